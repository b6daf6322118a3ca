"""Fit the constants of `nccl_constants.ACHIEVED`: ``python -m benchmarks.fit_collectives``.

Only rows of the fit half count. From the constants as they stand, each is moved up and down while
the loss falls, with steps that halve four times. The loss is the mean of |log(1 + error)| of each
family, collective and size class, weighted by the root of its rows; single errors are capped, so
that rows which the model cannot explain do not pull.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

from simulator.hardware import nccl_constants as nccl
from simulator.report import collectives

CAP = 0.3
STEPS = {
    "launch_us": 2.0, "hopper": 0.01, "blackwell": 0.01, "nvls_fill": 0.3, "net_ll_share": 0.1,
    "copy_gbs": 100.0, "parts_share": 0.02, "pairs_share": 0.02, "a100_efficiency": 0.01,
    "host_launch_us": 0.5,
}  # fmt: skip

SYSTEMS = dict(collectives.systems())


def start() -> dict[str, float]:
    """Return the constants as they stand."""
    rates, a100 = nccl.ACHIEVED, SYSTEMS["vtrain-a100-8"].cluster.node.link
    return {
        "launch_us": rates.launch_us, "hopper": rates.nvls_share["hopper"],
        "blackwell": rates.nvls_share["blackwell"], "nvls_fill": rates.nvls_fill,
        "net_ll_share": rates.net_ll_share, "copy_gbs": rates.local_copy_gbs["ampere"],
        "parts_share": rates.parts_share["hopper"], "pairs_share": rates.pairs_share["hopper"],
        "a100_efficiency": a100.efficiency, "host_launch_us": collectives.HOST_LAUNCH_US,
    }  # fmt: skip


def assume(x: dict[str, float]) -> None:
    """Let the model use these constants, in this process."""
    nccl.ACHIEVED = replace(
        nccl.ACHIEVED,
        launch_us=x["launch_us"],
        nvls_share=dict.fromkeys(("volta", "ampere"), 0.0)
        | {name: x[name] for name in ("hopper", "blackwell")},
        nvls_fill=x["nvls_fill"],
        net_ll_share=x["net_ll_share"],
        local_copy_gbs=dict.fromkeys(("volta", "ampere"), x["copy_gbs"]),
        parts_share=dict.fromkeys(("hopper", "blackwell"), x["parts_share"]),
        pairs_share=dict.fromkeys(("hopper", "blackwell"), x["pairs_share"]),
    )
    collectives.HOST_LAUNCH_US = x["host_launch_us"]
    for name, system in SYSTEMS.items():
        node = system.cluster.node
        if node.device.architecture == "ampere":
            link = replace(node.link, efficiency=x["a100_efficiency"])
            cluster = replace(system.cluster, node=replace(node, link=link))
            collectives.systems()[name] = replace(system, cluster=cluster)


def loss(x: dict[str, float]) -> float:
    """Return the loss of constants over the fit half."""
    assume(x)
    groups = defaultdict(list)
    for case in collectives.cases():
        if case.half == "fit":
            error = min(abs(math.log(1 + case.error)), CAP)
            groups[collectives.by_family(case)].append(error)
    return sum(sum(errors) / math.sqrt(len(errors)) for errors in groups.values())


def main() -> None:
    """Print the constants and the loss after each round, then the accuracy of both halves."""
    x, steps = start(), dict(STEPS)
    least = loss(x)
    for _ in range(4):
        for name in x:
            for sign in (1, -1):
                while (
                    now := loss(moved := x | {name: x[name] + sign * steps[name]})
                ) < least - 1e-6:
                    least, x = now, moved
        steps = {name: step / 2 for name, step in steps.items()}
        print(f"{least:.4f}", {name: round(value, 4) for name, value in x.items()})  # noqa: T201
    assume(x)
    print(collectives.validation_text(collectives.cases()).rpartition("\n\n")[2])  # noqa: T201


if __name__ == "__main__":
    main()
