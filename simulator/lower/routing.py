"""What routing runs beside products: the choice of experts, its loss, rows put in their order.

Counted kernel by kernel as Megatron-LM's core 0.13 runs them (megatron/core/transformer/moe:
`router.py`, `moe_utils.py`, `token_dispatcher.py`): torch's operators one after the other, or with
`run.expert_fusion` Transformer Engine's kernels in their place. Scores are softmaxed, the largest
taken, and a table of weights and one of choices written, a number for each token and expert; the
loss that balances experts scores and chooses once more. Most of these kernels are so short that
the host's time to issue them is what they cost.

How many copies of tokens there are the host knows only after it has asked the device: torch's
`masked_select` waits for its count, as `.cpu()` and DeepEP's dispatch do. Then nothing is queued:
the copy to the host is issued, and so is the kernel after it, while the device has nothing to do,
so that a wait costs twice `node.host_launch`. Megatron-LM's all-to-all dispatcher copies counts on
a stream of their own while rows are ordered, and where one kernel orders them waits for nothing
else. Where experts are padded to their capacity (`drop_and_pad`) all sizes are known beforehand.
"""

from __future__ import annotations

from typing import NamedTuple

from simulator.describe.model import Model
from simulator.lower.operators import FP32, INDEX, Along, Elements, Operator
from simulator.lower.shapes import Routing, Shapes
from simulator.program import Flow, Kernel

PERMUTATION, SCATTER = "permutation", "scatter"
"""Kernels that order rows, and those that add rows into others one by one: keys of a device's
`memory_efficiency_in`."""

PLACE = 4
"""Bytes of a place among rows in Transformer Engine's tables; torch's have `INDEX`."""


class Small(NamedTuple):
    """Kernels over scores: how many there are, and what they move in bf16."""

    kernels: int
    scores: int
    """Bytes of each token and expert."""
    chosen: int = 0
    """Bytes of each token and expert that it goes to."""


Both = tuple[Small, Small]
"""Forward and backward."""

CHOICE: Both = Small(14, 50, 28), Small(7, 32, 20)
"""Forward: an fp32 copy, its softmax and a bf16 copy; the largest (selected, then sorted); weights
written into zeros and, as whole numbers, choices, which become bits and are counted. Backward:
weights gathered and written into zeros, the softmax's gradient between two copies."""
GROUPS: Both = Small(11, 21, 24), Small(1, 5)
"""Where a token may go to some groups of experts only: the best of each group summed, the best
groups, a mask."""
CAPACITY: Both = Small(8, 19, 18), Small(1, 5)
"""The heaviest tokens of each expert that finds no place for all; padded, one kernel less."""
BALANCE: Both = Small(17, 44, 20), Small(7, 20)
"""The loss that balances experts: scores and choice once more, sums, the log's copy."""
FUSED: Both = Small(3, 18, 0), Small(3, 12, 0)
"""Transformer Engine's choice, scores for the loss, and loss (--moe-router-fusion)."""

ORDER = {"none": Small(13, 10, 18), "fused": Small(3, 17, 8), "padded": Small(11, 20, 50)}
"""What finds the place of each copy of a token: two `masked_select` of five kernels each; three
passes over a table of tokens and experts; a sort where experts are padded."""
UNORDER = {"none": Small(5, 11, 10), "fused": Small(0, 0), "padded": Small(3, 8, 18)}
"""Backward: the gradients of copies' weights go back to the table of weights."""
SUMS = 5
"""Kernels that make sums over ranks of the counts that all have gathered."""


def small(name: str, steps: Small, pairs: float, chosen: float) -> tuple[Kernel, ...]:
    """Return small kernels as one that runs so many times; none where there are none.

    Args:
        name: of the kernel.
        steps: what they are.
        pairs: tokens times experts.
        chosen: tokens times experts that one goes to.
    """
    count = steps.kernels
    if not count:
        return ()
    moved = steps.scores * pairs + steps.chosen * chosen
    return (Kernel(name, 5 * pairs / count, moved / count, "fp32", count=count),)


def choice(model: Model, x: Shapes) -> Operator:
    """Return the choice of experts from scores, which are kept in fp32 for backward."""
    assert model.num_experts is not None
    r, size = x.routing, float(x.local_tokens * model.num_experts)
    steps = [FUSED] if r.fusion == "all" else [CHOICE, BALANCE]
    if r.fusion != "all" and model.n_group > 1:
        steps.append(GROUPS)
    if r.capacity is not None:
        there, back = CAPACITY
        steps.append((there._replace(kernels=there.kernels - r.padded), back))
    chosen = float(x.local_tokens * model.experts_per_token)
    forward, backward = (
        Small(*(sum(column) for column in zip(*way, strict=True)))
        for way in zip(*steps, strict=True)
    )
    return Operator(
        name="routing",
        forward=small("routing", forward, size, chosen),
        input_grad=small("routing grad", backward, size, chosen),
        kept_bytes=FP32 * size,
        forward_bytes=x.elements.activation * size,
        backward_bytes=x.elements.activation * size,
    )


def counts(model: Model, x: Shapes) -> tuple[Operator, ...]:
    """Return how a rank learns how many copies it gets; nothing where experts are padded."""
    assert model.num_experts is not None
    r, pairs = x.routing, float(x.local_tokens * model.num_experts)
    if r.padded:
        return ()
    counted = small("counts", Small(1, 1), pairs, 0.0)
    if r.ep == 1 or r.dispatch != "all_to_all":  # of the tokens that are there, or DeepEP's own
        return (Operator(name="counts", forward=counted),)
    size = float(INDEX * model.num_experts * r.ep)
    sums = Kernel("sums of counts", 0.0, size, "fp32", count=SUMS)
    gathered = Along(Flow("all_gather", size), "ep")
    return (Operator(name="counts", forward=(*counted, gathered, sums)),)


def waits(r: Routing) -> int:
    """Return how often the host waits for the device in a forward pass through a layer.

    DeepEP's dispatch once, and thrice where torch makes a table of the indices that it gives;
    `masked_select` twice; once for the number of copies where some are dropped. Where all tokens
    are gathered, for the counts of a rank's experts (`.cpu()`), and their weights' `masked_select`.
    """
    if r.padded:
        return 0
    ordering = 2 if r.fusion == "none" else 0
    if r.dispatch == "all_gather":
        return 2 + ordering // 2
    if r.dispatch != "all_to_all":
        return 1 + (ordering and 3 + ordering)
    return ordering + (r.capacity is not None)


def waiting(r: Routing) -> tuple[Kernel, ...]:
    """Return the host's waits as kernels that do nothing but be issued, two for each."""
    count = 2 * waits(r)
    return (Kernel("wait for counts", 0.0, 0.0, "fp32", count=count),) if count else ()


def permutation(
    model: Model, x: Shapes, *, before: float, after: float, columns: int, low: float
) -> Operator:
    """Copy the rows of tokens to all of their places; backward sums the copies of a row.

    Args:
        model: whose tokens.
        x: how they are routed.
        before: elements of the rows.
        after: elements of the copies.
        columns: experts among which places are found.
        low: share of the bytes of an element that is moved forward.
    """
    e, r, h = x.elements, x.routing, model.hidden_size
    fused = r.fusion != "none"
    way = "fused" if fused else "padded" if r.padded else "none"
    pairs, chosen = before / h * columns, after / h
    kept = PLACE * (2 * pairs + before / h) if fused else INDEX * chosen
    moved = moving("dispatch", e, before, after, low=low, algorithm=PERMUTATION if fused else "")
    return Operator(
        name="dispatch",
        forward=(*small("places", ORDER[way], pairs, chosen), *waiting(r), moved),
        input_grad=(
            *summed("dispatch grad", e, after, before, fused=fused),
            *small("weights grad", UNORDER[way], pairs, chosen),
        ),
        kept_bytes=kept,
        forward_bytes=low * e.activation * (before + after),
        backward_bytes=e.activation * (before + after),
    )


def unpermutation(
    name: str, x: Shapes, *, before: float, after: float, low: float, shared: bool = False
) -> Operator:
    """Sum the results of a token's experts; backward copies the gradient to each of them.

    They are weighted before, in the activation, as Megatron-LM does since its core 0.12: the
    weights' gradients need nothing from here.

    Args:
        name: of the operator.
        x: how tokens are routed.
        before: elements of the copies.
        after: elements of the tokens.
        low: share of the bytes of an element that is moved backward.
        shared: whether the result of shared experts is added, by a kernel of its own.
    """
    e, fused = x.elements, x.routing.fusion != "none"
    added = (moving("shared sum", e, 2 * after, after),) if shared else ()
    grad = moving(f"{name} grad", e, after, before, low=low, algorithm=PERMUTATION if fused else "")
    return Operator(
        name=name,
        forward=(*summed(name, e, before, after, fused=fused), *added),
        input_grad=(grad,),
        forward_bytes=e.activation * after,
        backward_bytes=low * e.activation * before,
    )


def summed(
    name: str, e: Elements, before: float, after: float, *, fused: bool
) -> tuple[Kernel, ...]:
    """Return kernels that sum copies of rows: one, or torch's zeros and `scatter_add_`."""
    if fused:
        return (moving(name, e, before, after, algorithm=PERMUTATION),)
    zeros = moving("zeros", e, 0.0, after)
    return (zeros, moving(name, e, before, after, algorithm=SCATTER))


def moving(
    name: str, e: Elements, reads: float, writes: float, *, low: float = 1.0, algorithm: str = ""
) -> Kernel:
    """Return a kernel that moves rows; arguments count elements, `low` is the share of each."""
    moved = low * e.activation * (reads + writes)
    return Kernel(name, 0.0, moved, "fp32", algorithm=algorithm)
