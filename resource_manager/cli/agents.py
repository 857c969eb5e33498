"""`gpu-manager agent install` and `agent list`: agents on servers, from where the store is."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from inspect import getsource
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.exceptions import Exit

from resource_manager import __version__
from resource_manager.cli.agent_command import agent
from resource_manager.cli.base import BAD_INPUT, UNREACHABLE, Failure, one_line, print_json
from resource_manager.cli.discovering import MAX_CONNECTIONS, login_options, server_names
from resource_manager.cli.lazy_tables import tables
from resource_manager.cli.program import json_option, on_target, wide_option
from resource_manager.cli.signals import interruptible
from resource_manager.cli.target import Target, exit_codes
from resource_manager.cli.token_commands import token_store, tokens_file_option
from resource_manager.errors import ResourceManagerError
from resource_manager.manager.plurals import counted
from resource_manager.rest import tokens
from resource_manager.rest.tokens import Role, TokenStore

if TYPE_CHECKING:
    from resource_manager.manager.manager import GPUResourceManager

INSTALL_S = 120.0
FIRST_REPORT_S = 60.0
LOOK_EVERY_S = 1.0

PROGRAM = (
    "__init__.py",
    "lazy.py",
    "words.py",
    "errors.py",
    *(
        f"agent/{name}.py"
        for name in ("__init__", "__main__", "probe", "running", "generation", "sending", "mps")
    ),
)
"""Files of the package that an agent needs."""


@agent.command("install")
@click.argument("hosts", nargs=-1, metavar="HOST...")
@click.option("--all", "is_all", is_flag=True, help="Every server of the cluster that has an address.")
@click.option(
    "--service",
    "services",
    multiple=True,
    required=True,
    help="Address of the service, or of Airflow's page /gpu, as the servers reach it; repeatable: the next "
    "one takes the reports while one is away.",
)
@login_options
@tokens_file_option
@on_target
def install_agents(
    target: Target,
    hosts: tuple[str, ...],
    is_all: bool,
    services: tuple[str, ...],
    user: str | None,
    key: str | None,
    tokens_file: Path | None,
    as_json: bool,
) -> None:
    """Install or update the agent on servers by ssh, and wait for its first report.

    HOST is a server of the cluster, by its name or address, as [user@]host[:port]. Each gets the agent's
    files, a token that sends its reports only, and a systemd unit. It needs python3 and systemd, and a user
    who is root or may use sudo without a password. Run this where the store can be reached.
    """
    from resource_manager.agent.sending import ReportSender

    target.require_store("agent install reads the cluster of the store")
    store = token_store(target, tokens_file)
    ReportSender(" ".join(services))  # which refuses what is no address
    places = _places(target.on_store(), hosts, is_all=is_all)

    def install(place: tuple[str, str]) -> str:
        return _install(target.on_store(), store, *place, services, (user, key))

    def install_all() -> dict[str, str]:
        found = {}
        with ThreadPoolExecutor(MAX_CONNECTIONS) as threads:
            for name, why in zip(places, threads.map(install, places.items()), strict=True):
                found[name] = why
                line = f"Error: {name}: {one_line(why)}" if why else f"{name}: agent {__version__} reports"
                if not as_json:  # as they come: fifty servers take half a minute
                    click.echo(line, err=bool(why))
        return found

    problems = interruptible(install_all)
    failed = [name for name, why in problems.items() if why]
    if as_json:
        print_json([{"server_name": name, "error": why or None} for name, why in problems.items()])
    elif failed and len(problems) > 1:
        count, again = f"{len(failed)} of {counted(len(problems), 'server')}", " ".join(failed)
        click.echo(f"{count} without a report; once mended, agent install {again}", err=True)
    if failed:
        raise Exit(UNREACHABLE)


def _places(manager: GPUResourceManager, hosts: Sequence[str], *, is_all: bool) -> dict[str, str]:
    """Return where to log in, by server; raises `Failure` for a host that is no server of the cluster."""
    addresses = {row["server_name"]: row["address"] for row in manager.servers()}
    if is_all == bool(hosts):
        raise Failure("name the servers, or --all of the cluster", BAD_INPUT)
    if is_all:
        return {name: address for name, address in addresses.items() if address}
    server_names(hosts)  # which refuses what is no HOST
    places: dict[str, str] = {}
    for host in hosts:
        name = _server_at(host, addresses) or manager.server(host)["server_name"]  # raises with the nearest
        if name in places:
            raise Failure(f"HOST {host!r} is given twice: it is server {name}", BAD_INPUT)
        places[name] = _place(host, addresses[name] or name)
    return places


def _server_at(host: str, addresses: Mapping[str, str]) -> str | None:
    """Return the server that HOST is, by its name, or its address with the port; None if there is none.

    The name goes first, unless HOST has a port. Raises `Failure` if several servers are at that host.
    """
    from resource_manager.jobs.launchers.plain_ssh import parts_of

    name = host.rpartition("@")[2].partition(":")[0]
    _, at, port = parts_of(host)
    if port is None and name in addresses:
        return name
    known = {server: parts_of(address)[1:] for server, address in addresses.items() if address}
    found = [server for server, (its, own) in known.items() if its == at and (own or 22) == (port or 22)]
    if not found and port is None:
        found = [server for server, (its, _) in known.items() if its == at]
    if len(found) > 1:
        raise Failure(f"HOST {host!r} is the address of {', '.join(found)}: name the server", BAD_INPUT)
    return found[0] if found else name if name in addresses else None


def _place(host: str, address: str) -> str:
    """Return a server's address, with the user and the port that HOST names in place of its own."""
    from resource_manager.jobs.launchers.plain_ssh import parts_of

    user, _, port = parts_of(host)
    if not (user or port):
        return address
    own_user, at, own_port = parts_of(address)
    login, number = user or own_user, port or own_port
    where = f"[{at}]" if at and ":" in at else at
    return f"{f'{login}@' if login else ''}{where}{f':{number}' if number else ''}"


def _install(
    manager: GPUResourceManager,
    store: TokenStore,
    server: str,
    address: str,
    services: Sequence[str],
    login: tuple[str | None, str | None],
) -> str:
    """Install the agent of a server; return why it does not report, empty if it does.

    Tokens that an agent of it may have go on: the older ones until a report is taken under the new one, the
    new one as soon as its program was sent, however that ended.
    """
    from resource_manager.jobs.launchers import LauncherError, LauncherUnreachableError, NoAnswerError

    name = f"agent of {server}"  # one of this server that was made by hand may be that of another agent
    older = [each.token_id for each in store.read().values() if (each.name, each.server) == (name, server)]
    text = tokens.create(store, name, Role.AGENT, server=server)
    made = tokens.find(store.read(), text)
    assert made is not None
    begun_at = time.monotonic()
    try:
        if why := _run_there(address, server, _program(server, services, text), login):
            return why
        deadline = time.monotonic() + FIRST_REPORT_S
        while True:
            [use] = manager.gpus([server])  # one that was refused is not there
            is_new = use["age_s"] is not None and use["age_s"] < time.monotonic() - begun_at
            if is_new and use["agent_version"] == __version__ and made.token_id in store.last_uses():
                break
            if time.monotonic() > deadline:
                return f"no report at {services[0]} yet: journalctl -u gpu-manager-agent there says why"
            time.sleep(LOOK_EVERY_S)
        for token_id in older:
            store.delete(token_id)
        return use["error"]
    except LauncherError as error:
        if isinstance(error, NoAnswerError) or not isinstance(error, LauncherUnreachableError):
            store.delete(made.token_id)  # nothing was sent
        return str(error)
    except ResourceManagerError as error:
        return str(error)


def _program(server: str, services: Sequence[str], token: str) -> str:
    """Return the program that installs the agent on a server, where its standard input has it."""
    from resource_manager.agent import install

    package = Path(__file__).parents[1]
    files = {f"resource_manager/{name}": (package / name).read_text(encoding="utf-8") for name in PROGRAM}
    settings = {
        "GPU_MANAGER_URL": f'"{" ".join(services)}"',
        "GPU_MANAGER_SERVER": server,
        "GPU_MANAGER_AGENT_TOKEN": token,
    }
    lines = "".join(f"{name}={value}\n" for name, value in settings.items())
    unit = (package / "agent" / install.UNIT).read_text(encoding="utf-8")
    again = f"{getsource(install)}\ninstall('', {files!r}, {lines!r}, {unit!r})\n"
    return f"{getsource(install)}\ninstall({again!r}, {files!r}, {lines!r}, {unit!r})\n"


def _run_there(address: str, server: str, program: str, login: tuple[str | None, str | None]) -> str:
    """Run a program on a server, or here where that is this machine; return why it failed, if it did."""
    from resource_manager.jobs.launchers.ssh_python import SSHPython
    from resource_manager.jobs.launchers.terminal import is_here

    if is_here(address, server):
        done = subprocess.run([sys.executable, "-"], input=program, capture_output=True, text=True)
        code, said = done.returncode, done.stderr
    else:
        with closing(SSHPython(address, user=login[0], key_file=login[1])) as there:
            code, _, said = there.run(program, INSTALL_S)
    lines = said.strip().splitlines() or [f"the installation ended with {code}"]
    return lines[-1] if code else ""


@agent.command("list")
@json_option
@wide_option
@click.pass_obj
@exit_codes
def list_agents(target: Target, as_json: bool, wide: bool) -> None:
    """List the servers with the version of their agents and the time since the last report."""
    from resource_manager.cli.fitted_table import Column, FittedTable
    from resource_manager.manager.answer_words import duration

    uses: Sequence[Mapping[str, Any]] = target.manager.gpus()
    shown = ("server_id", "server_name", "watched", "age_s", "agent_version", "driver", "error")
    if as_json:
        print_json([{name: use[name] for name in shown} for use in uses])
        return
    table = FittedTable(Column("server"), Column("agent"), Column("last report"), Column("driver", 2))
    for use in uses:
        version = use["agent_version"] or "–"
        stale = "" if use["agent_version"] in (None, __version__) else f" (here {__version__})"
        age = "never" if use["age_s"] is None else f"{duration(use['age_s'])} ago"
        table.add_row(use["server_name"], version + stale, age, use["error"] or use["driver"] or "")
    tables.console(wide=wide).print(table)
    silent = sum(use["agent_version"] is None for use in uses)
    if silent:
        install = "gpu-manager agent install HOST… --service URL"
        click.echo(f"{counted(silent, 'server')} without an agent: {install}", err=True)
