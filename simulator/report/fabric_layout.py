"""Where the parts of a fabric lie in its figure: devices below, what joins them above.

All lengths are inches; x grows to the right, y upwards.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from simulator.hardware.fabric import Fabric

if TYPE_CHECKING:
    import networkx

Point = tuple[float, float]

MAX_NODES = 4
MAX_DEVICES = 16
"""Devices drawn of one node."""
MAX_EXTENT = 8
"""Devices drawn along a dimension of a grid."""

STEP = 0.37
"""From one device of a row to the next."""
BOX = 0.26
BAR = 0.22
"""Height of a switch."""
RISE = 0.75
"""From one row to the next."""
BESIDE = 0.055
"""How far from the middle of a box two wires that rise side by side lie."""

CUBE = 1.0
"""Side of one of the two quads of a hybrid cube mesh."""


class Box(NamedTuple):
    """A vertex: its middle, its size, what is written in it, and what it is."""

    x: float
    y: float
    width: float
    height: float
    label: str
    kind: str
    """`gpu`, `switch`, `nic` or `trunk`."""


@dataclass
class Drawing:
    """Boxes by the name of their vertex, and what is written beside them."""

    boxes: dict[str, Box] = field(default_factory=dict)
    place: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Index in the grid, of devices that form one."""
    along: list[Point] = field(default_factory=list)
    """From a device of the grid to the next, by dimension."""
    rows: dict[float, str] = field(default_factory=dict)
    """What lies at some heights."""
    captions: list[tuple[float, float, str]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    dense: bool = False
    """Whether wires cross so often that they must be thin."""

    def extent(self) -> tuple[float, float, float, float]:
        """Return left, right, bottom and top of everything."""
        every = list(self.boxes.values())
        low = min(b.y - b.height / 2 for b in every)
        return (
            min(b.x - b.width / 2 for b in every),
            max(b.x + b.width / 2 for b in every),
            min([low, *(y - 0.1 for _, y, _ in self.captions)]),
            max(b.y + b.height / 2 for b in every),
        )


def lay_out(fabric: Fabric, graph: networkx.DiGraph[str]) -> Drawing:
    """Return where everything lies; of many nodes, the first few with the switches above them."""
    cluster, drawing = fabric.cluster, Drawing()
    if cluster.network.layout == "torus":
        per, shape = cluster.ranks_per_node, cluster.network.shape
        names = {i: f"node{i // per}/gpu{i % per}" for i in range(cluster.world_size)}
        _grid(drawing, shape, names, (0.0, 0.0), _ranks(fabric, cluster.num_nodes))
        _count_out(drawing, cluster.world_size, len(drawing.boxes), "devices")
        drawing.rows = {}
        return drawing
    devices = min(cluster.node.num_devices, MAX_DEVICES)
    nodes = min(cluster.num_nodes, max(1, min(MAX_NODES, 2 * MAX_DEVICES // devices)))
    left = 0.0
    for node in range(nodes):
        left = _node(drawing, fabric, node, left) + 0.4
    _count_out(drawing, cluster.num_nodes, nodes, "nodes")
    shown = sum(box.kind == "gpu" for box in drawing.boxes.values()) // nodes
    if shown < cluster.node.num_devices:
        total = cluster.node.num_devices
        drawing.left_out.append(f"{total - shown} of {total} devices of a node")
    if cluster.num_nodes > 1:
        _trunks(drawing, graph, fabric)
    else:
        drawing.left_out.append("adapters, which join nothing")
    return drawing


def _count_out(drawing: Drawing, total: int, shown: int, what: str) -> None:
    if shown < total:
        drawing.left_out.append(f"{total - shown} of {total} {what}")


def _ranks(fabric: Fabric, nodes: int) -> dict[str, str]:
    """Return the rank on each device of the first nodes."""
    used = fabric.cluster.ranks_per_node
    ranks = np.argsort(fabric.slot)[: nodes * used].tolist()
    return {f"node{i // used}/gpu{i % used}": str(rank) for i, rank in enumerate(ranks)}


def _node(drawing: Drawing, fabric: Fabric, node: int, left: float) -> float:
    """Add one node that begins at `left`; return where it ends."""
    cluster, name = fabric.cluster, f"node{node}"
    ranks = _ranks(fabric, node + 1)
    layout, count = cluster.node.layout, cluster.node.num_devices
    before = set(drawing.boxes)
    if layout in ("mesh", "torus"):
        names = {i: f"{name}/gpu{i}" for i in range(count)}
        _grid(drawing, cluster.node.shape, names, (left, 0.0), ranks)
    else:
        ring = layout == "full-mesh" and cluster.num_nodes > 1  # its adapters need room above
        spots = SPOTS.get("" if ring else layout, _in_a_row)(min(count, MAX_DEVICES))
        for i, (x, y) in enumerate(spots):
            label = ranks.get(f"{name}/gpu{i}", "")
            drawing.boxes[f"{name}/gpu{i}"] = Box(left + x, y, BOX, BOX, label, "gpu")
        drawing.dense = layout == "full-mesh"
    mine = {k: box for k, box in drawing.boxes.items() if k not in before}
    start, right = left - STEP / 2, max(b.x for b in mine.values()) + STEP / 2
    top = max(b.y for b in mine.values())
    if top == 0.0:
        drawing.rows[0.0] = "devices"
    top = _switches(drawing, fabric, name, mine, top)
    if cluster.num_nodes > 1:
        _adapters(drawing, fabric, name, (start, right, top + RISE), len(mine))
    lowest = min(b.y for b in mine.values()) - 0.36 - _hang(fabric, len(mine))
    drawing.captions.append(((start + right) / 2, lowest, name))
    return right


def _hang(fabric: Fabric, devices: int) -> float:
    """Return how far wires between devices of one row hang below it."""
    node = fabric.cluster.node
    ends = [edge for edge in node.edges if edge.a[:3] == edge.b[:3] == "gpu"]
    spans = [abs(int(e.a[3:]) - int(e.b[3:])) for e in ends]
    if node.layout == "full-mesh" and fabric.cluster.num_nodes > 1:
        spans = [devices - 1]
    longest = min(max(spans, default=0), devices - 1)
    return bulge(STEP * longest) / 2 if longest > 1 else 0.0


def _in_a_row(count: int) -> list[Point]:
    return [(STEP * i, 0.0) for i in range(count)]


def _cube(count: int) -> list[Point]:
    """Two quads side by side, sheared so that no wire runs through a device."""
    quad = [(0.0, CUBE), (CUBE, CUBE), (1.25 * CUBE, 0.0), (0.25 * CUBE, 0.0)]
    return [*quad, *((x + 1.8 * CUBE, y + 0.4 * CUBE) for x, y in quad)][:count]


def _ring(count: int) -> list[Point]:
    """Corners of a regular polygon."""
    radius = max(0.7, STEP * 1.4 * count / (2 * math.pi))
    turns = [math.pi * (1 - 2 * (i + 0.5) / count) for i in range(count)]
    low = min(math.cos(t) for t in turns)
    return [(radius * (math.sin(t) + 1), radius * (math.cos(t) - low)) for t in turns]


SPOTS = {"hybrid-cube-mesh": _cube, "full-mesh": _ring}
"""Where devices lie by the layout of their node; elsewhere in a row."""


def _grid(
    drawing: Drawing, shape: Sequence[int], names: Mapping[int, str], at: Point,
    ranks: Mapping[str, str],
) -> None:  # fmt: skip
    """Add a grid: the last dimension to the right, the one before down, a third to the back."""
    deep = len(shape) > 2
    wide = 1.05 if deep and shape[-3] > 1 else 0.62
    axes = [(wide, 0.0), (0.0, -wide), (0.3, 0.26)]
    drawing.dense = deep
    drawing.along = [*reversed(axes[: len(shape)])]
    most = [1] * max(0, len(shape) - 3) + [MAX_NODES] * deep + [MAX_EXTENT] * min(2, len(shape))
    rows = min(shape[-2], MAX_EXTENT) if len(shape) > 1 else 1
    for place in np.ndindex(*(min(n, limit) for n, limit in zip(shape, most, strict=True))):
        number = int(np.ravel_multi_index(place, tuple(shape)))
        name, x, y = names[number], at[0], at[1] + (rows - 1) * wide
        for step, (dx, dy) in zip(reversed(place), axes, strict=False):
            x, y = x + step * dx, y + step * dy
        label = ranks.get(name, "")
        drawing.boxes[name] = Box(x, y, max(0.24, 0.05 + 0.06 * len(label)), 0.2, label, "gpu")
        drawing.place[name] = place


def _inner(fabric: Fabric) -> Iterator[list[tuple[str, list[str]]]]:
    """Yield the switches inside a node from the lowest row, each with what it joins below."""
    wires, names = fabric.node_wires, fabric.inside
    near: dict[str, set[str]] = {name: set() for name in names}
    for a, b in zip(wires.tail.tolist(), wires.head.tolist(), strict=True):
        near[names[a]].add(names[b])
    inner = [n for n in names if not re.fullmatch(r"(gpu|nic)\d+", n)]
    below = [n for n in names if re.fullmatch(r"gpu\d+", n)]
    while inner:
        row = [n for n in inner if near[n] & set(below)] or inner
        yield [(n, [m for m in below if m in near[n]]) for n in row]
        inner = [n for n in inner if n not in row]
        below = row


def _switches(
    drawing: Drawing, fabric: Fabric, node: str, devices: dict[str, Box], top: float
) -> float:
    """Add the switches inside a node, each above what it joins; return their highest row."""
    y, low = top, min(b.x - b.width / 2 for b in devices.values())
    high = max(b.x + b.width / 2 for b in devices.values())
    for row in _inner(fabric):
        y += RISE
        spans = []
        for name, below in row:
            under = [drawing.boxes[f"{node}/{b}"] for b in below if f"{node}/{b}" in drawing.boxes]
            ends = [edge for b in under for edge in (b.x - b.width / 2, b.x + b.width / 2)]
            spans.append((min(ends, default=low), max(ends, default=high), name))
        apart = all(a[1] <= b[0] for a, b in zip(sorted(spans), sorted(spans)[1:], strict=False))
        for i, (a, b, name) in enumerate(spans):
            if not apart:
                width = (high - low) / len(spans)
                a, b = low + i * width + 0.04, low + (i + 1) * width - 0.04
            label = name if len(row) > 1 else ""  # wires may cross it: its name stands beside
            drawing.boxes[f"{node}/{name}"] = Box((a + b) / 2, y, b - a, BAR, label, "switch")
        drawing.rows[y] = "switches" if len(row) > 1 else row[0][0]
    return y


def _adapters(
    drawing: Drawing, fabric: Fabric, node: str, at: tuple[float, float, float], devices: int
) -> None:  # fmt: skip
    """Spread the adapters of the drawn devices over their node, or over the switch of each."""
    start, right, y = at
    total, count = fabric.cluster.node.nic.count, fabric.cluster.node.num_devices
    shown = min(total, max(1, math.ceil(total * devices / count)))
    groups: dict[str, list[str]] = {}
    ends = [fabric.node_wires.tail.tolist(), fabric.node_wires.head.tolist()]
    near = {fabric.inside[a]: fabric.inside[b] for a, b in zip(*ends, strict=True)}
    for j in range(shown):
        switch = f"{node}/{near.get(f'nic{j}')}"
        above = switch in drawing.boxes and drawing.boxes[switch].kind == "switch"
        groups.setdefault(switch if above else "", []).append(f"nic{j}")
    for switch, names in groups.items():
        low, wide = start, right - start
        if switch:  # not above its middle, where its own wire rises
            box = drawing.boxes[switch]
            low, wide = box.x - box.width / 2, box.width
        shift = 0.75 if switch and box.label and len(names) % 2 else 0.5
        for i, name in enumerate(names):
            x, width = low + (i + shift) * wide / len(names), min(BOX, 0.9 * wide / len(names))
            drawing.boxes[f"{node}/{name}"] = Box(x, y, width, 0.2, name[3:], "nic")
    drawing.rows[y] = "adapters"


def _trunks(drawing: Drawing, graph: networkx.DiGraph[str], fabric: Fabric) -> None:
    """Add the switches that lie above the drawn adapters, a row for each tier."""
    tiers = _tiers(graph, set(fabric.trunks.names))
    order = {name: i for i, name in enumerate(fabric.trunks.names)}
    row = [name for name, box in drawing.boxes.items() if box.kind == "nic"]
    left, right, _, y = drawing.extent()
    y -= 0.1
    for tier in range(1, max(tiers.values(), default=0) + 1):
        above = {n for name in row for n in graph.successors(name) if tiers.get(n) == tier}
        row = sorted(above, key=order.__getitem__)
        if not row:
            return
        y += RISE + (0.5 if len(row) > 1 else 0.0)
        widest = 0.12 + 0.068 * max(map(len, row))
        fits = max(1, int((right - left) / (widest + 0.1)))
        kind = re.sub(r".*/|\d+$", "", row[0])
        total = sum(t == tier for t in tiers.values())
        row = row[:fits]
        if len(row) < total:
            drawing.left_out.append(f"{total - len(row)} of {total} {kind} switches")
        step = (right - left) / len(row)
        for i, name in enumerate(row):
            width = right - left if len(row) == 1 else widest
            box = Box(left + (i + 0.5) * step, y, width, BAR, name, "trunk")
            drawing.boxes[name] = box
        drawing.rows[y] = "switches" if len(row) > 1 else kind


def _tiers(graph: networkx.DiGraph[str], switches: set[str]) -> dict[str, int]:
    """Return how many links each switch of the network is away from the nearest adapter."""
    tiers: dict[str, int] = {}
    found = {n for n in switches if any(m not in switches for m in graph.predecessors(n))}
    while found:
        tier = 1 + max(tiers.values(), default=0)
        tiers.update(dict.fromkeys(found, tier))
        found = {m for n in found for m in graph.successors(n) if m in switches} - set(tiers)
    return tiers


def bulge(distance: float) -> float:
    """Return how far off the line a bent wire's control point lies."""
    return min(0.2 + 0.5 * distance, 1.8)


def wire(drawing: Drawing, a: str, b: str) -> list[list[Point]]:
    """Return the lines of a wire: one, or two stubs where a grid wraps around."""
    one, two = sorted((drawing.boxes[a], drawing.boxes[b]), key=lambda box: (box.y, box.x))
    if a in drawing.place and b in drawing.place:
        return _grid_wire(drawing, a, b)
    if one.y == two.y and one.kind == two.kind:
        return [_level(drawing, one, two)]
    if one.y == two.y or {one.kind, two.kind} == {"gpu"}:
        return [[(one.x, one.y), (two.x, two.y)]]
    return [_rising(one, two)]


def _rising(low: Box, high: Box) -> list[Point]:
    """Lead straight up where a box lies below a wide one, else from middle to middle."""
    foot, head = (low.x, low.y), (high.x, high.y)
    if high.width > 2 * BOX and low.width <= high.width and high.kind != "nic":
        inside = abs(low.x - high.x) <= high.width / 2
        side = BESIDE if low.kind == "gpu" and high.kind == "switch" else 0.0
        if inside and (high.kind == "switch" or high.width > 2):
            return [(low.x - side, low.y), (low.x - side, high.y)]
    if low.kind == "switch" and high.kind == "nic" and abs(low.x - high.x) < low.width / 2:
        return [(high.x, low.y), (high.x, high.y)]
    if low.kind == "gpu" and high.kind == "nic":
        return [(foot[0] + BESIDE, foot[1]), (head[0] + BESIDE, head[1])]
    return [foot, head]


def _level(drawing: Drawing, one: Box, two: Box) -> list[Point]:
    """Join neighbours in a row straight, others by a curve: below devices, above switches."""
    between = any(b.y == one.y and one.x < b.x < two.x for b in drawing.boxes.values())
    if not between:
        return [(one.x, one.y), (two.x, two.y)]
    sign = -1.0 if one.kind == "gpu" else 1.0
    tip = one.y + sign * bulge(two.x - one.x)
    turns = [i / 24 for i in range(25)]
    return [
        (one.x + (two.x - one.x) * t, (1 - 2 * t * (1 - t)) * one.y + 2 * t * (1 - t) * tip)
        for t in turns
    ]


def _grid_wire(drawing: Drawing, a: str, b: str) -> list[list[Point]]:
    one, two = (drawing.boxes[name] for name in (a, b))
    steps = np.subtract(drawing.place[b], drawing.place[a])
    axis = int(np.abs(steps).argmax())
    if abs(steps[axis]) == 1:
        return [[(one.x, one.y), (two.x, two.y)]]
    dx, dy = (0.5 * np.sign(steps[axis]) * v for v in drawing.along[axis - len(steps)])
    long = max(math.hypot(dx, dy) / 0.27, 1.0)
    dx, dy = dx / long, dy / long
    return [[(one.x, one.y), (one.x - dx, one.y - dy)], [(two.x, two.y), (two.x + dx, two.y + dy)]]
