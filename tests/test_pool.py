"""Processes of this machine: what a function makes of items, whatever becomes of a process."""

import time

import numpy as np
import pytest

from simulator.pool import mapped

GROWTH = 320 * 2**20
"""Bytes; joblib replaces a process that has grown by 300 MB, and looks once a second."""

kept = []


def square(item):
    return item * item


def grow(item):
    if not kept and item > 1:  # the first call of a process is what its growth is counted from
        kept.append(np.ones(GROWTH, np.uint8))
    time.sleep(0.4)
    return item


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_come_in_the_order_of_their_items(jobs):
    assert list(mapped(square, range(20), jobs)) == [n * n for n in range(20)]


@pytest.mark.timeout(60)
def test_a_process_that_is_replaced_for_its_size_costs_no_item():
    pytest.importorskip("psutil", reason="without it joblib replaces no process")
    assert list(mapped(grow, range(16), 2)) == list(range(16))
