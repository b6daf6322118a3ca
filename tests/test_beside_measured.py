"""Kernels beside collectives, as others have timed them: the table of docs/network.md."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import simulator as sim
from simulator.describe.cluster import Cluster
from simulator.hardware.arriving import arriving
from simulator.hardware.gemm import SPLITS, TILES, gemm_slots, written
from simulator.hardware.network import GroupShape, flow_model
from simulator.hardware.taken import Taken, default_shares
from simulator.program import Flow

GATHER = Flow("all_gather", 2.0**29)
"""512 MiB over the eight devices of a node."""
SHAPE = GroupShape(8, 1, 8)


def share_of(node: str, *, copied: bool = False, arrives: bool = True) -> tuple[float, float]:
    """Return what the gather takes of the computing of a device of a node, and its milliseconds."""
    cluster: Cluster = sim.load("llama-3-8b-3d", {"cluster.node": node}).cluster
    device, model = cluster.node.device, flow_model(GATHER, SHAPE, cluster)
    near, far = (np.array([share]) for share in default_shares(device))
    rate = arriving(GATHER, model.algorithm, 8) * model.bytes_per_s * arrives
    no = np.zeros(1, bool)
    memory = np.array([device.memory_bandwidth])
    taken = Taken(no, near, far, np.zeros(1, np.int64), no, memory)
    ranks = np.zeros(1, np.int64)
    (share,) = taken.shares(ranks, no, np.array([copied]), np.array([rate])).tolist()
    return share, 1e3 * (model.latency + GATHER.bytes / model.bytes_per_s)


def slower(node: str, *, arrives: bool = True) -> float:
    """Return how many times as long a kernel takes that a gather runs beside all along."""
    return 1 / (1 - share_of(node, arrives=arrives)[0])


def together(*, copied: bool, arrives: bool = True) -> float:
    """Return the milliseconds of the product and the gather of PyTorch's benchmark, side by side.

    One after the other they took 2.96 ms; a gather that ends first takes its share while it runs.
    """
    share, gather = share_of("dgx-h100", copied=copied, arrives=arrives)
    return 2.96 - gather + share * gather


class Row(NamedTuple):
    """What was measured, and what is predicted with SMs alone and with what arrives."""

    measured: float
    alone: float
    predicted: float


ROWS = {
    "product of 8,192 beside a gather by copy engines": Row(
        1.77, together(copied=True, arrives=False), together(copied=True)
    ),
    "product of 8,192 beside NCCL's gather": Row(
        2.02, together(copied=False, arrives=False), together(copied=False)
    ),
    "products of Llama-3 8B": Row(1.35, slower("dgx-h100", arrives=False), slower("dgx-h100")),
    "a product of 132 tiles": Row(80 / 47, slower("dgx-h100", arrives=False), slower("dgx-h100")),
    "products of a transformer": Row(2.0, slower("dgx-h100", arrives=False), slower("dgx-h100")),
    "product, A100": Row(2.08 / 1.18, slower("dgx-a100", arrives=False), slower("dgx-a100")),
    "attention, A100": Row(0.33 / 0.18, slower("dgx-a100", arrives=False), slower("dgx-a100")),
}


# 24 of 132 SMs are held; of 3,350 GB/s arrive 0.965 x 369: 1 - (1 - 24 / 132) x (1 - 356.1 / 3350).
def test_sms_and_arriving_bytes_are_taken_one_after_the_other():
    assert share_of("dgx-h100")[0] == pytest.approx(0.26879, abs=1e-5)


def test_copy_engines_take_what_arrives_only():
    assert share_of("dgx-h100", copied=True)[0] == pytest.approx(0.965 * 369 / 3350, rel=1e-6)


# A ring brings a rank 7 of 8 parts of a gather and of a sum each; a switch brings sums once.
@pytest.mark.parametrize(
    ("name", "algorithm", "bytes_"),
    [
        ("all_gather", "RING", 7 / 8),
        ("reduce_scatter", "RING", 7 / 8),
        ("all_reduce", "RING", 14 / 8),
        ("all_reduce", "NVLS", 1.0),
        ("all_gather", "NVLS", 7 / 8),
        ("all_reduce", "NONE", 0.0),
        ("push_pull", "PARAMETER_SERVER", 0.0),
    ],
)
def test_bytes_that_arrive_for_a_byte_of_payload(name, algorithm, bytes_):
    assert arriving(Flow(name, 1.0), algorithm, 8) == pytest.approx(bytes_)


# The gather by copy engines is what the one pass through memory was taken from.
def test_a_pass_through_memory_explains_copy_engines_beside_a_product():
    row = ROWS["product of 8,192 beside a gather by copy engines"]
    assert row.predicted == pytest.approx(row.measured, rel=0.025)


@pytest.mark.parametrize("name", list(ROWS)[1:])
def test_published_slowdowns_are_nearer_with_what_arrives(name):
    row = ROWS[name]
    assert abs(row.predicted - row.measured) < abs(row.alone - row.measured)


# FSDP of Llama-3 8B on eight H100, two sequences of 4,096 tokens each: 9,369 tokens/s a device
# where NCCL gathers and scatters, 9,593 where copy engines do, at 369 of 3,350 GB/s.
def test_copy_engines_make_a_step_of_fsdp_as_much_faster_as_was_measured():
    plan = {"pp": 1, "tp": 1, "dp": 8, "zero": 3, "microbatch_size": 2}
    run = {"global_batch_size": 16, "sequence_length": 4096, "layer_code": "torchtitan",
           "compiled": True}  # fmt: skip
    settings = {"cluster.num_nodes": 1} | {f"plan.{k}": v for k, v in plan.items()}
    settings |= {f"run.{k}": v for k, v in run.items()}
    by_sms, copied = (
        sim.simulate(sim.load("llama-3-8b-3d", settings | more)).step_time_s
        for more in ({}, {"run.overlap_slowdown": 369 / 3350})
    )
    assert by_sms / copied - 1 == pytest.approx(9593 / 9369 - 1, abs=0.005)


MODELS = [(2560, 7680, 10240), (4096, 6144, 14336), (4096, 12288, 16384), (5120, 15360, 13824),
          (8192, 10240, 28672), (12288, 36864, 49152), (16384, 18432, 53248)]  # fmt: skip
"""Widths of seven models: of the stream, of queries with keys and values, of the MLP."""

Shape = tuple[int, int, int]


def products() -> Iterator[Shape]:
    """Yield m, n and k of the products of layers, and of both their gradients."""
    for (hidden, qkv, inner), tp, tokens in itertools.product(
        MODELS, (1, 2, 4, 8), (2048, 4096, 8192, 16384)
    ):
        wide, narrow = ((qkv, hidden), (inner, hidden)), ((hidden, hidden), (hidden, inner))
        for n, k in (*((n // tp, k) for n, k in wide), *((n, k // tp) for n, k in narrow)):
            yield from ((tokens, n, k), (tokens, k, n), (n, k, tokens))


def cost(shape: Shape, cut: Shape, units: int, more: float) -> float:
    """Return what whole waves of a product cost, cut in tiles of rows x columns and parts of k."""
    (m, n, k), (rows, columns, parts) = shape, cut
    tiles = math.ceil(m / rows) * math.ceil(n / columns) * parts
    return math.ceil(tiles / units) * rows * columns * (k / parts + more) / TILES[rows, columns]


# The library cuts a product for the whole device, of which some SMs are held then.
@pytest.mark.parametrize(
    ("node", "held", "times"),
    [("dgx-h100", 24, 1.217), ("dgx-h100", 16, 1.137), ("dgx-a100", 24, 1.290)],
)
def test_waves_counted_exactly_take_on_average_what_is_in_proportion(node, held, times):
    d = sim.load("llama-3-8b-3d", {"cluster.node": node}).cluster.node.device
    rate, units = d.peak["bf16"] * d.matmul_efficiency * d.sustained_clock, d.compute_units
    more = written(2, rate, d.memory_bandwidth * d.memory_efficiency)
    alone = beside = 0.0
    for shape in products():
        best = gemm_slots((1, *shape), units, more)
        cut = next(
            (*tile, parts) for tile in TILES for parts in SPLITS
            if cost(shape, (*tile, parts), units, more) == best
        )  # fmt: skip
        alone, beside = alone + best, beside + cost(shape, cut, units - held, more)
    assert beside / alone == pytest.approx(times, abs=0.0006)
    assert beside / alone == pytest.approx(units / (units - held), rel=0.006)


def test_the_page_has_the_rows_as_they_are():
    page = Path(__file__).parents[1] / "docs" / "network.md"
    cells = re.findall(r"^\| .* \| ([\d.]+)(?: ms)? \| ([+-][\d.]+) % \| ([+-][\d.]+) % \|",
                       page.read_text(), re.M)  # fmt: skip
    expected = [
        (
            row.measured,
            100 * (row.alone / row.measured - 1),
            100 * (row.predicted / row.measured - 1),
        )
        for row in ROWS.values()
    ]
    found = [tuple(map(float, row)) for row in cells]
    assert np.array(found) == pytest.approx(np.array(expected), abs=0.06)
