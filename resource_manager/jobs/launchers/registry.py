"""Launchers by name; each is imported at its first use."""

from __future__ import annotations

from collections.abc import Callable

from resource_manager.jobs.launchers.base import Launcher, LauncherError


def _local(address: str, conn_id: str | None) -> Launcher:
    from resource_manager.jobs.launchers.local import LocalLauncher

    return LocalLauncher(host=address)


def _ssh(address: str, conn_id: str | None) -> Launcher:
    from resource_manager.jobs.launchers.ssh import SSHLauncher

    return SSHLauncher(address, conn_id)


def _docker(address: str, conn_id: str | None) -> Launcher:
    from resource_manager.jobs.launchers.docker import DockerLauncher

    return DockerLauncher(address, conn_id)


def _terminal(address: str, conn_id: str | None) -> Launcher:
    from resource_manager.jobs.launchers.terminal import open_terminal

    return open_terminal(address)


LAUNCHERS: dict[str, Callable[[str, str | None], Launcher]] = {
    "local": _local,
    "ssh": _ssh,
    "docker": _docker,
}
"""Functions by name that take an address (see each launcher) and an Airflow connection id or None."""


TERMINAL = "terminal"
"""Label of jobs that `gpu-manager run` has in a terminal; no launcher starts them, but one finds them."""


def open_launcher(name: str, address: str = "", conn_id: str | None = None) -> Launcher:
    """Open a launcher by name for the server at `address`; raises `LauncherError`."""
    try:
        make = _terminal if name == TERMINAL else LAUNCHERS[name]
    except KeyError:
        known = ", ".join(sorted(LAUNCHERS))
        raise LauncherError(f"unknown launcher {name!r}; known are {known}") from None
    return make(address, conn_id)
