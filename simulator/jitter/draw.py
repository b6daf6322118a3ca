"""What is drawn before anything runs, and the ticks of ops that come of it.

`default_rng([seed, rank, kind])` draws for one rank and one kind of disturbance, sample after
sample; after each `BLOCK` of samples another one, `[seed, rank, kind, block]`, goes on. So neither
another rank, nor another disturbance, nor more samples move what is drawn, and taking samples in
batches of any size, or blocks in any number of processes, gives the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.describe.jitter import Interference, Jitter, RandomSlow, Slow
from simulator.errors import DescriptionError
from simulator.pauses import Pauses
from simulator.program import NONE, Int64, Program
from simulator.units import TICKS_PER_SECOND, to_ticks

Float64 = npt.NDArray[np.float64]

OPS, FLOWS, GPUS, LINKS, PHASES, SPEEDS, HOSTS = range(7)
"""Kinds of what is drawn: the third number of a stream's seed."""

BLOCK = 16
"""Samples that one stream draws."""


class Draws(NamedTuple):
    """What is drawn for some samples; empty where a scenario has no such disturbance."""

    samples: int
    ops: Float64
    """(rows of work, samples, tiles): time over its mean; `Kinds` says which rows these are."""
    flows: Float64
    """(rows of flows, samples, tiles), the same for all members of one."""
    hosts: Float64
    """(rows beside steps, samples, tiles), likewise."""
    gpus: npt.NDArray[np.bool_]
    """(samples, ranks): whether a rank drew to be slow."""
    links: npt.NDArray[np.bool_]
    phase: Int64
    """(samples, ranks): tick from 0 to the period at which interference begins."""
    speeds: Float64
    """(samples, ranks): time of a rank's work over its mean."""


class Kinds(NamedTuple):
    """Rows of a program by what can disturb them."""

    work: Int64
    flows: Int64
    hosts: Int64
    """What hosts do beside steps."""

    @classmethod
    def of(cls, program: Program) -> Kinds:
        """Return the rows of a program."""
        flow, beside = program.is_flow, program.is_beside
        return cls(*map(np.flatnonzero, (~flow & ~beside, flow & ~beside, beside)))


def drawn(
    program: Program, jitter: Jitter, samples: range, most: int | None = None
) -> Iterator[Draws]:
    """Yield what is drawn for some samples, at most so many (all of a block) at a time.

    The first of them must be the first of a block.
    """
    for first in range(samples.start, samples.stop, BLOCK):
        count = min(BLOCK, samples.stop - first)
        size = most or count
        sizes = [min(size, count - done) for done in range(0, count, size)]
        yield from _block(program, jitter, first // BLOCK, sizes)


def _block(program: Program, jitter: Jitter, block: int, batches: Sequence[int]) -> Iterator[Draws]:
    """Yield what is drawn for so many samples of a block after another."""

    def streams(kind: int, wanted: object) -> list[np.random.Generator]:
        ranks = range(program.num_ranks) if wanted else ()
        more = [block] * (block > 0)
        return [np.random.default_rng([jitter.seed, rank, kind, *more]) for rank in ranks]

    def each(kind: int, wanted: object, *, normal: bool = False) -> Float64:
        """Return (samples, ranks) numbers from 0 to 1, or normal ones; (samples, 0) if unwanted."""
        every = [
            rng.standard_normal(sum(batches)) if normal else rng.random(sum(batches))
            for rng in streams(kind, wanted)
        ]
        return np.array(every).reshape(len(every), sum(batches)).T

    gpus, links = jitter.random_slow_gpus, jitter.random_slow_links
    slow_gpu = each(GPUS, gpus) < (gpus.share if gpus else 0)
    slow_link = each(LINKS, links) < (links.share if links else 0)
    period = to_ticks(jitter.interference.period) if jitter.interference else 0
    phase = (each(PHASES, jitter.interference) * period).astype(np.int64)
    speeds = _log_normal(each(SPEEDS, jitter.gpu_cv, normal=True), jitter.gpu_cv)
    of_ops, of_flows = streams(OPS, jitter.op_cv), streams(FLOWS, jitter.flow_cv)
    of_hosts = streams(HOSTS, jitter.host_cv)
    rows, first = Kinds.of(program), 0
    for n in batches:
        some = slice(first, first + n)
        first += n
        noise = _normal(program, rows.flows, n, of_flows, jitter.flow_cv)
        beside = _normal(program, rows.hosts, n, of_hosts, jitter.host_cv)
        yield Draws(
            n,
            _normal(program, rows.work, n, of_ops, jitter.op_cv),
            _of_first_members(program, rows.flows, noise),
            _of_first_members(program, rows.hosts, beside),
            slow_gpu[some],
            slow_link[some],
            phase[some],
            speeds[some],
        )


def _normal(
    program: Program,
    rows: Int64,
    samples: int,
    streams: Sequence[np.random.Generator],
    cv: float,
) -> Float64:
    """Return (rows, samples, tiles) log-normal numbers of mean 1 and a coefficient of variation.

    A rank draws for all its rows of a sample, in order, then for the next sample.
    """
    if not streams:
        return np.zeros((0, samples, program.num_tiles))
    out = np.empty((len(rows), samples, program.num_tiles))
    for place, ranks in enumerate(program.tile_ranks.tolist()):
        own = np.flatnonzero(program.rank[rows] == place)
        z = np.empty((program.num_tiles, samples, len(own)))
        for tile, rank in enumerate(ranks):
            streams[rank].standard_normal(out=z[tile])
        out[own] = _log_normal(z, cv).transpose(2, 1, 0)
    return out


def _log_normal(z: Float64, cv: float) -> Float64:
    """Turn standard normal numbers into log-normal ones of mean 1, in their place."""
    variance = math.log1p(cv * cv)  # of the logarithm
    z *= math.sqrt(variance)
    z -= variance / 2
    numbers: Float64 = np.exp(z, out=z)
    return numbers


def _of_first_members(program: Program, rows: Int64, factor: Float64) -> Float64:
    """Give each member of a flow what its first one drew: on the first tile, in the first row."""
    meeting = np.flatnonzero(program.joint[rows] != NONE) if len(factor) else np.zeros(0, np.int64)
    if not len(meeting):
        return factor
    members, joint = program.joint_members, program.joint[rows[meeting]]
    first = np.searchsorted(rows, members.ranks[members.offset[joint]])
    partition, out = program.partition[joint], factor.copy()
    for p, classes in enumerate(program.classes):
        _, index, inverse = np.unique(classes, return_index=True, return_inverse=True)
        here = partition == p
        out[meeting[here]] = factor[first[here]][:, :, index[inverse.reshape(-1)]]
    return out


def disturbed(program: Program, base: Int64, jitter: Jitter, draws: Draws) -> Int64:
    """Return (rows, samples x tiles) ticks: those that nothing disturbs, times what is drawn.

    Args:
        program: whose ops they are.
        base: (rows, tiles or 1) ticks that nothing disturbs.
        jitter: which disturbances apply; others that were drawn are left aside.
        draws: what was drawn for some samples.

    Raises:
        DescriptionError: when the run may last longer than the clock can tell.
    """
    n, tiles = draws.samples, program.num_tiles
    out = np.empty((len(program.rank), n, tiles), np.int64)
    wide = base.reshape(len(base), 1, -1)
    gpus = _factors(program, jitter.slow_gpus, jitter.random_slow_gpus, draws.gpus)
    if jitter.gpu_cv:
        gpus = draws.speeds if gpus is None else gpus * draws.speeds
    work, flows, hosts = Kinds.of(program)
    for place, ranks in enumerate(program.tile_ranks):
        own = np.flatnonzero(program.rank[work] == place)
        rows = work[own]
        factors = [] if gpus is None else [gpus[:, ranks]]
        if jitter.op_cv:
            factors.append(draws.ops[own])
        out[rows] = _times(wide[rows], factors)
    links = _factors(program, jitter.slow_links, jitter.random_slow_links, draws.links)
    factors = [] if links is None else [_slowest_member(program, flows, links)]
    if jitter.flow_cv:
        factors.append(draws.flows)
    out[flows] = _times(wide[flows], factors)
    out[hosts] = _times(wide[hosts], [draws.hosts] if jitter.host_cv else [])
    _check_clock(out, jitter.interference)
    return out.reshape(len(out), n * tiles)


def _factors(
    program: Program,
    named: Sequence[Slow],
    random: RandomSlow | None,
    mask: npt.NDArray[np.bool_],
) -> Float64 | None:
    """Return (samples or 1, ranks): how many times as long each rank takes; None where none is."""
    if not named and random is None:
        return None
    factor = np.ones((1, program.num_ranks))
    for slow in named:
        factor[:, list(slow.ranks)] *= slow.factor
    return factor if random is None else factor * np.where(mask, random.factor, 1.0)


def _slowest_member(program: Program, flows: Int64, factor: Float64) -> Float64:
    """Return (rows of flows, samples or 1, tiles): the greatest factor of a flow's members."""
    groups, joint = program.groups, program.joint[flows]
    by_group = np.maximum.reduceat(factor[:, groups.ranks], groups.offset[:-1], axis=1)
    group = program.joint_group[joint][:, None] + program.classes[program.partition[joint]]
    return by_group[:, group].transpose(1, 0, 2)


def _times(ticks: Int64, factors: Sequence[Float64]) -> Int64 | Float64:
    """Return ticks times all factors, to the nearest tick."""
    if not factors:
        return ticks
    product = ticks * factors[0]
    for factor in factors[1:]:
        product = product * factor
    rounded: Float64 = np.rint(product, out=product)
    return rounded


def _check_clock(ticks: Int64, interference: Interference | None) -> None:
    # No path passes a row twice, so the sum over rows bounds every time of the run.
    bound = float(ticks.max(axis=(1, 2), initial=0).sum(dtype=np.float64))
    if interference is not None:
        bound /= 1 - interference.duration / interference.period
    if not bound < 2**62:
        raise DescriptionError(
            f"jitter: a sample may last {bound / TICKS_PER_SECOND:.3g} s, more than the clock of "
            f"whole picoseconds holds ({2**62 / TICKS_PER_SECOND:.3g} s); disturb less, or "
            "simulate less of the run"
        )


def pauses_of(program: Program, jitter: Jitter, draws: Draws) -> Pauses | None:
    """Return when ranks stand still, with phases (ranks of a tile, samples x tiles)."""
    held = jitter.interference
    if held is None:
        return None
    phase = draws.phase
    if held.ranks is not None:
        spared = np.ones(program.num_ranks, bool)
        spared[list(held.ranks)] = False
        phase = np.where(spared, NONE, phase)
    wide = phase[:, program.tile_ranks].transpose(1, 0, 2).reshape(len(program.tile_ranks), -1)
    return Pauses(to_ticks(held.period), to_ticks(held.duration), np.ascontiguousarray(wide))
