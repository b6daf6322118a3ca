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
from simulator.schedules.formulas import Case, Formula
from simulator.schedules.passes import (
    add_optimizer,
    add_reduce_grad,
    add_send_recv,
    homes,
    stages_of_ranks,
)
from simulator.schedules.table import (
    BUBBLE_FRACTION,
    SCHEDULES,
    Schedule,
    Times,
    actions_of,
    copies_of,
    lists_of,
    schedule_name,
    schedule_of,
    size_complaint,
)

__all__ = [
    "BUBBLE_FRACTION",
    "SCHEDULES",
    "Action",
    "Actions",
    "Case",
    "Formula",
    "Schedule",
    "Times",
    "actions_of",
    "add_optimizer",
    "add_reduce_grad",
    "add_send_recv",
    "cell_text",
    "cells",
    "check_actions",
    "copies_of",
    "gpipe",
    "grid",
    "homes",
    "interleaved_1f1b",
    "lists_of",
    "naive",
    "one_f_one_b",
    "parse_cell",
    "parse_grid",
    "read_actions",
    "schedule_name",
    "schedule_of",
    "size_complaint",
    "stages_of_ranks",
]
