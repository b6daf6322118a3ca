"""What lies on the host, and the copies to and from there, worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest
from test_scenario_parity import alike_however_it_runs

import simulator as sim
from simulator.describe import catalog
from simulator.describe.cluster import Host
from simulator.describe.loader import load
from simulator.errors import DescriptionError
from simulator.hardware.host import host_seconds, host_share
from simulator.lower import lower
from simulator.lower.layers import blocks, num_parameters, shapes
from simulator.lower.memory import bytes_per_parameter, static_memory
from simulator.program import ACTION_CODE, Kernel
from simulator.report.memory_text import memory_text
from simulator.units import to_ticks

HOST = Host(bandwidth=1e9, efficiency=1.0, memory=1e9, memory_bandwidth=1e10, memory_efficiency=1.0)
ONE = {"num_steps": 1}
OPTIMIZER, ACTIVATIONS = {"offload_optimizer": True}, {"offload_activations": True}


@pytest.fixture
def hosted(scenario_of, cluster_of):
    """Return a function to a tiny scenario on nodes whose hosts are described."""

    def build(*, plan=None, host=None, devices=None, **more):
        world = int(np.prod([(plan or {}).get(axis, 1) for axis in ("dp", "tp", "pp")]))
        cluster = cluster_of(devices=devices or world)
        node = replace(cluster.node, host=replace(HOST, **(host or {})))
        if devices:
            cluster = replace(cluster, devices_per_node=world)
        return scenario_of(plan=plan, cluster=replace(cluster, node=node), **more)

    return build


def rows_of(program, stream):
    return np.flatnonzero(program.stream == program.streams.index(stream))


def lasting(result, stream):
    """Return the ticks of what rank 0 does in a stream, one by one."""
    p, t = result.program, result.timeline
    rows = rows_of(p, stream)
    rows = rows[p.rank[rows] == 0]
    return (t.end[rows] - t.start[rows]).tolist()


# ---- what a copy and an update take ----


# 1e6 bytes over 1e9 bytes/s: 1 ms. Two devices below one switch: 2 ms, unless only one is in use.
# Memory of 1e9 bytes/s for 4 devices gives each 0.25e9: 4 ms. Half of the rate, twice the time.
@pytest.mark.parametrize(
    ("changes", "devices", "milliseconds"),
    [
        ({}, 4, 1),
        ({"devices_per_link": 2}, 4, 2),
        ({"devices_per_link": 2}, 1, 1),
        ({"memory_bandwidth": 1e9}, 4, 4),
        ({"efficiency": 0.5}, 4, 2),
    ],
)
def test_a_copy_takes_its_share_of_the_link_or_of_the_memory(
    cluster_of, changes, devices, milliseconds
):
    node = replace(cluster_of().node, host=replace(HOST, **changes))
    seconds = host_seconds(Kernel("copy", 0.0, 1e6, "copy"), node, devices)
    assert seconds == pytest.approx(milliseconds / 1e3)


# 1e6 bytes, of 1e10 bytes/s x 0.8 a fourth: 0.5 ms, whatever the link.
def test_an_update_takes_its_share_of_the_memory(cluster_of):
    node = replace(cluster_of().node, host=replace(HOST, memory_efficiency=0.8))
    assert host_seconds(Kernel("update", 0.0, 1e6, "host"), node, 4) == pytest.approx(0.5e-3)


# 4 of 8 devices, two beside each of 4 hosts that have 2e9 bytes/s each: 1e9 a device, whoever else
# is in use; the 2 hosts in use have half of the memory.
def test_devices_share_what_their_own_host_has(cluster_of):
    node = replace(cluster_of().node, host=replace(HOST, count=4, memory_bandwidth=8e9))
    assert host_share(node, 4) == (1e9, 1e9, 0.5e9)


# ---- the optimizer ----


# Of N parameters in bf16: 2N bytes of gradients to the host at 1e9 bytes/s, 28N of Adam there (2
# of the gradient, 4, 4 and 4 of master and moments read and written, 2 of the weight) at 1e10,
# 2N back: (2 + 2.8 + 2)N ns. The device saves its own update: 28N bytes at 1e12 and a gap of 1 us.
def test_a_step_is_longer_by_both_copies_and_the_update(hosted):
    plain = sim.simulate(hosted(run={**ONE, "optimizer": "adamw"}))
    s = hosted(plan=OPTIMIZER, run={**ONE, "optimizer": "adamw"})
    result, n = sim.simulate(s), num_parameters(s.model)
    assert lasting(result, "offload") == [to_ticks(2e-9 * n)]
    assert lasting(result, "host") == [to_ticks(2.8e-9 * n)]
    assert lasting(result, "fetch") == [to_ticks(2e-9 * n)]
    longer = 6.8e-9 * n - (28e-12 * n + 1e-6)
    assert result.step_time_s - plain.step_time_s == pytest.approx(longer, abs=5e-12)


def test_the_step_after_begins_with_the_weights_and_is_as_long(hosted):
    result = sim.simulate(hosted(plan=OPTIMIZER, run={"num_steps": 2}))
    p, t = result.program, result.timeline
    work = (p.stream == 0) & (p.action == ACTION_CODE["F"])
    assert t.start[work & (p.step == 1)].min() == t.end[rows_of(p, "fetch")[0]]
    assert result.step_time_s == result.first_step_s


# 4 shards, each (2 + 2) / 4 bytes a parameter over the link and 28 / 4 by the host, of whose memory
# each of the 4 ranks has a fourth.
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_with_zero_only_the_shard_moves(hosted, zero):
    s = hosted(plan={**OPTIMIZER, "dp": 4, "zero": zero}, run=ONE)
    result, n = sim.simulate(s), -(-num_parameters(s.model) // 4)
    assert lasting(result, "offload") == lasting(result, "fetch") == [to_ticks(2e-9 * n)]
    assert lasting(result, "host") == [to_ticks(28e-9 / 10 * 4 * n)]


def test_gathers_of_the_next_step_wait_for_the_weights(hosted):
    s = hosted(plan={**OPTIMIZER, "dp": 4, "zero": 3}, run={"num_steps": 2})
    p, t = (result := sim.simulate(s)).program, result.timeline
    gathers = rows_of(p, "unshard")
    back = t.end[rows_of(p, "fetch")].max(initial=0, where=p.step[rows_of(p, "fetch")] == 0)
    assert t.start[gathers[p.step[gathers] == 1]].min() == back


# The stages of a rank clip together before the first of them goes to the host.
def test_no_gradient_of_a_rank_goes_to_the_host_before_all_are_clipped(hosted):
    plan = {**OPTIMIZER, "pp": 2, "chunks": 2, "schedule": "Interleaved1F1B"}
    result = sim.simulate(hosted(plan=plan, run={**ONE, "clip_grad": True}))
    p, t = result.program, result.timeline
    clipped = [p.costs[cost].name == "clip gradients" for cost in p.cost]
    for rank in range(2):
        mine = p.rank == rank
        copies = rows_of(p, "offload")[mine[rows_of(p, "offload")]]
        assert len(copies) == 2
        assert t.start[copies].min() == t.end[clipped & mine].max()


# ---- its memory ----


# Adam in bf16: master 4, moments 8 go; on the host lie those and the gradient, 14 as in Ren et al.;
# 16 with fp32 gradients. fp32 weights are on either side. Stage 3 leaves low-precision shards.
@pytest.mark.parametrize(
    ("plan", "run", "device", "host"),
    [
        ({}, {}, (2, 2, 0), 14),
        ({}, {"gradient_dtype": "fp32"}, (2, 4, 0), 16),
        ({}, {"precision": "fp32"}, (4, 4, 0), 16),
        ({"dp": 4, "zero": 1}, {}, (2, 2, 0), 3.5),
        ({"dp": 4, "zero": 2}, {}, (2, 0.5, 0), 3.5),
        ({"dp": 4, "zero": 3}, {}, (0.5, 0.5, 0), 3.5),
    ],
)
def test_bytes_of_a_parameter_on_the_device_and_on_the_host(hosted, plan, run, device, host):
    s = hosted(plan={**OPTIMIZER, **plan}, run=run)
    (memory,) = static_memory(s)
    assert bytes_per_parameter(s) == device
    assert memory.optimizer == 0
    assert memory.host == host * memory.params


def test_the_device_holds_less_by_the_optimizer(hosted):
    plain, away = (sim.simulate(hosted(plan=plan)) for plan in ({}, OPTIMIZER))
    n = num_parameters(plain.scenario.model)
    assert plain.peak_memory_bytes[0] - away.peak_memory_bytes[0] == 12 * n


# 2 stages on 2 ranks of one node: 14 bytes of every parameter, of the tied embedding twice.
def test_the_report_says_what_lies_on_the_host(hosted):
    s = hosted(plan={**OPTIMIZER, "pp": 2})
    result = sim.simulate(s)
    expected = sum(14 * stage.params for stage in static_memory(s))
    assert result.summary.host_memory_bytes == expected
    assert "on the fullest node: fits (optimizer " in str(result)
    assert "on the fullest node: fits (optimizer " in memory_text(result, s)


def test_what_the_host_cannot_hold_does_not_fit(hosted):
    result = sim.simulate(hosted(plan=OPTIMIZER, host={"memory": 1e6}))
    assert result.summary.fits_device
    assert not result.summary.fits
    assert "of 1 MB on the fullest node: DOES NOT FIT" in str(result)


# ---- activations ----


def layers_of(result, action):
    """Return start and end of the work of each layer of rank 0's first microbatch, in order."""
    p, t = result.program, result.timeline
    mine = (p.rank == 0) & (p.stream == 0) & (p.action == ACTION_CODE[action]) & (p.layer >= 0)
    rows = np.flatnonzero(mine & (p.microbatch == 0))
    return t.start[rows], t.end[rows]


# Copies slower than work (T > C): layer 0 ends at t0, its copy at t0 + T, the next ones T later
# each. Layer i + 2 begins when copy i has ended, so layers 2 and 3 wait T - C each, as does the
# head. The last copy away ends at t0 + 4T, the first one back at t0 + 5T: then one layer's backward
# begins every T.
def test_layers_wait_for_copies_that_are_slower_than_they_are(hosted):
    s = hosted(plan=ACTIVATIONS, batch=1, run=ONE)
    result = sim.simulate(s)
    copy = to_ticks(blocks(s.model, shapes(s)).layer.kept_bytes / 1e9)
    start, end = layers_of(result, "F")
    assert copy > (end - start).max()
    assert lasting(result, "offload") == lasting(result, "fetch") == [copy] * 4
    assert (start - end[0]).tolist()[1:] == [0, copy, 2 * copy]
    back, _ = layers_of(result, "B")
    assert (back - end[0]).tolist() == [5 * copy, 6 * copy, 7 * copy, 8 * copy]


# max(0, copy - compute) is nothing where copies are faster: the same ticks as without.
def test_copies_that_are_faster_than_layers_are_free(hosted):
    fast = {"bandwidth": 1e13, "memory_bandwidth": 1e13}
    plain, away = (
        sim.simulate(hosted(plan=plan, host=fast, run=ONE)) for plan in ({}, ACTIVATIONS)
    )
    assert away.times.makespan == plain.times.makespan
    assert not away.breakdown.of("offload").any()


# All of a step's copies lie in a row here: what is exposed is the step's length beyond the plain.
@pytest.mark.parametrize("plan", [ACTIVATIONS, OPTIMIZER, {**ACTIVATIONS, **OPTIMIZER}])
def test_what_copies_add_to_a_step_is_named(hosted, plan):
    plain, away = (sim.simulate(hosted(plan=p, run=ONE)) for p in ({}, plan))
    b, before = away.breakdown, plain.breakdown
    assert (b.ticks.sum(axis=0) == b.window).all()
    saved = before.of("optimizer") - b.of("optimizer")
    assert b.of("offload") == away.times.makespan - plain.times.makespan + saved
    assert b.of("offload") > 0
    assert b.bubble == 0


# GPipe keeps 4 microbatches of 4 layers; with copies at most one layer that computes and two that
# come or go are on the device, all 16 on the host. Embedding and head stay: 4 of each.
def test_the_device_holds_few_layers_and_the_host_all(hosted, llama):
    s = hosted(model=llama, plan={**ACTIVATIONS, "schedule": "GPipe"}, run=ONE)
    parts, result = blocks(s.model, shapes(s)), sim.simulate(s)
    ends = 4 * (parts.embedding.kept_bytes + parts.head.kept_bytes)
    assert result.activations.peak[0] <= ends + 3 * parts.layer.kept_bytes
    assert result.summary.host_memory_bytes == 16 * parts.layer.kept_bytes


def test_a_copy_back_waits_for_the_copy_away_and_memory_ends_at_nothing(hosted):
    result = sim.simulate(hosted(plan={**ACTIVATIONS, "pp": 2}, run=ONE))
    p, t = result.program, result.timeline
    away = {(p.rank[r], p.microbatch[r], p.layer[r]): t.end[r] for r in rows_of(p, "offload")}
    back = {(p.rank[r], p.microbatch[r], p.layer[r]): t.start[r] for r in rows_of(p, "fetch")}
    assert away.keys() == back.keys()
    assert len(away) == 4 * 4
    assert all(back[key] >= away[key] for key in away)
    for rank in range(2):
        assert result.memory.of_rank(rank)[1][-1] == 0


# The first 2 of 4 layers copy (T), 2 do not: layer 2 begins with the end of copy 0 at t0 + T, layer
# 3 with that of copy 1. Back, copy 1 begins when layer 3 is through, at e, and ends at e + T; copy
# 0 follows it, to e + 2T, for layer 2 is through long before.
def test_layers_that_do_not_copy_are_the_time_of_those_that_do(hosted):
    s = hosted(plan={**ACTIVATIONS, "offload_layers": 2}, batch=1, run=ONE)
    result = sim.simulate(s)
    copy = to_ticks(blocks(s.model, shapes(s)).layer.kept_bytes / 1e9)
    assert lasting(result, "offload") == lasting(result, "fetch") == [copy] * 2
    start, end = layers_of(result, "F")
    assert (start - end[0]).tolist()[1:] == [0, copy, 2 * copy]
    back, through = layers_of(result, "B")
    assert (back - through[0]).tolist()[1:] == [0, copy, 2 * copy]


# One layer copies, 3 do not: only the last one waits for it, and for that one's end it waits back.
def test_a_single_copy_has_the_time_of_all_other_layers(hosted):
    s = hosted(plan={**ACTIVATIONS, "offload_layers": 1}, batch=1, run=ONE)
    result = sim.simulate(s)
    copy = to_ticks(blocks(s.model, shapes(s)).layer.kept_bytes / 1e9)
    start, end = layers_of(result, "F")
    assert start[1:3].tolist() == end[:2].tolist()
    assert start[3] == end[0] + copy
    p, t = result.program, result.timeline
    back, through = layers_of(result, "B")
    assert t.start[rows_of(p, "fetch")].tolist() == [through[0]]
    assert back[3] == through[0] + copy


# The first 3 of 4 layers of 4 microbatches, which GPipe keeps all: 12 on the host.
def test_so_many_layers_lie_on_the_host(hosted, llama):
    plan = {**ACTIVATIONS, "schedule": "GPipe", "offload_layers": 3}
    s = hosted(model=llama, plan=plan, run=ONE)
    parts, result = blocks(s.model, shapes(s)), sim.simulate(s)
    assert result.summary.host_memory_bytes == 12 * parts.layer.kept_bytes


def test_as_many_as_there_are_is_all_of_them(hosted):
    plans = (ACTIVATIONS, {**ACTIVATIONS, "offload_layers": 4})
    all_of_them, four = (sim.simulate(hosted(plan=plan, run=ONE)) for plan in plans)
    assert all_of_them.times.makespan == four.times.makespan


# With full recomputation a layer keeps its input only: tokens x hidden x 2 bytes.
def test_what_recomputation_leaves_is_all_that_moves(hosted):
    s = hosted(plan={**ACTIVATIONS, "recompute": "full"}, batch=1, run=ONE)
    program = lower(s)
    sizes = {program.costs[program.cost[r]].kernels[0].bytes for r in rows_of(program, "offload")}
    assert sizes == {32 * 64 * 2}


# ---- however it runs ----

PLANS = [
    {"dp": 2, "tp": 2, "pp": 2},
    {"dp": 4, "zero": 1, "tp": 2},
    {"dp": 4, "zero": 2, "dp_shard": 2},
    {"dp": 4, "zero": 3, "recompute": "full"},
    {"pp": 2, "chunks": 2, "schedule": "Interleaved1F1B", "dp": 2},
    {"pp": 2, "schedule": "GPipe", "p2p_overlap": False, "recompute": "selective"},
    {"dp": 2, "zero": 3, "offload_layers": 3, "recompute": "full", "recompute_layers": 1},
    {"tp": 2, "sequence_parallel": True, "tp_overlap": "all", "dp": 2, "grad_overlap": False},
]


@pytest.mark.parametrize("plan", PLANS)
def test_engines_agree_folded_and_whole(hosted, llama, plan):
    s = hosted(model=llama, plan={**OPTIMIZER, **ACTIVATIONS, **plan}, run={"num_steps": 2})
    alike_however_it_runs(s)


@pytest.mark.parametrize("plan", PLANS[:7])
def test_detail_moves_no_time(hosted, llama, plan):
    results = [
        sim.simulate(hosted(model=llama, plan={**OPTIMIZER, **ACTIVATIONS, **plan},
                            run={**ONE, "detail": detail, "clip_grad": True}))
        for detail in ("kernel", "layer", "stage")
    ]  # fmt: skip
    times = [result.step_time_s for result in results]
    assert times == pytest.approx([times[0]] * 3, rel=1e-6)


def test_nothing_changes_where_nothing_is_offloaded(hosted, scenario_of):
    plan = {"dp": 2, "pp": 2}
    assert lower(hosted(plan=plan)) == lower(scenario_of(plan=plan))


# ---- what is refused ----


@pytest.mark.parametrize("name", ["offload_optimizer", "offload_activations"])
def test_a_node_without_a_host_is_refused(scenario_of, name):
    with pytest.raises(DescriptionError, match=f"plan.{name}: round node does not say what its"):
        scenario_of(plan={name: True})


@pytest.mark.parametrize(
    ("plan", "run", "message"),
    [
        ({"dp": 2, "gradient_exchange": "parameter_server"}, {}, "'parameter_server' brings"),
        ({"dp": 2, "gradient_exchange": "parameter_server", "staleness": 1}, {}, "brings"),
        ({}, {"optimizer": "muon"}, "'muon' multiplies matrices"),
        ({}, {"optimizer": "adam8bit"}, "'adam8bit' has kernels for devices only"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(hosted, plan, run, message):
    with pytest.raises(DescriptionError, match=message):
        hosted(plan={**OPTIMIZER, **plan}, run=run)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"offload_layers": 2}, "Plan.offload_layers: 2 has no effect with offload_activations fa"),
        ({**ACTIVATIONS, "offload_layers": 5}, "plan.offload_layers 5: no stage has more than 4"),
        ({**ACTIVATIONS, "offload_layers": 1, "pp": 2, "stage_cut": "time"}, "hangs on the cut"),
    ],
)
def test_layers_that_cannot_be_offloaded_are_refused(hosted, plan, message):
    with pytest.raises(DescriptionError, match=message):
        sim.simulate(hosted(plan=plan))


# ---- the catalogue ----


@pytest.mark.parametrize("node", ["dgx-a100", "dgx-h100", "dgx-h200", "gb200-nvl72", "gb300-nvl72"])
def test_nodes_of_the_catalogue_describe_hosts(node):
    assert node in catalog.names("nodes")
    s = load("gpt2-xl-1gpu", {"cluster.node": node, "plan.offload_optimizer": True})
    assert s.cluster.node.host is not None


# GPT-2 XL on 8 A100, 12.48 GB/s a device (0.78 x 32 / 2) and 40.96 of the memory: 2 x 2 bytes over
# the former, 28 over the latter, of each of 1,557,611,200 parameters: 499.24 ms + 1,064.77 ms.
def test_an_update_of_gpt2_xl_on_the_host_of_a_dgx_a100():
    changes = {"cluster.node": "dgx-a100", "plan.offload_optimizer": True, "run.precision": "bf16",
               "run.global_batch_size": 8, "run.num_steps": 1}  # fmt: skip
    result = sim.simulate(load("gpt2-xl-ddp", changes))
    assert result.summary.exposed_communication_s["offload"] == pytest.approx(1.56401, rel=1e-5)
    assert "12.48 GB/s for each device and direction" in str(result)
