"""Flows of a scenario on the links of its cluster: where they meet, and what that costs."""

from dataclasses import replace

import numpy as np
import pytest

import simulator as sim
from simulator.describe.network import Network
from simulator.engine import run
from simulator.hardware import price
from simulator.hardware.contention import contended
from simulator.hardware.patterns import PATTERNS, layout, rings, tree_parents
from simulator.lower import lower
from simulator.program import NONE, Flow, Groups, Program
from simulator.report.summary import assumptions


def flows(cluster, groups, size=1e9, name="all_reduce"):
    """Return a program in which every group runs one flow at once, and its end in seconds."""
    ranks = np.array([r for group in groups for r in group], np.int32)
    number = np.repeat(np.arange(len(groups)), [len(group) for group in groups]).astype(np.int32)
    n = len(ranks)
    stream = np.zeros(n, np.int16)
    for rank in set(ranks.tolist()):  # flows of one rank run side by side, in streams of their own
        mine = ranks == rank
        stream[mine] = np.arange(mine.sum())
    none = np.full(n, NONE, np.int32)
    program = Program(
        rank=ranks, stream=stream, action=np.zeros(n, np.int8), stage=none, microbatch=none,
        layer=none, step=np.zeros(n, np.int32), cost=np.zeros(n, np.int32), joint=number,
        pred_offset=np.zeros(n + 1, np.int64), preds=np.zeros(0, np.int32),
        joint_group=np.arange(len(groups), dtype=np.int32),
        groups=Groups(np.cumsum([0, *map(len, groups)]).astype(np.int64), ranks),
        costs=(Flow(name, size),), streams=tuple(f"s{k}" for k in range(stream.max() + 1)),
        num_ranks=cluster.world_size,
    )  # fmt: skip
    ticks = price(program, cluster)
    latency, traffic = contended(program, ticks, cluster)
    timeline = run(program, latency, traffic=traffic)
    ends = [timeline.end[number == k].max() / 1e12 for k in range(len(groups))]
    return ends, price(program, cluster).max() / 1e12, traffic


def test_a_flow_alone_takes_the_time_of_the_alpha_beta_model(cluster_of):
    for group in ([0, 1], [0, 1, 2, 3], list(range(8)), list(range(16)), [3, 11]):
        (end,), alone, _ = flows(cluster_of(num_nodes=2), [group])
        assert end == pytest.approx(alone, rel=1e-9)


@pytest.mark.parametrize("name", ["gpt2-xl-ddp", "gpt2-xl-1f1b", "gpt2-xl-1f1b-32gpu"])
def test_scenarios_in_which_little_meets_take_the_same_step_either_way(name):
    alone, shared = (
        sim.simulate(sim.load(name, {"run.network": network}))
        for network in ("alpha-beta", "fluid")
    )
    assert shared.step_time_s == pytest.approx(alone.step_time_s, rel=1e-3)


# Both cross from node 0 to node 1 through the adapters of ranks 0 and 8: each gets half of them.
def test_two_all_reduces_on_one_adapter_take_twice_as_long(cluster_of):
    groups = [[0, 8], [0, 8]]
    ends, alone, _ = flows(cluster_of(num_nodes=2), groups, size=1e10)
    assert ends == pytest.approx([2 * alone, 2 * alone], rel=1e-3)


def test_eight_rails_do_not_slow_each_other(cluster_of):
    cluster = replace(cluster_of(num_nodes=2), network=Network(layout="rail"))
    ends, alone, _ = flows(cluster, [[k, 8 + k] for k in range(8)], size=1e10)
    assert ends == pytest.approx([alone] * 8, rel=1e-6)


# 16 nodes of 8 adapters on leaves of 4 nodes: at 4:1 the uplinks of a leaf carry a quarter of
# what its adapters send, so all of them crossing to other leaves take four times as long.
def test_an_oversubscribed_spine_shows(cluster_of):
    def slowest(oversubscription):
        network = Network(layout="pods", radix=64, oversubscription=oversubscription,
                          routing="ecmp")  # fmt: skip
        cluster = replace(cluster_of(num_nodes=16), network=network)
        pairs = [[rank, (rank + 64) % 128] for rank in range(64)]
        return max(flows(cluster, pairs, size=1e9)[0])

    assert slowest(8.0) > 2 * slowest(1.0)


# 2(n-1)/n bytes of the size over each edge of the ring: 8 ranks 1.75, on every device's link.
def test_a_ring_moves_its_share_over_each_edge(cluster_of):
    cluster = replace(cluster_of(), nccl_algorithm="RING")
    _, _, traffic = flows(cluster, [list(range(8))])
    used = traffic.coefficient
    assert used / used.max() == pytest.approx(np.ones(16), rel=1e-9)  # 8 up, 8 down
    messages = PATTERNS["RING"](layout(np.arange(8), 8), 14)
    assert messages.share.tolist() == [1.75] * 8


def test_rings_over_nodes_leave_through_every_adapter_once():
    orders = rings(layout(np.arange(32), 8))
    assert orders.shape == (8, 32)
    assert all(sorted(order) == list(range(32)) for order in orders.tolist())
    leaves = {order[7] % 8 for order in orders.tolist()}
    assert leaves == set(range(8))
    # a ring enters the next node on the rail on which it left: no hop between rails
    assert all(order[7] % 8 == order[8] % 8 for order in orders.tolist())


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 8, 13, 16, 64])
def test_both_trees_of_a_double_tree_span_all_nodes(nodes):
    for parents in tree_parents(nodes):
        assert parents.count(-1) == 1
        for node in range(nodes):
            seen = set()
            while parents[node] >= 0:
                assert node not in seen
                seen.add(node)
                node = parents[node]


@pytest.mark.parametrize("nodes", [4, 8, 16, 64])
def test_a_node_is_inner_in_one_tree_only(nodes):
    first, second = ({p for p in parents if p >= 0} for parents in tree_parents(nodes))
    roots = {parents.index(-1) for parents in tree_parents(nodes)}
    assert first & second <= roots


# Every rank's part reaches every other: what enters a rank is what the collective must bring.
@pytest.mark.parametrize(
    ("algorithm", "steps", "enters"),
    [("RING", 2 * 15, 2 * 15 / 16), ("PAIRWISE", 0, 15 / 16), ("HALVING_DOUBLING", 0, 2 * 15 / 16),
     ("PAT", 0, 15 / 16)],
)  # fmt: skip
def test_a_pattern_brings_each_rank_its_bytes(algorithm, steps, enters):
    messages = PATTERNS[algorithm](layout(np.arange(16), 8), steps)
    arrived = np.bincount(messages.target, weights=messages.share, minlength=16)
    assert arrived == pytest.approx(np.full(16, enters))


def test_bytes_on_links_are_those_of_the_flows(cluster_of, scenario_of):
    s = scenario_of(plan={"dp": 2, "pp": 2}, run={"network": "fluid", "num_steps": 1},
                    cluster=cluster_of(2, 2))  # fmt: skip
    result = sim.simulate(s)
    traffic, demand = result.moves.traffic, result.moves.traffic.demand
    expected = np.zeros(len(traffic.capacity))
    for d in demand[demand != NONE].tolist():
        used = slice(traffic.offset[d], traffic.offset[d + 1])
        expected[traffic.links[used]] += traffic.size[d] * traffic.coefficient[used]
    assert result.links.bytes == pytest.approx(expected, rel=1e-6)
    assert result.links.utilisation.max() <= 1 + 1e-9


def test_the_report_of_a_fluid_run_names_the_busiest_links():
    text = str(sim.simulate(sim.load("gpt2-xl-ddp", {"run.network": "fluid"})))
    assert "busiest links" in text
    assert "share it fairly (max-min)" in text


def test_every_engine_runs_a_fluid_scenario_alike(scenario_of, cluster_of):
    s = scenario_of(plan={"dp": 2, "pp": 2, "tp": 2}, run={"network": "fluid"},
                    cluster=cluster_of(4, 2))  # fmt: skip
    program = lower(s)
    latency, traffic = contended(program, price(program, s.cluster), s.cluster)
    times = [run(program, latency, engine, traffic=traffic)
             for engine in ("reference", "events", "compiled")]  # fmt: skip
    assert times[0] == times[1] == times[2]


# A pair over one adapter at a tenth of its rate: what moves on it takes ten times as long.
@pytest.mark.parametrize("link", ["node0/nic0>network", "node0/nic0<>network", "node0/nic0"])
def test_a_degraded_adapter_holds_back_a_flow_that_meets_no_other(cluster_of, link):
    cluster = cluster_of(num_nodes=2)
    slow = replace(cluster, network=Network(degraded={link: 0.1}))
    (sound,), _, _ = flows(cluster, [[0, 8]], size=1e10)
    (held,), _, _ = flows(slow, [[0, 8]], size=1e10)
    assert held == pytest.approx(10 * sound, rel=1e-3)


def test_a_degraded_link_inside_a_node_holds_back_a_ring_over_it(cluster_of):
    cluster = cluster_of(num_nodes=1)
    slow = replace(cluster, network=Network(degraded={"node0/gpu0": 0.5}))
    (sound,), _, _ = flows(cluster, [list(range(8))], size=1e10)
    (held,), _, _ = flows(slow, [list(range(8))], size=1e10)
    assert held == pytest.approx(2 * sound, rel=0.02)  # alone it reaches 99% of the link


# Rank 0 leaves by its neighbour's adapter, where rank 1's bytes are already.
def test_two_flows_share_the_adapter_that_stands_in_for_a_failed_one(cluster_of):
    cluster = cluster_of(num_nodes=2)
    down = replace(cluster, network=Network(failed=("node0/nic0",)))
    sound, _, _ = flows(cluster, [[0, 8], [1, 9]], size=1e10)
    held, _, _ = flows(down, [[0, 8], [1, 9]], size=1e10)
    assert held == pytest.approx([2 * end for end in sound], rel=1e-3)


# 128 adapters on two leaves at 16:1: one of 8 uplinks carries what eight adapters may send.
def test_an_oversubscribed_spine_holds_back_a_ring_that_is_alone(cluster_of):
    def alone(oversubscription):
        network = Network(layout="pods", radix=128, oversubscription=oversubscription)
        (end,), _, _ = flows(
            replace(cluster_of(num_nodes=16), network=network), [list(range(128))], size=1e10
        )
        return end

    assert alone(16) > 1.5 * alone(1)


@pytest.mark.parametrize(
    ("name", "value"),
    [("degraded", {"node0/nic0": 0.5}), ("failed", ["node0/nic0"]), ("oversubscription", 4.0)],
)
def test_what_flows_apart_would_ignore_is_refused(name, value):
    table = {f"cluster.network.{name}": value}
    if name == "oversubscription":
        table["cluster.network.layout"] = "pods"
    with pytest.raises(sim.DescriptionError, match=f'{name} .* set run.network = "fluid"'):
        sim.load("gpt2-xl-1f1b-32gpu", table)


def test_a_network_that_flows_apart_do_not_see_is_among_the_assumptions():
    railed = sim.load("gpt2-xl-1f1b-32gpu", {"cluster.network.layout": "rail"})
    assert any("(rail) never hold a flow back" in line for line in assumptions(railed))
