"""What a search has found, as text and as plain values: the best plans, and why others lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from simulator.explore.change import words
from simulator.explore.objective import OBJECTIVES
from simulator.explore.search import Found
from simulator.explore.space import settings_text
from simulator.explore.trial import Trial
from simulator.operate.cost import cost_assumptions, drawn
from simulator.report.summary import OWNERS
from simulator.report.text import SCHEMA_VERSION, table
from simulator.units import format_bytes, format_seconds

TOP = 8
"""Plans that are listed."""

PARTS = 3
"""Parts of a step that are named where a plan loses, at most."""

WORTH = 0.005
"""Of the best plan's step: smaller parts are not named."""


def longer(trial: Trial, best: Trial, objective: str = "time") -> dict[str, float]:
    """Return by how many seconds each part of a plan's step is longer than the best one's.

    Longest first; parts sum to the difference of the steps, shorter ones counted. Where devices are
    paid for, those of a plan on more devices are longer in proportion.
    """
    scale = 1.0 if objective == "time" else trial.num_devices / best.num_devices
    parts = {k: scale * trial.owners_s[k] - best.owners_s[k] for k in trial.owners_s}
    return dict(sorted(parts.items(), key=lambda item: -item[1]))


def why(trial: Trial, best: Trial, objective: str = "time") -> str:
    """Return why a plan is worse than the best one, in words."""
    if trial.failed:
        return trial.failed
    if not trial.fits:
        return f"does not fit, by {format_bytes(trial.over_bytes)}"
    parts = longer(trial, best, objective)
    named = [(k, v) for k, v in parts.items() if v > WORTH * best.step_time_s][:PARTS]
    less = [(k, v) for k, v in reversed(parts.items()) if -v > WORTH * best.step_time_s][:1]
    text = [f"{SHORT.get(k, k)} {'+' if v > 0 else '-'}{format_seconds(abs(v))}"
            for k, v in named + less]  # fmt: skip
    if trial.num_devices != best.num_devices:
        text.insert(0, f"{trial.num_devices} devices")
    return ", ".join(text) or "as fast"


SHORT = {
    "memory": "memory bandwidth",
    **{k: f"exposed {k}" for k in ("tp", "pp", "dp", "cp", "ep")},
}


def found_text(found: Found, top: int = TOP) -> str:
    """Return a report of a search."""
    s, objective = found.scenario, OBJECTIVES[found.objective]
    lines = [f"{s.name}: plans by {found.objective}", *_counts(found), ""]
    best = found.best
    if not best:
        return "\n".join([*lines, _nothing(found), *_lost(found)])
    titles = list(dict.fromkeys([objective.title, "step"]))
    rows = [["", *titles, "MFU", "memory", "plan, and what it loses to the first"]]
    for number, t in enumerate(best[:top], 1):
        lost = "" if number == 1 else f": {why(t, best[0], found.objective)}"
        rows.append([
            str(number), *[objective.show(t), format_seconds(t.step_time_s)][-len(titles) :],
            f"{t.mfu:.1%}",
            format_bytes(t.device_memory_bytes), f"{t.name}{lost}",
        ])  # fmt: skip
    lines += [_aligned(rows), "", "to run them, add"]
    lines += [f"  {i}  {settings_text(t.settings)}" for i, t in enumerate(best[:top], 1)]
    lines += ["", _own(found), *_lost(found), "", "assumed:"]
    lines += [f"  - {line}" for line in search_assumptions(found)]
    return "\n".join(lines)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose last column is left."""
    body = table([row[:-1] for row in rows]).split("\n")
    widest = max(map(len, body))
    return "\n".join(f"{a:<{widest}}  {row[-1]}" for a, row in zip(body, rows, strict=True))


def _counts(found: Found) -> list[str]:
    p = found.pruned
    refused = f" ({found.refused:,} more were refused by the checks)" if found.refused else ""
    lines = [f"  space       {found.legal:,} legal plans{refused}: {_axes(found)}"]
    if p.count:
        parts = [
            f"{len(sizes):,} {what} ({_range(sizes)} too much)"
            for sizes, what in ((p.by_states, "by weights, gradients and optimizer states alone"),
                                (p.by_activations, "with activations in flight"))
            if sizes
        ]  # fmt: skip
        lines.append(f"  pruned      {p.count:,} that cannot fit: {', '.join(parts)}")
    left = f", {found.left:,} were not" if found.left else ""
    fits = sum(t.fits for t in found.trials)
    over = len(found.trials) - fits
    lines.append(
        f"  simulated   {len(found.trials):,} plans, {found.how}{left}; {fits:,} fit"
        + f", {over:,} do not" * bool(over)
    )
    if found.deadline is not None:
        d = found.deadline
        lines.append(
            f"  deadline    {d.tokens:.4g} tokens in {d.seconds / 86400:.4g} days: "
            f"{len(found.fitting):,} plans meet it"
        )
    return lines


def _axes(found: Found) -> str:
    return "; ".join(
        f"{key.partition('.')[2]} {', '.join(map(_word, values))}"
        for key, values in found.axes.items()
        if len(values) > 1
    )


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _range(sizes: Sequence[float]) -> str:
    low, high = format_bytes(sizes[0]), format_bytes(sizes[-1])
    return low if low == high else f"{low} to {high}"


def _nothing(found: Found) -> str:
    if any(t.fits for t in found.trials):
        fastest = next(t for t in found.trials if t.fits)
        return (
            f"no plan meets the deadline; the nearest trains {fastest.tokens_per_s:,.0f} tokens/s: "
            f"{fastest.name}"
        )
    run = [t for t in found.trials if not t.failed]
    if run:
        return (
            f"no plan fits; the closest lacks {format_bytes(run[0].over_bytes)}: {run[0].name}: "
            f"{settings_text(run[0].settings)}"
        )
    return "no plan fits: take more or larger devices, or give more values with --over"


def _own(found: Found) -> str:
    own, best = found.own, found.best[0]
    if not own.fits:
        return f"the scenario's own plan, {own.name}: {why(own, best)}"
    rank = found.rank_of_own
    among = "" if found.settled else f", {rank:,} of {len(found.fitting):,} that fit"
    if own not in found.trials:
        among = ", which is not in the space"
    return (
        f"the scenario's own plan, {own.name}{among}: step {format_seconds(own.step_time_s)}, "
        f"{own.step_time_s / best.step_time_s - 1:+.1%}: {why(own, best, found.objective)}"
    )


def _lost(found: Found) -> list[str]:
    """Return why plans lost, by what each loses most in."""
    fitting = found.fitting
    groups: dict[str, list[Trial]] = {}
    for t in fitting[1:]:
        owner, seconds = next(iter(longer(t, fitting[0], found.objective).items()))
        groups.setdefault(owner if seconds > 0 else "devices", []).append(t)
    rows = [["why the others lost", "plans", "least", "median", "most", "the best of them"]]
    for owner, members in sorted(groups.items(), key=lambda item: -len(item[1])):
        gaps = (longer(t, fitting[0], found.objective) for t in members)
        more = sorted(sum(gap.values()) for gap in gaps)
        rows.append([
            OWNERS.get(owner, "more devices"), f"{len(members):,}",
            *(f"{x:+.3g} s" for x in (more[0], median(more), more[-1])), members[0].name,
        ])  # fmt: skip
    over = [t for t in found.trials if not t.fits and not t.failed]
    if over:
        sizes = sorted(t.over_bytes for t in over)
        rows.append([
            "does not fit, when simulated", f"{len(over):,}",
            *(format_bytes(x) for x in (sizes[0], median(sizes), sizes[-1])), over[0].name,
        ])  # fmt: skip
    failed = [t for t in found.trials if t.failed]
    lines = ["", _aligned(rows)] if len(rows) > 1 else []
    if failed:
        lines.append(f"could not be run: {len(failed):,}, as {failed[0].name}: {failed[0].failed}")
    return lines


def search_assumptions(found: Found) -> list[str]:
    """Return what moved the order of plans."""
    s = found.scenario
    lines = [
        "batch, sequence, precision, optimizer and devices stay; dp fills the cluster; layers are "
        "divided evenly, or with embedding and head counted as a layer each"
        if s.plan.stage_cut == "uniform"
        else f"batch, sequence, precision, optimizer and devices stay; dp fills the cluster; "
        f"layers are cut by {s.plan.stage_cut}, so that no plan is ruled out before it is run",
        "a part of a step is a mean over ranks; parts of a plan less those of the first say what "
        "it loses",
    ]
    if len({t.num_devices for t in found.fitting}) > 1 and found.objective != "time":
        lines.append(
            "what a plan on more devices loses is counted in seconds of as many devices as the "
            "first has"
        )
    if s.run.network == "fluid":
        lines.append(
            f"plans were run with every flow alone; the best {len(found.settled)} of them then "
            "with links shared, by which they are ordered"
        )
    if found.deadline is not None:
        lines.append("the deadline is met without failures, checkpoints and other pauses")
    if found.objective == "energy":
        from dataclasses import replace

        from simulator.describe.cost import Cost

        priced = s if s.cost is not None else replace(s, cost=Cost())
        lines += cost_assumptions(priced, None)[1:2]
        c, device = priced.cost, s.cluster.node.device
        assert c is not None
        busy, waiting = drawn(device, c)
        lines.append(
            f"a device draws {busy:g} W computing, {waiting:g} W while only communication runs, "
            f"{device.idle_power:g} W in bubbles"
        )
    if found.objective == "tokens_per_dollar":
        assert s.cost is not None
        paid = "devices" if s.cost.device_price is not None else "electricity"
        lines.append(f"paid for: {paid} only")
    return lines


def found_dict(found: Found, top: int | None = None) -> dict[str, Any]:
    """Return a search as plain values; keys carry their units."""
    best = found.best[:top]
    return {
        "schema_version": SCHEMA_VERSION,
        "scenario": found.scenario.name,
        "objective": found.objective,
        "axes": {key: list(values) for key, values in found.axes.items()},
        "legal": found.legal,
        "refused": found.refused,
        "pruned_by_states": len(found.pruned.by_states),
        "pruned_by_activations": len(found.pruned.by_activations),
        "simulated": len(found.trials),
        "not_simulated": found.left,
        "how": found.how,
        "best": [_trial_dict(t, best[0], found.objective) for t in best],
        "own": _trial_dict(found.own, best[0] if best else found.own, found.objective),
        "rank_of_own": found.rank_of_own,
        "others": [_trial_dict(t, best[0], found.objective) for t in found.trials if not t.fits]
        if best
        else [],
        "assumptions": search_assumptions(found),
    }


def _trial_dict(t: Trial, best: Trial, objective: str) -> dict[str, Any]:
    document = asdict(t)
    for name in ("number", "place"):
        del document[name]
    document["set"] = words(t.settings)
    document["why"] = "" if t is best else why(t, best, objective)
    return document
