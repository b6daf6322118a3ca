"""``trainsim show``: what a scenario is made of, and what there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from simulator.cli.options import (
    OVER_CAPACITY,
    check_outputs,
    check_report,
    figure_of,
    load,
    scenario_options,
    write_json,
)
from simulator.cli.run import remedies_dict, remedies_text
from simulator.errors import DescriptionError

MOST_LISTED = 2_000_000
"""Ops that `show program` lists."""


@click.group()
def show() -> None:
    """Print schedules, a collective, a program, a topology, ranks, memory or the catalogue."""


@show.command("schedule")
@click.argument("name", required=False, metavar="[NAME|FILE.csv]")
@click.option("--stages", type=int, help="Pipeline stages; with chunks, ranks.  [default: 4]")
@click.option("--chunks", type=int,
              help="Stages of each rank, which share its F and B.  [default: fewest]")  # fmt: skip
@click.option("--microbatches", type=int, help="Pipeline inputs.  [default: 8]")
@click.option("--group", type=int, metavar="COUNT",
              help="Microbatches of a round, of Interleaved1F1B.")  # fmt: skip
@click.option("--forward", type=float, default=1.0, show_default=True, help="Seconds of one F.")
@click.option("--backward", type=float, default=2.0, show_default=True, help="Seconds of one B.")
@click.option("--input-grad", type=float, help="Of them, seconds of I.  [default: half]")
@click.option("--pair", type=float, help="Seconds of an F and a B together.  [default: of both]")
@click.option("--latency", type=float, default=0.0, show_default=True, help="Seconds of a message.")
@click.option("--memory", type=float, metavar="SHARE",
              help="Most kept by a rank of ZB-auto, in 1F1B's most.  [default: 1]")  # fmt: skip
@click.option("--csv", "csv_path", metavar="FILE", help="Write it as torch's schedule CSV.")
@click.option("--comms", is_flag=True, help="With sends and receives in the CSV, as torch's.")
@click.option("--plot", metavar="[NAME=]FILE", help="Draw it.")
def show_schedule(
    name: str | None, stages: int | None, chunks: int | None, microbatches: int | None,
    group: int | None, memory: float | None, csv_path: str | None, comms: bool,
    plot: str | None, **times: Any,
) -> None:  # fmt: skip
    """Print a schedule over time: a registered one, or that of a CSV file of torch's.

    Without NAME list the schedules.
    """
    figure = figure_of(plot) if plot else None
    if comms and not csv_path:
        raise DescriptionError("--comms says what --csv writes; give --csv too")
    from simulator import schedules
    from simulator.report.closed_forms import forms_text, schedules_text

    if name is None:
        if figure or csv_path:
            option = "--plot draws" if figure else "--csv writes"
            raise DescriptionError(f"{option} a schedule; give its NAME")
        click.echo(schedules_text())
        return
    check_outputs(None, None, [Path(csv_path)] if csv_path else [])
    known = schedules.schedule_of(name)
    size = known.size or (4, 8)
    stages = size[0] if stages is None else stages
    microbatches = size[1] if microbatches is None else microbatches
    from simulator.api import simulate_schedule

    result = simulate_schedule(
        name, stages=stages, microbatches=microbatches, chunks=chunks, microbatch_group=group,
        memory=memory, **times,
    )  # fmt: skip
    forms = forms_text(result, name, (stages, microbatches, chunks), times) if not group else ""
    click.echo(f"{result}{forms}")
    if csv_path:
        actions = result.actions
        assert actions is not None  # of a bare schedule
        if comms:
            actions = schedules.add_messages_as_torch(schedules.add_reduce_grad(actions))
        schedules.write_csv(actions, csv_path)
    if figure:
        getattr(result.plot, figure[0])(figure[1])


@show.command("schedules")
@scenario_options
@click.option("--json", "json_path", metavar="FILE", help="Write it as JSON; - for stdout.")
@click.option("--plot", metavar="FILE", help="Draw where steps go, and memory.")
def show_schedules(
    scenario: str, overrides: tuple[str, ...], json_path: str | None, plot: str | None
) -> None:
    """Run SCENARIO under every schedule that it can take, and print them side by side."""
    check_report(json_path, plot)
    loaded = load(scenario, overrides)
    from simulator.explore.schedules import compare_schedules

    compared = compare_schedules(loaded)
    if json_path:
        write_json(compared.to_dict(), json_path)
    if json_path != "-":
        click.echo(compared)
    if plot is not None:
        from simulator.explore.schedules_plot import schedules_figure

        schedules_figure(compared, plot)


@show.command("program")
@scenario_options
def show_program(scenario: str, overrides: tuple[str, ...]) -> None:
    """Print the program of SCENARIO: every op, its stream and what it waits for."""
    loaded = load(scenario, overrides)
    from simulator.lower import lower
    from simulator.program_text import format_program

    program = lower(loaded)
    if len(program) > MOST_LISTED:
        raise DescriptionError(
            f"{loaded.name}: a listing of {len(program):,} ops is no use; describe fewer ranks, "
            "steps or microbatches, or --set run.detail=stage"
        )
    click.echo(format_program(program))


@show.command("topology")
@scenario_options
@click.option("--plot", metavar="FILE", help="Draw it, with the ranks on their devices.")
def show_topology(scenario: str, overrides: tuple[str, ...], plot: str | None) -> None:
    """Print the hardware of SCENARIO, its sources, and where each rank lies."""
    check_report(None, plot)
    loaded = load(scenario, overrides)
    from simulator.report.placement import placement_text
    from simulator.report.topology import topology_text

    click.echo(f"{topology_text(loaded.cluster)}\n\n{placement_text(loaded)}")
    if plot is not None:
        from simulator.report.network_plots import fabric_figure

        fabric_figure(loaded, plot)


@show.command("placement")
@scenario_options
@click.option("--json", "json_path", metavar="FILE", help="Write it as JSON; - for stdout.")
def show_placement(scenario: str, overrides: tuple[str, ...], json_path: str | None) -> None:
    """Print which rank of SCENARIO lies on which device, and the nodes that groups lie on."""
    check_outputs(json_path, None, [])
    loaded = load(scenario, overrides)
    from simulator.report.placement import placement_dict, placement_text

    if json_path:
        write_json(placement_dict(loaded), json_path)
    if json_path != "-":
        click.echo(placement_text(loaded))


@show.command("memory")
@scenario_options
@click.option("--json", "json_path", metavar="FILE", help="Write it as JSON; - for stdout.")
def show_memory(scenario: str, overrides: tuple[str, ...], json_path: str | None) -> int:
    """Print what fills the memory of every stage of SCENARIO, and what inference would need."""
    check_outputs(json_path, None, [])
    loaded = load(scenario, overrides)
    from simulator.api import simulate
    from simulator.explore.remedies import find_remedies
    from simulator.report.inference import inference_dict, inference_text
    from simulator.report.memory_text import memory_text
    from simulator.report.text import SCHEMA_VERSION

    result = simulate(loaded)
    remedies = find_remedies(result)
    if json_path:
        document = {
            "schema_version": SCHEMA_VERSION,
            "scenario": loaded.name,
            "peak_memory_bytes": result.peak_memory_bytes.tolist(),
            "memory_capacity_bytes": result.summary.memory_capacity_bytes,
            "host_memory_bytes": result.summary.host_memory_bytes,
            "fits": result.summary.fits,
            "inference": inference_dict(loaded),
        }
        write_json(document | remedies_dict(remedies), json_path)
    if json_path != "-":
        click.echo(f"{memory_text(result, loaded)}{remedies_text(remedies)}")
        click.echo(f"\n{inference_text(loaded)}")
    return 0 if result.summary.fits else OVER_CAPACITY


@show.command("collective")
@click.option("--op", default="all_reduce", show_default=True, help="all_gather, all_to_all, ...")
@click.option("--sizes", default="1KB:8GB", show_default=True, metavar="MIN:MAX",
              help="Bytes, doubling; K, M, G are binary as in nccl-tests.")  # fmt: skip
@click.option("--cluster", "node", required=True, metavar="NODE", help="A node of the catalogue.")
@click.option("--nodes", type=int, default=1, show_default=True, help="How many nodes.")
@click.option("--per-node", type=int, help="Devices used in each node; all when absent.")
@click.option("--algorithm", help="Only this one: RING, TREE, NVLS, ... (NCCL_ALGO).")
@click.option("--protocol", help="Only this one: LL, LL128 or SIMPLE (NCCL_PROTO).")
def show_collective(
    op: str, sizes: str, node: str, nodes: int, per_node: int | None,
    algorithm: str | None, protocol: str | None,
) -> None:  # fmt: skip
    """Print a collective by size as nccl-tests would, with the algorithm that NCCL takes."""
    from simulator.describe.cluster import Cluster
    from simulator.describe.loader import load_node
    from simulator.report.collectives import collective_text, parse_sizes

    cluster = Cluster(node=load_node(node), num_nodes=nodes, devices_per_node=per_node)
    click.echo(
        collective_text(op, parse_sizes(sizes), cluster, algorithm=algorithm, protocol=protocol)
    )


@show.command("megatron")
@scenario_options
def show_megatron(scenario: str, overrides: tuple[str, ...]) -> None:
    """Print SCENARIO as the flags of Megatron-LM, and what of it they cannot say."""
    loaded = load(scenario, overrides)
    from simulator.cuts import resolved
    from simulator.exchange.megatron import launcher_flags, to_megatron, unsaid

    loaded = resolved(loaded)
    flags = to_megatron(loaded)
    head = " ".join(("torchrun", *launcher_flags(loaded), "pretrain_gpt.py"))
    click.echo(" \\\n    ".join((head, *flags)))
    for sentence in unsaid(loaded):
        click.echo(f"no flag says {sentence}", err=True)


@show.command("catalog")
def show_catalog() -> None:
    """List the devices, nodes, models and scenarios that are known by name."""
    from simulator.describe import catalog

    for folder in catalog.FOLDERS:
        click.echo(f"{folder}: {', '.join(catalog.names(folder)) or 'none'}")
