"""What ops of the reference engine contend for: servers of desks, and links of the network."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import simpy
from simpy.events import EventPriority

from simulator.kernels.sharing import advance, foresee, share
from simulator.program import Int32
from simulator.traffic import Traffic

AFTER_ALL_ELSE = EventPriority(2)
"""SimPy's priority for what happens last at a tick; ordinary events have 1."""


def at_rest(env: simpy.Environment, act: Callable[[simpy.Event], None]) -> None:
    """Act when this tick has come to rest: after all that happens because of what ended at it."""
    rest = env.event()
    rest.callbacks.append(act)
    rest._ok, rest._value = True, None
    env.schedule(rest, priority=AFTER_ALL_ELSE)


class Desks:
    """Servers that ops queue for: first come first served, ties in order of op id.

    Servers are granted when a tick has come to rest: after every op that ends at that tick has
    freed its own, and every op that is ready because of it has asked.
    """

    def __init__(self, env: simpy.Environment, servers: Sequence[int]) -> None:
        self.env = env
        self.free = list(servers)
        self.queues: list[list[tuple[Any, ...]]] = [[] for _ in servers]
        self.due = False

    def request(self, desk: int, op: int) -> simpy.Event:
        """Ask for a server; return what happens when one is granted."""
        granted = self.env.event()
        heapq.heappush(self.queues[desk], (self.env.now, op, granted))
        self._grant_later()
        return granted

    def release(self, desk: int) -> None:
        """Give a server back."""
        self.free[desk] += 1
        self._grant_later()

    def _grant_later(self) -> None:
        if not self.due:
            self.due = True
            at_rest(self.env, self._grant)

    def _grant(self, _rest: simpy.Event) -> None:
        self.due = False
        for desk, queue in enumerate(self.queues):
            while self.free[desk] and queue:
                self.free[desk] -= 1
                heapq.heappop(queue)[2].succeed()


class Network:
    """Links that flows share: when a tick has come to rest, rates are set anew where flows met.

    A flow is in the network from when its latency is over until its bytes have moved.
    """

    def __init__(self, env: simpy.Environment, traffic: Traffic, demand: Int32) -> None:
        self.env, self.traffic, self.demand = env, traffic, demand
        self.on_link: list[set[int]] = [set() for _ in traffic.capacity]
        self.moving: dict[int, simpy.Event] = {}
        self.touched: set[int] = set()
        count, links = len(demand), len(traffic.capacity)
        self.remaining, self.rate = np.zeros(count), np.zeros(count)
        self.since, self.finish = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.scratch, self.users = np.zeros((2, links)), np.zeros(links, np.int64)

    def links(self, flow: int) -> list[int]:
        """Return the links of a flow."""
        t, d = self.traffic, self.demand[flow]
        used: list[int] = t.links[t.offset[d] : t.offset[d + 1]].tolist()
        return used

    def transfer(self, flow: int) -> simpy.Event:
        """Let a flow enter its links; return what happens when its bytes have moved."""
        self.moving[flow] = self.env.event()
        self.remaining[flow] = self.traffic.size[self.demand[flow]]
        self.since[flow], self.rate[flow] = self.env.now, 0.0
        for link in self.links(flow):
            self.on_link[link].add(flow)
        self._touch({flow})
        return self.moving[flow]

    def _touch(self, flows: set[int]) -> None:
        if not self.touched:
            at_rest(self.env, self._share_anew)
        self.touched |= flows

    def _share_anew(self, _rest: simpy.Event) -> None:
        """Share the links of what was touched, and of all flows that they meet."""
        waiting, self.touched = self.touched & self.moving.keys(), set()
        while waiting:
            together = self._component(waiting.pop())
            waiting -= together
            flows, t = np.array(sorted(together), np.int64), self.traffic
            advance(flows, self.env.now, self.remaining, self.since, self.rate)
            share(
                flows, self.demand, t.offset, t.links, t.coefficient, t.weight, t.limit, t.capacity,
                self.scratch[0], self.scratch[1], self.users, self.rate,
            )  # fmt: skip
            foresee(flows, self.env.now, self.remaining, self.rate, self.finish)
            for flow in flows.tolist():
                self.env.process(self._end(flow, int(self.finish[flow])))

    def _component(self, flow: int) -> set[int]:
        """Return the flows that share links with a flow, directly or through others."""
        found, todo = {flow}, [flow]
        while todo:
            for link in self.links(todo.pop()):
                new = self.on_link[link] - found
                found |= new
                todo += new
        return found

    def _end(self, flow: int, finish: int) -> Generator[simpy.Event, Any, None]:
        """End a flow at the tick that was foreseen, unless that has changed since."""
        yield self.env.timeout(finish - self.env.now)
        if flow in self.moving and self.finish[flow] == finish:
            met: set[int] = set()
            for link in self.links(flow):
                self.on_link[link].remove(flow)
                met |= self.on_link[link]
            self.moving.pop(flow).succeed()
            if met:
                self._touch(met)
