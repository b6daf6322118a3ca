"""torch's caching allocator by its rules, on sequences worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.describe.scenario import Scenario
from simulator.hardware.allocator import GRAIN, MIB, PAGE, Allocator, Block
from simulator.lower.layers import shapes
from simulator.lower.operators import cross_entropy


@pytest.mark.parametrize(
    ("size", "segment"),
    [(1, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB, 10 * MIB), (11 * MIB, 12 * MIB)],
)
def test_a_segment_is_as_long_as_its_first_request_asks(size: int, segment: int) -> None:
    memory = Allocator()
    memory.take(size)
    assert memory.reserved == segment


# The rest of a segment is cut off where it is longer than 1 MiB: 3 MiB of 20 leave 17.
def test_the_rest_of_a_segment_serves_the_next_request() -> None:
    memory = Allocator()
    memory.take(3 * MIB)
    memory.take(17 * MIB)
    assert memory.reserved == 20 * MIB


# 9.5 and 9.5 of 20 MiB leave 1 MiB, which goes with the second one.
def test_a_rest_of_a_mebibyte_is_not_cut_off() -> None:
    memory = Allocator()
    memory.take(19 * MIB // 2)
    assert memory.take(19 * MIB // 2).size == 19 * MIB // 2 + MIB


def test_the_smallest_block_that_is_long_enough_is_taken() -> None:
    memory = Allocator()
    blocks = [memory.take(size * MIB) for size in (40, 30, 50)]
    for block in blocks:
        memory.give(block)
    assert memory.take(30 * MIB) is blocks[1]


def test_freed_neighbours_are_one_block() -> None:
    memory = Allocator(expandable=True)
    blocks = [memory.take(40 * MIB) for _ in range(3)]
    for block in (blocks[0], blocks[2], blocks[1]):
        memory.give(block)
    memory.take(120 * MIB)
    assert memory.reserved == 120 * MIB


# What one stream has freed another does not get.
def test_each_stream_keeps_what_it_once_needed() -> None:
    memory = Allocator(expandable=True)
    memory.give(memory.take(100 * MIB, "gather"))
    memory.take(100 * MIB, "compute")
    assert memory.reserved == 200 * MIB


# 100 MiB are free at the end of the segment; 40 more pages' worth of 20 MiB are mapped behind them.
def test_an_expandable_segment_grows_behind_what_is_free() -> None:
    grown = Allocator(expandable=True)
    grown.take(100 * MIB)
    grown.give(grown.take(100 * MIB))
    grown.take(140 * MIB)
    assert grown.reserved == 240 * MIB
    apart = Allocator()
    apart.take(100 * MIB)
    apart.give(apart.take(100 * MIB))
    apart.take(140 * MIB)
    assert apart.reserved == 340 * MIB


# A hole of 60 MiB between two tensors serves no request for 80.
def test_a_hole_that_is_too_short_stays_reserved() -> None:
    memory = Allocator(expandable=True)
    memory.take(20 * MIB)
    hole = memory.take(60 * MIB)
    memory.take(20 * MIB)
    memory.give(hole)
    memory.take(80 * MIB)
    assert memory.reserved == (20 + 60 + 20 + 80) * MIB


LOGITS = 200 * MIB
"""Bytes of bf16 logits; fp32 ones take twice as many."""

LOSSES = {
    # cross_entropy(logits.float()): copy, logarithms; then zeros and the gradient of the copy
    False: ("+b +w +p -b -w", "+g +h -g -p +c -h"),
    # loss_parallel: copy, less the largest, exponentials, logarithms; then zeros, exponentials,
    # their sum, a product
    True: ("+b +w +s +e -e +p -s -b -w", "+z +e +a -e +m -a -z -p +c -m"),
}
"""What torch's eager loss allocates and frees, forward and backward; b and c are bf16, others fp32.
As torch was seen to do (tests/torch_memory.py), whose calls are in the order of
torch/distributed/tensor/parallel/loss.py."""


# b w p: of the freed 200 + 400 g takes 400; h, as long, needs new memory.
@pytest.mark.parametrize("expandable", [True, False])
@pytest.mark.parametrize("parallel", [True, False])
def test_the_loss_leaves_a_hole_as_long_as_the_bf16_logits(
    scenario_of: Callable[..., Scenario], parallel: bool, expandable: bool
) -> None:
    memory, blocks = Allocator(expandable=expandable), dict[str, Block]()
    for call in " ".join(LOSSES[parallel]).split():
        name = call[1:]
        if call[0] == "+":
            blocks[name] = memory.take(LOGITS if name in "bc" else 2 * LOGITS)
        else:
            memory.give(blocks.pop(name))
    (pool,) = memory.pools.values()
    e = shapes(scenario_of(run={"precision": "bf16"})).elements
    loss = cross_entropy(e, tokens=1, vocab=LOGITS // 2, kind="eager", parallel=parallel)
    assert pool.reserved - pool.peak == loss.hole_bytes == LOGITS


@pytest.mark.parametrize("kind", ["in_place", "compiled"])
def test_a_loss_that_makes_one_tensor_leaves_no_hole(
    scenario_of: Callable[..., Scenario], kind: str
) -> None:
    e = shapes(scenario_of(run={"precision": "bf16"})).elements
    assert cross_entropy(e, tokens=1, vocab=8, kind=kind).hole_bytes == 0


CALLS = st.lists(
    st.tuples(st.integers(1, 200 * MIB), st.integers(0, 2), st.integers(0, 9)), max_size=60
)


@given(CALLS, st.booleans())
def test_blocks_never_overlap_and_pools_add_up(
    calls: list[tuple[int, int, int]], expandable: bool
) -> None:
    memory, live = Allocator(expandable=expandable), list[Block]()
    for size, stream, choice in calls:
        if live and choice < 5:
            memory.give(live.pop(choice % len(live)))
        block = memory.take(size, stream)
        assert block.size >= size
        assert block.size % GRAIN == 0
        live.append(block)
    for pool in memory.pools.values():
        own = sorted((b.at, b.size) for b in live if b.pool is pool)
        assert all(at + size <= after for (at, size), (after, _) in pairwise(own))
        free = sum(size for size, _ in pool.by_size)
        assert pool.allocated == sum(size for _, size in own)
        assert pool.reserved == pool.allocated + free >= pool.peak
        assert pool.reserved % (PAGE[pool.small] if expandable else 2 * MIB) == 0
