"""Programs of other programs' traces, run."""

from __future__ import annotations

from simulator.describe.cluster import Cluster
from simulator.engine import run
from simulator.errors import DescriptionError
from simulator.exchange.chakra import Traces
from simulator.hardware import price
from simulator.lower.check import check
from simulator.program import Flow
from simulator.report.result import Result


def replayed(traces: Traces, cluster: Cluster | None = None) -> Result:
    """Return what traces take.

    Args:
        traces: the program.
        cluster: prices communication, and work that states no duration; rank r is on device r.

    Raises:
        DescriptionError: when the cluster has too few devices.
        DeadlockError: when ranks wait for each other.
    """
    program, notes = traces.program, list(traces.notes)
    if cluster is None:
        if any(isinstance(c, Flow) for c in program.costs):
            notes.append("communication takes the durations that its nodes state")
    elif program.num_ranks > cluster.world_size:
        raise DescriptionError(
            f"the traces are of {program.num_ranks} ranks, but the cluster has "
            f"{cluster.world_size} devices"
        )
    else:
        notes.append("communication is priced on the cluster; rank r is on device r")
    timeline = run(check(program), price(program, cluster))
    return Result(program, timeline, title=traces.name, notes=tuple(notes))
