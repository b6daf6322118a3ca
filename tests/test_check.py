"""Programs that break a rule, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from simulator.errors import DeadlockError, ProgramError
from simulator.lower import lower
from simulator.lower.check import check
from simulator.program import NONE, Flow, Work

ProgramOf = Callable[..., Any]


def test_a_program_that_keeps_the_rules_is_returned_as_it_is(
    op: Any, program_of: ProgramOf
) -> None:
    program, _ = program_of([op(0, 1), op(0, 1, "dp", joint="a"), op(1, 1, "dp", joint="a")])
    assert check(program) is program


def test_an_empty_program_keeps_the_rules(program_of: ProgramOf) -> None:
    program, _ = program_of([])
    assert check(program) is program


def test_a_missing_member_is_named_with_the_group(op: Any, program_of: ProgramOf) -> None:
    program, _ = program_of([op(0, 1, joint="a"), op(2, 1, joint="a")], {"a": [0, 1, 2]})
    with pytest.raises(ProgramError, match=r"joins ranks \[0, 1, 2\] but has ops.* on \[0, 2\]"):
        check(program)


def test_a_member_too_many_is_an_error(op: Any, program_of: ProgramOf) -> None:
    program, _ = program_of([op(r, 1, joint="a") for r in range(3)], {"a": [0, 1]})
    with pytest.raises(ProgramError, match=r"joins ranks \[0, 1\]"):
        check(program)


def test_a_member_on_a_wrong_rank_is_an_error(op: Any, program_of: ProgramOf) -> None:
    program, _ = program_of([op(0, 1, joint="a"), op(2, 1, joint="a")], {"a": [0, 1]})
    with pytest.raises(ProgramError, match=r"joins ranks \[0, 1\] but has ops on \[0, 2\]"):
        check(program)


def test_a_rank_that_is_twice_in_a_joint_op_is_an_error(op: Any, program_of: ProgramOf) -> None:
    ops = [op(0, 1, "a", joint="a"), op(0, 1, "b", joint="a")]
    program, _ = program_of(ops, {"a": [0, 1]})
    with pytest.raises(ProgramError, match=r"\[0, 0\]"):
        check(program)


# "Every joint op has exactly the members of its group, once each": a rank twice in the group
# would be sent its own bytes.
def test_a_group_that_holds_a_rank_twice_is_an_error(op: Any, program_of: ProgramOf) -> None:
    program, _ = program_of([op(0, 1, "a", joint="a"), op(0, 1, "b", joint="a")])
    with pytest.raises(ProgramError):
        check(program)


# Sorting must not hide a swap between two joint ops of equal size.
def test_members_swapped_between_two_joint_ops_are_an_error(op: Any, program_of: ProgramOf) -> None:
    ops = [op(0, 1, "a", joint="a"), op(2, 1, "a", joint="a"),
           op(1, 1, "a", joint="b"), op(3, 1, "a", joint="b")]  # fmt: skip
    program, _ = program_of(ops, {"a": [0, 1], "b": [2, 3]})
    with pytest.raises(ProgramError, match="joint op 0"):
        check(program)


def test_members_may_be_listed_in_any_order(op: Any, program_of: ProgramOf) -> None:
    program, _ = program_of([op(r, 1, joint="a") for r in (2, 0, 1)], {"a": [1, 2, 0]})
    check(program)


def test_members_that_disagree_about_the_size_are_an_error(op: Any, program_of: ProgramOf) -> None:
    program, _ = program_of([op(0, 1, joint="a", name="x"), op(1, 1, joint="a", name="x")])
    costs = (*program.costs, Flow("x", 99.0, 0.0))
    wrong = replace(program, costs=costs, cost=np.array([0, 1], np.int32))
    with pytest.raises(ProgramError, match=r"op 1 \(rank 1.* disagrees"):
        check(wrong)


def test_members_that_disagree_about_the_collective_are_an_error(
    op: Any, program_of: ProgramOf
) -> None:
    program, _ = program_of([op(0, 1, joint="a", name="x"), op(1, 1, joint="a", name="y")])
    with pytest.raises(ProgramError, match="disagrees"):
        check(program)


def test_a_flow_that_is_not_joint_is_an_error(op: Any, program_of: ProgramOf) -> None:
    program, _ = program_of([op(0, 1)])
    with pytest.raises(ProgramError, match="a flow is joint"):
        check(replace(program, costs=(Flow("all_reduce", 1.0),)))


def test_work_that_is_joint_is_an_error(op: Any, program_of: ProgramOf) -> None:
    program, _ = program_of([op(0, 1, joint="a"), op(1, 1, joint="a")])
    with pytest.raises(ProgramError, match="a flow is joint"):
        check(replace(program, costs=(Work("w", seconds=0.0),)))


@pytest.mark.parametrize(
    ("column", "value"),
    [("cost", 1), ("cost", -1), ("rank", 1), ("rank", -2), ("stream", 9)],
)  # fmt: skip
def test_a_number_outside_its_table_is_an_error(
    op: Any, program_of: ProgramOf, column: str, value: int
) -> None:
    program, _ = program_of([op(0, 1)])
    wrong = np.full_like(getattr(program, column), value)
    with pytest.raises(ProgramError):
        check(replace(program, **{column: wrong}))


@pytest.mark.parametrize("joint", [1, -3])
def test_a_joint_number_that_does_not_exist_is_an_error(
    op: Any, program_of: ProgramOf, joint: int
) -> None:
    program, _ = program_of([op(0, 1, joint="a"), op(1, 1, joint="a")])
    with pytest.raises(ProgramError):
        check(replace(program, joint=np.array([0, joint], np.int32)))


@pytest.mark.parametrize("pred", [-1, 2])
def test_a_predecessor_that_does_not_exist_is_an_error(
    op: Any, program_of: ProgramOf, pred: int
) -> None:
    program, _ = program_of([op(0, 1), op(0, 1, after=(pred,))])
    with pytest.raises(ProgramError, match="predecessor"):
        check(program)


def test_a_joint_op_of_a_group_that_does_not_exist_is_an_error(
    op: Any, program_of: ProgramOf
) -> None:
    program, _ = program_of([op(0, 1, joint="a"), op(1, 1, joint="a")])
    with pytest.raises(ProgramError):
        check(replace(program, joint_group=np.array([3], np.int32)))


def test_an_op_that_needs_itself_is_a_deadlock(op: Any, program_of: ProgramOf) -> None:
    program, _ = program_of([op(0, 1, after=(0,))])
    with pytest.raises(DeadlockError, match="1 ops wait in a cycle"):
        check(program)


def test_an_op_that_needs_one_behind_it_in_its_stream_is_a_deadlock(
    op: Any, program_of: ProgramOf
) -> None:
    program, _ = program_of([op(3, 1, after=(1,)), op(3, 1)])
    with pytest.raises(DeadlockError) as error:
        check(program)
    assert "(op 0) needs the result of rank 3" in str(error.value)
    assert "(op 1) is behind, on stream 'compute'," in str(error.value)


# rank 0 waits in the meeting for rank 1, whose work waits for what comes after the meeting.
def test_a_cycle_through_a_joint_op_is_a_deadlock_that_names_all_three_reasons(
    op: Any, program_of: ProgramOf
) -> None:
    ops = [op(0, 1, joint="a"), op(0, 1), op(1, 1, after=(1,)), op(1, 1, joint="a")]
    program, _ = program_of(ops)
    with pytest.raises(DeadlockError) as error:
        check(program)
    text = str(error.value)
    assert "ranks [0, 1], 4 ops" in text
    assert "waits to meet" in text
    assert "needs the result of" in text
    assert "is behind" in text


# Ranks 0..2 each meet the next before the last: a-b-c around a triangle.
def test_a_ring_of_meetings_in_a_circle_names_all_ranks(op: Any, program_of: ProgramOf) -> None:
    ops = []
    for rank, (first, second) in enumerate([("a", "c"), ("b", "a"), ("c", "b")]):
        ops += [op(rank, 1, joint=first), op(rank, 1, joint=second)]
    program, _ = program_of(ops)
    with pytest.raises(DeadlockError, match=r"ranks \[0, 1, 2\]"):
        check(program)


def test_only_the_ops_of_the_cycle_are_listed(op: Any, program_of: ProgramOf) -> None:
    ops = [op(0, 1), op(1, 1, after=(2,)), op(1, 1), *(op(2, 1, after=(1,)) for _ in range(50))]
    program, _ = program_of(ops)
    with pytest.raises(DeadlockError) as error:
        check(program)
    assert len(str(error.value).splitlines()) == 3


# Units in an order that can run: 0, then 1 (stream), then the joint op (2, 3), then 4.
def test_units_follow_what_they_wait_for(op: Any, program_of: ProgramOf) -> None:
    ops = [op(0, 1), op(0, 1), op(0, 1, "dp", after=(1,), joint="a"), op(1, 1, joint="a"),
           op(1, 1)]  # fmt: skip
    program, _ = program_of(ops)
    offset, rows = program.units
    assert (offset.tolist(), rows.tolist()) == ([0, 1, 2, 4, 5], [0, 1, 2, 3, 4])


def test_units_leave_out_what_can_never_start(op: Any, program_of: ProgramOf) -> None:
    program, _ = program_of([op(0, 1), op(1, 1, after=(1,)), op(1, 1)])
    assert program.units[1].tolist() == [0]


# Both sides of a message: taking one member out of a lowered program is always noticed.
def test_a_lowered_program_without_one_of_its_flows_is_refused(
    scenario_of: Callable[..., Any],
) -> None:
    program = lower(scenario_of(plan={"dp": 2, "pp": 2, "tp": 2}, run={"num_steps": 1}))
    for gone in np.flatnonzero(program.joint != NONE)[::37]:
        first = program.cost[np.flatnonzero(program.joint == NONE)[0]]
        joint, cost = program.joint.copy(), program.cost.copy()
        joint[gone], cost[gone] = NONE, first
        with pytest.raises(ProgramError, match="joint op"):
            check(replace(program, joint=joint, cost=cost))
