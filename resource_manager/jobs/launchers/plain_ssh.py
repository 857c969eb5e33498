"""Connection by ssh without Airflow, whose hook takes seconds to load."""

from __future__ import annotations

import getpass
import logging
import os
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from resource_manager.errors import how_to_install
from resource_manager.jobs.launchers.base import LauncherError

CONNECT_TIMEOUT_S = 10.0
LOGIN_TIMEOUT_S = 30.0


def parts_of(address: str) -> tuple[str | None, str | None, int | None]:
    """Return user, host and port of `[user@]host[:port]`; raises `LauncherError`."""
    try:
        found = urlsplit(address if "://" in address else f"ssh://{address}")
        return found.username, found.hostname, found.port
    except ValueError as error:
        raise LauncherError(f"address {address!r} is not [user@]host[:port]: {error}") from error


def silence() -> None:
    """Keep paramiko's log off standard output, where commands write JSON; its errors are raised anyway."""
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)


def plain_connection(address: str, user: str | None = None, key_file: str | None = None) -> Callable[[], Any]:
    """Return a function that logs in to `[user@]host[:port]` and returns paramiko's client.

    The server's key must be in `~/.ssh/known_hosts`. Of `~/.ssh/config` it reads what Airflow's hook reads
    too, so that jobs reach the same servers: key and proxy command. Raises `LauncherError`.
    """
    try:
        import paramiko
    except ImportError as error:
        raise LauncherError(f"ssh needs paramiko: {how_to_install('ssh')}") from error
    silence()
    own_user, host, port = parts_of(address)
    if not host:
        raise LauncherError(f"address {address!r} names no host")

    def connect() -> paramiko.SSHClient:
        this_user = _this_user()  # which paramiko needs for any configuration
        path = os.path.expanduser("~/.ssh/config")
        config = paramiko.SSHConfig.from_path(path) if os.path.isfile(path) else paramiko.SSHConfig()
        known = config.lookup(host)
        proxy = known.get("proxycommand")
        client = paramiko.SSHClient()
        client.load_system_host_keys()
        try:
            client.connect(
                host,
                port or 22,
                own_user or user or this_user,
                key_filename=key_file or known.get("identityfile"),
                sock=paramiko.ProxyCommand(proxy) if proxy else None,
                timeout=CONNECT_TIMEOUT_S,
                banner_timeout=LOGIN_TIMEOUT_S,
                auth_timeout=LOGIN_TIMEOUT_S,
            )
        except BaseException:
            client.close()  # its thread and its connection would live on
            raise
        return client

    return connect


def _this_user() -> str:
    """Return the name of the user who runs this; raises `OSError` where a container's user has none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError) as error:
        raise OSError("the user of this process has no name: set USER to the one to log in as") from error
