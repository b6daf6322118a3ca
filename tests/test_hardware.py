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
    collective_seconds,
    flow_seconds,
    group_shapes,
    send_recv_seconds,
)
from simulator.lower import lower
from simulator.lower.layers import blocks, shapes
from simulator.lower.operators import streaming
from simulator.program import Flow, Groups, Kernel, Work

ClusterOf = Callable[..., Cluster]
ScenarioOf = Callable[..., Scenario]


def one_node(ranks: int) -> GroupShape:
    return GroupShape(ranks, 1, ranks)


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
    assert send_recv_seconds(1e9, one_node(2), half) == 2 * send_recv_seconds(
        1e9, one_node(2), full
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
    assert [shapes[i][:3] for i in index] == [(4, 1, 4), (2, 2, 1), (2, 2, 1), (5, 2, 2)]


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
    seconds = work_seconds(Work("w", pair), cluster_of().node)
    assert seconds == pytest.approx({"compute": 1e-4, "memory": 1e-5, "launch": 2e-6}, rel=1e-12)


# The host issues a kernel in 60 us: the short one of 10 us waits 50 us for it, the long one 1 us.
def test_a_kernel_shorter_than_its_launch_waits_for_the_host(cluster_of: ClusterOf) -> None:
    pair = (Kernel("a", 1e10, 1.0, "bf16", (1, 1, 1, 1)), Kernel("b", 1.0, 1e7, "fp32"))
    node = replace(cluster_of().node, host_launch=60e-6)
    seconds = work_seconds(Work("w", pair), node)
    assert seconds == pytest.approx({"compute": 1e-4, "memory": 1e-5, "launch": 51e-6}, rel=1e-12)


def test_a_cost_without_seconds_needs_a_cluster(op: Any, program_of: Callable[..., Any]) -> None:
    program, _ = program_of([op(0, 1)])
    object.__setattr__(program, "costs", (Work("matmul"),))
    with pytest.raises(ProgramError, match="matmul"):
        price(program)


# The same all-reduce on a group within a node and on one over two nodes: each has its own price.
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
    cluster = cluster_of(num_nodes=2, devices=2)
    near, far = (
        round(
            collective_seconds("all_reduce", 1e6, GroupShape(2, nodes, 2 // nodes), cluster) * 1e12
        )
        for nodes in (1, 2)
    )
    assert near < far
    assert price(program, cluster).tolist() == [near] * 2 + [far] * 2


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


# 2 kB pass over a buffer at 0.8 of 1 TB/s in 2.5 ns, others at half of it in 4 ns.
def test_passes_over_whole_buffers_run_at_a_rate_of_their_own(cluster_of):
    device = cluster_of(
        device={
            "memory_bandwidth": 1e12,
            "memory_efficiency": 0.5,
            "memory_efficiency_in": {"stream": 0.8},
        }
    ).node.device
    pass_over = streaming("clear", 0.0, 2000)
    assert kernel_seconds(pass_over, device) == (pytest.approx(2.5e-9), "memory")
    other = replace(pass_over, algorithm="")
    assert kernel_seconds(other, device) == (pytest.approx(4e-9), "memory")


# Fused Adam and copies of FSDP2 pass over whole buffers; norms do not, nor a loss of six kernels.
@pytest.mark.parametrize(
    ("name", "streams"),
    [
        ("adamw", True),
        ("copy of gradients", True),
        ("loss", False),
        ("clip gradients", True),
        ("mlp norm", False),
    ],
)
def test_optimizers_copies_and_clipping_stream(scenario_of, llama, name, streams):
    plan, run = {"dp": 4, "zero": 3}, {"clip_grad": True}
    costs = lower(scenario_of(model=llama, batch=4, plan=plan, run=run)).costs
    found = {k.algorithm for c in costs for k in getattr(c, "kernels", ()) if k.name == name}
    assert found == {"stream" if streams else ""}
