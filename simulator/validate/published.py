"""Published measurements beside predictions: what a source is, and how its rows are re-run.

Measured values lie in `workloads/measured`, a file for each source, as they were collected. Nothing
here, and no constant anywhere, is fitted to them, except where a source is marked ``calibrated``.
Every row of a file ends up as an `Outcome` or as an `Unexpressed` with the reason.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from simulator.describe import catalog
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.report.collectives import Accuracy

Row: TypeAlias = dict[str, str]
Kind: TypeAlias = Literal["predicted", "replayed", "calibrated"]
Unit: TypeAlias = Literal["s", "GiB", "%", "GB"]


class Case(NamedTuple):
    """One row that can be re-run."""

    measured: float
    """In the unit of its source."""
    scenario: Scenario | None
    """What is simulated; None where measured op times are replayed without a model."""
    predict: Callable[[], float]
    """Run it and return the prediction, in the unit of its source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A table of published measurements."""

    name: str
    title: str
    url: str
    file: str
    """In `workloads/measured`."""
    unit: Unit
    """Of measured and predicted values. Rates are turned into seconds of a step, so that one sign
    means one thing everywhere: above zero, the prediction is too slow or too large."""
    printed: str
    """What the source prints."""
    label: str
    """Format of a row's name, from its columns."""
    build: Callable[[Row], Case]
    """Raises `DescriptionError` with the reason why a row cannot be expressed."""
    kind: Kind = "predicted"
    together: tuple[str, ...] = ()
    """Columns that say alike in rows which describe the same run."""
    """`calibrated`: constants of the cost model may be fitted to its rows."""
    holds: Callable[[Row], bool] = bool
    """Whether a row of the file belongs to this source; all do unless a file serves several."""
    assumed: tuple[str, ...] = ()
    """Inputs that the source leaves unstated, and what was taken."""

    def rows(self) -> list[Row]:
        """Return its rows, in the order of the file."""
        path = catalog.root() / "workloads/measured" / self.file
        with path.open(encoding="utf-8", newline="") as file:
            return [row for row in csv.DictReader(file) if self.holds(row)]


class Outcome(NamedTuple):
    """A measured value beside its prediction."""

    label: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Signed: (predicted - measured) / measured."""
        return self.predicted / self.measured - 1


class Unexpressed(NamedTuple):
    """A row that no scenario can say, or that the simulator refuses."""

    label: str
    reason: str


class Report(NamedTuple):
    """All rows of a source."""

    source: Source
    outcomes: tuple[Outcome, ...]
    unexpressed: tuple[Unexpressed, ...]

    @property
    def accuracy(self) -> Accuracy | None:
        """Accuracy over the rows that were re-run; None without any."""
        return Accuracy.of(self.outcomes) if self.outcomes else None

    @property
    def ranking(self) -> float | None:
        """Spearman's rank correlation of predictions and measurements; None below three rows.

        1 where predictions put the rows in the measured order. Equal values share their mean rank.
        """
        if len(self.outcomes) < FEWEST_RANKED:
            return None
        measured = _ranks(np.array([o.measured for o in self.outcomes]))
        predicted = _ranks(np.array([o.predicted for o in self.outcomes]))
        if np.ptp(measured) == 0 or np.ptp(predicted) == 0:
            return None
        return float(np.corrcoef(measured, predicted)[0, 1])

    def reasons(self) -> dict[str, list[str]]:
        """Return the labels of the rows that cannot be expressed, by reason, most first."""
        groups: dict[str, list[str]] = {}
        for label, reason in self.unexpressed:
            groups.setdefault(reason, []).append(label)
        return dict(sorted(groups.items(), key=lambda group: -len(group[1])))


FEWEST_RANKED = 3
"""Rows whose order says something."""


def _ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the rank of each value; equal ones share their mean."""
    _, number, count = np.unique(values, return_inverse=True, return_counts=True)
    means: npt.NDArray[np.float64] = np.cumsum(count) - (count - 1) / 2
    return means[number]


def rerun(source: Source) -> Report:
    """Re-run every row of a source."""
    return report_of(source, [rerun_row(source, row) for row in source.rows()])


def rerun_row(source: Source, row: Row) -> Outcome | Unexpressed:
    """Re-run a row of a source."""
    label = source.label.format(**row)
    try:
        case = source.build(row)
        return Outcome(label, case.measured, case.predict())
    except DescriptionError as error:
        return Unexpressed(label, "; ".join(error.problems))


def report_of(source: Source, found: Iterable[Outcome | Unexpressed]) -> Report:
    """Return the report of a source's rows."""
    outcomes, unexpressed = [], []
    for one in found:
        if isinstance(one, Outcome):
            outcomes.append(one)
        else:
            unexpressed.append(one)
    return Report(source, tuple(outcomes), tuple(unexpressed))


def by_kind(reports: Iterable[Report], kind: Kind, unit: Unit) -> Accuracy | None:
    """Return the accuracy over all rows of sources of one kind and unit; None without any."""
    found = [
        o for r in reports if (r.source.kind, r.source.unit) == (kind, unit) for o in r.outcomes
    ]
    return Accuracy.of(found) if found else None


def document(reports: Sequence[Report]) -> dict[str, Any]:
    """Return reports as plain values for JSON."""
    return {"schema_version": 1, "sources": [_plain(report) for report in reports]}


def _plain(report: Report) -> dict[str, Any]:
    source, accuracy = report.source, report.accuracy
    return {
        **{k: getattr(source, k) for k in ("name", "title", "url", "kind", "unit", "printed")},
        "rows": len(report.outcomes) + len(report.unexpressed),
        "expressed": len(report.outcomes),
        "mape": accuracy and accuracy.mean,
        "bias": accuracy and accuracy.bias,
        "worst": accuracy and accuracy.worst,
        "rank_correlation": report.ranking,
        "cases": [{**o._asdict(), "error": o.error} for o in report.outcomes],
        "unexpressed": [u._asdict() for u in report.unexpressed],
        "assumed": list(source.assumed),
    }
