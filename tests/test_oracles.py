"""Traces beside other programs that read or write them; skipped where these are not installed."""

import random
import warnings

import pytest
from kineto_traces import Rank, saved

from simulator.exchange.chakra.nodes import Node, decode_file, encode_file
from simulator.exchange.kineto import read_kineto
from simulator.report.measured import overlap, result_of

NODES = [
    Node(0, "a", 4, (), 12, {"is_cpu_op": False, "num_ops": 2**40, "tensor_size": 2**33}),
    Node(1, "b", 7, (0,), 0, {"is_cpu_op": False, "comm_type": 2, "comm_size": 10, "pg_name": "3"}),
    Node(300, "send", 5, (0, 1), 2**40, {"is_cpu_op": False, "comm_tag": -1}),
]


def chakra():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schema = pytest.importorskip("chakra.schema.protobuf.et_def_pb2", reason="no mlc-chakra")
        from chakra.src.third_party.utils import protolib
    return schema, protolib


def test_mlc_chakra_reads_what_is_written(tmp_path):
    schema, protolib = chakra()
    path = tmp_path / "t.0.et"
    path.write_bytes(b"".join(encode_file(NODES)))
    head, found = schema.GlobalMetadata(), []
    with protolib.openFileRd(str(path)) as file:
        assert protolib.decodeMessage(file, head)
        node = schema.Node()
        while protolib.decodeMessage(file, node):
            attrs = {a.name: getattr(a, a.WhichOneof("value")) for a in node.attr}
            kinds = {a.name: a.WhichOneof("value") for a in node.attr}
            found.append(Node(node.id, node.name, node.type, tuple(node.data_deps),
                              node.duration_micros, attrs))  # fmt: skip
            assert kinds.get("comm_size", "int64_val") == "int64_val"
            assert kinds.get("is_cpu_op") == "bool_val"
            node = schema.Node()
    assert head.version == "0.0.4"
    assert found == NODES


def test_what_mlc_chakra_writes_is_read(tmp_path):
    schema, protolib = chakra()
    path = tmp_path / "t.0.et"
    with path.open("wb") as file:
        protolib.encodeMessage(file, schema.GlobalMetadata(version="0.0.4"))
        for one in NODES:
            node = schema.Node(id=one.id, name=one.name, type=one.type,
                               data_deps=one.deps[:1], ctrl_deps=one.deps[1:],
                               duration_micros=one.duration_us, start_time_micros=5)  # fmt: skip
            node.inputs.values = "[1]"
            for name, value in one.attrs.items():
                kind = {bool: "bool_val", int: "int64_val", str: "string_val"}[type(value)]
                node.attr.append(schema.AttributeProto(name=name, **{kind: value}))
            node.attr.append(schema.AttributeProto(name="involved_dim",
                             bool_list=schema.BoolList(values=[True])))  # fmt: skip
            protolib.encodeMessage(file, node)
    read = decode_file(path.read_bytes())
    assert [set(n.deps) for n in read] == [set(n.deps) for n in NODES]
    for ours, one in zip(read, NODES, strict=True):
        assert (ours.id, ours.name, ours.type, ours.duration_us) == (
            one.id, one.name, one.type, one.duration_us,
        )  # fmt: skip
        assert ours.attrs == one.attrs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [1, 2])
def test_overlap_and_computing_are_those_of_holistic_trace_analysis(tmp_path, seed):
    analysis = pytest.importorskip("hta.trace_analysis", reason="no HolisticTraceAnalysis")
    draw = random.Random(seed)
    ranks = [Rank(r, 2) for r in range(2)]
    for rank in ranks:
        rank.range("ProfilerStep#1", 0, 4000)
        at = 10
        for k in range(20):
            length = draw.randint(20, 100)
            rank.operator("aten::mm", at - 3, 2)
            rank.kernel("gemm", at, length, launch=at - 2)
            at += length + draw.choice([0, 0, 15])
            if k % 4 == 3:
                begin = at - draw.randint(10, 60)
                rank.operator("nccl:all_reduce", begin - 3, 2)
                rank.collective("allreduce", begin, draw.randint(30, 160), launch=begin - 2)
    for event in (e for rank in ranks for e in rank.events if e["cat"] == "cpu_op"):
        event["args"]["External id"] = 1
    measured = read_kineto(saved(tmp_path, *ranks))
    result = result_of(measured)
    over = overlap(result, measured)
    theirs = analysis.TraceAnalysis(trace_dir=str(tmp_path))
    percent = theirs.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"]
    assert (100 * over.hidden / over.communication).tolist() == pytest.approx(
        percent.tolist(), abs=0.01
    )
    busy = theirs.get_temporal_breakdown(visualize=False)["compute_time(us)"]
    ours = result.breakdown.of("forward", "backward", "optimizer") / 10**6
    assert ours.tolist() == busy.tolist()
