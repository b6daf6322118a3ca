"""Layers as torchtitan's code has them run: kernels, what is kept, collectives and their pieces."""

import re

import pytest

import simulator as sim
from simulator.describe.run import Run
from simulator.errors import DescriptionError
from simulator.lower.layers import blocks, shapes
from simulator.lower.passes import block_passes
from simulator.program import Flow, Kernel, Work

TITAN = {"layer_code": "torchtitan"}
TP = {"tp": 2, "sequence_parallel": True}
TOKENS, HIDDEN, INNER, KEYS = 64, 64, 160, 32
"""Of the tiny Llama: two samples of 32 tokens; 2 of 4 heads have keys, of 16 numbers."""


def layer_of(scenario_of, llama, plan=None, **run):
    plan = {"microbatch_size": 2, **(plan or {})}
    s = scenario_of(model=llama, batch=4, plan=plan, run={**TITAN, **run})
    return {o.name: o for o in blocks(s.model, shapes(s)).layer.operators}


def kernels(parts):
    return [(p.name, p.bytes * p.count) for p in parts if isinstance(p, Kernel)]


# By torch's own count (test_torch_plain.py): 36 bytes an element forward, 92 in backward; the fp32
# input and the bf16 result before the weight are kept.
def test_a_norm_that_is_not_compiled_moves_nine_times_the_bytes(scenario_of, llama):
    norm = layer_of(scenario_of, llama)["attention norm"]
    size = TOKENS * HIDDEN
    assert kernels(norm.forward) == [("attention norm", 36 * size)]
    assert kernels(norm.input_grad) == [("attention norm grad", 92 * size)]
    assert norm.kept_bytes == 6 * size
    compiled = layer_of(scenario_of, llama, compiled=True)["attention norm"]
    assert kernels(compiled.forward) == [("attention norm", 4 * size)]


# q has 64 columns, k and v 32 each; each reads the tokens, 2 x 64 x 64 bytes. Sums of three
# gradients of them: two kernels of three tensors, or one of four.
def test_queries_keys_and_values_are_products_of_their_own(scenario_of, llama):
    qkv = layer_of(scenario_of, llama)["qkv"]
    read = 2 * TOKENS * HIDDEN
    assert kernels(qkv.forward) == [
        ("qkv q", read + 2 * HIDDEN * 64 + 2 * TOKENS * 64),
        ("qkv k", read + 2 * HIDDEN * KEYS + 2 * TOKENS * KEYS),
        ("qkv v", read + 2 * HIDDEN * KEYS + 2 * TOKENS * KEYS),
    ]
    assert kernels(qkv.input_grad)[-1] == ("qkv grad sum", 2 * 3 * read)
    fused = layer_of(scenario_of, llama, compiled=True)["qkv"]
    assert kernels(fused.input_grad)[-1] == ("qkv grad sum", 4 * read)
    flops = [p.flops for p in qkv.weight_grad if isinstance(p, Kernel) and p.matmul]
    assert flops == [2.0 * HIDDEN * n * TOKENS for n in (64, KEYS, KEYS)]


# K and V, 64 x 32 numbers each, are read and written as 64 x 64; attention keeps them as large.
def test_keys_and_values_are_repeated_for_every_query_head(scenario_of, llama):
    layer = layer_of(scenario_of, llama)
    assert kernels(layer["repeat keys"].forward) == [("repeat keys", 2 * 2 * TOKENS * (32 + 64))]
    assert layer["attention"].core_input_bytes == 2 * 3 * TOKENS * 64


# To fp32 6 bytes, multiplied as complex numbers 8, back 6, for each of 64 + 32 numbers a token.
def test_rotary_positions_are_complex_numbers(scenario_of, llama):
    rotary = layer_of(scenario_of, llama, compiled=True)["rotary"]
    assert kernels(rotary.forward) == [("rotary", 20 * TOKENS * (64 + 32))]


# The gate and what it multiplies, and the gate's function of itself.
def test_a_gate_that_is_not_compiled_keeps_its_function(scenario_of, llama):
    gate = layer_of(scenario_of, llama)["silu"]
    assert gate.kept_bytes == 3 * 2 * TOKENS * INNER
    assert kernels(gate.forward) == [("silu", 2 * 5 * TOKENS * INNER)]
    assert kernels(gate.input_grad) == [("silu grad", 2 * 9 * TOKENS * INNER)]


# 2 x 64 x 64 bytes are gathered, copied into order, and kept whole: nothing is gathered again.
def test_gathered_inputs_are_copied_and_kept(scenario_of, llama):
    layer = layer_of(scenario_of, llama, TP)
    size = 2 * TOKENS * HIDDEN
    assert layer["qkv"].kept_bytes == size
    gathers = [
        part.bytes
        for o in layer.values()
        for part in (*o.forward, *o.backward)
        if isinstance(part, Flow) and part.name == "all_gather"
    ]
    assert gathers == [size] * 2  # at a region's entrance forward, at its exit in backward
    assert kernels(layer["leave tp"].forward) == [("leave tp copy", 2 * size)]


# Of tp 2: a rank's own piece is copied out, one product beside the gather, one after it. Before a
# scatter one product, one beside it, and a sum of two pieces to one half.
def test_asynchronous_collectives_are_cut_in_a_piece_a_rank(scenario_of, llama):
    plan = {**TP, "tp_overlap": "all"}
    layer = layer_of(scenario_of, llama, plan, compiled=True)
    size = 2 * TOKENS * HIDDEN
    ahead, rest = layer["fc1 ahead"], layer["fc2 rest"]
    assert [type(p).__name__ for p in ahead.forward] == ["Kernel", "Beside", "Kernel", "Kernel"]
    assert kernels(ahead.forward)[0] == ("fc1 copy", 2 * size / 2)
    assert [type(p).__name__ for p in rest.forward] == ["Beside", "Kernel"]
    for o in (ahead, layer["fc1"], rest, layer["fc2"]):
        rows = {p.matmul[1] for p in o.forward if isinstance(p, Kernel) and p.matmul}
        assert rows == {TOKENS // 2}
    (summed,) = (o for o in layer["leave tp"].forward if isinstance(o, Kernel))
    assert summed.bytes == size + size / 2


def test_pieces_are_as_many_flops_as_the_whole(scenario_of, llama):
    def flops(overlap):
        plan = {**TP, "tp_overlap": overlap}
        layer = layer_of(scenario_of, llama, plan, compiled=True)
        parts = [p for o in layer.values() for p in (*o.forward, *o.backward)]
        return sum(p.flops * p.count for p in parts if isinstance(p, Kernel) and p.matmul)

    assert flops("all") == flops("none")


# torch's checkpoints stop once the last product's input is there: 160 x 64 x 64 x 2 FLOPs less.
def test_a_full_recomputation_stops_before_the_last_product(scenario_of, llama):
    def again(code):
        run = {"layer_code": code, "detail": "kernel"}
        plan = {"microbatch_size": 2, "recompute": "full"}
        s = scenario_of(model=llama, batch=4, plan=plan, run=run)
        passes = block_passes(s, blocks(s.model, shapes(s)).layer, shared=False, recompute="full")
        works = [x.cost for x in passes.backward if isinstance(x.cost, Work)]
        parts = [k for w in works for k in w.kernels if k.matmul and "grad" not in k.name]
        return sum(k.flops * k.count for k in parts)

    assert again("fused") - again("torchtitan") == 2.0 * TOKENS * INNER * HIDDEN


@pytest.mark.parametrize("recompute", ["none", "full", "selective-op"])
@pytest.mark.parametrize("plan", [{}, TP, {**TP, "tp_overlap": "all"}])
def test_memory_of_plain_layers_comes_and_goes(scenario_of, llama, plan, recompute):
    whole = {"dp": 2, "zero": 3, "recompute": recompute, **plan}
    for detail in ("stage", "kernel"):
        run = {**TITAN, "compiled": "tp_overlap" in plan, "detail": detail}
        memory = sim.simulate(scenario_of(model=llama, batch=4, plan=whole, run=run)).memory
        assert memory.of_rank(0)[1][-1] == pytest.approx(0.0, abs=1e-6)
        assert memory.of_rank(0)[1].min() >= -1e-6


def test_layers_that_are_no_llamas_are_refused(scenario_of):
    with pytest.raises(DescriptionError, match="norms other than RMSNorm, an MLP without a gate"):
        scenario_of(run=TITAN)  # GPT


@pytest.mark.parametrize(
    ("plan", "run", "said"),
    [
        ({"tp": 2}, {}, "plan.tp without plan.sequence_parallel"),
        ({**TP, "tp_overlap": "grads"}, {}, "plan.tp_overlap 'grads'"),
        ({**TP, "tp_overlap": "all"}, {}, "needs run.compiled = true"),
        ({}, {"attention": "unfused"}, "run.attention 'unfused'"),
    ],
)
def test_what_torchtitan_never_runs_is_refused(scenario_of, llama, plan, run, said):
    with pytest.raises(DescriptionError, match=re.escape(said)):
        scenario_of(model=llama, plan=plan, run={**TITAN, **run})


def test_an_unknown_code_of_layers_is_refused():
    with pytest.raises(DescriptionError, match="layer_code"):
        Run(global_batch_size=1, sequence_length=8, layer_code="deepspeed")
