from simulator.schedules import *  # noqa
