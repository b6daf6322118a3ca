"""The door of numba: functions over arrays that are interpreted when small, compiled when large.

numba's import and its compiled code load at the first large call. Compiled code is kept in a
folder of the user's cache; a first compilation takes some seconds, and says so once.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

LOGGER = logging.getLogger("simulator")

SMALL = 40_000
"""Elements that a process interprets before it loads numba and its compiled code (0.3 to 0.8 s)."""


class Kernel:
    """A function over arrays with scalar loops, called as `kernel(size, *arguments)`.

    `size` says how many elements the loops will visit. A process that visits few runs the plain
    Python; once it has visited many, in one call or over many, all kernels are compiled.
    """

    visited = 0

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __call__(self, size: int, *arguments: Any) -> Any:
        """Run the function on its arguments."""
        if Kernel.visited + size < SMALL:
            Kernel.visited += size
            return self.function(*arguments)
        Kernel.visited = SMALL
        return self.compiled(*arguments)

    @property
    def compiled(self) -> Callable[..., Any]:
        """The compiled function."""
        return _compiled(self.function)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    numba = prepared_numba()
    compiled: Callable[..., Any] = numba.njit(cache=True)(function)
    return compiled


@cache
def prepared_numba() -> Any:
    """Return numba with a cache folder that can be written, after telling of a first compile.

    Kernels call those of other files, whose changes numba does not notice: each state of the files
    has a folder of its own.
    """
    folder = _cache_folder() / _fingerprint()
    folder.mkdir(exist_ok=True)
    os.environ.setdefault("NUMBA_CACHE_DIR", str(folder))
    import numba

    mark = folder / f"compiled-{numba.__version__}"
    if not mark.exists():
        LOGGER.warning("compiling the engine for this machine, once; this takes some seconds")
        mark.touch()
    return numba


def _cache_folder() -> Path:
    """Return a folder for compiled code that can be written, the user's cache if possible."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "trainsim" / "numba"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
    except OSError:  # compiled anew in each process, in a folder that only this user can read
        return Path(tempfile.mkdtemp(prefix="trainsim-numba-"))
    return folder


def _fingerprint() -> str:
    """Return what changes when a kernel has changed, and compiled code must be made anew."""
    here = Path(__file__).parent
    stamp = [f"{path}{path.stat().st_mtime_ns}" for path in sorted(here.glob("*.py"))]
    return hashlib.sha256(f"{stamp}".encode()).hexdigest()[:16]
