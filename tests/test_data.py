"""Loaders worked out by hand: what each stage gives, who waits for whom, what is refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scenario_parity import alike_however_it_runs

import simulator as sim
from simulator.describe.cluster import Host
from simulator.describe.data import Data, cached_share, sample_of
from simulator.describe.loader import load
from simulator.describe.storage import Reading, Storage
from simulator.errors import DescriptionError
from simulator.lower import lower
from simulator.lower.data import batch_of, loaders
from simulator.report.data import stage_seconds
from simulator.units import to_ticks

HOST = Host(bandwidth=1e9, efficiency=1.0, memory=1e9, memory_bandwidth=1e10, memory_efficiency=1.0)
FAST = Storage(kind="local", bandwidth=1e15)


@pytest.fixture(scope="session")
def loading(scenario_of, cluster_of):
    """Return a function to a tiny scenario with a loader; by default all but compute is fast."""

    def build(*, data=None, storage=FAST, host=None, plan=None, nodes=1, **more):
        world = int(np.prod([(plan or {}).get(axis, 1) for axis in ("dp", "tp", "pp", "cp")]))
        cluster = cluster_of(nodes, world // nodes)
        node = replace(cluster.node, host=replace(HOST, **(host or {})))
        cluster = replace(cluster, node=node, storage={"disk": storage})
        s = scenario_of(plan=plan, cluster=cluster, **more)
        fast = {"sample_bytes": 1e3, "transform_time": 1e-9, "device_bytes": 1.0}
        return replace(s, data=Data(storage="disk", **{**fast, **(data or {})}))

    return build


def free_step(s):
    return sim.simulate(replace(s, data=None)).step_time_s


def rows_of(p, name):
    names = np.array([cost.name for cost in p.costs], object)
    return np.flatnonzero(names[p.cost] == name)


# ---- what storage takes ----


# 1 MB at 1 GB/s: 1 ms. Scattered over storage that then gives half: 2 ms. 10 reads of 1,000 a
# second: 10 ms. A disk is shared by the 2 readers of its node, a server by all 8.
@pytest.mark.parametrize(
    ("facts", "random", "milliseconds"),
    [
        ({"kind": "local"}, False, 2),
        ({"kind": "local", "random_access": 0.5}, True, 4),
        ({"kind": "local", "random_access": 0.5}, False, 2),
        ({"kind": "local", "iops": 1000.0}, False, 20),
        ({"kind": "shared"}, False, 8),
        ({"kind": "shared", "node_bandwidth": 1e8}, False, 20),
        ({"kind": "shared", "bandwidth": 1e12}, False, 1),
    ],
)
def test_a_read_takes_its_share_of_storage_and_of_the_network(facts, random, milliseconds):
    storage = Storage(**{"bandwidth": 1e9, **facts})
    what = Reading(1e6, 10, on_node=2, in_all=8, random=random)
    assert storage.transfer_seconds(what, 2e9, 1e9) == pytest.approx(milliseconds / 1e3)


# 10 requests of 20 ms each; 1 MB at 10 MB/s a request takes 100 ms, 1 of them in the transfer.
def test_a_reader_of_an_object_store_waits_for_requests(loading):
    store = Storage(kind="object", bandwidth=1e9, latency=0.02, request_bandwidth=1e7)
    what = Reading(1e6, 10, on_node=1, in_all=1, random=True)
    assert store.request_seconds(what, 0.001) == pytest.approx(0.2 + 0.099)


# ---- closed forms ----


# The loader gives 200 samples/s where devices take 1,000: they compute a fifth of the time.
def test_a_loader_of_a_fifth_of_the_rate_leaves_devices_a_fifth_of_the_time(loading):
    s = loading()
    each = free_step(s) / s.run.global_batch_size
    result = sim.simulate(loading(data={"transform_time": 5 * each}))
    use = result.summary.data
    assert use.utilisation == pytest.approx(0.2, rel=1e-4)
    assert use.waiting_share == pytest.approx(0.8, rel=1e-4)
    assert use.slowest == "workers"
    assert use.samples_per_s["compute"] == pytest.approx(5 * use.samples_per_s["workers"], rel=1e-4)
    assert result.summary.bottleneck.startswith("data (workers:")
    assert result.summary.shares["data"] == pytest.approx(0.8, rel=1e-4)
    assert "devices compute 20.0% of the step" in str(result)


# Each stage alone is made three times as slow as computing; the step takes what it takes.
@pytest.mark.parametrize("slow", ["storage", "workers", "copy"])
def test_an_overlapped_step_takes_the_longest_of_its_stages(loading, slow):
    s = loading()
    each = 3 * free_step(s) / s.run.global_batch_size
    changes = {
        "storage": {"storage": Storage(kind="local", bandwidth=1e3 / each)},
        "workers": {"data": {"transform_time": 4 * each, "workers": 4}},
        "copy": {"data": {"device_bytes": 1e9 * each}},
    }[slow]
    if slow == "storage":  # so many that reading keeps none of them from the next read
        changes["data"] = {"workers": 4}
    s = loading(run={"num_steps": 4}, **changes)
    result = sim.simulate(s)
    longest = max(stage_seconds(s).values()) * s.num_microbatches
    assert result.step_time_s == pytest.approx(longest, rel=1e-3)
    assert result.summary.data.slowest == slow
    assert result.summary.bottleneck.startswith(f"data ({slow}:")


# A request of 10 ms, 100 kB at 10 MB/s a connection: 20 ms for each worker, until the store, which
# gives one in 4 ms, or the device holds them back.
@pytest.mark.parametrize(("workers", "each"), [(1, 20e-3), (2, 10e-3), (4, 5e-3), (8, 4e-3)])
def test_workers_hide_the_latency_of_an_object_store_until_its_bandwidth_binds(
    loading, workers, each
):
    store = Storage(kind="object", bandwidth=2.5e7, latency=10e-3, request_bandwidth=1e7)
    data = {"sample_bytes": 1e5, "workers": workers}
    s = loading(data=data, storage=store, batch=8, run={"num_steps": 4})
    result = sim.simulate(s)
    assert result.step_time_s == pytest.approx(8 * each, rel=1e-3)
    assert result.summary.data.slowest == ("storage" if workers == 8 else "workers")


def test_with_nothing_overlapped_a_step_takes_the_sum_of_its_stages(loading):
    data = {"overlap": False, "sample_bytes": 1e6, "transform_time": 2e-3, "device_bytes": 1e6}
    s = loading(data=data, storage=Storage(kind="local", bandwidth=1e9))
    # 1 ms to read, 2 ms to transform, 2 MB of memory traffic at 1e10: 0.2 ms, 1 ms to the device
    expected = free_step(s) + 4 * 4.2e-3
    assert sim.simulate(s).step_time_s == pytest.approx(expected, rel=1e-9)


def test_a_loader_that_is_fast_enough_costs_nothing_after_the_first_step(loading):
    s = loading()
    each = free_step(s) / s.run.global_batch_size
    result = sim.simulate(loading(data={"transform_time": 1.8 * each, "workers": 2}))
    assert result.step_time_s == pytest.approx(free_step(s), rel=1e-9)
    assert result.summary.shares["data"] == 0
    assert result.summary.data.slowest == "compute"
    assert "data" not in result.summary.bottleneck
    assert result.first_step_s > result.step_time_s


# GPipe takes its four batches in a burst, in a third of the step: a loader that is fast enough on
# average has them ready where it works that far ahead, and else not.
@pytest.mark.parametrize(("factor", "waits"), [(1, True), (4, False)])
def test_prefetching_bridges_bursts(loading, factor, waits):
    plain = {"plan": {"schedule": "GPipe"}, "run": {"num_steps": 4}}
    each = free_step(loading(**plain)) / 4
    data = {"transform_time": 0.9 * each, "prefetch_factor": factor}
    result = sim.simulate(loading(data=data, **plain))
    assert (result.summary.shares["data"] > 0.01) == waits
    assert (result.step_time_s > 1.01 * 4 * each) == waits


# 4 workers on 2 cores: as fast as 2 on cores of their own.
def test_workers_past_the_cores_take_turns(loading):
    slow = {"transform_time": 1e-2, "workers": 4}
    steps = [
        sim.simulate(loading(data=slow | data, host={"cores": cores})).step_time_s
        for data, cores in (({}, 2), ({"workers": 2}, 2), ({}, 4))
    ]
    assert steps[0] == pytest.approx(steps[1], rel=1e-6)
    assert steps[0] == pytest.approx(2 * steps[2], rel=1e-2)


# Of pageable memory a copy takes 1 / 0.4 as long, and nothing is computed beside it.
def test_copies_from_pageable_memory_are_slower_and_beside_nothing(loading):
    copied = {"device_bytes": 1e6}
    s = loading(data=copied | {"pinned": False})
    assert sim.simulate(s).step_time_s == pytest.approx(free_step(s) + 4 * 2.5e-3, rel=1e-6)
    assert stage_seconds(s)["copy"] == pytest.approx(2.5e-3)


# ---- caches, presets, who loads ----


# 1,000 samples of 1 kB, of which a node keeps 250 kB; in order each of 2 nodes passes over half.
@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({"epoch": "first", "page_cache": None}, 0.0),
        ({}, 0.25),
        ({"page_cache": 2e6}, 1.0),
        ({"shuffle": False}, 0.0),
        ({"shuffle": False, "page_cache": 5e5}, 1.0),
    ],
)
def test_later_epochs_find_in_the_cache_what_fits(loading, changes, share):
    data = {"epoch": "later", "page_cache": 2.5e5, "num_samples": 1000, **changes}
    s = loading(data=data, plan={"dp": 2}, nodes=2)
    assert cached_share(s) == share
    whole = batch_of(replace(s, data=replace(s.data, epoch="first", page_cache=None)))
    assert batch_of(s).read == pytest.approx((1 - share) * whole.read)


def test_a_preset_gives_what_is_not_stated(loading):
    s = loading(sequence=32)
    tokens = Data(storage="disk", preset="pre-tokenised", workers=1)
    assert sample_of(replace(s, data=tokens)) == (64.0, pytest.approx(64e-9), 512.0)
    stated = replace(tokens, sample_bytes=100.0)
    assert sample_of(replace(s, data=stated)).bytes == 100.0


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        ({"pp": 2, "dp": 2}, {0, 2}),
        ({"pp": 2, "tp": 2}, {0, 1}),
        ({"pp": 2, "chunks": 2, "schedule": "DualPipe"}, {0, 1}),
    ],
)
def test_ranks_with_the_first_stage_load(loading, plan, ranks):
    s = loading(plan=plan, batch=4 * plan.get("dp", 1))
    p = lower(s).flat
    assert set(p.rank[rows_of(p, "read")].tolist()) == ranks
    assert loaders(s).in_all == len(ranks)


def test_without_a_data_path_nothing_is_loaded(loading):
    s = replace(loading(), data=None)
    p = lower(s)
    assert not {"storage", "pin", "copy", "worker 0"} & set(p.streams)
    assert sim.simulate(s).summary.data is None


# ---- who waits for whom ----


def test_batches_go_round_the_workers_and_no_further_than_they_may(loading):
    s = loading(data={"workers": 3, "prefetch_factor": 2, "transform_time": 1e-3}, batch=8)
    result = sim.simulate(s)
    p, t = result.program, result.timeline
    requests, copies = rows_of(p, "request"), rows_of(p, "copy")
    names = [p.streams[lane] for lane in p.stream[requests][:7]]
    assert names == [f"worker {n % 3}" for n in range(7)]
    assert (t.start[requests[6:22]] >= t.end[copies[:16]]).all()
    works = np.flatnonzero((p.stream == 0) & (p.action == 0))
    first = [works[(p.step[works] == k) & (p.microbatch[works] == m)].min()
             for k in range(2) for m in range(8)]  # fmt: skip
    assert (t.start[first] >= t.end[copies[:16]]).all()


def test_workers_begin_evenly_spread(loading):
    result = sim.simulate(loading(data={"workers": 4, "transform_time": 1e-2}))
    p, t = result.program, result.timeline
    begins = t.start[rows_of(p, "request")[:4]]
    assert np.diff(begins) == pytest.approx(to_ticks(1e-2) / 4, rel=1e-4)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_engines_agree_on_random_loaders(loading, data):
    draw = data.draw
    plan = {
        "dp": draw(st.integers(1, 3)), "pp": draw(st.integers(1, 3)), "tp": draw(st.integers(1, 2)),
        "schedule": draw(st.sampled_from(["1F1B", "GPipe"])),
        "zero": draw(st.sampled_from([0, 3])),
    }  # fmt: skip
    pinned, overlap = draw(st.booleans()), draw(st.booleans())
    path = {
        "workers": draw(st.integers(1, 4)) if overlap else 1, "overlap": overlap, "pinned": pinned,
        "prefetch_factor": draw(st.integers(1, 3)),
        "transform_time": draw(st.floats(1e-7, 1e-3)), "sample_bytes": draw(st.floats(1.0, 1e5)),
        "device_bytes": draw(st.floats(1.0, 1e5)),
    }  # fmt: skip
    storage = Storage(
        kind=draw(st.sampled_from(["local", "shared", "object"])), bandwidth=1e8,
        latency=draw(st.floats(0, 1e-4)), request_bandwidth=draw(st.floats(1e6, 1e9)),
    )  # fmt: skip
    s = loading(plan=plan, data=path, storage=storage, batch=3 * plan["dp"])
    alike_however_it_runs(s)
    folded, whole = (sim.simulate(s, folded=f).step_time_s for f in (True, False))
    assert folded == whole >= free_step(s)


# ---- the report and the figure ----


def test_the_figure_has_batches_n_to_n_plus_2_in_flight(loading):
    from simulator.report.loader_plot import loader_pieces

    s = loading()
    each = free_step(s) / 4
    data = {"workers": 2, "transform_time": 1.95 * each, "device_bytes": 9e8 * each}
    s = loading(data=data, batch=8)
    _, rows, pieces, _ = loader_pieces(sim.simulate(s))
    assert rows == ["storage", "worker 0", "worker 1", "pin", "copy", "compute"]
    names = np.array(pieces.name)
    computing = np.flatnonzero(np.isin(names, ["forward", "backward"]) & (pieces.batch >= 0))
    in_flight = []
    for at in computing.tolist():
        while_it_runs = (pieces.start < pieces.end[at]) & (pieces.end > pieces.start[at])
        flying = set(pieces.batch[while_it_runs & np.isin(names, ["transform", "copy"])].tolist())
        assert any(batch > pieces.batch[at] for batch in flying)
        in_flight.append({1, 2} <= {batch - int(pieces.batch[at]) for batch in flying})
    assert len(in_flight) == 16  # n + 1 is copied and n + 2 transformed, whichever n is computed
    assert all(in_flight)


def test_the_first_step_alone_says_what_it_waits_for(loading):
    assert any(
        note.startswith("run.num_steps 1: the step waits for the first batch")
        for note in sim.simulate(loading(run={"num_steps": 1})).notes
    )


# 10 ms longer, in which the loader gets ahead; then as ever.
def test_the_first_step_begins_with_its_warm_up(loading):
    cold, plain = (
        sim.simulate(loading(plan={"pp": 2}, run={"warm_up": seconds})) for seconds in (1e-2, 0.0)
    )
    assert cold.step_time_s == plain.step_time_s
    longer = cold.first_step_s - plain.first_step_s
    assert 0.99e-2 < longer <= 1e-2
    notes = sim.simulate(loading(run={"warm_up": 1e-2, "num_steps": 1})).notes
    assert any("run.warm_up with it" in note for note in notes)


TOML = """
model = "resnet-50"
[cluster]
node = "dgx-a100"
[cluster.storage.disk]
from = "nvme-gen4"
bandwidth = "27 GB/s"
[plan]
dp = 8
microbatch_size = 64
[run]
global_batch_size = 512
image_size = 224
precision = "fp16"
optimizer = "momentum"
[data]
storage = "disk"
preset = "imagenet-decode-augment"
workers = 8
"""


def test_a_scenario_file_describes_storage_and_data(trainsim, tmp_path):
    (tmp_path / "s.toml").write_text(TOML)
    code, out, _ = trainsim("run", "s.toml", "--plot", "loader=loader.png")
    assert code == 0
    assert "slowest: workers" in out
    assert "bottleneck  data (workers:" in out
    assert (tmp_path / "loader.png").stat().st_size > 10_000
    s = load(tmp_path / "s.toml")
    assert s.cluster.storage["disk"].bandwidth == 27e9
    assert s.cluster.storage["disk"].random_access == 0.5


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("data.workers", 0, "workers: 0 load nothing; to load in the training process"),
        ("data.storage", "disc", "data.storage 'disc' is not one of cluster.storage (it has disk)"),
        ("data.num_samples", 511, "data.num_samples 511 is less than one batch"),
        ("data.preset", "pre-tokenised", "is for tokens (run.sequence_length), which"),
        ("data.epoch", "later", "epoch: 'later' differs from 'first' by what page_cache keeps"),
        ("data.page_cache", "1 GB", "num_samples is missing"),
        ("data.overlap", False, "workers: 8 with overlap = false"),
        ("data.transform_time", "-1 ms", "transform_time: -0.001 seconds must be at least 0"),
        ("data.prefetch_factor", 0, "prefetch_factor: 0 must be at least 1"),
        ("data.wrokers", 2, "unknown key 'wrokers', did you mean 'workers'?"),
        ("cluster.node", "dgx-1-v100", "does not say what its host offers, through which data"),
        ("cluster.storage.disk.bandwidth", "0 GB/s", "bandwidth: 0 bytes/s must be above 0"),
        ("cluster.storage.disk.node_bandwidth", "1 GB/s", "node_bandwidth: disks of kind 'local'"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(tmp_path, key, value, sentence):
    (tmp_path / "s.toml").write_text(TOML)
    with pytest.raises(DescriptionError) as caught:
        load(tmp_path / "s.toml", {key: value})
    assert sentence in str(caught.value)


def test_a_figure_of_no_loader_is_refused_before_the_run(trainsim):
    code, out, err = trainsim("run", "gpt2-xl-1gpu", "--plot", "loader=x.png")
    assert (code, out) == (2, "")
    assert "there is no data path to draw" in err
