"""Rows to scenarios: the tables that a TOML file would hold, and what is read off their results."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeAlias

from simulator.api import simulate
from simulator.describe.loader import scenario
from simulator.describe.scenario import Scenario
from simulator.units import UNITS
from simulator.validate.published import Case, Row

Table: TypeAlias = dict[str, Any]

GIB = UNITS["bytes"]["GiB"]


def at_the_end(dp: int) -> Table:
    """Return what a plan says where gradients are reduced after the last backward.

    Megatron-LM does so without ``--overlap-grad-reduce`` (DDP-impl local).
    """
    return {"grad_overlap": False} if dp > 1 else {}


BUFFERS = ["clear", "check", "scale", "copy"]
"""Passes of Megatron-LM over its gradient buffers since 2023 (param_and_grad_buffer.py, and
`check_for_nan_in_loss_and_grad` of training/arguments.py)."""
BUFFERS_2022 = ["clear", "divide", "copy"]
"""Passes of its versions from 2021 until then, whose buffers were contiguous by default
(megatron/model/distributed.py: `zero_grad_buffer`, `allreduce_gradients`)."""


VOCAB = 50257
"""Tokens of GPT-2's vocabulary, which Megatron-LM pads."""


def case(
    measured: float, model: Any, cluster: Table, plan: Table, run: Table,
    metric: Callable[[Scenario], float] | None = None,
) -> Case:  # fmt: skip
    """Return the case of a row; `metric` reads the prediction, seconds of a step when absent.

    Raises:
        DescriptionError: when the description is wrong or not built.
    """
    s = described(model, cluster, plan, run)
    return Case(measured, s, partial(metric or step_seconds, s))


def described(model: Any, cluster: Table, plan: Table, run: Table) -> Scenario:
    """Return the scenario of four tables, as a file would hold them.

    A step is simulated at the level of stages: it moves no time.
    """
    run = {"detail": "stage", **run}
    parts = {"model": model, "cluster": cluster, "plan": plan, "run": run}
    return scenario(parts, Path("scenario"))


@lru_cache(maxsize=256)
def step_seconds(s: Scenario) -> float:
    """Return the seconds of a step; rows that describe the same run share it."""
    return simulate(s).step_time_s


def allocated_gib(s: Scenario) -> float:
    """Return what torch's allocator gives out on the fullest rank, in GiB."""
    return float(simulate(s).peak_memory_bytes.max()) / GIB


def reserved_gib(s: Scenario) -> float:
    """Return what torch's allocator reserves on the fullest rank, in GiB."""
    return float(simulate(s).reserved_memory_bytes.max()) / GIB


def nodes_of(ranks: int, node: Any, size: int = 8) -> Table:
    """Return as many nodes of `size` used devices each as `ranks` fill."""
    return {
        "node": node,
        "num_nodes": max(1, ranks // size),
        "devices_per_node": min(size, ranks),
    }


def padded(vocab: int, tp: int) -> int:
    """Return a vocabulary as Megatron-LM pads it, to a multiple of 128 x tp."""
    multiple = 128 * tp
    return -(-vocab // multiple) * multiple


def gpt(row: Row, vocab: int, positions: int = 2048) -> Table:
    """Return Megatron-LM's GPT of a row with hidden, heads and layers."""
    hidden, heads = int(row["hidden"]), int(row["heads"])
    return {
        "name": "gpt",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": int(row["layers"]),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "norm": "layer_norm",
        "activation": "gelu",
        "gated_mlp": False,
        "position": "learned",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "embedding_dropout": 0.1,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
    }


def interleaved(chunks: int) -> Table:
    """Return what a plan says of a pipeline whose ranks hold so many chunks each."""
    return {"schedule": "Interleaved1F1B", "chunks": chunks} if chunks > 1 else {}


def context(cp: int, style: str) -> Table:
    """Return what a plan says of ranks that divide each sequence."""
    return {"cp": cp, "cp_style": style} if cp > 1 else {}


def overlapped(row: Row) -> Table:
    """Return what a plan says where backward's tensor-parallel collectives run beside products.

    Megatron-LM does so since late 2021 (``--no-async-tensor-model-parallel-allreduce`` turns it
    off), Transformer Engine too.
    """
    return {"tp_overlap": "grads"} if int(row["tp"]) > 1 else {}


def blocking(pp: int, tp: int = 1, *, sequence: bool = False) -> Table:
    """Return what a plan says of Megatron-LM's messages between stages.

    They block, but for interleaved schedules with ``--overlap-p2p-communication`` (2023 on), and
    each tp rank sends a part (``--no-scatter-gather-tensors-in-pipeline`` turns that off).
    """
    if pp == 1:
        return {}
    return {"p2p_overlap": False, "scatter_gather": tp > 1 and not sequence}


RANK_ORDER = {"order": ["pp", "dp", "cp", "tp"]}
"""Megatron-LM's ranks: tensor parallelism innermost, then context, data, pipeline stages outermost
(megatron/core/parallel_state.py)."""


def degrees(row: Row) -> Table:
    """Return dp, tp and pp of a row of Megatron-LM, with its order of ranks."""
    return {axis: int(row[axis]) for axis in ("dp", "tp", "pp")} | RANK_ORDER
