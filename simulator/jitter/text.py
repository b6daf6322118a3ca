"""What a report says of jitter, as text and as plain values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from simulator.jitter.result import Blame, Jittered
from simulator.report.text import stages_head, stages_text, table
from simulator.units import format_seconds

MOST_RANKS = 5
"""Ranks that the text names."""


def jittered_text(j: Jittered) -> str:
    """Return what goes below the report of the step that nothing disturbs."""
    count = len(j.step_ticks)
    more = j.mean_s / j.result.step_time_s - 1
    drawn = f"{count:,} samples, seed {j.jitter.seed}" if j.jitter.is_random else "nothing is drawn"
    lines = [
        f"jitter        {drawn}",
        f"  undisturbed {format_seconds(j.result.step_time_s)}",
        f"  step        {format_seconds(j.mean_s)} (mean, {more:+.2%}), standard deviation "
        f"{format_seconds(j.sd_s)}, {format_seconds(j.step_s.min())} to "
        f"{format_seconds(j.step_s.max())}",
    ]
    if count > 1:
        lines.append(
            "  percentiles "
            + ", ".join(f"{p} % {format_seconds(x)}" for p, x in j.percentiles_s.items())
        )
    lines += [*_blamed(j), "", _gains(j), "", _places(j), "", _kinds(j), "", "assumed of jitter:"]
    return "\n".join([*lines, *(f"  - {line}" for line in assumptions(j))])


def _blamed(j: Jittered) -> list[str]:
    """Return the ranks and the ops that most often delay a step by most."""
    ranks = enumerate(j.by_rank)
    worst = sorted((-b.delays_most, -b.delay_s, rank) for rank, b in ranks if b.delays_most)
    if not worst:
        return ["  delayed by  nobody"]
    named = ", ".join(f"rank {rank} in {-share:.0%}" for share, _, rank in worst[:MOST_RANKS])
    others = len(worst) - MOST_RANKS
    beyond = f", {others:,} other ranks" if others > 0 else ""
    op, rank, share = j.worst_ops[0]
    return [
        f"  delayed by  {named} of samples{beyond}",
        f"  worst op    {op} on rank {rank}, in {share:.0%} of samples",
    ]


def _gains(j: Jittered) -> str:
    """Return what a step would gain without each disturbance."""
    rows = [["without", "step", "gain", "of the step"]]
    for name, g in j.gains.items():
        gain = f"{format_seconds(g.mean_s)} +- {format_seconds(g.error_s)}"
        rows.append([name, format_seconds(j.mean_s - g.mean_s), gain, f"{g.share:.2%}"])
    base = j.result.step_time_s
    every = j.mean_s - base
    rows.append(
        ["all of it", format_seconds(base), format_seconds(every), f"{every / j.mean_s:.2%}"]
    )
    return table(rows)


def _places(j: Jittered) -> str:
    head = stages_head(j.result)
    names = [stages_text(stages) for stages in j.result.stages]
    columns = ["on the path", "delay", "delays most", "ends the step", "critical", "slack"]
    return table([[head, *columns], *_rows(zip(names, j.by_place, strict=True), slack=True)])


def _kinds(j: Jittered) -> str:
    columns = ["on the path", "delay", "delays most", "ends the step"]
    return table([["kind", *columns], *_rows(j.by_kind.items(), slack=False)])


def _rows(blamed: Iterable[tuple[str, Blame]], *, slack: bool) -> list[list[str]]:
    rows = []
    for name, b in blamed:
        row = [name, format_seconds(b.path_s), format_seconds(b.delay_s)]
        row += [f"{b.delays_most:.0%}", f"{b.ends:.0%}"]
        rows.append([*row, f"{b.critical:.0%}", format_seconds(b.slack_s)] if slack else row)
    return rows


def assumptions(j: Jittered) -> list[str]:
    """Return what was assumed and moves the answer."""
    jitter, run = j.jitter, j.result.scenario.run  # type: ignore[union-attr]  # it has jitter
    out = []
    if jitter.op_cv:
        out.append(
            f"each op of run.detail {run.detail!r} has noise of its own, log-normal around its "
            "time: the finer the ops, the more of it evens out within a pass; measure "
            "jitter.op_cv of ops as long as these"
        )
    if jitter.flow_cv:
        out.append("each message and collective has noise of its own, log-normal around its time")
    if jitter.host_cv:
        out.append(
            "each request, read, transform and copy of a batch, and each part of a checkpoint, has "
            "noise of its own"
            + (", where storage's links do not set its rate" if run.network == "fluid" else "")
        )
    if jitter.gpu_cv:
        out.append("the speed of a GPU is drawn anew for each sample, log-normal, for all its work")
    if jitter.random_slow_gpus or jitter.random_slow_links:
        out.append("slow ranks are drawn anew for each sample, each rank whatever the others")
    if jitter.slow_links or jitter.random_slow_links:
        out.append("a slow link takes its factor longer, latency too, in all flows of its rank")
    if jitter.interference:
        out.append(
            "interference holds a rank's work for its whole duration, as if its host had launched "
            "nothing ahead, at a phase that each rank draws by itself; flows, loaders and "
            "writers go on"
        )
    out.append(
        "delay is time on the critical path beyond that of the same op in the undisturbed step; a "
        "flow counts for the rank that came last; slack takes all else as long as it took"
    )
    return out


def jittered_dict(j: Jittered) -> dict[str, Any]:
    """Return jitter as plain values; the keys name their units."""
    ranks = j.by_rank
    return {
        "samples": len(j.step_ticks),
        "seed": j.jitter.seed,
        "undisturbed_step_time_s": j.result.step_time_s,
        "mean_step_time_s": j.mean_s,
        "sd_step_time_s": j.sd_s,
        "percentiles_s": {f"p{p}": x for p, x in j.percentiles_s.items()},
        "step_times_s": j.step_s.tolist(),
        "without": {name: gain._asdict() for name, gain in j.gains.items()},
        "ranks": {name: [getattr(b, name) for b in ranks] for name in Blame._fields},
        "places": [
            {"stages": stages, **b._asdict()}
            for stages, b in zip(j.result.stages, j.by_place, strict=True)
        ],
        "kinds": {name: _known(b) for name, b in j.by_kind.items()},
        "worst_ops": [
            {"op": op, "rank": rank, "share": share} for op, rank, share in j.worst_ops[:20]
        ],
        "assumptions": assumptions(j),
    }


def _known(b: Blame) -> dict[str, float]:
    """Return what is known of a kind: it has no slack."""
    return {name: value for name, value in b._asdict().items() if value == value}
