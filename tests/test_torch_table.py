"""Replays beside each other, idle time of measured steps, and the overlay; ranks are made up."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from test_torch_replay import NO_LINKS, recorded, seconds_of, tiny

import simulator as sim
from simulator.cli import ranks as cli
from simulator.errors import DescriptionError, TrainsimError
from simulator.validate.torch import replay
from simulator.validate.torch.clock import rebuilt
from simulator.validate.torch.compare import Sameness, compare
from simulator.validate.torch.plot import overlay
from simulator.validate.torch.predict import Prediction
from simulator.validate.torch.recording import Recording
from simulator.validate.torch.table import Row, Table, plans
from simulator.validate.torch.times import measured, shares, wall_spans

__all__ = ["tiny"]  # the fixture


def compared(job, stretch=1.0):
    job = replace(job, visits=2, steps=3)
    recording = Recording.of(job, recorded(job, stretch))
    same = Sameness(1e-7, 16, 2, 2e-7, "head.weight", 40)
    found = compare(recording, recording.ops_of_visits, recording.ops, NO_LINKS, "here", None)
    return replace(found, sameness=same)


# 1F1B of 2 stages and 8 microbatches, F 1 and B 2: each rank works 24 of 27, and waits 3.
def test_the_bubble_of_a_rebuilt_step_is_that_of_the_closed_form(tiny):
    job = tiny()
    step = rebuilt(job, seconds_of(job, {"F": 1.0, "B": 2.0}), NO_LINKS, {})
    program = Prediction(job, NO_LINKS, {}).program
    assert shares(program, measured(job, program, step.spans)) == pytest.approx((3 / 27, 0.0))


# tp 2, one forward of 8 x 2 + 4 sums of 0.25 s and a backward of 8 x 2 + 1: 8 microbatches.
def test_sums_of_tensor_parallel_ranks_are_exposed_communication(tiny):
    job = tiny(pp=1, tp=2)
    links = NO_LINKS._replace(peer_sums=((1.0, 0.25),))
    step = rebuilt(job, seconds_of(job, {"F": 1.0, "B": 1.0}), links, {})
    program = Prediction(job, links, {}).program
    sums = sum(part.kind == "sum" for _, part in job.parts(0))
    bubble, exposed = shares(program, measured(job, program, step.spans))
    assert bubble == pytest.approx(0.0, abs=1e-9)
    assert exposed == pytest.approx(0.25 * sums / step.seconds)


def test_a_step_by_the_wall_clock_begins_with_its_first_rank(tiny):
    job = replace(tiny(), visits=1, steps=1)
    spans = wall_spans(Recording.of(job, recorded(job, 1.0)), 0)
    assert spans[0][0] == pytest.approx((0.0, 1e-6))


def test_a_table_has_a_row_for_each_replay_with_both_clocks(tiny):
    rows = (Row("1F1B", "pp 2", 8, compared(tiny())),
            Row("GPipe", "pp 2", 4, compared(tiny(), stretch=1.2)))  # fmt: skip
    text = str(Table(rows))
    first, second = (line.split(" | ") for line in text.splitlines()[2:4])
    assert len(first) == len(second) == 14
    assert first[8] == "34 us"  # 34 actions of a microsecond, one after the other
    assert second[8:11] == ["", "", ""]
    assert first[11] == "6 of 6"
    assert second[11] == "0 of 6"
    assert "2 of 2 train what one process trains" in text


def test_a_table_says_the_mean_and_the_worst_error_of_each_clock(tiny):
    found = compared(tiny())
    assert found.clock is not None
    worse = replace(found, clock=found.clock._replace(error=-0.04), wall=None)
    better = replace(found, clock=found.clock._replace(error=0.02), wall=None)
    table = Table((Row("a", "", 1, worse), Row("b", "", 1, better)))
    accuracy = table.accuracy("clock")
    assert accuracy is not None
    assert (accuracy.figures, accuracy.mean, accuracy.worst) == (2, pytest.approx(0.03), 0.04)
    assert "by the wall clock of quiet steps: no figure" in str(table)


def test_a_replay_that_fails_keeps_the_others_and_its_reason(tiny):
    table = Table((Row("1F1B", "pp 2", 8, compared(tiny())), Row("GPipe", "pp 2", 8, None, "hung")))
    assert table.failed
    assert not table.holds
    assert "GPipe, pp 2, m 8: hung" in str(table)
    assert table.to_dict()["replays"][1] == {
        "schedule": "GPipe", "ranks": "pp 2", "microbatches": 8, "failed": "hung", "found": None,
    }  # fmt: skip


def test_plans_are_every_schedule_with_every_number_and_then_what_is_also_asked():
    s = sim.load("gpt-replay-2ranks")
    found = plans(s, ["GPipe", "Interleaved1F1B"], [4, 8], [{"plan.pp": 1}])
    keys = ("plan.schedule", "plan.chunks", "run.global_batch_size")
    assert [tuple(one[key] for key in keys) for one in found[:-1]] == [
        ("GPipe", 1, 8), ("GPipe", 1, 16), ("Interleaved1F1B", 2, 8), ("Interleaved1F1B", 2, 16),
    ]  # fmt: skip
    assert found[-1] == {"plan.pp": 1}
    assert plans(s, [], [], [{"plan.pp": 1}]) == [{"plan.pp": 1}]


def test_the_command_prints_one_table_and_writes_all_of_it(trainsim, tiny, monkeypatch, tmp_path):
    path, rows = tmp_path / "t.json", []

    def replayed(job, timeout):
        rows.append(len(json.loads(path.read_text())["replays"]) if path.exists() else 0)
        if job.num_microbatches == 4:
            raise TrainsimError("rank 0 was ended")
        return compared(job)

    monkeypatch.setattr(replay, "replay", replayed)
    code, out, _ = trainsim(
        "validate", "torch", "gpt-replay-2ranks", "--schedules", "gpipe,zb-h1", "--microbatches",
        "4,8", "--also", "plan.pp=1,plan.tp=2", "--json", path,
    )  # fmt: skip
    assert code == 1
    assert rows == [0, 1, 2, 3, 4]  # each is kept when it has ended
    names = [line.split(" | ")[:3] for line in out.splitlines()[2:7]]
    assert names == [
        ["| GPipe", "pp 2", "4"], ["| GPipe", "pp 2", "8"], ["| ZB-H1", "pp 2", "4"],
        ["| ZB-H1", "pp 2", "8"], ["| 1F1B", "tp 2", "8"],
    ]  # fmt: skip
    document = json.loads(path.read_text())
    assert [r["failed"] for r in document["replays"]].count("rank 0 was ended") == 2
    assert document["accuracy"]["rebuilt_clock"]["figures"] == 3


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--plot", "o.png"), "--plot is for one replay; leave out --schedules"),
        (("--calibration", "t.json"), "--calibration is for one replay"),
        (("--patience", "20", "--timeout", "30"), "give --timeout 40 or more"),
        (("--microbatches", "4,x"), "--microbatches: 'x' is not a number of microbatches"),
    ],
)
def test_what_has_no_meaning_in_a_table_is_refused(
    trainsim, tmp_path, monkeypatch, options, sentence
):
    monkeypatch.chdir(tmp_path)
    code, _, error = trainsim(
        "validate", "torch", "gpt-replay-2ranks", "--schedules", "1F1B", *options
    )
    assert code == 2
    assert sentence in error


def test_an_output_that_cannot_be_written_is_refused_before_any_rank_starts(
    trainsim, tmp_path, monkeypatch
):
    monkeypatch.setattr(cli, "load", lambda *_: pytest.fail("the work began"))
    for option in ("--json", "--timeline", "--machine", "--plot"):
        code, _, error = trainsim(
            "validate", "torch", "gpt-replay-2ranks", option, tmp_path / "absent" / "x.png"
        )
        assert code == 2
        assert "cannot write" in error
        assert "there is no folder" in error


@pytest.mark.parametrize("plan", [{"schedule": "ZB-H1"}, {"pp": 1, "tp": 2}])
def test_the_overlay_has_a_cell_for_every_action_of_both_steps(tiny, tmp_path, plan):
    found = compared(tiny(**plan))
    figure = overlay(found, tmp_path / "o.png")
    assert (tmp_path / "o.png").stat().st_size > 10_000
    ax = figure.axes[0]
    cells = {c.get_gid(): 0 for c in ax.collections}
    for c in ax.collections:
        cells[c.get_gid()] += len(c.get_paths())
    job = found.job
    works = [a.kind for rank in range(2) for a, part in job.parts(rank) if part.kind == "work"]
    assert cells["forward"] == 2 * works.count("F")
    assert cells.get("I", 0) == 2 * works.count("I")
    assert cells.get("tp", 0) == 2 * sum(p.kind == "sum" for r in range(2) for _, p in job.parts(r))
    assert [t.get_text() for t in ax.get_yticklabels()] == [
        f"rank {r} {which}" for r in range(2) for which in ("predicted", "measured")
    ]


def test_without_times_there_is_no_overlay_and_the_reason_is_given(tiny):
    found = compare(
        Recording.of(tiny(), recorded(tiny(), 1.0)), (), {}, NO_LINKS, "", None, "too few"
    )
    with pytest.raises(DescriptionError, match="times are left out, since too few"):
        overlay(found)


def test_ranks_that_take_turns_have_no_figure_by_the_wall_clock(tiny):
    found = compared(replace(tiny(), device="cuda-shared"))
    assert found.wall is None
    assert found.clock is not None
    assert [row.wall for row in found.idle] == [None, None]
    assert found.quiet == 0
    assert np.isfinite(found.clock.error)
