"""Recomputation by operators, as torchtitan's selective checkpointing with the option "op"."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import simulator as sim
from simulator.describe.model import Model
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.lower import lower
from simulator.lower.layers import blocks, recomputed_flops_per_token, shapes
from simulator.lower.operators import Beside, Operator
from simulator.program import Flow, Kernel

OP = {"recompute": "selective-op"}
SPLIT = {**OP, "tp": 2, "sequence_parallel": True}


def layer_of(s: Scenario) -> tuple[Operator, ...]:
    return blocks(s.model, shapes(s)).layer.operators


def products(s: Scenario) -> dict[str, float]:
    """Return the FLOPs of the products of a layer that run again, by name."""
    parts = [p for o in layer_of(s) for p in o.again]
    return {p.name: p.flops for p in parts if isinstance(p, Kernel) and p.matmul is not None}


# wk 64 x 32, wo 64 x 64 and w3 64 x 160 of each token run again, in 4 layers.
def test_every_second_product_runs_again(scenario_of: Any, llama: Model) -> None:
    s = scenario_of(model=llama, plan=OP)
    again = {"qkv": 2 * 64 * 32, "proj": 2 * 64 * 64, "fc1": 2 * 64 * 160}
    assert products(s) == {name: 32 * flops for name, flops in again.items()}
    assert recomputed_flops_per_token(s) == 4 * sum(again.values())


# Without a gate the order is wq, wk, wv, wo, w1, w2, and nothing needs w2 again. 4 heads of 16.
def test_without_a_gate_wk_and_wo_run_again(scenario_of: Any) -> None:
    assert products(scenario_of(plan=OP)) == {"qkv": 32 * 2 * 64 * 64, "proj": 32 * 2 * 64 * 64}


# wk reads 32 x 64 and 64 x 32 elements and writes 32 x 32, 2 bytes each.
def test_a_part_of_a_product_moves_its_own_bytes(scenario_of: Any, llama: Model) -> None:
    qkv = next(o for o in layer_of(scenario_of(model=llama, plan=OP)) if o.name == "qkv")
    (again,) = qkv.again
    assert isinstance(again, Kernel)
    assert again.bytes == 2 * (32 * 64 + 64 * 32 + 32 * 32)
    assert again.matmul == (1, 32, 32, 64)


# Of a token, in bytes: the layer's input 2 x 64, wq 2 x 64, wv 2 x 32, attention 2 x 64 and 4 for
# each of 4 heads, w1 2 x 160, w2 2 x 64, which backward does not need: 912, compiled 784.
@pytest.mark.parametrize(("compiled", "a_token"), [(False, 912), (True, 784)])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_results_of_the_other_products_are_saved(
    scenario_of: Any, llama: Model, compiled: bool, a_token: int, precision: str
) -> None:
    s = scenario_of(model=llama, plan=OP, run={"compiled": compiled, "precision": precision})
    assert sum(o.saved_bytes for o in layer_of(s)) == 32 * a_token


# On each of 2 ranks half of these, but all of w2's own result, which is not reduced yet; and what
# the two reduce-scatters return, 2 x 64 / 2 each; compiled only that after wo: the norm needs it.
@pytest.mark.parametrize(
    ("compiled", "a_token"), [(False, (912 - 128) // 2 + 128 + 2 * 64), (True, 784 // 2 + 64)]
)
def test_reduce_scatters_are_saved(
    scenario_of: Any, llama: Model, compiled: bool, a_token: int
) -> None:
    s = scenario_of(model=llama, plan=SPLIT, run={"compiled": compiled})
    assert sum(o.saved_bytes for o in layer_of(s)) == 32 * a_token


def test_wo_does_not_run_again_where_its_sum_is_saved_and_the_layer_compiled(
    scenario_of: Any, llama: Model
) -> None:
    for compiled, names in ((False, {"qkv", "proj", "fc1"}), (True, {"qkv", "fc1"})):
        s = scenario_of(model=llama, plan=SPLIT, run={"compiled": compiled})
        assert set(products(s)) == names


# The two gathers of a layer's inputs run again; without sequence parallelism the sum after wo does.
@pytest.mark.parametrize("overlap", ["none", "grads", "all"])
def test_gathers_run_again_and_reduce_scatters_do_not(
    scenario_of: Any, llama: Model, overlap: str
) -> None:
    s = scenario_of(model=llama, plan={**SPLIT, "tp_overlap": overlap})
    parts = [p.flow if isinstance(p, Beside) else p for o in layer_of(s) for p in o.again]
    assert Counter(p.name for p in parts if isinstance(p, Flow)) == {"all_gather": 2}
    plain = scenario_of(model=llama, plan={**OP, "tp": 2})
    sums = [p.name for o in layer_of(plain) for p in o.again if isinstance(p, Flow)]
    assert sums == ["all_reduce"]


# GPipe keeps all 4 microbatches of the two layers of stage 0 at once, then one layer's rest.
def test_memory_holds_what_is_saved_and_one_layer_in_full(scenario_of: Any, llama: Model) -> None:
    plan = {**OP, "pp": 2, "schedule": "GPipe"}
    s = scenario_of(model=llama, plan=plan, run={"num_steps": 1})
    layer = blocks(s.model, shapes(s)).layer
    saved = 32 * 912
    assert sim.simulate(s).activations.peak[0] == 4 * 2 * saved + (layer.kept_bytes - saved)


@pytest.mark.parametrize("detail", ["stage", "layer", "kernel"])
@pytest.mark.parametrize("plan", [OP, SPLIT, {**SPLIT, "tp_overlap": "all"}, {**OP, "pp": 2}])
def test_all_that_is_saved_is_freed(
    scenario_of: Any, llama: Model, plan: dict[str, Any], detail: str
) -> None:
    s = scenario_of(model=llama, plan=plan, run={"detail": detail})
    memory = sim.simulate(s).memory
    ranks = range(s.plan.world_size)
    assert all(memory.of_rank(rank)[1][-1] == pytest.approx(0.0) for rank in ranks)


# A step takes longer than without, by less than with full recomputation.
def test_it_costs_less_than_recomputing_all(scenario_of: Any, llama: Model) -> None:
    took = [
        sim.simulate(scenario_of(model=llama, plan={"recompute": how})).step_time_s
        for how in ("none", "selective-op", "full")
    ]
    assert took == sorted(took)
    assert len(set(took)) == 3


def test_only_the_first_layers_recompute_where_their_number_is_given(
    scenario_of: Any, llama: Model
) -> None:
    s = scenario_of(model=llama, plan={**OP, "recompute_layers": 1})
    assert recomputed_flops_per_token(s) == 2 * 64 * (32 + 64 + 160)
    layer = blocks(s.model, shapes(s)).layer
    names = {c.name for c in lower(s).costs}
    assert {"layer F", "layer recompute", "layer B"} <= names
    assert layer.kept_bytes > 32 * 912


def test_unfused_attention_has_no_result_to_save(scenario_of: Any) -> None:
    with pytest.raises(DescriptionError, match="saves the result of fused attention"):
        scenario_of(plan=OP, run={"attention": "unfused"})
