"""A launch script of Megatron-LM as a scenario, with an account of every flag."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from simulator.describe.cluster import Cluster
from simulator.describe.loader import load_cluster, load_node, scenario
from simulator.errors import DescriptionError
from simulator.exchange.account import Imported
from simulator.exchange.megatron import model, plan, run
from simulator.exchange.megatron.arguments import Arguments, asks, read_arguments, unknown_flags
from simulator.exchange.megatron.draft import Draft
from simulator.exchange.megatron.unmodelled import NOT_MODELLED, REFUSED, group_of

DEFAULT_NODE = "dgx-h100"
"""Taken where nobody says which; a script does not."""
_OTHER_PROGRAMS = re.compile(r"(bert|t5|ict|retro|vision|vlm|multimodal|mamba|hybrid|biencoder)")


def import_megatron(
    text: str,
    *,
    name: str = "imported",
    node: str | None = None,
    nodes: int | None = None,
    cluster: Mapping[str, Any] | None = None,
    variables: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
) -> Imported:
    """Return the scenario that a launch script of Megatron-LM describes.

    Args:
        text: the script, a part of it, bare flags, or ``key: value`` settings. Nothing is run.
        name: of the scenario.
        node: a node of the catalogue, which a script does not name.
        nodes: how many; the script's where it says.
        cluster: the whole table of the cluster instead.
        variables: values of shell variables, whatever the script assigns to them.
        flags: flags laid over those of the script, as words.

    Raises:
        DescriptionError: when what is given contradicts itself, is not known, or is not modelled.
    """
    args = read_arguments(text, variables, flags)
    if not any(asked in args.words for asked in ("num-layers", "encoder-num-layers")):
        raise DescriptionError(
            "there is no --num-layers in it: not a script, a part of one, or settings of "
            "Megatron-LM that describe a model"
        )
    if found := _OTHER_PROGRAMS.search(Path(args.script).name):
        raise DescriptionError(
            f"{args.script}: what is read are decoders, as pretrain_gpt.py trains them, "
            f"not {found[1]} models; a scenario's model may be the config.json of a BERT, ViT or T5"
        )
    draft = Draft(args)
    notes = list(args.notes)
    table = _cluster(draft, node, nodes, cluster, notes)
    share = _model_parallel(args)
    used = load_cluster(table)
    world = used.world_size
    if world % share:
        args.complain("tensor-model-parallel-size", _too_few(args, used, share))
        raise DescriptionError(args.problems)
    dp = max(1, world // share)
    model.model(draft)
    plan.plan(draft, dp, per_node=used.ranks_per_node, gradient_bytes=run.gradient_bytes(args))
    run.run(draft, dp)
    _unmapped(draft)
    problems = [*args.problems, *draft.refused]
    if problems:
        raise DescriptionError(dict.fromkeys(problems))
    tables = {
        "name": name,
        "cluster": table,
        "model": {"name": name, **draft.tables["model"]},
        "plan": draft.tables["plan"],
        "run": draft.tables["run"],
    }
    notes.append(f"plan.dp is left out: it fills the cluster ({dp} with {world} devices)")
    return Imported(
        scenario=scenario(tables, Path(f"{name}.toml")),
        tables=tables,
        why=draft.why,
        mapped=tuple(args.shown(flag) for flag in args.words if flag in draft.mapped),
        without_effect=_groups(args),
        not_modelled=tuple(dict.fromkeys(draft.left_out)),
        unknown=tuple(unknown_flags(args)),
        notes=tuple(notes),
    )


def _unmapped(draft: Draft) -> None:
    """Refuse or list the flags that no table row maps."""
    args = draft.args
    for flag, unmapped in REFUSED.items():
        if asks(args, flag, unmapped.neutral):
            draft.refused.append(f"{_given(args, flag)}: {unmapped.why}")
    for flag, unmapped in NOT_MODELLED.items():
        if asks(args, flag, unmapped.neutral):
            draft.left_out.append(f"{_given(args, flag)}: {unmapped.why}")


def _given(args: Arguments, flag: str) -> str:
    return args.shown(flag) if args.said(flag) else f"--{flag}"


def _groups(args: Arguments) -> dict[str, tuple[str, ...]]:
    """Return the flags without effect by group; among them those that ask for nothing."""
    out: dict[str, tuple[str, ...]] = {}
    for flag in args.words:
        group = group_of(flag)
        unmapped = NOT_MODELLED.get(flag) or REFUSED.get(flag)
        if unmapped and not asks(args, flag, unmapped.neutral):
            group = "what is modelled anyhow"
        if group:
            out[group] = (*out.get(group, ()), f"--{flag}")
    return out


# --- the cluster ----------------------------------------------------------------------------------


def _cluster(
    draft: Draft, node: str | None, nodes: int | None, cluster: Mapping[str, Any] | None,
    notes: list[str],
) -> dict[str, Any]:  # fmt: skip
    """Return the table of the cluster: what is asked for, else what the launcher is told."""
    args = draft.args
    draft.takes("nnodes", "nproc-per-node")
    if cluster is not None:
        table = dict(cluster)
        notes.append("the cluster is as asked for, whatever the launcher is told")
        return _graphed(draft, table)
    if node is None:
        notes.append(f"the node is taken to be {DEFAULT_NODE}; say which with --node")
    table = {"node": node or DEFAULT_NODE}
    count = nodes if nodes is not None else _launcher(args, "nnodes")
    if count is None:
        raise DescriptionError(
            "how many nodes there are is not said in it; say --nodes N"
            + (" (--nnodes comes from the environment)" if args.said("nnodes") else "")
        )
    if nodes is None:
        draft.note("cluster.num_nodes", args.shown("nnodes"))
    table["num_nodes"] = count
    size, per_node = load_node(table["node"]).num_devices, _launcher(args, "nproc-per-node")
    if per_node is not None and per_node != size:
        table["devices_per_node"] = per_node
        draft.note("cluster.devices_per_node", args.shown("nproc-per-node"))
    elif per_node is None:
        notes.append(f"all {size} devices of each node are used")
    return _graphed(draft, table)


def _launcher(args: Arguments, flag: str) -> int | None:
    """Return a launcher's count, or None where it is not told or only a run would tell."""
    words = args.words.get(flag, ())
    upper = words[0].rpartition(":")[2] if len(words) == 1 else ""  # torchrun's MIN:MAX
    return int(upper) if re.fullmatch("[0-9]{1,9}", upper) and int(upper) else None


def _graphed(draft: Draft, table: dict[str, Any]) -> dict[str, Any]:
    """With CUDA graphs let the host hold no device back."""
    args = draft.args
    flags = ("cuda-graph-impl", "enable-cuda-graph", "external-cuda-graph")
    draft.takes(*flags)
    used = args["cuda-graph-impl"] != "none" or any(args[flag] for flag in flags[1:])
    if not used:
        return table
    if "node" not in table:
        draft.leave_out(flags[0], "the hosts of nodes of several kinds issue every kernel")
        return table
    node = table["node"]
    changed = {"from": node} if isinstance(node, str) else dict(node)
    draft.note("cluster.node", ", ".join(args.shown(f) for f in flags if args.said(f)))
    return {**table, "node": {**changed, "host_launch": "0 us"}}


def _model_parallel(args: Arguments) -> int:
    degrees = ("tensor", "pipeline", "context")
    sizes = [args[_size(degree)] for degree in degrees]
    for degree, size in zip(degrees, sizes, strict=True):
        if not size:
            args.complain(_size(degree), "it must be at least 1")
    return max(1, sizes[0] or 1) * max(1, sizes[1] or 1) * max(1, sizes[2] or 1)


def _size(degree: str) -> str:
    if degree == "context":
        return "context-parallel-size"
    return f"{degree}-model-parallel-size"


def _too_few(args: Arguments, used: Cluster, share: int) -> str:
    """Say that the devices are no multiple of those that hold one model."""
    nodes = share // math.gcd(share, used.ranks_per_node)
    parts = " x ".join(str(args[_size(d)]) for d in ("tensor", "pipeline", "context"))
    return (
        f"tensor x pipeline x context = {parts} = {share} devices hold one model, and "
        f"{used.num_nodes} x {used.ranks_per_node} = {used.world_size} are no multiple of it; "
        f"say --nodes {nodes}, or a multiple"
    )
