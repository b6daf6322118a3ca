"""Samples of differing sizes: what their batches take, by hand and as statistics."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data import free_step, loading, rows_of  # noqa: F401  # a fixture
from test_save import DISK
from test_scenario_parity import alike_however_it_runs

import simulator as sim
from simulator.describe.data import sample_of
from simulator.describe.jitter import Jitter
from simulator.describe.loader import load
from simulator.describe.storage import Storage
from simulator.errors import DescriptionError
from simulator.hardware.sizes import drawn
from simulator.jitter import study
from simulator.lower import lower

SLOW = {"transform_time": 1e-3}


def lengths(result, name):
    """Return the seconds of all ops of a name, in order."""
    p, t = result.program, result.timeline
    rows = rows_of(p, name)
    return (t.end - t.start)[rows] / 1e12


# Two sizes, 1 and 3 kB: a batch of one sample takes half or one and a half of the mean.
def test_a_batch_takes_what_its_samples_do(loading):  # noqa: F811
    data = {**SLOW, "sizes": (1e3, 3e3), "sample_bytes": None}
    s = loading(data=data, storage=Storage(kind="local", bandwidth=1e7), batch=32)
    assert sample_of(s).bytes == 2e3
    result = sim.simulate(s)
    transforms, reads = lengths(result, "transform"), lengths(result, "read")
    assert set(transforms.round(12).tolist()) == {0.5e-3, 1.5e-3}
    assert set(reads.round(12).tolist()) == {1e-4, 3e-4}
    assert reads == pytest.approx(transforms / 5)  # of the same samples
    assert 0.3 < (transforms > 1e-3).mean() < 0.7


def test_sizes_have_the_stated_mean_and_spread(loading):  # noqa: F811
    s = loading(data={"size_cv": 0.7}, batch=4000)
    factor = drawn(lower(s), s).factor
    assert factor.mean() == pytest.approx(1, abs=4 * 0.7 / math.sqrt(factor.size))
    assert factor.std() == pytest.approx(0.7, rel=0.1)


# Of 16 samples a batch spreads a quarter as much.
def test_larger_batches_even_out(loading):  # noqa: F811
    s = loading(data={"size_cv": 0.5}, plan={"microbatch_size": 16}, batch=16 * 1000)
    assert drawn(lower(s), s).factor.std() == pytest.approx(0.5 / 4, rel=0.1)


# The slowest of 8 loaders holds all back, at the end, and at times another one before.
def test_replicas_draw_their_own_and_wait_for_the_slowest(loading):  # noqa: F811
    more = {"plan": {"dp": 8}, "run": {"num_steps": 8}}
    s = loading(data={**SLOW, "size_cv": 0.5}, **more)
    result = sim.simulate(s)
    factor = drawn(result.tiled, s).factor
    assert len(set(factor[0].tolist())) == 8
    by_step = factor[:32].reshape(8, 4, 8).sum(axis=1)
    took = result.step_ends[-1] / 1e9
    assert by_step.sum(axis=0).max() < took < by_step.max(axis=1).sum()


def test_ranks_of_tp_and_cp_load_the_same_samples(loading):  # noqa: F811
    s = loading(data={"size_cv": 0.5}, plan={"dp": 2, "tp": 2, "cp": 2}, sequence=32)
    factor = drawn(lower(s), s).factor
    assert factor.shape[1] == 8
    assert (factor[:, :4] == factor[:, :1]).all()
    assert (factor[:, 4:] == factor[:, 4:5]).all()
    assert (factor[:, 0] != factor[:, 4]).all()


def test_prefetching_bridges_large_samples(loading):  # noqa: F811
    each = free_step(loading()) / 4
    waits = []
    for factor in (1, 16):
        data = {"transform_time": 0.85 * each, "size_cv": 1.0, "prefetch_factor": factor}
        result = sim.simulate(loading(data=data, run={"num_steps": 40}))
        waits.append(result.step_ends[-1])
    assert waits[1] < 0.98 * waits[0]


# 10 reads of 1,000 a second take 10 ms whatever is in them, until bytes take longer.
def test_reads_that_their_number_bounds_take_no_longer_for_their_bytes(loading):  # noqa: F811
    disk = Storage(kind="local", bandwidth=1e9, iops=1000.0)
    data = {"sizes": (1e3, 1e9), "sample_bytes": None}
    for network in ("alpha-beta", "fluid"):
        s = loading(data=data, storage=disk, batch=16, run={"network": network})
        reads = lengths(sim.simulate(s), "read" if network == "alpha-beta" else "scattered_read")
        assert {round(x, 6) for x in reads.tolist()} == {1e-3, 1.0}


def test_another_seed_draws_other_samples_and_a_longer_run_begins_with_the_same(loading):  # noqa: F811
    def factors(batch, seed):
        s = loading(data={"size_cv": 0.5, "seed": seed}, batch=batch)
        return drawn(lower(s), s).factor[:, 0]

    assert (factors(4, 0)[:8] == factors(16, 0)[:8]).all()
    assert (factors(4, 0) != factors(4, 1)).all()


@pytest.mark.parametrize("network", ["alpha-beta", "fluid"])
def test_samples_of_one_size_are_alike(loading, network):  # noqa: F811
    more = {"storage": DISK, "plan": {"dp": 2}, "run": {"network": network}}
    data = {**SLOW, "sample_bytes": 1e5}
    one = sim.simulate(loading(data=data, **more))
    same = sim.simulate(loading(data={**SLOW, "sizes": (1e5,), "sample_bytes": None}, **more))
    assert same.step_ends.tolist() == one.step_ends.tolist()


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_engines_agree_on_samples_that_differ(loading, data):  # noqa: F811
    pick = data.draw
    plan = {"dp": pick(st.integers(1, 3)), "pp": pick(st.integers(1, 2)),
            "tp": pick(st.integers(1, 2))}  # fmt: skip
    network = pick(st.sampled_from(["alpha-beta", "fluid"]))
    store = Storage(
        kind=pick(st.sampled_from(["shared", "object"])), bandwidth=1e8, iops=1e5,
        latency=1e-5, request_bandwidth=1e7, node_bandwidth=pick(st.sampled_from([None, 1e8])),
    )  # fmt: skip
    s = loading(
        data={"size_cv": pick(st.floats(0.1, 2)), "sample_bytes": 1e4, "transform_time": 1e-5,
              "workers": pick(st.integers(1, 3))},
        storage=store, plan=plan, nodes=1, batch=2 * plan["dp"], run={"network": network},
    )  # fmt: skip
    if network == "alpha-beta":
        alike_however_it_runs(s)
    compiled, reference = (sim.simulate(s, engine=e) for e in ("compiled", "reference"))
    assert compiled.times == reference.times
    if network == "alpha-beta":
        j = study(sim.simulate(replace(s, jitter=Jitter(host_cv=0.1, samples=2))))
        assert np.isfinite(j.mean_s)


TOML = """
model = "resnet-50"
[cluster]
node = "dgx-a100"
[cluster.storage]
disk = "nvme-gen4"
[plan]
dp = 8
microbatch_size = 64
[run]
global_batch_size = 512
image_size = 224
[data]
storage = "disk"
preset = "imagenet-decode-augment"
sizes = ["20 kB", "90 kB", "110 kB", "600 kB"]
workers = 8
"""


def test_a_file_lists_sizes_with_units(trainsim, tmp_path):
    (tmp_path / "s.toml").write_text(TOML)
    assert load(tmp_path / "s.toml").data.sizes == (2e4, 9e4, 1.1e5, 6e5)
    code, out, _ = trainsim("run", "s.toml")
    assert code == 0
    assert "a sample has 205 kB on storage" in out
    assert "each is one of 4 sizes, drawn by each replica for itself (seed 0)" in out


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("data.sizes", ["20"], "sizes: '20' has no unit"),
        ("data.sizes", ["-1 kB"], "sizes: -1000 bytes must be above 0"),
        ("data.sizes", ["0 kB"], "sizes: 0 bytes must be above 0"),
        ("data.sizes", "20 kB", "'20 kB' is not a list"),
        ("data.sample_bytes", "1 kB", "sizes and sample_bytes both say how large samples are"),
        ("data.size_cv", 0.5, "sizes and size_cv both say how large samples are"),
        ("data.size_cv", -0.5, "size_cv: -0.5 must be at least 0"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(tmp_path, key, value, sentence):
    (tmp_path / "s.toml").write_text(TOML)
    with pytest.raises(DescriptionError) as caught:
        load(tmp_path / "s.toml", {key: value})
    assert sentence in str(caught.value)


def test_a_seed_that_draws_nothing_is_refused(loading):  # noqa: F811
    with pytest.raises(DescriptionError, match="3 draws nothing, for samples are all alike"):
        loading(data={"seed": 3})
