"""The ends of a model kernel by kernel: the embedding's gradient, and the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import simulator as sim
from simulator.describe.model import Model
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.lower import lower
from simulator.lower.layers import blocks
from simulator.lower.operators import Operator, Part
from simulator.lower.shapes import shapes
from simulator.program import ACTION_CODE, NONE, Flow, Kernel

ScenarioOf = Callable[..., Scenario]


def moved(parts: tuple[Part, ...]) -> dict[str, float]:
    return {part.name: part.bytes for part in parts if isinstance(part, Kernel)}


def operator(s: Scenario, block: str, name: str) -> Operator:
    made: Any = getattr(blocks(s.model, shapes(s)), block)
    return next(o for o in made.operators if o.name == name)


# Bytes a logit, bf16: a copy reads 2 and writes 4; the largest reads 4; subtraction and
# exponentials read and write 8 each; the sum reads 4; division 8. Backward 8, and 4 + 2.
@pytest.mark.parametrize(
    ("run", "forward", "backward"),
    [({}, 38, 14), ({"precision": "fp32"}, 32, 8), ({"fused_loss": True}, 2 + 2 + 4, 14)],
)
def test_the_loss_moves_what_its_kernels_do(
    scenario_of: ScenarioOf, gpt: Model, run: dict[str, Any], forward: int, backward: int
) -> None:
    s = scenario_of(run=run)
    logits = shapes(s).tokens * gpt.vocab_size
    loss = operator(s, "head", "loss")
    assert moved(loss.forward)["loss"] == forward * logits
    assert moved(loss.input_grad)["loss grad"] == backward * logits


# Three numbers a token and rank in fp32.
def test_transformer_engines_loss_gathers_once(scenario_of: ScenarioOf) -> None:
    s = scenario_of(plan={"tp": 2}, run={"fused_loss": True})
    head = blocks(s.model, shapes(s)).head.operators
    flows = [part for o in head for part in o.forward if isinstance(part, Flow)]
    assert flows[-1] == Flow("all_gather", 3.0 * 4 * shapes(s).tokens * 2)
    assert not any(o.name == "loss sum" for o in head)


def test_the_loss_runs_in_one_way(scenario_of: ScenarioOf) -> None:
    with pytest.raises(DescriptionError, match="one way alone"):
        scenario_of(run={"fused_loss": True, "compiled_loss": True})


# A microbatch's gradient is zeros of 2 bytes for every parameter, and rows of 2 + 2 read and
# written; it is read, and 4 bytes of the sum are read and written.
@pytest.mark.parametrize("fused", [False, True])
def test_the_embeddings_gradient_is_dense(
    scenario_of: ScenarioOf, llama: Model, fused: bool
) -> None:
    s = scenario_of(model=llama, run={"gradient_dtype": "fp32", "fused_accumulation": fused})
    found = moved(operator(s, "embedding", "embedding").weight_grad)
    params, rows = llama.vocab_size * llama.hidden_size, shapes(s).tokens * llama.hidden_size
    assert found == {
        "embedding wgrad": 2 * params + 4 * rows, "embedding accumulation": 10 * params,
    }  # fmt: skip


def test_one_microbatch_has_nothing_to_add(scenario_of: ScenarioOf, llama: Model) -> None:
    s = scenario_of(model=llama, batch=1)
    assert set(moved(operator(s, "embedding", "embedding").weight_grad)) == {"embedding wgrad"}


# Two norms a layer and one at the end, of `hidden` fp32 numbers, of each rank's part of the tokens.
@pytest.mark.parametrize("sequence", [False, True])
def test_gradients_of_norms_are_summed_over_tp_where_tokens_are_divided(
    scenario_of: ScenarioOf, llama: Model, sequence: bool
) -> None:
    plan = {"tp": 2, "sequence_parallel": sequence}
    program = lower(scenario_of(model=llama, plan=plan, run={"gradient_dtype": "fp32"}))
    last = (program.joint != NONE) & (program.action == ACTION_CODE["OPT"])
    sums = {program.costs[c] for c in np.unique(program.cost[last]).tolist()}
    norms = 4.0 * (2 * llama.num_hidden_layers + 1) * llama.hidden_size
    assert sums == ({Flow("all_reduce", norms)} if sequence else set())


# Chunks whose sums over dp wait for the last backward of all: sums over tp stand behind that.
def test_sums_over_tp_come_after_the_last_backward(scenario_of: ScenarioOf, llama: Model) -> None:
    plan = {"tp": 2, "sequence_parallel": True, "dp": 2, "pp": 2, "chunks": 2}
    plan |= {"schedule": "Interleaved1F1B", "grad_overlap": False, "p2p_overlap": False}
    frame = sim.simulate(scenario_of(model=llama, plan=plan)).to_frame()
    mine = frame[(frame.step == 1) & (frame["rank"] == 0)]
    sums = mine[(mine.action == "OPT") & (mine.stream == "tp")]
    assert len(sums) == 2
    assert sums.start_s.min() >= mine[mine.action == "B"].end_s.max()
