"""Pipeline schedules as data: for each pipeline rank, the list of actions it performs in order.

An action is a stage, a kind and a microbatch, spelled as torch.distributed.pipelining spells them
(``3F0``, ``1SEND_F2``). A schedule is one function over (ranks, microbatches), and over chunks
where a rank holds several stages, with a row in `SCHEDULES`; the passes take action lists and
return new ones. Which stages a rank holds is read off its list.
"""

from simulator.schedules.action import (
    Action,
    Actions,
    cell_text,
    cells,
    grid,
    parse_cell,
    parse_grid,
    read_actions,
)
from simulator.schedules.basic import gpipe, interleaved_1f1b, naive, one_f_one_b
from simulator.schedules.check import check_actions
from simulator.schedules.deadlock import check_progress
from simulator.schedules.formulas import Case, Formula
from simulator.schedules.passes import (
    add_optimizer,
    add_reduce_grad,
    add_send_recv,
    homes,
    stages_of_ranks,
)
from simulator.schedules.rows import BUBBLE_FRACTION, SCHEDULES
from simulator.schedules.schedule import Schedule
from simulator.schedules.table import (
    actions_of,
    copies_of,
    lists_of,
    schedule_name,
    schedule_of,
    size_complaint,
)
from simulator.schedules.times import Pace, Target, Times, pace
from simulator.schedules.torch_csv import add_messages_as_torch, read_csv, write_csv
from simulator.schedules.user import is_file, register_schedule

__all__ = [
    "BUBBLE_FRACTION",
    "SCHEDULES",
    "Action",
    "Actions",
    "Case",
    "Formula",
    "Pace",
    "Schedule",
    "Target",
    "Times",
    "actions_of",
    "add_messages_as_torch",
    "add_optimizer",
    "add_reduce_grad",
    "add_send_recv",
    "cell_text",
    "cells",
    "check_actions",
    "check_progress",
    "copies_of",
    "gpipe",
    "grid",
    "homes",
    "interleaved_1f1b",
    "is_file",
    "lists_of",
    "naive",
    "one_f_one_b",
    "pace",
    "parse_cell",
    "parse_grid",
    "read_actions",
    "read_csv",
    "register_schedule",
    "schedule_name",
    "schedule_of",
    "size_complaint",
    "stages_of_ranks",
    "write_csv",
]
