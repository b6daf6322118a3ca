"""V-Half and V-Min: a half and a third of 1F1B's activations, for a larger bubble than ZBV's.

Qi, Wan, Amar and Lin, "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362. The model
goes down the ranks and up again: stage s lies on rank s where s < p, else on rank 2p - 1 - s. A
schedule repeats a *building block*, the actions of one microbatch, every 6 slots, the F, I and W of
a rank's two stages; how long a stage's block lasts from F to W decides how many activations are
kept. The offsets of the blocks are the authors' (their code: sail-sg/zero-bubble); so is what the
ranks keep at most, (p+2)//2 and (p+4)//3 microbatches of both stages together.

Repeated as they stand, blocks leave slots free where the pipeline fills and drains, and the paper
closes ranks in several passes (*squeeze*, *reorder*). Here one rule does it, slot by slot: a rank
does what the blocks put first among what is ready and fits into the blocks' memory, and a W where
nothing else is. Each rank keeps the blocks' order of its forwards. That cannot get stuck: of what
is left, take what the blocks put first; all before it is done, so that it is ready, and if it is a
forward, its rank keeps no more than it does there in the blocks, where it fits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from simulator.schedules.action import Action, Actions
from simulator.schedules.times import Times, pace

INTERVAL = 6
"""Slots from one block to the next: F, I and W of two stages."""


class Offsets(NamedTuple):
    """Slots at which a rank does its part of the block of microbatch 0."""

    forward: tuple[int, int]
    """Of its stage on the way down the ranks, and of the one on the way up."""
    input_grad: tuple[int, int]
    """Of the same stages."""


def half_block(rank: int, ranks: int) -> Offsets:
    """Return V-Half's: two slots a rank where the pipeline's wave goes down, one where it goes up.

    Even numbers of ranks need three slots more, so that no two actions fall into one slot.
    """
    gap = 3 * (1 - ranks % 2)
    return Offsets(
        (2 * rank, 3 * ranks - 2 - rank),
        (6 * ranks + gap - 2 - rank, 3 * ranks + gap - 1 + 2 * rank),
    )


def min_block(rank: int, ranks: int) -> Offsets:
    """Return V-Min's: one slot a rank everywhere, so that stages last as short as they can."""
    gap = 0 if ranks % 3 else 2
    return Offsets(
        (rank, 2 * ranks - 1 - rank), (4 * ranks + gap - 1 - rank, 2 * ranks + gap + rank)
    )


def v_half(ranks: int, microbatches: int) -> Actions:
    """V-Half: half of 1F1B's activations and of its bubble (arXiv 2405.15362).

    For F = I = W of a stage, m >= p: idle at most 3(p-1) of these, where 1F1B's stages, twice as
    long, wait 6(p-1). Ranks keep (p+2)//2 microbatches at most. Where F, I and W differ, gaps stay
    in every repetition, as the paper says.
    """
    return _best(half_block, ranks, microbatches, (ranks + 2) // 2, 3 * (ranks - 1))


def v_min(ranks: int, microbatches: int) -> Actions:
    """V-Min: a third of 1F1B's activations, two thirds of its bubble (arXiv 2405.15362).

    For F = I = W of a stage: idle at most 4(p-1) of these, where 1F1B's stages, twice as long, wait
    6(p-1). Ranks keep (p+4)//3 microbatches at most. Where F, I and W differ, the bubble grows with
    the number of microbatches (the authors' "2B/3 + O(n)").
    """
    return _best(min_block, ranks, microbatches, (ranks + 4) // 3, 4 * (ranks - 1))


def _best(
    block: Callable[[int, int], Offsets], ranks: int, microbatches: int, kept: int, bubble: int
) -> Actions:
    """Return the shortest order for equal times, the first within the paper's bubble if any is."""
    offsets = [block(rank, ranks) for rank in range(ranks)]
    best: Actions = ()
    least = float("inf")
    for favour in FAVOURED:
        actions = _closed(offsets, microbatches, 2 * kept, favour)
        span = pace(actions, Times()).span
        if span < least:
            best, least = actions, span
        if span <= INTERVAL * microbatches + bubble:
            break
    return best


FAVOURED: Mapping[str, Callable[[str, int], bool]] = {
    "the blocks' order": lambda kind, way: False,
    "forwards": lambda kind, way: kind == "F",
    "gradients": lambda kind, way: kind == "I",
    "gradients of the way up": lambda kind, way: (kind, way) == ("I", 1),
}
"""What goes before the blocks' order where several actions are ready."""


def _closed(offsets: list[Offsets], microbatches: int, limit: int, favour: str) -> Actions:
    """Return the order in which ranks work slot by slot; `limit` in activations of a stage."""
    ranks = len(offsets)
    favoured = FAVOURED[favour]
    state = [_Rank(rank, ranks, offsets[rank], microbatches) for rank in range(ranks)]
    done: set[tuple[int, str, int]] = set()
    while any(len(rank.row) < INTERVAL * microbatches for rank in state):
        chosen = []
        for rank in state:
            ready = [
                ((not favoured(kind, way), slot), kind, way, microbatch)
                for slot, kind, way, microbatch in rank.open(limit)
                if rank.needed(kind, way, microbatch) <= done
            ]
            if ready:
                chosen.append(rank.do(*min(ready)[1:]))
            elif rank.weights:
                rank.do("W", *rank.weights.popleft())
        done.update((a.stage, a.kind, a.microbatch) for a in chosen)
    return tuple(tuple(rank.row) for rank in state)


class _Rank:
    """What a rank has done, and what it could do next."""

    def __init__(self, rank: int, ranks: int, offsets: Offsets, microbatches: int) -> None:
        self.stages = rank, 2 * ranks - 1 - rank
        self.last = 2 * ranks - 1
        self.offsets, self.microbatches = offsets, microbatches
        self.forwards = deque(
            sorted(
                (start + INTERVAL * m, "F", way, m)
                for way, start in enumerate(offsets.forward)
                for m in range(microbatches)
            )
        )
        self.gradients = [0, 0]
        """Input gradients done, of either stage."""
        self.weights: deque[tuple[int, int]] = deque()
        """Weight gradients that could be computed: stage and microbatch."""
        self.kept = 0
        self.row: list[Action] = []

    def open(self, limit: int) -> list[tuple[int, str, int, int]]:
        """Return what comes next on this rank if others have done their part, with its slot."""
        found = [self.forwards[0]] if self.forwards and self.kept < limit else []
        for way, count in enumerate(self.gradients):
            if count < self.microbatches:
                found.append((self.offsets.input_grad[way] + INTERVAL * count, "I", way, count))
        return found

    def needed(self, kind: str, way: int, microbatch: int) -> set[tuple[int, str, int]]:
        """Return what must have been done before."""
        stage = self.stages[way]
        if kind == "F":
            return {(stage - 1, "F", microbatch)} if stage else set()
        own = (stage, "F", microbatch)
        return {own} if stage == self.last else {own, (stage + 1, "I", microbatch)}

    def do(self, kind: str, way: int, microbatch: int) -> Action:
        """Append an action, which is what `open` or `weights` offered."""
        if kind == "F":
            self.forwards.popleft()
            self.kept += 1
        elif kind == "I":
            self.gradients[way] += 1
            self.weights.append((way, microbatch))
        else:
            self.kept -= 1
        action = Action(self.stages[way], kind, microbatch)
        self.row.append(action)
        return action
