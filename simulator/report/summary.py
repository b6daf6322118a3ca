"""The numbers of the report, with the convention of each stated beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from simulator.describe.network import Network
from simulator.describe.plan import Plan
from simulator.describe.scenario import Scenario
from simulator.hardware.compute import BOUNDS, work_seconds
from simulator.hardware.host import host_share
from simulator.hardware.outside import Float64, by_rank, capacity, nccl_bytes
from simulator.hardware.placement import spans
from simulator.lower.places import is_summed, layout
from simulator.lower.sharding import is_gathering
from simulator.lower.trainable import model_flops_per_token, recomputed_flops_per_token
from simulator.program import Int64, Program, Work
from simulator.report.beside import beside_communication
from simulator.report.between import BetweenUse, between_assumptions, evaluation_use, log_use
from simulator.report.breakdown import BUBBLE, COMMUNICATION, Breakdown
from simulator.report.context import context_assumptions
from simulator.report.data import DataUse, data_assumptions, data_use
from simulator.report.devices import device_assumptions
from simulator.report.experts import expert_assumptions
from simulator.report.host import host_assumptions, host_memory
from simulator.report.offload import offload_assumptions
from simulator.report.reserve import reserve_assumption
from simulator.report.samples import model_assumptions
from simulator.report.save import SaveUse, save_assumptions, save_use
from simulator.report.schedule import schedule_assumptions
from simulator.report.sharding import sharding_assumptions
from simulator.report.training import training_assumptions
from simulator.units import format_bytes, format_rate

if TYPE_CHECKING:
    from simulator.report.result import Result

OWNERS = {
    "compute": "compute",
    "memory": "memory bandwidth",
    "launch": "kernel launch",
    "tp": "tensor-parallel communication",
    "pp": "pipeline communication",
    "dp": "data-parallel communication",
    "cp": "context-parallel communication",
    "ep": "expert-parallel communication",
    "tied": "tied-embedding communication",
    "offload": "copies to and from the host, updates there",
    "data": "data loading",
    "save": "checkpoint",
    "log": "logging",
    "bubble": "pipeline bubble",
}
"""What a part of the step is owned by, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a person wants to know first. Shares are of the step, averaged over ranks."""

    step_time_s: float
    first_step_s: float
    tokens_per_s: float
    """Of an image its patches and class token count, or one for the whole of it."""
    samples_per_s: float
    mfu: float
    """Model FLOPs (`model_flops_per_token`) over step time x the peak rates of all ranks."""
    hfu: float
    """As `mfu`, with the forward FLOPs that recomputation repeats."""
    bubble_fraction: float
    bubble_ratio: float
    """Bubble over work, Megatron's definition."""
    exposed_communication_s: dict[str, float]
    """Mean over ranks, by kind."""
    slowed_by_communication_s: float
    """By how much longer work takes because of flows beside it, mean over ranks; part of what
    `shares` gives to work."""
    peak_memory_bytes: float
    """Allocated on the fullest rank, with the least room (torch.cuda.max_memory_allocated)."""
    reserved_memory_bytes: float
    """Reserved by the allocator there (torch.cuda.max_memory_reserved), were there room for it."""
    device_memory_bytes: float
    """What its device must have: `run.allocator_reserve` x allocated, context, NCCL's buffers."""
    peak_memory_rank: int
    memory_capacity_bytes: float
    host_memory_bytes: float
    """On the host of the fullest node; 0 where nothing is known of what lies there."""
    host_capacity_bytes: float
    """Of the memory of the hosts in use in a node; 0 where nothing is known of it."""
    shares: dict[str, float]
    """Share of the step by owner, a key of `OWNERS`; they sum to 1."""
    bottleneck: str
    data: DataUse | None
    """What the data path does; None where none is described."""
    checkpoint: SaveUse | None
    """What a checkpoint costs; None where none is described."""
    evaluation: BetweenUse | None
    """What an evaluation costs, likewise."""
    logging: BetweenUse | None
    """What a log costs, likewise."""

    @property
    def fits(self) -> bool:
        """Whether the fullest rank stays within its device's memory, and so does the host."""
        return self.fits_device and self.fits_host

    @property
    def fits_device(self) -> bool:
        """Whether the fullest rank stays within its device's memory."""
        return self.device_memory_bytes <= self.memory_capacity_bytes

    @property
    def fits_host(self) -> bool:
        """Whether what lies on hosts stays within their memory."""
        return self.host_memory_bytes <= self.host_capacity_bytes


def summarise(result: Result) -> Summary:
    """Return the summary of a scenario's result."""
    s = result.scenario
    if s is None:
        raise ValueError("a bare schedule has no summary: it has no model and no cluster")
    b, peak = result.breakdown, result.peak_memory_bytes
    seconds = result.step_time_s
    summed_peak = s.cluster.peak(s.precision.fastest)
    flops = model_flops_per_token(s)
    again = recomputed_flops_per_token(s)
    tokens = s.tokens_per_step / seconds
    shares = _shares(result, s)
    room = capacity(s)
    fullest = int(np.argmin(room - result.device_memory_bytes))
    needed = float(result.device_memory_bytes[fullest])
    node, devices = s.cluster.node, s.cluster.ranks_per_node
    unknown = node.host is None or s.cluster.is_mixed
    data, saved = data_use(result, s), save_use(result, s)
    return Summary(
        step_time_s=seconds,
        first_step_s=result.first_step_s,
        tokens_per_s=tokens,
        samples_per_s=s.run.global_batch_size / seconds,
        mfu=flops * tokens / summed_peak,
        hfu=(flops + again) * tokens / summed_peak,
        bubble_fraction=float(b.bubble_fraction.mean()),
        bubble_ratio=float(b.bubble.sum() / max(1, b.of("forward", "backward", "optimizer").sum())),
        exposed_communication_s={kind: shares[kind] * seconds for kind in COMMUNICATION},
        slowed_by_communication_s=result.slowed_by_communication_s,
        peak_memory_bytes=float(peak[fullest]),
        reserved_memory_bytes=float(result.reserved_memory_bytes[fullest]),
        device_memory_bytes=needed,
        peak_memory_rank=fullest,
        memory_capacity_bytes=float(room[fullest]),
        host_memory_bytes=sum(host_memory(result, s).values()),
        host_capacity_bytes=0.0 if unknown else host_share(node, devices).memory,
        shares=shares,
        bottleneck=_bottleneck(
            shares, needed, float(room[fullest]), data, saved.blocked_s / seconds if saved else 0.0
        ),
        data=data,
        checkpoint=saved,
        evaluation=evaluation_use(result, s),
        logging=log_use(result, s),
    )


def _shares(result: Result, s: Scenario) -> dict[str, float]:
    b = result.breakdown
    total = max(1, int(b.window.sum()))
    work = _work_by_bound(result.tiled, b, s)
    shares = {bound: ticks / total for bound, ticks in zip(BOUNDS, work, strict=True)}
    shares |= {kind: float(b.of(kind).sum()) / total for kind in COMMUNICATION}
    return shares | {"bubble": float(b.of(*BUBBLE).sum()) / total}


def _work_by_bound(program: Program, b: Breakdown, s: Scenario) -> list[float]:
    """Return the ticks of work of all ranks by what bounds it, as `BOUNDS`.

    Where tiles put a rank on nodes of several kinds, its work counts as the mean over them.
    """
    kinds = s.cluster.kinds
    parts = np.zeros((len(program.costs), len(kinds), len(BOUNDS)))
    for number, cost in enumerate(program.costs):
        if isinstance(cost, Work):
            for kind, node in enumerate(kinds):
                seconds = work_seconds(cost, node, s.cluster.ranks_per_node)
                parts[number, kind] = [seconds[bound] for bound in BOUNDS]
    totals = np.zeros(len(BOUNDS))
    for rows, weights in _shares_of_kinds(program, s):
        busy = np.bincount(program.cost[rows], weights=b.busy[rows], minlength=len(program.costs))
        mean = np.tensordot(parts, weights, (1, 0))
        totals += busy @ (mean / np.maximum(mean.sum(axis=1, keepdims=True), 1e-30))
    shares: list[float] = totals.tolist()
    return shares


def _shares_of_kinds(program: Program, s: Scenario) -> Iterator[tuple[Int64 | slice, Float64]]:
    """Yield rows of a program that run on each kind of node on the same share of tiles, with it."""
    if not s.cluster.is_mixed:
        yield slice(None), np.ones(1)
        return
    each = np.eye(len(s.cluster.kinds)).tolist()
    on = [by_rank(s, is_it)[program.tile_ranks].mean(axis=1) for is_it in each]
    distinct, number = np.unique(np.stack(on, axis=1), axis=0, return_inverse=True)
    for at, shares in enumerate(distinct):
        yield np.flatnonzero((number.reshape(-1) == at)[program.rank]), shares


def _bottleneck(
    shares: dict[str, float], peak: float, capacity: float, data: DataUse | None, saved: float
) -> str:
    if peak > capacity:
        return (
            f"memory capacity: {format_bytes(peak)} needed, {format_bytes(capacity)} there, "
            f"{format_bytes(peak - capacity)} too much"
        )
    if data is not None and data.binds:
        rate = format_rate(data.samples_per_s[data.slowest], "samples")
        return f"data ({data.slowest}: {rate}): {data.waiting_share:.1%} of the step"
    if saved > 0.5:  # ranks that wait for others that save call it bubble
        return f"{OWNERS['save']}: {saved:.1%} of the step"
    owner = max(shares, key=lambda name: shares[name])
    return f"{OWNERS[owner]}: {shares[owner]:.1%} of the step"


NETWORK = {
    "alpha-beta": "every rank has its even share of its node's adapters, and no flow meets another",
    "fluid": "flows that meet on a link share it fairly (max-min), at once and without loss",
}
"""What each network model assumes."""


P2P = {
    True: "sends and receives overlap computation; receives are posted ahead",
    False: "a stage waits for its sends and receives before it computes again",
}
"""What is assumed of messages between stages that overlap computation, and that do not."""

CUT = {
    "parameters": "fewest parameters",
    "time": "least time of forward and backward, found by running each block without contention",
}
"""What is least of the largest stage, by how a plan cuts stages."""

TP_OVERLAP = {
    "none": "tensor-parallel collectives do not overlap computation",
    "grads": "tensor-parallel collectives of backward run beside the products that do not need "
    "them; forward's do not overlap computation",
    "all": "tensor-parallel collectives of layers run beside the products that they feed or "
    "follow, in pieces of no size; those of the head in backward only, the embedding's never",
}
"""What each way to run tensor-parallel collectives assumes."""

STALE = (
    "gradients are of parameters that other ranks have changed since, which can cost steps to "
    "converge: steps are counted as if all were worth the same. A step's time is the harmonic mean "
    "of the replicas' own, each in its last step while all were still at work"
)
"""What an asynchronous run assumes."""


def _pull(s: Scenario) -> str:
    """Return what a pull from the parameter servers waits for."""
    staleness, steps = s.plan.staleness, s.run.num_steps
    if staleness is None:
        return "a bucket's pull waits for all its pushes"
    waits = (
        f"a rank's pull waits only where it is more than {staleness} step(s) ahead of the slowest"
    )
    if staleness >= steps:
        waits += f", which in {steps} step(s) it never is"
    if s.run.network == "alpha-beta":
        waits += "; its push and its pull take what they take when all ranks make theirs at once"
    return waits


def assumptions(s: Scenario) -> list[str]:
    """Return what was assumed that moves the answer and that the scenario does not say."""
    plan = s.plan
    out = [
        *device_assumptions(s),
        *model_assumptions(s),
        *_memory_assumptions(s),
        *training_assumptions(s),
        *offload_assumptions(s),
        *data_assumptions(s),
        *save_assumptions(s),
        *host_assumptions(s),
        *between_assumptions(s),
    ]
    out += _low_precision(s) + _saved_operators(s)
    if s.cluster.world_size > 1:
        out.append(
            "collectives run as NCCL's cost model chooses, or as the cluster forces; "
            + NETWORK[s.run.network]
        )
        if any(not span.even for span in spans(s) if span.axis != "pp"):
            out.append(
                "groups with more ranks on one node than on another take the time of groups with "
                "the fewest on each; where flows share links, each of their ranks counts as a node"
            )
        out += [
            "a collective alone uses all links of each device, whatever the layout "
            f"({node.layout}) of the node"
            for node in s.cluster.kinds
            if node.layout != "switch"
        ]
        if s.cluster.is_mixed:
            out.append(
                "what unlike nodes send each other takes as long as if all were of the kind that "
                "takes longest"
            )
        if s.run.network == "alpha-beta" and s.cluster.network != Network():
            out.append(
                f"links between nodes ({s.cluster.network.layout}) never hold a flow back; "
                'run.network = "fluid" routes flows over them'
            )
    if plan.pp > 1:
        out.append(P2P[plan.p2p_overlap])
        if plan.p2p_protocol == "eager":
            out.append("a message moves once it is sent, into a buffer that memory does not count")
    if plan.stage_cut != "uniform":
        out.append(
            f"stages of {', '.join(map(str, s.layers_per_stage))} layers: the cut whose largest "
            f"stage has the {CUT[plan.stage_cut]}, embedding and head counted"
        )
    out += schedule_assumptions(s)
    if plan.pp > 1 or plan.replicas > 1 or plan.tp_overlap != "none":
        out += beside_communication(s)
    if plan.tp > 1:
        beside = ", but for the other action of a pair" * layout(s).pairs
        out.append(TP_OVERLAP[plan.tp_overlap] + beside * (plan.tp_overlap == "none"))
    out += context_assumptions(s) + expert_assumptions(s)
    if is_summed(s):
        how = "all-reduced"
        if plan.num_servers:
            how = "pushed to parameter servers, and as many bytes of parameters pulled,"
            out.append(
                f"{plan.num_servers} parameter server(s) lie on the first ranks of each dp group "
                f"and share their links; {_pull(s)}; the servers' sums take no time and no memory, "
                "and every rank runs the optimizer in full"
            )
            if plan.staleness is not None:
                out.append(STALE)
        if plan.shards > 1:
            out += sharding_assumptions(plan, s.precision.gradient)
        else:
            out.append(f"gradients are {how} in {s.precision.gradient}-byte numbers {_when(plan)}")
    return out


def _when(plan: Plan) -> str:
    """Return when gradients are reduced."""
    if not plan.grad_overlap:
        return "in one piece a stage, after the last backward of the rank"
    sizes = ", then ".join(map(format_bytes, plan.buckets))
    chunk = " of each chunk" * (plan.chunks > 1)
    return f"during the last backward{chunk}, in buckets of at least {sizes}"


def _low_precision(s: Scenario) -> list[str]:
    """Return what is assumed of products in fp8."""
    if s.precision.linear != "fp8":
        return []
    when = "after each gather" if is_gathering(s) else "once a step, and kept beside the bf16 ones"
    moves = s.run.fp8_weights and (is_gathering(s) or s.run.fp8_scaling != "mxfp8")
    when = "once a step, and kept alone" if s.run.fp8_weights else when
    gathers = "" if moves else "gathers of weights and "
    shared = "for each 32 elements" if s.run.fp8_scaling == "mxfp8" else "a tensor"
    return [
        f"linear products of layers run in fp8 with one scale {shared}; attention and head in "
        f"bf16, and so do {gathers}sums of gradients; MFU is counted by the fp8 peak",
        f"inputs and gradients of outputs are cast by kernels of their own, weights {when}; cast "
        "inputs are kept for backward; norm and activation write bf16 that the cast reads",
    ]


def _saved_operators(s: Scenario) -> list[str]:
    """Return what is assumed of layers that recompute operator by operator."""
    if s.plan.recompute == "light":
        return ["all that a layer has not kept comes alive as its backward begins"]
    if s.plan.recompute != "selective-op":
        return []
    return [
        "of wq, wk, wv, wo, w1, w3, w2 every second one runs again in backward, though wq, wk, wv "
        "and w1, w3 are one product each forward; all that a layer has not saved comes alive as "
        "its backward begins"
    ]


def _memory_assumptions(s: Scenario) -> list[str]:
    """Return what was assumed of memory that the plan does not say."""
    products = {
        "torch": "linear layers hold nothing of their own",
        "megatron": "linear layers make an empty gradient in each backward",
        "transformer_engine": "linear layers keep an empty gradient for each shape of weight",
    }[s.run.linear_layers]
    place = "in place, in fp32" if s.run.loss_in_place else "on copies of the logits, in fp32"
    if s.run.fused_loss:
        place = "beside the logits, in fp32"
    if s.run.compiled_loss:
        place = "on the logits as they are"
    return [
        "memory counts a tensor from the kernel that makes it to the last one that uses it, and "
        f"cuBLAS workspaces; {products}; the loss works {place}; the optimizer and "
        "the copies of collectives take none",
        f"{reserve_assumption(s)}; "
        + " and ".join(
            f"on {'the device' if not s.cluster.is_mixed else node.device.name} the driver's "
            f"context takes {format_bytes(node.device.context)} and NCCL "
            f"{format_bytes(nccl_bytes(s, kind))}"
            for kind, node in enumerate(s.cluster.kinds)
        )
        + ": a buffer of each protocol for each channel and peer",
    ]
