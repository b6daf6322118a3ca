"""Published measurements beside predictions, as text."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.report.collectives import Accuracy
from simulator.report.text import table
from simulator.validate.published import Kind, Report, Unit, by_kind

LISTED = 3
"""Rows that are named for each reason why rows cannot be expressed; the others are counted."""


def published_text(reports: Sequence[Report]) -> str:
    """Return every row of every source, worst first, what was left out, and the summary."""
    return "\n\n".join([*map(_source_text, reports), _unexpressed_text(reports), summary(reports)])


def _source_text(report: Report) -> str:
    source = report.source
    head = [
        f"{source.name}: {source.title}", f"  {source.url}",
        f"  prints {source.printed}; {source.kind}", *(f"  assumed: {a}" for a in source.assumed),
    ]  # fmt: skip
    if not report.outcomes:
        return "\n".join([*head, "  no row can be expressed"])
    rows = [["case", f"measured {source.unit}", f"predicted {source.unit}", "error"]]
    rows += [
        [o.label, f"{o.measured:.4g}", f"{o.predicted:.4g}", f"{o.error:+.1%}"]
        for o in sorted(report.outcomes, key=lambda o: -abs(o.error))
    ]
    return "\n".join([*head, table(rows)])


def _unexpressed_text(reports: Sequence[Report]) -> str:
    lines = ["rows that are not expressed:"]
    for report in reports:
        for reason, labels in report.reasons().items():
            named = "; ".join(dict.fromkeys(labels[:LISTED]))
            more = f"; and {len(labels) - LISTED} more" if len(labels) > LISTED else ""
            lines += [f"  {report.source.name}: {len(labels)}: {reason}", f"      {named}{more}"]
    return "\n".join(lines if lines[1:] else [*lines, "  none"])


def summary(reports: Sequence[Report]) -> str:
    """Return a line for each source, then one for each kind of time."""
    rows = [["source", "kind", "unit", "rows", "expressed", "MAPE", "bias", "worst", "ranking"]]
    for r in reports:
        total = len(r.outcomes) + len(r.unexpressed)
        ranking = "-" if r.ranking is None else f"{r.ranking:.2f}"
        rows.append([
            r.source.name, r.source.kind, r.source.unit, str(total), *_cells(r.accuracy), ranking,
        ])  # fmt: skip
    kinds: tuple[tuple[Kind, Unit], ...] = (("predicted", "s"), ("predicted", "GiB"))
    for kind, unit in kinds:
        overall = by_kind(reports, kind, unit)
        if overall and len(reports) > 1:
            rows.append([f"all {kind}", kind, unit, "", *_cells(overall), ""])
    notes = (
        "error: (predicted - measured) / measured, of seconds also where a source prints a rate",
        "ranking: Spearman's rank correlation of predictions and measurements",
    )
    return "\n".join([table(rows), *notes])


def _cells(accuracy: Accuracy | None) -> list[str]:
    if accuracy is None:
        return ["0", "-", "-", "-"]
    return [str(accuracy.rows), *(f"{v:.1%}" if i == 0 else f"{v:+.1%}"
            for i, v in enumerate(accuracy[1:]))]  # fmt: skip
