"""Action lists as columns, and what follows from them alone, whatever the actions cost."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from simulator.lower.segments import STREAMS
from simulator.program import ACTION_CODE, ACTIONS, NONE, Int32, Int64
from simulator.schedules import Action, Actions

FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD = (ACTION_CODE[kind] for kind in ("F", "B", "I", "W"))
SEND_F, RECV_F, SEND_B, RECV_B = (
    ACTION_CODE[kind] for kind in ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
)
REDUCE_GRAD, OPT = ACTION_CODE["REDUCE_GRAD"], ACTION_CODE["OPT"]

PASSES = (FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD)
COMPLETING = (BACKWARD, WEIGHT_GRAD)
"""Passes that complete gradients of weights."""

MESSAGES = {SEND_F: "send F", RECV_F: "recv F", SEND_B: "send B", RECV_B: "recv B"}
"""Names of the streams of messages, to which the distance of the peer is added."""


@dataclass(frozen=True, eq=False)
class Grid:
    """Action lists as columns, ranks one after the other."""

    rank: Int32
    stage: Int32
    kind: Int32
    microbatch: Int32
    paired: npt.NDArray[np.bool_]
    """Whether each action runs together with the one after it."""
    home: Int32
    """(stages, microbatches): the pipeline rank on which a stage computes a microbatch."""
    num_ranks: int
    num_microbatches: int

    @property
    def num_stages(self) -> int:
        """Stages of the model."""
        return len(self.home)

    @cached_property
    def _placed(self) -> tuple[Int64, Int64]:
        key = self.rank.astype(np.int64) * self.num_stages + self.stage
        keys, place = np.unique(key, return_inverse=True)
        return keys, place.reshape(-1)

    @property
    def place(self) -> Int64:
        """The place of each action: its stage on its rank, numbered by rank and then by stage."""
        return self._placed[1]

    @cached_property
    def places(self) -> tuple[Int64, Int64]:
        """Rank and stage of each place."""
        rank, stage = np.divmod(self._placed[0], max(self.num_stages, 1))
        return rank, stage

    @cached_property
    def is_message(self) -> npt.NDArray[np.bool_]:
        """Whether each action is a send or a receive."""
        is_message: npt.NDArray[np.bool_] = np.isin(self.kind, list(MESSAGES))
        return is_message

    @cached_property
    def lanes(self) -> tuple[tuple[str, ...], Int32]:
        """All streams, and for each send or receive its own: by direction, pass and peer."""
        up = np.isin(self.kind, (SEND_F, RECV_B)).astype(np.int32)
        down = np.isin(self.kind, (SEND_B, RECV_F)).astype(np.int32)
        peer = np.clip(self.stage + up - down, 0, self.num_stages - 1)
        hop = (self.home[peer, self.microbatch] - self.rank) % max(self.num_ranks, 1)
        hop = np.where(hop > self.num_ranks // 2, hop - self.num_ranks, hop)
        streams, lanes = list(STREAMS), np.zeros(len(self.kind), np.int32)
        for code, name in MESSAGES.items():
            mine = self.kind == code
            for distance in np.unique(hop[mine]):
                lanes[mine & (hop == distance)] = len(streams)
                streams.append(f"{name} {distance:+d}")
        return tuple(streams), lanes

    @cached_property
    def _computed(self) -> Int64:
        """The last forward or backward before each action in its rank's list."""
        computes = np.where(np.isin(self.kind, PASSES), np.arange(len(self.kind)), NONE)
        before: Int64 = np.maximum.accumulate(np.concatenate([[NONE], computes[:-1]]))
        return before

    @cached_property
    def waits(self) -> Int64:
        """The action whose result the first op of each action waits for, or NONE.

        A send waits for the computation before it in the list; of a pair, for its own half where
        that makes what it sends. Receives are posted ahead.

        What REDUCE_GRAD and OPT wait for depends on the buckets of the backward before them.
        """
        stages = self.num_stages
        done = np.full((len(ACTION_CODE), stages + 2, self.num_microbatches + 1), NONE, np.int64)
        done[self.kind, self.stage + 1, self.microbatch] = np.arange(len(self.kind))

        def doer(code: int, offset: int) -> Int64:
            column: Int64 = done[code, self.stage + 1 + offset, self.microbatch]
            return column

        def local(offset: int) -> npt.NDArray[np.bool_]:
            neighbour = self.home[np.clip(self.stage + offset, 0, stages - 1), self.microbatch]
            same: npt.NDArray[np.bool_] = neighbour == self.rank
            return same

        def arrival(receive: int, handed: Int64, offset: int) -> Int64:
            received = doer(receive, 0)
            return np.where(received != NONE, received, np.where(local(offset), handed, NONE))

        def sent(*kinds: int) -> Int64:
            made = np.maximum.reduce([doer(kind, 0) for kind in kinds])
            computed = self._computed
            first = np.maximum(computed - 1, 0)
            halves = self.paired[first] & (computed > 0)
            return np.where(halves & (made == first), first, computed)

        gradient = np.maximum(doer(BACKWARD, 1), doer(INPUT_GRAD, 1))
        source = {
            FORWARD: arrival(RECV_F, doer(FORWARD, -1), -1),
            BACKWARD: arrival(RECV_B, gradient, 1),
            INPUT_GRAD: arrival(RECV_B, gradient, 1),
            WEIGHT_GRAD: doer(INPUT_GRAD, 0),
            SEND_F: sent(FORWARD),
            SEND_B: sent(BACKWARD, INPUT_GRAD),
        }
        waits = np.full(len(self.kind), NONE, np.int64)
        for code, column in source.items():
            mine = self.kind == code
            waits[mine] = column[mine]
        return waits

    @cached_property
    def messages(self) -> tuple[Int64, Int32]:
        """The number of each send or receive, the same on both sides, and the ranks of each."""
        at = np.flatnonzero(self.is_message)
        kind, stage = self.kind[at], self.stage[at].astype(np.int64)
        # A message is known by the stage it leaves, its microbatch and its direction.
        backward = np.isin(kind, (SEND_B, RECV_B))
        leaves = stage - (kind == RECV_F) + (kind == RECV_B)
        key = (backward * (self.num_stages + 2) + leaves) * self.num_microbatches
        _, first, number = np.unique(
            key + self.microbatch[at], return_index=True, return_inverse=True
        )
        numbers = np.full(len(self.kind), NONE, np.int64)
        numbers[at] = number.reshape(-1)
        enters = leaves[first] + np.where(backward[first], -1, 1)
        ends, microbatch = np.stack([leaves[first], enters], axis=1), self.microbatch[at][first]
        return numbers, self.home[ends, microbatch[:, None]]

    @cached_property
    def completed(self) -> Int64:
        """The action that completes the gradients of each REDUCE_GRAD or OPT, or NONE.

        The last backward of its place; its own microbatch's where it names one.
        """
        own = np.full((len(self.places[0]), self.num_microbatches + 1), NONE, np.int64)
        passes = np.flatnonzero(np.isin(self.kind, COMPLETING))
        own[self.place[passes], self.microbatch[passes] + 1] = passes
        own[:, 0] = self.last_of(*COMPLETING)
        found: Int64 = own[self.place, self.microbatch + 1]
        return found

    def last_of(self, *kinds: int) -> Int64:
        """Return the last action of some kinds of each place, or NONE."""
        last = np.full(len(self.places[0]), NONE, np.int64)
        actions = np.flatnonzero(np.isin(self.kind, kinds))
        last[self.place[actions]] = actions
        return last

    def first_of(self, kind: int) -> Int64:
        """Return the first action of a kind of each place, or NONE."""
        first = np.full(len(self.places[0]), NONE, np.int64)
        actions = np.flatnonzero(self.kind == kind)[::-1]
        first[self.place[actions]] = actions
        return first

    def spell(self, action: int) -> str:
        """Return the text of an action."""
        stage, m = int(self.stage[action]), int(self.microbatch[action])
        return str(Action(stage, ACTIONS[self.kind[action]], m))


def to_grid(actions: Actions) -> Grid:
    """Return action lists as columns."""
    rows = [
        (rank, a.stage, ACTION_CODE[a.kind], a.microbatch, a.paired)
        for rank, row in enumerate(actions)
        for a in row
    ]
    rank, stage, kind, microbatch, paired = np.array(rows, np.int32).reshape(-1, 5).T
    num_microbatches = int(microbatch.max(initial=-1)) + 1
    home = np.full((int(stage.max(initial=-1)) + 1, num_microbatches), NONE, np.int32)
    forward = kind == FORWARD
    home[stage[forward], microbatch[forward]] = rank[forward]
    both = paired.astype(bool)
    return Grid(rank, stage, kind, microbatch, both, home, len(actions), num_microbatches)
