"""`gpu-manager agent`: report this server's GPUs to the service."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from resource_manager.cli.base import BAD_INPUT, INTERVAL, UNREACHABLE, Failure, one_line, print_json
from resource_manager.cli.discovering import as_dict, health_option
from resource_manager.cli.program import json_option, main
from resource_manager.cli.target import Target, exit_codes

if TYPE_CHECKING:
    from resource_manager.agent.sending import ReportSender


@main.group(invoke_without_command=True)
@click.option("--server", help="Name of this server in the inventory.")
@click.option(
    "--url",
    multiple=True,
    help="Address of the service, or without --run-jobs of Airflow's page /gpu; else that of gpu-manager. "
    "Repeatable.",
)
@click.option(
    "--token", envvar="GPU_MANAGER_AGENT_TOKEN", help="Agent token of this server; else that of gpu-manager."
)
@click.option("--every", "interval_s", type=INTERVAL, default=10.0, show_default=True)
@click.option(
    "--run-jobs",
    is_flag=True,
    help="Also run the jobs of this server's leases, as this user: it is the server's job_user.",
)
@click.option("--once", is_flag=True, help="Send one report; with --json, print it and send nothing.")
@health_option
@json_option
@click.pass_context
@exit_codes
def agent(
    context: click.Context,
    server: str | None,
    url: tuple[str, ...],
    token: str | None,
    interval_s: float,
    run_jobs: bool,
    once: bool,
    health_path: Path | None,
    as_json: bool,
) -> None:
    """Report the GPUs of this server to the service until Ctrl-C; install and list the agents of servers."""
    if context.invoked_subcommand is not None:
        return
    target: Target = context.obj
    from resource_manager.agent.generation import KnownGeneration, mark_file
    from resource_manager.agent.sending import ReportSender, run_agent

    if server is None:
        raise Failure("--server is missing: the name of this server in the inventory", BAD_INPUT)
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,255}", server):
        raise Failure(f"--server {server[:60]!r} is not the name of a server", BAD_INPUT)
    if as_json and not once:
        raise Failure("--json goes with --once", BAD_INPUT)
    if as_json:
        _print_once(server, health_path)
        return

    def say(line: str) -> None:
        with suppress(OSError):  # its log is on a full disk, or its terminal is gone
            click.echo(one_line(f"{server}: {line}"), err=True)

    address = " ".join(url) or target.url
    if not address:
        raise Failure(
            "--url is missing: the address of the service, such as http://localhost:5000", BAD_INPUT
        )
    sender = ReportSender(address, token or target.token)
    if once:
        _send_once(server, sender)
    elif run_jobs:
        from resource_manager.agent.job_agent import run_job_agent

        run_job_agent(server, address, token or target.token, interval_s, say=say)
    else:
        known = KnownGeneration(mark_file(server, address))
        run_agent(server, sender, interval_s, sleep=time.sleep, say=say, generation=known)


def _print_once(server: str, health_path: Path | None) -> None:
    from resource_manager.agent.running import NoReportError, probe_here
    from resource_manager.fleet.health import health_table
    from resource_manager.manager.cluster_file.reading import load_health

    table = health_table(() if health_path is None else load_health(health_path))
    try:
        report = probe_here()
    except NoReportError as error:
        raise Failure(f"this machine gave no report: {error}", UNREACHABLE) from error
    print_json(as_dict(report.model_copy(update={"server": server}), table))


def _send_once(server: str, sender: ReportSender) -> None:
    from resource_manager.agent.running import RunningProbe
    from resource_manager.agent.sending import ReportRefusedError

    probe = RunningProbe()
    try:
        report = {**probe.report(), "server": server}
    finally:
        probe.close()
    try:
        sender.send(report)
    except ReportRefusedError as error:
        raise Failure(str(error), UNREACHABLE) from error
    if report["error"] is not None:
        raise Failure(f"this machine gave no report of its GPUs: {report['error']}", UNREACHABLE)
