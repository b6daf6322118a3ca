"""What torch's caching allocator reserves under FSDP2, by its rules; skipped where torch is not.

Tensors without data have sizes, an order and the streams that they were made on; from these the
rules (`simulator.hardware.allocator`) say what is reserved.
"""

from dataclasses import replace
from functools import cache

import pytest

torch = pytest.importorskip("torch")

import simulator as sim  # noqa: E402
from simulator.lower.memory import buffer_bytes  # noqa: E402
from tests.torch_memory import Size, step  # noqa: E402
from tests.torch_stages import stage_step  # noqa: E402

SIZE = Size(vocab=65536, layers=2, hidden=2048, heads=16, keys=8, inner=8192)
BATCH, LENGTH, SHARDS, STAGES, MICROBATCHES = 2, 4096, 8, 2, 3


@pytest.fixture
def described(scenario_of, llama):
    """Return the result of a scenario of `SIZE`'s layers a stage."""

    def result(pp, tp, recompute):
        model = replace(
            llama, vocab_size=SIZE.vocab, num_hidden_layers=SIZE.layers * pp,
            hidden_size=SIZE.hidden, num_attention_heads=SIZE.heads, num_key_value_heads=SIZE.keys,
            intermediate_size=SIZE.inner, head_dim=SIZE.hidden // SIZE.heads,
        )  # fmt: skip
        plan = {
            "dp": SHARDS, "tp": tp, "pp": pp, "zero": 3, "sequence_parallel": tp > 1,
            "microbatch_size": BATCH, "recompute": recompute, "root_holds_ends": True,
            "no_sync": pp > 1, "reshard_after_forward": pp == 1,
        }  # fmt: skip
        run = {
            "layer_code": "torchtitan", "gradient_dtype": "fp32", "loss_in_place": False,
            "fused_optimizer": False,
        }  # fmt: skip
        batch = BATCH * SHARDS * (MICROBATCHES if pp > 1 else 1)
        s = scenario_of(model=model, plan=plan, run=run, batch=batch, sequence=LENGTH)
        return sim.simulate(s)

    return result


@cache
def found(tp, recompute):
    """Return a step of torch's, run once."""
    full = recompute == "full"
    return step(SIZE, shards=SHARDS, tp=tp, recompute=full, batch=BATCH, length=LENGTH)


@pytest.mark.parametrize(("tp", "recompute"), [(1, "none"), (4, "full")])
def test_what_is_reserved_is_what_torchs_allocator_would(described, tp, recompute):
    result = described(1, tp, recompute)
    expected = result.reserved_memory_bytes[0] - buffer_bytes(result.scenario)
    assert found(tp, recompute).reserved == pytest.approx(expected, rel=0.03)


# A buffer for the cast shards, embedding and head with it, and one for the only layer; to the byte.
@pytest.mark.parametrize(("tp", "recompute"), [(1, "none"), (4, "full")])
def test_the_pool_of_gathers_is_torchs(described, tp, recompute):
    assert found(tp, recompute).pools[1] == described(1, tp, recompute).reserve.gathers[0]


# Three microbatches on two stages. The first holds the whole gradient of its embedding, the last
# all logits; holes between tensors of layers are not in the model.
@pytest.mark.parametrize(("stage", "tolerance"), [(0, 0.2), (1, 0.04)])
def test_a_stage_holds_what_torchs_pipelines_do(described, stage, tolerance):
    result = described(STAGES, 4, "full")
    run = stage_step(
        SIZE, shards=SHARDS, tp=4, batch=BATCH, length=LENGTH, stage=stage, stages=STAGES,
        microbatches=MICROBATCHES,
    )  # fmt: skip
    rank = int(result.tiled.tile_ranks[stage, 0])
    assert run.pools[1] == result.reserve.gathers[rank]
    workspace = buffer_bytes(result.scenario)
    allocated = result.peak_memory_bytes[rank] - workspace
    assert run.peak["step"] == pytest.approx(allocated, rel=0.06)
    expected = result.reserved_memory_bytes[rank] - workspace
    assert run.reserved == pytest.approx(expected, rel=tolerance)
