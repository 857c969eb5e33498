"""Launchers by name; each is imported at its first use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from resource_manager.core.models import JobPlace
from resource_manager.jobs.launchers.base import (
    JobSignals,
    Launcher,
    LauncherError,
    LauncherUnreachableError,
)


def _local(place: JobPlace) -> Launcher:
    from resource_manager.jobs.launchers.local import LocalLauncher

    return LocalLauncher(place=replace(place, address=""))


def _ssh(place: JobPlace) -> Launcher:
    from resource_manager.jobs.launchers.ssh import SSHLauncher

    return SSHLauncher(place)


def _docker(place: JobPlace) -> Launcher:
    from resource_manager.jobs.launchers.docker import DockerLauncher

    return DockerLauncher(place)


def _slurm(place: JobPlace) -> Launcher:
    from resource_manager.jobs.launchers.slurm import SlurmLauncher

    return SlurmLauncher(place)


def _agent(place: JobPlace) -> Launcher:
    from resource_manager.jobs.launchers.agent import AgentLauncher

    return AgentLauncher(place)


def _terminal(place: JobPlace) -> Launcher:
    from resource_manager.jobs.launchers.terminal import open_terminal

    return open_terminal(place)


LAUNCHERS: dict[str, Callable[[JobPlace], Launcher]] = {
    "local": _local,
    "ssh": _ssh,
    "docker": _docker,
    "slurm": _slurm,
    "agent": _agent,
}
"""Functions by name that open the launcher of a place; one without a machine is known by its address."""


TERMINAL = "terminal"
"""Label of jobs that `gpu-manager run` has in a terminal; no launcher starts them, but one finds them."""


def _local_signals(place: JobPlace) -> JobSignals:
    from resource_manager.jobs.launchers.local import LocalSignals

    return LocalSignals(place)


def _ssh_signals(place: JobPlace) -> JobSignals:
    from resource_manager.jobs.launchers.ssh import SSHSignals

    return SSHSignals(place)


def _docker_signals(place: JobPlace) -> JobSignals:
    from resource_manager.jobs.launchers.docker_signals import DockerSignals

    return DockerSignals(place)


SIGNALS: dict[str, Callable[[JobPlace], JobSignals]] = {
    "local": _local_signals,
    "ssh": _ssh_signals,
    "docker": _docker_signals,
}
"""Functions by launcher that open a standing look at the jobs of a place."""


def has_signals(place: JobPlace) -> bool:
    """Return whether there can be a standing look at the jobs of a place; else each is looked at alone."""
    return bool(place.machine) and place.launcher in SIGNALS


def open_signals(place: JobPlace) -> JobSignals:
    """Open a standing look at the jobs of a place; raises `LauncherError`."""
    return SIGNALS[place.launcher](place)


def open_at(place: JobPlace) -> Launcher:
    """Open the launcher of a place; once a job was prepared there, it looks there and nowhere else.

    Raises `LauncherError`, for a job that was prepared `LauncherUnreachableError`: it may run there.
    """
    try:
        try:
            make = _terminal if place.launcher == TERMINAL else LAUNCHERS[place.launcher]
        except KeyError:
            known = ", ".join(sorted(LAUNCHERS))
            raise LauncherError(f"unknown launcher {place.launcher!r}; known are {known}") from None
        return make(place)
    except LauncherError as error:
        if not place.machine or isinstance(error, LauncherUnreachableError):
            raise
        raise LauncherUnreachableError(str(error)) from error
