"""Whether ranks that run their lists from first to last ever come to the end, whatever the times.

A computation waits for its inputs. A message goes when the computation before its send has ended
and both sides have come to it: between two ranks, messages of one direction and pass are matched in
their order, as NCCL matches them; receives are posted ahead of computation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from simulator.errors import DeadlockError
from simulator.schedules.action import Action, Actions, cells, grid
from simulator.schedules.passes import OTHER_SIDE, homes


class _Place(NamedTuple):
    rank: int
    position: int


@dataclass(slots=True)
class _Lane:
    """Messages from one rank to another in one pass, F or B, in the order of either side."""

    sends: deque[tuple[Action, int]] = field(default_factory=deque)
    """With how many cells of computation come before each."""
    receives: deque[Action] = field(default_factory=deque)


def check_progress(actions: Actions) -> None:
    """Check that legal action lists come to their end.

    Raises:
        DeadlockError: with the cells at which ranks wait for each other, and the grid.
    """
    run = _DryRun(actions)
    run.go()
    if run.stuck:
        raise DeadlockError(run.explained())


class _DryRun:
    """Lists that run without a clock."""

    def __init__(self, actions: Actions) -> None:
        self.actions = actions
        self.home = homes(actions)
        self.place = {a.alone: _Place(r, i) for r, row in enumerate(actions)
                      for i, a in enumerate(row)}  # fmt: skip
        self.backward = {(a.stage, a.microbatch): a.kind for row in actions for a in row
                         if a.kind in ("B", "I")}  # fmt: skip
        self.lanes: dict[tuple[int, int, str], _Lane] = {}
        self.work: list[list[tuple[Action, ...]]] = []
        """Cells of computation of each rank."""
        for rank, row in enumerate(actions):
            self.work.append([])
            for cell in cells(row):
                if cell[0].kind in OTHER_SIDE:
                    self._post(cell[0], rank)
                elif cell[0].kind in ("F", "B", "I", "W"):
                    self.work[-1].append(cell)
        self.has_messages = bool(self.lanes)
        self.done: set[Action] = set()
        self.at = [0] * len(actions)
        """Cells that each rank has done."""

    def _post(self, message: Action, rank: int) -> None:
        peer = self.home.get(
            (message.stage + OTHER_SIDE[message.kind][1], message.microbatch), rank
        )
        pass_ = message.kind[-1]
        if message.kind.startswith("SEND"):
            lane = self.lanes.setdefault((rank, peer, pass_), _Lane())
            lane.sends.append((message, len(self.work[rank])))
        else:
            self.lanes.setdefault((peer, rank, pass_), _Lane()).receives.append(message)

    def go(self) -> None:
        """Run until nothing moves."""
        waiting: dict[Action, list[int]] = {}
        ready = deque(range(len(self.work)))
        sending: list[list[tuple[int, _Lane]]] = [[] for _ in self.work]
        for (source, target, _), lane in self.lanes.items():
            sending[source].append((target, lane))
        while ready:
            rank = ready.popleft()
            while self.at[rank] < len(self.work[rank]):
                cell = self.work[rank][self.at[rank]]
                missing = next((n for a in cell for n in self.needs(a) if n not in self.done), None)
                if missing is not None:
                    waiting.setdefault(missing, []).append(rank)
                    break
                self.at[rank] += 1
                for action in cell:
                    self.done.add(action.alone)
                    ready.extend(waiting.pop(action.alone, ()))
            for _, lane in sending[rank]:
                for received in self._move(lane, rank):
                    ready.extend(waiting.pop(received, ()))

    def _move(self, lane: _Lane, rank: int) -> Iterator[Action]:
        """Let messages go whose two sides are at the head of a lane; yield the receives."""
        while lane.sends and lane.receives:
            send, after = lane.sends[0]
            if after > self.at[rank] or other_side(send) != lane.receives[0]:
                return
            lane.sends.popleft()
            received = lane.receives.popleft()
            self.done.update((send, received))
            yield received

    def needs(self, action: Action) -> Iterator[Action]:
        """Yield what a computation waits for, beside what comes before it on its rank."""
        return needs(action, self.home, self.backward, messages=self.has_messages)

    @property
    def stuck(self) -> bool:
        """Whether something was left undone."""
        undone = any(lane.sends or lane.receives for lane in self.lanes.values())
        return undone or any(at < len(w) for at, w in zip(self.at, self.work, strict=True))

    def blocker(self, action: Action) -> tuple[Action, str]:
        """Return what an undone action waits for, and why."""
        rank = self.place[action].rank
        if action.kind not in OTHER_SIDE:
            head = self.work[rank][self.at[rank]]
            if action not in [a.alone for a in head]:
                return head[0].alone, "which comes before it in the list"
            missing = next(n for a in head for n in self.needs(a) if n not in self.done)
            return missing, "its input"
        lane = next(
            lane for lane in self.lanes.values()
            if action in lane.receives or any(send == action for send, _ in lane.sends)
        )  # fmt: skip
        if action.kind.startswith("RECV"):
            if lane.receives[0] != action:
                return lane.receives[0], "which is received before it"
            return other_side(action), "its other side"
        after = next(count for send, count in lane.sends if send == action)
        if after > self.at[rank]:
            return self.work[rank][after - 1][0].alone, "which comes before it in the list"
        if lane.sends[0][0] != action:
            return lane.sends[0][0], "which is sent before it"
        return other_side(action), "its other side"

    def explained(self) -> str:
        """Return who waits for whom, why, and the grid with the cells at which ranks stand."""
        heads = [w[at][0].alone for at, w in zip(self.at, self.work, strict=True) if at < len(w)]
        left = [send for lane in self.lanes.values() for send, _ in lane.sends]
        left += [receive for lane in self.lanes.values() for receive in lane.receives]
        chain = [(heads or left)[0]]
        reasons: list[str] = []
        while chain[-1] not in chain[:-1]:
            following, reason = self.blocker(chain[-1])
            chain.append(following)
            reasons.append(reason)
        first = chain.index(chain[-1])
        cycle, reasons = chain[first:], reasons[first:]
        ranks = sorted({self.place[a].rank for a in cycle})
        stand = {r: self.work[r][self.at[r]][0].alone for r in ranks
                 if self.at[r] < len(self.work[r])}  # fmt: skip
        lines = [
            f"deadlock between ranks {ranks}: "
            + "; ".join(self._stands(rank, stand.get(rank)) for rank in ranks),
            *(
                f"  {waiter} on rank {self.place[waiter].rank} waits for {blocker}"
                f"{self._where(waiter, blocker)}, {reason}"
                for waiter, blocker, reason in zip(cycle, cycle[1:], reasons, strict=False)
            ),
        ]
        marks: dict[tuple[int, int], str] = {
            self.place[a]: "<-- WAITS" for a in cycle if a.kind in OTHER_SIDE
        }
        marks |= {self.place[a]: "<-- STANDS HERE" for a in stand.values()}
        return "\n".join([*lines, grid(self.actions, marks)])

    def _stands(self, rank: int, action: Action | None) -> str:
        if action is None:
            return f"rank {rank} has computed all and still has messages to exchange"
        missing, _ = self.blocker(action)
        peer = self.place[other_side(missing) if missing.kind in OTHER_SIDE else missing].rank
        source = f" from rank {peer}" if peer != rank else ", later in its own list"
        return f"rank {rank} stands at {action} and waits for {missing}{source}"

    def _where(self, waiter: Action, blocker: Action) -> str:
        rank = self.place[blocker].rank
        return "" if rank == self.place[waiter].rank else f" on rank {rank}"


def needs(
    action: Action, home: Mapping[tuple[int, int], int], backward: Mapping[tuple[int, int], str],
    *, messages: bool,
) -> Iterator[Action]:  # fmt: skip
    """Yield what a computation waits for, beside what comes before it on its rank.

    Args:
        action: what waits.
        home: rank by stage and microbatch.
        backward: whether it is B or I, by stage and microbatch.
        messages: whether other ranks' results come by receives; else they are there when computed.
    """
    stage, kind, m, _ = action
    step, receive = _INPUT.get(kind, (0, ""))
    source = home.get((stage + step, m))
    if not step or source is None:
        return
    if messages and source != home[stage, m]:
        yield Action(stage, receive, m)
    else:
        yield Action(stage + step, "F" if kind == "F" else backward[stage + step, m], m)


_INPUT = {"F": (-1, "RECV_F"), "B": (1, "RECV_B"), "I": (1, "RECV_B")}
"""How many stages further the input of a computation is made, and the message that brings it."""


def other_side(message: Action) -> Action:
    """Return the receive of a send, or the send of a receive."""
    kind, offset = OTHER_SIDE[message.kind]
    return Action(message.stage + offset, kind, message.microbatch)
