"""The hot functions, one by one: ``pytest benchmarks``.

Each asserts the number of ops that it went through, never a time.
"""

from pathlib import Path

import pytest

from benchmarks.cases import legal, parts, plans, shape
from simulator.describe.loader import scenario
from simulator.engine import Folding, run
from simulator.hardware import price
from simulator.lower import lower
from simulator.lower.check import check
from simulator.report.result import Result

OPS = 148_576  # 8 stages x 8 replicas: (16 layers F + 16 layers B) x 64 microbatches, and messages


@pytest.fixture(scope="module")
def described():
    return scenario(shape(8), Path("benchmark.toml"))


@pytest.fixture(scope="module")
def priced(described):
    program = lower(described)
    return program, price(program, described.cluster)


def test_describe(benchmark):
    assert benchmark(lambda: scenario(shape(8), Path("b.toml"))).plan.pp == 8


def test_lower(benchmark, described):
    assert len(benchmark(lower, described)) == OPS


def test_price(benchmark, described, priced):
    assert benchmark(price, priced[0], described.cluster).size == OPS // 8


def test_check(benchmark, priced):
    assert len(benchmark(check, priced[0])) == OPS


@pytest.mark.parametrize("engine", ["compiled", "events"])
def test_engine(benchmark, priced, engine):
    program, ticks = priced
    timeline = benchmark(run, program, ticks, engine, Folding.none(program))
    assert timeline.end.size == OPS


def test_summary(benchmark, described, priced):
    program, ticks = priced
    timeline = run(program, ticks, "compiled", Folding.none(program))
    assert benchmark(lambda: Result(program, timeline, described).summary).fits


def test_a_folded_plan_of_a_sweep(benchmark):
    ((table, _),) = legal(plans(), 1)
    assert benchmark(parts, table, "compiled", True)["ops"] > 0
