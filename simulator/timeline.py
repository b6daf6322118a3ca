"""The outcome of a run, simulated or measured: when every op started and ended, nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Timeline:
    """Start and end of every op of one Program, in ticks (int64 picoseconds).

    By op id for a program without tiling. For a tiled one the arrays are (rows, columns), and
    `column_of_tile` says which column a tile's times stand in: tiles that run alike share one.
    """

    start: Int64
    end: Int64
    column_of_tile: Int64 | None = None

    @property
    def makespan(self) -> int:
        """End of the last op, in ticks."""
        return int(self.end.max(initial=0))

    @cached_property
    def flat(self) -> Timeline:
        """The times of all ops by op id."""
        return self.flat_of(np.arange(0 if self.column_of_tile is None else self.num_tiles))

    @property
    def num_tiles(self) -> int:
        """Tiles whose times are kept."""
        return 1 if self.column_of_tile is None else len(self.column_of_tile)

    def flat_of(self, tiles: npt.NDArray[np.integer]) -> Timeline:
        """Return the times of some tiles' ops, as `Program.flat_of` numbers them."""
        if self.column_of_tile is None:
            return self
        columns = self.column_of_tile[tiles]
        if len(columns) == self.start.shape[1] and (columns == np.arange(len(columns))).all():
            return Timeline(self.start.reshape(-1), self.end.reshape(-1))
        return Timeline(self.start[:, columns].ravel(), self.end[:, columns].ravel())

    @cached_property
    def columns(self) -> tuple[Int64, Int64]:
        """Start and end as (rows, columns), one column for a program without tiling."""
        if self.column_of_tile is None:
            return self.start[:, None], self.end[:, None]
        return self.start, self.end

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Timeline)
            and np.array_equal(self.flat.start, other.flat.start)
            and np.array_equal(self.flat.end, other.flat.end)
        )

    __hash__ = None  # type: ignore[assignment]
