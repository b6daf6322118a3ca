"""Collectives as text: what nccl-tests would print on a cluster, and how measured rows compare."""

from __future__ import annotations

import csv
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

from simulator.describe import catalog
from simulator.describe.cluster import Cluster
from simulator.describe.loader import load_node
from simulator.errors import DescriptionError
from simulator.exchange.nccl_tests import Row, Timing, format_rows
from simulator.hardware.nccl import best, bus_factor
from simulator.hardware.nccl_models import US
from simulator.hardware.network import GroupShape, group_of
from simulator.report.text import table
from simulator.units import format_bytes, parse_quantity

FLOAT = 4
"""Bytes of nccl-tests' default type."""

HOST_LAUNCH_US = 11.6
"""A host process launches its ranks one after the other, and can start no collective sooner.
Fitted: vTrain's A100 tables are flat from 1 to 4 MiB, at 11.1 to 12.8 us a rank for 4 to 8."""

BOUNDARY = 16e6
"""Bytes from which a message counts as large."""


def parse_sizes(text: str) -> list[int]:
    """Return the sizes of a ``1KB:8GB``, doubling from the first to the last, or of one size.

    A unit that nccl-tests knows, K, M, G, is a power of two, as there.

    Raises:
        DescriptionError: when it cannot be read.
    """
    first, colon, last = text.partition(":")
    low, high = _size(first, text), _size(last if colon else first, text)
    if not 0 <= low <= high:
        raise DescriptionError(f"--sizes {text!r}: the first size is above the last")
    if low == 0 and high:
        raise DescriptionError(f"--sizes {text!r}: doubling does not leave 0; write it alone")
    sizes = [low]
    while sizes[-1] * 2 <= high and high:
        sizes.append(sizes[-1] * 2)
    return sizes


def _size(text: str, whole: str) -> int:
    short = re.fullmatch(r"\s*(\d+)\s*([KMGT]?)\s*", text)
    try:
        unit = f"{short[2]}iB" if short and short[2] else "B"
        return int(parse_quantity(f"{short[1]} {unit}" if short else text, "bytes"))
    except ValueError as error:
        raise DescriptionError(f"--sizes {whole!r}: {error}, or '1KB:8GB'") from None


def collective_text(
    collective: str,
    sizes: Sequence[int],
    cluster: Cluster,
    *,
    algorithm: str | None = None,
    protocol: str | None = None,
) -> str:
    """Return what nccl-tests would print for a collective over all ranks of a cluster."""
    per_node, nodes = cluster.ranks_per_node, cluster.num_nodes
    group = group_of(GroupShape(per_node * nodes, nodes, per_node), cluster)
    rows = []
    for size in sizes:
        c = best(collective, size, group, algorithm=algorithm, protocol=protocol)
        algbw = size / c.seconds if c.seconds else 0.0
        timing = Timing(c.seconds, algbw, algbw * bus_factor(collective, group.ranks), None)
        rows.append(
            Row(size, size // FLOAT, "float", "none", -1, timing, Timing(*[None] * 4),
                f"{c.algorithm} {c.protocol}")
        )  # fmt: skip
    preamble = [
        f"simulated {collective}: {group.ranks} ranks on {nodes} x {cluster.node.name}, "
        f"{per_node} in each; algorithm and protocol at the end of each row",
    ]
    return format_rows(rows, preamble)


@dataclass(frozen=True, slots=True)
class System:
    """Where rows were measured; topologies/measured/systems.toml explains the fields."""

    name: str
    cluster: Cluster
    family: str
    held_out: bool
    ranks_per_process: int
    host_overhead_us: float

    @property
    def shape(self) -> GroupShape:
        """All its ranks as one group."""
        per_node, nodes = self.cluster.ranks_per_node, self.cluster.num_nodes
        return GroupShape(per_node * nodes, nodes, per_node)


class Case(NamedTuple):
    """A measured collective beside its prediction."""

    system: System
    collective: str
    size: int
    algorithm: str
    measured: float
    """Seconds."""
    predicted: float
    chosen: str
    """Algorithm and protocol of the prediction."""
    half: str
    """``fit`` or ``held out``."""
    source: str

    @property
    def error(self) -> float:
        """Error of the bus bandwidth, signed: (predicted - measured) / measured."""
        return self.measured / self.predicted - 1

    @property
    def size_class(self) -> str:
        """Large from 16 MB, the boundary of the accuracy that is asked for."""
        return ">= 16 MB" if self.size >= BOUNDARY else "< 16 MB"


@cache
def systems() -> dict[str, System]:
    """Return the systems of the measured rows, by name."""
    path = catalog.root() / "topologies/measured/systems.toml"
    facts = tomllib.loads(path.read_text(encoding="utf-8"))
    return {
        name: System(
            name,
            Cluster(
                node=load_node(fact["node"]),
                num_nodes=fact.get("nodes", 1),
                devices_per_node=fact["per_node"],
            ),
            fact["family"],
            fact.get("held_out", False),
            fact.get("ranks_per_process", 1),
            fact.get("host_overhead_us", 0.0),
        )
        for name, fact in facts.items()
    }


def cases() -> list[Case]:
    """Return all measured rows with their predictions, in the order of the file.

    Rows of a system, collective and forced algorithm stand by size; unless the system is held out
    whole, the first, third, ... of them belong to the fit half and the others are held out.
    """
    path = catalog.root() / "topologies/measured/collectives.csv"
    found: list[Case] = []
    place: dict[tuple[str, str], int] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            system = systems()[row["system"]]
            key = (row["system"], row["collective"])
            place[key] = place.get(key, -1) + 1
            held_out = system.held_out or place[key] % 2 == 1
            seconds, chosen = _predict(system, row)
            found.append(Case(
                system, row["collective"], int(row["size_B"]), row["algorithm"],
                float(row["time_us"]) * US, seconds, chosen,
                "held out" if held_out else "fit", row["source"],
            ))  # fmt: skip
    return found


def _predict(system: System, row: dict[str, str]) -> tuple[float, str]:
    group = group_of(system.shape, system.cluster)
    c = best(row["collective"], float(row["size_B"]), group, algorithm=row["algorithm"] or None)
    host = system.ranks_per_process * HOST_LAUNCH_US * US if system.ranks_per_process > 1 else 0.0
    seconds = max(c.seconds, host) + system.host_overhead_us * US
    return seconds, f"{c.algorithm} {c.protocol}"


class Signed(Protocol):
    """A measured value beside its prediction."""

    @property
    def error(self) -> float:
        """Signed share of the measured value."""


class Accuracy(NamedTuple):
    """Errors over some rows."""

    rows: int
    mean: float
    """Of |error|."""
    bias: float
    """Of the signed error."""
    worst: float

    @classmethod
    def of(cls, cases: Sequence[Signed]) -> Accuracy:
        """Return the accuracy over some rows, at least one."""
        errors = [case.error for case in cases]
        return cls(
            len(errors),
            sum(map(abs, errors)) / len(errors),
            sum(errors) / len(errors),
            max(errors, key=abs),
        )


Key = Callable[[Case], tuple[str, ...]]


def by_family(case: Case) -> tuple[str, ...]:
    """Return the heading of a row: half, family, collective, size class."""
    return case.half, case.system.family, case.collective, case.size_class


def by_system(case: Case) -> tuple[str, ...]:
    """Return the heading of a row with its system besides."""
    return (*by_family(case), case.system.name)


def accuracy(cases: Sequence[Case], key: Key = by_family) -> dict[tuple[str, ...], Accuracy]:
    """Return the accuracy of each group of rows that a key makes."""
    groups: dict[tuple[str, ...], list[Case]] = {}
    for case in cases:
        groups.setdefault(key(case), []).append(case)
    return {name: Accuracy.of(groups[name]) for name in sorted(groups)}


def validation_text(all_cases: Sequence[Case]) -> str:
    """Return every measured row with its prediction, then the accuracy by system and by family."""
    rows = [["system", "collective", "size", "measured us", "predicted us", "busbw error", "by",
             "half"]]  # fmt: skip
    rows += [
        [c.system.name, c.collective, format_bytes(c.size), f"{c.measured / US:.1f}",
         f"{c.predicted / US:.1f}", f"{c.error:+.1%}", c.chosen, c.half]
        for c in all_cases
    ]  # fmt: skip
    return "\n\n".join([
        table(rows),
        _accuracy_text(["half", "family", "collective", "size", "system"],
                       accuracy(all_cases, by_system)),
        _accuracy_text(["half", "family", "collective", "size"], accuracy(all_cases)),
    ])  # fmt: skip


def _accuracy_text(names: list[str], found: dict[tuple[str, ...], Accuracy]) -> str:
    rows = [[*names, "rows", "mean |error|", "bias", "worst"]]
    rows += [
        [*key, str(a.rows), f"{a.mean:.1%}", f"{a.bias:+.1%}", f"{a.worst:+.1%}"]
        for key, a in found.items()
    ]
    return table(rows)
