"""Names that the shell completes, asked of the store or service that the command line names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import click
from click.shell_completion import CompletionItem

from resource_manager.cli.target import Target
from resource_manager.errors import ResourceManagerError

CONNECT_TIMEOUT_S = 0.5
"""Time that a service may take to listen while somebody types."""

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]

_PLAIN = re.compile(r"[\w.:/@+][][\w.:/@+=,-]*")
"""Word that no shell reads as more, since bash takes it as it is; what is called otherwise has a short id."""

COLONS = "COMP_WORDBREAKS=${COMP_WORDBREAKS//:/}\n"
"""Line before bash's script: ids have colons, at which bash would break them into words."""


def _completes(ask: Callable[[Any, str], Iterable[CompletionItem]]) -> Complete:
    """Return a completion by what a manager answers; none while it does not answer."""

    def complete(context: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        target = Target.of(context.find_root().params, connect_timeout_s=CONNECT_TIMEOUT_S)
        try:
            words = ask(target.manager, incomplete)
            begun = (word for word in words if word.value.startswith(incomplete))
            return [word for word in begun if _PLAIN.fullmatch(word.value)]
        except (ResourceManagerError, click.ClickException, ImportError, OSError, ValueError):
            return []
        finally:
            target.close()

    return complete


def _names(entries: Iterable[Any], incomplete: str) -> list[CompletionItem]:
    """Return short ids with what has them, then the names of one alone; full ids once one is begun."""
    listed = list(entries)
    counts = Counter(entry["name"] for entry in listed)
    words = {entry["short_id"]: CompletionItem(entry["short_id"], help=entry["name"]) for entry in listed}
    for entry in listed:
        if counts[entry["name"]] == 1:
            words[entry["name"]] = CompletionItem(entry["name"])
        if incomplete:
            words[entry["task_id"]] = CompletionItem(entry["task_id"])
    return list(words.values())


leases = _completes(lambda manager, incomplete: _names(manager.leases(), incomplete))
pending = _completes(lambda manager, incomplete: _names(manager.queue(estimated=False), incomplete))
tasks = _completes(
    lambda manager, incomplete: _names([*manager.leases(), *manager.queue(estimated=False)], incomplete)
)
servers = _completes(lambda manager, _: [CompletionItem(each["server_name"]) for each in manager.servers()])
