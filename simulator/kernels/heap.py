"""Four-way heaps of (tick, number) in two arrays.

In a queue, ties go to the lower number. In the heap of events they need not: what happens at one
tick has the same outcome in any order, and comparing ticks alone is quicker.
"""

from __future__ import annotations

from simulator.kernels.jit import prepared_numba

njit = prepared_numba().njit


@njit(cache=True, inline="always")
def push(heap_tick, heap_op, size, tick, op):  # type: ignore[no-untyped-def]
    """Add to a four-way heap of (tick, op)."""
    i = size
    while i > 0:
        up = (i - 1) >> 2
        if heap_tick[up] < tick or (heap_tick[up] == tick and heap_op[up] < op):
            break
        heap_tick[i] = heap_tick[up]
        heap_op[i] = heap_op[up]
        i = up
    heap_tick[i] = tick
    heap_op[i] = op


@njit(cache=True, inline="always")
def pop(heap_tick, heap_op, size):  # type: ignore[no-untyped-def]
    """Remove the first of a heap that holds `size`; what was first is no longer in it."""
    last = size - 1
    tick = heap_tick[last]
    op = heap_op[last]
    i = 0
    while True:
        low = 4 * i + 1
        if low >= last:
            break
        best = low
        for k in range(low + 1, min(low + 4, last)):
            if heap_tick[k] < heap_tick[best] or (
                heap_tick[k] == heap_tick[best] and heap_op[k] < heap_op[best]
            ):
                best = k
        if tick < heap_tick[best] or (tick == heap_tick[best] and op < heap_op[best]):
            break
        heap_tick[i] = heap_tick[best]
        heap_op[i] = heap_op[best]
        i = best
    heap_tick[i] = tick
    heap_op[i] = op


@njit(cache=True, inline="always")
def push_event(heap_tick, heap_number, size, tick, number):  # type: ignore[no-untyped-def]
    """Add to a heap of events."""
    i = size
    while i > 0:
        up = (i - 1) >> 2
        if heap_tick[up] <= tick:
            break
        heap_tick[i] = heap_tick[up]
        heap_number[i] = heap_number[up]
        i = up
    heap_tick[i] = tick
    heap_number[i] = number


@njit(cache=True, inline="always")
def pop_event(heap_tick, heap_number, size):  # type: ignore[no-untyped-def]
    """Remove the first of a heap of events that holds `size`."""
    last = size - 1
    tick = heap_tick[last]
    i = 0
    while True:
        low = 4 * i + 1
        if low >= last:
            break
        best = low
        least = heap_tick[low]
        for k in range(low + 1, min(low + 4, last)):
            if heap_tick[k] < least:
                best = k
                least = heap_tick[k]
        if tick <= least:
            break
        heap_tick[i] = least
        heap_number[i] = heap_number[best]
        i = best
    heap_tick[i] = tick
    heap_number[i] = heap_number[last]
