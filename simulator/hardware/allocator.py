"""torch's caching allocator of device memory, by its rules: what it reserves for what is asked.

c10/cuda/CUDACachingAllocator.cpp of torch 2.6. Sizes are rounded up to 512 bytes. Each stream has a
pool of blocks for requests up to 1 MiB and one for others, and none uses a block of another: what
one pool has reserved stays its own. A request takes the smallest free block that is long enough,
and leaves the rest of it; a freed block joins the free ones beside it. Where none is long enough
more is reserved:

- in a *segment* of its own: 2 MiB for small requests, 20 MiB below 10 MiB, else the size rounded up
  to 2 MiB; what is left over is cut off where it is longer than 1 MiB;
- with *expandable segments* (`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`) at the lowest
  address where free memory and memory that is not mapped yet are long enough together, of which
  whole pages of 2 or 20 MiB are mapped. A block counts as long as it can grow.

Nothing is given back: that happens where the device is full. A free is taken as such at once, for
no tensor here is used on a stream that the allocator is told of (`record_stream`): FSDP2 orders its
streams by events, and torchtitan sets TORCH_NCCL_AVOID_RECORD_STREAMS.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

MIB = 2**20
GRAIN = 512
"""Sizes are multiples of it (kMinBlockSize)."""
SMALL = MIB
"""Longest request of a pool of small blocks (kSmallSize)."""
PAGE = {True: 2 * MIB, False: 20 * MIB}
"""Bytes that are reserved at once for small requests and others (kSmallBuffer, kLargeBuffer)."""
MIDDLE, STEP = 10 * MIB, 2 * MIB
"""From the first a segment is as long as the request, in steps of the second (kMinLargeAlloc,
kRoundLarge)."""
SPACE = 2**48
"""Addresses of an expandable segment: more than any device has memory."""


@dataclass(slots=True, eq=False)
class Block:
    """A stretch of addresses of a pool: asked for, free, or not mapped."""

    size: int
    at: int
    pool: Pool
    mapped: bool = True
    used: bool = False
    prev: Block | None = None
    next: Block | None = None

    @property
    def grown(self) -> int:
        """Bytes that it has, and could map behind it."""
        after = self.next
        return self.size + (after.size if after is not None and not after.mapped else 0)


@dataclass(slots=True, eq=False)
class Pool:
    """What a stream has reserved, for requests up to 1 MiB or for longer ones."""

    small: bool
    expandable: bool
    reserved: int = 0
    allocated: int = 0
    peak: int = 0
    """Most bytes that were allocated at once."""
    end: int = 0
    """First address that no segment has."""
    free: dict[tuple[int, int], Block] = field(default_factory=dict)
    """By size and address, whose order is `by_size`."""
    by_size: list[tuple[int, int]] = field(default_factory=list)
    unmapped: dict[int, Block] = field(default_factory=dict)
    """By address, in that order."""

    def take(self, size: int) -> Block:
        """Return a block of so many bytes."""
        block = self._fitting(size)
        if block is None:
            block = self._expanded(size) if self.expandable else self._segment(size)
        rest = block.size - size
        if rest >= GRAIN if self.small or self.expandable else rest > SMALL:
            self._add_free(self._cut(block, size))
        block.used = True
        self.allocated += block.size
        self.peak = max(self.peak, self.allocated)
        return block

    def give(self, block: Block) -> None:
        """Free a block."""
        block.used = False
        self.allocated -= block.size
        self._join(block)
        self._add_free(block)

    def _fitting(self, size: int) -> Block | None:
        at = bisect_left(self.by_size, (size, -1))
        if at == len(self.by_size):
            return None
        found = self.free[self.by_size[at]]
        if self.expandable:
            for key in self.by_size[at + 1 :]:
                other = self.free[key]
                if other.grown >= found.grown:
                    break
                found = other
        self._remove_free(found)
        return found

    def _segment(self, size: int) -> Block:
        page = PAGE[self.small]
        length = page if size < MIDDLE else -(-size // STEP) * STEP
        block = Block(length, self.end, self)
        self.end += length + page  # segments never touch
        self.reserved += length
        return block

    def _expanded(self, size: int) -> Block:
        found = self._room(size)
        if not found.mapped:
            self._map(found, min(found.size, size))
        while found.size < size:
            after = found.next
            assert after is not None
            self._map(after, min(size - found.size, after.size))  # joins what is free before it
            found = after
        self._remove_free(found)
        return found

    def _room(self, size: int) -> Block:
        """Return the first of the blocks, free or not mapped, that are long enough together."""
        for at in sorted(self.unmapped):
            block = self.unmapped[at]
            before = block.prev
            first = before if before is not None and not before.used else block
            one: Block | None = first
            length = 0
            while one is not None and not one.used and length < size:
                length, one = length + one.size, one.next
            if length >= size:
                return first
        block = Block(SPACE, self.end, self, mapped=False)
        self.end += SPACE
        self.unmapped[block.at] = block
        return block

    def _map(self, block: Block, size: int) -> None:
        """Map the pages at the head of a block that hold `size` bytes, as a free block."""
        page = PAGE[self.small]
        length = -(-size // page) * page
        del self.unmapped[block.at]
        if block.size > length:
            rest = self._cut(block, length)
            rest.mapped = False
            self.unmapped[rest.at] = rest
        block.mapped = True
        self.reserved += length
        self._join(block)
        self._add_free(block)

    def _cut(self, block: Block, size: int) -> Block:
        """Return what lies behind the first `size` bytes of a block as one of its own."""
        rest = Block(block.size - size, block.at + size, self, block.mapped)
        rest.prev, rest.next = block, block.next
        if block.next is not None:
            block.next.prev = rest
        block.size, block.next = size, rest
        return rest

    def _join(self, block: Block) -> None:
        """Add the free blocks beside a block to it."""
        before, after = block.prev, block.next
        if before is not None and before.mapped and not before.used:
            self._remove_free(before)
            block.at, block.size = before.at, before.size + block.size
            block.prev = before.prev
            if before.prev is not None:
                before.prev.next = block
        if after is not None and after.mapped and not after.used:
            self._remove_free(after)
            block.size += after.size
            block.next = after.next
            if after.next is not None:
                after.next.prev = block

    def _add_free(self, block: Block) -> None:
        key = (block.size, block.at)
        self.free[key] = block
        insort(self.by_size, key)

    def _remove_free(self, block: Block) -> None:
        key = (block.size, block.at)
        del self.free[key]
        del self.by_size[bisect_left(self.by_size, key)]


class Allocator:
    """Pools of the streams of a device."""

    def __init__(self, *, expandable: bool = False) -> None:
        self.expandable = expandable
        self.pools: dict[tuple[object, bool], Pool] = {}
        """By stream, and whether for small requests."""

    def take(self, size: int, stream: object = 0) -> Block:
        """Return a block for a tensor of so many bytes, made on a stream."""
        size = max(-(-size // GRAIN), 1) * GRAIN
        key = (stream, size <= SMALL)
        if key not in self.pools:
            self.pools[key] = Pool(size <= SMALL, self.expandable)
        return self.pools[key].take(size)

    def give(self, block: Block) -> None:
        """Free a block."""
        block.pool.give(block)

    @property
    def reserved(self) -> int:
        """Bytes of all pools (torch.cuda.memory_reserved)."""
        return sum(pool.reserved for pool in self.pools.values())
