"""The model that is trained: a transformer, in Hugging Face's words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from simulator.describe.fields import Count, Natural, Probability, validate
from simulator.errors import DescriptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class Patches:
    """How an image becomes tokens: one a patch, and the class token before them (ViT)."""

    image_size: Count
    """Pixels along each side of the images whose positions are learned."""
    patch_size: Count
    num_channels: Count

    def __post_init__(self) -> None:
        validate(self)
        if self.image_size % self.patch_size:
            raise DescriptionError(
                f"Patches.patch_size: {self.patch_size} does not divide image_size "
                f"{self.image_size}"
            )

    @property
    def tokens(self) -> int:
        """Patches of an image, and the class token."""
        return (self.image_size // self.patch_size) ** 2 + 1


class LayerKind(NamedTuple):
    """What tells the layers of a model apart."""

    has_experts: bool
    is_causal: bool
    crosses: bool
    """Whether it attends also to what an encoder has made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A decoder, an encoder, or both; names as in Hugging Face's ``config.json``.

    An encoder that norms after each sum (BERT) is the same chain of operators as one that norms
    before attention and MLP: its embedding's norm is the first layer's first, and its last layer's
    last norm the final one.
    """

    name: str
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    """All layers: those of an encoder, then those of its decoder."""
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count
    vocab_size: Count
    """Tokens of the vocabulary; the classes where a sample is an image."""
    max_position_embeddings: Count
    norm: Literal["layer_norm", "layer_norm_no_bias", "rms_norm"]
    """`layer_norm` has a weight and a bias, the others a weight only."""
    activation: Literal["gelu", "silu", "relu", "relu2"]
    """`relu2` is the square of a ReLU."""
    gated_mlp: bool
    """Whether the MLP multiplies an activated gate with a second projection (SwiGLU)."""
    position: Literal["learned", "rotary", "alibi", "relative"]
    """`alibi` adds a fixed bias to scores (Press et al., 2021, arXiv 2108.12409), `relative` a
    learned one, by how far apart query and key are (T5: Raffel et al., 2020, arXiv 1910.10683,
    section 2.1)."""
    attention_bias: bool
    """Of the queries, keys and values, and of the output unless `output_bias` says otherwise."""
    mlp_bias: bool
    tie_word_embeddings: bool
    output_bias: bool | None = None
    """Bias of the attention's output; as `attention_bias` when absent."""
    qk_norm: bool = False
    """Whether queries and keys are normalised, each head by itself (Qwen3)."""
    attention_window: Count | None = None
    """Tokens back to which attention reaches; all when absent. Longer sequences are refused."""
    causal: bool = True
    """Whether a token attends to itself and those before it; in an encoder it does to all, also
    where a decoder follows."""
    num_decoder_layers: Natural = 0
    """The last layers, where they are a decoder that attends also to what the layers before them,
    its encoder, have made (T5); none in a model of one stack. The embedding serves both, learned
    positions with it (as NeMo's; BART has some for each)."""
    relative_attention_num_buckets: Natural = 0
    """With relative positions, the distances that are told apart: each has a number for every head,
    the same in all layers of a stack."""
    token_types: Natural = 0
    """Kinds of token, each with a learned vector beside its position's (BERT's two sentences)."""
    embedding_norm: bool = False
    """Whether the embedding is normalised before the first layer (BLOOM)."""
    head_transform: bool = False
    """Whether a hidden x hidden product, the activation and a norm precede the head (BERT)."""
    head_bias: bool = False
    pooler: bool = False
    """Whether the first token's state goes through a hidden x hidden product and a tanh into a
    second loss of two classes (BERT's next sentence)."""
    patches: Patches | None = None
    """Of a model whose samples are images; its head sees the class token alone."""
    embedding_dropout: Probability = 0.0
    """Dropout after the embedding."""
    hidden_dropout: Probability = 0.0
    """Dropout after the attention and the MLP."""
    attention_dropout: Probability = 0.0
    inner_dropout: Probability = 0.0
    """Dropout within the MLP, after its activation, and after the last norm of each stack (T5)."""
    q_lora_rank: Count | None = None
    """With latent attention, numbers that a token's queries are made from; queries come straight
    from the hidden state when absent."""
    kv_lora_rank: Count | None = None
    """Numbers that a token's keys and values are made from: multi-head latent attention
    (DeepSeek-V2, arXiv 2405.04434, section 2.1); there is none when absent."""
    qk_nope_head_dim: Count | None = None
    """With latent attention, numbers of a head's queries and keys that are not rotated."""
    qk_rope_head_dim: Count | None = None
    """With latent attention, those that are; a token has one such key for all heads."""
    v_head_dim: Count | None = None
    """With latent attention, numbers of a head's values."""
    num_experts: Count | None = None
    """Experts of a layer, to `num_experts_per_tok` of which a router sends each token; none when
    absent. Hugging Face has num_local_experts and n_routed_experts too."""
    num_experts_per_tok: Count | None = None
    moe_intermediate_size: Count | None = None
    """Inner size of one expert."""
    num_shared_experts: Natural = 0
    """Experts, beside the others, that every token goes to: together one MLP of so many times
    `moe_intermediate_size` (DeepSeekMoE, arXiv 2401.06066)."""
    first_k_dense_replace: Natural = 0
    """First layers that have an MLP of `intermediate_size` in place of experts."""
    moe_layer_freq: Count = 1
    """Of the layers after those every so-manieth has experts."""
    n_group: Count = 1
    """Groups that the experts of a layer are divided into, in order."""
    topk_group: Count = 1
    """Groups that the experts of a token are in at most (node-limited routing: DeepSeek-V3, arXiv
    2412.19437, section 2.1.2)."""
    num_nextn_predict_layers: Natural = 0
    """Layers after the last one, each of which predicts one token further ahead from the state
    before it and the embedding of the next token, with the model's embedding and head
    (multi-token prediction: DeepSeek-V3, section 2.2)."""

    def __post_init__(self) -> None:
        validate(self)
        problems = [*self._stack_problems(), *self._latent_problems(), *self._expert_problems()]
        if problems:
            raise DescriptionError(problems)
        if self.num_attention_heads % self.num_key_value_heads:
            raise DescriptionError(
                f"Model.num_key_value_heads: {self.num_key_value_heads} does not divide "
                f"num_attention_heads {self.num_attention_heads}"
            )
        if self.patches and self.max_position_embeddings != self.patches.tokens:
            raise DescriptionError(
                f"Model.max_position_embeddings: {self.max_position_embeddings} are not the "
                f"{self.patches.tokens} patches and class token of an image"
            )

    def _stack_problems(self) -> list[str]:
        """Say what relative positions lack, and what is not modelled of an encoder and decoder."""
        problems, buckets = [], self.relative_attention_num_buckets
        if (self.position == "relative") != (buckets > 0):
            problems.append(
                f"Model.relative_attention_num_buckets: {buckets} is for position 'relative', not "
                f"{self.position!r}; set 0"
                if buckets
                else "Model.relative_attention_num_buckets: missing beside position 'relative'"
            )
        decoder = self.num_decoder_layers
        if not decoder:
            return problems
        if decoder >= self.num_hidden_layers:
            problems.append(
                f"Model.num_decoder_layers: {decoder} of {self.num_hidden_layers} layers leave none"
                " to the encoder"
            )
        plain = {
            "causal": True, "token_types": 0, "embedding_norm": False, "head_transform": False,
            "pooler": False, "patches": None, "attention_window": None, "kv_lora_rank": None,
            "num_experts": None, "num_nextn_predict_layers": 0,
        }  # fmt: skip
        problems += [
            f"Model.num_decoder_layers: {decoder} with {name} {getattr(self, name)!r} is not "
            "modelled; leave one of them out"
            for name, value in plain.items()
            if getattr(self, name) != value
        ]
        if self.position == "alibi":
            problems.append(
                f"Model.num_decoder_layers: {decoder} with position 'alibi' is not modelled; "
                "'relative', 'learned' and 'rotary' are"
            )
        return problems

    def _latent_problems(self) -> list[str]:
        """Say what is missing of latent attention, or of no use without it."""
        needed = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        latent = self.kv_lora_rank is not None
        problems = [
            f"Model.{name}: {'missing beside' if latent else 'is for latent attention; set'} "
            "kv_lora_rank"
            for name in (*needed, *(() if latent else ("q_lora_rank",)))
            if (getattr(self, name) is None) == latent
        ]
        if latent and self.num_key_value_heads != self.num_attention_heads:
            problems.append(
                f"Model.num_key_value_heads: {self.num_key_value_heads} are not the "
                f"{self.num_attention_heads} heads that latent attention makes keys and values for"
            )
        if latent and not problems and self.head_dim != self.qk_head_dim:
            problems.append(
                f"Model.head_dim: {self.head_dim} is not qk_nope_head_dim + qk_rope_head_dim = "
                f"{self.qk_head_dim}"
            )
        return problems

    def _expert_problems(self) -> list[str]:
        """Say what contradicts itself of experts and of prediction further ahead."""
        problems = []
        given = [n for n in ("num_experts_per_tok", "moe_intermediate_size") if getattr(self, n)]
        if self.num_experts is None:
            plain = {"num_shared_experts": 0, "first_k_dense_replace": 0, "moe_layer_freq": 1,
                     "n_group": 1, "topk_group": 1}  # fmt: skip
            given += [name for name, value in plain.items() if getattr(self, name) != value]
            problems += [f"Model.{name}: is for experts; set num_experts" for name in given]
        elif len(given) < 2:
            problems.append(
                f"Model.num_experts: {self.num_experts} experts need num_experts_per_tok and "
                "moe_intermediate_size"
            )
        elif self.experts_per_token > self.num_experts:
            problems.append(
                f"Model.num_experts_per_tok: {self.num_experts_per_tok} is more than the "
                f"{self.num_experts} experts"
            )
        elif self.num_experts % self.n_group or self.topk_group > self.n_group:
            problems.append(
                f"Model.n_group: {self.n_group} must divide num_experts {self.num_experts} and be "
                f"no less than topk_group {self.topk_group}"
            )
        if self.num_nextn_predict_layers and self.tie_word_embeddings:
            problems.append(
                f"Model.num_nextn_predict_layers: {self.num_nextn_predict_layers} with "
                "tie_word_embeddings is not modelled; set tie_word_embeddings = false"
            )
        if self.num_nextn_predict_layers and not self.causal:
            problems.append("Model.num_nextn_predict_layers: is for decoders; causal is false")
        return problems

    @property
    def reads_images(self) -> bool:
        """Whether a sample is an image."""
        return self.patches is not None

    @property
    def is_latent(self) -> bool:
        """Whether keys and values are made from few numbers a token (MLA)."""
        return self.kv_lora_rank is not None

    @property
    def qk_head_dim(self) -> int:
        """Numbers of a head's queries and keys."""
        if self.qk_nope_head_dim is None or self.qk_rope_head_dim is None:
            return self.head_dim
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def value_head_dim(self) -> int:
        """Numbers of a head's values."""
        return self.v_head_dim or self.head_dim

    @property
    def experts_per_token(self) -> int:
        """Experts that the router sends a token to; 0 where there is none."""
        return self.num_experts_per_tok or 0

    @property
    def num_encoder_layers(self) -> int:
        """Layers before those of a decoder; 0 in a model of one stack."""
        return self.num_hidden_layers - self.num_decoder_layers if self.num_decoder_layers else 0

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer, those that predict further ahead last."""
        count = self.num_hidden_layers + self.num_nextn_predict_layers
        first, every = self.first_k_dense_replace, self.moe_layer_freq
        encoder, decodes = self.num_encoder_layers, self.num_decoder_layers > 0
        return tuple(
            LayerKind(
                has_experts=self.num_experts is not None and i >= first and i % every == 0,
                is_causal=self.causal and i >= encoder,
                crosses=decodes and i >= encoder,
            )
            for i in range(count)
        )

    @property
    def shares_embedding(self) -> bool:
        """Whether the end of the model uses the embedding's matrix: in a tied head, or to predict
        further ahead.
        """
        return self.tie_word_embeddings or self.num_nextn_predict_layers > 0
