"""Kernels priced from a measured table: between its sizes, not beyond, and said in the report."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import simulator as sim
from simulator.describe.calibration import Axis, Calibration, Timed, same_device
from simulator.errors import DescriptionError
from simulator.hardware.calibration import measured
from simulator.hardware.compute import kernel_seconds, work_seconds
from simulator.program import Kernel, Work
from simulator.validate.torch.sizes import points, table_toml, to_time

# Seconds as m x n x k x 1e-12: a power law, so that every size between is exact.
CUBE = Timed(
    kernel="product",
    dtype="bf16",
    axes=tuple(Axis(name=name, at=(64.0, 1024.0)) for name in "mnk"),
    seconds=tuple(m * n * k * 1e-12 for m in (64, 1024) for n in (64, 1024) for k in (64, 1024)),
)
NORM = Timed(kernel="norm", axes=(Axis(name="bytes", at=(1e3, 1e6)),), seconds=(1e-6, 1e-3))
GRAD = replace(NORM, kernel="norm grad", seconds=(2e-6, 2e-3))


def product(m: int, n: int, k: int, batch: int = 1, dtype: str = "bf16") -> Kernel:
    return Kernel("fc1", 2.0 * m * n * k, 0.0, dtype, (batch, m, n, k))


@pytest.fixture
def device(a100):
    """Return the A100 with a table of its own."""
    table = Calibration(
        device="NVIDIA A100-SXM4-80GB", measured_at="2026", how="by hand",
        kernels=(CUBE, NORM, GRAD),
    )  # fmt: skip
    return replace(a100, calibration=table)


@pytest.fixture
def a100():
    return sim.load("gpt2-xl-1gpu", {"cluster.node": "dgx-a100"}).cluster.node.device


@given(st.lists(st.integers(64, 1024), min_size=3, max_size=3))
def test_a_power_of_sizes_is_interpolated_exactly(sizes):
    device = sim.load("gpt2-xl-1gpu", {"cluster.node": "dgx-a100"}).cluster.node.device
    table = Calibration(device=device.name, measured_at="", how="", kernels=(CUBE,))
    m, n, k = sizes
    found = measured(product(m, n, k), replace(device, calibration=table)).seconds
    assert found == pytest.approx(m * n * k * 1e-12, rel=1e-9)


def test_products_of_a_batch_take_the_time_of_one_each(device):
    one, eight = (measured(product(64, 64, 64, batch=b), device).seconds for b in (1, 8))
    assert eight == pytest.approx(8 * one)


def test_kernels_are_found_by_the_last_words_of_their_name(device):
    norm = Kernel("attention norm", 0.0, 1e3, "fp32")
    assert measured(norm, device).seconds == pytest.approx(1e-6)
    assert measured(replace(norm, name="final norm grad"), device).seconds == pytest.approx(2e-6)


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        (product(2048, 64, 64), "m 2,048 is outside 64 to 1,024"),
        (product(64, 64, 64, dtype="fp32"), "measured in bf16, not in fp32"),
        (Kernel("gelu", 0.0, 1e3, "fp32"), "not measured"),
        (Kernel("mlp norm", 0.0, 2e6, "fp32"), "bytes 2,000,000 is outside 1,000 to 1,000,000"),
    ],
)
def test_what_the_table_does_not_cover_takes_the_formula_and_says_why(device, a100, kernel, why):
    assert measured(kernel, device) == (None, why)
    assert kernel_seconds(kernel, device) == kernel_seconds(kernel, a100)


def test_a_table_of_another_device_is_not_used(device):
    other = replace(device, name="NVIDIA H100 SXM5 80 GB")
    found = measured(product(64, 64, 64), other)
    assert found == (None, "the table is of NVIDIA A100-SXM4-80GB")


def test_names_of_one_device_differ_only_in_what_is_between_letters_and_digits():
    assert same_device("NVIDIA A100-SXM4-80GB", "NVIDIA A100 SXM4 80 GB")
    assert not same_device("NVIDIA A100-SXM4-80GB", "NVIDIA A100 SXM4 40 GB")


def test_measured_kernels_have_no_further_gap_to_the_next_one(device):
    node = replace(sim.load("gpt2-xl-1gpu").cluster.node, device=device, host_launch=1.0)
    seconds = work_seconds(Work("F", (product(64, 64, 64),)), node)
    assert sum(seconds.values()) == pytest.approx(64**3 * 1e-12)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seconds": (1.0,)}, "1 times for 2 sizes of 'norm'"),
        ({"seconds": (1.0, 0.0)}, "times of 'norm' must be above 0"),
    ],
)
def test_a_table_that_is_no_grid_is_refused(change, sentence):
    with pytest.raises(DescriptionError, match=sentence):
        replace(NORM, **change)


def test_sizes_must_ascend():
    with pytest.raises(DescriptionError, match=r"\[2.0, 1.0\] must be ascending"):
        Axis(name="m", at=(2.0, 1.0))


# --- from the scenario to the table, and back ---


PLACE = "cluster.node.device.calibration"


def written(s, path, device="NVIDIA A100-SXM4-80GB"):
    """Write the table of a machine on which everything takes a millisecond."""
    timed = [{**one, "seconds": [1e-3] * points([one])} for one in to_time(s)]
    machine = {"device": device, "torch": "2.13", "threads_per_rank": 1, "busy": "a clock"}
    path.write_text(table_toml(timed, machine, 2), encoding="utf-8")
    return {PLACE: str(path)}


def test_a_written_table_prices_the_scenario_it_was_made_for(tmp_path, trainsim):
    s = sim.load("gpt-replay-2ranks")
    more = written(s, tmp_path / "table.toml")
    code, out, _ = trainsim(
        "run", "gpt-replay-2ranks", "--set", *(f"{k}={v}" for k, v in more.items())
    )
    assert code == 0
    assert "device.calibration (NVIDIA A100-SXM4-80GB, 20" in out
    assert "2 rank(s) at once of 1 thread(s)" in out
    assert "product, flash forward" in out
    assert "by the rules below embedding wgrad (not measured)" in out


def test_every_covered_kernel_takes_what_was_measured(tmp_path):
    s = sim.load("gpt-replay-2ranks")
    measured_scenario = sim.load("gpt-replay-2ranks", written(s, tmp_path / "table.toml"))
    program = sim.simulate(measured_scenario).tiled
    work = next(c for c in program.costs if isinstance(c, Work) and c.name == "layer F")
    seconds = sum(work_seconds(work, measured_scenario.cluster.node).values())
    assert seconds == pytest.approx(1e-3 * sum(k.count for k in work.kernels))


def test_a_table_of_another_device_prices_nothing_and_the_report_says_so(tmp_path, trainsim):
    s = sim.load("gpt-replay-2ranks")
    more = written(s, tmp_path / "table.toml", device="Some CPU")
    code, out, _ = trainsim(
        "run", "gpt-replay-2ranks", "--set", *(f"{k}={v}" for k, v in more.items())
    )
    assert code == 0
    assert "prices no kernel: the table is of Some CPU; all are priced by the rules below" in out
    assert (
        sim.simulate(sim.load("gpt-replay-2ranks", more)).step_time_s == sim.simulate(s).step_time_s
    )


def test_a_table_of_a_replay_is_refused_with_what_to_write(trainsim, tmp_path):
    (tmp_path / "t.json").write_text("{}")
    place = f"cluster.node.device.calibration={tmp_path / 't.json'}"
    code, _, error = trainsim("run", "gpt-replay-2ranks", "--set", place)
    assert code == 2
    assert "a device names a table of `trainsim calibrate --kernels`, in .toml" in error


def test_an_unknown_key_of_a_table_is_named(trainsim, tmp_path):
    path = tmp_path / "t.toml"
    path.write_text('device = "x"\nmeasured_at = "y"\nhow = "z"\nkernel = []\n')
    code, _, error = trainsim(
        "run", "gpt-replay-2ranks", "--set", f"cluster.node.device.calibration={path}"
    )
    assert code == 2
    assert "unknown key 'kernel', did you mean 'kernels'?" in error


def test_what_measured_times_do_not_take_apart_is_not_made_ideal(tmp_path):
    from simulator.explore.ideal import ideals

    s = sim.load("gpt-replay-2ranks")
    names = {i.name for i in ideals(sim.load("gpt-replay-2ranks", written(s, tmp_path / "t.toml")))}
    assert {"infinite memory bandwidth", "no launch gaps"}.isdisjoint(names)
    assert {"infinite memory bandwidth", "no launch gaps"} <= {i.name for i in ideals(s)}
