"""Figures of sweeps: the bubble over microbatches, and cost over time with its Pareto front."""

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from simulator.errors import DescriptionError
from simulator.explore.sweep.bubble_plot import bubble_figure, bubble_lines
from simulator.explore.sweep.cost_plot import cost_figure, front, priced
from simulator.explore.sweep.lines import label, telling
from simulator.explore.sweep.run import grid_of, run_sweep
from simulator.explore.sweep.swept import Swept

BATCH = "run.global_batch_size"


@pytest.fixture(scope="module")
def schedules():
    together = {"plan.schedule": ["GPipe", "1F1B", "Interleaved1F1B"], "plan.chunks": [1, 1, 2]}
    over = {BATCH: [4, 16, 64], "plan.microbatch_size": [1]}
    return run_sweep("gpt2-xl-1f1b", grid_of(over, together, None), workers=1)


@pytest.fixture(scope="module")
def prices():
    over = {"devices": [1, 8, 32], "plan.microbatch_size": [1, 2], BATCH: [2048]}
    together = {
        "cluster.node": ["dgx-a100", "dgx-h100"], "cost.device_price": ["2 USD/h", "3 USD/h"],
    }  # fmt: skip
    grid = grid_of(over, together, None)
    return run_sweep("gpt2-xl-generations", grid, workers=1, tokens=1e9)


def swept(*rows, varied):
    return Swept(name="test", keys=varied, varied=varied, rows=rows, simulated=len(rows))


def row(seconds, usd, **more):
    return {"status": "ok", "fits": True, "run_time_s": seconds, "run_devices_usd": usd, **more}


def test_a_line_is_a_setting_that_moves_no_microbatches(schedules):
    lines = bubble_lines(schedules)
    assert [line.name for line in lines] == ["GPipe", "1F1B", "Interleaved1F1B"]
    assert [r["num_microbatches"] for r in lines[0].rows] == [4, 16, 64]


def test_the_closed_form_is_that_of_the_schedule(schedules):
    # (p-1)/(m+p-1) with p = 4; two chunks count as twice the microbatches
    plain, _, chunked = bubble_lines(schedules)
    for line, shares in ((plain, (3 / 7, 3 / 19, 3 / 67)), (chunked, (3 / 11, 3 / 35, 3 / 131))):
        assert dict(line.ideal) == pytest.approx(dict(zip((4, 16, 64), shares, strict=True)))


def test_equal_stages_would_have_a_smaller_bubble_than_these(schedules):
    for line in bubble_lines(schedules):
        for r, (_, ideal) in zip(line.rows, line.ideal, strict=True):
            assert r["bubble_fraction"] > ideal


def test_lines_that_lie_on_each_other_can_both_be_seen(schedules):
    drawn = {line.get_gid(): line for line in bubble_figure(schedules).axes[0].lines}
    assert drawn["GPipe"].get_linewidth() > drawn["1F1B"].get_linewidth()


def test_a_sweep_over_no_microbatches_has_no_bubble_figure(trainsim):
    code, out, err = trainsim(
        "sweep", "gpt2-xl-1f1b", "--set", "plan.schedule=GPipe,1F1B", "--plot", "bubble=b.png"
    )
    assert (code, out) == (2, "")
    assert "list several values of one of run.global_batch_size" in err


def test_more_lines_than_colours_are_refused(schedules):
    rows = [{**schedules.rows[0], BATCH: b, "plan.x": x} for b in (1, 2) for x in range(7)]
    with pytest.raises(DescriptionError, match="7 lines; list fewer values"):
        bubble_lines(swept(*rows, varied=(BATCH, "plan.x")))


def test_nothing_on_the_front_is_beaten_in_both():
    points = priced([row(3, 1), row(1, 5), row(2, 5), row(2, 3), row(4, 2)])
    assert [(p.seconds, p.usd) for p in front(points)] == [(1, 5), (2, 3), (3, 1)]


def test_points_that_do_not_fit_or_have_no_price_are_left_out():
    rows = [row(1, 1), row(2, 1) | {"fits": False}, row(2, None), {"status": "refused"}]
    assert len(priced(rows)) == 1


def test_without_a_run_a_million_tokens_are_priced():
    # 1,000 tokens a second: 1,000 s; a step of 2 s costs 0.01 USD, so 500 steps 5 USD
    one = {"status": "ok", "fits": True, "tokens_per_s": 1000.0, "step_time_s": 2.0,
           "step_devices_usd": 0.01}  # fmt: skip
    (point,) = priced([one])
    assert (point.seconds, point.usd) == (1000.0, pytest.approx(5.0))


def test_a_sweep_without_prices_says_how_to_state_one(schedules):
    with pytest.raises(DescriptionError, match=r"cost.device_price=2.50 USD/h"):
        cost_figure(schedules)


def test_the_front_runs_from_the_fastest_to_the_cheapest(prices):
    (line,) = (x for x in cost_figure(prices).axes[0].lines if x.get_gid() == "front")
    x, y = line.get_data()
    points = priced(prices.rows)
    assert x[0] == pytest.approx(min(p.seconds for p in points) / 60)
    assert y[-1] == pytest.approx(min(p.usd for p in points))


@pytest.mark.parametrize("name", ["bubble", "cost"])
def test_no_two_labels_overlap_and_none_leaves_the_paper(name, schedules, prices):
    figure = bubble_figure(schedules) if name == "bubble" else cost_figure(prices)
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.canvas.draw()
    ax = figure.axes[0]
    texts = [*figure.texts, *figure.legends[0].get_texts(), *ax.get_xticklabels(),
             *ax.get_yticklabels(), ax.xaxis.label]  # fmt: skip
    extents = [t.get_window_extent(renderer) for t in texts if t.get_text()]
    extents += [super(type(t), t).get_window_extent(renderer) for t in ax.texts]
    for i, a in enumerate(extents):
        assert not any(a.overlaps(b) for b in extents[i + 1 :] if b.width and a.width)
    tight, (width, height) = figure.get_tightbbox(renderer), figure.get_size_inches()
    assert min(tight.x0, tight.y0, width - tight.x1, height - tight.y1) >= 0


def test_settings_that_go_together_are_named_once():
    rows = [
        {"node": n, "price": p, "tp": tp} for n, p in (("a", 1), ("b", 2)) for tp in (1, 2)
    ]  # fmt: skip
    assert telling(rows, ["node", "price", "tp"]) == ["node", "tp"]


def test_a_label_names_what_does_not_speak_for_itself():
    row = {"plan.schedule": "1F1B", "plan.recompute": "none", "devices": 1024}
    assert label(row, list(row)) == "1F1B, recompute none, 1,024 devices"


def test_a_command_draws_all_figures_at_once(trainsim, tmp_path):
    code, _, err = trainsim(
        "sweep", "gpt2-xl-generations", "--set", f"{BATCH}=64,128", "--devices", "1,8",
        "--set", "cost.device_price=2 USD/h", "--workers", "1", "--plot", "bubble=b.png",
        "--plot", "cost=c.svg", "--plot", "scaling=s.pdf",
    )  # fmt: skip
    assert code == 0, err
    assert {p.name for p in tmp_path.iterdir()} == {"b.png", "c.svg", "s.pdf"}


def test_an_unknown_figure_is_refused_with_those_there_are(trainsim):
    code, _, err = trainsim("sweep", "gpt2-xl-1f1b", "--set", "plan.pp=1,2", "--plot", "x=b.png")
    assert code == 2
    assert "scaling=FILE, bubble=FILE, cost=FILE" in err
