"""What a Program means: hand-made ones, and random ones against a longest-path oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.engine import ENGINES, run
from simulator.errors import DeadlockError
from simulator.lower.check import check
from simulator.program import NONE, Program

ProgramOf = Callable[..., Any]


@pytest.fixture(scope="session", params=list(ENGINES))
def times(request: pytest.FixtureRequest, program_of: ProgramOf) -> Callable[..., Any]:
    """Return a function from ops to [(start, end), ...] by each engine."""

    def spans(ops: list[Any], **more: Any) -> list[tuple[int, int]]:
        program, ticks = program_of(ops, **more)
        timeline = run(check(program), ticks, request.param)
        return list(zip(timeline.start.tolist(), timeline.end.tolist(), strict=True))

    return spans


def test_an_op_alone_runs_from_zero(op: Any, times: Any) -> None:
    assert times([op(0, 7)]) == [(0, 7)]


def test_a_program_without_ops_takes_no_time(times: Any) -> None:
    assert times([]) == []


def test_a_stream_runs_its_ops_one_after_the_other(op: Any, times: Any) -> None:
    assert times([op(0, 7), op(0, 2), op(0, 3)]) == [(0, 7), (7, 9), (9, 12)]


def test_streams_of_a_rank_run_side_by_side(op: Any, times: Any) -> None:
    assert times([op(0, 7, "compute"), op(0, 2, "copy")]) == [(0, 7), (0, 2)]


def test_equal_streams_of_two_ranks_run_side_by_side(op: Any, times: Any) -> None:
    assert times([op(0, 7), op(1, 2)]) == [(0, 7), (0, 2)]


# The head of the stream waits for the copy until 9; what could run at once waits behind it.
def test_a_stream_is_first_in_first_out(op: Any, times: Any) -> None:
    ops = [op(0, 9, "copy"), op(0, 1, after=(0,)), op(0, 1)]
    assert times(ops) == [(0, 9), (9, 10), (10, 11)]


def test_an_op_waits_for_the_last_of_its_predecessors(op: Any, times: Any) -> None:
    ops = [op(0, 4, "a"), op(1, 9, "a"), op(0, 6, "b"), op(0, 1, after=(0, 1, 2))]
    assert times(ops)[3] == (9, 10)


def test_a_predecessor_may_have_a_higher_number(op: Any, times: Any) -> None:
    assert times([op(0, 1, after=(1,)), op(1, 5)]) == [(5, 6), (0, 5)]


def test_a_predecessor_named_twice_counts_once(op: Any, times: Any) -> None:
    assert times([op(0, 3), op(1, 1, after=(0, 0))]) == [(0, 3), (3, 4)]


# Ready at 2, 5 and 3: all move from 5 to 9.
def test_a_joint_op_starts_when_its_last_member_arrives(op: Any, times: Any) -> None:
    ops = [op(r, t) for r, t in enumerate((2, 5, 3))]
    ops += [op(r, 4, "dp", after=(r,), joint="ar") for r in range(3)]
    assert times(ops)[3:] == [(5, 9)] * 3


# While rank 0's member waits for rank 1 it holds its stream: the next op there waits too.
def test_a_member_that_waits_holds_its_stream(op: Any, times: Any) -> None:
    ops = [
        op(0, 1, "dp", joint="ar"), op(0, 1, "dp"),
        op(1, 6), op(1, 1, "dp", after=(2,), joint="ar"),
    ]  # fmt: skip
    assert times(ops) == [(6, 7), (7, 8), (0, 6), (6, 7)]


def test_members_that_arrive_together_start_at_once(op: Any, times: Any) -> None:
    ops = [op(r, 3) for r in range(4)] + [op(r, 2, joint="ar") for r in range(4)]
    assert times(ops)[4:] == [(3, 5)] * 4


# The ring of three pair-wise messages: each rank sends to the next, then receives from the last, on
# streams of their own. A rank sends when it has computed (1, 2, 4): messages 1-3, 2-4, 4-6.
def test_messages_in_a_ring_do_not_wait_for_each_other(op: Any, times: Any) -> None:
    ops = [op(r, t) for r, t in enumerate((1, 2, 4))]
    ops += [op(r, 2, "send", after=(r,), joint=f"{r}") for r in range(3)]
    ops += [op((r + 1) % 3, 2, "recv", joint=f"{r}") for r in range(3)]
    assert times(ops)[6:] == [(1, 3), (2, 4), (4, 6)]


def test_an_op_of_no_ticks_starts_and_ends_at_once(op: Any, times: Any) -> None:
    ops = [op(0, 0), op(0, 5), op(0, 0), op(0, 0), op(0, 2)]
    assert times(ops) == [(0, 0), (0, 5), (5, 5), (5, 5), (5, 7)]


def test_a_joint_op_of_no_ticks_is_a_barrier(op: Any, times: Any) -> None:
    ops = [op(0, 4), op(1, 9), op(0, 0, joint="b"), op(1, 0, joint="b"), op(0, 1), op(1, 1)]
    assert times(ops)[2:] == [(9, 9), (9, 9), (9, 10), (9, 10)]


def test_ops_without_stream_are_ordered_by_their_inputs_only(op: Any, times: Any) -> None:
    ops = [op(0, 5, None), op(0, 3, None), op(0, 2, None, after=(1,)), op(0, 1)]
    assert times(ops) == [(0, 5), (0, 3), (3, 5), (0, 1)]


def test_a_joint_op_may_have_a_single_member(op: Any, times: Any) -> None:
    assert times([op(0, 2), op(0, 3, joint="ar")]) == [(0, 2), (2, 5)]


def test_large_ticks_stay_exact(op: Any, times: Any) -> None:
    # Above 2**53 a float would lose the last tick.
    big = 2**53
    assert times([op(0, big), op(0, 1), op(0, 1)]) == [(0, big), (big, big + 1), (big + 1, big + 2)]


@pytest.mark.parametrize("engine", list(ENGINES))
def test_a_program_that_waits_for_itself_is_an_error_not_a_hang(
    op: Any, program_of: ProgramOf, engine: str
) -> None:
    program, ticks = program_of([op(0, 1), op(0, 1, after=(2,)), op(1, 1, after=(1,))])
    with pytest.raises(DeadlockError, match=r"ranks \[0, 1\], 2 ops wait in a cycle"):
        run(program, ticks, engine)


# Two collectives in different order on the streams of two ranks.
@pytest.mark.parametrize("engine", list(ENGINES))
def test_collectives_in_different_order_are_an_error_not_a_hang(
    op: Any, program_of: ProgramOf, engine: str
) -> None:
    ops = [op(r, 1, "dp", joint=j) for r, j in ((0, "a"), (0, "b"), (1, "b"), (1, "a"))]
    program, ticks = program_of(ops)
    with pytest.raises(DeadlockError, match=r"ranks \[0, 1\]"):
        run(program, ticks, engine)


def longest_paths(program: Program, ticks: list[int]) -> dict[int, tuple[int, int]]:
    """Return (start, end) by op from the definition, by recursion with memory."""
    behind: dict[int, int] = {}
    last: dict[tuple[int, int], int] = {}
    for op in range(len(program)):
        lane = (int(program.rank[op]), int(program.stream[op]))
        if lane[1] != NONE:
            if lane in last:
                behind[op] = last[lane]
            last[lane] = op
    partners: dict[int, list[int]] = {}
    for op in range(len(program)):
        partners.setdefault(int(program.joint[op]), []).append(op)
    known: dict[int, tuple[int, int]] = {}

    def span(op: int) -> tuple[int, int]:
        if op not in known:
            together = [op] if program.joint[op] == NONE else partners[int(program.joint[op])]
            needs = [
                need
                for member in together
                for need in [*program.predecessors(member).tolist(), behind.get(member)]
                if need is not None
            ]
            start = max((span(need)[1] for need in needs), default=0)
            for member in together:
                known[member] = (start, start + ticks[member])
        return known[op]

    return {op: span(op) for op in range(len(program))}


@st.composite
def random_ops(draw: st.DrawFn, make: Any) -> list[Any]:
    """Draw ops that cannot wait for themselves: each needs only what was drawn before it.

    They are then renumbered so that ids say nothing but the order within streams.
    """
    num_ranks = draw(st.integers(1, 4))
    streams = st.sampled_from(["compute", "dp", "tp", None])
    ticks = st.integers(0, 4)
    drawn: list[Any] = []

    def needs() -> tuple[int, ...]:
        if not drawn:
            return ()
        return tuple(draw(st.lists(st.integers(0, len(drawn) - 1), max_size=3)))

    for number in range(draw(st.integers(0, 14))):
        if draw(st.booleans()):
            drawn.append(
                make(draw(st.integers(0, num_ranks - 1)), draw(ticks), draw(streams), needs())
            )
            continue
        members = draw(st.permutations(range(num_ranks)))[: draw(st.integers(1, num_ranks))]
        length = draw(ticks)
        together = [make(r, length, draw(streams), needs(), f"j{number}") for r in members]
        drawn += together
    order = sorted(range(len(drawn)), key=lambda _: draw(st.integers(0, 99)))
    # Put the ops of each lane, in their own order, into the places that the shuffle gave the lane.
    places: dict[Any, list[int]] = {}
    for op in range(len(drawn)):
        places.setdefault((drawn[op].rank, drawn[op].stream), []).append(op)
    queues = {lane: iter(ops) for lane, ops in places.items()}
    shuffled = [next(queues[drawn[op].rank, drawn[op].stream]) for op in order]
    new = {old: i for i, old in enumerate(shuffled)}
    return [drawn[old]._replace(after=tuple(new[p] for p in drawn[old].after)) for old in shuffled]


@pytest.mark.parametrize("engine", list(ENGINES))
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_programs_take_their_longest_path(
    op: Any, program_of: ProgramOf, engine: str, data: st.DataObject
) -> None:
    ops = data.draw(random_ops(op))
    program, ticks = program_of(ops)
    timeline = run(check(program), ticks, engine)
    expected = longest_paths(program, ticks.tolist())
    assert {
        i: (int(timeline.start[i]), int(timeline.end[i])) for i in range(len(program))
    } == expected


@pytest.mark.parametrize("engine", list(ENGINES))
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_longer_op_ends_nothing_earlier(
    op: Any, program_of: ProgramOf, engine: str, data: st.DataObject
) -> None:
    program, ticks = program_of(data.draw(random_ops(op)))
    before = run(program, ticks, engine)
    longer = ticks + np.array(
        data.draw(st.lists(st.integers(0, 3), min_size=len(ticks), max_size=len(ticks))), np.int64
    )
    members = program.joint_members
    for joint in range(len(members)):  # members of a joint op keep equal lengths
        longer[members[joint]] = longer[members[joint][0]]
    after = run(program, longer, engine)
    assert (after.end >= before.end).all()
