"""One truth: every engine gives the same start and end of every op, to the tick.

Random programs come as lists of `Spec`, drawn so that no op can wait for itself; a slow simulator
written from the prose of `simulator.program` and `simulator.engine.reference` has the last word.
"""

from __future__ import annotations

import heapq
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.engine import ENGINES, Folding, compiled, events, fold, run
from simulator.errors import DeadlockError
from simulator.kernels import jit
from simulator.lower.check import check
from simulator.program import NONE, Groups, Int64, Program, Tiling
from simulator.timeline import Timeline

STREAMS = ("compute", "dp", "tp", None)
MENUS = ((0,), (0, 1), (0, 1, 2, 5), (1, 2, 3), (3, 2**40))
"""Ticks to choose from: few of them, so that much falls on one tick."""


class Spec(NamedTuple):
    """One op of rank `rank`, or with a `width` a joint op of so many ranks from there on."""

    rank: int
    width: int
    stream: int
    length: int
    """Index into the menu of ticks."""
    desk: int
    needs: tuple[int, ...]
    """How far back lie the ops that it needs; members of a joint op take turns."""
    key: int
    """Where its op ids go: ids are sorted by key, in order within a stream."""


SPECS = st.builds(
    Spec,
    rank=st.integers(0, 3),
    width=st.sampled_from([0, 0, 0, 0, 1, 2, 3, 4]),
    stream=st.integers(0, 3),
    length=st.integers(0, 3),
    desk=st.integers(-1, 2),
    needs=st.lists(st.integers(0, 12), max_size=3).map(tuple),
    key=st.integers(0, 99),
)


class Case(NamedTuple):
    """A random program: its ops, the ticks to choose from, and the servers of each desk."""

    specs: Sequence[Spec]
    menu: Sequence[int]
    servers: Sequence[int]


CASES = st.builds(
    Case,
    specs=st.lists(SPECS, max_size=5) | st.lists(SPECS, min_size=6, max_size=14),
    menu=st.sampled_from(MENUS),
    servers=st.lists(st.integers(1, 3), max_size=3),
)

SOME_CASES = CASES.filter(lambda case: len(case.specs) > 0)

Drawn = tuple[Program, Int64]
Build = Callable[..., Drawn]


def drawn_ops(case: Case, op: Any) -> list[Any]:
    """Return ops that need only what stands before them, with the key of each."""
    ops: list[Any] = []
    for number, spec in enumerate(case.specs):
        known, width = len(ops), max(spec.width, 1)
        for m in range(width):
            needs = tuple(known - 1 - far for far in spec.needs[m::width] if far < known)
            desk = spec.desk if not spec.width and 0 <= spec.desk < len(case.servers) else None
            made = op(
                (spec.rank + m) % 4, case.menu[spec.length % len(case.menu)],
                STREAMS[(spec.stream + m * spec.key) % 4], needs,
                joint=f"j{number}" if spec.width else None, desk=desk,
            )  # fmt: skip
            ops.append((made, spec.key * (m + 1) % 101))
    return ops


def renumbered(ops: Sequence[Any], in_order: bool) -> list[Any]:
    """Return the ops sorted by key; `in_order` keeps the order that each stream has now."""
    order = sorted(range(len(ops)), key=lambda i: ops[i][1])
    if in_order:
        lanes = [(o.rank, o.stream) if o.stream else (NONE, i) for i, (o, _) in enumerate(ops)]
        queues: dict[Any, Iterator[int]] = {
            lane: iter([i for i in range(len(ops)) if lanes[i] == lane]) for lane in set(lanes)
        }
        order = [next(queues[lanes[i]]) for i in order]
    new = {old: i for i, old in enumerate(order)}
    return [ops[i][0]._replace(after=tuple(new[p] for p in ops[i][0].after)) for i in order]


@pytest.fixture(scope="session")
def build(op: Any, program_of: Any) -> Build:
    """Return a function from a case to a program and its ticks."""

    def made(case: Case, in_order: bool = True) -> Drawn:
        ops = renumbered(drawn_ops(case, op), in_order)
        program, ticks = program_of(ops, servers=case.servers, num_ranks=4)
        if len(case.specs) % 2:  # members of a joint op may end apart
            ticks[program.joint != NONE] += np.flatnonzero(program.joint != NONE) % 3
        return program, ticks

    return made


@pytest.fixture(scope="module", params=["interpreted", "compiled"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run kernels that choose by size in one way only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit, "SMALL", 0 if request.param == "compiled" else 2**62)
        yield request.param


def by_hand(program: Program, ticks: list[int]) -> tuple[list[int], list[int]]:
    """Return start and end of every op by the words, NONE for what never starts.

    At a tick all that ends is ended and all that is ready starts or asks, until nothing moves; then
    each desk gives its free servers to those who asked first, ties by op id; and so on.
    """
    count = len(program)
    slot = program.slot.tolist() or [NONE] * count
    joint, lane = program.joint.tolist(), list(zip(program.rank, program.stream, strict=True))
    together = [[m for m in range(count) if m == i or joint[m] == joint[i] != NONE]
                for i in range(count)]  # fmt: skip
    needs = [program.predecessors(i).tolist() for i in range(count)]
    for i in range(count):
        before = [k for k in range(i) if lane[k] == lane[i] and program.stream[i] != NONE]
        needs[i] += before[-1:]
    free, queues = list(program.servers), [list[tuple[int, int]]() for _ in program.servers]
    start, end = [NONE] * count, [NONE] * count
    came = [False] * count
    running: list[tuple[int, int]] = []
    now, moved = 0, True
    while True:
        while moved:
            moved = False
            while running and running[0][0] == now:
                op = heapq.heappop(running)[1]
                end[op], moved = now, True
                if slot[op] != NONE:
                    free[slot[op]] += 1
            for op in range(count):
                if came[op] or any(end[n] == NONE for m in together[op] for n in needs[m]):
                    continue
                came[op] = moved = True
                if slot[op] != NONE:
                    heapq.heappush(queues[slot[op]], (now, op))
                else:
                    start[op] = now
                    heapq.heappush(running, (now + ticks[op], op))
        for desk, queue in enumerate(queues):
            while free[desk] and queue:
                op = heapq.heappop(queue)[1]
                free[desk] -= 1
                start[op], moved = now, True
                heapq.heappush(running, (now + ticks[op], op))
        if not moved and not running:
            return start, end
        now, moved = running[0][0], True


def same_in_all(program: Program, ticks: Int64, folding: Folding | None = None) -> Timeline:
    """Return the reference's times after checking that every engine has them."""
    expected = run(program, ticks, "reference")
    for engine in ENGINES:
        assert run(program, ticks, engine, folding) == expected, engine
    return expected


@settings(max_examples=700, deadline=None)
@given(case=CASES)
def test_engines_agree_on_random_programs_and_with_the_words(
    kernels: str, build: Build, case: Case
) -> None:
    program, ticks = build(case)
    times = same_in_all(check(program), ticks)
    assert (times.start.tolist(), times.end.tolist()) == by_hand(program, ticks.tolist())


# Everything but a few messages queues: what matters is who asked first, and who has the smaller id.
@settings(max_examples=500, deadline=None)
@given(
    case=CASES.filter(lambda case: len(case.specs) > 1),
    servers=st.lists(st.integers(1, 3), min_size=1, max_size=2),
)
def test_engines_agree_on_programs_that_queue(build: Build, case: Case, servers: list[int]) -> None:
    specs = [s._replace(desk=s.desk % len(servers), width=s.width // 4 * 2) for s in case.specs]
    program, ticks = build(Case(specs, case.menu, servers))
    times = same_in_all(program, ticks)
    assert (times.start.tolist(), times.end.tolist()) == by_hand(program, ticks.tolist())


# An interrupt is heard between two calls of a kernel: a run cut into pieces is the same run.
@settings(max_examples=150, deadline=None)
@given(case=CASES, budget=st.integers(1, 6))
def test_a_run_cut_into_pieces_is_the_same_run(build: Build, case: Case, budget: int) -> None:
    program, ticks = build(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(events, "BUDGET", budget)
        patch.setattr(compiled, "CELLS", budget)
        same_in_all(program, ticks)


def many_specs(seed: int, count: int) -> list[Spec]:
    rng = np.random.default_rng(seed)
    return [
        Spec(
            rank=int(rng.integers(4)),
            width=int(rng.choice([0, 0, 0, 1, 2, 3, 4])),
            stream=int(rng.integers(4)),
            length=int(rng.integers(4)),
            desk=int(rng.integers(-1, 3)),
            needs=tuple(rng.integers(0, 40, rng.integers(4)).tolist()),
            key=int(rng.integers(100)),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("servers", [[], [1, 2, 3]], ids=["no desks", "desks"])
@pytest.mark.parametrize(("seed", "count"), [(1, 300), (2, 800), (3, 1600)])
def test_engines_agree_on_larger_programs(
    kernels: str, build: Build, seed: int, count: int, servers: list[int]
) -> None:
    program, ticks = build(Case(many_specs(seed, count), MENUS[2], servers))
    times = same_in_all(check(program), ticks)
    if count == 300:
        assert (times.start.tolist(), times.end.tolist()) == by_hand(program, ticks.tolist())


ALIKE = st.sampled_from([(), ("dp",), ("tp",), ("dp", "tp")])
"""Axes along which tiles are alike."""


def tiled(program: Program, dp: int, tp: int, partitions: Sequence[int]) -> Program:
    """Return the program as one tile of dp x tp; joint ops meet as `partitions` say, in turn."""
    tiles = np.arange(dp * tp)
    classes = np.stack([tiles, tiles // tp, tiles % tp, tiles * 0]).astype(np.int32)
    ranks = np.arange(4)[:, None] + 4 * tiles[None, :]
    joints = range(len(program.joint_group))
    partition = [partitions[j % len(partitions)] for j in joints]
    groups = [
        ranks[program.groups[j]][:, classes[partition[j]] == k].ravel()
        for j in joints
        for k in range(classes[partition[j]].max() + 1)
    ]
    width = [0, *(classes[p].max() + 1 for p in partition)]
    return replace(
        program,
        num_ranks=ranks.size,
        tiling=Tiling((("dp", dp), ("tp", tp)), ranks.astype(np.int32), classes),
        joint_partition=np.array(partition, np.int8),
        joint_group=np.cumsum(width, dtype=np.int32)[:-1],
        groups=Groups(
            np.cumsum([0, *map(len, groups)], dtype=np.int64),
            np.array([r for group in groups for r in group], np.int32),
        ),
    )


def agree_along(ticks: Int64, program: Program) -> list[bool]:
    """Return by axis whether all tiles that differ along it alone take the same times."""
    assert program.tiling is not None
    shape = [degree for _, degree in program.tiling.axes]
    by_axis = np.broadcast_to(ticks, (len(program.rank), program.num_tiles)).reshape(-1, *shape)
    return [(by_axis == by_axis.take([0], axis + 1)).all() for axis in range(len(shape))]


def folds_what_agrees(program: Program, ticks: Int64) -> Folding:
    """Return the folding after checking that it folds all axes along which ticks agree, no more."""
    assert program.tiling is not None
    folding = fold(program, ticks)
    alike = agree_along(ticks, program)
    kept = [1 if a else degree for a, (_, degree) in zip(alike, program.tiling.axes, strict=True)]
    assert len(folding.tiles) == math.prod(kept)
    wide = np.broadcast_to(ticks, (len(program.rank), program.num_tiles))
    assert (wide[:, folding.tiles[folding.column_of_tile]] == wide).all()
    return folding


@settings(max_examples=250, deadline=None)
@given(
    case=SOME_CASES,
    degrees=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    partitions=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    alike=ALIKE,
    seed=st.integers(0, 2**32 - 1),
)
def test_engines_agree_on_tiles_with_jitter(
    kernels: str, build: Build, case: Case,
    degrees: tuple[int, int], partitions: list[int], alike: tuple[str, ...], seed: int,
) -> None:  # fmt: skip
    one, ticks = build(case)
    program = check(tiled(one, *degrees, partitions))
    drawn = [1 if axis in alike else d for axis, d in zip(("dp", "tp"), degrees, strict=True)]
    jitter = np.random.default_rng(seed).choice([0, 0, 0, 1, 3], (len(ticks), *drawn))
    wide = (ticks[:, None, None] + np.broadcast_to(jitter, (len(ticks), *degrees))).reshape(
        len(ticks), -1
    )
    times = same_in_all(program, wide)
    same_in_all(program, wide, folds_what_agrees(program, wide))
    assert run(program.flat, wide.ravel(), "events") == times
    assert len(fold(program, ticks[:, None]).tiles) == 1
    same_in_all(program, ticks, fold(program, ticks[:, None]))


# Desks of a tile are its own: each tile of a program without joint ops runs as if it were alone.
@settings(max_examples=60, deadline=None)
@given(case=SOME_CASES, tiles=st.integers(2, 4))
def test_tiles_that_do_not_meet_run_as_if_alone(build: Build, case: Case, tiles: int) -> None:
    one, ticks = build(case._replace(specs=[s._replace(width=0) for s in case.specs]))
    program = tiled(one, tiles, 1, [0])
    wide = ticks[:, None] * np.arange(1, tiles + 1)
    start, end = same_in_all(program, wide).columns
    for tile in range(tiles):
        alone = run(one, np.ascontiguousarray(wide[:, tile]), "events")
        assert (start[:, tile].tolist(), end[:, tile].tolist()) == (
            alone.start.tolist(),
            alone.end.tolist(),
        )


@settings(max_examples=200, deadline=None)
@given(case=CASES)
def test_twice_as_long_ops_take_twice_as_long(build: Build, case: Case) -> None:
    program, ticks = build(case)
    for engine in ("compiled", "events"):
        once, twice = run(program, ticks, engine), run(program, 2 * ticks, engine)
        assert twice == Timeline(2 * once.start, 2 * once.end)
        assert once.makespan >= ticks.max(initial=0)
        assert (once.end - once.start == ticks).all()


@settings(max_examples=200, deadline=None)
@given(case=SOME_CASES, which=st.integers(0), more=st.integers(1, 9))
def test_one_longer_op_ends_nothing_earlier(
    build: Build, case: Case, which: int, more: int
) -> None:
    program, ticks = build(case._replace(servers=()))
    longer = ticks.copy()
    longer[which % len(ticks)] += more
    for engine in ("compiled", "events"):
        before, after = run(program, ticks, engine), run(program, longer, engine)
        assert (after.end >= before.end).all()


def closes(message: str) -> bool:
    """Return whether the ops of a deadlock's message wait for each other around a cycle."""
    pairs = re.findall(r"\(op (\d+)\) .*\(op (\d+)\)", message)
    starts, blockers = [a for a, _ in pairs], [b for _, b in pairs]
    return bool(pairs) and blockers == starts[1:] + starts[:1] and len(set(starts)) == len(starts)


# Streams in the order of the keys, whatever their ops need: most such programs wait for themselves.
@settings(max_examples=300, deadline=None)
@given(case=CASES)
def test_engines_agree_on_what_can_never_start(kernels: str, build: Build, case: Case) -> None:
    program, ticks = build(case, in_order=False)
    start, end = by_hand(program, ticks.tolist())
    if NONE not in end:
        times = same_in_all(program, ticks)
        assert (times.start.tolist(), times.end.tolist()) == (start, end)
        return
    for engine in ENGINES:
        with pytest.raises(DeadlockError, match="wait in a cycle") as caught:
            run(program, ticks, engine)
        assert closes(str(caught.value))


def planted(kind: str, count: int, op: Any) -> list[Any]:
    """Return ops that wait for each other; the first of them has id `count`."""
    joints = {"joints": ("a", "b", "b", "a"), "corner": ("a", None, None, "a")}
    if kind == "itself":
        return [op(0, 1, after=(count,))]
    if kind == "stream":
        return [op(0, 1, "x", after=(count + 1,)), op(0, 1, "x")]
    if kind == "needs":
        return [op(r, 1, None, after=(count + (r + 1) % 3,)) for r in range(3)]
    # joints: two meetings in different order; corner: rank 0 is behind the meeting, before rank 1
    ops = [op(i // 2, 1, "x", joint=j) for i, j in enumerate(joints[kind])]
    if kind == "corner":
        ops[2] = ops[2]._replace(after=(count + 1,))
    return ops


@pytest.mark.parametrize("kind", ["itself", "stream", "needs", "joints", "corner"])
@settings(max_examples=40, deadline=None)
@given(case=CASES, degrees=st.sampled_from([(1, 1), (2, 1), (2, 3)]))
def test_a_cycle_among_other_ops_is_found(
    op: Any, program_of: Any, kind: str, case: Case, degrees: tuple[int, int],
) -> None:  # fmt: skip
    ops = renumbered(drawn_ops(case, op), in_order=True)
    cycle = planted(kind, len(ops), op)
    program, ticks = program_of([*ops, *cycle], servers=case.servers, num_ranks=4)
    if degrees != (1, 1):
        program = tiled(program, *degrees, [0, 1, 2, 3])
    names = [f"(op {(len(ops) + i) * program.num_tiles}" for i in range(len(cycle))]
    for engine, folding in itertools.product(ENGINES, [None, fold(program, ticks)]):
        with pytest.raises(DeadlockError, match="wait in a cycle") as caught:
            run(program, ticks, engine, folding)
        assert closes(str(caught.value))
        assert any(name in str(caught.value) for name in names)
    with pytest.raises(DeadlockError, match="wait in a cycle"):
        check(program)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_tiled_program_without_ops_takes_no_time(build: Build, engine: str) -> None:
    one, _ = build(Case((), MENUS[0], [2]))
    program = tiled(one, 2, 3, [0])
    assert run(program, np.zeros((0, 6), np.int64), engine).makespan == 0


# Two tiles with 20,000 desks each: the last one of all is desk 39,999, too large for 16 bits.
def test_desks_of_all_tiles_are_told_apart(op: Any, program_of: Any) -> None:
    ops = [op(0, 3, None, desk=0), op(0, 3, None, desk=19_999)]
    one, _ = program_of(ops, servers=[1] * 20_000, num_ranks=4)
    assert tiled(one, 2, 1, [0]).flat.slot.tolist() == [0, 20_000, 19_999, 39_999]
