"""What ranks and their parent leave for each other in the folder of a job."""

from __future__ import annotations

import struct
from pathlib import Path

POSITION = struct.Struct("<qq")
"""Step and number of the action that a rank is at; -1 between steps."""


def position_file(folder: Path, rank: int) -> Path:
    """Return the file in which a rank's position stands."""
    return folder / f"position{rank}"


def results_file(folder: Path, rank: int) -> Path:
    """Return the file of what a rank measured: a head, and a line for each step."""
    return folder / f"rank{rank}.jsonl"


def grads_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's gradients of the first step."""
    return folder / f"grads{rank}.pt"
