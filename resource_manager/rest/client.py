"""`ServiceClient`: a lease service over HTTP."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, cast

from resource_manager.core.changes import JobEnd
from resource_manager.core.refusal import RefusalKind
from resource_manager.errors import LeaseNotFoundError, LockTimeoutError
from resource_manager.manager.agent_jobs import note_opened
from resource_manager.manager.answer_words import name_in_words
from resource_manager.manager.arguments import Dumpable, arguments_of
from resource_manager.manager.original import OriginalNames
from resource_manager.manager.refusal_wording import Refusal
from resource_manager.manager.results import (
    Allocation,
    ComingDemand,
    Explanation,
    LeaseChanges,
    QueueEntry,
    Recorded,
    ReleaseResult,
    Renewal,
    Submission,
)
from resource_manager.manager.stored_jobs import JobResult
from resource_manager.rest import answers
from resource_manager.rest.answers import MAX_HOLD_S
from resource_manager.rest.client_errors import RefusedError, ServiceError
from resource_manager.rest.cluster_calls import ClusterCalls
from resource_manager.rest.connection import PAGE, Clock, ServiceConnection

if TYPE_CHECKING:
    import httpx

    from resource_manager.core.models import JobPlace
    from resource_manager.manager.demand import DemandArguments

TIMEOUT_S = 70.0
"""Timeout of a request, longer than the manager's wait for its lock."""

WAIT_S = 1.0
"""Least time between two calls of `wait`, since a service that cannot hold it answers at once."""

T = TypeVar("T")

SUBMISSION = cast("type[Submission]", Submission)


class ServiceClient(ClusterCalls, OriginalNames):
    """Client of the service at `url`; results and errors are those of the manager's own methods.

    A connection that is refused is tried again for `connect_timeout_s` seconds. `transport` and `clock` are
    for a service that is reached another way, and another time.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        connect_timeout_s: float = 0.0,
        transport: httpx.BaseTransport | None = None,
        clock: Clock = time,
    ) -> None:
        self._http = ServiceConnection(url, token, timeout_s, connect_timeout_s, transport, clock)
        self.url = self._http.url
        note_opened(self)

    def try_allocate(
        self,
        lease_id: Dumpable | str | None = None,
        gpus: int | None = None,
        cpus: int | None = None,
        prefer_server: int | str | None = None,
        **options: Unpack[DemandArguments],
    ) -> Allocation | Refusal:
        """Return a lease, or the refusal with its reason."""
        try:
            demand = _plain((lease_id, gpus, cpus, prefer_server), options)
            return self._http.post(Allocation, "/api/allocate", demand)
        except RefusedError as error:
            return error.refusal
        except LockTimeoutError as error:
            return Refusal(RefusalKind.LOCK_BUSY, str(error))

    def submit(
        self,
        lease_id: Dumpable | str | None = None,
        gpus: int | None = None,
        cpus: int | None = None,
        prefer_server: int | str | None = None,
        *,
        job: Mapping[str, Any] | None = None,
        **options: Unpack[DemandArguments],
    ) -> Submission:
        """Return a lease (`state` RUNNING) or a pending request (WAITING)."""
        body = _plain((lease_id, gpus, cpus, prefer_server), options)
        return self._http.post(SUBMISSION, "/api/submit", {**body, "job": job})

    def announce(
        self,
        lease_id: Dumpable | str | None = None,
        gpus: int | None = None,
        cpus: int | None = None,
        prefer_server: int | str | None = None,
        *,
        after: Sequence[str] = (),
        copies: int = 1,
        **options: Unpack[DemandArguments],
    ) -> bool:
        """Announce the request that a task will make; return whether it is announced."""
        body = _plain((lease_id, gpus, cpus, prefer_server), options)
        return self._http.post(
            answers.AnnounceAnswer, "/api/announce", {**body, "after": list(after), "copies": copies}
        )["announced"]

    def withdraw(self, lease_ids: Collection[str] = (), *, run: str = "", reason: str = "") -> int:
        """Withdraw announced demands of this client, by ids or by DAG run; return how many there were."""
        body = {"task_ids": list(lease_ids), "run": run, "reason": reason}
        return self._http.post(answers.WithdrawAnswer, "/api/withdraw", body)["withdrawn"]

    def coming(self) -> list[ComingDemand]:
        """Return the announced demands, the next first."""
        return list(self._http.pages(ComingDemand, "/api/coming", limit=None))

    def result_of(self, lease_id: str, fencing_token: int | None = None) -> JobResult | None:
        """Return the result that was stored as the lease was released, for 7 days; by default the newest."""
        query = {"task_id": lease_id, "fencing_token": fencing_token}
        try:
            return self._http.get(JobResult, "/api/result", query)
        except ServiceError as error:
            if error.status != 404:
                raise
            return None

    def try_allocate_batch(
        self, requests: Iterable[Mapping[str, Any] | Dumpable]
    ) -> list[Allocation | Refusal]:
        """Return a lease or the refusal of each request."""
        demands = [
            _plain((), request) if isinstance(request, Mapping) else _plain((request,), {})
            for request in requests
        ]
        if not demands:
            return []
        batch = self._http.post(answers.BatchAnswer, "/api/allocate/batch", {"requests": demands})
        given: list[Allocation | Refusal] = []
        for granted, refused in zip(batch["results"], batch["refusals"], strict=True):
            if granted is not None:
                given.append(granted)
            elif refused is not None:
                given.append(Refusal(RefusalKind(refused["kind"]), refused["detail"]))
        return given

    def release(
        self,
        lease_id: str,
        *,
        fencing_token: int | None = None,
        outcome: str = "",
        job_end: JobEnd | str = JobEnd.UNKNOWN,
        reason: str = "",
        failed_nodes: Collection[str] = (),
    ) -> ReleaseResult:
        """End a lease; raise `JobPlacedError` if its job was placed and `job_end` does not say it is gone."""
        how = {"outcome": outcome, "job_end": job_end, "reason": reason, "failed_nodes": list(failed_nodes)}
        return self._release(lease_id, fencing_token, how)

    def release_members(
        self,
        lease_id: str,
        ranks: Collection[int],
        *,
        fencing_token: int,
        outcome: str = "",
        job_end: JobEnd | str = JobEnd.UNKNOWN,
        reason: str = "",
    ) -> ReleaseResult:
        """End members of a gang; the others stay quarantined."""
        how = {"outcome": outcome, "job_end": job_end, "reason": reason, "ranks": list(ranks)}
        return self._release(lease_id, fencing_token, how)

    def _release(self, lease_id: str, fencing_token: int | None, how: dict[str, Any]) -> ReleaseResult:
        body = _by_id(lease_id, fencing_token, **how)
        try:
            answer = self._http.post(answers.ReleaseAnswer, "/api/release", body)
        except LeaseNotFoundError as error:
            return ReleaseResult.OTHER_HOLDER if error.is_held else ReleaseResult.NOT_HELD
        return ReleaseResult.QUARANTINED if answer["quarantined"] else ReleaseResult.RELEASED

    def place_job(self, lease_id: str, places: Sequence[JobPlace], *, fencing_token: int) -> Allocation:
        """Store where the jobs of a lease are about to start; return the lease with the places it has."""
        body = _by_id(lease_id, fencing_token, places=[asdict(place) for place in places])
        return self._http.post(Allocation, "/api/place", body)

    def renew(
        self,
        lease_id: str,
        *,
        fencing_token: int | None = None,
        checkpoint_at: float | None = None,
        for_s: float | None = None,
    ) -> Allocation:
        """Return the lease with its new end; raise `LeaseNotFoundError`."""
        body = _by_id(lease_id, fencing_token, checkpoint_at=checkpoint_at, for_s=for_s)
        return self._http.post(Allocation, "/api/renew", body, **self._http.renewing)

    def renew_all(self, renewals: Sequence[Renewal]) -> list[bool]:
        """Return of each lease whether it is still held by this client's user."""
        renewed: list[bool] = []
        for start in range(0, len(renewals), PAGE):
            part = renewals[start : start + PAGE]
            body = {"renewals": [{key: each[key] for key in each if key != "by"} for each in part]}  # type: ignore[literal-required]
            given = self._http.post(answers.RenewBatchAnswer, "/api/renew/batch", body, **self._http.renewing)
            renewed += given["renewed"]
        return renewed

    def preempt(
        self, lease_id: str, *, preemptor: str = "", fencing_token: int | None = None, dry_run: bool = False
    ) -> Allocation:
        """Take a lease for a pending request, as an operator; see `GPUResourceManager.preempt`."""
        body = _by_id(lease_id, fencing_token, preemptor=preemptor, dry_run=dry_run)
        return self._http.post(Allocation, "/api/preempt", body)

    def cancel(self, lease_id: str, *, sequence: int | None = None, reason: str = "") -> bool:
        """Remove a pending request; return False if the task has none (of that `sequence`)."""
        try:
            self._http.post(answers.Done, "/api/cancel", _by_id(lease_id, sequence=sequence, reason=reason))
        except LeaseNotFoundError:
            return False
        return True

    def expire_and_schedule(self) -> list[Recorded]:
        """Do nothing: the service expires and schedules by itself."""
        return []

    def caller_name(self) -> str:
        """Return the name of the token's holder."""
        return self._http.get(answers.CallerAnswer, "/api/caller")["name"]

    def stated_owner(self, owner: str) -> str | None:
        """Return None: the service knows its callers by their tokens."""
        return None

    def require_owner(self, entry: Mapping[str, Any]) -> None:
        """Raise `ServiceError` (403) for a lease or pending request that the service would not let us end."""
        caller = self._http.get(answers.CallerAnswer, "/api/caller")
        owner = entry.get("owner") or ""
        if caller["role"] != "operator" and owner != caller["name"]:
            raise ServiceError(
                403, f"{name_in_words(entry)} belongs to {owner or 'no owner'}, not to {caller['name']}"
            )

    def status_of(self, lease_id: str) -> Submission | None:
        return self._status_of(lease_id)

    def _status_of(self, lease_id: str, timeout_s: float | None = None) -> Submission | None:
        try:
            return self._http.get(SUBMISSION, "/api/task", _by_id(lease_id, timeout_s=timeout_s))
        except LeaseNotFoundError:
            return None

    def named(
        self, name: str, *, pending: bool | None = None, fencing_token: int | None = None
    ) -> Submission:
        """Return what a full lease id, a short id, `dag.task[3]` or `dag.task` names.

        Raises `LeaseNotFoundError`, and `AmbiguousNameError`, which lists them, if there are several.
        """
        query = {"task_id": name, "pending": pending, "fencing_token": fencing_token}
        return self._http.get(SUBMISSION, "/api/task", query)

    def leases(self) -> list[Allocation]:
        return list(self._http.pages(Allocation, "/api/leases"))

    def lease_changes(self, after: int = -1, timeout_s: float = 0.0, prefix: str = "") -> LeaseChanges:
        """Return what changed of leases and requests after a version: the service holds the request."""
        query = {"after": after, "timeout_s": min(timeout_s, MAX_HOLD_S), "prefix": prefix}
        return self._http.get(LeaseChanges, "/api/leases/changes", query)

    def preempting(self) -> list[Allocation]:
        return self._http.get(answers.Page[Allocation], "/api/leases/preempting")["items"]

    def wait(self, lease_id: str, timeout_s: float) -> Submission | None:
        """Return as `status_of` once the request is granted or gone, or after `timeout_s`.

        The service holds the request, or answers at once where this user has too many held already.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            began = time.monotonic()
            found = self._status_of(lease_id, timeout_s=min(max(deadline - began, 0.0), MAX_HOLD_S))
            if found is None or found["state"] != "WAITING" or time.monotonic() >= deadline:
                return found
            time.sleep(max(min(began + WAIT_S, deadline) - time.monotonic(), 0.0))

    def queue(self, *, estimated: bool = True) -> list[QueueEntry]:
        """Return the manager's queue, each entry with `estimated_start`, which the service has anyway."""
        return list(self._http.pages(QueueEntry, "/api/queue", limit=None))

    def explain(
        self,
        lease_id: Dumpable | str | None = None,
        gpus: int | None = None,
        cpus: int | None = None,
        prefer_server: int | str | None = None,
        **options: Unpack[DemandArguments],
    ) -> Explanation:
        """Return the manager's explanation with `estimated_start`."""
        query = {
            name: [f"{key}={item}" for key, item in value.items()] if isinstance(value, Mapping) else value
            for name, value in _plain((lease_id, gpus, cpus, prefer_server), options).items()
        }
        return self._http.get(Explanation, "/api/explain", query)

    def explain_named(self, name: str) -> Explanation:
        """Return why the pending request of that name waits; see `GPUResourceManager.explain_named`."""
        return self._http.get(Explanation, "/api/task/explain", {"name": name})

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin_log_in(self) -> answers.DeviceAnswer:
        """Begin a log-in at the provider of the cluster, which a person ends in a browser."""
        return self._http.post(answers.DeviceAnswer, "/api/login", {})

    def end_log_in(self, device_code: str) -> answers.LogInAnswer:
        """Return the person's token, nulls until they have logged in."""
        return self._http.post(answers.LogInAnswer, "/api/login/token", {"device_code": device_code})

    def log_out(self) -> None:
        """Revoke the token of this client, which is that of a log-in."""
        self._http.call(answers.Done, "DELETE", "/api/login")


def _by_id(lease_id: str, fencing_token: int | None = None, **more: Any) -> dict[str, Any]:
    """Return fields with a full lease id, which must not be taken for a name once its lease is gone."""
    return {"task_id": lease_id, "fencing_token": fencing_token, "exact": True, **more}


def _plain(positional: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given fields of a demand as JSON has them; the service knows the defaults."""
    return {
        name: value.total_seconds()
        if isinstance(value, timedelta)
        else value.isoformat()
        if isinstance(value, datetime)
        else value
        for name, value in arguments_of(positional, options).items()
    }
