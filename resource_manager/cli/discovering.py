"""`gpu-manager discover`: ask servers for their GPUs, and write an inventory of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import click
from click.exceptions import Exit

from resource_manager.cli.base import BAD_INPUT, FILE, UNREACHABLE, Failure, one_line, print_json
from resource_manager.cli.program import json_option, main
from resource_manager.cli.signals import interruptible
from resource_manager.cli.target import F, exit_codes
from resource_manager.errors import ResourceManagerError
from resource_manager.manager.plurals import counted

if TYPE_CHECKING:  # pydantic takes most of the time that --help may take
    from resource_manager.agent.report_format import Report
    from resource_manager.fleet.health import HealthTable

MAX_CONNECTIONS = 32

S = TypeVar("S")
A = TypeVar("A")

health_option = click.option(
    "--health",
    "health_path",
    type=FILE,
    help="Cluster file whose [health] replaces rules of the built-in table.",
)


def login_options(command: F) -> F:
    """Add `--user` and `--key`, for servers that are asked by ssh."""
    key = click.Path(exists=True, dir_okay=False)
    command = click.option("--key", type=key, help="File with the private key.")(command)
    return click.option("--user", help="User to log in as, where the server's address names none.")(command)


@main.command()
@click.argument("hosts", nargs=-1, metavar="[HOST]...")
@login_options
@click.option(
    "--output", type=FILE, help="File to write the inventory to; without it and without --json it is printed."
)
@health_option
@json_option
@exit_codes
def discover(
    hosts: tuple[str, ...],
    user: str | None,
    key: str | None,
    output: Path | None,
    health_path: Path | None,
    as_json: bool,
) -> None:
    """Find the GPUs of servers and write an inventory that names them by UUID.

    HOST is [user@]host[:port], reached by ssh; without one, this machine is meant. Nothing is installed on
    the servers, which need python3. A server that gives no report is one line on standard error; the others
    are still printed, and the exit code is 3.
    """
    from resource_manager.cli.doctor.checks import next_step
    from resource_manager.fleet.health import health_table
    from resource_manager.fleet.inventory_text import Discovered, inventory_toml
    from resource_manager.manager.cluster_file.reading import load_health

    if not hosts and (user or key):
        raise Failure("--user and --key go with a HOST", BAD_INPUT)
    names = server_names(hosts)
    table = health_table(() if health_path is None else load_health(health_path))
    found = []
    answers = of_each(hosts, lambda host: ask(host, user, key)) if hosts else [ask_here()]
    for host, name, answer in zip(hosts or ("",), names or ("",), answers, strict=True):
        if isinstance(answer, ResourceManagerError):
            step = next_step(str(answer))
            click.echo(f"Error: {one_line(answer)}{f': {step}' if step else ''}", err=True)
        else:
            report = answer.model_copy(update={"server": name}) if name else answer
            found.append(Discovered(host, report))
    if as_json:
        print_json([as_dict(server.report, table) for server in found])
    if found and output is not None:
        _write(output, inventory_toml(found))
        gpus = sum(len(server.report.gpus) for server in found)
        click.echo(f"{output}: {counted(len(found), 'server')} with {counted(gpus, 'GPU')}", err=as_json)
    elif found and not as_json:
        click.echo(inventory_toml(found), nl=False)
    if len(found) < len(answers):
        raise Exit(UNREACHABLE)


def as_dict(report: Report, table: HealthTable) -> dict[str, Any]:
    """Return the report as it is printed: with the findings about each GPU."""
    from resource_manager.fleet.health import findings

    shown = report.model_dump()
    for gpu, of_gpu in zip(shown["gpus"], report.gpus, strict=True):
        gpu["health"] = [
            {"condition": each.condition, "action": each.action, "text": each.text, "todo": each.todo}
            for each in findings(of_gpu, table)
        ]
    return shown


def server_names(hosts: Sequence[str]) -> list[str]:
    """Return the servers' names: the host without user and port, or with the port where that is no name."""
    parts = []
    for host in hosts:
        try:
            found = urlsplit(f"ssh://{host}")
            parts.append((found.hostname or "", found.port))
        except ValueError:
            parts.append(("", None))
        if not re.fullmatch(r"[A-Za-z0-9._:-]+", parts[-1][0]):
            raise Failure(f"HOST {host!r} is not [user@]host[:port]", BAD_INPUT)
    often = Counter(name for name, _ in parts)
    names = [(name if often[name] == 1 else f"{name}-{port or 22}").replace(":", "-") for name, port in parts]
    twice = [host for host, name in zip(hosts, names, strict=True) if names.count(name) > 1]
    if twice:
        raise Failure(f"HOST {twice[-1]!r} is given twice", BAD_INPUT)
    return names


def ask_here() -> Report | ResourceManagerError:
    """Return the report of this machine, or the reason why there is none."""
    from resource_manager.agent.running import NoReportError, probe_here

    try:
        return probe_here()
    except NoReportError as error:
        return NoReportError(f"this machine gave no report: {error}")


def of_each(servers: Sequence[S], ask_one: Callable[[S], A]) -> list[A]:
    """Return what each server answers, `MAX_CONNECTIONS` asked at a time; a signal ends the program."""
    from concurrent.futures import ThreadPoolExecutor

    def ask_at_once() -> list[A]:
        with ThreadPoolExecutor(MAX_CONNECTIONS) as threads:
            return list(threads.map(ask_one, servers))

    return interruptible(ask_at_once)


def ask(host: str, user: str | None, key: str | None) -> Report | ResourceManagerError:
    """Return the report of a server by ssh, or the reason why there is none."""
    from resource_manager.agent.running import TIMEOUT_S, NoReportError, program, read_answer
    from resource_manager.jobs.launchers import LauncherError
    from resource_manager.jobs.launchers.ssh_python import SSHPython

    try:
        with closing(SSHPython(host, user=user, key_file=key)) as server:
            return read_answer(*server.run(program(), TIMEOUT_S))
    except NoReportError as error:
        return NoReportError(f"server {host} gave no report: {error}")
    except LauncherError as error:
        return error


def _write(path: Path, text: str) -> None:
    """Write the file in one step, so that no reader sees half of it."""
    from resource_manager.storage.draft_file import replacing

    try:
        with replacing(path) as file:
            file.write(text)
    except OSError as error:
        raise Failure(f"--output {path}: {error.strerror}", BAD_INPUT) from error
