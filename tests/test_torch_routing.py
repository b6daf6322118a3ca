"""Kernels and bytes of routing, against what torch runs when it chooses experts and orders rows.

The calls are those of Megatron-LM's core 0.13 (`topk_softmax_with_capacity`, `permute`,
`unpermute`, the losses that balance experts), written anew; a mode of torch sees every operator.
"""

from __future__ import annotations

import pytest

from simulator.describe.model import Model
from simulator.lower import routing
from simulator.lower.operators import Elements
from simulator.lower.routing import Small
from simulator.lower.shapes import Routing, Shapes

torch = pytest.importorskip("torch", reason="torch is not installed (extra: validate)")

FREE = {
    "detach", "alias", "view", "_unsafe_view", "_reshape_alias", "lift_fresh", "empty",
    "empty_like", "empty_strided", "new_empty_strided",
}  # fmt: skip
"""Operators that run no kernel."""
WRITES = {"zeros", "zeros_like", "ones_like", "new_zeros", "arange", "full"}
"""Those that read nothing."""
KERNELS = {"topk": 2, "scatter": 2, "masked_select": 5, "masked_scatter": 3, "sort": 3}
"""Kernels of an operator on a device: a selection and a sort; a copy and what is written into it;
a count, a selection and a gather."""


def counted(run):
    """Return the operators of a function, with their kernels and bytes, and its result."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    seen = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            name = func.overloadpacket.__name__
            if func.is_view or name in FREE:
                return out
            if name == "index_add":  # in place where no mode watches
                args = args[1:]
            held = tree_leaves(out if name in WRITES else (args, kwargs, out))
            tensors = {
                (t.data_ptr(), t.shape, t.stride()): t for t in held if isinstance(t, torch.Tensor)
            }
            moved = sum(
                min(t.numel() * t.element_size(), t.untyped_storage().nbytes())
                for t in tensors.values()
            )
            if name == "add_":  # what is added to is read and written
                moved += out.numel() * out.element_size()
            seen.append((name, KERNELS.get(name, 1), moved))
            return out

    with Counting():
        result = run()
    return seen, result


def choose(logits, k, *, groups=1, most=1, capacity=None, pads=False):
    """Return the table of weights of each token and expert, and that of choices."""
    tokens, experts = logits.shape
    scores = torch.softmax(logits, dim=-1, dtype=torch.float32).to(logits.dtype)
    if groups > 1:
        each = scores.view(tokens, groups, -1).topk(k // most, dim=-1)[0].sum(dim=-1)
        best = torch.topk(each, k=most, dim=-1, sorted=False)[1]
        mask = torch.zeros_like(each)
        mask.scatter_(1, best, 1)
        shape = (tokens, groups, experts // groups)
        mask = mask.unsqueeze(-1).expand(shape).reshape(tokens, -1)
        scores = scores.masked_fill(~mask.bool(), float("-inf"))
    weights, index = torch.topk(scores, k=k, dim=-1)
    gates = torch.zeros_like(logits).scatter(1, index, weights)
    chosen = torch.zeros_like(logits).int().scatter(1, index, 1).bool()
    chosen.sum(dim=0)
    if capacity:
        kept = torch.topk(gates, k=capacity, dim=0, sorted=False)[1]
        full = torch.zeros_like(logits).scatter(0, kept, 1).bool()
        chosen = full if pads else torch.logical_and(chosen, full)
        gates = gates * chosen
    return gates, chosen


LOG = torch.zeros(4)
"""Of losses, layer by layer."""


def balance(logits, k):
    """Return the loss that balances experts, which is added to the log."""
    tokens, experts = logits.shape
    scores = torch.softmax(logits, dim=-1, dtype=torch.float32)
    index = torch.topk(scores, k=k, dim=1)[1]
    chosen = torch.zeros_like(logits).int().scatter(1, index, 1).bool()
    loss = torch.sum(scores.sum(dim=0) * chosen.sum(dim=0)) * (experts / (tokens * tokens * k))
    LOG[0] += loss.detach() / 1e-2
    return loss


def sizes(tokens, experts, k):
    logits = torch.randn(tokens, experts, dtype=torch.bfloat16, requires_grad=True)
    return logits, {"k": k}


def moved(steps: Small, tokens: int, experts: int, k: int) -> int:
    return steps.scores * tokens * experts + steps.chosen * tokens * k


# What does not grow with tokens, sums and scalars, is left out: twice the tokens move just twice
# the rest.
@pytest.mark.parametrize(("experts", "k"), [(16, 4), (16, 2), (32, 4)])
@pytest.mark.parametrize(
    ("capacity", "pads", "kernels"), [(None, False, 0), (1, False, 8), (1, True, 7)]
)
def test_the_choice_of_experts_runs_so_many_kernels(experts, k, capacity, pads, kernels) -> None:
    totals = {}
    for tokens in (64, 128):
        logits, how = sizes(tokens, experts, k)
        how |= {"capacity": capacity and tokens * k // experts, "pads": pads}
        forward, (gates, _) = counted(lambda logits=logits, how=how: choose(logits, **how))
        grad = torch.ones_like(gates)
        backward, _ = counted(lambda gates=gates, grad=grad: gates.backward(grad))
        totals[tokens] = forward, backward
    for way in (0, 1):
        steps = routing.CHOICE[way]
        if capacity:
            more = routing.CAPACITY[way]
            if way == 0:
                more = Small(more.kernels - pads, more.scores - 3 * pads, more.chosen)
            steps = Small(*(a + b for a, b in zip(steps, more, strict=True)))
        assert steps.kernels == sum(kernel for _, kernel, _ in totals[64][way])
        small, large = (sum(size for *_, size in totals[tokens][way]) for tokens in (64, 128))
        assert large - small == moved(steps, 64, experts, k)


def test_the_loss_that_balances_experts_runs_so_many_kernels() -> None:
    totals, scale = {}, torch.ones(())
    for tokens in (64, 128):
        logits, how = sizes(tokens, 16, 4)
        forward, loss = counted(lambda logits=logits, how=how: balance(logits, **how))
        logits.grad = torch.zeros_like(logits)  # that of the choice, which is there already

        def back(loss=loss):
            loss.backward(torch.ones_like(loss) * scale)

        backward, _ = counted(back)
        totals[tokens] = forward, backward
    for way in (0, 1):
        assert routing.BALANCE[way].kernels == sum(kernel for _, kernel, _ in totals[64][way])
        small, large = (sum(size for *_, size in totals[tokens][way]) for tokens in (64, 128))
        assert large - small == moved(routing.BALANCE[way], 64, 16, 4)


# Bytes of groups depend on how many there are, and are few: within a tenth of the choice's.
def test_groups_of_experts_add_so_many_kernels() -> None:
    logits, how = sizes(256, 64, 8)
    plain, _ = counted(lambda: choose(logits, **how))
    limited, (gates, _) = counted(lambda: choose(logits, **how, groups=8, most=4))
    more = sum(k for _, k, _ in limited) - sum(k for _, k, _ in plain)
    assert more == routing.GROUPS[0].kernels
    size = sum(size for *_, size in limited)
    steps = [routing.CHOICE[0], routing.GROUPS[0]]
    assert sum(moved(step, 256, 64, 8) for step in steps) == pytest.approx(size, rel=0.1)
    backward, _ = counted(lambda: gates.sum().backward())
    assert [name for name, *_ in backward].count("masked_fill") == routing.GROUPS[1].kernels


HIDDEN = 32
TOKENS, EXPERTS, K = 64, 16, 4
"""256 copies: 16 of each expert, where they are padded."""


def dispatched(pads: bool):
    """Return operators by torch, forward and backward: rows ordered, and summed again."""
    logits, how = sizes(TOKENS, EXPERTS, K)
    gates, chosen = choose(
        logits, **how, capacity=K * TOKENS // EXPERTS if pads else None, pads=pads
    )
    gates = gates.detach().requires_grad_()
    rows = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)

    def order():
        if not pads:
            mask = chosen.bool().T.contiguous()
            index = torch.arange(TOKENS).unsqueeze(0).expand(EXPERTS, -1)
            places = index.masked_select(mask)
            weights = gates.T.contiguous().masked_select(mask)
            return rows.index_select(0, places), weights, places
        each = K * TOKENS // EXPERTS
        mask = chosen.to(torch.int8).T.contiguous()
        found = mask.argsort(dim=-1, descending=True, stable=True)[:, :each].contiguous()
        places = found.view(-1)
        flat = gates.T.contiguous().view(-1)
        at = (torch.arange(EXPERTS).unsqueeze(-1) * TOKENS + found).view(-1)
        return rows.index_select(0, places), flat.index_select(0, at), places

    forward, (copied, weights, places) = counted(order)
    grads = torch.ones_like(copied), torch.ones_like(weights)
    backward, _ = counted(lambda: torch.autograd.backward([copied, weights], grads))
    copies = copied.detach().requires_grad_()

    def add():
        out = torch.zeros((TOKENS, HIDDEN), dtype=copies.dtype)
        return out.scatter_add_(0, places.unsqueeze(1).expand(-1, HIDDEN), copies)

    summed, out = counted(add)
    grad = torch.ones_like(out)
    spread, _ = counted(lambda: out.backward(grad))
    return forward, backward, summed, spread


ROWS = {"index_select", "index_add", "index_add_", "scatter_add_", "gather"}
"""Operators that move rows."""


@pytest.mark.parametrize("pads", [False, True])
def test_rows_are_ordered_and_summed_by_so_many_kernels(pads) -> None:
    forward, backward, summed, spread = dispatched(pads)
    model = Model(
        name="tiny", hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, vocab_size=64,
        max_position_embeddings=64, norm="rms_norm",
        activation="silu", gated_mlp=True, position="rotary", attention_bias=False,
        mlp_bias=False, tie_word_embeddings=False, num_experts=EXPERTS, num_experts_per_tok=K,
        moe_intermediate_size=32,
    )  # fmt: skip
    x = Shapes(
        microbatch_size=1, sequence_length=TOKENS, tp=1, elements=Elements(2, 2, 4, "bf16"),
        attention="flash", routing=Routing(capacity=1.0 if pads else None, padded=pads),
    )  # fmt: skip
    size, copies = TOKENS * HIDDEN, K * TOKENS * HIDDEN
    there = routing.permutation(model, x, before=size, after=copies, columns=EXPERTS, low=1.0)
    back = routing.unpermutation("combine", x, before=copies, after=size, low=1.0)
    waiting = sum(k.count for k in there.forward if k.name == "wait for counts")
    for ours, theirs in (
        (there.forward, forward), (there.input_grad, backward), (back.forward, summed),
        (back.input_grad, spread),
    ):  # fmt: skip
        kernels = sum(k.count for k in ours if k.name != "wait for counts")
        assert kernels == sum(kernel for _, kernel, _ in theirs), theirs
        moved = sum(k.bytes * k.count for k in ours)
        # of rows and places exactly but for a table's edges: within a tenth
        assert moved == pytest.approx(sum(size for *_, size in theirs), rel=0.1), theirs
    assert waiting == (0 if pads else 2 * sum(name == "masked_select" for name, *_ in forward))
