"""Operators: what one step of a model computes, moves, keeps and communicates, and its gradients.

Each builder returns an `Operator` whose numbers follow from shapes alone. Backward is split into
the gradient of the input and that of the weight, which zero-bubble schedules move apart. Sizes are
per rank: builders are given dimensions that tensor parallelism has already divided.

Formulas: FLOPs of a product of m x k and k x n are 2mnk (each multiply-add counts two); kept
activations follow Korthikanti et al., 2022 (arXiv 2205.05198), section 4; flash attention's counts
follow Dao, 2023 (arXiv 2307.08691), section 4.1: backward recomputes the scores, five products to
forward's two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from simulator.program import Flow, Kernel


class Along(NamedTuple):
    """A collective over the ranks along an axis of the mesh; a bare flow is one along tp."""

    flow: Flow
    axis: str
    """The stream that it runs on, one of `segments.STREAMS`."""


class Beside(NamedTuple):
    """A collective beside which the operator's next kernels run.

    What is not waited for by them is waited for by the kernels after the next such collective, or
    by the next operator.
    """

    flow: Flow
    axis: str = "tp"


Part: TypeAlias = Kernel | Flow | Along | Beside

INDEX = 8
"""Bytes of torch's whole numbers."""
STREAM = "stream"
"""Of kernels that pass once over a whole buffer of weights, gradients, states or logits. A loss of
several kernels is none: Megatron-LM's runs at 2.8 of a B200's 8 TB/s, TE's fused one at 6.6."""
FP32 = 4
"""Bytes of the numbers that are kept in fp32 in every mode: losses, norms' statistics, logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One step of a block: kernels on the compute stream, and collectives between them."""

    name: str
    forward: tuple[Part, ...] = ()
    input_grad: tuple[Part, ...] = ()
    weight_grad: tuple[Part, ...] = ()
    kept_bytes: float = 0.0
    """Activations alive from this forward until its backward."""
    core_input_bytes: float | None = None
    """Of an operator of the attention core: what of them selective recomputation keeps too."""
    saved_bytes: float = 0.0
    """With recomputation by operators: activations alive from this forward on (`recompute`)."""
    again: tuple[Part, ...] = ()
    """With recomputation by operators: what backward runs before its own parts."""
    forward_bytes: float = 0.0
    """Alive only while its forward runs: its output, its input where nobody keeps it, copies."""
    backward_bytes: float = 0.0
    """Alive only while its backward runs: gradients of its output and input, copies, and those of
    weights that are added to a sum of them afterwards."""
    weight_grad_bytes: float = 0.0
    """Of `backward_bytes` what only the weight's gradient needs."""
    output_grad_bytes: float = 0.0
    """Gradient of its output, which waits for the weight's where backward is split; alive in
    `backward_bytes` too."""
    input_kept_bytes: float = 0.0
    """Of `kept_bytes` what only the gradient of the input needs, though it has a weight's too."""
    regathered: tuple[Flow, ...] = ()
    """Collectives at the head of `input_grad` that bring what only the weight's gradient needs."""
    hole_bytes: float = 0.0
    """While its backward runs, freed and of no use to it: shorter than the tensors it makes."""
    stream_bytes: float = 0.0
    """Gradient of the residual stream, which waits while the backward of a branch runs."""
    params: int = 0
    """Parameters held by this rank."""
    matrices: tuple[tuple[int, int], ...] = ()
    """Rows and columns of the matrices among those that are trained."""
    frozen: int = 0
    """Parameters that are not trained."""
    quantized: int = 0
    """Of them those that lie in `run.base_weights`."""
    model_flops: float = 0.0
    """Forward matrix FLOPs by the MFU convention: attention counted in full, causal or not."""
    tied: bool = False
    """Whether it uses the embedding's matrix, or at the other end of a pipeline a copy of it."""
    expert: bool = False
    """Whether its parameters are of experts, which fewer ranks hold than hold the others."""
    repeated: bool = False
    """Whether every tp rank holds its parameters whole, and under sequence parallelism the gradient
    of its own part of the sequence."""

    @property
    def trained(self) -> int:
        """Parameters that are trained."""
        return self.params - self.frozen

    @property
    def backward(self) -> tuple[Part, ...]:
        """Both gradients, input first, as one backward pass computes them."""
        return self.input_grad + self.weight_grad

    @property
    def input_grad_alone(self) -> tuple[Part, ...]:
        """The gradient of the input where that of the weight comes later."""
        return self.input_grad[len(self.regathered) :] if self.weight_grad else self.input_grad

    @property
    def weight_grad_alone(self) -> tuple[Part, ...]:
        """The gradient of the weight where that of the input is there already."""
        return (*self.regathered, *self.weight_grad) if self.weight_grad else ()


@dataclass(frozen=True, slots=True)
class Elements:
    """Bytes per element of activations and weights, and the precision of matrix products."""

    activation: int
    weight: int
    gradient: int
    matmul: str
    accumulation: str = "fused"
    """How the gradient of a weight is added to what earlier microbatches left: `fused` as the
    product is written, `separate` by a kernel of its own, `none` where there are none."""
    cast: float = 0.0
    """Bytes that casting an element to fp8 moves; 0 where no product is in fp8."""
    low: float = 1.0
    """Bytes of an element in fp8, with its part of the scales that lie beside it."""
    transposed: float = 0.0
    """Bytes that writing a copy for products along its other dimension moves besides."""
    directed: bool = False
    """Whether scales are of blocks along one dimension, so that no copy can be turned into the
    other: both are cast from what the element was."""
    cast_weights: bool = False
    """Whether each forward casts its weights, as those that are gathered for it."""
    turns_weights: bool = False
    """Whether each backward transposes its weights, as those that are gathered in fp8 for it."""
    keeps_low: bool = False
    """Whether inputs of activation functions are kept in fp8."""
    placeholder: bool = False
    """Whether a fused product hands a tensor as large as its weight to autograd all the same."""


def streaming(name: str, flops: float, moved: float) -> Kernel:
    """Return a kernel that moves so many bytes, passing once over whole buffers."""
    return Kernel(name, float(flops), float(moved), "fp32", algorithm=STREAM)


def batched_product(
    name: str, e: Elements, batch: int, m: int, n: int, k: int, out: int = 0
) -> Kernel:
    """Return a batched product; ``out`` overrides the bytes of one element of its result."""
    moved = batch * (e.activation * (m * k + k * n) + (out or e.activation) * m * n)
    return Kernel(name, 2.0 * batch * m * n * k, float(moved), e.matmul, (batch, m, n, k))


def linear(
    name: str, e: Elements, *, tokens: int, inputs: int, outputs: int, bias: bool
) -> Operator:
    """Multiply (tokens x inputs) with a weight (inputs x outputs); keeps its input.

    A bias is added as the product is written; its gradient sums the output's over all tokens.
    """
    written = {"fused": 2 * e.gradient, "separate": e.activation, "none": e.gradient}
    wgrad = batched_product(
        f"{name} wgrad", e, 1, inputs, outputs, tokens, out=written[e.accumulation]
    )
    size = float(tokens * outputs)
    weight_grad: tuple[Part, ...] = (wgrad,)
    if bias:
        weight_grad = (Kernel(f"{name} bias grad", size, e.activation * size, "fp32"), wgrad)
    if e.accumulation == "separate":
        added = float(inputs * outputs)
        moved = (e.activation + 2 * e.gradient) * added
        weight_grad = (*weight_grad, streaming(f"{name} accumulation", added, moved))
    apart = e.accumulation == "separate" or (e.accumulation == "fused" and e.placeholder)
    return Operator(
        name=name,
        forward=(batched_product(name, e, 1, tokens, outputs, inputs),),
        input_grad=(batched_product(f"{name} dgrad", e, 1, tokens, inputs, outputs),),
        weight_grad=weight_grad,
        kept_bytes=e.activation * tokens * inputs,
        forward_bytes=e.activation * size,
        backward_bytes=e.activation * tokens * (inputs + outputs)
        + (e.weight * inputs * outputs if apart else 0),
        weight_grad_bytes=e.weight * inputs * outputs if apart else 0.0,
        output_grad_bytes=e.activation * size,
        params=inputs * outputs + (outputs if bias else 0),
        matrices=((inputs, outputs),),
        model_flops=2.0 * tokens * inputs * outputs,
    )


def pointwise(
    name: str,
    e: Elements,
    *,
    reads: float,
    writes: float,
    grad_reads: float,
    grad_writes: float,
    kept_bytes: float,
    passing: tuple[float, float],
    params: int = 0,
    flops_per_element: float = 1.0,
    core_input_bytes: float | None = None,
) -> Operator:
    """Apply an element-wise function, bound by the bytes it moves; arguments count elements.

    `passing` are those alive only while forward, and while backward, runs.
    """

    def kernel(label: str, read: float, written: float) -> Kernel:
        flops = flops_per_element * max(read, written)
        return Kernel(label, flops, e.activation * (read + written), "fp32")

    return Operator(
        name=name,
        forward=(kernel(name, reads, writes),),
        input_grad=(kernel(f"{name} grad", grad_reads, grad_writes),),
        kept_bytes=kept_bytes,
        forward_bytes=e.activation * passing[0],
        backward_bytes=e.activation * passing[1],
        params=params,
        core_input_bytes=core_input_bytes,
    )


def norm(name: str, e: Elements, *, tokens: int, hidden: int, bias: bool) -> Operator:
    """Normalise each token; keeps its input (statistics, 4 to 8 bytes a token, are left out)."""
    size = tokens * hidden
    made = pointwise(
        name, e, reads=size, writes=size, grad_reads=2 * size, grad_writes=size,
        kept_bytes=e.activation * size, passing=(size, 2 * size),
        params=hidden * (2 if bias else 1), flops_per_element=5,
    )  # fmt: skip
    return replace(made, repeated=True)


def head_norm(e: Elements, *, size: float, dim: int) -> Operator:
    """Normalise the queries and the keys of each head (RMS), with a weight of `dim` for either."""
    made = pointwise(
        "qk norm", e, reads=size, writes=size, grad_reads=2 * size, grad_writes=size,
        kept_bytes=e.activation * size, passing=(size, 2 * size), params=2 * dim,
        flops_per_element=5,
    )  # fmt: skip
    return replace(made, repeated=True)


def fused(first: Operator, second: Operator, moved: float) -> Operator:
    """Return two element-wise operators as one; `moved` are the bytes of what lies between.

    Forward does not read it again; backward neither writes nor reads its gradient.
    """

    def one(a: tuple[Part, ...], b: tuple[Part, ...], dropped: float) -> tuple[Part, ...]:
        (x,), (y,) = a, b
        assert isinstance(x, Kernel)
        assert isinstance(y, Kernel)
        return (replace(x, flops=x.flops + y.flops, bytes=x.bytes + y.bytes - dropped),)

    return replace(
        second,
        forward=one(first.forward, second.forward, moved),
        input_grad=one(second.input_grad, first.input_grad, 2 * moved),
        kept_bytes=first.kept_bytes + second.kept_bytes,
        params=first.params + second.params,
    )


def activation(name: str, e: Elements, *, size: float, gated: bool) -> Operator:
    """Apply the activation function to `size` elements, times the second half when gated.

    With `keeps_low` its input is written in fp8 beside, and read so in backward.
    """
    inputs = 2 * size if gated else size
    low = inputs / e.activation if e.keeps_low else 0.0  # in elements of the others' size
    kept = low or inputs
    return pointwise(
        name, e, reads=inputs, writes=size + low, grad_reads=kept + size, grad_writes=inputs,
        kept_bytes=e.activation * kept, passing=(size, size + inputs), flops_per_element=8,
    )  # fmt: skip


def residual(name: str, e: Elements, *, size: float, dropout: bool) -> Operator:
    """Add to the residual stream, after dropout where the model has it (mask: one byte each).

    Backward adds the gradients of the two branches, and drops out again; without dropout the
    gradient of the branch is that of the stream.
    """
    mask = size / e.activation if dropout else 0.0
    again = size if dropout else 0.0
    return pointwise(
        name, e, reads=2 * size, writes=size + mask, grad_reads=2 * size + again + mask,
        grad_writes=size + again, kept_bytes=size if dropout else 0.0, passing=(2 * size, again),
    )  # fmt: skip


def rotary(e: Elements, *, size: float, whole: float) -> Operator:
    """Rotate queries and keys in place; nothing is kept, the rotation is undone in backward.

    `whole` counts the values too.
    """
    return pointwise(
        "rotary", e, reads=size, writes=size, grad_reads=size, grad_writes=size,
        kept_bytes=0.0, passing=(whole, whole), flops_per_element=3,
    )  # fmt: skip


def dropout(name: str, e: Elements, *, size: float) -> Operator:
    """Drop out; keeps the mask, of a byte each."""
    mask = size / e.activation
    return pointwise(
        name, e, reads=size, writes=size + mask, grad_reads=size + mask, grad_writes=size,
        kept_bytes=size, passing=(2 * size, 2 * size),
    )  # fmt: skip


def relative_positions(e: Elements, *, heads: int, length: int, buckets: int) -> Operator:
    """Look up the bias of each head's scores by how far apart query and key are (T5).

    The distances' buckets are 8-byte numbers, as torch's; they are kept, and the bias of one sample
    until the backward of the stack makes its gradient, which is as large.
    """
    pairs, params = length * length, buckets * heads
    moved = float(INDEX * pairs + e.activation * heads * pairs)
    return Operator(
        name="relative positions",
        forward=(Kernel("relative positions", float(heads * pairs), moved, "fp32"),),
        weight_grad=(Kernel("relative positions wgrad", float(heads * pairs), moved, "fp32"),),
        kept_bytes=moved,
        params=params,
        matrices=((buckets, heads),),
    )


def bias(name: str, e: Elements, *, tokens: int, outputs: int) -> Operator:
    """Add a bias of its own to a product that shares its weight, as it is written."""
    size = float(tokens * outputs)
    grad = Kernel(f"{name} grad", size, e.activation * size, "fp32")
    return Operator(
        name=name, weight_grad=(grad,), backward_bytes=e.activation * size, params=outputs
    )


def positions(e: Elements, *, tokens: int, hidden: int, rows: int, dropped: int) -> Operator:
    """Put a class token before each image's patches and add learned positions; drop out.

    `rows` are those of the class token and of the positions; their gradients sum over images.
    `dropped` are the tokens that are dropped out of.
    """
    size, mask = tokens * hidden, dropped * hidden
    moved = float(2 * e.activation * size + mask)
    read = float(e.activation * size + mask)
    return Operator(
        name="positions",
        forward=(Kernel("positions", float(size), moved, "fp32"),),
        weight_grad=(Kernel("positions wgrad", float(size), read, "fp32"),),
        kept_bytes=float(mask),
        forward_bytes=float(2 * e.activation * size),
        backward_bytes=float(e.activation * (2 if dropped else 1) * size),
        output_grad_bytes=float(e.activation * size),
        params=rows * hidden,
        matrices=((rows - 1, hidden),),  # the class token is none
    )


def embedding(
    e: Elements, *, tokens: int, hidden: int, vocab: int, positions: int, dropped: int
) -> Operator:
    """Look up the rows of tokens, and of positions where they are learned; add; drop out.

    `dropped` are the tokens that this rank drops out of. The gradient of the matrix is dense: each
    microbatch's is a tensor of zeros to which rows are written (ATen's `embedding_dense_backward`),
    and then added to those before it, whoever makes the products.
    """
    size = tokens * hidden
    params = (vocab + positions) * hidden
    apart = e.weight * params if e.accumulation != "none" else 0
    learned = bool(positions)
    mask = dropped * hidden
    moved = e.activation * size * (2 + learned) + mask
    grad = (e.activation + e.weight) * size + e.weight * params + mask
    added = (e.weight + 2 * e.gradient) * params
    return Operator(
        name="embedding",
        forward=(Kernel("embedding", float(size), float(moved), "fp32"),),
        weight_grad=(
            Kernel("embedding wgrad", float(size), float(grad), "fp32"),
            *(
                (streaming("embedding accumulation", float(params), float(added)),)
                if e.accumulation != "none"
                else ()
            ),
        ),
        kept_bytes=float(mask),
        forward_bytes=float(e.activation * size),
        backward_bytes=float(e.activation * size + apart),
        weight_grad_bytes=float(apart),
        output_grad_bytes=float(e.activation * size),
        params=params,
        matrices=((vocab, hidden), *([(positions, hidden)] if positions else [])),
    )


def cross_entropy(
    e: Elements, *, tokens: int, vocab: int, kind: str = "in_place", parallel: bool = False
) -> Operator:
    """Softmax and loss over the vocabulary in fp32.

    `kind` says in what kernels, and what is kept for backward:

    - ``in_place``: fp32 probabilities. Where logits are shorter a copy is made, which becomes the
      probabilities and then the gradient, kernel by kernel as in Megatron-LM's
      `_VocabParallelCrossEntropy` (core/tensor_parallel/cross_entropy.py): the largest is read, and
      taken off; exponentials are taken, summed, and divided by their sum; backward multiplies.
    - ``transformer_engine``: its two kernels read the logits, and write the gradient in fp32, which
      backward multiplies and copies (common/triton/cross_entropy.py).
    - ``eager``: torch's `cross_entropy` of ``logits.float()`` keeps fp32 logarithms; their gradient
      is written into zeros, that of the copy and that of the logits into tensors of their own.
      With `parallel`, logits divided over ranks, torch's `loss_parallel`
      (torch/distributed/tensor/parallel/loss.py) runs it term by term: logits less their largest,
      exponentials, their sum, logarithms; backward zeros, exponentials, their sum, a product.
      Of the freed logits and their fp32 copy the gradients of the latter take as much as they are
      long: what is left, as short as the logits, serves none of them (tests/test_allocator.py).
    - ``compiled``: nothing but the logits; each pass reads them (two, with `parallel`, for a sum
      over ranks lies between) and the gradient is written as short as they are.
    """
    size, short = float(tokens * vocab), e.activation < FP32
    a, word = e.activation, FP32
    copy = a + word if short else 0  # bytes an element of a cast either way
    forward, backward, kept, passing, passing_back = {
        "in_place": (copy + 8 * word, copy + 2 * word, word, a, a if short else 0),
        "transformer_engine": (2 * a + word, copy + 2 * word, word, a, a if short else 0),
        "eager": (
            (copy + 8 * word, copy + 8 * word, word, (a if short else 0) + 2 * word, 3 * word)
            if parallel else
            (copy + 2 * word, copy + 4 * word, word, a + (word if short else 0), 2 * word)
        ),
        "compiled": (a * (2 if parallel else 1), 2 * a, a, 0, a),
    }[kind]  # fmt: skip
    stream = STREAM if kind in ("transformer_engine", "compiled") else ""  # one pass or two
    return Operator(
        name="loss",
        forward=(Kernel("loss", 5 * size, size * forward, "fp32", algorithm=stream),),
        input_grad=(Kernel("loss grad", 2 * size, size * backward, "fp32", algorithm=stream),),
        kept_bytes=kept * size,
        forward_bytes=passing * size,
        backward_bytes=passing_back * size,
        hole_bytes=a * size if kind == "eager" and short else 0.0,
    )


def entering_tensor_parallel(size: float, *, sequence: bool) -> Operator:
    """Copy into a tensor-parallel region: free forward, sums the input's gradient backward.

    The conjugate operator *f* of Shoeybi et al., 2019 (arXiv 1909.08053), section 3; where the
    input is divided along the sequence, *g* of Korthikanti et al., 2022, section 4.2.2: it is
    gathered, and its gradient reduce-scattered.
    """
    if sequence:
        gather, reduce = Flow("all_gather", size), Flow("reduce_scatter", size)
        return Operator(name="enter tp", forward=(gather,), input_grad=(reduce,))
    return Operator(name="enter tp", input_grad=(Flow("all_reduce", size),))


def leaving_tensor_parallel(size: float, *, sequence: bool) -> Operator:
    """Sum the partial results of a tensor-parallel region forward: the conjugate operator *g*."""
    if sequence:
        gather, reduce = Flow("all_gather", size), Flow("reduce_scatter", size)
        return Operator(name="leave tp", forward=(reduce,), input_grad=(gather,))
    return Operator(name="leave tp", forward=(Flow("all_reduce", size),))


def _beside(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    return tuple(Beside(part) if isinstance(part, Flow) else part for part in parts)


def beside(collectives: Operator, product: Operator) -> tuple[Operator, Operator]:
    """Return both with the collectives run beside the product that they feed or follow.

    They are cut into pieces, each of which is exchanged while others are computed.
    """
    forward, backward = _beside(collectives.forward), _beside(collectives.input_grad)
    left = replace(collectives, forward=(), input_grad=())
    return left, replace(
        product,
        forward=(*forward, *product.forward),
        input_grad=(*backward, *product.input_grad),
    )


def first_of_region(
    product: Operator, size: float, tp: int, *, sequence: bool, overlap: bool
) -> tuple[Operator, Operator]:
    """Return the entrance of a tensor-parallel region and the product that it feeds.

    With `sequence` the product keeps its part of the input only and gathers it again for the
    weight's gradient; with `overlap` backward's collectives run beside the product's kernels.
    """
    enter = entering_tensor_parallel(size, sequence=sequence)
    summed = enter.input_grad
    again = enter.forward if sequence else ()
    if overlap:
        enter = replace(enter, input_grad=())
        input_grad = (*_beside(again), *product.input_grad, *_beside(summed))
    else:
        input_grad = (*again, *product.input_grad)
    product = replace(product, input_grad=input_grad)
    if not sequence:
        return enter, product
    return enter, replace(
        product,
        weight_grad_bytes=product.weight_grad_bytes + size,
        regathered=tuple(part for part in again if isinstance(part, Flow)),
        kept_bytes=product.kept_bytes / tp,
        forward_bytes=product.forward_bytes + size,
        backward_bytes=product.backward_bytes + size + size / tp,  # gathered again; scattered
    )
