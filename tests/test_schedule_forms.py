"""Closed forms of schedules against their action lists, run greedily; exact."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from greedy import run
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import simulator as sim
from simulator.errors import DescriptionError
from simulator.schedules import (
    BUBBLE_FRACTION,
    SCHEDULES,
    Action,
    Case,
    actions_of,
    add_send_recv,
    cell_text,
    cells,
    check_actions,
    homes,
    parse_grid,
    size_complaint,
    stages_of_ranks,
)

FORMULAS = [name for name, s in SCHEDULES.items() if s.bubble]
LISTED = Path(__file__).parent.parent / "workloads/measured/dualpipe_bubble_formulas.csv"
DOCUMENT = (LISTED.parents[2] / "docs/schedules.md").read_text(encoding="utf-8")

# Seconds of F, I and W: all alike; I or F longer; W short, W none.
TIMES = [(1, 1, 1), (1, 2, 1), (3, 2, 1), (2, 2, 1), (1, 1, 0.25), (2, 1, 0)]


def sizes(name: str, most: int) -> Iterator[tuple[int, int, int]]:
    """Yield (ranks, microbatches, chunks) that a schedule takes."""
    least, highest = SCHEDULES[name].chunks
    for v in (least,) if highest else (least, least + 1):
        for p in range(1, most + 1):
            for m in range(1, 4 * p + 2):
                if size_complaint(name, p, m, v) is None:
                    yield p, m, v


def rows_of(name: str, p: int, m: int, v: int | None = None) -> list[str]:
    return [" ".join(map(cell_text, cells(row))) for row in actions_of(name, p, m, v)]


@pytest.mark.parametrize("name", FORMULAS)
def test_the_bubble_is_the_papers(name: str) -> None:
    bubble, checked = SCHEDULES[name].bubble, 0
    assert bubble is not None
    for p, m, v in sizes(name, 6):
        for times in TIMES:
            case = Case(p, m, v, *times)
            if bubble.holds(case):
                idle = max(run(actions_of(name, p, m, v), *times).idle)
                assert idle == pytest.approx(bubble.value(case), abs=1e-9), case
                checked += 1
    assert checked > 40


@pytest.mark.parametrize("name", [name for name, s in SCHEDULES.items() if s.kept])
def test_the_activations_kept_are_the_papers(name: str) -> None:
    kept, checked = SCHEDULES[name].kept, 0
    assert kept is not None
    for p, m, v in sizes(name, 8):
        case = Case(p, m, v)
        if kept.holds(case):
            assert run(actions_of(name, p, m, v)).kept == list(kept.value(case)), case
            checked += 1
    assert checked > 15


# B <= F&B <= F+B: communication of one hides behind the other, at best all of F behind I.
@pytest.mark.parametrize("name", ["DualPipe", "DualPipeV"])
@pytest.mark.parametrize("pair", [3.0, 3.5, 4.0, 4.75, 5.0])
def test_pairs_that_take_less_than_both_leave_the_bubble_of_deepseek(
    name: str, pair: float
) -> None:
    bubble = SCHEDULES[name].bubble
    assert bubble is not None
    for p, m, v in sizes(name, 8):
        case = Case(p, m, v, 2, 2, 1, pair)
        assert bubble.holds(case)
        unused = max(run(actions_of(name, p, m, v), 2, 2, 1, pair).unused)
        assert unused == pytest.approx(bubble.value(case), abs=1e-9), case


def evaluated(text: str, case: Case, rank: int = 0) -> float:
    """Return the value of a formula's text: products are written side by side."""
    names = {**case._asdict(), "F": case.f, "I": case.i, "W": case.w, "B": case.b}
    names |= {"r": rank, "min": min, "X": case.pair}
    text = text.replace("F&B", "X")
    text = re.sub(r"(?<=[\dmpvr)])(?=[FIWBXmpvr(])", "*", text)
    return float(eval(text.replace("*r(", "r("), {}, names))


@pytest.mark.parametrize("name", FORMULAS)
def test_what_a_bubble_says_is_what_it_computes(name: str) -> None:
    bubble, kept = SCHEDULES[name].bubble, SCHEDULES[name].kept
    assert bubble is not None
    assert kept is not None
    for case in (Case(4, 8, 2, 1, 2, 0.5), Case(6, 9, 3, 3, 1.5, 1, 4.25)):
        assert evaluated(bubble.text, case) == bubble.value(case)
        assert [evaluated(kept.text, case, r) for r in range(case.p)] == list(kept.value(case))


# github.com/deepseek-ai/DualPipe lists them in PP stages: DualPipeV has two on each rank. ZB1P is
# ZB-H1, whose F+I-W is F+B-2W. sail-sg's rates are of 1F1B's bubble: ZB1P a third, ZB2P and ZBV
# none, for F = I = W.
def test_the_published_table_of_bubbles_holds() -> None:
    listed = {
        row["method"]: row["bubble"] for row in csv.DictReader(LISTED.read_text().splitlines())
    }
    ours = {"1F1B": "1F1B", "ZB1P": "ZB-H1", "DualPipe": "DualPipe", "DualPipeV": "DualPipeV"}
    for method, name in ours.items():
        bubble, per_rank = SCHEDULES[name].bubble, 2 if name == "DualPipeV" else 1
        assert bubble is not None
        for case in (Case(4, 8, 2, 1, 1, 1), Case(6, 20, 2, 2, 2, 1, 4)):
            there = listed[method].replace("PP", "p")
            value = evaluated(there, case._replace(p=case.p * per_rank))
            assert value == bubble.value(case), method
    for name, idle in {"1F1B": 7 * 3, "ZB-H1": 7 * 3 / 3, "ZB-H2": 0, "ZBVZeroBubble": 0}.items():
        bubble = SCHEDULES[name].bubble
        assert bubble is not None
        assert bubble.value(Case(8, 32)) == idle


# Question 10, F = I = W = 1 (B = 2): P=4, M=8 takes 24 + (4-1)(1+1-1) = 27, 1F1B 24 + 9 = 33;
# P=8, M=32 takes 96 + 7 = 103, 1F1B 96 + 21 = 117.
@pytest.mark.parametrize(
    ("name", "p", "m", "makespan"),
    [("ZB-H1", 4, 8, 27), ("1F1B", 4, 8, 33), ("ZB-H1", 8, 32, 103), ("1F1B", 8, 32, 117)],
)
def test_question_10_zb1p_beside_1f1b(name: str, p: int, m: int, makespan: float) -> None:
    assert run(actions_of(name, p, m)).makespan == makespan


# Every rank works 3 m without a gap, one after the other: the last begins after p-1 and ends so
# much later. 1F1B's first rank keeps 4.
def test_zb_h2_has_no_bubble_for_twice_the_memory() -> None:
    ran = run(actions_of("ZB-H2", 4, 8))
    assert ran.idle == [0, 0, 0, 0]
    assert ran.makespan == 3 * 8 + 3
    assert ran.kept == [7, 7, 7, 7]


# Rank 0 of 2: a warm-up of 1 forward, then F and I in turn, each W right after its I; rank 1 puts
# each W off by one I, so that it keeps 2 as well.
def test_zb_h1_by_hand() -> None:
    assert rows_of("ZB-H1", 2, 3) == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    ]


def test_zb_h2_by_hand() -> None:
    assert rows_of("ZB-H2", 2, 4) == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3",
    ]


# p=2, m=4: microbatches 0 and 1 enter at rank 0, 2 and 3 at rank 1, each at stage 0, so the two
# lists are the same with the halves exchanged. The middle ranks, both here, do not pair the first
# F and B of their main phase.
def test_dual_pipe_by_hand() -> None:
    first, second = rows_of("DualPipe", 2, 4)
    assert first == ("0F0 1F2 0F1 1B2 (1F3;0B0)OVERLAP_F_B 1B3 0I1 0W1")
    turned = [
        tuple(a._replace(microbatch=(a.microbatch + 2) % 4) for a in cell)
        for cell in cells(parse_grid(f"rank 0: {first}")[0])
    ]
    assert second == " ".join(map(cell_text, turned))


def test_dual_pipe_lays_each_stage_on_two_ranks() -> None:
    actions = actions_of("DualPipe", 4, 8)
    assert stages_of_ranks(actions) == ((0, 3), (1, 2), (1, 2), (0, 3))
    assert {homes(actions)[0, m] for m in range(4)} == {0}
    assert {homes(actions)[0, m] for m in range(4, 8)} == {3}


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "DualPipeV"])
def test_stages_lie_in_a_v(name: str) -> None:
    assert stages_of_ranks(actions_of(name, 3, 6)) == ((0, 5), (1, 4), (2, 3))


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (("DualPipe", 3, 12), "DualPipe takes an even number of ranks, not 3; 2 or 4"),
        (("DualPipe", 4, 9), "at least 2 x 4 ranks = 8, not 9; 10 would do"),
        (("DualPipe", 4, 6), "at least 2 x 4 ranks = 8, not 6; 8 would do"),
        (("DualPipeV", 4, 7), "as many microbatches as stages, 2 x 4 ranks = 8, not 7"),
        (("ZBVZeroBubble", 4, 8, 3), "ZBVZeroBubble takes 2 chunks a rank, not 3"),
        (("InterleavedZeroBubble", 2, 5), "4 or 6 would do"),
    ],
)
def test_a_size_that_a_schedule_does_not_take_is_explained(
    size: tuple[str, int, int], words: str
) -> None:
    with pytest.raises(DescriptionError, match=words):
        actions_of(*size)


# A backward in 1F1B needs F and B of all stages after its own: v chunks make each v times shorter.
# P=8, M=32, F=1, B=2 of a rank: 96 + 21/v.
@pytest.mark.parametrize(("v", "makespan"), [(1, 117), (2, 106.5), (4, 101.25)])
def test_question_6_the_bubble_of_interleaved_shrinks_with_chunks(v: int, makespan: float) -> None:
    name = "1F1B" if v == 1 else "Interleaved1F1B"
    assert run(actions_of(name, 8, 32, v), 1 / v, 1 / v, 1 / v).makespan == makespan


# Question 6: warm-up 2(P-r-1) + (v-1)P; then F and B in turn, so one more F comes before the first
# B.
def test_question_6_the_warm_up_of_interleaved() -> None:
    actions = actions_of("Interleaved1F1B", 4, 8, 2)
    before = [[a.kind for a in row].index("B") - 1 for row in actions]
    assert before == [10, 8, 6, 4]


# Half of that, P-r-1 + (v-1)P = 7, 6, 5, 4, is as fast while messages are free. Where they take
# time, each hop there and back stands in the way of every pair of F and B.
def test_question_6_half_the_warm_up_idles_more_where_messages_take_time() -> None:
    actions = actions_of("Interleaved1F1B", 4, 8, 2)
    rows = []
    for rank, row in enumerate(actions):
        forward, backward = ([a for a in row if a.kind == kind] for kind in "FB")
        first = 4 - rank - 1 + 4
        steady = [a for pair in zip(forward[first:], backward, strict=False) for a in pair]
        rows.append((*forward[:first], *steady, *backward[len(forward) - first :]))
    taken = [
        [
            sim.simulate_schedule(x, forward=0.5, backward=1, latency=c).step_time_s
            for c in (0, 0.25)
        ]
        for x in (tuple(rows), actions)
    ]
    assert taken == [[28.5, 36.0], [28.5, 32.0]]


# Question 8: rounds of 2 microbatches wait for the first of them to come round 4 ranks. F=1, B=2 of
# a rank, so chunks take 0.5 and 1: rounds of 4 idle 3 x 3 / 2, rounds of 2 for 12 more.
def test_question_8_a_round_smaller_than_the_pipeline_idles_more() -> None:
    idle = {
        group: run(actions_of("Interleaved1F1B", 4, 8, 2, group=group), 0.5, 0.5, 0.5)
        for group in (2, 4)
    }
    assert idle[4].makespan == 24 + 4.5
    assert idle[2].makespan == 24 + 16.5


@pytest.mark.parametrize("p", [2, 3, 4, 5])
@pytest.mark.parametrize("v", [2, 3])
def test_rounds_of_any_size_run_and_those_below_p_idle_more(p: int, v: int) -> None:
    for m in (p, 2 * p, 3 * p):
        taken = [
            run(actions_of("Interleaved1F1B", p, m, v, group=group)).makespan
            for group in range(1, m + 1)
        ]
        assert min(taken) == taken[p - 1]
        assert all(time > taken[p - 1] for time in taken[: p - 1])
    for group in range(1, 3 * p + 2):  # with a rest
        run(actions_of("Interleaved1F1B", p, 3 * p + 1, v, group=group))


def test_a_round_of_more_than_all_microbatches_is_refused() -> None:
    with pytest.raises(DescriptionError, match="8 microbatches, fewer than microbatch_group 9"):
        actions_of("Interleaved1F1B", 4, 8, 2, group=9)
    with pytest.raises(DescriptionError, match="microbatch_group is for Interleaved1F1B"):
        actions_of("1F1B", 4, 8, group=4)


# Seconds of a stage; of a rank's stages together for `simulate_schedule`.
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6), (4, 8), (4, 12)])
@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0, None), (0.5, 1.5, 0.25, None), (2, 2, 1, 4)])
def test_the_simulator_takes_as_long_as_the_greedy_run(
    name: str, p: int, m: int, times: tuple[float, float, float, float | None]
) -> None:
    least, copies = SCHEDULES[name].chunks[0], SCHEDULES[name].copies
    if refused := size_complaint(name, p, m, least):
        pytest.skip(refused)
    f, i, w, pair = times
    greedy = run(actions_of(name, p, m, least), f, i, w, pair)
    held = least / copies
    result = sim.simulate_schedule(
        name, stages=p, microbatches=m, chunks=least, forward=held * f, backward=held * (i + w),
        input_grad=held * i, pair=None if pair is None else held * pair,
    )  # fmt: skip
    assert result.step_time_s == pytest.approx(greedy.makespan, abs=1e-9)
    assert result.memory.peak.tolist() == greedy.kept


@pytest.mark.parametrize("name", BUBBLE_FRACTION)
def test_the_bubble_fraction_of_warnings_holds_for_few_microbatches_too(name: str) -> None:
    for p, m, v in sizes(name, 5):
        work = 3 * v * m
        makespan = run(actions_of(name, p, m, v)).makespan
        assert 1 - work / makespan == pytest.approx(BUBBLE_FRACTION[name](p, m, v), abs=1e-9)


# torch accepts ZBVZeroBubble with fewer microbatches than fill it, and leaves cells out.
@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(list(SCHEDULES)),
    p=st.integers(1, 9),
    m=st.integers(1, 40),
    chunks=st.integers(1, 4),
)
def test_every_schedule_does_all_work_once_in_an_order_that_runs(
    name: str, p: int, m: int, chunks: int
) -> None:
    least, most = SCHEDULES[name].chunks
    v = max(least, min(chunks, most or chunks))
    assume(size_complaint(name, p, m, v) is None)
    actions = actions_of(name, p, m, v)
    stages = p * v // SCHEDULES[name].copies
    work = [a.alone for row in actions for a in row if a.kind in ("F", "B", "I")]
    forward = {Action(s, "F", i) for s in range(stages) for i in range(m)}
    assert len(work) == len(set(work)) == 2 * len(forward)
    assert {a for a in work if a.kind == "F"} == forward
    assert len(actions) == p
    assert all(len(held) == v for held in stages_of_ranks(actions))
    run(actions)  # to the end
    check_actions(add_send_recv(actions))


def test_the_documented_table_has_every_schedule_with_its_formulas() -> None:
    rows = {line.split(" | ")[0][2:]: line for line in DOCUMENT.splitlines() if line[:2] == "| "}
    assert list(rows)[1:] == list(SCHEDULES)
    for name, schedule in SCHEDULES.items():
        cells_of_row = [cell.strip() for cell in rows[name].split("|")]
        for form in (schedule.bubble, schedule.kept):
            assert form is None or str(form) in cells_of_row, name


def test_the_documented_schedule_of_ones_own_runs(capsys: pytest.CaptureFixture[str]) -> None:
    before = dict(SCHEDULES)
    (snippet,) = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    try:
        exec(snippet, {})
    finally:
        SCHEDULES.clear()
        SCHEDULES.update(before)
    (said,) = re.findall(r"# (\d+\.\d+)\n", snippet)
    assert capsys.readouterr().out.strip() == said
