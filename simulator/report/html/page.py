"""One file that holds everything: style, scripts and data of a page, with nothing to fetch."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulator.errors import DescriptionError
from simulator.files import check_writable, write_whole
from simulator.program import ACTIONS
from simulator.report import palette
from simulator.report.html.charts import links_of, memory_of
from simulator.report.html.columns import packed
from simulator.report.html.density import BINS
from simulator.report.html.facts import FLOW_HEAD, facts
from simulator.report.html.ops import MOST_OPS, cost_table, ops_columns, ops_of

if TYPE_CHECKING:
    from simulator.report.result import Result

SUFFIXES = (".html", ".htm")
"""How the name of a page ends."""

STYLES = ("uplot/uPlot.min.css", "style.css", "timeline.css")
SCRIPTS = (
    "uplot/uPlot.iife.min.js", "words.js", "columns.js", "colours.js", "run.js", "view.js",
    "shares.js", "rows.js", "strips.js", "painter.js", "axis.js", "statistics.js", "follow.js",
    "tip.js", "inspector.js", "marks.js", "controls.js", "timeline.js", "overview.js",
    "search.js", "memory.js", "links.js", "summary.js", "toolbar.js", "main.js",
)  # fmt: skip
"""Files of a page in the order in which browsers run them."""

MOST_RUNS = 2


def save_html(
    results: Result | Sequence[Result], path: str | Path, *, names: Sequence[str] = ()
) -> None:
    """Write a page of one result, or of two side by side, that any browser opens offline.

    Args:
        results: a result, or two to compare; of two the second is set against the first.
        path: a file whose name ends in ``.html``.
        names: what the results are called, in place of their scenarios' names.

    Raises:
        DescriptionError: when the file cannot be written there, there are more than two results,
            or one has more ops than a page holds.
    """
    shown = list(results) if isinstance(results, Sequence) else [results]
    if not 1 <= len(shown) <= MOST_RUNS:
        raise DescriptionError(f"a page shows one result or two side by side, not {len(shown)}")
    check_writable(Path(path), SUFFIXES)
    text = page_text(shown, names)
    write_whole(Path(path), lambda to: _write(to, text))


def _write(path: Path, text: str) -> None:
    path.write_bytes(text.encode("utf-8"))


def page_text(results: Sequence[Result], names: Sequence[str] = ()) -> str:
    """Return the text of a page; the same results give the same text."""
    runs = [run_data(result, MOST_OPS // len(results)) for result in results]
    for run, name in zip(runs, names, strict=bool(names)):
        run["about"]["name"] = name
    runs[0]["colours"] = palette.COLOURS
    title = " against ".join(run["about"]["name"] for run in runs)
    parts = {
        "title": html.escape(title),
        "style": "\n".join(map(_asset, STYLES)),
        "data": "\n".join(f'<script type="application/json">{_json(run)}</script>' for run in runs),
        "scripts": "\n".join(f"<script>\n{_script(name)}</script>" for name in SCRIPTS),
    }
    text = _asset("page.html")
    head, *rest = text.split("{{")
    pieces = [head]
    for piece in rest:
        name, _, after = piece.partition("}}")
        pieces += [parts[name], after]
    return "".join(pieces)


def run_data(result: Result, most: int = MOST_OPS) -> dict[str, Any]:
    """Return what a page holds of a result: what it says, and its packed columns.

    Args:
        result: a program that has run.
        most: ops that may be kept one by one; ranks beyond them are kept as sums.
    """
    ops = ops_of(result, most)
    memory, memory_columns = memory_of(result)
    links, link_columns = links_of(result)
    about = facts(result) | {
        "kinds": ops.kinds,
        "tracks": ops.tracks,
        "actions": ACTIONS,
        "costs": cost_table(result.tiled),
        "exactSheets": ops.exact,
        "densityBins": BINS,
        "memory": memory,
        "links": links,
        "flowHead": FLOW_HEAD,
        "kept": _kept(result, ops.exact, ops.sheet_of),
    }
    columns = packed(ops_columns(result, ops) | memory_columns | link_columns)
    return {"about": about, "head": columns.head, "columns": columns.text}


def _kept(result: Result, exact: int, sheet_of: Any) -> str:
    """Say which ranks are kept as sums only, if any."""
    count = int((sheet_of < exact).sum())
    total = result.tiled.num_ranks
    if count == total:
        return ""
    return (
        f"{count:,} of {total:,} ranks are kept op by op, and the others, whose times differ, as "
        f"sums over {BINS} pieces of the run: they can be seen as rows of ranks, not searched"
    )


def _json(value: Any) -> str:
    """Return JSON that may stand in a script of a page."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _script(name: str) -> str:
    """Return a script, with the licence above it where it is another's."""
    folder, _, _ = name.rpartition("/")
    return f"/*\n{_asset(f'{folder}/LICENSE')}*/\n{_asset(name)}" if folder else _asset(name)


def _asset(name: str) -> str:
    return files("simulator.report.html").joinpath("assets", name).read_text(encoding="utf-8")
