"""A convolution network that is trained: a residual network, in Hugging Face's words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from simulator.describe.fields import Count, validate
from simulator.errors import DescriptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNet:
    """A residual network (He et al., 2015, arXiv 1512.03385); names as in ``config.json``.

    Its layers are the residual blocks, which differ in size from stage to stage.
    """

    name: str
    model_type: Literal["resnet"]
    """What tells it from a transformer."""
    num_channels: Count
    """Channels of an image."""
    embedding_size: Count
    """Channels of the first convolution, 7 x 7 with stride 2, before the max pool."""
    hidden_sizes: tuple[Count, ...]
    """Channels that leave each stage."""
    depths: tuple[Count, ...]
    """Blocks of each stage."""
    layer_type: Literal["bottleneck", "basic"]
    """A block is 1 x 1, 3 x 3, 1 x 1 with a quarter of its channels inside, or two 3 x 3."""
    num_labels: Count
    """Classes of the last, fully connected layer."""
    downsample_in_first_stage: bool = False
    """Whether the first stage halves its input, as all others do."""
    downsample_in_bottleneck: bool = False
    """Whether a bottleneck halves in its first convolution; else in its 3 x 3 (version 1.5)."""

    def __post_init__(self) -> None:
        validate(self)
        if len(self.hidden_sizes) != len(self.depths):
            raise DescriptionError(
                f"ResNet.depths: lists {len(self.depths)} stages, hidden_sizes "
                f"{len(self.hidden_sizes)}"
            )
        odd = [size for size in self.hidden_sizes if size % 4]
        if self.layer_type == "bottleneck" and odd:
            raise DescriptionError(
                f"ResNet.hidden_sizes: 4 does not divide {odd[0]}, whose quarter is inside a block"
            )

    @property
    def reads_images(self) -> bool:
        """Whether a sample is an image."""
        return True

    @property
    def num_hidden_layers(self) -> int:
        """Residual blocks of all stages."""
        return sum(self.depths)

    @property
    def hidden_size(self) -> int:
        """Channels that enter the fully connected layer."""
        return self.hidden_sizes[-1]

    @property
    def tie_word_embeddings(self) -> bool:
        """Whether the head shares a weight: there is no embedding."""
        return False

    @property
    def shares_embedding(self) -> bool:
        """Whether anything uses an embedding's matrix: there is none."""
        return False
