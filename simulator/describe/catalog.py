"""The catalogue: fact files that are found by name, in the repository and in an installed copy."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from simulator.errors import DescriptionError, suggestion

FOLDERS = {
    "devices": ("topologies/devices", (".toml",)),
    "calibrations": ("topologies/calibrations", (".toml",)),
    "nodes": ("topologies/nodes", (".toml",)),
    "storage": ("topologies/storage", (".toml",)),
    "models": ("workloads/models", (".json", ".toml")),
    "scenarios": ("workloads", (".toml",)),
}
"""Where each part of the catalogue lies below the root, and the endings of its files."""


@cache
def root() -> Path:
    """Return the folder that holds `topologies` and `workloads`."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "data"
    return installed if installed.is_dir() else package.parent


def names(folder: str) -> list[str]:
    """Return the names in one part of the catalogue, sorted; some parts may be empty."""
    place, suffixes = FOLDERS[folder]
    files = (root() / place).iterdir() if (root() / place).is_dir() else ()
    return sorted(path.stem for path in files if path.suffix in suffixes)


def find(reference: str, folder: str, base: Path) -> Path:
    """Return the file that a name of the catalogue, or a path relative to `base`, stands for.

    Raises:
        DescriptionError: when there is no such file.
    """
    place, suffixes = FOLDERS[folder]
    if not is_path(reference):
        for suffix in suffixes:
            path = root() / place / f"{reference}{suffix}"
            if path.is_file():
                return path
        known, endings = names(folder), " or ".join(suffixes)
        raise DescriptionError(
            f"{reference!r} is not in the catalogue of {folder}{suggestion(reference, known)}"
            f" (known: {', '.join(known) or 'none'}; a path must hold a '/' or end in {endings})"
        )
    try:
        path = (base / reference).expanduser()
        found = path.is_file()
        if found:
            path.open("rb").close()
    except (OSError, RuntimeError) as error:  # too long a name, a closed folder, an unknown user
        reason = getattr(error, "strerror", None) or str(error)
        raise DescriptionError(f"{reference!r} cannot be read ({reason})") from None
    if found and folder == "calibrations" and path.suffix not in suffixes:
        raise DescriptionError(
            f"{reference!r}: a device names a table of `trainsim calibrate --kernels`, in .toml"
        )
    if not found:
        raise DescriptionError(f"no file {reference!r} (looked for {path})")
    return path


def is_path(reference: str) -> bool:
    """Return whether a reference is a path rather than a name of the catalogue."""
    return "/" in reference or reference.endswith((".toml", ".json", ".yaml", ".yml"))
