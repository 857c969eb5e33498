"""Errors of a lease service over HTTP: the manager's own, made again of its answers, and those of the way."""

from __future__ import annotations

from typing import Any

from resource_manager.core.refusal import RefusalKind
from resource_manager.errors import (
    ALREADY_DONE,
    CLUSTER_CHANGED,
    JOB_PLACED,
    NO_LEASE,
    NOT_PREEMPTIBLE,
    TASK_TAKEN,
    UNKNOWN_SERVER,
    AlreadyDoneError,
    ClusterChangedError,
    DuplicateTaskError,
    InvalidRequestError,
    JobPlacedError,
    LeaseNotFoundError,
    LockTimeoutError,
    NeverFitsError,
    NotPreemptibleError,
    PriorityError,
    ResourceManagerError,
    UnknownNodeError,
)
from resource_manager.manager.refusal_wording import Refusal
from resource_manager.words import Words


class ServiceError(ResourceManagerError):
    """Refusal by the service; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ServiceUnavailableError(ServiceError):
    """Failure to reach the service, or of the service to reach its store, or one call too many (429)."""


class RefusedError(ServiceError):
    """Refusal by the manager behind the service, with its reason; the request may fit later."""

    def __init__(self, status: int, refusal: Refusal) -> None:
        super().__init__(status, refusal.detail)
        self.refusal = refusal


def error_of(status: int, problem: dict[str, Any], retry_after: str = "") -> ResourceManagerError:
    """Return the error that the manager would have raised, with the service's message."""
    kind = str(problem.get("type", ""))
    detail = str(problem.get("detail") or problem)
    error: ResourceManagerError
    field: str | None = None
    match problem:
        case {"errors": [{"field": str(first)}, *_]}:
            field = first or None
    if status == 503 and problem.get("kind") in list(RefusalKind):
        refused = RefusalKind(problem["kind"])
        # The other kinds have no known time.
        known = refused is RefusalKind.RECOVERING and retry_after.isdecimal()
        if refused is RefusalKind.LOCK_BUSY:
            error = LockTimeoutError(0.0)
            error.args = (detail,)
            return error
        return RefusedError(status, Refusal(refused, detail, float(retry_after) if known else None))
    if kind == CLUSTER_CHANGED:
        error = ClusterChangedError()
    elif kind == UNKNOWN_SERVER:
        error = UnknownNodeError(problem.get("server"), field=field)
    elif kind == TASK_TAKEN:
        error = DuplicateTaskError(problem.get("task_id", ""), "")
    elif kind == ALREADY_DONE:
        error = AlreadyDoneError()
    elif kind == NOT_PREEMPTIBLE:
        error = NotPreemptibleError()
    elif kind == JOB_PLACED:
        error = JobPlacedError(problem.get("task_id", ""), "", (), "")
    elif kind == NO_LEASE:
        error = LeaseNotFoundError(
            problem.get("task_id", ""),
            problem.get("fencing_token"),
            is_held=problem.get("is_held") is True,
        )
    elif problem.get("kind") == RefusalKind.NEVER_FITS:
        error = NeverFitsError(field=field)
    elif isinstance(most := problem.get("max_priority"), int):
        error = PriorityError(most, "")
    elif status in (400, 413, 415, 422):
        error = InvalidRequestError("", field=field)
    elif status == 429 or status >= 500:
        error = ServiceUnavailableError(status, "")
    else:
        error = ServiceError(status, "")
    error.args = (detail,)
    if isinstance(error, InvalidRequestError):
        error.words = _words(problem.get("template"), detail)
    return error


def _words(template: object, detail: str) -> Words:
    """Return the words of an error, without names of parameters if the service sent no template."""
    try:
        return Words(template) if isinstance(template, str) else Words("{}", detail)
    except (StopIteration, ValueError):  # not a template, or not of this version
        return Words("{}", detail)
