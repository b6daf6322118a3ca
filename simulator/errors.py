"""What can go wrong, and whose fault it is.

TrainsimError                 failed while running (exit code 1)
├── DescriptionError          the user's input is wrong (exit code 2)
└── ProgramError              the program breaks a rule of `check` (exit code 3)
    ├── ScheduleError         an action list is not a legal schedule
    └── DeadlockError         ranks wait for each other
"""

import difflib
from collections.abc import Iterable


class TrainsimError(Exception):
    """Base of every error that this package raises on purpose."""

    exit_code = 1


class DescriptionError(TrainsimError):
    """The description is wrong; `problems` holds one sentence per fault, all of them."""

    exit_code = 2

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class ProgramError(TrainsimError):
    """The program is not runnable; the message names ranks and ops."""

    exit_code = 3


class ScheduleError(ProgramError):
    """A schedule is not legal; the message shows the grid with the offending cell."""

    def __init__(self, message: str, place: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.place = place
        """Rank of the offending action, and its position in that rank's list."""


class DeadlockError(ProgramError):
    """Ops wait for each other in a cycle; the message lists who waits for whom."""


def suggestion(word: object, choices: Iterable[str]) -> str:
    """Return ``, did you mean 'x'?`` when a choice is close to the word, else an empty text."""
    by_lower = {c.lower(): c for c in choices}
    close = difflib.get_close_matches(str(word).lower(), by_lower, n=1, cutoff=0.6)
    return f", did you mean {by_lower[close[0]]!r}?" if close else ""
