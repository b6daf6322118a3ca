"""Sharded data parallelism over time: what is alive, what waits, what is exposed."""

from itertools import pairwise

import numpy as np
import pytest

import simulator as sim
from simulator.describe.plan import Plan
from simulator.hardware import price
from simulator.lower import lower
from simulator.lower.layers import blocks, num_parameters, shapes
from simulator.lower.memory import bytes_per_parameter, static_memory
from simulator.program import NONE

FSDP = {"dp": 4, "zero": 3}
HSDP = {"dp": 8, "zero": 3, "dp_shard": 4}
ONE = {"num_steps": 1}


# ---- memory ----


# Adam in bf16: weight 2, gradient 2 (4 in fp32), master 4, moments 8, over 4 shards from the stage
# that divides them on. FSDP holds fp32 shards alone: 4, 4 and 8.
@pytest.mark.parametrize(
    ("plan", "gradient", "parts"),
    [
        ({"zero": 0}, None, (2, 2, 12)),
        ({"zero": 1}, None, (2, 2, 3)),
        ({"zero": 1}, "fp32", (2, 4, 3)),
        ({"zero": 2}, "fp32", (2, 1, 3)),
        ({"zero": 3}, None, (1, 1, 2)),
        ({"zero": 3}, "fp32", (1, 1, 2)),
        ({"zero": 3, "sharding_library": "deepspeed"}, "fp32", (0.5, 1, 3)),
        ({"zero": 3, "sharding_library": "deepspeed"}, None, (0.5, 0.5, 3)),
    ],
)
def test_bytes_of_a_parameter_on_a_rank(scenario_of, plan, gradient, parts):
    s = scenario_of(plan={"dp": 4, **plan}, run={"gradient_dtype": gradient})
    assert bytes_per_parameter(s) == parts
    assert static_memory(s)[0].states == pytest.approx(sum(parts) * static_memory(s)[0].params)


def test_fp32_weights_have_no_other_copy_whatever_the_stage(scenario_of):
    s = scenario_of(plan=FSDP, run={"precision": "fp32"})
    assert bytes_per_parameter(s) == (1, 1, 2)


def passing_at(result, tick):
    """Return the bytes of rank 0 that are alive just after a tick and do not stay."""
    times, alive = result.memory.of_rank(0)
    return alive[np.searchsorted(times, tick, side="right") - 1]


def work(result, action, layer):
    """Return start and end ticks of rank 0's compute ops of an action and layer, in order."""
    p, t = result.program, result.timeline
    mine = (p.stream == 0) & (p.rank == 0) & (p.layer == layer)
    rows = np.flatnonzero(mine & (p.action == sim.program.ACTION_CODE[action]))
    return list(zip(t.start[rows].tolist(), t.end[rows].tolist(), strict=True))


# When the head's backward starts all activations are alive, its own 64 + 64 x 128 weights of 2
# bytes and as many gradients; one block ahead, the last layer's weights too. The loss's backward
# writes the 2-byte gradient of 128 logits for each of 32 tokens.
@pytest.mark.parametrize("prefetch", [0, 1])
def test_weights_are_alive_from_their_gather_and_gradients_from_their_backward(
    scenario_of, llama, prefetch
):
    s = scenario_of(model=llama, batch=4, plan={**FSDP, "prefetch": prefetch}, run=ONE)
    parts, result = blocks(s.model, shapes(s)), sim.simulate(s)
    kept = sum(b.kept_bytes for b in (parts.embedding, parts.head)) + 4 * parts.layer.kept_bytes
    head = 2 * (64 + 64 * 128)
    # head forward and backward have no layer number: forward of embedding and head, then backward
    start = work(result, "B", NONE)[0][0]
    ahead = 2 * parts.layer.params * prefetch
    # most is alive once the loss has been freed: the head's own gradient, those of its ends
    freed, gradient = 4 * 32 * 128, 2 * 64 * 128
    alive = gradient - freed + 2 * 32 * (64 + 128)
    assert passing_at(result, start) == kept + head + ahead + alive


# Stage 2, one bucket for all: after the last backward op no activation is left, but 2 bytes of
# gradient of each parameter until they are reduced.
def test_stage_2_holds_gradients_in_full_until_they_are_reduced(scenario_of, llama):
    result = sim.simulate(scenario_of(model=llama, batch=4, plan={"dp": 4, "zero": 2}, run=ONE))
    end = work(result, "B", NONE)[-1][1]
    assert passing_at(result, end) == 2 * num_parameters(llama)


# fp32 reductions copy 2-byte gradients into 4-byte buffers, which are released at their end.
@pytest.mark.parametrize("detail", ["stage", "layer", "kernel"])
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize(
    "more",
    [{}, {"pp": 2}, {"tp": 2}, {"reshard_after_forward": False}, {"recompute": "full"},
     {"pp": 2, "no_sync": True}, {"root_holds_ends": True},
     {"pp": 2, "schedule": "GPipe", "reshard_after_forward": False}],
)  # fmt: skip
def test_what_comes_goes(scenario_of, zero, more, detail):
    if zero == 2:
        own = ("reshard_after_forward", "no_sync", "root_holds_ends")
        more = {k: v for k, v in more.items() if k not in own}
    plan = {"dp": 4, "zero": zero, **more}
    memory = sim.simulate(
        scenario_of(plan=plan, run={"gradient_dtype": "fp32", "detail": detail})
    ).memory
    for rank in range(memory.program.num_ranks):
        assert memory.of_rank(rank)[1][-1] == 0.0
        assert memory.of_rank(rank)[1].min() >= 0.0


def test_detail_moves_no_time(scenario_of, llama):
    times = [
        sim.simulate(scenario_of(model=llama, plan=FSDP, run={"detail": detail})).step_time_s
        for detail in ("stage", "layer", "kernel")
    ]
    assert times == pytest.approx([times[0]] * 3, rel=1e-9)


# ---- time ----


def gathers_of_layers(result, action, num_layers=4):
    p, t = result.program, result.timeline
    mine = (p.stream == p.streams.index("unshard")) & (p.rank == 0) & (p.layer != NONE)
    rows = np.flatnonzero(mine & (p.action == sim.program.ACTION_CODE[action]))
    assert len(rows) == num_layers
    return (t.end - t.start)[rows].tolist()


def slow(cluster_of, bandwidth):
    return cluster_of(devices=4, link={"bandwidth": bandwidth, "pair_bandwidth": bandwidth})


def gaps(result, action):
    """Return idle ticks between one layer's work and the next's, and the time of a layer."""
    layers = range(4) if action == "F" else range(3, -1, -1)
    spans = [
        (min(s for s, _ in work(result, action, n)), max(e for _, e in work(result, action, n)))
        for n in layers
    ]
    return [b[0] - a[1] for a, b in pairwise(spans)], spans[1][1] - spans[1][0]


# A gather that begins with the work of the block before ends g later, that work c later: the block
# waits for g - c, or not at all.
@pytest.mark.parametrize("bandwidth", [1e8, 1e9, 1e10, 1e14])
@pytest.mark.parametrize("size", [1, 64])
def test_prefetch_exposes_what_the_work_before_does_not_cover(
    scenario_of, cluster_of, llama, bandwidth, size
):
    s = scenario_of(model=llama, batch=4 * size, plan={**FSDP, "microbatch_size": size},
                    run=ONE, cluster=slow(cluster_of, bandwidth))  # fmt: skip
    result = sim.simulate(s)
    gather = gathers_of_layers(result, "F")[0]
    idle, compute = gaps(result, "F")
    assert idle == [max(0, gather - compute)] * 3


def test_both_sides_of_the_closed_form_occur(scenario_of, cluster_of, llama):
    found = set()
    for size in (1, 1024):
        s = scenario_of(model=llama, batch=4 * size, plan={**FSDP, "microbatch_size": size},
                        run=ONE, cluster=slow(cluster_of, 1e10))  # fmt: skip
        found.add(gaps(sim.simulate(s), "F")[0][0] > 0)
    assert found == {True, False}


def test_without_prefetch_every_gather_is_exposed(scenario_of, llama):
    result = sim.simulate(scenario_of(model=llama, batch=4, plan={**FSDP, "prefetch": 0}, run=ONE))
    gather = gathers_of_layers(result, "F")[0]
    assert gaps(result, "F")[0] == [gather] * 3


# Gathers of the second step wait for the update of the first.
def test_a_step_gathers_weights_after_the_update_of_the_step_before(scenario_of, llama):
    result = sim.simulate(scenario_of(model=llama, batch=4, plan=FSDP, run={"num_steps": 2}))
    p, t = result.program, result.timeline
    mine = (p.stream == p.streams.index("unshard")) & (p.rank == 0)
    update = np.flatnonzero((p.rank == 0) & (p.action == sim.program.ACTION_CODE["OPT"]))[0]
    assert t.start[mine & (p.step == 1)].min() == t.end[update]


# At most two blocks of gradients in full: work after a block's backward waits for the reduction of
# the block before that.
@pytest.mark.parametrize("plan", [{"dp": 4, "zero": 2, "bucket_size": 4e4}, FSDP])
def test_backward_waits_for_the_last_but_one_reduction(scenario_of, cluster_of, llama, plan):
    cluster = slow(cluster_of, 1e7)
    s = scenario_of(model=llama, batch=4, plan=plan, run=ONE, cluster=cluster)
    r = sim.simulate(s)
    p, t = r.program, r.timeline
    mine = np.flatnonzero(p.rank == 0)
    reductions = mine[p.stream[mine] == p.streams.index("reduce")]
    works = mine[p.stream[mine] == 0]
    for earlier, later in pairwise(reductions.tolist()):
        following = works[works > later][0]
        assert t.start[following] >= t.end[earlier]


@pytest.mark.parametrize("plan", [{"dp": 4, "zero": 1}, {"dp": 4, "zero": 2}, FSDP, HSDP])
def test_the_update_waits_for_the_last_sum_of_gradients(scenario_of, cluster_of, llama, plan):
    cluster = cluster_of(link={"bandwidth": 1e7, "pair_bandwidth": 1e7}, devices=plan["dp"])
    r = sim.simulate(scenario_of(model=llama, plan=plan, run=ONE, cluster=cluster))
    p, t = r.program, r.timeline
    stream = "dp" if "dp_shard" in plan else "reduce"
    sums = (p.rank == 0) & (p.stream == p.streams.index(stream))
    update = np.flatnonzero((p.rank == 0) & (p.action == sim.program.ACTION_CODE["OPT"]))[0]
    assert t.start[update] == t.end[sums].max()


# The gather of updated weights counts as data-parallel communication, to the tick.
@pytest.mark.parametrize("zero", [1, 2])
def test_the_gather_after_the_update_is_exposed(scenario_of, llama, zero):
    s = scenario_of(model=llama, plan={"dp": 4, "zero": zero}, run={"num_steps": 2})
    result = sim.simulate(s)
    ticks = price(result.tiled, s.cluster)[:, 0]
    p = result.tiled
    mine = (p.step == 1) & (p.stream != 0) & (p.joint != NONE)
    assert result.breakdown.of("dp")[0] >= ticks[mine & (p.stream == p.streams.index("unshard"))]
    assert result.breakdown.of("drain")[0] == 0


PLANS = [
    {"dp": 4, "zero": 1}, {"dp": 4, "zero": 2, "pp": 2, "bucket_size": 2e4}, FSDP,
    {**FSDP, "pp": 2, "tp": 2}, HSDP, {**HSDP, "zero": 1, "pp": 2}, {**FSDP, "prefetch": 3},
    {**FSDP, "tp": 2, "sequence_parallel": True, "tp_overlap": "grads", "recompute": "selective"},
    {**HSDP, "pp": 2, "reshard_after_forward": False, "schedule": "GPipe"},
]  # fmt: skip


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: " ".join(f"{k}={v}" for k, v in p.items()))
@pytest.mark.parametrize("network", ["alpha-beta", "fluid"])
def test_engines_and_folding_give_the_same_ticks(scenario_of, cluster_of, plan, network):
    nodes = 2
    devices = Plan(**plan).world_size // nodes
    s = scenario_of(plan=plan, run={"network": network}, cluster=cluster_of(nodes, devices))
    whole = sim.simulate(s, folded=False).timeline
    for other in (
        sim.simulate(s), sim.simulate(s, engine="events"), sim.simulate(s, engine="reference"),
    ):  # fmt: skip
        assert np.array_equal(other.timeline.start, whole.start)
        assert np.array_equal(other.timeline.end, whole.end)


# Shard groups of 4 on nodes of 3: some cross nodes, some do not.
def test_uneven_shard_groups_do_not_fold(scenario_of, cluster_of, llama):
    plan = {"dp": 12, "zero": 3, "dp_shard": 4}
    s = scenario_of(model=llama, plan=plan, cluster=cluster_of(2, 6))
    assert sim.simulate(s).step_time_s == sim.simulate(s, folded=False).step_time_s
    assert not any("dp_replicate" in note for note in sim.simulate(s).notes)


def test_a_step_of_512_ranks_runs_on_one_of_them(scenario_of, cluster_of, llama):
    s = scenario_of(model=llama, plan={**FSDP, "dp": 512}, cluster=cluster_of(64, 8))
    result = sim.simulate(s)
    assert result.times.columns[0].shape[1] == 1
    assert result.peak_memory_bytes.shape == (512,)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("plan", [{}, {"pp": 2}, {"dp": 2, "dp_shard": 1}])
def test_one_shard_is_plain_data_parallelism(scenario_of, zero, plan):
    sharded = lower(scenario_of(plan={**plan, "zero": zero}))
    assert sharded == lower(scenario_of(plan={k: v for k, v in plan.items() if k != "dp_shard"}))


# Two stages, four microbatches of 8 samples over dp 4: each block's gradients, 4 bytes a parameter,
# are reduced in each of four backwards, or added up and reduced in the last.
def test_without_sync_a_step_reduces_gradients_once(scenario_of, llama):
    def reduced(no_sync):
        plan = {"dp": 4, "pp": 2, "zero": 3, "reshard_after_forward": False, "no_sync": no_sync}
        run = {"gradient_dtype": "fp32", **ONE}
        p = sim.simulate(scenario_of(model=llama, batch=16, plan=plan, run=run)).program
        mine = p.rank == 0
        names = [p.costs[cost].name for cost in p.cost[mine]]
        return names.count("reduce_scatter"), names.count("gradient accumulation")

    blocks_of_stage = 3  # the embedding and two layers
    assert reduced(no_sync=False) == (4 * blocks_of_stage, 0)
    assert reduced(no_sync=True) == (blocks_of_stage, 4 * blocks_of_stage)


# Between a backward and the next forward of the first stage: 4 bytes of each of its parameters in
# sums that are not reduced, besides what the warm-up microbatches and gathered weights take.
def test_without_sync_gradients_stay_in_full_between_backwards(scenario_of, llama):
    def alive(no_sync):
        plan = {"dp": 4, "pp": 2, "zero": 3, "reshard_after_forward": False, "no_sync": no_sync}
        run = {"gradient_dtype": "fp32", "num_steps": 1}
        result = sim.simulate(scenario_of(model=llama, batch=16, plan=plan, run=run))
        p, t = result.program, result.timeline
        last = np.flatnonzero((p.rank == 0) & (p.action == sim.program.ACTION_CODE["F"]))[-1]
        times, held = result.memory.only("unreduced").of_rank(0)
        return held[np.searchsorted(times, t.end[last], side="right") - 1]

    parts = blocks(llama, shapes(scenario_of(model=llama)))
    params = parts.embedding.params + 2 * parts.layer.params
    assert alive(no_sync=True) == 4 * params
    assert alive(no_sync=False) < 4 * params / 2  # what is on its way


# FSDP's root holds what no other module does: while layers compute, embedding and head are there.
def test_a_root_module_keeps_embedding_and_head_gathered(scenario_of, llama):
    def gathered(root):
        plan = {**FSDP, "root_holds_ends": root}
        result = sim.simulate(scenario_of(model=llama, batch=4, plan=plan, run=ONE))
        times, held = result.memory.only("gathered").of_rank(0)
        begin = work(result, "B", 2)[0][0]  # the last layer but one
        return held[np.searchsorted(times, begin, side="right") - 1]

    embedding = 2 * 64 * 128
    assert gathered(root=True) - gathered(root=False) == embedding


def test_no_sync_is_for_stage_3():
    with pytest.raises(sim.errors.DescriptionError, match="no_sync: true is for zero 3, not 1"):
        Plan(dp=2, zero=1, no_sync=True)
