"""vTrain's two tables: what a row describes, and where the rows of one node come from."""

import csv
from itertools import groupby

import pytest

from simulator.describe import catalog
from simulator.validate import megatron
from simulator.validate.sources import named

FOLDER = catalog.root() / "workloads/measured"


def rows(file):
    with (FOLDER / file).open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def row(file, **wanted):
    return next(r for r in rows(file) if all(r[k] == v for k, v in wanted.items()))


def milliseconds(**wanted):
    return float(row("vtrain_single_node.csv", **wanted)["iter_time_ms"])


def single(**wanted):
    return megatron.vtrain_single(row("vtrain_single_node.csv", **wanted)).scenario


def test_a_row_whose_tensor_parallelism_crosses_nodes():
    case = megatron.vtrain(row("vtrain_multi_node.csv", tp="16", micro_batch="32"))
    s = case.scenario
    assert case.measured == pytest.approx(10.5806)
    # 128 x 16 = 2048; 50257 / 2048 = 24.5, padded to 25 x 2048.
    assert s.model.vocab_size == 51200
    assert (s.cluster.num_nodes, s.cluster.node.nic.count) == (8, 4)
    assert (s.plan.recompute, s.plan.tp_overlap, s.run.clip_grad) == ("full", "grads", True)


def test_the_host_of_the_runs_on_many_nodes_is_that_of_the_catalogue():
    s = megatron.vtrain(row("vtrain_multi_node.csv", tp="8")).scenario
    assert s.cluster.node.host_launch == pytest.approx(10e-6)


def test_a_row_on_two_devices():
    s = single(n_gpus="2", pp="2")
    assert s.cluster.world_size == 2
    assert s.plan.recompute == "none"
    assert s.model.max_position_embeddings == 1024


# 50257 = 2 x 25128 + 1 = 8 x 6282 + 1: each rank has the whole part of it, and nothing is padded.
@pytest.mark.parametrize(("tp", "vocabulary"), [("1", 50257), ("2", 50256), ("8", 50256)])
def test_the_vocabulary_of_a_row_on_one_node_is_not_padded(tp, vocabulary):
    assert single(tp=tp).model.vocab_size == vocabulary


def test_a_row_on_one_node_is_described_as_its_program_adds_it_up():
    s = single(tp="2", pp="2", dp="2")
    assert (s.plan.tp_overlap, s.plan.scatter_gather, s.plan.grad_overlap) == ("none",) + (
        False,
    ) * 2
    assert (s.run.fused_accumulation, s.run.scales_loss, s.run.clip_grad) == (True, False, False)
    assert s.cluster.node.host_launch == pytest.approx(82e-6)


# Two runs of one program differ by a thousandth at least; here 160 plans of 12, 16, 20 and 24
# layers lie on a line to a millionth of a millisecond, the last digit that is printed.
def test_rows_of_one_node_lie_on_lines_over_layers():
    plan = ("hidden", "tp", "pp", "micro_batch", "global_batch")
    found = [r for r in rows("vtrain_single_node.csv") if r["dp"] == "1"]
    found.sort(key=lambda r: ([int(r[k]) for k in plan], int(r["layers"])))
    bends = []
    for _, group in groupby(found, key=lambda r: [r[k] for k in plan]):
        a, b, c, d = (float(r["iter_time_ms"]) for r in group)
        bends += [abs(a - 2 * b + c), abs(b - 2 * c + d)]
    assert len(bends) == 2 * 160
    assert max(bends) < 1e-6


# 12 layers of 12 x 1024^2 + 13 x 1024 weights, 50,257 x 1024 twice (the head is counted apart) and
# 1024 x 1024 positions: 255,129,600 numbers of 2 bytes, 487 MiB. trace/a100/AR_GPU{2,4,8}_... of
# the repository hold an all-reduce of 487 MiB in place at 2.7101, 3.5493 and 3.9879 ms.
@pytest.mark.parametrize("microbatch", ["1", "2", "4", "8"])
def test_rows_of_one_node_differ_by_entries_of_a_table_of_all_reduces(microbatch):
    each = {"hidden": "1024", "layers": "12", "tp": "1", "pp": "1", "micro_batch": microbatch}
    two, four, eight = (
        milliseconds(dp=str(dp), global_batch=str(2 * dp * int(microbatch)), **each)
        for dp in (2, 4, 8)
    )
    assert four - two == pytest.approx(3.5493 - 2.7101, abs=1e-6)
    assert eight - four == pytest.approx(3.9879 - 3.5493, abs=1e-6)


def test_the_source_says_that_its_rows_are_sums():
    (source,) = named(("vtrain-single",))
    assert "sums" in source.title
    assert "no run was measured" in source.assumed[0]
