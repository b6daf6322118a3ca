"""Torch modules as lists of layers; skipped where torch is not installed."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import simulator as sim  # noqa: E402
from simulator.describe.loader import load_model  # noqa: E402
from simulator.errors import DescriptionError  # noqa: E402
from simulator.exchange.module import describe_module, save_layers  # noqa: E402
from simulator.lower.layers import num_parameters  # noqa: E402


class Layer(nn.Module):
    def __init__(self, size, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.proj = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x):
        b, t, d = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, layers, size, heads, vocab, length):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, size), nn.Embedding(length, size)
        self.layers = nn.ModuleList(Layer(size, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, index):
        x = self.tokens(index) + self.places(torch.arange(index.shape[1], device=index.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Bottleneck(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        inner = outputs // 4
        self.body = nn.Sequential(
            nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(True),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(True),
            nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.short = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.short = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        return functional.relu(self.body(x) + self.short(x), inplace=True)


def resnet50():
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True),
              nn.MaxPool2d(3, 2, 1)]  # fmt: skip
    width = 64
    for stage, (size, depth) in enumerate(zip((256, 512, 1024, 2048), (3, 4, 6, 3), strict=True)):
        for block in range(depth):
            layers.append(Bottleneck(width, size, 2 if stage and not block else 1))
            width = size
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def on_meta(make, *sizes):
    with torch.device("meta"):
        return make(*sizes)


def tokens(batch, length):
    return torch.zeros(batch, length, dtype=torch.long, device="meta")


def total(model):
    return sum(layer.flops * layer.repeat for layer in model.layers)


@pytest.fixture(scope="module")
def gpt2():
    return describe_module(on_meta(Decoder, 12, 768, 12, 50257, 1024), tokens(1, 1024))


@pytest.fixture(scope="module")
def resnet():
    return describe_module(on_meta(resnet50), torch.empty(1, 3, 224, 224, device="meta"))


def test_gpt2_has_its_parameters_and_the_analytic_flops(gpt2):
    assert num_parameters(gpt2) == 124_439_808
    # 24 h^2 T of each layer's products, 4 T^2 h of its attention, 2 h V T of the head
    t, h, v = 1024, 768, 50257
    assert total(gpt2) == 12 * (24 * h * h * t + 4 * t * t * h) + 2 * h * v * t
    assert [(layer.name, layer.repeat) for layer in gpt2.layers] == [
        ("tokens", 1), ("places", 1), ("layers.0", 12), ("norm", 1), ("head", 1),
    ]  # fmt: skip


def test_resnet50_has_its_parameters_and_4_09_billion_multiply_adds(resnet):
    assert num_parameters(resnet) == 25_557_032
    assert total(resnet) / 2e9 == pytest.approx(4.089, abs=5e-4)


def test_a_layer_of_gpt_keeps_what_the_formula_says(gpt2):
    # Korthikanti et al., 2022, section 4.1, without dropout, in elements of T h: inputs of both
    # norms, of qkv, proj, fc1, of gelu (4) and of fc2 (4); attention keeps its own. The norms keep
    # two numbers a token besides, as torch's LayerNorm does.
    layer = gpt2.layers[2]
    assert layer.kept == 13 * 1024 * 768 + 4 * 1024
    assert layer.output == 1024 * 768


def test_the_products_of_gpt2_are_those_that_its_config_gives(gpt2):
    ours = [(p.m, p.n, p.k) for p in gpt2.layers[2].products]
    h = 768
    assert ours == [(1024, n, k) for n, k in ((3 * h, h), (h, h), (4 * h, h), (h, 4 * h))]
    (attention,) = gpt2.layers[2].attention
    assert (attention.length, attention.queries, attention.dim, attention.causal) == (
        1024, 12, 64, True,
    )  # fmt: skip


def test_memory_and_time_are_near_those_of_the_built_in_models(gpt2, resnet, tmp_path):
    save_layers(gpt2, tmp_path / "gpt2.toml")
    one = {"cluster.devices_per_node": 1, "plan.pp": 1, "run.global_batch_size": 4}
    (tmp_path / "x.toml").write_text(
        'name = "x"\nmodel = "./gpt2.toml"\n[cluster]\nnode = "dgx-a100"\n'
        '[plan]\nmicrobatch_size = 2\n[run]\nprecision = "bf16"\noptimizer = "adamw"\n'
    )
    listed = sim.simulate(sim.load(tmp_path / "x.toml", one))
    built = sim.simulate(sim.load("gpt2-xl-1f1b", one | {"model": "gpt2"}))
    # The loss and its copies of the logits are not in the module: time and memory are below.
    assert 0.75 < listed.step_time_s / built.step_time_s < 1.0
    assert listed.tiled.static_bytes == pytest.approx(built.tiled.static_bytes, rel=1e-3)
    save_layers(resnet, tmp_path / "gpt2.toml")
    listed = sim.simulate(sim.load(tmp_path / "x.toml", one | {
        "plan.microbatch_size": 256, "run.global_batch_size": 256, "run.precision": "fp16",
        "run.optimizer": "momentum",
    }))  # fmt: skip
    built = sim.simulate(sim.load("resnet50-ddp", {
        "cluster.devices_per_node": 1, "plan.dp": 1, "run.global_batch_size": 256,
    }))  # fmt: skip
    assert listed.step_time_s == pytest.approx(built.step_time_s, rel=0.15)
    assert listed.peak_memory_bytes == pytest.approx(built.peak_memory_bytes, rel=0.05)


def test_a_list_comes_back_from_its_file(gpt2, resnet, tmp_path):
    for model in (gpt2, resnet):
        save_layers(model, tmp_path / "m.toml")
        assert load_model(str(tmp_path / "m.toml")) == model


@pytest.mark.parametrize("batch", [1, 3])
def test_the_batch_that_it_was_counted_with_does_not_matter(batch):
    one = on_meta(Decoder, 2, 32, 4, 100, 16)
    assert describe_module(one, tokens(batch, 16)) == describe_module(one, tokens(2, 16))


def test_flops_are_those_of_torchs_counter_forward_and_backward():
    net = on_meta(lambda: nn.Sequential(
        nn.Conv2d(4, 8, 3, 2, 1), nn.GELU(), nn.ConvTranspose2d(8, 6, 2, 2),
        nn.Flatten(), nn.Linear(6 * 8 * 8, 10),
    ))  # fmt: skip
    x = torch.empty(2, 4, 8, 8, device="meta")
    counter = FlopCounterMode(display=False)
    with counter:
        out = net(x)
    model = describe_module(net, x)
    assert 2 * total(model) == counter.get_total_flops()
    with FlopCounterMode(display=False) as back:
        out.backward(torch.empty_like(out))
    first = model.layers[0].products[0]
    assert not first.input_grad
    assert 2 * (2 * total(model) - first.flops) == back.get_total_flops()


def test_attention_with_a_mask_of_its_own_is_listed_as_products():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(8, 8)

        def forward(self, x):
            q = self.project(x)[:, None]
            mask = torch.zeros(6, 6, device=x.device)
            return functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    model = describe_module(on_meta(Masked), torch.empty(2, 6, 8, device="meta"))
    (layer,) = model.layers
    assert not layer.attention
    assert [(p.weight, p.m, p.n, p.k) for p in layer.products[1:]] == [
        (False, 6, 6, 8), (False, 6, 8, 6),
    ]  # fmt: skip


def test_attention_inside_torchs_own_layers_is_listed():
    layer = on_meta(lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0))
    model = describe_module(layer, torch.empty(2, 6, 16, device="meta"), units=["self_attn"])
    (core,) = model.layers[0].attention
    assert (core.length, core.queries, core.keys, core.dim, core.causal) == (6, 2, 2, 8, False)


def test_what_a_list_cannot_say_is_refused():
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=False)

    with pytest.raises(DescriptionError, match="Again computes parts of its forward again"):
        describe_module(Again(), torch.zeros(2, 4))
    frozen = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
    with pytest.raises(DescriptionError, match=r"0\.weight and 1 more parameters are frozen"):
        describe_module(frozen, torch.zeros(2, 4))


def test_the_user_may_say_which_submodules_are_layers():
    one = on_meta(Decoder, 2, 32, 4, 100, 16)
    model = describe_module(one, tokens(1, 16), units=["layers.1", "head"], name="x")
    assert [layer.name for layer in model.layers] == ["layers.1", "head"]
    assert num_parameters(model) == sum(p.numel() for p in one.parameters())
    with pytest.raises(DescriptionError, match="no submodule 'legs'"):
        describe_module(one, tokens(1, 16), units=["legs"])
    with pytest.raises(DescriptionError, match="units that lie in each other"):
        describe_module(one, tokens(1, 16), units=["layers", "layers.0"])
    with pytest.raises(DescriptionError, match="'layers' is never called; of a container name"):
        describe_module(one, tokens(1, 16), units=["layers", "head"])


def test_the_module_is_left_as_it_is():
    one = nn.Sequential(nn.Linear(4, 4))
    describe_module(one, torch.zeros(1, 4))
    assert one[0].weight.device.type == "cpu"
    assert one[0].weight.grad is None
    assert not one._forward_hooks


def test_what_needs_numbers_or_mixes_samples_is_refused():
    class Branches(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    class Mixes(nn.Module):
        def forward(self, x):
            return x.T @ x

    with pytest.raises(DescriptionError, match="Branches does not run without numbers"):
        describe_module(Branches(), torch.zeros(2, 3))
    with pytest.raises(DescriptionError, match="it is no product of single samples"):
        describe_module(Mixes(), torch.zeros(2, 3))
    with pytest.raises(DescriptionError, match="of one number of samples"):
        describe_module(nn.Bilinear(2, 2, 2), torch.zeros(2, 2), torch.zeros(3, 2))
