"""The command `doctor`: it observes store, cluster, servers, this machine and Airflow; `checks` judge."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.exceptions import Exit

from resource_manager.cli.base import REFUSED, one_line, print_json
from resource_manager.cli.discovering import login_options
from resource_manager.cli.program import main, on_target
from resource_manager.cli.reconciling import AirflowLogin, airflow_options
from resource_manager.cli.target import Target
from resource_manager.cli.verifying import ask_all, missing_walls
from resource_manager.errors import ResourceManagerError, redact

if TYPE_CHECKING:
    from resource_manager.cli.doctor.checks import Login
    from resource_manager.manager.lease_service import LeaseService
    from resource_manager.storage.finding import Finding

MAX_TASKS = 20
"""Most leases whose tasks are looked for in Airflow."""


@main.command()
@airflow_options(required=False)
@click.option("--ssh", "by_ssh", is_flag=True, help="Ask the servers by ssh, too.")
@login_options
@on_target
def doctor(
    target: Target, airflow: AirflowLogin, by_ssh: bool, user: str | None, key: str | None, as_json: bool
) -> None:
    """Check store, cluster, servers, this machine and, with --airflow-url, Airflow; change nothing.

    Each fault is a line with the next step, and so is a note, of what works but is not as it should be.
    Exits with 1 if there is a fault.
    """
    lines, faults = [], 0
    for group, finding in _findings(target, by_ssh, (user, key), airflow):
        lines.append({"check": group, **asdict(finding)})
        mark = "ok   " if finding.ok else "note " if finding.is_caution else "FAULT"
        faults += mark == "FAULT"
        if not as_json:
            click.echo(f"{mark}  {group}: {one_line(finding.text)}")
    if as_json:
        print_json(lines)
    if faults:
        raise Exit(REFUSED)


def _findings(
    target: Target, by_ssh: bool, login: Login, airflow: AirflowLogin
) -> Iterator[tuple[str, Finding]]:
    """Yield what each check finds, with the name of its group; nothing is asked of a store out of reach."""
    from resource_manager.cli.doctor import checks

    try:
        if not target.url:
            yield from (("store", finding) for finding in _of_store(target))
        manager = target.manager
        yield from (("cluster", finding) for finding in _of_cluster(target, manager))
        yield from (("servers", finding) for finding in _of_servers(manager, by_ssh, login))
        if not target.url:
            yield from (("servers", finding) for finding in _of_tokens(target))
    except (ResourceManagerError, OSError) as error:
        shown = redact(target.url or target.settings().store)
        yield (
            "store",
            checks.of_store_out_of_reach(str(error), shown, target.setting, is_service=bool(target.url)),
        )
    yield "machine", _of_machine()
    if airflow.url:
        yield from (("airflow", finding) for finding in _of_airflow(target, airflow))


def _of_store(target: Target) -> list[Finding]:
    from resource_manager.storage.checks import check, of_job_keys
    from resource_manager.storage.finding import Finding

    settings = target.settings()
    return [Finding(True, target.place), *check(settings), *of_job_keys(settings)]


def _of_cluster(target: Target, manager: LeaseService) -> list[Finding]:
    from resource_manager.cli.doctor.checks import of_cluster
    from resource_manager.manager.notices import notices_of

    summary, file = manager.summary(), target.configured().inventory
    return of_cluster(summary, map(target.placed, notices_of(summary, file, manager.diff)))


def _of_servers(manager: LeaseService, by_ssh: bool, login: Login) -> Iterator[Finding]:
    from resource_manager.cli.doctor import checks

    uses = {use["server_name"]: use for use in manager.gpus()}
    rows = manager.servers()
    now = time.time()
    found = [each for row in rows for each in checks.of_server(row, uses[row["server_name"]], now)]
    yield from found
    if rows and all(each.ok for each in found):
        agents = sum(uses[row["server_name"]]["agent_version"] is not None for row in rows)
        yield checks.all_open(sum(not row["drained"] for row in rows), agents)
    if by_ssh:
        details = [manager.server(row["server_id"]) for row in rows]
        answers = ask_all(details, *login)
        for row, answer in zip(rows, answers, strict=True):
            yield checks.of_answer(row["server_name"], answer)
        must = [
            detail
            for detail, answer in zip(details, answers, strict=True)
            if detail["confine"] == "must" and not isinstance(answer, ResourceManagerError)
        ]
        for detail, missing in zip(must, missing_walls(must, *login), strict=True):
            yield checks.of_walls(detail["server_name"], missing)


def _of_tokens(target: Target) -> list[Finding]:
    from resource_manager.cli.doctor.checks import of_agent_tokens
    from resource_manager.cli.token_commands import token_store
    from resource_manager.fleet.records import records_of

    manager, tokens = target.on_store(), token_store(target, None)
    known = tokens.read().values()
    records = records_of(manager.store, {token.server for token in known if token.server})
    reported_at = {server: record.received_at for server, record in records.items()}
    servers, now = manager.read(lambda cluster, now: ({state.name for state in cluster.nodes}, now))
    return of_agent_tokens(known, tokens.last_uses(), reported_at, servers, now)


def _of_machine() -> Finding:
    from resource_manager.cli.doctor.checks import of_disk
    from resource_manager.jobs.directories.job_files import DEFAULT_ROOT

    folder = Path(os.environ.get("GPU_MANAGER_JOBS_DIR", DEFAULT_ROOT)).expanduser()
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return of_disk(str(folder), shutil.disk_usage(there).free)


def _of_airflow(target: Target, login: AirflowLogin) -> Iterator[Finding]:
    from resource_manager.cli.doctor.checks import of_airflow, of_airflow_out_of_reach, of_instance
    from resource_manager.jobs.airflow_api import AirflowUnavailableError
    from resource_manager.jobs.task_identity import TaskIdentity

    try:
        airflow = login.states()
        health = airflow.health()
        yield from of_airflow(health)
        with suppress(ResourceManagerError):  # of the store, which was said before
            tasks = (TaskIdentity.from_labels(lease["labels"]) for lease in target.manager.leases())
            own = [task for task in tasks if task and task.instance == health["instance"]][:MAX_TASKS]
            yield from of_instance(health["instance"], [task for task in own if not airflow.has(task)])
    except AirflowUnavailableError as error:
        yield of_airflow_out_of_reach(str(error))
