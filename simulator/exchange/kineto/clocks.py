"""Clocks of ranks, aligned by what must be simultaneous.

No rank leaves a collective before all have entered, and all leave it together: a rank's clock is
off by the median, over the collectives that it shares with ranks already aligned, of when it left
them less when those did. Only messages shared: one cannot end before it began on the other side,
which bounds the clock from both directions (as NTP does); a clock within the bounds stays, one
outside moves to their middle. The lowest rank's clock stands. Drift within a trace is not
corrected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.exchange.kineto.calls import ENDS_TOGETHER
from simulator.exchange.kineto.events import Int64
from simulator.exchange.kineto.match import Matched
from simulator.exchange.kineto.ranks import RankOps
from simulator.units import format_seconds

NANO = 1e-9


class Clocks(NamedTuple):
    """What is taken off the times of each rank."""

    offset: Int64
    """Nanoseconds by rank."""
    by_collectives: int
    """Ranks that collectives align."""
    by_messages: int
    """Ranks that messages align, or bound without moving them."""
    spread: float
    """Half the middle half of the differences, the largest of all ranks, in seconds; 0 without."""
    collectives: int
    """Collectives that align."""

    def sentence(self, ranks: Sequence[int]) -> str:
        """Say how clocks are aligned and by how much."""
        if len(ranks) == 1:
            return "one rank: no clocks to align"
        worst = int(np.argmax(np.abs(self.offset)))
        moved = format_seconds(float(abs(self.offset[worst])) * NANO)
        ways = []
        if self.by_collectives:
            ways.append(
                f"{self.by_collectives} by the ends of {self.collectives} matched collectives "
                f"(half of them within {format_seconds(2 * self.spread)})"
            )
        if self.by_messages:
            ways.append(f"{self.by_messages} by what messages allow")
        left = len(ranks) - 1 - self.by_collectives - self.by_messages
        if left:
            ways.append(f"{left} not at all, for nothing matches")
        return (
            f"clocks aligned to rank {ranks[0]}'s: {', '.join(ways)}; the largest correction is "
            f"{moved}" + (f", of rank {ranks[worst]}" if self.offset[worst] else "")
        )


def aligned(ranks: Sequence[RankOps], calls: Matched) -> Clocks:
    """Return how far the clock of each rank is off that of the first.

    Messages are asked only where no collective reaches a rank that is aligned already.
    """
    ends, slack = _ends(ranks, calls), _slack(ranks, calls)
    offset = np.zeros(len(ranks), np.int64)
    done = np.arange(len(ranks)) == 0
    by_collectives, by_messages, spread = 0, 0, 0.0
    while not done.all():
        shared = ~(np.isnan(ends) | np.isnan(ends[:, done]).all(axis=1, keepdims=True))
        count = np.where(done, 0, shared.sum(axis=0))
        rank = int(np.argmax(count))
        if count[rank]:
            rows = shared[:, rank]
            known = ends[rows][:, done] - offset[done]
            difference = ends[rows, rank] - np.nanmean(known, axis=1)
            offset[rank] = round(float(np.median(difference)))
            low, high = np.quantile(difference, [0.25, 0.75])
            spread = max(spread, float(high - low) / 2 * NANO)
            by_collectives += 1
        else:
            pair = next(((a, b) for a, b in sorted(slack) if done[a] != done[b]), None)
            if pair is None:
                break
            known_rank, rank = pair if done[pair[0]] else pair[::-1]
            offset[rank] = _within(slack, known_rank, rank, int(offset[known_rank]))
            by_messages += 1
        done[rank] = True
    return Clocks(offset, by_collectives, by_messages, spread, len(ends))


def _ends(ranks: Sequence[RankOps], calls: Matched) -> npt.NDArray[np.float64]:
    """Return (collectives, ranks): when each rank left, after the first end; nan elsewhere."""
    rows = []
    base = min((int(ops.end[0]) for ops in ranks if len(ops.end)), default=0)
    for members, message in zip(calls.members, calls.is_message, strict=True):
        first = ranks[members[0][0]].calls[members[0][1]]
        if message or first is None or first.operation not in ENDS_TOGETHER:
            continue
        row = np.full(len(ranks), np.nan)
        for position, i in members:
            row[position] = ranks[position].end[i] - base
        rows.append(row)
    return np.array(rows).reshape(-1, len(ranks))


def _slack(ranks: Sequence[RankOps], calls: Matched) -> dict[tuple[int, int], int]:
    """Return the least time from sending to arrival between two ranks, each by its own clock."""
    slack: dict[tuple[int, int], int] = {}
    for members, message in zip(calls.members, calls.is_message, strict=True):
        if message:
            (a, i), (b, j) = sorted(members, key=lambda m: _is_receive(ranks, m))
            late = int(ranks[b].end[j] - ranks[a].start[i])
            slack[a, b] = min(slack.get((a, b), late), late)
    return slack


def _within(slack: dict[tuple[int, int], int], known: int, rank: int, offset: int) -> int:
    """Return how far a rank's clock is ahead, by its messages with one that is `offset` ahead."""
    there, back = slack.get((known, rank)), slack.get((rank, known))
    high = np.inf if there is None else there + offset
    low = -np.inf if back is None else offset - back
    if low <= offset <= high:  # as good as the other's
        return offset
    middle = (low + high) / 2
    return round(middle if np.isfinite(middle) else low if low > offset else high)


def _is_receive(ranks: Sequence[RankOps], member: tuple[int, int]) -> bool:
    call = ranks[member[0]].calls[member[1]]
    return call is not None and call.operation == "recv"
