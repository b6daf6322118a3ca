"""Models that are lists of layers: what they compute, move and keep, by hand."""

import dataclasses

import pytest
from conftest import make_cluster

import simulator as sim
from simulator.describe.layer_list import Attention, LayerList, ListedLayer, Product
from simulator.describe.loader import load_model
from simulator.describe.plan import Plan
from simulator.describe.run import Run
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.lower.layers import blocks, model_flops_per_token, num_parameters
from simulator.lower.operators import Elements
from simulator.lower.shapes import Shapes

TEXT = """
name = "two"
model_type = "layers"

[[layers]]
name = "in"
parameters = 60
products = [{ m = 4, n = 5, k = 12, input_grad = false }]
kept = 48
output = 20

[[layers]]
name = "body"
repeat = 3
parameters = 25
products = [{ m = 4, n = 5, k = 5 }, { m = 4, n = 4, k = 5, weight = false, batch = 2 }]
kernels = 2
moved = 80
moved_once = 6
grad_kernels = 4
grad_moved = 120
kept = 40
kept_bytes = 7
output = 20
"""


def read(tmp_path, text=TEXT):
    path = tmp_path / "two.toml"
    path.write_text(text)
    return load_model(str(path))


def shapes(samples=2, attention="flash"):
    return Shapes(microbatch_size=samples, sequence_length=1, tp=1, attention=attention,
                  elements=Elements(2, 2, 4, "bf16"))  # fmt: skip


def kernels(parts):
    return [(k.matmul, k.flops, k.bytes, k.count) for k in parts]


def test_a_list_is_read_from_a_file(tmp_path):
    model = read(tmp_path)
    assert [layer.name for layer in model.layers] == ["in", "body"]
    assert model.num_hidden_layers == 4
    assert num_parameters(model) == 60 + 3 * 25


def test_a_product_with_a_weight_grows_in_rows_with_samples(tmp_path):
    first = blocks(read(tmp_path), shapes()).layers[0].operators[0]
    # 2 samples of 4 rows; bytes: 2 x (2 x (4 x 12 + 4 x 5) besides the weight + 12 x 5).
    assert kernels(first.forward) == [((1, 8, 5, 12), 960, 2 * (2 * 68 + 60), 1)]
    # its weight's gradient is added to fp32 ones, read and written; data needs no gradient
    assert kernels(first.weight_grad) == [((1, 12, 5, 8), 960, 2 * 2 * 68 + 2 * 4 * 60, 1)]
    assert first.input_grad == ()
    assert first.kept_bytes == 2 * 2 * 48


def test_a_product_without_a_weight_grows_in_batch_and_both_factors_have_gradients(tmp_path):
    body = blocks(read(tmp_path), shapes()).layers[1].operators[0]
    flops, moved = 2 * 4 * 4 * 4 * 5, 2 * 2 * 2 * (4 * 5 + 4 * 4 + 5 * 4)
    assert kernels(body.forward)[1] == ((4, 4, 4, 5), flops, moved, 1)
    assert kernels(body.input_grad)[1:3] == [
        ((4, 4, 5, 4), flops, moved, 1), ((4, 5, 4, 4), flops, moved, 1),
    ]  # fmt: skip
    assert len(body.weight_grad) == 1


def test_what_is_element_wise_is_shared_by_its_kernels(tmp_path):
    body = blocks(read(tmp_path), shapes()).layers[1].operators[0]
    moved = 2 * 80 + 6
    assert kernels(body.forward)[-1] == (None, moved / 4, 2 * moved / 2, 2)
    assert kernels(body.input_grad)[-1] == (None, 240 / 8, 2 * 240 / 4, 4)
    assert body.kept_bytes == 2 * (2 * 40 + 7)


def test_layers_that_repeat_are_one_block(tmp_path):
    parts = blocks(read(tmp_path), shapes())
    assert parts.kinds == (0, 1, 1, 1)


def test_attention_is_computed_as_the_run_says():
    layer = ListedLayer(
        name="attend", attention=(Attention(length=8, queries=2, keys=2, dim=4, causal=True),)
    )
    model = LayerList(name="a", model_type="layers", layers=(layer,))
    flash = blocks(model, shapes(1)).layers[0].operators
    assert [o.name for o in flash] == ["attend", "attention"]
    assert flash[1].model_flops == layer.flops == 4 * 2 * 8 * 8 * 4
    unfused = blocks(model, shapes(1, "unfused")).layers[0].operators
    assert "softmax" in [o.name for o in unfused]


def scenario(model, plan=None, run=None):
    plan, run = plan or {}, run or {}
    plain = {"global_batch_size": 8, "precision": "bf16", "optimizer": "adamw"}
    return Scenario(
        name="x",
        model=model,
        cluster=make_cluster(1, plan.get("pp", 1) * plan.get("tp", 1) * plan.get("dp", 1)),
        plan=Plan(**({"dp": 1, "microbatch_size": 2} | plan)),
        run=Run(**(plain | run)),
    )


def test_flops_of_a_sample_are_three_times_the_forward_products(tmp_path):
    s = scenario(read(tmp_path))
    # in: 2 x 4 x 5 x 12; body, three times: 2 x 4 x 5 x 5 and 2 x 2 x 4 x 4 x 5
    assert model_flops_per_token(s) == 3 * (480 + 3 * (200 + 320))


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1"])
def test_layers_that_hand_on_the_same_make_stages(tmp_path, schedule):
    s = scenario(read(tmp_path), {"pp": 2, "schedule": schedule})
    result = sim.simulate(s)
    assert result.stages == [[0], [1]]
    # 2 samples of 20 elements in bf16
    assert {u.payload_bytes for u in result.flows if u.operation == "send_recv"} == {80}
    assert "samples/s" in str(result)
    assert "global batch 8 samples" in str(result)


@pytest.mark.parametrize(
    ("plan", "run", "reason"),
    [
        ({"tp": 2}, {}, "a list of layers says not how they divide; set plan.tp = 1"),
        ({"recompute": "full"}, {}, 'says not what is computed again; set plan.recompute = "none"'),
        ({}, {"sequence_length": 8}, "with the sizes of its samples; leave it out"),
        ({}, {"image_size": 8}, "with the sizes of its samples; leave it out"),
        ({}, {"attention": "unfused"}, "has no effect on two, which has none"),
        ({}, {"precision": "fp8"}, "is not modelled of layers that are listed"),
        ({}, {"optimizer": "muon"}, "a list of layers says not which weights are some"),
        ({}, {"lora_rank": 4}, "and two is a list of layers; leave it out"),
    ],
)
def test_what_a_list_does_not_say_is_refused(tmp_path, plan, run, reason):
    with pytest.raises(DescriptionError) as error:
        scenario(read(tmp_path), plan, run)
    assert any(problem.endswith(reason) or reason in problem for problem in error.value.problems)


def test_stages_between_layers_that_hand_on_different_sizes_are_refused(tmp_path):
    model = read(tmp_path, TEXT.replace("output = 20", "output = 24", 1))
    assert scenario(model).model.outputs == (20, 24)
    with pytest.raises(DescriptionError, match="hand on from 20 to 24 elements a sample"):
        scenario(model, {"pp": 2})


def test_a_stage_needs_something_to_do_and_something_to_put_off(tmp_path):
    text = TEXT.replace('name = "in"\nparameters = 60\n', 'name = "in"\n')
    bare = text.replace("products = [{ m = 4, n = 5, k = 12, input_grad = false }]\n", "")
    with pytest.raises(DescriptionError, match="no layer of two on stage 0 computes anything"):
        scenario(read(tmp_path, bare), {"pp": 4})
    looks_up = bare.replace('name = "in"', 'name = "in"\nkernels = 1\ngrad_kernels = 1')
    assert scenario(read(tmp_path, looks_up), {"pp": 4}).plan.pp == 4
    with pytest.raises(DescriptionError, match=r"stage 0 \(in\) of two has no product with one"):
        scenario(read(tmp_path, looks_up), {"pp": 4, "schedule": "ZB-H1"})


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("m = 4, n = 5, k = 12", "m = 0, n = 5, k = 12", "m: 0 must be at least 1"),
        ("kernels = 2\n", "", "moves elements outside of products, but has no kernels that do"),
        (
            "products = [{ m = 4, n = 5, k = 12, input_grad = false }]\n",
            "",
            "in has 60 parameters, but neither products nor kernels that use them",
        ),
        ("repeat = 3", "repeats = 3", "unknown key 'repeats', did you mean 'repeat'"),
    ],
)
def test_a_list_that_is_wrong_is_refused_with_its_place(tmp_path, old, new, reason):
    with pytest.raises(DescriptionError, match=reason):
        read(tmp_path, TEXT.replace(old, new, 1))


def test_layers_without_parameters_gather_nothing(tmp_path):
    text = TEXT + '\n[[layers]]\nname = "relu"\nkernels = 1\nmoved = 40\noutput = 20\n'
    s = scenario(read(tmp_path, text), {"dp": 4, "zero": 3, "dp_shard": 4})
    gathers = [u for u in sim.simulate(s).flows if u.operation == "all_gather"]
    # forward and backward of four layers with weights, 60 and three times 25 in bf16
    assert {(u.payload_bytes, u.calls) for u in gathers} == {(120.0, 2), (50.0, 6)}


def test_a_list_of_no_layers_is_refused():
    with pytest.raises(DescriptionError, match="lists no layer"):
        LayerList(name="x", model_type="layers", layers=())


def test_a_product_moves_what_it_is_said_to():
    plain = Product(m=4, n=5, k=12)
    layer = ListedLayer(name="x", products=(dataclasses.replace(plain, moved=30),))
    model = LayerList(name="x", model_type="layers", layers=(layer,))
    (kernel,) = blocks(model, shapes(2)).layers[0].operators[0].forward
    assert kernel.bytes == 2 * (2 * 30 + 60)
