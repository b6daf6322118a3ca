"""The text of nccl-tests: read in all its layouts, fitted, written and read again."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.errors import DescriptionError
from simulator.exchange.nccl_tests import (
    HEADER,
    Row,
    Timing,
    fit,
    fit_all,
    format_rows,
    parse,
)

NEW = """\
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 1 minBytes 8 maxBytes 33554432 step: 2(factor) warmup iters: 5 iters: 20
#
# Using devices
#  Rank  0 Group  0 Pid   9001 on  node-1 device  0 [0x0f] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid   9002 on  node-1 device  1 [0x2d] NVIDIA H100 80GB HBM3
#  Rank  2 Group  0 Pid   8001 on  node-2 device  0 [0x0f] NVIDIA H100 80GB HBM3
#  Rank  3 Group  0 Pid   8002 on  node-2 device  1 [0x2d] NVIDIA H100 80GB HBM3
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
node-1:9001:9050 [0] NCCL INFO Connected all rings
      131072         32768     float     sum      -1    74.75    1.75    2.63      0    72.46    1.81    2.71      0
    33554432       8388608     float     sum      -1    588.5   57.01   85.52      0    588.7   57.00   85.50      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 44.09
#
"""  # noqa: E501
OLD = """\
#       size         count    type   redop     time   algbw   busbw   error     time   algbw   busbw   error
#        (B)    (elements)                     (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
     1048576        262144   float     sum    20.00   52.43   91.75   2e-07    21.00   49.93   87.38   2e-07
"""  # noqa: E501
GATHER = """\
#       size         count    type     time   algbw   busbw  error     time   algbw   busbw  error
     1048576         32768   float    20.00   52.43   45.88  0e+00    21.00   49.93   43.69    N/A
"""


def test_a_run_is_read_with_its_operation_ranks_and_nodes() -> None:
    table = parse(NEW)
    assert (table.operation, table.ranks, table.nodes) == ("all_reduce", 4, 2)
    assert [row.size for row in table.rows] == [131072, 33554432]
    row = table.rows[1]
    assert (row.count, row.dtype, row.redop, row.root) == (8388608, "float", "sum", -1)
    assert row.out_of_place == pytest.approx((588.5e-6, 57.01e9, 85.52e9, 0))
    assert row.in_place.seconds == pytest.approx(588.7e-6)


def test_the_layout_without_root_is_read() -> None:
    (row,) = parse(OLD).rows
    assert (row.redop, row.root) == ("sum", -1)
    assert row.out_of_place == pytest.approx((20e-6, 52.43e9, 91.75e9, 2e-7))


def test_the_layout_without_operator_and_with_nothing_to_check_is_read() -> None:
    (row,) = parse(GATHER, "all_gather").rows
    assert row.redop == "none"
    assert row.in_place.wrong is None


@pytest.mark.parametrize("prefix", ["[0] ", " 0: ", "[1,0]<stdout>:", "12: "])
def test_what_mpirun_puts_before_lines_is_taken_off(prefix: str) -> None:
    text = "\n".join(prefix + line for line in NEW.splitlines())
    assert parse(text) == parse(NEW)


def test_results_that_are_not_available_are_none() -> None:
    text = NEW.replace("72.46    1.81    2.71      0", "  N/A     N/A     N/A    N/A")
    assert parse(text).rows[0].in_place == (None, None, None, None)


def test_a_text_of_something_else_is_refused() -> None:
    with pytest.raises(DescriptionError, match="not the output of nccl-tests"):
        parse("size,time\n1024,3.0\n")


def test_a_table_without_rows_is_cut_off() -> None:
    with pytest.raises(DescriptionError, match="cut off: its table has no rows"):
        parse(HEADER)


@pytest.mark.parametrize("columns", [3, 7, 10])
def test_a_row_that_is_cut_off_is_named(columns: int) -> None:
    lines = NEW.splitlines()
    lines[14] = " ".join(lines[14].split()[:columns])
    with pytest.raises(DescriptionError, match=rf"line 15: a row of {columns} columns"):
        parse("\n".join(lines[:15]))


def test_rows_written_are_the_rows_read() -> None:
    rows = parse(NEW).rows
    text = format_rows(rows, ["a run"])
    assert text.startswith("# a run\n#")
    assert parse(text).rows == rows
    assert text.splitlines()[-1] == "# Avg bus bandwidth    : 44.09"


def test_a_note_after_the_columns_does_not_disturb() -> None:
    nothing = Timing(None, None, None, None)
    row = Row(1024, 256, "float", "none", -1, Timing(2e-6, 512e6, 896e6, None), nothing, "RING LL")
    (read,) = parse(format_rows([row])).rows
    assert read.out_of_place.seconds == pytest.approx(2e-6)
    assert read.in_place == nothing


def rows_of(alpha: float, beta: float, sizes: list[int]) -> list[Row]:
    return [
        Row(s, s // 4, "float", "sum", -1, Timing(alpha + beta * s, 0, 0, 0), Timing(0, 0, 0, 0))
        for s in sizes
    ]


# 20 us and 1 / (100 GB/s), from 1 kB to 1 GB: found to the last digits, nothing left over.
def test_alpha_and_beta_are_found_again() -> None:
    found = fit(rows_of(20e-6, 1e-11, [10**k for k in range(3, 10)]))
    np.testing.assert_allclose([found.alpha, found.beta], [20e-6, 1e-11], rtol=1e-9)
    np.testing.assert_allclose(found.residuals, 0, atol=1e-9)


# Times that fall with size have no alpha-beta: the best that is not negative is a constant.
def test_alpha_and_beta_are_never_negative() -> None:
    found = fit(rows_of(20e-6, -1e-15, [10**9, 2 * 10**9, 10**10]))
    assert found.beta == 0.0
    assert found.alpha > 0


def test_one_size_is_too_few() -> None:
    with pytest.raises(DescriptionError, match="two sizes"):
        fit(rows_of(20e-6, 1e-11, [1024]))


def test_runs_are_fitted_by_operation_and_scope() -> None:
    found = fit_all([parse(NEW), parse(NEW)])
    assert set(found) == {("all_reduce", 4, 2)}
    assert found["all_reduce", 4, 2].residuals == pytest.approx([0, 0], abs=1e-9)
    with pytest.raises(DescriptionError, match="names no operation"):
        fit_all([parse(OLD)])
