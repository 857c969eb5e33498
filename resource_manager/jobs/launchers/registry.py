"""Launchers by name; each is imported at its first use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

from resource_manager.core.models import JobPlace
from resource_manager.jobs.launchers.base import JobSignals, Launcher, LauncherError, LauncherUnreachableError


def _local(place: JobPlace) -> Launcher:
    from resource_manager.jobs.launchers.local import LocalLauncher

    return LocalLauncher(place=replace(place, address=""))


def _first_use(module: str, name: str) -> Callable[[JobPlace], Any]:
    """Return a function that imports what a module of this room calls by that name, and calls it."""

    def opened(place: JobPlace) -> Any:
        return getattr(import_module(f"{__package__}.{module}"), name)(place)

    return opened


LAUNCHERS: dict[str, Callable[[JobPlace], Launcher]] = {
    "local": _local,
    "ssh": _first_use("ssh", "SSHLauncher"),
    "docker": _first_use("docker", "DockerLauncher"),
    "slurm": _first_use("slurm", "SlurmLauncher"),
    "agent": _first_use("agent", "AgentLauncher"),
}
"""Functions by name that open the launcher of a place; one without a machine is known by its address."""

TERMINAL = "terminal"
"""Label of jobs that `gpu-manager run` has in a terminal; no launcher starts them, but one finds them."""

_terminal = _first_use("terminal", "open_terminal")

SIGNALS: dict[str, Callable[[JobPlace], JobSignals]] = {
    "local": _first_use("local", "LocalSignals"),
    "ssh": _first_use("ssh", "SSHSignals"),
    "docker": _first_use("docker_signals", "DockerSignals"),
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
    make = _terminal if place.launcher == TERMINAL else LAUNCHERS.get(place.launcher)
    try:
        if make is None:
            known = ", ".join(sorted(LAUNCHERS))
            raise LauncherError(f"unknown launcher {place.launcher!r}; known are {known}")
        return make(place)
    except LauncherError as error:
        if not place.machine or isinstance(error, LauncherUnreachableError):
            raise
        raise LauncherUnreachableError(str(error)) from error
