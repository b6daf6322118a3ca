"""Flows that share links: every engine gives the same ticks, and they are the ones of the words.

Programs come from the builders of `test_parity`; some of their joint ops are fluid here. A slow
simulator with exact fractions, written from the prose of `simulator.kernels.sharing`, has the last
word on rates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_parity import (
    CASES,
    MENUS,
    SOME_CASES,
    Case,
    drawn_ops,
    many_specs,
    renumbered,
    tiled,
)

from simulator.engine import ENGINES, Folding, contention, events, run
from simulator.errors import ProgramError
from simulator.program import NONE, Int64, Program
from simulator.timeline import Timeline
from simulator.traffic import Traffic

INF = float("inf")
SECOND = 10**12
"""Ticks of a second."""


class Demand(NamedTuple):
    """Bytes on links for a byte of payload, the payload, and the rate when it is free."""

    uses: Mapping[int, float]
    size: float
    limit: float = INF


class Net(NamedTuple):
    """Links, demands, and which of them the joint ops make in turn (NONE: a fixed time)."""

    capacity: Sequence[float]
    demands: Sequence[Demand]
    turns: Sequence[int]


def traffic_of(net: Net, joints: int, columns: int = 1) -> Traffic:
    """Return the traffic of so many joint ops on so many tiles."""
    demands = net.demands
    turns = np.resize(np.array([t % (len(demands) + 1) - 1 for t in net.turns]), joints * columns)
    return Traffic(
        capacity=np.array(net.capacity, np.float64),
        names=tuple(f"link {k}" for k in range(len(net.capacity))),
        offset=np.cumsum([0, *(len(d.uses) for d in demands)]).astype(np.int64),
        links=np.array([k for d in demands for k in d.uses], np.int32),
        coefficient=np.array([c for d in demands for c in d.uses.values()], np.float64),
        size=np.array([d.size for d in demands], np.float64),
        limit=np.array([d.limit for d in demands], np.float64),
        demand=turns.reshape(joints, columns).astype(np.int32),
    )


# A byte at 1e12 bytes/s takes one tick: on such links flows meet ops of some ticks; sizes and
# coefficients are few, so that much ends at one tick.
CAPACITIES = (1e12, 2e12, 3e11, 1e9)
COEFFICIENTS = (0.5, 1.0, 1.75, 2.0)
SIZES = (1.0, 1e3, 1e6, 3e6)
LIMITS = (INF, INF, 1e12, 1e11)
UNITS = (1, 500, 10**6)
"""Ticks that the menus of `test_parity` count in."""


@st.composite
def nets(draw: st.DrawFn) -> Net:
    capacity = draw(st.lists(st.sampled_from(CAPACITIES), min_size=1, max_size=6))
    demands = st.builds(
        Demand,
        uses=st.dictionaries(
            st.integers(0, len(capacity) - 1), st.sampled_from(COEFFICIENTS), max_size=4
        ),
        size=st.sampled_from(SIZES),
        limit=st.sampled_from(LIMITS),
    )
    turns = st.lists(st.integers(0, 6), min_size=1, max_size=7)
    return Net(capacity, draw(st.lists(demands, min_size=1, max_size=4)), draw(turns))


def some_flow(case: Case) -> bool:
    """Return whether a case has two joint ops or more."""
    return sum(spec.width > 0 for spec in case.specs) > 1


Build = Callable[..., tuple[Program, Int64]]


@pytest.fixture(scope="session")
def build(op: Any, program_of: Any) -> Build:
    """Return a function from a case to a program and its ticks, in units."""

    def made(case: Case, unit: int = 1) -> tuple[Program, Int64]:
        ops = renumbered(drawn_ops(case, op), in_order=True)
        program, ticks = program_of(ops, servers=case.servers, num_ranks=4)
        ticks *= unit if ticks.max(initial=0) < 2**40 else 1
        if len(case.specs) % 2:  # members of a joint op may bring different latencies
            ticks[program.joint != NONE] += np.flatnonzero(program.joint != NONE) % 3
        return program, ticks

    return made


def same_in_all(program: Program, ticks: Int64, traffic: Traffic) -> Timeline:
    """Return the reference's times after checking that every engine has them."""
    expected = run(program, ticks, "reference", traffic=traffic)
    for engine in ENGINES:
        assert run(program, ticks, engine, traffic=traffic) == expected, engine
    return expected


@settings(max_examples=600, deadline=None)
@given(case=CASES.filter(some_flow), net=nets(), unit=st.sampled_from(UNITS))
def test_engines_agree_on_random_programs_whose_flows_share_links(
    build: Build, case: Case, net: Net, unit: int
) -> None:
    program, ticks = build(case, unit)
    same_in_all(program, ticks, traffic_of(net, len(program.joint_group)))


# Mostly flows, and all of them fluid.
@settings(max_examples=300, deadline=None)
@given(case=CASES.filter(some_flow), net=nets(), unit=st.sampled_from(UNITS))
def test_engines_agree_on_programs_of_flows(build: Build, case: Case, net: Net, unit: int) -> None:
    specs = [s._replace(width=s.width or 2, needs=s.needs[:1]) for s in case.specs]
    turns = [t % len(net.demands) + 1 for t in net.turns]
    program, ticks = build(case._replace(specs=specs), unit)
    same_in_all(program, ticks, traffic_of(net._replace(turns=turns), len(program.joint_group)))


@settings(max_examples=200, deadline=None)
@given(
    case=SOME_CASES,
    net=nets(),
    degrees=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    partitions=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    unit=st.sampled_from(UNITS),
    jitter=st.booleans(),
)
def test_engines_agree_on_tiles_whose_flows_share_links(
    build: Build, case: Case, net: Net, degrees: tuple[int, int], partitions: list[int], unit: int,
    jitter: bool,
) -> None:  # fmt: skip
    one, ticks = build(case, unit)
    program = tiled(one, *degrees, partitions)
    traffic = traffic_of(net, len(one.joint_group), program.num_tiles)
    wide = ticks[:, None]
    if jitter:
        wide = (
            ticks[:, None] + np.arange(len(ticks) * program.num_tiles).reshape(len(ticks), -1) % 3
        )
    times = same_in_all(program, wide, traffic)
    # The flat program has a joint op for every class; its demands follow in order of classes.
    count = program.classes.max(axis=1)[program.partition] + 1
    demand = [traffic.demand[j, : count[j]] for j in range(len(count))]
    flat = Traffic(
        traffic.capacity, traffic.names, traffic.offset, traffic.links, traffic.coefficient,
        traffic.size, traffic.limit, np.concatenate([np.zeros(0, np.int32), *demand])[:, None],
    )  # fmt: skip
    every = np.broadcast_to(wide, (len(ticks), program.num_tiles)).ravel()
    assert run(program.flat, every, "events", traffic=flat) == times


# Demands need columns for the classes that joint ops meet in, not for all tiles.
def test_demands_may_have_fewer_columns_than_there_are_tiles(op: Any, program_of: Any) -> None:
    one, ticks = program_of([op(r % 2, 5, "dp", joint=f"j{r // 2}") for r in range(4)])
    program = tiled(one, 3, 2, [3, 1])  # all tiles meet in one class; in three classes
    net = Net([1e12], [Demand({0: 1.0}, 1e3)], [1])
    times = [same_in_all(program, ticks[:, None], traffic_of(net, 2, k)) for k in (3, 4, 6)]
    assert times[0] == times[1] == times[2]
    assert times[0].makespan == 5 + 1000 + 5 + 3000


# A run cut into pieces, with little room at first, is the same run.
@settings(max_examples=150, deadline=None)
@given(case=CASES.filter(some_flow), net=nets(), budget=st.integers(1, 6))
def test_a_run_in_pieces_and_little_room_changes_nothing(
    build: Build, case: Case, net: Net, budget: int
) -> None:
    program, ticks = build(case, 500)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(events, "BUDGET", budget)
        patch.setattr(events, "_Nodes", LittleRoom)
        same_in_all(program, ticks, traffic_of(net, len(program.joint_group)))


class LittleRoom(events._Nodes):
    """Room for the nodes of one flow."""

    def __init__(self, longest: int) -> None:
        self.nodes = np.empty((0, 5), np.int64)
        self.pool = np.array([NONE, 0], np.int64)
        self._add(longest)


@pytest.mark.parametrize("servers", [[], [1, 2, 3]], ids=["no desks", "desks"])
@pytest.mark.parametrize(("seed", "count"), [(1, 300), (2, 1200)])
def test_engines_agree_on_larger_programs_whose_flows_share_links(
    build: Build, seed: int, count: int, servers: list[int]
) -> None:
    program, ticks = build(Case(many_specs(seed, count), MENUS[2], servers), 10**5)
    uses = (
        {0: 1.0, 1: 1.75},
        {1: 2.0, 2: 0.5, 3: 1.0},
        {3: 1.0},
        {0: 1.0, 4: 1.0, 5: 2.0},
        {4: 1.5},
    )
    demands = [Demand(u, SIZES[k % 4], LIMITS[k % 3 + 1]) for k, u in enumerate(uses)]
    net = Net([1e12, 2e12, 3e11, 1e12, 5e11, 1e12], demands, [1, 2, 3, 4, 5, 0])
    same_in_all(program, ticks, traffic_of(net, len(program.joint_group)))


def flows_of(op: Any, program_of: Any, count: int, latency: int = 0) -> tuple[Program, Int64]:
    """Return flows that nothing orders, each with a rank of its own."""
    made: tuple[Program, Int64] = program_of(
        [op(r, latency, "dp", joint=f"flow {r}") for r in range(count)]
    )
    return made


def ends_of(op: Any, program_of: Any, net: Net, count: int, latency: int = 0) -> list[int]:
    """Return the ends of flows that start together, the same in every engine."""
    program, ticks = flows_of(op, program_of, count, latency)
    times = same_in_all(program, ticks, traffic_of(net, count))
    ends: list[int] = times.end.tolist()
    return ends


# 90 flows of 1, 2, ... 90 kB on one link of 1e12 bytes/s leave one after the other. Flow k + 1 has
# 1 kB more than flow k, which the 90 - k flows left move together: in 1000 (90 - k) ticks.
def test_flows_leave_one_link_one_after_the_other(op: Any, program_of: Any) -> None:
    net = Net([1e12], [Demand({0: 1.0}, 1e3 * (k + 1)) for k in range(90)], list(range(1, 91)))
    ends = ends_of(op, program_of, net, 90)
    expected = np.cumsum([1000 * (90 - k) for k in range(90)])
    assert np.abs(np.array(ends) - expected).max() <= 90


# 200 flows of 1 kB come to the link of a long one in turn, 5 ticks apart: whenever one has left,
# the end of the long one is foreseen later. Those ends stay in a heap with room for 72 at first.
# The long one moves 1e9 bytes, the others 200 x 1e3: the link is busy until the last byte.
def test_room_for_ends_that_were_foreseen_grows(
    op: Any, program_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown = []
    double = events._Nodes.double
    monkeypatch.setattr(events._Nodes, "double", lambda room: (grown.append(1), double(room)))
    ops = [op(0, 0, "dp", joint="long")] + [op(1, 5, "dp", joint=f"{k}") for k in range(200)]
    program, ticks = program_of(ops)
    net = Net([1e12], [Demand({0: 1.0}, 1e9), Demand({0: 1.0}, 1e3)], [1] + [2] * 200)
    times = same_in_all(program, ticks, traffic_of(net, 201))
    assert grown
    assert abs(times.end[0] - (10**9 + 200 * 1000)) <= 1


# Latency first, then size / rate in whole ticks: 1e3 bytes over 2 x 1e3 of a link of 3e11 bytes/s
# take 1e3 / 1.5e11 s = 6,666.67 ticks; with a limit of 7e10 bytes/s 14,285.7 ticks.
@pytest.mark.parametrize(
    ("demand", "ticks"),
    [
        (Demand({0: 1.0}, 1e3), 3_334),
        (Demand({0: 2.0}, 1e3), 6_667),
        (Demand({0: 2.0}, 1e3, 7e10), 14_286),
        (Demand({0: 1.0, 1: 1.0}, 1e3), 3_334),
        (Demand({}, 1e3, 1e9), 10**6),
        (Demand({}, 1e3), 1),
        (Demand({0: 1.0}, 0.0), 1),
    ],
)
@pytest.mark.parametrize("latency", [0, 1, 12_345])
def test_a_flow_alone_takes_its_latency_and_size_over_rate(
    op: Any, program_of: Any, demand: Demand, ticks: int, latency: int
) -> None:
    net = Net([3e11, 1e12], [demand], [1])
    assert ends_of(op, program_of, net, 1, latency) == [latency + ticks]


# An all-reduce of 1e6 bytes over 4 ranks puts 1.5e6 on a NIC of 1e12 bytes/s: 1.5e6 ticks.
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_equal_all_reduces_on_one_nic_take_as_many_times_as_long(
    op: Any, program_of: Any, count: int
) -> None:
    net = Net([1e12], [Demand({0: 1.5}, 1e6)], [1])
    ends = ends_of(op, program_of, net, count, latency=7)
    assert len(set(ends)) == 1
    assert abs(ends[0] - 7 - 1_500_000 * count) <= 1


def test_flows_on_rails_of_their_own_do_not_slow_each_other(op: Any, program_of: Any) -> None:
    net = Net([1e12] * 8, [Demand({rail: 2.0}, 1e6) for rail in range(8)], list(range(1, 9)))
    assert ends_of(op, program_of, net, 8, latency=7) == [2_000_007] * 8


# Flow a (1e6 bytes on 1e12 bytes/s) is alone for 500,000 ticks and has half left; then b (1e6)
# comes. Both move 0.5e12 bytes/s until a ends at 1,500,000; b has half left and ends at 2,000,000.
def test_a_flow_that_comes_later_slows_the_first_from_then_on(op: Any, program_of: Any) -> None:
    program, ticks = program_of([op(0, 0, "dp", joint="a"), op(1, 500_000, "dp", joint="b")])
    net = Net([1e12], [Demand({0: 1.0}, 1e6)], [1])
    times = same_in_all(program, ticks, traffic_of(net, 2))
    assert times.start.tolist() == [0, 0]
    assert times.end.tolist() == [1_500_000, 2_000_000]


# a (1e6 over x and y), b (0.5e6 over x), c (2e6 over y), x and y of 1e12. All move 0.5e12 until b
# ends at 1e6 with 0.5e6 moved by each; a has x free but y not: 0.5e12 still, ends at 2e6. c has
# moved 1e6 by then and ends at 2e6 + 1e6.
def test_a_flow_that_leaves_helps_only_whom_it_held_back(op: Any, program_of: Any) -> None:
    demands = [Demand({0: 1.0, 1: 1.0}, 1e6), Demand({0: 1.0}, 5e5), Demand({1: 1.0}, 2e6)]
    assert ends_of(op, program_of, Net([1e12, 1e12], demands, [1, 2, 3]), 3) == [
        2_000_000,
        1_000_000,
        3_000_000,
    ]


# Two members arrive at 10 and 30 with latencies 5 and 8: the flow enters its link at 38.
def test_a_flow_waits_for_its_last_member_and_its_longest_latency(op: Any, program_of: Any) -> None:
    program, ticks = program_of([
        op(0, 10), op(1, 30), op(0, 5, "dp", (0,), joint="a"), op(1, 8, "dp", (1,), joint="a"),
    ])  # fmt: skip
    times = same_in_all(program, ticks, traffic_of(Net([1e12], [Demand({0: 1.0}, 100.0)], [1]), 1))
    assert times.start.tolist() == [0, 0, 30, 30]
    assert times.end.tolist() == [10, 30, 138, 138]


@settings(max_examples=100, deadline=None)
@given(case=SOME_CASES, unit=st.sampled_from(UNITS))
def test_traffic_in_which_no_flow_is_fluid_changes_nothing(
    build: Build, case: Case, unit: int
) -> None:
    program, ticks = build(case, unit)
    net = Net([1e12], [Demand({0: 1.0}, 1e6)], [0])
    times = same_in_all(program, ticks, traffic_of(net, len(program.joint_group)))
    assert times == run(program, ticks, "compiled")
    assert times == same_in_all(program, ticks, Traffic.none())


def test_flows_of_folded_tiles_are_refused(op: Any, program_of: Any) -> None:
    one, ticks = program_of([op(0, 5, "dp", joint="a")])
    program = tiled(one, 2, 1, [0])
    folding = Folding(np.zeros(1, np.int64), np.zeros(2, np.int64))
    traffic = traffic_of(Net([1e12], [Demand({0: 1.0}, 1e6)], [1]), 1, 2)
    with pytest.raises(ProgramError, match="cannot be folded"):
        run(program, ticks, "events", folding, traffic)


def exact_rates(net: Net, moving: Mapping[int, int]) -> dict[int, Fraction]:
    """Return the fair rate of each moving flow (by number: its demand), in fractions."""
    capacity = [Fraction(c) for c in net.capacity]
    uses = {f: {k: Fraction(c) for k, c in net.demands[d].uses.items()} for f, d in moving.items()}
    weight = {
        f: uses[f][max(u, key=lambda k: u[k] / capacity[k])] if u else Fraction(1)
        for f, u in uses.items()
    }
    rates: dict[int, Fraction] = {}
    while len(rates) < len(moving):
        going = [f for f in moving if f not in rates]
        stops: list[tuple[Fraction, list[int]]] = [
            (Fraction(limit) * weight[f], [f])
            for f in going
            if (limit := net.demands[moving[f]].limit) < INF
        ]
        for link, most in enumerate(capacity):
            users = [f for f in going if link in uses[f]]
            left = most - sum(rates[f] * uses[f].get(link, 0) for f in rates)
            if users:
                stops.append((left / sum(uses[f][link] / weight[f] for f in users), users))
        if not stops:  # neither links nor limits
            return rates | dict.fromkeys(going, Fraction(10**40))
        level, who = min(stops, key=lambda stop: stop[0])
        rates |= {f: level / weight[f] for f in who}
    return rates


def by_hand(program: Program, ticks: list[int], net: Net) -> tuple[list[int], int]:
    """Return the end of every op in a program without desks, and how often rates changed.

    All is looked at anew at every tick at which something happens: who can start, who moves, how
    fast.
    """
    count = len(program)
    joint = program.joint.tolist()
    demand = traffic_of(net, len(program.joint_group)).demand[:, 0].tolist()
    lane = list(zip(program.rank, program.stream, strict=True))
    members = [[m for m in range(count) if m == i or joint[m] == joint[i] != NONE]
               for i in range(count)]  # fmt: skip
    needs = [set(program.predecessors(i).tolist()) for i in range(count)]
    for i in range(count):
        before = [k for k in range(i) if lane[k] == lane[i] and program.stream[i] != NONE]
        needs[i] |= set(before[-1:])
    end: list[int] = [NONE] * count
    started: set[int] = set()
    fixed: dict[int, int] = {}  # op: its end
    entering: dict[int, int] = {}  # flow: when its latency is over
    left: dict[int, Fraction] = {}  # flow: bytes
    rates: dict[int, Fraction] = {}
    now = changes = 0
    while True:
        moved = True
        while moved:
            moved = False
            for op in [op for op, t in fixed.items() if t == now]:
                end[op], moved = now, True
                del fixed[op]
            for op in range(count):
                if op in started or any(end[n] == NONE for m in members[op] for n in needs[m]):
                    continue
                started.update(members[op])
                moved = True
                if joint[op] != NONE and demand[joint[op]] != NONE:
                    entering[joint[op]] = now + max(ticks[m] for m in members[op])
                else:
                    fixed |= {m: now + ticks[m] for m in members[op]}
            for flow in [f for f, t in entering.items() if t == now]:
                left[flow] = Fraction(net.demands[demand[flow]].size)
                del entering[flow]
        if rates.keys() != left.keys():
            rates = exact_rates(net, {f: demand[f] for f in sorted(left)})
            changes += 1
        whens = {f: now + max(math.ceil(left[f] / rates[f] * SECOND), 1) for f in left}
        if not fixed and not entering and not whens:
            return end, changes
        then = min([*fixed.values(), *entering.values(), *whens.values()])
        for flow in list(left):
            left[flow] -= rates[flow] * (then - now) / SECOND
            if whens[flow] == then:
                del left[flow]
                for op in (op for op in range(count) if joint[op] == flow):
                    end[op] = then
        now = then


# Floats and fractions may round to different ticks, so each change of rates may add a difference of
# two; without desks a tick more or less never changes who goes first.
@settings(max_examples=250, deadline=None)
@given(case=CASES.filter(some_flow), net=nets(), unit=st.sampled_from(UNITS))
def test_ends_are_those_of_exact_fractions(build: Build, case: Case, net: Net, unit: int) -> None:
    specs = [s._replace(desk=-1) for s in case.specs]
    program, ticks = build(Case(specs, case.menu, ()), unit)
    times = run(program, ticks, "events", traffic=traffic_of(net, len(program.joint_group)))
    end, changes = by_hand(program, ticks.tolist(), net)
    assert np.abs(times.end - end).max(initial=0) <= 2 * changes


# What the reference foresees is recorded: between two moments rates are constant. Every flow moves
# its size, at most what one tick more moves; no link carries more than it can.
@settings(max_examples=150, deadline=None)
@given(case=CASES.filter(some_flow), net=nets())
def test_what_flows_move_adds_up_to_their_size(build: Build, case: Case, net: Net) -> None:
    program, ticks = build(case, 500)
    traffic = traffic_of(net, len(program.joint_group))
    foreseen: list[tuple[int, dict[int, float]]] = []

    def foresee(flows: Any, now: int, remaining: Any, rate: Any, finish: Any) -> None:
        foreseen.append((now, {f: float(rate[f]) for f in flows.tolist()}))
        kernel(flows, now, remaining, rate, finish)

    kernel = contention.foresee
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contention, "foresee", foresee)
        times = run(program, ticks, "reference", traffic=traffic)
    ends = {int(j): int(times.end[i]) for i, j in enumerate(program.joint) if j != NONE}
    moved = dict.fromkeys(ends, 0.0)
    rate: dict[int, float] = {}
    moments = sorted({t for t, _ in foreseen} | set(ends.values()))
    for now, then in itertools.pairwise(moments):
        for _, rates in (f for f in foreseen if f[0] == now):
            rate |= rates
        rate = {f: r for f, r in rate.items() if ends[f] > now}
        load = np.zeros(len(net.capacity))
        for flow, r in rate.items():
            moved[flow] += r * ((then - now) / SECOND)
            for link, coefficient in net.demands[traffic.demand[flow, 0]].uses.items():
                load[link] += coefficient * r
        assert (load <= traffic.capacity * (1 + 1e-9)).all()
    last = {f: r for _, rates in foreseen for f, r in rates.items()}
    for flow, r in last.items():
        size = net.demands[traffic.demand[flow, 0]].size
        assert size * (1 - 1e-9) <= moved[flow] <= size * (1 + 1e-9) + 1.001 * r / SECOND
