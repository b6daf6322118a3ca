"""Residual networks: the rows of NVIDIA's published training throughput."""

from __future__ import annotations

from typing import Any

from simulator.validate.published import Case, Row
from simulator.validate.scenarios import Table, described, nodes_of, step_seconds

SYSTEMS: dict[str, Any] = {
    "DGX A100 80GB": "dgx-a100",
    "DGX-1 V100 16GB": {"from": "dgx-1-v100", "device": "v100-sxm2-16gb"},
    "DGX-1 V100 32GB": "dgx-1-v100",
}

MODES: dict[str, Table] = {
    "AMP": {"precision": "fp16", "gradient_dtype": "fp32"},
    "TF32": {"precision": "tf32"},
    "FP32": {"precision": "fp32"},
}
"""torch's automatic mixed precision keeps weights in fp32, and so their gradients."""


def resnet50(row: Row) -> Case:
    """Images/s of all GPUs, as seconds of a step."""
    ranks, batch = int(row["n_gpus"]), int(row["batch"])
    plan = {"dp": ranks, "microbatch_size": int(row["batch_per_gpu"])}
    run = {
        "global_batch_size": batch, "image_size": 224, "optimizer": "momentum",
        **MODES[row["precision"]],
    }  # fmt: skip
    s = described("resnet-50", nodes_of(ranks, SYSTEMS[row["system"]]), plan, run)
    return Case(batch / float(row["images_per_s"]), s, lambda: step_seconds(s))
