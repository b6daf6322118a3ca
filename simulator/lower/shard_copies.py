"""What libraries of sharded data parallelism copy beside the collectives of weights and gradients.

A collective moves one buffer, and products want a tensor a weight; so libraries that keep a tensor
each copy out of what was gathered and into what is reduced, and some divide gradients by a kernel
before they are summed. These passes are over a whole block, in every microbatch, however few tokens
it has. What runs over shards alone (casts before a gather, sums of reduced shards) is a small part
of them, stands on streams of its own and is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from simulator.describe.plan import ShardingLibrary
from simulator.describe.scenario import Scenario
from simulator.lower.operators import streaming
from simulator.program import Kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Passes over a block; each reads or writes all of it once."""

    gathered: int = 0
    """Over gathered weights, before they are used."""
    made: int = 0
    """Over gradients as products made them, in every backward."""
    copied: Literal["always", "unfused", "to cast"] = "to cast"
    """When gradients are copied into what is reduced: always; where products do not write there
    themselves (`run.fused_accumulation`); where they are reduced in another precision."""
    reduced: int = 0
    """Over gradients in the precision that they are reduced in, before that."""


LIBRARIES: Mapping[ShardingLibrary, Copies] = {
    # torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py: split_with_sizes_copy out of the
    # gathered buffer; chunk_cat of gradients into the reduced one, which casts; NCCL averages. Both
    # on the stream of the kernels.
    "fsdp2": Copies(gathered=2, copied="always"),
    # torch/distributed/fsdp/_flat_param.py and _runtime_utils.py: weights are views of the gathered
    # buffer, by torch.split, whose backward concatenates gradients; `_post_backward_hook` casts
    # them and `_div_if_needed` divides by the square root or so of the ranks, both on a stream of
    # their own but on the same units and memory.
    "fsdp1": Copies(made=2, reduced=2),
    # Megatron-LM, fsdp/src/megatron_fsdp: weights are views of the gathered bucket; `main_grad` is
    # one of the reduced, into which products write, or gradients are copied; NCCL scales.
    "megatron_fsdp": Copies(copied="unfused"),
    # deepspeed/runtime/zero/partition_parameters.py: AllGatherCoalescedHandle concatenates parts;
    # stage3.py copies gradients into a bucket; comm/coalesced_collectives.py concatenates the parts
    # of ranks and divides.
    "deepspeed": Copies(gathered=2, made=2, reduced=4),
}


def after_gather(s: Scenario, size: float) -> tuple[Kernel, ...]:
    """Return what copies `size` gathered bytes of weights to where they are used."""
    moved = LIBRARIES[s.plan.sharding_library].gathered * size
    count = size / s.precision.weight
    return (streaming("copy of gathered weights", count, moved),) if moved else ()


def after_backward(s: Scenario, trained: int) -> tuple[Kernel, ...]:
    """Return what collects the gradients of `trained` parameters that a backward has made."""
    moved = LIBRARIES[s.plan.sharding_library].made * s.precision.weight * trained
    return (streaming("collection of gradients", trained, moved),) if moved else ()


def before_reduction(s: Scenario, trained: int, word: int) -> tuple[Kernel, ...]:
    """Return what makes gradients of `word` bytes each ready to be reduced."""
    copies, reduced = LIBRARIES[s.plan.sharding_library], s.precision.gradient
    copied = {
        "always": True, "unfused": not s.run.fused_accumulation, "to cast": word != reduced,
    }[copies.copied]  # fmt: skip
    moved = {
        "copy of gradients": (word + reduced) * copied,
        "division of gradients": copies.reduced * reduced,
    }
    return tuple(streaming(name, trained, each * trained) for name, each in moved.items() if each)
