"""Rows of a sweep as a table: a pandas frame, a Parquet or CSV file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulator.explore.sweep.columns import COLUMNS
from simulator.explore.sweep.row import Row
from simulator.files import write_whole

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES = (".parquet", ".csv")
"""How names of results end."""

RUN_COLUMNS = (
    "run_time_s", "run_energy_kwh", "run_carbon_kg", "run_electricity_usd", "run_devices_usd",
)  # fmt: skip
"""Of a run of so many tokens, where it was asked for."""

_KINDS = {
    "string": ("status", "reason", "device", "schedule", "owner", "bottleneck"),
    "boolean": ("fits",),
    "Int64": (
        "ranks", "num_nodes", "dp", "tp", "pp", "cp", "chunks", "microbatch_size",
        "num_microbatches", "global_batch_size",
    ),
}  # fmt: skip
KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}
"""Type of a column in a frame; float64 where it is not named."""


def to_frame(keys: Sequence[str], rows: Sequence[Row]) -> pd.DataFrame:
    """Return one line for each row; types of results do not depend on what is in them."""
    import pandas as pd

    ran = [name for name in RUN_COLUMNS if any(name in row for row in rows)]
    columns: dict[str, Any] = {}
    for name in (*keys, *COLUMNS, *ran):
        values: Any = [row.get(name) for row in rows]
        kind: Any = _kind(values) if name in keys else KIND_OF.get(name, "float64")
        if kind == "string":
            values = [None if value is None else written(value) for value in values]
        columns[name] = pd.Series(values, dtype=kind)
    return pd.DataFrame(columns)


def _kind(values: Sequence[object]) -> str:
    """Return the type of a column that holds all values of one setting."""
    kinds = {type(value) for value in values if value is not None}
    for name, allowed in (("boolean", {bool}), ("Int64", {int}), ("float64", {int, float})):
        if kinds <= allowed:
            return name
    return "string"


def written(value: object) -> str:
    """Return a value of a setting as one reads it."""
    if isinstance(value, (list, tuple, dict)):
        return json.dumps(value, default=str)
    return str(value)


def save(frame: pd.DataFrame, path: Path) -> None:
    """Write a frame as the file's name ends, whole or not at all.

    Raises:
        DescriptionError: when it cannot be written there.
    """

    def write(to: Path) -> None:
        if path.suffix == ".parquet":
            frame.to_parquet(to, engine="pyarrow", index=False)
        else:
            frame.to_csv(to, index=False, lineterminator="\n")

    write_whole(path, write)
