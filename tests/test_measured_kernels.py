"""Rows of measured kernels: what they time, their halves, and the verb that prints them."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
from click.testing import CliRunner

from simulator.cli import cli
from simulator.errors import DescriptionError
from simulator.validate import kernels

ROWS = kernels.rows()
CASES = kernels.cases()


def row(system: str, kernel: str, direction: str, shape: str) -> dict[str, str]:
    return {"system": system, "kernel": kernel, "pass": direction, "shape": shape}


def test_every_system_has_rows_and_every_row_a_system() -> None:
    assert {r["system"] for r in ROWS} == set(kernels.systems())


def test_no_product_was_measured_above_its_peak() -> None:
    for case in CASES:
        peak = kernels.systems()[case.system].device.peak["bf16"]
        assert case.flops / case.measured < peak, case


# 4096 x 8192 -> 10240: 2 x 4096 x 8192 x 10240 FLOPs; its weight's gradient sums over 4096 tokens
# and adds to 4 bytes an element, which are read and written.
def test_a_row_is_the_kernel_that_lowering_makes_of_its_operator() -> None:
    shape = "tokens=4096 inputs=8192 outputs=10240 gradient=4"
    forward, wgrad = (
        kernels.kernel_of(kernels.systems()["simumax-b200"], row("", "product", which, shape))
        for which in ("forward", "wgrad")
    )
    assert forward.matmul == (1, 4096, 10240, 8192)
    assert forward.dtype == "bf16"
    assert wgrad.flops == forward.flops == 2 * 4096 * 8192 * 10240
    assert wgrad.bytes == 2 * 4096 * (8192 + 10240) + 8 * 8192 * 10240


# A norm of 4096 x 8192 reads and writes 2 bytes each; a gated activation reads two, writes one.
@pytest.mark.parametrize(("kernel", "passes"), [("norm", 2), ("activation", 3), ("residual", 3)])
def test_a_pass_moves_its_elements(kernel: str, passes: int) -> None:
    made = kernels.kernel_of(
        kernels.systems()["vidur-h100"], row("", kernel, "forward", "tokens=4096 hidden=8192")
    )
    assert made.bytes == passes * 2 * 4096 * 8192


def test_halves_alternate_by_size_within_a_kernel_and_pass() -> None:
    for system, fact in kernels.systems().items():
        for kind in {(r["kernel"], r["pass"]) for r in ROWS if r["system"] == system}:
            mine = [r for r in ROWS if (r["system"], r["kernel"], r["pass"]) == (system, *kind)]
            count = Counter(r["half"] for r in mine)
            assert count["fit"] == (0 if fact.held_out else math.ceil(len(mine) / 2))


def test_the_verb_prints_every_row_and_the_accuracy_of_each_half() -> None:
    result = CliRunner().invoke(cli, ["validate", "kernels", "--system", "vidur-a100"])
    assert result.exit_code == 0
    rows = [line for line in result.output.splitlines() if line.startswith("vidur-a100 ")]
    kinds = {(c.kernel, c.half) for c in CASES if c.system == "vidur-a100"}
    assert len(rows) == sum(c.system == "vidur-a100" for c in CASES) + len(kinds)
    assert "dgx-a100" not in result.output
    assert "vidur-a100: NVIDIA A100 SXM4 80 GB; github.com/microsoft/vidur@" in result.output


def test_the_json_has_seconds_and_signed_errors() -> None:
    result = CliRunner().invoke(cli, ["validate", "kernels", "--json", "-"])
    found = json.loads(result.stdout)
    assert len(found["cases"]) == len(ROWS)
    case = found["cases"][0]
    assert case["error"] == pytest.approx(case["predicted_s"] / case["measured_s"] - 1)
    assert sum(a["rows"] for a in found["accuracy"]) == len(ROWS)


def test_an_unknown_system_is_named_with_those_that_there_are() -> None:
    with pytest.raises(DescriptionError, match="'h100': there are rows of vidur-h100, vidur-a100"):
        kernels.cases(("h100",))
