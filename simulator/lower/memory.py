"""Memory that is alive during the whole run: weights, gradients, optimizer state.

Activations come and go with ops and are counted on the timeline, as are weights that are gathered
for a while and gradients that are in full only until they are reduced. What torch's allocator does
not give out (`hardware/outside.py`) is counted apart.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from simulator.describe.optimizer import OPTIMIZERS
from simulator.describe.placement import kind_of_ranks
from simulator.describe.scenario import Scenario
from simulator.lower.optimizers import saved_state_bytes
from simulator.lower.places import layout
from simulator.lower.shapes import shapes
from simulator.lower.sharding import expert_shards, held_bytes, is_gathering
from simulator.lower.stage_buffers import stage_buffer_bytes
from simulator.lower.trainable import (
    Stage,
    low_weights,
    spared_weight_bytes,
    stage_params,
    stage_tensors,
    stages,
    tuned,
)
from simulator.program import Kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticMemory:
    """Bytes on each rank of one stage, or of all that a rank holds."""

    params: int
    """Parameters on one rank, before they are sharded over dp."""
    weights: float
    gradients: float
    optimizer: float
    """Master weights and optimizer states."""
    buffers: float
    """cuBLAS workspaces, what linear layers keep for themselves, what stages of torch's pipelines
    receive in."""
    host: float
    """In the memory of the host: gradients, master weights and states that are updated there."""

    @property
    def states(self) -> float:
        """What training a parameter takes: weights, gradients, optimizer."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """All of it that is on the device."""
        return self.states + self.buffers


WORKSPACE = {
    "volta": (4096 * 2 + 16 * 8) * 1024, "ampere": (4096 * 2 + 16 * 8) * 1024,
    "hopper": 32 * 2**20, "blackwell": 32 * 2**20,
}  # fmt: skip
"""Bytes of the workspace that torch gives cuBLAS: ":4096:2:16:8", 32 MiB from Hopper on
(aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize)."""

ENGINE_WORKSPACE = {
    "volta": 4 * 2**20, "ampere": 4 * 2**20,
    "hopper": 32 * 2**20 + 256, "blackwell": 32 * 2**20 + 256,
}  # fmt: skip
"""Bytes of Transformer Engine's own (pytorch/module/base.py, get_cublas_workspace_size_bytes)."""


def buffer_bytes(s: Scenario, kind: int = 0) -> float:
    """Return the bytes of buffers that a rank on a kind of node holds from its first step on."""
    device = s.cluster.kinds[kind].device.architecture
    size = float(WORKSPACE[device])
    if s.run.linear_layers == "transformer_engine":
        parts = tuned(s).blocks
        kinds = [parts.layers[kind] for kind in sorted(set(parts.kinds))]
        products = [
            kernel.matmul
            for layer in (*kinds, *parts.further[::2])
            for operator in layer.operators
            for kernel in operator.weight_grad
            if isinstance(kernel, Kernel) and kernel.matmul is not None
        ]
        size += ENGINE_WORKSPACE[device]
        size += s.precision.weight * sum(m * n for m, n in {p[1:3] for p in products})
    return size


def more_buffer_bytes(s: Scenario) -> npt.NDArray[np.float64]:
    """Return the bytes by which each rank's buffers exceed those of the first kind of node."""
    by_kind = np.array([buffer_bytes(s, kind) for kind in range(len(s.cluster.kinds))])
    more: npt.NDArray[np.float64] = by_kind - by_kind[0]
    return more[list(kind_of_ranks(s.plan, s.cluster))]


def bytes_per_parameter(s: Scenario, shards: int | None = None) -> tuple[float, float, float]:
    """Return the bytes that weight, gradient and optimizer (master copy, states) take on a rank.

    With bf16 weights, fp32 gradients and Adam, over d shards:

    | ZeRO                              | weight | gradient | optimizer |
    |---|---|---|---|
    | 0                                 | 2      | 4        | 12        |
    | 1 (Megatron's distributed one)    | 2      | 4        | 12/d      |
    | 2                                 | 2      | 4/d      | 12/d      |
    | 3 (FSDP: the shard is the master) | 4/d    | 4/d      | 8/d       |
    | 3 with low_precision_shard        | 2/d    | 4/d      | 12/d      |

    What is not trained has a weight only. Matrices of Adafactor and Muon have less than a lone
    parameter, whose states count here. Padding of shards to equal lengths is left out. `shards` are
    those of experts, where they have their own.
    """
    held = held_bytes(s)
    parts = (held.weight, held.gradient, held.master + OPTIMIZERS[s.run.optimizer].state_bytes)
    if s.plan.offload_optimizer:
        parts = (held.weight, held.gradient, 0.0)
    divided_from = (3, 2, 1)  # the stages of ZeRO
    shards = s.plan.shards if shards is None else shards
    if shards == 1:
        return parts
    weight, gradient, optimizer = (
        size / shards if s.plan.zero >= stage else size
        for size, stage in zip(parts, divided_from, strict=True)
    )
    return weight, gradient, optimizer


def host_bytes_per_parameter(s: Scenario) -> float:
    """Return the bytes that a trained parameter takes on a rank's host: those of its own shard.

    16 for Adam with fp32 gradients; with bf16 ones 14, as in Ren et al., 2021. What the host sends
    back it casts as it goes.
    """
    if not s.plan.offload_optimizer:
        return 0.0
    held, states = held_bytes(s), OPTIMIZERS[s.run.optimizer].state_bytes
    return (held.gradient + (held.master or held.weight) + states) / s.plan.shards


def rank_memory(s: Scenario) -> list[StaticMemory]:
    """Return what every rank of a pipeline holds all the time: its stages, and one set of buffers.

    A stage that lies on two ranks is held in full by both. Where weights are updated after every
    microbatch, each one in flight has the version that its forward used. Buffers are those of a
    rank, and of its stages.
    """
    every = static_memory(s)

    def of_rank(stages: tuple[int, ...], versions: int, of_stages: float) -> StaticMemory:
        held = [every[stage] for stage in stages]
        total = {f.name: sum(getattr(one, f.name) for one in held) for f in fields(StaticMemory)}
        total |= {"buffers": held[0].buffers + of_stages, "weights": versions * total["weights"]}
        return StaticMemory(**total)

    found = layout(s)
    return list(map(of_rank, found.stages, found.versions, stage_buffer_bytes(s)))


def static_memory(s: Scenario) -> list[StaticMemory]:
    """Return what every stage's ranks hold of it all the time, with the buffers of a rank on the
    first kind of node.

    A tied embedding lies on the first and on the last stage, as Megatron-LM keeps it; a rank that
    holds both has it once. Weights in fp8 are copies beside the bf16 ones, and transposed copies up
    to Hopper; with `run.fp8_weights` there are no bf16 ones.
    """
    weight, gradient, optimizer = bytes_per_parameter(s)
    *_, of_experts = bytes_per_parameter(s, expert_shards(s))
    copies = shapes(s).elements.low + shapes(s).elements.transposed
    buffers, on_host = buffer_bytes(s), host_bytes_per_parameter(s)
    out = []
    for stage in stages(s):
        params, trained = stage_params(s, stage), stage_tensors(s, stage)
        still = s.precision.weight * (params - trained.params) - spared_weight_bytes(s, stage)
        still /= s.plan.shards if s.plan.zero == 3 else 1  # not trained, and as it computes
        low = 0 if is_gathering(s) else low_weights(s, stage)
        alone = _spared_by_fp8(s, stage)
        states = optimizer * (trained.params - trained.experts) + of_experts * trained.experts
        saved, away = saved_state_bytes(s.run.optimizer, trained), s.plan.offload_optimizer
        out.append(
            StaticMemory(
                params=params,
                weights=float(weight * trained.params + still + copies * low - alone),
                gradients=float(gradient * trained.params),
                optimizer=0.0 if away else float(states - saved),
                buffers=buffers,
                host=float(on_host * trained.params - saved) if away else 0.0,
            )
        )
    return out


def _spared_by_fp8(s: Scenario, stage: Stage) -> float:
    """Return how much less the weights of a stage take for lying in fp8 alone (`run.fp8_weights`).

    Where they are gathered, shards of low precision have a byte in place of two, or one for each
    direction of blocks; fp32 ones stay.
    """
    if not s.run.fp8_weights:
        return 0.0
    low, size, e = low_weights(s, stage), s.precision.weight, shapes(s).elements
    if is_gathering(s):
        held = e.low + e.transposed * e.directed
        return (size - held) * low / s.plan.shards if s.plan.low_precision_shard else 0.0
    return float(size * low)
