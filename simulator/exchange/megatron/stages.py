"""How Megatron-LM divides layers over the stages of a pipeline."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from simulator.exchange.megatron.arguments import Arguments

_PARTS = {"E": "embedding", "t": "layer", "m": "multi-token prediction", "L": "loss"}
MOST_STAGES = 100_000
"""Stages of a pipeline."""
MOST_PARTS = 100_000
"""Letters of a layout with all repetitions written out."""


def chunks_of(args: Arguments) -> int:
    """Return the stages of each pipeline rank (``virtual_pipeline_model_parallel_size``)."""
    pp, layers = args["pipeline-model-parallel-size"], layers_of(args)
    layout = args["pipeline-model-parallel-layout"]
    each = args["num-layers-per-virtual-pipeline-stage"]
    per_rank = args["num-virtual-stages-per-pipeline-rank"]
    if sum(x is not None for x in (layout, each, per_rank)) > 1:
        args.complain(
            "num-layers-per-virtual-pipeline-stage",
            "one of it, --num-virtual-stages-per-pipeline-rank and "
            "--pipeline-model-parallel-layout may be given",
        )
        return 1
    if layout is not None:
        stages = len(_layout(args, layout))
        if stages % pp:
            args.complain(
                "pipeline-model-parallel-layout",
                f"{stages} stages are no multiple of the {pp} pipeline ranks",
            )
        return max(1, stages // int(pp))
    if each is not None:
        whole = layers + _accounted(args)
        if each < 1 or whole % (pp * each):
            args.complain(
                "num-layers-per-virtual-pipeline-stage",
                f"{each} x {pp} pipeline ranks do not divide {whole} layers",
            )
            return 1
        return int(whole // (pp * each))
    if pp * (per_rank or 1) > MOST_STAGES:
        args.complain("pipeline-model-parallel-size", f"it makes more than {MOST_STAGES} stages")
        return 1
    return max(1, per_rank or 1)


def layers_of(args: Arguments) -> int:
    """Return the layers of the model."""
    return int(args["num-layers"] or args["encoder-num-layers"] or 0)


def layers_per_stage(args: Arguments) -> tuple[int, ...] | None:
    """Return the layers of each stage, or None where all have equally many."""
    pp, layers = args["pipeline-model-parallel-size"], layers_of(args)
    layout = args["pipeline-model-parallel-layout"]
    if layout is not None:
        return _of_layout(args, layout, layers)
    first = args["decoder-first-pipeline-num-layers"]
    last = args["decoder-last-pipeline-num-layers"]
    uneven = [n for n in (first, last) if n is not None]
    whole = layers - sum(uneven) if uneven else layers + _accounted(args)
    ranks = pp - len(uneven)
    if pp == 1:
        return None
    if pp * chunks_of(args) > max(layers, 1):
        args.complain("num-layers", f"{layers} are fewer than the {pp * chunks_of(args)} stages")
        return None
    if whole < 0 or (ranks and whole % ranks) or (not ranks and whole):
        args.complain(
            "num-layers", f"{ranks} pipeline ranks do not divide {whole} of the {layers} layers"
        )
        return None
    of_rank = [whole // ranks if ranks else 0] * pp
    if first is not None:
        of_rank[0] = first
    if last is not None:
        of_rank[-1] = last
    return _over_chunks(args, of_rank)


def _over_chunks(args: Arguments, of_rank: Sequence[int]) -> tuple[int, ...] | None:
    """Divide the layers of each rank over its chunks, embedding and loss counted as layers."""
    chunks = chunks_of(args)
    if wrong := [n for n in of_rank if n % chunks]:
        args.complain(
            "num-virtual-stages-per-pipeline-rank",
            f"{chunks} stages do not divide the {wrong[0]} layers of a pipeline rank",
        )
        return None
    stages = [n // chunks for n in of_rank] * chunks
    stages[0] -= args["account-for-embedding-in-pipeline-split"]
    stages[-1] -= args["account-for-loss-in-pipeline-split"]
    return tuple(stages) if len(set(stages)) > 1 else None


def _accounted(args: Arguments) -> int:
    """Return how many layers embedding and loss are counted as."""
    names = ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split")
    return sum(args[name] for name in names)


def _of_layout(args: Arguments, layout: str, layers: int) -> tuple[int, ...] | None:
    """Return the layers of each stage of a layout, after checking its order."""
    stages = _layout(args, layout)
    parts = "".join(stages)
    mtp = args["mtp-num-layers"] or 0
    problem = ""
    if not re.fullmatch("Et*m*L", parts):
        problem = "parts must come as embedding E, layers t, multi-token prediction m, loss L"
    elif parts.count("t") != layers or parts.count("m") != mtp:
        problem = (
            f"it has {parts.count('t')} layers and {parts.count('m')} of multi-token prediction, "
            f"the model {layers} and {mtp}"
        )
    elif mtp and stages[-1].count("m") != mtp:
        problem = "multi-token prediction apart from the loss is not modelled; put m before L"
    elif "t" not in "".join(stages[:1]) or not all("t" in stage for stage in stages):
        empty = next(i for i, stage in enumerate(stages) if "t" not in stage)
        problem = f"stage {empty} has no layer, and stages without one are not modelled"
    if problem:
        args.complain("pipeline-model-parallel-layout", problem)
        return None
    counts = tuple(stage.count("t") for stage in stages)
    return counts if len(set(counts)) > 1 else None


def _layout(args: Arguments, layout: str) -> list[str]:
    """Return the letters of each stage of a layout, repetitions written out.

    The grammar is that of megatron/core/transformer/pipeline_parallel_layer_layout.py: ``|`` ends
    a stage, ``(...)*n`` and ``x*n`` repeat, commas mean nothing.
    """
    text = layout.replace(",", "")
    for pattern in (r"\(([^()]+)\)\*(\d{1,6})", r"(.)\*(\d{1,6})"):
        if sum(len(f[1]) * int(f[2]) for f in re.finditer(pattern, text)) > MOST_PARTS:
            args.complain("pipeline-model-parallel-layout", "it has more parts than any model")
            return ["EtL"]
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    if strange := set(text) - {*_PARTS, "|"}:
        known = ", ".join(f"{letter} {what}" for letter, what in _PARTS.items())
        args.complain(
            "pipeline-model-parallel-layout",
            f"{min(strange)!r} is no part of a layout; parts are {known}, and | between stages",
        )
        return ["EtL"]
    return text.split("|")


def layout_text(counts: Sequence[int], mtp: int = 0) -> str:
    """Return the layout of stages with so many layers each."""
    bodies = ["t" if n == 1 else f"t*{n}" for n in counts]
    first, *middle, last = (bodies * 2)[:2] if len(bodies) == 1 else bodies
    end = f"{'m' * mtp}L"
    if len(bodies) == 1:
        return f"E{first}{end}"
    runs = ((body, len(list(group))) for body, group in groupby(middle))
    inner = "".join(f"{body}|" if n == 1 else f"({body}|)*{n}" for body, n in runs)
    return f"E{first}|{inner}{last}{end}"
