"""Rows of measured kernels: what they time, their halves, and the verb that prints them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable

import pytest
from click.testing import CliRunner

from simulator.cli import cli
from simulator.describe.loader import load_node
from simulator.errors import DescriptionError
from simulator.hardware.grouped import ISSUE
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
    kinds = {(c.kernel, c.run_class, c.half) for c in CASES if c.system == "vidur-a100"}
    assert len(rows) == sum(c.system == "vidur-a100" for c in CASES) + len(kinds)
    assert "dgx-a100" not in result.output
    assert "vidur-a100: NVIDIA A100 PCIe 80 GB; github.com/microsoft/vidur@" in result.output


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


# --- the constants that are fitted to the fit half -------------------------------------------


def mean(errors: Iterable[kernels.Case]) -> float:
    """Return the mean of ln(predicted / measured)."""
    found = [math.log(c.predicted / c.measured) for c in errors]
    return sum(found) / len(found)


def chosen(wanted: Callable[[kernels.Case], bool]) -> list[kernels.Case]:
    return [c for c in CASES if c.half == "fit" and wanted(c)]


# A clock lower by a percent makes products longer by one: at the fitted one the mean error is 0.
@pytest.mark.parametrize(
    ("node", "names"),
    [("a100-pcie-8", ("vidur-a100", "simumax-a100-pcie")), ("dgx-h100", ("vidur-h100",)),
     ("dgx-b200", ("simumax-b200",))],
)  # fmt: skip
def test_the_clock_is_that_of_products_under_the_power_limit(
    node: str, names: tuple[str, ...]
) -> None:
    clock = load_node(node).device.sustained_clock
    rows = chosen(
        lambda c: c.system in names and c.kernel == "product" and c.run >= kernels.SETTLED
    )
    assert round(clock * math.exp(mean(rows)), 2) == clock


def spread(rows: list[kernels.Case]) -> float:
    """Return the root mean square of errors about those of each system's dense products.

    Dense ones run under the power limit; grouped ones are the B200's gradients of weights. What the
    A100's gradients of weights were added to is not certain.
    """
    squares: list[float] = []
    for system in kernels.systems():
        dense = [
            c for c in rows if c.system == system and c.kernel == "product"
            and c.run >= kernels.SETTLED
            and (system, c.direction) != ("simumax-a100-pcie", "wgrad")
        ]  # fmt: skip
        grouped = [
            c for c in rows if c.system == system == "simumax-b200" and c.kernel == "grouped"
            and c.direction == "wgrad"
        ]  # fmt: skip
        errors = [math.log(c.predicted / c.measured) - mean(dense) for c in dense + grouped]
        squares += [e * e for e in errors]
    return math.sqrt(sum(squares) / len(squares))


def test_the_exposed_share_of_writing_is_the_best_to_a_tenth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {}
    for share in (0.5, 0.6, 0.7):
        monkeypatch.setattr("simulator.hardware.gemm.EXPOSED", share)
        found[share] = spread([c for c in kernels.cases() if c.half == "fit"])
    assert min(found, key=found.__getitem__) == 0.6


# Gradients in fp32 of experts with at most 160 rows move 8 bytes for each of their results.
def test_the_memory_share_of_the_b200_is_that_of_gradients_bound_by_it() -> None:
    device = load_node("dgx-b200").device
    rows = chosen(
        lambda c: c.kernel == "grouped" and c.direction == "wgrad" and c.bound == "memory"
        and c.shape.endswith("gradient=4") and kernels.shape_of(c.shape)["tokens"] <= 160
    )  # fmt: skip
    assert round(device.memory_efficiency * math.exp(mean(rows)), 2) == device.memory_efficiency


# Norm, activation, rotation and sum, where a row moves 50 MB and more: those of the H100 reach 1.01
# times the share of the bandwidth that those of the A100 reach.
def test_the_memory_share_of_the_h100_is_the_a100s_by_the_same_kernels() -> None:
    ratios = []
    for kernel in ("norm", "activation", "rotary", "residual"):
        shares = []
        for name in ("vidur-h100", "vidur-a100"):
            system = kernels.systems()[name]
            moved = [
                (kernels.kernel_of(system, row(name, kernel, "forward", c.shape)).bytes, c.measured)
                for c in chosen(lambda c: (c.system, c.kernel) == (name, kernel))  # noqa: B023
            ]
            rates = [b / s / system.device.memory_bandwidth for b, s in moved if b >= 50e6]
            shares.append(sum(rates) / len(rates))
        ratios.append(shares[0] / shares[1])
    ratio = math.prod(ratios) ** (1 / len(ratios))
    h100, a100 = (load_node(n).device.memory_efficiency for n in ("dgx-h100", "dgx-a100"))
    assert round(a100 * ratio, 2) == h100


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_fused_attention_of_the_a100_has_no_mean_error(direction: str) -> None:
    rows = chosen(
        lambda c: (c.system, c.kernel, c.direction) == ("simumax-a100-pcie", "attention", direction)
    )
    share = load_node("a100-pcie-8").device.fused[f"flash2 {direction}"]
    assert round(share * math.exp(mean(rows)), 2) == pytest.approx(share, abs=0.011)


# 5120 x 1536 and 7168 x 2048 of 128 to 308 rows: the host issues no product sooner.
def test_the_host_issues_a_product_as_often_as_short_ones_end() -> None:
    rows = chosen(
        lambda c: c.system == "simumax-b200" and c.kernel == "grouped" and c.direction != "wgrad"
        and kernels.shape_of(c.shape)["inputs"] <= 2048
        and kernels.shape_of(c.shape)["tokens"] <= 308
    )  # fmt: skip
    each = sorted(c.measured / kernels.shape_of(c.shape)["experts"] for c in rows)
    assert each[0] < ISSUE < each[-1]
    assert each[len(each) // 2] == pytest.approx(ISSUE, rel=0.03)


@pytest.mark.parametrize(
    ("system", "kernel", "most"),
    [("simumax-a100-pcie", "attention", 0.05), ("simumax-a100-pcie", "product", 0.05),
     ("vidur-a100", "product", 0.05), ("vidur-h100", "product", 0.12),
     ("simumax-b200", "grouped", 0.12)],
)  # fmt: skip
def test_held_out_rows_follow(system: str, kernel: str, most: float) -> None:
    rows = [
        c for c in CASES if (c.system, c.kernel) == (system, kernel) and c.half == "held out"
    ]  # fmt: skip
    assert sum(abs(c.error) for c in rows) / len(rows) < most
