"""What Megatron-LM does to its gradient buffers once a step, and to the fp32 copies behind them.

Gradients of a rank lie in one buffer for all its microbatches (megatron/core/distributed,
param_and_grad_buffer.py: `_ParamAndGradBuffer`), so that each step clears it; before it is summed
a norm finds what is not a number, and it is multiplied by one over the ranks that sum it. The
optimizer works on fp32 alone (megatron/core/optimizer: `MixedPrecisionOptimizer`): shorter
gradients are copied before anything reads them, and weights are copied out of what it has updated
by kernels of their own. `run.gradient_passes` names which of these are run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from simulator.describe.optimizer import Pass
from simulator.describe.scenario import Scenario
from simulator.lower.operators import FP32, streaming
from simulator.lower.places import is_summed
from simulator.lower.segments import COMPUTE, Segment
from simulator.lower.sharding import held_bytes, sums_experts
from simulator.lower.tensors import Tensors
from simulator.program import NOTHING, Memory, Work

Exchange = Callable[[float], list[Segment]]
"""How a number of bytes of gradients is summed over dp."""


def checked(s: Scenario, size: float) -> list[Segment]:
    """Return the passes over `size` bytes of gradients before they are summed.

    A norm reads them; scaling reads and writes them, where several ranks sum them.
    """
    passes = s.run.gradient_passes
    averages = "divide" in passes or ("scale" in passes and s.plan.dp * s.plan.cp > 1)
    rows = [_pass("check gradients", size, 1)] if "check" in passes else []
    return [*rows, _pass("scale gradients", size, 2)] if averages else rows


def checking(s: Scenario, exchange: Exchange) -> Exchange:
    """Return a sum of gradients behind the passes over them, on the stream of the kernels."""
    if not s.run.gradient_passes:
        return exchange
    return partial(_checked_sum, s, exchange)


def _checked_sum(s: Scenario, exchange: Exchange, size: float) -> list[Segment]:
    return [*checked(s, size), *exchange(size)]


def checked_alone(s: Scenario, trained: Tensors) -> list[Segment]:
    """Return the passes over those gradients of a stage that no other rank has a part of."""
    dense = 0 if is_summed(s) else trained.params - trained.experts
    experts = 0 if sums_experts(s) else trained.experts
    count = dense + experts
    return checked(s, float(s.precision.gradient * count)) if count else []


def cleared(s: Scenario, trained: Tensors) -> list[Segment]:
    """Return the pass that writes zeros for the next step, where a stage trains anything."""
    if "clear" not in s.run.gradient_passes or not trained.params:
        return []
    return [_pass("clear gradients", float(s.precision.gradient * trained.params), 1)]


def is_copying(s: Scenario) -> bool:
    """Return whether gradients are copied to fp32 for the optimizer; to the host as they are."""
    short = held_bytes(s).gradient < FP32 and not s.plan.offload_optimizer
    return "copy" in s.run.gradient_passes and short


def gradient_bytes(s: Scenario) -> int:
    """Return the bytes of a gradient as the norm, clipping and the update read it."""
    return FP32 if is_copying(s) else held_bytes(s).gradient


def copied(s: Scenario, count: int, *, used: bool) -> tuple[list[Segment], Memory]:
    """Return the copy of `count` gradients to fp32, and what the update after it releases.

    Where nothing is `used` by an update of the same stage, the copy is gone at once.
    """
    if not is_copying(s) or not count:
        return [], NOTHING
    held = Memory(transients=float(FP32 * count))
    size = float((held_bytes(s).gradient + FP32) * count)
    kernel = streaming("copy gradients", 0.0, size)
    work = Work(kernel.name, (kernel,), None, held, NOTHING if used else held)
    return [Segment(work, COMPUTE)], held if used else NOTHING


def separate_copies(s: Scenario, passes: Sequence[Pass]) -> list[Pass]:
    """Return an update's passes with the weights' copies made by one of their own."""
    if "copy" not in s.run.gradient_passes or not any("c" in p.writes for p in passes):
        return [*passes]
    if any(p == Pass("round", "w", "c") for p in passes):  # unfused: it is one already
        return [*passes]
    own = [p._replace(writes=p.writes.replace("c", "")) for p in passes]
    return [*own, Pass("copy weights", "w", "c")]


def _pass(name: str, size: float, times: int) -> Segment:
    """Return a pass over gradients, bound by the bytes that it moves."""
    return Segment(Work(name, (streaming(name, 0.0, times * size),)), COMPUTE)
