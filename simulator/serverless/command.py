"""`gpu-simulate serverless`: workflows on a cluster under a placement policy."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import click
import numpy as np

from resource_manager.cli.base import FILE, Command
from simulator.cli import common_options, print_json
from simulator.errors import InputError
from simulator.io.files import write_json, write_text
from simulator.progress import progress_bar
from simulator.serverless.config import ClusterConfig
from simulator.serverless.errors import MemoryAllocationError
from simulator.serverless.raw_env import RawEnv
from simulator.serverless.run import Episode, run
from simulator.serverless.scheduler import HEURISTICS, PolicyScheduler, scheduler_policy
from simulator.serverless.template import WorkflowTemplate
from simulator.serverless.workflow_files import read_workflows
from simulator.serverless.workflow_shapes import SHAPES, generate_workflow

MAX_ARRIVALS = 1_000_000


class Memory(click.ParamType):  # type: ignore[type-arg]
    """A number of MiB, or the word `policy`."""

    name = "MIB|policy"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value is None or value == "policy":
            return None
        try:
            memory_mib = int(str(value))
        except ValueError:
            memory_mib = 0
        if memory_mib < 1:
            self.fail(f"{value!r} is neither 'policy' nor a number of MiB from 1", param, ctx)
        return memory_mib


@click.command(cls=Command)
@click.option(
    "--workflows",
    "sources",
    multiple=True,
    metavar="DIR|FILE|SHAPE:SIZE",
    help="DAX or WfCommons files, folders of them, or a generated shape like montage:20 "
    f"({', '.join(SHAPES)}); also as arguments.",
)
@click.argument("more_sources", nargs=-1, metavar="[DIR|FILE|SHAPE:SIZE]...")
@click.option(
    "--cluster",
    "cluster_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="YAML; default: one server of each of the eight c5 types.",
)
@click.option("--arrivals", default="0", help="Seconds like 0,1,2 or poisson:RATE:N.")
@click.option(
    "--policy",
    "policy_name",
    default="first_fit",
    help=f"{', '.join(HEURISTICS)}, or any other policy of the resource manager.",
)
@click.option(
    "--memory",
    "memory_mib",
    type=Memory(),
    default="policy",
    show_default=False,
    help="MiB for every function, or 'policy' (default): the memory each requires.",
)
@click.option("--log", "log_path", type=FILE, help="JSON lines, one per function.")
@common_options
def command(
    sources: tuple[str, ...],
    more_sources: tuple[str, ...],
    cluster_path: Path | None,
    arrivals: str,
    policy_name: str,
    memory_mib: int | None,
    log_path: Path | None,
    as_json: bool,
    output_dir: Path | None,
    seed: int,
) -> None:
    """Run serverless workflows on rented servers with NUMA nodes."""
    sources = (*sources, *more_sources)
    if not sources:
        raise click.UsageError("no workflow: name files, folders, or a shape such as montage:20.")
    config = ClusterConfig.c5() if cluster_path is None else ClusterConfig.from_yaml(cluster_path)
    if memory_mib is not None and memory_mib > config.largest_memory:
        raise MemoryAllocationError(
            f"--memory {memory_mib}: every NUMA node has less; the largest has {config.largest_memory} MiB"
        )
    templates = _templates(sources, seed, config.single_core_speed)
    env = RawEnv(parse_arrivals(arrivals, seed), templates, config)
    scheduler = PolicyScheduler(scheduler_policy(policy_name, env, seed), memory_mib)
    with progress_bar("workflows") as progress:
        episode = run(env, scheduler, seed, progress)
    if log_path is not None:
        write_text(log_path, "".join(json.dumps(asdict(record)) + "\n" for record in episode.records))
    if output_dir is not None:
        from simulator.serverless.plots import write_plots

        write_json(output_dir / "summary.json", asdict(episode.summary))
        write_plots(env, episode, output_dir)
    if as_json:
        print_json(asdict(episode.summary))
    else:
        _print_table(episode, policy_name)


def _templates(sources: tuple[str, ...], seed: int, single_core_speed: int) -> list[WorkflowTemplate]:
    templates: list[WorkflowTemplate] = []
    for source in sources:
        shape, _, size = source.partition(":")
        if size.isdecimal() and not Path(source).exists():
            templates.append(generate_workflow(shape, int(size), seed, single_core_speed))
        else:
            templates += read_workflows([Path(source)], single_core_speed)
    return templates


def parse_arrivals(text: str, seed: int) -> list[float]:
    """Parse `0,1,2.5` or `poisson:RATE:N` (RATE per second, N workflows) into seconds; raise `InputError`."""
    if text.startswith("poisson:"):
        parts = text.split(":")
        try:
            rate, count = float(parts[1]), int(parts[2])
        except (IndexError, ValueError):
            rate, count = 0.0, 0
        if len(parts) != 3 or not 0 < rate < math.inf or not 1 <= count <= MAX_ARRIVALS:
            wanted = f"poisson:RATE:N with RATE above 0 and N from 1 to {MAX_ARRIVALS:,}"
            raise InputError(f"arrivals {text!r}: expected {wanted}")
        gaps = np.random.default_rng(seed).exponential(1.0 / rate, size=count)
        return [float(time) for time in np.cumsum(gaps)]
    try:
        times = [float(part) for part in text.split(",")]
    except ValueError:
        times = [-1.0]
    if not all(0 <= time < math.inf for time in times):
        raise InputError(f"arrivals {text!r}: expected seconds like 0,1,2.5 or poisson:RATE:N")
    return times


def _print_table(episode: Episode, policy_name: str) -> None:
    summary = episode.summary
    for label, value in (
        ("policy", policy_name),
        ("functions", summary.functions),
        ("workflows", summary.workflows),
        ("mean makespan", f"{summary.mean_makespan_s:.3f} s"),
        ("last completion", f"{summary.last_completion_s:.3f} s"),
        ("rent", f"{summary.rent:.3f} $"),
        ("simulated in", f"{summary.wall_s:.3f} s, of which {summary.cpu_s:.3f} s on the processor"),
        ("speed", f"{summary.functions_per_s:,.0f} functions per second of processor time"),
    ):
        click.echo(f"{label:<16} {value}")
