"""The outcome of a run, simulated or measured: when every op started and ended, nothing else."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """Start and end of every op of one Program, in ticks (int64 picoseconds), by op id."""

    start: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]

    @property
    def makespan(self) -> int:
        """End of the last op, in ticks."""
        return int(self.end.max(initial=0))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Timeline)
            and np.array_equal(self.start, other.start)
            and np.array_equal(self.end, other.end)
        )

    __hash__ = None  # type: ignore[assignment]
