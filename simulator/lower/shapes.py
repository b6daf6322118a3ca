"""What the operators of a model depend on, besides the model itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

from simulator.describe.experts import expert_shares
from simulator.describe.model import Model
from simulator.describe.scenario import Scenario
from simulator.lower import operators as op
from simulator.lower.context import ALONE, Context
from simulator.lower.latest import for_latest
from simulator.lower.places import layout

MX_BLOCK = 32
"""Elements that share a scale of one byte in MXFP8 (OCP Microscaling Formats 1.0)."""
IMAGE_SIZE = 224
"""Pixels along each side where it does not matter, as to parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How the tokens of a layer reach its experts, and how those are divided."""

    ep: int = 1
    etp: int = 1
    load: tuple[float, ...] | None = None
    """Share of all copies of tokens that goes to each expert; even when absent."""
    capacity: float | None = None
    padded: bool = False
    dispatch: str = "all_to_all"
    fusion: str = "none"
    """What of routing is one kernel, as `run.expert_fusion`."""
    fp8: bool = False
    """Whether copies are exchanged as bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """What the operators of a model depend on, besides the model itself."""

    microbatch_size: int
    sequence_length: int
    """Of an encoder and its decoder, the encoder's."""
    tp: int
    elements: op.Elements
    attention: str
    sequence_parallel: bool = False
    tp_overlap: str = "none"
    compiled: bool = False
    plain: bool = False
    """Whether layers run as torchtitan's code has it (`lower.plain`)."""
    loss: str = "in_place"
    """In what kernels the loss runs, a `kind` of `operators.cross_entropy`."""
    megatron_head: bool = False
    """Whether the head's product is Megatron-LM's own, with its placeholder for the gradient."""
    image_size: int = IMAGE_SIZE
    """Pixels along each side, where samples are images."""
    decoder_sequence_length: int = 0
    """Tokens of a decoder that follows an encoder; 0 where none does."""
    context: Context = ALONE
    """Ranks that divide each sequence."""
    routing: Routing = Routing()

    @property
    def decoded(self) -> Shapes:
        """What the operators of the decoder depend on, which has tokens of its own."""
        length = self.decoder_sequence_length
        if not length:
            return self
        return replace(self, sequence_length=length, decoder_sequence_length=0)

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch on one context-parallel rank."""
        return self.microbatch_size * (self.sequence_length // self.context.ranks)

    @property
    def divided(self) -> int:
        """Ranks that gather each other's part of the sequence."""
        return self.tp if self.sequence_parallel else 1

    @property
    def local_tokens(self) -> int:
        """Tokens that one rank norms, adds and drops out."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens


@for_latest
def shapes(s: Scenario) -> Shapes:
    """Return what the operators of a scenario depend on."""
    p = s.precision
    accumulation = "fused" if s.run.fused_accumulation else "separate"
    alone = s.num_microbatches == 1 or layout(s).updates
    if alone or (s.plan.zero > 1 and s.plan.shards > 1):
        accumulation = "none"  # shards are added, which takes next to nothing
    gathers = s.plan.zero == 3 and s.plan.shards > 1 and not s.run.fused_accumulation
    gradient = p.weight if gathers else p.gradient  # copied in what they are reduced in
    return Shapes(
        microbatch_size=s.plan.microbatch_size,
        sequence_length=s.sequence_length,
        tp=s.plan.tp,
        elements=_casting(
            op.Elements(
                p.activation, p.weight, gradient, p.matmul, accumulation,
                placeholder=s.run.linear_layers == "megatron",
            ),
            s,
        ),
        attention=s.run.attention,
        sequence_parallel=s.plan.sequence_parallel,
        tp_overlap=s.plan.tp_overlap,
        compiled=s.run.compiled,
        plain=s.run.layer_code == "torchtitan",
        loss=_loss(s),
        megatron_head=s.run.linear_layers != "torch",
        image_size=s.run.image_size or IMAGE_SIZE,
        decoder_sequence_length=s.run.decoder_sequence_length or 0,
        context=Context(s.plan.cp, s.plan.cp_style, s.plan.cp_balance == "zigzag"),
        routing=_routing(s),
    )  # fmt: skip


def _loss(s: Scenario) -> str:
    if s.run.compiled_loss:
        return "compiled"
    if s.run.fused_loss:
        return "transformer_engine"
    return "in_place" if s.run.loss_in_place else "eager"


def _routing(s: Scenario) -> Routing:
    if not isinstance(s.model, Model) or s.model.num_experts is None:
        return Routing()
    plan = s.plan
    return Routing(
        ep=plan.ep,
        etp=plan.etp,
        load=expert_shares(s.model, s.run, plan.ep),
        capacity=plan.expert_capacity,
        padded=plan.expert_padding,
        dispatch=plan.expert_dispatch,
        fusion=s.run.expert_fusion,
        fp8=s.run.fp8_dispatch,
    )


def _casting(e: op.Elements, s: Scenario) -> op.Elements:
    """Return elements with what casting them to fp8 moves: read, written, written transposed."""
    if s.precision.linear != "fp8":
        return e
    blocks = s.run.fp8_scaling == "mxfp8"
    low = 1 + 1 / MX_BLOCK if blocks else 1.0
    reads = 2 if s.run.fp8_scaling == "current" and not s.run.compiled else 1
    turned = blocks or s.cluster.node.device.architecture != "blackwell"
    gathers = s.plan.zero == 3 and s.plan.shards > 1
    return replace(
        e,
        cast=reads * e.activation + low,
        low=low,
        keeps_low=s.run.fp8_kept,
        transposed=low if turned else 0.0,
        directed=blocks,
        cast_weights=gathers and not s.run.fp8_weights,
        turns_weights=gathers and s.run.fp8_weights and turned and not blocks,
    )
