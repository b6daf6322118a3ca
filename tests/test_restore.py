"""States read back, checkpoints one after the other, and who waits for whom, by hand."""

from dataclasses import replace

import numpy as np
import pytest
from test_data import loading, rows_of  # noqa: F401  # a fixture
from test_save import DISK, FLUID, saving, spans, state  # noqa: F401  # a fixture

import simulator as sim
from simulator.errors import DescriptionError
from simulator.lower import lower
from simulator.operate import operate
from simulator.program_text import format_program, parse_program


def first_step(s):
    return sim.simulate(s).first_step_s


# ---- reading back ----


# 12 N bytes at 1e9 bytes/s from storage, then to the device at as much: S + S. Four replicas read
# all of it each, over one storage: 4 S + S; where each holds a quarter: S + S / 4.
@pytest.mark.parametrize("run", [{}, FLUID])
@pytest.mark.parametrize(("plan", "sizes"), [({}, 2), ({"dp": 4}, 5), ({"dp": 4, "zero": 3}, 1.25)])
def test_a_run_that_begins_with_a_restore_begins_so_much_later(saving, run, plan, sizes):  # noqa: F811
    s = saving(plan=plan, save={"restore": True}, run=run)
    plain = replace(s, checkpoint=replace(s.checkpoint, restore=False))
    took = sizes * state(s) / 1e9
    assert first_step(s) - first_step(plain) == pytest.approx(took, rel=1e-6)
    for one in (s, plain):  # measured on the timeline, and said of a run without it
        use = sim.simulate(one).summary.checkpoint
        assert use.restore_s == pytest.approx(took, rel=1e-6)
        assert use.blocked_s == pytest.approx(sim.simulate(plain).summary.checkpoint.blocked_s)


def test_the_steady_step_does_not_show_a_restore(saving):  # noqa: F811
    s = saving(plan={"pp": 2, "dp": 2}, save={"restore": True}, run={"num_steps": 3})
    plain = replace(s, checkpoint=replace(s.checkpoint, restore=False))
    assert sim.simulate(s).step_time_s == sim.simulate(plain).step_time_s


def test_warm_up_follows_a_restore(saving):  # noqa: F811
    s = saving(save={"restore": True}, run={"warm_up": 1.0})
    warm = replace(s, run=replace(s.run, warm_up=0.0))
    assert first_step(s) == pytest.approx(first_step(warm) + 1.0, rel=1e-9)


# A loader that keeps storage busy leaves the state half of it, for as long as it reads ahead.
def test_a_restore_shares_storage_with_loaders(saving):  # noqa: F811
    data = {"sample_bytes": 1e6, "workers": 4, "prefetch_factor": 8}
    s = saving(data=data, save={"restore": True}, run=FLUID)
    alone = state(s) / 1e9
    took = sim.simulate(s).summary.checkpoint.restore_s - alone  # without the copy to the device
    assert took == pytest.approx(2 * alone, rel=1e-2)


# ---- one after the other ----


# An asynchronous checkpoint before every second step: training goes on C after it began, and the
# next one begins when two steps have been computed and the write has ended: max(2 T, W) + C apart.
@pytest.mark.parametrize("run", [{}, FLUID])
@pytest.mark.parametrize("slower", [0.05, 0.9, 20.0])
def test_a_checkpoint_waits_until_the_one_before_is_written(saving, run, slower):  # noqa: F811
    s = saving(
        save={"asynchronous": True, "every": 2},
        storage=replace(DISK, write_bandwidth=1e9 / slower), run={**run, "num_steps": 9},
    )  # fmt: skip
    copy = state(s) / 1e9
    result = sim.simulate(s)
    step = sim.simulate(replace(s, checkpoint=None)).step_time_s
    begins = spans(result, "snapshot")[0]
    expected = max(2 * step, slower * copy) + copy
    assert np.diff(begins) == pytest.approx([expected] * 3, rel=1e-6)
    use = result.summary.checkpoint
    assert use.count == 4
    assert use.waited_s == pytest.approx(max(0.0, slower * copy - 2 * step), rel=1e-6, abs=1e-11)
    assert ("until the one before was written" in str(result)) == (slower > 0.5)


@pytest.mark.parametrize("barrier", [True, False])
def test_a_checkpoint_is_complete_when_all_have_written(saving, barrier):  # noqa: F811
    s = saving(plan={"pp": 2}, save={"barrier": barrier})
    result = sim.simulate(s)
    p, t = result.program, result.timeline
    written = t.end[rows_of(p, "write")]
    works = np.flatnonzero((p.stream == 0) & (p.step == 1))
    begins = [int(t.start[works[p.rank[works] == rank]].min()) for rank in range(2)]
    assert written[0] != written[1]  # the last stage has a norm more
    assert begins[0] >= written[0]
    assert (begins[0] >= max(written)) == (barrier or written[0] > written[1])
    waits = [set(p.predecessors(int(works[p.rank[works] == r].min())).tolist()) for r in (0, 1)]
    complete = {int(row) for row in np.flatnonzero(p.stream == p.streams.index("write"))}
    assert all(one & complete for one in waits)
    assert (len(complete) == 4) == barrier


def test_folded_and_unfolded_runs_meet_at_the_same_tick(saving):  # noqa: F811
    plan = {"dp": 4, "pp": 2, "tp": 2}
    s = saving(plan=plan, save={"every": 1, "restore": True}, run={"num_steps": 3})
    folded, whole = (sim.simulate(s, folded=f) for f in (True, False))
    assert folded.step_ends.tolist() == whole.step_ends.tolist()
    assert len(folded.times.columns[0][0]) < len(whole.times.columns[0][0])


def test_meetings_of_all_ranks_keep_their_text(saving):  # noqa: F811
    program = lower(saving(plan={"dp": 2, "pp": 2}, save={"restore": True}, run=FLUID)).flat
    assert parse_program(format_program(program)) == program
    everybody = [program.groups[g].tolist() for g in range(len(program.groups))]
    assert [0, 1, 2, 3] in everybody


def test_a_checkpoint_is_taken_before_one_step_or_every_so_many(saving):  # noqa: F811
    with pytest.raises(DescriptionError, match="both say when it is taken"):
        saving(save={"every": 1, "before_step": 1})


# ---- over days ----


OPERATIONS = {
    "checkpoint": {"interval": "10 min"},
    "components": [{"name": "part", "mtbf": "5 h", "per": "cluster", "takes_node": False}],
}
DISK_OF_TWO_RATES = {"kind": "shared", "bandwidth": "1 GB/s", "write_bandwidth": "500 MB/s"}
DESCRIBED = {
    "cluster.node": "dgx-a100", "cluster.storage.disk": DISK_OF_TWO_RATES,
    "checkpoint": {"storage": "disk"}, "operations": OPERATIONS,
}  # fmt: skip


def days(**changes):
    s = sim.load("gpt2-xl-ddp", {**DESCRIBED, **changes})
    return s, operate(s, days=1, seeds=5)


# 18.7 GB at 0.5 GB/s and the copies to hosts before; read by eight ranks each at 1 GB/s, and
# copied.
def test_operations_take_the_times_of_simulated_checkpoints():
    s, o = days()
    use = sim.simulate(s).summary.checkpoint
    assert o.job.blocked == pytest.approx(use.blocked_s * 1e9, abs=1)
    assert o.job.restore == pytest.approx(use.restore_s * 1e9, abs=1)
    assert use.blocked_s == pytest.approx(use.state_bytes / 5e8, rel=0.01)
    assert use.restore_s == pytest.approx(8 * use.state_bytes / 1e9, rel=0.02)
    assert o.step_time_s == sim.simulate(replace(s, checkpoint=None, operations=None)).step_time_s
    assert "to write (simulated)" in str(o)
    assert o.to_dict()["checkpoint"]["is_simulated"]


def test_a_simulated_asynchronous_one_holds_back_for_its_snapshot():
    s, o = days(**{"checkpoint.asynchronous": True, "run.num_steps": 3, "checkpoint.every": 1})
    alone = replace(s, checkpoint=replace(s.checkpoint, every=None))
    use = sim.simulate(alone).summary.checkpoint
    assert use.blocked_s < 0.1 * use.write_s
    assert (o.job.blocked, o.job.drain) == (
        pytest.approx(use.blocked_s * 1e9, abs=1), pytest.approx(use.write_s * 1e9, abs=1)
    )  # fmt: skip


def test_what_is_stated_of_a_checkpoint_is_not_simulated():
    _, o = days(**{"operations.checkpoint.restore_time": "7 s"})
    assert o.job.restore == 7 * 10**9
    _, o = days(**{"operations.checkpoint.write_time": "60 s"})
    assert o.job.blocked == 60 * 10**9
    assert o.saved is None


def test_operations_do_not_change_what_is_synchronous():
    with pytest.raises(DescriptionError, match="is synchronous; set checkpoint"):
        days(**{"operations.checkpoint.asynchronous": True})
