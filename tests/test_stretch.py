"""Compute beside communication where flows take fixed times: the SMs that collectives hold."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_flow_parity import Demand, Net, traffic_of
from test_parity import CASES, Case, drawn_ops, renumbered, tiled

import simulator as sim
from simulator.describe.cluster import Cluster, NodeGroup
from simulator.describe.scenario import Scenario
from simulator.engine import ENGINES, Folding, fold, run, stretch
from simulator.engine.compiled import Pass
from simulator.engine.stretch import fold_slowed, run_stretched
from simulator.hardware import price
from simulator.hardware.network import GroupShape, flow_model
from simulator.hardware.overlap import slowed
from simulator.hardware.placement import devices
from simulator.hardware.taken import WHOLE, Moving, Taken, beside, default_shares, moving, taken
from simulator.jitter import study
from simulator.kernels import jit
from simulator.kernels import stretch as kernel
from simulator.lower import lower
from simulator.program import NONE, Int64, Program
from simulator.report.breakdown import WORK
from simulator.report.summary import assumptions
from simulator.timeline import Timeline

MS = 10**9
"""Ticks of a millisecond."""


def moves_of(program: Program, share: float, latency: Int64 | int = 0) -> Moving | None:
    """Return what all collectives of a program do to its work, each with a share and a latency."""
    works, meets = beside(program, Taken.stated(program, share).flows)
    flows = np.flatnonzero(meets)
    flows = flows[np.argsort(program.rank[flows], kind="stable")]
    ranks = np.arange(len(program.tile_ranks) + 1)
    waits = np.broadcast_to(np.asarray(latency, np.int64), (len(program.rank),))[flows]
    return Moving(
        works, np.searchsorted(program.rank[works], ranks),
        flows, np.searchsorted(program.rank[flows], ranks),
        waits[:, None], np.full((len(flows), 1), round(share * WHOLE)),
    ) if len(works) else None  # fmt: skip


def run_beside(program: Program, ticks: Int64, share: float, latency: Int64 | int = 0) -> Timeline:
    """Return the times of a program whose flows slow compute, the same in every engine."""
    moves = moves_of(program, share, latency)
    everyone = Folding.none(program)
    wide = ticks.reshape(len(program.rank), -1)
    first, *rest = (run_stretched(program, wide, moves, e, everyone) for e in ENGINES)
    assert all(other == first for other in rest)
    return first


@pytest.fixture
def ends(op: Any, program_of: Any) -> Callable[..., list[float]]:
    """Return a function from ops to their ends in milliseconds."""

    def made(ops: Sequence[Any], share: float, latency: int = 0) -> list[float]:
        program, ticks = program_of(ops)
        return (run_beside(program, ticks, share, latency).end / MS).tolist()

    return made


def gather(op: Any, stream: str, ms: float, after: tuple[int, ...] = (), name: str = "all_gather"
           ) -> Any:  # fmt: skip
    """Return a flow of one member on rank 0, on a stream of its own."""
    return op(0, round(ms * MS), stream, after, f"{stream} {after}", name=name)


# 8 ms at 0.75 of the rate do 6 ms of work; the 4 ms that are left end at 12 ms.
def test_a_kernel_beside_a_shorter_gather_loses_the_share_of_the_gather(op, ends):
    assert ends([op(0, 10 * MS), gather(op, "dp", 8)], 0.25) == [12.0, 8.0]


def test_a_kernel_beside_a_longer_gather_runs_at_what_is_left_all_along(op, ends):
    alone, longer = ends([op(0, 9 * MS), gather(op, "dp", 40)], 0.25)
    assert (alone, longer) == (12.0, 40.0)  # 9 / (1 - 0.25)


# 8 ms at half the rate do 4 ms of work; 6 ms are left.
def test_two_collectives_at_once_take_two_shares(op, ends):
    ops = [op(0, 10 * MS), gather(op, "dp", 8), gather(op, "tp", 8)]
    assert ends(ops, 0.25)[0] == 14.0


# 2 ms with two do 1, 6 ms with one do 4.5; 4.5 ms are left at 8 ms.
def test_a_second_collective_takes_only_while_it_moves(op, ends):
    ops = [op(0, 10 * MS), gather(op, "dp", 8), gather(op, "tp", 2)]
    assert ends(ops, 0.25)[0] == 12.5


# Five of a quarter would take 125 %; 10 % are left.
def test_flows_together_leave_a_tenth(op, ends):
    ops = [op(0, MS), *(gather(op, f"s{k}", 20) for k in range(5))]
    assert ends(ops, 0.25)[0] == 10.0


# It moves from 2 to 8 ms: 2 ms of work, then 4.5 of 6; 3.5 are left.
def test_a_flow_takes_nothing_during_its_latency(op, ends):
    assert ends([op(0, 10 * MS), gather(op, "dp", 8)], 0.25, latency=2 * MS)[0] == 11.5


# The first kernel ends at 12 ms, so the second gather moves from 12 to 20 beside the second one.
def test_what_slower_work_puts_off_slows_the_work_after_it(op, ends):
    ops = [op(0, 10 * MS), op(0, 10 * MS), gather(op, "dp", 8), gather(op, "dp", 8, after=(0,))]
    assert ends(ops, 0.25) == [12.0, 24.0, 8.0, 20.0]


# The gather ends at 10 ms; the kernel, slowed to 12 ms by it, no longer meets the one that starts
# on rank 1 when that rank's kernel of 10 ms is done.
def test_ranks_feel_their_own_flows_only(op, ends):
    ops = [op(0, 10 * MS), gather(op, "dp", 8), op(1, 10 * MS)]
    assert ends(ops, 0.25) == [12.0, 8.0, 10.0]


def test_work_that_no_flow_meets_keeps_its_ticks(op, program_of):
    ops = [op(0, 7), op(0, 5, "dp", (0,), "a", name="all_reduce"), op(0, 9, after=(1,))]
    program, ticks = program_of(ops)
    assert moves_of(program, 0.25) is None  # the flow stands between two kernels that wait for it
    assert run_beside(program, ticks, 0.25) == run(program, ticks)


CASES_WITH_FLOWS = CASES.filter(lambda case: any(spec.width for spec in case.specs))


def collectives(case: Case, op: Any) -> list[Any]:
    """Return the ops of a case, all of its flows collectives, in an order that ends."""
    ops = renumbered(drawn_ops(case, op), in_order=True)
    return [o._replace(name="all_reduce") if o.joint else o for o in ops]


def unlike_its_progress(
    program: Program, ticks: Int64, times: Timeline, share: float, latency: Int64
) -> float:
    """Return the most ticks by which work has done more or less, at its end, than it takes alone.

    At every moment it goes on at 1 - share x (flows that move on its rank), at least at 0.1.
    """
    worst = 0.0
    moving = [
        (int(program.rank[row]), int(times.start[row] + latency[row]), int(times.end[row]))
        for row in np.flatnonzero(program.is_flow)
    ]
    for row in np.flatnonzero(~program.is_flow & (program.stream == 0)).tolist():
        start, end, done = int(times.start[row]), int(times.end[row]), 0.0
        mine = [(a, b) for rank, a, b in moving if rank == program.rank[row] and a < b]
        cuts = sorted({start, end, *(t for pair in mine for t in pair if start < t < end)})
        for a, b in itertools.pairwise(cuts):
            flows = sum(first <= a and b <= last for first, last in mine)
            done += (b - a) * max(1 - share * flows, 0.1)
        worst = max(worst, abs(done - int(ticks[row])))
    return worst


@settings(max_examples=300, deadline=None)
@given(
    case=CASES_WITH_FLOWS, unit=st.sampled_from([1, 500, 10**6]),
    share=st.sampled_from([0.05, 0.2, 0.45]), waits=st.integers(0, 2),
)  # fmt: skip
def test_work_ends_exactly_when_what_flows_leave_it_has_done_it(
    op: Any, program_of: Any, case: Case, unit: int, share: float, waits: int
) -> None:
    program, ticks = program_of(collectives(case._replace(servers=[]), op), num_ranks=4)
    ticks *= unit if ticks.max(initial=0) < 2**40 else 1
    latency = np.minimum(ticks, waits * unit)
    times = run_beside(program, ticks, share, latency)
    assert unlike_its_progress(program, ticks, times, share, latency) <= 1.01


# Both round every op to a tick, and a slower kernel carries what was rounded before it along.
@settings(max_examples=200, deadline=None)
@given(case=CASES_WITH_FLOWS, share=st.sampled_from([0.01, 0.05]))
def test_the_fluid_engine_finds_the_same_where_no_two_flows_meet(
    op: Any, program_of: Any, case: Case, share: float
) -> None:
    program, ticks = program_of(collectives(case._replace(servers=[]), op), num_ranks=4)
    ticks *= 1000 if ticks.max(initial=0) < 2**40 else 1
    count = len(program.joint_group)
    sizes = 1000 * (1 + np.arange(count) % 3)
    net = Net([1e12] * count, [Demand({j: 1.0}, float(sizes[j])) for j in range(count)],
              range(1, count + 1))  # fmt: skip
    latency = ticks.copy()
    for joint in range(count):
        rows = program.joint_members[joint]
        latency[rows] = ticks[rows].max()
    whole = latency + np.append(sizes, 0)[program.joint]
    whole[program.joint == NONE] = ticks[program.joint == NONE]
    wide = latency.reshape(len(program.rank), -1)
    slower = slowed(program, wide, traffic_of(net, count), Taken.stated(program, share))
    fluid = run(slower[0], slower[1], traffic=slower[2])
    fixed = run_beside(program, whole, share, latency)
    assert np.abs(fluid.end - fixed.end).max() <= 4 * len(program.rank)


@settings(max_examples=100, deadline=None)
@given(
    case=CASES_WITH_FLOWS,
    degrees=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    partitions=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    alike=st.booleans(),
)
def test_engines_and_folded_runs_agree_on_tiles(
    op: Any, program_of: Any, case: Case, degrees: tuple[int, int], partitions: list[int],
    alike: bool,
) -> None:  # fmt: skip
    one, ticks = program_of(collectives(case, op), servers=case.servers, num_ranks=4)
    program = tiled(one, *degrees, partitions)
    wide = np.repeat(ticks[:, None] * (500 if ticks.max() < 2**40 else 1), program.num_tiles, 1)
    if not alike:
        wide += np.arange(program.num_tiles)
    moves = moves_of(program, 0.2)
    foldings = [(e, Folding.none(program)) for e in ENGINES]
    foldings += [("compiled", fold(program, wide)), ("events", fold(program, wide))]
    times = [run_stretched(program, wide, moves, engine, f) for engine, f in foldings]
    assert all(one == times[0] for one in times)


def test_compiled_loops_stretch_as_interpreted_ones(op, program_of, monkeypatch):
    ops = [op(0, 10 * MS), op(0, 3 * MS), gather(op, "dp", 8), gather(op, "tp", 5, after=(0,))]
    program, ticks = program_of(ops)
    times = []
    for small in (0, 2**62):
        monkeypatch.setattr(jit, "SMALL", small)
        times.append(run_beside(program, ticks, 0.3))
    assert times[0] == times[1]


# Rows of one stream, then rows of another that move at the same time: moments out of order.
@pytest.mark.parametrize("few", [0, 10**9], ids=["sorted", "put in order"])
def test_how_moments_are_put_in_order_moves_no_time(op, program_of, monkeypatch, few):
    ops = [op(0, 20 * MS)]
    for stream in ("a", "b"):
        for k in range(4):
            ops.append(gather(op, stream, 2 + k, after=(len(ops) - 1,) if k else ()))
    monkeypatch.setattr(kernel, "FEW", few)
    monkeypatch.setattr(jit, "SMALL", 2**62)
    program, ticks = program_of(ops)
    # Two of each length move together, 14 ms in all: they leave 0.5, so 7 ms of work are done.
    assert run_beside(program, ticks, 0.25).end[0] / MS == 27.0


# 3 ticks beside a flow of 2 at 0.8: 1.6 done, 1.4 left, so 3.4 in all. What waits for the kernel
# starts at 4, when it is done; at 3, rounded to the nearest, it would slow it, and so end later.
def test_what_waits_for_slowed_work_cannot_slow_it(op, program_of):
    ops = [op(0, 3), op(0, 9, "dp", joint="b", after=(0,), name="all_reduce"), op(0, 7),
           op(0, 2, "tp", joint="a", name="all_reduce")]  # fmt: skip
    program, ticks = program_of(ops)
    times = run_beside(program, ticks, 0.2)
    assert times.end[[0, 3]].tolist() == [4, 2]
    assert times.start[1] == 4


def test_times_that_do_not_settle_are_refused(op, program_of, monkeypatch):
    monkeypatch.setattr(stretch, "RUNS", 1)
    program, ticks = program_of([op(0, 10 * MS), gather(op, "dp", 8)])
    with pytest.raises(sim.DescriptionError, match=r"do not settle within 1 runs; set run.overlap"):
        run_beside(program, ticks, 0.25)


# Each run starts at the first op that changed: the whole program, then the last backward on.
def test_few_runs_settle_a_step_and_few_ops_run_again(monkeypatch):
    runs: list[tuple[int, int]] = []
    whole = Pass.run

    def counted(self: Pass, ticks: Int64, first: int = 0) -> None:
        runs.append((first, len(self._graph[0]) - 1))
        whole(self, ticks, first)

    monkeypatch.setattr(Pass, "run", counted)
    sim.simulate(sim.load("llama-3-8b-3d", {"run.num_steps": 1}))
    assert len(runs) == 4
    assert runs[0][0] == 0
    assert all(first > 0.9 * units for first, units in runs[1:])


def test_what_a_device_gives_to_collectives_stands_in_its_file():
    device = sim.load("llama-3-8b-3d").cluster.node.device
    assert (device.communication_units, device.compute_units) == (24, 132)
    assert default_shares(device) == pytest.approx((24 / 132, 16 / 132))
    assert default_shares(replace(device, communication_units=12)) == (12 / 132, 12 / 132)
    assert default_shares(replace(device, communication_units=None)) == (0, 0)


@pytest.mark.parametrize("facts", [{"compute_units": 40}, {"compute_units": None}])
def test_units_that_are_no_part_of_the_device_are_refused(facts):
    device = sim.load("llama-3-8b-3d").cluster.node.device
    with pytest.raises(sim.DescriptionError, match="communication_units: 24 must be at most half"):
        replace(device, **facts)


# Buckets have one stream: of the time in which they move beside it work loses 12 of 80 SMs, and of
# what is left the share of 900 GB/s of memory at which 2 x 7/8 of a bucket arrive.
def test_work_of_a_data_parallel_step_grows_by_the_share_of_its_device():
    before, after = (
        sim.simulate(sim.load("gpt2-xl-ddp", {"run.num_steps": 1, **more}))
        for more in ({"run.overlap_slowdown": 0}, {})
    )
    program, s = after.tiled, after.scenario
    moves = moving(program, s, devices(s.plan, s.cluster))
    start, end = (column[:, 0] for column in after.times.columns)
    entered = start[moves.flows] + moves.latency[:, 0]
    rows = moves.works
    under = sum(
        np.maximum(np.minimum(end[rows], last) - np.maximum(start[rows], first), 0).sum()
        for first, last in zip(entered, end[moves.flows], strict=True)
    )
    grown = after.breakdown.of(*WORK)[0] - before.breakdown.of(*WORK)[0]
    assert under > 1e10
    bucket = next(program.costs[c] for c in program.cost[moves.flows])
    rate = flow_model(bucket, GroupShape(8, 1, 8), s.cluster).bytes_per_s * 14 / 8
    share = 1 - (1 - 12 / 80) * (1 - rate / 900e9)
    assert 0.27 < share < 0.28
    assert grown == pytest.approx(share * under, rel=1e-6)
    assert after.summary.slowed_by_communication_s == pytest.approx(grown / 1e12)
    assert before.summary.slowed_by_communication_s == 0


@pytest.mark.parametrize("name", ["gpt2-xl-ddp", "llama-3-8b-3d", "mixtral-8x7b-64gpu"])
def test_a_slowdown_of_nothing_gives_what_ops_take_alone(name):
    s = sim.load(name, {"run.overlap_slowdown": 0})
    program = lower(s)
    ticks = price(program, s.cluster, devices(s.plan, s.cluster))
    assert sim.simulate(s).times == run(program, ticks, folding=fold(program, ticks))


# A coarser cut must not move a collective of a layer past the work beside a gather or a bucket.
@pytest.mark.parametrize(
    "settings", [{}, {"plan.pp": 1, "plan.dp": 16, "plan.zero": 3}], ids=["buckets", "gathers"]
)
def test_detail_moves_no_time_where_collectives_slow_work(settings):
    steps = [
        sim.simulate(sim.load("llama-3-8b-3d", {**settings, "run.detail": detail})).step_time_s
        for detail in ("stage", "layer", "kernel")
    ]
    assert steps == pytest.approx([steps[0]] * 3, rel=1e-8)


# Equal devices but for what collectives hold: replicas take the same alone, and not beside flows.
def test_replicas_that_feel_collectives_unlike_are_not_folded(scenario_of, cluster_of):
    cluster = cluster_of(devices=4, device={"compute_units": 128, "communication_units": 32})
    other = replace(cluster.node, device=replace(cluster.node.device, communication_units=16))
    groups = (NodeGroup(node=cluster.node), NodeGroup(node=other))
    s = scenario_of(
        cluster=Cluster(nodes=groups), plan={"dp": 2, "tp": 4, "tp_overlap": "grads"},
    )  # fmt: skip
    program, placement = lower(s), devices(s.plan, s.cluster)
    ticks = price(program, s.cluster, placement)
    moves = moving(program, s, placement)
    assert len(fold(program, ticks).tiles) < len(fold_slowed(program, ticks, moves).tiles)
    folded, whole = (sim.simulate(s, folded=fold) for fold in (True, False))
    assert folded.times == whole.times


def shares_of(s: Scenario) -> Taken | None:
    return taken(lower(s), s, devices(s.plan, s.cluster))


def test_messages_between_stages_take_nothing_unless_it_is_stated():
    default, stated = (
        sim.load("gpt2-xl-1f1b", more) for more in ({}, {"run.overlap_slowdown": 0.1})
    )
    placement = devices(default.plan, default.cluster)
    assert moving(lower(default), default, placement) is None
    assert moving(lower(stated), stated, placement) is not None


@pytest.mark.parametrize(("nodes", "takes"), [(1, True), (2, False)])
def test_rings_of_attention_take_what_collectives_do_within_a_node_only(nodes, takes):
    s = sim.load("llama-3-8b-128k", {"plan.cp": 2 * nodes, "cluster.num_nodes": nodes})
    program = lower(s)
    shifts = np.array([c.name == "shift" for c in program.costs])[program.cost]
    assert shifts.any()
    assert (shares_of(s).flows[shifts] == takes).all()


# Copy engines carry them: what arrives takes its share of the memory bandwidth, and no more.
@pytest.mark.parametrize(("overlap", "copied"), [("grads", False), ("all", True)])
def test_collectives_in_pieces_hold_no_sms(overlap, copied):
    s = sim.load("llama-3-8b-3d", {"plan.sequence_parallel": True, "plan.tp_overlap": overlap})
    program = lower(s)
    tp = (program.stream == program.streams.index("tp")) & program.is_flow
    assert shares_of(s).flows[tp].all()
    assert (shares_of(s).copied[tp] == copied).all()
    moves = moving(program, s, devices(s.plan, s.cluster))
    of_tp = moves.share[tp[moves.flows]] / WHOLE
    assert (of_tp.max() < 24 / 132) == copied
    assert of_tp.min() > 0


# A link carries one bucket at a time here, so nothing contends.
def test_both_networks_give_the_same_step_where_nothing_contends():
    fixed, fluid = (
        sim.simulate(sim.load("gpt2-xl-ddp", {"run.network": network, "run.num_steps": 1}))
        for network in ("alpha-beta", "fluid")
    )
    assert fixed.slowed_by_communication_s > 5e-3
    assert fluid.slowed_by_communication_s == pytest.approx(fixed.slowed_by_communication_s, 1e-8)
    assert fluid.step_time_s == pytest.approx(fixed.step_time_s, abs=100e-12)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama-3-8b-3d", {"plan.pp": 1, "plan.dp": 1, "plan.tp": 8, "cluster.num_nodes": 1,
                           "plan.sequence_parallel": True, "plan.tp_overlap": "all",
                           "run.global_batch_size": 1, "run.detail": "layer"}),
        ("llama-3-8b-128k", {"run.global_batch_size": 1}),
    ],
    ids=["pieces", "rings"],
)  # fmt: skip
def test_what_arrives_is_taken_alike_in_both_networks(name, settings):
    fixed, fluid = (
        sim.simulate(sim.load(name, settings | {"run.network": network, "run.num_steps": 1}))
        for network in ("alpha-beta", "fluid")
    )
    assert fixed.slowed_by_communication_s > 1e-3
    assert fluid.slowed_by_communication_s == pytest.approx(fixed.slowed_by_communication_s, 1e-6)


# Each device gives 60 of 128 units, and with two streams that is more than 90 %.
def test_what_devices_give_is_never_refused_where_links_are_shared(scenario_of, cluster_of):
    cluster = cluster_of(devices=8, device={"compute_units": 128, "communication_units": 60})
    plan = {"dp": 4, "tp": 2, "bucket_size": 2e4, "tp_overlap": "grads"}
    s = scenario_of(cluster=cluster, plan=plan, run={"network": "fluid"})
    assert sim.simulate(s).slowed_by_communication_s > 0
    stated = replace(s, run=replace(s.run, overlap_slowdown=0.5))
    with pytest.raises(sim.DescriptionError, match=r"at most 0\.45 fits"):
        sim.simulate(stated)


# Noise of next to nothing leaves the step that collectives have slowed.
def test_jitter_disturbs_the_slowed_step():
    s = sim.load("gpt2-xl-ddp", {"jitter.op_cv": 1e-9, "jitter.samples": 2, "run.num_steps": 1})
    result = sim.simulate(s)
    assert result.slowed_by_communication_s > 5e-3
    assert study(result).step_ticks / 1e12 == pytest.approx([result.step_time_s] * 2, rel=1e-7)
    assert any("as many seconds as in the step" in line for line in assumptions(s))


def test_jitter_where_links_are_shared_leaves_kernels_alone():
    s = sim.load("gpt2-xl-ddp", {"jitter.op_cv": 1e-9, "run.network": "fluid", "run.num_steps": 1})
    assert sim.simulate(s).slowed_by_communication_s == 0
    assert any("not modelled under jitter" in line for line in assumptions(s))


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("llama-3-8b-3d", {}, "holds 24 of the 132 SMs (16 over several nodes) of NVIDIA H100"),
        ("llama-3-8b-3d", {}, "bytes that arrive at a rank take their share of its memory"),
        ("llama-3-8b-3d", {"run.overlap_slowdown": 0.1}, "takes 10.0% of the computing"),
        ("llama-3-8b-3d", {"run.overlap_slowdown": 0}, "run.overlap_slowdown is 0"),
        (
            "gpt-replay-2ranks",
            {"cluster.node": "x86-64-cores"},
            "no communication_units are stated",
        ),
    ],
)
def test_the_report_says_what_collectives_take(name, settings, says):
    assert says in "\n".join(assumptions(sim.load(name, settings)))


def test_the_report_says_how_much_longer_work_takes():
    s = sim.load("llama-3-405b-operations")
    text, lost = str(sim.simulate(s)), sim.simulate(s).summary.slowed_by_communication_s
    assert f"slowed      compute by {1e3 * lost:.4g} ms" in text
