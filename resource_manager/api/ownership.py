"""A caller may touch what is his; an operator may touch everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from resource_manager.api.auth import Identity
from resource_manager.api.problems import ProblemError
from resource_manager.api.schemas import AllocateBody
from resource_manager.api.service import Service, owner_of
from resource_manager.cluster import ClusterState
from resource_manager.errors import LeaseNotFoundError


def arguments(body: AllocateBody, caller: Identity) -> dict[str, Any]:
    """The manager's arguments; the caller owns what he asks for, unless an operator names another."""
    arguments = body.model_dump(exclude_none=True)
    if body.owner not in ("", caller.name) and not caller.is_operator:
        raise ProblemError(403, f"{caller.name} may not allocate in the name of {body.owner}")
    arguments["owner"] = body.owner or caller.name
    return arguments


def own(view: dict[str, Any], caller: Identity) -> dict[str, Any]:
    """The view, unless the task id already was somebody else's."""
    if not caller.is_operator and owner_of(view) != caller.name:
        raise _taken(view["task_id"])
    return view


def refuse_taken(here: Service, caller: Identity, task_ids: Sequence[str]) -> None:
    """Refuses a batch with somebody else's lease in it before any of its requests is granted."""
    if caller.is_operator:
        return

    def taken(cluster: ClusterState, now: float) -> list[str]:
        leases = filter(None, map(cluster.leases.get, task_ids))
        return [lease.task_id for lease in leases if lease.request.owner != caller.name]

    for task_id in here.watch.look(taken):
        raise _taken(task_id)


def _taken(task_id: str) -> ProblemError:
    return ProblemError(409, f"task {task_id!r} belongs to somebody else")


def refuse_foreign(view: dict[str, Any], caller: Identity) -> None:
    if not caller.is_operator and owner_of(view) != caller.name:
        raise ProblemError(
            403, f"task {view['task_id']!r} belongs to {owner_of(view) or 'nobody'}, not to {caller.name}"
        )


def held_by(here: Service, caller: Identity, task_id: str, fencing_token: int | None) -> int:
    """The fencing token of the caller's lease, so that it cannot become another's before we act."""
    view = here.manager.status_of(task_id)
    if view is None or view["state"] == "WAITING":
        raise LeaseNotFoundError(task_id, fencing_token)
    refuse_foreign(view, caller)
    if fencing_token not in (None, view["fencing_token"]):
        raise LeaseNotFoundError(task_id, fencing_token)
    return int(view["fencing_token"])
