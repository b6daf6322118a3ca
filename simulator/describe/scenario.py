"""The Scenario: one model on one cluster under one plan, checked as a whole."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from simulator.describe.between import Evaluation, between_problems, copies_problem
from simulator.describe.cluster import Cluster
from simulator.describe.context import context_problems
from simulator.describe.cost import Cost
from simulator.describe.data import Data, data_problems
from simulator.describe.encoder_decoder import encoder_decoder_problems
from simulator.describe.experts import expert_problems
from simulator.describe.fields import validate
from simulator.describe.halves import schedule_contradictions
from simulator.describe.jitter import Jitter, jitter_problems
from simulator.describe.kinds import device_problems, mixture_problems
from simulator.describe.layer_code import layer_code_problems
from simulator.describe.layer_list import LayerList
from simulator.describe.layout import read_layout
from simulator.describe.model import Model
from simulator.describe.network import Network
from simulator.describe.operations import Operations, operations_problems
from simulator.describe.plan import Plan
from simulator.describe.resnet import ResNet
from simulator.describe.run import FP32_BYTES, PRECISIONS, Precision, Run
from simulator.describe.sample import positions, sample_problems, tokens
from simulator.describe.save import Save, save_problems
from simulator.describe.stages import division_problems, even_layers, listed_layers
from simulator.describe.target import target_of, target_problems
from simulator.describe.tuning import contradictions
from simulator.errors import DescriptionError
from simulator.schedules import Target, schedule_name, schedule_of, size_complaint
from simulator.schedules.layout import layout_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that a simulation needs to know; frozen, valid, SI units."""

    name: str
    model: Model | ResNet | LayerList
    cluster: Cluster
    plan: Plan
    run: Run
    operations: Operations | None = None
    """What happens over days of it; `trainsim operate` reads it."""
    cost: Cost | None = None
    """Power and prices, where energy and money are asked for."""
    jitter: Jitter | None = None
    """What makes steps differ; `trainsim run` samples it beside the step that nothing disturbs,
    which is what all else reads."""
    data: Data | None = None
    """How samples reach the devices; absent: they are there."""
    checkpoint: Save | None = None
    """Checkpoints between the steps that are simulated."""
    evaluation: Evaluation | None = None
    """Passes forward over held-out samples between steps."""

    def __post_init__(self) -> None:
        validate(self)
        problems = list(_contradictions(self))
        if problems:
            raise DescriptionError(problems)

    @property
    def num_microbatches(self) -> int:
        """Pipeline inputs of one replica in one step."""
        return self.run.global_batch_size // (self.plan.microbatch_size * self.plan.dp)

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        """Layers of each stage; a remainder goes to the first ones, away from the head.

        Raises:
            DescriptionError: when the plan leaves them to a balance that nobody has found yet.
        """
        listed = listed_layers(self.plan)
        if listed is None and self.plan.stage_cut != "uniform":
            raise DescriptionError(
                f"plan.stage_cut {self.plan.stage_cut!r} is not cut yet; give the scenario to "
                "simulator.cuts.resolved first"
            )
        return even_layers(self.plan, self.model.num_hidden_layers) if listed is None else listed

    @property
    def target(self) -> Target | None:
        """What the schedule is made for, of schedules that are made to measure."""
        return target_of(self.plan, self.run)

    @property
    def precision(self) -> Precision:
        """Bytes and matrix precision of the run's mode of arithmetic."""
        mode = PRECISIONS[self.run.precision]
        return mode if self.run.gradient_dtype is None else replace(mode, gradient=FP32_BYTES)

    @property
    def tokens_per_step(self) -> int:
        """Tokens (`tokens_per_sample`) of one optimizer step over all ranks."""
        return self.run.global_batch_size * self.tokens_per_sample

    @property
    def tokens_per_sample(self) -> int:
        """Tokens of one sample, those of an encoder and its decoder added up."""
        return tokens(self.model, self.run)

    @property
    def sequence_length(self) -> int:
        """Tokens of one sample; of an image its patches, or one for the whole of it. Where a
        decoder follows an encoder, the encoder's.
        """
        return positions(self.model, self.run)


def _contradictions(s: Scenario) -> Iterator[str]:
    """Say what does not fit together; each part alone is already right."""
    model, cluster, plan, run = s.model, s.cluster, s.plan, s.run
    if plan.world_size != cluster.world_size:
        yield (
            f"plan.dp {plan.dp} x {f'plan.cp {plan.cp} x ' if plan.cp > 1 else ''}plan.tp "
            f"{plan.tp} x plan.pp {plan.pp} = {plan.world_size} ranks, "
            f"but the cluster has {cluster.num_nodes} x {cluster.ranks_per_node} = "
            f"{cluster.world_size} devices{_dp_hint(plan, cluster)}"
        )
    yield from _placement(plan, cluster)
    yield from sample_problems(model, plan, run)
    if isinstance(model, Model):
        yield from _attention(model, s)
    if plan.cp > 1:
        yield from context_problems(model, plan, run, s.sequence_length)
    if plan.sequence_parallel and s.sequence_length // plan.cp % plan.tp:
        shared = f" / plan.cp {plan.cp} = {s.sequence_length // plan.cp}" * (plan.cp > 1)
        yield (
            f"plan.sequence_parallel: plan.tp {plan.tp} does not divide run.sequence_length "
            f"{s.sequence_length}{shared}"
        )
    yield from _stages(s)
    share = plan.microbatch_size * plan.dp
    if run.global_batch_size % share:
        near = max(share, run.global_batch_size // share * share)
        yield (
            f"run.global_batch_size {run.global_batch_size} is not a multiple of "
            f"plan.microbatch_size {plan.microbatch_size} x plan.dp {plan.dp} = {share}; "
            f"{near} would be"
        )
    yield from _stale_embedding(model, plan)
    yield from _schedule(s)
    yield from _flows_apart(s)
    yield from _offload(s)
    if isinstance(model, Model):
        yield from expert_problems(model, plan, run, cluster.ranks_per_node)
        yield from encoder_decoder_problems(model, plan, run)
    if plan.recompute == "selective-op" and run.attention == "unfused":
        yield (
            "plan.recompute 'selective-op' saves the result of fused attention, and run.attention "
            '\'unfused\' has none; set run.attention = "flash" or plan.recompute = "selective"'
        )
    for name in ("fp8_kept", "fp8_weights"):
        if getattr(run, name) and run.precision != "fp8":
            yield f"run.{name} is for run.precision 'fp8', not {run.precision!r}"
    for other, which in ((plan.offload_optimizer, "plan.offload_optimizer"),
                         (run.frozen_layers, "run.frozen_layers")):  # fmt: skip
        if run.fp8_weights and other:
            yield f"run.fp8_weights is not modelled with {which}; leave one of them out"
    if run.fp8_scaling != "delayed" and run.precision != "fp8":
        yield (
            f"run.fp8_scaling {run.fp8_scaling!r} is for run.precision 'fp8', not {run.precision!r}"
        )
    yield from contradictions(model, plan, run)
    if run.linear_layers != "torch" and not run.fused_accumulation:
        yield (
            f"run.linear_layers {run.linear_layers!r} says what is held where "
            "run.fused_accumulation is true; set it, or leave run.linear_layers out"
        )
    yield from layer_code_problems(model, plan, run)
    yield from device_problems(s)
    yield from mixture_problems(s)
    yield from jitter_problems(s)
    yield from data_problems(s)
    yield from save_problems(s)
    yield from between_problems(s)
    yield from operations_problems(s)


def _attention(model: Model, s: Scenario) -> Iterator[str]:
    """Say what heads cannot be divided by, and which tokens they cannot see."""
    yield from _tensor_parallel(model, s.plan.tp)
    window, length = model.attention_window, s.sequence_length
    if window is not None and length > window:
        yield (
            f"run.sequence_length {length} is more than the {window} tokens back to "
            f"which {model.name} attends; attention in a window is not modelled"
        )
    read = {"sequence_length": length, "decoder_sequence_length": s.run.decoder_sequence_length}
    for name, count in read.items():
        if model.position == "learned" and (count or 0) > model.max_position_embeddings:
            yield (
                f"run.{name} {count} is more than the {model.max_position_embeddings} positions "
                f"that {model.name} has learned"
            )


def _placement(plan: Plan, cluster: Cluster) -> Iterator[str]:
    """Say the first way in which a list of devices is no permutation of the cluster's."""
    if isinstance(plan.placement, str):
        return
    count, rank_on = cluster.world_size, dict[int, int]()
    once = f"each of the devices 0 to {count - 1} must be there once"
    for rank, device in enumerate(plan.placement):
        if device >= count:
            yield f"plan.placement: rank {rank} is on device {device}; {once}"
            return
        if device in rank_on:
            yield (
                f"plan.placement: ranks {rank_on[device]} and {rank} are both on device {device}; "
                f"{once}"
            )
            return
        rank_on[device] = rank
    missing = next((device for device in range(count) if device not in rank_on), None)
    if missing is not None:
        yield f"plan.placement: no rank is on device {missing}; {once}"


def _stale_embedding(model: Model | ResNet | LayerList, plan: Plan) -> Iterator[str]:
    """Say that gradients of a tied embedding cannot be summed once parameters have come back."""
    if plan.staleness is not None and plan.pp > 1 and model.shares_embedding:
        yield (
            f"plan.staleness {plan.staleness} with plan.pp {plan.pp}: the first and the last stage "
            f"sum the gradients of {model.name}'s tied embedding after the exchange, when each has "
            "already pulled parameters; set model.tie_word_embeddings = false, or plan.pp = 1"
        )


def _stages(s: Scenario) -> Iterator[str]:
    """Say what is wrong with how the layers are divided over the stages."""
    model, plan = s.model, s.plan
    problems = list(division_problems(plan, model.num_hidden_layers, model.name))
    yield from problems
    yield from _layout(s)
    if not problems and (plan.stage_cut == "uniform" or plan.layers_per_stage is not None):
        decodes = getattr(model, "num_decoder_layers", 0) > 0
        yield from _beyond_a_stage(plan, max(s.layers_per_stage), decodes)


def _layout(s: Scenario) -> Iterator[str]:
    """Say what a layout has too many or too few of, and where chunks are no loop of ranks."""
    plan = s.plan
    if plan.layout is not None:
        given = read_layout(plan.layout)[-1].count("m")
        there = getattr(s.model, "num_nextn_predict_layers", 0)
        if given != there:
            yield (
                f"plan.layout {plan.layout!r} has {given} layers m, but {s.model.name} has {there} "
                "that predict further tokens"
            )
    relieved = plan.first_stage_layers is not None or plan.last_stage_layers is not None
    if relieved and plan.chunks > 1 and not _is_looped(s):
        yield (
            f"plan.first_stage_layers and plan.last_stage_layers with plan.chunks {plan.chunks} "
            "are for schedules whose stage s lies on rank s % pp, as Interleaved1F1B, not for "
            f"{plan.schedule!r}; list plan.layers_per_stage"
        )


def _is_looped(s: Scenario) -> bool:
    """Return whether stage s lies on rank s % pp; so too where there is none."""
    plan = s.plan
    if not s.num_microbatches or list(_schedule(s)):
        return True
    size = plan.pp, s.num_microbatches, plan.chunks, plan.microbatch_group
    held = layout_of(schedule_of(plan.schedule), *size, s.target).stages
    return held == tuple(tuple(range(r, plan.num_stages, plan.pp)) for r in range(plan.pp))


def _beyond_a_stage(plan: Plan, layers: int, decodes: bool) -> Iterator[str]:
    """Say which counts are more than the layers of the largest stage."""
    if plan.recompute_layers is not None and plan.recompute_layers > layers:
        yield (
            f"plan.recompute_layers {plan.recompute_layers}: no stage has more than {layers} "
            "layers; leave it out to recompute all"
        )
    if plan.offload_layers is not None and plan.offload_layers > layers:
        yield (
            f"plan.offload_layers {plan.offload_layers}: no stage has more than {layers} layers; "
            "leave it out to offload all"
        )
    most = layers + 2 + decodes  # embedding and head are blocks too, and what a decoder begins with
    if plan.zero == 3 and plan.prefetch > most:
        yield (
            f"plan.prefetch {plan.prefetch}: a pass of a stage gathers no more than {most} "
            f"blocks; set plan.prefetch = {most} or fewer"
        )


def _schedule(s: Scenario) -> Iterator[str]:
    """Say why the schedule cannot be made in this size."""
    plan = s.plan
    try:
        name = schedule_name(plan.schedule)
    except DescriptionError as error:
        yield f"plan.{error}"
        return
    complaint = size_complaint(
        name, plan.pp, s.num_microbatches, plan.chunks, plan.microbatch_group
    )
    if complaint:
        yield f"plan.schedule {complaint}"
    elif s.num_microbatches:
        problems = list(target_problems(plan))
        yield from problems or schedule_contradictions(s.model, plan, s.run, s.num_microbatches)
        if not problems:
            yield from copies_problem(s)


def _flows_apart(s: Scenario) -> Iterator[str]:
    """Say what of the network would be ignored when no flow meets another."""
    network, plain = s.cluster.network, Network()
    if s.run.network != "alpha-beta":
        return
    for name in ("degraded", "failed", "oversubscription"):
        value = getattr(network, name)
        if value != getattr(plain, name):
            yield (
                f"cluster.network.{name} {value!r} has no effect in run.network 'alpha-beta', "
                'where links do not slow flows; set run.network = "fluid"'
            )


ON_DEVICE_ONLY = {
    "adam8bit": "has kernels for devices only",
    "muon": "multiplies matrices, for which a host is too slow",
}
"""Optimizers that nobody runs on a host, and why."""


def _offload(s: Scenario) -> Iterator[str]:
    """Say what cannot be kept on the host, or that nothing is known of it."""
    plan, node, optimizer = s.plan, s.cluster.node, s.run.optimizer
    for name in ("offload_optimizer", "offload_activations"):
        if getattr(plan, name) and node.host is None:
            yield (
                f"plan.{name}: {node.name} does not say what its host offers; describe "
                "cluster.node.host, as the node dgx-a100 does, or leave it out"
            )
    if plan.offload_optimizer and plan.num_servers:
        yield (
            "plan.offload_optimizer: plan.gradient_exchange 'parameter_server' brings parameters "
            "back from its servers, not from the host; leave one of them out"
        )
    if plan.offload_optimizer and optimizer in ON_DEVICE_ONLY:
        yield (
            f"plan.offload_optimizer: run.optimizer {optimizer!r} {ON_DEVICE_ONLY[optimizer]}; "
            'set run.optimizer = "adamw"'
        )


def _tensor_parallel(model: Model, tp: int) -> Iterator[str]:
    divided = ["num_attention_heads", "num_key_value_heads"]
    if not all(kind.has_experts for kind in model.layer_kinds):
        divided.append("intermediate_size")
    if model.num_shared_experts:
        divided.append("moe_intermediate_size")
    counts = {name: getattr(model, name) for name in divided}
    wrong = [f"{name} {count}" for name, count in counts.items() if count % tp]
    if wrong:
        common = math.gcd(*counts.values())
        legal = [degree for degree in range(1, common + 1) if common % degree == 0]
        yield (
            f"plan.tp {tp} does not divide {' and '.join(wrong)} of {model.name}; "
            f"legal degrees are {', '.join(map(str, legal))}"
        )


def _dp_hint(plan: Plan, cluster: Cluster) -> str:
    dp, rest = divmod(cluster.world_size, plan.cp * plan.tp * plan.pp)
    return f"; plan.dp = {dp} would use them all" if dp and not rest else ""
