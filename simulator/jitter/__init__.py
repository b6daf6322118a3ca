"""Steps that differ: noise, slow ranks and links, interference, many samples of one step."""

from simulator.jitter.result import Jittered
from simulator.jitter.run import study

__all__ = ["Jittered", "study"]
