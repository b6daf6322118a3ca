"""What happens over days: failures of components, recovery, spares, checkpoints, slow nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from simulator.describe.fields import (
    Bytes,
    BytesPerSecond,
    Count,
    Duration,
    Natural,
    Range,
    Seconds,
    Unit,
    validate,
)
from simulator.errors import DescriptionError

if TYPE_CHECKING:
    from simulator.describe.scenario import Scenario

RULES = ("young", "daly")
"""Names of rules for a checkpoint interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One kind of thing that fails and stops the job."""

    name: str
    mtbf: Duration
    """Mean time between failures of one of them."""
    per: Literal["device", "node", "cluster"]
    """What has `count` of it."""
    count: Count = 1
    distribution: Literal["exponential", "weibull", "burn-in"] = "exponential"
    """Of the time to failure. `exponential`: whatever its age. `weibull`: of mean `mtbf` and
    `shape`, new at the start and replaced by a new one at each failure. `burn-in`: the rate starts
    `burn_in_factor` times as high, and the excess decays with the time constant `burn_in_time`."""
    shape: Annotated[float, Range(0.2, 20)] | None = None
    """Of the Weibull distribution: below 1 many fail early, above 1 they wear out."""
    burn_in_factor: Annotated[float, Range(1, 1e6, open_low=True)] | None = None
    burn_in_time: Duration | None = None
    takes_node: bool = True
    """Whether its node needs repair; else the job restarts on the same nodes, as after a bug."""
    detection_time: Seconds | None = None
    """From the failure until the job is stopped; that of the operations when absent."""
    repair_time: Seconds | None = None
    """Until its node can be used again; that of the operations when absent."""

    def __post_init__(self) -> None:
        validate(self)
        needs = {"weibull": ("shape",), "burn-in": ("burn_in_factor", "burn_in_time")}
        problems = []
        for kind, names in needs.items():
            for name in names:
                given = getattr(self, name) is not None
                if given != (self.distribution == kind):
                    problems.append(
                        f"Component.{name} is for distribution {kind!r}, and {self.name} has "
                        f"{self.distribution!r}"
                        if given
                        else f"Component.{name}: distribution {kind!r} of {self.name} needs it"
                    )
        if self.repair_time is not None and not self.takes_node:
            problems.append(
                f"Component.repair_time: {self.name} takes no node (takes_node = false), so "
                "nothing is repaired"
            )
        if problems:
            raise DescriptionError(problems)

    def number(self, devices: int, nodes: int) -> int:
        """Return how many of it a job on some devices in some nodes has."""
        return self.count * {"device": devices, "node": nodes, "cluster": 1}[self.per]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """When state is saved, how long that takes, and how long it takes to read it back."""

    interval: Annotated[
        Literal["young", "daly"] | Annotated[float, Unit("seconds")], Unit("seconds", names=RULES)
    ] = "daly"
    """Training between two checkpoints, in whole steps; or a rule: `young`, `daly`."""
    asynchronous: bool = False
    """Whether training goes on once the state has been copied to the hosts (the snapshot), while
    it is written; it waits at the next checkpoint where that comes before the write has ended."""
    state: Bytes | None = None
    """Bytes of a checkpoint; absent: those of the model's weights and optimizer states."""
    write_bandwidth: BytesPerSecond | None = None
    """At which storage takes what all write at once. Where neither this nor a time is stated, times
    and bytes are those of the scenario's `[checkpoint]`, simulated."""
    write_time: Seconds | None = None
    """Stated instead of the bandwidth."""
    read_bandwidth: BytesPerSecond | None = None
    """Likewise of reading; that of writing when absent."""
    restore_time: Seconds | None = None
    """Stated instead; the time of a write where nothing is said."""
    snapshot_bandwidth: BytesPerSecond | None = None
    """From each device to its host; that of the node's host when absent."""
    snapshot_time: Seconds | None = None
    """Stated instead."""

    def __post_init__(self) -> None:
        validate(self)
        problems = list(self._problems())
        if problems:
            raise DescriptionError(problems)

    def _problems(self) -> Iterator[str]:
        for time, bandwidth in (
            ("write_time", "write_bandwidth"),
            ("restore_time", "read_bandwidth"),
            ("snapshot_time", "snapshot_bandwidth"),
        ):
            if getattr(self, time) is not None and getattr(self, bandwidth) is not None:
                yield f"Checkpoint.{time} and {bandwidth} say the same thing; leave one out"
        if not self.asynchronous:
            for name in ("snapshot_time", "snapshot_bandwidth"):
                if getattr(self, name) is not None:
                    yield f"Checkpoint.{name} is for asynchronous = true"

    @property
    def is_stated(self) -> bool:
        """Whether the time of a write is stated; else it is simulated."""
        return self.write_time is not None or self.write_bandwidth is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowNode:
    """Nodes that turn slow without a word, and hold the whole job back until somebody notices."""

    mtbf: Duration
    """Mean time until one node turns slow, whatever its age."""
    slowdown: Annotated[float, Range(1, 1000, open_low=True)]
    """Step time with a slow node over that without."""
    detection_time: Duration
    """From then until the node is found and replaced, which stops the job as a failure does."""

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """A run over days. Failures come by the clock, also while nothing runs; spares never fail."""

    days: Annotated[float, Range(0, 36500, open_low=True)] = 30.0
    step_time: Duration | None = None
    """Of one step with nothing wrong; absent: simulated."""
    checkpoint: Checkpoint
    components: tuple[Component, ...] = ()
    slow_node: SlowNode | None = None
    detection_time: Seconds = 0.0
    """From a failure until the job is stopped (a watchdog's timeout)."""
    rescheduling_time: Seconds = 0.0
    """To put a healthy node in the place of a failed one."""
    restart_time: Seconds = 0.0
    """To start all processes and connect them, before state is read."""
    repair_time: Seconds = 86400.0
    """Until a node that was taken out can be used again. ASSUMED a day where not stated."""
    spare_nodes: Natural = 0
    """Nodes that stand by, hot: beside those of the cluster."""
    elastic: bool = False
    """When no spare is left, whether the job goes on with fewer replicas, each with its share of
    the batch, and takes them back at a checkpoint; else it waits for a repair."""
    seed: Natural = 0
    """Of the first sample; each further sample adds one."""

    def __post_init__(self) -> None:
        validate(self)


def operations_problems(s: Scenario) -> Iterator[str]:
    """Say what of a scenario's operations does not fit the rest of it."""
    if s.operations is None or s.operations.checkpoint.is_stated:
        return
    if s.checkpoint is None:
        yield (
            "operations.checkpoint.write_bandwidth is missing: say at what rate storage takes a "
            'checkpoint, as write_bandwidth = "100 GB/s", or its write_time; or describe '
            "[checkpoint], whose times are simulated then"
        )
    elif s.operations.checkpoint.asynchronous and not s.checkpoint.asynchronous:
        yield (
            "operations.checkpoint.asynchronous: its times are to be those of [checkpoint], which "
            "is synchronous; set checkpoint.asynchronous = true, or state a write_time"
        )
