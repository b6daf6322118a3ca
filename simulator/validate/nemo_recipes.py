"""What the authors of NeMo's performance summaries configured, beyond what the summaries print.

The summaries name the recipes that they ran; of each row the table has the recipe of its model and
system whose version is nearest to the row's release, with the commit at which it was read. Columns
that a row prints (degrees, batches) are the row's, also where a recipe says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

from simulator.errors import DescriptionError
from simulator.validate.published import Row
from simulator.validate.scenarios import Table

DISTRIBUTED_BUCKET = 128 * 2**20
"""Parameters of a bucket of gradients (Megatron-Bridge, training/comm_overlap.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A configuration, as what it adds to a scenario."""

    source: str
    """Repository, commit and path."""
    plan: Table = field(default_factory=dict)
    run: Table = field(default_factory=dict)
    bucket: str | None = None
    """Size of a bucket of gradients, where they are reduced in buckets."""
    is_graph: bool = False
    """Whether a CUDA graph holds the whole iteration, so that the host issues no kernel."""
    is_overlapped: bool = False
    """Whether experts' exchanges run beside another microbatch (`moe_a2a_overlap`)."""
    in_switch_reduction: bool = True
    """Whether NCCL may reduce in switches (`NCCL_NVLS_ENABLE`)."""


class Key(NamedTuple):
    """Which rows a recipe is for."""

    release: str
    """Container; the product where the summary names none."""
    system: str
    model: str
    """Name in the catalogue."""
    is_sharded: bool
    """Whether the summary has FSDP."""


def _each(
    releases: str, systems: str, models: str, recipe: Recipe, *, is_sharded: bool = False
) -> dict[Key, Recipe]:
    """Return one recipe for all combinations of words."""
    words = product(releases.split(), systems.split(), models.split())
    return {Key(*three, is_sharded): recipe for three in words}


FUSED: Table = {"fused_accumulation": True, "linear_layers": "transformer_engine"}
"""`gradient_accumulation_fusion` of Transformer Engine's layers, which all recipes of Megatron-LM
have."""


# --- NeMo 24, by NeMo-Framework-Launcher ------------------------------------------------------


def _launcher(commit: str, path: str, bucket: int, gradients: str | None = None) -> Recipe:
    """Return a recipe of the launcher: no recomputation, buckets of so many MB.

    Where `grad_sync_dtype` is absent, NeMo's distributed_fused_adam sums in its own fp32. What the
    launcher sets for every job stands in its launcher_scripts/conf/config.yaml, which at
    01d0773863a5 (container 24.03.01) has `NVTE_FUSED_ATTN: 0 # Disable cudnn FA until we've tested
    it more`, so that Transformer Engine takes FlashAttention-2, and `NCCL_NVLS_ENABLE: 0`; pull
    request 422 of 2024-08-29, "enable fused attention", came after 24.07.
    """
    return Recipe(
        source=f"NVIDIA/NeMo-Framework-Launcher@{commit}:launcher_scripts/conf/training/{path}",
        run={"gradient_dtype": gradients, "attention": "flash2", **FUSED},
        bucket=f"{bucket} MB",
        in_switch_reduction=False,
    )


NEMO = {
    **_each("24.07", "DGX-H100", "gpt3-5b",
            _launcher("1e46ac6c166e", "gpt3/5b_fp8_performance.yaml", 200)),
    **_each("24.07", "DGX-H100", "gpt3-20b",
            _launcher("1e46ac6c166e", "gpt3/20b_fp8_performance.yaml", 200)),
    **_each("24.07", "DGX-H100", "gpt3-175b",
            _launcher("1e46ac6c166e", "gpt3/175b_fp8_performance.yaml", 100)),
    **_each("24.07", "DGX-H100", "nemotron-4-340b",
            _launcher("3be81fc10dfe", "nemotron/nemotron_340b.yaml", 50)),
    **_each("24.03.01.framework 24.07", "DGX-H100", "llama-2-7b",
            _launcher("064e676963bd", "llama/llama2_7b.yaml", 125, "fp32")),
    **_each("24.07", "DGX-H100", "llama-2-13b",
            _launcher("0446d2c06037", "llama/llama2_13b.yaml", 125, "fp32")),
    **_each("24.07", "DGX-H100", "llama-3-8b",
            _launcher("14860f742c67", "llama/llama3_8b.yaml", 125, "fp32")),
}  # fmt: skip
"""`activations_checkpoint_granularity` is null, or selective over 0 layers: nothing recomputes."""


# --- Megatron-Bridge --------------------------------------------------------------------------


def _bridge(
    commit: str, path: str, *, plan: Table | None = None, run: Table | None = None,
    is_graph: bool = False,
) -> Recipe:  # fmt: skip
    """Return a recipe under scripts/performance/configs, in all of which gradients are bf16.

    (`grad_reduce_in_fp32` False, of `mixed_precision` and of `ddp`.)
    """
    return Recipe(
        source=f"NVIDIA-NeMo/Megatron-Bridge@{commit}:scripts/performance/configs/{path}",
        plan=plan or {},
        run={"gradient_dtype": None, **(FUSED if run is None else run)},
        bucket=f"{2 * DISTRIBUTED_BUCKET / 1e6:.12g} MB",
        is_graph=is_graph,
    )


def _fsdp(commit: str, path: str, *, offload: int | None = None, fused: bool = False) -> Recipe:
    """Return a recipe of Megatron-FSDP.

    It keeps shards of low-precision weights beside the fp32 ones (model_weight_buffer and
    main_weight_buffer), and gathers two blocks at most (`fsdp_double_buffer`). `fused`: where
    `gradient_accumulation_fusion` is not switched off.
    """
    plan: Table = {"sharding_library": "megatron_fsdp"}
    if offload is not None:
        plan |= {"offload_activations": True, "offload_layers": offload}
    return _bridge(commit, path, plan=plan, run=None if fused else {"fused_accumulation": False})


_8B_2509 = ("0813a3f1f791", "llama3/llama3_8b_llm_pretrain.py")
_405B_2509 = ("27dfb3df3c2c", "llama31/llama31_405b_llm_pretrain.py")
_LLAMA3_2511 = ("0fa501acee1e", "llama3/workload_base_configs.py")
_LLAMA31_2511 = ("0fa501acee1e", "llama31/workload_base_configs.py")
_LLAMA3_26 = ("00919dcf1fe1", "llama/llama3_workload_base_configs.py")
_LLAMA31_26 = ("0013c9a8ed4d", "llama/llama31_workload_base_configs.py")

LLAMA = {
    **_each("25.09", "DGX-GB200 DGX-B200", "llama-3-8b", _bridge(*_8B_2509, is_graph=True)),
    **_each("25.11", "DGX-GB200", "llama-3-8b", _bridge(*_LLAMA3_2511)),
    **_each("25.11", "DGX-B200", "llama-3-8b", _bridge(*_LLAMA3_2511, is_graph=True)),
    **_each("25.11", "DGX-H100", "llama-3-8b", _fsdp(*_LLAMA3_2511), is_sharded=True),
    **_each("25.11", "DGX-GB300", "llama-3-70b", _fsdp(*_LLAMA3_2511, offload=20),
            is_sharded=True),
    **_each("25.11", "DGX-GB200", "llama-3-70b", _fsdp(*_LLAMA3_2511, offload=40),
            is_sharded=True),
    **_each("26.02.01 26.04 26.04.01", "DGX-GB300", "llama-3-70b", _fsdp(*_LLAMA3_26, offload=20),
            is_sharded=True),
    **_each("26.02.01 26.04 26.04.01", "DGX-GB200", "llama-3-70b", _fsdp(*_LLAMA3_26, offload=40),
            is_sharded=True),
    **_each("25.11", "DGX-H100", "llama-3-70b", _bridge(*_LLAMA3_2511)),
    **_each("26.02.01 26.04 26.04.01", "DGX-H100", "llama-3-70b", _bridge(*_LLAMA3_26)),
    **_each("25.09", "DGX-GB200", "llama-3-405b", _fsdp(*_405B_2509, offload=95, fused=True),
            is_sharded=True),
    **_each("25.09", "DGX-B200 DGX-H100", "llama-3-405b", _bridge(*_405B_2509)),
    **_each("25.11", "DGX-GB200", "llama-3-405b", _fsdp(*_LLAMA31_2511, offload=95, fused=True),
            is_sharded=True),
    **_each("25.11", "DGX-GB300", "llama-3-405b", _fsdp(*_LLAMA31_2511, offload=10),
            is_sharded=True),
    **_each("25.11", "DGX-B200", "llama-3-405b", _bridge(*_LLAMA31_2511)),
    **_each("25.11 26.02 26.02.01 26.04 26.04.01 26.06", "DGX-H100 DGX-GB200 DGX-GB300",
            "llama-3-405b", _bridge(*_LLAMA31_26)),
    **_each("25.11", "DGX-GB200", "llama-3-70b", _bridge(*_LLAMA3_2511)),
    **_each("26.02 26.02.01 26.04 26.04.01", "DGX-GB200 DGX-GB300", "llama-3-70b",
            _bridge(*_LLAMA3_26)),
}  # fmt: skip
"""No layer recomputes. `full_iteration` graphs as the recipes have them: that of 25.11 has none for
8B on GB200. 405B on GB200: 26's two optimizer instances are in no row that is sharded."""

_30B_2509 = ("4054233ae08b", "qwen3/qwen3_30b_a3b_llm_pretrain.py")
_235B_2509 = ("27dfb3df3c2c", "qwen3/qwen3_235b_a22b_llm_pretrain.py")
_QWEN3_2511 = ("0fa501acee1e", "qwen3/workload_base_configs.py")
_QWEN3_26 = ("01b2977e518f", "qwen/qwen3_workload_base_configs.py")
_DEEPSEEK_2511 = ("0fa501acee1e", "deepseek/workload_base_configs.py")
_DEEPSEEK_2602 = ("f0e2c37e3f82", "deepseek/deepseek_workload_base_configs.py")
_DEEPSEEK_2606 = ("042641823051", "deepseek/deepseek_workload_base_configs.py")
ROUTED: Table = {"expert_fusion": "all", **FUSED}
"""`moe_router_fusion`; `moe_permute_fusion` is set in the models' own recipes."""
DROPS: Table = {"expert_capacity": 1.0, "expert_padding": True}
"""`apply_moe_token_drop`, of runs of 25.09: the summary prints their numbers once more as such."""


def _deepseek(version: tuple[str, str], module: str) -> Recipe:
    """Return a recipe of DeepSeek-V3 that computes a module again, with moments in bf16.

    The moments are those of recipes/deepseek/deepseek_v3.py.
    """
    plan: Table = {"recompute": "light", "recompute_modules": [module]}
    return _bridge(*version, plan=plan, run={"optimizer": "adamw_bf16", **ROUTED})


def _overlapped(commit: str, path: str) -> Recipe:
    """Return a recipe with `moe_a2a_overlap`."""
    return replace(_bridge(commit, path), is_overlapped=True)


def _qwen3(commit: str, path: str, *, drops: bool = False, is_graph: bool = False) -> Recipe:
    """Return a recipe of Qwen3, in which nothing recomputes."""
    return _bridge(commit, path, plan=DROPS if drops else {}, run=ROUTED, is_graph=is_graph)


EXPERTS = {
    **_each("25.09", "DGX-GB200", "qwen3-30b-a3b", _qwen3(*_30B_2509, drops=True, is_graph=True)),
    **_each("25.09", "DGX-H100", "qwen3-30b-a3b", _qwen3(*_30B_2509, drops=True)),
    **_each("25.09", "DGX-H100", "qwen3-235b-a22b", _qwen3(*_235B_2509, drops=True)),
    **_each("25.11", "DGX-GB300 DGX-B200", "qwen3-30b-a3b", _qwen3(*_QWEN3_2511, is_graph=True)),
    **_each("25.11", "DGX-GB200", "qwen3-235b-a22b", _qwen3(*_QWEN3_2511, is_graph=True)),
    **_each("25.11", "DGX-GB300 DGX-H100", "qwen3-235b-a22b", _qwen3(*_QWEN3_2511)),
    **_each("26.02 26.02.01 26.04 26.04.01 26.06 26.06.01 26.08",
            "DGX-H100 DGX-B200 DGX-GB200 DGX-GB300", "qwen3-30b-a3b qwen3-235b-a22b",
            _qwen3(*_QWEN3_26)),
    **_each("26.02 26.02.01 26.04 26.04.01 26.06", "DGX-H100", "qwen3-235b-a22b",
            _overlapped(*_QWEN3_26)),
    **_each("25.11", "DGX-GB300", "deepseek-v3", _deepseek(_DEEPSEEK_2511, "moe_act")),
    **_each("25.11", "DGX-GB200 DGX-B200", "deepseek-v3",
            _deepseek(_DEEPSEEK_2511, "mla_up_proj")),
    **_each("26.02 26.02.01 26.04", "DGX-GB300 DGX-GB200 DGX-B200", "deepseek-v3",
            _deepseek(_DEEPSEEK_2602, "mla_up_proj")),
    **_each("26.04.01", "DGX-B200", "deepseek-v3", _overlapped(*_DEEPSEEK_2606)),
    **_each("26.06 26.06.01 26.08", "DGX-GB200 DGX-GB300", "deepseek-v3",
            _overlapped(*_DEEPSEEK_2606)),
}  # fmt: skip
"""`set_qwen3_common_configs` turns recomputation off. DeepSeek-V3 of 25.11 also computes the MLPs
of its three dense layers again (`mlp`), which is left out. All force the load to be even."""


# --- NeMo Automodel ---------------------------------------------------------------------------

AUTOMODEL = {
    **_each("NeMo-Automodel", "DGX-H100", "llama-3-70b", Recipe(
        source="NVIDIA-NeMo/Automodel@1079dfdd4beb:examples/llm_pretrain/"
        "llama3_1_70b_pretrain_benchmark_8nodes_tp1cp2pp1_0410.yaml",
        plan={"recompute": "full"},
        run={"gradient_dtype": "fp32", "fused_accumulation": False, "loss_in_place": False,
             "attention": "flash2"},
    ), is_sharded=True),
}  # fmt: skip
"""torch's FSDP: `activation_checkpointing` true, `reduce_dtype` float32, `attn_implementation` sdpa
(torch's FlashAttention-2), the loss torch's own; `enable_fsdp2_prefetch` a block ahead forward. In
backward it is two, of which one is taken. The fp32 weights that are taken too it does not have."""

RECIPES: dict[Key, Recipe] = NEMO | LLAMA | EXPERTS | AUTOMODEL


def key_of(row: Row, model: str) -> Key:
    """Return the key of a row; `model` is its name in the catalogue."""
    release = row["container"] or row["product"].replace(" ", "-")
    return Key(release, row["system"], model, row["fsdp"] not in ("", "0"))


def recipe_of(row: Row, model: str) -> Recipe:
    """Return the recipe of a row.

    Raises:
        DescriptionError: where the table has none, or one that is not modelled.
    """
    key = key_of(row, model)
    if key not in RECIPES:
        raise DescriptionError("its authors' configuration was not looked up")
    recipe = RECIPES[key]
    if recipe.is_overlapped:
        raise DescriptionError(
            "its recipe runs experts' exchanges beside another microbatch, which is not modelled"
        )
    return recipe
