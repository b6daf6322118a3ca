"""The page on sweeps is a promise too: its commands and its snippet run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from simulator.explore.sweep.columns import COLUMNS
from simulator.explore.sweep.frame import RUN_COLUMNS
from simulator.explore.sweep.run import grid_of, run_sweep
from simulator.explore.sweep.scaling import lost, scaling, spent

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ (trainsim .*)$", PAGE, re.MULTILINE)
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_runs_and_writes_what_it_names(command, tmp_path):
    words = shlex.split(command)[1:]
    arguments = [sys.executable, "-m", "simulator", *words]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / words[words.index("--out") + 1]).exists()


def test_the_snippet_of_the_page_runs(capsys):
    exec(SNIPPETS[0], {})
    assert capsys.readouterr().out.count("\n") == 9  # a head and eight rows


def test_every_column_that_the_page_names_is_there():
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", PAGE)) - {"samples_per_device"}
    assert named <= {*COLUMNS, *RUN_COLUMNS}, named - {*COLUMNS, *RUN_COLUMNS}


@pytest.fixture(scope="module")
def generations():
    over = {"devices": [1, 8, 32, 256, 1024], "samples_per_device": ["fixed", 2]}
    over |= {"run.global_batch_size": [2048]}
    together = {
        "cluster.node": ["dgx-1-v100", "dgx-a100", "dgx-h100"],
        "cost.device_price": ["1 USD/h", "2 USD/h", "3 USD/h"],
    }
    grid = grid_of(over, together, None)
    return scaling(run_sweep("gpt2-xl-generations", grid, workers=1, tokens=10e9))


def curve_of(generations, node, regime):
    return next(c for c in generations.curves if (c.group, c.regime) == (node, regime))


def test_the_table_of_the_page_is_what_the_command_prints(generations):
    table = PAGE.partition("Strong scaling on H100:")[2].partition("\n- ")[0]
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in table.split("\n")]
    rows = [line for line in cells if line[0].replace(",", "").isdigit()]
    curve = curve_of(generations, "dgx-h100", "strong")
    assert len(rows) == len(curve.rows) == 5
    for words, row, efficiency in zip(rows, curve.rows, curve.efficiency, strict=True):
        devices, accumulates, step, share, _, cost, _ = words
        assert int(devices.replace(",", "")) == row["ranks"]
        assert int(accumulates.replace(",", "")) == row["num_microbatches"]
        value, unit = step.split()
        assert float(value) * {"s": 1, "ms": 1e-3}[unit] == pytest.approx(row["step_time_s"], 5e-3)
        assert float(share.rstrip(" %")) == pytest.approx(100 * efficiency, abs=0.06)
        assert float(cost.lstrip("$")) == pytest.approx(row["run_devices_usd"], abs=0.51)


def test_nvlink_ends_at_eight_devices(generations):
    assert generations.node_size == 8
    # 2 samples a device: the last backward alone hides gradients, in the node and then between
    for node in generations.groups:
        rows = curve_of(generations, node, "2 a device").rows
        assert "in the node" in lost(rows[1], rows[0])
        assert "between nodes" in lost(rows[2], rows[0])


def test_the_text_says_what_limits_every_point(generations):
    for curve in generations.curves:
        for row in curve.rows[1:]:
            assert spent(row) != "-"
            ideal = curve.rows[0]["samples_per_s"] * row["ranks"]
            missing = 1 - row["samples_per_s"] / ideal
            assert (lost(row, curve.rows[0]) != "-") == (missing > 0.005)


def test_accumulating_is_slower_and_cheaper(generations):
    for node in generations.groups:
        few, *_, many = curve_of(generations, node, "strong").rows
        assert 600 < few["step_time_s"] / many["step_time_s"] < 1024
        assert few["run_devices_usd"] < 0.8 * many["run_devices_usd"]
