"""The model that is trained: a transformer decoder, in Hugging Face's words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from simulator.describe.fields import Count, Probability, validate
from simulator.errors import DescriptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A decoder-only transformer; names as in Hugging Face's ``config.json``."""

    name: str
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count
    vocab_size: Count
    max_position_embeddings: Count
    norm: Literal["layer_norm", "rms_norm"]
    """`layer_norm` has a weight and a bias, `rms_norm` a weight only."""
    activation: Literal["gelu", "silu", "relu"]
    gated_mlp: bool
    """Whether the MLP multiplies an activated gate with a second projection (SwiGLU)."""
    position: Literal["learned", "rotary"]
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
    embedding_dropout: Probability = 0.0
    """Dropout after the embedding."""
    hidden_dropout: Probability = 0.0
    """Dropout after the attention and the MLP."""
    attention_dropout: Probability = 0.0

    def __post_init__(self) -> None:
        validate(self)
        if self.num_attention_heads % self.num_key_value_heads:
            raise DescriptionError(
                f"Model.num_key_value_heads: {self.num_key_value_heads} does not divide "
                f"num_attention_heads {self.num_attention_heads}"
            )
