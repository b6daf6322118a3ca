"""Scaling over devices: efficiency, what is lost to what, where messages overtake, figures."""

import pytest

from simulator.errors import DescriptionError
from simulator.explore.sweep.run import grid_of, run_sweep
from simulator.explore.sweep.scaling import lost, scaling, scaling_text
from simulator.explore.sweep.scaling_plot import scaling_figure
from simulator.explore.sweep.swept import Swept
from simulator.report.breakdown import COMMUNICATION
from simulator.report.labels import apart


def row(devices, samples_per_s, *, exposed=0.0, optimizer=0.0, nodes=1, fits=True, **more):
    """A row of a step that is work, but for what data parallelism exposes."""
    return {
        "status": "ok", "fits": fits, "reason": "" if fits else "too small", "devices": devices,
        "ranks": devices, "num_nodes": nodes, "samples_per_s": samples_per_s, "step_time_s": 1.0,
        "tokens_per_s": 10 * samples_per_s, "num_microbatches": 64 // devices,
        "global_batch_size": 64, "work_fraction": 1 - exposed, "optimizer_fraction": optimizer,
        "compute_bound_fraction": 1 - exposed, "memory_bound_fraction": 0.0,
        "launch_bound_fraction": 0.0, "exposed_communication_fraction": exposed,
        "bubble_fraction": 0.0, **{f"exposed_{kind}_fraction": 0.0 for kind in COMMUNICATION},
        "exposed_dp_fraction": exposed, **more,
    }  # fmt: skip


def swept(*rows, varied=("devices",)):
    return Swept(name="test", keys=varied, varied=varied, rows=rows, simulated=len(rows))


def test_efficiency_is_throughput_a_device_over_that_of_the_fewest():
    curve = scaling(swept(row(8, 40.0), row(1, 10.0), row(2, 15.0))).curves[0]
    assert curve.efficiency == [1.0, 0.75, 0.5]


def test_what_is_lost_sums_to_what_is_missing_to_the_ideal():
    # A device takes 0.1 s a sample alone; of 8 devices each takes 0.2 s: half is lost. The
    # optimizer took 10 % of 0.1 s and takes 25 % of 0.2 s: 0.04 of 0.2 s more. Messages took
    # nothing and take 30 % of it. The rest, 15 % of the work, was 0.09 s and is 0.09 s.
    few, many = row(1, 10.0, optimizer=0.1), row(8, 40.0, optimizer=0.25, exposed=0.3, nodes=1)
    assert lost(many, few) == (
        "30% data-parallel communication in the node, 20% optimizer, shared by fewer microbatches"
    )


def test_communication_overtakes_where_it_first_takes_as_long_as_work():
    rows = [row(1, 10.0), row(8, 40.0, exposed=0.4), row(16, 50.0, exposed=0.6)]
    assert scaling(swept(*rows)).curves[0].overtaken == (8, 16)
    assert scaling(swept(*rows[:2])).curves[0].overtaken is None
    assert scaling(swept(rows[2])).curves[0].overtaken == (16, 16)


def test_points_that_do_not_fit_are_left_out_and_listed():
    found = scaling(swept(row(1, 10.0, fits=False), row(2, 20.0)))
    assert [r["ranks"] for r in found.curves[0].rows] == [2]
    assert "1 devices left out: too small" in scaling_text(found)


def test_a_sweep_in_which_nothing_fits_has_no_scaling():
    with pytest.raises(DescriptionError, match="no point of the sweep runs and fits"):
        scaling(swept(row(1, 10.0, fits=False)))


def test_keys_that_go_together_name_a_line_once():
    rows = [row(d, 10.0 * d, **{"cluster.node": n, "cost.device_price": p})
            for n, p in (("a100", "2 USD/h"), ("h100", "3 USD/h")) for d in (1, 2)]  # fmt: skip
    found = scaling(swept(*rows, varied=("cluster.node", "cost.device_price", "devices")))
    assert found.groups == ("a100", "h100")


def test_accumulation_on_one_device_is_told_as_the_rival_of_many():
    # One device: 64 microbatches in 8 s. Eight devices: 8 each in 2 s. So 4 times as long, and
    # 8 x 1 of 2 x 8 device-seconds.
    few, many = row(1, 10.0, step_time_s=8.0), row(8, 40.0, step_time_s=2.0)
    assert scaling_text(scaling(swept(few, many))).endswith(
        "1 device accumulating 8 times as much: 4 times as long as 8 for the same step, "
        "at 50% of the device-hours"
    )


def test_the_node_ends_where_all_nodes_of_several_are_equally_large():
    assert scaling(swept(row(1, 1.0), row(16, 9.0, nodes=2))).node_size == 8
    assert scaling(swept(row(1, 1.0), row(16, 9.0, nodes=2), row(16, 9, nodes=4))).node_size is None
    assert scaling(swept(row(1, 1.0), row(8, 4.0))).node_size is None


def test_names_of_lines_keep_apart_and_within_bounds():
    assert apart([0.5, 0.5, 0.5], 0.1, 0.0, 1.0) == [0.5, 0.6, 0.7]
    assert apart([0.95, 1.0], 0.1, 0.0, 1.0) == pytest.approx([0.9, 1.0])
    assert apart([0.5] * 5, 0.5, 0.0, 1.0) == [0.0, 0.25, 0.5, 0.75, 1.0]


@pytest.fixture(scope="module")
def generations():
    """GPT-2 XL on one to 1,024 devices of three generations, no accumulation at the end."""
    grid = grid_of(
        {"devices": [1, 8, 32, 256, 1024], "samples_per_device": ["fixed", 32],
         "run.global_batch_size": [2048]},
        {"cluster.node": ["dgx-1-v100", "dgx-a100", "dgx-h100"],
         "cost.device_price": ["1 USD/h", "2 USD/h", "3 USD/h"]},
        None,
    )  # fmt: skip
    return scaling(run_sweep("gpt2-xl-generations", grid, tokens=10e9, workers=1))


def test_gpt2_xl_scales_on_three_generations_in_one_sweep(generations):
    assert generations.groups == ("dgx-1-v100", "dgx-a100", "dgx-h100")
    assert generations.node_size == 8
    for curve in generations.curves:
        assert [r["ranks"] for r in curve.rows] == [1, 8, 32, 256, 1024]
        assert curve.efficiency == sorted(curve.efficiency, reverse=True)
        assert max(curve.efficiency) == 1  # never better than alone on the same devices


def test_accumulation_hides_what_a_network_costs(generations):
    for group in generations.groups:
        strong, weak = (c for c in generations.curves if c.group == group)
        assert strong.rows[-1]["num_microbatches"] == 1
        assert weak.rows[-1]["num_microbatches"] == 16
        assert weak.efficiency[-1] > 0.99 > 0.8 > strong.efficiency[-1]


def test_the_figure_names_each_generation_and_where_nodes_end(generations, tmp_path):
    figure = scaling_figure(generations, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").stat().st_size > 50_000
    assert len(figure.axes) == 4  # throughput, efficiency, communication, cost
    for ax in figure.axes:
        texts = {text.get_text() for text in ax.texts}
        assert {"dgx-1-v100", "dgx-a100", "dgx-h100"} <= texts
    assert {"links of one node ", " network between nodes"} <= {
        text.get_text() for text in figure.axes[0].texts
    }


def test_texts_of_the_figure_do_not_overlap(generations):
    figure = scaling_figure(generations)
    figure.draw_without_rendering()
    for ax in figure.axes:
        boxes = [
            t.get_window_extent() for t in (*ax.texts, ax.title, ax._left_title) if t.get_text()
        ]
        for k, box in enumerate(boxes):
            inner = box.padded(-2)  # of pixels, at 100 an inch
            assert not any(inner.overlaps(other) for other in boxes[k + 1 :])
