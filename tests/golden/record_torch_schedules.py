"""Print the action lists of torch's own GPipe or 1F1B over a grid of sizes.

Run with a Python that has torch:
    python tests/golden/record_torch_schedules.py GPipe > tests/golden/torch_gpipe.txt
    python tests/golden/record_torch_schedules.py 1F1B > tests/golden/torch_1f1b.txt
"""

import sys

import torch
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

MICROBATCHES = (1, 2, 3, 4, 5, 7, 8, 12, 16)


def main(schedule: str) -> None:
    out = sys.stdout
    out.write(
        f"# python tests/golden/record_torch_schedules.py {schedule}   (torch {torch.__version__})\n"
    )
    for stages in range(1, 9):
        for microbatches in MICROBATCHES:
            try:
                rows = get_schedule_ops(schedule, stages, microbatches)
            except ValueError:  # torch's 1F1B takes no fewer microbatches than stages
                continue
            out.write(f"p={stages} m={microbatches}\n")
            for rank, row in enumerate(rows):
                cells = " ".join(str(action) for action in row if action is not None)
                out.write(f"rank {rank}: {cells}\n")


if __name__ == "__main__":
    main(sys.argv[1])
