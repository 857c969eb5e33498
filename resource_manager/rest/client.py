"""`ServiceClient`: a lease service over HTTP."""

from __future__ import annotations

import logging
import random
import ssl
import time
from base64 import b64decode
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, cast

import httpx

from resource_manager.core.changes import JobEnd, ReleaseResult
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
    Words,
    redact,
)
from resource_manager.manager.agent_jobs import AgentState, note_opened
from resource_manager.manager.answer_words import name_in_words
from resource_manager.manager.arguments import Dumpable, arguments_of
from resource_manager.manager.cluster_results import (
    ClusterDiff,
    ClusterView,
    ServerDetail,
    ServerSummary,
    TeamsView,
    WindowView,
)
from resource_manager.manager.original import OriginalNames
from resource_manager.manager.refusal_wording import Refusal
from resource_manager.manager.results import (
    Allocation,
    ComingDemand,
    EstimatesView,
    Explanation,
    LeaseChanges,
    QueueEntry,
    Recorded,
    Renewal,
    SlurmJob,
    Submission,
    Summary,
)
from resource_manager.manager.stored_jobs import JobResult
from resource_manager.rest.answers import (
    MAX_HOLD_S,
    AnnounceAnswer,
    BatchAnswer,
    CallerAnswer,
    Change,
    DeviceAnswer,
    Done,
    LogInAnswer,
    MaintenanceAnswer,
    MaintenanceRemoveAnswer,
    Ordered,
    Page,
    ReleaseAnswer,
    RenewBatchAnswer,
    SnapshotAnswer,
    WithdrawAnswer,
    check,
    harmless,
)

if TYPE_CHECKING:
    from resource_manager.core.models import Gpu, JobPlace
    from resource_manager.manager.cluster_change import ApplyOptions
    from resource_manager.manager.cluster_file.sections import ClusterForm
    from resource_manager.manager.demand import DemandArguments
    from resource_manager.manager.maintenance_windows import WindowForm
    from resource_manager.manager.report import Report
    from resource_manager.manager.use_results import ServerUse

logger = logging.getLogger(__name__)

_spread = random.Random()
"""Of its own, so that waiting changes no random numbers of the program."""

TIMEOUT_S = 70.0
"""Timeout of a request, longer than the manager's wait for its lock."""

RETRY_S, MAX_RETRY_S = 0.1, 1.0
"""Shortest and longest pause before a call is sent again, unless the service names a longer one."""

BUSY_S = 30.0
"""Time for which a call that is one too many is sent again."""

WAIT_S = 1.0
"""Shortest time between two looks at a request that still waits: a service may answer at once."""

PAGE = 1000

T = TypeVar("T")

SUBMISSION = cast("type[Submission]", Submission)

EXACT: dict[str, Any] = {"exact": True}
"""Field of a call by a whole lease id: what nobody holds any more must not be taken for a name."""


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


@cache
def _trusted_authorities() -> ssl.SSLContext:
    """Return the certificate authorities that clients trust; reading them takes longer than many requests."""
    return httpx.create_ssl_context()


class ServiceClient(OriginalNames):
    """Client of the service at `url`; results and errors are those of the manager's own methods.

    A connection that is refused is tried again for `connect_timeout_s` seconds.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        connect_timeout_s: float = 0.0,
    ) -> None:
        self._connect_timeout_s = connect_timeout_s
        if token and not (token.isascii() and token.isprintable() and token == token.strip()):
            # The error of httpx would contain the token.
            raise InvalidRequestError(
                "the token has a space, a line break or another character that tokens do not have",
                field="token",
            )
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.url = redact(url).rstrip("/")
        try:
            self._http = httpx.Client(
                base_url=url.rstrip("/"), headers=headers, timeout=timeout_s, verify=_trusted_authorities()
            )
        except (httpx.InvalidURL, ValueError) as error:
            text = "not the address of a service: {!r}: {}"
            raise InvalidRequestError(text, redact(url), error, field="url") from error
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
            return self._post(Allocation, "/api/allocate", demand)
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
        return self._post(SUBMISSION, "/api/submit", {**body, "job": job} if job is not None else body)

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
        return self._post(AnnounceAnswer, "/api/announce", {**body, "after": list(after), "copies": copies})[
            "announced"
        ]

    def withdraw(self, lease_ids: Collection[str] = (), *, run: str = "", reason: str = "") -> int:
        """Withdraw announced demands of this client, by ids or by DAG run; return how many there were."""
        body = {"task_ids": list(lease_ids), "run": run, "reason": reason}
        return self._post(WithdrawAnswer, "/api/withdraw", body)["withdrawn"]

    def coming(self) -> list[ComingDemand]:
        """Return the announced demands, the next first."""
        return list(self._pages(ComingDemand, "/api/coming"))

    def order_job(self, server: str, key: str, order: Mapping[str, Any]) -> str:
        """Tell the agent of a server what to do with the job of a lease there."""
        return self._post(Ordered, "/api/jobs/order", {"server": server, "key": key, "order": order})["n"]

    def agent_state(self, server: str) -> AgentState:
        """Return what the agent of a server last said of the jobs that this client may read."""
        return self._get(AgentState, "/api/jobs", {"server": server})

    def job_output(self, server: str, key: str, offset: int, *, lease_id: str = "") -> dict[str, Any]:
        """Return a part of a job's output, which its agent sends now.

        The output of a job that is over is found by the id of its lease.
        """
        query = {"server": server, "key": key, "offset": offset}
        if lease_id:
            query["task_id"] = lease_id
        part = self._get(dict[str, Any], "/api/jobs/output", query)
        return {**part, "text": b64decode(part["text"]).decode()}

    def result_of(self, lease_id: str, fencing_token: int | None = None) -> JobResult | None:
        """Return the result that was stored as the lease was released, for 7 days; by default the newest."""
        token = {} if fencing_token is None else {"fencing_token": fencing_token}
        try:
            return self._get(JobResult, "/api/result", {"task_id": lease_id, **token})
        except (LeaseNotFoundError, ServiceError) as error:
            if isinstance(error, ServiceError) and error.status != 404:
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
        answer = self._post(BatchAnswer, "/api/allocate/batch", {"requests": demands})
        answers: list[Allocation | Refusal] = []
        for granted, refused in zip(answer["results"], answer["refusals"], strict=True):
            if granted is not None:
                answers.append(granted)
            elif refused is not None:
                answers.append(Refusal(RefusalKind(refused["kind"]), refused["detail"]))
        return answers

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
        body = {
            "task_id": lease_id,
            "fencing_token": fencing_token,
            "outcome": outcome,
            "job_end": job_end,
            "reason": reason,
            "failed_nodes": list(failed_nodes),
        }
        return self._release(body)

    def release_members(
        self,
        lease_id: str,
        ranks: Collection[int],
        *,
        fencing_token: int,
        outcome: str = "",
        job_end: JobEnd | str = JobEnd.UNKNOWN,
    ) -> ReleaseResult:
        """End members of a gang; the others stay quarantined."""
        body = {
            "task_id": lease_id,
            "fencing_token": fencing_token,
            "ranks": list(ranks),
            "outcome": outcome,
            "job_end": job_end,
        }
        return self._release(body)

    def _release(self, body: dict[str, Any]) -> ReleaseResult:
        try:
            answer = self._post(ReleaseAnswer, "/api/release", body | EXACT)
        except LeaseNotFoundError as error:
            return ReleaseResult.OTHER_HOLDER if error.is_held else ReleaseResult.NOT_HELD
        return ReleaseResult.QUARANTINED if answer["quarantined"] else ReleaseResult.RELEASED

    def place_job(self, lease_id: str, places: Sequence[JobPlace], *, fencing_token: int) -> Allocation:
        """Store where the jobs of a lease are about to start; return the lease with the places it has."""
        body = {
            "task_id": lease_id,
            "fencing_token": fencing_token,
            "places": [asdict(place) for place in places],
        }
        return self._post(Allocation, "/api/place", body)

    def renew(
        self,
        lease_id: str,
        *,
        fencing_token: int | None = None,
        checkpoint_at: float | None = None,
        for_s: float | None = None,
    ) -> Allocation:
        """Return the lease with its new end; raise `LeaseNotFoundError`."""
        body = {
            "task_id": lease_id,
            "fencing_token": fencing_token,
            "checkpoint_at": checkpoint_at,
            "for_s": for_s,
        }
        return self._post(Allocation, "/api/renew", body | EXACT)

    def renew_all(self, renewals: Sequence[Renewal]) -> list[bool]:
        """Return of each lease whether it is still held by this client's user."""
        renewed: list[bool] = []
        for start in range(0, len(renewals), PAGE):
            part = renewals[start : start + PAGE]
            body = {"renewals": [{key: each[key] for key in each if key != "by"} for each in part]}  # type: ignore[literal-required]
            renewed += self._post(RenewBatchAnswer, "/api/renew/batch", body)["renewed"]
        return renewed

    def preempt(
        self, lease_id: str, *, preemptor: str = "", fencing_token: int | None = None, dry_run: bool = False
    ) -> Allocation:
        """Take a lease for a pending request, as an operator; see `GPUResourceManager.preempt`."""
        body = {
            "task_id": lease_id,
            "preemptor": preemptor,
            "fencing_token": fencing_token,
            "dry_run": dry_run,
        }
        return self._post(Allocation, "/api/preempt", body | EXACT)

    def cancel(self, lease_id: str, *, sequence: int | None = None, reason: str = "") -> bool:
        """Remove a pending request; return False if the task has none (of that `sequence`)."""
        body = {"task_id": lease_id, "sequence": sequence, "reason": reason}
        return self._is_done("/api/cancel", body | EXACT)

    def expire_and_schedule(self) -> list[Recorded]:
        """Do nothing: the service expires and schedules by itself."""
        return []

    def caller_name(self) -> str:
        """Return the name of the token's holder."""
        return self._get(CallerAnswer, "/api/caller")["name"]

    def stated_owner(self, owner: str) -> str | None:
        """Return None: the service knows its callers by their tokens."""
        return None

    def require_owner(self, entry: Mapping[str, Any]) -> None:
        """Raise `ServiceError` (403) for a lease or pending request that the service would not let us end."""
        caller = self._get(CallerAnswer, "/api/caller")
        owner = entry.get("owner") or ""
        if caller["role"] != "operator" and owner != caller["name"]:
            raise ServiceError(
                403, f"{name_in_words(entry)} belongs to {owner or 'no owner'}, not to {caller['name']}"
            )

    def drain(
        self, server: int | str, gpu: int | str | None = None, *, reason: str = "", failed: bool = False
    ) -> ServerSummary:
        body = {"gpu": gpu, "reason": reason, "failed": failed}
        return self._post(ServerSummary, f"/api/servers/{self._server_id(server)}/drain", body)

    def resume(self, server: int | str, gpu: int | str | None = None) -> ServerSummary:
        path = f"/api/servers/{self._server_id(server)}/resume"
        return self._post(ServerSummary, path, {"gpu": gpu})

    def searched(self, server: int | str, jobs: Sequence[str], *, age_s: float = 0.0) -> ServerSummary:
        path = f"/api/servers/{self._server_id(server)}/searched"
        return self._post(ServerSummary, path, {"jobs": list(jobs), "age_s": age_s})

    def server(self, server: int | str) -> ServerDetail:
        return self._get(ServerDetail, f"/api/servers/{self._server_id(server)}")

    def adopt(self, server: int | str, gpus: Sequence[Gpu]) -> ServerDetail:
        listed = [
            {
                "gpu_id": gpu.gpu_id,
                "uuid": gpu.uuid,
                "type": gpu.gpu_type,
                "vendor": gpu.vendor,
                "memory_mib": gpu.memory_mib,
            }
            for gpu in gpus
        ]
        path = f"/api/servers/{self._server_id(server)}/adopt"
        return self._post(ServerDetail, path, {"gpus": listed})

    def gpus(self, servers: Sequence[str] = ()) -> list[ServerUse]:
        """Return the use of every GPU as last reported, by server: of these servers, by default of all."""
        from resource_manager.manager.use_results import ServerUse

        if servers:
            return self._get(Page[ServerUse], "/api/gpus", {"servers": list(servers)})["items"]
        return list(self._pages(ServerUse, "/api/gpus"))

    def reset(self) -> None:
        self._post(Done, "/api/reset", {"confirm": True})

    def teams(self) -> TeamsView:
        return self._get(TeamsView, "/api/teams")

    def cluster(self) -> ClusterView:
        return self._get(ClusterView, "/api/cluster")

    def diff(self, definition: ClusterForm, options: ApplyOptions | None = None) -> ClusterDiff:
        return self._put_cluster(definition, options, dry_run=True)

    def apply(
        self, definition: ClusterForm, options: ApplyOptions | None = None, *, revision: str | None = None
    ) -> ClusterDiff:
        return self._put_cluster(definition, options, revision=revision)

    def _put_cluster(self, form: ClusterForm, options: ApplyOptions | None, **more: Any) -> ClusterDiff:
        sections = form.model_dump(mode="json", by_alias=True, exclude_unset=True)
        body = {"sections": sections, **({} if options is None else asdict(options)), **more}
        return self._call(ClusterDiff, "PUT", "/api/cluster", json=body)

    def maintenance(self) -> list[WindowView]:
        return self._get(MaintenanceAnswer, "/api/maintenance")["windows"]

    def add_maintenance(self, form: WindowForm, *, dry_run: bool = False) -> WindowView:
        body = {**form.model_dump(mode="json", by_alias=True), "dry_run": dry_run}
        return self._post(WindowView, "/api/maintenance", body)

    def remove_maintenance(self, window_id: int, *, dry_run: bool = False) -> WindowView | None:
        body = {"id": window_id, "dry_run": dry_run}
        return self._post(MaintenanceRemoveAnswer, "/api/maintenance/remove", body)["window"]

    def summary(self) -> Summary:
        return self._get(Summary, "/api/status")

    def servers(self) -> list[ServerSummary]:
        return self.summary()["servers"]

    def status_of(self, lease_id: str) -> Submission | None:
        try:
            return self._get(SUBMISSION, "/api/task", {"task_id": lease_id} | EXACT)
        except LeaseNotFoundError:
            return None

    def named(
        self, name: str, *, pending: bool | None = None, fencing_token: int | None = None
    ) -> Submission:
        """Return what a full lease id, a short id, `dag.task[3]` or `dag.task` names.

        Raises `LeaseNotFoundError`, and `ServiceError` (409), which lists them, if there are several.
        """
        query = {"task_id": name, "pending": pending, "fencing_token": fencing_token}
        given = {key: value for key, value in query.items() if value is not None}
        return self._get(SUBMISSION, "/api/task", given)

    def leases(self) -> list[Allocation]:
        return list(self._pages(Allocation, "/api/leases"))

    def lease_changes(self, after: int = -1, timeout_s: float = 0.0, prefix: str = "") -> LeaseChanges:
        """Return what changed of leases and requests after a version: the service holds the request."""
        query = {"after": after, "timeout_s": min(timeout_s, MAX_HOLD_S), "prefix": prefix}
        return self._get(LeaseChanges, "/api/leases/changes", query)

    def preempting(self) -> list[Allocation]:
        return self._get(Page[Allocation], "/api/leases/preempting")["items"]

    def slurm_jobs(self) -> list[SlurmJob]:
        return self._get(Page[SlurmJob], "/api/slurm")["items"]

    def keep_slurm_jobs(self, cluster: str, jobs: Sequence[SlurmJob]) -> None:
        self._post(Done, "/api/slurm", {"cluster": cluster, "jobs": list(jobs)})

    def wait(self, lease_id: str, timeout_s: float) -> Submission | None:
        """Return as `status_of`, once a pending request is granted or gone, at most that much later."""
        deadline, version = time.monotonic() + timeout_s, -1
        while (found := self.status_of(lease_id)) is not None and found["state"] == "WAITING":
            began = time.monotonic()
            if began >= deadline:
                break
            changes = self.lease_changes(version, deadline - began, lease_id)
            version = changes["version"]
            if not (changes["leases"] or changes["ended"]):
                time.sleep(max(min(began + WAIT_S, deadline) - time.monotonic(), 0.0))
        return found

    def queue(self, *, estimated: bool = True) -> list[QueueEntry]:
        """Return the manager's queue, each entry with `estimated_start`, which the service has anyway."""
        return list(self._pages(QueueEntry, "/api/queue"))

    def history(self, after: int = 0, limit: int = PAGE, *, by: str = "", what: str = "") -> list[Recorded]:
        """Return the changes after a version, those of `by` and `what` only; see `GPUResourceManager`."""
        wanted = {"by": by, "what": what}
        asked = {name: text for name, text in wanted.items() if text}
        size = PAGE if asked else min(limit, PAGE)
        found = islice(self._pages(Change, "/api/history", after, size, **asked), limit)
        return cast("list[Recorded]", list(found))

    def report(self, by: Sequence[str] = ("team",), since: float | str = "30d") -> Report:
        """Return the GPU-hours of the last time, in seconds or as `30d`, by these keys."""
        from resource_manager.manager.report import Report  # with the accounting

        ago = since if isinstance(since, str) else f"{since:f}s"
        return self._get(Report, "/api/report", {"by": list(by), "since": ago})

    def estimates(self) -> EstimatesView:
        """Return how often the estimated starts of pending requests came true."""
        return self._get(EstimatesView, "/api/estimates")

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
        return self._get(Explanation, "/api/explain", query)

    def explain_named(self, name: str) -> Explanation:
        """Return why the pending request of that name waits; see `GPUResourceManager.explain_named`."""
        return self._get(Explanation, "/api/task/explain", {"name": name})

    def begin_log_in(self) -> DeviceAnswer:
        """Begin a log-in at the provider of the cluster, which a person ends in a browser."""
        return self._post(DeviceAnswer, "/api/login", {})

    def end_log_in(self, device_code: str) -> LogInAnswer:
        """Return the token of who logged in, nulls while nobody has."""
        return self._post(LogInAnswer, "/api/login/token", {"device_code": device_code})

    def log_out(self) -> None:
        """Revoke the token of this client, which is that of a log-in."""
        self._call(Done, "DELETE", "/api/login")

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def snapshot(self) -> dict[str, Any]:
        return self._get(SnapshotAnswer, "/api/snapshot")["snapshot"]

    def _server_id(self, server: int | str) -> int:
        if isinstance(server, int) and server >= 0:
            return server
        servers = self.servers()
        for row in servers:
            if server in (row["server_id"], row["server_name"]):
                return int(row["server_id"])
        raise UnknownNodeError(server, [row["server_name"] for row in servers])

    def _is_done(self, path: str, body: dict[str, Any]) -> bool:
        try:
            self._post(Done, path, body)
        except LeaseNotFoundError:
            return False
        return True

    def _pages(
        self, kind: type[T], path: str, after: int = 0, limit: int | None = None, **asked: str
    ) -> Iterator[T]:
        following: int | None = after
        while following is not None:
            query = {"after": following, "limit": PAGE if limit is None else limit, **asked}
            page = self._get(Page[kind], path, query)  # type: ignore[valid-type]
            yield from page["items"]
            before, following = following, page["next"]
            if following is not None and (following <= before or not page["items"]):
                raise ServiceUnavailableError(502, f"{self.url} gave pages of {path} that do not end")

    def _get(self, kind: type[T], path: str, query: dict[str, Any] | None = None) -> T:
        return self._call(kind, "GET", path, params=query)

    def _post(self, kind: type[T], path: str, body: dict[str, Any]) -> T:
        given = {key: value for key, value in body.items() if value is not None}
        return self._call(kind, "POST", path, json=given)

    def _answer(self, method: str, path: str, **content: Any) -> httpx.Response:
        """Return the response; try again where the connection is refused, as while a service starts.

        So too, for `BUSY_S`, where the service refuses the call as one too many of its caller's: no sooner
        than its Retry-After says, which is logged once if it is a second or more.
        """
        began, patience_s, has_said = time.monotonic(), RETRY_S, False
        while True:
            pause_s = RETRY_S
            try:
                response = self._http.request(method, path, **content)
                wait_s = response.headers.get("Retry-After", "0")
                left_s = began + BUSY_S - time.monotonic()
                if response.status_code != 429 or not wait_s.isdecimal() or float(wait_s) >= left_s:
                    return response
                pause_s = float(wait_s) + patience_s * (0.5 + _spread.random())  # nosec B311  # they spread
                patience_s = min(2 * patience_s, MAX_RETRY_S)
                if float(wait_s) >= 1 and not has_said:
                    has_said = True
                    logger.warning("%s has too many calls; asking again in %.1f s", self.url, pause_s)
            except httpx.ConnectError as error:
                if not _is_refused(error) or time.monotonic() >= began + self._connect_timeout_s:
                    raise
            time.sleep(pause_s)

    def _call(self, kind: type[T], method: str, path: str, **content: Any) -> T:
        """Return the answer, which is of that type; raises what the manager would have."""
        try:
            response = self._answer(method, path, **content)
        except httpx.UnsupportedProtocol as error:
            raise InvalidRequestError("not the address of a service: {!r}", self.url, field="url") from error
        except httpx.HTTPError as error:
            raise ServiceUnavailableError(503, f"no answer from {self.url}: {error}") from error
        except (TypeError, ValueError) as error:
            raise InvalidRequestError("cannot be sent to a service: {}", error) from error
        try:
            answer = harmless(response.json())
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) and response.status_code == 429:  # by a proxy, or before it was read
            raise ServiceUnavailableError(
                429,
                f"{self.url} has too many calls: it refused {method} {path}; ask again later",
            )
        if not isinstance(answer, dict):
            raise ServiceUnavailableError(
                502 if response.is_success else response.status_code,
                f"{self.url} is not a GPU manager: {method} {path} gave {response.status_code}",
            )
        if not response.is_success:
            raise _error(response.status_code, answer, response.headers.get("Retry-After", ""))
        try:
            check(answer, kind)
        except ValueError as error:
            raise ServiceUnavailableError(
                502, f"{self.url} gave another answer to {method} {path} than a GPU manager of ours: {error}"
            ) from error
        return cast("T", answer)


def _is_refused(error: BaseException | None) -> bool:
    """Return True if no process listened on the address, so that the request was not sent."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError):
            return True
        error = error.__cause__ or error.__context__
    return False


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


def _error(status: int, problem: dict[str, Any], retry_after: str = "") -> ResourceManagerError:
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
