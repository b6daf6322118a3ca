"""Pipelines with equal stages against the arithmetic of their papers, exact to the tick."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import simulator as sim
from simulator.report.result import Result
from simulator.schedules import BUBBLE_FRACTION, actions_of, size_complaint


def run(name: str, p: int, m: int, f: float = 1.0, b: float = 2.0, c: float = 0.0) -> Result:
    return sim.simulate_schedule(name, stages=p, microbatches=m, forward=f, backward=b, latency=c)


def in_flight(name: str, p: int, m: int) -> list[int]:
    expected: dict[str, list[int]] = {
        "naive": [1] * p,
        "GPipe": [m] * p,
        "1F1B": [min(p - stage, m) for stage in range(p)],
    }
    return expected[name]


def holds(name: str, p: int, m: int, f: float, b: float) -> None:
    """Check what the papers say of a pipeline of p stages and m microbatches."""
    result = run(name, p, m, f, b)
    assert result.memory.peak.tolist() == in_flight(name, p, m)
    pieces = result.breakdown
    if name == "naive":  # a microbatch crosses all stages alone, so one of p stages works
        assert (pieces.bubble * p == (p - 1) * pieces.window).all()
    else:
        assert (pieces.bubble * (m + p - 1) == (p - 1) * pieces.window).all()


# Each rank works m(f+b) of T = (m+p-1)(f+b); the rest, (p-1)(f+b), is idle: (p-1)/(m+p-1) of T.
@pytest.mark.parametrize("p", range(1, 17))
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_bubble_and_microbatches_in_flight_are_the_papers(name: str, p: int) -> None:
    for m in range(1, 65):
        holds(name, p, m, 1.0, 2.0)


@pytest.mark.parametrize("p", [1, 2, 3, 8, 16])
def test_naive_keeps_one_microbatch_in_flight(p: int) -> None:
    for m in (1, 2, 13):
        holds("naive", p, m, 1.0, 2.0)


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(["naive", "GPipe", "1F1B"]),
    p=st.integers(1, 16),
    m=st.integers(1, 64),
    f=st.integers(1, 1000),
    b=st.integers(1, 1000),
)
def test_bubble_is_the_papers_for_any_forward_and_backward(
    name: str, p: int, m: int, f: int, b: int
) -> None:
    holds(name, p, m, f / 128, b / 128)


# A microbatch alone passes p stages forward and back, p(f+b); the next waits for it: m p (f+b).
def test_naive_takes_every_microbatch_through_all_stages_alone() -> None:
    assert run("naive", 4, 3).step_time_s == 3 * 4 * (1 + 2)


def test_ratio_is_bubble_over_work() -> None:
    # P=4, M=8: idle 3(f+b) over work 8(f+b).
    np.testing.assert_allclose(run("GPipe", 4, 8).breakdown.bubble_ratio, 3 / 8, rtol=1e-15)


# GPipe's forward wave reaches the last stage after (m+p-1) f and p-1 messages, and the backward
# wave returns in the same way: T = (m+p-1)(f+b) + 2(p-1)c, c no longer than f.
@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 8), (5, 2), (3, 1)])
def test_gpipe_pays_each_message_latency_once_each_way(p: int, m: int) -> None:
    assert run("GPipe", p, m, 1.0, 2.0, 0.25).step_time_s == (m + p - 1) * 3 + 2 * (p - 1) * 0.25


# P=2, M=3, f=1, b=2, c=0.5 by hand, stage 0 above stage 1:
#   F0 0-1  F1 1-2   .................  B0 5-7  F2 7-8  B1 8-10  ....... B2 12-14
#   ...... F0 1.5-2.5  B0 2.5-4.5  F1 4.5-5.5  B1 5.5-7.5  ... F2 8.5-9.5  B2 9.5-11.5
# B0 leaves 4.5 and arrives 5; F2 leaves 8, arrives 8.5; B2 leaves 11.5, arrives 12.
def test_1f1b_with_latency_by_hand() -> None:
    result = run("1F1B", 2, 3, 1.0, 2.0, 0.5)
    work = result.program.stream == result.program.streams.index("compute")
    starts = {
        result.program.label(op): result.timeline.start[op] / 1e12 for op in np.flatnonzero(work)
    }
    assert starts == {
        "0F0": 0, "0F1": 1, "0B0": 5, "0F2": 7, "0B1": 8, "0B2": 12,
        "1F0": 1.5, "1B0": 2.5, "1F1": 4.5, "1B1": 5.5, "1F2": 8.5, "1B2": 9.5,
    }  # fmt: skip
    assert result.step_time_s == 14.0


# Question 1: P=6, M=3, f=1, b=2: T = (3+5) * 3 = 24, each rank idle 15 of 24 = 0.625.
def test_question_1_fewer_microbatches_than_stages_runs() -> None:
    result = run("1F1B", 6, 3)
    assert result.step_time_s == 24.0
    assert result.breakdown.bubble_fraction.tolist() == [0.625] * 6


# (6-1)/(3+6-1) = 62.5 %; with 4 P = 24 microbatches 5/29 = 17.24 %.
def test_question_1_fewer_microbatches_than_stages_warns() -> None:
    (note,) = run("1F1B", 6, 3).notes
    assert "M<P" in note
    assert "bubble 62.5%" in note
    assert "use M>=24 for <=17.2%" in note


def test_enough_microbatches_give_no_warning() -> None:
    assert run("1F1B", 6, 6).notes == ()


# Naive keeps one stage of six busy whatever M is: 5/6 = 83.3 % idle, and more microbatches do not
# help. The advice for GPipe and 1F1B would be wrong on both counts.
def test_naive_is_not_given_the_bubble_of_a_pipeline() -> None:
    assert not any("62.5%" in note or "M>=" in note for note in run("naive", 6, 3).notes)


# Question 2: P=4, M=8: T = 11 * 3 = 33; bubble 9/33 = 0.2727 of the time, 9/24 = 0.375 of the work.
def test_question_2_both_definitions_of_the_bubble() -> None:
    result = run("1F1B", 4, 8)
    assert result.step_time_s == 33.0
    np.testing.assert_allclose(result.breakdown.bubble_fraction, 0.2727, atol=5e-5)
    np.testing.assert_allclose(result.breakdown.bubble_ratio, 0.375, rtol=1e-15)


# Question 3: P=8, M=32, f=b=1: both (32+7) * 2 = 78, idle 14/78 = 0.1795; 32 against 8..1 kept.
def test_question_3_1f1b_is_no_faster_than_gpipe() -> None:
    gpipe, one = run("GPipe", 8, 32, 1, 1), run("1F1B", 8, 32, 1, 1)
    assert gpipe.step_time_s == one.step_time_s == 78.0
    np.testing.assert_allclose(gpipe.breakdown.bubble_fraction, 0.1795, atol=5e-5)
    np.testing.assert_allclose(one.breakdown.bubble_fraction, 0.1795, atol=5e-5)


def test_question_3_only_memory_differs() -> None:
    assert run("GPipe", 8, 32, 1, 1).memory.peak.tolist() == [32] * 8
    assert run("1F1B", 8, 32, 1, 1).memory.peak.tolist() == [8, 7, 6, 5, 4, 3, 2, 1]


# Question 4: P=8, 64 samples, time of a microbatch linear in its size s: (64/s + 7) * 3s.
# s=1: 71*3; s=2: 39*6; s=4: 23*12; s=8: 15*24.
@pytest.mark.parametrize(("size", "total"), [(1, 213), (2, 234), (4, 276), (8, 360)])
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_question_4_larger_microbatches_cost_bubble(name: str, size: int, total: int) -> None:
    assert run(name, 8, 64 // size, size, 2 * size).step_time_s == total


# Question 18: the first stages hold more although stages are equal.
@pytest.mark.parametrize(
    ("m", "held"),
    [
        (8, [8, 7, 6, 5, 4, 3, 2, 1]),
        (64, [8, 7, 6, 5, 4, 3, 2, 1]),
        (1, [1] * 8),
        (2, [2] * 7 + [1]),
    ],
)
def test_question_18_microbatches_in_flight(m: int, held: list[int]) -> None:
    assert run("1F1B", 8, m).memory.peak.tolist() == held


def interleaved(p: int, m: int, v: int, f: float = 1.0, b: float = 2.0, c: float = 0.0) -> Result:
    return sim.simulate_schedule(
        "Interleaved1F1B", stages=p, microbatches=m, chunks=v, forward=f, backward=b, latency=c
    )


def leading_forwards(p: int, m: int, v: int) -> list[int]:
    """Return the forwards of each rank before the last one before its first backward."""
    rows = actions_of("Interleaved1F1B", p, m, v)
    return [next(i for i, a in enumerate(row) if a.kind == "B") - 1 for row in rows]


# Question 6: rank r warms up with 2(p-r-1) + (v-1)p chunk forwards, then a forward and a backward.
@pytest.mark.parametrize(
    ("p", "m", "v", "warmup"),
    [
        (4, 8, 2, [10, 8, 6, 4]),
        (8, 32, 2, [22, 20, 18, 16, 14, 12, 10, 8]),
        (8, 32, 4, [38, 36, 34, 32, 30, 28, 26, 24]),
    ],
)
def test_question_6_interleaved_warms_up_with_twice_the_distance(
    p: int, m: int, v: int, warmup: list[int]
) -> None:
    assert leading_forwards(p, m, v) == warmup
    assert interleaved(p, m, v).memory.peak.tolist() == [kept + 1 for kept in warmup]


# Question 6: each of v chunks takes f/v and b/v, so the bubble is (p-1)(f+b)/v: p=4, m=8: 24 + 4.5;
# p=8, m=32: 96 + 21 (1F1B), 96 + 10.5 (v=2), 96 + 5.25 (v=4).
@pytest.mark.parametrize(
    ("p", "m", "v", "total"), [(4, 8, 2, 28.5), (8, 32, 2, 106.5), (8, 32, 4, 101.25)]
)
def test_question_6_chunks_divide_the_bubble(p: int, m: int, v: int, total: float) -> None:
    assert interleaved(p, m, v).step_time_s == total


def test_question_6_without_chunks_the_step_is_117() -> None:
    assert run("1F1B", 8, 32).step_time_s == 117.0


# Narayanan et al., 2021, section 2.2.2: bubble over ideal time is (p-1) / (v m).
@pytest.mark.parametrize("p", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("v", [2, 4, 8])
def test_interleaved_bubble_is_the_papers(p: int, v: int) -> None:
    for rounds in (1, 2, 3):
        pieces = interleaved(p, p * rounds, v, 3.0, 5.0).breakdown
        assert (pieces.bubble * v * p * rounds == (p - 1) * pieces.of("forward", "backward")).all()


# Any size, also rounds of more or fewer than p: in units of a chunk's f + b, the first microbatch
# passes v p stages, of which m fill m, and with m < p the last one comes m - 1 behind it.
@settings(max_examples=60, deadline=None)
@given(p=st.integers(1, 8), m=st.integers(1, 24), v=st.integers(2, 5), f=st.integers(1, 9))
def test_the_table_of_bubbles_holds_for_interleaved_of_any_size(
    p: int, m: int, v: int, f: int
) -> None:
    assume(not size_complaint("Interleaved1F1B", p, m, v))
    pieces = interleaved(p, m, v, f * v, 4.0 * v).breakdown
    expected = BUBBLE_FRACTION["Interleaved1F1B"](p, m, v)
    np.testing.assert_allclose(pieces.bubble_fraction, expected, rtol=1e-12, atol=1e-15)


# Korthikanti et al., 2022, section 4.2.3: the first rank keeps p (1 + (p-1)/(p v)) microbatches of
# activations. p=8, v=3: 8 (1 + 7/24) = 248/24 = 31/3, that is 31 chunks of a third; p=4, v=2: 11/2.
@pytest.mark.parametrize(("p", "v", "chunks"), [(8, 3, 31), (4, 2, 11), (2, 4, 9), (8, 12, 103)])
def test_the_first_rank_of_interleaved_keeps_what_korthikanti_says(
    p: int, v: int, chunks: int
) -> None:
    kept = interleaved(p, 2 * p, v).memory.peak[0]
    assert kept == chunks
    assert kept * p * v == p * (p * v + p - 1) * v  # kept / v = p (1 + (p-1)/(p v))


# p=6, m=3, v=2: 2*3 chunk units of work in 2*6 + 3 - 1 = 14, 57.1 % idle; with 24: 48 of 53, 9.4 %.
def test_question_7_interleaved_with_fewer_microbatches_than_ranks_warns() -> None:
    result = interleaved(6, 3, 2)
    assert result.step_time_s == 14 * 1.5
    (note,) = result.notes
    assert "M<P" in note
    assert "bubble 57.1%; use M>=24 for <=9.4%" in note


# Free messages or slow ones, odd sizes: sends meet their receives in order.
@pytest.mark.parametrize("c", [0.0, 0.3, 5.0])
@pytest.mark.parametrize("p", [2, 3, 5, 6, 7])
def test_interleaved_runs_with_messages_in_odd_sizes(p: int, c: float) -> None:
    for m, v in itertools.product((1, 2, 3, 5, 7, 10, 14), (2, 3, 5)):
        if not size_complaint("Interleaved1F1B", p, m, v):
            assert interleaved(p, m, v, c=c).step_time_s >= 3 * m + (p - 1) * 3 / v - 1e-9


# p=2, m=2, v=2, f=b=2 on a chunk 1, c=0.25, by hand (rank 0 holds stages 0, 2; rank 1 stages 1, 3):
#   0F0 0-1  0F1 1-2  2F0 2.5-3.5  2F1 3.5-4.5  2B0 6-7    2B1 8-9   0B0 9-10    0B1 10.5-11.5
#   1F0 1.25-2.25  1F1 2.25-3.25  3F0 3.75-4.75  3B0 4.75-5.75  3F1 5.75-6.75  3B1 6.75-7.75
#   1B0 7.75-8.75 (2B0 ends 7, arrives 7.25)  1B1 9.25-10.25 (2B1 ends 9, arrives 9.25)
# 0B0 starts when 2B1 ends at 9 = 8.75 + 0.25; 0B1 at 10.5 = 10.25 + 0.25.
def test_interleaved_with_latency_by_hand() -> None:
    assert interleaved(2, 2, 2, 2.0, 2.0, 0.25).step_time_s == 11.5


@pytest.mark.parametrize("name", ["naive", "GPipe", "1F1B"])
def test_nothing_is_kept_after_the_step(name: str) -> None:
    memory = run(name, 4, 6).memory
    assert [memory.of_rank(rank)[1][-1] for rank in range(4)] == [0.0] * 4


def test_no_latency_makes_a_pipeline_faster() -> None:
    for name, m in itertools.product(["naive", "GPipe", "1F1B"], [1, 4, 9]):
        times = [run(name, 4, m, c=c).step_time_s for c in (0.0, 0.125, 0.5, 3.0)]
        assert times == sorted(times)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"stages": 0, "microbatches": 1}, "stages 0"),
        ({"stages": 2, "microbatches": 0}, "microbatches 0"),
        ({"stages": 2}, "microbatches None"),
        ({"stages": 2, "microbatches": 2, "forward": -1.0}, "forward -1"),
        ({"stages": 2, "microbatches": 2, "latency": float("nan")}, "latency nan"),
        ({"stages": 2, "microbatches": 2, "backward": float("inf")}, "backward inf"),
    ],
)
def test_an_argument_out_of_range_is_named(arguments: dict[str, float], words: str) -> None:
    with pytest.raises(sim.DescriptionError, match=words):
        sim.simulate_schedule("1F1B", **arguments)  # type: ignore[arg-type]
