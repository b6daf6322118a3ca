"""The text of ``nvidia-smi topo -m`` as the layout of a node.

The matrix says how each pair of devices and adapters is joined: NV# (that many NVLinks), PIX or PXB
(below one PCIe switch), PHB or NODE (over the host bridges of one socket), SYS (over two sockets).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

from simulator.describe.cluster import Node
from simulator.describe.network import Edge
from simulator.errors import DescriptionError

NEARNESS = {"PIX": 0, "PXB": 1, "PHB": 2, "NODE": 3, "SYS": 4}
"""PCIe relations from near to far."""
_CELL = re.compile(r"X|NV[1-9]\d*|" + "|".join(NEARNESS))
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")  # the header is underlined on a terminal
_LEGEND = re.compile(r"\s*(NIC\d+):\s*(\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTopology:
    """How one node is joined, without its rates."""

    layout: Literal["switch", "graph"]
    """`switch` where every pair of more than two devices has the same number of NVLinks."""
    num_devices: int
    nvlinks: int
    """NVLinks of a device; the most of any."""
    adapters: tuple[str, ...]
    """The compute network's adapters in the order of their nearest devices: those below a PCIe
    switch with a device, or all where none is."""
    edges: tuple[Edge, ...]
    """Of `graph`; those with a count stand for NVLinks."""

    def node(
        self, base: Node, *, nvlink: float, pcie: float | None = None, socket: float | None = None
    ) -> Node:
        """Return a node with this layout and the parts of another.

        Args:
            base: gives the device, latencies, efficiencies and the rate of an adapter.
            nvlink: bytes/s of one NVLink per direction.
            pcie: bytes/s of a device's PCIe slot; `nvlink` when absent.
            socket: bytes/s between two sockets; `pcie` when absent.
        """
        pcie = pcie or nvlink
        rates = {"gpu": pcie, "pcie": pcie, "cpu": socket or pcie}
        switched = self.layout == "switch"
        link = replace(
            base.link,
            bandwidth=nvlink * self.nvlinks if self.nvlinks else pcie,
            pair_bandwidth=nvlink * self.nvlinks if switched else nvlink,
        )
        edges = tuple(
            e if _kind(e.b) in ("gpu", "nic") else replace(e, bandwidth=rates[_kind(e.a)])
            for e in self.edges
        )
        return replace(
            base, layout=self.layout, num_devices=self.num_devices, link=link, edges=edges,
            shape=(), pcie=None, nic=replace(base.nic, count=len(self.adapters) or base.nic.count),
        )  # fmt: skip


def parse_topo(text: str) -> NodeTopology:
    """Return the layout that the text of ``nvidia-smi topo -m`` describes.

    Raises:
        DescriptionError: when the matrix is missing, cut off, or holds a cell that is not known.
    """
    cells, affinity = _matrix(text)
    devices = [name for name in affinity if name.startswith("GPU")]
    pairs = {(a, b): cells[a, b] for a, b in combinations(devices, 2)}
    nvlinks = {pair: int(cell[2:]) for pair, cell in pairs.items() if cell.startswith("NV")}
    adapters = _compute_adapters(cells, devices, [n for n in affinity if n not in devices])
    switched = len(devices) > 2 and len(nvlinks) == len(pairs) and len(set(nvlinks.values())) == 1
    most = [sum(n for pair, n in nvlinks.items() if device in pair) for device in devices]
    found = filter(None, map(_LEGEND.fullmatch, text.splitlines()))
    legend = {match[1]: match[2] for match in found}
    edges = () if switched else (
        *(Edge(a=_gpu(a), b=_gpu(b), count=n) for (a, b), n in nvlinks.items()),
        *_pcie_edges(cells, affinity, devices, adapters),
    )  # fmt: skip
    return NodeTopology(
        layout="switch" if switched else "graph",
        num_devices=len(devices),
        nvlinks=next(iter(nvlinks.values())) if switched else max(most),
        adapters=tuple(legend.get(name, name) for name in adapters),
        edges=edges,
    )


def _matrix(text: str) -> tuple[dict[tuple[str, str], str], dict[str, str]]:
    """Return the cell of each pair of names, and the CPU affinity of each name in order."""
    lines = [_ESCAPE.sub("", line).split() for line in text.splitlines()]
    header = next((i for i, line in enumerate(lines) if line[:1] == ["GPU0"]), None)
    if header is None:
        raise DescriptionError("topo: no header line that begins with GPU0")
    columns = lines[header][: lines[header].index("CPU")] if "CPU" in lines[header] else None
    columns = lines[header] if columns is None else columns
    rows = {line[0]: line[1:] for line in lines[header + 1 :] if line and line[0] in columns}
    problems = list(_row_problems(columns, rows))
    if problems:
        raise DescriptionError(problems)
    cells = {(a, b): rows[a][i] for a in columns for i, b in enumerate(columns)}
    uneven = [(a, b) for a, b in combinations(columns, 2) if cells[a, b] != cells[b, a]]
    if uneven:
        a, b = uneven[0]
        raise DescriptionError(f"topo: {a} to {b} is {cells[a, b]}, but back is {cells[b, a]}")
    return cells, {a: " ".join(rows[a][len(columns) :][:1]) for a in columns}


def _row_problems(columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for name in columns:
        if name not in rows:
            yield f"topo: row {name} is missing; the text is cut off"
            continue
        found = rows[name][: len(columns)]
        for column, cell in zip(columns, found, strict=False):
            if not _CELL.fullmatch(cell):
                yield f"topo: row {name}, column {column}: unknown cell {cell!r}"
            elif (cell == "X") != (name == column):
                yield f"topo: row {name}, column {column}: {cell!r} is out of place"
        if len(found) < len(columns):
            yield f"topo: row {name} has {len(found)} of {len(columns)} cells; it is cut off"


def _compute_adapters(
    cells: Mapping[tuple[str, str], str], devices: Sequence[str], adapters: Sequence[str]
) -> list[str]:
    """Return the adapters that share a PCIe switch with a device, by nearest device."""
    rank = {nic: min((NEARNESS[cells[nic, gpu]], i) for i, gpu in enumerate(devices))
            for nic in adapters}  # fmt: skip
    near = [nic for nic in adapters if rank[nic][0] <= NEARNESS["PXB"]] or list(adapters)
    return sorted(near, key=lambda nic: rank[nic][1])


def _pcie_edges(
    cells: Mapping[tuple[str, str], str],
    affinity: Mapping[str, str],
    devices: Sequence[str],
    adapters: Sequence[str],
) -> Iterator[Edge]:
    """Yield the tree of PCIe switches and sockets that the relations imply."""
    names = [*devices, *adapters]
    below = [(a, b) for a, b in combinations(names, 2) if cells[a, b] in ("PIX", "PXB")]
    beside = [(a, b) for a, b in combinations(names, 2)
              if cells[a, b] in ("PIX", "PXB", "PHB", "NODE")
              or (a in devices and b in devices and affinity[a] == affinity[b] != "")]  # fmt: skip
    switch, socket = _components(names, below), _components(names, [*below, *beside])
    for name in names:
        kind = "gpu" if name in devices else "nic"
        number = names.index(name) - (0 if name in devices else len(devices))
        pair = (f"{kind}{number}", f"pcie{switch[name]}")
        yield Edge(a=pair[0], b=pair[1]) if kind == "gpu" else Edge(a=pair[1], b=pair[0])
    above = dict.fromkeys((switch[name], socket[name]) for name in names)
    yield from (Edge(a=f"pcie{k}", b=f"cpu{s}") for k, s in above)
    sockets = sorted({s for _, s in above})
    yield from (Edge(a=f"cpu{a}", b=f"cpu{b}") for a, b in combinations(sockets, 2))


def _components(names: Sequence[str], pairs: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Number the groups of names that pairs hold together, in the order of their first names."""
    group = {name: i for i, name in enumerate(names)}
    for a, b in pairs:
        old, new = max(group[a], group[b]), min(group[a], group[b])
        group = {name: new if number == old else number for name, number in group.items()}
    order = {number: i for i, number in enumerate(dict.fromkeys(group.values()))}
    return {name: order[number] for name, number in group.items()}


def _gpu(name: str) -> str:
    return name.lower()


def _kind(vertex: str) -> str:
    return vertex.rstrip("0123456789")
