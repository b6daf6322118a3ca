"""Segments: the ops of one pass through a block of operators, and how they are joined.

How finely a pass is cut is the run's *detail*: an op a kernel; an op a run of kernels between
collectives; or, for a stage as a whole, what comes before the first collective, all collectives,
and what comes after. The time of a pass does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from simulator.lower.blocks import Block
from simulator.lower.operators import Beside, Operator, Part
from simulator.program import NONE, NOTHING, Cost, Flow, Kernel, Memory, Work

(
    COMPUTE, TP, DP, TIED, UNSHARD, REDUCE, SHARDS, PIPELINE, CP, EP, ETP, EDP, OFFLOAD, HOST,
    FETCH,
) = range(15)  # fmt: skip
"""Codes of the streams that every program has; those of sends and receives follow."""

STREAMS = (
    "compute", "tp", "dp", "tied", "unshard", "reduce", "shards", "pipeline", "cp", "ep", "etp",
    "edp", "offload", "host", "fetch",
)  # fmt: skip
"""The last three, from OFFLOAD on, are of the rank alone: to its host, on it, and back."""

CHAIN, BRANCH, AHEAD = range(3)
"""Where an op stands in its body: after the chain's op before it and before the next one; after the
row before it, with nothing of the chain waiting for it; before the row after it, waiting for what
`sharding.waits` says."""


class Segment(NamedTuple):
    """One op to be, in a list that becomes a body."""

    cost: Cost
    stream: int
    layer: int = NONE
    gradient_bytes: float = 0.0
    """Gradients that are complete when it ends, but those of experts."""
    beside: bool = False
    """Whether it is a flow that the chain does not wait for at once."""
    aside: bool = False
    """Whether it runs beside the last such flow; it waits for the one before that."""
    place: int = CHAIN
    expert_bytes: float = 0.0
    """Gradients of experts that are complete when it ends."""


class Pass(NamedTuple):
    """Which parts of operators one pass through a block runs, and what memory it moves."""

    name: str
    parts: Callable[[Operator], tuple[Part, ...]]
    reverse: bool
    brings: Callable[[Operator, float], float]
    """Bytes that come alive, of an operator and of what it keeps from forward to backward."""
    frees: Callable[[Operator, float], float]
    """Bytes that are released, likewise."""
    completes: bool
    """Whether it completes weight gradients."""
    passing: Callable[[Operator], float]
    """Bytes that are alive only while an operator runs."""
    wasted: Callable[[Operator], float] = lambda _operator: 0.0
    """Bytes that are free then and serve nothing."""


def _nothing(_operator: Operator, _kept: float) -> float:
    return 0.0


def _all(_operator: Operator, kept: float) -> float:
    return kept


FORWARD = Pass(
    "F", lambda o: o.forward, reverse=False, brings=_all, frees=_nothing, completes=False,
    passing=lambda o: o.forward_bytes,
)  # fmt: skip
BACKWARD = Pass(
    "B", lambda o: o.backward, reverse=True, brings=_nothing, frees=_all, completes=True,
    passing=lambda o: o.backward_bytes + o.stream_bytes, wasted=lambda o: o.hole_bytes,
)  # fmt: skip
RECOMPUTE = FORWARD._replace(name="recompute", passing=lambda o: o.forward_bytes + o.stream_bytes)
"""Beside what is computed again the gradient of the layer's output waits."""


def _input_only(o: Operator, kept: float) -> float:
    return min(o.input_kept_bytes, kept) if o.weight_grad else kept


def _input_passing(o: Operator) -> float:
    later = o.weight_grad_bytes + o.output_grad_bytes if o.weight_grad else 0.0
    return max(o.backward_bytes - later, 0.0) + o.stream_bytes


INPUT_GRAD = Pass(
    "I", lambda o: o.input_grad_alone, reverse=True,
    brings=lambda o, _: o.output_grad_bytes if o.weight_grad else 0.0,
    frees=_input_only, completes=False, passing=_input_passing, wasted=lambda o: o.hole_bytes,
)  # fmt: skip
"""Gradients of inputs alone: what a product has read, and the gradient of what it has made, wait
for its weight's."""
WEIGHT_GRAD = Pass(
    "W", lambda o: o.weight_grad_alone, reverse=True, brings=_nothing,
    frees=lambda o, kept: kept - _input_only(o, kept) + o.output_grad_bytes,
    completes=True, passing=lambda o: o.weight_grad_bytes,
)  # fmt: skip
"""Gradients of weights alone; where an operator has no kernels for them they are complete with
those of the operator before it in backward."""


class Holding(NamedTuple):
    """What the operators of a block hold, given their index and themselves."""

    kept: Callable[[int, Operator], float]
    """Bytes of activations from forward to backward."""
    gradient: Callable[[int, Operator], float]
    """Bytes of weight gradients."""
    unreduced: Callable[[int, Operator], float] = lambda _index, _operator: 0.0
    """Bytes of weight gradients that come alive with the work that makes them."""


def segments(block: Block, run: Pass, detail: str, holding: Holding) -> list[Segment]:
    """Return the segments of one pass through a block: kernels joined between collectives.

    Args:
        block: operators in forward order.
        run: which parts, in which direction.
        detail: ``kernel`` keeps kernels apart; else those between collectives are joined.
        holding: what operators keep and complete.
    """
    out: list[Segment] = []
    kernels: list[Kernel] = []
    alloc = free = full = most = 0.0  # `most` is alive at once of what these kernels bring
    spread = 0.0  # and `spread` is taken of addresses
    grads = {False: 0.0, True: 0.0}  # by whether they are experts'
    aside = False

    def close() -> None:
        nonlocal alloc, free, full, most, spread
        if kernels:
            name = kernels[0].name if detail == "kernel" else f"{block.name} {run.name}"
            passing = most - alloc - full
            holes = spread - most
            brought = Memory(alloc, passing, unreduced=full, holes=holes)
            work = Work(name, tuple(kernels), None, brought, Memory(free, passing, holes=holes))
            out.append(Segment(work, COMPUTE, aside=aside))
        kernels.clear()
        alloc = free = full = most = spread = 0.0

    def complete() -> None:
        """Hand over gradients where a run of kernels ends, whatever the detail."""
        close()
        if any(grads.values()) and out:
            out[-1] = out[-1]._replace(
                gradient_bytes=out[-1].gradient_bytes + grads[False],
                expert_bytes=out[-1].expert_bytes + grads[True],
            )
            grads[False] = grads[True] = 0.0

    indexed = list(enumerate(block.operators))
    for index, operator in reversed(indexed) if run.reverse else indexed:
        parts = run.parts(operator)
        own = [i for i, part in enumerate(parts) if isinstance(part, Kernel)]
        if aside:
            close()
        aside = False
        for i, part in enumerate(parts):
            if not isinstance(part, Kernel):
                complete()
                aside = isinstance(part, Beside)
                flow, axis = (part, "tp") if isinstance(part, Flow) else part
                out.append(Segment(flow, STREAMS.index(axis), beside=aside))
                continue
            if detail == "kernel":
                close()
            kernels.append(part)
            # memory comes alive with an operator's first kernel and is released with its last
            if i == own[0]:
                alloc += run.brings(operator, holding.kept(index, operator))
                full += holding.unreduced(index, operator) if run.completes else 0.0
            now = alloc + full - free + run.passing(operator)
            most, spread = max(most, now), max(spread, now + run.wasted(operator))
            if i == own[-1]:
                free += run.frees(operator, holding.kept(index, operator))
            if run.completes and i == own[-1]:
                grads[operator.expert] += holding.gradient(index, operator)
        if run.completes and not own:
            grads[operator.expert] += holding.gradient(index, operator)
    complete()
    return out


def recomputing(block: Block, detail: str, holding: Holding) -> tuple[list[Segment], list[Segment]]:
    """Return forward of a block that recomputes operator by operator, and what runs again.

    What is not saved comes alive as backward begins to run it again (`recompute`).
    """
    more = block.kept_bytes - sum(o.saved_bytes for o in block.operators)
    runs = (any(isinstance(part, Kernel) for part in o.again) for o in block.operators)
    begin = next((i for i, runs_again in enumerate(runs) if runs_again), None)
    again = RECOMPUTE._replace(parts=lambda o: o.again)
    saved = holding._replace(kept=lambda _index, o: o.saved_bytes)
    regained = holding._replace(kept=lambda index, _o: more if index == begin else 0.0)
    return segments(block, FORWARD, detail, saved), segments(block, again, detail, regained)


def is_plain(chain: Sequence[Segment]) -> bool:
    """Return whether all of a chain comes one after the other."""
    return not any(segment.beside or segment.place != CHAIN for segment in chain)


def has_flows(chain: Sequence[Segment]) -> bool:
    """Return whether anything moves in a chain."""
    return any(isinstance(segment.cost, Flow) for segment in chain)


def coarse(chain: list[Segment]) -> list[Segment]:
    """Return a chain as a few segments, unless some of them run side by side."""
    return joined(chain) if is_plain(chain) else chain


def joined(chain: Sequence[Segment], buckets: Sequence[float] = ()) -> list[Segment]:
    """Return a chain with all that lies between gradient buckets joined into a few segments.

    Args:
        chain: segments of whole passes of a stage, of one or several blocks.
        buckets: gradients after which each bucket is full, the last for all that follow.
    """
    made: dict[tuple[int, ...], list[Segment]] = {}  # layers share their costs, by identity
    out: list[Segment] = []
    for group in _groups(chain, buckets):
        key = tuple(id(segment.cost) for segment in group)
        if key not in made:
            made[key] = _join(group)
        out += made[key]
    return out


def _groups(chain: Sequence[Segment], buckets: Sequence[float]) -> Iterator[list[Segment]]:
    group: list[Segment] = []
    full, left = 0.0, list(buckets)
    for segment in chain:
        group.append(segment)
        full += segment.gradient_bytes
        if left and full >= left[0]:
            yield group
            group, full, left = [], 0.0, left[1:] or left
    if group:
        yield group


def _join(group: list[Segment]) -> list[Segment]:
    """Return the work before the first flow, equal flows together, and the rest of the work.

    Memory moves so that the most that is alive at any time, and what is left, stay what they were.
    """
    flows: dict[tuple[Flow, int], int] = {}
    works: tuple[list[Work], list[Work]] = ([], [])
    for segment in group:
        cost = segment.cost
        if isinstance(cost, Flow):
            where = (cost, segment.stream)
            flows[where] = flows.get(where, 0) + cost.count
        else:
            works[bool(flows)].append(cost)
    rows: list[Segment] = [Segment(_one(w), COMPUTE) for w in works[:1] if w]
    rows += [Segment(replace(flow, count=count), on) for (flow, on), count in flows.items()]
    rows += [Segment(_one(w), COMPUTE) for w in works[1:] if w]
    at = [i for i, row in enumerate(rows) if isinstance(row.cost, Work)]
    if at:  # a chain without work keeps nothing
        alloc, free = _level(works[0] + works[1])
        rows[at[0]] = moving(rows[at[0]], alloc=alloc)
        rows[at[-1]] = moving(rows[at[-1]], free=free)
    rows[-1] = rows[-1]._replace(
        gradient_bytes=sum(segment.gradient_bytes for segment in group),
        expert_bytes=sum(segment.expert_bytes for segment in group),
    )
    return rows


HOLES = Memory._fields.index("holes")


def _level(works: list[Work]) -> tuple[Memory, Memory]:
    """Return what works move that begin and end together, alive at once as much as in turn.

    What is kept comes alive at its own peak. Transients are what is more than that when most is
    alive; below zero where the peaks of what else there is fall apart. Holes are what is reserved
    beyond that.
    """
    level = highest = (0.0,) * len(Memory._fields)
    most = spread = 0.0
    for work in works:
        level = tuple(have + more for have, more in zip(level, work.alloc, strict=True))
        highest = tuple(map(max, highest, level))
        most, spread = max(most, sum(level[:HOLES])), max(spread, sum(level))
        level = tuple(have - less for have, less in zip(level, work.free, strict=True))
    lasting = Memory(*highest)._replace(transients=0.0, holes=0.0)
    alloc = lasting._replace(transients=most - lasting.total, holes=spread - most)
    left = Memory(*level)._replace(transients=0.0, holes=0.0)
    return alloc, Memory(*(a - b for a, b in zip(alloc, left, strict=True)))


def _one(works: list[Work]) -> Work:
    """Return works one after the other as one, each kernel once with its count."""
    count: dict[int, int] = {}
    kernels: dict[int, Kernel] = {}
    for work in works:
        for kernel in work.kernels:
            kernels[id(kernel)] = kernel
            count[id(kernel)] = count.get(id(kernel), 0) + kernel.count
    return Work(f"stage {works[0].name.rpartition(' ')[2]}",
                tuple(replace(k, count=count[i]) for i, k in kernels.items()))  # fmt: skip


def moving(row: Segment, alloc: Memory = NOTHING, free: Memory = NOTHING) -> Segment:
    """Return work that brings more memory alive and releases more."""
    assert isinstance(row.cost, Work)
    more = Memory(*(a + b for a, b in zip(row.cost.alloc, alloc, strict=True)))
    less = Memory(*(a + b for a, b in zip(row.cost.free, free, strict=True)))
    return row._replace(cost=replace(row.cost, alloc=more, free=less))
