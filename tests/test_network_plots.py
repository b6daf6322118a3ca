"""Figures of the network: busy links over time, and the fabric as a graph."""

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

import simulator
from simulator.cli import cli
from simulator.describe.loader import scenario
from simulator.errors import DescriptionError
from simulator.hardware.fabric import build
from simulator.report import network_plots
from simulator.report.fabric_layout import lay_out, wire
from simulator.report.network_plots import HEAT, LINES, NOT_SHARED, link_means, link_shares
from simulator.report.palette import lightness
from simulator.report.plots import FIGURES
from simulator.report.result import Result
from simulator.report.topology import topology_text

CLUSTERS: dict[str, dict[str, Any]] = {
    "cube mesh": {"node": "dgx-1-v100"},
    "switch": {"node": "dgx-h100", "num_nodes": 8},
    "rail": {
        "node": "dgx-h100",
        "num_nodes": 8,
        "network": {"layout": "rail", "radix": 8, "failed": ["leaf0<>spine1"]},
    },
    "pods": {
        "node": "dgx-a100",
        "num_nodes": 8,
        "network": {"layout": "pods", "radix": 32, "oversubscription": 2.0, "spines": 4},
    },
    "fat tree": {
        "node": "dgx-1-v100",
        "num_nodes": 8,
        "network": {"layout": "fat-tree", "radix": 8},
    },
    "dragonfly": {
        "node": "dgx-1-v100",
        "num_nodes": 8,
        "network": {"layout": "dragonfly", "radix": 7},
    },
    "torus": {
        "node": "tpu-v4-host",
        "num_nodes": 16,
        "network": {"layout": "torus", "shape": [4, 4, 4]},
    },
    "pcie": {"node": "rtx-4090-8", "num_nodes": 2},
    "full mesh": {"node": "mi300x-8", "num_nodes": 2},
    "one full mesh": {"node": "mi300x-8"},
    "bridges": {"node": "a100-pcie-4-bridged", "num_nodes": 2},
    "rack": {"node": "gb200-nvl72"},
    "wafer": {"node": "wse-2"},
}


def table(cluster: dict[str, Any], network: str = "alpha-beta") -> dict[str, Any]:
    fp16 = cluster["node"] == "dgx-1-v100"
    return {
        "name": "a network",
        "model": "gpt2-xl",
        "cluster": cluster,
        "plan": {"microbatch_size": 1, "recompute": "full"},
        "run": {
            "global_batch_size": 504 if cluster["node"] in ("gb200-nvl72", "wse-2") else 64,
            "sequence_length": 128,
            "network": network,
            "precision": "fp16" if fp16 else "bf16",
        },
    }


def simulated(cluster: dict[str, Any], network: str = "alpha-beta") -> Result:
    return simulator.simulate(scenario(table(cluster, network), Path("network.toml")))


@pytest.fixture(scope="module")
def fixed() -> Result:
    """8 ranks of a hybrid cube mesh whose flows take fixed times."""
    return simulated(CLUSTERS["cube mesh"])


@pytest.fixture(scope="module")
def fluid() -> Result:
    """The same with flows that share links."""
    return simulated(CLUSTERS["cube mesh"], "fluid")


@pytest.fixture(scope="module")
def railed() -> Result:
    """64 ranks, rails and spines, a failed link."""
    return simulated(CLUSTERS["rail"], "fluid")


@pytest.fixture(scope="module", params=list(CLUSTERS))
def any_topology(request: pytest.FixtureRequest) -> Figure:
    return simulated(CLUSTERS[request.param], "fluid").plot.topology()


def gids(figure: Figure) -> list[str]:
    ax = figure.axes[0]
    every = [*ax.patches, *ax.collections, *ax.lines]
    return [str(artist.get_gid()) for artist in every if artist.get_gid()]


def words(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.texts)


def heat(figure: Figure) -> np.ndarray[Any, Any]:
    (image,) = figure.axes[0].images
    return np.asarray(image.get_array())


def texts_of(figure: Figure) -> list[Any]:
    figure.canvas.draw()
    every = [*figure.texts, *figure.legends[0].get_texts()]
    for ax in figure.axes:
        every += [*ax.texts, *ax.get_xticklabels(), *ax.get_yticklabels()]
        every += [ax.xaxis.label, ax.yaxis.label]
    return [text for text in every if text.get_text()]


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    renderer = FigureCanvasAgg(figure).get_renderer()
    extents = [(t.get_text(), t.get_window_extent(renderer)) for t in texts_of(figure)]
    return [(a, b) for (a, x), (b, y) in combinations(extents, 2) if x.overlaps(y)]


def margin(figure: Figure) -> float:
    tight = figure.get_tightbbox(FigureCanvasAgg(figure).get_renderer())
    width, height = figure.get_size_inches()
    return float(min(tight.x0, tight.y0, width - tight.x1, height - tight.y1))


def test_links_are_refused_where_flows_share_none(fixed: Result) -> None:
    with pytest.raises(DescriptionError, match=r"give --set run\.network=fluid"):
        fixed.plot.links()


def test_links_shows_the_24_busiest(railed: Result) -> None:
    figure = railed.plot.links()
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    use = railed.links
    assert names == [use.traffic.names[link] for link in use.hottest(24).tolist()]


def test_links_has_a_column_for_each_bin(railed: Result) -> None:
    assert heat(railed.plot.links()).shape == (24, railed.links.by_bin.shape[1])


def test_shares_of_a_link_average_to_its_utilisation(fluid: Result) -> None:
    shares = link_shares(fluid.links)
    assert shares.mean(axis=1) == pytest.approx(100 * fluid.links.utilisation)


def test_no_share_is_above_all_of_a_link(railed: Result) -> None:
    assert link_shares(railed.links).max() <= 100.001


def test_a_failed_link_is_used_by_nothing(railed: Result) -> None:
    failed = railed.links.traffic.names.index("leaf0>spine1")
    assert railed.links.utilisation[failed] == railed.links.peak[failed] == 0


def test_colours_of_links_run_from_0_to_100_percent(fluid: Result) -> None:
    (image,) = fluid.plot.links().axes[0].images
    assert image.get_clim() == (0, 100)


def test_the_mean_use_of_each_link_stands_at_its_right(fluid: Result) -> None:
    figure, use = fluid.plot.links(), fluid.links
    rows = [r for r in use.hottest(24).tolist() if use.bytes[r] >= 1]
    means = [t.get_text() for t in figure.axes[0].texts if t.get_text() != "mean"]
    assert means == [f"{use.utilisation[link]:.1%}" for link in rows]


@pytest.mark.parametrize("shades", [HEAT, LINES])
def test_more_use_is_darker(shades: Any) -> None:
    grey = [
        lightness("#" + bytes(int(255 * c) for c in shades(x)[:3]).hex())
        for x in np.linspace(0, 1, 33)
    ]
    assert (np.diff(grey) < 0).all()


@pytest.mark.parametrize("name", ["links", "topology"])
def test_texts_of_a_figure_of_shared_links_do_not_overlap(railed: Result, name: str) -> None:
    assert overlaps(FIGURES[name](railed)) == []


@pytest.mark.parametrize("name", ["links", "topology"])
def test_a_figure_of_shared_links_lies_on_its_paper(railed: Result, name: str) -> None:
    assert margin(FIGURES[name](railed)) >= 0


def test_texts_of_a_topology_do_not_overlap(any_topology: Figure) -> None:
    assert overlaps(any_topology) == []


def test_a_topology_lies_on_its_paper(any_topology: Figure) -> None:
    assert margin(any_topology) >= 0


def test_no_text_of_a_topology_is_smaller_than_6_points(any_topology: Figure) -> None:
    assert min(text.get_size() for text in texts_of(any_topology)) >= 6


@pytest.mark.parametrize("name", list(CLUSTERS))
def test_no_two_boxes_overlap(name: str) -> None:
    fabric = build(scenario(table(CLUSTERS[name], "fluid"), Path("n.toml")).cluster)
    boxes = lay_out(fabric, fabric.graph()).boxes.values()
    assert not any(
        abs(a.x - b.x) < (a.width + b.width) / 2 - 1e-9
        and abs(a.y - b.y) < (a.height + b.height) / 2 - 1e-9
        for a, b in combinations(boxes, 2)
    )


def test_a_hybrid_cube_mesh_has_16_wires(fixed: Result) -> None:
    # 6 in each quad, 4 between them
    assert gids(fixed.plot.topology()).count("wire") == 16


def test_no_wire_of_a_hybrid_cube_mesh_runs_through_a_device() -> None:
    fabric = build(scenario(table(CLUSTERS["cube mesh"]), Path("n.toml")).cluster)
    graph = fabric.graph()
    drawing = lay_out(fabric, graph)
    for a, b in ((a, b) for a, b in graph.edges if {a, b} <= set(drawing.boxes)):
        (line,) = wire(drawing, a, b)
        for x, y in np.linspace(line[0], line[-1], 50):
            for name, box in drawing.boxes.items():
                inside = abs(x - box.x) < box.width / 2 and abs(y - box.y) < box.height / 2
                assert name in (a, b) or not inside


def test_devices_bear_their_ranks(fixed: Result) -> None:
    texts = [t.get_text() for t in fixed.plot.topology().axes[0].texts]
    assert sorted(t for t in texts if t.isdigit()) == [str(rank) for rank in range(8)]


def test_of_8_nodes_4_are_drawn_and_the_title_says_so(railed: Result) -> None:
    figure = railed.plot.topology()
    assert gids(figure).count("gpu") == 32
    assert "left out: 4 of 8 nodes" in words(figure)


def test_a_failed_link_is_drawn_as_failed(railed: Result) -> None:
    assert gids(railed.plot.topology()).count("failed") == 1


def test_a_faster_link_is_wider(railed: Result) -> None:
    wires = [c for c in railed.plot.topology().axes[0].collections if c.get_gid() == "wire"]
    # 369 GB/s of NVLink beside 48.5 GB/s of an adapter: sqrt(7.6) = 2.76 times as wide
    widths = {
        round(float(w.get_linewidths()[0]), 2) for w in wires if isinstance(w, LineCollection)
    }
    assert max(widths) / min(widths) == pytest.approx(2.76, abs=0.02)


def test_without_shared_links_wires_have_one_colour(fixed: Result) -> None:
    wires = [c for c in fixed.plot.topology().axes[0].collections if c.get_gid() == "wire"]
    assert len({tuple(w.get_colors()[0]) for w in wires if isinstance(w, LineCollection)}) == 1


def test_a_wire_is_coloured_by_its_busier_direction(fluid: Result) -> None:
    pair = ("node0/gpu0", "node0/gpu1")
    means = link_means(fluid, {pair: 1.0})
    names, use = fluid.links.traffic.names, fluid.links.utilisation
    both = [use[names.index(f"{a}>{b}")] for a, b in (pair, pair[::-1])]
    assert means[pair] == pytest.approx(100 * max(both))


def test_a_torus_wraps_by_two_stubs() -> None:
    fabric = build(scenario(table(CLUSTERS["torus"]), Path("n.toml")).cluster)
    drawing = lay_out(fabric, fabric.graph())
    # place (0, 0, 0) and place (0, 0, 3) are neighbours
    assert len(wire(drawing, "node0/gpu0", "node0/gpu3")) == 2


def test_a_bare_schedule_has_no_topology() -> None:
    result = simulator.simulate_schedule("1F1B", stages=2, microbatches=2)
    with pytest.raises(DescriptionError, match="needs a cluster"):
        result.plot.topology()


@pytest.mark.parametrize("name", ["links", "topology"])
def test_the_same_result_gives_the_same_picture(fluid: Result, tmp_path: Path, name: str) -> None:
    for file in ("one.svg", "two.svg"):
        FIGURES[name](fluid, tmp_path / file)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_the_command_line_draws_both(tmp_path: Path) -> None:
    files = [tmp_path / "links.png", tmp_path / "topology.svg"]
    plots = ["--plot", f"links={files[0]}", "--plot", f"topology={files[1]}"]
    cli.main(["run", "gpt2-xl-1f1b", "--set", "run.network=fluid", *plots], standalone_mode=False)
    assert all(file.stat().st_size > 0 for file in files)


def test_the_command_line_refuses_links_before_it_simulates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simulator.api.simulate", None)  # a call would be a TypeError
    args = ["run", "gpt2-xl-1f1b", "--plot", f"links={tmp_path / 'links.png'}"]
    with pytest.raises(DescriptionError, match=NOT_SHARED):
        cli.main(args, standalone_mode=False)


def test_the_text_of_a_topology_says_how_nodes_are_joined() -> None:
    text = topology_text(scenario(table(CLUSTERS["pods"], "fluid"), Path("n.toml")).cluster)
    assert (
        "network pods, switches of 32 ports, oversubscribed 2 to 1, 4 spines, ecmp routing" in text
    )


def test_the_text_of_a_topology_says_how_devices_are_joined() -> None:
    text = topology_text(scenario(table(CLUSTERS["wafer"]), Path("n.toml")).cluster)
    assert "layout  mesh 12 x 7 inside a node" in text


def test_the_text_of_a_topology_names_what_failed() -> None:
    text = topology_text(scenario(table(CLUSTERS["rail"], "fluid"), Path("n.toml")).cluster)
    assert "impaired: leaf0<>spine1 failed" in text


def test_figures_of_the_network_are_registered() -> None:
    assert FIGURES["links"] is network_plots.links
    assert FIGURES["topology"] is network_plots.topology
