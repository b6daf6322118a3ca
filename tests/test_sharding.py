"""Sharded data parallelism: ZeRO's stages, FSDP and HSDP, in bytes, memory and time."""

from dataclasses import replace

import numpy as np
import pytest

import simulator as sim
from simulator.describe.model import Model
from simulator.describe.plan import Plan
from simulator.errors import DescriptionError
from simulator.hardware import price
from simulator.hardware.nccl import bus_factor
from simulator.lower import lower
from simulator.lower.layers import num_parameters
from simulator.lower.memory import bytes_per_parameter, static_memory
from simulator.program import NONE
from simulator.program_text import format_program, parse_program
from simulator.report.memory_text import memory_text
from simulator.report.sharding import sharding_traffic

FSDP = {"dp": 4, "zero": 3}
HSDP = {"dp": 8, "zero": 3, "dp_shard": 4}
ONE = {"num_steps": 1}


def flows(program, stream, rank=0):
    """Return the costs of a rank's flows on a stream, and the size of their groups, in order."""
    rows = np.flatnonzero(
        (program.stream == program.streams.index(stream))
        & (program.rank == rank)
        & (program.joint != NONE)
    )
    groups = program.joint_group[program.joint[rows]]
    return [
        (program.costs[c], len(program.groups[g]))
        for c, g in zip(program.cost[rows].tolist(), groups.tolist(), strict=True)
    ]


def sent(program, stream):
    """Return the bytes that rank 0 sends on a stream."""
    return sum(c.bytes * bus_factor(c.name, n) for c, n in flows(program, stream))


# ---- bytes on the wire ----


# bf16 weights and gradients, N parameters, 4 ranks: a reduce-scatter of 2N and a gather of 2N send
# 2 x 2N x 3/4, an all-reduce of 2N as much.
@pytest.mark.parametrize("zero", [1, 2])
def test_stages_1_and_2_send_what_an_all_reduce_sends(scenario_of, llama, zero):
    plan = {"dp": 4, "zero": zero, "bucket_size": 3e4}
    plain = lower(scenario_of(model=llama, batch=4, plan={"dp": 4}, run=ONE))
    program = lower(scenario_of(model=llama, batch=4, plan=plan, run=ONE))
    total = 2 * 2 * num_parameters(llama) * 3 / 4
    assert sent(program, "unshard") == sent(program, "reduce") == total / 2
    assert sent(plain, "dp") == pytest.approx(total)
    assert sent(program, "dp") == 0


# Two microbatches of GPipe: each gathers every block twice and reduces it once, 3 x 2N x 3/4.
def test_stage_3_sends_half_as_much_again_for_each_microbatch(scenario_of, llama):
    plan = {**FSDP, "schedule": "GPipe"}
    program = lower(scenario_of(model=llama, batch=8, plan=plan, run=ONE))
    once = 2 * num_parameters(llama) * 3 / 4
    assert sent(program, "unshard") == 2 * 2 * once
    assert sent(program, "reduce") == 2 * once


# 1F1B on one stage follows a forward by its backward: the head (final norm 64, 64 x 128) is
# gathered once for the two.
def test_a_head_stays_gathered_for_the_backward_that_comes_next(scenario_of, llama):
    program = lower(scenario_of(model=llama, batch=8, plan=FSDP, run=ONE))
    head = 64 + 64 * 128
    assert sent(program, "unshard") == 2 * 2 * (2 * num_parameters(llama) - head) * 3 / 4


# Tied, GPT's head gathers its final norm (2 x 64) alone; the embedding stays for it.
def test_a_tied_embedding_is_gathered_once_and_stays_for_the_head(scenario_of, gpt):
    program = lower(scenario_of(batch=4, plan=FSDP, run=ONE))
    embedding = (128 + 32) * 64
    layers = num_parameters(gpt) - embedding - 2 * 64
    gathered = [cost.bytes / 2 for cost, _ in flows(program, "unshard")]
    assert sum(gathered) == embedding + 2 * 64 + 2 * layers


# fp32 gradients are reduced in 4 bytes; weights are gathered in 2.
def test_gradients_are_reduced_in_their_own_precision(scenario_of, llama):
    run = {**ONE, "gradient_dtype": "fp32"}
    program = lower(scenario_of(model=llama, batch=4, plan=FSDP, run=run))
    assert sent(program, "reduce") == 4 * num_parameters(llama) * 3 / 4


@pytest.mark.parametrize(("zero", "reductions"), [(1, 1), (2, 4), (3, 4 * 6)])
def test_gradients_are_reduced_once_a_step_or_once_a_microbatch(
    scenario_of, llama, zero, reductions
):
    # 4 microbatches; one bucket holds all of the model, or there are 4 layers, embedding and head.
    program = lower(scenario_of(model=llama, plan={"dp": 4, "zero": zero}, run=ONE))
    assert len(flows(program, "reduce")) == reductions


# HSDP, 2 replicas of 4 shards: gathers and reduce-scatters join 4 ranks, and a quarter of each
# gradient is all-reduced over 2.
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_replicas_sum_their_shards_only(scenario_of, llama, zero):
    program = lower(scenario_of(model=llama, plan={**HSDP, "zero": zero}, run=ONE))
    scattered, summed = flows(program, "reduce"), flows(program, "dp")
    assert {n for _, n in [*flows(program, "unshard"), *scattered]} == {4}
    assert {n for _, n in summed} == {2}
    assert [c.bytes for c, _ in summed] == [c.bytes / 4 for c, _ in scattered]


# order dp, pp, tp on 16 ranks: dp stride 2, so shard groups of 4 are ranks 0 2 4 6 and 8 10 12 14
# (and the odd ones); their replicas are 8 apart.
def test_consecutive_dp_ranks_make_a_shard_group(scenario_of, llama):
    program = lower(scenario_of(model=llama, plan={**HSDP, "tp": 2}, run=ONE)).flat

    def groups(stream):
        mine = program.stream == program.streams.index(stream)
        numbers = np.unique(program.joint_group[program.joint[mine]])
        return {tuple(program.groups[g].tolist()) for g in numbers.tolist()}

    odd_and_even = {(0, 2, 4, 6), (8, 10, 12, 14), (1, 3, 5, 7), (9, 11, 13, 15)}
    assert groups("unshard") == groups("reduce") == odd_and_even
    assert groups("dp") == {(r, r + 8) for r in range(8)}


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
@pytest.mark.parametrize("pp", [1, 2])
def test_without_resharding_blocks_are_gathered_once(scenario_of, llama, pp, schedule):
    gathers = 4 if (pp, schedule) == (1, "1F1B") else 1
    # once a microbatch where its backward comes next, once a step elsewhere; 6 / pp blocks a rank
    plan = {**FSDP, "pp": pp, "schedule": schedule, "reshard_after_forward": False}
    program = lower(scenario_of(model=llama, plan=plan, run=ONE))
    assert len(flows(program, "unshard")) == gathers * 6 / pp


# 2 bytes of gradient and 4 + 8 read and written of fp32 states, then 2 of the weight: 2 + 24 + 2 a
# parameter; FSDP reads a 4-byte gradient and writes no other weight: 4 + 24. Each of its quarter.
@pytest.mark.parametrize(("zero", "moved"), [(0, 28), (1, 28 / 4), (2, 28 / 4), (3, 28 / 4)])
def test_each_rank_updates_its_shard(scenario_of, llama, zero, moved):
    program = lower(scenario_of(model=llama, plan={"dp": 4, "zero": zero}))
    (update,) = [c for c in program.costs if c.name == "OPT"]
    assert update.kernels[0].bytes == moved * num_parameters(llama)


# The end stages of tied embeddings sum the shard that each rank has, 128 x 64 x 2 bytes / 4.
@pytest.mark.parametrize(("zero", "share"), [(0, 1), (1, 4), (2, 4), (3, 4)])
def test_tied_embeddings_sum_their_shards(scenario_of, zero, share):
    program = lower(scenario_of(plan={"dp": 4, "pp": 2, "zero": zero}, run=ONE))
    ((summed, ranks),) = flows(program, "tied")
    assert (summed.bytes, ranks) == (128 * 64 * 2 / share, 2)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"dp": 4, "zero": 1, "gradient_exchange": "parameter_server"}, "reduce-scatters"),
        ({"dp": 4, "dp_shard": 2}, "dp_shard: 2 is for zero 1 to 3, not 0"),
        ({"dp": 6, "zero": 3, "dp_shard": 4}, "4 does not divide dp 6; legal are 1, 2, 3, 6"),
        ({"dp": 4, "zero": 2, "reshard_after_forward": False}, "false is for zero 3, not 2"),
        ({"dp": 4, "prefetch": 2}, "prefetch: 2 is for zero 3, not 0"),
        ({"dp": 4, "zero": 1, "sharding_library": "deepspeed"}, "deepspeed is for zero 3, not 1"),
        ({"dp": 4, "zero": 4}, "4 is not one of 0, 1, 2, 3"),
        ({"dp": 4, "zero": True}, "True is not one of 0, 1, 2, 3"),
        ({"dp": 4, "zero": 3, "prefetch": -1}, "-1 must be at least 0"),
        ({"dp": 4, "zero": 3, "bucket_size": 1e6}, "1e.06 has no effect with zero 3"),
    ],
)  # fmt: skip
def test_plans_that_contradict_themselves_are_refused(plan, message):
    with pytest.raises(DescriptionError, match=message):
        Plan(**plan)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"dp": 4, "zero": 3, "prefetch": 7}, "no more than 6 blocks"),
        ({"recompute": "full", "recompute_layers": 5}, "no stage has more than 4 layers"),
    ],
)
def test_counts_beyond_a_stage_are_refused(scenario_of, plan, message):
    with pytest.raises(DescriptionError, match=message):
        scenario_of(plan=plan)


# ---- copies around buffers ----


def copies(program, model, layer=1):
    """Return the bytes that each kernel of copies moves, of one layer, a parameter of it."""
    params = (num_parameters(model) - 2 * 64 * 128 - 64) / 4  # less embedding, head and norm
    moved = {}
    for i in np.flatnonzero((program.layer == layer) & (program.rank == 0)):
        cost = program.costs[program.cost[i]]
        for k in getattr(cost, "kernels", ()):
            if k.name.split()[0] in ("copy", "collection", "division"):
                moved[k.name] = moved.get(k.name, 0) + k.bytes * k.count
    return {name: size / params for name, size in moved.items()}


# A microbatch. Bytes a parameter: 2 x 2 after each of two gathers; bf16 to fp32 2 + 4; as they are
# 2 + 2; a division 2 x 4.
@pytest.mark.parametrize(
    ("library", "dtype", "each"),
    [
        ("fsdp2", "fp32", {"copy of gathered weights": 8, "copy of gradients": 6}),
        ("fsdp2", None, {"copy of gathered weights": 8, "copy of gradients": 4}),
        ("fsdp1", None, {"collection of gradients": 4, "division of gradients": 4}),
        (
            "fsdp1",
            "fp32",
            {
                "collection of gradients": 4,
                "copy of gradients": 6,
                "division of gradients": 8,
            },
        ),
        ("megatron_fsdp", "fp32", {"copy of gradients": 6}),
        (
            "deepspeed",
            None,
            {
                "copy of gathered weights": 8,
                "collection of gradients": 4,
                "division of gradients": 8,
            },
        ),
    ],
)
@pytest.mark.parametrize("detail", ["kernel", "stage"])
def test_each_library_copies_blocks_around_their_buffers(
    scenario_of, llama, library, dtype, each, detail
):
    run = {**ONE, "gradient_dtype": dtype, "detail": detail}
    plan = {**FSDP, "sharding_library": library}
    program = lower(scenario_of(model=llama, batch=4, plan=plan, run=run))
    assert copies(program, llama) == each


def test_products_that_add_to_gradients_spare_megatron_the_copy(scenario_of, llama):
    run = {**ONE, "gradient_dtype": "fp32", "fused_accumulation": True}
    plan = {**FSDP, "sharding_library": "megatron_fsdp"}
    assert copies(lower(scenario_of(model=llama, batch=4, plan=plan, run=run)), llama) == {}


# Of 4 microbatches each gathers twice; gradients are copied in fp32, once: 4 + 4.
def test_gradients_that_add_up_first_are_copied_once_a_step(scenario_of, llama):
    run = {**ONE, "gradient_dtype": "fp32"}
    program = lower(scenario_of(model=llama, batch=16, plan={**FSDP, "no_sync": True}, run=run))
    assert copies(program, llama)["copy of gradients"] == 8
    assert copies(program, llama)["copy of gathered weights"] == 4 * 8


# ---- reports ----


def test_flows_that_move_memory_print_and_parse_back(scenario_of):
    program = lower(scenario_of(plan=HSDP, run={"gradient_dtype": "fp32"})).flat
    assert parse_program(format_program(program)) == program


def test_the_report_says_what_is_sharded_and_what_would_hide_it(scenario_of, llama):
    s = scenario_of(model=llama, plan=HSDP)
    text = str(sim.simulate(s))
    assert "ZeRO-3 over 4 x 2 replicas" in text
    assert "would hide it behind its work" in text
    assert "the shards all-reduced over the replicas" in text
    assert "FSDP2 copies weights out of what was gathered" in text
    assert "bytes of a parameter on a rank: weight 1, gradient 1, optimizer 2" in memory_text(
        sim.simulate(s), s
    )


def test_a_plain_plan_reports_nothing_of_shards(scenario_of):
    text = str(sim.simulate(scenario_of(plan={"dp": 4})))
    assert "ZeRO" not in text
    assert "would hide it" not in text


# ---- questions that users ask ----


# DeepSpeed's estimate: fp16 weights 2, fp32 gradients 4, master and moments 12 over 4 GPUs, and
# weights and gradients of the largest layer in full: (18 x 6805e6 / 4 + 4 x 131e6) / 2^30.
def test_zero_3_of_6_8_billion_parameters_on_4_gpus_needs_29_gib(scenario_of, llama):
    plan = {**FSDP, "sharding_library": "deepspeed", "prefetch": 0}
    s = scenario_of(model=llama, batch=4, plan=plan, run={**ONE, "gradient_dtype": "fp32"})
    program = lower(s)
    (gathered, _), *_ = flows(program, "unshard")
    scattered = flows(program, "reduce")[-1][0]  # the embedding: first gathered, last reduced
    params = gathered.bytes / 2
    # gradients are as long as weights until the reduce-scatter brings what is more
    in_full = gathered.alloc.total + scattered.free.total - scattered.alloc.total
    states = sum(bytes_per_parameter(s)) * 6805e6 + in_full / params * 131e6
    assert states / 2**30 == pytest.approx(29.01, abs=0.005)


# 70.6e9 parameters over tp 8 x pp 2 = 16: 6 bytes and 12 / dp, or 18 where nothing is sharded.
@pytest.mark.parametrize(("dp", "zero", "gb"), [(48, 1, 27.6), (8, 1, 33.1), (8, 0, 79.4)])
def test_llama_70b_needs_memory_by_how_its_optimizer_is_sharded(dp, zero, gb):
    s = sim.load("llama-3-8b-3d", {
        "model": "llama-3-70b", "cluster.num_nodes": 2 * dp, "plan.dp": dp, "plan.tp": 8,
        "plan.pp": 2, "plan.zero": zero, "run.gradient_dtype": "fp32",
        "run.global_batch_size": 4 * dp,
    })  # fmt: skip
    states = np.mean([stage.total for stage in static_memory(s)])
    assert states / 1e9 == pytest.approx(gb, rel=0.003)


SEVEN_B = Model(
    name="7b", hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=32, head_dim=128, vocab_size=32000,
    max_position_embeddings=4096, norm="rms_norm", activation="silu", gated_mlp=True,
    position="rotary", attention_bias=False, mlp_bias=False, tie_word_embeddings=False,
)  # fmt: skip


def seven_b(scenario_of, cluster_of, plan):
    """Return 6.74e9 parameters on 2 nodes of 8 that share 100 Gb/s each: one microbatch."""
    cluster = cluster_of(2, 8, nic={"count": 1, "bandwidth": 12.5e9}, link={"bandwidth": 4.5e11})
    return scenario_of(model=SEVEN_B, batch=16, plan={"dp": 16, **plan}, run=ONE, cluster=cluster)


def seconds_of(s, *streams):
    """Return the seconds that a rank's flows on some streams take."""
    p = lower(s)
    ticks = price(p, s.cluster)[:, 0]
    mine = np.isin(p.stream, [p.streams.index(name) for name in streams]) & (p.joint != NONE)
    return ticks[mine].sum() / 1e12


# M = 2 x 6.74e9 bytes, 12.5 GB/s, 15/16 of each: gathered twice (the head once) and reduced once,
# (3 M - head) x 15/16 / 12.5e9 = 3.01 s; with 7e9 parameters and the head twice 3.15 s. Stage 1
# moves 2 M: 2.02 s (2.1 s).
@pytest.mark.parametrize(("zero", "times"), [(1, 2), (2, 2), (3, 3)])
def test_seven_billion_parameters_over_100_gbit_take_seconds(scenario_of, cluster_of, zero, times):
    bucket = {"bucket_size": 1e9} if zero < 3 else {}
    s = seven_b(scenario_of, cluster_of, {"zero": zero, **bucket})
    total, head = 2 * num_parameters(SEVEN_B), 2 * 4096 * 32001
    moved = times * total - (head if zero == 3 else 0)
    expected = moved * 15 / 16 / 12.5e9
    assert seconds_of(s, "unshard", "reduce") == pytest.approx(expected, rel=0.02)
    hiding = sharding_traffic(sim.simulate(s))
    assert sum(hiding.sent_bytes.values()) == pytest.approx(moved * 15 / 16)


# HSDP of 8: gathers stay in the node, and of the gradients an eighth crosses for each of 8 ranks
# that share the adapter: M / 12.5 GB/s = 1.08 s for the all-reduce over 2.
def test_hybrid_sharding_keeps_gathers_inside_the_node(scenario_of, cluster_of):
    s = seven_b(scenario_of, cluster_of, {"zero": 3, "dp_shard": 8})
    p = lower(s)
    for stream, nodes in (("unshard", 1), ("reduce", 1), ("dp", 2)):
        mine = p.stream == p.streams.index(stream)
        group = p.groups[int(p.joint_group[p.joint[mine]][0])]
        assert len(np.unique(group // 8)) == nodes
    total = 2 * num_parameters(SEVEN_B)
    assert seconds_of(s, "dp") == pytest.approx(total / 12.5e9, rel=0.02)
    slower = replace(s, plan=replace(s.plan, dp_shard=16))
    assert sim.simulate(s).step_time_s < 0.6 * sim.simulate(slower).step_time_s


# The figure printed is the bandwidth that hides all of it: bytes sent over forward and backward.
def test_the_bandwidth_that_hides_is_bytes_over_work(scenario_of, cluster_of):
    s = seven_b(scenario_of, cluster_of, {"zero": 3})
    result = sim.simulate(s)
    traffic = sharding_traffic(result)
    work_s = result.breakdown.of("forward", "backward")[0] / 1e12
    sent_bytes = sum(traffic.sent_bytes.values())
    assert traffic.hiding_bytes_per_s == pytest.approx(sent_bytes / work_s)
