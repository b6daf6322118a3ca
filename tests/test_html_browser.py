"""Pages in a real browser, chromium driven by playwright; skipped where either is missing.

A page is *interactive* when all of it is drawn, its listeners are there, and a frame has come to
the screen after that; it notes the milliseconds since navigation began.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulator import load, simulate, simulate_schedule
from simulator.report.html import save_html
from simulator.report.result import Result

CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
SCENARIOS = ("gpt2-xl-1f1b", "llama-3-8b-3d", "gpt3-175b-1024gpu")

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")


@dataclass
class Shown:
    """A page in a browser, what it has fetched and complained of, and the result that it shows."""

    page: Any
    result: Result
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def js(self, expression: str) -> Any:
        return self.page.evaluate(expression)

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.js("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def plot(self, k: int = 0) -> dict[str, float]:
        self.page.locator(".plot").nth(k).scroll_into_view_if_needed()
        box: dict[str, float] = self.page.locator(".plot").nth(k).bounding_box()
        return box

    def point(self, op: str, k: int = 0) -> tuple[float, float]:
        """Return where on the screen the middle of the compute op `op` of the first row is."""
        box = self.plot(k)
        x, y = self.js(
            f"""(() => {{
              const t = trainsim.timelines[{k}], row = t.rows.list[0], lane = row.lanes[0];
              for (let i = 0; i < row.sheet.count; i++)
                if (t.run.label(row.sheet.from + i) === "{op}" && row.sheet.start[i] >= 0)
                  return [t.x((row.sheet.start[i] + row.sheet.end[i]) / 2),
                          AXIS + lane.y + lane.height / 2];
            }})()"""
        )
        return box["x"] + x, box["y"] + y

    def view(self) -> tuple[float, float]:
        low, high = self.js("[trainsim.view.from, trainsim.view.to]")
        return low, high


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as play:
        running = play.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield running
        running.close()


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    return {name: simulate(load(name)) for name in SCENARIOS}


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Shown]]:
    """Return a function that opens the page of some results, and closes it after the test."""
    opened: list[Shown] = []

    def open_page(*shown: Result, width: int = 1280, height: int = 800) -> Shown:
        path = tmp_path / "page.html"
        save_html(shown, path)
        context = browser.new_context(viewport={"width": width, "height": height})
        seen = Shown(context.new_page(), shown[0])
        seen.page.on("request", lambda request: seen.requests.append(request.url))
        seen.page.on("console", lambda message: seen.complaints.append(message.text))
        seen.page.on("pageerror", lambda error: seen.complaints.append(str(error)))
        seen.page.goto(path.as_uri())
        seen.page.wait_for_selector("html[data-interactive]", timeout=60_000)
        opened.append(seen)
        return seen

    yield open_page
    for seen in opened:
        assert seen.complaints == []
        assert [url for url in seen.requests if not url.startswith("file://")] == []
        assert len(seen.requests) == 1  # the page itself
        seen.page.context.close()


@pytest.fixture
def small(show: Callable[..., Shown], results: dict[str, Result]) -> Shown:
    return show(results["gpt2-xl-1f1b"])


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_page_becomes_interactive_without_a_complaint_or_a_request(
    name: str, show: Callable[..., Shown], results: dict[str, Result],
    record_property: Callable[[str, object], None], capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    seen = show(results[name])
    milliseconds = int(seen.js("document.documentElement.dataset.interactive"))
    record_property("interactive_ms", milliseconds)
    with capsys.disabled():
        ranks = f"{seen.result.tiled.num_ranks:,} ranks"
        sys.stdout.write(f"\n{name}: {ranks}, interactive in {milliseconds} ms\n")
    drawn = seen.js("trainsim.timelines[0].painter.drawn")
    box = seen.plot()
    assert 0 < drawn <= box["width"] * box["height"] / 4


def test_the_browser_reads_the_very_times_of_the_run(small: Shown) -> None:
    got = small.js(
        "(({ start, end }) => [Array.from(start), Array.from(end)])(trainsim.runs[0].sheets[1])"
    )
    p, t, begin = small.result.program, small.result.timeline, small.result.window[0]
    mine = np.flatnonzero(p.rank == 1)
    assert sorted(got[0]) == sorted((t.start[mine] - begin).tolist())
    assert sorted(got[1]) == sorted((t.end[mine] - begin).tolist())


def test_ctrl_and_the_wheel_zoom_about_the_pointer(small: Shown) -> None:
    box, (low, high) = small.plot(), small.view()
    x = box["x"] + 600
    before = small.js("trainsim.timelines[0].moment(600)")
    small.page.mouse.move(x, box["y"] + 40)
    small.page.keyboard.down("Control")
    small.page.mouse.wheel(0, -240)
    small.page.keyboard.up("Control")
    small.settle()
    assert small.view()[1] - small.view()[0] < 0.8 * (high - low)
    assert small.js("trainsim.timelines[0].moment(600)") == pytest.approx(before, rel=1e-6)


def test_dragging_pans(small: Shown) -> None:
    small.js("trainsim.view.zoom(0.2)")
    box, (low, high) = small.plot(), small.view()
    small.page.mouse.move(box["x"] + 600, box["y"] + 50)
    small.page.mouse.down()
    small.page.mouse.move(box["x"] + 500, box["y"] + 50, steps=4)
    small.page.mouse.up()
    width = small.js("trainsim.timelines[0].width")
    assert small.view()[0] - low == pytest.approx(100 / width * (high - low), rel=0.01)
    assert not small.js("trainsim.view.followed")  # a drag is no click


def test_keys_zoom_pan_and_go_home(small: Shown) -> None:
    low, high = small.view()
    small.page.locator(".plot").focus()
    small.page.keyboard.press("+")
    narrow = small.view()
    assert narrow[1] - narrow[0] == pytest.approx(0.6 * (high - low))
    small.page.keyboard.press("ArrowRight")
    assert small.view()[0] > narrow[0]
    small.page.keyboard.press("0")
    assert small.view() == (low, high)


def test_hovering_an_op_names_it(small: Shown) -> None:
    small.page.mouse.move(*small.point("B5"))
    small.settle()
    text = small.page.locator(".timeline .tip").inner_text()
    assert text.startswith("B5\n")
    assert "rank 0" in text
    assert "microbatch 5" in text


def test_hovering_what_is_too_small_to_see_says_what_share_it_has(
    show: Callable[..., Shown], results: dict[str, Result]
) -> None:
    seen = show(results["gpt3-175b-1024gpu"])
    box = seen.plot()
    seen.page.mouse.move(box["x"] + 600, box["y"] + 24 + 8)
    seen.settle()
    text = seen.page.locator(".timeline .tip").inner_text()
    assert "backward" in text
    assert "zoom in to see ops" in text


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("F3", lambda p, names: (p.action == 0) & (p.microbatch == 3)),
        ("layer 12", lambda p, names: p.layer == 12),
        ("mb:2 stage:1", lambda p, names: (p.microbatch == 2) & (p.stage == 1)),
        ("all_reduce", lambda p, names: np.char.find(names[p.cost], "all_reduce") >= 0),
    ],
)
def test_a_search_finds_the_ops_that_the_program_has(
    text: str, wanted: Callable[..., Any], small: Shown
) -> None:
    p = small.result.program
    count = int(wanted(p, np.array([cost.name for cost in p.costs])).sum())
    small.page.keyboard.press("/")
    small.page.keyboard.type(text)
    api.expect(small.page.locator(".search output")).to_have_text(f"{count:,} ops")


def test_enter_goes_to_the_next_match_and_escape_clears(small: Shown) -> None:
    small.page.locator(".search input").fill("F7")
    small.page.keyboard.press("Enter")
    first, low = small.page.locator(".search output").inner_text(), small.view()
    small.page.keyboard.press("Enter")
    assert first.startswith("1 of ")
    assert small.page.locator(".search output").inner_text().startswith("2 of ")
    assert small.view() != low
    small.page.keyboard.press("Escape")
    assert small.js("trainsim.timelines[0].painter.mask") is None


def test_searching_for_a_rank_shows_it(
    show: Callable[..., Shown], results: dict[str, Result]
) -> None:
    seen = show(results["llama-3-8b-3d"])
    seen.page.locator(".search input").fill("rank 37 F2")
    ranks = "trainsim.timelines[0].rows.list.map((row) => row.rank)"
    p = seen.result.tiled
    place = int(np.nonzero(p.tile_ranks == 37)[0][0])
    count = int(((p.rank == place) & (p.action == 0) & (p.microbatch == 2) & ~p.is_flow).sum())
    api.expect(seen.page.locator(".search output")).to_have_text(f"{count} ops")
    assert 37 in seen.js(ranks)


def test_the_op_that_is_found_can_be_followed_by_keys_alone(small: Shown) -> None:
    for key in ("/", "B", "1", "2", "Enter", "Tab", "f"):
        small.page.keyboard.press(key)
    assert small.js("trainsim.view.followed.microbatch") == 12


def test_a_selected_range_shows_what_ranks_do_in_it(small: Shown) -> None:
    box = small.plot()
    small.page.mouse.move(box["x"] + 300, box["y"] + 10)  # on the axis
    small.page.mouse.down()
    small.page.mouse.move(box["x"] + 500, box["y"] + 10, steps=3)
    small.page.mouse.up()
    text = small.page.locator(".inspector").inner_text()
    assert "selected" in text
    assert "Mean of 4 ranks" in text


def test_statistics_of_the_whole_step_are_those_of_the_report(small: Shown) -> None:
    small.page.locator(".plot").focus()
    small.page.keyboard.press("r")
    found = small.js("statistics(trainsim.runs[0], ...trainsim.view.home)")
    busy = {kind["name"]: kind["busy"] for kind in found["kinds"]}
    b = small.result.breakdown
    for name in ("forward", "backward", "optimizer"):
        assert busy[name] == pytest.approx(b.of(name).mean(), rel=0.02), name


def test_clicking_an_op_follows_its_microbatch_through_all_stages(small: Shown) -> None:
    small.page.mouse.click(*small.point("F9"))
    small.settle()
    assert small.js("trainsim.view.followed.microbatch") == 9
    rows = small.page.locator(".journey tbody tr").all_inner_texts()
    passes = [row.split()[:2] for row in rows]
    forward = [["F9", str(stage)] for stage in range(4)]
    backward = [["B9", str(stage)] for stage in (3, 2, 1, 0)]
    assert passes == forward + backward
    small.page.get_by_role("button", name="next microbatch").click()
    assert small.js("trainsim.view.followed.microbatch") == 10
    small.page.keyboard.press("Escape")
    assert small.js("trainsim.view.followed") is None


def test_a_kind_can_be_hidden_and_shown(small: Shown) -> None:
    lanes = "trainsim.timelines[0].rows.list[0].lanes.map((lane) => lane.name)"
    chip = small.page.locator(".chips button[data-kind=pp]")
    assert "pp" in small.js(lanes)
    chip.click()
    assert "pp" not in small.js(lanes)
    assert chip.get_attribute("aria-pressed") == "false"
    chip.click()
    assert "pp" in small.js(lanes)


def test_every_stream_can_have_a_lane_of_its_own(small: Shown) -> None:
    small.page.get_by_role("button", name="stream", exact=True).click()
    lanes = small.js("trainsim.timelines[0].rows.list[0].lanes.length")
    assert lanes == small.js("trainsim.runs[0].tracks.length")


def test_all_of_1024_ranks_can_be_seen_with_a_picture_a_stage(
    show: Callable[..., Shown], results: dict[str, Result]
) -> None:
    seen = show(results["gpt3-175b-1024gpu"])
    assert seen.js("trainsim.timelines[0].rows.list.length") == 8
    seen.page.get_by_role("button", name="rank", exact=True).click()
    seen.settle()
    assert seen.js("trainsim.timelines[0].rows.list.length") == 1024
    assert seen.js("trainsim.timelines[0].painter.strips.seen.size") <= 8
    seen.js("trainsim.view.zoom(0.001)")
    seen.settle()
    assert seen.js("trainsim.timelines[0].painter.drawn") <= 1024


def test_ranks_whose_times_differ_can_be_chosen_by_replica(
    show: Callable[..., Shown], scenario_of: Callable[..., Any], cluster_of: Callable[..., Any]
) -> None:
    from dataclasses import replace

    from simulator.timeline import Timeline

    result = simulate(scenario_of(plan={"pp": 2, "dp": 2}, cluster=cluster_of(1, 4)))
    start, end = (times[:, :1] + np.array([[0, 10**6]]) for times in result.times.columns)
    seen = show(replace(result, times=Timeline(start, end, np.arange(2))))
    first = seen.js("trainsim.timelines[0].rows.list[0].sheet.start[0]")
    seen.page.get_by_label("Replica").fill("1")
    seen.page.keyboard.press("Enter")
    seen.page.get_by_role("button", name="stage", exact=True).click()
    later = seen.js("trainsim.timelines[0].rows.list[0].sheet.start[0]")
    assert later - first == 10**6


def test_memory_and_timeline_show_the_same_range(small: Shown) -> None:
    small.js("trainsim.view.show(1e11, 5e11)")
    small.settle()
    shown = small.js("(({ min, max }) => [min, max])(trainsim.charts[0].plot.scales.x)")
    assert shown == pytest.approx([0.1, 0.5])


def test_busy_links_are_shown_where_flows_share_them(
    show: Callable[..., Shown], scenario_of: Callable[..., Any], cluster_of: Callable[..., Any]
) -> None:
    plan = {"pp": 2, "dp": 2}
    scenario = scenario_of(plan=plan, cluster=cluster_of(2, 2), run={"network": "fluid"})
    seen = show(simulate(scenario))
    assert seen.page.locator("#links canvas").count() == 1
    assert "of capacity" in seen.page.locator("#links").inner_text()


def test_two_runs_lie_on_one_axis_with_what_changed(
    show: Callable[..., Shown], results: dict[str, Result]
) -> None:
    seen = show(results["gpt2-xl-1f1b"], simulate(load("gpt2-xl-gpipe")))
    assert seen.page.locator(".plot").count() == 2
    table = seen.page.locator(".differences").inner_text()
    assert "+382.8%" in table  # of memory: GPipe keeps all microbatches
    seen.js("trainsim.view.zoom(0.5)")
    seen.settle()
    assert seen.js("trainsim.timelines.map((t) => t.moment(400))") == pytest.approx(
        [seen.js("trainsim.timelines[0].moment(400)")] * 2
    )


@pytest.mark.parametrize("width", [800, 1280, 1920])
def test_nothing_is_wider_than_the_window(
    width: int, show: Callable[..., Shown], results: dict[str, Result]
) -> None:
    seen = show(results["llama-3-8b-3d"], width=width)
    assert seen.js("document.documentElement.scrollWidth") <= width


def test_a_bare_schedule_is_drawn_as_papers_draw_it(show: Callable[..., Shown]) -> None:
    seen = show(simulate_schedule("1F1B", stages=4, microbatches=8))
    assert "33 s" in seen.page.locator(".tiles").inner_text()
    seen.page.mouse.move(*seen.point("F7"))
    seen.settle()
    assert seen.page.locator(".timeline .tip").inner_text().startswith("F7\n")


def test_the_theme_can_be_changed(small: Shown) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    before = small.js(ground)
    small.page.locator("#theme").click()
    assert small.js(ground) != before
