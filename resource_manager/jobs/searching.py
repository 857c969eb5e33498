"""Look by the launchers at a server of a restored state, for jobs of leases that the state does not know.

A look shows what one account keeps in its jobs folder there, or what one Docker engine runs. So a server
counts as seen only if each way by which jobs of the state's leases came to any server leads there, too, and
answers; where no lease of the state has a job, nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

from resource_manager.core.models import JobPlace
from resource_manager.jobs.directories import job_files
from resource_manager.jobs.launchers import LauncherUnreachableError, open_at
from resource_manager.jobs.launchers.base import is_key
from resource_manager.jobs.launchers.registry import TERMINAL
from resource_manager.jobs.launchers.terminal import is_here


def jobs_on(
    server: Mapping[str, Any], leases: Iterable[Mapping[str, Any]], *, has_agent: bool = False
) -> list[str]:
    """Return the keys of the jobs that run on the server; raises `LauncherError` if that is unknown.

    `has_agent`: its agent runs jobs; to any other server none came by an agent.
    """
    placed = [
        (member["server_name"], JobPlace(**place))
        for lease in leases
        for member, place in zip(lease["members"], lease["job_places"], strict=False)
    ]
    name = server["server_name"]
    machines = {place.machine for on, place in placed if on == name}
    here = job_files.machine() in machines or (server["address"] != "" and is_here(server["address"], name))
    ways = {replace(place, address="", machine="", mark="", walls="") for _, place in placed}
    if not has_agent:
        ways = {way for way in ways if way.launcher != "agent"}
    if not ways:
        raise LauncherUnreachableError(f"no lease says by which launcher jobs came to {name}")
    found: set[str] = set()
    for way in ways:
        with closing(open_at(_at(way, server, here=here))) as launcher:
            found |= set(filter(is_key, launcher.running()))
    return sorted(found)


def _at(way: JobPlace, server: Mapping[str, Any], *, here: bool) -> JobPlace:
    """Return the place on the server to which the way leads; raises `LauncherUnreachableError`."""
    if way.launcher == "agent":
        return replace(way, address=server["server_name"])
    if here and way.launcher in ("local", TERMINAL):
        return way
    if way.launcher == "local" or not server["address"]:
        raise LauncherUnreachableError(
            f"{server['server_name']} is not known to be this machine, as launcher {way.launcher!r} needs"
        )
    return replace(way, address=server["address"])
