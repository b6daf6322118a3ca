"""Action lists as the CSV files of torch.distributed.pipelining: a row a rank, a cell an action.

torch's ``_dump_csv`` writes them and its ``_load_csv`` reads them, as "compute_only", or with
messages as "compute_comms".
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

from simulator.errors import DeadlockError, DescriptionError, ScheduleError
from simulator.files import write_whole
from simulator.program import NONE
from simulator.schedules.action import Action, Actions, cell_text, cells, parse_cell
from simulator.schedules.check import check_actions
from simulator.schedules.deadlock import check_progress, needs, other_side
from simulator.schedules.passes import homes

_SHARDING = re.compile(r"\d+(UNSHARD|RESHARD)")
"""FSDP's cells: when weights are gathered is the plan's (zero 3), not the schedule's."""

_PASSES = {"F": ("SEND_F", 1), "B": ("SEND_B", -1), "I": ("SEND_B", -1)}
"""The message after a computation, and how many stages further it goes."""


def read_csv(path: str | Path) -> tuple[Actions, int]:
    """Return the checked lists of a file, and how many UNSHARD and RESHARD were left out.

    Raises:
        DescriptionError: with the row and the column of the first thing that is wrong.
        DeadlockError: when the lists wait for each other.
    """
    rows, columns, left_out = [], [], 0
    for number, texts in enumerate(_rows(Path(path)), 1):
        row: list[Action] = []
        where: list[int] = []
        for column, text in enumerate(texts, 1):
            if _SHARDING.fullmatch(text.strip()):
                left_out += 1
            elif text.strip():
                try:
                    cell = parse_cell(text)
                except ScheduleError as error:
                    raise DescriptionError(
                        f"{path} row {number}, column {column}: {error}"
                    ) from None
                row.extend(cell)
                where.extend([column] * len(cell))
        rows.append(tuple(row))
        columns.append(where)
    actions = tuple(rows)
    try:
        check_actions(actions)
        check_progress(actions)
    except ScheduleError as error:
        place = ""
        if error.place:
            rank, position = error.place
            place = f" row {rank + 1}, column {columns[rank][position]}"
        raise DescriptionError(f"{path}{place}: {error}") from None
    except DeadlockError as error:
        raise DeadlockError(f"{path}: {error}") from None
    return actions, left_out


def _rows(path: Path) -> list[list[str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.reader(file))
    except OSError as error:
        raise DescriptionError(f"{path}: cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise DescriptionError(f"{path}: is not a CSV text ({error})") from None
    while rows and not any(text.strip() for text in rows[-1]):
        rows.pop()
    return rows


def write_csv(actions: Actions, path: str | Path) -> None:
    """Write action lists for torch, which has no word for the optimizer steps at their end.

    Raises:
        DescriptionError: when the file cannot be written there, or updates follow each microbatch.
    """
    if any(a.kind == "OPT" and a.microbatch != NONE for row in actions for a in row):
        raise DescriptionError(
            f"cannot write {str(path)!r}: torch's files have no optimizer steps, which this "
            "schedule takes after each microbatch"
        )

    def write(target: Path) -> None:
        with target.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(
                [cell_text(cell) for cell in cells(row) if cell[0].kind != "OPT"] for row in actions
            )

    write_whole(Path(path), write)


def add_messages_as_torch(actions: Actions) -> Actions:
    """Return lists with sends and receives where torch.distributed.pipelining puts them.

    A receive stands where its send happens when ranks do an action each in turn, so that both ends
    come to their messages in one order.

    Raises:
        DeadlockError: when the lists wait for each other.
    """
    check_progress(actions)
    home = homes(actions)
    backward = {(a.stage, a.microbatch): a.kind for row in actions for a in row
                if a.kind in ("B", "I")}  # fmt: skip
    left = [list(cells(row))[::-1] for row in actions]
    out: list[list[Action]] = [[] for _ in actions]
    seen: list[set[Action]] = [set() for _ in actions]

    def ready(action: Action, rank: int) -> bool:
        wanted = needs(action, home, backward, messages=True)
        return all(n in seen[rank] for n in wanted)

    while any(left):
        for rank, row in enumerate(left):
            if not row or not all(ready(a, rank) for a in row[-1]):
                continue
            cell = row.pop()
            out[rank].extend(cell)
            seen[rank].update(a.alone for a in cell)
            for action in cell:
                kind, step = _PASSES.get(action.kind, ("", 0))
                peer = home.get((action.stage + step, action.microbatch), rank)
                if peer != rank:
                    send = Action(action.stage, kind, action.microbatch)
                    out[rank].append(send)
                    out[peer].append(other_side(send))
                    seen[peer].add(other_side(send))
    return tuple(map(tuple, out))
