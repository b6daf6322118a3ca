"""Memory of this machine: what is too large is refused before it is tried, with the number."""

from __future__ import annotations

import os
from pathlib import Path

from simulator.errors import DescriptionError
from simulator.units import format_bytes


def available_bytes() -> float:
    """Return the memory that this process may still use, or infinity where that is unknown."""
    return min(_machine_bytes(), _group_bytes())


def _group_bytes() -> float:
    """Return what the process's control group leaves, where it has a limit (cgroup v2)."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = (group / "memory.current").read_text(encoding="ascii").strip()
        return float(limit) - float(used)  # "max" is no number
    except (OSError, ValueError):
        return float("inf")


def _machine_bytes() -> float:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 1024
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (OSError, ValueError, AttributeError):
        return float("inf")


def require(size: float, what: str, advice: str) -> None:
    """Check that `size` bytes can be had.

    Raises:
        DescriptionError: when they cannot; it says for what, and what to do instead.
    """
    if size < 100e6:
        return
    there = available_bytes()
    if size > there:
        raise DescriptionError(
            f"{what} would need about {format_bytes(size)} of memory, and {format_bytes(there)} "
            f"are available; {advice}"
        )
