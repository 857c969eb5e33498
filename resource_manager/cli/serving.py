"""Command `serve`, which runs the service."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from resource_manager import __version__
from resource_manager.agent.generation import state_folder
from resource_manager.cli.base import BAD_INPUT, FILE, Failure, is_terminal
from resource_manager.cli.program import main
from resource_manager.cli.reconciling import AirflowLogin, airflow_options
from resource_manager.cli.signals import PROMPT_S, Calls, Interrupted, Signals, leave
from resource_manager.cli.target import Target, exit_codes
from resource_manager.cli.token_commands import tokens_file_option
from resource_manager.rest.private_file import secret_in

if TYPE_CHECKING:  # imported at run time only by the commands that need them
    from resource_manager.rest.chores import Chore
    from resource_manager.rest.service import Service
    from resource_manager.rest.tokens import Token
    from resource_manager.settings import Settings

logger = logging.getLogger(__name__)

DEFAULT_RATE = "1000/second"
ARCHIVE_S = 5.0
AUDIT_S = 1.0
SECRET_S = 10.0

DRAIN_S = PROMPT_S - 1
"""Longest wait for requests that have come, at the end of the service."""

SWITCH_S = 0.001
"""Longest run of a thread while others wait: a short call has its turn several times beside dear ones."""


def _proxy_address(context: click.Context, option: click.Parameter, text: str | None) -> str | None:
    """Return the address as connections have it: a name would be that of none, and nobody would be told."""
    try:
        return str(ip_address(text)) if text and text != "*" else text
    except ValueError as error:
        raise click.BadParameter(f"must be an address such as 127.0.0.1, got {text!r}") from error


@main.command()
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=5000, show_default=True)
@click.option("--threads", type=click.IntRange(1, 256), default=16, show_default=True)
@click.option(
    "--max-streams", type=click.IntRange(0, 1000), default=64, show_default=True, help="Most live pages."
)
@click.option(
    "--max-connections-per-address",
    type=click.IntRange(1, 10_000),
    default=128,
    show_default=True,
    help="Most connections of one address, but for the trusted proxy.",
)
@click.option("--rate-limit", envvar="GPU_MANAGER_RATE_LIMIT", default=DEFAULT_RATE, show_default=True)
@airflow_options(required=False)
@click.option(
    "--insecure", is_flag=True, help="Without tokens but of agents, allow everything to all who can connect."
)
@click.option("--behind-https", is_flag=True, help="Send session cookies over HTTPS only.")
@click.option(
    "--trusted-proxy",
    callback=_proxy_address,
    help="Address of the reverse proxy whose X-Forwarded-For is trusted.",
)
@click.option(
    "--log-format", type=click.Choice(["json", "text"]), help="Default: text on a terminal, else json."
)
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
@click.option(
    "--archive",
    envvar="GPU_MANAGER_ARCHIVE",
    type=FILE,
    help="Append every change to this file, before the store drops it.",
)
@click.option(
    "--audit",
    envvar="GPU_MANAGER_AUDIT",
    metavar="FILE|syslog",
    help="Append every change to this file, or send it to this machine's syslog, within a second.",
)
@click.option(
    "--sign-on-secret",
    "client_secret",
    envvar="GPU_MANAGER_SIGN_ON_SECRET",
    type=FILE,
    help="File with the secret of this service at the provider of [sign_on], if it has one.",
)
@click.option(
    "--notice-secret",
    envvar="GPU_MANAGER_NOTICE_SECRET",
    type=FILE,
    help="File with the secret that signs the notices to webhooks.",
)
@click.option("--example", is_flag=True, help="Give an empty store 4 servers with 8 GPUs each, to try it.")
@tokens_file_option
@click.pass_obj
@exit_codes
def serve(
    target: Target,
    host: str,
    port: int,
    threads: int,
    max_streams: int,
    max_connections_per_address: int,
    rate_limit: str,
    airflow: AirflowLogin,
    insecure: bool,
    behind_https: bool,
    trusted_proxy: str | None,
    log_format: str | None,
    log_level: str,
    archive: Path | None,
    audit: str | None,
    client_secret: Path | None,
    notice_secret: Path | None,
    example: bool,
    tokens_file: Path | None,
) -> None:
    """Serve the REST API and the console."""
    from resource_manager.errors import NO_SERVERS
    from resource_manager.manager.audit_trail import audit_trail
    from resource_manager.rest.app import create_app
    from resource_manager.rest.assemble import mark_file, persistence_of, standalone
    from resource_manager.rest.http_server import bounded_server
    from resource_manager.rest.observability import logs
    from resource_manager.storage.archive import extend

    target.require_store("serve runs on a store")
    _require_temporary_folder()
    if airflow.url and not airflow.url.startswith(("http://", "https://")):  # links would lead nowhere
        raise Failure(f"--airflow-url must begin with http:// or https://, got {airflow.url!r}", BAD_INPUT)
    settings = target.settings()
    kept = persistence_of(settings, tokens_file)
    if example:
        _add_example(settings)
    manager = target.on_store()
    has_sign_on = manager.read(lambda cluster, now: cluster.settings.sign_on is not None)
    known = kept.tokens.read()  # with a sign-on, too: a broken file of tokens is told now
    opening = "" if has_sign_on else opening_of(known, host, insecure=insecure)
    notice_key = secret_in(notice_secret)
    records: list[Chore] = [("session secret", SECRET_S, kept.keep_secret)]
    if archive is not None:
        extend(archive, manager)
        records.append(("archive", ARCHIVE_S, lambda: extend(archive, manager)))
    if audit is not None:
        records.append(("audit", AUDIT_S, audit_trail(manager, audit, state_folder()).follow))
    logs.configure(log_format or ("text" if is_terminal(sys.stderr) else "json"), log_level)
    service = standalone(
        manager,
        kept,
        open_to=opening,
        rate=rate_limit,
        airflow_url=airflow.url,
        airflow_api=airflow.states if airflow.is_complete else None,
        max_streams=max_streams,
        threads=threads,
        client_secret=secret_in(client_secret),
    )
    beside = [] if archive is None else [archive.with_name(f"{archive.name}.mark")]
    service.receiver.marks.keep_in([mark_file(settings), *beside])
    if not manager.inventory:
        logger.warning("%s", target.placed(NO_SERVERS))
    if opening:
        logger.warning(
            "there are no tokens%s, so whoever reaches %s is an operator: gpu-manager token create, then "
            "start it again",
            " but of agents" if known else "",
            "this machine" if opening == "loopback" else "this address",
        )
    app = create_app(service, secure_cookies=behind_https)
    try:
        server = bounded_server(
            app,
            host,
            port,
            threads=threads + max_streams,
            max_per_address=max_connections_per_address,
            trusted_proxy=trusted_proxy,
        )
    except (OSError, ValueError) as error:  # such as a port in use, or a name that waitress cannot resolve
        why = getattr(error, "strerror", None) or "no address of that name or port is known here"
        raise Failure(f"--host {host} --port {port}: {why}", BAD_INPUT) from error
    if not _serve(server, service, notice_key, records):
        leave(0)


def _require_temporary_folder() -> None:
    """Raise `Failure` if there is no folder in which long bodies and answers can wait."""
    import tempfile

    try:
        tempfile.gettempdir()
    except OSError as error:
        raise Failure(
            "serve needs a folder for temporary files that it can write: set TMPDIR, or in a container that "
            "is read-only docker run --tmpfs /tmp",
            BAD_INPUT,
        ) from error


def _add_example(settings: Settings) -> None:
    """Write the servers of the original to an empty store; raises `SettingsError` if it has others."""
    from resource_manager.manager.cluster_file.servers import default_inventory
    from resource_manager.manager.manager import GPUResourceManager

    GPUResourceManager(settings, inventory=default_inventory()).close()


def opening_of(known: Mapping[str, Token], host: str, *, insecure: bool) -> str:
    """Return who may call without a token: "loopback", "everyone" if insecure, or empty: nobody.

    Unless insecure the token of an agent counts, too: servers reach the service, so others may. Raises
    `Failure` for an address that other machines can reach.
    """
    from resource_manager.rest.tokens import has_callers

    if has_callers(known) if insecure else known:
        return ""
    if insecure:
        return "everyone"
    if not _is_loopback(host):
        raise Failure(
            f"--host {host} can be reached from other machines and there are no tokens: make one with "
            "`gpu-manager token create NAME --role operator`, or add --insecure",
            BAD_INPUT,
        )
    return "loopback"


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _serve(server: Any, service: Service, notice_key: str, records: Sequence[Chore]) -> bool:
    """Serve until a signal comes; return False if something still waits for a silent store."""
    from resource_manager.rest.chores import begin_chores

    sys.setswitchinterval(SWITCH_S)
    with Signals() as signals:
        for address in addresses(server):
            logger.info("serving at %s", address, extra={"address": address, "version": __version__})
        stop = threading.Event()
        chores = begin_chores(service, notice_key, stop, records)
        serving = Calls(signals).begin(server.run)
        with suppress(Interrupted):
            signals.result(serving)
        logger.info("stopping")
        stop.set()
        ends_at = time.monotonic() + PROMPT_S
        closing = Calls(signals).begin(lambda: _close(server, service))
        is_closed = signals.is_settled(closing, PROMPT_S)
        for chore in chores:
            chore.join(max(ends_at - time.monotonic(), 0.0))
        return is_closed and not any(chore.is_alive() for chore in chores)


def _close(server: Any, service: Service) -> None:
    """Take no more connections, close live pages, and let requests be answered that have come."""
    from resource_manager.rest.http_server import drain, stop_listening

    listeners = stop_listening(server)
    service.watch.close()
    drain(listeners, DRAIN_S)
    server.task_dispatcher.shutdown(timeout=PROMPT_S)


def addresses(server: Any) -> list[str]:
    """Return the URLs of a waitress server; a name such as localhost often has an IPv4 and an IPv6 one."""
    sockets = getattr(server, "effective_listen", None)  # only a server of several sockets has it
    return [
        f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        for host, port in sockets or [(server.effective_host, server.effective_port)]
    ]
