"""Import of `nvidia-smi topo -m`: layouts recognised, broken texts refused."""

import pytest
from conftest import NODE

from simulator.describe.cluster import Cluster
from simulator.errors import DescriptionError
from simulator.exchange.topo import parse_topo
from simulator.hardware.fabric import build

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_3
"""


def matrix(names, rows, columns="\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"):
    """Lay out rows of cells as the tool does: tabs, an underlined and indented header."""
    lines = ["\t\x1b[4m" + "\t".join(names) + columns + "\x1b[0m"]
    lines += [f"{name}\t" + "\t".join(row) for name, row in zip(names, rows, strict=True)]
    return "\n".join(lines) + "\n" + LEGEND


GPUS8 = [f"GPU{i}" for i in range(8)]
# NVLinks of a DGX-1 V100; SYS elsewhere
DGX1 = matrix(GPUS8, [
    ["X", "NV1", "NV1", "NV2", "NV2", "SYS", "SYS", "SYS", "0-19"],
    ["NV1", "X", "NV2", "NV1", "SYS", "NV2", "SYS", "SYS", "0-19"],
    ["NV1", "NV2", "X", "NV2", "SYS", "SYS", "NV1", "SYS", "0-19"],
    ["NV2", "NV1", "NV2", "X", "SYS", "SYS", "SYS", "NV1", "0-19"],
    ["NV2", "SYS", "SYS", "SYS", "X", "NV1", "NV1", "NV2", "20-39"],
    ["SYS", "NV2", "SYS", "SYS", "NV1", "X", "NV2", "NV1", "20-39"],
    ["SYS", "SYS", "NV1", "SYS", "NV1", "NV2", "X", "NV2", "20-39"],
    ["SYS", "SYS", "SYS", "NV1", "NV2", "NV1", "NV2", "X", "20-39"],
])  # fmt: skip
HGX = matrix(["GPU0", "GPU1", "GPU2", "NIC0", "NIC1"], [
    ["X", "NV18", "NV18", "SYS", "PXB", "0-55", "0", "N/A"],
    ["NV18", "X", "NV18", "PIX", "SYS", "0-55", "0", "N/A"],
    ["NV18", "NV18", "X", "SYS", "NODE", "56-111", "1", "N/A"],
    ["SYS", "PIX", "SYS", "X", "SYS"],
    ["PXB", "SYS", "NODE", "SYS", "X"],
])  # fmt: skip
PCIE = matrix(["GPU0", "GPU1", "GPU2", "GPU3", "mlx5_0"], [
    ["X", "PIX", "NODE", "SYS", "PIX", "0-31"],
    ["PIX", "X", "NODE", "SYS", "PIX", "0-31"],
    ["NODE", "NODE", "X", "SYS", "NODE", "0-31"],
    ["SYS", "SYS", "SYS", "X", "SYS", "32-63"],
    ["PIX", "PIX", "NODE", "SYS", "X"],
], columns="\tCPU Affinity")  # fmt: skip


def fabric_of(text, **rates):
    return build(Cluster(node=parse_topo(text).node(NODE, **rates)))


def test_equal_nvlinks_between_all_devices_are_a_switch():
    found = parse_topo(HGX)
    assert (found.layout, found.num_devices, found.nvlinks) == ("switch", 3, 18)
    assert found.edges == ()
    node = found.node(NODE, nvlink=25e9)
    assert node.link.bandwidth == node.link.pair_bandwidth == 450e9
    assert node.nic.count == 2


def test_adapters_come_in_the_order_of_their_nearest_devices_with_their_names():
    assert parse_topo(HGX).adapters == ("mlx5_3", "mlx5_0")


def test_a_dgx_1_has_the_links_of_the_hybrid_cube_mesh():
    found = parse_topo(DGX1)
    assert (found.layout, found.num_devices, found.nvlinks) == ("graph", 8, 6)
    fabric, mesh = fabric_of(DGX1, nvlink=25e9), build(
        Cluster(node=NODE.__class__(
            name="dgx-1", device=NODE.device, num_devices=8, layout="hybrid-cube-mesh",
            link=parse_topo(DGX1).node(NODE, nvlink=25e9).link, nic=NODE.nic,
        ))
    )  # fmt: skip
    for a in range(8):
        for b in range(8):
            assert len(fabric.route(a, b).links) == len(mesh.route(a, b).links)
            if len(mesh.route(a, b).links) == 1:
                both = (fabric.capacity[fabric.route(a, b).links],
                        mesh.capacity[mesh.route(a, b).links])  # fmt: skip
                assert both[0] == both[1]


def test_pcie_relations_become_switches_and_sockets():
    fabric = fabric_of(PCIE, nvlink=25e9, pcie=30e9, socket=10e9)

    def way(a, b):
        return [fabric.names[i].split(">")[1].removeprefix("node0/")
                for i in fabric.route(a, b).links]  # fmt: skip

    assert way(0, 1) == ["pcie0", "gpu1"]
    assert way(0, 2) == ["pcie0", "cpu0", "pcie1", "gpu2"]
    assert way(0, 3) == ["pcie0", "cpu0", "cpu1", "pcie2", "gpu3"]
    assert fabric.capacity[fabric.route(0, 3).links].tolist() == [30e9, 30e9, 10e9, 30e9, 30e9]
    assert "node0/pcie0>node0/nic0" in fabric.names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no header"),
        (HGX.replace("PXB", "QPI"), r"row GPU0, column NIC1: unknown cell 'QPI'"),
        (DGX1[: DGX1.index("GPU6\tSYS")], "row GPU6 is missing; the text is cut off"),
        (DGX1[: DGX1.index("GPU7\tSYS") + 12], "row GPU7 has 2 of 8 cells; it is cut off"),
        (PCIE.replace("GPU1\tPIX", "GPU1\tPXB"), "GPU0 to GPU1 is PIX, but back is PXB"),
        (DGX1.replace("GPU0\tX", "GPU0\tNV1"), "row GPU0, column GPU0: 'NV1' is out of place"),
    ],
)
def test_a_broken_text_is_refused_with_its_place(text, message):
    with pytest.raises(DescriptionError, match=message):
        parse_topo(text)


def test_every_problem_of_a_text_is_named_at_once():
    text = DGX1[: DGX1.index("GPU5\tSYS")]
    with pytest.raises(DescriptionError) as error:
        parse_topo(text)
    assert len(error.value.problems) == 3
