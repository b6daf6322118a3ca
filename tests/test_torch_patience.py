"""Waiting for a quiet host; without ranks."""

from __future__ import annotations

import pytest

worker = pytest.importorskip("simulator.validate.torch.worker", reason="torch is not installed")


@pytest.fixture
def clock(monkeypatch):
    """Return the seconds slept; time passes only by sleeping."""
    slept = [0.0]
    monkeypatch.setattr(worker.time, "monotonic", lambda: slept[0])
    monkeypatch.setattr(worker.time, "sleep", lambda s: slept.__setitem__(0, slept[0] + s))
    return slept


# Two cores, 100 ticks a second each: 40 in a look. 2 of them are 5 %, 4 are 10 %.
@pytest.mark.parametrize(("used", "looks"), [([2], 1), ([4, 4, 2], 3)])
def test_a_step_waits_until_the_host_uses_less_than_six_percent(monkeypatch, clock, used, looks):
    ticks = iter([x for i, u in enumerate(used) for x in ((0, 40 * i), (u, 40 * (i + 1)))])
    monkeypatch.setattr(worker, "_host_time", lambda: next(ticks))
    worker.wait_for_quiet(10.0)
    assert clock[0] == pytest.approx(0.2 * looks)


def test_patience_ends(monkeypatch, clock):
    now = [0]

    def busy():
        now[0] += 40
        return now[0], now[0]

    monkeypatch.setattr(worker, "_host_time", busy)
    worker.wait_for_quiet(1.0)
    assert clock[0] == pytest.approx(1.0, abs=0.21)


def test_without_patience_nothing_is_waited_for(monkeypatch, clock):
    monkeypatch.setattr(worker, "_host_time", lambda: pytest.fail("looked"))
    worker.wait_for_quiet(0.0)
    assert clock[0] == 0.0
