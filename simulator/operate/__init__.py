"""Training over days: failures, recovery, checkpoints, goodput, energy and money."""

from simulator.operate.result import Operated
from simulator.operate.run import operate

__all__ = ["Operated", "operate"]
