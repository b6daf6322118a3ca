"""What loaders and checkpoints have in the memory of hosts, by hand."""

from dataclasses import replace

import pytest
from test_data import free_step, loading  # noqa: F401  # a fixture
from test_save import saving, state  # noqa: F401  # a fixture

import simulator as sim
from simulator.report.host import host_memory

ROOM = {"memory": 1e9}


# Ahead are 3 workers x 4 batches of 1 MB, all of them ready, and pinned where they are: one of them
# is twice there while it is copied.
@pytest.mark.parametrize(("pinned", "most"), [(True, 13), (False, 12)])
def test_a_host_holds_the_batches_that_are_ready(loading, pinned, most):  # noqa: F811
    each = free_step(loading()) / 4
    data = {"workers": 3, "prefetch_factor": 4, "device_bytes": 1e6, "pinned": pinned}
    s = loading(data=data, batch=32, host={"bandwidth": 1e7 / each, "memory_bandwidth": 1e9 / each})
    parts = host_memory(sim.simulate(s), s)
    assert parts == {"batches": pytest.approx(most * 1e6, rel=1e-2)}


# A batch that is transformed is there as it was read, 5 MB, and as it will be, 1 MB.
def test_a_batch_that_is_transformed_counts_in_both_forms(loading):  # noqa: F811
    data = {"prefetch_factor": 1, "sample_bytes": 5e6, "device_bytes": 1e6, "transform_time": 1e-2}
    s = loading(data=data)
    assert host_memory(sim.simulate(s), s)["batches"] == pytest.approx(6e6)


def test_ranks_of_a_node_add_up_and_folding_moves_nothing(loading):  # noqa: F811
    data = {"device_bytes": 1e6, "transform_time": 1e-3}
    one = loading(data=data)
    two = loading(data=data, plan={"dp": 4}, nodes=2)
    each = host_memory(sim.simulate(one), one)["batches"]
    for folded in (True, False):
        result = sim.simulate(two, folded=folded)
        assert host_memory(result, two)["batches"] == pytest.approx(2 * each)


def test_a_page_cache_takes_its_memory(loading):  # noqa: F811
    data = {"epoch": "later", "page_cache": 2e8, "num_samples": 1000}
    s = loading(data=data)
    assert host_memory(sim.simulate(s), s)["page cache"] == 2e8


# 12 bytes a parameter from the snapshot's beginning to the write's end; of two replicas half each,
# on one node all of it again; where the first saves all, it has all.
@pytest.mark.parametrize("sharded", [True, False])
def test_a_snapshot_lies_on_hosts_until_it_is_written(saving, sharded):  # noqa: F811
    s = saving(plan={"dp": 2}, save={"sharded": sharded}, host=ROOM)
    assert host_memory(sim.simulate(s), s) == {"checkpoint": pytest.approx(state(s))}


def test_a_state_that_is_read_back_lies_there_too(saving):  # noqa: F811
    s = saving(plan={"dp": 2}, save={"restore": True}, host=ROOM)
    assert host_memory(sim.simulate(s), s) == {"checkpoint": pytest.approx(2 * state(s))}


def test_a_host_that_is_too_small_does_not_fit(loading):  # noqa: F811
    data = {"device_bytes": 1e6, "workers": 4, "prefetch_factor": 8}
    s = loading(data=data, host={"memory": 1e7})
    result = sim.simulate(s)
    assert not result.summary.fits
    assert "on the fullest node: DOES NOT FIT (batches" in str(result)
    assert any("a data.prefetch_factor below 8, hold less" in note for note in result.notes)
    assert sim.simulate(replace(s, data=replace(s.data, prefetch_factor=2))).summary.fits


def test_nothing_is_said_of_hosts_that_hold_nothing(scenario_of):
    result = sim.simulate(scenario_of())
    assert result.summary.host_memory_bytes == 0
    assert "  host  " not in str(result)
