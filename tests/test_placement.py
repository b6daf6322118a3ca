"""Placement: which device each rank runs on, and what that costs."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import simulator as sim
from simulator.cli import cli
from simulator.describe.loader import parse_override
from simulator.describe.network import Network
from simulator.describe.plan import Plan
from simulator.engine import ENGINES
from simulator.errors import DescriptionError
from simulator.hardware.fabric import build
from simulator.hardware.patterns import PATTERNS, layout
from simulator.hardware.placement import devices, spans
from simulator.lower.mesh import Mesh
from simulator.report.fabric_layout import lay_out
from simulator.report.network_plots import device_tints, fabric_figure
from simulator.report.placement import placement_dict, placement_text
from simulator.report.summary import assumptions

NETWORKS = ("alpha-beta", "fluid")
CYCLIC = Path(__file__).parent / "golden" / "placement_cyclic.txt"


@pytest.fixture
def placed(scenario_of, cluster_of):
    """Return a tiny scenario on 2 nodes, placed; dp 2 x pp 2 x tp 2 unless stated."""

    def made(placement="block", network="alpha-beta", cluster=None, **plan):
        plan = {"dp": 2, "pp": 2, "tp": 2, **plan, "placement": placement}
        degrees = plan["dp"] * plan["pp"] * plan["tp"]
        cluster = cluster or cluster_of(num_nodes=2, devices=degrees // 2)
        return scenario_of(cluster=cluster, plan=plan, run={"network": network})

    return made


def span_ticks(result):
    return result.timeline.start.tolist(), result.timeline.end.tolist()


def test_block_puts_rank_r_on_device_r(placed):
    s = placed()
    assert devices(s.plan, s.cluster).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


# 2 nodes of 4: even ranks on devices 0 to 3 of node 0, odd ones on 4 to 7.
def test_cyclic_deals_ranks_to_nodes_in_turn(placed):
    s = placed("cyclic")
    assert devices(s.plan, s.cluster).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_cyclic_counts_the_devices_in_use_only(placed, cluster_of):
    s = placed("cyclic", cluster=replace(cluster_of(num_nodes=4), devices_per_node=2))
    assert devices(s.plan, s.cluster).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def test_a_list_of_an_override_is_the_device_of_each_rank():
    places = dict([parse_override("plan.placement=[1, 0, 3, 2]")])
    assert sim.load("gpt2-xl-1f1b", places).plan.placement == (1, 0, 3, 2)


def test_a_name_of_an_override_is_read():
    places = dict([parse_override("plan.placement=cyclic")])
    assert sim.load("gpt2-xl-1f1b", places).plan.placement == "cyclic"


REFUSALS = {
    "repeated": ([0, 1, 1, 3], "plan.placement: ranks 1 and 2 are both on device 1"),
    "beyond the last": ([0, 1, 4, 3], "plan.placement: rank 2 is on device 4"),
    "too long": ([0, 1, 2, 3, 0], "plan.placement: ranks 0 and 4 are both on device 0"),
    "too short": ([0, 2, 3], "plan.placement: no rank is on device 1"),
    "empty": ([], "plan.placement: no rank is on device 0"),
}


@pytest.mark.parametrize(("places", "why"), REFUSALS.values(), ids=REFUSALS)
def test_a_list_that_is_no_permutation_is_refused_in_one_sentence(places, why):
    with pytest.raises(DescriptionError) as caught:
        sim.load("gpt2-xl-1f1b", {"plan.placement": places})
    (problem,) = caught.value.problems
    assert problem.endswith(f"{why}; each of the devices 0 to 3 must be there once")


BAD_VALUES = {
    "misspelt": ("cyclc", "'cyclc' is not one of block, cyclic, did you mean 'cyclic'?"),
    "negative": ([0, -1, 2, 3], "-1 must be at least 0"),
    "a fraction": ([0, 1.5, 2, 3], "1.5 is not a whole number"),
    "one number": (3, "3 is not a list"),
    "an array": (np.arange(4), "array([0, 1, 2, 3]) is not a list"),
}


@pytest.mark.parametrize(("value", "why"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_a_value_that_is_no_placement_is_refused(value, why):
    with pytest.raises(DescriptionError) as caught:
        Plan(placement=value)
    assert str(caught.value) == f"Plan.placement: {why}"


# An all-reduce of S bytes over 2 ranks by a ring takes 2 rounds of S/2 at the rate of the link
# between them: S / 1e5 inside a node, S / 1e4 through an adapter each between nodes, 10 times as
# long. S is 2 bytes x 32 tokens x 64 = 4096: 41 ms beside latencies below 0.1 ms. Those of tp do
# not overlap computation, so what the breakdown counts as exposed is their sum.
@pytest.mark.parametrize(("adapters", "ratio"), [(2, 10.0), (1, 20.0)])
@pytest.mark.parametrize("network", NETWORKS)
def test_a_tp_group_across_nodes_pays_the_ratio_of_the_links(
    placed, cluster_of, network, adapters, ratio
):
    slow = {"bandwidth": 1e5, "pair_bandwidth": 1e5}
    cluster = cluster_of(2, 2, link=slow, nic={"bandwidth": 1e4, "count": adapters})
    cluster = replace(cluster, nccl_algorithm="RING", nccl_protocol="SIMPLE")

    def exposed(placement):
        s = placed(placement, network, cluster, pp=1)
        return sim.simulate(s).summary.exposed_communication_s["tp"]

    # One adapter of a node carries both groups: each has half of it, in the closed form by its
    # even share and in the fluid network because both are under way at once.
    assert exposed([0, 2, 1, 3]) / exposed("block") == pytest.approx(ratio, rel=0.01)


@pytest.mark.parametrize("network", NETWORKS)
def test_the_identity_is_the_default_to_the_tick(placed, network):
    default, listed = (sim.simulate(placed(p, network)) for p in ("block", list(range(8))))
    assert span_ticks(listed) == span_ticks(default)


# What docs/network.md says: 2.5 s for 1.3 s, all of it tensor-parallel groups over four nodes.
def test_cyclic_nearly_doubles_the_step_of_a_plan_that_wants_tp_in_a_node():
    block, cyclic = (
        sim.simulate(sim.load("llama-3-8b-3d", {"plan.placement": placement})).step_time_s
        for placement in ("block", "cyclic")
    )
    assert 1.8 < cyclic / block < 2.1


# Rank r of one order is, by its coordinates, rank r' of the other; on device r' it is there.
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("order", [("tp", "pp", "dp"), ("pp", "dp", "tp"), ("dp", "tp", "pp")])
def test_a_placement_that_imitates_an_order_of_axes_takes_its_step(placed, network, order):
    imitated = placed(network=network, order=order)
    at = Mesh.of(Plan()).of(placed().plan).coordinates(np.arange(8))
    places = Mesh.of(imitated.plan).rank(**at).tolist()
    assert places != list(range(8))
    times = [sim.simulate(s).step_time_s for s in (imitated, placed(places, network))]
    assert times[0] == times[1]


@settings(max_examples=12, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("network", NETWORKS)
def test_engines_agree_on_any_placement(scenario_of, cluster_of, network, data):
    places = data.draw(st.permutations(range(8)))
    plan = {"dp": 2, "pp": 2, "tp": 2, "placement": places}
    s = scenario_of(cluster=cluster_of(2, 4), plan=plan, batch=4, run={"network": network})
    first, *others = (span_ticks(sim.simulate(s, engine=engine)) for engine in ENGINES)
    assert all(other == first for other in others)


# tp groups {0,1}, {2,3} of the first replica lie on one node each, those of the second across:
# dp must not be folded.
def test_replicas_that_lie_otherwise_are_not_folded(placed):
    s = placed([0, 1, 4, 5, 2, 6, 3, 7])
    folded = sim.simulate(s)
    assert not any("dp" in note for note in folded.notes if note.startswith("folded"))
    assert span_ticks(folded) == span_ticks(sim.simulate(s, folded=False))


def test_replicas_that_lie_alike_are_folded(placed):
    assert any("folded dp 2 -> 1" in note for note in sim.simulate(placed("cyclic")).notes)


# dp pairs 0 and 4, 1 and 5, ...: cyclic puts each on one node, where a server's push is quick.
def test_parameter_servers_pay_for_where_their_ranks_lie(placed):
    def exposed(placement):
        s = placed(placement, pp=1, dp=4, gradient_exchange="parameter_server")
        return sim.simulate(s).summary.exposed_communication_s["dp"]

    assert exposed("cyclic") < exposed("block")


# Nodes 0 and 1 hold ranks 1, 3 and 0, 2: rank 0 comes first, so node 1 does; on it device 4 does.
def test_rings_go_through_nodes_in_the_order_of_their_first_ranks():
    at = layout(np.arange(4), 4, np.array([5, 1, 4, 0]))
    assert at.by_node.tolist() == [[2, 0], [3, 1]]


def test_the_first_rank_is_the_server_wherever_it_lies():
    at = layout(np.arange(4), 2, np.array([3, 0, 1, 2]))
    messages = PATTERNS["PARAMETER_SERVER"](at, 1)
    assert np.bincount(messages.source, weights=messages.share).tolist() == [3, 1, 1, 1]


# 3 ranks on node 0 and 1 on node 1: each counts as a node, and those of one node stand together.
def test_ranks_of_an_uneven_group_stand_together_by_node():
    at = layout(np.arange(4), 4, np.array([0, 4, 1, 2]))
    assert at.by_node.tolist() == [[0], [2], [3], [1]]


def test_routes_depend_on_devices_not_on_the_names_of_ranks(cluster_of):
    network = Network(layout="fat-tree", radix=4, routing="ecmp")
    cluster = replace(cluster_of(8, 2, nic={"count": 2}), network=network)
    order = np.random.default_rng(3).permutation(16)
    plain, moved = build(cluster), build(cluster, order)
    for a, b in ((0, 15), (3, 9), (6, 1)):
        assert (moved.route(a, b).links == plain.route(order[a], order[b]).links).all()


# Of the 4 tp groups the first two lie on a node each, the last two on two.
def test_spans_say_over_how_many_nodes_groups_lie(placed):
    found = {span.axis: span for span in spans(placed([0, 1, 4, 5, 2, 6, 3, 7]))}
    assert (found["tp"].groups, found["tp"].fewest, found["tp"].most) == (4, 1, 2)


def test_groups_that_lie_unevenly_are_an_assumption(placed):
    # tp groups 0-3 and 4-7: three ranks on one node, one on the other
    uneven = placed([0, 1, 2, 4, 3, 5, 6, 7], dp=1, pp=2, tp=4)
    said = "groups with more ranks on one node than on another"
    assert any(line.startswith(said) for line in assumptions(uneven))
    assert not any(line.startswith(said) for line in assumptions(placed("cyclic")))


def test_the_report_names_a_placement_that_is_not_the_default(placed):
    assert "recompute none, placement cyclic" in str(sim.simulate(placed("cyclic")))
    assert "placement" not in str(sim.simulate(placed()))


def test_a_placement_is_printed_as_the_golden_text(placed):
    assert placement_text(placed("cyclic")) == CYCLIC.read_text(encoding="utf-8").rstrip("\n")


# 18 nodes of 20 devices: 16 of each are listed.
def test_what_a_long_listing_leaves_out_is_counted(placed, cluster_of):
    text = placement_text(placed(cluster=cluster_of(18, 20), dp=90, tp=4, pp=1))
    assert "\n... and 2 nodes more and 4 devices of each node more\n" in text
    assert len(text.splitlines()) == 1 + 1 + 16 + 1 + 1 + 3


def test_one_rank_has_a_placement_and_no_groups(placed, cluster_of):
    text = placement_text(placed(cluster=cluster_of(1, 1), dp=1, tp=1, pp=1))
    assert text.splitlines()[1:] == ["node     gpu 0", "0     0:d0p0t0"]


def test_the_command_line_prints_a_placement(capsys):
    arguments = ["show", "placement", "gpt2-xl-1f1b", "--set", "plan.placement=cyclic"]
    cli.main(arguments, standalone_mode=False)
    assert capsys.readouterr().out.startswith("placement cyclic (rank:dp,pp,tp; axes dp > pp > tp)")


def test_the_command_line_writes_a_placement_as_json(capsys):
    places = ["--set", "plan.placement=[3,2,1,0]", "--json", "-"]
    cli.main(["show", "placement", "gpt2-xl-1f1b", *places], standalone_mode=False)
    document = json.loads(capsys.readouterr().out)
    assert document["placement"] == "listed"
    assert document["ranks"]["device"] == [3, 2, 1, 0]
    assert document["ranks"]["pp"] == [0, 1, 2, 3]


def test_json_says_node_and_device_of_each_rank(placed):
    ranks = placement_dict(placed("cyclic"))["ranks"]
    assert ranks["node"] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert ranks["device"] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_trace_names_the_device_of_a_rank(placed, tmp_path):
    sim.simulate(placed("cyclic")).save_trace(tmp_path / "t.json")
    assert "rank 3 · node 1 gpu 1 ·" in (tmp_path / "t.json").read_text(encoding="utf-8")


def drawn(s):
    fabric = build(s.cluster, devices(s.plan, s.cluster))
    return lay_out(fabric, fabric.graph())


def test_drawn_devices_bear_the_ranks_on_them(placed):
    boxes = drawn(placed("cyclic")).boxes
    labels = [boxes[f"node1/gpu{i}"].label for i in range(4)]
    assert labels == ["1", "3", "5", "7"]


def test_ranks_of_a_tp_group_are_drawn_in_one_colour(placed):
    s = placed("cyclic")
    what, tints = device_tints(s, drawn(s))
    assert what == "tp group"
    assert all(tints[f"node0/gpu{i}"] == tints[f"node1/gpu{i}"] for i in range(4))
    assert len(set(tints.values())) == 4


# 16 tp groups are more than there are colours; 2 stages are not.
def test_stages_have_the_colours_where_groups_are_too_many(placed):
    s = placed(dp=8)
    what, tints = device_tints(s, drawn(s))
    assert what == "stage"
    assert len(set(tints.values())) == 2


def test_a_plan_of_replicas_alone_has_no_colours(placed):
    s = placed(dp=8, pp=1, tp=1)
    assert device_tints(s, drawn(s)) == ("", {})


def test_a_figure_says_what_the_colours_of_devices_are(placed):
    texts = [text.get_text() for text in fabric_figure(placed("cyclic")).texts]
    words = " ".join(texts).replace("\n", " ")
    assert "placement cyclic; numbers in devices are ranks, a colour for each tp group" in words


def test_the_command_line_draws_a_topology_without_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr("simulator.api.simulate", None)  # a call would be a TypeError
    file = tmp_path / "fabric.png"
    cli.main(["show", "topology", "gpt2-xl-1f1b", "--plot", str(file)], standalone_mode=False)
    assert file.stat().st_size > 0
