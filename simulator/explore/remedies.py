"""The nearest changes that make a plan fit: each simulated, with what it costs in time.

A change is one of a table, or two of them together; none alters what a step computes. The
scenario's own checks say what is legal. Within a row of the table options stand nearest first, and
whatever goes at least as far as a change that fits, in every row, is not tried: "zero 1" fits, so
nobody asks for "zero 2", nor for "zero 1 and full recomputation".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from simulator.api import simulate
from simulator.cuts import resolved
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.explore.change import Settings, by_stage, changed, each_flow_alone, words
from simulator.report.result import Result
from simulator.report.summary import Summary
from simulator.report.text import table
from simulator.schedules import schedule_name
from simulator.units import format_bytes, format_seconds

MOST_FOUND = 5
"""Changes that are reported, the fastest of those that fit."""

MOST_ROWS = 2_000_000
"""Rows of programs that a search simulates: a second or two. After that nothing more is tried."""

ROWS_OF_ANY = 20_000
"""Rows that take as long as what every simulation does once, whatever its size: about 10 ms."""

OPTIONS = 3
"""Options of one row of the table, the nearest ones that are legal."""


def _one_at_a_time(s: Scenario) -> Iterator[Settings]:
    """Let backwards come as early as they can: 1F1B keeps the fewest activations here."""
    if schedule_name(s.plan.schedule) != "1F1B":
        settings: Settings = {"plan.chunks": 1} if s.plan.chunks > 1 else {}
        if s.plan.recompute_again:
            settings["plan.recompute_again"] = False
        yield {"plan.schedule": "1F1B", **settings}


def _more(axis: str) -> Callable[[Scenario], Iterator[Settings]]:
    """Return the row that gives an axis more of the ranks of dp."""

    def options(s: Scenario) -> Iterator[Settings]:
        now = getattr(s.plan, axis)
        ranks = now * s.plan.dp
        for degree in range(now + 1, ranks + 1):
            if ranks % degree == 0:
                yield {f"plan.{axis}": degree, "plan.dp": ranks // degree}

    return options


def _more_shards(s: Scenario) -> Iterator[Settings]:
    """Divide more of the states over dp: optimizer states, gradients, weights."""
    for stage in range(s.plan.zero + 1, 4) if s.plan.replicas > 1 else ():
        yield {"plan.zero": stage}


def _no_gathered_weights(s: Scenario) -> Iterator[Settings]:
    """Free gathered weights between forward and backward."""
    if not s.plan.reshard_after_forward:
        yield {"plan.reshard_after_forward": True}


def _fused_attention(s: Scenario) -> Iterator[Settings]:
    """Never keep the matrix of scores."""
    if s.run.attention == "unfused":
        yield {"run.attention": "flash"}


def _sequence_parallel(s: Scenario) -> Iterator[Settings]:
    """Divide what tensor parallelism repeats on every rank."""
    if s.plan.tp > 1 and not s.plan.sequence_parallel:
        yield {"plan.sequence_parallel": True}


def _recompute(s: Scenario) -> Iterator[Settings]:
    """Keep less for backward: not the attention core, then only each layer's input."""
    if s.plan.recompute_layers is not None:
        yield {"plan.recompute_layers": max(resolved(s).layers_per_stage)}
    for mode in KEEPS_LESS[s.plan.recompute]:
        yield {"plan.recompute": mode}


KEEPS_LESS = {
    "none": ("selective", "full"), "light": ("full",), "selective": ("full",),
    "selective-op": ("full",), "full": (),
}  # fmt: skip
"""Ways to recompute that keep less than each, those that keep most first."""


def _smaller_microbatch(s: Scenario) -> Iterator[Settings]:
    """Halve and quarter the microbatch, then one sample."""
    size = s.plan.microbatch_size
    below = [d for d in range(size - 1, 0, -1) if size % d == 0]
    nearest = [next((d for d in below if part * d <= size), 1) for part in (2, 4)]
    for fewer in dict.fromkeys([*nearest, 1] if below else []):
        yield {"plan.microbatch_size": fewer}


TABLE: tuple[Callable[[Scenario], Iterator[Settings]], ...] = (
    _one_at_a_time, _more("tp"), _more("pp"), _more("cp"), _more_shards,
    _no_gathered_weights, _fused_attention, _sequence_parallel, _recompute, _smaller_microbatch,
)  # fmt: skip
"""What may be changed. The second change of a pair is made on what the first has left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change and what a simulation of it says."""

    settings: Settings
    device_memory_bytes: float
    """Of the fullest rank."""
    step_time_s: float
    slowdown: float
    """Seconds of a step over those of the plan as it is, less one; below zero it is faster."""

    @property
    def name(self) -> str:
        """The change as ``--set`` takes it."""
        return ", ".join(words(self.settings))


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedies:
    """What was found for a plan that does not fit."""

    rank: int
    """The fullest one."""
    over_bytes: float
    """What it needs beyond its device's memory."""
    capacity_bytes: float
    step_time_s: float
    """Of the plan as it is, as if memory were there."""
    tried: int
    """Changes that were simulated."""
    left: int
    """Legal changes that were not: the search had taken its share of time."""
    found: tuple[Remedy, ...]
    """Those that fit, fastest first."""
    closest: Remedy | None
    """Where none fits, the one that needs least; None where none frees memory."""

    def __str__(self) -> str:
        head = (
            f"does not fit: rank {self.rank} needs {format_bytes(self.over_bytes)} more than the "
            f"{format_bytes(self.capacity_bytes)} of its device"
        )
        return f"{head}\n{self._table() if self.found else self._hopeless()}"

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, units in the names of keys."""
        return asdict(self)

    def _table(self) -> str:
        rows = [["nearest changes that fit", "peak memory", "step", "against now"]]
        rows += [
            [r.name, format_bytes(r.device_memory_bytes), format_seconds(r.step_time_s),
             f"{r.slowdown:+.1%}"]
            for r in self.found
        ]  # fmt: skip
        rows.append(["now", format_bytes(self.capacity_bytes + self.over_bytes),
                     format_seconds(self.step_time_s), ""])  # fmt: skip
        return f"{table(rows)}\n{self._tried()}"

    def _hopeless(self) -> str:
        if self.closest is None:
            return (
                "no change of the plan is left that would free memory: take more or larger devices"
            )
        return (
            f"no change of the plan fits, alone or with another ({self._tried()}): take more or "
            f"larger devices, or go on from the closest, {self.closest.name}, which needs "
            f"{format_bytes(self.closest.device_memory_bytes)}"
        )

    def _tried(self) -> str:
        left = f", {self.left} more were not" if self.left else ""
        return f"{self.tried} change{'s' * (self.tried != 1)} simulated{left}"


@dataclass(frozen=True, slots=True)
class _Candidate:
    steps: Mapping[int, int]
    """How far it goes by row of the table: 1 is that row's nearest option."""
    settings: Settings
    scenario: Scenario

    def reaches(self, other: _Candidate) -> bool:
        """Return whether it goes at least as far in every row."""
        return all(self.steps.get(row, 0) >= step for row, step in other.steps.items())


def find_remedies(result: Result) -> Remedies | None:
    """Return the nearest changes with which a result's plan fits; None where it does.

    Changes are tried at the level of stages and with every flow alone; where the run's flows share
    links, the fastest are then run so too, and those times are returned.
    """
    s, now = result.scenario, result.summary
    if s is None or now.fits_device:
        return None
    outcomes, left = _search(s, now)
    tried = len(outcomes)
    if s.run.network == "fluid":
        outcomes = _sharing_links(outcomes, now)
    found = [o.remedy for o in outcomes if o.fits]
    saving = [o.remedy for o in outcomes if o.remedy.device_memory_bytes < now.device_memory_bytes]
    closest = min(saving, key=lambda r: r.device_memory_bytes, default=None)
    return Remedies(
        rank=now.peak_memory_rank,
        over_bytes=now.device_memory_bytes - now.memory_capacity_bytes,
        capacity_bytes=now.memory_capacity_bytes,
        step_time_s=now.step_time_s,
        tried=tried,
        left=left,
        found=tuple(sorted(found, key=lambda r: (r.step_time_s, r.name))[:MOST_FOUND]),
        closest=None if found else closest,
    )


@dataclass(frozen=True, slots=True)
class _Outcome:
    candidate: _Candidate
    remedy: Remedy
    fits: bool
    rows: int
    """Of the program that was run."""


def _search(s: Scenario, now: Summary) -> tuple[list[_Outcome], int]:
    """Return what was simulated, nearest changes first, and how many were left untried."""
    outcomes: list[_Outcome] = []
    spent, left = 0, 0
    for candidate in _candidates(s):
        if any(o.fits and candidate.reaches(o.candidate) for o in outcomes):
            continue
        if spent >= MOST_ROWS:
            left += 1
            continue
        try:
            outcomes.append(_outcome(candidate, each_flow_alone(candidate.scenario), now))
        except DescriptionError:  # too large for this machine
            left += 1
            continue
        spent += outcomes[-1].rows + ROWS_OF_ANY
    return outcomes, left


def _sharing_links(outcomes: list[_Outcome], now: Summary) -> list[_Outcome]:
    """Return outcomes with the fastest that fit run anew, on links that flows share."""
    out = [o for o in outcomes if not o.fits]
    missing = MOST_FOUND
    for old in sorted((o for o in outcomes if o.fits), key=lambda o: o.remedy.step_time_s):
        if missing:
            new = _outcome(old.candidate, by_stage(old.candidate.scenario), now)
            out.append(new)
            missing -= new.fits
    return out


def _outcome(candidate: _Candidate, s: Scenario, now: Summary) -> _Outcome:
    result = simulate(s)
    then = result.summary
    remedy = Remedy(
        settings=candidate.settings,
        device_memory_bytes=then.device_memory_bytes,
        step_time_s=then.step_time_s,
        slowdown=then.step_time_s / now.step_time_s - 1,
    )
    return _Outcome(candidate, remedy, then.fits, len(result.tiled.rank))


def _candidates(s: Scenario) -> list[_Candidate]:
    """Return every legal change and pair of changes, nearest first."""
    whole = _Candidate({}, {}, s)
    singles = [(row, one) for row in range(len(TABLE)) for one in _options(whole, row)]
    pairs = [
        two for row, one in singles for later in range(row + 1, len(TABLE))
        for two in _options(one, later)
    ]  # fmt: skip
    pairs.sort(key=lambda pair: sum(pair.steps.values()))
    return [*(one for _, one in singles), *pairs]


def _options(base: _Candidate, row: int) -> Iterator[_Candidate]:
    """Return the nearest legal options of a row of the table, on top of a change."""
    every = ((settings, changed(base.scenario, settings)) for settings in TABLE[row](base.scenario))
    legal = ((settings, new) for settings, new in every if new is not None)
    for step, (settings, new) in enumerate(islice(legal, OPTIONS), 1):
        yield _Candidate({**base.steps, row: step}, {**base.settings, **settings}, new)
