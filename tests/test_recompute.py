"""What backward computes again, what lies along the sequence, and what runs beside products."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import simulator as sim
from simulator.describe.model import Model
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.hardware import price
from simulator.lower import lower
from simulator.lower.layers import Shapes, blocks, recomputed_flops_per_token, shapes
from simulator.lower.memory import static_memory
from simulator.lower.operators import Elements
from simulator.program import Flow, Kernel

ScenarioOf = Callable[..., Scenario]
HALF = Elements(2, 2, 2, "bf16")


def flows_of(s: Scenario, rank: int = 0) -> Counter[tuple[str, float]]:
    """Return the tensor-parallel flows of one rank by name and bytes."""
    p = lower(s).flat
    mine = (p.rank == rank) & (p.stream == p.streams.index("tp"))
    costs = [p.costs[c] for c in p.cost[mine].tolist()]
    return Counter((c.name, c.bytes) for c in costs if isinstance(c, Flow))


# Korthikanti et al., 2022, equation 4: sequence parallelism divides all of a layer,
# sbh/t (34 + 5as/h). Their 22B: h=6144, a=64, s=2048, b=4.
@pytest.mark.parametrize("t", [2, 4, 8])
def test_sequence_parallelism_divides_all_that_a_layer_keeps(gpt: Model, t: int) -> None:
    h, a, s, b = 6144, 64, 2048, 4
    model = replace(
        gpt, hidden_size=h, intermediate_size=4 * h, num_attention_heads=a,
        num_key_value_heads=a, head_dim=h // a,
    )  # fmt: skip
    x = Shapes(
        microbatch_size=b, sequence_length=s, tp=t, elements=HALF, attention="unfused",
        sequence_parallel=True,
    )  # fmt: skip
    assert blocks(model, x).layer.kept_bytes == (34 * s * b * h + 5 * a * s * s * b) // t


# Their table 2: selective recomputation leaves 34sbh/t with sequence parallelism and
# sbh (10 + 24/t) without. GPipe keeps all 4 microbatches of the two layers of stage 0; a core that
# comes alive in backward, 5as^2b/t = 10,240 bytes, is less than what the MLP after it has freed.
@pytest.mark.parametrize(("sequence", "kept"), [(True, 34 / 2), (False, 10 + 24 / 2)])
def test_selective_recomputation_keeps_no_scores(
    scenario_of: ScenarioOf, sequence: bool, kept: float
) -> None:
    plan = {"pp": 2, "tp": 2, "recompute": "selective", "schedule": "GPipe"}
    s = scenario_of(plan={**plan, "sequence_parallel": sequence}, run={"attention": "unfused"})
    sbh = 32 * 64
    embedding = sbh / (2 if sequence else 1)
    assert sim.simulate(s).activations.peak[0] == 4 * (embedding + 2 * kept * sbh)


# Backward repeats the two products of the core, 4asd a token: 4 * 4 heads * 32 * 16, of 4 layers.
def test_selective_recomputation_repeats_the_products_of_the_core(scenario_of: ScenarioOf) -> None:
    s = scenario_of(plan={"recompute": "selective"}, run={"attention": "unfused"})
    assert recomputed_flops_per_token(s) == 4 * (4 * 4 * 32 * 16)


@pytest.mark.parametrize("detail", ["stage", "layer", "kernel"])
@pytest.mark.parametrize("attention", ["flash", "unfused"])
def test_selective_recomputation_frees_what_it_keeps(
    scenario_of: ScenarioOf, detail: str, attention: str
) -> None:
    s = scenario_of(
        plan={"pp": 2, "recompute": "selective"}, run={"detail": detail, "attention": attention}
    )
    result = sim.simulate(s)
    assert all(result.memory.of_rank(rank)[1][-1] == pytest.approx(0.0) for rank in range(2))


# Two of stage 0's four layers recompute in full and keep 2sbh, the others what they always keep.
def test_only_the_first_layers_recompute_where_their_number_is_given(
    scenario_of: ScenarioOf,
) -> None:
    s = scenario_of(plan={"recompute": "full", "recompute_layers": 2}, run={"num_steps": 1})
    layer, x = blocks(s.model, shapes(s)).layer, 2 * 32 * 64
    again = sim.simulate(s).activations.of_rank(0)[1].max()
    parts = blocks(s.model, shapes(s))
    ends = parts.embedding.kept_bytes + parts.head.kept_bytes
    assert again == ends + 2 * layer.kept_bytes + 2 * x
    assert recomputed_flops_per_token(s) == 2 * layer.model_flops / 32


# Megatron-LM with sequence parallelism: a layer gathers twice forward and reduce-scatters twice;
# backward gathers the two outputs' gradients and the two inputs again, reduce-scatters twice. The
# embedding is reduce-scattered (and its gradient gathered); the head's input gathered, again in
# backward, its gradient reduce-scattered. 4 layers, 4 microbatches, 2 bytes * 32 * 64. Gradients of
# nine norms, a weight and a bias of 64 each, are summed once a step.
def test_sequence_parallelism_gathers_and_scatters_in_place_of_all_reduces(
    scenario_of: ScenarioOf,
) -> None:
    s = scenario_of(plan={"tp": 2, "sequence_parallel": True}, run={"num_steps": 1})
    size = 2.0 * 32 * 64
    assert flows_of(s) == {
        ("all_gather", size): 4 * (4 * (2 + 2 + 2) + 1 + 2),
        ("reduce_scatter", size): 4 * (4 * (2 + 2) + 1 + 1),
        ("all_reduce", 4.0 * 32): 4 * 3,
        ("all_reduce", 2.0 * (2 * 4 + 1) * 2 * 64): 1,
    }


# Each rank sends its part of the sequence on to the next stage.
def test_sequence_parallel_stages_send_their_part(scenario_of: ScenarioOf) -> None:
    s = scenario_of(plan={"tp": 2, "pp": 2, "sequence_parallel": True})
    sends = {c.bytes for c in lower(s).costs if isinstance(c, Flow) and c.name == "send_recv"}
    assert sends == {2 * 32 * 64 / 2}


def durations(s: Scenario) -> dict[str, float]:
    """Return the ticks of each cost, by name; the collectives of activations all take the same."""
    p = lower(s)
    ticks = price(p, s.cluster).reshape(len(p.rank), -1)[:, 0]
    return {p.costs[c].name: int(t) for c, t in zip(p.cost.tolist(), ticks.tolist(), strict=True)}


# One layer and head, one microbatch, one step. In turn a column-parallel product's backward takes
# gather + dgrad + wgrad + scatter (all-reduce without sequence parallelism), wgrad with the sum of
# the bias's gradient; beside one another max(gather, dgrad) + max(scatter, wgrad). The three are
# qkv, fc1 and the head, which has no bias.
@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("detail", ["stage", "layer", "kernel"])
def test_backwards_collectives_run_beside_the_products_that_do_not_need_them(
    scenario_of: ScenarioOf, gpt: Model, sequence: bool, detail: str
) -> None:
    model = replace(gpt, num_hidden_layers=1)

    def scenario(overlap: str, detail: str) -> Scenario:
        plan: dict[str, Any] = {"tp": 2, "sequence_parallel": sequence, "tp_overlap": overlap}
        run = {"num_steps": 1, "detail": detail}
        return scenario_of(model=model, plan=plan, run=run, batch=1)

    took = durations(scenario("none", "kernel"))
    gather = took["all_gather"] if sequence else 0
    scatter = took["reduce_scatter"] if sequence else took["all_reduce"]
    if not sequence:  # named as the loss's smaller ones: take the largest
        p = lower(scenario("none", "kernel"))
        ticks = price(p, scenario("none", "kernel").cluster)
        scatter = int(ticks.reshape(len(p.rank), -1)[p.joint >= 0, 0].max())
    saved = 0
    for product in ("qkv", "fc1", "head"):
        dgrad, wgrad = took[f"{product} dgrad"], took[f"{product} wgrad"]
        wgrad += took.get(f"{product} bias grad", 0)
        beside = max(gather, dgrad) + max(scatter, wgrad)
        saved += gather + dgrad + wgrad + scatter - beside
    before = sim.simulate(scenario("none", detail)).timeline.makespan
    after = sim.simulate(scenario("grads", detail)).timeline.makespan
    assert saved > 0
    assert before - after == pytest.approx(saved, abs=10)  # joined work is rounded once


# 4 bytes of gradient a parameter in place of 2, and as many in the buckets.
def test_gradients_in_fp32_take_four_bytes(scenario_of: ScenarioOf) -> None:
    s = scenario_of(plan={"dp": 2}, run={"gradient_dtype": "fp32", "num_steps": 1})
    stage = static_memory(s)[0]
    assert stage.gradients == 4 * stage.params
    p = lower(s)
    reduced = sum(
        p.costs[c].bytes
        for c in p.cost[p.stream == p.streams.index("dp")].tolist()  # type: ignore[union-attr]
    )
    assert reduced == 4 * stage.params


# A kernel of its own reads the new gradient (2 bytes) and reads and writes the sum (4 each): 10 a
# weight. Fused, the product reads and writes the sum: 8 for what would be 2. Alone there is no sum.
@pytest.mark.parametrize(
    ("batch", "run", "written", "added"),
    [(4, {}, 2, 10), (4, {"fused_accumulation": True}, 8, 0), (1, {}, 4, 0)],
)
def test_gradients_of_microbatches_are_added_by_a_kernel_or_by_the_product(
    scenario_of: ScenarioOf, batch: int, run: dict[str, Any], written: int, added: int
) -> None:
    s = scenario_of(run={"gradient_dtype": "fp32", **run}, batch=batch)
    fc1 = next(o for o in blocks(s.model, shapes(s)).layer.operators if o.name == "fc1")
    weights, tokens = 64 * 256, 32
    moved = {k.name: k.bytes for k in fc1.weight_grad if isinstance(k, Kernel)}
    assert moved["fc1 wgrad"] == 2 * tokens * (64 + 256) + written * weights
    assert moved.get("fc1 accumulation", 0) == added * weights


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"sequence_parallel": True}, "no effect with tp 1"),
        ({"tp_overlap": "grads"}, "no effect with tp 1"),
        ({"recompute_layers": 2}, "no effect with recompute 'none'"),
        ({"recompute_modules": ("moe_act",)}, "are parts of recompute 'light', not of 'none'"),
    ],
)
def test_options_without_effect_are_refused(
    scenario_of: ScenarioOf, plan: dict[str, Any], words: str
) -> None:
    with pytest.raises(DescriptionError, match=words):
        scenario_of(plan=plan)
