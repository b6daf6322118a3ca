"""Compute beside communication: what flows take of their ranks' computing, and who pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_flow_parity import Demand, Net, traffic_of
from test_parity import CASES, Case, drawn_ops, renumbered, tiled

import simulator as sim
from simulator.engine import ENGINES, run
from simulator.hardware import price
from simulator.hardware.contention import contended
from simulator.hardware.overlap import slowed
from simulator.hardware.taken import Taken
from simulator.lower import lower
from simulator.program import NONE, Int64, Program
from simulator.report.breakdown import WORK
from simulator.report.summary import assumptions
from simulator.timeline import Timeline
from simulator.traffic import Traffic

SECOND = 10**12
LINK = 1e9
"""Bytes/s of each link of the hand-made nets."""
HALVES = [Demand({link: 1.0}, LINK / 2) for link in range(2)]
"""Demands that take half a second alone, each on a link of its own."""


def run_slowed(program: Program, ticks: Int64, traffic: Traffic, slowdown: float) -> Timeline:
    """Return the times of a program whose flows slow compute, the same in every engine."""
    shares = Taken.stated(program, slowdown)
    taken = slowed(program, ticks.reshape(len(program.rank), -1), traffic, shares)
    first, *rest = (run(taken[0], taken[1], engine, traffic=taken[2]) for engine in ENGINES)
    assert all(other == first for other in rest)
    return first


@pytest.fixture
def ends(op: Any, program_of: Any) -> Callable[..., list[float]]:
    """Return a function from ops, whose flows make demands in turn, to their ends in seconds."""

    def made(
        ops: Sequence[Any], slowdown: float, demands: Sequence[Demand] = HALVES
    ) -> list[float]:
        program, ticks = program_of(ops)
        traffic = traffic_of(Net([LINK] * 2, demands, [1, 2]), len(program.joint_group))
        times = run_slowed(program, ticks, traffic, slowdown)
        return (times.end / SECOND).tolist()

    return made


def collective(op: Any, joint: str, *ranks: int, latency: float = 0.0, name: str = "all_reduce",
               after: tuple[int, ...] = ()) -> list[Any]:  # fmt: skip
    """Return the members of a flow, on a stream of its own."""
    return [op(rank, round(latency * SECOND), joint, after, joint, name=name) for rank in ranks]


# Half a second at 0.8 of the rate does 0.4 s of work; the 0.6 s that are left end at 1.1 s.
def test_compute_beside_an_all_reduce_runs_slower_and_the_all_reduce_as_ever(op, ends):
    ops = [op(0, SECOND), *collective(op, "a", 0, 1)]
    assert ends(ops, 0.2) == pytest.approx([1.1, 0.5, 0.5], abs=1e-11)


# Half a second at 0.6 of the rate does 0.3 s of work; 0.7 s are left.
def test_two_collectives_at_once_take_twice_as_much(op, ends):
    ops = [op(0, SECOND), *collective(op, "a", 0, 1), *collective(op, "b", 0, 2)]
    assert ends(ops, 0.2) == pytest.approx([1.2, 0.5, 0.5, 0.5, 0.5], abs=1e-11)


# On one link each moves at half its rate for a second, and takes 0.1: a second does 0.8 s of work.
def test_flows_that_slow_each_other_take_as_much_less_for_as_much_longer(op, ends):
    ops = [op(0, SECOND), *collective(op, "a", 0, 1), *collective(op, "b", 0, 2)]
    together = ends(ops, 0.2, demands=[HALVES[0], HALVES[0]])
    assert together == pytest.approx([1.2, 1.0, 1.0, 1.0, 1.0], abs=1e-11)


# The first moves at its own 5 % of the link for 0.5 s and takes 0.1 s of work; the second has 95 %
# for that time and 0.025 s alone: it ends at 0.525 s and takes 0.2 x 0.5 s as well.
def test_a_flow_far_below_its_links_keeps_its_rate_beside_another(op, ends):
    ops = [op(0, SECOND), *collective(op, "a", 0, 1), *collective(op, "b", 0, 2)]
    slow = Demand({0: 1.0}, LINK / 40, LINK / 20)
    together = ends(ops, 0.2, demands=[slow, HALVES[0]])
    assert together == pytest.approx([1.2, 0.5, 0.5, 0.525, 0.525], abs=1e-11)


# The flow moves from 0.25 s to 0.75 s, whole within the second of work.
def test_a_flow_takes_nothing_during_its_latency(op, ends):
    ops = [op(0, SECOND), *collective(op, "a", 0, 1, latency=0.25)]
    assert ends(ops, 0.2) == pytest.approx([1.1, 0.75, 0.75], abs=1e-11)
    late = [op(0, SECOND), *collective(op, "a", 0, 1, latency=1.5)]
    assert ends(late, 0.2) == pytest.approx([1.0, 2.0, 2.0], abs=1e-11)


def test_a_rank_outside_the_group_is_not_slowed(op, ends):
    ops = [op(2, SECOND), *collective(op, "a", 0, 1)]
    assert ends(ops, 0.2) == [1.0, 0.5, 0.5]


def test_a_message_slows_sender_and_receiver(op, ends):
    ops = [op(0, SECOND), op(1, SECOND), *collective(op, "a", 0, 1, name="send_recv")]
    assert ends(ops, 0.2) == pytest.approx([1.1, 1.1, 0.5, 0.5], abs=1e-11)


def test_what_moves_without_kernels_takes_nothing(op, ends):
    ops = [op(0, SECOND), *collective(op, "a", 0, 1, name="checkpoint")]
    assert ends(ops, 0.2) == [1.0, 0.5, 0.5]


def test_an_op_of_no_time_stays_one(op, ends):
    ops = [op(0, 0), *collective(op, "a", 0, 1)]
    assert ends(ops, 0.2) == [0.0, 0.5, 0.5]


def test_a_collective_that_compute_waits_for_changes_nothing(scenario_of):
    s = scenario_of(plan={"tp": 4}, run={"network": "fluid"})
    program = lower(s)
    ticks, traffic = contended(program, price(program, s.cluster), s.cluster)
    assert (traffic.demand != NONE).any()
    same = slowed(program, ticks, traffic, Taken.stated(program, 0.2))
    assert (same[0], same[2]) == (program, traffic)
    assert same[1] is ticks


def test_forwards_before_gradients_move_keep_their_ticks(scenario_of):
    s = scenario_of(plan={"dp": 4, "bucket_size": 2e4}, run={"network": "fluid"})
    program = lower(s)
    ticks, traffic = contended(program, price(program, s.cluster), s.cluster)
    slower, _, _ = slowed(program, ticks, traffic, Taken.stated(program, 0.2))
    beside = {program.label(row) for row in np.flatnonzero(slower.joint != program.joint)}
    assert beside
    assert all(label.startswith("0B3") for label in beside)  # the last of four backwards


def lost(program: Program, ticks: Int64, timeline: Timeline, slowdown: float) -> list[float]:
    """Return by how much each op of a compute stream ended late, less what its flows took.

    Where flows meet on no link each takes the same share from the end of its latency to its end.
    """
    moving = [
        (rank, int(timeline.start[rows[0]] + ticks[rows].max()), int(timeline.end[rows[0]]))
        for rows in (program.joint_members[j] for j in range(len(program.joint_group)))
        for rank in program.rank[rows].tolist()
    ]
    out = []
    for row in np.flatnonzero(~program.is_flow & (program.stream == 0)).tolist():
        start, end = int(timeline.start[row]), int(timeline.end[row])
        beside = sum(
            max(min(end, last) - max(start, first), 0)
            for rank, first, last in moving
            if rank == program.rank[row]
        )
        out.append(end - start - int(ticks[row]) - slowdown * beside)
    return out


def no_slower(program: Program, ticks: Int64, timeline: Timeline, sizes: Sequence[int]) -> bool:
    """Return whether flows take their latency and size, all other ops but compute their ticks."""
    for row in np.flatnonzero(program.stream != 0).tolist():
        joint, held = int(program.joint[row]), int(ticks[row])
        if joint != NONE:
            held = int(ticks[program.joint_members[joint]].max()) + sizes[joint]
        if abs(int(timeline.end[row] - timeline.start[row]) - held) > 1:
            return False
    return True


# Flows of 1 to 3 ms (in units of a tick of the menu: 500 ticks or a million) on links of their own.
@settings(max_examples=400, deadline=None)
@given(
    case=CASES.filter(lambda case: any(spec.width for spec in case.specs)),
    unit=st.sampled_from([500, 10**6]),
    slowdown=st.sampled_from([0.01, 0.05]),
)
def test_compute_loses_what_flows_beside_it_take_and_flows_lose_nothing(
    op: Any, program_of: Any, case: Case, unit: int, slowdown: float
) -> None:
    ops = [
        o._replace(name="all_reduce") if o.joint else o
        for o in renumbered(drawn_ops(case._replace(servers=[]), op), in_order=True)
    ]
    program, ticks = program_of(ops, num_ranks=4)
    ticks *= unit if ticks.max(initial=0) < 2**40 else 1
    count = len(program.joint_group)
    sizes = [unit * (1 + j % 3) for j in range(count)]
    net = Net([1e12] * count, [Demand({j: 1.0}, sizes[j]) for j in range(count)],
              range(1, count + 1))  # fmt: skip
    assume(slowdown * len(program.rank) < 0.9)
    times = run_slowed(program, ticks, traffic_of(net, count), slowdown)
    assert no_slower(program, ticks, times, sizes)
    assert np.abs(lost(program, ticks, times, slowdown)).max(initial=0.0) <= 2


@settings(max_examples=150, deadline=None)
@given(
    case=CASES.filter(lambda case: any(spec.width for spec in case.specs)),
    degrees=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    partitions=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    meet=st.booleans(),
)
def test_engines_agree_on_tiles_whose_flows_slow_compute(
    op: Any, program_of: Any, case: Case, degrees: tuple[int, int], partitions: list[int],
    meet: bool,
) -> None:  # fmt: skip
    ops = [
        o._replace(name="all_reduce") if o.joint else o
        for o in renumbered(drawn_ops(case, op), in_order=True)
    ]
    one, ticks = program_of(ops, servers=case.servers, num_ranks=4)
    program = tiled(one, *degrees, partitions)
    count = len(one.joint_group) * program.num_tiles
    demands = [Demand({0 if meet else d: 1.0}, 700.0 * (1 + d % 3)) for d in range(count)]
    net = Net([1e12] * count, demands, range(1, count + 1))
    traffic = traffic_of(net, len(one.joint_group), program.num_tiles)
    width = program.classes.max(axis=1)[program.partition] + 1
    traffic.demand[np.arange(program.num_tiles) >= width[:, None]] = NONE  # no such class
    wide = np.repeat(ticks[:, None] * (500 if ticks.max() < 2**40 else 1), program.num_tiles, 1)
    run_slowed(program, wide, traffic, 0.01)


@pytest.mark.parametrize("plan", [{"dp": 2, "pp": 2, "tp": 2}, {"dp": 8}])
def test_engines_agree_on_scenarios(scenario_of, plan):
    s = scenario_of(plan=plan, run={"network": "fluid", "overlap_slowdown": 0.15})
    times = [sim.simulate(s, engine=engine).times for engine in ENGINES]
    assert times[0] == times[1] == times[2]


FLUID = {"run.network": "fluid", "run.num_steps": 1}


# Buckets have one stream, so a rank has one all-reduce at a time: its work takes longer by 0.15 of
# the time in which buckets move beside it.
def test_work_of_a_data_parallel_step_grows_by_its_share_of_the_buckets_under_it():
    before, after = (
        sim.simulate(sim.load("gpt2-xl-ddp", {**FLUID, "run.overlap_slowdown": c}))
        for c in (0.0, 0.15)
    )
    program, times = after.excerpt([0])
    rows = np.flatnonzero(program.rank == 0)
    work = rows[~program.is_flow[rows]]
    buckets = rows[program.is_flow[rows]]
    entered = times.start[buckets] + after.moves.latency[np.flatnonzero(after.tiled.is_flow), 0]
    beside = sum(
        np.maximum(
            np.minimum(times.end[work], last) - np.maximum(times.start[work], first), 0
        ).sum()
        for first, last in zip(entered, times.end[buckets], strict=True)
    )
    grown = after.breakdown.of(*WORK)[0] - before.breakdown.of(*WORK)[0]
    assert beside > 0.01 * SECOND
    assert grown == pytest.approx(0.15 * beside, rel=1e-6)


def test_each_rank_of_a_symmetric_plan_pays_for_its_own_flows(scenario_of):
    before, after = (
        sim.simulate(
            scenario_of(
                plan={"dp": 2, "tp": 2, "bucket_size": 2e4},
                run={"network": "fluid", "overlap_slowdown": c},
            )
        ).breakdown.of(*WORK)
        for c in (0.0, 0.2)
    )
    assert np.ptp(after) <= 10  # ticks, of rounding
    assert after.min() > before.max() + 1e-7 * SECOND


def test_groups_of_slowed_work_are_the_ranks_that_it_lies_on(scenario_of):
    s = scenario_of(plan={"dp": 2, "tp": 2, "pp": 2}, run={"network": "fluid"})
    program = lower(s)
    ticks, traffic = contended(program, price(program, s.cluster), s.cluster)
    flat = slowed(program, ticks, traffic, Taken.stated(program, 0.1))[0].flat
    assert len(flat.joint_group) > len(program.flat.joint_group)
    for joint, group in enumerate(flat.joint_group.tolist()):
        members = flat.rank[flat.joint_members[joint]]
        assert sorted(members.tolist()) == sorted(flat.groups[group].tolist())


@pytest.mark.parametrize("name", ["gpt2-xl-ddp", "gpt2-xl-1f1b"])
def test_a_slowdown_of_next_to_nothing_moves_nothing(name):
    before, after = (
        sim.simulate(sim.load(name, {**FLUID, "run.overlap_slowdown": c})) for c in (0.0, 1e-15)
    )
    assert np.abs(after.times.end - before.times.end).max() <= 10  # ticks, of rounding


def test_slowed_work_is_work_in_reports_and_computing_is_no_link():
    before, after = (
        sim.simulate(sim.load("gpt2-xl-1f1b", {**FLUID, "run.overlap_slowdown": c}))
        for c in (0.0, 0.15)
    )
    assert after.tiled == before.tiled
    assert after.links.traffic.names == before.links.traffic.names
    assert after.links.bytes == pytest.approx(before.links.bytes, rel=1e-9)
    assert (after.breakdown.ticks.sum(axis=0) == after.breakdown.window).all()
    grown = after.breakdown.of(*WORK) / before.breakdown.of(*WORK)
    assert (grown > 1).all()
    assert (grown < 1 / (1 - 5 * 0.15)).all()


def test_kernels_at_full_rate_and_slowed_ones_are_among_the_assumptions():
    off, on = (
        "\n".join(assumptions(sim.load("gpt2-xl-ddp", {**FLUID, "run.overlap_slowdown": c})))
        for c in (0.0, 0.15)
    )
    assert "kernels run at full rate beside communication" in off
    assert "takes 15.0% of the computing of its ranks" in on


@pytest.mark.parametrize(
    ("value", "why"), [(-0.1, "at least 0"), (0.6, "at most 0.5"), (True, "not a number")]
)
def test_a_slowdown_out_of_range_is_refused(value, why):
    with pytest.raises(sim.DescriptionError, match=f"overlap_slowdown: .*{why}"):
        sim.load("gpt2-xl-ddp", {**FLUID, "run.overlap_slowdown": value})


# An inner stage sends and receives both ways: four messages at once.
def test_flows_that_would_take_all_of_a_rank_are_refused():
    s = sim.load("gpt2-xl-1f1b", {**FLUID, "run.overlap_slowdown": 0.25})
    with pytest.raises(sim.DescriptionError, match=r"4 flows .* take 100% .* at most 0.225 fits"):
        sim.simulate(s)


def test_flows_that_no_stream_orders_count_each(op, ends):
    members = [
        op(rank, 0, None, (), f"j{k}", name="all_reduce") for k in range(5) for rank in (0, 1)
    ]
    with pytest.raises(sim.DescriptionError, match="5 flows"):
        ends([op(0, SECOND), *members], 0.2)
