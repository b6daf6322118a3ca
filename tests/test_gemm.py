"""Products by shape: tiles, waves, results, split k, alignment; grouped ones; fused attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.describe.cluster import Cluster
from simulator.hardware.compute import kernel_seconds
from simulator.hardware.gemm import EXPOSED, alignment, gemm_slots, written
from simulator.hardware.grouped import ISSUE, grouped_seconds
from simulator.program import Kernel

ClusterOf = Callable[..., Cluster]
TILE = 256 * 128


# 2,048 x 1,024 x 4,096 on 64 units: 8 x 8 tiles of 256 x 128, one wave of 4,096 steps of k,
# and of as many more as writing the results costs.
def test_a_product_that_fills_one_wave_takes_one_tile_of_every_unit() -> None:
    assert gemm_slots((1, 2048, 1024, 4096), 64) == TILE * 4096
    assert gemm_slots((1, 2048, 1024, 4096), 64, 96) == TILE * (4096 + 96)


# One row more needs a ninth row of tiles: 72 tiles on 64 units are two waves. In tiles of 128 x 128
# it is 17 x 8 = 136 > 128, three waves of half a tile at 0.93: 1.61; of 128 x 64 17 x 16 = 272,
# five of a quarter at 0.78: 1.60; of 64 x 128 33 x 8 = 264, five: the same; of 64 x 64 33 x 16 =
# 528, nine of an eighth at 0.6: 1.875.
def test_one_row_more_may_need_another_wave() -> None:
    slots = gemm_slots((1, 2049, 1024, 4096), 64, 96)
    assert slots == pytest.approx(5 / 4 / 0.78 * TILE * (4096 + 96), rel=1e-12)


# 256 x 128 with k 8,192 is one tile; in 16 parts of k it takes 512 + 96 steps on 16 of 64 units.
# In two halves of 128 x 128 at 0.93, 16 parts each: 0.5 / 0.93 of that; in four quarters at 0.78:
# 0.25 / 0.78; in eight of 64 x 64 at 0.6 and 16 parts, 128 <= 2 x 64: two waves, 0.25 / 0.6.
def test_a_small_deep_product_is_split_along_k() -> None:
    slots = gemm_slots((1, 256, 128, 8192), 64, 96)
    assert slots == pytest.approx(0.25 / 0.78 * TILE * (512 + 96), rel=1e-12)


@given(
    shape=st.tuples(*[st.integers(1, 4096)] * 3, st.integers(1, 8192)),
    units=st.integers(1, 160),
)
def test_no_product_runs_above_the_best_rate(shape: tuple[int, int, int, int], units: int) -> None:
    assert gemm_slots(shape, units) * units >= math.prod(shape) * 0.999999


@given(
    shape=st.tuples(*[st.integers(1, 2048)] * 4),
    axis=st.integers(0, 2),
    units=st.integers(1, 160),
)
def test_a_larger_product_is_not_faster(
    shape: tuple[int, int, int, int], axis: int, units: int
) -> None:
    larger = list(shape)
    larger[axis] += 1
    assert gemm_slots(tuple(larger), units) >= gemm_slots(shape, units)


# GPT-2's vocabulary of 50,257 is odd: half the rate in 2-byte numbers; 50,304 is 64 x 786.
@pytest.mark.parametrize(("vocab", "share"), [(50257, 0.5), (50304, 1.0)])
def test_rows_that_do_not_align_halve_the_rate(vocab: int, share: float) -> None:
    assert alignment((1, 8192, vocab, 768), 2) == share


# The gradient of a weight of 768 x 50,304 sums over 154 tokens: rows of 768 and 50,304 lie in
# memory, no row of 154.
def test_the_tokens_that_a_weights_gradient_sums_over_need_not_align() -> None:
    assert alignment((1, 768, 50304, 154), 2, wgrad=True) == 1.0
    assert alignment((1, 768, 50304, 154), 2) == 0.5


# A tile of 256 x 128 with 8 bytes a result is 262,144 bytes, which one of 100 units moves at 1e10
# bytes/s in 26.2 us; at 1e12 FLOP/s it computes a step of k, 65,536 FLOPs, in 65.5 ns: 400 of them.
def test_results_cost_the_share_of_their_time_that_no_loop_hides() -> None:
    assert written(8.0, 1e14, 1e12) == pytest.approx(EXPOSED * 400, rel=1e-12)


# One product takes 20 us, in which two are issued; two beside each other take 30. So 8 take 4 x 30.
def test_products_of_experts_run_beside_each_other_as_they_are_issued() -> None:
    times = {1: 20e-6, 2: 30e-6}
    assert grouped_seconds(8, times.__getitem__) == pytest.approx(120e-6)


# Products of 1 us are issued one in 9.2 us; of 100 us, four run at once: 8 in two rounds of 250.
def test_no_expert_is_issued_sooner_and_no_more_run_than_there_are_streams() -> None:
    assert grouped_seconds(8, {1: 1e-6}.__getitem__) == pytest.approx(8 * ISSUE)
    assert grouped_seconds(8, {1: 100e-6, 4: 250e-6}.__getitem__) == pytest.approx(500e-6)


# The round device with 64 units, half of its 1e14 FLOP/s by efficiency and clock: one wave of
# 2 x 32,768 x 4,096 FLOPs on each of 64 units at 5e13 / 64: 344 us. A result of 2 bytes is moved at
# 1e12 bytes/s: 0.6 x 2 x 5e13 / 2e12 = 30 steps of k more.
def test_a_product_takes_its_waves_at_the_sustained_rate(cluster_of: ClusterOf) -> None:
    rates: dict[str, Any] = {"matmul_efficiency": 0.625, "sustained_clock": 0.8}
    device = cluster_of(device={"compute_units": 64, **rates}).node.device
    moved = 2.0 * (2048 * 4096 + 4096 * 1024 + 2048 * 1024)
    product = Kernel("k", 2.0 * 2048 * 1024 * 4096, moved, "bf16", (1, 2048, 1024, 4096))
    seconds, bound = kernel_seconds(product, device)
    assert seconds == pytest.approx(2 * TILE * (4096 + 30) * 64 / 5e13, rel=1e-12)
    assert bound == "compute"


# 0.5 of 1e14, of which 300 tokens reach half and heads of 128 all: 1e10 FLOPs in 400 us; heads of
# 64 reach (64/114) / (128/178) = 0.7807 of that.
@pytest.mark.parametrize(("dim", "seconds"), [(128, 4e-4), (64, 4e-4 * (128 / 178) / (64 / 114))])
def test_fused_attention_runs_at_its_own_rate(
    cluster_of: ClusterOf, dim: int, seconds: float
) -> None:
    device = cluster_of(device={"fused": {"flash forward": 0.5}}).node.device
    kernel = Kernel("k", 1e10, 1.0, "bf16", (8, 300, 300, dim), 1, "flash forward")
    assert kernel_seconds(kernel, device)[0] == pytest.approx(seconds, rel=1e-12)


# 32 heads of 4,096 queries on 64 units: waiting costs 240 queries a unit forward and 80 backward,
# 64 x 240 / 131,072 = 0.117 of the time, and twice that on Blackwell.
@pytest.mark.parametrize(
    ("direction", "architecture", "more"),
    [("forward", "ampere", 240), ("backward", "hopper", 80), ("forward", "blackwell", 480)],
)
def test_the_last_queries_keep_units_waiting(
    cluster_of: ClusterOf, direction: str, architecture: str, more: int
) -> None:
    name = f"flash {direction}"
    facts: dict[str, Any] = {"fused": {name: 0.5}, "architecture": architecture}
    kernel = Kernel("k", 1e10, 1.0, "bf16", (32, 4096, 4096, 128), 1, name)
    alone, spread = (
        kernel_seconds(kernel, cluster_of(device={**facts, "compute_units": units}).node.device)[0]
        for units in (None, 64)
    )
    assert spread / alone == pytest.approx(1 + 64 * more / (32 * 4096), rel=1e-12)


# Heads of 160 (192 and 128, halved) run at 0.86 of the rate of heads of 128.
def test_wide_heads_run_below_the_stated_rate(cluster_of: ClusterOf) -> None:
    device = cluster_of(device={"fused": {"flash forward": 0.5}}).node.device
    seconds = [
        kernel_seconds(
            Kernel("k", 1e10, 1.0, "bf16", (8, 300, 300, dim), 1, "flash forward"), device
        )[0]
        for dim in (128, 160)
    ]
    assert seconds[0] / seconds[1] == pytest.approx(0.86, rel=1e-12)
