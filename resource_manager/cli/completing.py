"""Ids and names that the shell completes, asked of the store or service that the command line names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click

from resource_manager.cli.target import Target
from resource_manager.errors import ResourceManagerError

CONNECT_TIMEOUT_S = 0.5
"""Time that a service may take to listen while somebody types."""

Complete = Callable[[click.Context, click.Parameter, str], list[str]]

COLONS = "COMP_WORDBREAKS=${COMP_WORDBREAKS//:/}\n"
"""Line before bash's script: ids have colons, at which bash would break them into words."""


def _completes(ask: Callable[[Any], Iterable[str]]) -> Complete:
    """Return a completion by what a manager answers; none while it does not answer."""

    def complete(context: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        target = Target.of(context.find_root().params, connect_timeout_s=CONNECT_TIMEOUT_S)
        try:
            return [name for name in ask(target.manager) if name.startswith(incomplete)]
        except (ResourceManagerError, click.ClickException, ImportError, OSError, ValueError):
            return []
        finally:
            target.close()

    return complete


def _ids(entries: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(entry["task_id"] for entry in entries))


leases = _completes(lambda manager: _ids(manager.leases()))
pending = _completes(lambda manager: _ids(manager.queue()))
tasks = _completes(lambda manager: _ids([*manager.leases(), *manager.queue()]))
servers = _completes(
    lambda manager: [server["server_name"] for server in manager.get_resource_summary()["servers"]]
)
