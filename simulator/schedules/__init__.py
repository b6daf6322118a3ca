"""Pipeline schedules as data: for each pipeline rank, the list of actions it performs in order.

An action is a stage, a kind and a microbatch, spelled as torch.distributed.pipelining spells them
(``3F0``, ``1SEND_F2``). A schedule is one function over (stages, microbatches), or over (ranks,
microbatches, chunks) where a rank holds several stages; the passes take action lists and return
new ones.
"""

from simulator.schedules.action import Action, Actions, grid, parse_grid, read_actions
from simulator.schedules.basic import gpipe, interleaved_1f1b, naive, one_f_one_b
from simulator.schedules.check import check_actions
from simulator.schedules.passes import add_optimizer, add_reduce_grad, add_send_recv
from simulator.schedules.table import (
    BUBBLE_FRACTION,
    CHUNKED,
    PLAIN,
    SCHEDULES,
    actions_of,
    schedule_name,
    size_complaint,
)

__all__ = [
    "BUBBLE_FRACTION",
    "CHUNKED",
    "PLAIN",
    "SCHEDULES",
    "Action",
    "Actions",
    "actions_of",
    "add_optimizer",
    "add_reduce_grad",
    "add_send_recv",
    "check_actions",
    "gpipe",
    "grid",
    "interleaved_1f1b",
    "naive",
    "one_f_one_b",
    "parse_grid",
    "read_actions",
    "schedule_name",
    "size_complaint",
]
