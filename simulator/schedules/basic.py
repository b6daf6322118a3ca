"""The schedules that compute a backward in one piece: layer-wise, GPipe, 1F1B, interleaved."""

from __future__ import annotations

from itertools import count

from simulator.program import NONE
from simulator.schedules.action import Action, Actions


def naive(stages: int, microbatches: int) -> Actions:
    """Layer-wise model parallelism: one microbatch in flight, so one stage works at a time.

    Bubble fraction (p-1)/p, 1 microbatch kept.
    """
    return tuple(
        tuple(Action(stage, kind, m) for m in range(microbatches) for kind in ("F", "B"))
        for stage in range(stages)
    )


def gpipe(stages: int, microbatches: int) -> Actions:
    """All forwards, then all backwards (Huang et al., 2019, arXiv 1811.06965).

    Bubble fraction (p-1)/(m+p-1); m microbatches kept.
    """
    return tuple(
        tuple(Action(stage, kind, m) for kind in ("F", "B") for m in range(microbatches))
        for stage in range(stages)
    )


def one_f_one_b(stages: int, microbatches: int) -> Actions:
    """Alternate forward and backward after a warm-up (PipeDream-Flush, arXiv 2006.09503).

    Bubble fraction (p-1)/(m+p-1) as GPipe; stage i keeps min(p-i, m) microbatches.
    """

    def one(stage: int) -> tuple[Action, ...]:
        warmup = min(stages - stage, microbatches)
        actions = [Action(stage, "F", m) for m in range(warmup)]
        for m in range(microbatches):
            actions.append(Action(stage, "B", m))
            if warmup + m < microbatches:
                actions.append(Action(stage, "F", warmup + m))
        return tuple(actions)

    return tuple(one(stage) for stage in range(stages))


def pipe_dream(stages: int, microbatches: int) -> Actions:
    """1F1B that updates weights after each backward and never drains (SOSP 2019, 1806.03377).

    A microbatch's backward uses the weights that its forward used: stage i keeps min(p-i, m)
    versions of them, and as many microbatches. Gradients are of older weights than those that they
    update. No bubble but the first fill.
    """
    return tuple(
        tuple(
            out
            for action in row
            for out in ((action, action._replace(kind="OPT")) if action.kind == "B" else (action,))
        )
        for row in one_f_one_b(stages, microbatches)
    )


def interleaved_1f1b(
    ranks: int, microbatches: int, chunks: int, group: int | None = None
) -> Actions:
    """1F1B with several chunks of layers on each rank (Megatron-LM; Narayanan, 2104.04473, 2.2).

    Chunk c of rank r is stage c x p + r. Microbatches go in rounds of about p: a round passes a
    rank's first chunk, then its second, and so on; the last chunk first on the way back: looped,
    depth first. Rounds are those of torch.distributed.pipelining, of p microbatches where p divides
    m as the paper asks. Or they are of `group`, and the rest in a last one, as Megatron-LM's
    ``--microbatch-group-size-per-virtual-pipeline-stage`` has it: rounds of fewer than p, which
    Megatron-LM refuses, wait for their first microbatch to come round.
    For p chunks v and m a multiple of p: bubble ratio (p-1)/(v m), a vth of 1F1B's; rank r keeps
    min(2(p-r-1) + (v-1)p + 1, v m) chunk activations, on rank 0 p (1 + (p-1)/(p v)) microbatches.
    """
    size = group or microbatches // rounds_of(ranks, microbatches)
    least = 0 if group is None else ranks
    order = looped(microbatches, chunks, size, least)
    warmup = (chunks - 1) * max(size, least)

    def one(rank: int) -> tuple[Action, ...]:
        forward = [Action(c * ranks + rank, "F", m) for c, m in order]
        backward = [Action((chunks - 1 - c) * ranks + rank, "B", m) for c, m in order]
        first = min(2 * (ranks - 1 - rank) + warmup, len(order))
        steady = [a for pair in zip(forward[first:], backward, strict=False) for a in pair]
        row = (*forward[:first], *steady, *backward[len(order) - first :])
        return tuple(a for a in row if a.microbatch != NONE)

    return tuple(one(rank) for rank in range(ranks))


def looped_bfs(ranks: int, microbatches: int, chunks: int) -> Actions:
    """GPipe with several chunks on each rank, breadth first (Lamy-Poirier, 2023, arXiv 2211.05953).

    All microbatches pass a rank's first chunk, then its second, and so on; back in the reverse of
    that order. Bubble (p-1)(F+B) of a chunk's times; v m chunk activations kept.
    """
    order = looped(microbatches, chunks, microbatches)
    return tuple(
        tuple(
            Action(c * ranks + rank, kind, m)
            for kind, way in (("F", order), ("B", order[::-1]))
            for c, m in way
        )
        for rank in range(ranks)
    )


def looped(microbatches: int, chunks: int, size: int, least: int = 0) -> list[tuple[int, int]]:
    """Return the (chunk, microbatch) that pass a rank, in rounds of `size` microbatches.

    Rounds of fewer than `least` are filled up with NONE.
    """
    rounds = [
        range(first, min(first + size, microbatches)) for first in range(0, microbatches, size)
    ]
    filled = [(*r, *(NONE,) * (least - len(r))) for r in rounds]
    return [(c, m) for r in filled for c in range(chunks) for m in r]


def rounds_of(ranks: int, microbatches: int) -> int:
    """Return how many times the interleaved schedule goes through the chunks of a rank."""
    return max(1, microbatches // ranks)


def interleaved_complaint(
    ranks: int, microbatches: int, chunks: int, group: int | None
) -> str | None:
    """Return why the interleaved schedule does not take a size, or None where it does."""
    if group is not None:
        more = f"has {microbatches} microbatches, fewer than microbatch_group {group}"
        return more if group > microbatches else None
    rounds = rounds_of(ranks, microbatches)
    if microbatches % rounds == 0:
        return None
    below, above = (
        next(m for m in count(microbatches, step) if m % rounds_of(ranks, m) == 0)
        for step in (-1, 1)
    )
    return (
        f"takes {microbatches} microbatches through {ranks} ranks in {microbatches} // "
        f"{ranks} = {rounds} rounds, which do not divide them; {below} or {above} would do"
    )
