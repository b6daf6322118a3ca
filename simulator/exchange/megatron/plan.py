"""Megatron-LM's flags of parallelism and memory, as the fields of a plan."""

from __future__ import annotations

from simulator.describe.plan import AXES
from simulator.exchange.megatron.draft import Draft
from simulator.exchange.megatron.stages import (
    OF_CHUNKS,
    OF_LAYERS,
    chunks_of,
    divide,
    most_layers,
)

SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""Stage of ZeRO of Megatron FSDP's ``--data-parallel-sharding-strategy``."""
CP_STYLES = {"p2p": "ring", "a2a": "all_to_all", "allgather": "all_gather"}
DISPATCHERS = ("allgather", "alltoall", "flex")
LIGHT = ("layernorm", "moe_act", "mla_up_proj")
"""Modules that `plan.recompute` "light" computes again, of ``--recompute-modules``: all of them,
or those of `plan.recompute_modules`."""
LEAST_BUCKET, BUCKET_OF_A_RANK = 40_000_000, 1_000_000
"""Parameters of a bucket where ``--ddp-bucket-size`` is absent: the larger of the first and, for
each data-parallel rank, the second (megatron/core/distributed/distributed_data_parallel.py)."""


def plan(draft: Draft, dp: int, *, per_node: int, gradient_bytes: int) -> None:
    """Fill the table of the plan.

    Args:
        draft: what is filled.
        dp: data-parallel degree that the cluster leaves.
        per_node: devices used in each node.
        gradient_bytes: of one parameter's gradient as it is reduced.
    """
    args = draft.args
    tp, pp = args["tensor-model-parallel-size"], args["pipeline-model-parallel-size"]
    draft.put("plan.tp", tp, "tensor-model-parallel-size")
    draft.put("plan.pp", pp, "pipeline-model-parallel-size")
    _context(draft)
    _experts(draft, tp, per_node)
    _order(draft)
    _pipeline(draft, pp, dp)
    draft.put("plan.microbatch_size", args["micro-batch-size"] or 1, "micro-batch-size")
    if not args["micro-batch-size"]:
        args.complain("micro-batch-size", "Megatron-LM needs it, and it is not given")
    _tensors(draft, tp)
    _shards(draft, dp)
    _gradients(draft, dp * args["context-parallel-size"], gradient_bytes)
    _recomputation(draft)
    _offload(draft)


def _context(draft: Draft) -> None:
    args, cp = draft.args, draft.args["context-parallel-size"]
    draft.takes("context-parallel-size", "cp-comm-type")
    if cp == 1:
        return
    draft.put("plan.cp", cp, "context-parallel-size")
    kinds = set(args["cp-comm-type"])
    if len(kinds) > 1 or not kinds <= set(CP_STYLES):
        draft.refuse("cp-comm-type", f"modelled are {', '.join(CP_STYLES)}, alike in all layers")
        return
    draft.put("plan.cp_style", CP_STYLES[kinds.pop()], "cp-comm-type")


def _experts(draft: Draft, tp: int, per_node: int) -> None:
    args, ep = draft.args, draft.args["expert-model-parallel-size"]
    draft.takes("expert-model-parallel-size", "expert-tensor-parallel-size")
    draft.takes("moe-token-dispatcher-type", "moe-enable-deepep", "moe-flex-dispatcher-backend")
    if not args["num-experts"]:
        if ep > 1:
            args.complain("expert-model-parallel-size", f"{ep} needs --num-experts")
        return
    if ep > 1:
        draft.put("plan.ep", ep, "expert-model-parallel-size")
    etp = args["expert-tensor-parallel-size"]
    etp = tp if etp is None else etp
    if etp > 1:
        draft.put("plan.etp", etp, "expert-tensor-parallel-size", "tensor-model-parallel-size")
    factor = args["moe-expert-capacity-factor"]
    if factor is not None:
        draft.put("plan.expert_capacity", factor, "moe-expert-capacity-factor")
        flag = "moe-pad-expert-input-to-capacity"
        draft.put("plan.expert_padding", args[flag], flag)
    if ep > 1:
        _dispatch(draft, beyond_a_node=ep * etp > per_node)


def _dispatch(draft: Draft, *, beyond_a_node: bool) -> None:
    """Set how tokens are sent: DeepEP and HybridEP send one once to a node, or once to a rank."""
    args, flag = draft.args, "moe-token-dispatcher-type"
    kind = args[flag]
    flags = ("moe-enable-deepep", flag, "moe-flex-dispatcher-backend")
    if kind not in DISPATCHERS:
        args.complain(flag, f"{kind!r} is not one of {', '.join(DISPATCHERS)}")
    elif kind == "allgather":
        draft.put("plan.expert_dispatch", "all_gather", *flags)
    elif kind == "flex":
        groups, most = args["moe-router-num-groups"], args["moe-router-group-topk"]
        limited = bool(beyond_a_node and groups and most and most < groups)
        dispatch = "node_limited" if limited else "deduplicated"
        draft.put("plan.expert_dispatch", dispatch, *flags)


def _order(draft: Draft) -> None:
    """Megatron-LM's ranks: tensor parallelism innermost, then context and data, stages outermost.

    With ``--use-tp-pp-dp-mapping`` data parallelism is outermost (megatron/core/parallel_state.py).
    """
    outer = ("dp", "pp") if draft.args["use-tp-pp-dp-mapping"] else ("pp", "dp")
    rest = tuple(axis for axis in AXES if axis not in outer)
    draft.put("plan.order", (*outer, *rest), "use-tp-pp-dp-mapping")
    draft.note("plan.order", "Megatron-LM's order of ranks")


def _pipeline(draft: Draft, pp: int, dp: int) -> None:
    args, chunks = draft.args, chunks_of(draft.args)
    group = "microbatch-group-size-per-virtual-pipeline-stage"
    draft.takes(*OF_CHUNKS, *OF_LAYERS, "no-overlap-p2p-communication", group)
    if pp == 1:
        return
    looped = chunks > 1
    schedule = "Interleaved1F1B" if looped else "1F1B"
    behind = OF_CHUNKS if looped else ("pipeline-model-parallel-size",)
    draft.put("plan.schedule", schedule, *behind)
    if looped:
        draft.put("plan.chunks", chunks, *OF_CHUNKS)
        _rounds(draft, pp, dp, group)
    divide(draft)
    overlaps = looped and not args["no-overlap-p2p-communication"]
    draft.put("plan.p2p_overlap", overlaps, "no-overlap-p2p-communication")
    why = "overlap in the interleaved schedule" if overlaps else "block"
    draft.note("plan.p2p_overlap", f"Megatron-LM's messages {why}")


def _rounds(draft: Draft, pp: int, dp: int, flag: str) -> None:
    """Set the microbatches of a round: as many as pipeline ranks, where the flag is absent.

    That is what the schedule does anyhow when they divide the microbatches.
    """
    args = draft.args
    batch, micro = args["global-batch-size"], args["micro-batch-size"] or 1
    even = batch is None or (batch // (micro * dp)) % pp == 0
    size = args[flag] or pp
    if size != pp or not even:
        draft.put("plan.microbatch_group", size, flag)


def _tensors(draft: Draft, tp: int) -> None:
    """Sequence parallelism, which Megatron-LM turns off without tensor parallelism, and overlap."""
    args = draft.args
    draft.takes("sequence-parallel", "tp-comm-overlap")
    if tp == 1:
        return
    draft.put("plan.sequence_parallel", args["sequence-parallel"], "sequence-parallel")
    if args["tp-comm-overlap"] and not args["sequence-parallel"]:
        args.complain("tp-comm-overlap", "Megatron-LM has it with --sequence-parallel only")
        return
    overlap = "all" if args["tp-comm-overlap"] else "grads"
    draft.put("plan.tp_overlap", overlap, "tp-comm-overlap")
    if overlap == "grads":
        draft.note("plan.tp_overlap", "Megatron-LM's backward hides what it can")


def _shards(draft: Draft, dp: int) -> None:
    """Set the stage of ZeRO and, with fewer shards than ranks, their number."""
    args = draft.args
    stage, flags = 0, ["use-distributed-optimizer"]
    if args["use-torch-fsdp2"]:
        stage, flags = 3, ["use-torch-fsdp2"]
    elif args["use-megatron-fsdp"] or args["use-custom-fsdp"]:
        strategy = args["data-parallel-sharding-strategy"]
        if strategy not in SHARDING:
            args.complain("data-parallel-sharding-strategy",
                          f"{strategy!r} is not one of {', '.join(SHARDING)}")  # fmt: skip
        stage = SHARDING.get(strategy, 0)
        flags = ["use-megatron-fsdp", "use-custom-fsdp", "data-parallel-sharding-strategy"]
    elif args["use-distributed-optimizer"]:
        stage = 1
    draft.takes("use-distributed-optimizer", "data-parallel-sharding-strategy",
                "num-distributed-optimizer-instances",
                "torch-fsdp2-no-reshard-after-forward")  # fmt: skip
    draft.put("plan.zero", stage, *flags)
    if stage == 3 and not args["use-torch-fsdp2"]:
        draft.put("plan.sharding_library", "megatron_fsdp", *flags)
    instances = args["num-distributed-optimizer-instances"]
    if stage and instances > 1:
        if dp % instances:
            args.complain("num-distributed-optimizer-instances",
                          f"{instances} does not divide the data-parallel degree {dp}")  # fmt: skip
        draft.put("plan.dp_shard", dp // instances, "num-distributed-optimizer-instances")
    if args["use-torch-fsdp2"] and args["torch-fsdp2-no-reshard-after-forward"]:
        draft.put("plan.reshard_after_forward", False, "torch-fsdp2-no-reshard-after-forward")


def _gradients(draft: Draft, ranks: int, gradient_bytes: int) -> None:
    """Set when gradients are reduced, and in what buckets; with zero 2 and 3 every backward is.

    They are summed over the ranks of data and of context parallelism.
    """
    args, zero = draft.args, draft.tables["plan"].get("zero", 0)
    draft.takes("overlap-grad-reduce", "ddp-bucket-size", "ddp-impl")
    if ranks == 1 or zero == 3:
        return
    torch_ddp = args["ddp-impl"] == "torch"
    if not args["overlap-grad-reduce"] and not torch_ddp and zero < 2:
        draft.put("plan.grad_overlap", False, "overlap-grad-reduce")
        return
    draft.put("plan.grad_overlap", True, "overlap-grad-reduce", "ddp-impl")
    if torch_ddp:
        return
    stated = args["ddp-bucket-size"]
    size = stated or max(LEAST_BUCKET, BUCKET_OF_A_RANK * ranks)
    draft.put("plan.bucket_size", f"{size * gradient_bytes / 1e6:.12g} MB", "ddp-bucket-size")
    draft.note("plan.bucket_size", f"{size} parameters of {gradient_bytes} bytes")


def _recomputation(draft: Draft) -> None:
    args = draft.args
    old = args["checkpoint-activations"] or args.said("activations-checkpoint-method")
    kind = args["recompute-granularity"] or ("full" if old else None)
    kind = "selective" if args["recompute-activations"] else kind
    flags = ("recompute-granularity", "recompute-activations", "checkpoint-activations",
             "activations-checkpoint-method")  # fmt: skip
    draft.takes(*flags, "recompute-method", "recompute-num-layers", "recompute-modules",
                "activations-checkpoint-num-layers")  # fmt: skip
    if kind is None:
        return
    if kind not in ("full", "selective"):
        args.complain("recompute-granularity", f"{kind!r} is not one of full, selective")
        return
    if kind == "selective":
        _modules(draft, flags)
        return
    draft.put("plan.recompute", "full", *flags)
    _recomputed_layers(draft, old=bool(old))


def _modules(draft: Draft, flags: tuple[str, ...]) -> None:
    """Set what of a layer is computed again: the core of attention, or all that is cheap."""
    modules = set(draft.args["recompute-modules"])
    if modules == {"core_attn"}:
        draft.put("plan.recompute", "selective", *flags)
        return
    if not modules <= set(LIGHT):
        draft.refuse("recompute-modules", f"modelled are core_attn alone, {' '.join(LIGHT)} and "
                     "whole layers")  # fmt: skip
        return
    draft.put("plan.recompute", "light", *flags, "recompute-modules")
    latent = draft.args["multi-latent-attention"]
    if any(m not in modules and (latent or m != "mla_up_proj") for m in LIGHT):
        named = [m for m in LIGHT if m in modules]
        draft.put("plan.recompute_modules", named, "recompute-modules")


def _recomputed_layers(draft: Draft, *, old: bool) -> None:
    """Set how many layers of a stage recompute, where it is not all of them."""
    args = draft.args
    names = ("activations-checkpoint-method", "activations-checkpoint-num-layers") if old else (
        "recompute-method", "recompute-num-layers")  # fmt: skip
    method, count = args[names[0]] or ("uniform" if old else None), args[names[1]] or 1
    if method not in ("uniform", "block"):
        args.complain(names[0], "Megatron-LM's full recomputation needs it: uniform or block")
        return
    largest = most_layers(draft)
    if method == "block" and count < largest:
        draft.put("plan.recompute_layers", count, names[1], names[0])
    if method == "uniform" and count > 1:
        draft.leave_out(names[1], "every layer keeps its input, not one of so many")


def _offload(draft: Draft) -> None:
    args = draft.args
    draft.takes("optimizer-offload-fraction", "cpu-offloading-num-layers")
    if args["optimizer-cpu-offload"]:
        draft.put("plan.offload_optimizer", True, "optimizer-cpu-offload")
        if args["optimizer-offload-fraction"] != 1:
            draft.refuse("optimizer-offload-fraction", "the optimizer lies on the host whole or "
                         "not at all")  # fmt: skip
    count = args["cpu-offloading-num-layers"]
    if not count:
        return
    draft.put("plan.offload_activations", True, "cpu-offloading-num-layers")
    if count < most_layers(draft):
        draft.put("plan.offload_layers", count, "cpu-offloading-num-layers")
