"""Bare schedules on every engine: the times of the lists, the papers' bubbles and memory."""

from __future__ import annotations

import greedy
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import simulator as sim
from simulator.describe.plan import Plan
from simulator.engine import ENGINES, run
from simulator.errors import DescriptionError
from simulator.hardware import price
from simulator.lower import lower_schedule
from simulator.lower.bodies import CostTable, StageBodies, body
from simulator.lower.check import check
from simulator.lower.grid import to_grid
from simulator.lower.mesh import Mesh
from simulator.lower.pipeline import expand
from simulator.lower.replicate import replicate
from simulator.lower.segments import COMPUTE, TP, Segment
from simulator.program import Flow, Program, Work
from simulator.report.result import Result
from simulator.schedules import (
    SCHEDULES,
    Actions,
    actions_of,
    add_send_recv,
    parse_grid,
    size_complaint,
)
from simulator.schedules.formulas import Case
from simulator.units import TICKS_PER_SECOND


def ran(actions: Actions, engine: str = "compiled", **times: float) -> Result:
    program = lower_schedule(actions, **times)
    return Result(program, run(program, price(program), engine), None, ())


def idle(result: Result) -> list[float]:
    """Return the seconds that each rank idles between its first and its last action."""
    p, t, out = result.program, result.timeline, []
    for rank in range(p.num_ranks):
        mine = (p.rank == rank) & (p.stream == 0)
        start, end = t.start[mine], t.end[mine]
        out.append((int(end.max() - start.min()) - int((end - start).sum())) / TICKS_PER_SECOND)
    return out


def made(case: Case, name: str, engine: str = "compiled") -> Result:
    more = {} if case.fb is None else {"pair": case.fb}
    return ran(
        actions_of(name, case.p, case.m, case.v), engine,
        forward=case.f, backward=case.b, input_grad=case.i, weight_grad=case.w, **more,
    )  # fmt: skip


# Whatever the sizes and times, engines run the lists as they are walked through one by one.
@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(list(SCHEDULES)),
    p=st.integers(1, 6),
    m=st.integers(1, 14),
    v=st.integers(1, 4),
    times=st.tuples(*[st.integers(1, 500)] * 4),
)
def test_engines_run_the_lists(
    name: str, p: int, m: int, v: int, times: tuple[int, int, int, int]
) -> None:
    assume(not size_complaint(name, p, m, v))
    f, i, w, pair = (time / 128 for time in times)
    actions = actions_of(name, p, m, v)
    expected = greedy.run(actions, f, i, w, pair)
    for engine in ENGINES if p * m * v < 60 else ("compiled", "events"):
        result = ran(
            actions, engine, forward=f, backward=i + w, input_grad=i, weight_grad=w, pair=pair
        )
        assert result.step_time_s == expected.makespan
        assert idle(result) == expected.idle
        assert result.memory.peak.tolist() == expected.kept


@pytest.mark.parametrize("engine", ["compiled", "events"])
@pytest.mark.parametrize("name", [name for name, s in SCHEDULES.items() if s.bubble])
def test_bubble_and_memory_are_the_papers(name: str, engine: str) -> None:
    schedule, seen = SCHEDULES[name], 0
    for p, m, v in [(2, 4, 1), (4, 8, 1), (3, 6, 2), (4, 12, 2), (4, 8, 2), (8, 32, 2), (8, 16, 4)]:
        case = Case(p, m, min(v, schedule.chunks[1] or v))
        if size_complaint(name, *case[:3]):
            continue
        result = made(case, name, engine)
        assert schedule.bubble
        if schedule.bubble.holds(case):
            assert max(idle(result)) == schedule.bubble.value(case)
            seen += 1
        if schedule.kept and schedule.kept.holds(case):
            assert tuple(result.memory.peak.tolist()) == schedule.kept.value(case)
    assert seen


# Wherever a formula says that it holds, and whatever the times; many sizes are refused.
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    name=st.sampled_from([name for name, s in SCHEDULES.items() if s.bubble]),
    p=st.integers(2, 6),
    rounds=st.integers(1, 4),
    v=st.integers(1, 3),
    times=st.tuples(*[st.sampled_from([32, 64, 96, 128, 160, 256])] * 3),
)
def test_a_bubble_is_its_formula_where_that_holds(
    name: str, p: int, rounds: int, v: int, times: tuple[int, int, int]
) -> None:
    f, i, w = (time / 128 for time in times)
    case = Case(p, p * rounds, v, f, i, w)
    formula = SCHEDULES[name].bubble
    assume(not size_complaint(name, p, case.m, v) and formula and formula.holds(case))
    assert formula  # assumed
    assert max(idle(made(case, name))) == formula.value(case)


# Question 10, B = I + W = 2: P = 4, M = 8: 27 against 33; P = 8, M = 32: 103 against 117, idle 7
# against 21.
@pytest.mark.parametrize(
    ("name", "p", "m", "seconds", "bubble"),
    [("ZB-H1", 4, 8, 27, 3), ("1F1B", 4, 8, 33, 9), ("ZB-H1", 8, 32, 103, 7),
     ("1F1B", 8, 32, 117, 21)],
)  # fmt: skip
def test_question_10_a_split_backward_fills_the_bubble(
    name: str, p: int, m: int, seconds: float, bubble: float
) -> None:
    result = sim.simulate_schedule(name, stages=p, microbatches=m, forward=1, backward=2)
    assert result.step_time_s == seconds
    assert (result.breakdown.bubble / TICKS_PER_SECOND).tolist() == [bubble] * p


# I takes 1.25 of B's 2, W 0.75: idle (p-1)(F+I-W) = 3 (1 + 1.25 - 0.75) = 4.5.
def test_the_gradient_of_the_input_may_take_any_part_of_a_backward() -> None:
    result = sim.simulate_schedule("ZB-H1", stages=4, microbatches=8, input_grad=1.25)
    assert max(idle(result)) == 4.5


@pytest.mark.parametrize(("name", "value"), [("input_grad", 2.5), ("input_grad", -1), ("pair", -1)])
def test_stated_times_of_halves_and_pairs_are_checked(name: str, value: float) -> None:
    with pytest.raises(DescriptionError, match=f"{name} {value}"):
        sim.simulate_schedule("ZB-H1", stages=4, microbatches=8, **{name: value})  # type: ignore[arg-type]


# Of one activation kept, I frees three quarters and W the rest.
def test_what_waits_for_w_may_be_a_part() -> None:
    lists = parse_grid("rank 0: 0F0 0I0 0F1 0I1 0W0 0W1")
    result = ran(lists, held=0.25)
    assert result.memory.of_rank(0)[1].tolist() == [1.0, 0.25, 1.25, 0.5, 0.25, 0.0]


# Both inputs of the pair at 3 (rank 1 has F1 at 2 already): rank 0 F0 0-1, F1 1-2; rank 1 F0 1-2,
# B0 2-4; then rank 0's pair of F2 and B0 4-6.5 where a pair takes 2.5.
def test_a_pair_begins_with_both_inputs_and_hands_over_at_its_end() -> None:
    lists = parse_grid(
        "rank 0: 0F0 0F1 (0F2;0B0)OVERLAP_F_B 0B1 0B2\nrank 1: 1F0 1B0 1F1 1B1 1F2 1B2"
    )
    result = ran(lists, pair=2.5, latency=0.25)
    p, t = result.program, result.timeline
    work = np.flatnonzero(p.stream == 0)
    at = {p.label(op): (t.start[op] / 1e12, t.end[op] / 1e12) for op in work}
    assert at["1B0"] == (2.25, 4.25)
    assert at["0F2"][0] == 4.5
    assert at["0B0"][1] == at["0F2"][0] + 2.5
    # stage 1 gets F2 when the pair has ended, though its half of the time is less
    assert at["1F2"][0] == at["0B0"][1] + 0.25


HALF = [Segment(Work("a", seconds=3.0), COMPUTE), Segment(Flow("all_reduce", 1.0, seconds=2.0), TP),
        Segment(Work("b", seconds=3.0), COMPUTE)]  # fmt: skip


def with_collectives(text: str) -> Program:
    """Return a schedule whose every pass is kernels of 3 s, a collective of 2 s, kernels of 3 s."""
    table = CostTable()
    half = body(HALF, table)
    nothing = body([], table)
    grid = to_grid(add_send_recv(parse_grid(text)))
    bodies = (StageBodies(half, half, half, nothing, nothing, half),) * len(grid.places[0])
    message = table.number(Flow("send_recv", 0.0, seconds=0.0))
    mesh = Mesh.of(Plan(pp=grid.num_ranks, tp=2))
    replica = expand(grid, bodies, message)
    return check(replicate(replica, mesh, tuple(table.costs), np.zeros(grid.num_ranks)))


# Alone a pass takes 3 + 2 + 3 = 8; two that run together 3 + 3 + 3 + 3 = 12, each collective
# beside the other's kernels.
@pytest.mark.parametrize(("cell", "seconds"), [("0F1 0B0", 32), ("(0F1;0B0)OVERLAP_F_B", 28)])
@pytest.mark.parametrize("engine", ENGINES)
def test_in_a_pair_collectives_of_one_hide_behind_kernels_of_the_other(
    engine: str, cell: str, seconds: float
) -> None:
    program = with_collectives(f"rank 0: 0F0 {cell} 0B1")
    times = run(program, price(program), engine)
    assert times.makespan == seconds * TICKS_PER_SECOND


# F1's result leaves when its second kernels end at 8 + 9 = 17, B0's at 20.
def test_each_half_of_a_pair_hands_over_its_own_result() -> None:
    program = with_collectives("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 (1F1;1B0)OVERLAP_F_B 1B1")
    times = run(program, price(program), "compiled")
    tile = {(program.label(op)): int(times.columns[0][op, 0]) for op in range(len(program.rank))}
    assert tile["1SEND_B0"] == tile["1SEND_B0"]
    ends = times.columns[1]
    last = {program.label(op): int(ends[op, 0]) for op in np.flatnonzero(program.stream == 0)}
    assert last["1F1 b"] < last["1B0 b"] == tile["1SEND_B0"]


def test_fewest_chunks_are_taken_where_none_are_said() -> None:
    result = sim.simulate_schedule("ZBVZeroBubble", stages=4, microbatches=8)
    assert result.step_time_s == 8 * 3 + 1.5  # half a stage's F at each rank before the last
