"""Descriptions: what a file means, and what is said when it is wrong."""

import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest

import simulator as sim
from simulator.describe import catalog
from simulator.describe.cluster import Cluster
from simulator.describe.fields import complaint, rules
from simulator.describe.loader import parse_override, scenario
from simulator.describe.model import Model
from simulator.describe.network import Network
from simulator.describe.plan import Plan
from simulator.describe.run import Run
from simulator.errors import DescriptionError


def table(**parts):
    whole = {
        "model": "gpt2-xl",
        "cluster": {"node": "dgx-a100", "devices_per_node": 4},
        "plan": {"pp": 4, "microbatch_size": 4},
        "run": {"global_batch_size": 64, "sequence_length": 1024},
    }
    for name, values in parts.items():
        known = whole[name]
        both = isinstance(values, dict) and isinstance(known, dict)
        whole[name] = {**known, **values} if both else values
    return whole


def read(**parts):
    return scenario(table(**parts), Path("run.toml"))


def problems(**parts):
    with pytest.raises(DescriptionError) as caught:
        read(**parts)
    return caught.value.problems


@pytest.mark.parametrize("name", catalog.names("scenarios"))
def test_every_shipped_scenario_loads(name):
    assert sim.load(name).name


def run_on(name):
    # a V100 has no rate for bf16, a TPU, Gaudi or Trainium none for fp16
    return {"precision": "fp16" if "v100" in name else "bf16"}


@pytest.mark.parametrize("name", catalog.names("devices"))
def test_every_shipped_device_says_where_its_facts_come_from(name):
    node = {"from": "dgx-a100", "device": name}
    device = read(cluster={"node": node}, run=run_on(name)).cluster.node.device
    assert all(source.url.startswith("https://") for source in device.sources)
    assert device.sources


@pytest.mark.parametrize("name", catalog.names("nodes"))
def test_every_shipped_node_says_where_its_facts_come_from(name):
    assert read(cluster={"node": name}, run=run_on(name)).cluster.node.sources


def test_quantities_become_si_units():
    node = read().cluster.node
    assert node.nic.bandwidth == 200e9 / 8
    assert node.device.memory == 80 * 2**30


def test_a_plan_without_dp_fills_the_cluster():
    assert read(cluster={"node": "dgx-a100", "num_nodes": 4, "devices_per_node": 8}).plan.dp == 8


def test_the_microbatches_follow_from_the_batch():
    # 64 samples / (microbatches of 4 x dp 1) = 16
    assert read().num_microbatches == 16


def test_a_remainder_of_layers_goes_to_the_first_stages():
    # 48 layers on 5 stages: 9 each and 3 over
    s = read(plan={"pp": 5}, cluster={"devices_per_node": 5})
    assert s.layers_per_stage == (10, 10, 10, 9, 9)


def test_layers_of_stages_can_be_said():
    assert read(plan={"layers_per_stage": [11, 12, 13, 12]}).layers_per_stage == (11, 12, 13, 12)


def test_facts_of_a_named_file_can_be_changed():
    node = {"from": "dgx-a100", "num_devices": 16, "link": {"bandwidth": "600 GB/s"}}
    changed = read(cluster={"node": node}).cluster.node
    assert changed.num_devices == 16
    assert changed.link.bandwidth == 600e9
    assert changed.link.latency == read().cluster.node.link.latency


def test_a_model_can_be_a_file_beside_the_scenario(tmp_path):
    (tmp_path / "config.json").write_text(
        (catalog.root() / "workloads/models/gpt2.json").read_text()
    )
    s = scenario(table(model="./config.json", plan={"pp": 4}), tmp_path / "run.toml")
    assert s.model.hidden_size == 768


def test_a_model_can_be_a_table_of_its_own():
    s = read(model={"from": "gpt2-xl", "num_hidden_layers": 8})
    assert s.model.num_hidden_layers == 8


def test_overrides_reach_into_named_files(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text((catalog.root() / "workloads/gpt2-xl-1f1b.toml").read_text())
    s = sim.load(path, {"cluster.node.nic.bandwidth": "800 Gb/s", "plan.pp": 2, "plan.dp": 2})
    assert s.cluster.node.nic.bandwidth == 100e9
    assert (s.plan.pp, s.plan.dp) == (2, 2)


@pytest.mark.parametrize(
    ("text", "value"),
    [("a.b=4", 4), ("a.b=[1, 2]", [1, 2]), ("a.b=1F1B", "1F1B"), ('a.b="x"', "x")],
)
def test_an_override_is_toml_or_bare_text(text, value):
    assert parse_override(text) == ("a.b", value)


def test_all_problems_are_reported_at_once():
    found = problems(
        plan={"microbatch_size": 0, "tpp": 2}, run={"sequence_length": "long"}, model="gpt9"
    )
    assert len(found) == 4


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({"plan": {"tpp": 4}}, "[plan]: unknown key 'tpp', did you mean 'tp'?"),
        ({"plan": {"microbatch_size": 0}}, "[plan]: microbatch_size: 0 must be at least 1"),
        ({"plan": {"bucket_size": 25}}, "bucket_size: 25 has no unit; write for example '80 GB'"),
        ({"plan": {"bucket_size": "-1 MB"}}, "bucket_size: -1e+06 bytes must be above 0"),
        ({"plan": {"pp": True}}, "pp: True is not a whole number"),
        (
            {"plan": {"schedule": "1f1"}},
            "did you mean '1F1B'?; a file of lists ends in .csv",
        ),
        ({"plan": {"order": ["dp", "pp", "pp"]}}, "must name each of dp, pp, cp, tp once"),
        ({"plan": {"layers_per_stage": [24, 24]}}, "lists 2 stages but pp is 4"),
        ({"plan": {"layers_per_stage": [12, 12, 12, 13]}}, "sums to 49, but gpt2-xl has 48 layers"),
        (
            {"plan": {"dp": 2}},
            "= 8 ranks, but the cluster has 1 x 4 = 4 devices; plan.dp = 1 would",
        ),
        (
            {"run": {"global_batch_size": 65}},
            "65 is not a multiple of plan.microbatch_size 4 x plan.dp 1",
        ),
        ({"run": {"sequence_length": 2048}}, "2048 is more than the 1024 positions"),
        ({"run": {"precision": "bf61"}}, "did you mean 'bf16'?"),
        (
            {"model": "gpt2-xxl"},
            "'gpt2-xxl' is not in the catalogue of models, did you mean 'gpt2-xl'?",
        ),
        ({"model": "./none.json"}, "no file './none.json'"),
        ({"model": 3}, "[model]: 3 is not a table or a name"),
        ({"cluster": {"devices_per_node": 9}}, "9 is more than the 8 devices"),
        ({"cluster": {"node": "dgx-v100"}}, "did you mean 'dgx-1-v100'?"),
        ({"cluster": 4}, "[cluster]: 4 is not a table"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(parts, sentence):
    assert any(sentence in problem for problem in problems(**parts)), problems(**parts)


def test_tensor_parallelism_must_divide_the_heads():
    found = problems(plan={"tp": 3, "pp": 1}, cluster={"devices_per_node": 3})
    assert "plan.tp 3 does not divide num_attention_heads 25" in found[0]
    assert "legal degrees are 1, 5, 25" in found[0]


def test_a_device_without_the_precision_is_refused():
    found = problems(cluster={"node": "dgx-1-v100"})
    assert "has no rate for it; it has fp32, fp16" in found[0]


def test_a_negative_bandwidth_is_refused():
    node = {"from": "dgx-a100", "link": {"bandwidth": "-3 GB/s"}}
    assert "bandwidth: -3e+09 bytes/s must be above 0" in problems(cluster={"node": node})[0]


def test_an_unknown_precision_of_a_device_is_refused():
    node = {"from": "dgx-a100", "device": {"peak": {"bf61": "1 TFLOP/s"}}}
    assert "unknown precision 'bf61', did you mean 'bf16'?" in problems(cluster={"node": node})[0]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "rwkv"}, "model_type 'rwkv' is not supported; supported are gpt2, llama,"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"n_layer": None}, "key 'n_layer' is missing"),
        ({"n_layer": -4}, "n_layer -4 must be a whole number of at least 1"),
        ({"n_head": 23}, "n_head 23 does not divide n_embd 1600"),
        ({"activation_function": "gelux"}, "activation_function 'gelux' is not one of"),
        ({"activation_function": ["gelu"]}, "is not one of gelu"),
        ({"resid_pdrop": "x"}, "resid_pdrop 'x' must be a number from 0 to 1"),
        ({"attn_pdrop": True}, "attn_pdrop True must be a number from 0 to 1"),
        ({"embd_pdrop": -0.1}, "embd_pdrop -0.1 must be a number from 0 to 1"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings 'yes' must be true or false"),
        ({"add_cross_attention": True}, "an encoder beside the decoder is not modelled"),
    ],
)
def test_a_wrong_config_json_is_refused(change, sentence, tmp_path):
    import json

    config = json.loads((catalog.root() / "workloads/models/gpt2-xl.json").read_text()) | change
    (tmp_path / "mine.json").write_text(json.dumps(config))
    with pytest.raises(DescriptionError, match=sentence):
        scenario(table(model="./mine.json"), tmp_path / "run.toml")


def test_a_python_description_is_held_to_the_same_rules():
    with pytest.raises(DescriptionError, match=r"Plan.tp: 0 must be at least 1"):
        sim.Plan(tp=0)


def test_a_config_without_width_is_not_blamed_for_its_heads(tmp_path):
    (tmp_path / "m.json").write_text('{"model_type": "gpt2", "n_head": 12}')
    with pytest.raises(DescriptionError) as caught:
        scenario(table(model="./m.json"), tmp_path / "run.toml")
    assert "does not divide" not in str(caught.value)


def test_a_key_that_is_twice_in_json_is_refused(tmp_path):
    (tmp_path / "m.json").write_text('{"model_type": "gpt2", "n_head": 12, "n_head": 6}')
    with pytest.raises(DescriptionError, match="key 'n_head' is there twice"):
        scenario(table(model="./m.json"), tmp_path / "run.toml")


def test_the_decoder_of_a_multimodal_config_is_read(tmp_path):
    import json

    inner = json.loads((catalog.root() / "workloads/models/llama-3-8b.json").read_text())
    (tmp_path / "m.json").write_text(json.dumps({"model_type": "vision", "text_config": inner}))
    s = scenario(table(model="./m.json", plan={"pp": 4}), tmp_path / "run.toml")
    assert s.model.hidden_size == 4096


def test_a_changed_node_finds_its_device_beside_its_own_file(tmp_path):
    node, devices = tmp_path / "nodes", tmp_path / "devices"
    node.mkdir()
    devices.mkdir()
    root = catalog.root() / "topologies"
    text = (root / "nodes/dgx-a100.toml").read_text()
    (node / "mine.toml").write_text(text.replace('"a100-sxm4-80gb"', '"../devices/mine.toml"'))
    (devices / "mine.toml").write_text((root / "devices/a100-sxm4-80gb.toml").read_text())
    changed = {"from": "nodes/mine.toml", "num_devices": 4}
    s = scenario(table(cluster={"node": changed}), tmp_path / "run.toml")
    assert s.cluster.node.num_devices == 4


def test_a_device_states_the_rate_of_element_wise_work():
    node = {"from": "dgx-a100"}
    s = read(cluster={"node": node})
    device = s.cluster.node.device
    with pytest.raises(DescriptionError, match="fp32 is missing"):
        replace(device, peak={"bf16": 1e12})


def test_a_part_of_the_wrong_kind_is_refused():
    device = read().cluster.node.device
    with pytest.raises(DescriptionError, match=r"Cluster.node: .* is not a Node"):
        sim.Cluster(node=device)


def test_a_list_stands_for_a_tuple():
    assert sim.Plan(pp=2, layers_per_stage=[3, 3]).layers_per_stage == (3, 3)


def test_a_file_with_a_byte_order_mark_is_read(tmp_path):
    path = tmp_path / "run.toml"
    text = (catalog.root() / "workloads/gpt2-xl-1f1b.toml").read_text()
    path.write_text("\ufeff" + text, encoding="utf-8")
    assert sim.load(path).plan.pp == 4


@pytest.mark.parametrize("name", ["x" * 300 + ".toml", "~nobodyxyz/x.toml"])
def test_a_path_that_cannot_be_is_refused(name):
    with pytest.raises(DescriptionError, match="cannot be read"):
        sim.load(name)


def test_a_model_is_no_scenario():
    path = catalog.root() / "workloads/models/gpt2.json"
    with pytest.raises(DescriptionError, match="a scenario is a TOML file"):
        sim.load(path)


def test_a_sequence_longer_than_the_window_of_attention_is_refused():
    with pytest.raises(DescriptionError, match="8192 is more than the 4096 tokens back to which"):
        read(model="mistral-7b", run={"sequence_length": 8192})


@pytest.mark.parametrize("described", [Model, Cluster, Network, Plan, Run])
def test_every_default_is_legal(described):
    for name, rule in rules(described).items():
        if not (rule.required or rule.default is dataclasses.MISSING or rule.default is None):
            assert complaint(rule.default, rule.base, rule.markers) is None, name
