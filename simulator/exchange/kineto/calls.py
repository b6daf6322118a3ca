"""Collectives and messages of a rank: what each one is, in which group, on which axis."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from simulator.errors import DescriptionError
from simulator.exchange.kineto.files import Group, whole_numbers

IS_COMMUNICATION = re.compile(r"nccl|rccl|^gloo:", re.IGNORECASE)
"""Names of kernels and ranges that communicate."""

OPERATIONS = {
    "allreduce": "all_reduce", "allreducecoalesced": "all_reduce", "reduce": "reduce",
    "allgather": "all_gather", "allgatherbase": "all_gather", "allgathersingle": "all_gather",
    "allgatherintotensorcoalesced": "all_gather", "allgathercoalesced": "all_gather",
    "reducescatter": "reduce_scatter", "reducescatterbase": "reduce_scatter",
    "reducescattersingle": "reduce_scatter", "reducescattertensorcoalesced": "reduce_scatter",
    "alltoall": "all_to_all", "alltoallv": "all_to_all", "alltoallbase": "all_to_all",
    "alltoallsingle": "all_to_all", "broadcast": "broadcast", "broadcastoop": "broadcast",
    "barrier": "barrier", "gather": "gather", "scatter": "scatter",
    "send": "send", "recv": "recv", "recvanysource": "recv", "sendrecv": "send_recv",
}  # fmt: skip
"""Operations by their name in traces, without case and without what is no letter."""

ENDS_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives that no rank leaves before all have entered."""

BYTES = {
    "float": 4, "float32": 4, "double": 8, "float64": 8, "half": 2, "float16": 2, "bfloat16": 2,
    "int": 4, "int32": 4, "long": 8, "int64": 8, "short": 2, "int16": 2, "byte": 1, "uint8": 1,
    "char": 1, "int8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
"""Bytes of a number by the name of its type, in lower case."""

AXES = (
    ("tp", r"\btp\b|tensor"), ("pp", r"\bpp\b|pipeline"), ("cp", r"\bcp\b|context"),
    ("ep", r"\be[tp]p?\b|expert"), ("tied", r"embedding"),
    ("dp", r"\bdp\b|\bfsdp\b|\bhsdp\b|data|shard|replicate|default"),
)  # fmt: skip
"""Axis of a group by the words of its description (torch's mesh names, Megatron's constants)."""

AXIS_NAMES = tuple(axis for axis, _ in AXES)

_KERNEL = re.compile(r"(?:nccl\w*?Kernel_|nccl:_?|gloo:)([A-Za-z_]+?)(?:_[A-Z]|_[a-z]\d|\(|$)")


class Call(NamedTuple):
    """One call of a rank."""

    operation: str
    """As torch.distributed spells it; `send` or `recv` for one side of a message."""
    group: str
    """Name of the process group; empty where nothing says."""
    ranks: tuple[int, ...]
    """Of the group, as far as they are known."""
    axis: str
    bytes: float
    """The full buffer of a rank; 0 where nothing says."""
    peer: int | None = None
    """Rank at the other end of a message."""
    number: int | None = None
    """Of the call within its group, where the trace counts them."""


def call_of(
    name: str, args: Mapping[str, Any], groups: Mapping[str, Group], axes: Mapping[str, str]
) -> Call:
    """Return what a kernel or a range that communicates is.

    Args:
        name: of the kernel or range.
        args: its arguments, with those of the operator that launched it.
        groups: process groups of the trace by name.
        axes: axes of groups by name that the user states.
    """
    group = str(args.get("Process Group Name", ""))
    if not group and len(groups) == 1:
        group = next(iter(groups))
    listed = groups.get(group, Group("", ()))
    description = str(args.get("Process Group Description", "")) or listed.description
    ranks = whole_numbers(args.get("Process Group Ranks")) or listed.ranks
    operation = operation_of(str(args.get("Collective name") or _from_name(name)))
    sides = {"send": "Dst Rank", "recv": "Src Rank"}
    peer = args.get(sides.get(operation, ""))
    message = operation in (*sides, "send_recv")
    number = args.get("Seq")
    return Call(
        operation, group, ranks,
        axes.get(group) or ("pp" if message else axis_of(description)), _bytes(args),
        peer if type(peer) is int else None,
        number if type(number) is int and not message else None,
    )  # fmt: skip


def operation_of(name: str) -> str:
    """Return an operation in torch.distributed's spelling; an unknown one stays as it is."""
    return OPERATIONS.get(re.sub(r"[^a-z]", "", name.lower()), name)


def axis_of(description: str) -> str:
    """Return the mesh axis that a group's description names; dp where it names none."""
    words = re.sub(r"[_\W]+", " ", description.lower())
    return next((axis for axis, pattern in AXES if re.search(pattern, words)), "dp")


def check_axes(axes: Mapping[str, str]) -> None:
    """Check the axes that a user states.

    Raises:
        DescriptionError: when one is no axis.
    """
    wrong = [f"{group}={axis}" for group, axis in axes.items() if axis not in AXIS_NAMES]
    if wrong:
        raise DescriptionError(f"group {wrong[0]}: the axes are {', '.join(AXIS_NAMES)}")


def _from_name(name: str) -> str:
    found = _KERNEL.search(name)
    return found[1] if found else "collective"


def _bytes(args: Mapping[str, Any]) -> float:
    each = BYTES.get(str(args.get("dtype", "")).lower(), 0)
    counts = (args.get("In msg nelems"), args.get("Out msg nelems"))
    return float(max((c for c in counts if type(c) is int), default=0) * each)
