"""The roofline: FLOPs a byte, attained FLOP/s, roofs, and labels that hide nothing."""

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

import simulator
from simulator.errors import DescriptionError
from simulator.report.labels import Box, Labels, along, apart
from simulator.report.roofline import roofline
from simulator.report.roofline_plot import marks_of

NAMES = ("gpt2-xl-1f1b", "deepseek-v3-2048gpu", "resnet50-ddp", "llama-3-8b-a100-h100")


@pytest.fixture(scope="module", params=NAMES)
def result(request):
    return simulator.simulate(simulator.load(request.param))


@pytest.fixture(scope="module")
def gpt2():
    return simulator.simulate(simulator.load("gpt2-xl-1f1b"))


def point(result, name, category):
    points = roofline(result).points
    return next(p for p in points if (p.name, p.category) == (name, category))


def test_a_product_has_the_flops_and_bytes_of_its_shape(gpt2):
    # fc1 of GPT-2 XL, microbatches of 4 x 1,024 tokens: m 4096, k 1600, n 6400 in bf16;
    # 2mkn FLOPs over 2 (mk + kn + mn) bytes
    s = gpt2.scenario
    m, k, n = s.plan.microbatch_size * 1024, 1600, 6400
    fc1 = point(gpt2, "fc1", "forward")
    assert fc1.intensity == pytest.approx(m * k * n / (m * k + k * n + m * n))
    assert fc1.flops == pytest.approx(2 * m * k * n * 48 * s.num_microbatches)


def test_element_wise_work_runs_at_the_sustained_bandwidth_but_for_gaps(gpt2):
    gelu, device = point(gpt2, "gelu", "forward"), gpt2.scenario.cluster.node.device
    bandwidth = device.memory_bandwidth * device.memory_efficiency
    assert 0.95 * bandwidth < gelu.bytes / gelu.seconds < bandwidth


def test_no_operator_is_above_its_roofs(result):
    drawn = roofline(result)
    highest = drawn.roofs[0].peak
    for p in drawn.points:
        assert p.rate <= min(highest, p.intensity * drawn.device.memory_bandwidth)


def test_the_time_of_kernels_is_the_work_of_the_step(gpt2):
    b = gpt2.breakdown
    work = b.of("forward", "backward", "optimizer").sum() / 1e12
    assert roofline(gpt2).seconds == pytest.approx(work, rel=1e-6)


def test_marks_hold_all_time_but_that_which_computes_nothing(result):
    drawn = roofline(result)
    moving = sum(seconds for _, seconds in drawn.moving)
    assert sum(m.share for m in marks_of(drawn)) == pytest.approx(1 - moving / drawn.seconds)


def test_of_two_kinds_of_device_the_larger_half_is_drawn_and_counted():
    over = {"cluster.nodes": [{"node": "dgx-a100", "count": 1}, {"node": "dgx-h100", "count": 3}]}
    result = simulator.simulate(simulator.load("llama-3-8b-a100-h100", over))
    drawn = roofline(result)
    assert "H100" in drawn.device.name
    assert drawn.ranks == 24
    assert "24 of 32 ranks" in result.plot.roofline().texts[1].get_text()


def test_a_bare_schedule_has_no_kernels():
    with pytest.raises(DescriptionError, match="needs kernels"):
        simulator.simulate_schedule("GPipe", stages=2, microbatches=2).plot.roofline()


def test_labels_hide_no_label_and_no_dot(result):
    figure = result.plot.roofline()
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.canvas.draw()
    ax = figure.axes[0]
    texts = [t for t in ax.texts if t.get_gid() in ("label", "roof") and not t.get_rotation()]
    assert len(texts) > 8
    # Without its line to the dot
    boxes = [super(type(t), t).get_window_extent(renderer) for t in texts]
    for i, a in enumerate(boxes):
        assert not any(a.overlaps(b) for b in boxes[i + 1 :]), texts[i].get_text()
    for line in ax.lines:
        if line.get_gid() in ("forward", "backward", "optimizer"):
            (x,), (y,) = line.get_data()
            at = ax.transData.transform((x, y))
            assert not any(b.contains(*at) for b in boxes)


def test_apart_keeps_order_and_gap():
    assert apart([1.0, 1.0, 1.0], 2.0, 0.0, 10.0) == [1.0, 3.0, 5.0]


def test_a_label_goes_beside_its_dot_or_nowhere():
    labels = Labels(Box(0, 0, 100, 100), [], [Box(45, 45, 55, 55)])
    box = labels.place((50, 50), 5, (20, 10))
    assert box is not None
    assert box.left >= 55
    assert labels.place((50, 50), 5, (200, 10)) is None


def test_no_line_crosses_a_label_or_another_dot():
    dots = [(40.0 + 14 * k, 100.0) for k in range(8)]
    round_dots = [Box(x - 2, y - 2, x + 2, y + 2) for x, y in dots]
    labels = Labels(Box(0, 0, 200, 200), [], round_dots)
    placed = [(dot, box) for dot in dots if (box := labels.place(dot, 2, (40, 10)))]
    assert len(placed) >= 6
    for dot, box in placed:
        line = list(along(dot, box.corner(dot), 1.0))
        others = [b for _, b in placed if b is not box]
        others += [b for at, b in zip(dots, round_dots, strict=True) if at != dot]
        assert not any(other.meets(piece) for other in others for piece in line)
