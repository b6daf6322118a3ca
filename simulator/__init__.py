"""trainsim: a discrete-event simulator of distributed deep-learning training.

>>> import simulator as sim
>>> result = sim.simulate_schedule("1F1B", stages=4, microbatches=8)
>>> result.step_time_s
33.0
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulator.api import simulate, simulate_schedule
    from simulator.describe import (
        Cluster,
        Device,
        Link,
        Model,
        Nic,
        Node,
        Plan,
        Run,
        Scenario,
        load,
    )
    from simulator.errors import (
        DeadlockError,
        DescriptionError,
        ProgramError,
        ScheduleError,
        TrainsimError,
    )
    from simulator.explore.sweep.run import sweep
    from simulator.program import Program
    from simulator.report.result import Result
    from simulator.schedules import register_schedule
    from simulator.timeline import Timeline

__version__ = "0.1.0"

# Public names load with their module at first use: the command line answers --help without numpy.
_HOME = {
    "api": ("simulate", "simulate_schedule"),
    "describe": (
        "Cluster", "Device", "Link", "Model", "Nic", "Node", "Plan", "Run", "Scenario", "load",
    ),
    "errors": (
        "DeadlockError", "DescriptionError", "ProgramError", "ScheduleError", "TrainsimError",
    ),
    "explore.sweep.run": ("sweep",),
    "program": ("Program",),
    "report.result": ("Result",),
    "schedules": ("register_schedule",),
    "timeline": ("Timeline",),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

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
    "register_schedule",
    "simulate",
    "simulate_schedule",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'simulator' has no attribute {name!r}")
    value = getattr(import_module(f"simulator.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
