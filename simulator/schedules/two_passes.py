"""Schedules in which microbatches pass each rank twice, or in two directions."""

from __future__ import annotations

from collections import Counter

from simulator.schedules.action import Action, Actions
from simulator.schedules.formulas import Case


class TwoPasses:
    """The list of one rank while it is written: of two stages, 0 and 1, or of two directions.

    Microbatches of each are numbered as their actions come.
    """

    def __init__(self, stages: tuple[int, int], first: tuple[int, int] = (0, 0)) -> None:
        self.actions: list[Action] = []
        self.done: Counter[str] = Counter()
        """How many of each action there are by its word, with B counted as I."""
        self._stages, self._first = stages, first
        self._pending: list[Action] = []
        """Weight gradients put off."""

    def add(self, words: str, count: int = 1) -> None:
        """Write actions, a number of times: ``F0 I1 W1``; ``F0&B1`` is a pair, ``W`` the oldest W.

        A W without any put off is nothing.
        """
        for word in words.split() * count:
            first, _, second = word.partition("&")
            self._write(first, paired=bool(second))
            if second:
                self._write(second)

    def _write(self, word: str, *, paired: bool = False) -> None:
        kind, of = word[0], word[1:]
        if kind == "W":
            ready = [w for w in self._pending if not of or w.stage == self._stages[int(of)]]
            if ready:
                self._pending.remove(ready[0])
                self.actions.append(ready[0])
            return
        stage, counted = self._stages[int(of)], f"{'F' if kind == 'F' else 'I'}{of}"
        microbatch = self._first[int(of)] + self.done[counted]
        self.done[counted] += 1
        self.actions.append(Action(stage, kind, microbatch, paired))
        if kind == "I":
            self._pending.append(Action(stage, "W", microbatch))

    def drain(self, words: str) -> None:
        """Write all weight gradients put off, those of ``W1`` before those of ``W0``, say."""
        for word in words.split():
            self.add(word, len(self._pending))


def zbv_zero_bubble(ranks: int, microbatches: int) -> Actions:
    """ZB-V: stages r and 2p-1-r on rank r (Qi et al., 2023, arXiv 2401.10241, 6), as torch has it.

    The last stage is on the first rank, so a microbatch's backward begins where its forward did.
    No bubble for F = I = W and m >= 2p-1; rank r keeps up to 2p stage activations, of half a rank's
    layers each: the memory of 1F1B.
    """
    enough = max(2 * ranks - 1, microbatches)

    def one(rank: int) -> tuple[Action, ...]:
        row = TwoPasses((rank, 2 * ranks - 1 - rank))
        row.add("F0", 2 * (ranks - rank) - 1)
        row.add("F1 F0", rank)
        row.add("F1 I1 W1", ranks - rank)
        row.add("F0 I0 W0 F1 I1 W1", enough - row.done["F0"])
        row.add("I0 W0 F1 I1 W1", row.done["F0"] - row.done["F1"])
        row.add("I0 I1", rank)
        row.add("I0 W0", ranks - rank)
        row.drain("W1 W0")
        return tuple(a for a in row.actions if a.microbatch < microbatches)

    return tuple(one(rank) for rank in range(ranks))


def dual_pipe(ranks: int, microbatches: int) -> Actions:
    """Microbatches enter at both ends, F and B of the two overlap (DeepSeek-V3, arXiv 2412.19437).

    As github.com/deepseek-ai/DualPipe: p ranks in even number, rank r holds stages r and p-1-r, the
    first half of the microbatches enters at rank 0. Bubble (p/2-1)(F&B+B-3W), where B is a whole
    backward and F&B a pair; p+1 stage activations kept, and all weights twice.
    """
    half = microbatches // 2

    def one(rank: int) -> tuple[Action, ...]:
        turned = rank >= ranks // 2
        near = min(rank, ranks - 1 - rank)
        first = (half, 0) if turned else (0, half)
        row = TwoPasses((near, ranks - 1 - near), first)
        return _dual(row, ranks // 2, near, half)

    return tuple(one(rank) for rank in range(ranks))


def dual_pipe_complaint(
    ranks: int, microbatches: int, chunks: int, group: int | None
) -> str | None:
    """Return why DualPipe does not take a size, or None where it does."""
    least = 2 * ranks
    if ranks % 2:
        others = f"{ranks - 1} or {ranks + 1}" if ranks > 1 else "2"
        return f"takes an even number of ranks, not {ranks}; {others} would do"
    if microbatches % 2 or microbatches < least:
        near = max(microbatches + microbatches % 2, least)
        return (
            f"takes an even number of microbatches, at least 2 x {ranks} ranks = {least}, not "
            f"{microbatches}; {near} would do"
        )
    return None


def dual_pipe_v_complaint(
    ranks: int, microbatches: int, chunks: int, group: int | None
) -> str | None:
    """Return why DualPipeV does not take a size, or None where it does."""
    if microbatches >= 2 * ranks:
        return None
    return (
        f"takes at least as many microbatches as stages, 2 x {ranks} ranks = {2 * ranks}, not "
        f"{microbatches}"
    )


def dual_pipe_is_exact(case: Case) -> bool:
    """Return whether the bubble formula of DualPipe and DualPipeV holds."""
    return case.f == case.i >= case.w and case.b <= case.pair <= case.f + case.b


def dual_pipe_v(ranks: int, microbatches: int) -> Actions:
    """DualPipe folded into a V: stages r and 2p-1-r on rank r, as torch has it.

    From github.com/deepseek-ai/DualPipe (Qi et al., "cut-in-half"). Bubble (p-1)(F&B+B-3W), where
    B is a whole backward and F&B a pair; 2p+1 stage activations kept.
    """
    return tuple(
        _dual(TwoPasses((rank, 2 * ranks - 1 - rank)), ranks, rank, microbatches)
        for rank in range(ranks)
    )


def _dual(row: TwoPasses, ranks: int, rank: int, microbatches: int) -> tuple[Action, ...]:
    """Write the list of the rank-th of `ranks` from an end, for microbatches each way."""
    inner, away = rank == ranks - 1, ranks - rank - 1
    row.add("F0", 2 * away)
    row.add("F0 F1", rank + 1)
    row.add("I1 W F1", away)
    for number in range(microbatches - 2 * ranks + rank + 1):
        row.add("F0 B1" if inner and number == 0 else "F0&B1")
        row.add("F1&B0")
    row.add("B1 F1&B0", away)
    backwards = 2 * (rank + 1)
    whole = 2 * ((rank + 1) // 2) + (rank % 2 == 0)
    for number in range(backwards):
        row.add(f"{'B' if number < whole else 'I'}{1 - number % 2}")
    row.add("W I0", away)
    row.add("W", rank + 1)
    return tuple(row.actions)
