"""Layers of `run.layer_code` "torchtitan" against torch; skipped where torch is not installed.

The peak of tensors without data is what torch's allocator gives out, but for what kernels take for
themselves.
"""

from dataclasses import replace
from functools import cache

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

import simulator as sim  # noqa: E402
from simulator.lower.layers import blocks, shapes  # noqa: E402
from simulator.lower.memory import buffer_bytes  # noqa: E402
from simulator.program import Kernel  # noqa: E402
from tests.torch_memory import Size, moved, norm, repeated, rotated, step  # noqa: E402

SIZE = Size(vocab=8192, layers=2, hidden=256, heads=8, keys=4, inner=1024)
BATCH, LENGTH, SHARDS = 4, 512, 4


@pytest.fixture
def described(scenario_of, llama):
    """Return the scenario of a run of torch."""

    def scenario(tp, recompute):
        model = replace(
            llama, vocab_size=SIZE.vocab, num_hidden_layers=SIZE.layers, hidden_size=SIZE.hidden,
            num_attention_heads=SIZE.heads, num_key_value_heads=SIZE.keys,
            intermediate_size=SIZE.inner, head_dim=SIZE.hidden // SIZE.heads,
        )  # fmt: skip
        plan = {
            "dp": SHARDS, "tp": tp, "zero": 3, "sequence_parallel": tp > 1,
            "microbatch_size": BATCH, "recompute": recompute, "root_holds_ends": True,
        }  # fmt: skip
        run = {
            "layer_code": "torchtitan", "gradient_dtype": "fp32", "loss_in_place": False,
            "fused_optimizer": False,
        }  # fmt: skip
        return scenario_of(model=model, plan=plan, run=run, batch=BATCH * SHARDS, sequence=LENGTH)

    return scenario


@cache
def found(tp, recompute):
    """Return a step of torch's, run once."""
    full = recompute == "full"
    return step(SIZE, shards=SHARDS, tp=tp, recompute=full, batch=BATCH, length=LENGTH)


# Of a rank with everything: shards, gathered weights, activations, logits and their gradients.
@pytest.mark.parametrize(("tp", "recompute"), [(1, "none"), (1, "full"), (4, "none"), (4, "full")])
def test_most_memory_is_what_torch_allocates(described, tp, recompute):
    s = described(tp, recompute)
    expected = sim.simulate(s).peak_memory_bytes[0] - buffer_bytes(s)
    assert max(found(tp, recompute).peak.values()) == pytest.approx(expected, rel=0.03)


# 7 products a layer and the head's forward, twice as many in backward, where a checkpoint runs six
# of each layer's again.
@pytest.mark.parametrize(("recompute", "again"), [("none", 0), ("full", 6)])
def test_a_checkpoint_does_not_run_the_last_product_again(recompute, again):
    products = found(1, recompute).products
    assert products["forward"] == 7 * SIZE.layers + 1
    assert products["backward"] == (14 + again) * SIZE.layers + 2


def tensors(*shape, dtype=torch.bfloat16, trained=True):
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=trained)


# A factor is left for numbers a token or a column, which are not counted here.
def test_kernels_of_a_layer_move_the_bytes_that_torchs_do(described):
    s = described(1, "none")
    layer = {o.name: o for o in blocks(s.model, shapes(s)).layer.operators}

    def of(name):
        return tuple(
            sum(k.bytes * k.count for k in parts if isinstance(k, Kernel))
            for parts in (layer[name].forward, layer[name].input_grad)
        )

    x = tensors(BATCH, LENGTH, SIZE.hidden)
    assert of("attention norm") == pytest.approx(moved(norm, x, tensors(SIZE.hidden)), rel=0.02)
    halves = [tensors(BATCH, LENGTH, SIZE.inner) for _ in range(2)]
    gate = moved(lambda gate, up: functional.silu(gate) * up, *halves)
    assert of("silu") == pytest.approx(gate, rel=1e-6)
    size = SIZE.hidden // SIZE.heads
    keys = tensors(BATCH, LENGTH, SIZE.keys, size)
    one = moved(lambda k: repeated(k, SIZE.heads // SIZE.keys), keys)
    assert of("repeat keys") == pytest.approx(tuple(2 * part for part in one), rel=1e-6)
    turns = tensors(LENGTH, size // 2, dtype=torch.complex64, trained=False)
    both = [
        moved(lambda q: rotated(q, turns), tensors(BATCH, LENGTH, heads, size))
        for heads in (SIZE.heads, SIZE.keys)
    ]
    assert of("rotary") == pytest.approx(tuple(map(sum, zip(*both, strict=True))), rel=0.15)
