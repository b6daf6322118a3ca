"""NCCL's cost model: seconds of a collective by algorithm and protocol, and which NCCL picks.

It follows `ncclTopoTuneModel` and `ncclTopoGetAlgoTime` of src/graph/tuning.cc: every pair of
algorithm and protocol has a latency (base + steps x hardware) and a bandwidth (the links' with
factors of the pair), its time is latency + size / bandwidth, and the least time wins. NCCL chooses
by its own constants (`PLANNED`); how long it then takes is reckoned with what machines achieve
(`ACHIEVED`). docs/network.md has the accuracy. Sizes count as nccl-tests counts: the full buffer,
gathered where ranks hold parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from simulator.errors import DescriptionError, suggestion
from simulator.hardware import nccl_constants as nccl
from simulator.hardware import nccl_models as models
from simulator.hardware.nccl_constants import Rates
from simulator.hardware.nccl_models import US, Group

NONE = "NONE"
"""Algorithm and protocol of a group of one, which moves nothing."""


class Choice(NamedTuple):
    """One way to run a collective."""

    algorithm: str
    protocol: str
    seconds: float
    planned: float
    """Seconds that NCCL expects, by which it chooses."""


def bus_factor(collective: str, ranks: int) -> float:
    """Return busbw / algbw as nccl-tests defines it (doc/PERFORMANCE.md)."""
    return BUS_FACTORS[collective](ranks)


def _parts(n: int) -> float:
    return (n - 1) / n


BUS_FACTORS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": _parts,
    "reduce_scatter": _parts,
    "all_to_all": _parts,
    "gather": _parts,
    "scatter": _parts,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "send_recv": lambda n: 1.0,
    "shift": lambda n: 1.0,
    "barrier": lambda n: 0.0,
}

Model = Callable[[str, float, Group, str, Rates], float]
"""Seconds of (collective, size, group, protocol, rates)."""
REDUCING = ("all_reduce", "all_gather", "reduce_scatter")


class Algorithm(NamedTuple):
    """What an algorithm can run, and where NCCL would consider it."""

    seconds: Model
    collectives: Sequence[str]
    protocols: Sequence[str]
    usable: Callable[[Group], bool] = lambda g: True
    automatic: bool = True
    """Whether NCCL has it; others run only when asked for."""


def _switch(g: Group) -> bool:
    return g.in_switch_reduction and nccl.ACHIEVED.nvls_share[g.architecture] > 0 and g.per_node > 1


ALL_REDUCE = ("all_reduce",)
SIMPLE = ("SIMPLE",)

ALGORITHMS: Mapping[str, Algorithm] = {
    "TREE": Algorithm(models.tree, ALL_REDUCE, nccl.PROTOCOLS),
    "RING": Algorithm(models.ring, (*REDUCING, "broadcast", "reduce"), nccl.PROTOCOLS),
    "NVLS": Algorithm(models.nvls, REDUCING, SIMPLE, lambda g: _switch(g) and g.nodes == 1),
    "NVLS_TREE": Algorithm(
        models.nvls_tree, ALL_REDUCE, SIMPLE, lambda g: _switch(g) and g.nodes > 1
    ),
    "PAT": Algorithm(models.pat, REDUCING[1:], SIMPLE, lambda g: g.nodes == g.ranks),
    "PAIRWISE": Algorithm(models.pairwise, ("all_to_all",), SIMPLE),
    "STAR": Algorithm(models.star, ("gather", "scatter"), SIMPLE),
    "HIERARCHICAL": Algorithm(
        models.hierarchical, ALL_REDUCE, SIMPLE, lambda g: g.nodes > 1, automatic=False
    ),
    "HALVING_DOUBLING": Algorithm(models.halving_doubling, ALL_REDUCE, SIMPLE, automatic=False),
}
"""Algorithms by NCCL's name where it has them."""

COLLECTIVES = (*REDUCING, "all_to_all", "broadcast", "reduce", "gather", "scatter", "barrier")


def choices(
    collective: str,
    size: float,
    group: Group,
    *,
    algorithm: str | None = None,
    protocol: str | None = None,
) -> list[Choice]:
    """Return every way to run a collective of `size` bytes over a group, NCCL's choice first.

    Args:
        collective: a name of `COLLECTIVES`; a barrier is an all-reduce of nothing.
        size: bytes, as nccl-tests counts.
        group: where its ranks lie.
        algorithm: only this one, a key of `ALGORITHMS`.
        protocol: only this one: LL, LL128 or SIMPLE.

    Raises:
        DescriptionError: for an unknown name.
    """
    collective = "all_reduce" if _known(collective, COLLECTIVES) == "barrier" else collective
    wanted = _known(algorithm, ALGORITHMS) if algorithm else None
    protocols = [_known(protocol, nccl.PROTOCOLS)] if protocol else nccl.PROTOCOLS
    if group.ranks == 1:
        return [Choice(NONE, NONE, 0.0, 0.0)]
    found = [
        Choice(name, p, *_times(a.seconds, collective, size, group, p))
        for name, a in ALGORITHMS.items()
        if (name == wanted if wanted else a.automatic)
        and collective in a.collectives
        and a.usable(group)
        for p in a.protocols
        if p in protocols and (p != "LL128" or _ll128(group))
    ]
    return sorted(found, key=lambda choice: choice.planned)


def _times(
    model: Model, collective: str, size: float, group: Group, protocol: str
) -> tuple[float, float]:
    achieved, planned = (
        rates.launch_us * US + model(collective, size, group, protocol, rates)
        for rates in (nccl.ACHIEVED, nccl.PLANNED)
    )
    return achieved, planned


def best(
    collective: str,
    size: float,
    group: Group,
    *,
    algorithm: str | None = None,
    protocol: str | None = None,
) -> Choice:
    """Return the way that NCCL takes: the first of `choices`.

    Raises:
        DescriptionError: for an unknown name, or when what is asked for cannot run there.
    """
    found = choices(collective, size, group, algorithm=algorithm, protocol=protocol)
    if not found:
        usable = choices(collective, size, group)
        known = ", ".join(sorted({f"{c.algorithm}/{c.protocol}" for c in usable}))
        asked = "/".join(filter(None, (algorithm, protocol)))
        raise DescriptionError(
            f"{collective} over {group.ranks} ranks on {group.nodes} nodes has no {asked}; "
            f"there are {known}"
        )
    return found[0]


def _ll128(g: Group) -> bool:
    """Whether the path keeps 128-byte stores whole, which LL128 needs."""
    return g.link != "PCI" and (g.nodes == 1 or g.net_ll128)


def _known(name: str, names: Sequence[str] | Mapping[str, object]) -> str:
    by_lower = {known.lower(): known for known in names}
    if name.lower() not in by_lower:
        raise DescriptionError(
            f"unknown {name!r}{suggestion(name, names)}; there are {', '.join(names)}"
        )
    return by_lower[name.lower()]
