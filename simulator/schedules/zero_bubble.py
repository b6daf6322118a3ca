"""Schedules that put weight gradients off to fill bubbles (Qi et al., 2023, arXiv 2401.10241).

F, I and W are the seconds of a stage's forward, of the gradient of its input and of those of its
weights; an activation is kept from its F to its W.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from simulator.schedules.action import Action, Actions
from simulator.schedules.basic import looped, rounds_of

Passes: TypeAlias = Sequence[tuple[int, int]]
"""(stage, microbatch) in the order in which they pass a rank."""


def zb_h1(stages: int, microbatches: int) -> Actions:
    """1F1B whose weight gradients fill the drain (Qi et al., 2023, arXiv 2401.10241, figure 2).

    Bubble (p-1)(F+I-W), a third of 1F1B's for F = I = W; every stage keeps min(p, m) microbatches,
    as the first one of 1F1B.
    """
    return tuple(
        one_f_i_w(*_straight(stage, microbatches), stages - 1 - stage, stage)
        for stage in range(stages)
    )


def zb_h2(stages: int, microbatches: int) -> Actions:
    """ZB-H1 after a warm-up of up to 2p-1 forwards, not p (arXiv 2401.10241, figure 3).

    Bubble (p-1)(F+I-2W), none for F = I = W: stages begin and end one after the other. Every stage
    keeps min(2p-1, m) microbatches.
    """
    return tuple(
        one_f_i_w(*_straight(stage, microbatches), 2 * (stages - 1 - stage), 2 * stage)
        for stage in range(stages)
    )


def interleaved_zero_bubble(ranks: int, microbatches: int, chunks: int) -> Actions:
    """ZB-H1 with several chunks on each rank, as torch.distributed.pipelining has it.

    Stages and rounds are those of Interleaved1F1B. Bubble (p-1)(F+I-W); rank r keeps
    min(v p, v m) chunk activations where p divides m.
    """
    size = microbatches // rounds_of(ranks, microbatches)
    order = looped(microbatches, chunks, size)

    def one(rank: int) -> tuple[Action, ...]:
        forward = [(c * ranks + rank, m) for c, m in order]
        backward = [((chunks - 1 - c) * ranks + rank, m) for c, m in order]
        return one_f_i_w(forward, backward, (chunks - 1) * size + ranks - 1 - rank, rank)

    return tuple(one(rank) for rank in range(ranks))


def one_f_i_w(forward: Passes, backward: Passes, warmup: int, delay: int) -> tuple[Action, ...]:
    """Return a rank's list: `warmup` forwards, then F and I in turn, and W `delay` I's later."""
    warmup = min(warmup, len(forward))
    out = [Action(stage, "F", m) for stage, m in forward[:warmup]]
    for number, (stage, m) in enumerate(backward):
        if warmup + number < len(forward):
            out.append(Action(forward[warmup + number][0], "F", forward[warmup + number][1]))
        out.append(Action(stage, "I", m))
        if number >= delay:
            out.append(Action(backward[number - delay][0], "W", backward[number - delay][1]))
    done = max(len(backward) - delay, 0)
    return (*out, *(Action(stage, "W", m) for stage, m in backward[done:]))


def _straight(stage: int, microbatches: int) -> tuple[Passes, Passes]:
    passes = [(stage, m) for m in range(microbatches)]
    return passes, passes
