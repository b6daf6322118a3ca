"""Residual networks: parameters, products, bytes, activations, and steps in images."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from test_scenario_parity import alike_however_it_runs

import simulator as sim
from simulator.describe.huggingface import read_config
from simulator.describe.loader import scenario
from simulator.describe.resnet import ResNet
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.lower import lower
from simulator.lower.convolution import Maps, batch_norm, below, convolution, max_pool, relu
from simulator.lower.layers import (
    Blocks,
    blocks,
    model_flops_per_token,
    num_parameters,
    recomputed_flops_per_token,
    shapes,
)
from simulator.lower.memory import static_memory
from simulator.lower.operators import Elements
from simulator.program import Flow, Kernel, Work

HALF, FULL = Elements(2, 2, 2, "bf16", "none"), Elements(4, 4, 4, "fp32", "none")
FIFTY: dict[str, Any] = {
    "model_type": "resnet", "num_channels": 3, "embedding_size": 64,
    "hidden_sizes": [256, 512, 1024, 2048], "depths": [3, 4, 6, 3], "layer_type": "bottleneck",
    "num_labels": 1000,
}  # fmt: skip
BASIC = {"hidden_sizes": [64, 128, 256, 512], "layer_type": "basic"}


def network(**changes: Any) -> ResNet:
    return ResNet(name="network", **{**FIFTY, **changes})


def trained(run: dict[str, Any] | None = None, **plan: Any) -> Scenario:
    """Return ResNet-50 on one DGX A100, 32 images a GPU."""
    table = {
        "model": "resnet-50",
        "cluster": {"node": "dgx-a100"},
        "plan": {"dp": 8, "microbatch_size": 32, **plan},
        "run": {"global_batch_size": 256, "image_size": 224, "precision": "fp32",
                "optimizer": "momentum", **(run or {})},
    }  # fmt: skip
    return scenario(table, Path("test.toml"))


def parts(s: Scenario) -> Blocks:
    return blocks(s.model, shapes(s))


# A bottleneck of m channels inside has in*m + 9m^2 + m*out weights, 2(m + m + out) of its norms,
# and in*out + 2*out of its shortcut where sizes change.
#   stem 3*49*64 + 128 = 9 536
#   m 64:  58 112 + 16 896 = 75 008;         2 x 70 400    -> 215 808
#   m 128: 247 296 + 132 096 = 379 392;      3 x 280 064   -> 1 219 584
#   m 256: 986 112 + 526 336 = 1 512 448;    5 x 1 117 184 -> 7 098 368
#   m 512: 3 938 304 + 2 101 248 = 6 039 552; 2 x 4 462 592 -> 14 964 736
#   fully connected 2048*1000 + 1000 = 2 049 000
def test_resnet_50_has_25_557_032_parameters() -> None:
    assert 9_536 + 215_808 + 1_219_584 + 7_098_368 + 14_964_736 + 2_049_000 == 25_557_032
    assert num_parameters(trained().model) == 25_557_032


# torchvision's counts of the same networks.
@pytest.mark.parametrize(
    ("changes", "parameters"),
    [
        ({**BASIC, "depths": [2, 2, 2, 2]}, 11_689_512),
        ({**BASIC, "depths": [3, 4, 6, 3]}, 21_797_672),
        ({"depths": [3, 4, 23, 3]}, 44_549_160),
        ({"depths": [3, 8, 36, 3]}, 60_192_808),
    ],
)
def test_other_depths_have_the_parameters_that_are_published(
    changes: dict[str, Any], parameters: int
) -> None:
    assert num_parameters(network(**changes)) == parameters


# Multiply-adds of an image of 224: positions x weights.
#   stem 112^2 * 9 408 = 118 013 952
#   56^2: 3136 * (73 728 + 2 * 69 632) = 667 942 912
#   28^2: 3136 * 32 768 + 784 * 344 064 + 3 * 784 * 278 528 = 1 027 604 480
#   14^2: 784 * 131 072 + 196 * 1 376 256 + 5 * 196 * 1 114 112 = 1 464 336 384
#   7^2:  196 * 524 288 + 49 * 5 505 024 + 2 * 49 * 4 456 448 = 809 238 528
#   fully connected 2 048 000
def test_an_image_takes_4_09_billion_multiply_adds_forward() -> None:
    forward = 118_013_952 + 667_942_912 + 1_027_604_480 + 1_464_336_384 + 809_238_528 + 2_048_000
    assert forward == 4_089_184_256
    assert model_flops_per_token(trained()) == 3 * 2 * forward


# Version 1, which halves in the first convolution of a bottleneck, has 3.86 billion: conv1 of the
# three blocks at a quarter of the positions, and conv2 as it was: 3 * 102 760 448 * 3/4 less.
def test_halving_in_the_first_convolution_saves_a_twentieth() -> None:
    later = parts(trained())
    sooner = blocks(network(downsample_in_bottleneck=True), shapes(trained()))
    saved = sum(b.model_flops for b in later.layers) - sum(b.model_flops for b in sooner.layers)
    assert saved == 32 * 2 * 3 * 102_760_448 * 3 // 4


# Batch 32 in fp32. conv1's result, 112 x 112 x 64 x 32 x 4 = 102 760 448 bytes (98 MiB), is there
# twice: before its norm, and after the ReLU. With the images 224 x 224 x 3 x 32 x 4 = 19 267 584
# and 8 bytes for each of 56 x 56 x 64 x 32 places of maxima, 51 380 224: 276 168 704.
def test_the_stem_keeps_images_its_result_twice_and_the_places_of_maxima() -> None:
    stem = {o.name: o.kept_bytes for o in parts(trained()).embedding.operators}
    assert stem == {
        "stem": 19_267_584, "stem norm": 102_760_448, "stem relu": 0,
        "max pool": 102_760_448 + 51_380_224,
    }  # fmt: skip


# Channels kept at a position: the block's input; conv1's and conv2's results before and after norm
# and ReLU; conv3's; the shortcut's, where there is one. 128 bytes: 32 images in fp32.
#   56^2: 64 + 2*64 + 2*64 + 256 + 256 = 832; 256 + 128 + 128 + 256 = 768
#   28^2: (256 + 2*128) at 56^2, 2*128 + 512 + 512 = 1280; 512 + 256 + 256 + 512 = 1536
#   14^2: (512 + 2*256) at 28^2, 2*256 + 1024 + 1024 = 2560; 3072
#   7^2:  (1024 + 2*512) at 14^2, 2*512 + 2048 + 2048 = 5120; 6144
def test_batch_32_activations_by_layer() -> None:
    kept = [block.kept_bytes for block in parts(trained()).layers]
    assert kept == [
        128 * 3136 * 832, *[128 * 3136 * 768] * 2,
        128 * (3136 * 512 + 784 * 1280), *[128 * 784 * 1536] * 3,
        128 * (784 * 1024 + 196 * 2560), *[128 * 196 * 3072] * 5,
        128 * (196 * 2048 + 49 * 5120), *[128 * 49 * 6144] * 2,
    ]  # fmt: skip


# Stem 276 168 704, blocks 128 * 19 217 408 = 2 459 828 224, and of the head the last map and its
# averages, 128 * (49 + 1) * 2048, with the loss's 4 * 32 * 1000: 13 235 200.
def test_batch_32_keeps_2_75_gigabytes_in_all() -> None:
    result = sim.simulate(trained())
    assert 276_168_704 + 2_459_828_224 + 13_235_200 == 2_749_232_128
    assert result.activations.peak.tolist() == [2_749_232_128.0] * 8


# Most is alive in backward, as the last pool reads the gradient of its averages and writes that of
# the map, 4 * 32 * 2048 * (1 + 49) = 13 107 200 bytes. Gone are the loss's 4 * 32 * 1000 and the
# input of the fully connected layer, 4 * 32 * 2048. The ReLU before it needs a little less: two
# maps, 25 690 112, beside which all of the head is gone, 13 235 200.
@pytest.mark.parametrize("detail", ["kernel", "layer", "stage"])
def test_memory_is_fullest_where_the_last_pool_runs_backward(detail: str) -> None:
    result = sim.simulate(trained({"detail": detail}))
    assert 25_690_112 - 13_235_200 < 13_107_200 - 128_000 - 262_144
    peak = 2_749_232_128 - 128_000 - 262_144 + 13_107_200
    assert result.memory.peak.tolist() == [float(peak)] * 8


# The first block, 56 x 56 with 64 channels in and inside, 256 out, 32 images in fp32: maps of
# n = 25 690 112 bytes and 4n. Backward a convolution and a norm hold the gradients of their result
# and input; beside the convolutions waits the gradient that the shortcut has left, n, and beside
# the shortcut's that of the sum, 4n, which is also the gradient of either norm's result.
def test_gradients_of_one_branch_wait_for_the_other() -> None:
    n = 4 * 32 * 56 * 56 * 64
    (first, second, *_) = parts(trained()).layers
    alive = {o.name: (o.backward_bytes + o.stream_bytes) / n for o in first.operators}
    assert alive == {
        "conv1": 2 + 1, "norm1": 2 + 1, "relu1": 2 + 1, "conv2": 2 + 1, "norm2": 2 + 1,
        "relu2": 2 + 1, "conv3": 5 + 1, "norm3": 8 + 1, "shortcut": 5 + 4, "shortcut norm": 8,
        "residual": 4, "relu": 8,
    }  # fmt: skip
    alive = {o.name: (o.backward_bytes + o.stream_bytes) / n for o in second.operators}
    assert alive == {
        "conv1": 5 + 4, "norm1": 2 + 4, "relu1": 2 + 4, "conv2": 2 + 4, "norm2": 2 + 4,
        "relu2": 2 + 4, "conv3": 5 + 4, "norm3": 8, "residual": 4, "relu": 8,
    }  # fmt: skip


# Forward each writes its result; a norm's is kept by nobody, and waits for the ReLU or the sum.
def test_results_that_nobody_keeps_are_alive_until_they_are_read() -> None:
    n = 4 * 32 * 56 * 56 * 64
    alive = {o.name: o.forward_bytes / n for o in parts(trained()).layers[0].operators}
    assert alive == {
        "conv1": 1, "norm1": 1, "relu1": 2, "conv2": 1, "norm2": 1, "relu2": 2, "conv3": 4,
        "norm3": 4, "shortcut": 4 + 4, "shortcut norm": 4 + 4, "residual": 12, "relu": 8,
    }  # fmt: skip


# Images have no gradient: of the first convolution only that of its result is alive, 4 * 32 * 64 *
# 112^2, where the images would add 19 267 584.
def test_the_first_convolution_holds_no_gradient_of_images() -> None:
    stem, *_ = parts(trained()).embedding.operators
    assert stem.backward_bytes == 102_760_448


def test_activations_are_linear_in_the_batch() -> None:
    peaks = [
        sim.simulate(trained({"global_batch_size": 8 * n}, microbatch_size=n)).activations.peak[0]
        for n in (32, 64)
    ]
    assert peaks[1] == 2 * peaks[0]


# Half as long numbers halve all but the places of maxima, 8 bytes each: 51 380 224, and the loss's
# probabilities, which stay in fp32: 128 000.
def test_half_precision_halves_activations_but_not_places_of_maxima() -> None:
    peak = sim.simulate(trained({"precision": "fp16"})).activations.peak[0]
    assert peak == (2_749_232_128 - 51_380_224 - 128_000) / 2 + 51_380_224 + 128_000


# 8 images of 16 channels, 10 x 10, windows of 3 x 3, 32 channels out: rows 800, columns 144.
def test_a_convolution_is_a_product_of_positions_windows_and_channels() -> None:
    x, y = Maps(8, 16, 10), Maps(8, 32, 10)
    found = convolution("c", HALF, x, y, kernel=3)
    kernels = [*found.forward, *found.input_grad, *found.weight_grad]
    assert [k.matmul for k in kernels if isinstance(k, Kernel)] == [
        (1, 800, 32, 144), (1, 800, 16, 288), (1, 144, 32, 800),
    ]  # fmt: skip
    assert {k.flops for k in kernels if isinstance(k, Kernel)} == {2.0 * 800 * 32 * 144}
    assert found.model_flops == 2 * 800 * 32 * 144


# Each of input (12 800), result (25 600) and weight (4 608) is moved once, 2 bytes an element.
def test_a_convolution_moves_its_input_not_the_unrolled_one() -> None:
    found = convolution("c", HALF, Maps(8, 16, 10), Maps(8, 32, 10), kernel=3)
    kernels = [*found.forward, *found.input_grad, *found.weight_grad]
    moved = 2.0 * (12_800 + 25_600 + 4_608)
    assert [k.bytes for k in kernels if isinstance(k, Kernel)] == [moved] * 3
    assert found.kept_bytes == 2 * 12_800


# Stride 2 makes a quarter of the results, and as few products in either gradient.
def test_a_strided_convolution_multiplies_no_zeros_backward() -> None:
    x = Maps(8, 16, 10)
    found = convolution("c", HALF, x, below(x, 32, 3, 2, 1), kernel=3)
    flops = {k.flops for k in (*found.forward, *found.backward) if isinstance(k, Kernel)}
    assert flops == {2.0 * 200 * 32 * 144}


def test_images_have_no_gradient() -> None:
    stem, *_ = parts(trained()).embedding.operators
    assert stem.input_grad == ()
    assert len(stem.weight_grad) == 1


# Windows of 3, 7 and 1 over 224 with padding of half of them: (224 + 6 - 7)/2 + 1 = 112, (112 + 2 -
# 3)/2 + 1 = 56, all rounded down.
@pytest.mark.parametrize(
    ("side", "kernel", "stride", "out"),
    [(224, 7, 2, 112), (112, 3, 2, 56), (56, 3, 1, 56), (56, 1, 2, 28), (7, 3, 2, 4)],
)
def test_windows_leave_the_sides_that_torch_says(
    side: int, kernel: int, stride: int, out: int
) -> None:
    assert below(Maps(1, 1, side), 1, kernel, stride, kernel // 2).side == out


# Elements of 4 bytes moved a pass: norm 2 + 1 and 4 + 1; ReLU 1 + 1 and 2 + 1.
def test_batch_norm_and_relu_move_what_their_passes_need() -> None:
    x = Maps(2, 4, 8)
    for operator, forward, backward in (
        (batch_norm("n", FULL, x), 3, 5),
        (relu("r", FULL, x), 2, 3),
    ):
        moved = [k.bytes for k in (*operator.forward, *operator.backward) if isinstance(k, Kernel)]
        assert moved == [4.0 * 512 * forward, 4.0 * 512 * backward]


# 512 elements in, 128 out with 8 bytes each for their places.
def test_max_pool_keeps_where_its_maxima_were() -> None:
    x = Maps(2, 4, 8)
    pool = max_pool("p", FULL, x, below(x, 4, 3, 2, 1), kernel=3)
    assert pool.kept_bytes == 4 * 512 + 8 * 128


def test_blocks_that_are_alike_are_one_object() -> None:
    found = parts(trained())
    assert len(found.layers) == 16
    assert [len(run) for _, run in found.runs(range(16))] == [1, 2, 1, 3, 1, 5, 1, 2]


# 25 557 032 gradients of 4 bytes leave each of 8 ranks once.
@pytest.mark.parametrize("plan", [{}, {"zero": 1}, {"zero": 2}, {"zero": 3}])
def test_each_gradient_is_reduced_once(plan: dict[str, int]) -> None:
    program = lower(trained({"num_steps": 1}, **plan)).flat
    sent: Counter[int] = Counter()
    for op in range(len(program)):
        cost = program.costs[program.cost[op]]
        if isinstance(cost, Flow) and cost.name in ("all_reduce", "reduce_scatter"):
            sent[int(program.rank[op])] += int(cost.bytes)
    assert set(sent.values()) == {4 * 25_557_032}


def test_momentum_in_fp32_holds_12_bytes_a_parameter() -> None:
    (only,) = static_memory(trained())
    assert only.states == 12 * 25_557_032


def test_the_step_multiplies_what_the_formula_says_but_for_the_gradient_of_images() -> None:
    program = lower(trained({"num_steps": 1})).flat
    flops = sum(
        k.flops * k.count
        for op in range(len(program)) if program.rank[op] == 0
        and isinstance(cost := program.costs[program.cost[op]], Work)
        for k in cost.kernels if k.matmul
    )  # fmt: skip
    assert flops == 32 * 2 * (3 * 4_089_184_256 - 118_013_952)


# Full recomputation repeats the 16 blocks: all but the stem and the fully connected layer.
def test_recomputation_repeats_the_blocks() -> None:
    s = trained(recompute="full")
    assert recomputed_flops_per_token(s) == 2 * (4_089_184_256 - 118_013_952 - 2_048_000)
    assert sim.simulate(s).memory.peak[0] < sim.simulate(trained()).memory.peak[0] / 2


@pytest.mark.parametrize("detail", ["layer", "kernel", "stage"])
@pytest.mark.parametrize("plan", [{}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"recompute": "full"}])
def test_engines_agree(plan: dict[str, Any], detail: str) -> None:
    alike_however_it_runs(trained({"detail": detail}, **plan))


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
def test_the_report_counts_images(precision: str) -> None:
    result = sim.simulate(trained({"precision": precision}))
    text = str(result)
    assert f"{256 / result.step_time_s:,.5g} images/s" in text
    assert "global batch 256 images of 224 x 224" in text
    assert "tokens" not in text.split("assumed")[0]
    assert "attention" not in text


def test_a_larger_image_takes_as_much_longer_as_it_has_pixels() -> None:
    large = trained({"image_size": 448})
    small = model_flops_per_token(trained()) - 6 * 2_048_000
    assert model_flops_per_token(large) - 6 * 2_048_000 == 4 * small


def test_a_batch_that_does_not_fit_is_told_what_would() -> None:
    from simulator.explore.remedies import find_remedies

    result = sim.simulate(trained({"global_batch_size": 8 * 1024}, microbatch_size=1024))
    found = find_remedies(result)
    assert found is not None
    assert {"plan.microbatch_size": 512} in [dict(one.settings) for one in found.found]


@pytest.mark.parametrize(
    ("run", "plan", "sentence"),
    [
        ({}, {"tp": 2, "dp": 4}, "convolution networks are modelled with data parallelism only"),
        ({}, {"pp": 2, "dp": 4}, "set plan.tp = 1 and plan.pp = 1 for resnet-50"),
        ({}, {"recompute": "selective"}, "a transformer's layer apart, and resnet-50 has none"),
        ({}, {"recompute": "selective-op"}, 'set plan.recompute = "full" or "none"'),
        ({"attention": "unfused"}, {}, "run.attention 'unfused' has no effect on resnet-50"),
        ({"sequence_length": 8}, {}, "run.sequence_length 8 is for models of text"),
        ({"frozen_layers": 2}, {}, "run.frozen_layers 2 is modelled of transformers"),
        ({"lora_rank": 8}, {}, "run.lora_rank 8 is modelled of transformers, and resnet-50 is a"),
        ({"fake_quantization": True, "fused_accumulation": False}, {}, "fake_quantization true is"),
        ({"compiled": True}, {}, "run.compiled true is modelled of transformers"),
        ({"linear_layers": "megatron"}, {}, "run.linear_layers 'megatron' is modelled of"),
        ({"optimizer": "adafactor"}, {}, "'adafactor' is modelled of matrices"),
        ({"optimizer": "muon"}, {}, "weights of convolutions have four dimensions"),
    ],
)
def test_what_has_no_meaning_for_it_is_refused(
    run: dict[str, Any], plan: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(DescriptionError) as caught:
        trained(run, **plan)
    assert sentence in str(caught.value)


def test_convolutions_in_fp8_are_refused() -> None:
    with pytest.raises(DescriptionError, match="'fp8' is not modelled of convolutions; fp32, tf32"):
        scenario(
            {
                "model": "resnet-50",
                "cluster": {"node": "dgx-h100"},
                "plan": {"dp": 8},
                "run": {"global_batch_size": 8, "image_size": 224, "precision": "fp8"},
            },
            Path("test.toml"),
        )


def test_images_without_a_size_are_refused() -> None:
    table = {"model": "resnet-50", "cluster": {"node": "dgx-a100"}, "run": {"global_batch_size": 8}}
    with pytest.raises(DescriptionError, match="image_size is missing: resnet-50 reads images"):
        scenario(table, Path("test.toml"))


def test_a_network_can_be_written_in_toml() -> None:
    shallow = {**BASIC, "depths": [1, 1, 1, 1]}
    table = {
        "model": {"name": "network", **FIFTY, **shallow},
        "cluster": {"node": "dgx-a100"},
        "run": {"global_batch_size": 8, "image_size": 224},
    }
    assert scenario(table, Path("test.toml")).model == network(**shallow)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"depths": [3, 4]}, "ResNet.depths: lists 2 stages, hidden_sizes 4"),
        ({"hidden_sizes": [250, 512, 1024, 2048]}, "4 does not divide 250"),
        ({"layer_type": "wide"}, "'wide' is not one of bottleneck, basic"),
    ],
)
def test_a_wrong_shape_is_told(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DescriptionError) as caught:
        network(**changes)
    assert sentence in str(caught.value)


# Hugging Face names every class; num_labels stands for as many nameless ones.
def test_classes_are_counted_by_name_or_number() -> None:
    config = {k: v for k, v in FIFTY.items() if k != "num_labels"}
    named = {**config, "id2label": {str(i): f"class {i}" for i in range(10)}}
    assert read_config(named)["num_labels"] == 10
    assert read_config({**config, "num_labels": 12})["num_labels"] == 12
    with pytest.raises(DescriptionError, match="key 'num_labels' is missing"):
        read_config(config)


def test_another_activation_is_refused() -> None:
    with pytest.raises(DescriptionError, match="hidden_act 'gelu' is not modelled"):
        read_config({**FIFTY, "hidden_act": "gelu"})


def test_memory_of_it_is_shown_without_serving(trainsim: Any) -> None:
    code, out, _ = trainsim("show", "memory", "resnet50-ddp", "--json", "memory.json")
    assert code == 0
    assert "what serving takes is told of decoders only" in out
    assert json.loads(Path("memory.json").read_text(encoding="utf-8"))["inference"] is None
