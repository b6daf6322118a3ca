"""Columns of what a sweep keeps of each simulation."""

from __future__ import annotations

from simulator.report.breakdown import COMMUNICATION

WORK = ("compute", "memory", "launch")
"""Owners of the step that are work."""

COLUMNS = (
    "status", "reason", "fits", "ranks", "num_nodes", "device", "dp", "tp", "pp", "cp",
    "schedule", "chunks", "microbatch_size", "num_microbatches", "global_batch_size",
    "step_time_s", "samples_per_s", "tokens_per_s", "mfu", "hfu", "bubble_fraction",
    "work_fraction", "optimizer_fraction",
    *(f"{bound}_bound_fraction" for bound in WORK), "exposed_communication_fraction",
    *(f"exposed_{kind}_fraction" for kind in COMMUNICATION),
    "owner", "bottleneck", "device_memory_bytes", "memory_capacity_bytes", "step_energy_kwh",
    "step_carbon_kg", "step_electricity_usd", "step_devices_usd",
)  # fmt: skip
"""All columns, in order; what a row has no value for is empty."""
