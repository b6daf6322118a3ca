"""Action lists against those of torch.distributed.pipelining, recorded and installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import simulator as sim
from simulator.errors import DescriptionError
from simulator.schedules import Action, actions_of, cell_text, cells, size_complaint

GOLDEN = Path(__file__).parent / "golden"
FILES = {
    "GPipe": "torch_gpipe.txt",
    "1F1B": "torch_1f1b.txt",
    "Interleaved1F1B": "torch_interleaved.txt",
    "LoopedBFS": "torch_looped_bfs.txt",
    "InterleavedZeroBubble": "torch_interleaved_zero_bubble.txt",
    "ZBVZeroBubble": "torch_zbv.txt",
    "DualPipeV": "torch_dual_pipe_v.txt",
}
SEVERAL = [name for name in FILES if name not in ("GPipe", "1F1B")]
"""Those of several stages on each rank."""


def recorded(name: str) -> dict[tuple[int, ...], list[list[str]]]:
    """Read the recorded lists by (ranks, microbatches), or (ranks, microbatches, chunks)."""
    out: dict[tuple[int, ...], list[list[str]]] = {}
    rows: list[list[str]] = []
    for line in (GOLDEN / FILES[name]).read_text().splitlines():
        if line.startswith("p="):
            rows = out[tuple(int(part[2:]) for part in line.split())] = []
        elif line.startswith("rank"):
            rows.append(line.partition(":")[2].split())
    return out


def ours(name: str, *size: int) -> list[list[str]]:
    return [[cell_text(cell) for cell in cells(row)] for row in actions_of(name, *size)]


def installed(name: str, *size: int, **options: bool) -> list[list[str]] | None:
    """Return the installed torch's lists, None if it refuses the size."""
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    try:
        rows = visualizer.get_schedule_ops(name, *size, **options)
    except ValueError:
        return None
    return [[str(a) for a in row if a is not None] for row in rows]


def computed(row: Sequence[str]) -> list[str]:
    return [cell for cell in row if "REDUCE_GRAD" not in cell]


def renumbered(row: Sequence[str]) -> list[str]:
    """Number forwards from zero."""
    return [
        str(a._replace(microbatch=a.microbatch - 1)) if a.kind == "F" else str(a)
        for a in map(Action.parse, row)
    ]


# 8 stage counts x 9 microbatch counts; torch's 1F1B needs m >= p, which leaves 9+8+7+6+5+4+4+3 = 46
# (of m in 1, 2, 3, 4, 5, 7, 8, 12, 16: p=6 and p=7 both leave 7, 8, 12, 16). Interleaved: 5 rank
# counts x 8 x 2 chunk counts (and one more), but m=5 on p=2 and m=10 on p=3, which it refuses.
# DualPipeV needs m >= 2p: of 1, 2, 3, 5, 6, 8, 9, 12, 14 leave p = 1 to 6 8+6+5+4+2+2, and (8, 20).
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("GPipe", 72),
        ("1F1B", 46),
        ("Interleaved1F1B", 81 - 4),
        ("LoopedBFS", 5 * 5 * 2),
        ("InterleavedZeroBubble", 80 - 4),
        ("ZBVZeroBubble", 6 * 9),
        ("DualPipeV", 27 + 1),
    ],
)
def test_the_recording_of_torch_covers_the_grid(name: str, count: int) -> None:
    assert len(recorded(name)) == count


@pytest.mark.parametrize("name", SEVERAL)
def test_lists_equal_those_recorded_from_torch(name: str) -> None:
    for size, rows in recorded(name).items():
        assert ours(name, *size) == rows, size


def test_gpipe_lists_equal_those_recorded_from_torch() -> None:
    for size, rows in recorded("GPipe").items():
        assert ours("GPipe", *size) == [computed(row) for row in rows], size


# torch 2.13 numbers the forwards of the last stage 1..m (its counter starts at 0 and is raised
# before the first use when there is no warm-up); every other stage counts 0..m-1.
def test_1f1b_lists_equal_those_recorded_from_torch_but_for_its_numbering_of_the_last_stage() -> (
    None
):
    for size, rows in recorded("1F1B").items():
        *first, last = [computed(row) for row in rows]
        assert ours("1F1B", *size) == [*first, renumbered(last)], size


def test_torch_really_numbers_the_last_stage_of_1f1b_from_one() -> None:
    for (p, m), rows in recorded("1F1B").items():
        forwards = [cell for cell in rows[-1] if "F" in cell]
        assert forwards == [f"{p - 1}F{i}" for i in range(1, m + 1)]


# torch ends the lists of these two with a REDUCE_GRAD of the stage.
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_torch_reduces_gradients_after_the_last_backward_as_we_do(name: str) -> None:
    for (p, _), rows in recorded(name).items():
        assert [row[-1] for row in rows] == [f"{stage}REDUCE_GRAD" for stage in range(p)]


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (3, 5), (4, 4), (6, 11)])
def test_lists_equal_those_of_the_installed_torch(
    name: str, stages: int, microbatches: int
) -> None:
    theirs = installed(name, stages, microbatches)
    assert theirs is not None
    rows = [computed(row) for row in theirs]
    if name == "1F1B" and f"{stages - 1}F{microbatches}" in rows[-1]:
        rows[-1] = renumbered(rows[-1])
    assert ours(name, stages, microbatches) == rows


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("name", SEVERAL)
def test_lists_of_several_stages_equal_those_of_the_installed_torch_or_both_refuse(
    name: str, ranks: int
) -> None:
    for chunks in (2, 3):
        for m in (1, ranks, ranks + 1, 2 * ranks, 2 * ranks + 3):
            theirs = installed(name, ranks, m, chunks)
            assert (theirs is None) == (size_complaint(name, ranks, m, chunks) is not None)
            if theirs is not None:
                assert ours(name, ranks, m, chunks) == theirs
            else:
                with pytest.raises(DescriptionError, match=f"not {chunks}|{m}"):
                    ours(name, ranks, m, chunks)


# torch places the receives itself, and UNSHARD and RESHARD of FSDP, which do nothing here.
@pytest.mark.parametrize(("ranks", "m", "chunks"), [(2, 4, 2), (3, 3, 3), (4, 6, 2), (5, 10, 3)])
def test_interleaved_lists_with_the_messages_of_torch_take_as_long_as_with_ours(
    ranks: int, m: int, chunks: int
) -> None:
    theirs = installed("Interleaved1F1B", ranks, m, chunks, with_comms=True)
    assert theirs is not None
    rows = [[cell for cell in row if "SHARD" not in cell] for row in theirs]
    times = {"forward": 1.0, "backward": 2.0, "latency": 0.25}
    ours = sim.simulate_schedule(actions_of("Interleaved1F1B", ranks, m, chunks), **times)
    assert sim.simulate_schedule(rows, **times).step_time_s == ours.step_time_s
