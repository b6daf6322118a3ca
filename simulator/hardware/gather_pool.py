"""What torch's allocator reserves for weights on their way: the pool of FSDP2's gathers.

FSDP2 gathers in the pool of its copy-in stream, and copies what has arrived into the parameters,
which are of the pool of the stream that computes (torch/distributed/fsdp/_fully_shard of torch 2.6:
`foreach_all_gather` allocates the cast shards and the gathered buffer on
`all_gather_copy_in_stream`, `alloc_all_gather_outputs` on the current one). In forward a buffer is
freed when the next one has been allocated (`FSDPCommContext.all_gather_state`), in backward before
that. Each stage of a pipeline rank is a root of its own, with streams of its own.

Gradients are copied in and reduced from the pool that computes; their shards stay in that of the
stream that reduces, where they count as gradients do.
"""

from __future__ import annotations

from functools import lru_cache

from simulator.describe.scenario import Scenario
from simulator.hardware.allocator import Allocator, Block
from simulator.lower.gathers import Gathers, gathers, shortened


def gather_pool_bytes(s: Scenario) -> list[float]:
    """Return what the pools of gathers of each pipeline rank have reserved."""
    expandable = has_expandable_segments(s)
    return [
        float(sum(reserved_by(_short(one), s.plan.shards, expandable) for one in of_rank))
        for of_rank in gathers(s)
    ]


def has_expandable_segments(s: Scenario) -> bool:
    """Return whether segments grow, as torchtitan's run_train.sh asks; torch's default is no."""
    return s.run.layer_code == "torchtitan"


def _short(one: Gathers) -> Gathers:
    return Gathers(*map(shortened, one))


@lru_cache(maxsize=1024)
def reserved_by(stage: Gathers, shards: int, expandable: bool) -> int:
    """Return what a stage's gathers make their pool reserve, in one step as much as in several."""
    pool = Allocator(expandable=expandable)

    def gathered(size: float) -> Block:
        shard = pool.take(round(size / shards))
        whole = pool.take(round(size))
        pool.give(shard)
        return whole

    before: Block | None = None
    for size in stage.forward:
        whole = gathered(size)
        if before is not None:
            pool.give(before)
        before = whole
    if before is not None:
        pool.give(before)
    for size in stage.backward:
        pool.give(gathered(size))
    return pool.reserved
