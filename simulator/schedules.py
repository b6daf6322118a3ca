"""Pipeline schedules as data: for each pipeline rank, the list of actions it performs in order.

An action is a stage, a kind and a microbatch, spelled as torch.distributed.pipelining spells them
(``3F0``, ``1SEND_F2``). A schedule is one function over (stages, microbatches), or over (ranks,
microbatches, chunks) where a rank holds several stages; the passes below take action lists and
return new ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import count
from typing import NamedTuple, TypeAlias

from simulator.budget import require
from simulator.errors import DescriptionError, ScheduleError, suggestion
from simulator.program import ACTION_CODE, ACTIONS, NONE


class Action(NamedTuple):
    """One cell of a schedule."""

    stage: int
    kind: str
    """A key of `ACTION_CODE`."""
    microbatch: int = NONE
    """NONE for what concerns all microbatches: REDUCE_GRAD and OPT."""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch == NONE else self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action that prints as `text`.

        Raises:
            ScheduleError: when no action does.
        """
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(f"{text!r} is not an action; write for example 3F0 or 1SEND_F2")
        return cls(int(match[1]), match[2], int(match[3]) if match[3] else NONE)


_ACTION = re.compile(rf"(\d+)({'|'.join(sorted(ACTIONS, key=len, reverse=True))})(\d*)")

Actions: TypeAlias = tuple[tuple[Action, ...], ...]
"""Action lists by pipeline rank."""


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


def interleaved_1f1b(ranks: int, microbatches: int, chunks: int) -> Actions:
    """1F1B with several chunks of layers on each rank (Megatron-LM; Narayanan, 2104.04473, 2.2).

    Chunk c of rank r is stage c x p + r. Microbatches go in rounds of about p: a round passes a
    rank's first chunk, then its second, and so on; the last chunk first on the way back. Rounds are
    those of torch.distributed.pipelining, of p microbatches where p divides m as the paper asks.
    For p chunks v and m a multiple of p: bubble ratio (p-1)/(v m), a vth of 1F1B's; rank r keeps
    min(2(p-r-1) + (v-1)p + 1, v m) chunk activations, on rank 0 p (1 + (p-1)/(p v)) microbatches.
    """
    rounds = _rounds(ranks, microbatches)
    size = microbatches // rounds
    order = [(c, r * size + i) for r in range(rounds) for c in range(chunks) for i in range(size)]

    def one(rank: int) -> tuple[Action, ...]:
        forward = [Action(c * ranks + rank, "F", m) for c, m in order]
        backward = [Action((chunks - 1 - c) * ranks + rank, "B", m) for c, m in order]
        warmup = min(2 * (ranks - 1 - rank) + (chunks - 1) * size, len(order))
        steady = [a for pair in zip(forward[warmup:], backward, strict=False) for a in pair]
        return (*forward[:warmup], *steady, *backward[len(order) - warmup :])

    return tuple(one(rank) for rank in range(ranks))


def _rounds(ranks: int, microbatches: int) -> int:
    """Return how many times the interleaved schedule goes through the chunks of a rank."""
    return max(1, microbatches // ranks)


PLAIN: dict[str, Callable[[int, int], Actions]] = {
    "naive": naive,
    "GPipe": gpipe,
    "1F1B": one_f_one_b,
}
"""Schedules of one stage a rank, by name: functions of (stages, microbatches)."""

CHUNKED: dict[str, Callable[[int, int, int], Actions]] = {"Interleaved1F1B": interleaved_1f1b}
"""Schedules of several stages a rank, by name: functions of (ranks, microbatches, chunks)."""

SCHEDULES: Mapping[str, Callable[..., Actions]] = PLAIN | CHUNKED
"""All schedules, as torch.distributed.pipelining names them; add a function to add one."""


def _filled(ranks: int, microbatches: int, chunks: int) -> float:
    """Return the bubble fraction of a pipeline that waits only for its first microbatch.

    (p-1)/(v m + p-1) for m >= p; with fewer, a chunk waits for the first microbatch to come round.
    """
    work = chunks * microbatches
    return 1 - work / (chunks * max(microbatches, ranks) + min(microbatches, ranks) - 1)


BUBBLE_FRACTION = dict.fromkeys(("GPipe", "1F1B", "Interleaved1F1B"), _filled)
"""Bubble fraction for equal stages and free messages, of schedules where it falls with m,
from (ranks, microbatches, chunks)."""


def schedule_name(name: str) -> str:
    """Return the registered spelling of a schedule's name, whatever its case.

    Raises:
        DescriptionError: when there is none.
    """
    by_lower = {known.lower(): known for known in SCHEDULES}
    if name.lower() not in by_lower:
        raise DescriptionError(
            f"schedule {name!r} is not one of {', '.join(SCHEDULES)}{suggestion(name, SCHEDULES)}"
        )
    return by_lower[name.lower()]


def size_complaint(name: str, ranks: int, microbatches: int, chunks: int) -> str | None:
    """Return why a registered schedule cannot be made in a size, or None where it can."""
    if name not in CHUNKED:
        takers = ", ".join(CHUNKED)
        return f"{name} takes one chunk a rank, not {chunks}; use {takers}" if chunks > 1 else None
    if chunks < 2:
        return f"{name} needs at least 2 chunks a rank, not {chunks}; with one chunk use 1F1B"
    rounds = _rounds(ranks, microbatches)
    if microbatches % rounds == 0:
        return None
    below, above = (
        next(m for m in count(microbatches, step) if m % _rounds(ranks, m) == 0) for step in (-1, 1)
    )
    return (
        f"{name} takes {microbatches} microbatches through {ranks} ranks in {microbatches} // "
        f"{ranks} = {rounds} rounds, which do not divide them; {below} or {above} would do"
    )


@lru_cache(maxsize=64)
def actions_of(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Actions:
    """Return the checked action lists of a registered schedule, without communication.

    Raises:
        DescriptionError: when there is no such schedule, not of this size, or it is too large for
            this machine.
    """
    name = schedule_name(name)
    complaint = size_complaint(name, ranks, microbatches, chunks)
    if complaint:
        raise DescriptionError(complaint)
    what = f"a schedule of {microbatches:,} microbatches on {ranks * chunks} stages"
    require(1500.0 * ranks * chunks * microbatches, what, "take fewer, larger microbatches")
    size = (ranks, microbatches, chunks) if name in CHUNKED else (ranks, microbatches)
    actions = SCHEDULES[name](*size)
    check_actions(actions)
    return actions


def read_actions(rows: object) -> Actions:
    """Return action lists from lists of actions, or of their texts.

    Raises:
        ScheduleError: when something in them is neither.
    """
    if not isinstance(rows, (list, tuple)) or not all(isinstance(r, (list, tuple)) for r in rows):
        raise ScheduleError(f"a schedule is a list of actions for each rank, not {rows!r}")
    return tuple(
        tuple(a if isinstance(a, Action) else Action.parse(str(a)) for a in row) for row in rows
    )


def check_actions(actions: Actions) -> None:
    """Check that every microbatch passes every stage once, forward before backward.

    Raises:
        ScheduleError: with the grid and the offending cell marked.
    """
    if not any(actions):
        raise ScheduleError("a schedule needs at least one action")
    home: dict[int, int] = {}
    seen: set[Action] = set()
    for rank, row in enumerate(actions):
        for position, action in enumerate(row):
            complaint = _complaint(action, rank, home, seen)
            if complaint:
                raise ScheduleError(f"{complaint}\n{grid(actions, (rank, position))}")
            seen.add(action)
            home[action.stage] = rank
    _check_complete(actions, home, seen)
    if any(a.kind in _OTHER_SIDE for a in seen):
        _check_messages(actions, home, seen)


_OTHER_SIDE = {"SEND_F": ("RECV_F", 1), "RECV_F": ("SEND_F", -1),
               "SEND_B": ("RECV_B", -1), "RECV_B": ("SEND_B", 1)}  # fmt: skip
"""The other side of a message: its kind, and how many stages further it is done."""


def _check_messages(actions: Actions, home: dict[int, int], seen: set[Action]) -> None:
    """Check that messages have two sides, and come before what needs them, after what they send."""
    last = max(home)
    for rank, row in enumerate(actions):
        before: set[tuple[str, int, int]] = set()
        for position, action in enumerate(row):
            stage, kind, m = action
            complaint = None
            if kind in _OTHER_SIDE:
                other, offset = _OTHER_SIDE[kind]
                if Action(stage + offset, other, m) not in seen:
                    complaint = f"{action} on rank {rank} has no {stage + offset}{other}{m}"
            if kind == "F" and stage > 0 and home[stage - 1] != rank:
                complaint = _absent(action, rank, "RECV_F", before)
            elif kind in ("B", "I") and stage < last and home[stage + 1] != rank:
                complaint = _absent(action, rank, "RECV_B", before)
            elif kind == "SEND_F" and ("F", stage, m) not in before:
                complaint = f"{action} on rank {rank} comes before {stage}F{m}, which it sends"
            elif kind == "SEND_B" and not {("B", stage, m), ("I", stage, m)} & before:
                complaint = f"{action} on rank {rank} comes before {stage}B{m}, which it sends"
            if complaint:
                raise ScheduleError(f"{complaint}\n{grid(actions, (rank, position))}")
            before.add((kind, stage, m))


def _absent(
    action: Action, rank: int, receive: str, before: set[tuple[str, int, int]]
) -> str | None:
    stage, _, m = action
    if (receive, stage, m) in before:
        return None
    return f"{action} on rank {rank} has no {stage}{receive}{m} before it"


def _complaint(action: Action, rank: int, home: dict[int, int], seen: set[Action]) -> str | None:
    stage, kind, microbatch = action
    if kind not in ACTION_CODE:
        return f"{kind!r} is not an action kind, on rank {rank}"
    if stage < 0 or microbatch < NONE:
        return f"{action} on rank {rank}: stages and microbatches count from 0"
    if (microbatch == NONE) != (kind in ("REDUCE_GRAD", "OPT")):
        return f"{action} on rank {rank} must {'not ' * (microbatch != NONE)}name a microbatch"
    if kind not in ("REDUCE_GRAD", "OPT") and Action(stage, "OPT") in seen:
        return f"{action} on rank {rank} comes after the optimizer step of its stage"
    if action in seen:
        return f"{action} on rank {rank} is done twice"
    if home.get(stage, rank) != rank:
        return f"stage {stage} is on rank {home[stage]} and on rank {rank}"
    if kind in ("B", "I") and Action(stage, "F", microbatch) not in seen:
        return f"{action} on rank {rank} comes before its forward {stage}F{microbatch}"
    if kind == "W" and Action(stage, "I", microbatch) not in seen:
        return f"{action} on rank {rank} comes before {stage}I{microbatch}"
    return None


def _check_complete(actions: Actions, home: dict[int, int], seen: set[Action]) -> None:
    stages = max(home, default=-1) + 1
    microbatches = max((a.microbatch for a in seen), default=-1) + 1
    if not microbatches:
        raise ScheduleError(f"a schedule needs at least one forward\n{grid(actions)}")
    for stage in range(stages):
        for m in range(microbatches):
            forward = Action(stage, "F", m) in seen
            whole = Action(stage, "B", m) in seen
            split = Action(stage, "I", m) in seen and Action(stage, "W", m) in seen
            if not forward or whole == split:
                missing = f"{stage}F{m}" if not forward else f"{stage}B{m} (or both I and W)"
                raise ScheduleError(f"{missing} is missing\n{grid(actions)}")


def add_send_recv(actions: Actions) -> Actions:
    """Return action lists with a send after each producer and a receive before each consumer.

    Stages on the same rank hand over without a message.
    """
    home = {action.stage: rank for rank, row in enumerate(actions) for action in row}
    last = max(home, default=0)
    rows = []
    for rank, row in enumerate(actions):
        out: list[Action] = []
        for action in row:
            stage, kind, m = action
            if kind == "F" and stage > 0 and home[stage - 1] != rank:
                out.append(Action(stage, "RECV_F", m))
            if kind in ("B", "I") and stage < last and home[stage + 1] != rank:
                out.append(Action(stage, "RECV_B", m))
            out.append(action)
            if kind == "F" and stage < last and home[stage + 1] != rank:
                out.append(Action(stage, "SEND_F", m))
            if kind in ("B", "I") and stage > 0 and home[stage - 1] != rank:
                out.append(Action(stage, "SEND_B", m))
        rows.append(tuple(out))
    return tuple(rows)


def add_reduce_grad(actions: Actions) -> Actions:
    """Return action lists with a REDUCE_GRAD after the last backward of each stage."""
    return _after_last_backward(actions, "REDUCE_GRAD")


def add_optimizer(actions: Actions) -> Actions:
    """Return action lists with the optimizer steps of a rank's stages at its end."""
    return tuple(
        (*row, *(Action(stage, "OPT") for stage in sorted({a.stage for a in row})))
        for row in actions
    )


def _after_last_backward(actions: Actions, kind: str) -> Actions:
    rows = []
    for row in actions:
        last = {a.stage: i for i, a in enumerate(row) if a.kind in ("B", "W")}
        at = {i: stage for stage, i in last.items()}
        rows.append(tuple(
            out
            for i, action in enumerate(row)
            for out in ((action, Action(at[i], kind)) if i in at else (action,))
        ))  # fmt: skip
    return tuple(rows)


def grid(actions: Sequence[Sequence[Action]], error: tuple[int, int] | None = None) -> str:
    """Return action lists as text, a row a rank; `error` is the (rank, position) to point at."""
    width = max((len(str(a)) for row in actions for a in row), default=1)
    lines = []
    for rank, row in enumerate(actions):
        cells = [
            f"{action!s:<{width}}" + (" <-- ERROR HERE" if (rank, i) == error else "")
            for i, action in enumerate(row)
        ]
        lines.append(f"rank {rank}: {' '.join(cells)}".rstrip())
    return "\n".join(lines)


def parse_grid(text: str) -> Actions:
    """Return the action lists that `grid` printed."""
    rows = [line.partition(":")[2].split() for line in text.splitlines() if line.strip()]
    return tuple(tuple(Action.parse(cell) for cell in row) for row in rows)
