"""Schedules from users: CSV files as torch.distributed.pipelining has them, and functions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import simulator as sim
from simulator.errors import DeadlockError, DescriptionError, ScheduleError
from simulator.schedules import (
    SCHEDULES,
    Action,
    Actions,
    actions_of,
    add_messages_as_torch,
    add_reduce_grad,
    cell_text,
    cells,
    check_progress,
    read_csv,
    register_schedule,
    schedule_of,
    write_csv,
)

SIZES = [
    ("GPipe", 3, 4), ("1F1B", 4, 6), ("ZB-H1", 3, 5), ("ZB-H2", 3, 6), ("Interleaved1F1B", 3, 6),
    ("LoopedBFS", 2, 4), ("InterleavedZeroBubble", 2, 4), ("ZBVZeroBubble", 3, 7),
    ("DualPipeV", 2, 5), ("DualPipe", 4, 8), ("V-Half", 3, 6),
]  # fmt: skip
TORCHS = ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
PLAN = """
model = "gpt2-xl"
[cluster]
node = "dgx-a100"
num_nodes = 1
devices_per_node = 4
[plan]
pp = 4
schedule = "{0}"
{1}
[run]
global_batch_size = 8
sequence_length = 128
"""


def csv(folder: Path, *rows: str) -> str:
    """Write a file whose rows are given with blanks for commas; return its path."""
    path = folder / "own.csv"
    path.write_text("".join(f"{row.replace(' ', ',')}\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(("name", "p", "m"), SIZES)
@pytest.mark.parametrize("comms", [False, True])
def test_a_file_that_is_written_reads_back(
    tmp_path: Path, name: str, p: int, m: int, comms: bool
) -> None:
    actions = actions_of(name, p, m)
    if comms:
        actions = add_messages_as_torch(add_reduce_grad(actions))
    write_csv(actions, tmp_path / "out.csv")
    assert read_csv(tmp_path / "out.csv") == (actions, 0)


def test_a_row_is_a_rank_and_a_cell_an_action(tmp_path: Path) -> None:
    write_csv(actions_of("1F1B", 2, 2), tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


# torch pads lists with empty cells, and marks where FSDP gathers weights.
def test_empty_cells_are_nothing_and_those_of_fsdp_are_counted(tmp_path: Path) -> None:
    path = csv(tmp_path, "0UNSHARD 0F0  0B0 0RESHARD", " 1F0 1B0 ")
    assert read_csv(path) == (actions_of("1F1B", 2, 1), 2)
    assert "2 UNSHARD and RESHARD" in schedule_of(path).note


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (("0F0 0B0", "1F0 1X0"), "row 2, column 2: '1X0' is not an action"),
        (("0F0  0B0", "1B0 1F0"), "row 2, column 1: 1B0 on rank 1 comes before its forward"),
        (("0F0   0B0 0F0", "1F0 1B0"), "row 1, column 5: 0F0 on rank 0 is done twice"),
        (("0F0 (0F1;0B1)OVERLAP_F_B 0B0",), "row 1, column 2: 0F1 on rank 0 is paired with 0B1"),
        (("0F0 0B0", "1F0"), "1B0 .or both I and W. is missing"),
        (("0F0 1F0 1B0 0B0", "2F0 2B0"), "its ranks hold 2, 1 of 3 stages"),
        ((), "a schedule needs at least one action"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_with_row_and_column(
    tmp_path: Path, rows: tuple[str, ...], words: str
) -> None:
    with pytest.raises(DescriptionError, match=f"own.csv.*{words}"):
        schedule_of(csv(tmp_path, *rows))


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(DescriptionError, match=r"none\.csv' cannot be read \(No such file"):
        schedule_of(str(tmp_path / "none.csv"))


SWAPPED = (
    "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1",
    "1RECV_F1 1RECV_F0 1F0 1F1 1B0 1B1 1SEND_B0 1SEND_B1",
)


def test_swapped_receives_are_a_deadlock_with_ranks_and_cells(
    tmp_path: Path, trainsim: Any
) -> None:
    code, _, err = trainsim("show", "schedule", csv(tmp_path, *SWAPPED))
    assert code == 3
    assert "rank 0 stands at 0B0 and waits for 0RECV_B0 from rank 1" in err
    assert "rank 1 stands at 1F0 and waits for 1RECV_F0 from rank 0" in err
    assert "1RECV_F0 on rank 1 waits for 1RECV_F1, which is received before it" in err


# p=2, m=2 by hand as 1F1B: (2 + 1) x 3 s.
def test_a_file_is_simulated_as_its_lists(tmp_path: Path) -> None:
    path = csv(tmp_path, "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    assert sim.simulate_schedule(path).step_time_s == 9.0


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = csv(tmp_path, "0F0 0B0")
    assert sim.simulate_schedule(path).step_time_s == 3.0
    csv(tmp_path, "0F0 0B0 0F1 0B1")
    assert sim.simulate_schedule(path).step_time_s == 6.0


def test_a_file_is_of_one_size(tmp_path: Path) -> None:
    path = csv(tmp_path, "0F0 0B0", "1F0 1B0")
    with pytest.raises(DescriptionError, match="is of 2 ranks and 1 microbatches, not of 4 and 8"):
        actions_of(path, 4, 8)


@pytest.fixture
def scenario(tmp_path: Path) -> Any:
    def write(schedule: str, more: str = "") -> Path:
        path = tmp_path / "scenario.toml"
        path.write_text(PLAN.format(schedule, more))
        return path

    return write


# A path is taken from the scenario's folder, wherever the command runs.
@pytest.mark.parametrize(
    ("name", "chunks"),
    [("1F1B", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2), ("DualPipe", 2)],
)
@pytest.mark.parametrize("comms", [False, True])
def test_a_scenario_with_a_file_takes_as_long_as_with_the_schedule_in_it(
    tmp_path: Path, scenario: Any, name: str, chunks: int, comms: bool
) -> None:
    actions = actions_of(name, 4, 8, chunks)
    if comms:
        actions = add_messages_as_torch(add_reduce_grad(actions))
    write_csv(actions, tmp_path / "own.csv")
    named = sim.simulate(sim.load(scenario(name, f"chunks = {chunks}")))
    filed = sim.simulate(sim.load(scenario("own.csv", f"chunks = {chunks}")))
    assert filed.step_time_s == named.step_time_s
    assert filed.peak_memory_bytes.tolist() == named.peak_memory_bytes.tolist()


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (("0F0 0B0", "1F0 1B0"), "is of 2 ranks and 1 microbatches, not of 4 and 8"),
        (("0F0 0X0",), "own.csv row 1, column 2: '0X0' is not an action"),
    ],
)
def test_a_scenario_with_a_wrong_file_is_refused(
    tmp_path: Path, scenario: Any, rows: tuple[str, ...], words: str
) -> None:
    csv(tmp_path, *rows)
    with pytest.raises(DescriptionError, match=words):
        sim.load(scenario("own.csv"))


def test_pipedream_cannot_be_written_for_torch(tmp_path: Path) -> None:
    with pytest.raises(DescriptionError, match="no optimizer steps, which this schedule takes"):
        write_csv(actions_of("PipeDream", 2, 2), tmp_path / "out.csv")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("name", "p", "m"), SIZES)
def test_messages_as_torch_places_them_do_not_deadlock(name: str, p: int, m: int) -> None:
    check_progress(add_messages_as_torch(actions_of(name, p, m)))


def runtime(p: int, v: int, m: int) -> Any:
    """Return torch's runtime of a schedule, of stages that do nothing."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    stage = mock.create_autospec(
        pytest.importorskip("torch.distributed.pipelining.stage").PipelineStage, instance=True
    )
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, p, p * v, None
    made = schedules._PipelineScheduleRuntime([stage] * v, m)
    made.pipeline_order = {}
    return made


@pytest.mark.parametrize(
    ("name", "p", "m"), [size for size in SIZES if size[0] not in ("GPipe", "1F1B", "DualPipe")]
)
def test_a_file_that_we_write_loads_in_torch(tmp_path: Path, name: str, p: int, m: int) -> None:
    actions = actions_of(name, p, m)
    v = SCHEDULES[name].chunks[0]
    loaded = runtime(p, v, m)
    write_csv(actions, tmp_path / "compute.csv")
    loaded._load_csv(str(tmp_path / "compute.csv"))
    assert texts(loaded.pipeline_order, p) == spelled(actions)
    full = add_messages_as_torch(add_reduce_grad(actions))
    write_csv(full, tmp_path / "comms.csv")
    loaded = runtime(p, v, m)
    loaded._load_csv(str(tmp_path / "comms.csv"), format="compute_comms")
    assert texts(loaded.pipeline_order_with_comms, p) == spelled(full)


# torch's passes on our compute-only file, but for UNSHARD and RESHARD. These count as turns of
# their ranks in torch, so that some receives of ZB-V stand a few cells elsewhere.
@pytest.mark.parametrize(
    ("name", "p", "m"), [size for size in SIZES if size[0] not in ("GPipe", "1F1B", "DualPipe")]
)
def test_torch_places_messages_where_we_do(tmp_path: Path, name: str, p: int, m: int) -> None:
    actions = actions_of(name, p, m)
    loaded = runtime(p, SCHEDULES[name].chunks[0], m)
    write_csv(actions, tmp_path / "compute.csv")
    loaded._load_csv(str(tmp_path / "compute.csv"))
    theirs = [
        [cell for cell in row if "SHARD" not in cell]
        for row in texts(loaded.pipeline_order_with_comms, p)
    ]
    placed = spelled(add_messages_as_torch(add_reduce_grad(actions)))
    if name == "ZBVZeroBubble":
        assert list(map(sorted, placed)) == list(map(sorted, theirs))
        placed, theirs = (
            [[c for c in row if "RECV" not in c] for row in x] for x in (placed, theirs)
        )
    assert placed == theirs


@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.parametrize("kind", ["compute_only", "compute_comms"])
def test_a_file_that_torch_writes_loads_here(tmp_path: Path, name: str, kind: str) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    stage = runtime(2, 2, 4)._stages[0]
    theirs = schedules.get_schedule_class(name)([stage] * 2, 4)
    theirs._dump_csv(str(tmp_path / "theirs.csv"), format=kind)
    actions, left_out = read_csv(tmp_path / "theirs.csv")
    assert computed(actions) == spelled(actions_of(name, 2, 4))
    assert (left_out > 0) == (kind == "compute_comms")


def texts(order: dict[int, list[Any]], ranks: int) -> list[list[str]]:
    return [[str(a) for a in order[rank] if a is not None] for rank in range(ranks)]


def spelled(actions: Actions) -> list[list[str]]:
    return [[cell_text(cell) for cell in cells(row)] for row in actions]


def computed(actions: Actions) -> list[list[str]]:
    return [[t for t in row if not any(w in t for w in ("SEND", "RECV", "REDUCE"))]
            for row in spelled(actions)]  # fmt: skip


@pytest.fixture
def registry() -> Iterator[None]:
    """Forget what a test registers."""
    before = dict(SCHEDULES)
    yield
    SCHEDULES.clear()
    SCHEDULES.update(before)


def backward_first(ranks: int, microbatches: int) -> list[list[str]]:
    """Each microbatch alone, as naive does."""
    return [
        [f"{rank}{kind}{m}" for m in range(microbatches) for kind in "FB"] for rank in range(ranks)
    ]


@pytest.mark.usefixtures("registry")
def test_a_registered_function_is_a_schedule(trainsim: Any) -> None:
    sim.register_schedule("mine", backward_first)
    assert actions_of("Mine", 3, 4) == actions_of("naive", 3, 4)
    assert sim.simulate_schedule("mine", stages=3, microbatches=4).step_time_s == 4 * 3 * 3
    assert "mine                   Each microbatch alone" in trainsim("show", "schedule")[1]


@pytest.mark.usefixtures("registry")
def test_a_registered_function_may_be_changed() -> None:
    register_schedule("mine", backward_first)
    actions_of("mine", 2, 2)
    register_schedule("mine", lambda p, m: actions_of("GPipe", p, m))
    assert actions_of("mine", 2, 2) == actions_of("GPipe", 2, 2)


@pytest.mark.usefixtures("registry")
def test_a_registered_function_takes_the_chunks_it_says() -> None:
    register_schedule("mine", lambda p, m, v: actions_of("LoopedBFS", p, m, v), chunks=(2, None))
    assert actions_of("mine", 2, 3, 3) == actions_of("LoopedBFS", 2, 3, 3)
    with pytest.raises(DescriptionError, match="mine needs at least 2 chunks"):
        actions_of("mine", 2, 3, 1)


@pytest.mark.usefixtures("registry")
def test_a_scenario_may_name_a_registered_schedule(scenario: Any) -> None:
    register_schedule("mine", lambda p, m: actions_of("1F1B", p, m), note="of tests")
    own, plain = (sim.simulate(sim.load(scenario(name))) for name in ("mine", "1F1B"))
    assert own.step_time_s == plain.step_time_s
    assert "of tests" in str(own)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda p, m: [["0F0", "0B0"]], ScheduleError, "of 1 ranks, and were asked for 2"),
        (lambda p, m: [["0F0", "0B0"], ["1F0", "1B0"]], ScheduleError, "of 1 microbatches"),
        (lambda p, m: [["nonsense"]], ScheduleError, "'nonsense' is not an action"),
        (lambda p, m: [["0F1", "0B1", "0F0", "0B0"], ["1F0", "1F1", "1B1", "1B0"]],
         DeadlockError, r"ranks \[0, 1\]"),
    ],
)  # fmt: skip
def test_lists_of_a_function_are_checked(make: Any, error: type[Exception], words: str) -> None:
    register_schedule("mine", make)
    with pytest.raises(error, match=words):
        actions_of("mine", 2, 2)


@pytest.mark.parametrize("name", ["1f1b", "own.csv", " "])
def test_a_name_that_cannot_be_given_is_refused(name: str) -> None:
    with pytest.raises(DescriptionError, match=f"schedule {name!r}"):
        register_schedule(name, backward_first)


def test_what_is_shown_of_a_schedule(trainsim: Any) -> None:
    _, shown, _ = trainsim("show", "schedule", "ZB-H1", "--stages", "2", "--microbatches", "3")
    assert shown.splitlines() == [
        "rank 0 |F0 F1 .  I0 W0 F2 I1 W1 I2 W2",
        "rank 1 |.  F0 I0 F1 I1 W0 F2 I2 W1 W2",
        "",
        "step 10 s; bubble 0.1000 of the step, 0.1111 of the work",
        "activations in flight by rank: 2 2",
        "idle of the rank that idles most: 1 s; paper: (p-1)(F+I-W) for m >= p and F >= W "
        "with free messages: 1 s",
        "activations of one stage kept by rank, paper: min(p, m): 2 2",
    ]


def test_a_schedule_is_written_and_shown_from_its_file(tmp_path: Path, trainsim: Any) -> None:
    path = str(tmp_path / "out.csv")
    options = ("--stages", "2", "--microbatches", "4", "--csv", path, "--comms")
    code, first, _ = trainsim("show", "schedule", "DualPipeV", *options)
    assert code == 0
    again = trainsim("show", "schedule", path)[1].splitlines()
    assert again == first.splitlines()[: len(again)]
    assert "(0F3;3B1)OVERLAP_F_B" in Path(path).read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--csv", "a.csv"], "--csv writes a schedule; give its NAME"),
        (["1F1B", "--comms"], "--comms says what --csv writes"),
        (["1F1B", "--group", "2"], "microbatch_group is for Interleaved1F1B"),
        (["1F1B", "--csv", "/nowhere/a.csv"], "there is no folder"),
    ],
)
def test_options_that_do_nothing_are_refused(options: list[str], words: str, trainsim: Any) -> None:
    code, _, err = trainsim("show", "schedule", *options)
    assert code == 2
    assert words in err


def test_an_action_of_a_list_may_be_given_as_such() -> None:
    rows = ((Action(0, "F", 0), Action(0, "B", 0)),)
    assert sim.simulate_schedule(rows).step_time_s == 3.0


# Question 8 on devices: 4 ranks, 8 microbatches, 2 chunks.
def test_a_plan_with_rounds_smaller_than_its_pipeline_is_slower_and_says_so(scenario: Any) -> None:
    results = [
        sim.simulate(
            sim.load(scenario("Interleaved1F1B", f"chunks = 2\nmicrobatch_group = {group}"))
        )
        for group in (2, 4)
    ]
    slow, fast = (result.step_time_s for result in results)
    assert slow > 1.2 * fast
    assert "2 microbatches pass each chunk of a rank before its next one" in str(results[0])


def test_a_plan_with_rounds_of_a_schedule_without_them_is_refused(scenario: Any) -> None:
    with pytest.raises(DescriptionError, match="1F1B has no rounds of 2 microbatches"):
        sim.load(scenario("1F1B", "microbatch_group = 2"))
