"""Who asks: the caller whose name the changes of an operation carry as `by`."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from resource_manager.core.changes import Change, DeadlineRisk, Granted, Preempting
from resource_manager.core.cluster import ClusterState
from resource_manager.core.direct_init import direct_copy
from resource_manager.core.identifiers import check_names
from resource_manager.core.names import Named, name_of
from resource_manager.errors import InvalidRequestError

MAX_BY = 600
"""The most characters of a caller's name: that of a task of Airflow has three ids, two of 250 at most."""

RESERVED = ("airflow:", "unix:", "agent:", "user:")
"""Beginnings of the names of callers that did not log in."""

Step = Callable[[ClusterState, float], list[Change]]


@dataclass(slots=True)
class Asking:
    """A caller, and the changes that were made because of what they asked for, while they ask."""

    by: str
    is_operator: bool = False
    teams: tuple[str, ...] = ()
    """The only ones that the caller may name; none: any."""
    changes: list[Change] = field(default_factory=list, init=False)
    entries: dict[str, Named] = field(default_factory=dict, init=False)
    """Leases and pending requests before the changes of them, by id: their names stay known."""

    def noting(self, step: Step) -> Step:
        """Return the step, noting what is there of the leases and requests that its changes are about."""

        def noted(cluster: ClusterState, now: float) -> list[Change]:
            changes = step(cluster, now)
            for change in changes:
                lease_id = getattr(change, "lease_id", "")
                if entry := cluster.leases.get(lease_id) or cluster.pending.get(lease_id):
                    self.entries[lease_id] = entry
            return changes

        return noted

    def names(self) -> dict[str, str]:
        """Return the names of what its changes are about and do not bring, by lease id."""
        return {lease_id: name_of(entry) for lease_id, entry in self.entries.items()}


_asking: ContextVar[Asking | None] = ContextVar("gpu_manager_asking", default=None)


@contextmanager
def asked_by(by: str, *, is_operator: bool = False, teams: tuple[str, ...] = ()) -> Iterator[Asking]:
    """Ask for everything inside, in this thread or task, in the name of `by`; empty: nobody asks.

    Operators may state any priority; `teams` are the only ones that the caller may name, none: any. The name
    goes before the manager's own name. Raises `InvalidRequestError` for a name that cannot be shown.
    """
    token = _asking.set(Asking(checked_by(by), is_operator, teams))
    try:
        yield _asking.get()  # type: ignore[misc]
    finally:
        _asking.reset(token)


def asking() -> Asking | None:
    """Return who asks in this thread or task, None if nobody said so."""
    return _asking.get()


def checked_by(by: str) -> str:
    """Return the name of a caller; raises `InvalidRequestError` if it is too long or cannot be printed."""
    check_names({"by": (by,)})
    if len(by) > MAX_BY:
        raise InvalidRequestError("{by} may have {} characters, got {:,}", MAX_BY, len(by))
    return by


def as_caller(name: str) -> str:
    """Return the name for the history of somebody who logged in under this one.

    It is never one of those that tasks, agents and users of machines have.
    """
    return f"user:{name}" if name.startswith(RESERVED) else name


@cache
def this_user() -> str:
    """Return who runs this process, as its system says: `unix:<user>@<host>`."""
    return _printable(f"unix:{user_name()}@{os.uname().nodename}")


@cache
def user_name() -> str:
    """Return the name of the user who runs this process; the number where a container's user has none."""
    try:
        return _printable(pwd.getpwuid(os.getuid()).pw_name)
    except KeyError:
        return str(os.getuid())


def _printable(name: str) -> str:
    return "".join(each if each.isascii() and each.isprintable() else "?" for each in name)[:MAX_BY]


def with_by(changes: Sequence[Change], by: str, sequence: int) -> list[Change]:
    """Return the changes of one operation, those that were asked for with `by`.

    The others are what it made possible: grants of requests that had arrived before, those up to `sequence`,
    and preemptions for such requests, which come after what was asked for.
    """
    stamped: list[Change] = []
    for change in changes:
        kind: type = type(change)
        if kind is Granted:
            is_asked = change.lease.sequence > sequence  # type: ignore[union-attr]
        else:
            is_asked = kind is not DeadlineRisk and (kind is not Preempting or not stamped)
        stamped.append(_copy_of(kind)(change, by) if is_asked else change)
    return stamped


@cache
def _copy_of(kind: type[Change]) -> Callable[[Any, str], Change]:
    return direct_copy(kind, "by")
