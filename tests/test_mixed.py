"""Nodes of several kinds in one cluster: prices, memory, cuts and what is refused."""

from dataclasses import replace

import numpy as np
import pytest

import simulator as sim
from simulator.cuts import _times, resolved
from simulator.describe.cluster import Cluster, NodeGroup
from simulator.describe.loader import load_node
from simulator.describe.loader import scenario as scenario_of_table
from simulator.errors import DescriptionError
from simulator.hardware import price
from simulator.hardware.network import GroupShape, collective_seconds, flow_seconds, group_shapes
from simulator.lower import lower
from simulator.program import ACTION_CODE, NONE, Flow, Groups
from simulator.report.text import cluster_name


@pytest.fixture
def kinds(cluster_of):
    """Return a slow kind of node and one that is twice as fast in everything, 2 devices each."""

    def make(*counts, devices=2, **changes):
        slow = cluster_of(devices=devices).node
        fast = cluster_of(
            devices=devices,
            device={
                "name": "fast device", "memory_bandwidth": 2e12, "launch_overhead": 5e-7,
                "peak": {k: 2 * v for k, v in slow.device.peak.items()},
            } | changes,
            nic={"bandwidth": 2e10, "latency": 5e-6},
            link={"bandwidth": 2e11, "pair_bandwidth": 2e11, "latency": 5e-7},
        ).node  # fmt: skip
        nodes = (slow, replace(fast, name="fast node"))
        return Cluster(nodes=tuple(
            NodeGroup(node=nodes[i % 2], count=count) for i, count in enumerate(counts)
        ))  # fmt: skip

    return make


def test_nodes_are_numbered_group_by_group(kinds):
    cluster = kinds(2, 1, 1)
    assert cluster.num_nodes == 4
    assert cluster.world_size == 8
    assert [node.name for node in cluster.kinds] == ["round node", "fast node"]
    assert cluster.kind_of_node == (0, 0, 1, 0)
    assert cluster_name(cluster) == (
        "6 x round device in 3 nodes round node; 2 x fast device in 1 node fast node"
    )
    assert cluster.only(1) == Cluster(node=cluster.kinds[1], num_nodes=4)
    assert cluster.peak("bf16") == 6e14 + 4e14


def test_groups_of_one_kind_are_a_plain_cluster(kinds, scenario_of):
    slow = kinds(1, 1).only(0).node
    listed = Cluster(nodes=(NodeGroup(node=slow, count=1), NodeGroup(node=slow, count=1)))
    plain = Cluster(node=slow, num_nodes=2)
    assert not listed.is_mixed
    plan = {"pp": 2, "tp": 2}
    one, other = (sim.simulate(scenario_of(plan=plan, cluster=c)) for c in (listed, plain))
    assert one.times == other.times
    assert str(one) == str(other)


# A message of 1e9 bytes: 1e-5 + 0.1 s between slow nodes, 5e-6 + 0.05 s between fast ones.
def test_a_message_between_unlike_nodes_takes_the_slower_adapter(kinds):
    cluster, message = kinds(2, 2), Flow("send_recv", 1e9)
    groups = Groups(np.array([0, 2, 4, 6]), np.array([0, 2, 4, 6, 2, 4], np.int32))
    shapes, number = group_shapes(groups, cluster)
    assert [shapes[i].kinds for i in number] == [(0,), (1,), (0, 1)]
    seconds = [flow_seconds(message, shapes[i], cluster) for i in number]
    assert seconds == pytest.approx([0.10001, 0.050005, 0.10001])


def test_a_collective_takes_as_long_as_on_its_slowest_member(kinds):
    cluster = kinds(2, 2)
    sizes = (1e3, 1e6, 1e9)
    for size in sizes:
        both, slow, fast = (
            collective_seconds("all_reduce", size, GroupShape(8, 4, 2, members), cluster)
            for members in ((0, 1), (0,), (1,))
        )
        assert both == slow >= fast


# The first stage lies on slow nodes, the second one on fast ones.
def test_each_stage_takes_the_ticks_that_it_takes_on_its_own_kind(kinds, scenario_of):
    cluster = kinds(1, 1)
    s = scenario_of(plan={"pp": 2, "tp": 2}, cluster=cluster)
    program = lower(s)
    mixed = price(program, cluster)
    assert mixed.shape[1] == 1  # all tiles agree
    for stage in (0, 1):
        alone = price(program, cluster.only(stage))
        rows = (program.stage == stage) & np.isin(
            program.stream, [program.streams.index(name) for name in ("compute", "tp")]
        )
        assert (mixed[rows] == alone[rows]).all()
    work = (program.joint == NONE) & (program.stage == 1)
    slow = price(program, cluster.only(0))
    assert (2 * mixed[work] - slow[work] <= 2).all()  # halves are rounded


@pytest.mark.parametrize("engine", ["compiled", "events", "reference"])
def test_a_pipeline_of_two_kinds_waits_for_the_slow_stage(kinds, scenario_of, engine):
    cluster, plan = kinds(1, 1), {"pp": 2, "tp": 2}
    mixed, slow, fast = (
        sim.simulate(scenario_of(plan=plan, cluster=c), engine=engine)
        for c in (cluster, cluster.only(0), cluster.only(1))
    )
    assert fast.step_time_s < mixed.step_time_s < slow.step_time_s
    busy = [r.breakdown.of("forward", "backward") for r in (mixed, slow, fast)]
    assert busy[0][:2].tolist() == busy[1][:2].tolist()
    assert busy[0][2:].tolist() == busy[2][2:].tolist()


# With dp outermost the slow replica and the fast one differ; tp ranks lie in one node.
def test_replicas_on_unlike_nodes_are_not_folded(kinds, scenario_of):
    s = scenario_of(plan={"dp": 2, "tp": 2}, cluster=kinds(1, 1))
    folded, whole = (sim.simulate(s, folded=fold) for fold in (True, False))
    assert folded.notes == ("folded tp 2 -> 1: ranks identical",)
    assert folded.times == whole.times
    assert folded.times == sim.simulate(s, engine="reference").times
    b = folded.breakdown.of("forward", "backward")
    assert b[0] > 1.9 * b[2]
    assert sum(folded.summary.shares.values()) == pytest.approx(1)


def test_a_rank_goes_by_the_kind_of_its_placement(kinds, scenario_of):
    s = scenario_of(plan={"dp": 2, "tp": 2, "placement": "cyclic"}, cluster=kinds(1, 1))
    b = sim.simulate(s).breakdown.of("forward", "backward")
    assert b[0] == b[2] > 1.9 * b[1]
    assert b[1] == b[3]


# 2 slow devices of 1e14 and 2 fast ones of 2e14: 6e14 in all.
def test_utilisation_counts_the_peaks_of_all_devices(kinds, scenario_of):
    result = sim.simulate(scenario_of(plan={"pp": 2, "tp": 2}, cluster=kinds(1, 1)))
    plain = sim.simulate(scenario_of(plan={"pp": 2, "tp": 2}, cluster=kinds(1, 1).only(0)))
    flops = [r.summary.mfu * r.step_time_s * peak for r, peak in ((result, 6e14), (plain, 4e14))]
    assert flops[0] == pytest.approx(flops[1])


def test_the_rank_with_the_least_room_is_the_fullest(kinds, scenario_of):
    plan = {"pp": 2, "tp": 2}
    enough = sim.simulate(scenario_of(plan=plan, cluster=kinds(1, 1)))
    needed = enough.device_memory_bytes
    assert enough.summary.peak_memory_rank == 0
    small = kinds(1, 1, memory=float(needed[2]) - 1)  # of the fast devices
    summary = sim.simulate(scenario_of(plan=plan, cluster=small)).summary
    assert summary.peak_memory_rank == 2
    assert not summary.fits
    assert summary.device_memory_bytes - summary.memory_capacity_bytes == 1


# torch gives cuBLAS 4,096 x 2 + 16 x 8 KiB on an A100 and 32 MiB on an H100. NCCL opens 24 and 16
# channels; the driver's context is alike.
def test_buffers_are_those_of_each_ranks_device():
    s = sim.load("llama-3-8b-a100-h100", {"plan.stage_cut": "uniform", "run.num_steps": 1})
    plain = replace(s, cluster=s.cluster.only(0))
    own, first = lower(s).static_bytes, lower(plain).static_bytes
    more = 32 * 2**20 - (4096 * 2 + 16 * 8) * 1024
    assert (own - first).tolist() == [0] * 16 + [more] * 16
    mixed, alone = sim.simulate(s), sim.simulate(replace(s, cluster=s.cluster.only(1)))
    assert mixed.device_memory_bytes[16:].tolist() == alone.device_memory_bytes[16:].tolist()


def test_a_cut_by_time_follows_the_speed_of_each_stage(kinds, scenario_of, gpt):
    model = replace(gpt, num_hidden_layers=12)
    cluster, plan = kinds(1, 1, devices=1), {"pp": 2, "stage_cut": "time"}
    s = resolved(scenario_of(model=model, plan=plan, cluster=cluster))
    slow, fast = (_times(replace(s, cluster=cluster.only(kind))) for kind in (0, 1))
    assert slow.layers == pytest.approx(2 * fast.layers, rel=1e-6)
    loads = {
        n: max(slow.of(0, 2)[0, n], fast.of(1, 2)[n, 12]) for n in range(13)
    }  # fmt: skip
    assert s.layers_per_stage[0] == min(loads, key=loads.get)
    even = scenario_of(model=model, plan=plan | {"stage_cut": "uniform"}, cluster=cluster)
    assert sim.simulate(s).step_time_s < sim.simulate(even).step_time_s


# Three stages of two chunks each lie on ranks 0, 1, 2, 0, 1, 2: of them 1 and 4 on a fast node.
def test_stages_of_several_chunks_go_by_their_rank(kinds, scenario_of, gpt):
    model = replace(gpt, num_hidden_layers=18)
    plan = {"pp": 3, "chunks": 2, "schedule": "Interleaved1F1B", "stage_cut": "time"}
    s = scenario_of(model=model, plan=plan, cluster=kinds(1, 1, 1, devices=1), batch=6)
    layers = resolved(s).layers_per_stage
    assert min(layers[1], layers[4]) > max(layers[0], layers[2], layers[3])


def test_the_shipped_mixture_is_balanced_by_time():
    cut, even = (
        sim.simulate(sim.load("llama-3-8b-a100-h100", {"plan.stage_cut": how}))
        for how in ("time", "uniform")
    )
    layers = cut.scenario.layers_per_stage
    assert sum(layers) == 32
    assert max(layers[:2]) < min(layers[2:])
    assert cut.step_time_s < 0.7 * even.step_time_s
    text = str(cut)
    assert (
        "16 x NVIDIA A100 SXM4 80 GB in 2 nodes NVIDIA DGX A100 (80 GB); 16 x NVIDIA H100" in text
    )
    assert "on NVIDIA H100 SXM5 80 GB: matrix products sustain" in text
    assert "2 (NVIDIA DGX A100 (80 GB) + NVIDIA DGX H100)" in text


def test_the_passes_of_the_shipped_mixture_are_those_of_each_generation():
    s = sim.load("llama-3-8b-a100-h100", {"plan.stage_cut": "uniform"})
    mixed = sim.simulate(s)
    for kind, stages in ((0, (0, 1)), (1, (2, 3))):
        alone = sim.simulate(replace(s, cluster=s.cluster.only(kind)))
        for stage in stages:
            for action in "FB":
                rows = (mixed.tiled.stage == stage) & (mixed.tiled.action == ACTION_CODE[action])
                spent = [
                    (r.times.columns[1] - r.times.columns[0])[rows & (mixed.tiled.stream == 0)]
                    for r in (mixed, alone)
                ]
                assert (spent[0] == spent[1]).all()


def table(**cluster):
    return {
        "model": "gpt2-xl",
        "cluster": {"nodes": [{"node": "dgx-a100"}, {"node": "dgx-h100", "count": 2}]} | cluster,
        "plan": {"tp": 4},
        "run": {"global_batch_size": 48, "sequence_length": 1024},
    }


@pytest.fixture
def read(tmp_path):
    def of(**cluster):
        full = table(**cluster)
        full["model"] = "llama-3-8b"
        return scenario_of_table(full, tmp_path / "mixed.toml")

    return of


def test_a_file_lists_groups_of_nodes(read):
    s = read()
    assert s.cluster.kind_of_node == (0, 1, 1)
    assert s.plan.dp == 6  # fills the cluster: 3 x 8 / 4


@pytest.mark.parametrize(
    ("cluster", "why"),
    [
        ({"num_nodes": 4}, r"mixed.toml \[cluster\]: num_nodes: 4 is not what nodes lists"),
        ({"node": "dgx-h100"}, r"node: 'NVIDIA DGX H100' is not what nodes lists; leave it out"),
        ({"nodes": []}, "node: is missing; name a node, or list nodes"),
        ({"nodes": [{"node": "dgx-a100", "number": 2}]}, "unknown key 'number'"),
        ({"nodes": [{"node": "dgx-a100", "count": 0}]}, "count: 0 must be at least 1"),
        ({"network": {"layout": "rail"}}, "routes between nodes of several kinds are not modelled"),
        (
            {"nodes": [{"node": "dgx-a100"}, {"node": "a100-pcie-4"}]},
            r"unlike numbers of devices \(8 of .*, 4 of .*\); set devices_per_node = 4",
        ),
        ({"devices_per_node": 9}, "devices_per_node: 9 is more than the 8 devices of NVIDIA DGX A"),
    ],
)
def test_a_list_of_nodes_that_cannot_be_says_why(read, cluster, why):
    with pytest.raises(DescriptionError, match=why):
        read(**cluster)


def test_a_cluster_without_a_node_says_so():
    with pytest.raises(DescriptionError, match=r"Cluster.node: is missing; name a node"):
        Cluster()


@pytest.mark.parametrize(
    ("plan", "run", "why"),
    [
        ({}, {"network": "fluid"}, "run.network 'fluid' with cluster.nodes of several kinds"),
        ({"offload_optimizer": True}, {}, "plan.offload_optimizer with cluster.nodes of several"),
        ({}, {"precision": "fp8"}, "run.precision 'fp8': NVIDIA A100 SXM4 80 GB has no rate for"),
    ],
)
def test_what_is_not_modelled_on_unlike_nodes_is_refused(plan, run, why):
    cluster = Cluster(nodes=tuple(NodeGroup(node=load_node(n)) for n in ("dgx-a100", "dgx-h100")))
    s = sim.load("llama-3-8b-3d", {"plan.dp": 4, "plan.pp": 1, "cluster.num_nodes": 2})
    with pytest.raises(DescriptionError, match=why):
        replace(s, cluster=cluster, plan=replace(s.plan, **plan), run=replace(s.run, **run))


def test_kernels_that_depend_on_the_device_are_refused(scenario_of):
    old, new = load_node("dgx-h100"), load_node("dgx-b200")
    s = sim.load("llama-3-8b-3d", {"plan.dp": 4, "plan.pp": 1, "cluster.num_nodes": 2})
    cluster = Cluster(nodes=(NodeGroup(node=old), NodeGroup(node=new)))
    with pytest.raises(
        DescriptionError, match=r"fp8' with .* casts transposed too and some do not"
    ):
        replace(s, cluster=cluster, run=replace(s.run, precision="fp8"))
    v100 = Cluster(nodes=(NodeGroup(node=old), NodeGroup(node=load_node("dgx-1-v100"))))
    with pytest.raises(DescriptionError, match=r"'muon' with .* multiplies in bf16 where a device"):
        replace(s, cluster=v100, run=replace(s.run, precision="fp16", optimizer="muon"))


def test_unlike_nodes_have_no_fabric_to_draw(trainsim):
    code, _, err = trainsim(
        "show", "topology", "llama-3-8b-a100-h100", "--plot", "fabric.png"
    )  # fmt: skip
    assert code == 2
    assert "links between nodes of several kinds" in err


def test_the_hardware_of_each_kind_is_shown(trainsim):
    code, out, _ = trainsim("show", "topology", "llama-3-8b-a100-h100")
    assert code == 0
    assert "2 x NVIDIA DGX A100 (80 GB), 8 of 8 devices used in each: 16 ranks" in out
    assert "2 x NVIDIA DGX H100, 8 of 8 devices used in each: 16 ranks" in out


def test_the_kind_of_each_node_is_shown_beside_its_ranks(trainsim):
    _, out, _ = trainsim("show", "placement", "llama-3-8b-a100-h100")
    rows = [line for line in out.splitlines() if "NVIDIA DGX" in line]
    assert [row.split("  ")[0] for row in rows] == [
        "0 NVIDIA DGX A100 (80 GB)", "1 NVIDIA DGX A100 (80 GB)", "2 NVIDIA DGX H100",
        "3 NVIDIA DGX H100",
    ]  # fmt: skip


def test_memory_of_each_kind_is_shown(trainsim):
    code, out, _ = trainsim("show", "memory", "llama-3-8b-a100-h100")
    assert code == 0
    assert "device NVIDIA A100 SXM4 80 GB: allocated, context" in out
    assert "85.9 GB on each NVIDIA A100 SXM4 80 GB, 85.9 GB on each NVIDIA H100 SXM5 80 GB" in out
    assert "there is no pipeline, on the smallest kind of device" in out
