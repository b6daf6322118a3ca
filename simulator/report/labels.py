"""Where labels stand on paper so that none hides a thing or another label; all in points."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from simulator.report.palette import FAINT, text_width

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = 8.0
"""Points of a label."""


Point: TypeAlias = tuple[float, float]


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

    def corner(self, point: Point) -> Point:
        """Return where a line from a point ends: on the near side, or in its middle if level."""
        x = self.left if self.left > point[0] else self.right if self.right < point[0] else None
        y = self.bottom if self.bottom > point[1] else self.top if self.top < point[1] else None
        return (
            (self.left + self.right) / 2 if x is None else x,
            (self.bottom + self.top) / 2 if y is None else y,
        )


FARTHEST = 110
"""Points from a dot within which its label is tried."""

TURNS = (-20, 20, 0, 200, 160, 180, -50, 50, 230, 130, -90, 90, -70, 70, 250, 110)
"""Directions from a dot in which a label is tried, in degrees."""


def along(a: Point, b: Point, thick: float) -> Iterator[Box]:
    """Yield boxes that cover a line."""
    pieces = max(1, math.ceil(math.dist(a, b) / max(thick, 1.0)))
    for k in range(pieces + 1):
        x, y = (p + (q - p) * k / pieces for p, q in zip(a, b, strict=True))
        yield Box(x - thick / 2, y - thick / 2, x + thick / 2, y + thick / 2)


@dataclass(slots=True)
class Labels:
    """Paper on which labels are put one after the other, each beside its dot."""

    paper: Box
    """Within which they must lie."""
    taken: list[Box]
    """What they must not hide."""
    dots: list[Box]
    """Dots, which they must not hide either, nor a line to another dot cross."""
    names: list[Box] = field(default_factory=list)
    """Those that are there, which no line of another may cross."""

    def place(self, at: Point, radius: float, size: tuple[float, float]) -> Box | None:
        """Take and return the free place that is nearest to a dot, or None where there is none.

        Args:
            at: middle of the dot.
            radius: of the dot.
            size: width and height of the label.
        """
        for box in _around(at, radius, *size):
            if not self.paper.holds(box) or any(
                map(box.meets, (*self.taken, *self.dots, *self.names))
            ):
                continue
            line = list(along(at, box.corner(at), 1.0))
            others = (*self.names, *(dot for dot in self.dots if not dot.meets(line[0])))
            if not any(other.meets(piece) for other in others for piece in line):
                self.names.append(box)
                self.taken += line
                return box
        return None


def _around(at: Point, radius: float, wide: float, tall: float) -> Iterator[Box]:
    """Yield places around a dot, the nearest first."""
    for far in range(3, FARTHEST, 5):
        for turn in TURNS:
            cos, sin = math.cos(math.radians(turn)), math.sin(math.radians(turn))
            x, y = at[0] + (radius + far) * cos, at[1] + (radius + far) * sin
            left = x - wide / 2 + math.copysign(wide / 2, cos) * (abs(cos) > 0.05)
            yield Box(left, y - tall / 2, left + wide, y + tall / 2)


def name_dot(ax: Axes, text: str, where: Point, at: Point, radius: float, labels: Labels) -> bool:
    """Name a dot with a line to it; return whether there was room.

    Args:
        ax: where it is drawn.
        text: the name.
        where: the dot's place in the axes' units.
        at: the same in points, as those of `labels`.
        radius: of the dot.
        labels: what there is already.
    """
    box = labels.place(at, radius, (text_width(text, SIZE) + 3, 1.35 * SIZE))
    if box is None:
        return False
    corner = box.corner(at)
    sides = ((corner[0] - box.left) / (box.right - box.left),
             (corner[1] - box.bottom) / (box.top - box.bottom))  # fmt: skip
    line: dict[str, Any] = {
        "arrowstyle": "-", "lw": 0.5, "color": FAINT, "relpos": sides, "shrinkA": 0, "shrinkB": 0,
    }  # fmt: skip
    ax.annotate(
        text, where, (box.left + 1.5 - at[0], box.bottom + 1.5 - at[1]), size=SIZE, ha="left",
        textcoords="offset points", va="bottom", gid="label", zorder=4, arrowprops=line,
    )  # fmt: skip
    return True


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
