"""Figures of the network: how busy links are over time, and the fabric as a graph."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch

from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.hardware.fabric import Fabric, build
from simulator.hardware.placement import devices
from simulator.lower.mesh import Mesh
from simulator.report import palette
from simulator.report.fabric_layout import Drawing, lay_out, wire
from simulator.report.palette import COLOURS, FAINT, INK, text_width
from simulator.units import TICKS_PER_SECOND, format_rate

if TYPE_CHECKING:
    import networkx

    from simulator.report.links import LinkUse
    from simulator.report.result import Result

NOT_SHARED = "the figure links needs flows that share links: give --set run.network=fluid"

MAX_LINKS = 24
"""Rows of the heat map."""

HEAT = LinearSegmentedColormap.from_list(
    "heat", ["#f3f3f3", "#b5d2ea", "#56a0d3", "#0b5a9c", "#061a3a"]
)
"""Use of links, light to dark in one hue, so that it reads in grey and to any eye."""
LINES = LinearSegmentedColormap.from_list("lines", HEAT(np.linspace(0.15, 1.0, 64)))
"""The same without the shades that a line would vanish in."""

NEUTRAL = "#8a8a8a"
BOXES = {"gpu": "#ffffff", "switch": "#e4e4e4", "nic": "#fbf3d0", "trunk": "#e4e4e4"}
TINTS = (
    "#bfe0f5", "#f7d9a0", "#b4e3cf", "#efc4dc", "#f7f0a1", "#f3b99b", "#c9c5ee", "#d9d2c0",
)  # fmt: skip
"""Of devices whose ranks belong together: pale, so that their numbers can be read."""
LOWER = 0.3
"""Inches that a time axis would take."""
WIDEST = 5.0
"""Points of the line of the fastest link; others by the root of their rate."""


def links(result: Result, path: str | Path | None = None) -> Figure:
    """Draw how busy the busiest links are during the last step, a row a link.

    Raises:
        DescriptionError: when flows did not share links, or the figure cannot be saved.
    """
    palette.check_path(path)
    if result.moves is None:
        raise DescriptionError(NOT_SHARED)
    use = result.links
    rows = use.hottest(MAX_LINKS)
    rows = rows[use.bytes[rows] >= 1]
    if not len(rows):
        raise DescriptionError("the figure links has nothing to show: no link carries a byte")
    names = [use.traffic.names[link] for link in rows.tolist()]
    active, total = int((use.bytes >= 1).sum()), len(use.traffic.names)
    which = "all" if active == len(rows) else f"the {len(rows)} busiest of"
    note = f"share of each link's capacity; {which} {active} links in use, {total} in all"
    begin, end = use.window
    with palette.style():
        figure, (ax,) = palette.sheet(
            7.2, [max(1.3, 0.21 * len(rows))],
            titles=palette.titles_of(result, note),
            handles=[], labels=names, right=1.75,
        )  # fmt: skip
        unit = palette.time_axis(ax, begin, end, since_last_step=begin > 0)
        palette.row_axis(ax, names, 0.5)
        extent = (0.0, (end - begin) / unit, float(len(rows)), 0.0)
        image = ax.imshow(
            link_shares(use)[rows], cmap=HEAT, vmin=0, vmax=100, extent=extent, aspect="auto",
            interpolation="nearest", gid="use",
        )  # fmt: skip
        ax.hlines(np.arange(1, len(rows)), 0, extent[1], color="white", lw=0.8)
        for row, mean in enumerate(use.utilisation[rows].tolist()):
            ax.text(1.075, row + 0.5, f"{mean:.1%}", ha="right", va="center_baseline",
                    transform=ax.get_yaxis_transform())  # fmt: skip
        ax.text(1.075, -0.12, "mean", ha="right", va="bottom", color=FAINT,
                transform=ax.get_yaxis_transform())  # fmt: skip
        _colour_bar(figure, ax, image, "use of the link (%)", 0.85)
    return palette.save(figure, path)


def link_shares(use: LinkUse) -> palette.Float64:
    """Return (links, bins) the percent of each link's capacity that is used in each bin."""
    begin, end = use.window
    seconds = max(end - begin, 1) / TICKS_PER_SECOND / use.by_bin.shape[1]
    room = (use.traffic.capacity * seconds)[:, None]
    share: palette.Float64 = np.divide(
        100 * use.by_bin, room, out=np.zeros_like(use.by_bin), where=room > 0
    )
    return share


def _colour_bar(
    figure: Figure, ax: Axes, shades: ScalarMappable, label: str, inches: float
) -> None:
    """Add a colour bar some inches right of an axis."""
    box, (width, height) = ax.get_position(), figure.get_size_inches()
    tall = min(box.height, 2.6 / height)
    where = (box.x1 + inches / width, box.y1 - tall, 0.13 / width, tall)
    bar = figure.colorbar(shades, cax=figure.add_axes(where))
    ticks = np.linspace(0, shades.norm.vmax or 100.0, 6).tolist()
    bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    bar.set_label(label)
    bar.outline.set_linewidth(0.5)


def topology(result: Result, path: str | Path | None = None) -> Figure:
    """Draw the fabric of the cluster as a graph: lines as wide as links are fast.

    Where flows shared links, colours tell how busy the busier direction of each was.

    Raises:
        DescriptionError: for a bare schedule, or when the figure cannot be saved.
    """
    if result.scenario is None:
        raise DescriptionError("the figure topology needs a cluster, and a schedule has none")
    return fabric_figure(result.scenario, path, result)


def fabric_figure(
    s: Scenario, path: str | Path | None = None, result: Result | None = None
) -> Figure:
    """Draw the fabric of a scenario with its ranks; of a result, with the use of its links.

    Raises:
        DescriptionError: when the figure cannot be saved.
    """
    palette.check_path(path)
    fabric = build(s.cluster, devices(s.plan, s.cluster))
    graph = fabric.graph()
    drawing = lay_out(fabric, graph)
    rates = wires_drawn(drawing, graph)
    use = link_means(result, rates) if result else {}
    together, tints = device_tints(s, drawing)
    left, right, bottom, top = drawing.extent()
    heights = [y for pair in rates for line in wire(drawing, *pair) for _, y in line]
    bottom, top = min([bottom, *heights]), max([top, *heights])
    with palette.style():
        room = max(right - left + 0.5, 5.5)
        figure, (ax,) = palette.sheet(
            room, [top - bottom + 0.35 - LOWER], titles=_titles(s, result, drawing, together),
            handles=_widths(rates, fabric, drawing), labels=[*drawing.rows.values(), "0"],
            right=1.3 if use else 0.25,
        )  # fmt: skip
        middle = (left + right) / 2
        ax.set(xlim=(middle - room / 2, middle + room / 2), ylim=(bottom - 0.15, top + 0.2))
        _bare(figure, ax, drawing.rows)
        most = _round_up(max(use.values(), default=1.0))
        shades = ScalarMappable(Normalize(0, most), LINES)
        colours = {pair: LINES(mean / most) for pair, mean in use.items()}
        _draw_wires(ax, drawing, rates, colours)
        _draw_failed(ax, drawing, fabric)
        _draw_boxes(ax, drawing, tints)
        if use:
            _colour_bar(figure, ax, shades, "mean use in the step (%)", 0.2)
    return palette.save(figure, path)


def _bare(figure: Figure, ax: Axes, rows: dict[float, str]) -> None:
    """Leave only names of rows around an axis, and let it use the room of a time axis."""
    ax.set(yticks=list(rows), yticklabels=list(rows.values()), xticks=[])
    ax.tick_params(axis="y", length=0)
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    box, tall = ax.get_position(), LOWER / figure.get_size_inches()[1]
    ax.set_position((box.x0, box.y0 - tall, box.width, box.height + tall))


def wires_drawn(drawing: Drawing, graph: networkx.DiGraph[str]) -> dict[tuple[str, str], float]:
    """Return the faster direction's bytes/s of each wire between boxes of a drawing."""
    rates: dict[tuple[str, str], float] = {}
    for a in drawing.boxes:
        for b in graph.successors(a):
            if b in drawing.boxes:
                pair = (min(a, b), max(a, b))
                rates[pair] = max(rates.get(pair, 0.0), graph[a][b]["capacity"])
    return rates


def link_means(result: Result, rates: dict[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    """Return percent of the step's capacity used on the busier direction of each wire."""
    if result.moves is None:
        return {}
    shares = link_shares(result.links).mean(axis=1).tolist()
    mean = dict(zip(result.moves.traffic.names, shares, strict=True))
    return {(a, b): max(mean.get(f"{a}>{b}", 0.0), mean.get(f"{b}>{a}", 0.0)) for a, b in rates}


def _round_up(value: float) -> float:
    """Return the next of 1, 2, 5, 10, 20, 50 and 100."""
    return next((float(x) for x in (1, 2, 5, 10, 20, 50) if value <= x), 100.0)


def device_tints(s: Scenario, drawing: Drawing) -> tuple[str, dict[str, str]]:
    """Return what the drawn ranks of one tint have in common, and the tint of each device.

    That is the innermost of group, stage and replica which there are several of, but no more than
    `TINTS`; nothing where there is none.
    """
    mesh = Mesh.of(s.plan)
    ranks = {name: int(b.label) for name, b in drawing.boxes.items() if b.kind == "gpu" and b.label}
    at = {name: mesh.coordinates(rank) for name, rank in ranks.items()}
    keys = {
        "tp group": {
            name: (a["dp"], a["pp"] * mesh.cp + a["cp"]) for name, a in at.items() if mesh.tp > 1
        },
        "stage": {name: (0, a["pp"]) for name, a in at.items()},
        "replica": {name: (a["dp"], 0) for name, a in at.items() if mesh.tp * mesh.pp > 1},
    }
    for what, key in keys.items():
        order = sorted(set(key.values()))
        if 1 < len(order) <= len(TINTS):
            return what, {name: TINTS[order.index(k)] for name, k in key.items()}
    return "", {}


def _titles(s: Scenario, result: Result | None, drawing: Drawing, together: str) -> list[str]:
    cluster = s.cluster
    what = f"{cluster.num_nodes} x {cluster.node.name} ({cluster.node.layout})"
    what += f", network {cluster.network.layout}" if cluster.num_nodes > 1 else ""
    left_out = f"left out: {', '.join(drawing.left_out)}" if drawing.left_out else ""
    colour = "colour of lines: the busier direction" if result and result.moves else ""
    each = f", a colour for each {together}" if together else ""
    ranks = f"numbers in devices are ranks{each}"
    placed = "" if s.plan.placement == "block" else f"placement {s.plan.placement_name}"
    notes = (what, placed, ranks, colour, left_out)
    return [palette.titles_of(result)[0] if result else s.name, "; ".join(filter(None, notes))]


def _width(drawing: Drawing, rate: float, fastest: float) -> float:
    widest = WIDEST * (0.4 if drawing.dense else 1.0)
    return max(0.8, widest * float(np.sqrt(rate / fastest)))


def _widths(rates: dict[tuple[str, str], float], fabric: Fabric, drawing: Drawing) -> list[Line2D]:
    """Return the legend's lines: some rates, and failed links where there are any."""
    every: list[float] = []
    for rate in sorted(rates.values(), reverse=True):
        if not every or rate < 0.95 * every[-1]:  # lines that look alike have one entry
            every.append(rate)
    some = [every[i] for i in sorted({round(x) for x in np.linspace(0, len(every) - 1, 5)})]
    handles = [
        Line2D([], [], color=NEUTRAL, lw=_width(drawing, rate, every[0]),
               label=f"{format_rate(rate, 'B')} a direction")
        for rate in (some if every else [])
    ]  # fmt: skip
    if _failed(drawing, fabric):
        handles.append(Line2D([], [], color=COLOURS["capacity"], ls=":", lw=1.6, label="failed"))
    return handles


def _failed(drawing: Drawing, fabric: Fabric) -> list[tuple[str, str]]:
    names = [fabric.names[link].split(">") for link in np.flatnonzero(fabric.capacity == 0)]
    return sorted({(min(n), max(n)) for n in names if set(n) <= set(drawing.boxes)})


def _draw_wires(
    ax: Axes, drawing: Drawing, rates: dict[tuple[str, str], float],
    colours: dict[tuple[str, str], Any],
) -> None:  # fmt: skip
    """Draw wires, each with a white rim that tells it from what it crosses."""
    fastest = max(rates.values(), default=1.0)
    for z, pair in enumerate(sorted(rates, key=lambda pair: _depth(drawing, pair), reverse=True)):
        lines, width = wire(drawing, *pair), _width(drawing, rates[pair], fastest)
        order = 4.0 if _passes(drawing, pair) else 1.0
        for rim in (True, False):
            look = {"color": "white" if rim else colours.get(pair, NEUTRAL)}
            look |= {"linewidths": width + 1.6 * rim, "gid": None if rim else "wire"}
            ax.add_collection(
                LineCollection(lines, zorder=order + z / 10000, **look), autolim=False
            )


def _depth(drawing: Drawing, pair: tuple[str, str]) -> tuple[int, tuple[str, str]]:
    """Return how far back a wire lies; in a grid, what lies in front hides what lies behind."""
    places = [drawing.place.get(name, (0,)) for name in pair]
    return min(place[-3] if len(place) > 2 else 0 for place in places), pair


def _passes(drawing: Drawing, pair: tuple[str, str]) -> bool:
    """Return whether a wire leads past the switches of its node."""
    ends = [drawing.boxes[name] for name in pair]
    low, high = sorted(end.y for end in ends)
    node = pair[0].split("/")[0] + "/"
    return any(
        box.kind == "switch" and low < box.y < high
        for name, box in drawing.boxes.items()
        if name.startswith(node)
    )


def _draw_failed(ax: Axes, drawing: Drawing, fabric: Fabric) -> None:
    for pair in _failed(drawing, fabric):
        for line in wire(drawing, *pair):
            x, y = zip(*line, strict=True)
            ax.plot(x, y, color=COLOURS["capacity"], ls=":", lw=1.6, zorder=4.5, gid="failed")


def _draw_boxes(ax: Axes, drawing: Drawing, tints: Mapping[str, str]) -> None:
    """Draw vertices with their labels, and what is written below nodes."""
    for name, box in drawing.boxes.items():
        z = 3.0 if box.kind == "switch" else 5.0
        colour = BOXES[box.kind] if box.label or box.kind != "gpu" else COLOURS["drain"]
        colour = tints.get(name, colour)
        ax.add_patch(FancyBboxPatch(
            (box.x - box.width / 2 + 0.03, box.y - box.height / 2 + 0.03), box.width - 0.06,
            box.height - 0.06, boxstyle="round,pad=0.03", facecolor=colour, edgecolor=INK,
            linewidth=0.7, zorder=z, gid=box.kind,
        ))  # fmt: skip
        fits = [s for s in (8.0, 7.0, 6.0) if text_width(box.label, s) / 72 <= box.width - 0.02]
        if box.label and fits:
            plate = {"boxstyle": "square,pad=0.15", "facecolor": colour, "edgecolor": "none"}
            ax.text(box.x, box.y, box.label, size=fits[0], ha="center", va="center_baseline",
                    zorder=6, bbox=plate if box.kind == "switch" else None)  # fmt: skip
    for x, y, text in drawing.captions:
        ax.text(x, y, text, ha="center", va="center", color=FAINT, zorder=6)
