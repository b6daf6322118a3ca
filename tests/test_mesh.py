"""The mesh: which rank lies where, and who meets whom along its axes."""

from dataclasses import replace

import numpy as np
import pytest

from simulator.describe.plan import Plan
from simulator.errors import DescriptionError
from simulator.lower.bodies import SCOPES
from simulator.lower.mesh import Mesh
from simulator.lower.pipeline import Template
from simulator.lower.replicate import replicate
from simulator.lower.segments import STREAMS
from simulator.program import Flow


def groups(plan: Plan, scope: str) -> list[list[int]]:
    """Return the groups of ranks that one flow on each pipeline rank of a scope joins."""
    places = np.arange(plan.pp, dtype=np.int32)
    same = np.zeros(plan.pp, np.int32)
    one = Template(
        rank=places,
        stream=np.full(plan.pp, STREAMS.index(scope), np.int16),
        action=same.astype(np.int8),
        stage=places,
        microbatch=same,
        layer=same,
        step=same,
        cost=same,
        pred=same - 1,
        joint=places,
        joint_scope=np.full(plan.pp, SCOPES.index(scope), np.int8),
        joint_ranks=np.stack([places, places], axis=1),
        streams=STREAMS,
        num_ranks=plan.pp,
    )
    whole = replicate(one, Mesh.of(plan), (Flow("all_reduce", 8.0),), np.zeros(plan.pp))
    return [whole.groups[g].tolist() for g in range(len(whole.groups))]


def test_context_ranks_lie_between_pipeline_and_tensor_ranks():
    plan = Plan(dp=2, pp=2, cp=2, tp=2)
    assert groups(plan, "cp")[:4] == [[0, 2], [1, 3], [8, 10], [9, 11]]
    assert Mesh.of(plan).coordinates(13) == {"dp": 1, "pp": 1, "cp": 0, "tp": 1}


def test_gradients_are_summed_over_data_and_context_ranks_together():
    assert groups(Plan(dp=2, cp=2, tp=2), "dp") == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_consecutive_ranks_of_a_stage_divide_the_experts():
    assert groups(Plan(dp=8, ep=4), "ep") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups(Plan(dp=8, ep=4), "edp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_the_ranks_of_one_expert_are_the_innermost():
    plan = Plan(dp=4, tp=2, ep=2, etp=2)
    assert groups(plan, "etp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups(plan, "ep") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups(plan, "edp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_experts_cut_tensor_ranks_anew():
    assert groups(Plan(dp=2, tp=4, ep=8), "ep") == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_expert_groups_stay_within_a_stage_wherever_its_ranks_lie():
    plan = Plan(dp=4, pp=2, ep=2)
    assert groups(plan, "ep") == [[0, 2], [4, 6], [1, 3], [5, 7]]


def test_shards_reach_over_context_ranks():
    plan = Plan(dp=4, cp=2, zero=1, dp_shard=2)
    assert plan.shards == 4
    assert groups(plan, "unshard") == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ({"dp": 4, "ep": 3}, "ep x etp 3 must divide dp x cp x tp = 4"),
        ({"dp": 2, "tp": 6, "ep": 4}, "and divide or be a multiple of tp 6 and of cp x tp 6"),
        ({"dp": 3, "etp": 2}, "etp 2 must divide dp x cp x tp = 3"),
    ],
)
def test_experts_that_cut_across_groups_are_refused(plan, sentence):
    with pytest.raises(DescriptionError, match=sentence):
        Plan(**plan)


def test_an_axis_of_one_rank_need_not_be_in_the_order():
    plan = Plan(dp=2, pp=2, tp=2, order=("pp", "dp", "tp"))
    assert Mesh.of(plan).coordinates(5) == {"dp": 0, "pp": 1, "cp": 0, "tp": 1}
    with pytest.raises(DescriptionError, match="must name each of dp, pp, cp, tp once"):
        replace(plan, cp=2)
