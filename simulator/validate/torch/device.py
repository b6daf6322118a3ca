"""Where ranks compute and how they talk: CPU cores, a GPU a rank, or one GPU that ranks share.

The rows of GPUs have not been run on one yet; tests run their paths on CPU tensors.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

try:
    import fcntl
except ImportError:  # as on Windows
    fcntl = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Device:
    """One kind of device."""

    name: str
    """Of torch."""
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
    shared: bool = False
    """Whether all ranks compute on one device: they take turns, an action or a part of one each,
    and messages go through the memory of the host."""

    def here(self) -> torch.device:
        """Return this rank's device."""
        if self.name != "cuda":
            return torch.device(self.name)
        index = 0 if self.shared else int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
        return torch.device(self.name, index)

    @property
    def link(self) -> torch.device:
        """Where the tensors of messages lie."""
        return torch.device("cpu") if self.shared else self.here()

    def lacking(self, ranks: int) -> str | None:
        """Say what ranks on this host lack, if anything."""
        if self.name != "cuda":
            return None
        there, need = torch.cuda.device_count(), 1 if self.shared else ranks
        if there >= need:
            return None
        more = (
            "" if there == 0 or self.shared
            else "; ranks that share one take turns with --device cuda-shared"
        )  # fmt: skip
        each = "one is needed" if self.shared else "each rank needs its own"
        return f"torch finds {there} GPUs here; with --device {self.option} {each}{more}"

    @property
    def option(self) -> str:
        """How the command line names it."""
        return f"{self.name}-shared" if self.shared else self.name


class Turns:
    """Whose turn it is on a device that ranks share: a lock that ends with its process."""

    def __init__(self, device: Device, path: Path) -> None:
        self._file: BinaryIO | None = None
        if device.shared:
            if fcntl is None:
                raise SystemExit("ranks cannot share a GPU on this system: it has no flock")
            self._file = path.open("a+b")

    def take(self) -> bool:
        """Wait for the turn; return whether there are turns."""
        if self._file is None:
            return False
        fcntl.flock(self._file, fcntl.LOCK_EX)
        return True

    def give(self) -> None:
        """Hand the turn on."""
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Take no more turns."""
        if self._file is not None:
            self._file.close()


SYNCHRONISED = "monotonic clock around each action, with the GPU synchronised after it"

DEVICES = {
    "cpu": Device(
        "cpu", "gloo", time.thread_time_ns, lambda: None, tagged=True,
        clock="CPU time of the rank's thread",
    ),
    "cuda": Device(
        "cuda", "nccl", time.perf_counter_ns, lambda: torch.cuda.synchronize(), tagged=False,
        clock=SYNCHRONISED,
    ),
    "cuda-shared": Device(
        "cuda", "gloo", time.perf_counter_ns, lambda: torch.cuda.synchronize(), tagged=True,
        clock=f"{SYNCHRONISED}; ranks take turns on one GPU", shared=True,
    ),
}  # fmt: skip
"""Kinds of devices by the name of `--device`."""
