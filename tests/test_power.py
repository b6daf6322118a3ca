"""From a power limit to a clock: the law, published sweeps, and what it slows."""

from __future__ import annotations

import csv
import dataclasses
import tomllib
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import simulator as sim
from simulator.describe import catalog
from simulator.describe.cluster import Device
from simulator.describe.cost import Cost
from simulator.describe.loader import load_node
from simulator.describe.power import Power
from simulator.errors import DescriptionError
from simulator.hardware.compute import kernel_seconds
from simulator.hardware.power import clock_left, draw, rate_at
from simulator.operate.cost import drawn
from simulator.program import Kernel

FLAT = Power(static=100.0, knee=0.9, slope=1.0, rate=0.8)
RISING = Power(static=100.0, knee=0.5, slope=1.0, rate=1.0)


def limited(node: str, watts: float | None) -> Device:
    return dataclasses.replace(load_node(node).device, power_limit=watts)


# --- the law ----------------------------------------------------------------------------------


# 500 - 100 of 900 - 100 W: half of what the clock draws, so half of the clock.
def test_below_the_knee_a_clock_goes_with_the_power_beyond_the_static_part() -> None:
    assert rate_at(FLAT, 900.0, 500.0) == pytest.approx(0.4)


# At the top the voltage is 1 + (1 / 0.5 - 1) = 2, at 0.75 it is 1.5: of 400 W beyond the static
# part, which are 1 x 2^2, 0.75 x 1.5^2 takes 168.75.
def test_above_the_knee_power_goes_with_the_square_of_the_voltage_too() -> None:
    assert rate_at(RISING, 500.0, 268.75) == pytest.approx(0.75)


def test_no_limit_raises_a_clock_above_the_highest() -> None:
    assert rate_at(FLAT, 900.0, 5000.0) == 1.0


@given(
    st.builds(
        Power, static=st.floats(1, 90), knee=st.floats(0.1, 1), slope=st.floats(0, 3),
        rate=st.floats(0.1, 1),
    ),
    st.floats(0.3, 1),
)  # fmt: skip
def test_the_clock_under_a_limit_draws_the_limit(power: Power, share: float) -> None:
    rate = rate_at(power, 300.0, 300.0 * share)
    dynamic = (300.0 - power.static) / (draw(power, 1.0, power.rate) - power.static)
    assert draw(power, dynamic, rate) == pytest.approx(300.0 * share)
    assert rate <= power.rate * (1 + 1e-9)


# --- what it slows ----------------------------------------------------------------------------

PRODUCT = Kernel("fc1", flops=2 * 8192**3, bytes=6 * 8192**2, dtype="bf16", matmul=(1, *[8192] * 3))
ATTENTION = Kernel(
    "attention", flops=4 * 32 * 8192**2 * 128, bytes=4 * 2 * 32 * 8192 * 128, dtype="bf16",
    matmul=(32, 8192, 8192, 128), algorithm="flash2 forward",
)  # fmt: skip
NORM = Kernel("norm", flops=1e8, bytes=1e9, dtype="fp32")


@pytest.mark.parametrize(("kernel", "slowed"), [(PRODUCT, True), (ATTENTION, True), (NORM, False)])
def test_products_and_attention_are_slowed_and_passes_over_memory_are_not(
    kernel: Kernel, slowed: bool
) -> None:
    device = limited("dgx-a100", 320.0)
    before, after = (
        kernel_seconds(kernel, each)[0] for each in (limited("dgx-a100", None), device)
    )
    share = 1 / clock_left(device) if slowed else 1.0
    # Writing a product's results goes with the memory, which is not slowed.
    assert after / before == pytest.approx(share, rel=0.01)


# (500 - 32) / (700 - 32) W: both lie below the knee.
def test_an_h100_at_500_of_700_watts_keeps_seven_tenths_of_its_clock() -> None:
    assert clock_left(limited("dgx-h100", 500.0)) == pytest.approx(468 / 668)


def test_a_limit_of_the_boards_own_power_changes_nothing() -> None:
    assert clock_left(limited("dgx-h100", 700.0)) == pytest.approx(1.0)


def test_a_limit_lengthens_the_step_and_the_report_says_how_far_clocks_fall() -> None:
    changes = {"cluster.node": {"from": "dgx-h100", "device": {
        "from": "h100-sxm5-80gb", "power_limit": "500 W"}}}  # fmt: skip
    slow = sim.simulate(sim.load("gpt2-xl-ddp", changes))
    fast = sim.simulate(sim.load("gpt2-xl-ddp", {"cluster.node": "dgx-h100"}))
    assert fast.step_time_s < slow.step_time_s < fast.step_time_s * 668 / 468
    said = "a limit of 500 W in place of 700 W leaves 70.1% of the clock to matrix products"
    assert said in " ".join(str(slow).split())


# Half of 700 W while only communication runs is below the limit already.
def test_a_device_draws_no_more_than_its_limit() -> None:
    assert drawn(limited("dgx-h100", 500.0), Cost()) == (500.0, 350.0)
    assert drawn(limited("dgx-h100", None), Cost()) == (700.0, 350.0)


def test_limits_can_be_swept() -> None:
    s = sim.load("gpt2-xl-ddp", {"cluster.node": "dgx-h100"})
    frame = sim.sweep(s, {"cluster.node.device.power_limit": ["500 W", "600 W", "700 W"]})
    assert frame["step_time_s"].is_monotonic_decreasing


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"power_limit": 800.0}, "800 W is above tdp, 700 W"),
        # 32 W + 98 pJ a byte of 3.35 TB/s
        ({"power_limit": 300.0}, "300 W is less than the 360 W that kernels bound by memory draw"),
        ({"power_limit": 500.0, "power": None}, "500 W, but the device has no power, by which"),
        ({"power_limit": 500.0, "tdp": None}, "the device has no tdp, by which a limit sets"),
    ],
)
def test_a_limit_whose_clock_cannot_be_told_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(DescriptionError, match=message):
        dataclasses.replace(load_node("dgx-h100").device, **changes)


def test_a_knee_above_the_highest_clock_is_refused() -> None:
    with pytest.raises(DescriptionError, match="knee"):
        Power(static=30.0, knee=1.2, slope=1.0, rate=0.8)


# --- published sweeps -------------------------------------------------------------------------

SYSTEMS = tomllib.loads(
    (catalog.root() / "topologies/measured/power_systems.toml").read_text(encoding="utf-8")
)
SLOPE = 0.96


@cache
def sweep(system: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return watts and rates (the fastest row's is 1) of each run of a sweep."""
    path = catalog.root() / "topologies/measured/power.csv"
    with path.open(encoding="utf-8", newline="") as file:
        mine = [r for r in csv.DictReader(file) if r["sweep"] == system]
    found = {}
    for run in dict.fromkeys(r["run"] for r in mine):
        rows = [r for r in mine if r["run"] == run]
        seconds = np.array([float(r["time_s"]) for r in rows])
        found[run] = np.array([float(r["power_w"]) for r in rows]), seconds.min() / seconds
    return found


def fitted(system: str, slopes: np.ndarray) -> tuple[float, float, float, float]:
    """Return static part, dynamic part, knee and slope of least relative squares of power."""
    runs = [sweep(system)[run] for run in SYSTEMS[system]["fitted"]]
    watts, rates = (np.concatenate(each) for each in zip(*runs, strict=True))
    knee, slope = np.meshgrid(np.arange(0.5, 1.0, 0.005), slopes, indexing="ij")
    voltage = 1 + slope[..., None] * np.maximum(0, rates / knee[..., None] - 1)
    ones, each = 1 / watts, rates * voltage**2 / watts
    a, b, c = (ones * ones).sum(), (ones * each).sum(-1), (each * each).sum(-1)
    static = (ones.sum() * c - each.sum(-1) * b) / (a * c - b * b)
    dynamic = (a * each.sum(-1) - b * ones.sum()) / (a * c - b * b)
    off = ((static[..., None] * ones + dynamic[..., None] * each - 1) ** 2).sum(-1)
    at = np.unravel_index(off.argmin(), off.shape)
    return float(static[at]), float(dynamic[at]), float(knee[at]), float(slope[at])


def errors(system: str, run: str) -> np.ndarray:
    """Return errors of predicted seconds, above zero too slow, by the fit of the sweep."""
    static, dynamic, knee, slope = fitted(system, np.array([SLOPE]))
    power = Power(static=static, knee=knee, slope=slope, rate=1.0)
    watts, rates = sweep(system)[run]
    top = draw(power, dynamic, 1.0)
    return rates / np.array([rate_at(power, top, w) for w in watts.tolist()]) - 1


def test_the_slope_of_voltage_is_that_of_a_layer_on_an_a100() -> None:
    assert fitted("a100-layers", np.arange(0, 3, 0.02))[3] == pytest.approx(SLOPE)


@pytest.mark.parametrize(
    ("system", "node"), [("a100-layers", "dgx-a100"), ("b300-product", "dgx-b200")]
)
def test_static_part_and_knee_are_those_of_the_sweep(system: str, node: str) -> None:
    static, dynamic, knee, _ = fitted(system, np.array([SLOPE]))
    power = load_node(node).device.power
    assert power is not None
    assert (power.static, power.knee, power.slope) == pytest.approx((round(static), knee, SLOPE))
    if node == "dgx-a100":  # what 400 W leave of the rate of a part of 500 W
        top = draw(power, dynamic, 1.0)
        assert rate_at(dataclasses.replace(power, rate=1.0), top, 400.0) == pytest.approx(
            power.rate, abs=0.005
        )


# Held out: an A100's backward, three batches on a V100.
@pytest.mark.parametrize(
    ("system", "run", "most"),
    [("a100-layers", "backward", 0.006), ("v100-resnet50", "batch 128", 0.015),
     ("v100-resnet50", "batch 192", 0.015), ("v100-resnet50", "batch 360", 0.015)],
)  # fmt: skip
def test_held_out_rates_follow_from_power(system: str, run: str, most: float) -> None:
    assert np.abs(errors(system, run)).mean() < most


# 98 of 220 W leave 0.52 of the rate; the cube root says 0.76.
def test_a_cube_root_of_the_boards_power_is_wrong_by_a_third_on_a_v100() -> None:
    watts, rates = sweep("v100-resnet50")["batch 256"]
    assert rates[0] == pytest.approx(0.518, abs=1e-3)
    assert (watts[0] / watts[-1]) ** (1 / 3) == pytest.approx(0.764, abs=1e-3)


# --- from the B200 to larger boards of its kind -----------------------------------------------


def rate_of(device: Device, watts: float) -> float:
    """Return the FLOP/s that the B200's products sustain at another power."""
    b200 = load_node("dgx-b200").device
    assert b200.power is not None
    share = b200.matmul_efficiency * b200.sustained_clock * b200.peak["bf16"]
    return share * rate_at(b200.power, 1000.0, watts) / b200.power.rate


@pytest.mark.parametrize("node", ["gb200-nvl72", "gb300-nvl72"])
def test_clocks_of_the_larger_blackwell_parts_follow_from_their_power(node: str) -> None:
    device = load_node(node).device
    assert device.tdp is not None
    share = rate_of(device, device.tdp) / (device.matmul_efficiency * device.peak["bf16"])
    assert device.sustained_clock == round(share, 2)


# Three products of 8,192 tokens with 4096 x 4096, 4096 x 14336 and 14336 x 4096 weights, 34,796
# times in 55.548 s at the limit of 1100 W: 1377 TFLOP/s (gpu-power-lab, t2-b300-r1/work-gemm.json).
# Fitted to nothing here; a B200's constants and the cube root of power give 1172.
def test_a_b300s_products_under_its_limit_are_predicted_to_a_tenth() -> None:
    measured = 34796 * 2 * 8192 * (4096**2 + 2 * 4096 * 14336) / 55.548
    predicted = rate_of(load_node("dgx-b200").device, 1100.0)
    assert measured == pytest.approx(1377e12, rel=1e-3)
    assert predicted / measured - 1 == pytest.approx(-0.093, abs=0.005)
