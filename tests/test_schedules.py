"""Action lists, and what is said about wrong ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import simulator as sim
from simulator.errors import DeadlockError, DescriptionError, ProgramError, ScheduleError
from simulator.lower import lower_schedule
from simulator.schedules import (
    Action,
    Actions,
    actions_of,
    add_optimizer,
    add_reduce_grad,
    add_send_recv,
    check_actions,
    check_progress,
    grid,
    parse_grid,
    read_actions,
    size_complaint,
)


def lists(*rows: str) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(map(Action.parse, row.split())) for row in rows)


# P=2, M=2, v=2 by hand: rank 0 holds stages 0 and 2, rank 1 stages 1 and 3. Warm-up 2(1-r) + 2:
# 4 forwards on rank 0 (all there are), 2 on rank 1, which then alternates.
def test_interleaved_lists_by_hand() -> None:
    assert actions_of("Interleaved1F1B", 2, 2, 2) == lists(
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    )


# Rounds are m // p, at least 1, and must divide m: 20 // 6 = 3 does not divide 20; 18 and 21 are
# divided by 3. 5 // 2 = 2, 4 and 6 are divided by 2 and 3.
@pytest.mark.parametrize(
    ("ranks", "m", "near"), [(2, 5, "4 or 6"), (6, 20, "18 or 21"), (3, 10, "9 or 12")]
)
def test_interleaved_refuses_uneven_rounds_and_names_the_nearest(
    ranks: int, m: int, near: str
) -> None:
    with pytest.raises(DescriptionError, match=f"{m} microbatches through {ranks} ranks.*{near}"):
        actions_of("Interleaved1F1B", ranks, m, 2)


# Question 7: of p=6, m=3 one round; of p=4, m=10 two of 5; m need not be a multiple of p x v.
@pytest.mark.parametrize(("ranks", "m"), [(6, 3), (4, 10), (4, 4)])
def test_question_7_interleaved_takes_uneven_numbers_that_rounds_divide(ranks: int, m: int) -> None:
    rows = actions_of("Interleaved1F1B", ranks, m, 2)
    assert [len(row) for row in rows] == [2 * 2 * m] * ranks


@pytest.mark.parametrize(
    ("name", "chunks", "words"),
    [
        ("GPipe", 2, "GPipe takes one chunk a rank, not 2; use Interleaved1F1B"),
        ("Interleaved1F1B", 1, "at least 2 chunks a rank, not 1; with one chunk use 1F1B"),
    ],
)
def test_a_schedule_says_which_chunks_it_takes(name: str, chunks: int, words: str) -> None:
    with pytest.raises(DescriptionError, match=words):
        actions_of(name, 4, 8, chunks)


def test_chunks_beside_lists_are_refused() -> None:
    with pytest.raises(DescriptionError, match="chunks 2 is for the name of a schedule"):
        sim.simulate_schedule(lists("0F0 0B0"), chunks=2)


# A stage of 1F1B with fewer microbatches than warm-up slots simply runs out of forwards.
def test_1f1b_with_fewer_microbatches_than_stages_is_all_forwards_then_all_backwards() -> None:
    assert actions_of("1F1B", 5, 2)[0] == lists("0F0 0F1 0B0 0B1")[0]


def test_naive_finishes_a_microbatch_before_it_starts_the_next() -> None:
    assert actions_of("naive", 2, 2) == lists("0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1")


def test_schedule_names_ignore_case() -> None:
    assert actions_of("gpipe", 3, 2) == actions_of("GPipe", 3, 2)


def test_an_unknown_schedule_lists_the_known_ones_and_suggests_the_nearest() -> None:
    with pytest.raises(DescriptionError, match=r"naive, GPipe, 1F1B.*did you mean 'GPipe'"):
        actions_of("gpip", 2, 2)


@pytest.mark.parametrize(
    "text", ["3F0", "0B12", "1I2", "1W2", "4SEND_F3", "4RECV_B0", "2REDUCE_GRAD", "0OPT"]
)
def test_an_action_prints_as_it_parses(text: str) -> None:
    assert str(Action.parse(text)) == text


@pytest.mark.parametrize("text", ["", "F0", "3X0", "3F0 1B0", "-1F0", "3f0", "3F-1"])
def test_a_text_that_is_no_action_is_an_error(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action"):
        Action.parse(text)


@pytest.mark.parametrize("name", ["naive", "GPipe", "1F1B"])
def test_a_grid_parses_back(name: str) -> None:
    full = add_optimizer(add_reduce_grad(add_send_recv(actions_of(name, 3, 4))))
    assert parse_grid(grid(full)) == full


def test_sends_follow_producers_and_receives_precede_consumers() -> None:
    assert add_send_recv(actions_of("1F1B", 3, 1)) == lists(
        "0F0 0SEND_F0 0RECV_B0 0B0",
        "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0",
        "2RECV_F0 2F0 2B0 2SEND_B0",
    )


def test_stages_of_one_rank_hand_over_without_a_message() -> None:
    one_rank = lists("0F0 1F0 1B0 0B0")
    assert add_send_recv(one_rank) == one_rank


# F and B of stages 0 and 1 one after the other: 1 + 1 + 2 + 2.
def test_two_stages_of_one_rank_run_in_its_order() -> None:
    assert sim.simulate_schedule(lists("0F0 1F0 1B0 0B0")).step_time_s == 6.0


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (("0F0 0B0", "1F0 1B0 1B0"), "1B0 on rank 1 is done twice"),
        (("0F0 0F0 0B0", "1F0 1B0"), "0F0 on rank 0 is done twice"),
        (("0F0 0B0", "1B0 1F0"), "1B0 on rank 1 comes before its forward 1F0"),
        (("0F0 0B0", "1B0"), "1B0 on rank 1 comes before its forward 1F0"),
        (("0F0 0B0 0F1", "1F0 1B0 0B1"), "microbatch 1 passes stage 0 on rank 0 and on rank 1"),
        (("0F0 0W0", "1F0 1B0"), "0W0 on rank 0 comes before 0I0"),
    ],
)
def test_a_wrong_cell_is_named_and_marked_in_the_grid(rows: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ScheduleError) as error:
        check_actions(lists(*rows))
    first, *shown = str(error.value).splitlines()
    assert first == sentence
    assert len(shown) == len(rows)
    wrong = sentence.split()[0] if sentence[0].isdigit() else "0B1"
    assert f"{wrong} <-- ERROR HERE" in " ".join(" ".join(shown).split())


@pytest.mark.parametrize(
    ("rows", "missing"),
    [
        (("0F0 0B0 0F1 0B1", "1F0 1B0"), "1F1 is missing"),
        (("0F0 0B0", "1F0"), "1B0"),
        (("0F0 0B0", "2F0 2B0"), "1F0 is missing"),
        (("0F0 0I0",), "0B0"),
    ],
)
def test_a_missing_cell_is_named_with_the_grid(rows: tuple[str, ...], missing: str) -> None:
    with pytest.raises(ScheduleError) as error:
        check_actions(lists(*rows))
    first, *shown = str(error.value).splitlines()
    assert first.startswith(missing)
    assert len(shown) == len(rows)


def test_a_send_without_receive_names_both() -> None:
    rows = lists("0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1B0 1SEND_B0")
    with pytest.raises(ScheduleError, match="0SEND_F0 on rank 0 has no 1RECV_F0") as error:
        sim.simulate_schedule(rows)
    assert "rank 0: 0F0" in str(error.value)  # the grid


def test_a_backward_without_receive_names_it_and_its_rank() -> None:
    rows = lists("0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")
    with pytest.raises(ScheduleError, match="0B0 on rank 0 has no 0RECV_B0 before it"):
        sim.simulate_schedule(rows)


@pytest.mark.parametrize(
    ("rows", "alone"),
    [
        (("0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"), "1RECV_F0"),
        (("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0"), "0RECV_B0"),
    ],
)
def test_a_receive_without_send_names_it_and_both_ranks(rows: tuple[str, ...], alone: str) -> None:
    with pytest.raises(ProgramError, match=alone) as error:
        sim.simulate_schedule(lists(*rows))
    assert "0" in str(error.value)
    assert "1" in str(error.value)


@pytest.mark.parametrize(
    "row", ["0RECV_F0 0F0 0B0", "0F0 0SEND_F0 0B0", "0F0 0B0 0SEND_B0", "0F0 0RECV_B0 0B0"]
)
def test_a_message_over_the_edge_of_the_pipeline_is_an_error(row: str) -> None:
    with pytest.raises(ProgramError):
        sim.simulate_schedule(lists(row))


# torch's runtime runs a rank's list from left to right: a forward before its receive has no input,
# and a send before its forward has nothing to send.
@pytest.mark.parametrize(
    "rows",
    [
        ("0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1RECV_F0 1B0 1SEND_B0"),
        ("0SEND_F0 0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"),
        ("0F0 0SEND_F0 0B0 0RECV_B0", "1RECV_F0 1F0 1B0 1SEND_B0"),
        ("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1SEND_B0 1B0"),
    ],
)
def test_a_message_on_the_wrong_side_of_its_computation_is_an_error(rows: tuple[str, ...]) -> None:
    with pytest.raises(ScheduleError):
        sim.simulate_schedule(lists(*rows))


# A bare schedule has no gradients and no weights: what torch's lists end with takes no time.
def test_reduce_grad_of_a_bare_schedule_takes_no_time() -> None:
    plain = sim.simulate_schedule(actions_of("1F1B", 3, 4))
    whole = sim.simulate_schedule(add_optimizer(add_reduce_grad(actions_of("1F1B", 3, 4))))
    assert whole.step_time_s == plain.step_time_s == (4 + 2) * 3
    assert whole.memory.peak.tolist() == plain.memory.peak.tolist()


def test_a_send_of_what_was_never_computed_is_an_error() -> None:
    rows = lists("0F0 0SEND_F0 0SEND_F1 0RECV_B0 0B0", "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0")
    with pytest.raises(ProgramError):
        sim.simulate_schedule(rows)


@pytest.mark.parametrize("rows", [(), ((),)])
def test_an_empty_schedule_is_a_schedule_error(rows: tuple[tuple[Action, ...], ...]) -> None:
    with pytest.raises(ScheduleError):
        sim.simulate_schedule(rows)


# Messages between two ranks in one direction are matched in order, as NCCL matches them. One side
# does microbatch 0 then 1, the other 1 first, so each waits for the other for ever.
FORWARD_0 = "0F0 0F1 0SEND_F0 0SEND_F1"
BACKWARD_0 = "0RECV_B0 0RECV_B1 0B0 0B1"
FORWARD_1 = "1RECV_F0 1RECV_F1 1F0 1F1"
BACKWARD_1 = "1B0 1B1 1SEND_B0 1SEND_B1"
SWAPPED = {
    "1RECV_F": (f"{FORWARD_0} {BACKWARD_0}", f"1RECV_F1 1RECV_F0 1F0 1F1 {BACKWARD_1}"),
    "0SEND_F": (f"0F0 0F1 0SEND_F1 0SEND_F0 {BACKWARD_0}", f"{FORWARD_1} {BACKWARD_1}"),
    "0RECV_B": (f"{FORWARD_0} 0RECV_B1 0RECV_B0 0B0 0B1", f"{FORWARD_1} {BACKWARD_1}"),
    "1SEND_B": (f"{FORWARD_0} {BACKWARD_0}", f"{FORWARD_1} 1B0 1B1 1SEND_B1 1SEND_B0"),
}


# As the lists stand, sends come after both passes: rank 1 runs F 2-3 3-4, B 4-6 6-8, rank 0 B 8-12.
def test_messages_in_the_same_order_on_their_two_ends_run() -> None:
    rows = lists(f"{FORWARD_0} {BACKWARD_0}", f"{FORWARD_1} {BACKWARD_1}")
    assert sim.simulate_schedule(rows).step_time_s == 12.0


def test_a_send_waits_for_the_computation_before_it_in_its_list() -> None:
    # 0SEND_F0 stands after 0B0, which needs what rank 1 sends only after it has received 0F0.
    rows = lists("0F0 0RECV_B0 0B0 0SEND_F0", "1RECV_F0 1F0 1B0 1SEND_B0")
    with pytest.raises(DeadlockError, match=r"ranks \[0, 1\]"):
        sim.simulate_schedule(rows)


def test_texts_of_actions_are_read_as_actions() -> None:
    assert sim.simulate_schedule([["0F0", "0B0"]]).step_time_s == 3.0


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        ([["0OPT"]], "needs at least one forward"),
        ([["0OPT", "0F0", "0B0"]], "comes after the optimizer step"),
        ([["0F", "0B"]], "must name a microbatch"),
        ([["0F0", "0OPT0", "0B0"]], "0OPT0 on rank 0 comes before its backward 0B0"),
        ([["0F0", "0B0", "0OPT0", "0OPT"]], "names a microbatch, and other steps do not"),
        ([["0F0", "0B0", "1OPT"]], "1OPT on rank 0, which does nothing else of its stage"),
        ([[Action(-1, "F", 0)]], "count from 0"),
        ([3], "is a list of actions for each rank"),
        ([["nonsense"]], "'nonsense' is not an action"),
    ],
)
def test_lists_that_say_nothing_sensible_are_refused(rows: object, part: str) -> None:
    with pytest.raises(ScheduleError, match=part):
        sim.simulate_schedule(rows)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments",
    [
        {"stages": "4"},
        {"stages": 2.5},
        {"chunks": 0},
        {"forward": None},
        {"forward": 0.0, "backward": 0.0},
    ],
)
def test_arguments_of_the_wrong_kind_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(DescriptionError):
        sim.simulate_schedule("1F1B", **{"stages": 2, "microbatches": 2, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize("swapped", SWAPPED)
def test_messages_in_different_order_on_their_two_ends_are_a_deadlock_that_is_explained(
    swapped: str,
) -> None:
    with pytest.raises(DeadlockError) as error:
        sim.simulate_schedule(lists(*SWAPPED[swapped]))
    head, *shown = str(error.value).splitlines()
    assert head.startswith("deadlock between ranks [0, 1]: rank 0 ")
    assert "; rank 1 " in head
    cycle, rows = shown[:-2], shown[-2:]
    assert f"{swapped}0" in " ".join(cycle)
    assert f"{swapped}1" in " ".join(cycle)
    # each line's waiter is what the line before waits for, and the last waits for the first
    waiters = [line.split()[0] for line in cycle]
    blockers = [line.split(" waits for ")[1].split(",")[0].split()[0] for line in cycle]
    assert blockers == [*waiters[1:], waiters[0]]
    for cell in waiters:
        assert f"{cell} <-- WAITS" in " ".join(" ".join(rows).split())


def test_a_deadlock_says_where_ranks_stand_and_what_they_wait_for() -> None:
    with pytest.raises(DeadlockError) as error:
        sim.simulate_schedule(lists(*SWAPPED["1RECV_F"]))
    assert str(error.value).splitlines() == [
        "deadlock between ranks [0, 1]: rank 0 stands at 0B0 and waits for 0RECV_B0 from rank 1; "
        "rank 1 stands at 1F0 and waits for 1RECV_F0 from rank 0",
        "  1RECV_F0 on rank 1 waits for 1RECV_F1, which is received before it",
        "  1RECV_F1 on rank 1 waits for 0SEND_F1 on rank 0, its other side",
        "  0SEND_F1 on rank 0 waits for 0SEND_F0, which is sent before it",
        "  0SEND_F0 on rank 0 waits for 1RECV_F0 on rank 1, its other side",
        "rank 0: 0F0      0F1      0SEND_F0 <-- WAITS 0SEND_F1 <-- WAITS 0RECV_B0 0RECV_B1 "
        "0B0      <-- STANDS HERE 0B1",
        "rank 1: 1RECV_F1 <-- WAITS 1RECV_F0 <-- WAITS 1F0      <-- STANDS HERE 1F1      "
        "1B0      1B1      1SEND_B0 1SEND_B1",
    ]


# Rank 1 wants to do the backward of microbatch 1 before its forward of 0, which rank 0 sends only
# after it has received that backward.
def test_ranks_that_wait_for_each_others_results_are_a_deadlock() -> None:
    rows = lists("0F1 0B1 0F0 0B0", "1F0 1F1 1B1 1B0")
    with pytest.raises(DeadlockError, match=r"ranks \[0, 1\]"):
        sim.simulate_schedule(rows)


def test_a_rank_whose_own_order_is_impossible_is_a_deadlock() -> None:
    with pytest.raises(DeadlockError, match="1F0"):
        sim.simulate_schedule(lists("1F0 0F0 1B0 0B0"))


# What the dry run of the lists says, and what the ops that they become say.
@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS"]),
    p=st.integers(2, 4),
    m=st.integers(2, 6),
    swaps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=3),
)
def test_lists_that_deadlock_are_those_whose_ops_do(
    name: str, p: int, m: int, swaps: list[tuple[int, int]]
) -> None:
    v = 2 if name in ("Interleaved1F1B", "LoopedBFS") else 1
    assume(size_complaint(name, p, m, v) is None)
    rows = [list(row) for row in add_send_recv(actions_of(name, p, m, v))]
    for rank, place in swaps:
        row = rows[rank % p]
        i = place % (len(row) - 1)
        row[i], row[i + 1] = row[i + 1], row[i]
    changed = read_actions(rows)
    try:
        check_actions(changed)
    except ScheduleError:
        assume(False)
    assert stops(check_progress, changed) == stops(lower_schedule, changed)


def stops(check: Callable[[Actions], object], actions: Actions) -> bool:
    try:
        check(actions)
    except DeadlockError:
        return True
    return False


def test_a_long_grid_is_shown_near_what_is_wrong() -> None:
    rows = [list(row) for row in actions_of("1F1B", 2, 100)]
    rows[1].append(rows[1][60])
    with pytest.raises(ScheduleError, match="is done twice") as error:
        check_actions(read_actions(rows))
    first, second = str(error.value).splitlines()[1:]
    assert first.endswith("...")
    assert len(first.split()) == 2 + 9 + 1
    assert second.startswith("rank 1: ... ")
    assert second.endswith("1F30 <-- ERROR HERE")
    assert len(second.split()) == 2 + 1 + 9 + 3
