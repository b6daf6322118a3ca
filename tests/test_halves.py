"""A backward split into the gradient of the input and that of the weights: work, memory, sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

import simulator as sim
from simulator.describe.model import Model
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.lower import lower
from simulator.lower.layers import Block, blocks, shapes
from simulator.lower.memory import static_memory
from simulator.program import ACTIONS, Flow, Program, Work

ScenarioOf = Callable[..., Scenario]

H1 = {"pp": 2, "schedule": "ZB-H1"}
"""Two stages of two layers; rank 0 runs F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3."""
ONCE = {"num_steps": 1}


def work_of(program: Program, *kinds: str) -> Counter[str]:
    """Return how often each kernel runs in actions of some kinds, on all ranks of a pipeline."""
    count: Counter[str] = Counter()
    wanted = np.isin(program.action, [ACTIONS.index(kind) for kind in kinds])
    for cost in program.cost[wanted].tolist():
        work = program.costs[cost]
        if isinstance(work, Work):
            for kernel in work.kernels:
                count[kernel.name] += kernel.count
    return count


# 1F1B and ZB-H1 compute the same kernels, the latter's backward in two actions.
@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("detail", ["kernel", "layer", "stage"])
def test_both_halves_make_a_backward(
    scenario_of: ScenarioOf, request: pytest.FixtureRequest, model: str, recompute: str, detail: str
) -> None:
    found = []
    for plan in ({"pp": 2}, H1):
        s = scenario_of(
            model=request.getfixturevalue(model), plan={**plan, "tp": 2, "recompute": recompute},
            run={**ONCE, "detail": detail},
        )  # fmt: skip
        program = lower(s)
        found.append((work_of(program, "B", "I", "W"), work_of(program, "F")))
    assert found[0] == found[1]
    assert found[0][0]["qkv wgrad"] == 4 * 4  # layers x microbatches


def test_weights_have_their_gradients_in_w_alone(scenario_of: ScenarioOf, gpt: Model) -> None:
    program = lower(scenario_of(plan=H1, run={**ONCE, "detail": "kernel"}))
    inputs, weights = work_of(program, "I"), work_of(program, "W")
    assert not any("wgrad" in name for name in inputs)
    assert {name.rpartition(" ")[2] for name in weights} == {"wgrad", "grad", "accumulation"}
    assert not {name for name in weights if name.endswith("grad")} & set(inputs)
    assert weights["embedding wgrad"] == 4
    assert {"qkv dgrad", "attention norm grad"} <= set(inputs)


# With sequence parallelism the input is gathered again for the weight's gradient: 2 products a
# layer and the head gather once forward, and once more in W; what I gathers are gradients.
@pytest.mark.parametrize("overlap", ["none", "grads", "all"])
def test_the_input_is_gathered_again_where_the_weight_needs_it(
    scenario_of: ScenarioOf, gpt: Model, overlap: str
) -> None:
    def gathers(plan: dict[str, Any], *kinds: str) -> int:
        p = lower(scenario_of(
            plan={**plan, "tp": 2, "sequence_parallel": True, "tp_overlap": overlap},
            run={**ONCE, "detail": "kernel"},
        ))  # fmt: skip
        named = np.array([isinstance(c, Flow) and c.name == "all_gather" for c in p.costs])
        mine = named[p.cost] & np.isin(p.action, [ACTIONS.index(kind) for kind in kinds])
        return int(mine.sum())

    assert gathers(H1, "W") == 4 * (4 * 2 + 1)
    assert gathers(H1, "I", "W") == gathers({"pp": 2}, "B")


def kept_for_weights(block: Block) -> float:
    """Return the bytes that a block keeps from I to W: inputs and outputs' gradients."""
    return sum(o.kept_bytes + o.output_grad_bytes for o in block.operators if o.weight_grad)


# Layer of 64 wide, 4 heads of 16, inner 160, 2 bytes, 32 tokens (llama: no bias, no dropout):
# inputs 64 (qkv) + 64 (proj) + 64 (fc1) + 160 (fc2) and gradients 128 + 64 + 320 + 64 a token.
def test_a_layer_holds_inputs_and_gradients_of_products(
    scenario_of: ScenarioOf, llama: Model
) -> None:
    layer = blocks(llama, shapes(scenario_of(model=llama))).layer
    assert kept_for_weights(layer) == 2 * 32 * (64 + 64 + 64 + 160 + 128 + 64 + 320 + 64)


# One microbatch on one stage of a pipeline of two: after F everything that is kept, after I what W
# needs, after W nothing.
@pytest.mark.parametrize("detail", ["kernel", "layer", "stage"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_memory_falls_with_i_and_ends_with_w(
    scenario_of: ScenarioOf, llama: Model, recompute: str, detail: str
) -> None:
    s = scenario_of(
        model=llama, plan={**H1, "recompute": recompute}, run={**ONCE, "detail": detail}, batch=1
    )
    parts, result = blocks(llama, shapes(s)), sim.simulate(s)
    first = parts.layer.operators[0].kept_bytes
    core = sum(o.kept_bytes - (o.core_input_bytes or 0.0)
               for o in parts.layer.operators if o.core_input_bytes is not None)  # fmt: skip
    layers = {"none": 2 * parts.layer.kept_bytes, "full": 2 * first,
              "selective": 2 * (parts.layer.kept_bytes - core)}[recompute]  # fmt: skip
    ends = [(0, layers + parts.embedding.kept_bytes, parts.embedding),
            (1, layers + parts.head.kept_bytes, parts.head)]  # fmt: skip
    p, t = result.program, result.timeline
    for rank, after_forward, other in ends:
        ticks, held = result.memory.only("activations").of_rank(rank)
        for kind, expected in (
            ("F", after_forward),
            ("I", 2 * kept_for_weights(parts.layer) + kept_for_weights(other)),
            ("W", 0.0),
        ):
            end = t.end[(p.rank == rank) & (p.action == ACTIONS.index(kind)) & (p.stream == 0)]
            # on the last rank I begins where F ends
            side: Literal["left", "right"] = "left" if kind == "F" else "right"
            assert held[np.searchsorted(ticks, end.max(), side=side) - 1] == expected, kind


# Question 12: F = I = W = 1: 3 units of work without recomputation; 4 where I computes a layer
# again and keeps it; 5 where I and W both do. Here in forwards of layers.
@pytest.mark.parametrize(
    ("plan", "forwards"),
    [({}, 1), ({"recompute": "full"}, 2), ({"recompute": "full", "recompute_again": True}, 3)],
)
def test_question_12_recomputation_runs_forward_once_or_twice_more(
    scenario_of: ScenarioOf, plan: dict[str, Any], forwards: int
) -> None:
    kernels = work_of(lower(scenario_of(plan=H1 | plan, run=ONCE)), "F", "I", "W")
    assert kernels["fc1"] == forwards * 4 * 4  # layers x microbatches
    assert kernels["fc1 dgrad"] == kernels["fc1 wgrad"] == 4 * 4


# From I to W only the layer's input and gradients of outputs are alive: less than what I has
# computed again, and time is given for it.
def test_computing_again_twice_takes_time_and_spares_memory(
    scenario_of: ScenarioOf, llama: Model
) -> None:
    plan = {**H1, "schedule": "ZB-H2", "recompute": "full"}
    once, twice = (
        sim.simulate(scenario_of(model=llama, plan={**plan, "recompute_again": again}, batch=8))
        for again in (False, True)
    )
    assert twice.step_time_s > once.step_time_s
    assert (twice.activations.peak < once.activations.peak).all()


@pytest.mark.parametrize(
    ("plan", "run", "sentence"),
    [
        ({**H1, "dp": 2, "zero": 2}, {}, "zero 2 .* splits backward"),
        ({**H1, "recompute_again": True}, {}, "recompute_again: true is for plan.recompute 'full'"),
        (
            {"pp": 2, "recompute": "full", "recompute_again": True}, {},
            "a schedule that splits backward, not 'full' and 1F1B",
        ),
        ({**H1, "post_validation": True}, {}, "post_validation: true has no effect"),
        ({"post_validation": True}, {"clip_grad": True}, "post_validation: true has no effect"),
        ({"pp": 2, "schedule": "PipeDream", "dp": 2, "zero": 1}, {}, "zero 1 with .* after every"),
        ({"pp": 2, "schedule": "PipeDream"}, {"clip_grad": True}, "run.clip_grad with plan.sched"),
        ({"pp": 2, "schedule": "PipeDream"}, {}, "tiny-gpt's tied embedding with plan.schedule"),
        (
            {"pp": 2, "chunks": 2, "schedule": "DualPipe", "dp": 2,
             "gradient_exchange": "parameter_server"}, {},
            "'parameter_server' with plan.schedule DualPipe, which has every stage on two ranks",
        ),
        (
            {"pp": 2, "chunks": 2, "schedule": "DualPipeV", "offload_activations": True}, {},
            "splits backward and runs forwards and backwards together: when activations come back",
        ),
    ],
)  # fmt: skip
def test_what_halves_do_not_go_with_is_refused(
    scenario_of: ScenarioOf, plan: dict[str, Any], run: dict[str, Any], sentence: str
) -> None:
    batch = 4 * plan.get("dp", 1)
    with pytest.raises(DescriptionError, match=sentence):
        scenario_of(plan=plan, run=run, batch=batch)


# Buckets of a byte: each product's gradient is summed as its W of the last microbatch ends.
@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_are_summed_in_the_last_w(
    scenario_of: ScenarioOf, llama: Model, zero: int
) -> None:
    s = scenario_of(
        model=llama, plan={**H1, "dp": 2, "bucket_size": 1.0, "zero": zero}, run=ONCE
    )  # fmt: skip
    p = lower(s)
    sums = np.flatnonzero(p.stream == p.streams.index("reduce" if zero else "dp"))
    assert {(ACTIONS[a], m) for a, m in zip(p.action[sums], p.microbatch[sums], strict=True)} == {
        ("W", 3)
    }
    by_stage: Counter[int] = Counter()
    for op in sums.tolist():
        cost = p.costs[p.cost[op]]
        assert isinstance(cost, Flow)
        by_stage[int(p.stage[op])] += int(cost.bytes)
    assert [by_stage[stage] for stage in range(2)] == [2 * m.params for m in static_memory(s)]


# Frozen layers 0 and 1 are stage 0: it has no backward, and stage 1 sends none back.
def test_a_frozen_stage_has_neither_half(scenario_of: ScenarioOf, llama: Model) -> None:
    s = scenario_of(model=llama, plan=H1, run={**ONCE, "frozen_layers": 2})
    p = lower(s)
    halves = np.isin(p.action, [ACTIONS.index(kind) for kind in ("I", "W")])
    assert set(p.stage[halves].tolist()) == {1}
    assert not (p.action == ACTIONS.index("SEND_B")).any()


def test_adapters_have_their_gradients_in_w(scenario_of: ScenarioOf, llama: Model) -> None:
    s = scenario_of(
        model=llama, plan=H1,
        run={**ONCE, "lora_rank": 4, "lora_targets": ("qkv",), "detail": "kernel"},
    )  # fmt: skip
    result = sim.simulate(s)
    kernels = set(work_of(result.program, "W"))
    assert {name for name in kernels if "accumulation" not in name} == {
        "qkv A wgrad",
        "qkv B wgrad",
    }
    assert [result.memory.of_rank(rank)[1][-1] for rank in (0, 1)] == [0.0, 0.0]


# F = I = W on equal stages: after its first one, a step of ZB-H2 takes m (F + I + W), for the
# ranks' idle times at its two ends fit together. That needs no meeting of ranks between steps.
@pytest.mark.parametrize(("clip", "post"), [(False, False), (True, True), (True, False)])
def test_steps_of_zb_h2_are_parallelograms(
    scenario_of: ScenarioOf, llama: Model, clip: bool, post: bool
) -> None:
    model = replace(llama, num_hidden_layers=4, vocab_size=8)
    s = scenario_of(
        model=model, plan={"pp": 4, "schedule": "ZB-H2", "post_validation": post},
        run={"num_steps": 4, "clip_grad": clip}, batch=16,
    )  # fmt: skip
    result = sim.simulate(s)
    p, t = result.program, result.timeline
    last = (p.step == 3) & (p.stream == 0)
    busiest = max(int((t.end - t.start)[last & (p.rank == rank)].sum()) for rank in range(4))
    bubble = result.step_time_s * 1e12 / busiest - 1
    assert (bubble < 0.02) == (post or not clip)


@pytest.mark.parametrize(("post", "expected"), [(False, {"tp", "pipeline"}), (True, {"tp"})])
def test_without_meeting_the_norm_is_not_summed_over_the_pipeline(
    scenario_of: ScenarioOf, post: bool, expected: set[str]
) -> None:
    s = scenario_of(plan={**H1, "tp": 2, "post_validation": post}, run={**ONCE, "clip_grad": True})
    p = lower(s)
    sums = np.array([isinstance(c, Flow) and c.bytes == 4 for c in p.costs])[p.cost]
    assert {p.streams[i] for i in p.stream[sums]} == expected
    assert (
        any("no update is ever taken back" in line for line in str(sim.simulate(s)).split("\n"))
        == post
    )


# Question 12, as torchtitan saw it: a split backward wins without recomputation, and loses where
# both halves compute layers again (5 units of work against the 4 of one that is whole).
@pytest.mark.parametrize(
    ("recompute", "faster"), [({}, True), ({"recompute": "full", "recompute_again": True}, False)]
)
def test_question_12_computing_again_twice_undoes_what_a_split_backward_wins(
    scenario_of: ScenarioOf, llama: Model, recompute: dict[str, Any], faster: bool
) -> None:
    model = replace(llama, num_hidden_layers=16, vocab_size=8)
    plan = {"pp": 4, "chunks": 2} | recompute
    split = scenario_of(
        model=model, plan=plan | {"schedule": "InterleavedZeroBubble"}, run=ONCE, batch=16
    )
    plan.pop("recompute_again", None)
    whole = scenario_of(
        model=model, plan=plan | {"schedule": "Interleaved1F1B"}, run=ONCE, batch=16
    )
    assert (sim.simulate(split).step_time_s < sim.simulate(whole).step_time_s) == faster
