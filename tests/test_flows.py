"""Communication by kind: bandwidth in nccl-tests' conventions, transfer apart from wait."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from simulator.api import simulate, simulate_schedule
from simulator.describe.loader import load
from simulator.describe.network import Network
from simulator.engine import run
from simulator.hardware import price
from simulator.hardware.collectives import ring_all_reduce_seconds
from simulator.hardware.network import GroupShape, collective_choice, send_recv_seconds
from simulator.lower import lower
from simulator.program import NONE, Flow
from simulator.report.flows import flows_text
from simulator.report.result import Result
from simulator.units import TICKS_PER_SECOND, to_ticks

GOLDEN = Path(__file__).parent / "golden"
PICOSECOND = 1 / TICKS_PER_SECOND
PLAN = {"dp": 2, "pp": 2, "tp": 2}


def of(result, operation, axis):
    (use,) = (u for u in result.flows if (u.operation, u.axis) == (operation, axis))
    return use


# 4 ranks, 4 MB: 2 x 3 rounds of 1 us + 1 MB / (100 GB/s) = 11 us each, 66 us in all.
# algbw = 4 MB / 66 us; busbw = 2 x 3/4 of that = 100 GB/s x 10/11: the wire but for the latency.
def test_the_busbw_of_a_ring_all_reduce_is_the_wires_less_its_latency(op, program_of):
    seconds = ring_all_reduce_seconds(4e6, 4, alpha=1e-6, beta=1e-11)
    program, _ = program_of([op(rank, 1, "dp", joint="ring") for rank in range(4)])
    program = replace(program, costs=(Flow("all_reduce", 4e6, seconds),))
    (use,) = Result(program, run(program, price(program))).flows
    assert use.transfer_mean_s == use.transfer_max_s == 66e-6
    assert use.algbw_bytes_per_s == pytest.approx(4e6 / 66e-6, rel=1e-12)
    assert use.busbw_bytes_per_s == pytest.approx(1e11 * 10 / 11, rel=1e-12)


# Arrivals at 100, 30, 30 and 30 ticks: three of four wait 70.
def test_the_others_wait_for_the_last_to_arrive_and_it_waits_for_none(op, program_of):
    work = [op(rank, 100 if rank == 0 else 30) for rank in range(4)]
    meet = [op(rank, 8, "dp", (rank,), joint="sum", name="all_reduce") for rank in range(4)]
    program, ticks = program_of([*work, *meet])
    (use,) = Result(program, run(program, ticks)).flows
    assert use.wait_max_s == 70 * PICOSECOND
    assert use.wait_mean_s == pytest.approx(0.75 * 70 * PICOSECOND)
    assert use.transfer_mean_s == 8 * PICOSECOND
    assert use.calls == 1


# The second op of the stream is ready at 5 but arrives at 20, when the first one ends; rank 1 is
# there at 20 too, so nobody waits for it. For the first, rank 1 arrives at 0 and waits 10.
def test_a_member_arrives_when_it_is_at_the_head_of_its_stream(op, program_of):
    ops = [op(0, 10), op(0, 10, "dp", (0,), joint="a"), op(1, 10, "dp", joint="a"),
           op(0, 10, "dp", (0,), joint="b"), op(1, 10, "dp", joint="b")]  # fmt: skip
    program, ticks = program_of(ops)
    (use,) = Result(program, run(program, ticks)).flows
    assert use.calls == 2
    assert use.wait_max_s == 10 * PICOSECOND
    assert use.wait_mean_s == pytest.approx(10 / 4 * PICOSECOND)


# One of 4 replicas is 5 us late from its first op on: 3 of 4 members wait 5 us in the one
# all-reduce of all gradients.
def test_a_late_replica_makes_all_others_wait_by_as_much_as_it_is_late(scenario_of):
    s = scenario_of(plan={"dp": 4, "bucket_size": 1e12}, run={"num_steps": 1})
    program = lower(s)
    ticks = np.repeat(price(program, s.cluster), 4, axis=1)
    ticks[0, 2] += to_ticks(5e-6)
    use = of(Result(program, run(program, ticks), s), "all_reduce", "dp")
    assert use.calls == 1
    assert use.wait_max_s == 5e-6
    assert use.wait_mean_s == pytest.approx(0.75 * 5e-6, rel=1e-12)


# The end stages of 3 sum their tied embedding: the one that ends its backward first waits for the
# other by the difference of the two ends, its peer not at all.
def test_stages_of_uneven_layers_wait_for_the_slower_one(scenario_of, gpt):
    model = replace(gpt, num_hidden_layers=8)
    s = scenario_of(model=model, plan={"pp": 3, "layers_per_stage": (5, 2, 1)},
                    run={"num_steps": 1})  # fmt: skip
    result = simulate(s)
    p, end = result.tiled, result.times.end
    tied = np.flatnonzero(p.stream == p.streams.index("tied"))
    a, b = (max(end[p.predecessors(row)]) for row in tied)
    use = of(result, "all_reduce", "tied")
    assert abs(a - b) > 0
    assert use.wait_max_s == abs(int(a - b)) * PICOSECOND
    assert use.wait_mean_s == pytest.approx(use.wait_max_s / 2)


def test_nothing_waits_among_replicas_that_are_alike(scenario_of):
    flows = simulate(scenario_of(plan={"dp": 4, "tp": 2}), folded=False).flows
    assert {use.axis for use in flows} == {"dp", "tp"}
    assert all(use.wait_max_s == 0 for use in flows)


# GPipe, 2 stages x 2 microbatches, F 1 s, B 2 s, messages 0.5 s. Activations leave at 1 and 2 and
# are awaited from 0 and 1.5 (the end of the message before): waits 1 and 0.5. Stage 1 computes
# F 1.5 to 3.5, B to 5.5 and 7.5; gradients are awaited from 0 and 6: waits 5.5 and 1.5. Senders
# wait for nobody: 8.5 s over 8 members.
def test_waits_of_the_messages_of_a_bare_schedule():
    result = simulate_schedule("GPipe", stages=2, microbatches=2, latency=0.5)
    (use,) = result.flows
    assert (use.operation, use.axis, use.ranks, use.calls) == ("send_recv", "pp", 2, 4)
    assert use.wait_max_s == 5.5
    assert use.wait_mean_s == 8.5 / 8
    assert use.transfer_per_rank_s == 4 * 0.5
    assert use.algbw_bytes_per_s == 0  # its messages have no bytes
    assert use.nodes is use.ranks_per_node is use.algorithm is use.protocol is None


def test_messages_that_take_no_time_have_no_bandwidth():
    (use,) = simulate_schedule("GPipe", stages=2, microbatches=2).flows
    assert use.transfer_mean_s == 0
    assert use.algbw_bytes_per_s is use.busbw_bytes_per_s is None


def test_a_collective_alone_has_the_bandwidth_and_algorithm_of_nccls_model(scenario_of, cluster_of):
    cluster = replace(cluster_of(num_nodes=2, devices=4), nccl_algorithm="RING")
    result = simulate(scenario_of(plan={"dp": 2, "tp": 4, "bucket_size": 1e12}, cluster=cluster))
    use = of(result, "all_reduce", "dp")
    shape = GroupShape(2, 2, 1)
    chosen = collective_choice("all_reduce", use.payload_bytes, shape, cluster)
    assert (use.algorithm, use.protocol) == ("RING", chosen.protocol)
    assert (use.ranks, use.nodes, use.ranks_per_node) == shape[:3]
    assert use.transfer_mean_s == pytest.approx(chosen.seconds, abs=PICOSECOND)
    assert use.busbw_bytes_per_s == pytest.approx(use.payload_bytes / chosen.seconds, rel=1e-6)


# A boundary of 2 x 32 tokens x 64 numbers of 2 bytes; 2 directions x 4 microbatches x 2 replicas.
def test_messages_are_counted_and_timed_by_where_they_cross(scenario_of, cluster_of):
    s = scenario_of(plan={"dp": 2, "pp": 2, "microbatch_size": 2, "order": ("pp", "dp", "tp")},
                    cluster=cluster_of(num_nodes=2, devices=2))  # fmt: skip
    use = of(simulate(s), "send_recv", "pp")
    assert (use.payload_bytes, use.nodes, use.calls) == (2 * 32 * 64 * 2, 2, 2 * 4 * 2)
    seconds = send_recv_seconds(use.payload_bytes, GroupShape(2, 2, 1), s.cluster)
    assert use.transfer_mean_s == pytest.approx(seconds, abs=PICOSECOND)
    assert use.algorithm is None


# dp 3 x tp 2 on nodes of 3: of the tp pairs (0,1), (2,3), (4,5) the middle one lies on two nodes.
def test_groups_that_lie_differently_are_kinds_of_their_own(scenario_of, cluster_of):
    s = scenario_of(plan={"dp": 3, "tp": 2}, cluster=cluster_of(num_nodes=2, devices=3))
    flows = [u for u in simulate(s).flows if u.axis == "tp" and u.payload_bytes > 1000]
    calls = {use.nodes: use.calls for use in flows}
    seconds = {use.nodes: use.transfer_mean_s for use in flows}
    assert calls[1] == 2 * calls[2]
    assert seconds[1] < seconds[2]
    assert all(use.transfer_mean_s == pytest.approx(use.transfer_max_s) for use in flows)


def test_servers_have_no_busbw_for_nccl_tests_has_none(scenario_of):
    plan = {"dp": 4, "gradient_exchange": "parameter_server", "servers": 2, "bucket_size": 1e12}
    use = of(simulate(scenario_of(plan=plan)), "push_pull", "dp")
    assert use.algbw_bytes_per_s == pytest.approx(use.payload_bytes / use.transfer_mean_s)
    assert use.busbw_bytes_per_s is use.algorithm is None


def values(result):
    return [[x for x in use if not isinstance(x, float)] for use in result.flows], [
        [x for x in use if isinstance(x, float)] for use in result.flows
    ]


@pytest.mark.parametrize("other", [{"folded": False}, {"engine": "events"},
                                   {"engine": "reference"}])  # fmt: skip
def test_folded_and_unfolded_runs_and_all_engines_report_the_same(scenario_of, other):
    s = scenario_of(plan=PLAN)
    folded, whole = simulate(s), simulate(s, **other)
    assert folded.times.columns[0].shape[1] == 1
    (words, numbers), (more_words, more_numbers) = values(folded), values(whole)
    assert words == more_words
    for a, b in zip(numbers, more_numbers, strict=True):
        assert a == pytest.approx(b, rel=1e-12, abs=0)


@pytest.mark.parametrize("network", ["alpha-beta", "fluid"])
def test_transfers_sum_to_what_the_timeline_holds(scenario_of, cluster_of, network):
    s = scenario_of(plan=PLAN, run={"num_steps": 2, "network": network},
                    cluster=cluster_of(num_nodes=2, devices=4))  # fmt: skip
    result = simulate(s)
    p, t = result.program, result.timeline
    last = (p.joint != NONE) & (p.step == 1)
    held = int((t.end - t.start)[last].sum()) * PICOSECOND
    members = sum(use.transfer_mean_s * use.calls * use.ranks for use in result.flows)
    assert members == pytest.approx(held, rel=1e-12)
    assert sum(u.transfer_per_rank_s for u in result.flows) * 8 == pytest.approx(held, rel=1e-12)
    assert sum(u.calls * u.ranks for u in result.flows) == last.sum()


def test_only_the_last_step_is_counted(scenario_of):
    one, three = (simulate(scenario_of(plan=PLAN, run={"num_steps": n})) for n in (1, 3))
    assert sum(u.calls for u in one.flows) == sum(u.calls for u in three.flows)


# At detail "stage" all collectives of a pass are one op with a count; a call is still a call.
def test_joined_calls_are_counted_and_timed_one_by_one(scenario_of):
    fine, coarse = (
        simulate(scenario_of(plan=PLAN, run={"detail": detail})) for detail in ("layer", "stage")
    )
    assert max(c.count for c in coarse.tiled.costs if isinstance(c, Flow)) > 1

    def calls(result):
        return {(u.operation, u.axis, u.payload_bytes): (u.calls, u.transfer_mean_s,
                u.transfer_max_s, u.algbw_bytes_per_s) for u in result.flows}  # fmt: skip

    assert calls(fine).keys() == calls(coarse).keys()
    for key, numbers in calls(fine).items():
        assert calls(coarse)[key] == pytest.approx(numbers, rel=1e-6)


# Rank 1 arrives 90 ticks late at an op of 3 calls of 10: rank 0 waits before the first of them.
def test_members_of_joined_calls_wait_before_the_first(op, program_of):
    ops = [op(1, 90), op(0, 30, "tp", joint="a"), op(1, 30, "tp", (0,), joint="a")]
    program, ticks = program_of(ops)
    costs = tuple(replace(c, count=3) if isinstance(c, Flow) else c for c in program.costs)
    (use,) = Result(replace(program, costs=costs), run(program, ticks)).flows
    assert use.calls == 3
    assert use.transfer_mean_s == pytest.approx(10 * PICOSECOND)
    assert use.wait_max_s == 90 * PICOSECOND
    assert use.wait_mean_s == pytest.approx(90 / 6 * PICOSECOND)


# 4 nodes, 2 a leaf whose one uplink carries what one adapter does: the two dp rings, 0-2 and 1-3,
# halve it; alone, each has all its adapter carries.
def test_flows_that_meet_have_less_bandwidth_than_alone(scenario_of, cluster_of):
    nodes = cluster_of(num_nodes=4, devices=1, nic={"count": 1, "bandwidth": 1e8})
    uplink = Network(layout="pods", radix=3, oversubscription=2.0)
    plan = {"dp": 2, "tp": 2, "bucket_size": 1e12}
    alone, sharing = (
        of(simulate(scenario_of(plan=plan, cluster=cluster, run={"network": network})),
           "all_reduce", "dp").algbw_bytes_per_s
        for cluster, network in ((nodes, "alpha-beta"), (replace(nodes, network=uplink), "fluid"))
    )  # fmt: skip
    assert alone / sharing == pytest.approx(2, rel=0.03)


def test_the_most_time_comes_first(scenario_of):
    times = [use.transfer_per_rank_s for use in simulate(scenario_of(plan=PLAN)).flows]
    assert len(times) > 3
    assert times == sorted(times, reverse=True)


def test_a_summary_alone_does_not_look_at_flows(scenario_of):
    result = simulate(scenario_of(plan=PLAN))
    assert result.summary.step_time_s > 0
    assert "flows" not in vars(result)


def test_the_table_of_a_shipped_scenario():
    result = simulate(load("gpt2-xl-ddp"))
    table = flows_text(result.flows, result.breakdown).rpartition("\n")[0]
    assert table + "\n" == (GOLDEN / "flows-gpt2-xl-ddp.txt").read_text(encoding="utf-8")
    assert table in str(result)


def test_the_table_says_how_much_it_leaves_out(scenario_of):
    result = simulate(scenario_of(plan=PLAN))
    lines = flows_text(result.flows, result.breakdown, 2).splitlines()
    rest = sum(use.transfer_per_rank_s for use in result.flows[2:])
    assert lines[3] == f"and {len(result.flows) - 2} more kinds: {rest / 1e-6:.4g} us a rank"


def test_the_exposed_part_of_each_axis_is_the_breakdowns(scenario_of):
    result = simulate(scenario_of(plan={"tp": 2}))
    exposed = result.summary.exposed_communication_s["tp"]
    total = sum(use.transfer_per_rank_s for use in result.flows)
    assert exposed == pytest.approx(total)  # nothing overlaps tensor-parallel all-reduces
    line = flows_text(result.flows, result.breakdown).splitlines()[-1]
    spelled = f"{exposed / 1e-3:.4g} ms"
    assert line == f"mean over ranks: tp {spelled}, {spelled} of it exposed"


def test_a_rank_that_talks_to_nobody_has_no_table(scenario_of):
    result = simulate(scenario_of())
    assert result.flows == ()
    assert "algbw" not in str(result)


def test_json_has_every_kind_with_units_in_its_keys(scenario_of):
    result = simulate(scenario_of(plan=PLAN))
    rows = json.loads(json.dumps(result.to_dict(), allow_nan=False))["flows"]
    assert [row["calls"] for row in rows] == [use.calls for use in result.flows]
    assert {key.rpartition("_")[2] for key, value in rows[0].items() if type(value) is float} == {
        "s", "bytes",
    }  # fmt: skip


# Two nodes of 2: by block a tp pair lies on one node, cyclic on two.
@pytest.mark.parametrize(("placement", "nodes"), [("block", 1), ("cyclic", 2)])
def test_a_kind_spans_the_nodes_that_its_ranks_are_placed_on(
    scenario_of, cluster_of, placement, nodes
):
    plan = {"dp": 2, "tp": 2, "placement": placement}
    s = scenario_of(plan=plan, cluster=cluster_of(num_nodes=2, devices=2))
    assert {use.nodes for use in simulate(s).flows if use.axis == "tp"} == {nodes}
