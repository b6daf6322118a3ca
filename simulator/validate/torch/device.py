"""Where ranks compute and how they talk: CPU cores with gloo, or a GPU a rank with NCCL.

The row of GPUs has not been run on one yet.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Device:
    """One kind of device."""

    name: str
    backend: str
    """Of torch.distributed."""
    busy: Callable[[], int]
    """Nanoseconds that this rank has computed, up to any fixed number."""
    settle: Callable[[], None]
    """Wait until all that was launched has been computed."""
    tagged: bool
    """Whether messages find each other by tag; else by order in a group of their own."""
    clock: str
    """What `busy` reads."""

    def here(self) -> torch.device:
        """Return this rank's device."""
        index = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
        return torch.device(self.name, index) if self.name == "cuda" else torch.device("cpu")


DEVICES = {
    "cpu": Device(
        "cpu", "gloo", time.thread_time_ns, lambda: None, tagged=True,
        clock="CPU time of the rank's thread",
    ),
    "cuda": Device(
        "cuda", "nccl", time.perf_counter_ns, lambda: torch.cuda.synchronize(), tagged=False,
        clock="monotonic clock around each action, with the GPU synchronised after it",
    ),
}  # fmt: skip
