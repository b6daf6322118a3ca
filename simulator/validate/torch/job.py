"""The job of the ranks: what of a scenario they build and do, as plain values.

Everything that the replay does not do is refused here, in a sentence.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from simulator.describe.model import Model
from simulator.describe.plan import Plan
from simulator.describe.run import Run
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.lower.mesh import Mesh
from simulator.schedules import (
    Action,
    Actions,
    actions_of,
    add_optimizer,
    add_reduce_grad,
    add_send_recv,
    homes,
    stages_of_ranks,
)
from simulator.schedules.passes import OTHER_SIDE

OPTIMIZERS = ("sgd", "momentum", "rmsprop", "adam", "adamw")
"""Those of `torch.optim`, in their foreach form."""

MODEL_FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "norm",
    "activation", "gated_mlp", "position", "attention_bias", "output_bias", "mlp_bias", "head_bias",
)  # fmt: skip
"""What of a model the ranks build."""

PLAN_FIELDS = (
    "dp", "pp", "tp", "schedule", "chunks", "microbatch_group", "schedule_times", "schedule_memory",
    "schedule_kept", "microbatch_size", "layers_per_stage", "stage_cut", "first_stage_layers",
    "last_stage_layers", "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split", "layout", "order", "bucket_size", "grad_overlap",
)  # fmt: skip
RUN_FIELDS = (
    "global_batch_size", "sequence_length", "precision", "optimizer", "fused_optimizer",
    "attention", "network", "num_steps", "detail", "linear_layers", "loss_in_place",
    "allocator_reserve",
)  # fmt: skip
"""What of a plan and of a run the replay follows, or does not depend on."""

ELEMENT = 4
"""Bytes of a number: all is fp32."""

WARMING, REPETITIONS, A_VISIT = 1, 8, 2
"""Repetitions of a pattern whose op times are measured: that warm up, and that count in a
calibration, and in a visit."""


class Part(NamedTuple):
    """A stretch of an action that is timed by itself."""

    kind: str
    """``work``; ``sum``, a collective of tp ranks; ``send`` and ``receive``; ``launch`` of the sums
    of gradients, and the ``wait`` for them."""
    bytes: float = 0.0
    """Of a sum."""


MESSAGES = {
    "SEND_F": "send", "SEND_B": "send", "RECV_F": "receive", "RECV_B": "receive",
    "REDUCE_GRAD": "launch",
}  # fmt: skip
"""Kinds of the parts of actions that are no work."""

Mode = Literal["replay", "calibrate", "reference"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What ranks do; all of it can be written as JSON."""

    model: dict[str, Any]
    """`MODEL_FIELDS`."""
    layers: tuple[int, ...]
    """Of each stage."""
    rows: tuple[tuple[str, ...], ...]
    """By pipeline rank: the texts of its actions, with messages, reductions and updates."""
    dp: int
    tp: int
    strides: tuple[int, int, int]
    """Distance in rank between neighbours along dp, pp and tp."""
    microbatch_size: int
    sequence_length: int
    bucket_bytes: float | None
    """Gradients of a stage are summed in buckets of at least this; in one piece when None."""
    optimizer: str
    mode: Mode = "replay"
    warmup: int = 3
    """Steps before those that are recorded, at least `checked`."""
    visits: int = 5
    """Times that op times are measured by themselves and steps are recorded, by turns, so that both
    see the same phases of the host."""
    steps: int = 3
    """Steps of a visit."""
    patience: float = 0.0
    """Seconds that each step, and each measurement of op times, waits at most for a quiet host."""
    calibrates: bool = True
    """Whether a visit begins with op times; not where a calibration is given."""
    kernels: tuple[dict[str, Any], ...] = ()
    """Of a calibration: kinds of kernels to time, as `sizes.to_time` lists them."""
    memory: tuple[float, ...] = ()
    """Bytes that the simulator predicts each rank to hold at most: states, activations and what is
    alive while an operator runs."""
    checked: int = 2
    """First steps whose losses, and of the first one gradients, are compared with one process."""
    device: Literal["cpu", "cuda", "cuda-shared"] = "cpu"
    seed: int = 0

    @classmethod
    def of(cls, scenario: Scenario, **options: Any) -> Job:
        """Return the job of a scenario.

        Raises:
            DescriptionError: with all that the replay does not do.
        """
        from simulator.cuts import resolved  # which the ranks do not need

        scenario = resolved(scenario)
        problems = list(_refusals(scenario))
        if problems:
            raise DescriptionError(problems)
        plan, model = scenario.plan, scenario.model
        actions = actions_of(
            plan.schedule, plan.pp, scenario.num_microbatches, plan.chunks,
            group=plan.microbatch_group, target=scenario.target,
        )  # fmt: skip
        if any(a.kind == "OPT" for row in actions for a in row):
            raise DescriptionError(
                f"plan.schedule {plan.schedule!r} updates weights after every microbatch, which "
                "the replay does not do; take a synchronous schedule"
            )
        whole = add_optimizer(add_reduce_grad(add_send_recv(actions)))
        strides = Mesh.of(plan).strides
        return cls(
            model={name: getattr(model, name) for name in MODEL_FIELDS},
            layers=scenario.layers_per_stage,
            rows=tuple(tuple(str(a.alone) for a in row) for row in whole),
            dp=plan.dp,
            tp=plan.tp,
            strides=(strides["dp"], strides["pp"], strides["tp"]),
            microbatch_size=plan.microbatch_size,
            sequence_length=scenario.sequence_length,
            bucket_bytes=plan.bucket_size if plan.grad_overlap else None,
            optimizer=scenario.run.optimizer,
            memory=_peaks(scenario),
            **options,
        )

    @classmethod
    def read(cls, path: Path) -> Job:
        """Return the job that `write` wrote."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        for name in ("layers", "strides", "memory", "kernels"):
            fields[name] = tuple(fields[name])
        fields["rows"] = tuple(map(tuple, fields["rows"]))
        return cls(**fields)

    def write(self, path: Path) -> None:
        """Write the job as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @cached_property
    def actions(self) -> Actions:
        """Action lists by pipeline rank."""
        return tuple(tuple(map(Action.parse, row)) for row in self.rows)

    @property
    def pp(self) -> int:
        """Ranks of a pipeline."""
        return len(self.rows)

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.dp * self.pp * self.tp

    @property
    def num_microbatches(self) -> int:
        """Pipeline inputs of one replica in one step."""
        return 1 + max(a.microbatch for row in self.actions for a in row)

    @property
    def boundary_bytes(self) -> int:
        """Bytes of a message between stages."""
        tokens = self.microbatch_size * self.sequence_length
        return ELEMENT * tokens * int(self.model["hidden_size"])

    @property
    def splits(self) -> bool:
        """Whether some backward is cut into I and W."""
        return any(a.kind == "I" for row in self.actions for a in row)

    def place(self, rank: int) -> tuple[int, int, int]:
        """Return the replica of a rank, its place in the pipeline, and its index along tp."""
        dp, pp, tp = self.strides
        return rank // dp % self.dp, rank // pp % self.pp, rank // tp % self.tp

    def rank(self, replica: int, place: int, index: int = 0) -> int:
        """Return the rank at a place of a replica's pipeline."""
        dp, pp, tp = self.strides
        return replica * dp + place * pp + index * tp

    def peers(self, rank: int) -> tuple[int, ...]:
        """Return the tp ranks of a rank's place, itself among them."""
        replica, place, _ = self.place(rank)
        return tuple(self.rank(replica, place, index) for index in range(self.tp))

    def list_of(self, rank: int) -> tuple[Action, ...]:
        """Return the actions of a rank."""
        return self.actions[self.place(rank)[1]]

    @cached_property
    def _homes(self) -> dict[tuple[int, int], int]:
        return homes(self.actions)

    def peer(self, rank: int, message: Action) -> int:
        """Return the rank at the other side of a send or receive."""
        step = OTHER_SIDE[message.kind][1]
        replica, _, index = self.place(rank)
        return self.rank(replica, self._homes[message.stage + step, message.microbatch], index)

    def other_side(self, message: Action) -> Action:
        """Return the receive of a send, or the send of a receive."""
        kind, step = OTHER_SIDE[message.kind]
        return Action(message.stage + step, kind, message.microbatch)

    @cached_property
    def holders(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """Ranks that hold the same part of each stage, ascending, by stage and index along tp."""
        stages = stages_of_ranks(self.actions)
        return {
            (stage, index): tuple(sorted(
                self.rank(replica, place, index)
                for replica in range(self.dp)
                for place, held in enumerate(stages)
                if stage in held
            ))
            for stage in range(len(self.layers))
            for index in range(self.tp)
        }  # fmt: skip

    def sharers(self, rank: int, stage: int) -> tuple[int, ...]:
        """Return the ranks that sum the gradients of a stage with a rank, itself among them."""
        return self.holders[stage, self.place(rank)[2]]

    def parts_of(self, action: Action) -> tuple[Part, ...]:
        """Return what an action is made of, one after the other."""
        return self._parts[action.stage, action.kind]

    @cached_property
    def _parts(self) -> dict[tuple[int, str], tuple[Part, ...]]:
        kinds = {(a.stage, a.kind) for row in self.actions for a in row}
        return {(stage, kind): tuple(self._parts_of(stage, kind)) for stage, kind in kinds}

    def _parts_of(self, stage: int, kind: str) -> Iterator[Part]:
        if kind == "OPT" and len(self.holders[stage, 0]) > 1:
            yield Part("wait")
        if self.tp > 1:
            for size in self._sums_of(stage, kind):
                yield Part("work")
                yield Part("sum", size)
        yield Part(MESSAGES.get(kind, "work"))

    def _sums_of(self, stage: int, kind: str) -> Iterator[float]:
        """Yield the bytes of the tensor-parallel sums of an action."""
        first, last = stage == 0, stage == len(self.layers) - 1
        tokens = ELEMENT * self.microbatch_size * self.sequence_length
        wide, layers = float(self.boundary_bytes), 2 * self.layers[stage]
        if kind == "F":
            yield from [wide] * (first + layers) + [float(tokens)] * (3 * last)
        elif kind in ("B", "I"):
            yield from [wide] * (last + layers)

    @cached_property
    def _parts_of_rank(self) -> tuple[tuple[tuple[Action, Part], ...], ...]:
        return tuple(
            tuple((action, part) for action in row for part in self.parts_of(action))
            for row in self.actions
        )

    def parts(self, rank: int) -> tuple[tuple[Action, Part], ...]:
        """Return the parts of all actions of a rank, each with its action."""
        return self._parts_of_rank[self.place(rank)[1]]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank holds, ascending."""
        return stages_of_ranks(self.actions)[self.place(rank)[1]]

    def live(self, rank: int) -> int:
        """Return the most microbatches of one stage that a rank keeps at once."""
        most, now = 1, dict.fromkeys(self.stages_of(rank), 0)
        for a in self.list_of(rank):
            now[a.stage] += {"F": 1, "B": -1, "W": -1}.get(a.kind, 0)
            most = max(most, *now.values())
        return most


def _peaks(s: Scenario) -> tuple[float, ...]:
    """Return the bytes of each rank at its peak, without what only GPUs hold."""
    from simulator.api import simulate  # which the ranks do not need
    from simulator.lower.memory import rank_memory

    peak = simulate(s).memory.peak
    states = [held.states for held in rank_memory(s)]
    stride, pp = Mesh.of(s.plan).strides["pp"], s.plan.pp
    return tuple(float(p) + states[rank // stride % pp] for rank, p in enumerate(peak))


def _refusals(s: Scenario) -> Iterator[str]:
    """Say what of a scenario the replay does not do."""
    if not isinstance(s.model, Model):
        yield f"{s.model.name} is no transformer; the replay builds GPT- and Llama-like decoders"
        return
    model = s.model
    dropout = ("embedding_dropout", "hidden_dropout", "attention_dropout")
    for name in dropout:
        if getattr(model, name):
            yield (
                f"model.{name} {getattr(model, name):g}: random numbers would keep losses from "
                f"being compared with those of one process; set model.{name} = 0"
            )
    if model.position not in ("learned", "rotary"):
        yield (
            f"model.position {model.position!r} is not built; take a model with learned or rotary "
            "positions"
        )
    if model.vocab_size % s.plan.tp:
        yield (
            f"plan.tp {s.plan.tp} does not divide the vocabulary of {model.vocab_size}; set "
            "model.vocab_size to a multiple"
        )
    yield from _more("model", model, Model, (*MODEL_FIELDS, *dropout, "name"))
    yield from _more("plan", s.plan, Plan, PLAN_FIELDS)
    yield from _more("run", s.run, Run, RUN_FIELDS)
    if s.run.precision != "fp32":
        yield (
            f'run.precision {s.run.precision!r}: the replay is in fp32; set run.precision = "fp32"'
        )
    if s.run.optimizer not in OPTIMIZERS:
        yield f"run.optimizer {s.run.optimizer!r} is not one of {', '.join(OPTIMIZERS)}"


def _more(where: str, part: Any, kind: type, known: tuple[str, ...]) -> Iterator[str]:
    """Say which fields that the replay does not follow differ from their default."""
    for field in dataclasses.fields(kind):
        value = getattr(part, field.name)
        if field.name not in known and value != PLAIN.get(field.name, field.default):
            plain = PLAIN.get(field.name, field.default)
            yield f"{where}.{field.name} = {_toml(value)} is not replayed; set it to {_toml(plain)}"


PLAIN = {"tie_word_embeddings": False}
"""Values that the replay takes of fields without default."""


def _toml(value: object) -> str:
    return "nothing" if value is None else json.dumps(value)


def label(action: Action) -> str:
    """Return the kind and stage that times of an action are kept by, as ``F0``."""
    return f"{action.kind}{action.stage}"


def tag(job: Job, send: Action) -> int:
    """Return the tag of a message, given the action that sends it."""
    number = send.stage * job.num_microbatches + send.microbatch
    return 2 * number + (send.kind == "SEND_B")
