"""What a rank does: the actions of its list, one after the other, on real tensors.

Sends return at once; receives are posted ahead, a few in the order of the list, so that data moves
as soon as it is there. Times are taken at the boundaries between actions, so that what the rank
does between two of them is in one of them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from simulator.schedules import Action
from simulator.validate.torch.device import Device, Turns
from simulator.validate.torch.job import Job, tag
from simulator.validate.torch.model import (
    OPTIMIZERS,
    Stage,
    buckets,
    stage_of,
    tokens,
    weight_grads,
)
from simulator.validate.torch.peers import Peers

AHEAD = 8
"""Receives that are posted before they are needed."""

COMPUTING = ("F", "B", "I", "W", "OPT")
"""Kinds that compute on the device."""

WAITS = ("RECV_F", "RECV_B", "wait")
"""What is a wait for another rank."""


class Span(NamedTuple):
    """One part of an action as it was done, in nanoseconds."""

    start: int
    """Monotonic clock of the host, as is `end`."""
    end: int
    busy: int
    """What `Device.busy` counted in between."""


class Groups(NamedTuple):
    """Process groups, made by all ranks in one order."""

    sums: dict[tuple[int, ...], Any]
    """By the ranks that sum together: gradients of a stage, and what tp ranks divide."""
    lanes: dict[tuple[int, int, str], Any]
    """By sender, receiver and kind of message, for devices without tags."""

    @classmethod
    def of(cls, job: Job, device: Device) -> Groups:
        """Make the groups of a job."""
        peers = {job.peers(rank) for rank in range(job.world_size)}
        several = sorted({h for h in (*job.holders.values(), *peers) if len(h) > 1})
        lanes = sorted({
            (rank, job.peer(rank, a), a.kind)
            for rank in range(job.world_size)
            for a in job.list_of(rank)
            if a.kind.startswith("SEND")
        })  # fmt: skip
        return cls(
            {ranks: dist.new_group(ranks) for ranks in several},
            {} if device.tagged else {lane: dist.new_group(lane[:2]) for lane in lanes},
        )


class Executor:
    """The state of a rank: its stages, what has arrived, what is on its way."""

    def __init__(self, job: Job, rank: int, device: Device, groups: Groups, turns: Turns) -> None:
        self.job, self.rank, self.device, self.groups = job, rank, device, groups
        self.turns = turns
        self.actions, self.live = job.list_of(rank), job.live(rank)
        self.replica, _, index = job.place(rank)
        self.here = device.here()
        self.peers = Peers(job.tp, index, groups.sums.get(job.peers(rank)))
        self.peers.before, self.peers.after = self._pause, self._go_on
        self.stages: dict[int, Stage] = {}
        self.sums: dict[int, list[Tensor]] = {}
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        for number in job.stages_of(rank):
            stage = stage_of(job, number, self.peers).to(self.here)
            params = list(stage.parameters())
            self.stages[number] = stage
            self.sums[number] = buckets(params, job.bucket_bytes)
            self.optimizers[number] = OPTIMIZERS[job.optimizer](list(params))
        self.split = {(a.stage, a.microbatch) for a in self.actions if a.kind == "I"}
        self.last = len(job.layers) - 1
        self.number = 0
        self.losses: dict[int, float] = {}
        self.before_update: Callable[[int], None] | None = None
        self.handed: Callable[[Tensor], None] = lambda gradient: None
        """Is told of each gradient that only the transport still needs."""
        self._data: dict[int, Tensor] = {}
        self._arrived: dict[tuple[str, int, int], Tensor] = {}
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._left: dict[tuple[int, int], list[Any]] = {}
        self._posted: dict[Action, tuple[Any, Tensor]] = {}
        self._sent: dict[Action, tuple[Any, Tensor]] = {}
        self._reducing: dict[int, list[Any]] = {}
        self._to_post: deque[Action] = deque()
        self._spans: list[Span] = []
        self._start = self._spent = 0

    def step(self, at: Callable[[int], None] | None = None) -> list[Span]:
        """Do all actions once; `at` is told the position of each before it begins."""
        self._to_post = deque(a for a in self.actions if a.kind in WAITS)
        self.load()
        for _ in range(AHEAD):
            self._post()
        spans = self.run(self.actions, at)
        for work, _ in self._sent.values():
            work.wait()
        self._sent.clear()
        self.number += 1
        return spans

    def held(self) -> list[Tensor]:
        """Return what a rank holds all the time: parameters, gradients, optimizer states."""
        states = (
            value
            for optimizer in self.optimizers.values()
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        )
        params = (p.data for stage in self.stages.values() for p in stage.parameters())
        return [*params, *(flat for flats in self.sums.values() for flat in flats), *states]

    def load(self) -> None:
        """Get the samples of a step."""
        self._data = {
            m: tokens(self.job, self.number, self.replica, m).to(self.here)
            for m in range(self.job.num_microbatches)
        }
        self.losses = {}

    def run(self, actions: Sequence[Action], at: Callable[[int], None] | None = None) -> list[Span]:
        """Do actions one after the other; return the spans of their parts."""
        self._spans = []
        self._start, self._spent = time.perf_counter_ns(), self.device.busy()
        for position, action in enumerate(actions):
            if at is not None:
                at(position)
            if action.kind in COMPUTING and self.turns.take():
                self._start, self._spent = time.perf_counter_ns(), self.device.busy()
            DO[action.kind](self, action)
            self._mark(action.kind)
            self.turns.give()
        return self._spans

    def _pause(self) -> None:
        """End work, to wait for other ranks."""
        self._mark()
        self.turns.give()

    def _go_on(self) -> None:
        """End the wait; it is this rank's turn to work again."""
        self.turns.take()
        self._mark("wait")

    def _mark(self, kind: str = "") -> None:
        """End the part that is being done; the next one begins."""
        if not kind.startswith("SEND"):
            self.device.settle()
        end, spent = time.perf_counter_ns(), self.device.busy()
        waits = self.device.busy is time.perf_counter_ns and kind in WAITS
        self._spans.append(Span(self._start, end, 0 if waits else spent - self._spent))
        self._start, self._spent = end, spent

    def feed(self, stage: int, microbatches: int) -> None:
        """Hand a stage what its neighbours would send it, as random numbers."""
        job = self.job
        shape = job.microbatch_size, job.sequence_length, job.model["hidden_size"]
        self._arrived.clear()
        for m in range(microbatches):
            self._arrived["F", stage, m] = torch.randn(shape, device=self.here)
            self._arrived["B", stage, m] = torch.randn(shape, device=self.here) * 1e-3

    def _post(self) -> None:
        if not self._to_post:
            return
        action = self._to_post.popleft()
        job = self.job
        buffer = torch.empty(
            job.microbatch_size, job.sequence_length, job.model["hidden_size"],
            device=self.device.link,
        )  # fmt: skip
        peer, send = job.peer(self.rank, action), job.other_side(action)
        group = self.groups.lanes.get((peer, self.rank, send.kind))
        self._posted[action] = dist.irecv(buffer, peer, group, tag(job, send)), buffer

    def forward(self, action: Action) -> None:
        """F."""
        number, m = action.stage, action.microbatch
        key = number, m
        stage = self.stages[number]
        if key in self.split:
            stage.later.calls = self._left.setdefault(key, [])
        if number == 0:
            x = self._data[m][:, :-1]
        else:
            x = self._arrived.pop(("F", number, m)).requires_grad_()
        targets = self._data[m][:, 1:] if number == self.last else None
        y = stage(x, targets)
        stage.later.calls = None
        if number == self.last:
            self.losses[m] = float(y.detach())
            y = y / self.job.num_microbatches
        else:
            self._arrived["F", number + 1, m] = y.detach()
        self._kept[key] = x, y

    def backward(self, action: Action) -> None:
        """B, and I: the products of the forward say which gradients are computed."""
        number, m = action.stage, action.microbatch
        x, y = self._kept.pop((number, m))
        y.backward(None if number == self.last else self._arrived.pop(("B", number, m)))
        if number:
            assert x.grad is not None  # it required one
            self._arrived["B", number - 1, m] = x.grad

    def weights(self, action: Action) -> None:
        """W."""
        weight_grads(self._left.pop((action.stage, action.microbatch)))

    def send(self, action: Action) -> None:
        """SEND_F and SEND_B."""
        kind, step = ("F", 1) if action.kind == "SEND_F" else ("B", -1)
        tensor = self._arrived.pop((kind, action.stage + step, action.microbatch)).contiguous()
        tensor = tensor.to(self.device.link)
        peer = self.job.peer(self.rank, action)
        group = self.groups.lanes.get((self.rank, peer, action.kind))
        self._sent[action] = dist.isend(tensor, peer, group, tag(self.job, action)), tensor
        if kind == "B":
            self.handed(tensor)

    def receive(self, action: Action) -> None:
        """RECV_F and RECV_B."""
        work, buffer = self._posted.pop(action)
        work.wait()
        answered = Action(action.stage, "SEND_F", action.microbatch)
        if action.kind == "RECV_B" and answered in self._sent:  # so its tensor is needed no more
            self._sent.pop(answered)[0].wait()
        self._arrived[action.kind[-1], action.stage, action.microbatch] = buffer.to(self.here)
        self._post()

    def reduce(self, action: Action) -> None:
        """REDUCE_GRAD: all buckets of a stage, not waited for until its update."""
        holders = self.job.sharers(self.rank, action.stage)
        if len(holders) > 1:
            group = self.groups.sums[holders]
            self._reducing[action.stage] = [
                dist.all_reduce(flat, group=group, async_op=True)
                for flat in self.sums[action.stage]
            ]

    def update(self, action: Action) -> None:
        """OPT: wait for the sums, take their mean over replicas, update, clear gradients."""
        if len(self.job.sharers(self.rank, action.stage)) > 1:
            self.turns.give()
            for work in self._reducing.pop(action.stage, ()):
                work.wait()
            self._go_on()
        flats = self.sums[action.stage]
        if self.job.dp > 1:
            torch._foreach_div_(flats, float(self.job.dp))
        if self.before_update is not None:
            self.before_update(action.stage)
        self.optimizers[action.stage].step()
        torch._foreach_zero_(flats)


DO: dict[str, Callable[[Executor, Action], None]] = {
    "F": Executor.forward,
    "B": Executor.backward,
    "I": Executor.backward,
    "W": Executor.weights,
    "SEND_F": Executor.send,
    "SEND_B": Executor.send,
    "RECV_F": Executor.receive,
    "RECV_B": Executor.receive,
    "REDUCE_GRAD": Executor.reduce,
    "OPT": Executor.update,
}
