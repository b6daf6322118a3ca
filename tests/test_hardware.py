"""Prices: kernels on a device, messages and collectives on a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import simulator as sim
from simulator.describe.cluster import Cluster
from simulator.describe.scenario import Scenario
from simulator.errors import ProgramError
from simulator.hardware import price
from simulator.hardware.compute import kernel_seconds, work_seconds
from simulator.hardware.network import (
    GroupShape,
    all_reduce_seconds,
    flow_seconds,
    group_shapes,
    send_recv_seconds,
)
from simulator.lower.layers import blocks, shapes
from simulator.program import Flow, Groups, Kernel, Work

ClusterOf = Callable[..., Cluster]
ScenarioOf = Callable[..., Scenario]


def one_node(ranks: int) -> GroupShape:
    return GroupShape(ranks, 1, ranks)


# Question 21: 2(n-1)/n of 1 GB over 50 GB/s. n=8: 1.75/50 = 35.0 ms; n=16: 1.875/50 = 37.5 ms.
@pytest.mark.parametrize(("n", "milliseconds"), [(8, 35.0), (16, 37.5), (4, 30.0)])
def test_question_21_a_ring_all_reduce(cluster_of: ClusterOf, n: int, milliseconds: float) -> None:
    cluster = cluster_of(
        devices=16, link={"bandwidth": 50e9, "pair_bandwidth": 50e9, "latency": 0.0}
    )
    seconds = all_reduce_seconds(1e9, one_node(n), cluster)
    np.testing.assert_allclose(seconds, milliseconds * 1e-3, rtol=1e-12)


# 1 GB in 35.0 ms is 28.57 GB/s of algbw; times 2(n-1)/n = 1.75 the link's 50 GB/s.
def test_question_21_bus_bandwidth_is_the_link(cluster_of: ClusterOf) -> None:
    cluster = cluster_of(link={"bandwidth": 50e9, "pair_bandwidth": 50e9, "latency": 0.0})
    algbw = 1e9 / all_reduce_seconds(1e9, one_node(8), cluster)
    np.testing.assert_allclose(algbw, 28.57e9, rtol=2e-4)
    np.testing.assert_allclose(algbw * 1.75, 50e9, rtol=1e-12)


# 2(n-1) rounds of 1 us: 8 ranks 14 us; and of 800 bytes 100 each over 1e11 B/s, 1 ns: 14 ns.
def test_every_round_of_a_ring_pays_the_latency(cluster_of: ClusterOf) -> None:
    seconds = all_reduce_seconds(800.0, one_node(8), cluster_of())
    np.testing.assert_allclose(seconds, 14e-6 + 14e-9, rtol=1e-12)


def test_a_collective_of_one_rank_is_free(cluster_of: ClusterOf) -> None:
    assert all_reduce_seconds(1e9, one_node(1), cluster_of()) == 0.0


# A pair of devices has the pair's link, a ring of more all links of a device: DGX-1's two numbers.
def test_two_ranks_use_the_link_of_a_pair(cluster_of: ClusterOf) -> None:
    cluster = cluster_of(link={"pair_bandwidth": 25e9, "bandwidth": 150e9, "latency": 0.0})
    np.testing.assert_allclose(all_reduce_seconds(1e9, one_node(2), cluster), 1 / 25, rtol=1e-12)
    np.testing.assert_allclose(
        all_reduce_seconds(1e9, one_node(3), cluster), 4 / 3 / 150, rtol=1e-12
    )
    np.testing.assert_allclose(send_recv_seconds(1e9, one_node(2), cluster), 1 / 25, rtol=1e-12)


# Two nodes of 8 devices and 8 NICs of 10 GB/s: a ring of all 16 leaves a node through all 8, 80
# GB/s, below the links' 100 GB/s: 2*15/16 GB / 80 GB/s = 23.4375 ms; 30 rounds of 10 us.
def test_a_ring_over_nodes_leaves_through_all_nics(cluster_of: ClusterOf) -> None:
    seconds = all_reduce_seconds(1e9, GroupShape(16, 2, 8), cluster_of(num_nodes=2))
    np.testing.assert_allclose(seconds, 23.4375e-3 + 30 * 10e-6, rtol=1e-12)


# Faster NICs: 8 of 20 GB/s are 160, the links' 100 GB/s bind: 1.875/100.
def test_a_ring_over_nodes_is_no_faster_than_its_links(cluster_of: ClusterOf) -> None:
    cluster = cluster_of(num_nodes=2, nic={"bandwidth": 20e9, "latency": 0.0})
    seconds = all_reduce_seconds(1e9, GroupShape(16, 2, 8), cluster)
    np.testing.assert_allclose(seconds, 18.75e-3, rtol=1e-12)


# Question 23: 8 NICs, a ring with 4 ranks a node uses 4 of them, with 8 ranks all: twice the rate;
# with one rank a node one NIC.
def test_question_23_bus_bandwidth_counts_the_nics_in_use(cluster_of: ClusterOf) -> None:
    cluster = cluster_of(num_nodes=2, nic={"latency": 0.0})

    def busbw(per_node: int) -> float:
        n = 2 * per_node
        return 2 * (n - 1) / n * 1e9 / all_reduce_seconds(1e9, GroupShape(n, 2, per_node), cluster)

    np.testing.assert_allclose([busbw(1), busbw(4), busbw(8)], [10e9, 40e9, 80e9], rtol=1e-12)


# 4 NICs for 8 devices: two devices share one, 5 GB/s each.
def test_ranks_share_nics_where_there_are_fewer(cluster_of: ClusterOf) -> None:
    cluster = cluster_of(num_nodes=2, nic={"count": 4, "latency": 0.0})
    seconds = send_recv_seconds(1e9, GroupShape(2, 2, 1), cluster)
    np.testing.assert_allclose(seconds, 0.2, rtol=1e-12)


def test_a_message_pays_latency_and_bytes(cluster_of: ClusterOf) -> None:
    # 1 us + 1e6 / 1e11 = 11 us inside a node; 10 us + 1e6 / 1e10 = 110 us between nodes.
    assert send_recv_seconds(1e6, one_node(2), cluster_of()) == pytest.approx(11e-6, rel=1e-12)
    outside = send_recv_seconds(1e6, GroupShape(2, 2, 1), cluster_of(num_nodes=2))
    assert outside == pytest.approx(110e-6, rel=1e-12)


def test_efficiency_scales_the_rates(cluster_of: ClusterOf) -> None:
    full = cluster_of(link={"latency": 0.0})
    half = cluster_of(link={"latency": 0.0, "efficiency": 0.5})
    assert all_reduce_seconds(1e9, one_node(8), half) == 2 * all_reduce_seconds(
        1e9, one_node(8), full
    )


def test_a_stated_duration_overrides_the_network(cluster_of: ClusterOf) -> None:
    assert flow_seconds(Flow("all_reduce", 1e9, 3.5), one_node(8), cluster_of()) == 3.5


# 4 ranks a node: {0,1,2,3} on one; {0,4} on two, one each; {2,3,4,5,6} on two, 2 and 3: fewest 2.
def test_the_shape_of_a_group_is_its_ranks_and_nodes(cluster_of: ClusterOf) -> None:
    sets = [[0, 1, 2, 3], [0, 4], [5, 1], [2, 3, 4, 5, 6]]
    groups = Groups(
        np.cumsum([0, *map(len, sets)]).astype(np.int64), np.concatenate(sets).astype(np.int32)
    )
    shapes, index = group_shapes(groups, cluster_of(num_nodes=2, devices=4))
    assert [shapes[i] for i in index] == [(4, 1, 4), (2, 2, 1), (2, 2, 1), (5, 2, 2)]


# Roofline of the round device: 1e14 bf16 FLOP/s, 1e12 B/s. 1e10 FLOPs take 100 us; 1e7 bytes 10 us.
def test_a_kernel_takes_the_longer_of_arithmetic_and_memory(cluster_of: ClusterOf) -> None:
    device = cluster_of().node.device
    product = (1, 1, 1, 1)
    assert kernel_seconds(Kernel("k", 1e10, 1e7, "bf16", product), device) == (1e-4, "compute")
    assert kernel_seconds(Kernel("k", 1e8, 1e7, "bf16", product), device) == (1e-5, "memory")


# 1e-4 / 0.5 and 1e-5 / 0.25.
def test_efficiencies_lengthen_a_kernel(cluster_of: ClusterOf) -> None:
    device = cluster_of(device={"matmul_efficiency": 0.5, "memory_efficiency": 0.25}).node.device
    assert kernel_seconds(Kernel("k", 1e10, 1.0, "bf16", (1, 1, 1, 1)), device)[0] == 2e-4
    assert kernel_seconds(Kernel("k", 1.0, 1e7, "fp32"), device)[0] == 4e-5


# Attention is two matrix products whatever its precision: the sustained share applies to fp32 too.
# 1e9 FLOPs at 1e13 fp32 FLOP/s * 0.5: 200 us.
def test_flash_attention_in_fp32_runs_at_the_sustained_rate(
    scenario_of: ScenarioOf, cluster_of: ClusterOf
) -> None:
    s = scenario_of(run={"precision": "fp32"})
    device = cluster_of(device={"matmul_efficiency": 0.5}).node.device
    operators = blocks(s.model, shapes(s)).layer.operators
    (kernel,) = next(o for o in operators if o.name == "attention").forward
    assert isinstance(kernel, Kernel)
    big = replace(kernel, flops=1e9, bytes=1.0)
    assert kernel_seconds(big, device) == (2e-4, "compute")


# Two kernels of 100 us and 10 us, and two gaps of 1 us.
def test_work_is_its_kernels_and_a_gap_before_each(cluster_of: ClusterOf) -> None:
    pair = (Kernel("a", 1e10, 1.0, "bf16", (1, 1, 1, 1)), Kernel("b", 1.0, 1e7, "fp32"))
    seconds = work_seconds(Work("w", pair), cluster_of().node.device)
    assert seconds == pytest.approx({"compute": 1e-4, "memory": 1e-5, "launch": 2e-6}, rel=1e-12)


def test_a_cost_without_seconds_needs_a_cluster(op: Any, program_of: Callable[..., Any]) -> None:
    program, _ = program_of([op(0, 1)])
    object.__setattr__(program, "costs", (Work("matmul"),))
    with pytest.raises(ProgramError, match="matmul"):
        price(program)


# The same all-reduce on a group within a node and on one over two nodes: each has its own price.
# 1e6 bytes, n=2: 2 * (1 us + 5e5/1e11) = 12 us; 2 * (10 us + 5e5/1e10) = 120 us.
def test_a_flow_is_priced_for_the_shape_of_its_group(
    op: Any, program_of: Callable[..., Any], cluster_of: ClusterOf
) -> None:
    program, _ = program_of(
        [
            op(rank, 1, "dp", joint=joint, name="all_reduce")
            for joint, pair in (("near", (0, 1)), ("far", (1, 2)))
            for rank in pair
        ],
        num_ranks=4,
    )
    object.__setattr__(program, "costs", (Flow("all_reduce", 1e6),))
    ticks = price(program, cluster_of(num_nodes=2, devices=2))
    assert ticks.tolist() == [12_000_000] * 2 + [120_000_000] * 2


# An int64 of picoseconds holds 106 days: 9.2e6 s. More must not wrap around into nonsense.
@pytest.mark.parametrize("seconds", [1e8, float("inf")])
def test_a_duration_past_the_clock_is_an_error(seconds: float) -> None:
    with pytest.raises(sim.TrainsimError):
        sim.simulate_schedule("1F1B", stages=2, microbatches=2, forward=seconds)


# Question 30. Each axis' own link, made ten times slower, lengthens the step.
@pytest.mark.parametrize("plan", [{"tp": 4}, {"pp": 4}, {"dp": 4}])
def test_question_30_a_slower_link_lengthens_the_step(
    scenario_of: ScenarioOf, cluster_of: ClusterOf, plan: dict[str, int]
) -> None:
    fast, slow = (
        sim.simulate(
            scenario_of(
                plan=plan,
                cluster=cluster_of(devices=4, link={"bandwidth": rate, "pair_bandwidth": rate}),
            )
        )
        for rate in (1e11, 1e10)
    )
    assert slow.step_time_s > fast.step_time_s


# A pipeline's messages on a device so slow that they hide: with 3 us of message against 1 s of
# work a stage, warm-up and drain still see each latency once: 2(p-1) messages longer, no more.
def test_question_30_what_is_hidden_costs_nothing_but_the_fill() -> None:
    free, paid = (
        sim.simulate_schedule("GPipe", stages=4, microbatches=8, latency=c) for c in (0.0, 3e-6)
    )
    np.testing.assert_allclose(paid.step_time_s - free.step_time_s, 6 * 3e-6, rtol=1e-9)


def test_question_30_two_nodes_are_slower_than_one(
    scenario_of: ScenarioOf, cluster_of: ClusterOf
) -> None:
    one, two = (
        sim.simulate(
            scenario_of(plan={"dp": 4}, cluster=cluster_of(num_nodes=n, devices=4 // n))
        ).step_time_s
        for n in (1, 2)
    )
    assert two > one
