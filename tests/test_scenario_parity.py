"""Every engine gives the same ticks on what scenarios lower to, folded and whole."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_parity import folds_what_agrees, same_in_all

from simulator.api import simulate
from simulator.cuts import resolved
from simulator.describe import catalog
from simulator.describe.loader import load
from simulator.describe.scenario import Scenario
from simulator.engine import Folding, run
from simulator.hardware import price
from simulator.lower import lower
from simulator.program import NONE, Work
from simulator.schedules import SCHEDULES, schedule_of, size_complaint
from simulator.schedules.layout import layout_of


def alike_however_it_runs(scenario: Scenario) -> Folding:
    """Check that folded and unfolded engines agree; return the folding."""
    program = lower(scenario)
    ticks = price(program, scenario.cluster)
    folding = Folding.none(program)
    if program.tiling is not None:
        folding = folds_what_agrees(program, ticks)
    expected = same_in_all(program, ticks)
    assert expected.makespan > 0
    for engine in ("compiled", "events"):
        assert run(program, ticks, engine, folding) == expected, engine
    return folding


@pytest.mark.parametrize("name", catalog.names("scenarios"))
def test_engines_agree_on_every_shipped_scenario(name: str) -> None:
    shipped = load(name)
    plan, nodes = shipped.plan, shipped.cluster.num_nodes
    dp = 2 if plan.dp > 8 else plan.dp  # the reference runs every rank
    microbatches = min(shipped.num_microbatches, plan.pp + 1, 5 if dp == plan.dp else 2)
    if size_complaint(plan.schedule, plan.pp, microbatches, plan.chunks):
        microbatches = 2 * plan.pp  # DualPipe's fewest
    few: dict[str, Any] = {
        "plan.dp": dp,
        "cluster.num_nodes": nodes * dp // plan.dp,
        "run.global_batch_size": dp * plan.microbatch_size * microbatches,
        "run.num_steps": 2 if dp == plan.dp else 1,
    }
    if plan.ep > dp:
        few |= {"plan.ep": dp, "plan.expert_dispatch": "all_to_all"}
    alike_however_it_runs(resolved(load(name, few)))


def contexts(data: st.DataObject, cp: int, heads: int) -> dict[str, Any]:
    """Draw how cp ranks divide sequences; heads are swapped where there are enough."""
    styles = ["ring", "all_gather", *(["all_to_all"] if heads % cp == 0 else [])]
    style = data.draw(st.sampled_from(styles))
    balances = ["zigzag"] if style == "all_to_all" else ["zigzag", "contiguous"]
    return {"cp": cp, "cp_style": style, "cp_balance": data.draw(st.sampled_from(balances))}


@settings(max_examples=90, deadline=None)
@given(data=st.data())
def test_engines_agree_on_random_plans(
    scenario_of: Any, cluster_of: Any, gpt: Any, llama: Any, data: st.DataObject
) -> None:
    dp, tp, pp = (data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 2, 4])),
                  data.draw(st.integers(1, 4)))  # fmt: skip
    cp = data.draw(st.sampled_from([1, 1, 2, 4]))
    world = dp * tp * pp * cp
    assume(world <= 24)
    model = data.draw(st.sampled_from([gpt, llama] if tp < 4 else [gpt]))
    nodes = data.draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    size = data.draw(st.integers(1, 2))
    plan = {
        "dp": dp, "tp": tp, "pp": pp, "microbatch_size": size,
        "schedule": data.draw(st.sampled_from(["naive", "GPipe", "1F1B"])),
        "order": tuple(data.draw(st.permutations(["dp", "pp", "cp", "tp"]))),
        "recompute": data.draw(st.sampled_from(["none", "full"])),
        "bucket_size": data.draw(st.sampled_from([1.0, 1e5, 25e6])),
        **(contexts(data, cp, model.num_key_value_heads // tp) if cp > 1 else {}),
    }  # fmt: skip
    alike_however_it_runs(
        scenario_of(
            model=model,
            plan=plan,
            run={
                "detail": data.draw(st.sampled_from(["stage", "layer", "kernel"])),
                "num_steps": data.draw(st.integers(1, 3 if world <= 8 else 1)),
            },
            batch=dp * size * data.draw(st.integers(1, 4 if world <= 8 else 2)),
            cluster=cluster_of(num_nodes=nodes, devices=world // nodes),
        )
    )


# Stages of any number of layers, 1 or 2, on nodes that cut pipelines anywhere: 4 layers or 8.
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_engines_agree_on_random_plans_with_chunks(
    scenario_of: Any, cluster_of: Any, gpt: Any, llama: Any, data: st.DataObject
) -> None:
    dp, tp = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (3, 1)]))
    pp, chunks = data.draw(st.sampled_from([(2, 2), (2, 4), (3, 2), (4, 2)]))
    microbatches = data.draw(st.integers(1, 7))
    assume(not size_complaint("Interleaved1F1B", pp, microbatches, chunks))
    world, stages = dp * tp * pp, pp * chunks
    nodes = data.draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    layers = data.draw(st.lists(st.integers(1, 2), min_size=stages, max_size=stages))
    model = replace(data.draw(st.sampled_from([gpt, llama])), num_hidden_layers=sum(layers))
    alike_however_it_runs(
        scenario_of(
            model=model,
            plan={
                "dp": dp, "tp": tp, "pp": pp, "chunks": chunks, "schedule": "Interleaved1F1B",
                "layers_per_stage": tuple(layers),
                "order": tuple(data.draw(st.permutations(["dp", "pp", "tp"]))),
                "recompute": data.draw(st.sampled_from(["none", "full"])),
                "bucket_size": data.draw(st.sampled_from([1.0, 1e5, 25e6])),
            },
            run={
                "detail": data.draw(st.sampled_from(["stage", "layer", "kernel"])),
                "num_steps": data.draw(st.integers(1, 2)),
            },
            batch=dp * microbatches,
            cluster=cluster_of(num_nodes=nodes, devices=world // nodes),
        )
    )  # fmt: skip


def done_by(scenario: Scenario) -> Counter[tuple[int, str]]:
    """Return how often the ranks of a pipeline run each kernel for each microbatch in a step."""
    program, done = lower(scenario), Counter[tuple[int, str]]()
    works = (program.stream == 0) & (program.microbatch != NONE) & (program.step == 0)
    for microbatch, cost in zip(program.microbatch[works], program.cost[works], strict=True):
        work = program.costs[cost]
        assert isinstance(work, Work)
        for kernel in work.kernels:
            done[int(microbatch), kernel.name] += kernel.count
    return done


# Whatever the schedule, the plan and the size: engines agree, every kernel runs as often for
# every microbatch as without a pipeline, and no activation is left.
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_schedule_does_all_work_once_on_every_engine(
    scenario_of: Any, cluster_of: Any, gpt: Any, llama: Any, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(list(SCHEDULES)))
    least, most = SCHEDULES[name].chunks
    pp, chunks = data.draw(st.integers(2, 4)), data.draw(st.integers(least, most or 3))
    dp, tp = data.draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (1, 2), (2, 2), (3, 1)]))
    microbatches = data.draw(st.integers(1, 9))
    assume(dp * tp * pp <= 12 and not size_complaint(name, pp, microbatches, chunks))
    stages = pp * chunks // SCHEDULES[name].copies
    layers = data.draw(st.lists(st.integers(1, 2), min_size=stages, max_size=stages))
    model = replace(data.draw(st.sampled_from([gpt, llama])), num_hidden_layers=sum(layers))
    found = layout_of(schedule_of(name), pp, microbatches, chunks)
    if found.updates:  # no norm, no shards, no tied embedding
        model = replace(model, tie_word_embeddings=False)
    splits = found.splits
    recompute = data.draw(st.sampled_from(["none", "selective", "full"]))
    twice = splits and recompute == "full" and data.draw(st.booleans())
    clip = not found.updates and data.draw(st.booleans())
    world = dp * tp * pp
    nodes = data.draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    sequence_parallel = tp > 1 and data.draw(st.booleans())
    detail = data.draw(st.sampled_from(["stage", "layer", "kernel"]))
    plan = {
        "dp": dp, "tp": tp, "pp": pp, "chunks": chunks, "schedule": name,
        "layers_per_stage": tuple(layers), "recompute": recompute, "recompute_again": twice,
        "zero": 0 if found.updates else data.draw(st.sampled_from([0, 1])),
        "sequence_parallel": sequence_parallel,
        "order": tuple(data.draw(st.permutations(["dp", "pp", "tp"]))),
        "bucket_size": data.draw(st.sampled_from([1.0, 1e5, 25e6])),
        "tp_overlap": data.draw(st.sampled_from(["none", "grads"])) if tp > 1 else "none",
        "post_validation": clip and data.draw(st.booleans()),
    }  # fmt: skip
    run_of = {
        "detail": detail, "num_steps": data.draw(st.integers(1, 2)), "clip_grad": clip,
        "frozen_layers": data.draw(st.integers(0, sum(layers) - 1)) if model is not gpt else 0,
    }  # fmt: skip
    made = scenario_of(
        model=model, plan=plan, run=run_of, batch=dp * microbatches,
        cluster=cluster_of(num_nodes=nodes, devices=world // nodes),
    )  # fmt: skip
    alike_however_it_runs(made)
    alone = scenario_of(
        model=model,
        plan={name: plan[name] for name in ("recompute", "tp", "sequence_parallel")},
        run=run_of | {"num_steps": 1}, batch=microbatches,
    )  # fmt: skip
    if found.updates:  # microbatches of a next step are in flight when it ends
        return
    done, expected = done_by(made), done_by(alone)
    if twice:  # forward runs once more than in a backward of one piece
        done = Counter({key: min(count, expected[key]) for key, count in done.items()})
    assert done == expected
    memory = simulate(made).activations
    for rank in range(world):
        assert abs(memory.of_rank(rank)[1][-1:].sum()) < 1e-6


# dp 3 x tp 2 on nodes of 3: the tp pair of ranks 2 and 3 lies on two nodes, the others on one. With
# tp outermost, dp 3 x tp 4 on nodes of 4: the dp group 0, 1, 2 lies on one node, 3, 4, 5 on two.
@pytest.mark.parametrize(
    ("degrees", "order", "nodes", "folded"),
    [
        ((3, 2, 1), ("dp", "pp", "tp"), 2, {"tp"}),
        ((3, 4, 1), ("tp", "pp", "dp"), 3, {"dp"}),
        ((3, 2, 2), ("dp", "pp", "tp"), 4, set()),
        ((2, 2, 2), ("dp", "pp", "tp"), 1, {"dp", "tp"}),
        ((2, 2, 2), ("dp", "pp", "tp"), 2, {"dp", "tp"}),
    ],
)
def test_replicas_that_lie_differently_are_not_folded(
    scenario_of: Any, cluster_of: Any, degrees: tuple[int, int, int], order: tuple[str, ...],
    nodes: int, folded: set[str],
) -> None:  # fmt: skip
    plan = dict(zip(("dp", "tp", "pp"), degrees, strict=True)) | {"order": order}
    cluster = cluster_of(num_nodes=nodes, devices=math.prod(degrees) // nodes)
    folding = alike_however_it_runs(scenario_of(plan=plan, cluster=cluster))
    assert set(re.findall(r"(\w+) \d+ -> 1", folding.reason)) == folded
