"""Context parallelism: who attends to what, what goes round, what it costs and what it spares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_scenario_parity import alike_however_it_runs

import simulator as sim
from simulator.describe.loader import load
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.hardware.network import GroupShape, flow_seconds
from simulator.hardware.patterns import PATTERNS, layout
from simulator.lower import lower
from simulator.lower.context import pairs
from simulator.lower.layers import Shapes, blocks, model_flops_per_token, shapes
from simulator.lower.memory import static_memory
from simulator.lower.operators import Along, Beside, Operator
from simulator.lower.trainable import recomputed_flops_per_token
from simulator.program import Flow, Kernel
from simulator.report.context import context_assumptions
from simulator.units import to_seconds

ScenarioOf = Callable[..., Scenario]

STYLES = ("ring", "all_to_all", "all_gather")


def attention(x: Shapes, model: Any) -> list[Operator]:
    """Return the operators of the attention core of a layer."""
    return [o for o in blocks(model, x).layer.operators if o.core_input_bytes is not None]


def flows(operators: list[Operator], part: str) -> list[tuple[str, float, int]]:
    """Return name, bytes and count of the collectives along cp of operators."""
    found = [p.flow for o in operators for p in getattr(o, part) if isinstance(p, (Along, Beside))]
    return [(flow.name, flow.bytes, flow.count) for flow in found]


def kernels(operators: list[Operator], part: str) -> list[Kernel]:
    """Return the fused kernels of operators."""
    every = (p for o in operators for p in getattr(o, part))
    return [p for p in every if isinstance(p, Kernel) and p.algorithm]


def flops(operators: list[Operator], part: str) -> float:
    return sum(k.flops * k.count for k in kernels(operators, part))


# --- who attends to what ----------------------------------------------------------------------


def test_zigzag_gives_every_rank_the_same_causal_work_in_every_step() -> None:
    # 4 ranks of 8 tokens: 32 x 32 / 2 = 512 pairs, 128 a rank, 32 = 8 x 8 / 2 a step
    assert (pairs(4, 8, causal=True, zigzag=True) == 32).all()


def test_contiguous_tokens_give_rank_r_of_cp_2r_plus_1_parts_of_cp_squared() -> None:
    work = pairs(4, 8, causal=True, zigzag=False)
    assert (work.sum(axis=1) / 512).tolist() == [1 / 16, 3 / 16, 5 / 16, 7 / 16]


def test_zigzag_counts_are_those_of_the_mask() -> None:
    # by enumeration: chunks r and 7 - r of 3 tokens each; a query's own chunk counts half (a
    # triangle without its diagonal's other half), as s^2 / 2 does
    ranks, chunk = 4, 3
    tokens = [
        np.r_[r * chunk : (r + 1) * chunk, (7 - r) * chunk : (8 - r) * chunk] for r in range(ranks)
    ]
    for step in range(1, ranks):
        for rank in range(ranks):
            queries, keys = tokens[rank], tokens[(rank - step) % ranks]
            seen = int((keys[None, :] < queries[:, None]).sum())
            assert seen == pairs(ranks, 2 * chunk, causal=True, zigzag=True)[rank, step] == 18


def test_contiguous_counts_are_those_of_the_mask() -> None:
    ranks, length = 4, 6
    for step in range(1, ranks):
        for rank in range(ranks):
            queries = np.arange(length) + rank * length
            keys = np.arange(length) + (rank - step) % ranks * length
            seen = int((keys[None, :] < queries[:, None]).sum())
            assert seen == pairs(ranks, length, causal=True, zigzag=False)[rank, step]


def test_without_a_mask_all_ranks_meet_all_keys() -> None:
    assert pairs(2, 8, causal=False, zigzag=True).tolist() == [[64, 64], [64, 64]]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("part", ["forward", "input_grad"])
def test_flops_of_all_ranks_are_those_of_one_that_has_the_sequence_whole(
    scenario_of: ScenarioOf, gpt: Any, style: str, part: str
) -> None:
    alone = attention(shapes(scenario_of()), gpt)
    plan = {"cp": 4, "cp_style": style}
    divided = attention(shapes(scenario_of(plan=plan)), gpt)
    assert 4 * flops(divided, part) == flops(alone, part) > 0


# 2 cp - 1 of cp parts of the mean: 7 / 4 for 4 ranks.
@pytest.mark.parametrize("style", ["ring", "all_gather"])
def test_contiguous_tokens_take_as_long_as_the_last_rank(
    scenario_of: ScenarioOf, gpt: Any, style: str
) -> None:
    plan = {"cp": 4, "cp_style": style}
    even = attention(shapes(scenario_of(plan=plan)), gpt)
    uneven = attention(shapes(scenario_of(plan={**plan, "cp_balance": "contiguous"})), gpt)
    for part in ("forward", "input_grad"):
        assert flops(uneven, part) == flops(even, part) * 7 / 4


def test_a_zigzag_step_has_half_of_the_queries_meet_all_keys(
    scenario_of: ScenarioOf, gpt: Any
) -> None:
    x = shapes(scenario_of(plan={"cp": 2}))
    assert [k.matmul for k in kernels(attention(x, gpt), "forward")] == [
        (4, 16, 16, 16),  # the rank's own 16 tokens under the mask
        (4, 8, 16, 16),
    ]


# --- what goes round --------------------------------------------------------------------------

# llama-3-8b, 8192 tokens over cp 4, 8 key-value heads over tp 2: 2048 tokens x 4 heads x 128 x
# 2 bytes, K and V: 4 194 304 bytes.
KV = 4_194_304


def llama(**plan: Any) -> Scenario:
    changes = {f"plan.{key}": value for key, value in plan.items()}
    world = plan.get("cp", 1) * plan.get("tp", 1)
    return load("llama-3-8b-3d", {
        "plan.dp": 1, "plan.pp": 1, "plan.tp": 2, "cluster.num_nodes": 1,
        "cluster.devices_per_node": world, "run.global_batch_size": 1, **changes,
    })  # fmt: skip


def test_a_ring_passes_k_and_v_on_once_less_than_there_are_ranks() -> None:
    s = llama(cp=4, tp=2)
    assert flows(attention(shapes(s), s.model), "forward") == [("shift", KV, 1)] * 3


def test_a_ring_s_backward_passes_k_and_v_on_and_their_gradients_a_step_behind() -> None:
    s = llama(cp=4, tp=2)
    assert flows(attention(shapes(s), s.model), "input_grad") == [
        ("shift", KV, 1), ("shift", 2 * KV, 1), ("shift", 2 * KV, 1), ("shift", KV, 1),
    ]  # fmt: skip


def test_recomputation_runs_the_ring_again() -> None:
    s = llama(cp=4, tp=2, recompute="full")
    program = lower(s)
    shifts = [
        c.count
        for c in (program.costs[i] for i in program.cost)
        if isinstance(c, Flow) and c.name == "shift"
    ]
    assert sum(shifts) == s.run.num_steps * 32 * (3 + 3 + 4)


def test_all_to_all_swaps_queries_keys_and_values_and_the_result() -> None:
    s = llama(cp=4, tp=2, cp_style="all_to_all")
    # queries: 2048 tokens x 16 heads x 128 x 2 bytes = 8 388 608
    assert flows(attention(shapes(s), s.model), "forward") == [
        ("all_to_all", 2 * KV, 1), ("all_to_all", KV / 2, 2), ("all_to_all", 2 * KV, 1),
    ]  # fmt: skip


def test_all_to_all_swaps_result_and_gradient_in_backward_and_three_gradients_back() -> None:
    s = llama(cp=4, tp=2, cp_style="all_to_all")
    assert flows(attention(shapes(s), s.model), "input_grad") == [
        ("all_to_all", 2 * KV, 2), ("all_to_all", 2 * KV, 1), ("all_to_all", KV / 2, 2),
    ]  # fmt: skip


def test_all_gather_gathers_k_and_v_twice_and_scatters_their_gradients() -> None:
    s = llama(cp=4, tp=2, cp_style="all_gather")
    core = attention(shapes(s), s.model)
    assert flows(core, "forward") == [("all_gather", 4 * KV, 1)]
    assert flows(core, "input_grad") == [("all_gather", 4 * KV, 1), ("reduce_scatter", 4 * KV, 1)]


def test_messages_between_stages_are_divided(scenario_of: ScenarioOf) -> None:
    # 32 tokens x 64 x 2 bytes, over cp 2
    for cp, size in ((1, 4096), (2, 2048)):
        program = lower(scenario_of(plan={"cp": cp, "pp": 2}))
        sent = {c.bytes for c in program.costs if c.name == "send_recv"}
        assert sent == {size}


# --- the flow ---------------------------------------------------------------------------------


def test_a_shift_within_a_node_takes_one_message(cluster_of: Any) -> None:
    # 1 us + 1e8 / 1e11 s
    seconds = flow_seconds(Flow("shift", 1e8), GroupShape(4, 1, 4), cluster_of())
    assert seconds == pytest.approx(1e-6 + 1e-3)


def test_a_shift_over_nodes_takes_its_slowest_message(cluster_of: Any) -> None:
    # 8 adapters of 1e10 bytes/s for 8 ranks: 10 us + 1e8 / 1e10 s
    seconds = flow_seconds(Flow("shift", 1e8), GroupShape(4, 2, 2), cluster_of(num_nodes=2))
    assert seconds == pytest.approx(1e-5 + 1e-2)


def test_a_shift_of_one_rank_moves_nothing(cluster_of: Any) -> None:
    assert flow_seconds(Flow("shift", 1e8), GroupShape(1, 1, 1), cluster_of()) == 0


def test_a_shift_loads_one_route_a_rank() -> None:
    messages = PATTERNS["SHIFT"](layout(np.array([0, 2, 4]), 8), 0.0)
    assert list(zip(*messages, strict=True)) == [(0, 2, 1.0), (2, 4, 1.0), (4, 0, 1.0)]


@pytest.mark.parametrize("style", STYLES)
def test_fluid_and_alpha_beta_agree_where_nothing_contends(style: str) -> None:
    alone, shared = (
        sim.simulate(replace(s, run=replace(s.run, network=network)))
        for s in [llama(cp=4, tp=1, cp_style=style, grad_overlap=False)]
        for network in ("alpha-beta", "fluid")
    )
    assert shared.step_time_s == pytest.approx(alone.step_time_s, rel=1e-9)


@pytest.mark.parametrize("style", STYLES)
def test_engines_agree_where_flows_along_cp_share_links(
    scenario_of: ScenarioOf, cluster_of: Any, style: str
) -> None:
    s = scenario_of(
        plan={"dp": 2, "cp": 4, "cp_style": style}, run={"network": "fluid"},
        cluster=cluster_of(num_nodes=2, devices=4),
    )  # fmt: skip
    times = {engine: sim.simulate(s, engine=engine).times for engine in ("compiled", "reference")}
    assert times["compiled"] == times["reference"]


# Four ranks on two nodes, two on each: rank 1 sends to rank 2 and rank 3 to rank 0 over an adapter.
def test_a_ring_over_two_nodes_crosses_twice(cluster_of: Any) -> None:
    messages = PATTERNS["SHIFT"](layout(np.arange(4), 2), 0.0)
    crossing = messages.source // 2 != messages.target // 2
    assert messages.source[crossing].tolist() == [1, 3]


# --- time -------------------------------------------------------------------------------------


def free_of_all_but_products(scenario_of: ScenarioOf, cluster_of: Any, **plan: Any) -> Any:
    """Run a tiny GPT where only matrix products take time: 8.192e9 a second."""
    cp = plan.get("cp", 1)
    cluster = cluster_of(
        devices=cp,
        device={
            "peak": {"fp32": 1e30, "bf16": 8.192e9}, "memory_bandwidth": 1e30,
            "launch_overhead": 0.0,
        },
        link={"pair_bandwidth": 4.096e8, "latency": 0.0},
    )  # fmt: skip
    return sim.simulate(scenario_of(plan=plan, cluster=cluster))


@pytest.mark.parametrize("cp", [2, 4])
def test_work_is_divided_by_cp_where_efficiency_is_the_same(
    scenario_of: ScenarioOf, cluster_of: Any, cp: int
) -> None:
    alone = free_of_all_but_products(scenario_of, cluster_of)
    divided = free_of_all_but_products(scenario_of, cluster_of, cp=cp)
    whole, part = (r.breakdown.of("forward", "backward")[0] for r in (alone, divided))
    assert part == pytest.approx(whole / cp, rel=1e-9)


# cp 2, 16 tokens a rank, 4 heads of 16: a step is 2 x 4 x 16 x 128 x 2 = 32 768 FLOPs forward,
# 4 us, and 10 us backward; K and V are 2 x 16 x 64 x 2 = 4096 bytes, 10 us. Forward waits
# 10 - 4 us for its only transfer; backward's two last as long as its two steps.
def test_a_ring_step_takes_the_longer_of_attention_and_transfer(
    scenario_of: ScenarioOf, cluster_of: Any
) -> None:
    result = free_of_all_but_products(scenario_of, cluster_of, cp=2)
    layers, microbatches = 4, 4
    waited = to_seconds(int(result.breakdown.of("cp")[0]))
    assert waited == pytest.approx(layers * microbatches * 6e-6)


# cp 4, 8 tokens a rank: a step is 1 us forward and 2.5 us backward, K and V 2048 bytes, 5 us.
# Forward: 3 x (5 - 1); backward: 5 + 10 + 10 + 5 - 4 x 2.5.
def test_a_ring_that_is_slower_than_attention_shows_all_but_the_attention_beside_it(
    scenario_of: ScenarioOf, cluster_of: Any
) -> None:
    result = free_of_all_but_products(scenario_of, cluster_of, cp=4)
    waited = to_seconds(int(result.breakdown.of("cp")[0]))
    assert waited == pytest.approx(4 * 4 * (12e-6 + 20e-6))


@pytest.mark.parametrize("style", STYLES)
def test_detail_moves_no_time(scenario_of: ScenarioOf, style: str) -> None:
    plan = {"cp": 4, "tp": 1, "cp_style": style, "recompute": "full"}
    steps = [
        sim.simulate(scenario_of(plan=plan, run={"detail": detail})).step_time_s
        for detail in ("stage", "layer", "kernel")
    ]
    assert steps == pytest.approx([steps[0]] * 3, rel=1e-6)


def test_cp_of_one_changes_nothing() -> None:
    plain = load("llama-3-8b-3d")
    assert lower(replace(plain, plan=replace(plain.plan, cp=1))) == lower(plain)


@pytest.mark.parametrize(
    ("plan", "run"),
    [
        ({"cp": 2, "tp": 2, "sequence_parallel": True, "tp_overlap": "all"}, {}),
        ({"cp": 2, "tp": 2, "tp_overlap": "grads", "cp_style": "all_gather"}, {}),
        ({"cp": 2, "pp": 2, "recompute": "selective"}, {}),
        ({"cp": 2, "pp": 2, "tp": 2, "p2p_overlap": False, "scatter_gather": True}, {}),
        ({"cp": 4, "dp": 2, "zero": 1}, {}),
        ({"cp": 2, "dp": 2, "zero": 2, "cp_style": "all_to_all"}, {}),
        ({"cp": 2, "dp": 2, "zero": 3, "recompute": "full"}, {"detail": "kernel"}),
        ({"cp": 2, "dp": 2, "zero": 3, "dp_shard": 1, "cp_style": "all_gather"}, {}),
        ({"cp": 2, "pp": 2, "chunks": 2, "schedule": "Interleaved1F1B"}, {"clip_grad": True}),
        ({"cp": 2, "pp": 2, "schedule": "ZB-H1", "cp_style": "all_to_all"}, {}),
        ({"cp": 4, "pp": 2, "chunks": 2, "schedule": "ZBVZeroBubble"}, {}),
        ({"cp": 2, "pp": 2, "chunks": 2, "schedule": "DualPipeV"}, {}),
        ({"cp": 4, "grad_overlap": False}, {"compiled": True}),
        ({"cp": 2, "dp": 2, "gradient_exchange": "parameter_server"}, {}),
        ({"cp": 2}, {"lora_rank": 4}),
        ({"cp": 2}, {"frozen_layers": 2}),
    ],
)
def test_engines_agree_whatever_it_is_combined_with(
    scenario_of: ScenarioOf, plan: dict[str, Any], run: dict[str, Any]
) -> None:
    alike_however_it_runs(scenario_of(plan=plan, run=run))


def test_engines_agree_with_activations_on_the_host() -> None:
    changes = {"plan.cp": 2, "plan.dp": 1, "cluster.devices_per_node": 2,
               "run.global_batch_size": 2, "plan.microbatch_size": 1,
               "plan.offload_activations": True}  # fmt: skip
    alike_however_it_runs(load("bert-large-ddp", changes))


def test_engines_agree_in_fp8(scenario_of: ScenarioOf, cluster_of: Any, llama: Any) -> None:
    device = {"peak": {"fp32": 1e13, "bf16": 1e14, "fp8": 2e14}}
    cluster = cluster_of(devices=2, device=device)
    alike_however_it_runs(
        scenario_of(model=llama, plan={"cp": 2}, run={"precision": "fp8"}, cluster=cluster)
    )


def test_ranks_along_cp_that_run_alike_are_folded(scenario_of: ScenarioOf) -> None:
    folding = alike_however_it_runs(scenario_of(plan={"dp": 2, "cp": 2, "tp": 2}))
    assert "cp 2 -> 1" in folding.reason


# --- memory and counts ------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
def test_kept_activations_are_divided_by_cp(style: str) -> None:
    alone, divided = llama(cp=1, tp=1), llama(cp=4, tp=1, cp_style=style)
    kept = [blocks(s.model, shapes(s)).layer.kept_bytes for s in (alone, divided)]
    assert kept[0] == 4 * kept[1]


def test_a_ring_holds_k_v_and_the_result_of_every_step_until_they_are_merged() -> None:
    s = llama(cp=4, tp=2)
    end = attention(shapes(s), s.model)[-1]
    # K, V 4 MiB and a result of 8 MiB a step, a fp32 number a query and head (2048 x 16), and the
    # merged result
    assert end.forward_bytes == 4 * (KV + 2 * KV + 4 * 2048 * 16) + 2 * KV


def test_states_are_sharded_over_cp_too() -> None:
    plain, sharded = (static_memory(llama(cp=4, tp=1, zero=zero))[0] for zero in (0, 1))
    assert sharded.optimizer == plain.optimizer / 4


def test_cp_multiplies_no_samples(scenario_of: ScenarioOf) -> None:
    s = scenario_of(plan={"dp": 2, "cp": 2}, batch=8)
    assert s.num_microbatches == 4
    assert s.tokens_per_step == 8 * 32


def test_model_flops_of_a_token_do_not_depend_on_cp() -> None:
    alone, divided = (llama(cp=cp, tp=1, recompute="full") for cp in (1, 4))
    assert model_flops_per_token(alone) == model_flops_per_token(divided)
    assert recomputed_flops_per_token(alone) == pytest.approx(recomputed_flops_per_token(divided))


# --- what is said -----------------------------------------------------------------------------


def test_the_balance_is_among_the_assumptions(scenario_of: ScenarioOf) -> None:
    even = " ".join(context_assumptions(scenario_of(plan={"cp": 2})))
    plan = {"cp": 2, "cp_balance": "contiguous"}
    uneven = " ".join(context_assumptions(scenario_of(plan=plan)))
    assert "16 tokens" in even
    assert "same causal work" in even
    assert "1.5 times the mean" in uneven


@pytest.mark.parametrize(
    ("plan", "run", "sentence"),
    [
        ({"cp_style": "all_to_all"}, {}, "Plan.cp_style: 'all_to_all' has no effect with cp 1"),
        ({"cp_balance": "contiguous"}, {}, "'contiguous' has no effect with cp 1"),
        ({"cp": 3}, {}, r"32 is not a multiple of 2 x plan.cp \(zig-zag chunks\) = 6; 30 would"),
        ({"cp": 3, "cp_balance": "contiguous"}, {}, "multiple of plan.cp = 3; 30 would be"),
        ({"cp": 2}, {"attention": "unfused"}, "plan.cp 2 is for fused attention"),
        ({"cp": 2, "recompute": "selective-op"}, {}, 'set plan.recompute = "selective"'),
        ({"cp": 2, "cp_style": "all_to_all", "cp_balance": "contiguous"}, {}, "heads of whole"),
        ({"cp": 8, "cp_style": "all_to_all"}, {}, "= 8 ranks, but not num_attention_heads 4 and"),
        ({"cp": 8, "tp": 4, "sequence_parallel": True, "cp_balance": "contiguous"}, {}, None),
        ({"cp": 16, "tp": 4, "sequence_parallel": True}, {}, r"32 / plan.cp 16 = 2"),
    ],
)
def test_what_is_not_divided_is_refused(
    scenario_of: ScenarioOf, plan: dict[str, Any], run: dict[str, Any], sentence: str | None
) -> None:
    if sentence is None:
        scenario_of(plan=plan, run=run)
        return
    with pytest.raises(DescriptionError, match=sentence):
        scenario_of(plan=plan, run=run)


def test_keys_and_values_are_not_copied_to_more_ranks(scenario_of: ScenarioOf, llama: Any) -> None:
    with pytest.raises(DescriptionError, match="but not num_key_value_heads 2"):
        scenario_of(model=llama, plan={"cp": 4, "cp_style": "all_to_all"})


def test_latent_keys_and_values_are_not_divided() -> None:
    with pytest.raises(DescriptionError, match="deepseek-v3 attends to latent keys and values"):
        load("deepseek-v3-2048gpu", {"plan.cp": 2, "plan.dp": 64})


def test_experts_are_cut_out_of_ranks_that_divide_sequences_too(
    scenario_of: ScenarioOf, llama: Any
) -> None:
    model = replace(llama, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    alike_however_it_runs(scenario_of(model=model, plan={"dp": 2, "cp": 2, "ep": 4}))


def test_images_are_not_divided() -> None:
    with pytest.raises(DescriptionError, match="divides sequences of tokens"):
        load("resnet50-ddp", {"plan.cp": 2})


def test_encoders_need_no_balance() -> None:
    plan = {"plan.cp": 2, "plan.dp": 4}
    assert "causal" not in " ".join(context_assumptions(load("bert-large-ddp", plan)))
    with pytest.raises(DescriptionError, match="attention of bert-large is not causal"):
        load("bert-large-ddp", {**plan, "plan.cp_balance": "contiguous"})
