"""The two verbs: replay a job and compare, calibrate and keep the table."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from simulator.errors import DescriptionError, TrainsimError
from simulator.files import write_whole
from simulator.pool import cores
from simulator.validate.torch.compare import TAKING_TURNS, Comparison, compare
from simulator.validate.torch.job import MESSAGES, Job
from simulator.validate.torch.launch import (
    Ranks,
    check_against_one_process,
    folder_of,
    require_torch,
)
from simulator.validate.torch.recording import Links, Op, Recording
from simulator.validate.torch.sizes import table_toml

Progress = Callable[[int], None]

SCHEMA_VERSION = 1

SAME = ("model", "layers", "tp", "microbatch_size", "sequence_length", "optimizer", "device")
"""What a calibration must have in common with a job that it prices."""


def shared_cores(job: Job) -> str | None:
    """Say why times of a job mean nothing here, if they do."""
    if job.device != "cpu" or job.world_size <= cores():
        return None
    return (
        f"{job.world_size} ranks on {cores()} cores take turns, so their times say nothing about "
        "the pipeline"
    )


def replay(
    job: Job, *, calibration: Path | None = None, timeout: float = 60.0,
    progress: Progress = lambda step: None, timeline: Path | None = None,
) -> Comparison:  # fmt: skip
    """Run a job on real ranks and compare it with predictions.

    Args:
        job: what to run.
        calibration: a table of `calibrate`; op times are measured between the steps when absent.
        timeout: seconds that all ranks may stay where they are.
        progress: is told how many steps are done.
        timeline: where to write the spans of all steps as JSON; also, marked incomplete, where the
            ranks were cut short.

    Raises:
        DescriptionError: when torch is not there, or the calibration is of something else.
        DeadlockError: when the ranks wait for each other.
        TrainsimError: when a rank has crashed.
    """
    require_torch()
    table = None if calibration is None else read_calibration(calibration, job)
    job = dataclasses.replace(job, mode="replay", calibrates=table is None)
    with folder_of(job) as folder:
        try:
            with Ranks(job, folder) as ranks:
                ranks.wait(timeout, progress)
        except (TrainsimError, KeyboardInterrupt):
            if timeline is not None:
                write_timeline(Recording.read(job, folder), timeline)
            raise
        recording = Recording.read(job, folder)
        if timeline is not None:
            write_timeline(recording, timeline)
        check_against_one_process(job, folder)
        reference = json.loads((folder / "reference.json").read_text(encoding="utf-8"))
    return compared(recording, table, reference)


def joined(
    job: Job, *, calibration: Path | None = None, timeline: Path | None = None
) -> Comparison | None:
    """Do the part of this process in a job whose ranks torchrun has started.

    Returns the comparison on rank 0, None elsewhere. torchrun watches the ranks and ends them.

    Raises:
        DescriptionError: when torchrun has started another number of ranks.
    """
    require_torch()
    table = None if calibration is None else read_calibration(calibration, job)
    job = dataclasses.replace(job, mode="replay", calibrates=table is None)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world != job.world_size:
        raise DescriptionError(
            f"torchrun has started {world} ranks, and the plan has {job.world_size}"
        )
    if job.device in TAKING_TURNS:
        raise DescriptionError(
            f"--device {job.device}: ranks that take turns are started by the command itself; "
            "leave out torchrun"
        )
    from simulator.validate.torch import worker  # imports torch

    with folder_of(job) as folder:
        texts = worker.joined(job, rank, folder)
        if rank:
            return None
        recording = Recording.of(job, texts)
        if timeline is not None:
            write_timeline(recording, timeline)
        check_against_one_process(job, folder)
        reference = json.loads((folder / "reference.json").read_text(encoding="utf-8"))
    return compared(recording, table, reference)


def compared(
    recording: Recording, table: tuple[Mapping[str, Op], Links, str] | None,
    reference: Mapping[str, Any] | None,
) -> Comparison:  # fmt: skip
    """Return a recording beside predictions from a calibration, or from its own op times."""
    own = recording.ops_of_visits
    ops, links, source = table or (
        recording.ops, recording.links,
        f"op times measured by themselves before each of {recording.job.visits} visits of "
        f"{recording.job.steps} steps, in the ranks' processes",
    )  # fmt: skip
    if table is not None:
        own = (ops,) * recording.job.visits
    return compare(recording, own, ops, links, source, reference, shared_cores(recording.job))


def calibrate(
    job: Job, *, timeout: float = 60.0, progress: Progress = lambda repetition: None
) -> tuple[dict[str, Any], str]:
    """Measure op times of a job's stages, messages and sums by size, and single kernels.

    Returns the table of a replay, and the text of one that a device may name.

    Raises:
        DescriptionError: when torch is not there, or the ranks would share cores.
        TrainsimError: when a rank has crashed or hangs.
    """
    require_torch()
    if wrong := shared_cores(job):
        raise DescriptionError(f"{wrong}; calibrate with at most {cores()} ranks")
    job = dataclasses.replace(job, mode="calibrate")
    with folder_of(job) as folder:
        with Ranks(job, folder) as ranks:
            ranks.wait(timeout, progress)
        recording = Recording.read(job, folder)
    of_device = table_toml(recording.kernels, recording.machine, job.world_size)
    return {
        "schema_version": SCHEMA_VERSION,
        "measured_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": dict(recording.machine),
        "ranks": job.world_size,
        "job": {name: _plain(getattr(job, name)) for name in SAME},
        "actions": {name: op._asdict() for name, op in recording.ops.items()},
        "gap": recording.gap,
        "copies": [dict(zip(("bytes", "seconds"), r, strict=True)) for r in recording.copies],
        "messages": [
            dict(zip(("bytes", "seconds", "send", "receive"), row, strict=True))
            for row in recording.links.messages
        ],
        **{
            name: [
                dict(zip(("bytes", "seconds"), row, strict=True))
                for row in getattr(recording.links, name)
            ]
            for name in ("sums", "peer_sums")
        },
    }, of_device


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def read_calibration(path: Path, job: Job) -> tuple[Mapping[str, Op], Links, str]:
    """Return the op times and links of a table, and in words where it comes from.

    Raises:
        DescriptionError: when it cannot be read, or is of something else than the job.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        problems = [
            f"{path}: is for {name} {table['job'][name]!r}, not {_plain(getattr(job, name))!r}"
            for name in SAME
            if table["job"][name] != _plain(getattr(job, name))
        ]
        ops = {
            name: Op(**{**op, "samples": tuple(tuple(map(float, s)) for s in op["samples"])})
            for name, op in table["actions"].items()
        }
        messages = tuple(tuple(row.values()) for row in table["messages"])
        sums = (tuple(tuple(r.values()) for r in table[name]) for name in ("sums", "peer_sums"))
        links = Links(messages, *sums)
        source = f"{path}: {table['measured_at']}, {table['machine']['device']}"
        ranks = int(table["ranks"])
    except OSError as error:
        raise DescriptionError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DescriptionError(f"{path}: is not a table of trainsim calibrate ({error})") from None
    if ranks != job.world_size:
        problems.append(f"{path}: was measured with {ranks} ranks at once, not {job.world_size}")
    if problems:
        raise DescriptionError(problems)
    needed = {f"{a.kind}{a.stage}" for row in job.actions for a in row if a.kind in "FBIW"}
    if lacking := sorted(needed - ops.keys()):
        raise DescriptionError(
            f"{path}: has no {', '.join(lacking)}; calibrate with plan.schedule of the replay"
        )
    return ops, links, source


def timeline_document(recording: Recording) -> dict[str, Any]:
    """Return all spans of a recording: by rank and step, the actions with start, end and busy."""
    return {
        "schema_version": SCHEMA_VERSION,
        "complete": recording.complete,
        "machine": dict(recording.machine),
        "clock": "nanoseconds of the host's monotonic clock; busy as machine.busy says",
        "steps": list(recording.steps),
        "ranks": [
            {
                "parts": [
                    str(action)
                    if part.kind in ("work", *MESSAGES.values())
                    else f"{action} {part.kind}"
                    for action, part in recording.job.parts(rank)
                ],
                "spans": recording.spans[rank].tolist(),
            }
            for rank in range(recording.job.world_size)
        ],
    }


def write_timeline(recording: Recording, path: Path) -> None:
    """Write the spans of a recording as JSON.

    Raises:
        DescriptionError: when the file cannot be written.
    """
    write_document(timeline_document(recording), path)


def write_document(document: Mapping[str, Any], path: Path) -> None:
    """Write plain values as JSON, whole or not at all."""
    write_text(json.dumps(document) + "\n", path)


def write_text(text: str, path: Path) -> None:
    """Write a text, whole or not at all."""

    def write(target: Path) -> None:
        target.write_text(text, encoding="utf-8")

    write_whole(path, write)
