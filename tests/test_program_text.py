"""The text of a Program: it reads back as an equal one, and faults are told by line."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import simulator.program_text as program_text
from simulator.describe.scenario import Scenario
from simulator.errors import ProgramError
from simulator.lower import lower, lower_schedule
from simulator.program import ACTIONS, NONE, Cost, Flow, Groups, Kernel, Memory, Program, Work
from simulator.program_text import format_program, parse_program
from simulator.schedules import actions_of

SMALL = """\
program ranks=2 ops=4
stream 0 compute
stream 1 "send F +1"
cost 0 work "layer F" alloc=4096
  kernel fc1 flops=2048 bytes=512.5 dtype=bf16 matmul=1x8x8x16
cost 1 work OPT seconds=0.001 free=4096
cost 2 flow send_recv bytes=4096
group 0 0,1
joint 0 group=0
static 0 1000000
static 1 2000000
op 0 rank=0 compute     0F0      layer=0 step=0 cost=0  # "layer F"
op 1 rank=0 "send F +1" 0SEND_F0 step=0 cost=2 @0 after=0  # send_recv
op 2 rank=1 -           1RECV_F0 step=0 cost=2 @0  # send_recv
op 3 rank=1 compute     OPT      step=1 cost=1 after=0,2  # OPT
end
"""

AMOUNTS = st.floats(0, 1e300)
DURATIONS = st.none() | AMOUNTS
KERNELS = st.builds(
    Kernel, st.text(), AMOUNTS, AMOUNTS, st.text(), st.none() | st.tuples(*[st.integers(0, 9)] * 4)
)
MEMORY = st.builds(Memory, *[AMOUNTS] * len(Memory._fields))
COSTS: st.SearchStrategy[Cost] = st.one_of(
    st.builds(Work, st.text(), st.lists(KERNELS, max_size=2).map(tuple), DURATIONS, MEMORY, MEMORY),
    st.builds(
        Flow, st.text(), AMOUNTS, DURATIONS, servers=st.integers(0, 9), alloc=MEMORY, free=MEMORY
    ),
)


def rows_of(lists: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    flat = [value for row in lists for value in row]
    return np.cumsum([0, *map(len, lists)], dtype=np.int64), np.array(flat, np.int32)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    ops, ranks = draw(st.integers(0, 6)), draw(st.integers(1, 5))
    streams = draw(st.lists(st.text(), max_size=4, unique=True))
    costs = draw(st.lists(COSTS, min_size=1, max_size=4))
    groups = draw(st.lists(st.lists(st.integers(0, ranks - 1)), max_size=3))
    joints = draw(st.lists(st.integers(0, len(groups) - 1), max_size=3)) if groups else []
    static = draw(st.just([]) | st.lists(AMOUNTS, min_size=ranks, max_size=ranks))
    pred_offset, preds = rows_of(
        draw(st.lists(st.lists(st.integers(0, max(ops - 1, 0))), min_size=ops, max_size=ops))
    )

    def column(dtype: type, low: int, high: int) -> np.ndarray:
        return np.array(draw(st.lists(st.integers(low, high), min_size=ops, max_size=ops)), dtype)

    return Program(
        rank=column(np.int32, 0, ranks - 1),
        stream=column(np.int16, NONE, len(streams) - 1),
        action=column(np.int8, 0, len(ACTIONS) - 1),
        stage=column(np.int32, NONE, 2**15 - 1),
        microbatch=column(np.int32, NONE, 2**15 - 1),
        layer=column(np.int32, NONE, 2**15 - 1),
        step=column(np.int32, 0, 2**15 - 1),
        cost=column(np.int32, 0, len(costs) - 1),
        joint=column(np.int32, NONE, len(joints) - 1),
        pred_offset=pred_offset,
        preds=preds,
        joint_group=np.array(joints, np.int32),
        groups=Groups(*rows_of(groups)),
        costs=tuple(costs),
        streams=tuple(streams),
        num_ranks=ranks,
        static_bytes=np.array(static, np.float64),
    )


def dtypes(program: Program) -> dict[str, np.dtype]:
    values = {f.name: getattr(program, f.name) for f in dataclasses.fields(program)}
    values |= {"groups.offset": program.groups.offset, "groups.ranks": program.groups.ranks}
    return {name: v.dtype for name, v in values.items() if isinstance(v, np.ndarray)}


@given(programs())
def test_any_program_reads_back_as_it_was_written(program: Program) -> None:
    assert parse_program(format_program(program)) == program


@given(programs())
def test_columns_that_were_read_have_the_declared_dtypes(program: Program) -> None:
    assert dtypes(parse_program(format_program(program))) == dtypes(program)


@given(programs())
def test_a_program_that_was_read_is_written_as_the_same_text(program: Program) -> None:
    text = format_program(program)
    assert format_program(parse_program(text)) == text


@given(st.sampled_from(["GPipe", "1F1B", "naive"]), st.integers(1, 4), st.integers(1, 5))
@settings(max_examples=20)
def test_the_program_of_a_schedule_reads_back(name: str, stages: int, microbatches: int) -> None:
    program = lower_schedule(actions_of(name, stages, microbatches), latency=0.1)
    assert parse_program(format_program(program)) == program


def test_the_program_of_a_scenario_reads_back(scenario_of: Callable[..., Scenario]) -> None:
    program = lower(scenario_of(plan={"pp": 2, "tp": 2, "dp": 2}, run={"num_steps": 2})).flat
    assert parse_program(format_program(program)) == program


def test_the_columns_of_a_lowered_program_have_the_dtypes_that_its_text_gives(
    scenario_of: Callable[..., Scenario],
) -> None:
    program = lower(scenario_of(plan={"pp": 2, "tp": 2})).flat
    assert dtypes(parse_program(format_program(program))) == dtypes(program)


def test_a_hand_written_program_is_written_as_it_stands() -> None:
    assert format_program(parse_program(SMALL)) == SMALL


def test_the_example_of_the_module_is_a_program() -> None:
    example = inspect.cleandoc(program_text.__doc__ or "").split("\n\n")[1]
    assert len(parse_program(example)) == 3


def test_blank_lines_comments_and_space_mean_nothing() -> None:
    loose = re.sub("\n", '  # a "remark\n\n', SMALL.replace(" ", "   ").replace('"   ', '" '))
    loose = loose.replace("send   F   +1", "send F +1").replace("layer   F", "layer F")
    assert parse_program(loose) == parse_program(SMALL)


def test_an_op_without_stage_or_microbatch_has_none() -> None:
    program = parse_program(SMALL)
    assert (program.stage[3], program.microbatch[3]) == (NONE, NONE)


def test_a_dash_is_the_absent_stream() -> None:
    assert parse_program(SMALL).stream[2] == NONE


def test_a_stream_that_is_named_dash_is_quoted() -> None:
    program = dataclasses.replace(parse_program(SMALL), streams=("compute", "-"))
    assert parse_program(format_program(program)) == program


def test_a_text_cut_anywhere_is_refused() -> None:
    for end in range(len(SMALL) - 1):
        with pytest.raises(ProgramError, match=r"^line \d+: "):
            parse_program(SMALL[:end])


@given(st.data())
def test_a_damaged_text_is_read_or_refused_and_nothing_else(data: st.DataObject) -> None:
    words = re.split(r"(\s+)", SMALL)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(words) - 1))
        words[at] = data.draw(st.sampled_from(words) | st.text(max_size=4) | st.just("-1"))
    with contextlib.suppress(ProgramError):
        parse_program("".join(words))


FAULTS = [
    ("program ranks=2 ops=4\n", "", "line 1: the one line such as"),
    ("ops=4", "ops=5", "line 16: the end comes after 4 of 5 ops"),
    ("ops=4", "ops=3", "line 15: op 3 lies outside 0..2"),
    ("ops=4", "", "line 1: the program lacks its ops"),
    ("ops=4", "ops=many", "line 1: number of ops 'many' is not a whole number"),
    ("op 1 ", "oop 1 ", "line 13: unknown keyword 'oop', did you mean 'op'?"),
    ("op 1 ", "op 7 ", "line 13: op 7 stands where op 1 should"),
    ("rank=1 compute", "rank=1 compete", "unknown stream 'compete', did you mean 'compute'?"),
    ("stream 1 \"send F +1\"", "stream 1 compute", "line 3: stream 'compute' is there twice"),
    ("stream 0 compute", "stream 0", "line 2: a stream lacks its name"),
    ("0 work", "0 werk", "line 4: cost kind 'werk' is not one of work, flow"),
    ("cost 2 flow", "", "line 7: unknown keyword 'send_recv'"),
    ("bytes=512.5", "bytes=lots", "line 5: bytes 'lots' is not a number"),
    ("bytes=512.5", "bytes=nan", "line 5: bytes nan is not finite and at least 0"),
    ("bytes=512.5", "bytes=-1", "line 5: bytes -1 is not finite and at least 0"),
    ("1x8x8x16", "8x8x16", "line 5: matmul '8x8x16' is not of the form BATCHxMxNxK"),
    ("1x8x8x16", "1x8x8xK", "line 5: size in matmul 'K' is not a whole number"),
    ("  kernel", "cost 1 flow f bytes=0\n  kernel", "line 6: a kernel must follow the work"),
    ("group 0 0,1", "group 0 0,2", "line 8: rank 2 lies outside 0..1"),
    ("joint 0 group=0", "joint 0 group=1", "line 9: group 1 lies outside 0..0"),
    ("static 1 2000000\n", "", "line 15: static bytes are given for 1 of 2 ranks"),
    ("op 0 rank=0", "op 0 rank=2", "line 12: rank 2 lies outside 0..1"),
    ("0F0 ", "0X0 ", "line 12: '0X0' is not an action; write for example 3F0"),
    ("0F0 ", "2147483648F0 ", "line 12: stage 2147483648 lies outside 0..2147483647"),
    ("cost=0 ", "cost=3 ", "line 12: cost 3 lies outside 0..2"),
    ("cost=0 ", "", "line 12: an op lacks its cost"),
    ("cost=0 ", "cost=0 cost=0 ", "line 12: an op has its cost twice"),
    ("layer=0", "lair=0", "line 12: an op has no place for 'lair=0'"),
    ("@0 after", "@1 after", "line 13: joint 1 lies outside 0..0"),
    ("after=0,2", "after=0,4", "line 15: predecessor 4 lies outside 0..3"),
    ("after=0,2", "after=0,", "line 15: predecessor '' is not a whole number"),
    ('"layer F" alloc', '"layer F alloc', "line 4: a quoted name has no end"),
    ('"layer F" alloc', r'"layer \F" alloc', r'line 4: "layer \F" is not a name in quotes'),
    ("end\n", "", "line 16: the text stops after 4 of 4 ops, before its line 'end'"),
    ("end\n", "end\nop 4\n", "line 17: 'op' stands after the line 'end'"),
]  # fmt: skip


@pytest.mark.parametrize(("right", "wrong", "message"), FAULTS, ids=[m for *_, m in FAULTS])
def test_a_fault_is_told_in_one_line_that_names_its_line(
    right: str, wrong: str, message: str
) -> None:
    assert SMALL.count(right) >= 1
    with pytest.raises(ProgramError, match=re.escape(message)) as caught:
        parse_program(SMALL.replace(right, wrong, 1))
    assert "\n" not in str(caught.value)


def test_an_empty_text_is_no_program() -> None:
    with pytest.raises(ProgramError, match="line 1: the text stops before its line 'end'"):
        parse_program("")
