"""Fabrics: links, rates, latencies and routes by hand for every layout."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import make_cluster

from simulator.describe import catalog
from simulator.describe.cluster import Cluster, Pcie
from simulator.describe.loader import Builder
from simulator.describe.network import Edge, Network
from simulator.errors import DescriptionError
from simulator.hardware.fabric import build

PCIE = Pcie(socket_bandwidth=8e9, socket_efficiency=0.5, socket_latency=2e-6)


def node_of(layout="switch", devices=8, nics=8, nodes=1, **fields):
    """Nodes of links of 100 GB/s and 1 us, adapters of 10 GB/s and 10 us."""
    cluster = make_cluster(nodes, devices, nic={"count": nics})
    return replace(cluster, node=replace(cluster.node, layout=layout, **fields))


def net_of(layout="crossbar", nodes=4, nics=2, devices=2, **fields):
    cluster = node_of(nodes=nodes, devices=devices, nics=nics)
    return replace(cluster, network=Network(layout=layout, **fields))


def names(fabric, source, target, key=0):
    return [fabric.names[i] for i in fabric.route(source, target, key).links]


def hops(fabric):
    ranks = np.arange(fabric.cluster.world_size)
    found = fabric.routes(np.repeat(ranks, len(ranks)), np.tile(ranks, len(ranks)))
    return np.diff(found.offset).reshape(len(ranks), -1)


def rate(fabric, name):
    return float(fabric.capacity[fabric.links_named(name)].sum())


def catalogued(node, num_nodes=1):
    problems = []
    table = {"node": node, "num_nodes": num_nodes}
    cluster = Builder(catalog.root() / "test.toml", problems).build(Cluster, table, "cluster")
    assert not problems
    return cluster


# Within a node


def test_a_switch_is_two_hops_at_the_devices_full_rate_and_alpha_once():
    fabric = build(node_of())
    assert names(fabric, 0, 5) == ["node0/gpu0>node0/nvswitch", "node0/nvswitch>node0/gpu5"]
    assert rate(fabric, "node0/gpu0>node0/nvswitch") == 1e11
    assert fabric.route(0, 5).latency == 1e-6


def test_a_rank_reaches_itself_over_no_link():
    route = build(node_of()).route(3, 3)
    assert len(route.links) == 0
    assert route.latency == 0


def test_capacity_is_the_datasheet_rate_times_its_efficiency():
    cluster = make_cluster(1, 8, link={"efficiency": 0.75})
    assert rate(build(cluster), "node0/gpu0>node0/nvswitch") == 0.75e11


# A hop within {0..3} or {4..7} or between i and i + 4: 1; else over a neighbour: 2. Each device
# has 3 + 1 neighbours, so 8 x 4 pairs at 1 and 8 x 3 at 2.
def test_a_hybrid_cube_mesh_has_four_neighbours_and_three_at_two_hops():
    found = hops(build(node_of("hybrid-cube-mesh")))
    assert np.bincount(found.ravel()).tolist() == [8, 32, 24]


def test_each_v100_of_a_hybrid_cube_mesh_has_six_nvlinks():
    fabric = build(node_of("hybrid-cube-mesh"))
    for device in range(8):
        links = [i for i, name in enumerate(fabric.names)
                 if name.startswith(f"node0/gpu{device}>node0/gpu")]  # fmt: skip
        counts = sorted(fabric.capacity[links] / 1e11)
        assert counts == [1, 1, 2, 2]
        assert sum(counts) == 6


def test_a_ring_of_eight_v100_uses_double_links_only():
    fabric, ring = build(node_of("hybrid-cube-mesh")), [0, 3, 2, 1, 5, 6, 7, 4]
    for a, b in zip(ring, ring[1:] + ring[:1], strict=True):
        assert rate(fabric, f"node0/gpu{a}>node0/gpu{b}") == 2e11


def test_a_full_mesh_gives_each_pair_a_link_of_its_own():
    fabric = build(node_of("full-mesh"))
    assert (hops(fabric) == 1 - np.eye(8)).all()
    assert len([n for n in fabric.names if "gpu0>node0/gpu" in n]) == 7


# Devices 0-3 below switch 0 of socket 0, devices 4-7 below switch 1 of socket 1.
def test_a_pcie_box_crosses_its_sockets_at_the_rate_between_them():
    fabric = build(node_of("pcie", pcie=PCIE))
    assert names(fabric, 0, 1) == ["node0/gpu0>node0/pcie0", "node0/pcie0>node0/gpu1"]
    assert [n.split(">")[1].split("/")[1] for n in names(fabric, 0, 7)] == [
        "pcie0", "cpu0", "cpu1", "pcie1", "gpu7",
    ]  # fmt: skip
    assert rate(fabric, "node0/cpu0>node0/cpu1") == 4e9
    assert fabric.route(0, 7).latency == pytest.approx(1e-6 + 2e-6)


def test_a_pcie_box_of_one_socket_crosses_none():
    fabric = build(node_of("pcie", pcie=replace(PCIE, sockets=1)))
    assert hops(fabric).max() == 4
    assert not [n for n in fabric.names if "cpu0>node0/cpu" in n]


def test_a_mesh_is_as_far_as_its_coordinates_and_a_torus_wraps_around():
    place = np.stack(np.unravel_index(np.arange(12), (3, 4)), axis=1)
    apart = np.abs(place[:, None] - place[None])
    mesh = build(node_of("mesh", devices=12, shape=(3, 4)))
    assert (hops(mesh) == apart.sum(axis=2)).all()
    torus = build(node_of("torus", devices=12, shape=(3, 4)))
    assert (hops(torus) == np.minimum(apart, np.array([3, 4]) - apart).sum(axis=2)).all()


def test_a_drawn_node_has_the_drawn_rates():
    edges = (Edge(a="gpu0", b="gpu1", count=3), Edge(a="gpu1", b="x", bandwidth=5e9),
             Edge(a="x", b="gpu2"))  # fmt: skip
    fabric = build(node_of("graph", devices=3, nics=1, edges=edges))
    assert rate(fabric, "node0/gpu0>node0/gpu1") == 3e11
    assert rate(fabric, "node0/gpu1>node0/x") == 5e9
    assert names(fabric, 0, 2) == [
        "node0/gpu0>node0/gpu1", "node0/gpu1>node0/x", "node0/x>node0/gpu2"
    ]  # fmt: skip


def test_a_drawn_node_in_two_pieces_is_refused_with_both_ranks():
    edges = (Edge(a="gpu0", b="gpu1"), Edge(a="gpu2", b="gpu3"))
    with pytest.raises(DescriptionError, match=r"no route from rank 2 \(node0/gpu2\) to rank 0"):
        build(node_of("graph", devices=4, edges=edges))


def test_messages_do_not_pass_through_an_adapter_that_devices_share():
    fabric = build(node_of("hybrid-cube-mesh", nics=1))
    assert not [n for a in range(8) for b in range(8) for n in names(fabric, a, b) if "nic" in n]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "mesh"}, "needs shape"),
        ({"layout": "mesh", "shape": (3, 3)}, "3 x 3 = 9, but num_devices is 8"),
        ({"shape": (2, 4)}, "has no shape"),
        ({"layout": "pcie"}, "needs pcie"),
        ({"layout": "graph", "edges": (Edge(a="gpu0", b="gpu8"),)}, "no 'gpu8'"),
        ({"layout": "graph", "edges": (Edge(a="x", b="y"), Edge(a="y", b="x"))}, "joined twice"),
        ({"layout": "hybrid-cube-mesh", "num_devices": 4}, "has 8"),
    ],
)
def test_a_layout_says_what_it_lacks(changes, message):
    with pytest.raises(DescriptionError, match=message):
        node_of(**{"layout": "switch", **changes})


# Between nodes


def test_the_default_network_gives_every_adapter_its_full_rate():
    fabric = build(net_of())
    assert names(fabric, 0, 3) == [
        "node0/gpu0>node0/nic0", "node0/nic0>network", "network>node1/nic1", "node1/nic1>node1/gpu1"
    ]  # fmt: skip
    assert rate(fabric, "node0/nic0>network") == 1e10
    assert fabric.route(0, 3).latency == 1e-5


@pytest.mark.parametrize("layout", ["switch", "pcie", "hybrid-cube-mesh"])
def test_a_message_between_nodes_costs_the_adapters_alpha_whatever_the_node(layout):
    fabric = build(node_of(layout, nodes=2, pcie=PCIE if layout == "pcie" else None))
    assert fabric.route(0, 8).latency == pytest.approx(1e-5)


def test_devices_share_adapters_evenly():
    fabric = build(node_of(devices=8, nics=4, nodes=2))
    assert [names(fabric, r, 8)[0].rpartition("/")[2] for r in range(8)] == [
        "nic0", "nic0", "nic1", "nic1", "nic2", "nic2", "nic3", "nic3"
    ]  # fmt: skip


# Radix 4: two nodes a pod, 2 rails: leaves 0 and 1 of pod 0, 2 and 3 of pod 1.
def test_rails_meet_on_their_leaf_and_cross_over_a_spine():
    fabric = build(net_of("rail", radix=4))
    assert len(names(fabric, 0, 2)) == 4
    assert names(fabric, 0, 2)[1:3] == ["node0/nic0>leaf0", "leaf0>node1/nic0"]
    assert len(names(fabric, 0, 3)) == 6  # the other rail
    assert len(names(fabric, 0, 4)) == 6  # the same rail, another pod


# 8 nodes x 2 adapters of 10 GB/s on radix 16, 3:1: 12 ports down, so 6 nodes a leaf, 2 leaves.
# A full leaf may send 12 x 10 = 120 GB/s, a third of it goes up: 40 GB/s on 4 spines of 10 GB/s.
def test_the_uplinks_of_a_leaf_carry_its_adapters_over_the_oversubscription():
    fabric = build(net_of("pods", nodes=8, radix=16, oversubscription=3.0))
    up = [i for i, n in enumerate(fabric.names) if n.startswith("leaf0>spine")]
    assert fabric.capacity[up].tolist() == [1e10] * 4


def cut(fabric, left):
    """Bytes/s from one set of nodes to the rest: the smallest cut through the switches."""
    import networkx

    graph = fabric.graph()
    for vertex in list(graph):
        if "/nic" in vertex:
            node = int(vertex.split("/")[0].removeprefix("node"))
            ends = ("source", vertex) if node in left else (vertex, "sink")
            graph.add_edge(*ends, capacity=float("inf"))
    graph.remove_nodes_from([v for v in list(graph) if "/gpu" in v])
    return networkx.maximum_flow_value(graph, "source", "sink")


# 16 adapters of 10 GB/s: half of them send 80 GB/s; with 2:1, 40 GB/s get through. In pods of
# radix 6, 3 ports of a leaf (1 node) go down; with 2:1, 4 (2 nodes).
@pytest.mark.parametrize("ratio", [1.0, 2.0])
def test_the_bisection_of_a_fat_tree_and_of_pods_is_that_of_its_adapters_over_the_ratio(ratio):
    tree = build(net_of("fat-tree", nodes=8, radix=4, oversubscription=ratio))
    assert cut(tree, {0, 1, 2, 3}) == pytest.approx(8e10 / ratio)
    pods = build(net_of("pods", nodes=8, radix=6, oversubscription=ratio))
    assert cut(pods, {0, 1, 2, 3}) == pytest.approx(8e10 / ratio)


# k = 4: 2 adapters an edge switch (a node), 2 edge switches a pod.
def test_a_fat_tree_climbs_as_high_as_it_must():
    fabric = build(net_of("fat-tree", nodes=8, radix=4))
    assert [len(names(fabric, 0, r)) for r in (1, 2, 4)] == [2, 6, 8]
    assert sum(v.startswith("core") for v in fabric.vertices) == 4
    assert sum(v.startswith("agg") for v in fabric.vertices) == 8


# Radix 7: p = 2 adapters a router, 4 routers a group, 2 global links a router, up to 9 groups.
# 72 adapters fill it: one link between any two groups.
def test_a_full_dragonfly_joins_all_groups_by_one_link_each():
    fabric = build(net_of("dragonfly", nodes=36, radix=7))
    between = [n for n in fabric.names if n.count("router") == 2
               and n.split("/")[0] != n.split(">")[1].split("/")[0]]  # fmt: skip
    assert len(between) == 9 * 8
    ports = np.unique([n.split(">")[0] for n in between], return_counts=True)[1]
    assert ports.tolist() == [2] * 36
    # to the adapter and away from it 2 + 2 hops, at most local, global, local between
    assert hops(fabric).max() == 4 + 3


def test_a_torus_of_devices_takes_the_shorter_way_around():
    cluster = replace(
        node_of(devices=4, nodes=12), network=Network(layout="torus", shape=(4, 2, 6))
    )
    fabric = build(cluster)
    place = np.stack(np.unravel_index(np.arange(48), (4, 2, 6)), axis=1)
    apart = np.abs(place[:, None] - place[None])
    assert (hops(fabric) == np.minimum(apart, np.array([4, 2, 6]) - apart).sum(axis=2)).all()
    # links of one device: two along extents 4 and 6, one along extent 2
    assert len([n for n in fabric.names if n.startswith("node0/gpu0>")]) == 5
    assert fabric.searches == 0


def test_arithmetic_and_search_agree_on_a_torus():
    cluster = replace(node_of(devices=4, nodes=6), network=Network(layout="torus", shape=(2, 4, 3)))
    searched = build(
        replace(cluster, network=replace(cluster.network, failed=("node0/gpu0>node0/gpu1",)))
    )
    arithmetic, other = hops(build(cluster)), hops(searched)
    assert searched.searches > 0
    assert (other >= arithmetic).all()
    assert (other[1:, 1:] == arithmetic[1:, 1:]).mean() > 0.9


def test_a_drawn_network_has_the_drawn_links():
    edges = (Edge(a="node0", b="left"), Edge(a="node1", b="left"), Edge(a="node2", b="right"),
             Edge(a="node3", b="right"), Edge(a="left", b="right", bandwidth=5e9))  # fmt: skip
    fabric = build(net_of("graph", edges=edges, hop_latency=1e-6))
    assert names(fabric, 0, 7)[1:4] == ["node0/nic0>left", "left>right", "right>node3/nic1"]
    assert rate(fabric, "left>right") == 5e9
    assert fabric.route(0, 7).latency == pytest.approx(1e-5 + 1e-6)


def test_a_drawn_network_that_is_not_connected_is_refused():
    edges = (Edge(a="node0", b="left"), Edge(a="node1", b="left"), Edge(a="node2", b="node3"))
    with pytest.raises(DescriptionError, match=r"no route from rank 4 \(node2/gpu0\) to rank 0"):
        build(net_of("graph", edges=edges))


def test_a_ring_of_nodes_without_a_switch_passes_through_their_adapters():
    edges = tuple(Edge(a=f"node{n}", b=f"node{(n + 1) % 4}") for n in range(4))
    fabric = build(net_of("graph", edges=edges, routing="shortest"))
    assert names(fabric, 0, 4)[1:3] == ["node0/nic0>node1/nic0", "node1/nic0>node2/nic0"]


def test_rails_that_never_meet_are_changed_in_the_source_node():
    edges = tuple(Edge(a=f"node{n}/nic{j}", b=f"rail{j}") for n in range(4) for j in range(2))
    fabric = build(net_of("graph", edges=edges))
    assert names(fabric, 0, 5) == [
        "node0/gpu0>node0/nvswitch", "node0/nvswitch>node0/gpu1", "node0/gpu1>node0/nic1",
        "node0/nic1>rail1", "rail1>node2/nic1", "node2/nic1>node2/gpu1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layout": "torus", "shape": (3, 3)}, "3 x 3 = 9 devices, but the cluster uses 4 x 2"),
        ({"layout": "torus"}, "needs shape"),
        ({"layout": "fat-tree", "radix": 2}, "holds 2 adapters, but the cluster has 4 x 2 = 8"),
        ({"layout": "fat-tree", "radix": 5}, "is odd"),
        ({"layout": "dragonfly", "radix": 3}, "holds 6 adapters"),
        ({"layout": "pods", "radix": 2}, "leaves 1 ports of a leaf"),
        ({"layout": "graph"}, "needs edges"),
        ({"spines": 2}, "has no spines"),
        ({"oversubscription": 0.5}, "at least 1"),
        ({"degraded": {"network": 0.0}}, "above 0"),
        ({"layout": "ring"}, "not one of"),
    ],
)
def test_a_network_that_does_not_fit_is_refused(fields, message):
    with pytest.raises(DescriptionError, match=message):
        net_of(**fields)


# Scale: operations are counted, not seconds


def test_sixteen_thousand_devices_need_a_search_a_leaf_not_a_device():
    cluster = replace(make_cluster(2048), network=Network(layout="rail"))
    fabric = build(cluster)
    assert fabric.searches == 0
    random = np.random.default_rng(0)
    source, target = random.integers(0, 16384, (2, 20000))
    found = fabric.routes(source, target)
    # 2048 nodes on leaves of 32 ports and 8 rails: 512 leaves; in a node 8 adapters + 8 devices
    assert fabric.searches <= 512 + 16
    assert np.diff(found.offset).max() == 6
    before = fabric.searches
    fabric.routes(source, target, key=1)
    assert fabric.searches == before


def test_a_torus_of_sixteen_thousand_devices_needs_no_search():
    network = Network(layout="torus", shape=(16, 32, 32))
    fabric = build(replace(make_cluster(2048), network=network))
    assert len(fabric.route(0, 16383).links) == 3
    assert fabric.searches == 0


def test_the_graph_has_the_links_with_their_rates():
    fabric = build(net_of("rail", radix=4, failed=("leaf0>spine0",)))
    graph = fabric.graph()
    assert graph.number_of_edges() == len(fabric.names) - 1
    assert graph["node0/nic0"]["leaf0"]["capacity"] == 1e10


# The catalogue


@pytest.mark.parametrize("name", catalog.names("nodes"))
def test_every_node_of_the_catalogue_is_connected_and_reads_the_same_both_ways(name):
    fabric = build(catalogued(name, num_nodes=2))
    found = hops(fabric)
    assert (found == found.T).all()
    assert (np.delete(found.ravel(), np.arange(len(found)) * (len(found) + 1)) > 0).all()
    assert fabric.cluster.node.sources


@pytest.mark.parametrize(
    ("name", "devices", "gigabytes"),
    [("dgx-h200", 8, 450), ("dgx-b200", 8, 900), ("gb200-nvl72", 72, 900), ("mi300x-8", 8, 448)],
)
def test_the_links_of_a_device_sum_to_its_datasheet_rate(name, devices, gigabytes):
    cluster = catalogued(name)
    fabric = build(cluster)
    out = [i for i, n in enumerate(fabric.names)
           if n.startswith("node0/gpu0>") and "nic" not in n]  # fmt: skip
    assert cluster.node.num_devices == devices
    reached = fabric.capacity[out].sum() / cluster.node.link.efficiency
    assert reached == pytest.approx(gigabytes * 1e9)
