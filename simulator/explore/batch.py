"""Batch size and time to a loss: the critical-batch model.

McCandlish et al., 2018 (arXiv 1812.06162), equation 2.11: reaching a loss takes S steps and E
samples with (S/S_min - 1)(E/E_min - 1) = 1, and B_crit = E_min/S_min. With E = B S it follows that
S/S_min = 1 + B_crit/B and E/E_min = 1 + B/B_crit: at the critical batch both are twice their least.
B_crit grows as the loss falls, and is a fact of model and data that somebody must have measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from simulator.explore.search import Found
from simulator.explore.space import settings_text
from simulator.explore.trial import Trial
from simulator.report.text import table
from simulator.units import format_seconds


def steps_over_least(batch: float, critical: float) -> float:
    """Return S/S_min of a batch; both in tokens, or both in samples."""
    return 1 + critical / batch


def samples_over_least(batch: float, critical: float) -> float:
    """Return E/E_min of a batch; both in tokens, or both in samples."""
    return 1 + batch / critical


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A global batch with its best plan, and what reaching the loss takes with it."""

    samples: int
    plan: Trial
    steps: float
    """Over the fewest, S/S_min."""
    data: float
    """Samples over the fewest, E/E_min."""
    time_s: float
    """Seconds to the loss for each of the S_min steps: S/S_min x step."""
    usd: float | None
    """Money likewise; None where nothing is priced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Batches beside each other."""

    critical_tokens: float
    tokens_per_sample: int
    batches: tuple[Batch, ...]
    """Ascending."""
    left_out: tuple[str, ...]
    """Batches without a plan, and why."""

    @property
    def fastest(self) -> Batch:
        """The one that reaches the loss first."""
        return min(self.batches, key=lambda b: b.time_s)

    def __str__(self) -> str:
        first = self.fastest
        rows = [
            ["batch", "B/B_crit", "step", "steps/S_min", "data/E_min", "time to the loss", "USD"]
        ]
        cheapest = min((b.usd for b in self.batches if b.usd is not None), default=None)
        for b in self.batches:
            usd = "-" if b.usd is None or cheapest is None else f"{b.usd / cheapest:.2f} x"
            rows.append([
                str(b.samples), f"{b.samples * self.tokens_per_sample / self.critical_tokens:.3g}",
                format_seconds(b.plan.step_time_s), f"{b.steps:.3g}", f"{b.data:.3g}",
                f"{b.time_s / first.time_s:.2f} x", usd,
            ])  # fmt: skip
        lines = [
            f"batch size, with a critical batch of {self.critical_tokens:.4g} tokens",
            table(rows),
            f"the loss is reached first with batch {first.samples}: {first.plan.name}: "
            f"--set run.global_batch_size={first.samples} {settings_text(first.plan.settings)}",
            *(f"left out: {reason}" for reason in self.left_out),
            "assumed: S/S_min = 1 + B_crit/B and E/E_min = 1 + B/B_crit (McCandlish et al., 2018), "
            "one critical batch for the whole run, each batch with its own best plan and a "
            "learning rate tuned to it",
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the advice as plain values; keys carry their units."""
        return {
            "critical_batch_tokens": self.critical_tokens,
            "batches": [
                {
                    "global_batch_size": b.samples,
                    "step_time_s": b.plan.step_time_s,
                    "steps_over_least": b.steps,
                    "data_over_least": b.data,
                    "time_to_loss_s_per_least_step": b.time_s,
                    "usd_per_least_step": b.usd,
                    "settings": b.plan.settings,
                }
                for b in self.batches
            ],
            "fastest_global_batch_size": self.fastest.samples,
            "left_out": list(self.left_out),
        }


def advise(found: Sequence[Found], critical_tokens: float, left_out: Sequence[str] = ()) -> Advice:
    """Return what searches at several batches say of the time to a loss.

    Args:
        found: a search for each batch; one without a plan that fits is left out.
        critical_tokens: the critical batch of the loss that is aimed at.
        left_out: batches that could not be searched, and why.
    """
    batches, out = [], list(left_out)
    length = found[0].scenario.tokens_per_sample
    for one in found:
        samples = one.scenario.run.global_batch_size
        if not one.best:
            out.append(f"batch {samples}: no plan fits")
            continue
        plan, size = one.best[0], float(samples * length)
        steps = steps_over_least(size, critical_tokens)
        usd = None if plan.tokens_per_usd is None else steps * size / plan.tokens_per_usd
        batches.append(
            Batch(
                samples=samples, plan=plan, steps=steps,
                data=samples_over_least(size, critical_tokens),
                time_s=steps * plan.step_time_s, usd=usd,
            )
        )  # fmt: skip
    batches.sort(key=lambda b: b.samples)
    return Advice(
        critical_tokens=critical_tokens, tokens_per_sample=length, batches=tuple(batches),
        left_out=tuple(out),
    )  # fmt: skip
