"""The parallel plan: how a step is divided over the ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from simulator.describe.fields import Bytes, Count, Natural, OrFile, Probability, Range, validate
from simulator.describe.stages import cut_problems
from simulator.describe.timing import ScheduleTimes
from simulator.errors import DescriptionError
from simulator.schedules.table import copies_of

ShardingLibrary: TypeAlias = Literal["fsdp2", "fsdp1", "megatron_fsdp", "deepspeed"]
"""What shards weights (zero 3)."""
Axis: TypeAlias = Literal["dp", "pp", "cp", "tp"]

AXES: tuple[Axis, ...] = ("dp", "pp", "cp", "tp")
"""Mesh axes, in the default order from outermost to innermost."""


BUCKET_SIZE = 25e6
"""Of torch DDP: 25 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Degrees of parallelism, the pipeline schedule, and how work and memory are traded."""

    dp: Count = 1
    """Data-parallel degree; a scenario file that leaves it out fills the cluster."""
    tp: Count = 1
    """Tensor-parallel degree."""
    pp: Count = 1
    """Pipeline-parallel degree: the ranks of a pipeline."""
    cp: Count = 1
    """Context-parallel degree: ranks that hold the same weights and divide each sequence."""
    cp_style: Literal["ring", "all_to_all", "all_gather"] = "ring"
    """How ranks along cp meet in attention: `ring` passes K and V on beside the attention over the
    block in hand; `all_to_all` swaps shares of the sequence for shares of the heads, and back;
    `all_gather` gathers K and V first (Megatron-LM's --cp-comm-type p2p, a2a, all_gather)."""
    cp_balance: Literal["zigzag", "contiguous"] = "zigzag"
    """Tokens of each rank along cp where attention is causal: of 2 x cp chunks one from the front
    and its mirror from the back, so that all have the same work; or one run of them, so that the
    last rank has most."""
    ep: Count = 1
    """Expert-parallel degree: ranks that divide the experts of a layer among them.

    Experts cut the dp x cp x tp ranks of a stage anew: with j = (dp index x cp + cp index) x tp +
    tp index, rank j holds part j % etp of expert group j // etp % ep, as j + etp x ep does
    (Megatron-LM's --expert-model-parallel-size).
    """
    etp: Count = 1
    """Expert-tensor-parallel degree: ranks that divide each expert (Megatron-LM's
    --expert-tensor-parallel-size)."""
    expert_capacity: Annotated[float, Range(0, open_low=True)] | None = None
    """Copies of tokens that an expert takes of each rank's, over an even share of them; those above
    are dropped. Nothing is dropped when absent (Megatron-LM's --moe-expert-capacity-factor)."""
    expert_padding: bool = False
    """With `expert_capacity`, whether every expert computes just as many, some of them empty
    (Megatron-LM's --moe-pad-expert-input-to-capacity)."""
    expert_dispatch: Literal["all_to_all", "deduplicated", "node_limited", "all_gather"] = (
        "all_to_all"
    )
    """How often a token is sent over ep: to each of its experts; once to each of their ranks, all
    ranks of ep at most; once to each of their nodes, `topk_group` at most, inside which it goes on
    (DeepSeek-V3, arXiv 2412.19437, section 3.2.2). It comes back summed as often. `all_gather`:
    all tokens to all ranks, whose results are summed over them (Megatron-LM's allgather)."""
    schedule: Annotated[str, OrFile(".csv")] = "1F1B"
    """Pipeline schedule, a name that `trainsim show schedule` lists, or a CSV file of action lists
    as torch.distributed.pipelining writes them, compute only or with communication."""
    chunks: Count = 1
    """Stages of each pipeline rank (Megatron-LM's virtual pipeline); the schedule says which: stage
    s lies on rank s % pp of the looped ones, as Interleaved1F1B."""
    microbatch_group: Count | None = None
    """Microbatches that pass one chunk of a rank before its next one (Megatron-LM's
    ``--microbatch-group-size-per-virtual-pipeline-stage``), of schedules that go in rounds; torch's
    rounds when absent: m / max(1, m // pp)."""
    schedule_times: ScheduleTimes | None = None
    """Times that the schedule is made for, of schedules that are (ZB-auto); only their ratios
    matter. F, I and W that take the same time on all stages, and free messages, when absent."""
    schedule_memory: Annotated[float, Range(0, open_low=True)] | None = None
    """Most activations that a rank may keep in such a schedule, in what 1F1B keeps on its first
    rank, pp microbatches; 1 when absent (ZB-1p of the zero-bubble paper; 2 is its ZB-2p)."""
    schedule_kept: Probability | None = None
    """Part of a microbatch's activations that such a schedule counts from the gradient of a stage's
    input until those of its weights; all when absent."""
    microbatch_size: Count = 1
    """Samples of one pipeline input of one data-parallel replica."""
    layers_per_stage: tuple[Natural, ...] | None = None
    """Layers of each of the pp x chunks stages, first to last; by `stage_cut` when absent.

    The first and the last stage may have none: they hold the embedding and the head.
    """
    stage_cut: Literal["uniform", "parameters", "time"] = "uniform"
    """How layers are divided where nothing lists them: evenly, or so that the largest stage has the
    fewest parameters, or the least seconds of forward and backward, embedding and head counted.

    With several chunks it is stages that are balanced, not ranks.
    """
    first_stage_layers: Natural | None = None
    """Layers of the first rank of the pipeline, over its chunks evenly; the other ranks share the
    rest evenly (Megatron-LM's ``--decoder-first-pipeline-num-layers``)."""
    last_stage_layers: Natural | None = None
    """Likewise of the last rank (``--decoder-last-pipeline-num-layers``)."""
    account_for_embedding_in_pipeline_split: bool = False
    """Whether the embedding counts as a layer in an even split: the first stage then has one less
    (Megatron-LM's flag; torchtitan's `pipeline_parallel_first_stage_less_layers` of 1)."""
    account_for_loss_in_pipeline_split: bool = False
    """Likewise the head with its loss, on the last stage."""
    layout: str | None = None
    """What each stage holds, as Megatron-LM's ``--pipeline-model-parallel-layout`` writes it:
    `describe.layout`."""
    order: tuple[Axis, ...] = AXES
    """Mesh axes from outermost to innermost: consecutive ranks differ in the last one.

    Axes of degree 1 may be left out.
    """
    placement: Literal["block", "cyclic"] | tuple[Annotated[int, Range(0)], ...] = "block"
    """Device of each rank; devices in use are numbered node by node.

    `block`: rank r on device r. `cyclic`: consecutive ranks on consecutive nodes, round robin
    (both as Slurm's --distribution names them). A list: rank r on device `placement[r]`.
    """
    bucket_size: Bytes = BUCKET_SIZE
    """Gradients are reduced in buckets of at least this size (torch DDP: 25 MB).

    They become ready with each run of kernels between collectives, a layer at a time without tp.
    """
    first_bucket_size: Bytes | None = None
    """Size of the first bucket of a backward, where it differs (torch DDP: 1 MiB), so that the
    exchange begins early; `bucket_size` when absent."""
    grad_overlap: bool = True
    """Whether gradients are reduced during the last backward, bucket by bucket; else those of a
    stage in one piece when the rank's last backward has ended (Megatron-LM without
    ``--overlap-grad-reduce``)."""
    gradient_exchange: Literal["all_reduce", "parameter_server"] = "all_reduce"
    """How gradients are summed over dp.

    `parameter_server`: every rank pushes its gradients to servers and pulls as many bytes of
    parameters back. Without `staleness` it is synchronous: a bucket's pull begins when all ranks'
    pushes have ended.
    """
    servers: Count | None = None
    """Parameter servers of each dp group, each with an equal part of every bucket; 1 when absent.

    They lie on the first ranks of the group, beside their training, and share its links: no device
    or node is set apart for them.
    """
    staleness: Natural | None = None
    """Steps that a rank may be ahead of the slowest of its dp group; synchronous when absent.

    Every rank pushes and pulls for itself. Its pull of a bucket in step k waits until all ranks
    have pushed that bucket of step k - staleness: stale synchronous parallel (Ho et al., NIPS
    2013). At 0 that is the synchronous exchange; from `run.num_steps` on nobody waits for anybody
    (Downpour SGD: Dean et al., NIPS 2012). Gradients are then of older parameters: steps are worth
    less, which is not modelled.
    """
    zero: Literal[0, 1, 2, 3] = 0
    """Stage of ZeRO (Rajbhandari et al., 2020, arXiv 1910.02054): what dp ranks divide among them.

    1: optimizer states (Megatron-LM's distributed optimizer); 2: gradients too; 3: weights too,
    gathered a block at a time (torch's FSDP).
    """
    dp_shard: Count | None = None
    """Ranks that divide the states, consecutive along dp; all dp ranks when absent.

    Fewer make dp / dp_shard replicas of the shards (HSDP).
    """
    reshard_after_forward: bool = True
    """With zero 3, free a block's weights after its forward and gather them again in backward.

    Else they stay: until the block's next backward where each forward is directly followed by its
    backward, until the last backward of the step elsewhere (as torch's pipelines do).
    """
    prefetch: Natural = 1
    """With zero 3, blocks whose weights are gathered ahead of the one that computes.

    1 is torch FSDP2's implicit prefetching, at most two gathered blocks alive; 0 overlaps nothing.
    """
    sharding_library: ShardingLibrary = "fsdp2"
    """With zero 3, whose passes over weights and gradients in full run beside their collectives
    (`lower.shard_copies`): torch's FSDP2 or FSDP1, Megatron-FSDP, or DeepSpeed. The last two keep
    shards of low-precision weights beside the fp32 ones; torch's cast these before each gather."""
    no_sync: bool = False
    """With zero 3, reduce gradients in a step's last backward alone: until then each rank adds them
    up in full, in the precision that they are reduced in (as torch.distributed.pipelining does
    with FSDP2, `backward_maybe_with_nosync` of its stage.py)."""
    root_holds_ends: bool = False
    """With zero 3, keep embedding and head gathered from forward to backward, as weights of FSDP's
    root module are that no block of its own holds (torchtitan until 2025)."""
    offload_optimizer: bool = False
    """Keep master weights and optimizer states in the host's memory and update them there: once a
    step gradients go there and weights come back (ZeRO-Offload: Ren et al., 2021, arXiv
    2101.06840; DeepSpeed's offload_optimizer). With zero each rank's shard; with zero 3 shards of
    low-precision weights stay on the device."""
    offload_activations: bool = False
    """Copy what each layer keeps to the host behind its forward, and back while the layer after it
    in the model runs its backward; at most two layers wait for either."""
    offload_layers: Count | None = None
    """With `offload_activations`, layers of each stage, its first ones, that do so; all when absent
    (Megatron-LM's --cpu-offloading-num-layers). Copies then have as many layers' time as do not:
    of n, layer n - offload_layers + i waits for the copy of layer i, and that copy comes back when
    the backward of the former has ended, so that so many layers' activations are there at most
    (Transformer Engine, pytorch/cpu_offload.py, `_default_offload_sync_init`)."""
    recompute: Literal["none", "light", "selective", "selective-op", "full"] = "none"
    """What backward computes again instead of keeping it: `full` all of a layer but its input,
    `selective` the attention core (scores, softmax, dropout, context), as Korthikanti et al., 2022
    (arXiv 2205.05198), section 5; `selective-op` all but fused attention, reduce-scatters and every
    second matrix product, as torchtitan's selective_ac_option "op"; `light` norms, activation
    functions and the up projections of latent attention, as DeepSeek-V3 (arXiv 2412.19437, section
    3.2.3)."""
    recompute_modules: tuple[Literal["layernorm", "moe_act", "mla_up_proj"], ...] | None = None
    """What of it `light` computes again: norms, activation functions, the up projections of latent
    attention; all of them when absent (Megatron-LM's --recompute-modules)."""
    recompute_layers: Count | None = None
    """Layers of each stage, its first ones, that recompute; all when absent."""
    recompute_again: bool = False
    """With recompute "full" and a schedule that splits backward, compute a layer again for the
    gradients of its weights too, and keep nothing from one to the other but gradients; else what
    was computed again for the gradient of the input stays until then."""
    post_validation: bool = False
    """Whether ranks update without waiting for the norm, or the overflow, of the whole pipeline:
    it is checked afterwards, and an update that turns out wrong is taken back (Qi et al., 2023,
    arXiv 2401.10241, section 4). Steps that are taken back are not modelled."""
    sequence_parallel: bool = False
    """Divide norms, residuals and dropouts over the tp ranks along the sequence: all-reduces become
    an all-gather and a reduce-scatter (Korthikanti et al., 2022, section 4.2.2)."""
    p2p_overlap: bool = True
    """Whether stages compute on while they send and receive, receives posted ahead; else a rank
    waits for what it sends and for what it needs next before it computes again (Megatron-LM without
    ``--overlap-p2p-communication``)."""
    p2p_protocol: Literal["rendezvous", "eager"] = "rendezvous"
    """Without `p2p_overlap`, when a message moves: once both sides have posted it (`rendezvous`:
    NCCL), or once its sender has, into a buffer of the receiver, which has not got there yet
    (`eager`: MPI's and UCX's for small ones). The buffers are not counted."""
    scatter_gather: bool = False
    """Whether each of the tp ranks of a stage sends a part of what all of them hold, and the next
    stage's gather the parts (Narayanan et al., 2021, section 4.1); with sequence parallelism each
    sends its own part anyhow."""
    tp_overlap: Literal["none", "grads", "all"] = "none"
    """`grads` runs backward's tensor-parallel collectives beside the products that do not need
    them, as Megatron-LM: the all-reduce (reduce-scatter) of an input's gradient beside that of the
    weight and, with sequence parallelism, the input's second all-gather beside the former. `all`
    also runs the all-gathers and reduce-scatters of sequence parallelism beside the product of a
    layer that they feed or follow, in pieces so small that the longer of the two counts
    (Transformer Engine's userbuffers, torch's asynchronous tensor parallelism)."""

    def __post_init__(self) -> None:
        validate(self)
        problems = []
        named = {axis: self.order.count(axis) for axis in AXES}
        if any(count > 1 or (not count and getattr(self, a) > 1) for a, count in named.items()):
            problems.append(
                f"Plan.order: {list(self.order)} must name each of {', '.join(AXES)} once"
            )
        problems += self._expert_problems()
        if self.chunks > 1 and self.pp == 1:
            problems.append(
                f"Plan.chunks: {self.chunks} chunks need a pipeline of at least 2 ranks, pp is 1"
            )
        problems += cut_problems(self)
        for name in ("servers", "staleness"):
            value = getattr(self, name)
            if value is not None and self.gradient_exchange != "parameter_server":
                problems.append(
                    f"Plan.{name}: {value} is for gradient_exchange 'parameter_server', "
                    f"not '{self.gradient_exchange}'"
                )
        if self.staleness is not None and self.replicas == 1:
            problems.append(
                f"Plan.staleness: {self.staleness} needs ranks to be ahead of, but dp is 1; "
                "leave it out"
            )
        if self.num_servers > self.replicas:
            problems.append(
                f"Plan.servers: {self.servers} is more than the {self.replicas} ranks they lie on"
            )
        if not self.grad_overlap and (self.holders == 1 or self.zero > 1):
            why = "dp 1" if self.holders == 1 else f"zero {self.zero}, which reduces every backward"
            problems.append(f"Plan.grad_overlap: false has no effect with {why}")
        if not self.grad_overlap and self.bucket_size != BUCKET_SIZE:
            problems.append(
                f"Plan.bucket_size: {self.bucket_size:g} has no effect with grad_overlap false, "
                "which reduces gradients in one piece"
            )
        if self.first_bucket_size is not None and (self.holders == 1 or not self.grad_overlap):
            why = "dp 1" if self.holders == 1 else "grad_overlap false"
            problems.append(
                f"Plan.first_bucket_size: {self.first_bucket_size:g} has no effect with {why}"
            )
        if self.recompute_layers is not None and self.recompute == "none":
            problems.append(
                f"Plan.recompute_layers: {self.recompute_layers} has no effect with recompute "
                "'none'; set plan.recompute"
            )
        if self.recompute_modules is not None and self.recompute != "light":
            problems.append(
                f"Plan.recompute_modules: {list(self.recompute_modules)} are parts of recompute "
                f"'light', not of '{self.recompute}'; set plan.recompute = \"light\""
            )
        if self.offload_layers is not None and not self.offload_activations:
            problems.append(
                f"Plan.offload_layers: {self.offload_layers} has no effect with "
                "offload_activations false; set plan.offload_activations = true"
            )
        for name, off, axis in (
            ("sequence_parallel", False, "tp"),
            ("tp_overlap", "none", "tp"),
            ("scatter_gather", False, "tp"),
            ("scatter_gather", False, "pp"),
            ("p2p_overlap", True, "pp"),
            ("cp_style", "ring", "cp"),
            ("cp_balance", "zigzag", "cp"),
        ):
            if getattr(self, axis) == 1 and getattr(self, name) != off:
                value = getattr(self, name)
                problems.append(f"Plan.{name}: {value!r} has no effect with {axis} 1")
        if self.p2p_protocol != "rendezvous" and self.p2p_overlap:
            problems.append(
                f"Plan.p2p_protocol: {self.p2p_protocol!r} has no effect with p2p_overlap true, "
                "where receives are posted ahead; set p2p_overlap = false"
            )
        if self.scatter_gather and self.sequence_parallel:
            problems.append(
                "Plan.scatter_gather: with sequence_parallel each rank sends its own part anyhow; "
                "leave one of the two out"
            )
        if self.tp_overlap == "all" and self.tp > 1 and not self.sequence_parallel:
            problems.append(
                "Plan.tp_overlap: 'all' is for sequence_parallel, whose collectives come in "
                'pieces; set sequence_parallel = true or tp_overlap = "grads"'
            )
        problems += self._sharding_problems()
        if problems:
            raise DescriptionError(problems)

    def _sharding_problems(self) -> list[str]:
        """Say what of the sharding contradicts the rest of the plan."""
        problems = []
        if self.zero and self.gradient_exchange != "all_reduce":
            problems.append(
                f"Plan.zero: {self.zero} reduce-scatters gradients, and gradient_exchange "
                f"{self.gradient_exchange!r} does not; set zero = 0 or leave gradient_exchange out"
            )
        if self.dp_shard is not None and not self.zero:
            problems.append(f"Plan.dp_shard: {self.dp_shard} is for zero 1 to 3, not 0")
        elif self.replicas % self.shards:
            legal = [d for d in range(1, self.dp + 1) if self.dp % d == 0]
            problems.append(
                f"Plan.dp_shard: {self.dp_shard} does not divide dp {self.dp}; "
                f"legal are {', '.join(map(str, legal))}"
            )
        for name, plain in (
            ("reshard_after_forward", True), ("prefetch", 1), ("sharding_library", "fsdp2"),
            ("no_sync", False), ("root_holds_ends", False),
        ):  # fmt: skip
            value = getattr(self, name)
            if value != plain and self.zero != 3:
                shown = str(value).lower()
                problems.append(f"Plan.{name}: {shown} is for zero 3, not {self.zero}")
        if self.zero == 3 and self.replicas > 1 and self.buckets != (BUCKET_SIZE,):
            problems.append(
                f"Plan.bucket_size: {self.buckets[0]:g} has no effect with zero 3, which reduces "
                "gradients a block at a time; leave bucket_size and first_bucket_size out"
            )
        return problems

    def _expert_problems(self) -> list[str]:
        """Say why the ranks of a stage cannot be cut anew for experts."""
        problems = []
        inner, whole = (self.tp, self.cp * self.tp), self.replicas * self.tp
        for name, size in (("etp", self.etp), ("ep x etp", self.ep * self.etp)):
            if whole % size or any(size % part and part % size for part in inner):
                problems.append(
                    f"Plan.ep: {name} {size} must divide dp x cp x tp = {whole}, and divide or be "
                    f"a multiple of tp {self.tp} and of cp x tp {self.cp * self.tp}"
                )
        return problems

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weights: those along dp and cp."""
        return self.dp * self.cp

    @property
    def holders(self) -> int:
        """Ranks that hold the same stage: its replicas, on each rank of a pipeline that has it."""
        return self.replicas * copies_of(self.schedule)

    @property
    def shards(self) -> int:
        """Ranks that divide states among them; 1 where nothing is divided.

        Ranks along cp are among them, as in Megatron-LM and torchtitan.
        """
        return (self.dp_shard or self.dp) * self.cp if self.zero else 1

    @property
    def low_precision_shard(self) -> bool:
        """Whether shards of low-precision weights lie beside the fp32 ones."""
        return self.sharding_library in ("megatron_fsdp", "deepspeed")

    @property
    def edp(self) -> int:
        """Ranks of a stage that hold the same part of the same experts."""
        return self.replicas * self.tp // (self.ep * self.etp)

    @property
    def world_size(self) -> int:
        """Ranks that the plan needs."""
        return self.dp * self.cp * self.tp * self.pp

    @property
    def placement_name(self) -> str:
        """The placement in a word."""
        return self.placement if isinstance(self.placement, str) else "listed"

    @property
    def num_stages(self) -> int:
        """Stages of a pipeline: one for each chunk of each of its ranks, or of each pair of ranks
        where a schedule has every stage on two.
        """
        return self.pp * self.chunks // copies_of(self.schedule)

    @property
    def buckets(self) -> tuple[float, ...]:
        """Sizes of the buckets of gradients, the last for all that follow."""
        if not self.grad_overlap:
            return (math.inf,)
        first = () if self.first_bucket_size is None else (self.first_bucket_size,)
        return (*first, self.bucket_size)

    @property
    def num_servers(self) -> int:
        """Parameter servers of each dp group; 0 where gradients are all-reduced."""
        return 0 if self.gradient_exchange == "all_reduce" else self.servers or 1
