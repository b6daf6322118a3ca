"""Parameter servers: push and pull of gradients by formula, on links, and in whole scenarios."""

from dataclasses import replace

import numpy as np
import pytest

import simulator as sim
from simulator.describe.plan import Plan
from simulator.engine import run
from simulator.errors import DescriptionError, ProgramError
from simulator.hardware import price
from simulator.hardware.contention import contended
from simulator.hardware.nccl import choices
from simulator.hardware.network import GroupShape, flow_model, flow_seconds, group_of
from simulator.hardware.patterns import PATTERNS, layout
from simulator.lower import check, lower
from simulator.program import NONE, Flow, Groups, Program
from simulator.program_text import format_program, parse_program

SERVERS = {"gradient_exchange": "parameter_server"}


def push_pull(size, servers):
    return Flow("push_pull", size, servers=servers)


def ring_seconds(size, shape, cluster):
    (found,) = choices(
        "all_reduce", size, group_of(shape, cluster), algorithm="RING", protocol="SIMPLE"
    )
    return found.seconds


def alone(cluster, flow, num_ranks):
    """Return a program of one flow over the first ranks."""
    n = num_ranks
    none, zero = np.full(n, NONE, np.int32), np.zeros(n, np.int32)
    return Program(
        rank=np.arange(n, dtype=np.int32), stream=np.zeros(n, np.int16),
        action=np.zeros(n, np.int8), stage=none, microbatch=none, layer=none, step=zero, cost=zero,
        joint=zero, pred_offset=np.zeros(n + 1, np.int64), preds=np.zeros(0, np.int32),
        joint_group=np.zeros(1, np.int32),
        groups=Groups(np.array([0, n], np.int64), np.arange(n, dtype=np.int32)),
        costs=(flow,), streams=("dp",), num_ranks=cluster.world_size,
    )  # fmt: skip


# 4 nodes of one device, 10 GB/s and 10 us. 3 others push 1 GB each into the server's adapter: 0.3 s
# and 10 us; the pull takes as long: 0.60002 s.
def test_one_server_takes_in_what_all_others_push(cluster_of):
    cluster = cluster_of(num_nodes=4, devices=1)
    seconds = flow_seconds(push_pull(1e9, 1), GroupShape(4, 4, 1), cluster)
    assert seconds == pytest.approx(0.60002, rel=1e-12)


# Two servers hold 0.5 GB each: half of the bytes into each, 0.30002 s.
def test_two_servers_halve_the_bytes_on_each(cluster_of):
    cluster = cluster_of(num_nodes=4, devices=1)
    seconds = flow_seconds(push_pull(1e9, 2), GroupShape(4, 4, 1), cluster)
    assert seconds == pytest.approx(0.30002, rel=1e-12)


# One node of 100 GB/s and 1 us: 7 x 1 GB / 100 GB/s + 1 us, twice.
def test_within_a_node_the_link_carries_the_pushes(cluster_of):
    seconds = flow_seconds(push_pull(1e9, 1), GroupShape(8, 1, 8), cluster_of())
    assert seconds == pytest.approx(2 * 0.070001, rel=1e-12)


# 2 nodes of 8 devices, 4 adapters of 10 GB/s: a rank's share is 5 GB/s. 8 ranks of the other node
# push 1 GB each: 1.6 s; the 7 of its own node need only 0.07 s of its link meanwhile.
def test_the_servers_share_of_an_adapter_is_the_narrow_place_between_nodes(cluster_of):
    cluster = cluster_of(num_nodes=2, nic={"count": 4, "latency": 0.0})
    seconds = flow_seconds(push_pull(1e9, 1), GroupShape(16, 2, 8), cluster)
    assert seconds == pytest.approx(2 * 1.6, rel=1e-12)


@pytest.mark.parametrize(("nodes", "devices"), [(1, 8), (8, 1)])
def test_a_server_on_every_rank_takes_as_long_as_the_ring(cluster_of, nodes, devices):
    cluster, shape = cluster_of(nodes, devices), GroupShape(8, nodes, devices)
    seconds = flow_seconds(push_pull(1e10, 8), shape, cluster)
    assert seconds == pytest.approx(ring_seconds(1e10, shape, cluster), rel=0.02)


# 8 adapters of a node carry the ring, which sums along the way; servers hear from every rank of
# the other node: 8/16 x 10 GB over 10 GB/s, twice, is 1 s against 2 x 15/16 x 10 GB / 80 GB/s.
def test_over_nodes_of_many_devices_servers_lose_to_the_ring(cluster_of):
    cluster, shape = cluster_of(num_nodes=2), GroupShape(16, 2, 8)
    seconds = flow_seconds(push_pull(1e10, 16), shape, cluster)
    assert seconds == pytest.approx(1.0, rel=1e-4)
    assert seconds > 4 * ring_seconds(1e10, shape, cluster)


def test_servers_on_all_ranks_move_the_volume_of_the_ring():
    at = layout(np.arange(8), 8)
    ring, servers = PATTERNS["RING"](at, 14), PATTERNS["PARAMETER_SERVER"](at, 8)
    for ends in ("source", "target"):
        by_rank = [
            np.bincount(getattr(m, ends), weights=m.share, minlength=8) for m in (ring, servers)
        ]
        assert by_rank[1] == pytest.approx(by_rank[0])
        assert by_rank[1] == pytest.approx(np.full(8, 2 * 7 / 8))


# One of 4 ranks: 3 in and 3 out at the server, one each way at the others.
def test_one_server_sends_and_gets_for_all():
    messages = PATTERNS["PARAMETER_SERVER"](layout(np.arange(4), 1), 1)
    for ends in (messages.source, messages.target):
        assert np.bincount(ends, weights=messages.share).tolist() == [3, 1, 1, 1]


# Every end of every message is counted, apart within nodes and between them; at 1 byte/s on both
# the formula must find the busiest.
@pytest.mark.parametrize(("nodes", "local"), [(1, 2), (1, 8), (2, 1), (2, 4), (3, 4), (8, 1)])
def test_no_end_is_busier_than_the_formula_says(cluster_of, nodes, local):
    n = nodes * local
    cluster = cluster_of(
        nodes, local, link={"bandwidth": 1.0, "pair_bandwidth": 1.0, "latency": 0.0},
        nic={"bandwidth": 1.0, "latency": 0.0},
    )  # fmt: skip
    for servers in range(1, n + 1):
        ends = {}
        for worker in range(n):
            for server in range(servers):
                near = worker // local == server // local
                if worker != server:
                    for end in (("out", worker, near), ("in", server, near)):
                        ends[end] = ends.get(end, 0.0) + 1 / servers
        seconds = flow_seconds(push_pull(1.0, servers), GroupShape(n, nodes, local), cluster)
        assert seconds == pytest.approx(2 * max(ends.values()), rel=1e-12)


@pytest.mark.parametrize("servers", [1, 3, 8, 16])
@pytest.mark.parametrize(("nodes", "devices"), [(2, 8), (16, 1), (1, 16)])
def test_a_push_pull_alone_takes_its_alpha_beta_time_on_the_fabric(
    cluster_of, servers, nodes, devices
):
    cluster = cluster_of(nodes, devices)
    program = check(alone(cluster, push_pull(1e9, servers), 16))
    ticks = price(program, cluster)
    latency, traffic = contended(program, ticks, cluster)
    end = run(program, latency, traffic=traffic).end.max()
    assert end == pytest.approx(ticks.max(), rel=1e-9)


# The server's adapter carries 3 GB in and 3 GB out, those of the others 1 GB.
def test_the_servers_adapter_is_the_busiest_link(cluster_of):
    cluster = cluster_of(num_nodes=4, devices=1)
    program = alone(cluster, push_pull(1e9, 1), 4)
    _, traffic = contended(program, price(program, cluster), cluster)
    loads = np.zeros(len(traffic.capacity))
    loads[traffic.links] = traffic.size[0] * traffic.coefficient
    busy = {name for name, load in zip(traffic.names, loads, strict=True) if load == loads.max()}
    assert loads.max() == pytest.approx(3e9)
    assert busy
    assert all("node0" in name for name in busy)


def test_nothing_but_latency_is_left_of_an_empty_push_pull(cluster_of):
    cluster = cluster_of(num_nodes=4, devices=1)
    model = flow_model(push_pull(1e9, 1), GroupShape(4, 4, 1), cluster)
    assert model == ("PARAMETER_SERVER", 2e-5, pytest.approx(1e9 / 0.6))
    assert flow_seconds(push_pull(1e9, 1), GroupShape(1, 1, 1), cluster) == 0.0


def slow_cluster(cluster_of):
    return cluster_of(num_nodes=4, devices=1, nic={"bandwidth": 1e8})


@pytest.mark.parametrize("network", ["alpha-beta", "fluid"])
def test_fewer_servers_make_a_longer_step(scenario_of, cluster_of, network):
    steps = [
        sim.simulate(
            scenario_of(
                plan={"dp": 4, **exchange}, cluster=slow_cluster(cluster_of),
                run={"network": network},
            )
        ).step_time_s
        for exchange in ({}, {**SERVERS, "servers": 4}, {**SERVERS, "servers": 2}, SERVERS)
    ]  # fmt: skip
    assert steps[0] == pytest.approx(steps[1], rel=0.1)
    assert steps[1] < steps[2] < steps[3]
    assert steps[3] > 2 * steps[0]


def test_a_real_scenario_is_slower_with_one_server():
    plain = sim.simulate(sim.load("gpt2-xl-ddp"))
    one = sim.simulate(sim.load("gpt2-xl-ddp", {"plan.gradient_exchange": "parameter_server"}))
    assert one.step_time_s > plain.step_time_s
    assert "1 parameter server(s) lie on the first ranks" in str(one)
    assert "parameter server" not in str(plain)


@pytest.mark.parametrize("detail", ["stage", "layer", "kernel"])
def test_buckets_are_pushed_and_the_rest_stays_all_reduced(scenario_of, detail):
    plan = {"dp": 2, "tp": 2, "pp": 2, "bucket_size": 1e4}
    plain, served = (
        lower(scenario_of(plan={**plan, **exchange}, run={"detail": detail}))
        for exchange in ({}, {**SERVERS, "servers": 2})
    )
    on_dp = served.stream == served.streams.index("dp")
    assert on_dp.any()
    for program, name, servers in ((plain, "all_reduce", 0), (served, "push_pull", 2)):
        costs = [program.costs[cost] for cost in program.cost[on_dp]]
        assert {(cost.name, cost.servers) for cost in costs} == {(name, servers)}
    sizes = [[p.costs[cost].bytes for cost in p.cost[on_dp]] for p in (plain, served)]
    assert sizes[0] == sizes[1]
    others = {served.costs[cost].name for cost in served.cost[served.is_flow & ~on_dp]}
    assert others == {"all_reduce", "send_recv"}


def test_a_replica_alone_pushes_nothing(scenario_of):
    assert all(cost.name != "push_pull" for cost in lower(scenario_of(plan=SERVERS)).costs)


@pytest.mark.parametrize("network", ["alpha-beta", "fluid"])
def test_every_engine_runs_parameter_servers_alike(scenario_of, cluster_of, network):
    s = scenario_of(
        plan={"dp": 4, "pp": 2, **SERVERS, "servers": 3}, run={"network": network},
        cluster=cluster_of(4, 2),
    )  # fmt: skip
    program = lower(s)
    ticks, traffic = price(program, s.cluster), None
    if network == "fluid":
        ticks, traffic = contended(program, ticks, s.cluster)
    times = [
        run(program, ticks, engine, traffic=traffic)
        for engine in ("reference", "events", "compiled")
    ]
    assert times[0] == times[1] == times[2]


def test_folding_changes_nothing(scenario_of, cluster_of):
    s = scenario_of(plan={"dp": 4, **SERVERS}, cluster=slow_cluster(cluster_of))
    assert sim.simulate(s).step_time_s == sim.simulate(s, folded=False).step_time_s


def test_the_text_of_a_program_keeps_the_servers(scenario_of):
    text = format_program(lower(scenario_of(plan={"dp": 4, **SERVERS, "servers": 3})))
    assert "flow push_pull bytes=" in text
    assert "servers=3" in text
    program = parse_program(text)
    assert format_program(program) == text
    assert {c.servers for c in program.costs if c.name == "push_pull"} == {3}
    assert check(program) is program


@pytest.mark.parametrize(
    ("plan", "complaint"),
    [
        ({"dp": 4, "servers": 2}, "servers: 2 is for gradient_exchange 'parameter_server', not"),
        ({"dp": 4, **SERVERS, "servers": 5}, "servers: 5 is more than the 4 ranks they lie on"),
        ({"dp": 4, **SERVERS, "servers": 0}, "servers: 0 must be at least 1"),
        ({"dp": 4, "gradient_exchange": "parameter_servers"}, "did you mean 'parameter_server'"),
    ],
)
def test_a_plan_refuses_servers_that_cannot_be(plan, complaint):
    with pytest.raises(DescriptionError, match=complaint):
        Plan(**plan)


def test_a_plan_counts_its_servers():
    assert [Plan(dp=4).num_servers, Plan(dp=4, **SERVERS).num_servers] == [0, 1]
    assert Plan(dp=4, **SERVERS, servers=4).num_servers == 4


@pytest.mark.parametrize(
    ("flow", "complaint"),
    [
        (push_pull(1e6, 0), "has 0 servers"),
        (push_pull(1e6, 5), "joint op 0 has 5 servers but joins 4 ranks"),
        (Flow("all_reduce", 1e6, servers=2), "has 2 servers"),
    ],
)
def test_check_refuses_flows_with_servers_that_cannot_be(cluster_of, flow, complaint):
    with pytest.raises(ProgramError, match=complaint):
        check(replace(alone(cluster_of(), push_pull(1e6, 1), 4), costs=(flow,)))


# Question 25. 7e9 parameters in bf16 over 2 nodes of 8 with 100 Gb/s a node: a gather or a scatter
# of parts moves 14 GB x 15/16 over 12.5 GB/s, 1.05 s. ZeRO-3 does three a step: 3.15 s; ZeRO-1 and
# 2 two: 2.1 s. Plans with ZeRO are not built; this is the volume of the collectives they need.
def test_question_25_three_passes_over_a_slow_network(cluster_of):
    cluster = cluster_of(num_nodes=2, nic={"count": 1, "bandwidth": 12.5e9})
    group = group_of(GroupShape(16, 2, 8), cluster)
    gather, scatter = (
        choices(name, 14e9, group, algorithm="RING", protocol="SIMPLE")[0].seconds
        for name in ("all_gather", "reduce_scatter")
    )
    assert 2 * gather + scatter == pytest.approx(3.15, rel=0.01)
    assert gather + scatter == pytest.approx(2.1, rel=0.01)


# On the hybrid cube mesh of a DGX-1 messages between devices that are no neighbours share links, so
# that the routes carry less than the formula says; NCCL's measured all-reduce is not held to them.
def test_a_fluid_run_is_held_to_the_routes_of_the_messages():
    by_formula, on_links = (
        sim.simulate(
            sim.load(
                "gpt2-xl-ddp",
                {
                    "plan.gradient_exchange": "parameter_server",
                    "plan.servers": 8,
                    "run.network": network,
                },
            )
        )
        for network in ("alpha-beta", "fluid")
    )
    exposed = [r.summary.exposed_communication_s["dp"] for r in (by_formula, on_links)]
    assert exposed[1] > 1.5 * exposed[0]
    assert on_links.links.utilisation.max() <= 1 + 1e-9
