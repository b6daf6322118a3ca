"""The data path: what a sample is, who loads it and from where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from simulator.describe.fields import Bytes, Count, Natural, Range, Seconds, validate
from simulator.errors import DescriptionError, suggestion

if TYPE_CHECKING:
    from simulator.describe.scenario import Scenario

INT64, FP32 = 8, 4


class Preset(NamedTuple):
    """What a sample of a known kind takes, for each of its tokens or as a whole."""

    images: bool
    bytes: float
    """Bytes on storage, of a token or of an image."""
    seconds: float
    """Of one core, of a token or of an image."""
    source: str


PRESETS: Mapping[str, Preset] = {
    "openwebtext-tokenise": Preset(
        False, 4.4, 1e-6, "4.4 bytes of text a token, as English under GPT-2's vocabulary; a core "
        "tokenises 1 million tokens a second, ASSUMED for byte-pair encoders in native code",
    ),
    "pre-tokenised": Preset(
        False, 2.0, 2e-9, "2 bytes a token (uint16, as nanoGPT's train.bin), widened to int64 at "
        "ASSUMED 2 ns a token",
    ),
    "imagenet-decode-augment": Preset(
        True, 110e3, 10e-3, "110 kB an image (ImageNet's 1.28 million take about 140 GB); a core "
        "decodes, crops and flips ASSUMED 100 images a second",
    ),
}  # fmt: skip
"""What samples take that nobody has measured for a scenario."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """A loader on each rank that holds the first stage, as torch's DataLoader: a batch of it is a
    microbatch, batch n is loaded by worker n % workers, and workers take theirs in order.
    """

    storage: str
    """One of `cluster.storage`."""
    preset: Literal["openwebtext-tokenise", "pre-tokenised", "imagenet-decode-augment"] | None = (
        None
    )
    """Gives `sample_bytes` and `transform_time` where these are absent; see `PRESETS`."""
    sample_bytes: Bytes | None = None
    """Of a sample as it lies on storage."""
    sizes: tuple[Bytes, ...] = ()
    """Bytes of samples in place of `sample_bytes`, each as likely as the others: some that were
    measured, or quantiles."""
    size_cv: Annotated[float, Range(0, 10)] = 0.0
    """Coefficient of variation of the bytes of samples, log-normal around `sample_bytes`."""
    seed: Natural = 0
    """Of what is drawn of samples' sizes, for each replica by itself."""
    transform_time: Seconds | None = None
    """Of one core for a sample: decoding, tokenising, augmenting, collating. Where sizes differ, of
    one of the mean size, and of others as their bytes."""
    device_bytes: Bytes | None = None
    """Of a sample as it goes to the device. Absent: of tokens inputs and targets in int64, of
    images three channels of fp32."""
    workers: Annotated[int, Range(0, 4096)] = 1
    """Processes of each rank that load."""
    prefetch_factor: Count = 2
    """Batches that each worker has under way or ready."""
    pinned: bool = True
    """Whether batches are copied to pinned memory first; from pageable memory copies are slower
    and do not run beside computing."""
    overlap: bool = True
    """Whether loading runs beside computing; false: a batch is loaded, and copied, when all before
    its forward has been computed, as in the training process itself (num_workers = 0)."""
    shuffle: bool = True
    """Whether each sample is a scattered read of its own; else a batch is one run of bytes."""
    num_samples: Count | None = None
    """Of the data set; needed where a cache keeps some of it."""
    page_cache: Bytes | None = None
    """Memory of each node that keeps what was read (the page cache); nothing when absent."""
    epoch: Literal["first", "later"] = "first"
    """Which pass over the data set it is: in later ones the page cache has some of it."""

    def __post_init__(self) -> None:
        validate(self)
        problems = list(self._problems())
        if problems:
            raise DescriptionError(problems)

    def _problems(self) -> Iterator[str]:
        for name in ("sample_bytes", "transform_time"):
            stated = getattr(self, name) is not None or (name == "sample_bytes" and self.sizes)
            if self.preset is None and not stated:
                yield f"Data.{name} is missing; state it, or a preset ({', '.join(PRESETS)})"
        if not self.workers:
            yield (
                "Data.workers: 0 load nothing; to load in the training process, as torch does with "
                "num_workers = 0, set workers = 1 and overlap = false"
            )
        if self.sizes and (self.sample_bytes is not None or self.size_cv):
            other = "size_cv" if self.size_cv else "sample_bytes"
            yield f"Data.sizes and {other} both say how large samples are; leave one of them out"
        if self.seed and not self.sizes and not self.size_cv:
            yield (
                f"Data.seed: {self.seed} draws nothing, for samples are all alike; state size_cv "
                "or sizes, or leave it out"
            )
        if not self.overlap and self.workers > 1:
            yield (
                f"Data.workers: {self.workers} with overlap = false, where the training process "
                "loads; set workers = 1, or overlap = true"
            )
        if self.epoch == "later" and self.page_cache is None:
            yield (
                "Data.epoch: 'later' differs from 'first' by what page_cache keeps; state "
                'page_cache = "500 GB", or leave it out'
            )
        if self.page_cache is not None and self.num_samples is None:
            yield "Data.num_samples is missing: what page_cache keeps is a share of the data set"
        if self.page_cache is not None and self.epoch == "first":
            yield (
                "Data.page_cache: in the first epoch nothing has been read yet; set "
                'epoch = "later", or leave it out'
            )


class Sample(NamedTuple):
    """What one sample takes on its way."""

    bytes: float
    """On storage; the mean of all."""
    seconds: float
    """Of a core, likewise."""
    device_bytes: float


def sample_of(s: Scenario) -> Sample:
    """Return what a sample of a scenario with a data path takes."""
    data = s.data
    assert data is not None  # callers ask where there is one
    pixels = s.run.image_size
    size, seconds = data.sample_bytes, data.transform_time
    if data.sizes:
        size = sum(data.sizes) / len(data.sizes)
    if data.preset is not None:
        preset = PRESETS[data.preset]
        each = 1 if preset.images else s.tokens_per_sample
        size = preset.bytes * each if size is None else size
        seconds = preset.seconds * each if seconds is None else seconds
    assert size is not None  # checked by Data
    assert seconds is not None
    copied = data.device_bytes
    if copied is None:
        labels = s.run.decoder_sequence_length or s.sequence_length
        copied = 3 * FP32 * pixels**2 if pixels else INT64 * (s.tokens_per_sample + labels)
    return Sample(size, seconds, float(copied))


def cached_share(s: Scenario) -> float:
    """Return the share of reads that the page cache answers.

    Shuffled, each node reads samples of the whole set, of which it holds what fits, at random; in
    order, each node passes over its own part again, of which nothing is left where it does not fit
    (least recently used goes first).
    """
    data = s.data
    if data is None or data.epoch == "first":
        return 0.0
    assert data.page_cache is not None  # checked by Data
    assert data.num_samples is not None
    whole = data.num_samples * sample_of(s).bytes
    if data.shuffle:
        return min(1.0, data.page_cache / whole)
    return float(data.page_cache >= whole / s.cluster.num_nodes)


def data_problems(s: Scenario) -> Iterator[str]:
    """Say what of a data path does not fit the rest."""
    data, known = s.data, s.cluster.storage
    if data is None:
        return
    if data.storage not in known:
        there = f"it has {', '.join(known)}" if known else "it has none"
        yield (
            f"data.storage {data.storage!r} is not one of cluster.storage ({there})"
            f"{suggestion(data.storage, known)}; describe [cluster.storage.{data.storage}]"
        )
    preset = PRESETS[data.preset] if data.preset else None
    if preset and preset.images != bool(s.run.image_size):
        wanted = "images (run.image_size)" if preset.images else "tokens (run.sequence_length)"
        yield f"data.preset {data.preset!r} is for {wanted}, which {s.model.name} does not read"
    if data.num_samples is not None and data.num_samples < s.run.global_batch_size:
        yield (
            f"data.num_samples {data.num_samples} is less than one batch, run.global_batch_size "
            f"{s.run.global_batch_size}"
        )
    bare = [node.name for node in s.cluster.kinds if node.host is None]
    if bare:
        yield (
            f"data: {bare[0]} does not say what its host offers, through which data is copied; "
            "describe cluster.node.host, as the node dgx-a100 does"
        )
