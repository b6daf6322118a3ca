"""What the code of a layer (`run.layer_code`) cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from simulator.describe.model import Model
from simulator.describe.plan import Plan
from simulator.describe.run import Run


def layer_code_problems(model: Any, plan: Plan, run: Run) -> Iterator[str]:
    """Say why torchtitan's Llama cannot be the code of a model's layers, or of a plan's."""
    if run.layer_code != "torchtitan":
        return
    what = "run.layer_code 'torchtitan' is its Llama's layer"
    if not isinstance(model, Model):
        yield f'{what}, and {model.name} has none; set run.layer_code = "fused"'
        return
    odd = {
        "experts": model.num_experts is not None,
        "latent attention": model.is_latent,
        "a decoder behind an encoder": model.num_decoder_layers > 0,
        "norms other than RMSNorm": model.norm != "rms_norm",
        "an MLP without a gate": not model.gated_mlp,
        f"{model.position} positions": model.position != "rotary",
        "norms of queries and keys": model.qk_norm,
        "biases": model.attention_bias or model.mlp_bias,
        "dropout": model.hidden_dropout > 0 or model.inner_dropout > 0,
    }
    found = [name for name, has in odd.items() if has]
    if found:
        yield f'{what}, and {model.name} has {", ".join(found)}; set run.layer_code = "fused"'
    never = {
        "run.attention 'unfused'": run.attention == "unfused",
        "run.lora_rank": run.lora_rank is not None,
        "run.fake_quantization": run.fake_quantization,
        "run.fused_accumulation": run.fused_accumulation,
        f"plan.recompute {plan.recompute!r}": plan.recompute in ("light", "selective"),
        "plan.tp_overlap 'grads'": plan.tp_overlap == "grads",
        "plan.tp without plan.sequence_parallel": plan.tp > 1 and not plan.sequence_parallel,
    }
    for name in (name for name, has in never.items() if has):
        yield f'{what}, which never runs with {name}; leave it out or set run.layer_code = "fused"'
    if plan.tp_overlap == "all" and not run.compiled:
        yield (
            f"{what}, whose collectives torch.compile fuses with products: plan.tp_overlap 'all' "
            "needs run.compiled = true"
        )
