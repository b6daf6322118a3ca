"""Routes over fabrics, and what degraded and failed links do to them."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_fabric import hops, names, net_of, node_of, rate

from simulator.describe.network import Network
from simulator.errors import DescriptionError
from simulator.hardware.fabric import build

# Routes


@pytest.mark.parametrize("layout", ["rail", "fat-tree", "pods", "dragonfly"])
@pytest.mark.parametrize("routing", ["shortest", "ecmp", "static"])
def test_a_route_is_a_chain_from_source_to_target_and_as_long_back(layout, routing):
    fabric = build(net_of(layout, nodes=8, radix=8, routing=routing))
    ranks = np.arange(16)
    found = fabric.routes(np.repeat(ranks, 16), np.tile(ranks, 16), key=3)
    for pair in range(256):
        links = found.links[found.offset[pair] : found.offset[pair + 1]]
        if len(links):
            assert fabric.vertices[fabric.tail[links[0]]] == fabric.vertex(pair // 16)
            assert fabric.vertices[fabric.head[links[-1]]] == fabric.vertex(pair % 16)
            assert (fabric.head[links[:-1]] == fabric.tail[links[1:]]).all()
            assert len(set(links.tolist())) == len(links)
    assert (hops(fabric) == hops(fabric).T).all()
    seconds = found.latency.reshape(16, 16)
    assert seconds == pytest.approx(seconds.T)


def test_one_route_and_many_are_the_same():
    fabric = build(net_of("fat-tree", nodes=8, radix=4))
    many = fabric.routes(np.array([0, 5, 9]), np.array([15, 2, 8]), key=7)
    for i, pair in enumerate([(0, 15), (5, 2), (9, 8)]):
        one = fabric.route(*pair, 7)
        assert one.links.tolist() == many.links[many.offset[i] : many.offset[i + 1]].tolist()
        assert one.latency == many.latency[i]
        assert one.links.dtype == np.int32


# 8 spines, 2000 flows: 250 each; six standard deviations of a binomial count are 89.
def test_ecmp_spreads_flows_over_all_spines():
    fabric = build(net_of("pods", nodes=8, nics=8, devices=8, radix=16))
    keys = np.arange(2000)
    found = fabric.routes(np.zeros(2000, int), np.full(2000, 63), keys)
    spine = fabric.head[found.links.reshape(2000, 6)[:, 2]]
    used, count = np.unique(spine, return_counts=True)
    assert len(used) == 8
    assert (abs(count - 250) < 89).all()


def test_ecmp_is_the_same_in_every_process():
    code = (
        "from test_fabric import *;"
        "f = build(net_of('fat-tree', nodes=8, radix=4));"
        "print(*[i for k in range(9) for i in f.route(0, 15, k).links])"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed}, cwd=Path(__file__).parent,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(runs) == 1


def test_shortest_takes_the_first_spine_and_static_goes_by_destination():
    shortest = build(net_of("pods", nodes=8, radix=4, routing="shortest"))
    assert {names(shortest, 0, r, k)[2] for r in (4, 6, 9) for k in (0, 1)} == {"leaf0>spine0"}
    static = build(net_of("pods", nodes=8, radix=4, routing="static"))
    assert names(static, 0, 14, 0) == names(static, 0, 14, 5)
    assert {names(static, 0, r)[2] for r in (14, 15)} == {"leaf0>spine0", "leaf0>spine1"}


def test_a_placement_moves_ranks_and_nothing_else():
    cluster = net_of("rail", radix=4)
    order = np.array([5, 2, 7, 0, 1, 6, 3, 4])
    plain, placed = build(cluster), build(cluster, placement=order)
    assert placed.vertex(0) == "node2/gpu1"
    assert (hops(placed) == hops(plain)[np.ix_(order, order)]).all()


def test_a_placement_that_is_no_permutation_is_refused():
    with pytest.raises(DescriptionError, match="each of the slots 0 to 7 once"):
        build(net_of(), placement=[0] * 8)


# Degradation and failure


def test_a_degraded_link_keeps_its_share_in_the_named_direction():
    fabric = build(net_of("pods", radix=4, degraded={"leaf0>spine1": 0.5}))
    assert rate(fabric, "leaf0>spine1") == 0.5 * rate(fabric, "leaf0>spine0")
    assert rate(fabric, "spine1>leaf0") == rate(fabric, "spine0>leaf0")


def test_both_directions_and_whole_vertices_can_be_named():
    fabric = build(net_of(degraded={"node0/nic0<>network": 0.5, "node1/nic1": 0.25}))
    assert rate(fabric, "network>node0/nic0") == rate(fabric, "node0/nic0>network") == 5e9
    assert rate(fabric, "network>node1/nic1") == 2.5e9


def test_routes_avoid_a_failed_link_and_a_failed_spine():
    for failed in ("leaf0>spine0", "spine0"):
        fabric = build(net_of("pods", nodes=8, radix=4, failed=(failed,)))
        used = {names(fabric, 0, 14, key)[2] for key in range(20)}
        assert used == {"leaf0>spine1"}
        assert rate(fabric, "leaf0>spine0") == 0


def test_a_failed_nvlink_is_gone_around_in_its_node_only():
    cluster = node_of("hybrid-cube-mesh", nodes=2)
    failed = Network(failed=("node0/gpu0<>node0/gpu3",))
    fabric = build(replace(cluster, network=failed))
    assert len(fabric.route(0, 3).links) == 2
    assert len(fabric.route(8, 11).links) == 1


def test_a_device_whose_adapter_failed_uses_the_next_one():
    fabric = build(net_of(nodes=2, failed=("node0/nic0",)))
    assert names(fabric, 0, 2)[-4:] == [
        "node0/gpu1>node0/nic1", "node0/nic1>network", "network>node1/nic0", "node1/nic0>node1/gpu0"
    ]  # fmt: skip


def test_a_failure_that_cuts_ranks_off_is_refused_by_name():
    with pytest.raises(DescriptionError, match=r"node1/gpu0.*failed: leaf1"):
        build(net_of("pods", nodes=2, radix=4, failed=("leaf1",)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("leaf0>spine9", r"no vertex 'spine9'.*did you mean 'spine"),
        ("leaf0>leaf1", r"no link 'leaf0>leaf1'; links of leaf0 lead to"),
        ("node9", "no vertex 'node9'"),
    ],
)
def test_an_unknown_link_is_refused_with_what_there_is(name, message):
    with pytest.raises(DescriptionError, match=message):
        build(net_of("pods", radix=4, failed=(name,)))
