"""Figures: what is drawn, that it can be read, and that it is saved whole or not at all."""

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

import simulator
from simulator.describe.loader import scenario
from simulator.errors import DescriptionError
from simulator.program import ACTION_CODE
from simulator.report.breakdown import CATEGORIES
from simulator.report.memory_plot import memory_parts
from simulator.report.palette import COLOURS, SERIES, lightness
from simulator.report.plots import (
    FIGURES,
    at_once,
    breakdown_bars,
    flow_spans,
    pipeline_cells,
    pipeline_rows,
)
from simulator.report.result import Result

OF_RANKS = ("pipeline", "breakdown", "memory")
"""Figures whose rows are ranks; see test_network_plots for the others."""


@pytest.fixture(scope="module")
def schedule() -> Result:
    return simulator.simulate_schedule("1F1B", stages=4, microbatches=8, latency=0.25)


@pytest.fixture(scope="module")
def training() -> Result:
    """64 ranks: pp 4, tp 4, dp 4."""
    table = {
        "model": "llama-3-8b",
        "cluster": {"node": "dgx-h100", "num_nodes": 8},
        "plan": {"pp": 4, "tp": 4, "microbatch_size": 1},
        "run": {"global_batch_size": 32, "sequence_length": 2048},
    }
    return simulator.simulate(scenario(table, Path("llama.toml")))


def drawn(figure: Figure, name: str) -> list[PolyCollection]:
    """Return the collections of boxes of one kind."""
    return [c for c in figure.axes[0].collections if c.get_gid() == name]


def boxes(figure: Figure, name: str) -> int:
    return sum(len(c.get_paths()) for c in drawn(figure, name))


def words(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.texts)


def rows(figure: Figure) -> list[str]:
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_each_rank_has_a_cell_for_each_microbatch(schedule: Result, name: str) -> None:
    # 4 ranks x 8 microbatches
    assert boxes(schedule.plot.pipeline(), name) == 32


def test_the_layers_of_an_action_are_one_cell(training: Result) -> None:
    # 4 ranks shown x 8 microbatches; every action is many ops
    assert boxes(training.plot.pipeline(), "forward") == 32


def test_a_cell_lasts_as_long_as_its_action(schedule: Result) -> None:
    # B takes 2 s
    for path in drawn(schedule.plot.pipeline(), "backward")[0].get_paths():
        assert np.ptp(path.vertices[:, 0]) == pytest.approx(2.0)


def test_each_rank_that_updates_has_an_optimizer_cell(training: Result) -> None:
    assert boxes(training.plot.pipeline(), "optimizer") == 4


def test_ideal_messages_are_not_drawn() -> None:
    figure = simulator.simulate_schedule("GPipe", stages=2, microbatches=2).plot.pipeline()
    assert boxes(figure, "pp") == 0


def test_flows_that_touch_are_one_box(schedule: Result) -> None:
    spans = flow_spans(schedule, np.arange(4), "pp", 0, schedule.timeline.makespan)
    for row in range(4):
        mine = spans.row == row
        gaps = spans.start[mine][1:] - spans.end[mine][:-1]
        assert (gaps > 0).all()


def test_flows_cover_the_time_in_which_a_rank_communicates(schedule: Result) -> None:
    # Rank 0 sends 8 forwards and receives 8 gradients, 0.25 s each, no two at a time.
    spans = flow_spans(schedule, np.array([0]), "pp", 0, schedule.timeline.makespan)
    assert (spans.end - spans.start).sum() == 16 * 250_000_000_000


def test_later_chunks_of_a_rank_are_paler() -> None:
    from simulator.schedules import Action

    # Two stages on each of two ranks, one microbatch.
    actions = tuple(
        tuple(Action(stage, kind, 0) for kind, order in (("F", 1), ("B", -1))
              for stage in (rank, rank + 2)[::order])
        for rank in range(2)
    )  # fmt: skip
    figure = simulator.simulate_schedule(actions).plot.pipeline()
    assert len({tuple(c.get_facecolor()[0]) for c in drawn(figure, "forward")}) == 2


@pytest.mark.parametrize("shape", [(4, 8), (8, 16), (16, 64), (32, 128)])
def test_no_number_is_wider_than_its_cell(shape: tuple[int, int]) -> None:
    stages, microbatches = shape
    result = simulator.simulate_schedule("1F1B", stages=stages, microbatches=microbatches)
    figure = result.plot.pipeline()
    renderer = FigureCanvasAgg(figure).get_renderer()
    ax = figure.axes[0]
    cells = np.concatenate([
        [path.get_extents().extents for path in c.get_paths()]
        for name in ("forward", "backward") for c in drawn(figure, name)
    ])  # fmt: skip
    for text in ax.texts:
        x, y = text.get_position()
        inside = (cells[:, 0] < x) & (x < cells[:, 2]) & (cells[:, 1] < y) & (y < cells[:, 3])
        (cell,) = cells[inside]
        left, right = ax.transData.transform([(cell[0], y), (cell[2], y)])[:, 0]
        extent = text.get_window_extent(renderer)
        assert left <= extent.x0
        assert extent.x1 <= right


def test_wide_cells_are_all_numbered(schedule: Result) -> None:
    # 4 ranks x 8 microbatches, F and B
    assert len(schedule.plot.pipeline().axes[0].texts) == 64


def test_the_row_of_rank_0_is_at_the_top(schedule: Result) -> None:
    figure = schedule.plot.pipeline()
    bottom, top = figure.axes[0].get_ylim()
    assert bottom > top
    assert rows(figure) == ["rank 0", "rank 1", "rank 2", "rank 3"]


def test_the_title_says_step_time_and_bubble_fraction() -> None:
    # 1F1B: (p-1)/(m+p-1) = 3/11; (8 + 3) * 3 s
    figure = simulator.simulate_schedule("1F1B", stages=4, microbatches=8).plot.pipeline()
    assert "1F1B: step time 33 s, bubble fraction 27.3%" in words(figure)


def test_64_ranks_of_a_plan_show_one_of_each_stage(training: Result) -> None:
    figure = training.plot.pipeline()
    assert rows(figure) == [f"rank {4 * stage} · stage {stage}" for stage in range(4)]
    assert "4 of 64 ranks, one of each stage" in words(figure)


@pytest.mark.parametrize("name", ["breakdown", "memory"])
def test_64_ranks_of_a_schedule_show_32_and_say_so(name: str) -> None:
    result = simulator.simulate_schedule("GPipe", stages=64, microbatches=2)
    figure = FIGURES[name](result)
    assert len(rows(figure)) == 32
    assert "32 of 64 ranks" in words(figure)


def test_ranks_can_be_chosen(training: Result) -> None:
    assert pipeline_rows(training, [5, 3])[0].tolist() == [5, 3]


@pytest.mark.parametrize("ranks", [[], [64], [-1], [1, 1]])
def test_ranks_that_cannot_be_shown_are_refused(training: Result, ranks: list[int]) -> None:
    with pytest.raises(DescriptionError, match="some of 0 to 63"):
        training.plot.pipeline(ranks=ranks)


def test_a_whole_run_shows_every_step(training: Result) -> None:
    steps = len(training.step_ends)
    figure = training.plot.pipeline(whole_run=True)
    assert boxes(figure, "optimizer") == 4 * steps


def test_pieces_of_a_bar_sum_to_the_step(training: Result) -> None:
    share, labels, _ = breakdown_bars(training)
    assert share.sum(axis=0) == pytest.approx(np.ones(len(labels)))


def test_bars_of_many_ranks_are_means_and_say_so(training: Result) -> None:
    figure = training.plot.breakdown()
    assert rows(figure) == ["stage 0", "stage 1", "stage 2", "stage 3"]
    assert "mean of the 16 ranks of a stage; 64 ranks in all" in words(figure)


def test_memory_of_the_fullest_rank_reaches_its_peak(training: Result) -> None:
    rank = int(np.argmax(training.peak_memory_bytes))
    _, parts = memory_parts(training, rank)
    assert sum(parts.values()).max() == pytest.approx(training.device_memory_bytes[rank])


def test_memory_has_one_value_at_any_time(training: Result) -> None:
    time, _ = memory_parts(training, 0)
    assert (np.diff(time) > 0).all()


def test_memory_shows_the_capacity_of_the_device(training: Result) -> None:
    (line,) = (x for x in training.plot.memory().axes[0].lines if x.get_gid() == "capacity")
    assert training.scenario is not None
    assert line.get_ydata()[0] * 1e9 == training.scenario.cluster.node.device.memory


def test_a_schedule_keeps_as_many_microbatches_as_1f1b_promises(schedule: Result) -> None:
    peaks = [text.get_text() for text in schedule.plot.memory().axes[0].texts]
    assert peaks == [f"peak {4 - rank}" for rank in range(4)]


def test_every_category_has_a_colour() -> None:
    assert set(CATEGORIES) <= set(COLOURS)


def test_no_two_things_have_one_colour() -> None:
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_colours_of_weeks_mean_nothing_else() -> None:
    from simulator.operate.plot import LOOKS

    own = {colour for name, (colour, _) in LOOKS.items() if name != "checkpoint"}
    assert not own & {*COLOURS.values(), *(colour for colour, _ in SERIES)}
    assert len(own) == len(LOOKS) - 1


# Greys, white, scales of one hue and tints of groups stand for no thing.
def test_figures_take_their_colours_from_the_palette() -> None:
    package = Path(simulator.__file__).parent
    free = {"palette.py", "network_plots.py"}
    for path in package.rglob("*.py"):
        if path.name in free or path == package / "operate/plot.py":
            continue
        found = re.findall(r"\"#([0-9a-f]{6})\"", path.read_text(encoding="utf-8"))
        assert all(c[:2] == c[2:4] == c[4:] for c in found), path.name


def test_work_is_told_apart_in_grey() -> None:
    grey = sorted(lightness(COLOURS[n]) for n in ("forward", "backward", "I", "W"))
    assert min(b - a for a, b in pairwise(grey)) > 0.1


@pytest.mark.parametrize("name", OF_RANKS)
def test_no_two_texts_of_a_figure_overlap(training: Result, name: str) -> None:
    figure = FIGURES[name](training)
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.canvas.draw()
    labels = [
        text
        for ax in figure.axes
        for text in (*ax.texts, *ax.get_xticklabels(), *ax.get_yticklabels(), ax.xaxis.label)
    ]
    texts = [*figure.texts, *figure.legends[0].get_texts(), *labels]
    extents = [t.get_window_extent(renderer) for t in texts if t.get_text()]
    assert not any(
        a.overlaps(b)
        for i, a in enumerate(extents)
        for b in extents[i + 1 :]
        if a.width and b.width
    )


@pytest.mark.parametrize("name", OF_RANKS)
def test_nothing_lies_outside_the_paper(training: Result, name: str) -> None:
    figure = FIGURES[name](training)
    renderer = FigureCanvasAgg(figure).get_renderer()
    tight = figure.get_tightbbox(renderer)
    width, height = figure.get_size_inches()
    assert min(tight.x0, tight.y0, width - tight.x1, height - tight.y1) >= 0


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf", "PNG"])
def test_a_figure_is_saved_by_its_suffix(schedule: Result, tmp_path: Path, suffix: str) -> None:
    schedule.plot.breakdown(tmp_path / f"figure.{suffix}")
    magic = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix.lower()]
    assert (tmp_path / f"figure.{suffix}").read_bytes().startswith(magic)


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_same_result_gives_the_same_bytes(
    schedule: Result, tmp_path: Path, suffix: str
) -> None:
    for name in ("one", "two"):
        schedule.plot.pipeline(tmp_path / f"{name}.{suffix}")
    one, two = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in ("one", "two"))
    assert one == two


@pytest.mark.parametrize("file", ["figure.bmp", "figure"])
def test_an_unknown_suffix_is_refused_and_leaves_no_file(
    schedule: Result, tmp_path: Path, file: str
) -> None:
    with pytest.raises(DescriptionError, match=r"must end in \.png, \.svg or \.pdf"):
        schedule.plot.pipeline(tmp_path / file)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_refused(schedule: Result, tmp_path: Path) -> None:
    with pytest.raises(DescriptionError, match="there is no folder"):
        schedule.plot.memory(tmp_path / "missing" / "figure.png")


def test_drawing_leaves_the_settings_of_matplotlib_alone(schedule: Result) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    schedule.plot.pipeline()
    assert dict(matplotlib.rcParams) == before


# A pair takes 3 s on both stages of a rank, so 1.5 s on one.
def test_pairs_are_framed_and_only_they():
    result = simulator.simulate_schedule("DualPipeV", stages=2, microbatches=4, pair=3)
    paired = sum(a.paired for row in result.actions for a in row)
    figure = result.plot.pipeline()
    (frames,) = (c for c in figure.axes[0].collections if c.get_gid() == "pair")
    assert len(frames.get_paths()) == paired > 0
    widths = {round(np.ptp(path.vertices[:, 0]), 6) for path in frames.get_paths()}
    assert widths == {1.5}


def test_a_figure_says_which_schedule_it_shows():
    figure = simulator.simulate_schedule("zb-h1", stages=2, microbatches=4).plot.pipeline()
    assert any(text.get_text().startswith("ZB-H1: step time") for text in figure.texts)


def test_actions_whose_kernels_take_turns_have_half_a_row_each():
    pairs = {"plan.schedule": "DualPipe", "plan.chunks": 2, "run.global_batch_size": 32}
    result = simulator.simulate(simulator.load("llama-3-8b-3d", pairs))
    cells = pipeline_cells(result, result.stage_ranks, *result.window)
    place = at_once(cells)
    assert set(place[cells.action == ACTION_CODE["F"]].tolist()) == {0, 1}
    assert set(place[cells.action == ACTION_CODE["B"]].tolist()) == {0, 2}
    for half in range(3):
        mine = np.flatnonzero(place == half)
        mine = mine[np.lexsort((cells.start[mine], cells.row[mine]))]
        same = cells.row[mine[1:]] == cells.row[mine[:-1]]
        assert (cells.start[mine[1:]] >= cells.end[mine[:-1]])[same].all()
