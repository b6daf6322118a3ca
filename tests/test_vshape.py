"""V-Half and V-Min: placement, order, and the activations and bubble that their paper states."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.schedules import Action, Actions, actions_of, check_actions, stages_of_ranks
from simulator.schedules.times import Times, pace
from simulator.schedules.vshape import INTERVAL, Offsets, half_block, min_block, v_half, v_min

BOTH = pytest.mark.parametrize("make", [v_half, v_min])
KEPT = {v_half: lambda p: (p + 2) // 2, v_min: lambda p: (p + 4) // 3}
BLOCK: dict[Callable[[int, int], Actions], Callable[[int, int], Offsets]] = {
    v_half: half_block, v_min: min_block,
}  # fmt: skip


def most_kept(actions: Actions) -> list[int]:
    """Activations of one stage that each rank keeps at most, from F to W."""
    peaks = []
    for row in actions:
        now = most = 0
        for action in row:
            now += {"F": 1, "I": 0, "W": -1}[action.kind]
            most = max(most, now)
        peaks.append(most)
    return peaks


@BOTH
def test_the_model_goes_down_the_ranks_and_up_again(make: Callable[[int, int], Actions]) -> None:
    assert stages_of_ranks(make(3, 4)) == ((0, 5), (1, 4), (2, 3))


@BOTH
@pytest.mark.parametrize("p", range(1, 33))
def test_no_two_actions_of_repeated_blocks_fall_into_one_slot(
    make: Callable[[int, int], Actions], p: int
) -> None:
    for rank in range(p):
        offsets = BLOCK[make](rank, p)
        slots = {slot % INTERVAL for pair in offsets for slot in pair}
        assert len(slots) == 4  # of 6; the other two are for W


@BOTH
@pytest.mark.parametrize("p", range(1, 17))
def test_a_block_hands_over_in_order(make: Callable[[int, int], Actions], p: int) -> None:
    block = [BLOCK[make](rank, p) for rank in range(p)]
    way = [o.forward[0] for o in block] + [o.forward[1] for o in reversed(block)]
    way += [o.input_grad[1] for o in block] + [o.input_grad[0] for o in reversed(block)]
    assert way == sorted(set(way))


# V-Half keeps (p+2)//2 microbatches of two stages, V-Min (p+4)//3: for p = 8, 5 and 4, where 1F1B
# keeps 8. (The authors' description of their pipeline explorer, for microbatches enough.)
@BOTH
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
def test_ranks_keep_as_much_as_the_authors_state(
    make: Callable[[int, int], Actions], p: int
) -> None:
    for m in (p, 2 * p, 3 * p + 1):
        assert max(most_kept(make(p, m))) <= 2 * KEPT[make](p)
    assert max(most_kept(make(p, 2 * p + 1))) == 2 * KEPT[make](p)


# 1F1B of stages twice as long waits (p-1) x 2 x 3 = 6(p-1); V-Half half of that, V-Min two thirds.
@pytest.mark.parametrize(("make", "slots"), [(v_half, 3), (v_min, 4)])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 18])
def test_equal_times_leave_no_more_bubble_than_the_paper_states(
    make: Callable[[int, int], Actions], slots: int, p: int
) -> None:
    for m in (p, p + 1, 2 * p, 4 * p, 8 * p):
        assert pace(make(p, m), Times()).span - INTERVAL * m <= slots * (p - 1)


def test_v_min_waits_two_thirds_of_1f1b_and_v_half_half_of_it() -> None:
    # p = 8, m = 32, stages of 1 and 1F1B's of 2: 6 x 32 = 192 of work. 1F1B 192 + 42.
    whole = Times(2.0, 2.0, 2.0)
    assert pace(actions_of("1F1B", 8, 32), whole).span == 234
    assert pace(v_half(8, 32), Times()).span == 192 + 21
    assert pace(v_min(8, 32), Times()).span == 192 + 27


def test_v_mins_bubble_grows_with_microbatches_where_times_differ() -> None:
    # "2B/3 + O(n)": with W at half of F, a repetition of V-Min has gaps.
    def bubble(m: int) -> float:
        return pace(v_min(8, m), Times(1.0, 1.0, 0.5)).span - 5 * m

    assert bubble(64) > bubble(32) > bubble(16)


@settings(max_examples=80, deadline=None)
@given(make=st.sampled_from([v_half, v_min]), p=st.integers(1, 12), m=st.integers(1, 30))
def test_every_size_is_legal_and_does_all_work_once(
    make: Callable[[int, int], Actions], p: int, m: int
) -> None:
    actions = make(p, m)
    check_actions(actions)
    for rank, row in enumerate(actions):
        stages = (rank, 2 * p - 1 - rank)
        assert sorted(row) == sorted(
            Action(s, kind, i) for s in stages for kind in "FIW" for i in range(m)
        )


@settings(max_examples=40, deadline=None)
@given(make=st.sampled_from([v_half, v_min]), p=st.integers(2, 12), m=st.integers(1, 30))
def test_memory_never_exceeds_1f1bs_nor_the_blocks(
    make: Callable[[int, int], Actions], p: int, m: int
) -> None:
    kept = max(most_kept(make(p, m)))
    assert kept <= 2 * min(m, KEPT[make](p))
