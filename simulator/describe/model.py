"""The model that is trained: a transformer, in Hugging Face's words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A decoder or an encoder alone; names as in Hugging Face's ``config.json``.

    An encoder that norms after each sum (BERT) is the same chain of operators as one that norms
    before attention and MLP: its embedding's norm is the first layer's first, and its last layer's
    last norm the final one.
    """

    name: str
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
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
    position: Literal["learned", "rotary", "alibi"]
    """`alibi` adds a fixed bias to scores (Press et al., 2021, arXiv 2108.12409)."""
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
    """Whether a token attends to itself and those before it; in an encoder it does to all."""
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

    def __post_init__(self) -> None:
        validate(self)
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

    @property
    def reads_images(self) -> bool:
        """Whether a sample is an image."""
        return self.patches is not None
