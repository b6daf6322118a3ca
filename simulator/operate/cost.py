"""Energy and money of a job: of one step, of the run with all its losses, of a million tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from simulator.describe.cluster import Device
from simulator.describe.cost import Cost
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.operate.job import FEWER, LOST, SLOW, TRAINING
from simulator.report.breakdown import BUBBLE, COMMUNICATION, WORK
from simulator.report.samples import counted
from simulator.report.text import table
from simulator.units import UNITS, format_count

if TYPE_CHECKING:
    from simulator.operate.result import Float64, Operated
    from simulator.report.result import Result

RUNNING = (TRAINING, LOST, SLOW, FEWER)
"""Categories of time in which the cluster computes; in all others it idles."""

KWH = UNITS["kg/J"]["kg/kWh"] ** -1
"""Joules of a kilowatt-hour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What an amount of training takes."""

    joules: float
    """Of the building."""
    carbon_kg: float | None
    electricity_usd: float | None
    devices_usd: float | None

    def times(self, factor: float) -> Bill:
        """Return the bill of a multiple."""
        known = (self.joules, self.carbon_kg, self.electricity_usd, self.devices_usd)
        joules, *others = (None if x is None else x * factor for x in known)
        assert joules is not None
        return Bill(joules=joules, carbon_kg=others[0], electricity_usd=others[1],
                    devices_usd=others[2])  # fmt: skip


def mix_of(result: Result | None) -> tuple[float, float, float]:
    """Return the shares of a step that devices compute, only communicate and idle.

    Without a simulated step they compute all the time, which is an upper bound.
    """
    if result is None:
        return 1.0, 0.0, 0.0
    b = result.breakdown
    work, communication, idle = (
        float(b.of(*names).sum() / b.window.sum()) for names in (WORK, COMMUNICATION, BUBBLE)
    )
    return work, communication, idle


def device_power(s: Scenario, cost: Cost, mix: tuple[float, float, float]) -> float:
    """Return the watts that one device draws on average in a mix of work, messages and idling.

    Raises:
        DescriptionError: when its file does not say, or devices are of several kinds.
    """
    if s.cluster.is_mixed:
        raise DescriptionError("cost: the energy of nodes of several kinds is not modelled")
    device = s.cluster.node.device
    for name in ("tdp", "idle_power"):
        if getattr(device, name) is None:
            raise DescriptionError(
                f"cost: {device.name} has no {name}; state it, as cluster.node.device = "
                f'{{ from = "...", {name} = "{"700 W" if name == "tdp" else "70 W"}" }}'
            )
    assert device.idle_power is not None
    watts = (*drawn(device, cost), device.idle_power)
    return sum(share * power for share, power in zip(mix, watts, strict=True))


def drawn(device: Device, cost: Cost) -> tuple[float, float]:
    """Return the watts of a device while it computes, and while only communication runs.

    They are shares of its thermal design power, but no more than a power limit allows.
    """
    assert device.tdp is not None
    busy, communication = device.tdp * cost.busy_share, device.tdp * cost.communication_share
    if device.power_limit is None:
        return busy, communication
    return min(busy, device.power_limit), min(communication, device.power_limit)


def bill(
    s: Scenario, cost: Cost, mix: tuple[float, float, float], running: float, idle: float,
    spare_nodes: int = 0,
) -> Bill:  # fmt: skip
    """Return what a cluster takes for some seconds of training and some of standing still."""
    per_node, nodes = s.cluster.ranks_per_node, s.cluster.num_nodes
    total = running + idle
    stand_by = device_power(s, cost, (0.0, 0.0, 1.0))
    joules = nodes * per_node * (device_power(s, cost, mix) * running + stand_by * idle)
    joules += spare_nodes * per_node * stand_by * total
    joules += (nodes + spare_nodes) * cost.host_power * total
    joules *= cost.pue
    held = (nodes + spare_nodes) * per_node * total

    def priced(price: float | None, amount: float) -> float | None:
        return None if price is None else price * amount

    return Bill(
        joules=joules,
        carbon_kg=priced(cost.carbon_intensity, joules),
        electricity_usd=priced(cost.electricity_price, joules),
        devices_usd=priced(cost.device_price, held),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bills:
    """Bills of a job; means over samples."""

    step: Bill
    """One step with nothing wrong."""
    run: Bill
    million_tokens: Bill
    """A million tokens (samples, of images) that were kept, with all that was lost."""


def bills(operated: Operated) -> Bills:
    """Return what operations take.

    Raises:
        DescriptionError: when nothing says what power or what is kept is zero.
    """
    s, ops = operated.scenario, operated.operations
    assert s.cost is not None  # asked for only then
    mix = mix_of(operated.step)
    seconds: Float64 = operated.seconds.mean(axis=0)
    running = float(seconds[list(RUNNING)].sum())
    run = bill(s, s.cost, mix, running, float(seconds.sum()) - running, ops.spare_nodes)
    tokens = float(operated.tokens.mean())
    return Bills(
        step=bill(s, s.cost, mix, operated.step_time_s, 0.0),
        run=run,
        million_tokens=run.times(1e6 / tokens if tokens else float("inf")),
    )


def step_bills(result: Result) -> tuple[Bill, Bill]:
    """Return what one step takes, and a million of its tokens (of its samples, where images).

    Raises:
        DescriptionError: when the device's file does not say what it draws.
    """
    s = result.scenario
    assert s is not None
    assert s.cost is not None  # asked for only then
    step = bill(s, s.cost, mix_of(result), result.step_time_s, 0.0)
    return step, step.times(1e6 / s.tokens_per_step)


def step_text(result: Result) -> str:
    """Return the bill of a step as a table, with what it was counted from."""
    s = result.scenario
    assert s is not None
    step, million = step_bills(result)
    what = counted(s)
    rows = [["takes", "energy", "CO2e", "electricity", "devices"],
            ["one step", *bill_cells(step)],
            [f"a million {what}", *bill_cells(million)]]  # fmt: skip
    lines = cost_assumptions(s, result)
    return "\n".join([table(rows), *(f"  - {line}" for line in lines)])


def bill_cells(b: Bill) -> list[str]:
    """Return energy, carbon, electricity and devices as texts; a dash where nothing is known."""
    return [
        f"{format_count(b.joules / KWH)} kWh",
        "-" if b.carbon_kg is None else f"{format_count(b.carbon_kg)} kg",
        "-" if b.electricity_usd is None else f"${format_count(b.electricity_usd)}",
        "-" if b.devices_usd is None else f"${format_count(b.devices_usd)}",
    ]


def bill_dict(b: Bill) -> dict[str, Any]:
    """Return a bill as plain values."""
    return {
        "energy_kwh": b.joules / KWH, "carbon_kg": b.carbon_kg,
        "electricity_usd": b.electricity_usd, "devices_usd": b.devices_usd,
    }  # fmt: skip


def cost_assumptions(s: Scenario, result: Result | None) -> list[str]:
    """Return what moved the energy and the money, of a step that was simulated or stated."""
    cost = s.cost
    assert cost is not None
    device = s.cluster.node.device
    busy, waiting = drawn(device, cost)
    work, communication, _ = mix_of(result)
    stated = " (the step's time is stated, so all of it counts as computing)"
    return [
        f"a device draws {busy:g} W computing, {work:.1%} of a step"
        f"{stated if result is None else ''}, {waiting:g} W "
        f"while only communication runs, {communication:.1%}, and {device.idle_power:g} W idle: "
        "in bubbles, in spare nodes and while the job stands still; time with fewer replicas is "
        "counted as time with all",
        f"a node draws {cost.host_power:g} W beside its devices, and the building {cost.pue:g} "
        "times what nodes do; network and storage are left out",
        "devices are paid for as long as they are held, spare and broken ones too",
    ]
