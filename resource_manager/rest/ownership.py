"""Owner checks: a caller may change their own leases and requests, an operator all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from resource_manager.core.cluster import ClusterState
from resource_manager.errors import LeaseNotFoundError
from resource_manager.rest.auth import Identity
from resource_manager.rest.problems import ProblemError
from resource_manager.rest.schemas import AllocateBody
from resource_manager.rest.service import Service, owner_of


def arguments(body: AllocateBody, caller: Identity) -> dict[str, Any]:
    """Return the manager's arguments; the caller is the owner unless an operator names another.

    A caller of some teams asks for one of them: without a `team`, for the first.
    """
    arguments = body.model_dump(exclude_none=True)
    if body.owner not in ("", caller.name) and not caller.is_operator:
        raise ProblemError(
            403, f"owner must be {caller.name}, got {body.owner}: only an operator may name another"
        )
    arguments["owner"] = body.owner or caller.name
    if caller.teams and not caller.is_operator:
        if body.team not in ("", *caller.teams):
            raise ProblemError(
                403, f"team must be one of {caller.name}'s ({', '.join(caller.teams)}), got {body.team}"
            )
        arguments["team"] = body.team or caller.teams[0]
    return arguments


def own(view: dict[str, Any], caller: Identity) -> dict[str, Any]:
    """Return the view; raise 409 if the task id belongs to another owner."""
    if not caller.is_operator and owner_of(view) != caller.name:
        raise _taken(view["task_id"])
    return view


def refuse_taken(service: Service, caller: Identity, task_ids: Sequence[str]) -> None:
    """Raise 409 if a task id of a batch has another owner's lease, before any of its requests is granted."""
    if caller.is_operator:
        return

    def taken(cluster: ClusterState, now: float) -> list[str]:
        leases = filter(None, map(cluster.leases.get, task_ids))
        return [lease.lease_id for lease in leases if lease.request.owner != caller.name]

    for task_id in service.watch.look(taken):
        raise _taken(task_id)


def _taken(task_id: str) -> ProblemError:
    return ProblemError(409, f"task {task_id!r} belongs to another owner: use another task_id")


def require_owner(view: dict[str, Any], caller: Identity) -> None:
    if not caller.is_operator and owner_of(view) != caller.name:
        raise ProblemError(
            403, f"task {view['task_id']!r} belongs to {owner_of(view) or 'no owner'}, not to {caller.name}"
        )


def owned_lease(service: Service, caller: Identity, task_id: str, fencing_token: int | None) -> int:
    """Return the fencing token of the caller's lease, so that a change cannot hit a later lease."""
    view = service.manager.status_of(task_id)
    if view is None or view["state"] == "WAITING":
        raise LeaseNotFoundError(task_id, fencing_token)
    require_owner(view, caller)
    if fencing_token not in (None, view["fencing_token"]):
        raise LeaseNotFoundError(task_id, fencing_token)
    return int(view["fencing_token"])
