"""What a step gains when one thing is ideal, and what is worth a try; every number is of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simulator.api import simulate
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.explore.change import by_stage, words
from simulator.explore.critical import Path, critical_path
from simulator.explore.ideal import MORE, Ideal, ideals, scaled, with_settings
from simulator.explore.next_steps import Step, Steps, next_steps
from simulator.report.result import Result
from simulator.report.summary import OWNERS
from simulator.report.text import SCHEMA_VERSION, stages_text, table
from simulator.units import format_bytes, format_seconds

NOTHING = 1e-6
"""Of the step: gains below it are none."""

MOST_SLACK = 64.0
"""Times as long that communication is made, at most, to find its slack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What making one thing ideal changes."""

    ideal: Ideal
    step_time_s: float
    """Of the run; with more samples in a step, for as many as the scenario has."""
    gain: float
    """Of the scenario's step."""
    more_memory_bytes: float
    fits: bool
    on_path_s: float | None
    """What the critical path has of it: no gain is larger, but for work beside it that it slows.
    None where it is of several owners."""
    slack: float | None = None
    """Where it gains nothing: how many times as long it may take before a step is longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A scenario with each of several things made ideal."""

    scenario: Scenario
    result: Result
    path: Path
    gains: tuple[Gain, ...]
    """Largest first."""
    steps: Steps
    left_out: tuple[str, ...]

    def gain_of(self, name: str) -> float | None:
        """Return the gain of an ideal by its name, or None where it has not been tried."""
        return next((g.gain for g in self.gains if g.ideal.name == name), None)

    @property
    def verdict(self) -> str:
        """What the step is bound by, in a sentence."""
        return verdict(self)

    def __str__(self) -> str:
        return whatif_text(self)


def what_if(s: Scenario) -> WhatIf:
    """Return what a scenario gains when one thing is made ideal, each by a run of its own.

    Raises:
        DescriptionError: when its replicas are not in step.
    """
    coarse = by_stage(s)
    result = simulate(coarse)
    path = critical_path(result)
    gains, left_out = [], []
    for ideal in ideals(coarse):
        try:
            gains.append(_gain(ideal, coarse, result, path))
        except DescriptionError as error:
            left_out.append(f"{ideal.name}: {' '.join(str(error).split())}")
    gains.sort(key=lambda g: (-g.gain, g.ideal.name))
    return WhatIf(
        scenario=s, result=result, path=path, gains=tuple(gains), steps=next_steps(s),
        left_out=tuple(left_out),
    )  # fmt: skip


def _gain(ideal: Ideal, s: Scenario, now: Result, path: Path) -> Gain:
    result = ideal.run(s)
    then = result.summary
    assert result.scenario is not None
    samples = result.scenario.run.global_batch_size / s.run.global_batch_size
    seconds = then.step_time_s / samples
    gain = 1 - seconds / now.step_time_s
    hidden = abs(gain) < NOTHING
    return Gain(
        ideal=ideal,
        step_time_s=seconds,
        gain=0.0 if hidden else gain,
        more_memory_bytes=then.device_memory_bytes - now.summary.device_memory_bytes,
        fits=then.fits,
        on_path_s=path.owners_s.get(ideal.owner, 0.0) if ideal.reprice and ideal.owner else None,
        slack=_slack(ideal, s, now.step_time_s) if hidden else None,
    )


def _slack(ideal: Ideal, s: Scenario, step_s: float) -> float | None:
    """Return how many times as long something hidden may take, found by runs; None if unknown."""
    rates = [key for key in ideal.settings if key.endswith("bandwidth")]
    if ideal.reprice is None and not rates:
        return None

    def grows(factor: float) -> bool:
        if ideal.reprice is not None:
            return simulate(s, repriced=scaled((ideal.owner,), factor)).step_time_s > (
                step_s * (1 + NOTHING)
            )
        slower: dict[str, object] = {
            key: f"{_value(s, key) / factor / 1e9!r} GB/s" for key in rates
        }  # fmt: skip
        return simulate(with_settings(s, slower)).step_time_s > step_s * (1 + NOTHING)

    return bisected(grows)


def bisected(grows: Callable[[float], bool]) -> float:
    """Return the largest factor, to 1 %, with which nothing grows; `MOST_SLACK` at most."""
    low, high = 1.0, 2.0
    while not grows(high):
        if high >= MOST_SLACK:
            return MOST_SLACK
        low, high = high, 2 * high
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if grows(middle) else (middle, high)
    return low


def _value(s: Scenario, key: str) -> float:
    value: Any = s
    for name in key.split("."):
        value = getattr(value, name)
    return float(value)


BOUND = {
    "no launch gaps": "launch-bound",
    "infinite memory bandwidth": "bound by memory bandwidth",
    "perfect stage balance": "held up by unequal stages",
    "twice the batch": "bubble-bound",
    MORE: "bubble-bound",
    "no recomputation": "held up by recomputation",
}
"""What a step is when an ideal gains most."""

WORTH = 0.02
"""Gains below it do not make a verdict."""


MOST_OF = 0.9
"""Part of the largest gain with which an ideal of one owner makes the verdict."""


def verdict(w: WhatIf) -> str:
    """Return what a step is bound by, and what it is not, with the runs that say so."""
    compute = w.path.owners_s.get("compute", 0.0) / w.path.step_s
    candidates = [g for g in w.gains if g.gain >= WORTH]
    best = candidates[0] if candidates else None
    if best is not None and not best.ideal.owner:  # one owner that has nearly all of it says more
        enough = (g for g in candidates if g.ideal.owner and g.gain >= MOST_OF * best.gain)
        best = next(enough, best)
    if best is None or compute > best.gain:
        more = (
            f"; of what could be ideal, {best.ideal.name} gains most, {best.gain:.1%}"
            if best
            else ""
        )
        text = f"compute-bound: arithmetic has {compute:.1%} of the critical path{more}"
    else:
        said = BOUND.get(
            best.ideal.name, f"bound by {OWNERS.get(best.ideal.owner, 'communication')}"
        )
        text = f"{said}: {best.ideal.name} would gain {best.gain:.1%}"
    smaller = w.gain_of(MORE)
    if w.scenario.plan.pp > 1 and smaller is not None and smaller < WORTH / 2:
        cost = f"cost {-smaller:.1%}" if smaller < 0 else f"gain {smaller:.1%}"
        text += f"; not bubble-bound: {MORE} would {cost}"
    return text


def whatif_text(w: WhatIf) -> str:
    """Return a report of what would happen if."""
    step = w.path.step_s
    lines = [
        f"{w.scenario.name}: step {format_seconds(w.result.step_time_s)}",
        f"  {w.verdict}",
        "",
        f"critical path of the last step; main rank: {stages_named(w.path.main_stages)}",
        *(f"  {OWNERS[k]:<32} {format_seconds(v):>9}  {v / step:6.1%}{_which(k, w.path)}"
          for k, v in w.path.owners_s.items() if v >= 0.0005 * step),
        "",
    ]  # fmt: skip
    rows = [["if there were", "step", "gain", "on the path", "memory"]]
    rows += [_row(g, step) for g in w.gains]
    lines += [table(rows), ""]
    for g in w.gains:
        if g.slack is not None:
            lines.append(_hidden(g))
    lines += _steps(w)
    lines += [f"left out: {reason}" for reason in (*w.left_out, *w.steps.left_out)]
    lines += ["", "assumed:", *(f"  - {line}" for line in _assumed(w))]
    return "\n".join(lines)


def stages_named(stages: tuple[int, ...]) -> str:
    """Return the stages of a rank in words."""
    return f"stage{'s' * (len(stages) > 1)} {stages_text(stages)}"


def _which(owner: str, path: Path) -> str:
    if owner == "compute":
        named = list(path.kernels_s.items())[:4]
        return "  most in " + ", ".join(f"{k} {format_seconds(v)}" for k, v in named)
    mine = [(k, v) for k, v in path.groups_s.items() if k.partition(" ")[0] == owner][:3]
    if not mine or (len(mine) == 1 and " of " not in mine[0][0]):
        return ""
    return "  " + ", ".join(f"{k.partition(' of ')[2]} {format_seconds(v)}" for k, v in mine)


def _row(g: Gain, step: float) -> list[str]:
    path = "" if g.on_path_s is None else f"{g.on_path_s / step:.2%}"
    more = f"{'+' if g.more_memory_bytes > 0 else '-'}{format_bytes(abs(g.more_memory_bytes))}"
    memory = more if abs(g.more_memory_bytes) >= 1e6 else ""
    return [
        g.ideal.name, format_seconds(g.step_time_s), f"{g.gain:+.2%}", path,
        memory + ("" if g.fits else " DOES NOT FIT"),
    ]  # fmt: skip


def _hidden(g: Gain) -> str:
    assert g.slack is not None
    what = g.ideal.name.removeprefix("free ").removeprefix("infinite ")
    if g.slack >= MOST_SLACK:
        return f"{what}: fully hidden or not in use: {MOST_SLACK:g} x as slow changes nothing"
    return f"{what}: fully hidden, slack {g.slack:.2f} x: only slower than that is a step longer"


def _steps(w: WhatIf) -> list[str]:
    found = w.steps
    if not found.singles:
        return [f"nothing to try next: of {found.tried} changes of the plan none that fits gains"]
    rows = [["to try next", "step", "gain", "memory"]]
    rows += [_step_row(", ".join(words(x.settings)), x) for x in found.singles[:5]]
    lines = [table(rows)]
    over = f"; {found.over} more would gain and do not fit" if found.over else ""
    lines.append(f"{found.tried} changes simulated{over}")
    if len(found.chain) > 1:
        rows = [["one on top of the other", "step", "gain", "memory"]]
        rows += [_step_row(f"{i}. " + ", ".join(words(x.settings)), x)
                 for i, x in enumerate(found.chain, 1)]  # fmt: skip
        lines += ["", table(rows)]
    return lines


def _step_row(name: str, x: Step) -> list[str]:
    sign = "+" if x.more_memory_bytes >= 0 else "-"
    return [
        name, format_seconds(x.step_time_s), f"{x.gain:+.1%}",
        f"{sign}{format_bytes(abs(x.more_memory_bytes))}",
    ]  # fmt: skip


def _assumed(w: WhatIf) -> list[str]:
    lines = [
        "every gain is of a run of its own; gains of two things together are not their sum",
        "infinite: 1e9 GB/s and no latency of links; what a collective takes to begin stays",
        "twice the batch: its step over two, so gains are of time for a sample",
    ]
    if w.scenario.run.network == "fluid":
        lines.append("what to try next was run with every flow alone")
    return lines


def whatif_dict(w: WhatIf) -> dict[str, Any]:
    """Return it as plain values; keys carry their units."""

    def step(x: Step) -> dict[str, Any]:
        return {
            "settings": x.settings, "set": words(x.settings), "step_time_s": x.step_time_s,
            "gain": x.gain, "more_memory_bytes": x.more_memory_bytes,
        }  # fmt: skip

    return {
        "schema_version": SCHEMA_VERSION,
        "scenario": w.scenario.name,
        "step_time_s": w.result.step_time_s,
        "verdict": w.verdict,
        "critical_path": {
            "owners_s": w.path.owners_s,
            "kernels_s": w.path.kernels_s,
            "groups_s": w.path.groups_s,
            "main_stages": list(w.path.main_stages),
        },
        "what_if": [
            {
                "name": g.ideal.name,
                "settings": g.ideal.settings,
                "step_time_s": g.step_time_s,
                "gain": g.gain,
                "on_path_s": g.on_path_s,
                "more_memory_bytes": g.more_memory_bytes,
                "fits": g.fits,
                "slack": g.slack,
            }
            for g in w.gains
        ],
        "to_try": [step(x) for x in w.steps.singles],
        "chain": [step(x) for x in w.steps.chain],
        "left_out": [*w.left_out, *w.steps.left_out],
        "assumptions": _assumed(w),
    }
