"""Which rank lies on which device, as text and as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from simulator.describe.plan import AXES, Axis
from simulator.describe.scenario import Scenario
from simulator.hardware.placement import Span, devices, spans
from simulator.lower.mesh import Mesh
from simulator.report.text import SCHEMA_VERSION, table

MAX_NODES = 16
"""Nodes whose ranks are listed; the rest is counted."""
MAX_DEVICES = 16
"""Devices of a node whose ranks are listed; the rest is counted."""


def placement_text(s: Scenario) -> str:
    """Return a row for each node with the rank on each device, and how far groups reach."""
    mesh, per_node = Mesh.of(s.plan), s.cluster.ranks_per_node
    by_device = np.argsort(devices(s.plan, s.cluster)).reshape(-1, per_node)
    shown = by_device[:MAX_NODES, :MAX_DEVICES]
    axes = [axis for axis in AXES if axis != "cp" or s.plan.cp > 1]
    rows = [["node", *(f"gpu {i}" for i in range(shown.shape[1]))]]
    kinds = s.cluster.kinds if s.cluster.is_mixed else ()
    named = [f" {kinds[kind].name}" if kinds else "" for kind in s.cluster.kind_of_node]
    for node, ranks in enumerate(shown.tolist()):
        at = [mesh.coordinates(rank) for rank in ranks]
        cells = [f"{r}:{_place(a, axes)}" for r, a in zip(ranks, at, strict=True)]
        rows.append([f"{node}{named[node]}", *cells])
    left_out = [
        f"{total - listed} {what} more"
        for total, listed, what in zip(
            by_device.shape, shown.shape, ("nodes", "devices of each node"), strict=True
        )
        if total > listed
    ]
    return "\n".join([
        f"placement {s.plan.placement_name} (rank:{','.join(axes)}; "
        f"axes {' > '.join(axis for axis in s.plan.order if axis in axes)})",
        table(rows),
        *([f"... and {' and '.join(left_out)}"] if left_out else []),
        *_spans_text(spans(s)),
    ])  # fmt: skip


def _place(at: Mapping[str, int], axes: list[Axis]) -> str:
    return "".join(f"{axis[0]}{at[axis]}" for axis in axes)


def _spans_text(found: list[Span]) -> list[str]:
    if not found:
        return []
    rows = [["axis", "groups", "ranks of each", "nodes of each"]]
    for span in found:
        nodes = f"{span.fewest}" if span.fewest == span.most else f"{span.fewest} to {span.most}"
        rows.append([span.axis, f"{span.groups}", f"{span.ranks}", nodes])
    return ["", table(rows)]


def placement_dict(s: Scenario) -> dict[str, Any]:
    """Return the place of every rank as plain values: columns by rank."""
    every = np.arange(s.cluster.world_size)
    node, device = np.divmod(devices(s.plan, s.cluster), s.cluster.ranks_per_node)
    at = Mesh.of(s.plan).coordinates(every)
    return {
        "schema_version": SCHEMA_VERSION,
        "placement": s.plan.placement_name,
        "order": list(s.plan.order),
        "ranks": {
            "node": node.tolist(),
            "device": device.tolist(),
            **{axis: at[axis].tolist() for axis in AXES},
        },
        "axes": [span._asdict() for span in spans(s)],
    }
