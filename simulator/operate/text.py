"""The report of operations as text for people and as plain values for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from simulator.describe.scenario import Scenario
from simulator.operate.cost import bill_cells, bill_dict, bills, cost_assumptions
from simulator.operate.interval import daly, lost_share, young
from simulator.operate.job import NANOSECONDS, NO_NODE, interval_seconds, mtbf, saving
from simulator.operate.result import Operated, Spread
from simulator.report.samples import counted
from simulator.report.text import SCHEMA_VERSION, table
from simulator.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from simulator.operate.best import Best

AGEING = (
    "the mean time between failures, and rules for intervals, count things of all ages alike: at "
    "first, more or fewer fail (burn-in, Weibull)"
)

ELASTIC = (
    "goes on with fewer replicas, as few as the missing nodes allow, each at its pace and with its "
    "share of the batch, and takes back at a checkpoint those whose nodes have returned"
)


def operated_text(o: Operated, best: Best | None = None) -> str:
    """Return the report of operations as text."""
    lines = [*_headline(o), "", _waterfall(o), "", _components(o), *_best(best), *_cost(o), "",
             "assumed:", *(f"  - {line}" for line in assumptions(o))]  # fmt: skip
    return "\n".join(lines) + "".join(f"\nnote: {note}" for note in notes(o))


def _headline(o: Operated) -> list[str]:
    s, ops = o.scenario, o.operations
    cluster, g, steps = s.cluster, Spread.of(o.goodput), Spread.of(o.steps)
    spare = f" and {ops.spare_nodes:,} spare" * (ops.spare_nodes > 0)
    return [
        s.name,
        f"  cluster     {cluster.world_size:,} x "
        f"{' and '.join(dict.fromkeys(node.device.name for node in cluster.kinds))} in "
        f"{cluster.num_nodes:,}{spare} node{'s' * (cluster.num_nodes + ops.spare_nodes > 1)}",
        f"  run         {ops.days:g} days, {len(o.seeds):,} sample{'s' * (len(o.seeds) > 1)} "
        f"(seeds {o.seeds[0]} to {o.seeds[-1]})",
        f"  step        {format_seconds(o.step_time_s)} ({_source(o)})",
        f"  failures    {_between(mtbf(ops, cluster.world_size, cluster.num_nodes))}",
        f"  checkpoint  {_checkpoint(o)}",
        "",
        f"  goodput     {g.mean:.2%}{_error(100 * g.error, ' points')} effective training time"
        + f"; 5 to 95 % of samples {g.low:.2%} to {g.high:.2%}" * (len(o.seeds) > 1),
        f"  stopped     {Spread.of(o.interruptions).mean:,.1f} times",
        f"  kept        {steps.mean:,.0f} steps, {format_count(float(o.tokens.mean()))} "
        f"{counted(s)}",
    ]


def _source(o: Operated) -> str:
    """Return where the times of steps are from."""
    if o.step is None:
        return "stated"
    if o.scenario.jitter is None:
        return "simulated"
    low, high = min(o.step_times_s), max(o.step_times_s)
    return (
        f"mean of {len(o.step_times_s):,} simulated under jitter, {format_seconds(low)} to "
        f"{format_seconds(high)}; undisturbed {format_seconds(o.step.step_time_s)}"
    )


def _between(seconds: float) -> str:
    return "none" if seconds == float("inf") else f"one in {format_hours(seconds)} on average"


def format_hours(seconds: float) -> str:
    """Return a duration to four digits in the unit of its size, up to hours."""
    for scale, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= scale:
            number = seconds / scale
            return f"{number:,.0f} {unit}" if number >= 1000 else f"{number:.4g} {unit}"
    return format_seconds(seconds)


def _error(value: float, unit: str) -> str:
    return "" if np.isnan(value) else f" +- {value:.2g}{unit}"


def _checkpoint(o: Operated) -> str:
    save, steps = saving(o.scenario, o.operations), o.job.interval
    every = format_hours(steps * o.step_time_s)
    how = (
        f"{format_seconds(save.blocked)} to copy, {format_seconds(save.write)} to write beside it"
        if o.job.asynchronous
        else f"{format_seconds(save.write)} to write"
    )
    rule = o.operations.checkpoint.interval
    named = ""
    if isinstance(rule, str):
        wanted = interval_seconds(o.scenario, o.operations)
        sooner = steps * o.step_time_s - wanted > o.step_time_s
        named = (
            f" ({rule}{f' wants {format_hours(wanted)}: not before a write has ended' * sooner})"
        )
    source = " (simulated)" * (o.saved is not None)
    return f"every {every}, {steps:,} steps{named}: {format_bytes(save.state_bytes)}, {how}{source}"


def _waterfall(o: Operated) -> str:
    """Return the table of where the time goes; rows that never took any are left out."""
    rows = [["where the time goes", "mean", "5 %", "median", "95 %", "hours"]]
    hours = o.operations.days * 24
    for name, shares in o.by_category().items():
        if shares.any() or name == "training":
            x = Spread.of(shares)
            cells = [f"{value:.2%}" for value in (x.mean, x.low, x.middle, x.high)]
            rows.append([name, *cells, f"{x.mean * hours:,.1f}"])
    rows.append(["wall clock", "100.00%", "", "", "", f"{hours:,.1f}"])
    return table(rows)


def _components(o: Operated) -> str:
    ops, cluster = o.operations, o.scenario.cluster
    rows = [["stopped by", "of them", "mtbf of one", "times", "5 %", "95 %"]]
    numbers = [c.number(cluster.world_size, cluster.num_nodes) for c in ops.components]
    means = [c.mtbf for c in ops.components]
    if ops.slow_node is not None:
        numbers, means = [*numbers, cluster.num_nodes], [*means, ops.slow_node.mtbf]
    for k, name in enumerate(o.job.names):
        x = Spread.of(o.outcome.interruptions[:, k])
        rows.append([name, f"{numbers[k]:,}", format_hours(means[k]), f"{x.mean:,.1f}",
                     f"{x.low:,.0f}", f"{x.high:,.0f}"])  # fmt: skip
    total = Spread.of(o.interruptions)
    rows.append(["all", "", "", f"{total.mean:,.1f}", f"{total.low:,.0f}", f"{total.high:,.0f}"])
    return table(rows)


def _best(best: Best | None) -> list[str]:
    if best is None:
        return []
    rows = [["checkpoint every", "steps", "goodput"]]
    for seconds, steps, goodput in zip(best.seconds, best.steps, best.goodput, strict=True):
        rows.append([format_hours(seconds), f"{steps:,}", f"{goodput:.2%}"])
    return [
        "",
        table(rows),
        f"best by simulation{'' if best.is_smooth else ' (of these)'}: "
        f"{format_hours(best.best)}; Young {format_hours(best.young)} "
        f"({best.young / best.best - 1:+.1%}), Daly {format_hours(best.daly)} "
        f"({best.daly / best.best - 1:+.1%})",
    ]


def _cost(o: Operated) -> list[str]:
    if o.scenario.cost is None:
        return []
    b = bills(o)
    what = counted(o.scenario)
    rows = [["takes", "energy", "CO2e", "electricity", "devices"],
            ["one step", *bill_cells(b.step)],
            [f"{o.operations.days:g} days", *bill_cells(b.run)],
            [f"a million {what} kept", *bill_cells(b.million_tokens)]]  # fmt: skip
    return ["", table(rows)]


def assumptions(o: Operated) -> list[str]:
    """Return what was assumed of operations, as far as it moves the answer."""
    ops, s = o.operations, o.scenario
    by_name = {"exponential": "have no age (exponential)", "weibull": "age (Weibull)",
               "burn-in": "fail more at first (burn-in)"}  # fmt: skip
    kinds = sorted({c.distribution for c in ops.components})
    swapped = any(repair != NO_NODE for repair in o.job.repair)
    lines = [
        "the run begins with its first step"
        + "; every step takes the same time" * (len(o.step_times_s) == 1)
        + " but for slow nodes" * (len(o.step_times_s) == 1 and ops.slow_node is not None),
        "failures come by the clock, also while the job recovers, which then begins anew; things "
        f"that fail {' or '.join(by_name[kind] for kind in kinds)}" if kinds else "nothing fails",
        *([AGEING] if set(kinds) - {"exponential"} else []),
        f"recovery: {format_hours(ops.detection_time)} until a failure is found, "
        f"{format_hours(ops.rescheduling_time)} to put another node in place, "
        f"{format_hours(ops.restart_time + s.run.warm_up)} to start{_warm(s)}, "
        f"{format_seconds(o.job.restore / NANOSECONDS)} to read the state; then from the last "
        "checkpoint that was written whole",
    ]  # fmt: skip
    if s.jitter is not None and ops.step_time is None:
        lines.append(
            f"steps take what {len(o.step_times_s):,} samples under [jitter] took, one after the "
            "other, round and round, each run from another one on: what lasts over many steps, as "
            "the speed of a GPU, evens out; they count as training"
        )
    if o.step is not None and (s.evaluation is not None or s.run.log_time):
        lines.append(
            "evaluations and logging make every step longer by what one of them costs a step on "
            "average; they count as training"
        )
    if swapped:
        lines.append(
            f"a node is out for {format_hours(ops.repair_time)} where its component does not say; "
            f"{ops.spare_nodes:,} nodes stand by and do not fail; without one the job "
            + (ELASTIC if ops.elastic else "waits")
        )
    save = saving(s, ops)
    stated = "" if ops.checkpoint.state is None else " (stated)"
    lines.append(
        f"a checkpoint is {format_bytes(save.state_bytes)}{stated}: master weights and optimizer "
        "states, each once, spread evenly over the devices"
        if o.saved is None
        else "checkpoints and restores take what those of [checkpoint] do beside steps that "
        "nothing disturbs, each without another one under way"
    )
    if o.job.asynchronous:
        lines.append("writing a snapshot slows no step; a failure before its end loses it")
    if ops.slow_node is not None:
        slow = ops.slow_node
        lines.append(
            f"one slow node or several make steps {slow.slowdown:g} times as long, for "
            f"{format_hours(slow.detection_time)} each; taking one out stops the job at once"
        )
    return lines + (cost_assumptions(s, o.step) if s.cost is not None else [])


def notes(o: Operated) -> list[str]:
    """Return warnings: what of the description makes a difference that is easily overlooked."""
    out, save = [], saving(o.scenario, o.operations)
    every = o.job.interval * o.step_time_s
    if o.job.asynchronous and save.write > every:
        wait = save.write - every
        out.append(
            f"a checkpoint takes {format_hours(save.write)} to write, more than the "
            f"{format_hours(every)} between two: training waits {format_hours(wait)} for each; an "
            "interval of at least the write would not"
        )
    if o.step is not None and not o.step.summary.fits:
        out.append("the plan does not fit into memory (trainsim run says by how much)")
    return out


def _warm(s: Scenario) -> str:
    return f" (run.warm_up, {format_hours(s.run.warm_up)}, with it)" * (s.run.warm_up > 0)


def operated_dict(o: Operated, best: Best | None = None) -> dict[str, Any]:
    """Return the report as plain values, units in the names of keys."""
    s, ops = o.scenario, o.operations
    save, between = saving(s, ops), mtbf(ops, s.cluster.world_size, s.cluster.num_nodes)
    finite = between != float("inf")
    categories = {
        name: {"mean": x.mean, "p5": x.low, "p50": x.middle, "p95": x.high}
        for name, x in ((name, Spread.of(v)) for name, v in o.by_category().items())
    }
    out: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "scenario": s.name,
        "days": ops.days,
        "seeds": {"first": o.seeds[0], "count": len(o.seeds)},
        "step_time_s": o.step_time_s,
        "step_time_is_stated": o.step is None,
        "step_times_s": list(o.step_times_s),
        "mtbf_s": between if finite else None,
        "checkpoint": {
            "interval_s": o.job.interval * o.step_time_s,
            "interval_steps": o.job.interval,
            "state_bytes": save.state_bytes,
            "write_s": save.write,
            "blocked_s": save.blocked,
            "restore_s": save.restore,
            "is_simulated": o.saved is not None,
            "young_s": young(save.blocked, between) if finite else None,
            "daly_s": daly(save.blocked, between) if finite else None,
            "lost_share_to_first_order": (
                lost_share(o.job.interval * o.step_time_s, save.blocked, between)
                if finite else 0.0
            ),
        },
        "goodput": _spread(o.goodput),
        "interruptions": _spread(o.interruptions),
        "steps": _spread(o.steps),
        "tokens": _spread(o.tokens),
        "share_of_wall_clock": categories,
        "interruptions_by_component": {
            name: _spread(o.outcome.interruptions[:, k]) for k, name in enumerate(o.job.names)
        },
        "samples": {
            "goodput": o.goodput.tolist(),
            "interruptions": o.interruptions.tolist(),
            "steps": o.steps.tolist(),
        },
        "assumptions": assumptions(o),
        "notes": notes(o),
    }  # fmt: skip
    if best is not None:
        out["best_interval"] = {
            "best_s": best.best, "young_s": best.young, "daly_s": best.daly,
            "intervals_s": list(best.seconds), "goodput": list(best.goodput),
        }  # fmt: skip
    if s.cost is not None:
        b = bills(o)
        out["cost"] = {
            "step": bill_dict(b.step), "run": bill_dict(b.run),
            "million_tokens": bill_dict(b.million_tokens),
        }  # fmt: skip
    return out


def _spread(values: Any) -> dict[str, float | None]:
    x = Spread.of(values)
    return {
        "mean": x.mean, "mean_95_percent": None if np.isnan(x.error) else x.error,
        "p5": x.low, "p50": x.middle, "p95": x.high,
    }  # fmt: skip
