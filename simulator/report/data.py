"""The data path: what each stage of it would give, and which one holds the step back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from simulator.describe.data import PRESETS, Data, cached_share, sample_of
from simulator.describe.scenario import Scenario
from simulator.hardware.compute import work_seconds
from simulator.hardware.sizes import differ
from simulator.lower.data import STAGES, batch_of, core_share, costs_of, loaders
from simulator.program import Work
from simulator.report.breakdown import WORK
from simulator.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from simulator.report.result import Result

SETTLED = 1.005
"""Throughput over the least that a stage gives above which a loader is still filling up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataUse:
    """What the stages of the data path would give, each alone, and what they cost."""

    samples_per_s: dict[str, float]
    """By stage: `storage` (reads at their share, of what no cache answers), `workers` (each a batch
    after the other, its reads included), `copy` (to pinned memory, to the device), `compute` (the
    run with all samples there). Of the whole run; a stage that takes no time is absent."""
    slowest: str
    """The stage that gives least."""
    waiting_share: float
    """Share of the step that would go if all samples were there."""
    utilisation: float
    """Share of the step in which devices compute, mean over ranks."""

    @property
    def binds(self) -> bool:
        """Whether a faster loader would make steps shorter, and its slowest stage sets the pace."""
        return self.slowest != "compute" and self.waiting_share > 0.001


def data_use(result: Result, s: Scenario) -> DataUse | None:
    """Return what the data path of a scenario's result does; None where it has none."""
    if s.data is None:
        return None
    step, b = result.step_time_s, result.breakdown
    free = min(step, result.without_data_s or step)
    rates = {name: _samples(s) / each for name, each in stage_seconds(s).items() if each}
    rates["compute"] = s.run.global_batch_size / free
    return DataUse(
        samples_per_s=rates,
        slowest=min(rates, key=lambda name: rates[name]),
        waiting_share=1 - free / step,
        utilisation=float((b.of(*WORK) / b.window).mean()),
    )


def _samples(s: Scenario) -> float:
    """Return the samples of the whole run that one batch of every loader holds; ranks of tp and cp
    load the same.
    """
    return s.plan.microbatch_size * loaders(s).in_all / (s.plan.tp * s.plan.cp)


def stage_seconds(s: Scenario) -> dict[str, float]:
    """Return the seconds between two batches of a rank that each stage of its loader needs."""
    data, batch = s.data, batch_of(s)
    assert data is not None
    costs = dict(zip(STAGES, costs_of(s), strict=True))
    pin, copy = (
        max(sum(work_seconds(cost, node, s.cluster.ranks_per_node).values())
            for node in s.cluster.kinds)
        for cost in (costs["pin"], costs["copy"])
        if isinstance(cost, Work)
    )  # fmt: skip
    return {
        "storage": batch.read,
        "workers": batch.cycle / data.workers,
        "copy": max(pin, copy) if data.overlap and data.pinned else pin + copy,
    }


def data_lines(result: Result, s: Scenario) -> list[str]:
    """Return the lines of the report on the data path, if there is one."""
    use = result.summary.data
    if use is None:
        return []
    rates = ", ".join(
        f"{name} {format_rate(rate, 'samples')}" for name, rate in use.samples_per_s.items()
    )
    return [
        f"  data        limits: {rates}; slowest: {use.slowest}",
        f"              devices compute {use.utilisation:.1%} of the step; "
        f"{use.waiting_share:.1%} of it would go if all samples were there",
    ]


def data_notes(result: Result) -> tuple[str, ...]:
    """Return warnings that a loader is not in its steady state."""
    s = result.scenario
    if s is None or s.data is None:
        return ()
    if s.run.num_steps == 1:
        return (
            "run.num_steps 1: the step waits for the first batch of each loader, which later steps "
            "have ready",
        )
    use = result.summary.data
    assert use is not None  # of a scenario with data
    least = use.samples_per_s[use.slowest]
    if result.summary.samples_per_s <= SETTLED * least:
        return ()
    return (
        f"the loader is still ahead: in the long run {use.slowest} give(s) "
        f"{format_rate(least, 'samples')}; simulate more than run.num_steps = {s.run.num_steps}",
    )


def _spread(data: Data) -> str:
    """Return how samples differ."""
    if not differ(data):
        return "all samples are alike"
    how = f"one of {len(data.sizes)} sizes" if data.sizes else f"log-normal, cv {data.size_cv:.3g}"
    return (
        f"each is {how}, drawn by each replica for itself (seed {data.seed}), and takes a core as "
        "long as its bytes say; limits of the path are those of mean samples"
    )


def data_assumptions(s: Scenario) -> list[str]:
    """Return what was assumed of the data path that the scenario does not say."""
    data = s.data
    if data is None:
        return []
    sample, found, storage = sample_of(s), loaders(s), s.cluster.storage[data.storage]
    what = (
        f"a sample has {format_bytes(sample.bytes)} on storage, takes a core "
        f"{format_seconds(sample.seconds)} and has {format_bytes(sample.device_bytes)} on its way "
        f"to the device; {_spread(data)}"
    )
    if data.preset is not None:
        what += f" ({data.preset}: {PRESETS[data.preset].source})"
    where = "of its node" if storage.kind == "local" else "in all"
    count = found.on_node if storage.kind == "local" else found.in_all
    path = "" if storage.kind == "local" else (
        ", through a network of its own" if storage.node_bandwidth
        else ", through its node's adapters"
    )  # fmt: skip
    out = [
        what,
        f"each of {found.in_all} ranks loads its own microbatches (ranks of tp and cp the same "
        "ones), those of the first stage, labels with them; a worker reads and transforms a batch "
        "at a time, workers begin evenly spread, and a batch is copied when the forward before the "
        "one before its own has ended",
        "reads are flows that share storage with all that meets them there"
        f"{path}; limits of the path count even shares"
        if s.run.network == "fluid"
        else f"a rank reads at its even share of storage, of {count} {where}{path}, as if nothing "
        "else used them; its reads come one after the other, their latency apart",
    ]
    share, workers = core_share(s), found.on_node * data.workers
    if not all(node.host and node.host.cores for node in s.cluster.kinds):
        out.append(f"each of the {workers} workers of a node has a core (host.cores is not stated)")
    elif share > 1:
        out.append(f"{workers} workers share the cores of a node, {share:.4g} a core, all at once")
    if cached := cached_share(s):
        out.append(f"the page cache answers {cached:.1%} of reads at once and at no cost")
    if not data.pinned:
        out.append(
            "copies from pageable memory have 0.4 of the rate and wait for the computing before"
        )
    return out
