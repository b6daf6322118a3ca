"""Where time goes, worked out by hand, and its pieces against the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import simulator as sim
from simulator.describe.model import Model
from simulator.describe.scenario import Scenario
from simulator.engine import run
from simulator.lower.check import check
from simulator.program import ACTION_CODE
from simulator.report.breakdown import CATEGORIES, breakdown
from simulator.units import to_ticks

ScenarioOf = Callable[..., Scenario]


@pytest.fixture(scope="session")
def pieces(program_of: Callable[..., Any]) -> Callable[..., list[dict[str, int]]]:
    """Return a function from ops to the categories of each rank that are not zero."""

    def of(ops: list[Any], begin: int = 0, end: int | None = None, **more: Any) -> Any:
        program, ticks = program_of(ops, **more)
        timeline = run(check(program), ticks)
        b = breakdown(program, timeline, begin, timeline.makespan if end is None else end)
        assert (b.ticks.sum(axis=0) == b.window).all()
        return [
            {c: int(n) for c, n in zip(CATEGORIES, b.ticks[:, rank], strict=True) if n}
            for rank in range(program.num_ranks)
        ]

    return of


# F 0-3, B 3-9, OPT 9-10: nothing idle.
def test_work_is_named_by_its_action(op: Any, pieces: Any) -> None:
    ops = [op(0, 3, action="F"), op(0, 4, action="I"), op(0, 2, action="W"), op(0, 1, action="OPT")]
    assert pieces(ops) == [{"forward": 3, "backward": 6, "optimizer": 1}]


# One rank: B 0-10, B 10-20; the first one's gradients move 10-25 beside the second; OPT 25-30.
# Of the 15 ticks of the all-reduce 10 are covered, 5 exposed.
def test_only_what_backward_does_not_cover_of_an_all_reduce_is_exposed(
    op: Any, pieces: Any
) -> None:
    ops = []
    for rank in range(2):
        n = len(ops)
        ops += [
            op(rank, 10, action="B"),
            op(rank, 15, "dp", after=(n,), joint="ar", action="B"),
            op(rank, 10, action="B"),
            op(rank, 5, after=(n + 1,), action="OPT"),
        ]
    assert pieces(ops) == [{"backward": 20, "optimizer": 5, "dp": 5}] * 2


# The same with an all-reduce of 8: over before the backward ends.
def test_an_all_reduce_that_backward_covers_is_not_exposed(op: Any, pieces: Any) -> None:
    ops = []
    for rank in range(2):
        n = len(ops)
        ops += [
            op(rank, 10, action="B"),
            op(rank, 8, "dp", after=(n,), joint="ar", action="B"),
            op(rank, 10, action="B"),
            op(rank, 5, after=(n + 1,), action="OPT"),
        ]
    assert pieces(ops) == [{"backward": 20, "optimizer": 5}] * 2


# Rank 0's B ends at 10, rank 1's at 30; the all-reduce moves 30-40, OPT 40-45. Rank 0 waits 10-30
# for its partner, which is no communication, then 10 for the bytes.
def test_waiting_for_a_slower_partner_is_bubble_and_not_communication(op: Any, pieces: Any) -> None:
    ops = [
        op(0, 10, action="B"), op(0, 10, "dp", after=(0,), joint="ar"),
        op(0, 5, after=(1,), action="OPT"),
        op(1, 30, action="B"), op(1, 10, "dp", after=(3,), joint="ar"),
        op(1, 5, after=(4,), action="OPT"),
    ]  # fmt: skip
    assert pieces(ops) == [
        {"backward": 10, "optimizer": 5, "dp": 10, "drain": 20},
        {"backward": 30, "optimizer": 5, "dp": 10},
    ]


def buckets(op: Any, rank: int, first: int, lengths: list[int], backward: list[int]) -> list[Any]:
    """Return backwards that each fill a bucket, and an optimizer step after the last."""
    ops = []
    for i, (length, b) in enumerate(zip(lengths, backward, strict=True)):
        ops.append(op(rank, b, action="B"))
        ops.append(op(rank, length, "dp", after=(first + 2 * i,), joint=f"b{i}"))
    return [*ops, op(rank, 5, after=(first + len(ops) - 1,), action="OPT")]


# B 0-10 10-20; bucket 0 moves 10-40, bucket 1 waits for the stream and moves 40-50; OPT 50-55.
# From 20 to 50 buckets move one after the other: all 30 exposed; OPT waits for the last only.
def test_a_chain_of_buckets_is_exposed_as_a_whole(op: Any, pieces: Any) -> None:
    ops = buckets(op, 0, 0, [30, 10], [10, 10])
    ops += buckets(op, 1, len(ops), [30, 10], [10, 10])
    assert pieces(ops) == [{"backward": 20, "optimizer": 5, "dp": 30}] * 2


# Rank 1's second B lasts 50 (10-60). Bucket 0 moves 10-40, bucket 1 60-70. Rank 0 idles 20-70: 20
# of bucket 0, nothing 40-60, 10 of bucket 1.
def test_a_hole_between_buckets_is_bubble(op: Any, pieces: Any) -> None:
    ops = buckets(op, 0, 0, [30, 10], [10, 10])
    ops += buckets(op, 1, len(ops), [30, 10], [10, 50])
    assert pieces(ops) == [
        {"backward": 20, "optimizer": 5, "dp": 30, "drain": 20},
        {"backward": 60, "optimizer": 5, "dp": 10},
    ]


# F 0-4, tp 4-6, F 6-9 on rank 0; rank 1 arrives at 7, so the bytes move 7-9 and F runs 9-12.
def test_tensor_parallel_time_is_exposed_and_a_late_partner_is_a_stall(
    op: Any, pieces: Any
) -> None:
    ops = []
    for rank, first in ((0, 4), (1, 7)):
        n = len(ops)
        ops += [
            op(rank, first),
            op(rank, 2, "tp", after=(n,), joint="ar"),
            op(rank, 3, after=(n + 1,)),
        ]
    assert pieces(ops) == [{"forward": 7, "tp": 2, "stall": 3}, {"forward": 10, "tp": 2}]


# The optimizer waits for a tied all-reduce that waits for a bucket: 10-14 dp, 14-20 tied.
def test_flows_of_two_kinds_in_a_row_count_as_each_kind(op: Any, pieces: Any) -> None:
    ops = [
        op(0, 10, action="B"), op(0, 4, "dp", after=(0,), joint="a"),
        op(0, 6, "tied", after=(1,), joint="t"), op(0, 5, after=(2,), action="OPT"),
    ]  # fmt: skip
    assert pieces(ops) == [{"backward": 10, "dp": 4, "tied": 6, "optimizer": 5}]


def test_a_rank_without_work_drains_all_the_time(op: Any, pieces: Any) -> None:
    assert pieces([op(0, 9)], num_ranks=2) == [{"forward": 9}, {"drain": 9}]


# F 0-10 seen from 4 to 7; and from 8 to 15 with nothing after 10.
def test_a_window_cuts_what_reaches_over_its_ends(op: Any, pieces: Any) -> None:
    assert pieces([op(0, 10)], 4, 7) == [{"forward": 3}]
    assert pieces([op(0, 10)], 8, 15) == [{"forward": 2, "drain": 5}]


# The message moves 3-9; the window 5-12 holds 4 of it and 3 of the forward that follows.
def test_a_window_cuts_exposed_communication(op: Any, pieces: Any) -> None:
    ops = [
        op(0, 3), op(0, 6, "send F +1", after=(0,), joint="m"),
        op(1, 6, "recv F -1", joint="m"), op(1, 3, after=(2,)),
    ]  # fmt: skip
    assert pieces(ops, 5, 12) == [{"drain": 7}, {"pp": 4, "forward": 3}]


# 1F1B of 2 stages, 3 microbatches, f=1, b=2, c=0.5: T=14 (test_pipeline_closed_forms). Stage 0
# idles 2-5 (0.5 message) and 10-12 (0.5 message); stage 1 0-1.5 (1 fill, 0.5 message), 7.5-8.5
# (0.5 stall, 0.5 message) and 11.5-14 (drain).
def test_the_latency_of_a_pipeline_is_exposed_by_hand() -> None:
    b = sim.simulate_schedule("1F1B", stages=2, microbatches=3, latency=0.5).breakdown
    by_hand = {
        "forward": [3, 3], "backward": [6, 6], "pp": [1, 1],
        "fill": [0, 1], "stall": [4, 0.5], "drain": [0, 2.5],
    }  # fmt: skip
    assert {c: (b.of(c) / 1e12).tolist() for c in by_hand} == by_hand
    assert b.window.tolist() == [14 * 10**12] * 2


GRID = [
    {"dp": dp, "tp": tp, "pp": pp, "schedule": schedule, "recompute": recompute}
    for dp, tp, pp in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 4), (4, 1, 2), (2, 2, 2))
    for schedule in (("naive", "GPipe", "1F1B") if pp > 1 else ("1F1B",))
    for recompute in ("none", "full")
]


@pytest.mark.parametrize("detail", ["layer", "kernel"])
@pytest.mark.parametrize("plan", GRID)
def test_question_32_the_pieces_of_every_rank_sum_to_the_step(
    scenario_of: ScenarioOf, plan: dict[str, Any], detail: str
) -> None:
    result = sim.simulate(scenario_of(plan={**plan, "bucket_size": 1e4}, run={"detail": detail}))
    b = result.breakdown
    assert (b.ticks >= 0).all()
    assert (b.ticks.sum(axis=0) == b.window).all()
    assert (b.window == to_ticks(result.step_time_s)).all()


@pytest.mark.parametrize("plan", GRID)
def test_an_axis_of_one_rank_exposes_nothing(scenario_of: ScenarioOf, plan: dict[str, Any]) -> None:
    b = sim.simulate(scenario_of(plan=plan)).breakdown
    for axis in ("dp", "tp", "pp"):
        if plan[axis] == 1:
            assert not b.of(axis).any()
    if plan["tp"] > 1:
        assert b.of("tp").all()  # every all-reduce of tensor parallelism stands in the way


def work_of_a_step(result: sim.Result, rank: int, step: int, actions: str) -> int:
    p, t = result.program, result.timeline
    codes = [ACTION_CODE[a] for a in actions]
    mine = (p.rank == rank) & (p.step == step) & np.isin(p.action, codes)
    mine &= p.stream == p.streams.index("compute")
    return int((t.end - t.start)[mine].sum())


@pytest.mark.parametrize("plan", [plan for plan in GRID if plan["pp"] > 1])
def test_a_window_of_a_steady_pipeline_holds_the_work_of_one_step(
    scenario_of: ScenarioOf, plan: dict[str, Any]
) -> None:
    result = sim.simulate(scenario_of(plan=plan))
    for rank in range(result.program.num_ranks):
        assert result.breakdown.of("forward")[rank] == work_of_a_step(result, rank, 1, "F")
        assert result.breakdown.of("backward")[rank] == work_of_a_step(result, rank, 1, "B")


# A last stage with 15 of 16 wide layers updates its weights long after the first has begun the
# next step. Steps repeat exactly, so whatever slice is reported holds each rank's work of one step.
def test_a_late_optimizer_takes_no_work_out_of_the_window(
    scenario_of: ScenarioOf, llama: Model
) -> None:
    model = replace(llama, num_hidden_layers=16, intermediate_size=65536)
    result = sim.simulate(
        scenario_of(model=model, plan={"pp": 2, "layers_per_stage": (1, 15)}, run={"num_steps": 3})
    )
    for rank in range(2):
        assert result.breakdown.of("forward")[rank] == work_of_a_step(result, rank, 1, "F")


def test_steps_of_a_steady_pipeline_take_equal_time(scenario_of: ScenarioOf) -> None:
    result = sim.simulate(scenario_of(plan={"pp": 2, "dp": 2}, run={"num_steps": 4}))
    ends = np.diff(result.step_ends)
    assert len(set(ends.tolist())) == 1


# More than one step is one after the other: the first takes as long as a run of one step.
def test_the_first_step_is_that_of_a_run_of_one(scenario_of: ScenarioOf) -> None:
    one, three = (
        sim.simulate(scenario_of(plan={"pp": 2, "tp": 2}, run={"num_steps": n})) for n in (1, 3)
    )
    assert one.first_step_s == three.first_step_s
    assert one.step_time_s == one.first_step_s


def test_replicas_of_equal_ranks_break_down_alike(scenario_of: ScenarioOf) -> None:
    b = sim.simulate(scenario_of(plan={"dp": 2, "pp": 2, "tp": 2})).breakdown
    # order dp, pp, tp: ranks 0, 1, 4, 5 are stage 0; 2, 3, 6, 7 stage 1
    for ranks in ([0, 1, 4, 5], [2, 3, 6, 7]):
        assert (b.ticks[:, ranks] == b.ticks[:, ranks[:1]]).all()


# Stage 0 ends last and starts first, so every step is the first one over again: what the others
# wait for at its beginning is fill, and at its end drain, whichever step is reported.
def test_the_bubble_of_a_later_step_has_the_pieces_of_the_first(scenario_of: ScenarioOf) -> None:
    plan = {"pp": 4, "layers_per_stage": (1, 1, 1, 1)}
    one, three = (
        sim.simulate(scenario_of(plan=plan, batch=8, run={"num_steps": n})).breakdown
        for n in (1, 3)
    )
    assert one.of("fill")[3] > 0
    assert one.of("drain")[3] > 0
    assert (one.ticks == three.ticks).all()
