"""A part that nobody sells: described in a scenario, it runs as any other."""

import re
import tomllib
from pathlib import Path

import pytest

import simulator as sim
from simulator.lower.layers import model_flops_per_token

PAGE = (Path(__file__).parent.parent / "docs/hardware.md").read_text(encoding="utf-8")
(TOML,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "card.toml"
    path.write_text(TOML, encoding="utf-8")
    return sim.simulate(sim.load(path))


def test_a_step_on_an_own_part_takes_no_less_than_its_products(result):
    flops = model_flops_per_token(result.scenario) * 64 * 1024
    least = flops / (8 * 0.9 * 16e12)
    assert least == pytest.approx(0.49, abs=0.005)  # as the page says
    assert least < result.step_time_s < 1.5 * least


def test_its_facts_are_those_that_were_written(result):
    device = result.scenario.cluster.node.device
    table = tomllib.loads(TOML)["cluster"]["node"]["device"]
    assert (device.name, device.memory) == (table["name"], 32e9)
    assert device.peak == {"fp32": 2e12, "bf16": 16e12}
