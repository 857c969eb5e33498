"""`gpu-manager verify` and `adopt`: compare the inventory with what the servers report, and correct it."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING

import click
from click.exceptions import Exit

from resource_manager.cli import completing
from resource_manager.cli.base import REFUSED, UNREACHABLE, Failure, one_line, print_json
from resource_manager.cli.discovering import ask, ask_here, login_options, of_each
from resource_manager.cli.program import main, on_target
from resource_manager.cli.target import Target
from resource_manager.errors import ResourceManagerError
from resource_manager.manager.plurals import counted

if TYPE_CHECKING:
    from resource_manager.agent.report_format import Report
    from resource_manager.core.models import Gpu
    from resource_manager.manager.cluster_results import ServerDetail


@main.command()
@click.argument("server", required=False, shell_complete=completing.servers)
@login_options
@on_target
def verify(target: Target, server: str | None, user: str | None, key: str | None, as_json: bool) -> None:
    """Compare the GPUs of SERVER (id or name), or of all servers, with the inventory.

    Each server is asked by ssh at its address in the inventory. Exits with 1 if one differs or is not pinned,
    with 3 if one gives no report.
    """
    from resource_manager.fleet.comparison import Verdict, compare

    manager = target.manager
    wanted = [row["server_id"] for row in manager.servers()] if server is None else [server]
    rows = [manager.server(each) for each in wanted]
    compared = []
    answers = ask_all(rows, user, key)
    for row, answer in zip(rows, answers, strict=True):
        if isinstance(answer, ResourceManagerError):
            click.echo(f"Error: {one_line(answer)}", err=True)
        else:
            compared.append((row["server_name"], compare(_gpus(row), answer)))
    if as_json:
        print_json([{"server": name, **asdict(found), "text": found.in_words()} for name, found in compared])
    else:
        for name, found in compared:
            click.echo(f"{name}: {found.verdict}: {one_line(found.in_words())}")
    if len(compared) < len(rows):
        raise Exit(UNREACHABLE)
    if any(found.verdict not in (Verdict.SAME, Verdict.RENUMBERED) for _, found in compared):
        raise Exit(REFUSED)


@main.command()
@click.argument("server", shell_complete=completing.servers)
@login_options
@on_target
def adopt(target: Target, server: str, user: str | None, key: str | None, as_json: bool) -> None:
    """Take the GPUs that SERVER (id or name) reports as its GPUs in the inventory.

    Refused while the server has leases. No file of the cluster takes it back, unless it is forced.
    """
    from resource_manager.fleet.inventory_text import pinned_gpus

    manager = target.manager
    row = manager.server(server)
    [report] = ask_all([row], user, key)
    if isinstance(report, ResourceManagerError):
        raise Failure(str(report), UNREACHABLE) from report
    name, gpus = row["server_name"], pinned_gpus(report)
    if not all(gpu.uuid for gpu in gpus):
        raise Failure(f"server {name} reports GPUs without UUIDs, which cannot be pinned", REFUSED)
    adopted = manager.adopt(row["server_id"], gpus)
    print_json(adopted) if as_json else click.echo(f"{name}: {counted(len(gpus), 'GPU')} adopted")


def _gpus(row: ServerDetail) -> list[Gpu]:
    from resource_manager.core.models import Gpu

    return [
        Gpu(gpu["gpu_id"], gpu["type"], gpu["vendor"], gpu["memory_mib"], gpu["uuid"]) for gpu in row["gpus"]
    ]


def ask_all(
    rows: Sequence[ServerDetail], user: str | None, key: str | None
) -> list[Report | ResourceManagerError]:
    """Return each server's report, or why there is none."""
    return of_each(rows, lambda row: _ask(row, user, key))


def missing_walls(rows: Sequence[ServerDetail], user: str | None, key: str | None) -> list[str]:
    """Return for each server what is missing there for the walls of jobs, empty where they can be built."""
    return of_each(rows, lambda row: _missing_walls(row, user, key))


def _missing_walls(row: ServerDetail, user: str | None, key: str | None) -> str:
    from resource_manager.jobs.launchers import LauncherError, walls
    from resource_manager.jobs.launchers.base import ANSWER_TIMEOUT_S
    from resource_manager.jobs.launchers.ssh_python import SSHPython

    program = walls.check_program(row["writable"])
    try:
        if row["address"]:
            with closing(SSHPython(row["address"], user=user, key_file=key)) as server:
                code, found, complaint = server.run(program, ANSWER_TIMEOUT_S)
        else:
            done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
            code, found, complaint = done.returncode, done.stdout, done.stderr
    except LauncherError as error:
        return str(error)
    return one_line((found if code == 0 else complaint).strip())


def _ask(row: ServerDetail, user: str | None, key: str | None) -> Report | ResourceManagerError:
    if row["address"]:
        return ask(row["address"], user, key)
    if row["server_name"] == socket.gethostname():
        return ask_here()
    return ResourceManagerError(
        f"server {row['server_name']} has no address in the inventory, so it cannot be asked"
    )
