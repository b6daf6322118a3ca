"""What was assumed of a schedule: where stages lie, how backward is cut, who waits for whom."""

from __future__ import annotations

from simulator.describe.scenario import Scenario
from simulator.lower.places import layout
from simulator.schedules import Target, schedule_name, schedule_of


def schedule_assumptions(s: Scenario) -> list[str]:
    """Return what was assumed of the schedule of a pipeline."""
    plan, found, out = s.plan, layout(s), []
    if plan.chunks > 1:
        out.append(_placed(s))
    if plan.microbatch_group is not None:
        out.append(
            f"{plan.microbatch_group} microbatches pass each chunk of a rank before its next one"
        )
    if found.splits:
        out.append(
            "a split backward frees with I what no weight's gradient needs; the inputs of products "
            "and the gradients of their outputs stay until W, where gradients of weights are "
            "complete, those of norms too, though I computes them"
        )
    if found.splits and plan.recompute != "none":
        out.append(
            "I and W both compute a layer again, which keeps its input and gradients until W"
            if plan.recompute_again
            else "what I has computed again stays until W, which computes nothing again"
        )
    if found.pairs:
        out.append(
            "kernels of a forward and a backward that run together take turns, a run between two "
            "collectives each, at full rate; each waits for its own inputs and collectives only"
        )
    if found.copies > 1:
        out.append(
            "a stage lies on two ranks with weights, gradients and optimizer states on both, or "
            "their shards over dp; its gradients are summed over both and over dp"
        )
    if plan.post_validation:
        out.append(
            "ranks update before they know the norm of the whole pipeline; it goes along with the "
            "pipeline at no cost, and no update is ever taken back"
        )
    if found.updates:
        out.append(
            "weights are updated after every microbatch, and steps follow without a flush; ranks "
            f"keep {', '.join(map(str, found.versions))} versions of their weights, and no step is "
            "worth less for gradients of older ones"
        )
    if s.target is not None:
        out.append(_made_for(s, s.target))
    note = schedule_of(plan.schedule).note
    return [*out, note] if note else out


def _placed(s: Scenario) -> str:
    """Return where stages lie, by the rule or one by one."""
    count, pp, stages = s.plan.num_stages, s.plan.pp, layout(s).stages
    if stages == tuple(tuple(range(rank, count, pp)) for rank in range(pp)):
        return (
            f"stage s of {count} lies on pipeline rank s mod {pp}, and the last rank sends to the "
            "first over the network"
        )
    if stages == tuple((rank, 2 * pp - 1 - rank) for rank in range(pp)):
        return (
            f"stage s of {count} lies on pipeline rank s, from stage {pp} on on rank "
            f"{count - 1} - s, and stages {pp - 1} and {pp} hand over without a message"
        )
    if stages == tuple(tuple(sorted((rank, pp - 1 - rank))) for rank in range(pp)):
        return f"stage s of {count} lies on pipeline ranks s and {pp - 1} - s"
    shown = [f"{rank}: {', '.join(map(str, held))}" for rank, held in enumerate(stages)]
    return f"stages by pipeline rank: {'; '.join(shown[:8])}" + "; ..." * (pp > 8)


def _made_for(s: Scenario, target: Target) -> str:
    """Return for which times and how much memory the schedule was ordered."""
    times = "plan.schedule_times"
    if s.plan.schedule_times is None:
        times = "F, I and W of one time on all stages and free messages (plan.schedule_times)"
    end = "of all ranks' step together" if target.synchronous else "of the slowest rank's own step"
    kept = "whole" if target.kept == 1 else f"{target.kept:.3g} of it"
    return (
        f"{schedule_name(s.plan.schedule)} is ordered by a heuristic for {times} and the least "
        f"time {end}; a rank keeps activations of at most {target.memory * s.plan.pp:.4g} "
        f"microbatches (plan.schedule_memory {target.memory:g}), {kept} from I to W "
        "(plan.schedule_kept)"
    )
