"""Where stages lie: V shapes, two ranks for each stage, and what is summed and held there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import simulator as sim
from simulator.describe.model import Model
from simulator.describe.scenario import Scenario
from simulator.errors import DeadlockError, DescriptionError
from simulator.lower import lower
from simulator.lower.layers import num_parameters
from simulator.lower.memory import buffer_bytes, rank_memory, static_memory
from simulator.lower.places import layout
from simulator.program import ACTIONS, Flow, Program
from simulator.schedules import SCHEDULES

ScenarioOf = Callable[..., Scenario]

V = {"pp": 2, "chunks": 2, "schedule": "ZBVZeroBubble"}
"""Four stages: 0 and 3 on rank 0, 1 and 2 on rank 1."""
DUAL = {"pp": 4, "chunks": 2, "schedule": "DualPipe"}
"""Four stages: r and 3 - r on rank r; microbatches 0 to 3 enter at rank 0, the others at rank 3."""
ONCE = {"num_steps": 1}


def pairs_of(program: Program, kind: str) -> set[tuple[int, int, int]]:
    """Return the ranks that each kind of message goes from and to, with the stage that sends."""
    rows = np.flatnonzero(program.action == ACTIONS.index(kind))
    ends = [program.groups[int(program.joint_group[program.joint[op]])].tolist() for op in rows]
    return {(*end, int(stage)) for end, stage in zip(ends, program.stage[rows], strict=True)}


def summed(program: Program, stream: str) -> dict[int, list[tuple[list[int], float]]]:
    """Return by stage the ranks and bytes of the sums on a stream, as stage's ops on a tile."""
    found: dict[int, list[tuple[list[int], float]]] = {}
    for op in np.flatnonzero(program.stream == program.streams.index(stream)).tolist():
        cost = program.costs[program.cost[op]]
        assert isinstance(cost, Flow)
        group = program.groups[int(program.joint_group[program.joint[op]])].tolist()
        found.setdefault(int(program.stage[op]), []).append((group, cost.bytes))
    return found


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ({"pp": 4}, ((0,), (1,), (2,), (3,))),
        ({"pp": 2, "chunks": 2, "schedule": "Interleaved1F1B"}, ((0, 2), (1, 3))),
        ({"pp": 2, "chunks": 2, "schedule": "LoopedBFS"}, ((0, 2), (1, 3))),
        (V, ((0, 3), (1, 2))),
        (DUAL, ((0, 3), (1, 2), (1, 2), (0, 3))),
    ],
)
def test_stages_lie_where_their_actions_are(
    scenario_of: ScenarioOf, plan: dict[str, Any], expected: tuple[tuple[int, ...], ...]
) -> None:
    s = scenario_of(plan=plan, batch=8)
    assert layout(s).stages == expected
    p = lower(s)
    held = set(zip(p.rank.tolist(), p.stage.tolist(), strict=True))
    assert held == {(rank, stage) for rank, held in enumerate(expected) for stage in held}


# Stage 1 hands to stage 2 on the same rank; 0 to 1 and 2 to 3 cross, there and back.
def test_a_v_turns_around_without_a_message(scenario_of: ScenarioOf) -> None:
    p = lower(scenario_of(plan=V, run=ONCE, batch=8))
    assert pairs_of(p, "SEND_F") == {(0, 1, 0), (1, 0, 2)}
    assert pairs_of(p, "SEND_B") == {(0, 1, 3), (1, 0, 1)}


# Half of the microbatches go down the ranks, the others up; each stage is then on the other rank.
def test_microbatches_of_a_dual_pipe_enter_at_both_ends(scenario_of: ScenarioOf) -> None:
    p = lower(scenario_of(plan=DUAL, run=ONCE, batch=8))
    down = {(r, r + 1, r) for r in range(3)}
    up = {(3 - r, 2 - r, r) for r in range(3)}
    assert pairs_of(p, "SEND_F") == down | up
    forward = p.action == ACTIONS.index("F")
    first = forward & (p.stage == 0)
    entered = set(zip(p.rank[first].tolist(), p.microbatch[first].tolist(), strict=True))
    assert entered == {(0, m) for m in range(4)} | {(3, m) for m in range(4, 8)}


# Untied: each rank of the pipeline holds two of four stages, so both halves hold the model once.
def test_both_ranks_hold_all_of_a_stage(scenario_of: ScenarioOf, llama: Model) -> None:
    s = scenario_of(model=llama, plan=DUAL, batch=8)
    static = (lower(s).static_bytes - buffer_bytes(s)).tolist()
    every = static_memory(s)
    assert static[0] == static[3] == every[0].states + every[3].states
    assert static[1] == static[2] == every[1].states + every[2].states
    assert sum(static) == 2 * 16 * num_parameters(llama)


def test_a_rank_has_one_set_of_buffers(scenario_of: ScenarioOf, llama: Model) -> None:
    s = scenario_of(model=llama, plan=V, batch=8)
    assert [held.buffers for held in rank_memory(s)] == [buffer_bytes(s)] * 2


# Ranks are dp x pp: replica d has ranks 4 d + r. Stages 0 and 3 lie on r = 0 and r = 3.
@pytest.mark.parametrize("dp", [1, 2])
def test_gradients_are_summed_over_both_ranks_and_dp(
    scenario_of: ScenarioOf, llama: Model, dp: int
) -> None:
    plan = {**DUAL, "dp": dp, "bucket_size": 1e4}
    s = scenario_of(model=llama, plan=plan, run=ONCE, batch=8 * dp)
    p, every = lower(s), static_memory(s)
    found = summed(p, "dp")
    for stage, ranks in enumerate([(0, 3), (1, 2), (1, 2), (0, 3)]):
        both = sorted(4 * d + r for d in range(dp) for r in ranks)
        assert all(sorted(group) == both for group, _ in found[stage])
        # each bucket has an op on either rank
        assert sum(size for _, size in found[stage]) == 2 * 2 * every[stage].params


# With ZeRO-1 each rank scatters over its own dp group, then both sum their shards: 0 and 3 the
# first one, 4 and 7 the second.
def test_shards_of_both_ranks_are_replicas(scenario_of: ScenarioOf, llama: Model) -> None:
    s = scenario_of(model=llama, plan={**DUAL, "dp": 2, "zero": 1}, run=ONCE, batch=16)
    p, every = lower(s), static_memory(s)
    scattered, shards = summed(p, "reduce"), summed(p, "dp")
    assert {tuple(sorted(group)) for group, _ in scattered[0]} == {(0, 4), (3, 7)}
    assert {tuple(sorted(group)) for group, _ in shards[0]} == {(0, 3)}
    assert sum(size for _, size in shards[0]) == 2 * 2 * every[0].params / 2
    assert every[0].optimizer == every[0].params * 8 / 2 + every[0].params * 4 / 2


def test_the_optimizer_runs_on_both_ranks(scenario_of: ScenarioOf, llama: Model) -> None:
    p = lower(scenario_of(model=llama, plan=DUAL, run=ONCE, batch=8))
    updates = p.action == ACTIONS.index("OPT")
    assert sorted(zip(p.rank[updates].tolist(), p.stage[updates].tolist(), strict=True)) == [
        (0, 0), (0, 3), (1, 1), (1, 2), (2, 1), (2, 2), (3, 0), (3, 3),
    ]  # fmt: skip


# The tied matrix is once on a rank of both ends: no message, one gradient, one copy in memory.
@pytest.mark.parametrize("plan", [V, DUAL])
def test_a_tied_embedding_is_one_where_both_ends_meet(
    scenario_of: ScenarioOf, gpt: Model, plan: dict[str, Any]
) -> None:
    s = scenario_of(model=gpt, plan=plan, run=ONCE, batch=8)
    untied = scenario_of(
        model=replace(gpt, tie_word_embeddings=False), plan=plan, run=ONCE, batch=8
    )
    matrix = gpt.vocab_size * gpt.hidden_size
    assert sum(stage.params for stage in static_memory(s)) == num_parameters(gpt)
    assert rank_memory(untied)[0].params - rank_memory(s)[0].params == matrix
    p = lower(s)
    assert not (p.stream == p.streams.index("tied")).any()
    # its gradient is the embedding's: the head's stage has none of it to sum over dp
    dp = lower(scenario_of(model=gpt, plan={**plan, "dp": 2}, run=ONCE, batch=16))
    copies = layout(s).copies
    sums = {stage: sum(size for _, size in rows) for stage, rows in summed(dp, "dp").items()}
    assert sums == {i: 2 * copies * one.params for i, one in enumerate(static_memory(s))}


def test_a_tied_embedding_at_two_ends_of_a_loop_is_summed(scenario_of: ScenarioOf) -> None:
    s = scenario_of(plan={**V, "schedule": "LoopedBFS"}, run=ONCE, batch=8)
    p = lower(s)
    assert (p.stream == p.streams.index("tied")).sum() == 2


def test_a_rank_of_a_v_takes_one_norm_of_both_stages(scenario_of: ScenarioOf, llama: Model) -> None:
    s = scenario_of(model=llama, plan=V, run={**ONCE, "clip_grad": True}, batch=8)
    p = lower(s)
    named = np.array([cost.name == "gradient norm" for cost in p.costs])[p.cost]
    kernels = [p.costs[cost].kernels[0].bytes for cost in p.cost[named].tolist()]  # type: ignore[union-attr]
    assert kernels == [2 * held.params for held in rank_memory(s)]


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (V, "stage s of 4 lies on pipeline rank s, from stage 2 on on rank 3 - s"),
        (DUAL, "stage s of 4 lies on pipeline ranks s and 3 - s"),
        ({**V, "schedule": "LoopedBFS"}, "stage s of 4 lies on pipeline rank s mod 2"),
    ],
)
def test_the_report_says_where_stages_lie(
    scenario_of: ScenarioOf, plan: dict[str, Any], text: str
) -> None:
    assert text in str(sim.simulate(scenario_of(plan=plan, batch=8)))


def test_a_v_gathers_no_tied_embedding(scenario_of: ScenarioOf) -> None:
    with pytest.raises(DescriptionError, match=r"zero 3 with plan\.schedule ZBVZeroBubble"):
        scenario_of(plan={**V, "dp": 2, "zero": 3}, batch=16)


# Rank 0 sends F2 before it posts the receive of I0, rank 1 waits for that: both wait.
def test_blocking_that_deadlocks_says_what_would_help(scenario_of: ScenarioOf) -> None:
    plan = {"pp": 2, "schedule": "ZB-H2", "p2p_overlap": False}
    with pytest.raises(DeadlockError, match=r"plan\.p2p_overlap = true posts receives ahead"):
        lower(scenario_of(plan=plan, batch=8))


# Work of a step: each kernel of each layer as often as under 1F1B, whatever the schedule.
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "PipeDream"])
def test_every_schedule_computes_the_same(scenario_of: ScenarioOf, llama: Model, name: str) -> None:
    def work(schedule: str) -> tuple[float, float]:
        plan = {"pp": 2, "schedule": schedule, "chunks": SCHEDULES[schedule].chunks[0]}
        p = lower(scenario_of(model=llama, plan=plan, run=ONCE, batch=8))
        passes = np.isin(p.action, [ACTIONS.index(kind) for kind in ("F", "B", "I", "W")])
        costs = [p.costs[cost] for cost in p.cost[passes & (p.stream == 0)].tolist()]
        kernels = [kernel for cost in costs for kernel in cost.kernels]  # type: ignore[union-attr]
        return sum(k.flops * k.count for k in kernels), sum(k.bytes * k.count for k in kernels)

    assert work(name) == work("1F1B")
