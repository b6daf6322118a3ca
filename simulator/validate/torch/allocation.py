"""Bytes of tensors that are alive during a step: counted by storage, or by the GPU's allocator.

On CPU a mode sees every operator of a step, forward and backward; the storages of what it returns
count until they are released. What an operator uses within itself is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """Counts bytes of storages that come and go while it is on."""

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, Any] = {}
        for tensor in held:
            self._count(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        """Run an operator and count what it returns."""
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()  # one object as long as the storage is alive
        if key not in self._seen:
            self._seen[key] = weakref.ref(storage, lambda _: self._release(key, size))
            self.now += size
            self.peak = max(self.peak, self.now)

    def forget(self, tensor: Tensor) -> None:
        """Count a tensor no longer, though it is still alive."""
        storage = tensor.untyped_storage()
        if id(storage) in self._seen:
            self._release(id(storage), storage.nbytes())

    def _release(self, key: int, size: int) -> None:
        del self._seen[key]
        self.now -= size


def peak_bytes(
    step: Callable[[Callable[[Tensor], None]], Any], held: list[Tensor], device: torch.device
) -> int:
    """Return the most bytes that are alive during a step, with what is held all the time.

    The step may hand over tensors that are to count no longer, on the CPU.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step(lambda tensor: None)
        return int(torch.cuda.max_memory_allocated(device))
    with Alive(held) as alive:
        step(alive.forget)
    return alive.peak


def held_bytes(held: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of tensors, each counted once."""
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    return sum(sizes.values())
