"""What is reserved beyond what is allocated, and whether that decides what fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import simulator as sim
from simulator.describe.cluster import Cluster
from simulator.describe.model import Model
from simulator.describe.scenario import Scenario
from simulator.hardware.allocator import MIB
from simulator.hardware.gather_pool import gather_pool_bytes, reserved_by
from simulator.hardware.outside import outside
from simulator.lower.gathers import Gathers, gathers, shortened
from simulator.lower.stage_buffers import stage_buffer_bytes
from simulator.report.memory_text import memory_text

ScenarioOf = Callable[..., Scenario]
TITAN = {"layer_code": "torchtitan", "gradient_dtype": "fp32"}


@pytest.fixture
def large(llama: Model) -> Model:
    """Return a model whose layers take more than a page of the allocator."""
    return replace(llama, vocab_size=8192, hidden_size=1024, intermediate_size=8192, head_dim=256)


# Embedding and head of the root (128 x 64 each, and a norm) are gathered first, then the layers.
def test_what_the_root_holds_is_gathered_first(scenario_of: ScenarioOf, llama: Model) -> None:
    plan = {"dp": 2, "zero": 3, "root_holds_ends": True}
    ((stage,),) = gathers(scenario_of(model=llama, plan=plan))
    assert stage.forward[0] == 2 * (2 * 128 * 64 + 64)
    assert stage.forward[1:] == (stage.forward[1],) * 4
    assert stage.backward == stage.forward[1:]


def test_without_a_root_embedding_and_head_are_gathered_in_turn(
    scenario_of: ScenarioOf, llama: Model
) -> None:
    ((stage,),) = gathers(scenario_of(model=llama, plan={"dp": 2, "zero": 3}))
    assert stage.forward[0] == 2 * 128 * 64
    assert stage.forward[-1] == 2 * (128 * 64 + 64)


def test_no_plan_without_stage_3_gathers_ahead(scenario_of: ScenarioOf, llama: Model) -> None:
    for plan in ({}, {"dp": 2, "zero": 1}, {"dp": 2, "zero": 2}):
        assert gather_pool_bytes(scenario_of(model=llama, plan=plan)) == [0.0]


# Layers of one size: forward gathers two at a time, 80 + 80, and casts half of the second one; in a
# pool that grows by 20 MiB. A third layer takes the first one's place.
def test_two_buffers_and_a_cast_shard_are_alive_in_forward() -> None:
    layers = Gathers((80 * MIB,) * 4, (80 * MIB,) * 4)
    assert reserved_by(layers, 2, expandable=True) == (40 + 80 + 80) * MIB
    alone = Gathers((80 * MIB,), (80 * MIB,))
    assert reserved_by(alone, 2, expandable=True) == (40 + 80) * MIB


@pytest.mark.parametrize("expandable", [True, False])
def test_more_layers_of_a_size_reserve_no_more(expandable: bool) -> None:
    sizes = (70 * MIB, *[110 * MIB] * 30, 40 * MIB)
    every = Gathers(sizes, sizes[::-1])
    few = Gathers(*map(shortened, every))
    assert len(few.forward) == 6
    assert reserved_by(few, 8, expandable) == reserved_by(every, 8, expandable)


def test_what_is_reserved_is_allocated_and_the_pools(scenario_of: ScenarioOf, large: Model) -> None:
    s = scenario_of(model=large, plan={"dp": 2, "zero": 3}, run=TITAN)
    result = sim.simulate(s)
    pool = gather_pool_bytes(s)[0]
    assert pool > 2 * 2 * 4 * 8192 * 1024  # two layers
    assert result.reserve.gathers.tolist() == [pool, pool]
    assert (result.reserved_memory_bytes - result.peak_memory_bytes).tolist() == [pool, pool]


# 32 tokens x 8192 logits of two bytes.
@pytest.mark.parametrize("detail", ["stage", "layer", "kernel"])
def test_an_eager_loss_leaves_a_hole(scenario_of: ScenarioOf, llama: Model, detail: str) -> None:
    run = {"precision": "bf16", "detail": detail, "num_steps": 1}
    model = replace(llama, vocab_size=8192)
    eager = sim.simulate(scenario_of(model=model, run=run | {"loss_in_place": False}))
    assert eager.reserve.holes[0] == 2 * 32 * 8192
    assert sim.simulate(scenario_of(model=model, run=run)).reserve.holes[0] == 0


# A message is 32 tokens x 64 x 2 bytes, logits are 32 x 128 x 2; 4 microbatches. 1F1B has 2 of them
# in flight on the first of two stages and 1 on the last, whose inputs are activations.
def test_stages_of_torchs_pipelines_receive_every_microbatch_in_its_own_buffer(
    scenario_of: ScenarioOf, llama: Model
) -> None:
    plan = {"dp": 2, "pp": 2, "zero": 3, "no_sync": True, "reshard_after_forward": False}
    message, logits = 32 * 64 * 2, 32 * 128 * 2
    s = scenario_of(model=llama, plan=plan, run=TITAN)
    assert stage_buffer_bytes(s) == (2 * 4 * message, (4 - 1) * message + 4 * logits)
    assert stage_buffer_bytes(scenario_of(model=llama, plan=plan)) == (0.0, 0.0)


# With tp 2 half of 128 x 64 weights are a rank's own; the sum of their gradients in fp32 is whole.
def test_the_gradient_of_a_divided_embedding_is_whole_until_it_is_reduced(
    scenario_of: ScenarioOf, llama: Model
) -> None:
    plan = {
        "dp": 2, "pp": 2, "tp": 2, "zero": 3, "no_sync": True, "reshard_after_forward": False,
        "sequence_parallel": True,
    }  # fmt: skip

    def unreduced(run: dict[str, str]) -> float:
        result = sim.simulate(scenario_of(model=llama, plan=plan, run=run))
        return float(result.memory.only("unreduced").peak[0])

    own = 128 * 64 / 2
    assert unreduced(TITAN) - unreduced({"gradient_dtype": "fp32"}) == 4 * own


# A device with room for what is allocated and not for what would be reserved: the plan fits.
def test_what_is_reserved_is_given_back_before_a_plan_fails(
    scenario_of: ScenarioOf, large: Model, cluster_of: Callable[..., Cluster]
) -> None:
    plan = {"dp": 2, "zero": 3}
    s = scenario_of(model=large, plan=plan, run=TITAN)
    result = sim.simulate(s)
    least = float(result.device_memory_bytes[0])
    assert least == result.peak_memory_bytes[0] + outside(s)[0]
    assert "cached memory" not in memory_text(result, s)
    small = cluster_of(devices=2, device={"memory": least + MIB})
    s = scenario_of(model=large, plan=plan, run=TITAN, cluster=small)
    result = sim.simulate(s)
    assert result.summary.fits
    assert "the allocator gives cached memory back and tries again" in memory_text(result, s)
    assert "gathering" in memory_text(result, s)
    less = cluster_of(devices=2, device={"memory": least - MIB})
    over = scenario_of(model=large, plan=plan, run=TITAN, cluster=less)
    assert not sim.simulate(over).summary.fits
