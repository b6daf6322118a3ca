"""Chakra execution traces: what is written, what is read, and what is refused."""

import json
import subprocess
import sys

import numpy as np
import pytest
from conftest import Op, make_program
from hypothesis import given
from hypothesis import strategies as st

import simulator as sim
from simulator.errors import DescriptionError
from simulator.exchange.chakra import read_chakra, write_chakra
from simulator.exchange.chakra.nodes import (
    COLLECTIVE,
    COMPUTE,
    METADATA,
    RECV,
    SEND,
    STORE,
    Node,
    decode,
    decode_file,
    encode,
    encode_file,
)
from simulator.hardware import price
from simulator.hardware.placement import devices
from simulator.lower import lower
from simulator.program import NONE
from simulator.report.measured import overlap
from simulator.report.replayed import replayed
from simulator.wire import framed, read_varint, signed, text, varint

MICRO = 10**6
"""Ticks of a microsecond."""


def written(folder, *ranks, name="t"):
    """Write the nodes of ranks and return their prefix."""
    for rank, nodes in enumerate(ranks):
        (folder / f"{name}.{rank}.et").write_bytes(b"".join(encode_file(nodes)))
    return folder / name


def nodes_of(prefix, rank):
    return decode_file(prefix.with_name(f"{prefix.name}.{rank}.et").read_bytes())


def work(number, deps=(), us=10, **attrs):
    return Node(number, f"op {number}", COMPUTE, deps, us, {"is_cpu_op": False, **attrs})


def call(number, deps=(), us=5, kind=0, size=100, **attrs):
    said = {"is_cpu_op": False, "comm_type": kind, "comm_size": size, **attrs}
    return Node(number, "call", COLLECTIVE, deps, us, said)


def message(number, kind, source=0, target=1, tag=7, size=100, us=5):
    said = {"comm_src": source, "comm_dst": target, "comm_tag": tag, "comm_size": size}
    return Node(number, "message", kind, (), us, {"is_cpu_op": False, **said})


def exported(folder, name, **changes):
    small = {"run.num_steps": 1, "run.global_batch_size": 16}
    scenario = sim.load(name, small | changes)
    program = lower(scenario)
    ticks = price(program, scenario.cluster, devices(scenario.plan, scenario.cluster))
    prefix = folder / "t"
    return scenario, program, write_chakra(program, ticks, prefix), prefix


@given(st.integers(-(2**63), 2**63 - 1))
def test_a_number_comes_back(value):
    data = varint(value)
    assert len(data) <= 10
    assert (signed(read_varint(data, 0)[0]), len(data)) == (value, read_varint(data, 0)[1])


names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=8)
values = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), names)
node = st.builds(
    Node, st.integers(0, 2**64 - 1), names, st.integers(0, 7),
    st.lists(st.integers(0, 2**64 - 1), max_size=4, unique=True).map(tuple),
    st.integers(0, 2**64 - 1),
    st.dictionaries(st.text("abc_", min_size=1, max_size=5), values, max_size=4),
)  # fmt: skip


@given(node)
def test_a_node_comes_back(one):
    assert decode(encode(one)) == one


@given(st.lists(node, max_size=4), st.data())
def test_a_file_that_is_cut_short_is_refused_or_ends_between_nodes(nodes, data):
    pieces = list(encode_file(nodes))
    whole = b"".join(pieces)
    cut = data.draw(st.integers(len(pieces[0]), len(whole)))
    borders = np.cumsum([len(p) for p in pieces]).tolist()
    if cut in borders:
        assert decode_file(whole[:cut]) == nodes[: borders.index(cut)]
    else:
        with pytest.raises(ValueError, match="ends within"):
            decode_file(whole[:cut])


@pytest.mark.parametrize(("ticks", "micros"), [(499_999, 0), (500_000, 1), (1_500_000, 2)])
def test_durations_round_half_a_microsecond_up(tmp_path, ticks, micros):
    program, _ = make_program([Op(0, 0)])
    write_chakra(program, np.array([ticks]), tmp_path / "t")
    assert nodes_of(tmp_path / "t", 0)[0].duration_us == micros


def test_what_rounding_changes_is_said(tmp_path):
    program, _ = make_program([Op(0, 0), Op(0, 0), Op(0, 0)])
    done = write_chakra(program, np.array([1_400_000, 2_400_000, 100]), tmp_path / "t")
    # 0.4 + 0.4 us and 100 ps are lost.
    assert done.notes[0].endswith(
        "shortens the work of a rank by at most 800.1 ns (rank 0); 1 ops are shorter than half of "
        "one and take none"
    )


def test_streams_and_predecessors_are_dependencies(tmp_path):
    ops = [Op(0, 1), Op(0, 1, "copy"), Op(0, 1, after=(1,)), Op(0, 1, None, after=(0,))]
    program, _ = make_program(ops)
    write_chakra(program, np.full(4, MICRO), tmp_path / "t")
    assert [n.deps for n in nodes_of(tmp_path / "t", 0)] == [(), (), (0, 1), (0,)]


def test_communication_is_on_no_cpu_and_both_ends_of_a_message_agree(tmp_path):
    _, program, done, prefix = exported(tmp_path, "gpt2-xl-1f1b")
    nodes = [nodes_of(prefix, rank) for rank in range(done.files)]
    assert sum(map(len, nodes)) == done.nodes == len(program)
    calls = [n for some in nodes for n in some if n.type != COMPUTE]
    assert calls
    assert all(n.attrs["is_cpu_op"] is False for some in nodes for n in some)
    ends = {
        kind: sorted(
            tuple(n.attrs[k] for k in ("comm_tag", "comm_src", "comm_dst", "comm_size"))
            for n in calls if n.type == kind
        )
        for kind in (SEND, RECV)
    }  # fmt: skip
    assert ends[SEND] == ends[RECV]
    tags = [end[0] for end in ends[SEND]]
    assert len(set(tags)) == len(tags) == 3 * 2 * 8  # borders, forward and back, microbatches


def test_an_all_gathers_size_is_the_share_of_a_rank(tmp_path):
    ops = [Op(r, 5, "dp", joint="x", name="all_gather") for r in range(4)]
    program, _ = make_program(ops)  # 5 bytes in full
    write_chakra(program, np.full(4, MICRO), tmp_path / "t")
    assert nodes_of(tmp_path / "t", 0)[0].attrs["comm_size"] == 2  # 5 / 4, upwards
    flow = read_chakra(tmp_path / "t").program.costs[0]
    assert (flow.name, flow.bytes) == ("all_gather", 8)


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"model": "gpt2", "plan.tp": 2, "plan.pp": 2}, {"plan.schedule": "ZB-H1"},
        {"model": "gpt2", "plan.pp": 1, "plan.dp": 4, "plan.zero": 3},
    ],
    ids=str,
)  # fmt: skip
def test_a_scenario_that_is_written_and_read_takes_the_same_step(tmp_path, changes):
    alone = {**changes, "run.overlap_slowdown": 0}  # as durations are written
    scenario, program, _, prefix = exported(tmp_path, "gpt2-xl-1f1b", **alone)
    result = sim.simulate(scenario)
    again = replayed(read_chakra(prefix))
    # An op is at most half a microsecond off, and no path of the step has more ops than this.
    ops = np.bincount(program.flat.rank).max() * program.num_ranks
    assert abs(again.step_time_s - result.step_time_s) < ops * 0.5e-6
    assert again.step_time_s == pytest.approx(result.step_time_s, rel=2e-3)
    priced = replayed(read_chakra(prefix, priced=True), scenario.cluster)
    assert priced.step_time_s == pytest.approx(result.step_time_s, rel=2e-3)
    flat, back = program.flat, again.tiled
    for name in ("action", "stage", "microbatch", "layer", "step"):
        for rank in range(flat.num_ranks):
            ours = np.sort(getattr(flat, name)[flat.rank == rank])
            assert (np.sort(getattr(back, name)[back.rank == rank]) == ours).all()


def test_groups_stand_in_a_file_of_their_own_and_are_read_from_there(tmp_path):
    ops = [Op(r, 8, "tp", joint="ab"[r // 2], name="all_reduce") for r in range(4)]
    program, _ = make_program(ops)
    done = write_chakra(program, np.full(4, MICRO), tmp_path / "t")
    assert json.loads(done.groups.read_text()) == {"0": [0, 1], "1": [2, 3]}
    back = read_chakra(tmp_path / "t").program
    assert [back.groups[g].tolist() for g in range(2)] == [[0, 1], [2, 3]]
    assert back.streams == ("compute", "tp")


def test_traces_of_others_run_by_their_dependencies(tmp_path):
    # Rank 0: 10, then a call; rank 1: 30, then the call. Both then work 10 more: 30 + 5 + 10.
    ranks = [[work(0, us=us), call(1, (0,)), work(2, (1,))] for us in (10, 30)]
    result = replayed(read_chakra(written(tmp_path, *ranks)))
    assert result.step_time_s == pytest.approx(45e-6)
    assert result.breakdown.of("dp").tolist() == [5 * MICRO] * 2
    assert overlap(result).hidden.tolist() == [0, 0]
    assert "communication takes the durations that its nodes state" in result.notes


def test_nodes_run_by_id_where_several_can_whatever_their_order_in_the_file(tmp_path):
    prefix = written(tmp_path, [work(3, (5,), us=1), work(5, us=2), work(4, us=3)])
    program = read_chakra(prefix).program
    assert [program.costs[c].name for c in program.cost] == ["op 4", "op 5", "op 3"]


def test_control_dependencies_count_too(tmp_path):
    # Field 4 holds control dependencies; here one that is not packed.
    raw = encode(work(1)) + varint(4 << 3) + varint(0)
    assert decode(raw).deps == (0,)


def test_metadata_take_no_time(tmp_path):
    nodes = [Node(0, "process group", METADATA), work(1, (0,))]
    assert replayed(read_chakra(written(tmp_path, nodes))).step_time_s == pytest.approx(10e-6)


def test_work_without_a_duration_is_priced_on_a_cluster(tmp_path):
    nodes = [work(0, us=0, num_ops=10**12, tensor_size=10**6)]
    prefix = written(tmp_path, nodes)
    with pytest.raises(DescriptionError, match="no duration; give --cluster"):
        read_chakra(prefix)
    scenario = sim.load("gpt2-xl-1f1b")
    result = replayed(read_chakra(prefix, priced=True), scenario.cluster)
    # A TFLOP at 312 TFLOP/s takes 3.2 ms, and no device reaches its peak.
    assert 3.2e-3 < result.step_time_s < 6.4e-3
    assert any("priced by its operations in bf16" in note for note in result.notes)


def test_a_cluster_that_is_too_small_is_refused(tmp_path):
    prefix = written(tmp_path, *([[call(0)]] * 5))
    with pytest.raises(DescriptionError, match="of 5 ranks, but the cluster has 4 devices"):
        replayed(read_chakra(prefix, priced=True), sim.load("gpt2-xl-1f1b").cluster)


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ([[message(0, SEND)], [message(0, RECV, size=99)]],
         "message of 99 bytes meets a message of 100 bytes on rank 0; a peer would hang"),
        ([[call(0)], [call(0, kind=7)]], "a reduce_scatter of 100 bytes meets a all_reduce"),
        ([[message(0, SEND)], []], "message 0 1 7, call 0: rank 1 has no node of it, but rank 0"),
        ([[call(0)], [work(0)]], "call 0: rank 1 has no node of it, but rank 0 has"),
        ([[message(0, SEND, target=5)]], r"comm_src and comm_dst \[0, 5\] are not two of"),
        ([[call(0, kind=12)]], "comm_type 12 is none of 0 to 9"),
        ([[call(0, size=-4)]], "comm_size -4 is no number of bytes"),
        ([[call(0, us=0)]], "communication states no duration; give --cluster"),
        ([[Node(0, "save", STORE)]], "a memory store node is not modelled"),
        ([[work(0, (1,)), work(1, (0,))]], "2 nodes wait for each other in a cycle"),
        ([[work(0), work(0)]], "has two nodes with id 0"),
    ],
)  # fmt: skip
def test_traces_that_do_not_fit_are_refused_with_the_node(tmp_path, ranks, reason):
    with pytest.raises(DescriptionError, match=reason):
        read_chakra(written(tmp_path, *ranks))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "states schema '', not '0.0.4'"),
        (framed(text(1, b"0.0.1")), "states schema '0.0.1'"),
        (b"\x1f\x8b\x08\x00", "cut short"),
        (framed(text(1, b"0.0.4")) + b"\x20abc", "ends within a message"),
        (b'{"traceEvents": []}', "cut short or no Chakra execution trace"),
    ],
)
def test_what_is_no_trace_is_refused_in_a_sentence(tmp_path, data, reason):
    (tmp_path / "t.0.et").write_bytes(data)
    with pytest.raises(DescriptionError, match=reason):
        read_chakra(tmp_path / "t")


def test_a_missing_rank_is_refused(tmp_path):
    prefix = written(tmp_path, [work(0)], [work(0)], [work(0)])
    (tmp_path / "t.1.et").unlink()
    with pytest.raises(DescriptionError, match="traces of 2 ranks up to 2, but none of 1"):
        read_chakra(prefix)
    with pytest.raises(DescriptionError, match="there is no file"):
        read_chakra(tmp_path / "x")


def test_what_chakra_has_no_node_for_is_refused(tmp_path):
    program, _ = make_program([Op(r, 5, "cp", joint="x", name="shift") for r in range(2)])
    with pytest.raises(DescriptionError, match="Chakra has no node for shift; it has all_reduce"):
        write_chakra(program, np.full(2, MICRO), tmp_path / "t")
    assert not list(tmp_path.iterdir())


def test_traces_of_a_run_with_more_ranks_are_not_mixed_with_new_ones(tmp_path):
    written(tmp_path, [work(0)], [work(0)])
    program, _ = make_program([Op(0, 1)])
    with pytest.raises(DescriptionError, match="of a run with more ranks than these 1"):
        write_chakra(program, np.array([MICRO]), tmp_path / "t")


def test_an_export_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")
        yield

    monkeypatch.setattr("simulator.exchange.chakra.written.encode_file", full)
    program, _ = make_program([Op(0, 1)])
    with pytest.raises(DescriptionError, match=r"cannot write .*: No space left on device"):
        write_chakra(program, np.array([MICRO]), tmp_path / "t")
    assert not list(tmp_path.iterdir())


def trainsim(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "simulator", *arguments],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_command_line_writes_and_reads(tmp_path):
    done = trainsim(tmp_path, "export", "chakra", "gpt2-xl-1f1b", "x", "--set", "run.num_steps=1")
    assert done.returncode == 0, done.stderr
    assert "4 traces of 3,590 nodes as x.RANK.et, groups in x.comm_groups.json" in done.stdout
    done = trainsim(tmp_path, "import", "chakra", "x", "--json", "-")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step_times_s"] == pytest.approx([1.4346], rel=1e-3)


def test_a_missing_prefix_ends_with_a_sentence(tmp_path):
    done = trainsim(tmp_path, "import", "chakra", "x")
    assert done.returncode == 2
    assert done.stderr == "trainsim: there is no file 'x', and none x.RANK.et\n"


def test_labels_of_nodes_of_others_are_guessed_and_that_is_said(tmp_path):
    nodes = [
        Node(0, "aten::mm", COMPUTE, (), 1, {"is_cpu_op": False}),
        Node(1, "MmBackward0", COMPUTE, (0,), 1, {"is_cpu_op": False}),
        Node(2, "Adam step", COMPUTE, (1,), 1, {"is_cpu_op": False}),
        Node(3, "python", COMPUTE, (2,), 1, {}),
    ]
    traces = read_chakra(written(tmp_path, nodes))
    p = traces.program
    assert [p.label(i).split(" ")[0] for i in range(4)] == ["F", "B", "OPT", "F"]
    assert p.streams == ("compute", "cpu")
    assert (p.stage == NONE).all()
    assert "actions are guessed from the names of nodes, axes of groups are dp" in traces.notes
