"""Schedules of users: from a Python function, or from a CSV file."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path

from simulator.errors import DescriptionError, ScheduleError
from simulator.schedules.action import Action, Actions, grid, read_actions
from simulator.schedules.passes import stages_of_ranks
from simulator.schedules.rows import SCHEDULES
from simulator.schedules.schedule import Schedule
from simulator.schedules.torch_csv import read_csv

_FILES: dict[str, tuple[tuple[int, int], Schedule]] = {}
"""Schedules of files by absolute path, each with the file's time of change and size."""


def register_schedule(
    name: str,
    function: Callable[..., Sequence[Sequence[Action | str]]],
    *,
    chunks: int | tuple[int, int | None] = 1,
    copies: int = 1,
    note: str = "",
) -> None:
    """Give a schedule a name, which then does wherever a schedule is named.

    Args:
        name: by which it is found, whatever the case; one's own may be given anew.
        function: of (ranks, microbatches), or of (ranks, microbatches, chunks) where chunks vary,
            to a list of actions for each rank, such as ``["0F0", "0B0"]``. With a docstring, whose
            first line lists show.
        chunks: stages of each rank, or the fewest and the most of them; None for no most.
        copies: ranks that hold each stage.
        note: what a reader of its results must know; reports list it with what was assumed.

    Raises:
        DescriptionError: when the name is taken by a schedule of this package, or is a file's.
    """
    taken = {known.lower(): known for known, s in SCHEDULES.items()}
    known = taken.get(name.lower())
    if known is not None and not SCHEDULES[known].foreign:
        raise DescriptionError(f"schedule {name!r} is one of this package's; take another name")
    if is_file(name) or not name.strip():
        raise DescriptionError(f"schedule {name!r} cannot be a name: it is empty or a file's")
    least, most = (chunks, chunks) if isinstance(chunks, int) else chunks
    if least < 1 or copies < 1 or (most is not None and most < least):
        raise DescriptionError(
            f"schedule {name!r}: chunks {chunks} and copies {copies} must be at least 1, and the "
            "most chunks no fewer than the least"
        )

    @wraps(function)
    def make(*size: int) -> Actions:
        return read_actions([list(row) for row in function(*size)])

    SCHEDULES.pop(known or name, None)
    SCHEDULES[name] = Schedule(make, (least, most), copies, note=note, foreign=True)


def check_size(actions: Actions, ranks: int, microbatches: int, stages: int) -> None:
    """Check that lists which a user's function made are of the size that they were made for.

    Raises:
        ScheduleError: when they are not.
    """
    work = [a for row in actions for a in row]
    for what, found, wanted in (
        ("ranks", len(actions), ranks),
        ("microbatches", max(a.microbatch for a in work) + 1, microbatches),
        ("stages", max(a.stage for a in work) + 1, stages),
    ):
        if found != wanted:
            raise ScheduleError(
                f"the lists are of {found} {what}, and were asked for {wanted}\n{grid(actions)}"
            )


def is_file(name: str) -> bool:
    """Return whether a schedule's name is the path of a CSV file."""
    return name.lower().endswith(".csv")


def file_schedule(path: str) -> Schedule:
    """Return the schedule that a CSV file of torch.distributed.pipelining holds, of one size.

    It is read once, and again when the file has changed.

    Raises:
        DescriptionError: with the row and the column of what is wrong.
        DeadlockError: when its lists wait for each other.
    """
    place = os.path.abspath(path)
    known = _FILES.get(place)
    try:
        found = Path(place).stat()
        stamp = found.st_mtime_ns, found.st_size
    except OSError as error:
        if known is not None:  # what was read stays
            return known[1]
        raise DescriptionError(f"schedule {path!r} cannot be read ({error.strerror})") from None
    if known is None or known[0] != stamp:
        _FILES[place] = known = stamp, _of_file(path)
    return known[1]


def _of_file(path: str) -> Schedule:
    actions, left_out = read_csv(path)
    held = stages_of_ranks(actions)
    stages = max(stage for row in held for stage in row) + 1
    counts = {len(row) for row in held}
    chunks, rest = max(counts), len(held) * max(counts) % stages
    if len(counts) > 1 or rest:
        shown = ", ".join(str(len(row)) for row in held)
        raise DescriptionError(
            f"{path}: its ranks hold {shown} of {stages} stages; a plan's ranks hold equally many "
            "each"
        )
    microbatches = max(a.microbatch for row in actions for a in row) + 1

    def make(_ranks: int, _microbatches: int) -> Actions:
        return actions

    note = f"{left_out} UNSHARD and RESHARD of {path} are left out: plan.zero says when weights are"
    return Schedule(
        make, (chunks, chunks), len(held) * chunks // stages,
        size=(len(actions), microbatches), note=f"{note} gathered" if left_out else "",
    )  # fmt: skip
