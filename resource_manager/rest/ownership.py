"""Owner checks: a caller may change their own leases and requests, an operator all of them."""

from __future__ import annotations

from resource_manager.core.models import Request
from resource_manager.errors import LeaseNotFoundError, OtherOwnerError, ResourceManagerError
from resource_manager.manager.results import Allocation
from resource_manager.manager.stored_jobs import JobResult
from resource_manager.rest.auth import Identity
from resource_manager.rest.problems import ProblemError
from resource_manager.rest.schemas import AllocateBody
from resource_manager.rest.service import Service


def owned(service: Service, body: AllocateBody, caller: Identity) -> AllocateBody:
    """Return the demand with its owner: the caller, unless an operator names another.

    A caller of some teams asks for one of them: without a `team`, for the first. In a team with a longest
    runtime only an operator's lease is quarantined where no job was placed: it would be held beyond it.
    """
    if body.owner not in ("", caller.name) and not caller.is_operator:
        raise ProblemError(
            403, f"owner must be {caller.name}, got {body.owner}: only an operator may name another"
        )
    theirs: dict[str, object] = {"owner": body.owner or caller.name}
    if caller.teams and not caller.is_operator:
        if body.team not in ("", *caller.teams):
            raise ProblemError(
                403, f"team must be one of {caller.name}'s ({', '.join(caller.teams)}), got {body.team}"
            )
        theirs["team"] = body.team or caller.teams[0]
    if body.quarantine and not caller.is_operator:
        theirs["quarantine"] = not _has_longest_runtime(service, str(theirs.get("team", body.team)))
    return body.model_copy(update=theirs)


def _has_longest_runtime(service: Service, name: str) -> bool:
    teams = service.watch.read(lambda cluster, now: cluster.teams.teams)
    return any(team.name == name and team.max_runtime_s is not None for team in teams)


def require_run_jobs(caller: Identity) -> None:
    """Raise 403 for a caller whose token does not let agents run jobs for them."""
    if not caller.run_jobs:
        raise ProblemError(
            403, f"agents run no jobs for {caller.name}: gpu-manager token create {caller.name} --run-jobs"
        )


def may_read(caller: Identity, of: Request | Allocation | JobResult) -> bool:
    """Return whether a caller may read the output of a job: its owner, one of their team, an operator."""
    owner, team = (of.owner, of.team) if isinstance(of, Request) else (of["owner"], of["team"])
    return caller.is_operator or caller.name == owner or (bool(team) and team in caller.teams)


def owner_required(caller: Identity) -> str | None:
    """Return the owner that a lease must have for this caller to change it; an operator may change any."""
    return None if caller.is_operator else caller.name


def not_released(
    service: Service, caller: Identity, task_id: str, fencing_token: int | None
) -> ResourceManagerError:
    """Return the error for a release that found no lease of that fencing token, or another's.

    Another token comes before another owner: the holder of a lease that has ended must learn that it has
    ended, also where somebody else has made one under its id since.
    """
    view = service.manager.status_of(task_id)
    owner = owner_required(caller)
    is_that = view is not None and fencing_token in (None, view.get("fencing_token"))
    if view is not None and is_that and owner not in (None, view["owner"]):
        return OtherOwnerError(f"{view['name']} {view['short_id']}", view["owner"], owner)
    is_held = view is not None and "fencing_token" in view
    return LeaseNotFoundError(task_id, fencing_token, is_held=is_held)
