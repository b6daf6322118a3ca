"""Memory that is alive during the whole run: weights, gradients, optimizer state, by stage.

Activations come and go with ops and are counted on the timeline. Communication buffers and what
the framework itself reserves are not modelled yet; reports say so.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulator.describe.run import OPTIMIZERS
from simulator.describe.scenario import Scenario
from simulator.lower.bodies import stage_params
from simulator.lower.layers import blocks, shapes
from simulator.lower.operators import FP32


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticMemory:
    """Bytes on each rank of one stage."""

    params: int
    """Parameters on one rank."""
    weights: float
    gradients: float
    optimizer: float
    """Master weights and optimizer states."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.optimizer


def bytes_per_parameter(s: Scenario) -> tuple[int, int, int]:
    """Return the bytes that weight, gradient and optimizer (master copy, states) take."""
    p = s.precision
    return p.weight, p.gradient, p.master + FP32 * OPTIMIZERS[s.run.optimizer].states


def static_memory(s: Scenario) -> list[StaticMemory]:
    """Return what every stage's ranks hold all the time; a rank of several chunks holds the sum.

    A tied embedding lies on the first and on the last stage, as Megatron-LM keeps it.
    """
    parts = blocks(s.model, shapes(s))
    weight, gradient, optimizer = bytes_per_parameter(s)
    out = []
    for stage, layers in enumerate(s.layers_per_stage):
        params = stage_params(s, parts, layers, stage == 0, stage == s.plan.num_stages - 1)
        out.append(
            StaticMemory(
                params=params,
                weights=float(weight * params),
                gradients=float(gradient * params),
                optimizer=float(optimizer * params),
            )
        )
    return out
