"""Ranks that do many small jobs one after the other: importing torch is what takes time.

Run as a script: ``python torch_ranks.py FOLDER JOB...``, each job a folder inside with its
``job.json``, all of one world size.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    import torch

    from simulator.validate.torch import worker
    from simulator.validate.torch.job import Job

    folder, names = Path(sys.argv[1]), sys.argv[2:]
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    worker.join(Job.read(folder / names[0] / "job.json"), rank, f"file://{folder / 'store'}")
    for name in names:
        job = Job.read(folder / name / "job.json")
        worker.work(job, rank, folder / name)
        if rank == 0:
            worker.compare_with_one_process(job, folder / name)
    sys.stderr.flush()
    os._exit(0)
