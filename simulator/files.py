"""Writing files and folders whole: to a temporary one beside the target, then renamed, or not."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Callable, Collection
from pathlib import Path

from simulator.errors import DescriptionError


def check_writable(path: Path, suffixes: Collection[str] = ()) -> None:
    """Check that a file can be written at a path, before the work that would fill it.

    Args:
        path: the file to be.
        suffixes: how its name may end; anyhow when empty.

    Raises:
        DescriptionError: when its folder is missing or closed, something that is no plain file or
            that is read-only lies there, or its name ends wrong.
    """
    if suffixes and not path.name.endswith(tuple(suffixes)):
        raise DescriptionError(
            f"cannot write {str(path)!r}: its name must end in {' or '.join(suffixes)}"
        )
    if wrong := _obstacle(path):
        raise DescriptionError(f"cannot write {str(path)!r}: {wrong}")


def _obstacle(path: Path) -> str | None:
    """Say what keeps a file from being written at a path, if anything does."""
    target = Path(os.path.realpath(path))
    folder = target.parent
    try:
        if not folder.is_dir():
            return f"there is no folder {str(path.parent)!r}"
        if not os.access(folder, os.W_OK | os.X_OK):
            return "the folder is not writable"
        if not target.exists():
            return None
        mode = target.stat().st_mode
    except OSError as error:
        return f"{error.strerror}"
    if stat.S_ISDIR(mode):
        return "it is a folder"
    if not stat.S_ISREG(mode):
        return "it is not a plain file"
    return None if mode & 0o222 and os.access(target, os.W_OK) else "it is read-only"


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file and rename it to `path`; on failure leave nothing behind.

    A link is followed, and the mode of a file that is replaced is kept.

    Raises:
        DescriptionError: when the file cannot be written there.
    """
    check_writable(path)
    target = Path(os.path.realpath(path))
    temporary: Path | None = None
    try:
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~_umask()
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=".trainsim-", suffix=path.suffix)
        os.close(handle)
        temporary = Path(name)
        write(temporary)
        temporary.chmod(mode)
        temporary.replace(target)
    except (OSError, zlib.error) as error:  # a full disk shows as either
        reason = getattr(error, "strerror", None) or str(error)
        raise DescriptionError(f"cannot write {str(path)!r}: {reason}") from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def check_folder(path: Path) -> None:
    """Check that a folder can be made at a path: nothing lies there, or an empty one does.

    Raises:
        DescriptionError: when something else lies there, or its own folder is missing or closed.
    """
    target = Path(os.path.realpath(path))
    wrong = None
    try:
        if target.is_dir():
            if next(target.iterdir(), None) is not None:
                wrong = "the folder is not empty; name a new one"
        elif target.exists():
            wrong = "it is not a folder"
        if wrong is None and not target.parent.is_dir():
            wrong = f"there is no folder {str(path.parent)!r}"
        elif wrong is None and not os.access(target.parent, os.W_OK | os.X_OK):
            wrong = "the folder around it is not writable"
    except OSError as error:
        wrong = f"{error.strerror}"
    if wrong is not None:
        raise DescriptionError(f"cannot write {str(path)!r}: {wrong}")


def write_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary folder and rename it to `path`; on failure leave nothing behind.

    Raises:
        DescriptionError: when the folder cannot be written there.
    """
    check_folder(path)
    target = Path(os.path.realpath(path))
    temporary: Path | None = None
    try:
        temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=".trainsim-"))
        write(temporary)
        temporary.chmod(0o777 & ~_umask())
        temporary.replace(target)  # over an empty folder too
    except OSError as error:
        raise DescriptionError(f"cannot write {str(path)!r}: {error.strerror}") from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
