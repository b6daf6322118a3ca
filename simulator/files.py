"""Writing files whole: to a temporary one beside the target, then renamed, or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

from simulator.errors import DescriptionError


def check_writable(path: Path, suffixes: Collection[str] = ()) -> None:
    """Check that a file can be written at a path, before the work that would fill it.

    Args:
        path: the file to be.
        suffixes: how its name may end; anyhow when empty.

    Raises:
        DescriptionError: when its folder is missing or closed, the path is a folder, or its name
            ends wrong.
    """
    if suffixes and not path.name.endswith(tuple(suffixes)):
        raise DescriptionError(
            f"cannot write {str(path)!r}: its name must end in {' or '.join(suffixes)}"
        )
    folder = path.parent
    if not folder.is_dir():
        raise DescriptionError(f"cannot write {str(path)!r}: there is no folder {str(folder)!r}")
    if path.is_dir():
        raise DescriptionError(f"cannot write {str(path)!r}: it is a folder")
    if not os.access(folder, os.W_OK):
        raise DescriptionError(f"cannot write {str(path)!r}: the folder is not writable")


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file and rename it to `path`; on failure leave nothing behind.

    Raises:
        DescriptionError: when the file cannot be written there.
    """
    check_writable(path)
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".trainsim-", suffix=path.suffix)
        os.close(handle)
        temporary = Path(name)
        write(temporary)
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except OSError as error:
        raise DescriptionError(f"cannot write {str(path)!r}: {error.strerror}") from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
