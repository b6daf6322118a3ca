"""Mixtures of experts: counts, bytes, times and memory by hand arithmetic."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_scenario_parity import alike_however_it_runs

import simulator as sim
from simulator.describe import catalog
from simulator.describe.experts import expert_shares
from simulator.describe.huggingface import read_config
from simulator.describe.model import Model
from simulator.describe.run import Run
from simulator.errors import DescriptionError
from simulator.hardware.compute import work_seconds
from simulator.hardware.network import GroupShape, flow_seconds
from simulator.hardware.placement import spans
from simulator.lower import lower
from simulator.lower.experts import Rows, copies, rows
from simulator.lower.layers import (
    active_parameters,
    blocks,
    model_flops_per_token,
    num_parameters,
)
from simulator.lower.memory import static_memory
from simulator.lower.operators import Along
from simulator.lower.routing import waiting, waits
from simulator.lower.shapes import Routing, shapes
from simulator.program import ACTION_CODE, NONE, Flow, Kernel, Work


def model_of(name: str, **changes: object) -> Model:
    config = json.loads((catalog.root() / f"workloads/models/{name}.json").read_text())
    return replace(Model(name=name, **read_config(config)), **changes)


DEEPSEEK = model_of("deepseek-v3")
TINY = Model(
    name="tiny-experts", hidden_size=64, intermediate_size=160, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=128,
    max_position_embeddings=32, norm="rms_norm", activation="silu", gated_mlp=True,
    position="rotary", attention_bias=False, mlp_bias=False, tie_word_embeddings=False,
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
)  # fmt: skip
EXPERT = 64 * 64 + 32 * 64
"""Parameters of a tiny expert: 64 into 2 x 32, 32 into 64."""
TWICE = (2 / 8, *[(1 - 2 / 8) / 7] * 7)
"""Expert 0 gets twice an even share, the others what is left."""


def named(s, name):
    """Return the operator of a name in the last layer of a scenario."""
    return next(o for o in blocks(s.model, shapes(s)).layers[-1].operators if o.name == name)


# Mixtral: 32 layers of 41,943,040 (attention), 8 x 176,160,768, 32,768 (router), 8,192 (norms);
# 2 x 131,072,000 and a norm of 4,096. Qwen3: 48 of 18,874,368 + 256 + 128 x 4,718,592 + 262,144 +
# 4,096; 2 x 311,164,928; 2,048.
@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("mixtral-8x7b", 46_702_792_704, 12_879_925_248),
        ("qwen3-30b-a3b", 30_532_122_624, 3_353_032_704),
    ],
)
def test_published_models_have_their_published_parameters(name, total, active) -> None:
    model = model_of(name)
    assert (num_parameters(model), active_parameters(model)) == (total, active)


# 61 x 187,121,664 (attention and norms), 3 x 396,361,728 (dense), 58 x 11,320,164,352 (256 + 1
# experts of 44,040,192 and a router), 2 x 926,679,040, 7,168; of 256 experts a token meets 8.
def test_deepseek_v3_has_671_billion_parameters_without_its_further_layer() -> None:
    alone = replace(DEEPSEEK, num_nextn_predict_layers=0)
    assert num_parameters(alone) == 671_026_404_352
    assert active_parameters(alone) == 37_552_282_624


# The further layer: attention and norms, experts, 2 x 7,168^2 down, three more norms; embedding and
# head are the model's.
def test_a_further_layer_adds_its_own_parameters_only() -> None:
    alone = replace(DEEPSEEK, num_nextn_predict_layers=0)
    own = 187_121_664 + 11_320_164_352 + 2 * 7_168**2 + 3 * 7_168
    assert num_parameters(DEEPSEEK) - num_parameters(alone) == own


def experts_of(model: Model) -> tuple[bool, ...]:
    return tuple(kind.has_experts for kind in model.layer_kinds)


def test_the_first_layers_are_dense() -> None:
    assert experts_of(DEEPSEEK) == (False,) * 3 + (True,) * 59
    assert experts_of(replace(TINY, moe_layer_freq=2)) == (True, False, True, False)


# 32 tokens x 2 experts: 64 rows of 64 numbers of 2 bytes on each of 4 ranks; 2 experts of a rank
# get 32 rows each.
def test_balanced_experts_have_an_even_share_of_the_work(scenario_of) -> None:
    s = scenario_of(model=TINY, plan={"dp": 4, "ep": 4})
    there, weights = named(s, "to experts").forward
    assert there == Along(Flow("all_to_all", 64 * 64 * 2.0), "ep")
    assert weights == Along(Flow("all_to_all", 64 * 4.0), "ep")  # in fp32, beside their rows
    (up,) = named(s, "expert fc1").forward
    assert (up.flops, up.matmul) == (2.0 * 64 * 64 * 64, (2, 32, 64, 64))
    assert up.bytes == 2 * (64 * 64 + 2 * 64 * 64 + 64 * 64)  # rows in, weights, rows out
    (down,) = named(s, "expert fc2").forward
    assert (down.flops, down.matmul) == (2.0 * 64 * 64 * 32, (2, 32, 64, 32))


# 4 layers x 4 microbatches x 4 ranks: rows, their weights and rows back, forward and backward; the
# counts of all ranks forward, where experts are not padded.
@pytest.mark.parametrize(("padding", "gathers"), [(False, 1), (True, 0)])
def test_every_pass_of_a_layer_exchanges_thrice(scenario_of, padding, gathers) -> None:
    plan = {
        "dp": 4,
        "ep": 4,
        "expert_padding": padding,
        "expert_capacity": 1.0 if padding else None,
    }
    s = scenario_of(model=TINY, plan=plan, run={"num_steps": 1})
    program = lower(s).flat
    mine = [program.costs[c] for c in program.cost[program.stream == program.streams.index("ep")]]
    assert Counter(cost.name for cost in mine) == Counter(
        {"all_to_all": 4 * 4 * 4 * 6, "all_gather": 4 * 4 * 4 * gathers}
    )


# The rank of expert 0 gets 2 x 64 rows, of which 7/8 come from others: what 8 ranks exchange counts
# as if all of them did. Nothing else of a layer changes.
def test_an_expert_with_twice_the_tokens_doubles_its_path_only(scenario_of) -> None:
    even, twice = (
        blocks(TINY, shapes(scenario_of(model=TINY, plan={"dp": 8, "ep": 8}, run=run))).layers[0]
        for run in ({}, {"expert_load": TWICE})
    )
    changed = set()
    for a, b in zip(even.operators, twice.operators, strict=True):
        for x, y in zip(a.forward + a.backward, b.forward + b.backward, strict=True):
            if x == y:
                continue
            changed.add(a.name)
            x, y = (p.flow if isinstance(p, Along) else p for p in (x, y))
            if isinstance(x, Kernel):
                assert y.flops == 2 * x.flops
            else:
                assert y.bytes == 2 * x.bytes
    assert changed == {"to experts", "expert fc1", "silu", "expert fc2", "from experts"}


# All of a step is on one chain here: one microbatch, gradients in one piece after it.
def test_an_expert_with_twice_the_tokens_lengthens_the_step_by_its_path(scenario_of) -> None:
    def at(load):
        return scenario_of(
            model=TINY, plan={"dp": 8, "ep": 8, "grad_overlap": False}, batch=8,
            run={"expert_load": load, "detail": "kernel"},
        )  # fmt: skip

    def path(s):
        layer = blocks(s.model, shapes(s)).layers[0]
        parts = [p for o in layer.operators for p in o.forward + o.backward]
        shape = GroupShape(ranks=8, nodes=1, per_node=8)
        flows = [flow_seconds(p.flow, shape, s.cluster) for p in parts if isinstance(p, Along)]
        kernels = [
            sum(work_seconds(Work("", (p,)), s.cluster.node).values())
            for p in parts
            if isinstance(p, Kernel)
        ]
        return 4 * (sum(flows) + sum(kernels))

    even, twice = at("uniform"), at(TWICE)
    longer = sim.simulate(twice).step_time_s - sim.simulate(even).step_time_s
    assert longer == pytest.approx(path(twice) - path(even), abs=1e-9)
    assert longer > 0


# The way to the experts and back on the round node, one microbatch of 32 tokens on each of 8 ranks:
# 64 rows of 128 bytes. A pass over n bytes takes n ps and a gap of 1 us; products here are bound by
# bytes. Dispatch 4,096 + 8,192; fc1 8,192 + 8,192 + 8,192 (rows, one weight, results); SwiGLU
# 8,192 + 4,096; fc2 4,096 + 4,096 + 8,192; combine 8,192 + 4,096: 77,824 bytes. Before dispatch
# three kernels find places: of 32 x 8 scores 17 bytes each, of 64 copies 8.
def test_the_forward_way_of_balanced_experts_takes_its_bytes(scenario_of) -> None:
    s = scenario_of(
        model=TINY, plan={"dp": 8, "ep": 8}, batch=8, run={"expert_fusion": "permutation"}
    )
    names = ("dispatch", "expert fc1", "silu", "expert fc2", "combine")
    kernels = tuple(k for name in names for k in named(s, name).forward)
    seconds = sum(work_seconds(Work("", kernels), s.cluster.node).values())
    places = 32 * 8 * 17 + 64 * 8
    assert seconds == pytest.approx((77_824 + places) * 1e-12 + (5 + 3) * 1e-6)


# One microbatch, gradients in one piece after it: every op of a rank comes after the one before.
def test_a_step_of_balanced_experts_is_the_sum_of_its_ops(scenario_of) -> None:
    s = scenario_of(
        model=TINY, plan={"dp": 8, "ep": 8, "grad_overlap": False}, batch=8,
        run={"detail": "kernel", "num_steps": 1},
    )  # fmt: skip
    result = sim.simulate(s, folded=False)
    program, shape = result.tiled.flat, GroupShape(ranks=8, nodes=1, per_node=8)
    total = 0.0
    for number in program.cost[program.rank == 0]:
        cost = program.costs[number]
        if isinstance(cost, Flow):
            total += flow_seconds(cost, shape, s.cluster)
        else:
            total += sum(work_seconds(cost, s.cluster.node).values())
    assert result.step_time_s == pytest.approx(total, abs=1e-12 * len(program.rank))


# 64 copies of a rank over 8 experts: 8 each; 2 x 8 for expert 0, 48 / 7 for the others. At most
# ceil(1.25 x 8) = 10: 6 of 64 are dropped; padded all have 10.
@pytest.mark.parametrize(
    ("routing", "expected"),
    [
        (Routing(), Rows(64, 64, 0)),
        (Routing(ep=8, load=TWICE), Rows(64, 128, 0)),
        (Routing(ep=8, load=TWICE, capacity=1.25), Rows(58, 80, 6 / 64)),
        (Routing(ep=8, load=TWICE, capacity=1.25, padded=True), Rows(80, 80, 6 / 64)),
        (Routing(ep=4, load=TWICE), Rows(64, 4 * (16 + 48 / 7), 0)),
    ],
)
def test_copies_of_tokens_are_dealt_out(routing, expected) -> None:
    assert rows(TINY, routing, 32) == pytest.approx(expected)


# Question 27: tokens x min(top k, distinct ranks) x hidden x 2 bytes on each rank.
@pytest.mark.parametrize(
    ("ep", "dispatch", "sent"),
    [(8, "all_to_all", 2), (8, "deduplicated", 2), (2, "deduplicated", 2), (2, "all_to_all", 2)],
)
def test_question_27_a_rank_sends_a_token_to_each_distinct_rank(
    scenario_of, ep, dispatch, sent
) -> None:
    s = scenario_of(model=TINY, plan={"dp": 8, "ep": ep, "expert_dispatch": dispatch})
    there = named(s, "to experts").forward[0]
    assert there.flow.bytes == 32 * sent * 64 * 2


def test_a_token_crosses_to_a_rank_or_a_node_once() -> None:
    assert copies(DEEPSEEK, Routing(ep=64)) == 8
    assert copies(DEEPSEEK, Routing(ep=4, dispatch="deduplicated")) == 4
    assert copies(DEEPSEEK, Routing(ep=64, dispatch="deduplicated")) == 8
    assert copies(DEEPSEEK, Routing(ep=64, dispatch="node_limited")) == 4


# 1, 1/2, 1/3, 1/4 over their sum of 25/12 is 0.48, 0.24, 0.16, 0.12; of two
# experts a token none gets more than half. With exponent 2 the first would get 0.70: 1/2, and the
# others share the rest as 1/4 : 1/9 : 1/16.
def test_zipf_shares_fall_and_stop_at_all_tokens() -> None:
    four = replace(TINY, num_experts=4)
    one = Run(global_batch_size=1, expert_load="zipf")
    assert expert_shares(four, one, 1) == pytest.approx((0.48, 0.24, 0.16, 0.12))
    two = replace(one, expert_load_exponent=2.0)
    rest = 1 / 4 + 1 / 9 + 1 / 16
    assert expert_shares(four, two, 1) == pytest.approx(
        (0.5, *(0.5 * share / rest for share in (1 / 4, 1 / 9, 1 / 16)))
    )


# Dealt out to two ranks in turn: the first holds places 1 and 3, the second 2 and 4.
def test_popular_experts_are_dealt_out_to_ranks() -> None:
    run = Run(global_batch_size=1, expert_load="zipf")
    shares = expert_shares(replace(TINY, num_experts=4), run, 2)
    assert shares == pytest.approx((0.48, 0.16, 0.24, 0.12))


# A layer of a rank: 2 experts of 6,144; attention 64 x 128 + 64 x 64, router 64 x 8, norms 128:
# 12,928 whole. Embedding and head 2 x 128 x 64, a norm of 64. 8 ranks hold these, 2 the same
# experts; 2 + 2 bytes of weight and gradient, 12 of the optimizer over those who share it.
def test_states_of_experts_are_divided_over_those_that_hold_them(scenario_of) -> None:
    (held,) = static_memory(scenario_of(model=TINY, plan={"dp": 8, "ep": 4, "zero": 1}))
    experts, dense = 4 * 2 * EXPERT, 4 * 12_928 + 2 * 128 * 64 + 64
    assert held.params == experts + dense
    assert held.weights == held.gradients == 2 * (experts + dense)
    assert held.optimizer == 12 * (experts / 2 + dense / 8)


# Gradients of experts, 2 bytes each, over the 2 ranks that hold the same; the others over all 8.
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("detail", ["stage", "layer", "kernel"])
def test_gradients_of_experts_are_summed_in_their_own_groups(scenario_of, zero, detail) -> None:
    plan = {"dp": 8, "ep": 4, "zero": zero, "bucket_size": 1e4}
    s = scenario_of(model=TINY, plan=plan, run={"num_steps": 1, "detail": detail})
    program = lower(s).flat
    for name, ranks, size in (
        ("edp", 2, 2 * 4 * 2 * EXPERT),
        ("reduce" if zero else "dp", 8, 2 * (4 * 12_928 + 2 * 128 * 64 + 64)),
    ):
        on = (program.stream == program.streams.index(name)) & (program.rank == 0)
        sums = [
            op for op in on.nonzero()[0] if program.costs[program.cost[op]].name != "all_gather"
        ]
        assert sum(program.costs[program.cost[op]].bytes for op in sums) == size
        assert {len(program.groups[program.joint_group[program.joint[op]]]) for op in sums} == {
            ranks
        }


# tp 2 without dividing experts: 8 ranks of dp x tp hold the 8 experts twice over 4.
def test_experts_cut_the_ranks_of_a_stage_anew(scenario_of) -> None:
    plan = {"dp": 4, "tp": 2, "ep": 4, "sequence_parallel": True}
    s = scenario_of(model=TINY, plan=plan)
    assert s.plan.edp == 2
    there = named(s, "to experts").forward[0]
    assert there.flow.bytes == 16 * 2 * 64 * 2  # each tp rank sends its own half of the tokens
    (up,) = named(s, "expert fc1").forward
    assert up.matmul == (2, 16, 64, 64)  # 4 x 32 copies over 8 experts


# etp 2: each expert's 32 inner numbers are halved; its ranks gather each other's 32 rows.
def test_divided_experts_gather_each_others_tokens(scenario_of) -> None:
    plan = {"dp": 4, "tp": 2, "ep": 4, "etp": 2, "sequence_parallel": True}
    s = scenario_of(model=TINY, plan=plan)
    (gather,) = named(s, "gather").forward
    assert gather == Along(Flow("all_gather", 2 * 32 * 64 * 2.0), "etp")
    (up,) = named(s, "expert fc1").forward
    assert (up.flops, up.matmul) == (2.0 * 64 * 64 * 32, (2, 32, 32, 64))
    (back,) = named(s, "scatter").forward
    assert back == Along(Flow("reduce_scatter", 2 * 32 * 64 * 2.0), "etp")


# Each tp rank routes half of the tokens: the router's gradient, 64 x 8 x 2 bytes a layer, is a sum,
# and so are those of nine norms.
def test_gradients_of_routers_are_summed_over_tensor_parallel_ranks(scenario_of) -> None:
    plan = {"tp": 2, "ep": 2, "sequence_parallel": True}
    program = lower(scenario_of(model=TINY, plan=plan, run={"num_steps": 1})).flat
    sums = [
        program.costs[program.cost[op]].bytes
        for op in range(len(program.rank))
        if program.action[op] == ACTION_CODE["OPT"]
        and program.joint[op] != NONE
        and program.rank[op] == 0
    ]
    assert sums == [4 * 64 * 8 * 2.0 + 9 * 64 * 2]


# 6 FLOPs a weight that a token meets, and attention; whatever is dropped or lies elsewhere.
def test_mfu_counts_the_experts_that_a_token_goes_to(scenario_of) -> None:
    weights = active_parameters(TINY) - 128 * 64 - (4 * 2 + 1) * 64  # embedding, norms
    expected = 6 * weights + 12 * 4 * 64 * 32
    for plan in ({}, {"dp": 4, "ep": 4, "expert_capacity": 0.5}):
        assert model_flops_per_token(scenario_of(model=TINY, plan=plan)) == expected


SHARED = replace(
    TINY, num_shared_experts=1, first_k_dense_replace=1, num_nextn_predict_layers=1,
    q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12,
    head_dim=24, num_key_value_heads=4,
)  # fmt: skip


# Stages of 2 layers: the first has a dense layer and one with experts; the last two with experts,
# the further one, its projection of 2 x 64 x 64 and 3 norms, and a copy of the embedding.
def test_stages_hold_what_their_own_layers_are(scenario_of) -> None:
    first, last = static_memory(scenario_of(model=SHARED, plan={"pp": 2}))
    attention = 64 * 32 + 32 + 32 * 96 + 64 * 24 + 16 + 16 * 4 * 28 + 4 * 12 * 64 + 128
    dense, mixed = attention + 3 * 64 * 160, attention + 9 * EXPERT + 64 * 8
    assert first.params == 128 * 64 + dense + mixed
    assert last.params == 3 * mixed + 2 * 64 * 64 + 3 * 64 + 2 * 128 * 64 + 64
    whole = static_memory(scenario_of(model=SHARED))[0].params
    assert whole == first.params + last.params - 128 * 64 == num_parameters(SHARED)


def test_the_copy_of_the_embedding_is_summed_with_it(scenario_of) -> None:
    program = lower(scenario_of(model=SHARED, plan={"pp": 2}, run={"num_steps": 1})).flat
    tied = program.stream == program.streams.index("tied")
    assert [program.costs[c].bytes for c in program.cost[tied]] == [2.0 * 128 * 64] * 2


PLANS = [
    {"dp": 4, "ep": 4},
    {"dp": 2, "pp": 2, "ep": 2, "zero": 1},
    {"dp": 8, "ep": 2, "expert_dispatch": "deduplicated"},
    {
        "dp": 2,
        "tp": 2,
        "ep": 2,
        "etp": 2,
        "sequence_parallel": True,
        "expert_dispatch": "all_gather",
    },
    {"dp": 2, "tp": 2, "ep": 4, "sequence_parallel": True, "tp_overlap": "all"},
    {"dp": 2, "tp": 2, "ep": 2, "etp": 2, "sequence_parallel": True, "recompute": "full"},
    {"pp": 2, "dp": 2, "ep": 2, "schedule": "ZB-H1", "recompute": "light"},
    {"pp": 2, "dp": 2, "schedule": "DualPipe", "chunks": 2, "ep": 2, "zero": 1},
]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", [TINY, SHARED], ids=lambda m: m.name)
def test_all_ranks_run_and_detail_moves_no_time(scenario_of, model, plan) -> None:
    run = {"clip_grad": True, "expert_load": "zipf"}
    kernel, layer, stage = (
        sim.simulate(scenario_of(model=model, plan=plan, run={**run, "detail": detail}))
        for detail in ("kernel", "layer", "stage")
    )
    rounding = 1e-12 * len(kernel.tiled.rank)
    assert kernel.step_time_s == pytest.approx(layer.step_time_s, abs=rounding)
    assert stage.step_time_s == pytest.approx(layer.step_time_s, abs=rounding)


@pytest.mark.parametrize("plan", PLANS)
def test_both_engines_agree_and_so_does_folding(scenario_of, plan) -> None:
    s = scenario_of(model=SHARED, plan=plan)
    one, other, whole = (
        sim.simulate(s, **how) for how in ({}, {"engine": "reference"}, {"folded": False})
    )
    assert one.step_time_s == other.step_time_s == whole.step_time_s


# Every microbatch releases what it kept, with what is computed again counted on the way.
@pytest.mark.parametrize("plan", PLANS)
def test_activations_come_and_go(scenario_of, plan) -> None:
    program = lower(scenario_of(model=SHARED, plan=plan, run={"num_steps": 1})).flat
    costs = [program.costs[c] for c in program.cost[program.rank == 0]]
    alive = sum(cost.alloc.total - cost.free.total for cost in costs)
    assert alive == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("plan", "run", "message"),
    [
        ({"dp": 3, "ep": 3}, {}, "plan.ep 3 does not divide the 8 experts of tiny-experts"),
        ({"tp": 2}, {}, "set plan.sequence_parallel = true"),
        ({"dp": 2, "zero": 3}, {}, "plan.zero 3 is not modelled of tiny-experts"),
        ({}, {"lora_rank": 4}, "adapters are not modelled of tiny-experts"),
        ({"recompute": "selective-op"}, {}, "'selective-op' is not modelled of tiny-experts"),
        ({"expert_padding": True}, {}, "plan.expert_capacity, which is not set"),
        (
            {"dp": 2, "ep": 2, "expert_dispatch": "all_gather", "expert_capacity": 1.0},
            {},
            "plan.expert_capacity with plan.expert_dispatch 'all_gather'",
        ),
        ({"expert_dispatch": "deduplicated"}, {}, "has no effect with plan.ep 1"),
        ({}, {"expert_load": (0.5, 0.5)}, "lists 2 shares; tiny-experts has 8 experts"),
        ({}, {"expert_load": (0.1,) * 8}, "the shares sum to 0.8"),
        ({}, {"expert_load": (0.65, *[0.05] * 7)}, "no expert gets a token twice"),
        ({}, {"expert_load_exponent": 2.0}, "is for run.expert_load 'zipf'"),
        ({}, {"fp8_dispatch": True}, 'run.fp8_dispatch is for run.precision "fp8"'),
    ],
)
def test_what_does_not_go_with_experts_is_said(scenario_of, plan, run, message) -> None:
    with pytest.raises(DescriptionError, match=message):
        scenario_of(model=TINY, plan=plan, run=run)


def test_a_model_without_experts_has_none_to_divide(scenario_of, llama) -> None:
    with pytest.raises(DescriptionError, match="ep 2 is for experts, and tiny-llama"):
        scenario_of(model=llama, plan={"dp": 2, "ep": 2})


# The report's 180,000 H800 hours for 1e12 tokens: 2,048 devices take 19.9 s for 15,360 x 4,096.
def test_deepseek_v3_on_2048_devices_takes_the_published_time_within_a_fifth() -> None:
    result = sim.simulate(sim.load("deepseek-v3-2048gpu"))
    published = 180e3 * 3600 / 2048 * 15_360 * 4_096 / 1e12
    assert published == pytest.approx(19.9, abs=0.05)
    assert abs(result.step_time_s / published - 1) < 0.2
    assert result.summary.fits


def test_mixtral_on_64_devices_fits() -> None:
    assert sim.simulate(sim.load("mixtral-8x7b-64gpu")).summary.fits


# Kept in fp8 the inputs of SwiGLU take 1 byte: 64 rows x 2 x 32 of a rank, and of weights 4 bytes.
def test_inputs_of_activations_may_stay_in_fp8(scenario_of, cluster_of) -> None:
    cluster = cluster_of(devices=4, device={"peak": {"fp32": 1e13, "bf16": 1e14, "fp8": 2e14}})
    kept = [
        named(
            scenario_of(
                model=TINY, plan={"dp": 4, "ep": 4}, cluster=cluster,
                run={"precision": "fp8", "fp8_kept": low},
            ),
            "silu",
        ).kept_bytes
        for low in (False, True)
    ]  # fmt: skip
    assert kept == [64 * (2 * 64 + 4), 64 * (64 + 4)]


# Copies go to experts in fp8 and come back in bf16; their gradients likewise, the other way round.
# Megatron-LM's go in bf16.
@pytest.mark.parametrize(("low", "each"), [(True, 1), (False, 2)])
def test_copies_may_go_to_experts_in_fp8(scenario_of, cluster_of, low, each) -> None:
    s = in_fp8(scenario_of, cluster_of, fp8_dispatch=low)
    there, back = named(s, "to experts"), named(s, "from experts")
    sizes = [
        side[0].flow.bytes for part in (there, back) for side in (part.forward, part.input_grad)
    ]
    assert sizes == [64 * 64 * each, 64 * 64 * 2, 64 * 64 * 2, 64 * 64 * each]


def in_fp8(scenario_of, cluster_of, plan=None, **run):
    cluster = cluster_of(devices=4, device={"peak": {"fp32": 1e13, "bf16": 1e14, "fp8": 2e14}})
    return scenario_of(
        model=TINY, plan={"dp": 4, "ep": 4, **(plan or {})}, cluster=cluster,
        run={"precision": "fp8", **run},
    )  # fmt: skip


# 64 rows of 64 numbers of 2 bytes are read and written once more before fc1 and after fc2, forward
# and backward, and 64 fp32 weights beside those before: products in fp8 want 16 rows or a multiple.
def test_rows_are_copied_to_multiples_of_16_in_fp8(scenario_of, cluster_of) -> None:
    s = in_fp8(scenario_of, cluster_of)
    for name, beside in (("pad", 64 * 8), ("unpad", 0)):
        for side in (named(s, name).forward, named(s, name).input_grad):
            assert sum(kernel.bytes for kernel in side) == 2 * 64 * 64 * 2 + beside


# Two experts of each rank get 4 x 8 rows each; with a capacity of 2 they get 4 x 16.
@pytest.mark.parametrize(
    ("plan", "run", "pads"),
    [
        ({}, {}, True),
        ({}, {"expert_fusion": "permutation"}, True),
        ({}, {"expert_fusion": "all"}, False),
        ({"expert_capacity": 1.0, "expert_padding": True}, {}, True),
        ({"expert_capacity": 2.0, "expert_padding": True}, {}, False),
        ({"expert_capacity": 2.0}, {}, True),
    ],
)
def test_rows_that_are_multiples_already_are_not_copied(
    scenario_of, cluster_of, plan, run, pads
) -> None:
    s = in_fp8(scenario_of, cluster_of, plan, **run)
    operators = blocks(s.model, shapes(s)).layers[-1].operators
    assert ("pad" in [o.name for o in operators]) == pads


# Of 32 tokens of 64 numbers each rank gathers those of all 4, with 8 bits and 8 weights of 2 bytes
# each; its 2 experts get 64 copies, and results for all 128 tokens are summed over ranks.
def test_all_tokens_may_be_gathered(scenario_of) -> None:
    plan = {"dp": 4, "ep": 4, "expert_dispatch": "all_gather"}
    s = scenario_of(model=TINY, plan=plan, run={"expert_fusion": "permutation"})
    tokens, rows = 4 * 32 * 64, 64 * 64
    sizes = {
        name: [(p.flow.name, p.flow.bytes) for p in named(s, name).forward]
        for name in ("tables", "to experts", "from experts")
    }
    assert sizes == {
        "tables": [("all_gather", 4 * 32 * 8), ("all_gather", 4 * 32 * 8 * 2)],
        "to experts": [("all_gather", 2 * tokens)],
        "from experts": [("reduce_scatter", 2 * tokens)],
    }
    assert named(s, "dispatch").forward[-1].bytes == 2 * (tokens + rows)
    assert named(s, "unsort").forward[-1].bytes == 2 * (tokens + rows)


# Experts of one rank have their copies sorted all the same, as Megatron-LM does; padded copies lie
# in the order of experts.
@pytest.mark.parametrize(
    ("plan", "sorts"),
    [
        ({}, True),
        ({"expert_capacity": 1.0, "expert_padding": True}, False),
        ({"dp": 8, "ep": 8}, False),
    ],
)
def test_copies_are_sorted_where_a_rank_has_several_experts(scenario_of, plan, sorts) -> None:
    s = scenario_of(model=TINY, plan=plan)
    operators = blocks(s.model, shapes(s)).layers[-1].operators
    assert ("sort" in [o.name for o in operators]) == sorts


# `masked_select` twice; once more where some copies are dropped and their number is asked for;
# DeepEP's dispatch once, thrice in front of the two where torch makes a table of its indices.
@pytest.mark.parametrize(
    ("routing", "expected"),
    [
        (Routing(ep=8), 2),
        (Routing(ep=8, fusion="permutation"), 0),
        (Routing(ep=8, fusion="permutation", capacity=1.0), 1),
        (Routing(ep=8, capacity=1.0), 3),
        (Routing(ep=8, capacity=1.0, padded=True), 0),
        (Routing(ep=8, dispatch="deduplicated", fusion="permutation"), 1),
        (Routing(ep=8, dispatch="deduplicated"), 6),
        (Routing(ep=8, dispatch="all_gather", fusion="permutation"), 2),
        (Routing(ep=8, dispatch="all_gather"), 3),
    ],
)
def test_the_host_waits_where_it_does_not_know_how_many_copies_there_are(routing, expected) -> None:
    assert waits(routing) == expected


# The copy to the host and the kernel after it are issued while the device has nothing to do.
def test_a_wait_costs_twice_what_the_host_takes_to_issue_a_kernel(scenario_of, cluster_of) -> None:
    node = replace(cluster_of().node, host_launch=60e-6)
    (wait,) = waiting(Routing(ep=8, fusion="permutation", capacity=1.0))
    assert work_seconds(Work("", (wait,)), node)["launch"] == pytest.approx(2 * 60e-6)


# Sent once to each of 2 ranks a token's two copies are two rows, ordered where they arrive: 64 rows
# that arrive become the 64 copies of 4 experts. Nothing is ordered before.
def test_tokens_that_are_sent_once_are_ordered_where_they_arrive(scenario_of) -> None:
    plan = {"dp": 8, "ep": 2, "expert_dispatch": "deduplicated"}
    s = scenario_of(model=TINY, plan=plan, run={"expert_fusion": "permutation"})
    names = [o.name for o in blocks(s.model, shapes(s)).layers[-1].operators]
    assert names.index("send") < names.index("to experts") < names.index("dispatch")
    assert "sort" not in names
    assert named(s, "send").forward == ()
    *_, moved = named(s, "dispatch").forward
    assert moved.bytes == (64 + 64) * 64 * 2
    assert named(s, "dispatch").kept_bytes == 4 * 64 * (2 * 4 + 1)


# Rows at a device's own rate: 12,288 bytes at a fifth of 1 TB/s, summed one by one at a twentieth.
@pytest.mark.parametrize(
    ("fusion", "forward", "backward"),
    [("permutation", 5 * 12_288, 5 * 12_288), ("none", 12_288, 20 * 12_288 + 4_096)],
)
def test_rows_are_moved_at_rates_of_their_own(
    scenario_of, cluster_of, fusion, forward, backward
) -> None:
    rates = {"permutation": 0.2, "scatter": 0.05}
    cluster = cluster_of(devices=8, device={"memory_efficiency_in": rates})
    s = scenario_of(
        model=TINY, plan={"dp": 8, "ep": 8}, cluster=cluster, run={"expert_fusion": fusion}
    )
    o = named(s, "dispatch")
    for side, expected in ((o.forward[-1:], forward), (o.input_grad, backward)):
        moved = tuple(k for k in side if not k.name.endswith("weights grad"))
        bound = work_seconds(Work("", moved), s.cluster.node)
        assert bound["memory"] == pytest.approx(expected * 1e-12)


def test_a_device_has_rates_of_known_kinds_of_kernel_only(cluster_of) -> None:
    with pytest.raises(DescriptionError, match="unknown kind of kernel 'scater', did you mean"):
        cluster_of(device={"memory_efficiency_in": {"scater": 0.1}})


# Norms, activations and up projections are computed again: of a layer stay its two norms' inputs,
# the products' that read neither, and of attention its result with 4 bytes a row and head.
def test_light_recomputation_keeps_less_and_runs_cheap_parts_again(scenario_of) -> None:
    plans = ({}, {"recompute": "light"}, {"recompute": "full"})
    peaks, times = zip(
        *(
            (float(r.peak_memory_bytes.max()), r.step_time_s)
            for r in (sim.simulate(scenario_of(model=SHARED, plan=plan)) for plan in plans)
        ),
        strict=True,
    )
    assert peaks[2] < peaks[1] < peaks[0]
    assert times[0] < times[1] < times[2]


def test_the_report_says_what_it_assumes_of_experts(scenario_of) -> None:
    s = scenario_of(
        model=SHARED, plan={"dp": 8, "ep": 8, "expert_capacity": 1.0}, run={"expert_load": TWICE}
    )
    text = str(sim.simulate(s))
    assert "every expert gets the recorded share of all copies of tokens" in text
    assert "of the copies are dropped" in text
    assert "of which a token meets" in text
    assert "layer(s) that predict further ahead" in text


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_engines_agree_on_random_plans_with_experts(scenario_of, data) -> None:
    draw = data.draw
    dp, tp, pp, cp = (draw(st.sampled_from(of)) for of in ([1, 2, 4], [1, 2], [1, 2], [1, 1, 2]))
    ranks = dp * cp * tp
    ep, etp = (draw(st.sampled_from([d for d in (1, 2, 4, 8) if ranks % d == 0])) for _ in "ab")
    assume(ranks % (ep * etp) == 0)
    model = draw(st.sampled_from([TINY, SHARED] if cp == 1 else [TINY]))
    plan = {
        "dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp, "sequence_parallel": tp > 1,
        "zero": draw(st.sampled_from([0, 1])),
        "schedule": draw(st.sampled_from(["GPipe", "1F1B", "ZB-H1"])),
        "recompute": draw(st.sampled_from(["none", "light", "full"])),
        "expert_capacity": draw(st.sampled_from([None, 0.5, 1.25])),
        "bucket_size": draw(st.sampled_from([1.0, 1e5, 25e6])),
    }  # fmt: skip
    run = {
        "expert_load": draw(st.sampled_from(["uniform", "zipf", TWICE])), "num_steps": 2,
        "clip_grad": draw(st.booleans()), "detail": draw(st.sampled_from(["stage", "layer"])),
    }  # fmt: skip
    alike_however_it_runs(scenario_of(model=model, plan=plan, run=run))


# 64 ranks, pp outermost: 16 of a stage on 2 nodes; the experts of a layer on the 8 of one, those
# that hold the same on both.
def test_groups_of_experts_lie_where_the_placement_says() -> None:
    found = {span.axis: span for span in spans(sim.load("mixtral-8x7b-64gpu"))}
    assert (found["ep"].groups, found["ep"].ranks, found["ep"].most) == (8, 8, 1)
    assert (found["edp"].groups, found["edp"].ranks, found["edp"].fewest) == (32, 2, 2)
