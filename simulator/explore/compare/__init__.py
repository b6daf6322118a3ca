"""Two runs side by side: what was put in differently, what came out, and where the time went.

A `Side` is a simulated or a measured run, a `Comparison` is two of them with their differences. All
times are whole ticks, so that differences add up exactly to that of the steps.
"""

from simulator.explore.compare.comparison import Comparison, compare
from simulator.explore.compare.side import Side

__all__ = ["Comparison", "Side", "compare"]
