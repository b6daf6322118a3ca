"""The automatic zero-bubble scheduler: an order found for stated times and a memory limit.

Qi, Wan, Huang and Lin, "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 3.1. A
backward is two actions: I, the gradient of the input, on which the stage before waits, and W, that
of the weights, for which nobody waits, so that it can fill what would be a bubble. The heuristic
walks through the microbatches and decides three things in both ways each; the best of the eight
orders counts. The paper's further improvement of that order by integer programming is left out.
"""

from __future__ import annotations

import math
from itertools import count, product
from typing import NamedTuple

from simulator.errors import DescriptionError
from simulator.schedules.action import Action, Actions
from simulator.schedules.times import Pace, Target, Times, pace
from simulator.schedules.zero_bubble import one_f_i_w

EPSILON = 1e-9
"""Memory that counts as none: sums of fractions of an activation."""


class Choices(NamedTuple):
    """What the heuristic leaves open (section 3.1): its grid search tries all of them."""

    overfill: bool
    """Before the first I, start a forward even where it ends after that gradient has come."""
    hold_back: bool
    """Leave a forward out where a stage is two ahead of the next, and no bubble grows by it."""
    fill_small: bool
    """Put a W into a gap smaller than it even where the rank has idled less than others."""


def zero_bubble_auto(
    ranks: int,
    microbatches: int,
    times: Times | None = None,
    limit: float | None = None,
    *,
    kept: float = 1.0,
    synchronous: bool = False,
) -> Actions:
    """Return the best order that the heuristic finds; one stage a rank.

    With a limit of p activations (ZB-1p) and equal times the bubble is ZB-H1's, (p-1)(F + I - W);
    with 2p (ZB-2p) ranks are never idle between their first and last action, m >= 2p - 1.

    Args:
        ranks: p, of one stage each.
        microbatches: m.
        times: of a microbatch on a stage; equal ones and free messages when absent.
        limit: activations of a microbatch that a rank may keep at a time; p when absent, which is
            what 1F1B keeps on its first rank.
        kept: part of an activation that stays from I until W.
        synchronous: whether the step ends for all ranks at once, as with a global gradient norm.
            Else the longest time of a rank from its first to its last action counts, as in the
            paper, whose optimizer validates afterwards.

    Raises:
        DescriptionError: when a limit or a time cannot be.
    """
    times = Times() if times is None else times
    limit = float(ranks) if limit is None else limit
    _check(ranks, times, limit, kept)

    def cost(taken: Pace) -> tuple[float, float]:
        return (taken.makespan, taken.span) if synchronous else taken

    depth = min(ranks, int(limit + EPSILON))
    simple = (_delayed_weights(ranks, microbatches, depth, late) for late in (depth - 1, 0))
    best = min(simple, key=lambda actions: cost(pace(actions, times)))
    least = cost(pace(best, times))
    for bound in _bounds(ranks, limit):
        for choices in map(Choices._make, product((False, True), repeat=3)):
            builder = _Builder(ranks, microbatches, times, bound, kept)
            if not builder.build(choices, least[0], synchronous):
                continue  # it could not be shorter
            if cost(builder.pace()) < least:
                best, least = builder.actions(), cost(builder.pace())
    return best


def _bounds(ranks: int, limit: float) -> list[float]:
    """Return the limits to try: a heuristic can do worse with more memory."""
    usual = {float(ranks), 2.0 * ranks}
    return sorted({limit} | {bound for bound in usual if bound < limit}, reverse=True)


def zb_auto(ranks: int, microbatches: int, *, target: Target) -> Actions:
    """Zero-bubble order found for stated times under a memory limit (ZB-1p, ZB-2p).

    Qi et al., arXiv 2401.10241, section 3.1; `zero_bubble_auto` says how. Bubble and memory are
    those of the order that was found: with a limit of 1F1B's memory and equal times ZB-H1's bubble,
    (p-1)(F + I - W), with twice that none between a rank's first and last action.
    """
    return zero_bubble_auto(
        ranks, microbatches, target.times, target.memory * ranks,
        kept=target.kept, synchronous=target.synchronous,
    )  # fmt: skip


def _check(ranks: int, times: Times, limit: float, kept: float) -> None:
    """Check times and memory.

    Raises:
        DescriptionError: with all that is wrong.
    """
    problems = []
    for kind, column in times.by_stage(ranks).items():
        if not all(0 <= value < math.inf for value in column):
            problems.append(f"times of {kind} must be at least 0 and finite, not {column}")
    if not 0 <= times.message < math.inf:
        problems.append(f"time of a message must be at least 0 and finite, not {times.message}")
    if not limit >= 1:
        problems.append(
            f"a limit of {limit:g} activations holds not one microbatch; it must be at least 1"
        )
    if not 0 <= kept <= 1:
        problems.append(f"kept must be a part between 0 and 1 of an activation, not {kept:g}")
    if problems:
        raise DescriptionError(problems)


def _delayed_weights(ranks: int, microbatches: int, depth: int, delay: int) -> Actions:
    """Return 1F1B of at most `depth` microbatches in flight with every backward split.

    Rank r does its weight gradients min(r, delay) backwards late, as far as `depth` allows: ZB-H1
    where depth is p (section 2.1), in which all ranks keep as much as the first does in 1F1B.
    """
    passes = [[(rank, m) for m in range(microbatches)] for rank in range(ranks)]
    rows = []
    for rank in range(ranks):
        ahead = min(ranks - rank, depth) - 1
        late = min(rank, delay, depth - 1 - ahead)
        rows.append(one_f_i_w(passes[rank], passes[rank], ahead, late))
    return tuple(rows)


class _Builder:
    """An order in the making: counts, clocks and memory by rank."""

    def __init__(
        self, ranks: int, microbatches: int, times: Times, limit: float, kept: float
    ) -> None:
        self.ranks, self.microbatches, self.message = ranks, microbatches, times.message
        self.seconds = times.by_stage(ranks)
        self.limit, self.kept = limit + EPSILON, kept
        self.change = {"F": 1.0, "I": kept - 1.0, "W": -kept}
        self.work = [
            microbatches * (forward + whole)
            for forward, whole in zip(self.seconds["F"], self.seconds["B"], strict=True)
        ]
        self.rows: list[list[str]] = [[] for _ in range(ranks)]
        """Kinds; microbatches of a kind go in their order."""
        self.ends: dict[str, list[list[float]]] = {
            kind: [[] for _ in range(ranks)] for kind in ("F", "I", "W")
        }
        self.first = [0.0] * ranks
        """When a rank has started."""
        self.clock = [0.0] * ranks
        self.memory = [0.0] * ranks
        self.idle = [0.0] * ranks
        """Seconds that a rank has waited since its first forward."""
        self.most_idle = 0.0

    def count(self, kind: str, rank: int) -> int:
        return len(self.ends[kind][rank])

    def arrival(self, kind: str, rank: int) -> float:
        """Return when what the next F or I of a rank needs from another is there."""
        other = rank - 1 if kind == "F" else rank + 1
        if not 0 <= other < self.ranks:
            return 0.0
        return self.ends[kind][other][self.count(kind, rank)] + self.message

    def put(self, kind: str, rank: int) -> None:
        """Append the next F, I or W of a rank; memory must have been made."""
        start = self.clock[rank]
        if kind != "W":
            start = max(start, self.arrival(kind, rank))
            if not self.rows[rank]:
                self.first[rank] = start
            elif start > self.clock[rank]:
                self.idle[rank] += start - self.clock[rank]
                self.most_idle = max(self.most_idle, self.idle[rank])
        self.rows[rank].append(kind)
        self.clock[rank] = start + self.seconds[kind][rank]
        self.ends[kind][rank].append(self.clock[rank])
        self.memory[rank] += self.change[kind]

    def pending(self, rank: int) -> int:
        """Return how many weight gradients could be computed now."""
        return self.count("I", rank) - self.count("W", rank)

    def reclaim(self, rank: int) -> None:
        """Compute weight gradients until a forward's activation fits."""
        while self.memory[rank] + 1 > self.limit and self.pending(rank):
            self.put("W", rank)

    def fill(self, kind: str, rank: int, choices: Choices) -> None:
        """Compute weight gradients in the gap before the next F or I of a rank.

        All that fit into it, and one more where the rest of the gap would make the rank the one
        that has idled longest.
        """
        until = self.arrival(kind, rank)
        weight = self.seconds["W"][rank]
        while self.pending(rank) and self.clock[rank] + weight <= until:
            self.put("W", rank)
        gap = until - self.clock[rank]
        if gap > 0 and self.pending(rank):
            grows = self.idle[rank] + gap > self.most_idle
            if grows or choices.fill_small:
                self.put("W", rank)

    def pace(self) -> Pace:
        """Return how long the finished order takes."""
        spans = (end - start for start, end in zip(self.first, self.clock, strict=True))
        return Pace(max(spans), max(self.clock))

    def actions(self) -> Actions:
        """Return the order."""
        rows = []
        for rank, kinds in enumerate(self.rows):
            number = {kind: count() for kind in "FIW"}
            rows.append(tuple(Action(rank, kind, next(number[kind])) for kind in kinds))
        return tuple(rows)

    def least(self, synchronous: bool) -> float:
        """Return the least that the order can take: a rank's work and what it has waited."""
        spans = map(sum, zip(self.work, self.idle, strict=True))
        return max(map(sum, zip(spans, self.first, strict=True)) if synchronous else spans)

    def build(self, choices: Choices, below: float, synchronous: bool) -> bool:
        """Make the order that one set of choices leads to; give up where it is no use.

        Returns whether it may take less than, or as little as, `below`.
        """
        self.warm_up(choices)
        for _ in range(1, self.microbatches):
            if self.least(synchronous) > below * (1 + EPSILON):
                return False
            goes = self.next_forwards(choices)
            for rank in range(self.ranks):
                if goes[rank]:
                    self.reclaim(rank)
                    self.fill("F", rank, choices)
                    self.put("F", rank)
            for rank in reversed(range(self.ranks)):
                self.fill("I", rank, choices)
                if rank == 0 and self.count("F", 0) == self.microbatches:
                    while self.pending(0):  # nobody waits for the first rank's gradients
                        self.put("W", 0)
                self.put("I", rank)
        for rank in range(self.ranks):
            while self.pending(rank):
                self.put("W", rank)
        return True

    def warm_up(self, choices: Choices) -> None:
        """Start as many forwards as fit into memory before the first gradient, and compute that."""
        for rank in range(self.ranks):
            self.put("F", rank)
        more = [0] * self.ranks
        gradient = 0.0
        for rank in reversed(range(self.ranks)):
            clock, forward = self.clock[rank], self.seconds["F"][rank]
            fits = min(self.limit - 1, self.microbatches - 1)
            while rank < self.ranks - 1 and more[rank] + 1 <= fits:
                if clock >= gradient or (not choices.overfill and clock + forward > gradient):
                    break
                clock += forward
                more[rank] += 1
            gradient = max(clock, gradient) + self.seconds["I"][rank] + self.message
        for rank in range(1, self.ranks):  # a stage stays a forward ahead of the next
            before = more[rank - 1]
            most = before if before + 1 == self.microbatches else max(before - 1, 0)
            more[rank] = min(more[rank], most)
        for rank in range(self.ranks):
            for _ in range(more[rank]):
                self.put("F", rank)
        for rank in reversed(range(self.ranks)):
            self.put("I", rank)

    def next_forwards(self, choices: Choices) -> list[bool]:
        """Return which ranks do a forward in this round: all that a later one does not hold up."""
        goes = [self.count("F", rank) < self.microbatches for rank in range(self.ranks)]
        if choices.hold_back:
            for rank in range(self.ranks - 1):
                ahead = self.count("F", rank) - self.count("F", rank + 1)
                if goes[rank] and ahead > 1 and self.can_wait(rank):
                    goes[rank] = False
        for rank in reversed(range(self.ranks - 1)):
            goes[rank] = goes[rank] and goes[rank + 1]
        return goes

    def can_wait(self, rank: int) -> bool:
        """Return whether a rank may leave out its next forward, as the next gradient comes soon."""
        after = rank + 1
        gradient = self.clock[after] + self.message
        gradient += self.seconds["F"][after] + self.seconds["I"][after]
        clock, weight = self.clock[rank], self.seconds["W"][rank]
        if clock >= gradient:
            return True
        over = self.memory[rank] + 1 - self.limit
        pieces = min(math.ceil(over / self.kept), self.pending(rank)) if over > 0 < self.kept else 0
        if clock + self.seconds["F"][rank] + pieces * weight <= gradient:
            return False
        return gradient - clock <= self.most_idle - self.idle[rank]
