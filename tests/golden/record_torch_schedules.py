"""Print the action lists of one of torch's own schedules over a grid of sizes.

Run with a Python that has torch, for each NAME -> FILE
(GPipe -> gpipe, 1F1B -> 1f1b, Interleaved1F1B -> interleaved, LoopedBFS -> looped_bfs,
InterleavedZeroBubble -> interleaved_zero_bubble, ZBVZeroBubble -> zbv, DualPipeV -> dual_pipe_v):
    python tests/golden/record_torch_schedules.py NAME > tests/golden/torch_FILE.txt
"""

import sys

import torch
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

PLAIN = [(p, m, 1) for p in range(1, 9) for m in (1, 2, 3, 4, 5, 7, 8, 12, 16)]
CHUNKED = [(p, m, v) for p in (1, 2, 3, 4, 6) for m in (1, 2, 3, 4, 5, 6, 8, 10) for v in (2, 3)]
FOLDED = [(p, m, 2) for p in (1, 2, 3, 4, 5, 6) for m in (1, 2, 3, 5, 6, 8, 9, 12, 14)]
SIZES = {
    "GPipe": PLAIN,
    "1F1B": PLAIN,
    "Interleaved1F1B": [*CHUNKED, (8, 32, 4)],
    "LoopedBFS": [(p, m, v) for p in (1, 2, 3, 4, 5) for m in (1, 2, 3, 5, 8) for v in (2, 3)],
    "InterleavedZeroBubble": CHUNKED,
    "ZBVZeroBubble": FOLDED,
    "DualPipeV": [*FOLDED, (8, 20, 2)],
}
"""(ranks, microbatches, chunks per rank) by schedule."""


def main(schedule: str) -> None:
    out = sys.stdout
    command = f"python tests/golden/record_torch_schedules.py {schedule}"
    out.write(f"# {command}   (torch {torch.__version__})\n")
    for p, m, v in SIZES[schedule]:
        try:
            rows = get_schedule_ops(schedule, p, m, v)
        except ValueError:  # fewer microbatches than stages, uneven rounds
            continue
        out.write(f"p={p} m={m} v={v}\n" if v > 1 else f"p={p} m={m}\n")
        for rank, row in enumerate(rows):
            cells = " ".join(str(action) for action in row if action is not None)
            out.write(f"rank {rank}: {cells}\n")


if __name__ == "__main__":
    main(sys.argv[1])
