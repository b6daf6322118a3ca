"""A stage of torch's pipelines under FSDP2 and tensor parallelism, on tensors without data."""

from __future__ import annotations

import torch
from torch import distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.torch_memory import ENDS, Alive, Layer, Llama, Norm, cross_entropy, parallel, run_of


class Part(nn.Module):
    """A stage of a pipeline."""

    def __init__(self, z, length, first, last):
        super().__init__()
        self.tok_embeddings = nn.Embedding(z.vocab, z.hidden) if first else nn.Identity()
        self.layers = nn.ModuleDict({str(i): Layer(z) for i in range(z.layers)})
        self.norm = Norm(z.hidden) if last else nn.Identity()
        self.output = nn.Linear(z.hidden, z.vocab, bias=False) if last else nn.Identity()
        ones = torch.ones(length, z.hidden // z.heads // 2)
        self.register_buffer("turns", torch.polar(ones, ones))

    forward = Llama.forward


def stage_step(z, *, shards, tp, batch, length, stage, stages, microbatches):
    """Return what the second step takes on a rank of a stage of 1F1B, all layers recomputed.

    Its tensors live as torch/distributed/pipelining/stage.py keeps them: buffers to receive in from
    the first step on, outputs to the next one; gradients are reduced after the last backward.
    """
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=shards * tp)
    try:
        return _stage_step(z, shards, tp, batch, length, stage, stages, microbatches)
    finally:
        distributed.destroy_process_group()


def _stage_step(z, shards, tp, batch, length, stage, stages, microbatches):
    first, last = stage == 0, stage == stages - 1
    mesh = init_device_mesh("cpu", (shards, tp), mesh_dim_names=("dp", "tp"))
    ends = {"tok_embeddings": first, "norm": last, "output": last}
    with torch.device("meta"):
        model = Part(z, length, first, last)
        ends = {name: style for name, style in ENDS.items() if ends[name]}
        model = parallel(model, mesh, tp, True, ends, stays=True)
    alive, cache, outputs = Alive(), {}, []
    with FakeTensorMode(allow_non_fake_inputs=True), alive.only_real():
        model.to_empty(device="cpu")
        update = torch.optim.AdamW(model.parameters(), foreach=True)
        with alive, loss_parallel():
            for tensor in (*model.parameters(), *model.buffers()):
                alive.note(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
            message = (batch, length // tp, z.hidden)
            arrived, returned = (
                [
                    None if end else torch.empty(message, dtype=torch.bfloat16)
                    for _ in range(microbatches)
                ]
                for end in (first, last)
            )

            def forward(i):
                x = torch.randint(0, 10, (batch, length)) if first else arrived[i].requires_grad_()
                outputs.append(model(x))
                labels = torch.randint(0, 10, (batch, length))
                cache[i] = cross_entropy(outputs[-1], labels) if last else outputs[-1]

            def backward(i):
                torch.autograd.backward(cache.pop(i), None if last else returned[i])
                if last:
                    outputs[i].detach_()
                if not first:
                    arrived[i].grad = None

            def synchronise(now):
                model.set_is_last_backward(now)
                model.set_reshard_after_backward(now)
                model.set_requires_gradient_sync(now)

            for _ in range(2):
                alive.peak = alive.now
                outputs.clear()
                synchronise(False)
                ahead = min(stages - stage, microbatches)
                for i in range(ahead):
                    forward(i)
                for i in range(microbatches):
                    backward(i)
                    if ahead + i < microbatches:
                        forward(ahead + i)
                synchronise(True)
                for state in fully_shard.state(model)._state_ctx.all_states:
                    for group in state._fsdp_param_groups:
                        group.post_backward()
                update.step()
                update.zero_grad()
    return run_of(alive, {"step": alive.peak})
