"""Megatron-LM's flags of batch and arithmetic, as the fields of a run."""

from __future__ import annotations

from simulator.describe.run import FP32_BYTES, PRECISIONS
from simulator.exchange.megatron.arguments import Arguments
from simulator.exchange.megatron.draft import Draft

SCALING = {"delayed": "delayed", "tensorwise": "current", "mxfp8": "mxfp8"}
"""``run.fp8_scaling`` of ``--fp8-recipe``."""
ATTENTION = {"auto": "flash", "flash": "flash", "fused": "flash",
             "unfused": "unfused", "local": "unfused"}  # fmt: skip
"""``run.attention`` of ``--attention-backend``; auto and fused take the library's best kernels."""
LINEAR = {"transformer_engine": "transformer_engine", "local": "megatron"}
"""``run.linear_layers`` of ``--transformer-impl``, where accumulation is fused."""


def gradient_bytes(args: Arguments) -> int:
    """Return the bytes of a gradient as it is accumulated and reduced."""
    return FP32_BYTES if _fp32_gradients(args) else PRECISIONS[_precision(args)].gradient


def _precision(args: Arguments) -> str:
    """Return the mode of arithmetic; Megatron-LM's is fp32 where no flag says another."""
    if args["fp8-format"]:
        return "fp8"
    return "bf16" if args["bf16"] else "fp16" if args["fp16"] else "fp32"


def _fp32_gradients(args: Arguments) -> bool:
    """Return whether gradients are fp32: with bf16 unless it is turned off, with fp16 if asked."""
    if args["bf16"]:
        return not args["grad-reduce-in-bf16"] and args["main-grads-dtype"] == "fp32"
    return bool(args["accumulate-allreduce-grads-in-fp32"])


def run(draft: Draft, dp: int) -> None:
    """Fill the table of the run."""
    args = draft.args
    batch, micro = args["global-batch-size"], args["micro-batch-size"] or 1
    draft.put("run.global_batch_size", batch or micro * dp, "global-batch-size")
    if not batch:
        draft.note("run.global_batch_size", "one microbatch of each data-parallel rank by default")
    length = args["seq-length"] or args["encoder-seq-length"]
    if not length:
        args.complain("seq-length", "Megatron-LM needs it, and it is not given")
    draft.put("run.sequence_length", length or 1, "seq-length", "encoder-seq-length")
    _arithmetic(draft)
    _optimizer(draft)
    _gradient_passes(draft)
    _loss(draft)
    fused = not args["no-gradient-accumulation-fusion"]
    draft.put("run.fused_accumulation", fused, "no-gradient-accumulation-fusion")
    impl = args["transformer-impl"]
    if impl not in LINEAR:
        args.complain("transformer-impl", f"{impl!r} is not one of {', '.join(LINEAR)}")
        return
    draft.takes("transformer-impl")
    if fused:
        draft.put("run.linear_layers", LINEAR[impl], "transformer-impl")
    _attention(draft, impl)
    _routing(draft)


def _routing(draft: Draft) -> None:
    """Set what of the routing of experts is one kernel."""
    args, flags = draft.args, ("moe-permute-fusion", "moe-router-fusion")
    if not args["num-experts"]:
        draft.takes(*flags)
        return
    permutes, routes = (args[flag] for flag in flags)
    if routes and not permutes:
        draft.leave_out("moe-router-fusion", "without --moe-permute-fusion torch's operators route")
    fusion = "none" if not permutes else "all" if routes else "permutation"
    draft.put("run.expert_fusion", fusion, *flags)


def _arithmetic(draft: Draft) -> None:
    args, precision = draft.args, _precision(draft.args)
    if args["bf16"] and args["fp16"]:
        args.complain("fp16", "it cannot be had together with --bf16")
    draft.put("run.precision", precision, "fp8-format", "bf16", "fp16")
    if precision == "fp32":
        draft.note("run.precision", "without --bf16 and --fp16")
    draft.takes("fp8-recipe", "fp8-param-gather", "grad-reduce-in-bf16",
                "accumulate-allreduce-grads-in-fp32", "main-grads-dtype")  # fmt: skip
    if precision == "fp8":
        recipe = args["fp8-recipe"]
        if not args["bf16"]:
            args.complain("fp8-format", "fp8 is modelled beside --bf16")
        if recipe in SCALING:
            draft.put("run.fp8_scaling", SCALING[recipe], "fp8-recipe")
        else:
            draft.put("run.fp8_scaling", "current", "fp8-recipe")
            draft.leave_out("fp8-recipe", "a tensor has one scale, found from its own values")
        if args["fp8-param-gather"]:
            draft.put("run.fp8_weights", True, "fp8-param-gather")
    if precision != "fp32" and _fp32_gradients(args):
        draft.put("run.gradient_dtype", "fp32", "grad-reduce-in-bf16" if args["bf16"] else
                  "accumulate-allreduce-grads-in-fp32")  # fmt: skip


def _optimizer(draft: Draft) -> None:
    """Megatron-LM's Adam decouples weight decay, as AdamW; its SGD has a momentum."""
    args, kind = draft.args, draft.args["optimizer"]
    draft.takes("sgd-momentum")
    momentum = "momentum" if args["sgd-momentum"] else "sgd"
    known = {"adam": "adamw", "sgd": momentum, "muon": "muon"}
    if kind not in known:
        draft.refuse("optimizer", f"modelled are {', '.join(known)}")
        return
    moments = ("exp-avg-dtype", "exp-avg-sq-dtype")
    draft.takes(*moments)
    kinds = {args[flag] for flag in moments}
    if kind == "adam" and kinds == {"bf16"}:
        draft.put("run.optimizer", "adamw_bf16", "optimizer", *moments)
    else:
        draft.put("run.optimizer", known[kind], "optimizer")
        for flag in moments:
            if args[flag] != "fp32":
                draft.leave_out(flag, "moments are in fp32, or both in bf16")
    draft.put("run.clip_grad", args["clip-grad"] > 0, "clip-grad")


def _gradient_passes(draft: Draft) -> None:
    """Set the passes over gradient buffers, which torch's DDP and sharded gradients have not.

    A loss per token divides by the tokens in place of the ranks, on one rank too. Moments that are
    not in fp32 need the optimizer that takes gradients and weights as they are.
    """
    args, key = draft.args, "run.gradient_passes"
    flags = ("no-check-for-nan-in-loss-and-grad", "ddp-average-in-collective",
             "calculate-per-token-loss", "use-precision-aware-optimizer")  # fmt: skip
    draft.takes(*flags)
    if draft.tables["plan"].get("zero", 0) > 1 or args["ddp-impl"] == "torch":
        return
    unchecked, averaged, per_token, aware = (args[flag] for flag in flags)
    low = aware or {args["exp-avg-dtype"], args["exp-avg-sq-dtype"]} != {"fp32"}
    scaling = "divide" if per_token else None if averaged else "scale"
    passes = ("clear", None if unchecked else "check", scaling, None if low else "copy")
    draft.put(key, [name for name in passes if name], *flags)
    if not args.said(*flags):
        draft.note(key, "Megatron-LM's gradient buffers and fp32 optimizer")


def _loss(draft: Draft) -> None:
    """Set whether the loss is Transformer Engine's; Megatron-LM's own fused one is taken as its
    unfused one.
    """
    args, flags = draft.args, ("cross-entropy-loss-fusion", "cross-entropy-fusion-impl")
    fuses, impl = (args[flag] for flag in flags)
    draft.takes(*flags)
    if impl not in ("native", "te"):
        args.complain("cross-entropy-fusion-impl", f"{impl!r} is not one of native, te")
    elif fuses and impl == "native":
        draft.leave_out("cross-entropy-loss-fusion", "the loss runs as Megatron-LM's unfused one")
    elif fuses:
        draft.put("run.fused_loss", True, *flags)


def _attention(draft: Draft, impl: str) -> None:
    """Set whether the matrix of scores is written: by local layers, unless they are told not to."""
    args, backend = draft.args, draft.args["attention-backend"]
    backend = backend.removeprefix("AttnBackend.")
    if backend not in ATTENTION:
        args.complain("attention-backend", f"{backend!r} is not one of {', '.join(ATTENTION)}")
        return
    kind = ATTENTION[backend]
    if impl == "local" and not args.said("attention-backend", "use-flash-attn"):
        kind = "unfused"
    flags = ("attention-backend", "use-flash-attn", "transformer-impl")
    draft.put("run.attention", kind, *flags)
