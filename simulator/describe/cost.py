"""Energy and money: power beside the devices' own, what electricity emits and costs, prices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from simulator.describe.fields import Range, Unit, Watts, validate

Share = Annotated[float, Range(0, 1.5)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a device-second takes beside time. Shares are of the device's `tdp`."""

    busy_share: Share = 1.0
    """Power while computing. ASSUMED the whole of tdp, an upper bound: a node of 8 H100 drew at
    most 8.4 of its 10.2 kW in training (Latif et al., 2024, arXiv 2412.08602)."""
    communication_share: Share = 0.5
    """Power while only communication runs. ASSUMED: no published value by device was found."""
    host_power: Watts = 0.0
    """Of a node beside its devices (processors, adapters, fans), running or not."""
    pue: Annotated[float, Range(1, 5)] = 1.0
    """Power usage effectiveness: of the building over that of the machines."""
    carbon_intensity: Annotated[float, Unit("kg/J", zero=True)] | None = None
    """CO2 equivalents of electricity."""
    electricity_price: Annotated[float, Unit("USD/J", zero=True)] | None = None
    device_price: Annotated[float, Unit("USD/s", zero=True)] | None = None
    """Of a device for the time it is held, spare ones too."""

    def __post_init__(self) -> None:
        validate(self)
