"""Errors of a service's client: the manager's own, rebuilt from its answers, and those of reaching it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from resource_manager import errors
from resource_manager.core.refusal import RefusalKind
from resource_manager.manager.refusal_wording import Refusal
from resource_manager.words import Words


class ServiceError(errors.ResourceManagerError):
    """Refusal by the service; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ServiceUnavailableError(ServiceError, errors.OutageError):
    """Failure to reach the service, or of the service to reach its store.

    Also an answer that no GPU manager gave, whatever its status: proxies answer for a service that is down.
    """


class ServiceBusyError(ServiceUnavailableError, errors.BusyError):
    """Refusal of one call too many (429)."""

    def __init__(self, message: str) -> None:
        super().__init__(429, message)


class RefusedError(ServiceError):
    """Refusal by the manager behind the service, with its reason; the request may fit later."""

    def __init__(self, status: int, refusal: Refusal) -> None:
        super().__init__(status, refusal.detail)
        self.refusal = refusal


def error_of(status: int, problem: dict[str, Any], retry_after: str = "") -> errors.ResourceManagerError:
    """Return the error that the manager would have raised, with the service's message."""
    detail, task_id = str(problem.get("detail") or problem), problem.get("task_id", "")
    error: errors.ResourceManagerError
    field: str | None = None
    match problem:
        case {"errors": [{"field": str(first)}, *_]}:
            field = first or None
    of_type: dict[str, Callable[[], errors.ResourceManagerError]] = {
        errors.CLUSTER_CHANGED: errors.ClusterChangedError,
        errors.UNKNOWN_SERVER: lambda: errors.UnknownNodeError(problem.get("server"), field=field),
        errors.SERVER_IN_USE: lambda: errors.ServerInUseError(problem.get("server", ""), ()),
        errors.TASK_TAKEN: lambda: errors.DuplicateTaskError(task_id, ""),
        errors.ALREADY_DONE: errors.AlreadyDoneError,
        errors.NOT_PREEMPTIBLE: errors.NotPreemptibleError,
        errors.AMBIGUOUS_NAME: lambda: errors.AmbiguousNameError("", 0, ""),
        errors.JOB_PLACED: lambda: errors.JobPlacedError(task_id, "", (), ""),
        errors.NO_LEASE: lambda: errors.LeaseNotFoundError(
            task_id, problem.get("fencing_token"), is_held=problem.get("is_held") is True
        ),
    }
    kind = problem.get("kind")
    if status == 503 and kind == RefusalKind.LOCK_BUSY:
        error = errors.LockTimeoutError(0.0)
    elif status == 503 and kind in list(RefusalKind):
        # only a recovery window says when it ends
        ends_at_known = kind == RefusalKind.RECOVERING and retry_after.isdecimal()
        retry_after_s = float(retry_after) if ends_at_known else None
        return RefusedError(status, Refusal(RefusalKind(kind), detail, retry_after_s))
    elif (make := of_type.get(str(problem.get("type")))) is not None:
        error = make()
    elif kind == RefusalKind.NEVER_FITS:
        error = errors.NeverFitsError(field=field)
    elif isinstance(most := problem.get("max_priority"), int):
        error = errors.PriorityError(most, "")
    elif status in (400, 413, 415, 422):
        error = errors.InvalidRequestError("", field=field)
    elif status == 429:
        error = ServiceBusyError("")
    elif status >= 500:
        error = ServiceUnavailableError(status, "")
    else:
        error = ServiceError(status, "")
    error.args = (detail,)
    if isinstance(error, errors.InvalidRequestError):
        error.words = _words(problem.get("template"), detail)
    return error


def _words(template: object, detail: str) -> Words:
    """Return the words of an error, without names of parameters if the service sent no template."""
    try:
        return Words(template) if isinstance(template, str) else Words("{}", detail)
    except (StopIteration, ValueError):  # not a template, or not of this version
        return Words("{}", detail)
