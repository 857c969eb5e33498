"""Errors as problem documents (RFC 9457), with the original design's `error` added."""

from __future__ import annotations

import logging
import math
from typing import Any

import flask
from pydantic import ValidationError
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from resource_manager import errors
from resource_manager.core.refusal import RefusalKind
from resource_manager.manager.agent_jobs import AgentSilentError
from resource_manager.manager.demand import complaint, in_words
from resource_manager.manager.refusal_wording import Refusal, lock_busy, no_servers
from resource_manager.storage.jobs import TooManyJobsError
from resource_manager.words import Words

logger = logging.getLogger(__name__)

MISSING_PARAMETERS = "Missing required parameters"
ALLOCATION_FAILED = "Resource allocation failed"
"""Texts of the original design, section 7.2.1."""

TITLES = {
    400: "Bad request",
    401: "Authentication required",
    403: "Not allowed",
    404: "Not found",
    405: "Method not allowed",
    409: "Conflict",
    411: "Length required",
    413: "Body too large",
    415: "Unsupported media type",
    422: "Idempotency key reused",
    429: "Too many requests",
    500: "Internal error",
    503: "Not available now",
}


class ProblemError(Exception):
    """Problem document raised as an error: the status, the fault and its remedy.

    `refusal` makes it one of that kind: it sets the type and the member `kind`.
    """

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        error: str | None = None,
        kind: str = "about:blank",
        refusal: RefusalKind | None = None,
        retry_after_s: int | None = None,
        headers: dict[str, str] | None = None,
        **members: Any,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = shortened(detail)
        self.error = self.detail if error is None else shortened(error)
        self.kind = kind
        self.headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
        self.headers |= headers or {}
        self.members = {
            name: shortened(value, 1000) if isinstance(value, str) else value
            for name, value in members.items()
        }
        if refusal is not None:
            self.kind = f"urn:gpu-manager:{refusal.replace('_', '-')}"
            self.members["kind"] = str(refusal)

    def response(self) -> flask.Response:
        response = flask.jsonify(
            type=self.kind,
            title=TITLES.get(self.status, "Error"),
            status=self.status,
            detail=self.detail,
            error=self.error,
            **self.members,
        )
        response.status_code = self.status
        response.content_type = "application/problem+json"
        response.headers.update(self.headers)
        return response


MAX_DETAIL = 500


def shortened(text: str, most: int = MAX_DETAIL) -> str:
    """Return the text, cut in its middle if longer than `most`: a refusal must not repeat a large request."""
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 4 :]}"


MAX_COMPLAINTS = 20
"""Errors named in one answer: a body can contain a hundred thousand."""


def from_validation(error: ValidationError) -> ProblemError:
    """Return a 400 with the first errors; `Missing required parameters` if a field is missing."""
    complaints: list[dict[str, str]] = []
    missing: list[str] = []
    found = error.errors(include_url=False)  # all of them each time, and there can be a hundred thousand
    for entry in found[:MAX_COMPLAINTS]:
        field = shortened(".".join(errors.place_in(entry["loc"])), 100)
        said = in_words(entry)
        if entry["type"] == "model_type":  # pydantic names a class of ours
            said = "must be a JSON object" if field else "the body must be a JSON object"
        complaints.append({"field": field, "message": shortened(said, 200)})
        if entry["type"] == "missing" or (entry["input"] is None and field):
            missing.append(field)
    if missing:
        return ProblemError(
            400, f"missing: {', '.join(missing)}", error=MISSING_PARAMETERS, errors=complaints
        )
    first, named = complaints[0], found[0].get("ctx", {}).get("words")
    where, words = first["field"], Words("{}", first["message"])
    if named is not None and str(named) == first["message"]:
        words = named
    if where:
        words = complaint(where, words)
    return ProblemError(400, str(words), errors=complaints, template=words.template)


def from_manager(error: errors.ResourceManagerError) -> ProblemError:
    """Return the problem of a manager's error; one that the caller cannot fix is a 503 with Retry-After."""
    detail = str(error)
    match error:
        case errors.UnknownNodeError():
            return _invalid(error, kind=errors.UNKNOWN_SERVER, server=error.node)
        case errors.DuplicateTaskError():
            return ProblemError(409, detail, kind=errors.TASK_TAKEN, task_id=error.lease_id)
        case errors.AlreadyDoneError():
            return ProblemError(409, detail, kind=errors.ALREADY_DONE)
        case errors.ClusterChangedError():
            return ProblemError(409, detail, kind=errors.CLUSTER_CHANGED)
        case errors.NoServersError():
            return from_refusal(no_servers())
        case errors.ServerInUseError():
            return ProblemError(409, detail, kind=errors.SERVER_IN_USE, server=error.server)
        case errors.JobPlacedError():
            return ProblemError(409, detail, kind=errors.JOB_PLACED, task_id=error.lease_id)
        case errors.AmbiguousNameError():
            return ProblemError(409, detail, kind=errors.AMBIGUOUS_NAME)
        case errors.NotPreemptibleError():
            return ProblemError(409, detail, kind=errors.NOT_PREEMPTIBLE)
        case errors.IdempotencyKeyError():
            return ProblemError(422, detail)
        case errors.KeysFullError() | TooManyJobsError():
            return ProblemError(429, detail, retry_after_s=60)
        case errors.OtherOwnerError():
            return ProblemError(403, detail)
        case errors.PriorityError():
            return _invalid(error, max_priority=error.most)
        case errors.NeverFitsError():
            return _invalid(error, refusal=RefusalKind.NEVER_FITS)
        case errors.InvalidRequestError():
            return _invalid(error)
        case errors.LeaseNotFoundError():
            return ProblemError(
                404,
                detail,
                kind=errors.NO_LEASE,
                task_id=error.lease_id,
                fencing_token=error.fencing_token,
                is_held=error.is_held,
            )
        case AgentSilentError():
            return ProblemError(503, detail, retry_after_s=5)
        case errors.StateUnconfirmedError():
            return from_refusal(Refusal(RefusalKind.RECOVERING, detail, error.remaining_s))
        case errors.LockTimeoutError():
            logger.error("the lock could not be taken: %s", detail)
            return from_refusal(lock_busy(error.waited_s))
        case errors.StoreFullError():
            logger.error("the store is full: %s", detail)
            return ProblemError(
                503, detail, error=ALLOCATION_FAILED, kind=errors.STORE_FULL, retry_after_s=60
            )
        case errors.StoreUnavailableError() | errors.StaleStateError() | errors.LockError():
            logger.error("the store did not answer: %s", detail)
            return ProblemError(503, detail, error=ALLOCATION_FAILED, retry_after_s=5)
        case errors.StoreError():
            logger.error("the stored state cannot be used: %s", detail)
            return ProblemError(503, detail, error=ALLOCATION_FAILED, retry_after_s=60)
    logger.error("unexpected error of the manager: %s", detail)
    return ProblemError(500, "the manager failed: see the log of the service")


def _invalid(error: errors.InvalidRequestError, **members: Any) -> ProblemError:
    """Return a 400; its `template` has `{gpus}` where the detail names the parameter gpus."""
    detail, template = str(error), error.words.template
    if len(template) <= MAX_DETAIL:  # a longer one is cut, and a template cannot be
        members["template"] = template
    complaint = {"field": error.field or "", "message": shortened(detail)}
    return ProblemError(400, detail, errors=[complaint], **members)


def without_details(error: errors.StoreError) -> ProblemError:
    """Return the problem of a store's error for callers who are not known: the log has what it says."""
    logger.error("the store cannot be used: %s", error)
    detail = "the store cannot be used: see the log of the service"
    return ProblemError(503, detail, error=ALLOCATION_FAILED, retry_after_s=5)


def from_http(error: HTTPException) -> ProblemError:
    """Return the problem of an error of the framework's."""
    status = error.code or 500
    detail = error.description or TITLES.get(status, "")
    if isinstance(error, RequestEntityTooLarge):
        detail = f"the body may have at most {flask.request.max_content_length:,} bytes"
    elif error is flask.request.routing_exception:
        detail = f"there is no {flask.request.method} {flask.request.path}"
    headers = {name: value for name, value in error.get_headers() if name in ("Allow", "Retry-After")}
    return ProblemError(status, detail, headers=headers)


RETRY_AFTER_S = 5


def from_refusal(refusal: Refusal) -> ProblemError:
    """Return a 503 with the original design's `error`, the kind, and Retry-After unless it can never fit."""
    wait_s = None
    if refusal.kind is not RefusalKind.NEVER_FITS:
        wait_s = max(math.ceil(RETRY_AFTER_S if refusal.retry_after_s is None else refusal.retry_after_s), 1)
    return ProblemError(
        503, refusal.detail, error=ALLOCATION_FAILED, refusal=refusal.kind, retry_after_s=wait_s
    )


def problem_of(error: Exception) -> ProblemError:
    """Return the problem of an error; the details of a crash are in the log."""
    if isinstance(error, ProblemError):
        return error
    if isinstance(error, ValidationError):
        return from_validation(error)
    if isinstance(error, errors.ResourceManagerError):
        return from_manager(error)
    if isinstance(error, HTTPException):
        return from_http(error)
    logger.error("unhandled error at %r", flask.request.path, exc_info=error)
    return ProblemError(500, "internal error: see the log of the service")


def install(app: flask.Flask) -> None:
    """Turn every error of the app into a problem document, unknown paths and crashes included."""
    app.register_error_handler(Exception, lambda error: problem_of(error).response())
