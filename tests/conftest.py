"""Builders that tests share: a Program from a list of ops, a Scenario from what differs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from simulator import cli
from simulator.describe.cluster import Cluster, Device, Link, Nic, Node
from simulator.describe.model import Model
from simulator.describe.plan import Plan
from simulator.describe.run import Run
from simulator.describe.scenario import Scenario
from simulator.program import ACTION_CODE, NONE, Flow, Groups, Program, Work


class Op(NamedTuple):
    """One op of a hand-made program; with a `joint` key it is a member of that flow."""

    rank: int
    ticks: int
    stream: str | None = "compute"
    after: tuple[int, ...] = ()
    joint: str | None = None
    action: str = "F"
    name: str = "op"
    step: int = 0
    desk: int | None = None


def make_program(
    ops: Sequence[Op],
    groups: Mapping[str, Sequence[int]] | None = None,
    num_ranks: int | None = None,
    servers: Sequence[int] = (),
) -> tuple[Program, np.ndarray[Any, np.dtype[np.int64]]]:
    """Return the Program of ops, ids by position, and their ticks.

    `groups` gives the ranks of a joint op where they are not those of its member ops.
    """
    keys = list(dict.fromkeys(o.joint for o in ops if o.joint is not None))
    ranks = {k: [o.rank for o in ops if o.joint == k] for k in keys} | dict(groups or {})
    streams = tuple(dict.fromkeys(["compute", *(o.stream for o in ops if o.stream)]))
    costs: list[Work | Flow] = []
    for o in ops:
        cost = Flow(o.name, float(o.ticks), 0.0) if o.joint else Work(o.name, seconds=0.0)
        if cost not in costs:
            costs.append(cost)
    sizes = [len(ranks[k]) for k in keys]

    def column(values: Sequence[int], dtype: type) -> Any:
        return np.array(values, dtype)

    program = Program(
        rank=column([o.rank for o in ops], np.int32),
        stream=column([streams.index(o.stream) if o.stream else NONE for o in ops], np.int16),
        action=column([ACTION_CODE[o.action] for o in ops], np.int8),
        stage=column([NONE] * len(ops), np.int32),
        microbatch=column([NONE] * len(ops), np.int32),
        layer=column([NONE] * len(ops), np.int32),
        step=column([o.step for o in ops], np.int32),
        cost=column([
            costs.index(Flow(o.name, float(o.ticks), 0.0) if o.joint else Work(o.name, seconds=0.0))
            for o in ops
        ], np.int32),
        joint=column([keys.index(o.joint) if o.joint else NONE for o in ops], np.int32),
        pred_offset=np.concatenate([[0], np.cumsum([len(o.after) for o in ops])]).astype(np.int64),
        preds=column([p for o in ops for p in o.after], np.int32),
        joint_group=column(list(range(len(keys))), np.int32),
        groups=Groups(
            np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
            column([r for k in keys for r in ranks[k]], np.int32),
        ),
        costs=tuple(costs),
        streams=streams,
        slot=column([NONE if o.desk is None else o.desk for o in ops] if servers else [], np.int32),
        servers=tuple(servers),
        num_ranks=num_ranks or max((o.rank for o in ops), default=0) + 1,
    )  # fmt: skip
    return program, column([o.ticks for o in ops], np.int64)


DEVICE = Device(
    name="round device", memory=1e12, memory_bandwidth=1e12, matmul_efficiency=1.0,
    memory_efficiency=1.0, launch_overhead=1e-6,
    peak={"fp32": 1e13, "tf32": 5e13, "fp16": 1e14, "bf16": 1e14},
)  # fmt: skip
LINK = Link(name="link", bandwidth=1e11, pair_bandwidth=1e11, efficiency=1.0, latency=1e-6)
NIC = Nic(name="nic", count=8, bandwidth=1e10, efficiency=1.0, latency=1e-5)
NODE = Node(name="round node", device=DEVICE, num_devices=8, link=LINK, nic=NIC)

GPT = Model(
    name="tiny-gpt", hidden_size=64, intermediate_size=256, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=4, head_dim=16, vocab_size=128,
    max_position_embeddings=32, norm="layer_norm", activation="gelu", gated_mlp=False,
    position="learned", attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
    embedding_dropout=0.1, hidden_dropout=0.1, attention_dropout=0.1,
)  # fmt: skip
LLAMA = Model(
    name="tiny-llama", hidden_size=64, intermediate_size=160, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=128,
    max_position_embeddings=32, norm="rms_norm", activation="silu", gated_mlp=True,
    position="rotary", attention_bias=False, mlp_bias=False, tie_word_embeddings=False,
)  # fmt: skip


def make_cluster(num_nodes: int = 1, devices: int = 8, **changes: Any) -> Cluster:
    """Return nodes of round numbers; changes such as ``link={"bandwidth": 1e9}`` apply to parts."""
    node = replace(
        NODE,
        num_devices=devices,
        device=replace(DEVICE, **changes.get("device", {})),
        link=replace(LINK, **changes.get("link", {})),
        nic=replace(NIC, **changes.get("nic", {})),
    )
    return Cluster(node=node, num_nodes=num_nodes)


def make_scenario(
    *,
    model: Model = GPT,
    plan: Mapping[str, Any] | None = None,
    run: Mapping[str, Any] | None = None,
    batch: int | None = None,
    sequence: int = 32,
    cluster: Cluster | None = None,
) -> Scenario:
    """Return a tiny scenario; its batch is 4 microbatches a replica unless stated."""
    p = Plan(**(plan or {}))
    return Scenario(
        name="test",
        model=model,
        cluster=cluster or make_cluster(devices=p.world_size),
        plan=p,
        run=Run(
            global_batch_size=batch or 4 * p.dp * p.microbatch_size,
            sequence_length=sequence,
            **(run or {}),
        ),
    )


@pytest.fixture(scope="session")
def op() -> type[Op]:
    return Op


@pytest.fixture(scope="session")
def program_of() -> Callable[..., Any]:
    return make_program


@pytest.fixture(scope="session")
def scenario_of() -> Callable[..., Scenario]:
    return make_scenario


@pytest.fixture(scope="session")
def cluster_of() -> Callable[..., Cluster]:
    return make_cluster


@pytest.fixture(scope="session")
def gpt() -> Model:
    return GPT


@pytest.fixture(scope="session")
def llama() -> Model:
    return LLAMA


@pytest.fixture
def trainsim(capsys, monkeypatch, tmp_path):
    """Run a command in an empty folder; return its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["trainsim", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return caught.value.code or 0, out, err

    return run
