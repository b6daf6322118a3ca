"""Ranks that do many small jobs one after the other: importing torch is what takes time.

Run as a script: ``python torch_ranks.py FOLDER JOB...``, each job a folder inside with its
``job.json``, all of one world size. The rows of GPUs compute on CPU tensors: all but the GPU itself
is what runs there.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":
    import torch

    from simulator.validate.torch import measure, worker
    from simulator.validate.torch.device import DEVICES
    from simulator.validate.torch.job import Job

    for option in ("cuda", "cuda-shared"):
        DEVICES[option] = replace(DEVICES[option], name="cpu", backend="gloo", settle=lambda: None)
    measure.ROUNDS = 3  # nothing here is about how long messages take
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
