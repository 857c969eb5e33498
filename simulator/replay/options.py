"""Options shared by `replay` and `compare`: the source of the workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from resource_manager.core.cluster_settings import ClusterSettings
from simulator.cli import BadInput, FiniteRange, options_as, reject_given
from simulator.replay.comparison import Source
from simulator.replay.openb import first_seed
from simulator.replay.replay import CHECKPOINT_S
from simulator.rounds.linear_programs import SOLVERS
from simulator.rounds.policies import ROUND_POLICIES, may_solve
from simulator.rounds.studies import STUDIES


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """What the options say of the workload, and of the teams that share the servers."""

    trace: str | None
    data: Path | None
    pods: str
    nodes: Path | None
    jobs: str | None
    history: str | None
    quotas: tuple[tuple[str, float], ...]
    load: str
    workload: str
    solver: str
    split_large_jobs: bool
    teams: str
    checkpoint_s: float


def workload_options(kinds: Sequence[str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the options that name a workload, which a command receives as `given`."""
    return options_as(
        "given",
        WorkloadOptions,
        click.option(
            "--solver",
            type=click.Choice(list(SOLVERS)),
            default="highs",
            help="Solver of the round policies that need one; ecos gives the published figures.",
        ),
        click.option("--workload", default="1", help="pollux: the workload."),
        click.option("--load", default="1.0", help="pollux: the load."),
        click.option("--trace", type=click.Choice(kinds), help="The kind of trace."),
        click.option("--data", type=click.Path(path_type=Path), help="Folder of a published trace."),
        click.option("--pods", default="default", help="openb: the pod list."),
        click.option("--nodes", type=click.Path(path_type=Path), help="csv, json: file of the servers."),
        click.option("--jobs", help="muri: the trace, such as trace1. csv, json: file of the jobs."),
        click.option(
            "--history", help="A file of gpu-manager history --export, or the URL of Redis or a database."
        ),
        click.option("--quotas", callback=_quotas, help="fair_share: shares by team, as a=0.5,b=0.25."),
        click.option(
            "--teams",
            type=click.Path(),
            default="",
            show_default=False,
            help="Teams file, in place of recorded rules: guarantees, limits, preemption, not max_runtime.",
        ),
        click.option(
            "--checkpoint-every",
            "checkpoint_s",
            type=FiniteRange(min=0, min_open=True),
            default=CHECKPOINT_S,
            help="--teams, --history: seconds between checkpoints; a preemption loses what came after.",
        ),
        click.option(
            "--split-large-jobs",
            is_flag=True,
            help="csv, json: split a job of more GPUs than any server has over the fewest servers.",
        ),
    )


def _quotas(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[tuple[str, float], ...]:
    try:
        pairs = [part.split("=", 1) for part in (value or "").split(",") if part.strip()]
        shares = tuple((team.strip(), float(share)) for team, share in pairs)
        if not all(0 <= share <= 1 for _, share in shares) or len(dict(shares)) < len(shares):
            raise ValueError
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is not a list of shares from 0 to 1, one a team, such as a=0.5,b=0.25"
        ) from None
    return shares


TEAM_OPTIONS = ("teams", "checkpoint_s")
ROUND_OPTIONS = ("load", "workload", "solver")
UNUSED_OPTIONS: dict[str | None, tuple[str, ...]] = {
    "openb": (
        *("nodes", "jobs", "order", "orders", "quotas", "split_large_jobs"),
        *(*ROUND_OPTIONS, *TEAM_OPTIONS),
    ),
    "muri": ("nodes", "pods", "policy", "quotas", "split_large_jobs", *ROUND_OPTIONS, *TEAM_OPTIONS),
    "csv": ("data", "pods", "load", "workload"),
    "json": ("data", "pods", "load", "workload"),
    "pollux": ("nodes", "jobs", "pods", "order", "split_large_jobs"),
    "shockwave": ("nodes", "jobs", "pods", "order", "load", "workload", "split_large_jobs"),
    None: ("data", "pods", "nodes", "jobs", "load", "workload", "split_large_jobs"),
}
"""Kind of trace (None: a history) -> the options without effect there."""


def reject_unused_options(given: WorkloadOptions, policies: Sequence[str], orders: Sequence[str]) -> None:
    """Raise `BadInput` for an option without effect on that workload or under those policies and orders."""
    trace, history = given.trace, given.history
    if (trace is None) == (history is None):
        raise BadInput("name one workload: --trace with its files, or --history")
    workload = "--history" if trace is None else f"--trace {trace}"
    reject_given(UNUSED_OPTIONS[trace], f"cannot be used with {workload}")
    if history is None and not given.teams:
        reject_given(("checkpoint_s",), "applies only to --teams and --history: else nothing is preempted")
    if not any(order.startswith("fair_share") for order in orders):
        reject_given(("quotas",), "applies only to the order fair_share")
    if given.teams:
        reject_given(("quotas",), "has no effect with --teams: the weights of the teams are the quotas there")
    if not any(map(may_solve, policies)):
        solving = ", ".join(filter(may_solve, ROUND_POLICIES))
        reject_given(("solver",), f"applies only to policies that solve: {solving}")


def default_order(history: str | None) -> str:
    """Return the live default order for a recorded history, `fifo` for published traces."""
    return ClusterSettings().order if history is not None else "fifo"


def default_policies(trace: str | None) -> tuple[str, ...]:
    """Return the policies replayed or compared if none are named; a replay takes the first."""
    return STUDIES.get(trace or "", ("first_fit", "best_fit", "fgd"))


def source_of(given: WorkloadOptions) -> Source:
    """Return the workload that the options name; raise `BadInput` naming a missing option."""
    trace, data, nodes, jobs = given.trace, given.data, given.nodes, given.jobs
    if given.history is not None:
        return Source("history", (given.history,))
    if trace == "openb":
        if data is None:
            raise BadInput("--trace openb needs --data, the folder with csv/ and fixtures/")
        return Source("openb", (str(data), given.pods))
    if trace in STUDIES:
        if data is None:
            raise BadInput(f"--trace {trace} needs --data, the folder of the study")
        more = (given.load, given.workload) if trace == "pollux" else ()
        return Source(trace, (str(data), *more))
    if nodes is None or jobs is None:
        raise BadInput(f"--trace {trace} needs --nodes and --jobs, the files of servers and jobs")
    for path in (nodes, Path(jobs)):
        if (path.suffix in (".json", ".jsonl")) != (trace == "json"):
            raise BadInput(
                f"--trace {trace} cannot read the file {path}: "
                "names in .json or .jsonl are for --trace json, others for --trace csv"
            )
    return Source("jobs", (str(nodes), jobs), given.split_large_jobs)


def seed_of(source: Source, seed: int) -> int:
    """Return --seed or, where openb was given none, the first seed for which the data has an order."""
    given = click.get_current_context().get_parameter_source("seed") is not ParameterSource.DEFAULT
    return seed if given or source.kind != "openb" else first_seed(Path(source.paths[0]), source.paths[1])
