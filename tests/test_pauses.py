"""Ranks that stand still from time to time: every engine ends their work at the same tick."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_parity import CASES, drawn_ops, renumbered, tiled

from simulator.engine import ENGINES, Folding, run, run_side_by_side
from simulator.errors import ProgramError
from simulator.kernels import jit
from simulator.kernels.pauses import resumed
from simulator.pauses import Pauses


@pytest.fixture(scope="module", params=["interpreted", "compiled"])
def kernels(request):
    """Run kernels that choose by size in one way only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit, "SMALL", 0 if request.param == "compiled" else 2**62)
        yield request.param


# Every 5 ticks one pause of 1 tick, at 2, 7, 12: work goes on in [0, 2), [3, 7), [8, 12), [13, 17).
@pytest.mark.parametrize(
    ("start", "ticks", "end"),
    [
        (0, 2, 2),  # ends as the pause begins
        (0, 3, 4),  # one tick after it
        (0, 10, 12),  # 2 + 4 + 4
        (0, 11, 14),  # one more lies behind a third pause
        (2, 1, 4),  # starts as a pause begins
        (3, 4, 7),  # the whole of a gap
        (2, 0, 2),  # nothing to do
    ],
)
def test_work_goes_on_where_it_stopped(start, ticks, end):
    assert resumed(start, ticks, period=5, duration=1, phase=2) == end


@settings(max_examples=100, deadline=None)
@given(
    start=st.integers(0, 60), ticks=st.integers(0, 60), period=st.integers(2, 15),
    duration=st.integers(1, 14), phase=st.integers(0, 14),
)  # fmt: skip
def test_the_formula_counts_ticks(start, ticks, period, duration, phase):
    assume(duration < period and phase < period)
    now, left = start, ticks
    while left:
        left -= (now - phase) % period >= duration
        now += 1
    assert resumed(start, ticks, period, duration, phase) == now


@settings(max_examples=60, deadline=None)
@given(
    case=CASES, degrees=st.sampled_from([(1, 1), (2, 1), (2, 3)]),
    phases=st.lists(st.integers(-1, 6), min_size=24, max_size=24), duration=st.integers(1, 6),
)  # fmt: skip
def test_engines_agree_on_ranks_that_stand_still(
    kernels, op, program_of, case, degrees, phases, duration
):
    ops = renumbered(drawn_ops(case, op), in_order=True)
    program, ticks = program_of(ops, servers=case.servers, num_ranks=4)
    if degrees != (1, 1):
        program = tiled(program, *degrees, [0, 1, 2, 3])
    phase = np.array(phases[: 4 * program.num_tiles], np.int64).reshape(4, -1)
    pauses = Pauses(7, duration, phase)
    expected = run(program, ticks, "reference", pauses=pauses)
    for engine in ENGINES:
        assert run(program, ticks, engine, pauses=pauses) == expected, engine


def test_flows_go_on(op, program_of):
    ops = [op(r, 10, "dp", joint="sum") for r in (0, 1)]
    program, ticks = program_of(ops)
    pauses = Pauses(5, 4, np.zeros((2, 1), np.int64))
    assert run(program, ticks, pauses=pauses).makespan == 10


# Rank 0 works 4 ticks: set 0 is held from 1 to 3, set 1 not at all, set 2 from 3 to 5.
def test_sets_side_by_side_have_pauses_of_their_own(op, program_of):
    program, ticks = program_of([op(0, 4)])
    pauses = Pauses(10, 2, np.array([[1, -1, 3]], np.int64))
    start, end = run_side_by_side(
        program, np.repeat(ticks[:, None], 3, axis=1), Folding.none(program), 3, pauses
    )
    assert (start.tolist(), end.tolist()) == ([[0, 0, 0]], [[6, 4, 6]])


def test_ranks_that_stand_still_are_not_folded(op, program_of):
    one, ticks = program_of([op(r, 4) for r in range(4)])
    program = tiled(one, 2, 1, [0])
    pauses = Pauses(10, 2, np.zeros((4, 2), np.int64))
    half = Folding(np.zeros(1, np.int64), np.zeros(2, np.int64))
    with pytest.raises(ProgramError, match="cannot be folded"):
        run(program, ticks, folding=half, pauses=pauses)
    with pytest.raises(ProgramError, match="do not fit"):
        run(program, ticks, pauses=replace(pauses, phase=np.zeros((4, 1), np.int64)))
