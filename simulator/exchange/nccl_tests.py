"""The text that NVIDIA's nccl-tests print: read, fitted to alpha and beta, written again.

Layouts read: with and without the ``redop`` and ``root`` columns, ``#wrong`` or the older
``error``, ``N/A`` in any of the results, lines that mpirun or srun prefix with the rank, logs in
between.
Sizes are bytes; times and rates become seconds and bytes/s.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from simulator.errors import DescriptionError
from simulator.units import UNITS

US = UNITS["seconds"]["us"]
GBS = UNITS["bytes/s"]["GB/s"]

OPERATIONS = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all", "broadcast": "broadcast", "reduce": "reduce", "gather": "gather",
    "scatter": "scatter", "sendrecv": "send_recv",
}  # fmt: skip
"""Our names of the operations by the names of nccl-tests' programs (``<name>_perf``)."""

_PREFIX = re.compile(r"^\s*(?:\[[\d,]+\](?:<\w+>)?:?|\d+:)\s?(?=\s*[#\d\w])")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\b.*?\bon\s+(\S+)\s+device")
_PROGRAM = re.compile(r"\b(\w+?)_perf\b")
_RESULTS = 8
"""Columns of two blocks, out of place and in place: time, algbw, busbw, #wrong."""


class Timing(NamedTuple):
    """One block of a row; None where nccl-tests prints N/A."""

    seconds: float | None
    algbw: float | None
    busbw: float | None
    wrong: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """One size."""

    size: int
    count: int
    dtype: str
    redop: str
    root: int
    out_of_place: Timing
    in_place: Timing
    note: str = ""
    """What we add after the columns: algorithm and protocol."""


@dataclass(frozen=True, slots=True)
class Table:
    """One run of a test."""

    rows: tuple[Row, ...]
    operation: str | None
    """As in `OPERATIONS`; None when the text does not name its program."""
    ranks: int | None
    nodes: int | None
    """Distinct hosts of the ``# Rank`` lines; None without such lines."""


class Fit(NamedTuple):
    """Seconds of an operation as alpha + beta x size."""

    alpha: float
    beta: float
    residuals: tuple[float, ...]
    """(fitted - measured) / measured of each row."""


def parse(text: str, operation: str | None = None) -> Table:
    """Return the rows of one run's output.

    Args:
        text: what the program printed, whole.
        operation: its operation; read from the name of the program in the text when absent.

    Raises:
        DescriptionError: when it is no such output, or a row is cut off.
    """
    lines = [_PREFIX.sub("", line).strip() for line in text.splitlines()]
    comments = [line for line in lines if line.startswith("#")]
    if not any("busbw" in line for line in comments):
        raise DescriptionError(
            "not the output of nccl-tests: no line '# size count type ... busbw' in it"
        )
    numbered = [(n, line.partition("#")[0].split()) for n, line in enumerate(lines, 1)]
    rows = tuple(_row(number, cells) for number, cells in numbered if _is_row(cells))
    if not rows:
        raise DescriptionError("the output of nccl-tests is cut off: its table has no rows")
    hosts = {match[1]: match[2] for match in map(_RANK.match, comments) if match}
    named = next((m[1] for m in map(_PROGRAM.search, lines) if m and m[1] in OPERATIONS), None)
    return Table(
        rows,
        operation or (OPERATIONS[named] if named else None),
        len(hosts) or None,
        len(set(hosts.values())) or None,
    )


def _is_row(cells: Sequence[str]) -> bool:
    return len(cells) > 2 and cells[0].isdigit() and cells[1].isdigit()


def _row(number: int, cells: Sequence[str]) -> Row:
    head, results = cells[:-_RESULTS], [_number(cell) for cell in cells[-_RESULTS:]]
    broken = [
        c for c, r in zip(cells[-_RESULTS:], results, strict=True) if r is None and c != "N/A"
    ]
    if not 3 <= len(head) <= 5 or broken:
        raise DescriptionError(
            f"line {number}: a row of {len(cells)} columns, {' '.join(cells)!r}; nccl-tests write "
            f"size count type [redop] [root], then twice time algbw busbw #wrong; is it cut off?"
        )
    redop, root = [*head[3:], *["none", "-1"][len(head) - 3 :]]
    return Row(
        int(head[0]), int(head[1]), head[2], redop, int(root),
        _timing(results[:4]), _timing(results[4:]),
    )  # fmt: skip


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _timing(cells: Sequence[float | None]) -> Timing:
    scales = (US, GBS, GBS, 1.0)
    return Timing(*(None if c is None else c * s for c, s in zip(cells, scales, strict=True)))


def fit(rows: Iterable[Row]) -> Fit:
    """Return the alpha and beta, neither below 0, that leave the least squares of relative errors.

    Times are those out of place, or in place where there are none.

    Raises:
        DescriptionError: for fewer than two sizes.
    """
    points = {r.size: r.out_of_place.seconds or r.in_place.seconds for r in rows}
    times = {size: seconds for size, seconds in points.items() if seconds}
    if len(times) < 2:
        raise DescriptionError(f"alpha and beta need two sizes with a time; there are {len(times)}")
    size = np.array(list(times), float)
    seconds = np.array(list(times.values()))
    columns = np.stack([1 / seconds, size / seconds], axis=1)
    scale = columns.max(axis=0)  # alpha and beta are many powers of ten apart
    solution = np.linalg.lstsq(columns / scale, np.ones(len(size)), rcond=None)[0] / scale
    for held, free in ((0, 1), (1, 0)):
        if solution[held] < 0:
            solution[held] = 0.0
            solution[free] = columns[:, free].sum() / (columns[:, free] ** 2).sum()
    alpha, beta = map(float, solution)
    return Fit(alpha, beta, tuple(((alpha + beta * size) / seconds - 1).tolist()))


def fit_all(tables: Iterable[Table]) -> dict[tuple[str, int, int], Fit]:
    """Return the fit of each (operation, ranks, nodes), over all runs of it.

    Raises:
        DescriptionError: when a run does not say what it is.
    """
    rows: dict[tuple[str, int, int], list[Row]] = {}
    for table in tables:
        if table.operation is None or table.ranks is None or table.nodes is None:
            raise DescriptionError(
                "a run of nccl-tests names no operation, or has no '# Rank' lines that tell "
                "how many ranks and nodes took part"
            )
        rows.setdefault((table.operation, table.ranks, table.nodes), []).extend(table.rows)
    return {scope: fit(measured) for scope, measured in rows.items()}


HEADER = """\
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""  # noqa: E501


def format_rows(rows: Sequence[Row], preamble: Sequence[str] = ()) -> str:
    """Return rows in the layout of nccl-tests, after lines of a preamble, with its last line."""
    lines = [*(f"# {line}" for line in preamble), HEADER.rstrip("\n")]
    for row in rows:
        blocks = "  ".join(map(_block, (row.out_of_place, row.in_place)))
        head = f"{row.size:>12}  {row.count:>12}  {row.dtype:>8}  {row.redop:>6}  {row.root:>6}"
        note = f"  # {row.note}" if row.note else ""
        lines.append(f"{head}  {blocks}{note}")
    known = [t.busbw for r in rows for t in (r.out_of_place, r.in_place) if t.busbw is not None]
    average = sum(known) / len(known) / GBS if known else 0.0
    return "\n".join([*lines, f"# Avg bus bandwidth    : {average:g}"])


def _block(timing: Timing) -> str:
    time = "N/A" if timing.seconds is None else _time(timing.seconds / US)
    rates = [("N/A" if r is None else f"{r / GBS:.2f}") for r in (timing.algbw, timing.busbw)]
    wrong = "N/A" if timing.wrong is None else f"{timing.wrong:g}"
    return f"{time:>7}  {rates[0]:>6}  {rates[1]:>6}  {wrong:>5}"


def _time(us: float) -> str:
    """Five digits, as nccl-tests write them."""
    return f"{us:.2f}" if us < 1000 else f"{us:.1f}" if us < 10000 else f"{us:.0f}"
