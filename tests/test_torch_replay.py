"""Schedules on real torch processes: order, freedom from deadlock, losses, gradients, clocks.

No test asserts a wall time: this host may do other things too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulator.errors import DeadlockError, DescriptionError, TrainsimError
from simulator.validate.torch import launch
from simulator.validate.torch.clock import rebuilt
from simulator.validate.torch.compare import compare
from simulator.validate.torch.job import Job
from simulator.validate.torch.launch import Ranks, folder_of
from simulator.validate.torch.predict import Prediction
from simulator.validate.torch.recording import Links, Recording
from simulator.validate.torch.replay import read_calibration, timeline_document

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed (extra: validate)"
)

NO_DROPOUT = {"embedding_dropout": 0.0, "hidden_dropout": 0.0, "attention_dropout": 0.0}


@pytest.fixture(scope="session")
def tiny(gpt, scenario_of):
    """Return the job of a tiny model under a plan; 8 layers, so that every schedule has stages."""

    def make(model=gpt, run=None, m=8, **plan: Any) -> Job:
        run = {"precision": "fp32", **(run or {})}
        plan = {"pp": 2, **plan}
        model = replace(model, num_hidden_layers=8, tie_word_embeddings=False, **NO_DROPOUT)
        scenario = scenario_of(model=model, plan=plan, run=run, batch=m * plan.get("dp", 1))
        return Job.of(scenario, warmup=2, visits=1, steps=1, calibrates=False)

    return make


# --- without torch: what is done, and what is refused ---


def test_a_job_holds_the_very_lists_of_the_schedule_with_messages_and_updates(tiny):
    job = replace(tiny(), rows=())
    assert job.rows == ()  # a job is a value
    rows = tiny(pp=2, schedule="GPipe").rows
    assert rows[1][:4] == ("1RECV_F0", "1F0", "1RECV_F1", "1F1")
    assert rows[0][-2:] == ("0REDUCE_GRAD", "0OPT")


def test_a_job_is_read_as_it_was_written(tiny, tmp_path):
    job = tiny(dp=2, schedule="ZB-H1")
    job.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == job


@pytest.mark.parametrize(
    ("plan", "run", "sentence"),
    [
        (
            {"tp": 2, "sequence_parallel": True},
            {},
            r"plan\.sequence_parallel = true is not replayed",
        ),
        ({"recompute": "full"}, {}, r'plan\.recompute = "full" is not replayed; set it to "none"'),
        ({"dp": 2, "zero": 1}, {}, r"plan\.zero = 1 is not replayed"),
        ({}, {"precision": "bf16"}, r'set run\.precision = "fp32"'),
        ({}, {"clip_grad": True}, r"run\.clip_grad = true is not replayed"),
        ({}, {"optimizer": "muon"}, r"run\.optimizer 'muon' is not one of sgd"),
        ({"schedule": "PipeDream"}, {}, r"updates weights after every microbatch"),
    ],
)
def test_what_is_not_replayed_is_refused_in_a_sentence(tiny, plan, run, sentence):
    with pytest.raises(DescriptionError, match=sentence):
        tiny(run=run, **plan)


def test_dropout_and_tied_embeddings_are_refused(gpt, scenario_of):
    with pytest.raises(DescriptionError) as caught:
        Job.of(scenario_of(model=gpt, plan={"pp": 2}, run={"precision": "fp32"}))
    assert "set model.hidden_dropout = 0" in str(caught.value)
    assert "model.tie_word_embeddings = true is not replayed" in str(caught.value)


def test_without_torch_the_command_says_how_to_get_it(trainsim, monkeypatch):
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    code, _, error = trainsim("validate", "torch", "gpt-replay-2ranks")
    assert code == 2
    assert 'pip install "trainsim[validate]"' in error


def test_more_ranks_than_cores_cannot_be_calibrated(tiny, monkeypatch):
    from simulator.validate.torch import replay

    monkeypatch.setattr(replay, "require_torch", lambda: None)
    monkeypatch.setattr(replay, "cores", lambda: 2)
    with pytest.raises(DescriptionError, match="4 ranks on 2 cores take turns"):
        replay.calibrate(tiny(pp=4))


def seconds_of(job: Job, times: dict[str, float]) -> list[list[float]]:
    return [
        [times.get(a.kind, 0.0) if part.kind == "work" else 0.0 for a, part in job.parts(r)]
        for r in range(job.world_size)
    ]


NO_LINKS = Links(((1.0, 0.0, 0.0, 0.0),), ((1.0, 0.0),))


# 1F1B, 2 stages, 8 microbatches: (8 + 1) x (1 + 2) = 27, and the update 0.5.
def test_the_rebuilt_clock_gives_the_hand_worked_step_of_1f1b(tiny):
    job = tiny()
    step = rebuilt(job, seconds_of(job, {"F": 1.0, "B": 2.0, "OPT": 0.5}), NO_LINKS, {})
    assert step.seconds == 27.5


# Rank 0 sends F0 at 1; it is there at 1.25; F, B on rank 1 until 4.25; back at 4.5, B until 6.5.
def test_a_message_takes_its_time_on_the_rebuilt_clock(tiny):
    job = tiny(pp=2, microbatch_size=8)
    links = Links(((1.0, 0.25, 0.0, 0.0),), ())
    step = rebuilt(job, seconds_of(job, {"F": 1.0, "B": 2.0}), links, {})
    assert job.num_microbatches == 1
    assert step.seconds == 6.5


# Two replicas of one stage: 8 forwards and backwards take 24; two buckets of 3 s one after the
# other, then the update.
def test_sums_of_gradients_are_waited_for_on_the_rebuilt_clock(tiny):
    job = tiny(pp=1, dp=2)
    links = Links((), ((10.0, 3.0),))
    times = seconds_of(job, {"F": 1.0, "B": 2.0, "OPT": 0.5})
    assert rebuilt(job, times, links, {0: (10.0, 10.0)}).seconds == 24 + 6 + 0.5


# tp 2, one layer: forward with embedding, two sums of the layer and three of the loss: 1 x 7 + 6 x
# 0.25; backward with the head's and two: 2 x 4 + 3 x 0.25; the slower peer sets the pace: 1 more
# in each forward's first part. 8 microbatches: 8 x (7 + 1 + 8 + 9 x 0.25) = 146.
def test_tensor_parallel_ranks_meet_in_every_sum_on_the_rebuilt_clock(tiny):
    job = replace(tiny(pp=1, tp=2), layers=(1,))
    times = seconds_of(job, {"F": 1.0, "B": 2.0})
    for i, (action, _) in enumerate(job.parts(1)):
        if action.kind == "F" and (i == 0 or job.parts(1)[i - 1][0] != action):
            times[1][i] += 1.0
    links = Links((), (), ((1.0, 0.25),))
    assert rebuilt(job, times, links, {}).seconds == 146.0


PLANS = {
    "GPipe": {"schedule": "GPipe"},
    "1F1B": {},
    "Interleaved1F1B": {"schedule": "Interleaved1F1B", "chunks": 2},
    "ZB-H1": {"schedule": "ZB-H1"},
    "ZBVZeroBubble": {"schedule": "ZBVZeroBubble", "chunks": 2},
    "DualPipeV": {"schedule": "DualPipeV", "chunks": 2},
    "dp": {"pp": 1, "dp": 2, "bucket_size": 20e3},
    "dp in one piece": {"pp": 1, "dp": 2, "grad_overlap": False},
    "tp": {"pp": 1, "tp": 2},
    "tp split": {"pp": 1, "tp": 2, "schedule": "ZB-H1"},
}
FOUR = {
    "tp ZB-H1": {"tp": 2, "schedule": "ZB-H1"},
    "dp ZB-H1": {"dp": 2, "schedule": "ZB-H1"},
    "dp Interleaved1F1B": {"dp": 2, "schedule": "Interleaved1F1B", "chunks": 2},
    "tp dp": {"pp": 1, "tp": 2, "dp": 2},
    "tp outside pp": {"tp": 2, "order": ["tp", "pp", "dp", "cp"]},
}
"""Plans of four ranks."""


@pytest.mark.parametrize("name", [*PLANS, *FOUR])
def test_the_engine_replays_random_op_times_as_the_rebuilt_clock_does(tiny, name):
    job, random = tiny(**(PLANS | FOUR)[name]), np.random.default_rng(7)
    own = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "OPT": 0.5}
    times = [[t * random.uniform(0.5, 1.5) for t in row] for row in seconds_of(job, own)]
    links = Links(((1.0, 0.1, 0.0, 0.0),), ((1.0, 0.7),), ((1.0, 0.2),))
    buckets = dict.fromkeys(range(len(job.layers)), (1.0, 1.0))
    for rank, row in enumerate(times):  # the engine is told what sums take
        for i, (_, part) in enumerate(job.parts(rank)):
            if part.kind == "sum":
                row[i] = 0.2
    engine = Prediction(job, links, buckets).step(lambda r: times[r])
    assert engine == pytest.approx(rebuilt(job, times, links, buckets).seconds, rel=1e-9)


def recorded(job: Job, stretch: float) -> list[str]:
    """Return what ranks would write of one step whose wall clock is `stretch` times its busy."""
    texts = []
    for rank in range(job.world_size):
        now, spans = 0, []
        for _ in job.parts(rank):
            spans.append([now, now + int(1000 * stretch), 1000])
            now = spans[-1][1]
        steps = [
            {"step": n, "recorded": True, "losses": {}, "spans": spans}
            for n in range(job.visits * job.steps)
        ]
        ops = {f"{a.kind}{a.stage}": [[[1e-6, 1e-6]]] for a in job.list_of(rank)}
        head = {"machine": {}, "messages": [], "sums": [], "buckets": {}}
        visits = [{"actions": ops}] * job.visits
        texts.append("\n".join(map(json.dumps, [head, *visits, *steps])))
    return texts


@pytest.mark.parametrize(("stretch", "quiet"), [(1.02, 6), (1.04, 0)])
def test_only_quiet_steps_count_for_the_wall_clock(tiny, stretch, quiet):
    job = replace(tiny(), visits=2, steps=3)
    recording = Recording.of(job, recorded(job, stretch))
    found = compare(recording, recording.ops_of_visits, recording.ops, NO_LINKS, "here", None)
    assert found.quiet == quiet
    assert (found.wall is None) == (quiet == 0)
    assert found.clock is not None


def test_a_timeline_that_was_cut_short_is_marked_and_keeps_whole_steps(tiny):
    job = replace(tiny(), visits=2, steps=3)
    texts = recorded(job, 1.0)
    texts[1] = "\n".join(texts[1].splitlines()[:-1]) + '\n{"step": 5, "rec'
    document = timeline_document(Recording.of(job, texts))
    assert document["complete"] is False
    assert document["steps"] == [0, 1, 2, 3, 4]


def test_a_calibration_of_something_else_is_refused_with_what_differs(tiny, tmp_path):
    job, path = tiny(), tmp_path / "table.json"
    table = {
        "measured_at": "2026", "machine": {"device": "x"}, "ranks": 2, "messages": [], "sums": [],
        "actions": {},
        "peer_sums": [],
        "job": {"model": job.model, "layers": list(job.layers), "tp": 1, "microbatch_size": 3,
                "sequence_length": 32, "optimizer": "adamw", "device": "cpu"},
    }  # fmt: skip
    path.write_text(json.dumps(table))
    with pytest.raises(DescriptionError, match="is for microbatch_size 3, not 1"):
        read_calibration(path, job)
    path.write_text("{}")
    with pytest.raises(DescriptionError, match="is not a table of trainsim calibrate"):
        read_calibration(path, job)


# --- with torch ---


M = 4
"""Microbatches of those that are replayed."""


@pytest.fixture(scope="session")
def replayed(tiny, llama, tmp_path_factory):
    """Run every plan on the same processes; return recordings and references by name."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed (extra: validate)")
    two = {name: tiny(m=M, **plan) for name, plan in PLANS.items()}
    two["Llama"] = tiny(llama, m=M, **PLANS["ZB-H1"])
    two["Llama tp"] = tiny(llama, m=M, **PLANS["tp split"])
    four = {name: tiny(m=M, **plan) for name, plan in FOUR.items()}
    folder = tmp_path_factory.mktemp("ranks")
    fakes = {
        f"{device} {name}": replace(two[name], device=device)
        for device, names in FAKED.items()
        for name in names
    }
    return run_all(two | fakes, folder / "two") | run_all(four, folder / "four")


def run_all(jobs: dict[str, Job], folder: Path) -> dict[str, tuple[Recording, dict[str, Any]]]:
    names = [name.replace(" ", "-") for name in jobs]
    world = next(iter(jobs.values())).world_size
    for name, job in zip(names, jobs.values(), strict=True):
        (folder / name).mkdir(parents=True)
        job.write(folder / name / "job.json")
    script = Path(__file__).parent / "torch_ranks.py"
    environment = os.environ | {
        "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), *sys.path]),
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder), *names],
            env=environment | {"RANK": str(rank)}, stderr=subprocess.PIPE,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=300)
            assert rank.returncode == 0, errors.decode()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return {
        name: (
            Recording.read(job, folder / own),
            json.loads((folder / own / "reference.json").read_text()),
        )
        for own, (name, job) in zip(names, jobs.items(), strict=True)
    }


# NCCL knows no tags, so that every direction has a group; ranks that share a GPU take turns. GPUs
# themselves are not there: the fakes compute on the CPU and talk by gloo.
FAKED = {"cuda": ("1F1B", "DualPipeV", "dp"), "cuda-shared": ("1F1B", "dp", "tp split")}
FAKES = [f"{device} {name}" for device, names in FAKED.items() for name in names]


EVERY = [*PLANS, *FOUR, *FAKES, "Llama", "Llama tp"]


@needs_torch
@pytest.mark.parametrize("name", EVERY)
def test_losses_and_gradients_equal_those_of_one_process(replayed, name):
    recording, reference = replayed[name]
    same = compare(recording, (), {}, NO_LINKS, "", reference, "not timed").sameness
    assert same is not None
    replicas = recording.job.dp * recording.job.tp
    assert same.losses == 2 * M * replicas
    assert same.gradients == reference["parameters"] * replicas
    assert same.loss < 1e-5
    assert same.gradient < 1e-5, same.parameter


@needs_torch
@pytest.mark.parametrize("name", EVERY)
def test_every_rank_does_all_actions_of_its_list_in_order(replayed, name):
    recording, _ = replayed[name]
    assert recording.complete
    for rank, spans in enumerate(recording.spans):
        assert spans.shape == (1, len(recording.job.parts(rank)), 3)
        start, end, busy = np.moveaxis(spans[0], 1, 0)
        gaps = start[1:] - end[:-1]
        assert (gaps >= 0).all()
        assert recording.job.device == "cuda-shared" or not gaps.any()
        assert (busy >= 0).all()


@needs_torch
@pytest.mark.parametrize("name", [name for name, plan in PLANS.items() if plan.get("pp", 2) == 2])
def test_what_was_sent_is_received_later_on_one_clock(replayed, name):
    recording, _ = replayed[name]
    job = recording.job
    for rank in range(2):
        for i, (action, _) in enumerate(job.parts(rank)):
            if action.kind.startswith("SEND"):
                peer = job.peer(rank, action)
                j = [a for a, _ in job.parts(peer)].index(job.other_side(action))
                assert recording.spans[peer][0, j, 1] > recording.spans[rank][0, i, 0]


@needs_torch
@pytest.mark.parametrize("name", [name for name in FAKES if name.startswith("cuda-shared")])
def test_ranks_that_share_a_device_never_work_at_once(replayed, name):
    recording, _ = replayed[name]
    spans = np.concatenate([
        recording.spans[rank][0, recording.works(rank)] for rank in range(2)
    ])  # fmt: skip
    start, end, _ = spans[np.argsort(spans[:, 0])].T
    assert (start[1:] >= end[:-1]).all()


@needs_torch
@pytest.mark.parametrize("name", ["1F1B", "tp split", "dp"])
def test_peak_memory_is_counted_and_near_what_is_predicted(replayed, name):
    recording, _ = replayed[name]
    held, peak = np.array(recording.memory, float).T
    params = sum(p for b in recording.buckets.values() for p in b)
    assert held.sum() >= 4 * params  # fp32 weights, gradients, two states
    assert (peak > held).all()
    assert np.array(recording.job.memory) == pytest.approx(peak, rel=0.25)


@needs_torch
def test_ranks_that_wait_for_each_other_are_ended_with_both_their_positions(tiny):
    job = tiny()
    rows = (tuple(a for a in job.rows[0] if a != "0SEND_F1"), job.rows[1])
    job = replace(job, rows=rows)
    with (
        folder_of(job) as folder, Ranks(job, folder) as ranks,
        pytest.raises(DeadlockError) as caught,
    ):  # fmt: skip
        ranks.wait(timeout=3)
    assert "rank 0: action 8 of 33, 0RECV_B1, step 0" in str(caught.value)
    assert "rank 1: action 5 of 34, 1RECV_F1, step 0" in str(caught.value)
    assert all(process.poll() is not None for process in ranks.processes)


@needs_torch
def test_a_rank_that_is_killed_ends_all_and_leaves_its_steps(tiny):
    job = replace(tiny(), visits=200, steps=50)
    with folder_of(job) as folder:
        with Ranks(job, folder) as ranks:

            def kill() -> None:
                while ranks.position(1)[0] < 6:
                    time.sleep(0.01)
                os.kill(ranks.processes[1].pid, signal.SIGKILL)

            threading.Thread(target=kill, daemon=True).start()
            with pytest.raises(TrainsimError, match="rank 1 was ended by signal 9"):
                ranks.wait(timeout=60)
        recording = Recording.read(job, folder)
    assert all(process.poll() is not None for process in ranks.processes)
    assert len(recording.steps) >= 3
    assert not recording.complete


# A busy host changes phase between op times and steps, so the bound is wide; median of 5 visits.
@needs_torch
def test_op_times_measured_apart_predict_the_rebuilt_clock(trainsim):
    size = ("model.hidden_size=128", "model.head_dim=32", "model.intermediate_size=512",
            "run.sequence_length=64")  # fmt: skip
    code, out, error = trainsim(
        "validate", "torch", "gpt-replay-2ranks", "--json", "-", "--visits", 5, "--steps", 2,
        "--warmup", 2, *(part for text in size for part in ("--set", text)),
    )  # fmt: skip
    assert code == 0, error
    found = json.loads(out)
    assert found["same_as_one_process"]["holds"]
    assert abs(found["rebuilt_clock"]["engine_error"]) < 0.03
    assert abs(found["rebuilt_clock"]["error"]) < 0.25
