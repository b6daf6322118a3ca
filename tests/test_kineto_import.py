"""Traces of torch.profiler as measured runs; times of traces are in microseconds."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kineto_traces import Rank, saved

import simulator as sim
from simulator.errors import DescriptionError
from simulator.exchange.kineto import read_kineto
from simulator.exchange.kineto.calls import axis_of, call_of, operation_of
from simulator.exchange.kineto.events import Spans, innermost
from simulator.lower.check import check
from simulator.program import ACTION_CODE, ACTIONS, NONE
from simulator.report.breakdown import CATEGORIES
from simulator.report.measured import overlap, result_of, step_times

TRACES = Path(__file__).parent / "traces"
MICRO = 10**6
"""Ticks of a microsecond."""


def late_pair(clock=0.0):
    """Two ranks that compute 100 and 150 us, sum gradients until 200, and update until 250."""
    first, second = Rank(0, 2), Rank(1, 2, clock=clock)
    for rank, length in ((first, 100), (second, 150)):
        rank.operator("autograd::engine::evaluate_function: MmBackward0", -5, 5)
        rank.kernel("gemm", 0, length)
        rank.collective("allreduce", length, 200 - length, launch=-2)
        rank.range("Optimizer.step#AdamW.step", 195, 3)
        rank.kernel("multi_tensor_apply", 200, 50, launch=196)
    return first, second


def named(measured, rank, kind):
    """Return (start, end) of the ops of a rank that compute in actions of a kind, in us."""
    p, t = measured.program, measured.timeline
    ops = np.flatnonzero((p.rank == rank) & (p.action == ACTION_CODE[kind]) & ~p.is_flow)
    ops = ops[p.stream[ops] == p.streams.index("compute")]
    return [(int(t.start[i]) / MICRO, int(t.end[i]) / MICRO) for i in ops]


def flows(measured, rank):
    """Return (name, stream, start, end) of the calls of a rank, in us."""
    p, t = measured.program, measured.timeline
    return [
        (p.costs[p.cost[i]].name, p.streams[p.stream[i]], int(t.start[i]) / MICRO,
         int(t.end[i]) / MICRO)
        for i in np.flatnonzero((p.rank == rank) & p.is_flow)
    ]  # fmt: skip


def test_a_collective_starts_when_its_last_member_is_there(tmp_path):
    measured = read_kineto(saved(tmp_path, *late_pair()))
    assert flows(measured, 0) == flows(measured, 1) == [("all_reduce", "dp 0", 150, 200)]


def test_wait_for_a_late_member_is_told_from_exposed_transfer(tmp_path):
    result = result_of(read_kineto(saved(tmp_path, *late_pair())))
    # Rank 0 computes 0..100, waits for rank 1 until 150, for the bytes until 200, updates to 250.
    b = result.breakdown
    assert b.of("backward").tolist() == [100 * MICRO, 150 * MICRO]
    assert b.of("dp").tolist() == [50 * MICRO, 50 * MICRO]
    assert b.bubble.tolist() == [50 * MICRO, 0]
    assert b.of("optimizer").tolist() == [50 * MICRO, 50 * MICRO]
    assert result.flows[0].wait_mean_s == pytest.approx(25e-6)
    assert result.flows[0].transfer_mean_s == pytest.approx(50e-6)
    # 4,000 bytes in 50 us; an all-reduce of two ranks has busbw = algbw.
    assert result.flows[0].busbw_bytes_per_s == pytest.approx(80e6)


@pytest.mark.parametrize("clock", [3e6, -12_345.5])
def test_clocks_are_aligned_by_the_ends_of_collectives(tmp_path, clock):
    measured = read_kineto(saved(tmp_path, *late_pair(clock)))
    assert measured.clocks.offset.tolist() == [0, round(clock * 1000)]
    assert flows(measured, 1) == [("all_reduce", "dp 0", 150, 200)]
    assert "clocks aligned to rank 0's: 1 by the ends of 1 matched" in measured.notes[0]


def test_clocks_are_aligned_through_ranks_that_share_no_group_with_the_first(tmp_path):
    groups = {"a": ("tp", [0, 1]), "b": ("dp", [1, 2])}
    ranks = [Rank(r, 3, groups, clock) for r, clock in enumerate((0, 50, -900))]
    for rank, group in zip(ranks, ("a", "ab", "b"), strict=True):
        for name in group:
            rank.collective("allreduce", 10 + 20 * (name == "b"), 10, group=name)
    measured = read_kineto(saved(tmp_path, *ranks))
    assert measured.clocks.offset.tolist() == [0, 50_000, -900_000]


def test_messages_bound_clocks_where_there_is_no_collective(tmp_path):
    # Sent at 0 and there at 10, back at 20 and there at 30: rank 1's clock, 100 us ahead, shows 110
    # and 120. It may be ahead by at most 110 and at least 120 - 30 = 90: the middle is 100.
    first, second = Rank(0, 2), Rank(1, 2, clock=100)
    first.send(0, 10, 1)
    second.recv(0, 10, 0)
    second.send(20, 10, 0)
    first.recv(20, 10, 1)
    measured = read_kineto(saved(tmp_path, first, second))
    assert measured.clocks.offset.tolist() == [0, 100_000]


def test_collectives_go_on_where_messages_have_reached(tmp_path):
    # Ranks 0 and 1 exchange messages, ranks 1 and 2 sum: the collective aligns 2 to 1 exactly.
    groups = {"0": ("default_pg", range(3)), "dp": ("mesh_dp", [1, 2])}
    ranks = [Rank(r, 3, groups, clock) for r, clock in enumerate((0, 100, -5000))]
    ranks[0].send(0, 10, 1)
    ranks[1].recv(0, 10, 0)
    ranks[1].send(20, 10, 0)
    ranks[0].recv(20, 10, 1)
    for rank in ranks[1:]:
        rank.collective("allreduce", 40, 10, group="dp")
    measured = read_kineto(saved(tmp_path, *ranks))
    assert measured.clocks.offset.tolist() == [0, 100_000, -5_000_000]
    assert "1 by the ends of 1 matched collectives" in measured.notes[0]
    assert "1 by what messages allow" in measured.notes[0]


def test_clocks_within_what_messages_allow_stay(tmp_path):
    first, second = Rank(0, 2), Rank(1, 2, clock=4)
    first.send(0, 10, 1)
    second.recv(0, 10, 0)
    second.send(20, 10, 0)
    first.recv(20, 10, 1)
    measured = read_kineto(saved(tmp_path, first, second))
    assert measured.clocks.offset.tolist() == [0, 0]


def test_messages_match_by_their_ends_in_order(tmp_path):
    first, second = Rank(0, 2), Rank(1, 2)
    for ts in (0, 50):
        first.send(ts, 30, 1)
        second.recv(ts + 10, 20, 0)
    second.send(100, 5, 0, count=500)
    first.recv(90, 15, 1, count=500)
    p = read_kineto(saved(tmp_path, first, second)).program
    members = [sorted(p.joint_members[j].tolist()) for j in range(len(p.joint_group))]
    kinds = [{(int(p.rank[i]), ACTIONS[p.action[i]]) for i in some} for some in members]
    forward, back = {(0, "SEND_F"), (1, "RECV_F")}, {(1, "SEND_B"), (0, "RECV_B")}
    assert sorted(map(sorted, kinds)) == sorted(map(sorted, (forward, forward, back)))
    assert {c.bytes for c in p.costs if c.name == "send_recv"} == {4000, 2000}


def test_groups_are_kept_apart_and_their_axes_follow_from_their_descriptions(tmp_path):
    groups = {"1": ("mesh_tp", [0, 1]), "2": ("mesh_tp", [2, 3]), "3": ("mesh_dp_shard", [0, 2])}
    ranks = [Rank(r, 4, groups) for r in range(4)]
    for rank in ranks:
        rank.collective("_allgather_base", 10, 5, group="12"[rank.rank // 2])
    for rank in ranks[::2]:
        rank.collective("_reduce_scatter_base", 20, 5, group="3")
    p = read_kineto(saved(tmp_path, *ranks)).program
    assert sorted(p.groups[g].tolist() for g in range(len(p.groups))) == [[0, 1], [0, 2], [2, 3]]
    assert p.streams == ("compute", "dp 3", "tp 1", "tp 2")


def test_the_user_may_state_the_axis_of_a_group(tmp_path):
    ranks = late_pair()
    measured = read_kineto(saved(tmp_path, *ranks), {"0": "cp"})
    assert measured.program.streams == ("compute", "cp 0")
    with pytest.raises(DescriptionError, match="group 0=xp: the axes are tp, pp"):
        read_kineto(tmp_path, {"0": "xp"})


@pytest.mark.parametrize(
    ("description", "axis"),
    [
        ("TENSOR_MODEL_PARALLEL_GROUP", "tp"), ("mesh_tp", "tp"), ("mesh_pp", "pp"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pp"), ("CONTEXT_PARALLEL_GROUP", "cp"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "ep"), ("EMBEDDING_GROUP", "tied"),
        ("DATA_PARALLEL_GROUP", "dp"), ("mesh_dp_shard", "dp"), ("default_pg", "dp"), ("", "dp"),
    ],
)  # fmt: skip
def test_descriptions_of_torch_and_megatron_name_axes(description, axis):
    assert axis_of(description) == axis


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
        ("ncclKernel_ReduceScatter_RING_LL_Sum_bfloat16(ncclDevComm*)", "reduce_scatter"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_recv"),
        ("ncclDevKernel_AllGather_RING_LL", "all_gather"), ("gloo:all_reduce", "all_reduce"),
        ("gloo:recv", "recv"),
    ],
)  # fmt: skip
def test_operations_are_known_by_the_names_of_kernels_where_arguments_are_missing(name, operation):
    assert call_of(name, {}, {}, {}).operation == operation


def test_an_operation_that_is_not_known_keeps_its_name():
    assert operation_of("_all_gather_single") == "all_gather"
    assert operation_of("coalesced") == "coalesced"


def test_arguments_of_a_call_may_lie_at_the_operator_that_launched_it(tmp_path):
    rank = Rank(0, 1)
    rank.kernel("ncclDevKernel_AllGather_RING_LL(x)", 10, 5, **{"External id": 77})
    rank.operator("record_param_comms", 1, 2)
    rank.events[-1]["args"] = {
        "External id": 77, "Collective name": "_allgather_base", "In msg nelems": 10,
        "Out msg nelems": 40, "dtype": "BFloat16", "Process Group Name": "0",
    }  # fmt: skip
    p = read_kineto(rank.save(tmp_path)).program
    assert [(c.name, c.bytes) for c in p.costs] == [("all_gather", 80)]


def stepped(rank=0, world=1, steps=(4, 5)):
    """One rank of two steps of 100 us: a forward of 40, a backward of 30, an update of 20."""
    trace = Rank(rank, world)
    for k, number in enumerate(steps):
        at = 100 * k
        trace.range(f"ProfilerStep#{number}", at, 100)
        trace.kernel("fwd", at + 5, 40)
        trace.operator("autograd::engine::evaluate_function: X", at + 44, 20, tid=2)
        trace.kernel("bwd", at + 45, 30, launch=at + 50)
        trace.kernel("clip", at + 75, 2, launch=at + 70)
        trace.range("Optimizer.step#AdamW.step", at + 76, 10)
        trace.kernel("adam", at + 80, 20, launch=at + 77)
    return trace


def test_steps_are_those_of_the_profiler(tmp_path):
    measured = read_kineto(stepped().save(tmp_path))
    assert measured.steps == (4, 5)
    result = result_of(measured)
    # The first begins with its annotation, 0; both end with their last kernel.
    assert step_times(result).tolist() == pytest.approx([100e-6, 100e-6])


def test_passes_and_updates_are_told_by_who_launched_a_kernel(tmp_path):
    measured = read_kineto(stepped().save(tmp_path))
    assert named(measured, 0, "F") == [(5, 45), (105, 145)]
    assert named(measured, 0, "B") == [(45, 75), (145, 175)]
    assert named(measured, 0, "OPT") == [(75, 77), (80, 100), (175, 177), (180, 200)]


def test_a_turn_from_backward_to_forward_begins_a_microbatch(tmp_path):
    rank = Rank(0, 1)
    for k in range(3):
        rank.kernel("fwd", 100 * k, 40)
        rank.operator("autograd::engine::evaluate_function: X", 100 * k + 38, 30)
        rank.kernel("bwd", 100 * k + 40, 60, launch=100 * k + 39)
    p = read_kineto(rank.save(tmp_path)).program
    assert p.microbatch.tolist() == [0, 0, 1, 1, 2, 2]


def test_ops_outside_steps_and_steps_of_some_ranks_are_left_out_and_said(tmp_path):
    first, second = stepped(0, 2), stepped(1, 2, steps=(4,))
    first.kernel("warm up", -50, 10)
    measured = read_kineto(saved(tmp_path, first, second))
    assert measured.steps == (4,)
    assert "steps 5 are not on all ranks and left out" in measured.notes
    assert "1 ops lie outside all steps and are left out" in measured.notes


def test_ranges_of_actions_label_what_is_launched_in_them(tmp_path):
    rank = Rank(0, 1)
    rank.range("PP:2F1", 0, 10)
    rank.kernel("fwd", 20, 30, launch=5)
    rank.range("PP:2I1", 10, 10)
    rank.kernel("bwd", 50, 30, launch=15)
    p = read_kineto(rank.save(tmp_path)).program
    assert [p.label(i) for i in range(2)] == ["2F1 fwd", "2I1 bwd"]


def test_an_action_that_repeats_begins_the_next_step(tmp_path):
    rank = Rank(0, 1)
    for at in (0, 100):
        rank.range("PP:0F0", at, 10)
        rank.range("PP:0B0", at + 10, 20)
    assert read_kineto(rank.save(tmp_path)).program.step.tolist() == [0, 0, 1, 1]


def test_passes_begin_where_the_message_was_there_that_they_waited_for(tmp_path):
    # Torch's runtime posts the receive at 0 and waits for it in the forward, from 20 to 50.
    first, second = Rank(0, 2), Rank(1, 2)
    first.range("PP:0F0", 0, 40)
    first.range("PP:0SEND_F0", 40, 2)
    second.range("PP:1RECV_F0", 0, 2)
    second.range("gloo:recv", 1, 49)
    second.range("PP:1F0", 20, 60)
    measured = read_kineto(saved(tmp_path, first, second))
    assert named(measured, 1, "F") == [(50, 80)]
    assert flows(measured, 1) == [("send_recv", "recv F", 40, 50)]
    b = result_of(measured).breakdown
    assert b.of("pp").tolist()[1] == 10 * MICRO
    assert measured.clocks.offset.tolist() == [0, 0]


def test_updates_count_where_no_action_names_them(tmp_path):
    rank = Rank(0, 1)
    rank.range("ProfilerStep#1", 0, 100)
    rank.range("PP:0F0", 0, 20)
    rank.range("Optimizer.step#AdamW.step", 30, 40)
    assert named(read_kineto(rank.save(tmp_path)), 0, "OPT") == [(30, 70)]
    rank.range("PP:0OPT0", 25, 50)  # holds the other
    assert named(read_kineto(rank.save(tmp_path)), 0, "OPT") == [(25, 75)]


def test_ranges_that_reduce_are_sums_where_something_is_summed_in_them(tmp_path):
    ranks = [Rank(0, 2), Rank(1, 2)]
    for rank in ranks:
        rank.range("PP:0B0", 0, 10)
        rank.range("PP:0REDUCE_GRAD", 10, 20)
    assert not read_kineto(saved(tmp_path, *ranks)).program.is_flow.any()
    for rank in ranks:
        rank.range("gloo:all_reduce", 12, 15)
    measured = read_kineto(saved(tmp_path, *ranks))
    assert flows(measured, 0) == [("all_reduce", "dp", 10, 30)]


def test_kernels_that_overlap_count_once(tmp_path):
    rank = Rank(0, 1)
    rank.kernel("a", 0, 100)
    rank.kernel("b", 60, 60, stream=8)  # 40 of it beside a
    rank.kernel("c", 10, 20, stream=9)  # all of it
    measured = read_kineto(rank.save(tmp_path))
    result = result_of(measured)
    assert result.breakdown.of("forward").tolist() == [120 * MICRO]
    assert any("2 kernels overlap earlier ones" in n and "0.06 ms" in n for n in measured.notes)
    p = measured.program
    assert p.streams == ("compute", "beside")


def test_calls_that_overlap_have_streams_of_their_own(tmp_path):
    rank = Rank(0, 1)
    rank.collective("allreduce", 0, 50)
    rank.collective("allreduce", 20, 50, stream=21)
    p = read_kineto(rank.save(tmp_path)).program
    assert p.streams == ("compute", "dp 0", "dp 0 (2)")


def test_a_kernel_without_a_launch_counts_where_it_ran(tmp_path):
    rank = stepped()
    rank.kernel("orphan", 130, 1, launch=False)
    measured = read_kineto(rank.save(tmp_path))
    assert any("1 of 9 kernels have no launch" in note for note in measured.notes)
    assert len(measured.program) == 9


def test_calls_that_nobody_matches_are_said_and_stay(tmp_path):
    first, second = Rank(0, 2), Rank(1, 2)
    for rank in (first, second):
        rank.collective("allreduce", 0, 10)
    first.collective("allreduce", 20, 10)
    measured = read_kineto(saved(tmp_path, first, second))
    assert len(measured.program.joint_group) == 2
    assert any(note.startswith("1 calls match none of another rank") for note in measured.notes)


def test_from_where_ranks_name_other_operations_on_nothing_matches(tmp_path):
    first, second = Rank(0, 2), Rank(1, 2)
    for rank, operations in ((first, "abc"), (second, "adc")):
        names = {"a": "allreduce", "b": "broadcast", "c": "allreduce", "d": "barrier"}
        for k, letter in enumerate(operations):
            rank.collective(names[letter], 20 * k, 10)
    sizes = np.diff(read_kineto(saved(tmp_path, first, second)).program.joint_members.offset)
    assert sorted(sizes.tolist()) == [1, 1, 1, 1, 2]


def test_calls_that_the_trace_numbers_match_by_number(tmp_path):
    first, second = Rank(0, 2), Rank(1, 2)
    for k in range(3):
        first.collective("allreduce", 20 * k, 10, Seq=k)
    for k in range(1, 3):  # the profiler of rank 1 began later
        second.collective("allreduce", 20 * k, 10, Seq=k)
    p = read_kineto(saved(tmp_path, first, second)).program
    assert sorted(np.diff(p.joint_members.offset).tolist()) == [1, 2, 2]


def test_dependencies_that_would_be_a_cycle_are_left_out_and_said(tmp_path):
    # Each rank computes between the two calls, and they made them in opposite orders.
    groups = {"a": ("tp", [0, 1]), "b": ("dp", [0, 1])}
    ranks = [Rank(r, 2, groups) for r in range(2)]
    for rank, order in zip(ranks, ("ab", "ba"), strict=True):
        rank.collective("allreduce", 0, 10, group=order[0], stream=20)
        rank.kernel("gemm", 12, 8)
        rank.collective("allreduce", 20, 10, group=order[1], stream=21)
    measured = read_kineto(saved(tmp_path, *ranks))
    assert any("would have been a cycle" in note for note in measured.notes)
    check(measured.program)


def test_numbered_calls_in_opposite_orders_still_make_a_program(tmp_path):
    ranks = [Rank(r, 2) for r in range(2)]
    for rank, order in zip(ranks, ((1, 2), (2, 1)), strict=True):
        for k, number in enumerate(order):
            rank.collective("allreduce", 20 * k, 10, Seq=number)
    measured = read_kineto(saved(tmp_path, *ranks))
    check(measured.program)
    assert any("would have been a cycle" in note for note in measured.notes)


def test_overlap_is_what_of_a_calls_own_time_the_rank_computes(tmp_path):
    rank = Rank(0, 1)
    rank.kernel("gemm", 0, 100)
    rank.kernel("gemm", 130, 70, launch=120)
    rank.collective("allreduce", 50, 60)  # 50 of 60 beside the first
    rank.collective("allreduce", 105, 40, stream=21)  # 15 of 40 beside the second
    measured = read_kineto(rank.save(tmp_path))
    over = overlap(result_of(measured), measured)
    # They lie over each other from 105 to 110: 50..145 is 95 us, of which 65 are computed beside.
    assert over.communication.tolist() == [95 * MICRO]
    assert over.hidden.tolist() == [65 * MICRO]
    # The host launched the second product at 120, 20 us after the first had ended.
    assert over.host.tolist() == [20 * MICRO]


def test_copies_between_host_and_device_are_data(tmp_path):
    rank = Rank(0, 1)
    rank.kernel("Memcpy HtoD (Pinned -> Device)", 0, 30, stream=7, cat="gpu_memcpy")
    rank.kernel("gemm", 30, 70)
    b = result_of(read_kineto(rank.save(tmp_path))).breakdown
    assert b.of("data").tolist() == [30 * MICRO]
    assert b.of("forward").tolist() == [70 * MICRO]


def test_the_recorded_pipeline_has_the_bubble_that_its_ranges_show():
    measured = read_kineto(TRACES)
    check(measured.program)
    result = result_of(measured)
    # Rank 0: F 9.899 9.590 10.129 10.063, B 21.068 20.633 21.308 20.091, OPT 4.641 ms.
    assert result.breakdown.of("forward", "backward", "optimizer")[0] == pytest.approx(
        127.422e9, rel=1e-4
    )
    # From rank 0's 0F0 at 728865.63 to the end of its OPT at 919644.631 us.
    assert result.step_time_s == pytest.approx(190.779e-3, rel=1e-4)
    # All 8 messages of 4 microbatches match.
    assert np.diff(measured.program.joint_members.offset).tolist() == [2] * 8


def test_a_recording_of_torchs_runtime_has_all_its_messages_and_one_clock():
    measured = read_kineto(TRACES / "runtime")
    check(measured.program)
    p = measured.program
    assert measured.steps == (2, 3)
    # Interleaved, 4 stages on 2 ranks: 3 borders x 2 directions x 4 microbatches x 2 steps
    assert np.diff(p.joint_members.offset).tolist() == [2] * 48
    assert measured.clocks.offset.tolist() == [0, 0]
    for action, count in (("F", 4 * 4 * 2), ("B", 4 * 4 * 2)):
        assert ((p.action == ACTION_CODE[action]) & ~p.is_flow).sum() == count
    result = result_of(measured)
    assert result.stages == [[0, 2], [1, 3]]
    assert (result.breakdown.ticks.sum(axis=0) == result.breakdown.window).all()


def test_a_recording_of_data_parallelism_has_its_sums_in_their_passes():
    measured = read_kineto(TRACES / "ddp")
    p = measured.program
    assert measured.steps == (2, 3)
    # two buckets a step
    assert np.diff(p.joint_members.offset).tolist() == [2] * 4
    assert {p.streams[s].split(" ")[0] for s in p.stream[p.is_flow]} == {"dp"}
    assert {ACTIONS[a] for a in p.action[p.is_flow]} == {"REDUCE_GRAD"}
    assert abs(measured.clocks.offset[1]) < 1_000_000  # one host: within a millisecond
    assert {ACTIONS[a] for a in p.action[~p.is_flow]} == {"F", "B", "OPT", "REDUCE_GRAD"}


def test_the_recorded_pipeline_is_drawn_and_traced(tmp_path):
    result = result_of(read_kineto(TRACES))
    result.plot.pipeline(tmp_path / "p.png")
    result.plot.breakdown(tmp_path / "b.png")
    result.save_trace(tmp_path / "t.json")
    slices = [e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"]
              if e["ph"] == "X" and e["dur"] > 0]  # fmt: skip
    assert sum(e["name"].startswith("F") for e in slices) == 8


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZB-H1", "Interleaved1F1B"])
@settings(
    max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(clock=st.floats(-1e5, 1e5), microbatches=st.sampled_from([2, 4, 6]))
def test_a_simulated_schedule_recorded_as_kernels_comes_back(
    tmp_path, schedule, clock, microbatches
):
    chunks = {"chunks": 2} if schedule == "Interleaved1F1B" else {}
    run = sim.simulate_schedule(
        schedule, stages=2, microbatches=microbatches, forward=1e-3, backward=2e-3, **chunks
    )
    p, t = run.program, run.timeline
    ranks = [Rank(r, 2, clock=clock * r) for r in range(2)]
    for i in np.flatnonzero(p.stream == p.streams.index("compute")).tolist():
        trace, start, end = ranks[p.rank[i]], t.start[i] / MICRO, t.end[i] / MICRO
        kind = ACTIONS[p.action[i]]
        name = f"PP:{p.stage[i]}{kind}" + ("" if p.microbatch[i] == NONE else str(p.microbatch[i]))
        trace.range(name, start - 0.25, 0.2)
        trace.kernel("k", start, end - start, launch=start - 0.2)
    for rank in ranks:  # gives the clocks something to go by
        rank.range("PP:0AR", 1e6 - 2, 1)
        rank.collective("barrier", 1e6, 0, launch=1e6 - 1.5)
    measured = read_kineto(saved(tmp_path, *ranks))
    assert abs(measured.clocks.offset[1] - clock * 1000) <= 1
    q, u = measured.program, measured.timeline
    mine = np.flatnonzero(q.stream == q.streams.index("compute"))
    key = np.lexsort((p.microbatch, p.action, p.stage))
    key = key[p.stream[key] == p.streams.index("compute")]
    back = mine[np.lexsort((q.microbatch[mine], q.action[mine], q.stage[mine]))]
    assert (q.stage[back] == p.stage[key]).all()
    assert (q.microbatch[back] == p.microbatch[key]).all()
    assert np.abs(u.start[back] - t.start[key]).max() <= 2000  # clocks are whole nanoseconds
    assert (u.end[back] - u.start[back] - (t.end - t.start)[key] == 0).all()


@pytest.mark.parametrize("changes", [{}, {"plan.schedule": "ZB-H1"}, {"plan.pp": 1, "plan.dp": 4}])
def test_a_scenario_written_as_profilers_write_it_comes_back_with_its_numbers(tmp_path, changes):
    small = {"model": "gpt2", "run.global_batch_size": 16}
    result = sim.simulate(sim.load("gpt2-xl-1f1b", small | changes))
    result.save_kineto(tmp_path / "traces")
    back = result_of(read_kineto(tmp_path / "traces"))
    assert back.step_time_s == pytest.approx(result.step_time_s, rel=1e-6)
    for category in CATEGORIES:
        ours, theirs = (r.breakdown.of(category).mean() for r in (result, back))
        assert theirs == pytest.approx(ours, rel=1e-3, abs=1e6), category  # a microsecond


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=8),
    st.lists(st.integers(-5, 45), min_size=1, max_size=8),
)
def test_the_innermost_range_is_one_that_holds_the_time_and_began_last(spans, at):
    spans = sorted({(s, s + length) for s, length in spans}, key=lambda x: (x[0], -x[1]))
    found = innermost(
        Spans([""] * len(spans), *np.array(spans, np.int64).reshape(-1, 2).T), np.array(at)
    )
    for time, i in zip(at, found.tolist(), strict=True):
        holding = [k for k, (start, end) in enumerate(spans) if start <= time < end]
        nested = all(
            a[1] <= b[0] or b[1] <= a[1] for k, a in enumerate(spans) for b in spans[k + 1 :]
        )
        assert (i == NONE) == (not holding) or not nested
        if nested and holding:
            assert i == holding[-1]


def truncated(path):
    text = path.read_bytes()
    path.write_bytes(text[: len(text) // 2])


@pytest.mark.parametrize("name", ["trace_0.json", "trace_0.json.gz"])
def test_a_trace_that_is_cut_short_is_refused(tmp_path, name):
    truncated(stepped().save(tmp_path, name))
    with pytest.raises(DescriptionError, match=rf"{name}' is cut short"):
        read_kineto(tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty"),
        ("PK\x03\x04", "does not begin as JSON does"),
        ('{"model": 1}', "it has no list 'traceEvents', only model"),
        ('{"traceEvents": [}]}', "is no JSON at line 1, column 18"),
        ('{"traceEvents": []}', "holds no kernels, no operators and no ranges"),
    ],
)
def test_what_is_no_trace_is_refused_in_a_sentence(tmp_path, text, reason):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(DescriptionError, match=reason):
        read_kineto(path)


def test_two_files_of_one_rank_are_refused(tmp_path):
    stepped().save(tmp_path, "a.json")
    stepped().save(tmp_path, "b.json.gz")
    with pytest.raises(DescriptionError, match=r"a.json' and .*b.json.gz' are both of rank 0"):
        read_kineto(tmp_path)


def test_a_missing_rank_is_said_and_the_others_are_numbered_anew(tmp_path):
    measured = read_kineto(saved(tmp_path, stepped(1, 4), stepped(3, 4)))
    assert measured.ranks == (1, 3)
    assert any(n.startswith("2 of 4 ranks have no trace (0, 2)") for n in measured.notes)
    assert "ranks 1, 3 are shown as 0 to 1, in this order" in measured.notes


def test_a_rank_that_cannot_be_told_is_refused_unless_the_name_says_it(tmp_path):
    for k in range(2):
        document = stepped(k, 2).document()
        del document["distributedInfo"]
        (tmp_path / f"worker{k}.json").write_text(json.dumps(document))
    with pytest.raises(DescriptionError, match=r"worker0\.json' does not say its rank"):
        read_kineto(tmp_path)
    for k in range(2):
        (tmp_path / f"worker{k}.json").rename(tmp_path / f"x-rank{k}.json")
    assert read_kineto(tmp_path).ranks == (0, 1)


def test_no_file_an_empty_folder_and_a_pattern_of_nothing_are_said_together(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DescriptionError) as error:
        read_kineto([tmp_path / "no.json", tmp_path / "empty", f"{tmp_path}/*.gz"])
    assert len(error.value.problems) == 3


def test_events_that_are_broken_are_skipped_and_counted(tmp_path):
    rank = stepped()
    rank.events += [{"ph": "X", "cat": "kernel", "name": "x", "ts": "soon", "dur": 1}, 7, {}]
    measured = read_kineto(rank.save(tmp_path))
    assert "1 events have no name or no times" in measured.notes


def trainsim(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "simulator", "import", "kineto", *arguments],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_command_line_reports_draws_and_writes(tmp_path):
    saved(tmp_path, *late_pair())
    done = trainsim(tmp_path, ".", "--json", "r.json", "--plot", "p.svg", "--trace", "t.json.gz")
    assert done.returncode == 0, done.stderr
    assert "exposed     dp 50 us (mean over ranks)" in done.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["summary"]["step_time_s"] == pytest.approx(250e-6)
    assert report["step_times_s"] == pytest.approx([250e-6])
    assert (tmp_path / "p.svg").exists()
    assert (tmp_path / "t.json.gz").exists()


def test_wrong_input_on_the_command_line_ends_with_a_sentence(tmp_path):
    (tmp_path / "x.json").write_text("{")
    done = trainsim(tmp_path, "x.json", "--json", "r.json")
    assert done.returncode == 2
    assert done.stderr == "trainsim: 'x.json' is cut short: its JSON ends within line 1\n"
    assert not (tmp_path / "r.json").exists()
    done = trainsim(tmp_path, "x.json", "--plot", "memory=m.png")
    assert done.returncode == 2
    assert "a run of traces has the figures pipeline and breakdown" in done.stderr
