"""Checkpoints between steps, and what writing and reading cost each other, worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data import loading  # noqa: F401  # a fixture
from test_scenario_parity import alike_however_it_runs

import simulator as sim
from simulator.describe.loader import load
from simulator.describe.save import Save
from simulator.describe.storage import Storage
from simulator.errors import DescriptionError
from simulator.lower import lower
from simulator.lower.layers import num_parameters
from simulator.lower.save import parts_of
from simulator.program_text import format_program, parse_program

DISK = Storage(kind="shared", bandwidth=1e9, node_bandwidth=1e15)
FLUID = {"network": "fluid"}


@pytest.fixture(scope="session")
def saving(loading):  # noqa: F811
    """Return a function to a tiny scenario with a checkpoint, without a loader unless stated."""

    def build(*, data=None, save=None, storage=DISK, **more):
        s = loading(data=data, storage=storage, **more)
        s = s if data else replace(s, data=None)
        return replace(s, checkpoint=Save(storage="disk", **(save or {})))

    return build


def state(s):
    """Return the bytes of bf16's fp32 copy and Adam's two states: 12 a parameter."""
    return 12 * num_parameters(s.model)


def spans(result, name):
    """Return start and end of all ops of a stream, in seconds."""
    p, t = result.program, result.timeline
    rows = np.flatnonzero(p.stream == p.streams.index(name))
    return t.start[rows] / 1e12, t.end[rows] / 1e12


# ---- what a checkpoint takes ----


# 12 N bytes to the host at 1e9 bytes/s and from there to storage at 1e9: 24 N ns for one rank.
@pytest.mark.parametrize("run", [{}, FLUID])
@pytest.mark.parametrize(("asynchronous", "copies"), [(False, 2), (True, 1)])
def test_a_step_waits_for_the_write_or_for_the_snapshot(saving, run, asynchronous, copies):
    s = saving(save={"asynchronous": asynchronous}, run=run)
    result = sim.simulate(s)
    use = result.summary.checkpoint
    assert use.state_bytes == state(s)
    assert use.blocked_s == pytest.approx(copies * state(s) / 1e9, rel=1e-6)
    assert use.write_s == pytest.approx(state(s) / 1e9, rel=1e-6)
    assert result.summary.shares["save"] > 0.4
    assert result.summary.bottleneck.startswith("checkpoint:")


# 4 replicas save a quarter each, from four hosts' links and over one storage: 12 N / 4 and 12 N ns.
# Where the first saves all, it copies all and the others wait for it.
@pytest.mark.parametrize("run", [{}, FLUID])
@pytest.mark.parametrize(("sharded", "snapshot"), [(True, 0.25), (False, 1.0)])
def test_shards_are_copied_side_by_side(saving, run, sharded, snapshot):
    s = saving(plan={"dp": 4}, save={"sharded": sharded}, run=run)
    use = sim.simulate(s).summary.checkpoint
    size = state(s)
    assert use.state_bytes == pytest.approx(size)
    assert use.snapshot_s == pytest.approx(snapshot * size / 1e9, rel=1e-6)
    assert use.write_s == pytest.approx(size / 1e9, rel=1e-6)
    assert use.blocked_s == pytest.approx((1 + snapshot) * size / 1e9, rel=1e-2)


def test_ranks_of_a_pipeline_save_their_own_stages(saving):
    s = saving(plan={"pp": 2, "dp": 2})
    parts = parts_of(s)
    tied = 12 * s.model.vocab_size * s.model.hidden_size  # the embedding lies on both ends
    assert 2 * sum(part.bytes for part in parts) == state(s) + tied
    use = sim.simulate(s).summary.checkpoint
    assert use.write_s >= (state(s) + tied) / 1e9 * 0.999
    # reading back, each rank reads all of its stage: 4 x 2 parts from storage, then 2 to the device
    assert use.restore_s == pytest.approx((8 + 2) * max(part.bytes for part in parts) / 1e9)


def test_a_checkpoint_that_others_wait_for_in_bubbles_is_the_bottleneck(saving):
    slow = replace(DISK, bandwidth=1e8)
    result = sim.simulate(saving(plan={"pp": 4}, storage=slow))
    assert result.summary.bottleneck.startswith("checkpoint:")


# Half the rate of reading: twice the time.
@pytest.mark.parametrize("run", [{}, FLUID])
def test_writing_has_a_rate_of_its_own(saving, run):
    s = saving(storage=replace(DISK, write_bandwidth=5e8), run=run)
    use = sim.simulate(s).summary.checkpoint
    assert use.write_s == pytest.approx(2 * state(s) / 1e9, rel=1e-6)
    assert use.restore_s == pytest.approx(2 * state(s) / 1e9, rel=1e-6)  # and to the device


# ---- writing and reading on one storage ----


# Reads hold the step back: 4 batches of 1 MB at 1 GB/s are 4 ms. A write of S bytes beside them has
# half of the storage, so it takes 2 S ns, and the reads lose S ns in all.
@pytest.mark.parametrize("dp", [1, 2])
def test_a_burst_and_loading_slow_each_other_by_what_sharing_says(saving, dp):
    more = {
        "data": {"sample_bytes": 1e6 / dp, "workers": 2}, "plan": {"dp": dp},
        "run": {**FLUID, "num_steps": 8},
    }  # fmt: skip
    save = {"asynchronous": True, "before_step": 3}
    s = saving(save=save, **more)
    result, plain = sim.simulate(s), sim.simulate(replace(s, checkpoint=None))
    assert plain.step_time_s == pytest.approx(4e-3, rel=1e-3)
    assert result.summary.data.slowest == "storage"
    size = state(s)
    assert result.summary.checkpoint.write_s == pytest.approx(2 * size / 1e9, rel=1e-2)
    lost = float(result.step_ends[-1] - plain.step_ends[-1]) / 1e12
    snapshot = size / dp / 1e9  # before the loader's reads are held up it has a batch or two ready
    assert size / 1e9 - 1e-4 <= lost <= size / 1e9 + snapshot


def test_storages_of_their_own_do_not_slow_each_other(saving):
    data = {"sample_bytes": 1e6, "workers": 2}
    s = saving(data=data, save={"asynchronous": True, "before_step": 3},
               run={**FLUID, "num_steps": 8})  # fmt: skip
    apart = replace(s.cluster, storage={"disk": DISK, "other": DISK})
    s = replace(s, cluster=apart, checkpoint=replace(s.checkpoint, storage="other"))
    result = sim.simulate(s)
    assert result.summary.checkpoint.write_s == pytest.approx(state(s) / 1e9, rel=1e-6)


# 8 ranks of 2 nodes read over one server at 1 GB/s and through a network of 0.25 GB/s a node:
# 4 MB of each node in a step take 16 ms; over the server alone they would take 8.
def test_reads_share_the_network_of_their_node(loading):  # noqa: F811
    data = {"sample_bytes": 250e3, "workers": 2}
    for network in ("fluid", "alpha-beta"):
        s = loading(
            data=data, storage=replace(DISK, node_bandwidth=2.5e8), plan={"dp": 8}, nodes=2,
            run={"network": network, "num_steps": 4},
        )  # fmt: skip
        assert sim.simulate(s).step_time_s == pytest.approx(16e-3, rel=1e-3)


# Gradients go both ways over an adapter; batches come in.
def test_reads_through_adapters_meet_gradients_there(loading):  # noqa: F811
    data = {"sample_bytes": 1e5, "workers": 2}
    s = loading(data=data, storage=Storage(kind="shared", bandwidth=1e15), plan={"dp": 2}, nodes=2,
                run=FLUID)  # fmt: skip
    used = sim.simulate(s).links
    size = dict(zip(used.traffic.names, used.bytes.tolist(), strict=True))
    more = size["network>node0/nic0"] - size["node0/nic0>network"]
    assert more == pytest.approx(4e5)  # four batches, over what gradients put on both


# ---- engines, text, what is refused ----


@settings(max_examples=12, deadline=None)
@given(draw=st.data())
def test_engines_agree_on_random_checkpoints(saving, draw):
    pick = draw.draw
    sharded = pick(st.booleans())
    plan = {"dp": pick(st.integers(1, 3)), "pp": pick(st.integers(1, 2)),
            "zero": pick(st.sampled_from([0, 1, 3])) if sharded else 0}  # fmt: skip
    run = {"network": pick(st.sampled_from(["fluid", "alpha-beta"])), "num_steps": 3}
    s = saving(
        data={"sample_bytes": pick(st.floats(1e3, 1e5)), "workers": pick(st.integers(1, 3))},
        save={"asynchronous": pick(st.booleans()), "sharded": sharded,
              "barrier": pick(st.booleans()), "restore": pick(st.booleans()),
              **pick(st.sampled_from([{}, {"before_step": 1}, {"every": 1}]))},
        plan=plan, run=run, batch=2 * plan["dp"],
    )  # fmt: skip
    if run["network"] == "alpha-beta":
        alike_however_it_runs(s)
    compiled, reference = (sim.simulate(s, engine=e) for e in ("compiled", "reference"))
    assert compiled.times == reference.times


def test_flows_of_storage_keep_their_text(saving):
    program = lower(saving(data={"sample_bytes": 1e3}, run=FLUID))
    assert parse_program(format_program(program)) == program


TOML = """
model = "llama-3-8b"
[cluster.node]
from = "dgx-h100"
[cluster.node.host]
bandwidth = "25 GB/s"
efficiency = 1.0
memory = "2 TB"
memory_bandwidth = "600 GB/s"
memory_efficiency = 1.0
[cluster.storage.nfs]
kind = "shared"
bandwidth = "2 GB/s"
[plan]
dp = 8
zero = 3
recompute = "full"
[run]
global_batch_size = 8
sequence_length = 8192
detail = "stage"
[checkpoint]
storage = "nfs"
"""


# 8.03e9 parameters x 12 bytes = 96.4 GB: 48 s at 2 GB/s, 360 s at 0.268; a snapshot to the hosts
# of 8 devices at 25 GB/s each blocks for 0.48 s.
def test_a_checkpoint_of_8_billion_parameters_takes_what_storage_gives(tmp_path):
    (tmp_path / "s.toml").write_text(TOML)

    def use(**overrides):
        s = load(tmp_path / "s.toml", {k.replace("__", "."): v for k, v in overrides.items()})
        return sim.simulate(s).summary.checkpoint

    assert use().state_bytes == pytest.approx(96.4e9, rel=1e-3)
    assert use().write_s == pytest.approx(48.2, rel=1e-3)
    slow = use(cluster__storage__nfs__bandwidth="0.268 GB/s")
    assert slow.write_s == pytest.approx(360, rel=1e-2)
    quick = use(checkpoint__asynchronous=True)
    assert quick.blocked_s == pytest.approx(0.48, rel=2e-2)
    assert quick.beyond_s > 40


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("checkpoint.storage", "nsf", "checkpoint.storage 'nsf' is not one of cluster.storage"),
        ("run.num_steps", 1, "is taken between two steps, and run.num_steps is 1"),
        ("checkpoint.before_step", 2, "before_step 2: steps are 0 to 1; set run.num_steps = 3"),
        ("checkpoint.before_step", 0, "before_step: 0 must be at least 1"),
        ("checkpoint.every", 2, "every 2: the first one would be before step 2, of steps 0 to 1"),
        ("checkpoint.sharded", False, "under plan.zero 3 no rank has all of its state"),
        ("plan.offload_optimizer", True, "the state lies on the host already"),
        ("cluster.node", "dgx-1-v100", "does not say what its host offers, to which state"),
    ],
)
def test_a_checkpoint_that_makes_no_sense_is_refused(tmp_path, key, value, sentence):
    (tmp_path / "s.toml").write_text(TOML)
    with pytest.raises(DescriptionError) as caught:
        load(tmp_path / "s.toml", {key: value})
    assert sentence in str(caught.value)


def test_one_rank_cannot_save_the_experts_of_others():
    with pytest.raises(DescriptionError) as caught:
        load("mixtral-8x7b-64gpu", {
            "cluster.storage.nfs": "nfs-100g", "checkpoint.storage": "nfs", "plan.zero": 0,
            "checkpoint.sharded": False,
        })  # fmt: skip
    assert "with plan.ep 8 no rank has all experts" in str(caught.value)


def test_the_report_says_what_a_checkpoint_costs(saving):
    text = str(sim.simulate(saving(save={"asynchronous": True})))
    assert "  checkpoint  " in text
    assert "longer for each; reading it back takes" in text
    assert "computes again after the snapshot" in text
