"""The zero-bubble paper's runs: rows to scenarios, and the order of its schedules."""

import csv
from collections import defaultdict
from dataclasses import asdict
from itertools import combinations

import pytest

from simulator.api import simulate
from simulator.describe import catalog
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.report.stage_times import stage_times
from simulator.schedules import Times, actions_of, pace
from simulator.validate import zero_bubble
from simulator.validate.published import rerun
from simulator.validate.scenarios import described, gpt, nodes_of, padded
from simulator.validate.sources import named

TABLE = catalog.root() / "workloads/measured/zero_bubble_table4.csv"


def row(**wanted: str) -> dict[str, str]:
    with TABLE.open(encoding="utf-8", newline="") as file:
        return next(r for r in csv.DictReader(file) if wanted.items() <= r.items())


def by_setup(source: str) -> dict[str, dict[str, tuple[float, float]]]:
    """Measured and predicted values of a source by model and microbatches, then by schedule."""
    found: dict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    for outcome in rerun(named((source,))[0]).outcomes:
        setup, _, schedule = outcome.label.rpartition(" ")
        found[setup][schedule] = outcome.measured, outcome.predicted
    return found


def misplaced(setups: dict[str, dict[str, tuple[float, float]]]) -> dict[tuple[str, ...], float]:
    """Pairs of schedules in an order that was not measured: how far apart the predictions are.

    Equal measured values have no order.
    """
    return {
        (setup, a, b): abs(runs[a][1] / runs[b][1] - 1)
        for setup, runs in setups.items()
        for a, b in combinations(sorted(runs), 2)
        if (runs[a][0] - runs[b][0]) * (runs[a][1] - runs[b][1]) < 0
        or (runs[a][1] == runs[b][1] and runs[a][0] != runs[b][0])
    }


# --- rows -----------------------------------------------------------------------------------------


def test_a_row_has_a_layer_less_at_either_end() -> None:
    case = zero_bubble.step(row(model="1.5B", schedule="1F1B", microbatches_m="24"))
    assert case.scenario is not None
    # 24 x 6 samples / (8 GPUs x 11.8 samples/s) = 1.525 s
    assert case.measured == pytest.approx(1.5254, rel=1e-4)
    assert case.scenario.layers_per_stage == (2, 3, 3, 3, 3, 3, 3, 2)
    assert not case.scenario.model.tie_word_embeddings
    assert not case.scenario.plan.p2p_overlap


def test_a_chunk_of_interleaved_1f1b_is_a_layer_the_embedding_or_the_head() -> None:
    case = zero_bubble.step(row(model="6.2B", schedule="1F1B-I", microbatches_m="24"))
    assert case.scenario is not None
    # (30 + 2) / 8 = 4 chunks of each rank
    assert case.scenario.plan.chunks == 4
    assert case.scenario.layers_per_stage == (0, *[1] * 30, 0)


def test_an_automatic_row_waits_for_no_norm_and_posts_messages_ahead() -> None:
    case = zero_bubble.memory(row(model="6.2B", schedule="ZB-2p", microbatches_m="24"))
    assert case.scenario is not None
    plan = case.scenario.plan
    assert (plan.schedule, plan.schedule_memory) == ("ZB-auto", 2.0)
    assert (plan.post_validation, plan.p2p_overlap) == (True, True)
    # 32 x 4096 of 34 x 4096 + 5 x 32 x 1024
    assert plan.schedule_kept == pytest.approx(131072 / (139264 + 163840))
    assert plan.schedule_times is not None
    times = plan.schedule_times.times
    assert times == pytest.approx((0.029718, 0.029444, 0.019927, 0.000527))


def test_a_replay_of_1f1b_takes_the_closed_form_and_its_messages() -> None:
    ideal = (24 + 8 - 1) * (18.522 + 18.086 + 9.337) / 1e3
    case = zero_bubble.replay(row(model="1.5B", schedule="1F1B", microbatches_m="24"))
    assert ideal < case.predict() < ideal + 2 * 31 * 0.601e-3


def test_a_replay_of_an_automatic_schedule_takes_its_own_pace() -> None:
    # Two ways to one number: the engine on lowered lists, and the scheduler's own longest path.
    found = row(model="1.5B", schedule="ZB-2p", microbatches_m="24")
    times = Times(0.018522, 0.018086, 0.009337, 0.000601)
    span = pace(zero_bubble.actions(found), times).span
    assert zero_bubble.replay(found).predict() == pytest.approx(span, rel=1e-9)


# --- what is measured of stages -------------------------------------------------------------------


def test_the_times_of_stages_are_those_that_a_run_shows() -> None:
    case = zero_bubble.memory(row(model="6.2B", schedule="ZB-1p", microbatches_m="24"))
    assert case.scenario is not None
    times = stage_times(simulate(case.scenario))
    assert isinstance(times.forward, tuple)
    assert len(times.forward) == 8
    # inner stages are alike; the first has a layer less and an embedding
    assert len(set(times.forward[1:-1])) == 1
    assert times.forward[0] < times.forward[1]
    assert 0 < times.message < min(times.forward)


def test_a_run_of_whole_backwards_has_no_times_to_give() -> None:
    case = zero_bubble.step(row(model="6.2B", schedule="1F1B", microbatches_m="24"))
    assert case.scenario is not None
    with pytest.raises(DescriptionError, match="for example ZB-H1"):
        stage_times(simulate(case.scenario))


# --- the order of schedules -----------------------------------------------------------------------


def test_profiled_times_put_the_schedules_in_the_measured_order() -> None:
    setups = by_setup("zero-bubble-replay")
    assert len(setups) == 12
    for runs in setups.values():
        assert sorted(runs) == ["1F1B", "1F1B-I", "ZB-1p", "ZB-2p"]
        assert min(runs, key=lambda schedule: runs[schedule][1]) == "ZB-2p"
        assert max(runs, key=lambda schedule: runs[schedule][1]) == "1F1B"
    # 70 of 72 pairs. In the other two 1F1B-I is ahead of ZB-1p by half a percent or less, and was
    # measured 0.2 and 4.5 % behind; the paper's own rates (table 5) have it ahead in 9 setups.
    assert misplaced(setups) == {
        ("6.2B p 8 m 64", "1F1B-I", "ZB-1p"): pytest.approx(0.0002, abs=1e-4),
        ("14.6B p 16 m 48", "1F1B-I", "ZB-1p"): pytest.approx(0.005, abs=5e-4),
    }


def test_memory_of_the_schedules_is_in_the_measured_order() -> None:
    setups = by_setup("zero-bubble-memory")
    assert len(setups) == 12
    assert misplaced(setups) == {}
    errors = [p / m - 1 for runs in setups.values() for m, p in runs.values()]
    assert max(map(abs, errors)) < 0.04


def test_few_microbatches_gain_a_fifth_to_a_third() -> None:
    # Table 9, m <= p: measured 19 to 33 % more samples; predictions gain 26 to 44 %.
    setups = by_setup("zero-bubble-few-step")
    assert len(setups) == 9
    for runs in setups.values():
        measured, predicted = (runs["1F1B"][i] / runs["ZB-2p"][i] for i in (0, 1))
        assert 1.19 < measured < 1.35
        assert abs(predicted / measured - 1) < 0.1


# What post-validation gains, table 7: samples/s of ZB-2p with it and with a synchronisation.
@pytest.mark.parametrize(
    ("model", "m", "free", "synchronised"),
    [("1.5B", "24", 14.5, 13.11), ("6.2B", "24", 4.32, 4.00),
     ("14.6B", "48", 1.81, 1.68), ("28.3B", "96", 0.99, 0.91)],
)  # fmt: skip
def test_post_validation_gains_about_what_was_measured(
    model: str, m: str, free: float, synchronised: float
) -> None:
    found = row(model=model, microbatches_m=m, schedule="ZB-2p")
    columns = ("T_F_ms", "T_B_ms", "T_W_ms", "T_comm_ms")
    span, makespan = pace(zero_bubble.actions(found), Times(*(float(found[c]) for c in columns)))
    assert makespan / span == pytest.approx(free / synchronised, abs=0.04)


# --- interleaved against zero bubble: 6.2B on 8 H800 ----------------------------------------------

# Measured there: 1F1B 55 samples/s and 48 GB, interleaved 66 and 57, ZB-2p 67 and 79, ZB-V 64 and
# 53. An H800 is an H100 with NVLink of 200 GB/s a direction. Microbatches are not stated: with 32,
# 1F1B's bubble is 7/39 = 17.9 %, what it was behind.
H800 = {"from": "dgx-h100", "link": {"bandwidth": "200 GB/s", "pair_bandwidth": "200 GB/s"}}
EVEN = [3, *[4] * 6, 3]


def on_h800(plan: dict[str, object], microbatches: int) -> Scenario:
    layers, heads, hidden = zero_bubble.MODELS["6.2B"]
    shape = {"hidden": str(hidden), "heads": str(heads), "layers": str(layers)}
    model = gpt(shape, padded(50257, 1), 1024) | {"tie_word_embeddings": False}
    return described(
        model, nodes_of(8, H800), {"dp": 1, "pp": 8, "microbatch_size": 3, **plan},
        {
            "global_batch_size": 3 * microbatches, "sequence_length": 1024, "precision": "fp16",
            "attention": "unfused", "fused_accumulation": True, "clip_grad": True,
        },
    )  # fmt: skip


def compared(microbatches: int) -> dict[str, tuple[float, float]]:
    """Samples/s and bytes of the fullest rank by schedule."""
    profile = simulate(on_h800({"schedule": "ZB-H1", "layers_per_stage": EVEN}, 8))
    zero = {"post_validation": True}
    plans: dict[str, dict[str, object]] = {
        "1F1B": {"layers_per_stage": EVEN, "p2p_overlap": False},
        "interleaved": {
            "schedule": "Interleaved1F1B", "chunks": 4, "layers_per_stage": [0, *[1] * 30, 0],
        },
        "ZB-2p": zero | {
            "schedule": "ZB-auto", "schedule_memory": 2.0, "layers_per_stage": EVEN,
            "schedule_kept": zero_bubble.kept({"model": "6.2B"}),
            "schedule_times": asdict(stage_times(profile)),
        },
        "ZB-V": zero | {
            "schedule": "ZBVZeroBubble", "chunks": 2, "layers_per_stage": [1, *[2] * 14, 1],
        },
    }  # fmt: skip
    runs = {name: simulate(on_h800(plan, microbatches)) for name, plan in plans.items()}
    return {
        name: (3 * microbatches / run.step_time_s, float(run.peak_memory_bytes.max()))
        for name, run in runs.items()
    }


def test_interleaved_and_zero_bubble_are_close_and_1f1b_is_behind() -> None:
    found = compared(32)
    rate = {name: samples for name, (samples, _) in found.items()}
    memory = {name: held for name, (_, held) in found.items()}
    assert max(rate, key=rate.__getitem__) in ("ZB-2p", "ZB-V")  # 0.7 % apart; measured 4 %
    assert min(rate["interleaved"], rate["ZB-V"]) > 0.94 * rate["ZB-2p"]
    assert 0.81 < rate["1F1B"] / rate["ZB-2p"] < 0.85
    assert sorted(memory, key=memory.__getitem__) == ["1F1B", "ZB-V", "interleaved", "ZB-2p"]


def test_the_gap_shrinks_as_microbatches_grow() -> None:
    # Without messages 1F1B is behind by its bubble alone, 7 / (m + 7): 1.35 % at 512.
    assert 1 - 512 * 3 / pace(actions_of("1F1B", 8, 512), Times()).span == pytest.approx(7 / 519)
    few, many = compared(32), compared(128)
    behind = [1 - runs["1F1B"][0] / runs["ZB-2p"][0] for runs in (few, many)]
    assert behind[1] < 0.4 * behind[0]
