"""Where labels stand on paper so that none hides a thing or another label; all in points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from simulator.report.palette import FAINT, text_width

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = 8.0
"""Points of a label."""


class Box(NamedTuple):
    """A rectangle on paper."""

    left: float
    bottom: float
    right: float
    top: float

    def meets(self, other: Box) -> bool:
        """Return whether two overlap."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.bottom < other.top
            and other.bottom < self.top
        )

    def holds(self, other: Box) -> bool:
        """Return whether another lies within this one."""
        return (
            self.left <= other.left
            and other.right <= self.right
            and self.bottom <= other.bottom
            and other.top <= self.top
        )


TURNS = (-20, 20, 0, 200, 160, 180, -50, 50, 230, 130, -90, 90)
"""Directions from a dot in which a label is tried, in degrees."""


def along(a: tuple[float, float], b: tuple[float, float], thick: float) -> Iterator[Box]:
    """Yield boxes that cover a line."""
    pieces = max(1, math.ceil(math.dist(a, b) / max(thick, 1.0)))
    for k in range(pieces + 1):
        x, y = (p + (q - p) * k / pieces for p, q in zip(a, b, strict=True))
        yield Box(x - thick / 2, y - thick / 2, x + thick / 2, y + thick / 2)


def beside(
    at: tuple[float, float], radius: float, size: tuple[float, float], paper: Box,
    taken: Iterable[Box], farthest: float = 180.0,
) -> Box | None:  # fmt: skip
    """Return the free place for a label that is nearest to its dot, or None where there is none.

    Args:
        at: middle of the dot.
        radius: of the dot.
        size: width and height of the label.
        paper: within which it must lie.
        taken: what it must not hide.
        farthest: distance up to which places are tried.
    """
    taken, (wide, tall) = list(taken), size
    for far in range(3, int(farthest), 5):
        for turn in TURNS:
            cos, sin = math.cos(math.radians(turn)), math.sin(math.radians(turn))
            x, y = at[0] + (radius + far) * cos, at[1] + (radius + far) * sin
            left = x - wide / 2 + math.copysign(wide / 2, cos) * (abs(cos) > 0.05)
            box = Box(left, y - tall / 2, left + wide, y + tall / 2)
            if paper.holds(box) and not any(map(box.meets, taken)):
                return box
    return None


def name_dot(
    ax: Axes, text: str, where: tuple[float, float], at: tuple[float, float], radius: float,
    paper: Box, taken: list[Box],
) -> None:  # fmt: skip
    """Name a dot with a line to it, if there is room, and add the name to what is taken.

    Args:
        ax: where it is drawn.
        text: the name.
        where: the dot's place in the axes' units.
        at: the same in points, as `paper` and `taken` are.
        radius: of the dot.
        paper: see `beside`.
        taken: see `beside`.
    """
    box = beside(at, radius, (text_width(text, SIZE) + 3, 1.35 * SIZE), paper, taken)
    if box is None:
        return
    taken.append(box)
    side = 0.0 if box.left > at[0] else 1.0 if box.right < at[0] else 0.5
    level = 0.0 if box.bottom > at[1] else 1.0 if box.top < at[1] else 0.5
    line: dict[str, Any] = {
        "arrowstyle": "-", "lw": 0.5, "color": FAINT, "relpos": (side, level), "shrinkA": 0,
        "shrinkB": 0,
    }  # fmt: skip
    ax.annotate(
        text, where, (box.left + 1.5 - at[0], box.bottom + 1.5 - at[1]), size=SIZE, ha="left",
        textcoords="offset points", va="bottom", gid="label", zorder=4, arrowprops=line,
    )  # fmt: skip


def apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return ascending places near the wanted ones, at least a gap apart, within bounds.

    Where there is no room for that they are spread evenly.
    """
    room = high - low
    if len(wanted) > 1 and gap * (len(wanted) - 1) > room:
        return [low + room * k / (len(wanted) - 1) for k in range(len(wanted))]
    places: list[float] = []
    for at in wanted:
        places.append(max(at, places[-1] + gap if places else low))
    top = high
    for k in range(len(places) - 1, -1, -1):
        places[k] = min(places[k], top)
        top = places[k] - gap
    return places
