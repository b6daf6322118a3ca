"""trainsim: a discrete-event simulator of distributed deep-learning training.

>>> import simulator as sim
>>> result = sim.simulate_schedule("1F1B", stages=4, microbatches=8)
>>> result.step_time_s
33.0
"""

from simulator.api import simulate, simulate_schedule
from simulator.describe import Cluster, Device, Link, Model, Nic, Node, Plan, Run, Scenario, load
from simulator.errors import (
    DeadlockError,
    DescriptionError,
    ProgramError,
    ScheduleError,
    TrainsimError,
)
from simulator.program import Program
from simulator.report.result import Result
from simulator.timeline import Timeline

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "DeadlockError",
    "DescriptionError",
    "Device",
    "Link",
    "Model",
    "Nic",
    "Node",
    "Plan",
    "Program",
    "ProgramError",
    "Result",
    "Run",
    "Scenario",
    "ScheduleError",
    "Timeline",
    "TrainsimError",
    "load",
    "simulate",
    "simulate_schedule",
]
