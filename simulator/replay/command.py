"""`gpu-simulate replay`: a recorded workload under a placement policy and a queue order."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from resource_manager.cli.base import FILE, Command
from resource_manager.manager.cluster_file.reading import load_teams
from simulator.cli import BadInput, common_options, print_json, reject_given
from simulator.io.files import write_csv, write_json
from simulator.present.figures import Bar
from simulator.present.tables import print_tables
from simulator.progress import Progress, progress_bar
from simulator.replay import metrics, muri, openb, options
from simulator.replay.agreement import compare_with_record
from simulator.replay.comparison import Case, check, head_of, play, rounds_of
from simulator.replay.job_runs import Record
from simulator.replay.report import save_timeline, team_table, write_report
from simulator.rounds.policies import ROUND_POLICIES, is_round_policy
from simulator.rounds.record import JOB_COLUMNS, bars_of, curves, job_rows, study_summary, summarise
from simulator.rounds.studies import STUDIES

POLICY_HELP = (
    "Placement policy, default first_fit; or a round policy, which preempts jobs between rounds: "
    f"{', '.join(ROUND_POLICIES)}."
)
ORDER_HELP = (
    "Queue order, also with +backfill; default priority+backfill for --history, srtf for muri, else fifo."
)


@click.command("replay", cls=Command)
@options.workload_options(["openb", "muri", "csv", "json", "pollux", "shockwave"])
@click.option("--policy", help=POLICY_HELP)
@click.option("--order", help=ORDER_HELP)
@click.option("--curve", type=FILE, help="openb: write the curve as CSV.")
@common_options
def command(
    given: options.WorkloadOptions,
    policy: str | None,
    order: str | None,
    curve: Path | None,
    seed: int,
    output_dir: Path | None,
    as_json: bool,
) -> None:
    """Replay a recorded workload through the resource manager's own allocator."""
    trace, history = given.trace, given.history
    if curve is not None and trace != "openb":
        raise BadInput("--curve needs --trace openb; other replays write their curves into --output-dir")
    if output_dir is not None and (output_dir / "jobs.csv").resolve() in (
        Path(name).resolve() for name in (given.nodes, given.jobs) if name
    ):
        raise BadInput("--output-dir: the results' jobs.csv would replace the trace's; name another folder")
    policy = policy or options.default_policies(trace)[0]
    options.reject_unused_options(given, [policy], [order or options.default_order(history)])
    with progress_bar("replaying") as progress:
        if trace == "muri":
            summary = _muri(given.data, given.jobs, order or "srtf", progress)
        else:
            source = options.source_of(given)
            order = order or options.default_order(history)
            seed = options.seed_of(source, seed)
            rules = (given.quotas, given.solver, given.teams)
            preemption = bool(given.teams) and load_teams(given.teams).preemption
            case = Case(source, policy, order, seed, *rules, preemption, given.checkpoint_s)
            if trace in STUDIES or is_round_policy(policy):
                summary = _in_rounds(case, progress, output_dir)
            elif trace == "openb":
                summary = _openb(case, progress, curve, output_dir)
            else:
                summary = _timed(case, progress, output_dir)
    if output_dir is not None:
        write_json(output_dir / "summary.json", summary)
    report(summary, as_json)


def _muri(data: Path | None, jobs: str | None, order: str, progress: Progress) -> dict[str, Any]:
    if data is None or jobs is None:
        raise BadInput("--trace muri needs --data, the folder, and --jobs, the trace such as trace1")
    if order not in muri.ORDERS:
        raise BadInput(f"--trace muri supports --order {' and '.join(muri.ORDERS)}, not {order!r}")
    return muri.replay(muri.read_jobs(data, jobs), order, progress)


def _openb(case: Case, progress: Progress, curve: Path | None, output_dir: Path | None) -> dict[str, Any]:
    folder, pods = case.source.paths
    trace = openb.read_trace(Path(folder), pods, case.seed)
    summary, rows = openb.replay(trace, case.policy, case.seed, progress)
    if curve is not None:
        write_csv(curve, openb.CURVE_COLUMNS, rows)
    if output_dir is not None:
        write_csv(output_dir / "curve.csv", openb.CURVE_COLUMNS, rows)
        result = {"case": head_of(case), "summary": summary, "curve": openb.curve_of(rows)}
        write_report(f"Replay of {case.source.name}", result, output_dir)
    return summary


def _timed(case: Case, progress: Progress, output_dir: Path | None) -> dict[str, Any]:
    check(case.source, [case.policy], [case.order], [case.seed], teams=case.teams)
    started = time.perf_counter()
    record = play(case, progress)
    wall_s = time.perf_counter() - started
    summary = {"policy": case.policy, "order": case.order, **metrics.summarise(record)}
    if case.source.kind == "history":
        summary["recorded"] = compare_with_record(record)
    summary["wall_s"] = round(wall_s, 3)
    if output_dir is not None:
        _write(case, record, summary, output_dir)
    return summary


def _in_rounds(case: Case, progress: Progress, output_dir: Path | None) -> dict[str, Any]:
    if case.source.kind == "openb":
        raise BadInput(
            f"--trace openb has no run times: the round policy {case.policy} cannot be used with it"
        )
    why = f"has no effect with {case.policy}, which ranks all jobs in every round"
    reject_given(("order",), why)
    rounds = rounds_of(case.source, case.policy, case.solver)
    reject_given(options.TEAM_OPTIONS, why)
    started = time.perf_counter()
    rounds.run(progress)
    wall_s = time.perf_counter() - started
    figures = study_summary if case.source.kind in STUDIES else summarise
    summary = {"policy": case.policy, **figures(rounds), "wall_s": round(wall_s, 3)}
    if output_dir is not None:
        write_csv(output_dir / "jobs.csv", JOB_COLUMNS, job_rows(rounds))
        shown = {**summarise(rounds), **summary}
        result = {"case": {**head_of(case), "in_rounds": True}, "summary": shown, **curves(rounds)}
        write_report(f"Replay of {case.source.name}", result, output_dir)
        save_timeline(bars_of(rounds), rounds.leases.nodes, output_dir)
    return summary


def _write(case: Case, record: Record, summary: dict[str, Any], output_dir: Path) -> None:
    """Write one row per job, the members of a gang separated by semicolons, the page and the figures."""
    columns = ("job", "team", "submitted_s", "started_s", "ended_s", "wait_s", "node", "gpu_ids")
    rows = []
    for task_id, job_run in record.job_runs.items():
        wait = None if job_run.started_at is None else metrics.wait_s(job_run)
        where = (
            ";".join(member.node for member in job_run.members),
            ";".join(" ".join(map(str, member.gpu_ids)) for member in job_run.members),
        )
        times = (job_run.job.submitted_at, job_run.first_started_at, job_run.ended_at, wait)
        rows.append((task_id, job_run.job.request.team, *times, *where))
    write_csv(output_dir / "jobs.csv", columns, rows)
    if record.samples:
        result = {"case": head_of(case), "summary": summary, **metrics.curve_data(record)}
        write_report(f"Replay of {case.source.name}", result, output_dir)
        end = record.samples[-1].at
        bars = [
            Bar(member.node, begin, until, task_id)
            for task_id, job_run in record.job_runs.items()
            for member, begin, until in metrics.spans(job_run, end)
        ]
        save_timeline(bars, record.workload.nodes, output_dir)


MAX_SHOWN = 20
"""Values of one figure above which it is left to --json."""


def report(summary: dict[str, Any], as_json: bool) -> None:
    """Print the summary as JSON, or as lines of name and value."""
    if as_json:
        print_json(summary)
        return
    width = max(map(len, summary))
    for name, value in summary.items():
        if name == "teams" and (by_team := team_table([{"case": {"name": ""}, "summary": summary}])):
            print_tables(by_team)
            continue
        if isinstance(value, dict):
            if len(value) > MAX_SHOWN:
                continue
            shown = ", ".join(f"{key} {item}" for key, item in value.items() if not isinstance(item, list))
            if not shown:
                continue
        else:
            shown = f"{value:,}" if isinstance(value, int | float) else str(value)
        click.echo(f"{name:<{width}}  {shown}")
