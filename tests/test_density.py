"""The view of many ranks: what all of them do at any time, rows that stand for several."""

import numpy as np
import pytest

import simulator
from simulator.report.breakdown import COMMUNICATION
from simulator.report.density import ACTIVITIES, BINS, density
from simulator.report.palette import MAX_ROWS


def share(result, name):
    return density(result).shares[ACTIVITIES.index(name)]


@pytest.fixture(scope="module")
def schedule():
    return simulator.simulate_schedule("1F1B", stages=4, microbatches=8, latency=0.25)


@pytest.fixture(scope="module")
def training():
    return simulator.simulate(simulator.load("llama-3-8b-3d"))


def test_shares_of_a_piece_sum_to_one(training):
    assert density(training).shares.sum(axis=0) == pytest.approx(np.ones((64, BINS)), abs=1e-5)


def test_a_schedule_without_messages_is_idle_for_its_bubble():
    # (p-1)/(m+p-1) = 3/11
    result = simulator.simulate_schedule("1F1B", stages=4, microbatches=8)
    assert share(result, "idle").mean() == pytest.approx(3 / 11, abs=1e-6)


def test_the_forward_of_rank_0_fills_the_start(schedule):
    # 4 forwards of 1 s before the first backward arrives; a piece is step / 600 = 60 ms
    width = schedule.step_time_s / BINS
    assert (share(schedule, "forward")[0, : int(4 / width)] == 1).all()


def test_work_agrees_with_the_breakdown(training):
    share_of = training.breakdown.shares
    order = density(training).ranks
    for number, name in enumerate(("forward", "backward", "optimizer")):
        # The window is that of all ranks here, and each rank's own there: as long, a bit apart.
        drawn = share(training, name).mean(axis=1)
        assert drawn == pytest.approx(share_of[number][order], abs=2e-3)


def test_ranks_are_ordered_by_stage(training):
    d = density(training)
    assert (np.diff(d.place) >= 0).all()
    assert sorted(d.ranks.tolist()) == list(range(64))


def test_folding_changes_no_picture():
    over = {"run.global_batch_size": 32}
    scenario = simulator.load("llama-3-8b-3d", over)
    folded, every = (density(simulator.simulate(scenario, folded=f)) for f in (True, False))
    assert np.array_equal(folded.shares, every.shares)


def test_1024_ranks_share_rows_and_lose_no_time():
    result = simulator.simulate(simulator.load("gpt3-175b-1024gpu", {"run.global_batch_size": 192}))
    d = density(result)
    assert d.shares.shape[1] == 450
    assert len(d.ranks) == 1024
    work = result.breakdown.of("forward", "backward").sum() / result.breakdown.window.sum()
    assert d.mean[:2].sum() / BINS == pytest.approx(work, rel=1e-4)


def test_communication_beside_work_does_not_count(training):
    total = sum(share(training, kind).mean() for kind in COMMUNICATION)
    exposed = training.breakdown.of(*COMMUNICATION).sum() / training.breakdown.window.sum()
    # A flow that moves while its rank idles for another reason counts here, not there.
    assert exposed - 1e-3 <= total < 0.2


@pytest.mark.parametrize("stages", [MAX_ROWS, MAX_ROWS + 1])
def test_a_pipeline_of_more_rows_than_can_be_told_apart_is_drawn_whole(stages):
    result = simulator.simulate_schedule("GPipe", stages=stages, microbatches=2)
    figure = result.plot.pipeline()
    images = [image for ax in figure.axes for image in ax.images]
    assert len(images) == (stages > MAX_ROWS)
    if images:
        assert images[0].get_array().shape == (stages, BINS)


def test_chosen_ranks_are_drawn_as_cells():
    result = simulator.simulate_schedule("GPipe", stages=64, microbatches=2)
    assert not result.plot.pipeline(ranks=[0, 63]).axes[0].images
