"""Optimizers: what they keep, and what an update moves and computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import simulator as sim
from simulator.describe.model import Model
from simulator.describe.optimizer import OPTIMIZERS
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.lower import lower
from simulator.lower.layers import num_parameters
from simulator.lower.memory import bytes_per_parameter, static_memory
from simulator.lower.optimizers import newton_schulz
from simulator.program import Work

ScenarioOf = Callable[..., Scenario]

LAYER = 12 * 64 * 64  # matrices of a layer of tiny-gpt: 3 + 1 + 4 + 4 times h x h


def update_of(s: Scenario) -> Work:
    (update,) = {c for c in lower(s).costs if isinstance(c, Work) and c.name == "OPT"}
    return update


def moved(s: Scenario) -> float:
    return sum(k.bytes for k in update_of(s).kernels) / num_parameters(s.model)


# ---- states ----


# bf16: weight 2, gradient 2, master 4 and the states; 8-bit Adam: 2 x (1 + 4 / 2048).
@pytest.mark.parametrize(
    ("optimizer", "states"),
    [("sgd", 0), ("momentum", 4), ("rmsprop", 4), ("adam", 8), ("adam8bit", 2 + 8 / 2048)],
)
def test_states_of_a_parameter(scenario_of: ScenarioOf, optimizer: str, states: float) -> None:
    assert bytes_per_parameter(scenario_of(run={"optimizer": optimizer})) == (2, 2, 4 + states)


def test_adam_in_fp32_of_one_and_a_half_billion_parameters_is_24_gb(
    scenario_of: ScenarioOf,
) -> None:
    s = scenario_of(run={"precision": "fp32", "optimizer": "adam"})
    assert sum(bytes_per_parameter(s)) * 1.5e9 == 24e9


# Rows + columns: qkv 64 + 192, proj 64 + 64, fc1 and fc2 64 + 256 each: 1024 a layer; its biases
# 192 + 64 + 256 + 64 and two norms of 128: 832. Tokens 128 + 64, positions 32 + 64, final norm 128.
def test_adafactor_keeps_rows_and_columns_of_matrices(scenario_of: ScenarioOf) -> None:
    (only,) = static_memory(scenario_of(run={"precision": "fp32", "optimizer": "adafactor"}))
    assert only.optimizer == 4 * (4 * (1024 + 832) + 192 + 96 + 128)


def test_muon_keeps_momentum_of_matrices_of_layers_and_adam_of_the_rest(
    scenario_of: ScenarioOf,
) -> None:
    s = scenario_of(run={"precision": "fp32", "optimizer": "muon"})
    (only,) = static_memory(s)
    rest = num_parameters(s.model) - 4 * LAYER
    assert only.optimizer == 4 * (4 * LAYER) + 8 * rest


# tp 2 halves each matrix on one side: 64 + 96, 32 + 64, 64 + 128, 128 + 64 = 640 a layer.
def test_adafactor_factors_the_matrices_of_a_rank(scenario_of: ScenarioOf, llama: Model) -> None:
    s = scenario_of(plan={"tp": 2}, run={"precision": "fp32", "optimizer": "adafactor"})
    vectors = 4 * (2 * 128 + 96 + 64 + 128 + 64)
    ends = (64 + 64) + (32 + 64) + 128
    assert static_memory(s)[0].optimizer == 4 * (4 * 640 + vectors + ends)


# ---- traffic ----


# fp32 words. Adam fused reads w, g, m, v and writes w, m, v: 7. Unfused, by torch's kernels: lerp m
# 3, scale v 2, addcmul v 3, sqrt 2, divide 2, add 2, addcdiv 4: 18; AdamW's decay 2 more.
@pytest.mark.parametrize(
    ("optimizer", "fused", "unfused"),
    [
        ("sgd", 3, 3),
        ("momentum", 5, 2 + 3 + 3),
        ("rmsprop", 5, 2 + 3 + 2 + 2 + 4),
        ("adam", 7, 18),
        ("adamw", 7, 20),
    ],
)
def test_words_that_an_update_moves(
    scenario_of: ScenarioOf, optimizer: str, fused: int, unfused: int
) -> None:
    run = {"precision": "fp32", "optimizer": optimizer}
    assert moved(scenario_of(run=run)) == 4 * fused
    assert moved(scenario_of(run={**run, "fused_optimizer": False})) == 4 * unfused


# A textbook says 5 times the parameters' bytes unfused and 2 times fused. Its ratio is right, 18/7
# to 5/2; its 2 is the weights' own traffic, one read and one write, without gradient and moments.
def test_adam_unfused_moves_two_and_a_half_times_what_fused_moves(scenario_of: ScenarioOf) -> None:
    run = {"precision": "fp32", "optimizer": "adam"}
    ratio = moved(scenario_of(run={**run, "fused_optimizer": False})) / moved(scenario_of(run=run))
    assert ratio == pytest.approx(5 / 2, rel=0.03)


def test_a_fused_update_reads_and_writes_each_weight_once() -> None:
    (only,) = OPTIMIZERS["adam"].fused
    assert only.reads.count("w") + only.writes.count("w") == 2


# bf16, gradient 2 bytes, master 4: lerp m 10, scale v 8, addcmul v 10, sqrt, divide and add 8 each,
# addcdiv 16, round to bf16 4 + 2.
def test_mixed_precision_rounds_in_a_kernel_of_its_own_when_unfused(
    scenario_of: ScenarioOf,
) -> None:
    s = scenario_of(run={"optimizer": "adam", "fused_optimizer": False})
    assert moved(s) == 10 + 8 + 10 + 3 * 8 + 16 + 6


# 8-bit Adam, bf16: gradient 2, master read and written 8, two states of 1 + 4 / 2048 both ways,
# weight 2.
def test_eight_bit_states_move_eight_bits(scenario_of: ScenarioOf) -> None:
    s = scenario_of(run={"optimizer": "adam8bit"})
    assert moved(s) == pytest.approx(2 + 8 + 4 * (1 + 4 / 2048) + 2)


# fp32, of all parameters: gradient read three times and weight twice, then written: 6 words; the
# sums, 4 * (4 * 1856 + 416) bytes, are written once and read twice.
def test_adafactor_reads_the_gradient_three_times(scenario_of: ScenarioOf) -> None:
    s = scenario_of(run={"precision": "fp32", "optimizer": "adafactor"})
    sums = 4 * (4 * (1024 + 832) + 192 + 96 + 128)
    params = num_parameters(s.model)
    assert sum(k.bytes for k in update_of(s).kernels) == 4 * 6 * params + 3 * sums


# 28 and 74 + decay 8 bytes a parameter at 1e12 B/s, 1 us a kernel: 1 and 9 kernels.
def test_the_step_is_longer_by_what_an_unfused_update_moves(scenario_of: ScenarioOf) -> None:
    fused, unfused = (
        sim.simulate(scenario_of(run={"fused_optimizer": fused})).step_time_s
        for fused in (True, False)
    )
    params = num_parameters(scenario_of().model)
    more = (74 + 8 - 28) * params / 1e12 + 8e-6
    assert unfused - fused == pytest.approx(more, rel=1e-9)


@pytest.mark.parametrize(("zero", "shards"), [(0, 1), (1, 4), (2, 4), (3, 4)])
def test_an_unfused_update_is_of_a_ranks_shard(
    scenario_of: ScenarioOf, llama: Model, zero: int, shards: int
) -> None:
    run = {"optimizer": "adam", "precision": "fp32", "fused_optimizer": False}
    s = scenario_of(model=llama, plan={"dp": 4, "zero": zero}, run=run)
    assert moved(s) == 4 * 18 / shards


# ---- Muon ----


# X of 64 x 256: 4 n²m + 2 n³ = 4 * 64² * 256 + 2 * 64³ FLOPs an iteration, five of them; laid the
# other way it is the same.
@pytest.mark.parametrize("shape", [(64, 256), (256, 64)])
def test_newton_schulz_counts_three_products_an_iteration(shape: tuple[int, int]) -> None:
    kernels = newton_schulz(*shape, 3, precision="bf16", fused=True)
    flops = sum(k.flops * k.count for k in kernels)
    assert flops == 3 * 5 * (4 * 64**2 * 256 + 2 * 64**3)
    assert {k.matmul for k in kernels} == {(1, 64, 64, 256), (1, 64, 64, 64), (1, 64, 256, 64)}


# b A + c A A adds n² numbers, a X + B X n m: fused they are read, 2 bytes each; unfused the one is
# scaled (2 moves) and added (3), and the product is not the reader.
def test_unfused_newton_schulz_scales_and_adds_in_kernels(scenario_of: ScenarioOf) -> None:
    fused, unfused = (
        sum(k.bytes * k.count for k in newton_schulz(64, 256, 1, precision="bf16", fused=fused))
        for fused in (True, False)
    )
    assert unfused - fused == 5 * (2 + 3 - 1) * 2 * (64 * 64 + 64 * 256)


def test_muon_orthogonalises_every_matrix_of_layers_and_no_other(scenario_of: ScenarioOf) -> None:
    products = [k for k in update_of(scenario_of(run={"optimizer": "muon"})).kernels if k.matmul]
    # four layers, five iterations: qkv 64 x 192 and proj 64 x 64 once, 64 x 256 twice (fc1, fc2)
    by_columns = {k.matmul[3]: k.count for k in products if k.name == "muon XX'" and k.matmul}
    assert sum(k.count for k in products if k.name == "muon XX'") == 4 * 5 * 4
    assert set(by_columns) == {192, 64, 256}


# Without: gradient 2, momentum 4 + 4, X 2; norm 2, normalise 4; then X 2, master 4 + 4, weight 2.
def test_muon_moves_by_hand(scenario_of: ScenarioOf) -> None:
    s = scenario_of(run={"optimizer": "muon"})
    passes = sum(k.bytes for k in update_of(s).kernels if not k.matmul)
    rest = num_parameters(s.model) - 4 * LAYER
    assert passes == (12 + 6 + 12) * 4 * LAYER + 28 * rest


# ---- refused, and said ----


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_optimizers_of_whole_matrices_are_not_sharded(
    scenario_of: ScenarioOf, optimizer: str, zero: int
) -> None:
    with pytest.raises(DescriptionError, match=r"needs whole matrices.*set plan\.zero = 0"):
        scenario_of(plan={"dp": 2, "zero": zero}, run={"optimizer": optimizer})


def test_eight_bit_adam_is_one_kernel_only(scenario_of: ScenarioOf) -> None:
    with pytest.raises(DescriptionError, match="adam8bit is one kernel only"):
        scenario_of(run={"optimizer": "adam8bit", "fused_optimizer": False})


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({"optimizer": "muon"}, "Muon orthogonalises"),
        ({"optimizer": "adafactor"}, "Adafactor has no momentum"),
        ({"optimizer": "adam8bit"}, "block of 2048"),
        ({"fused_optimizer": False}, "one kernel for all tensors"),
    ],
)
def test_the_report_says_what_it_assumed(
    scenario_of: ScenarioOf, run: dict[str, object], said: str
) -> None:
    assert said in str(sim.simulate(scenario_of(run=run)))
    assert said not in str(sim.simulate(scenario_of()))
