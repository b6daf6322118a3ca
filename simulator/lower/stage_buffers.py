"""What the stages of torch's pipelines hold all the time: buffers to receive in, and outputs.

torch/distributed/pipelining/stage.py of torch 2.6. Before the first step a stage allocates a buffer
for the input of every microbatch (`_prepare_forward_infra`) and one for the gradient of every
output (`_create_grad_recv_info`). Forward computes on the buffer, which is then what its first
layer keeps. Each output stays until the next step begins (`output_chunks`, `clear_runtime_states`),
the last stage's logits among them.
"""

from __future__ import annotations

from itertools import accumulate

from simulator.describe.scenario import Scenario
from simulator.lower.places import layout
from simulator.lower.shapes import shapes
from simulator.lower.trainable import tuned
from simulator.schedules import lists_of, schedule_of

ENDS = {"F": 1, "B": -1, "I": -1}
"""How an action changes the microbatches of a stage in flight."""


def has_stage_buffers(s: Scenario) -> bool:
    """Return whether torch's pipelines run the stages."""
    return s.run.layer_code == "torchtitan" and s.plan.pp > 1


def stage_buffer_bytes(s: Scenario) -> tuple[float, ...]:
    """Return the bytes of buffers and outputs of each pipeline rank.

    Inputs of the microbatches in flight count as activations, when there are most of them.
    """
    if not has_stage_buffers(s):
        return (0.0,) * s.plan.pp
    plan, x, last = s.plan, shapes(s), s.plan.num_stages - 1
    lists = lists_of(
        schedule_of(plan.schedule), plan.pp, s.num_microbatches, plan.chunks,
        plan.microbatch_group, s.target,
    )  # fmt: skip
    message = s.precision.activation * x.local_tokens * s.model.hidden_size
    head = next(o for o in tuned(s).blocks.head.operators if o.name == "head")
    logits = s.precision.activation * x.tokens * head.params // s.model.hidden_size

    def of_stage(stage: int, row: list[str]) -> float:
        flying = max(accumulate(ENDS.get(kind, 0) for kind in row), default=0)
        inputs = (s.num_microbatches - flying) * message if stage else 0
        if stage == last:
            return float(inputs + s.num_microbatches * logits)
        return float(inputs + 2 * s.num_microbatches * message)

    return tuple(
        sum(of_stage(stage, [a.kind for a in row if a.stage == stage]) for stage in held)
        for held, row in zip(layout(s).stages, lists, strict=True)
    )
