"""How Megatron-LM divides layers over the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from simulator.describe.layout import read_layout
from simulator.describe.plan import Plan
from simulator.describe.stages import even_layers, listed_layers
from simulator.errors import DescriptionError
from simulator.exchange.megatron.arguments import Arguments
from simulator.exchange.megatron.draft import Draft

MOST_STAGES = 100_000
"""Stages of a pipeline."""

OF_CHUNKS = ("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank",
             "pipeline-model-parallel-layout")  # fmt: skip
"""Flags that say how many stages a pipeline rank holds; one of them may be given."""

OF_LAYERS = {
    "decoder-first-pipeline-num-layers": "first_stage_layers",
    "decoder-last-pipeline-num-layers": "last_stage_layers",
    "account-for-embedding-in-pipeline-split": "account_for_embedding_in_pipeline_split",
    "account-for-loss-in-pipeline-split": "account_for_loss_in_pipeline_split",
}
"""Flags that relieve the ends of the pipeline, and the fields of a plan that say the same."""


def layers_of(args: Arguments) -> int:
    """Return the layers of the model."""
    return int(args["num-layers"] or args["encoder-num-layers"] or 0)


def layout_of(args: Arguments) -> str | None:
    """Return the layout that is given, without the backslashes that keep a shell off it."""
    layout = args["pipeline-model-parallel-layout"]
    return None if layout is None else str(layout).replace("\\", "")


def chunks_of(args: Arguments) -> int:
    """Return the stages of each pipeline rank (``virtual_pipeline_model_parallel_size``)."""
    pp = args["pipeline-model-parallel-size"]
    said = [flag for flag in OF_CHUNKS if args[flag] is not None]
    if len(said) > 1:
        args.complain(said[0], f"it cannot be had together with --{said[1]}")
        return 1
    layout, each = layout_of(args), args["num-layers-per-virtual-pipeline-stage"]
    if layout is not None:
        return _stages(args, layout) // int(pp) or 1
    if each is not None:
        whole = layers_of(args) + _accounted(args)
        if each < 1 or whole % (pp * each):
            args.complain(said[0], f"{each} x {pp} pipeline ranks do not divide {whole} layers")
            return 1
        return int(whole // (pp * each))
    chunks = args["num-virtual-stages-per-pipeline-rank"] or 1
    if pp * chunks > MOST_STAGES:
        args.complain("pipeline-model-parallel-size", f"it makes more than {MOST_STAGES} stages")
        return 1
    return int(chunks)


def _stages(args: Arguments, layout: str) -> int:
    """Return the stages of a layout; they must be as many on each pipeline rank."""
    flag, pp = "pipeline-model-parallel-layout", args["pipeline-model-parallel-size"]
    try:
        stages = read_layout(layout)
    except DescriptionError as error:
        for problem in error.problems:
            args.complain(flag, problem)
        return int(pp)
    mtp, said = args["mtp-num-layers"] or 0, "".join(stages).count("m")
    if said != mtp:
        args.complain(flag, f"it has {said} layers that predict further tokens, the model {mtp}")
    if len(stages) % pp:
        args.complain(flag, f"{len(stages)} stages are no multiple of the {pp} pipeline ranks")
    return len(stages)


def divide(draft: Draft) -> None:
    """Set how the layers are divided; Megatron-LM divides evenly what the ends do not take."""
    args, pp = draft.args, draft.args["pipeline-model-parallel-size"]
    layout = layout_of(args)
    if layout is not None:
        draft.put("plan.layout", layout, "pipeline-model-parallel-layout")
        return
    for flag, key in OF_LAYERS.items():
        if args[flag] is not None and args[flag] is not False:
            draft.put(f"plan.{key}", args[flag], flag)
    ends = [args[flag] for flag in list(OF_LAYERS)[:2] if args[flag] is not None]
    ranks = pp - len(ends)
    rest = layers_of(args) - sum(ends) if ends else layers_of(args) + _accounted(args)
    if rest < 0 or (rest % ranks if ranks else rest):
        what = "the others" if ends else "pipeline ranks"
        args.complain("num-layers", f"{ranks} {what} do not divide {rest} layers evenly")


def _accounted(args: Arguments) -> int:
    """Return how many layers embedding and loss are counted as."""
    return sum(args[flag] for flag in list(OF_LAYERS)[2:])


def most_layers(draft: Draft) -> int:
    """Return the layers of the largest stage, or 0 where the division is wrong."""
    said = ("pp", "chunks", "schedule", "layout", *OF_LAYERS.values())
    table = {k: v for k, v in draft.tables["plan"].items() if k in said}
    try:
        plan = Plan(**table)
        return max(listed_layers(plan) or even_layers(plan, layers_of(draft.args)))
    except DescriptionError:
        return 0  # the scenario says what is wrong


def layout_text(counts: Sequence[int], mtp: int = 0) -> str:
    """Return the layout of stages with so many layers each."""
    bodies = ["" if not n else "t" if n == 1 else f"t*{n}" for n in counts]
    end = f"{'m' * mtp}L"
    if len(bodies) == 1:
        return f"E{bodies[0]}{end}"
    first, *middle, last = bodies
    runs = ((body, len(list(group))) for body, group in groupby(middle))
    inner = "".join(f"{body}|" if n == 1 else f"({body}|)*{n}" for body, n in runs)
    return f"E{first}|{inner}{last}{end}"
