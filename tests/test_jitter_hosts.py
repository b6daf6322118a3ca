"""Jitter beside loaders and checkpoints: whose noise it is, and samples shared by processes."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from test_data import free_step, loading  # noqa: F401  # a fixture
from test_jitter import EVERYTHING
from test_save import DISK

import simulator as sim
from simulator.describe.jitter import Interference, Jitter, RandomSlow, Slow
from simulator.describe.save import Save
from simulator.errors import DescriptionError
from simulator.jitter import study
from simulator.jitter.draw import drawn
from simulator.jitter.run import step_ticks
from simulator.jitter.text import jittered_dict

HELD = Interference(period=1e-3, duration=5e-4)


@pytest.fixture
def slow_loader(loading):  # noqa: F811
    """Return a function to a scenario that waits for the one worker of each rank under a jitter."""

    def build(jitter, seconds=1e-3, **more):
        s = loading(data={"transform_time": seconds}, run={"num_steps": 4}, **more)
        return replace(s, jitter=jitter)

    return build


# Four transforms of a millisecond, one after the other: their mean is four, and their variances
# add up.
def test_a_loader_that_holds_all_back_varies_as_its_transforms_do(slow_loader):
    s = slow_loader(Jitter(host_cv=0.1, samples=1500))
    steps = study(sim.simulate(s)).step_s * 1e3
    assert steps.mean() == pytest.approx(4, abs=4 * 0.2 / math.sqrt(1500))
    assert steps.std(ddof=1) == pytest.approx(0.2, rel=0.1)


@pytest.mark.parametrize(
    "jitter",
    [
        Jitter(slow_gpus=(Slow(ranks=(0,), factor=1.5),)),
        Jitter(gpu_cv=0.1, op_cv=0.1, samples=5),
        Jitter(interference=HELD, samples=5),
        Jitter(random_slow_links=RandomSlow(share=1.0, factor=2.0), flow_cv=0.5, samples=5),
    ],
)
def test_what_disturbs_devices_leaves_loaders_alone(slow_loader, jitter):
    s = slow_loader(jitter, plan={"dp": 2})
    steps = study(sim.simulate(s)).step_s
    assert steps == pytest.approx(4e-3, rel=1e-2)


def test_prefetching_bridges_noise_of_a_loader_that_is_fast_enough(loading):  # noqa: F811
    each = free_step(loading()) / 4
    steps = []
    for factor in (1, 8):
        data = {"transform_time": 0.85 * each, "workers": 1, "prefetch_factor": factor}
        s = loading(data=data, run={"num_steps": 8})
        s = replace(s, jitter=Jitter(host_cv=0.8, samples=60))
        steps.append(study(sim.simulate(s)).mean_s / (4 * each))
    assert steps[0] > steps[1] + 0.02
    assert steps[1] > 0.99


def test_a_loader_moves_nobodys_noise(slow_loader, scenario_of):
    jitter = replace(EVERYTHING, host_cv=0.2)
    s = slow_loader(jitter, plan={"dp": 2})
    draws = [
        next(drawn(sim.simulate(replace(s, data=data, jitter=None)).tiled, jitter, range(3)))
        for data in (s.data, None)
    ]
    assert (draws[0].ops == draws[1].ops).all()
    assert (draws[0].flows == draws[1].flows).all()


def scenarios(loading, network):  # noqa: F811
    """Yield scenarios with a loader, checkpoints and both."""
    jitter = Jitter(op_cv=0.1, host_cv=0.4, interference=EVERYTHING.interference, samples=3)
    if network == "alpha-beta":
        jitter = replace(EVERYTHING, host_cv=0.4, samples=3)
    for sharded in (True, False):
        s = loading(
            data={"sample_bytes": 1e5, "transform_time": 1e-4, "workers": 2}, storage=DISK,
            plan={"dp": 2, "pp": 2}, run={"network": network, "num_steps": 3},
        )  # fmt: skip
        save = Save(storage="disk", sharded=sharded, asynchronous=sharded)
        s = replace(s, jitter=jitter)
        yield from (s, replace(s, checkpoint=save), replace(s, checkpoint=save, data=None))


@pytest.mark.parametrize("network", ["alpha-beta", "fluid"])
def test_engines_sample_loaders_and_checkpoints_alike(loading, network):  # noqa: F811
    for s in scenarios(loading, network):
        texts = {
            json.dumps(jittered_dict(study(sim.simulate(s, engine=engine), engine=engine)))
            for engine in ("compiled", "events", "reference")
        }
        assert len(texts) == 1


@pytest.mark.parametrize("network", ["alpha-beta", "fluid"])
def test_paths_add_up_and_slack_is_never_below_none(loading, network):  # noqa: F811
    for s in scenarios(loading, network):
        j = study(sim.simulate(s))
        ticks = j.delays.window[:, 1] - j.delays.window[:, 0]
        assert j.delays.on_path.sum() == ticks.sum()
        assert all(0 <= rank.slack_s <= j.mean_s for rank in j.by_rank)
        assert sum(b.path_s for b in j.by_kind.values()) == pytest.approx(j.mean_s)


def test_a_replay_without_noise_of_hosts_is_a_run_without_it(slow_loader):
    jitter = Jitter(op_cv=0.2, host_cv=0.3, samples=6)
    s = slow_loader(jitter)
    replayed = study(sim.simulate(s)).without["noise of hosts, cv 0.3"]
    without = replace(s, jitter=replace(jitter, host_cv=0.0))
    assert replayed.tolist() == study(sim.simulate(without)).step_ticks.tolist()


def test_noise_of_hosts_needs_something_that_they_do():
    with pytest.raises(DescriptionError, match="and there is neither; leave it out"):
        sim.load("gpt2-xl-ddp", {"jitter.host_cv": 0.1})


@pytest.mark.parametrize("jobs", [2, 3])
def test_any_number_of_processes_gives_the_same_bytes(scenario_of, jobs):
    s = replace(scenario_of(plan={"dp": 2, "pp": 2}), jitter=replace(EVERYTHING, samples=40))
    result = sim.simulate(s)
    one, many = (study(result, jobs=n) for n in (1, jobs))
    assert json.dumps(jittered_dict(one)) == json.dumps(jittered_dict(many))
    assert step_ticks(result, jobs=jobs).tolist() == one.step_ticks.tolist()
    assert np.unique(one.step_ticks).size == 40


def test_verbs_print_the_same_bytes_with_any_number_of_processes(trainsim):
    jitter = ("--set", "jitter.op_cv=0.05", "--set", "jitter.samples=20", "--json", "-")
    days = ("--set", 'operations.checkpoint={interval="10 min",write_time="9 s"}', "--seeds", 6)
    for verb, *more in (("run",), ("operate", *days, "--days", 1)):
        texts = {
            trainsim(verb, "gpt2-xl-ddp", *jitter, *more, "--jobs", jobs)[1] for jobs in (1, 2)
        }
        assert len(texts) == 1
        assert '"step_time' in texts.pop()
