"""REST routes; each declaration names the role it needs."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from typing import Any, TypeVar, cast

import flask

from resource_manager import STORED_FORMAT, __version__
from resource_manager.agent.probe import MAX_REPORT_BYTES
from resource_manager.agent.report_format import ReportError, read_report
from resource_manager.core.changes import JobEnd, ReleaseResult
from resource_manager.core.models import Gpu, JobPlace, Lease
from resource_manager.core.name_lookup import find
from resource_manager.errors import (
    NO_LEASE,
    UNKNOWN_SERVER,
    LeaseNotFoundError,
    StateClosedError,
    UnknownNodeError,
)
from resource_manager.fleet.receiving import ReportAnswer
from resource_manager.fleet.server_use import use_of
from resource_manager.manager.agent_jobs import AgentState, jobs_on
from resource_manager.manager.cluster_change import ApplyOptions
from resource_manager.manager.cluster_results import (
    ClusterDiff,
    ClusterView,
    ServerDetail,
    ServerSummary,
    TeamsView,
    WindowView,
)
from resource_manager.manager.refusal_wording import Refusal
from resource_manager.manager.report import Report, ReportQuery
from resource_manager.manager.results import (
    Allocation,
    ComingDemand,
    EstimatesView,
    Explanation,
    QueueEntry,
    Renewal,
    SlurmJob,
    Submission,
    Summary,
)
from resource_manager.manager.stored_jobs import JobResult
from resource_manager.manager.use_results import ServerUse
from resource_manager.manager.wording import matches
from resource_manager.rest.agent_schemas import (
    AgentJobsQuery,
    AgentStateQuery,
    LogsBody,
    OrderBody,
    OutputQuery,
    ResultQuery,
)
from resource_manager.rest.answers import (
    AnnounceAnswer,
    BatchAnswer,
    CallerAnswer,
    Change,
    Done,
    Health,
    MaintenanceAnswer,
    MaintenanceRemoveAnswer,
    Ordered,
    Page,
    ReleaseAnswer,
    RenewBatchAnswer,
    SnapshotAnswer,
    Trend,
    WithdrawAnswer,
)
from resource_manager.rest.auth import Identity
from resource_manager.rest.openapi import document
from resource_manager.rest.ownership import may_read, not_released, owned, owner_required, require_run_jobs
from resource_manager.rest.problems import ProblemError, from_refusal
from resource_manager.rest.routing import Routes, raw_body
from resource_manager.rest.schemas import (
    AdoptBody,
    AllocateBody,
    AnnounceBody,
    BatchBody,
    CancelBody,
    ChangesQuery,
    ClusterBody,
    DrainBody,
    ExplainQuery,
    GpusQuery,
    HistoryQuery,
    MaintenanceBody,
    MaintenanceRemoveBody,
    NameQuery,
    PageQuery,
    PlaceBody,
    PreemptBody,
    ReleaseBody,
    RenewBatchBody,
    RenewBody,
    ResetBody,
    ResumeBody,
    SearchedBody,
    SlurmBody,
    StatusQuery,
    SubmitBody,
    TaskQuery,
    UsageHistoryQuery,
    WithdrawBody,
)
from resource_manager.rest.service import Service
from resource_manager.rest.tokens import Role
from resource_manager.storage.once import Once

T = TypeVar("T")

MAX_CLUSTER_BYTES = 16 * 1024 * 1024
"""Maximum size of the definition of a cluster, enough for the servers of the largest."""

routes = Routes()


@routes.add(
    "POST",
    "/api/allocate",
    Role.USER,
    "Grant GPUs now, or answer 503",
    body=AllocateBody,
    tags=("leases",),
)
def allocate(service: Service, caller: Identity, body: AllocateBody, once: Once | None = None) -> Allocation:
    result = service.manager.try_allocate(owned(service, body, caller), once=once)
    if isinstance(result, Refusal):
        service.metrics.refusals.labels(result.kind).inc()
        raise from_refusal(result)
    return result


@routes.add(
    "POST",
    "/api/allocate/batch",
    Role.USER,
    "Grant several requests, each on its own; each counts for the limit of calls",
    body=BatchBody,
    tags=("leases",),
)
def allocate_batch(
    service: Service, caller: Identity, body: BatchBody, once: Once | None = None
) -> BatchAnswer:
    if len(body.requests) > 1:
        service.limits.count(flask.g.counted_as, len(body.requests) - 1)
    requests = [owned(service, item, caller) for item in body.requests]
    results: list[Any] = []
    refusals: list[Any] = []
    for result in service.manager.try_allocate_batch(requests, once=once):
        if isinstance(result, Refusal):
            service.metrics.refusals.labels(result.kind).inc()
            results.append(None)
            refusals.append({"kind": str(result.kind), "detail": result.detail})
        else:
            results.append(result)
            refusals.append(None)
    return {"results": results, "refusals": refusals}


@routes.add(
    "POST",
    "/api/submit",
    Role.USER,
    "Grant GPUs now, or queue the request",
    body=SubmitBody,
    tags=("queue",),
)
def submit(service: Service, caller: Identity, body: SubmitBody, once: Once | None = None) -> Submission:
    if body.job is not None:
        require_run_jobs(caller)
    return service.manager.submit(owned(service, body, caller), job=body.job, once=once)


@routes.add(
    "POST",
    "/api/announce",
    Role.USER,
    "Announce a demand that a task will make; it holds nothing",
    body=AnnounceBody,
    tags=("queue",),
)
def announce(
    service: Service, caller: Identity, body: AnnounceBody, once: Once | None = None
) -> AnnounceAnswer:
    demand = owned(service, body, caller)
    return {"announced": service.manager.announce(demand, after=body.after, copies=body.copies)}


@routes.add(
    "POST",
    "/api/withdraw",
    Role.USER,
    "Withdraw announced demands; of another owner as operator only",
    body=WithdrawBody,
    tags=("queue",),
)
def withdraw(
    service: Service, caller: Identity, body: WithdrawBody, once: Once | None = None
) -> WithdrawAnswer:
    owner = owner_required(caller)
    return {
        "withdrawn": service.manager.withdraw(body.task_ids, run=body.run, owner=owner, reason=body.reason)
    }


@routes.add(
    "POST",
    "/api/release",
    Role.USER,
    "End a lease; of another owner as operator only",
    body=ReleaseBody,
    failures=(404, 409),
    tags=("leases",),
)
def release(service: Service, caller: Identity, body: ReleaseBody, once: Once | None = None) -> ReleaseAnswer:
    owner, outcome = owner_required(caller), body.outcome
    lease_id, token = _meant(service, body.task_id, body.fencing_token, pending=False, exact=body.exact)
    once = _needed(once, body.fencing_token)
    if body.job_end is JobEnd.GONE and not caller.is_operator:
        raise ProblemError(403, "job_end gone is an operator's word that nothing runs there any more")
    if body.ranks is None or body.fencing_token is None:
        result = service.manager.release(
            lease_id,
            fencing_token=token,
            owner=owner,
            outcome=outcome,
            job_end=body.job_end,
            reason=body.reason,
            failed_nodes=body.failed_nodes,
            once=once,
        )
    else:
        result = service.manager.release_members(
            body.task_id,
            body.ranks,
            fencing_token=body.fencing_token,
            owner=owner,
            outcome=outcome,
            job_end=body.job_end,
            once=once,
        )
    if result not in (ReleaseResult.RELEASED, ReleaseResult.QUARANTINED):
        raise not_released(service, caller, lease_id, token)
    quarantined = result is ReleaseResult.QUARANTINED
    return {"success": True, "task_id": lease_id, "quarantined": quarantined}


@routes.add(
    "POST",
    "/api/place",
    Role.USER,
    "Store where the jobs of a lease are about to start",
    body=PlaceBody,
    failures=(404,),
    tags=("leases",),
)
def place(service: Service, caller: Identity, body: PlaceBody, once: Once | None = None) -> Allocation:
    places = [JobPlace(**place.model_dump()) for place in body.places]
    return service.manager.place_job(
        body.task_id, places, fencing_token=body.fencing_token, owner=owner_required(caller)
    )


@routes.add(
    "POST",
    "/api/renew",
    Role.USER,
    "Renew a lease: its TTL starts again now",
    body=RenewBody,
    failures=(404, 409),
    tags=("leases",),
)
def renew(service: Service, caller: Identity, body: RenewBody, once: Once | None = None) -> Allocation:
    lease_id, token = _meant(service, body.task_id, body.fencing_token, pending=False, exact=body.exact)
    return service.manager.renew(
        lease_id,
        fencing_token=token,
        owner=owner_required(caller),
        checkpoint_at=body.checkpoint_at,
        for_s=body.for_s,
        once=_needed(once, body.fencing_token),
    )


@routes.add(
    "POST",
    "/api/renew/batch",
    Role.USER,
    "Renew several leases in one commit; each counts for the limit of calls",
    body=RenewBatchBody,
    tags=("leases",),
)
def renew_all(
    service: Service, caller: Identity, body: RenewBatchBody, once: Once | None = None
) -> RenewBatchAnswer:
    if len(body.renewals) > 1:
        service.limits.count(flask.g.counted_as, len(body.renewals) - 1)
    renewals = [cast("Renewal", each.model_dump()) for each in body.renewals]
    return {"renewed": service.manager.renew_all(renewals, owner=owner_required(caller))}


@routes.add(
    "POST",
    "/api/preempt",
    Role.OPERATOR,
    "Preempt a lease for a pending request: its job has its grace to save what it did, then waits again",
    body=PreemptBody,
    failures=(404, 409),
    tags=("leases",),
)
def preempt(service: Service, caller: Identity, body: PreemptBody, once: Once | None = None) -> Allocation:
    lease_id, token = _meant(service, body.task_id, body.fencing_token, pending=False, exact=body.exact)
    is_exact = body.exact or not body.preemptor
    preemptor = _meant(service, body.preemptor, None, pending=True, exact=is_exact)[0]
    return service.manager.preempt(
        lease_id, preemptor=preemptor, fencing_token=token, dry_run=body.dry_run, once=once
    )


@routes.add(
    "POST",
    "/api/cancel",
    Role.USER,
    "Remove a pending request from the queue",
    body=CancelBody,
    failures=(404, 409),
    tags=("queue",),
)
def cancel(service: Service, caller: Identity, body: CancelBody, once: Once | None = None) -> Done:
    lease_id, sequence = _meant(service, body.task_id, body.sequence, pending=True, exact=body.exact)
    is_cancelled = service.manager.cancel(
        lease_id,
        owner=owner_required(caller),
        sequence=sequence,
        reason=body.reason,
        once=once,
    )
    if not is_cancelled:
        raise ProblemError(404, f"task {body.task_id!r} has no pending request", kind=NO_LEASE)
    return {"success": True, "task_id": lease_id}


@routes.add(
    "POST",
    "/api/servers/<int:server_id>/drain",
    Role.OPERATOR,
    "Drain a server or one of its GPUs: it takes no new leases",
    body=DrainBody,
    failures=(404,),
    tags=("servers",),
)
def drain(
    service: Service, caller: Identity, body: DrainBody, server_id: int, once: Once | None = None
) -> ServerSummary:
    return _server(
        lambda: service.manager.drain(server_id, body.gpu, reason=body.reason, failed=body.failed, once=once)
    )


@routes.add(
    "POST",
    "/api/servers/<int:server_id>/resume",
    Role.OPERATOR,
    "Resume a drained server or a closed GPU: it takes new leases again",
    body=ResumeBody,
    failures=(404,),
    tags=("servers",),
)
def resume(
    service: Service, caller: Identity, body: ResumeBody, server_id: int, once: Once | None = None
) -> ServerSummary:
    return _server(lambda: service.manager.resume(server_id, body.gpu, once=once))


@routes.add(
    "POST",
    "/api/servers/<int:server_id>/searched",
    Role.OPERATOR,
    "All jobs that a launcher saw on a server: closed since a restore, it opens if each has its lease",
    body=SearchedBody,
    failures=(404,),
    tags=("servers",),
)
def searched(
    service: Service, caller: Identity, body: SearchedBody, server_id: int, once: Once | None = None
) -> ServerSummary:
    return _server(lambda: service.manager.searched(server_id, body.jobs, age_s=body.age_s, once=once))


@routes.add(
    "GET",
    "/api/servers/<int:server_id>",
    Role.READER,
    "One server with its GPUs and the leases on each",
    failures=(404,),
    tags=("servers",),
)
def server(service: Service, caller: Identity, server_id: int) -> ServerDetail:
    return _server(lambda: service.manager.server(server_id))


@routes.add(
    "POST",
    "/api/servers/<int:server_id>/adopt",
    Role.OPERATOR,
    "Replace the GPUs of a server without leases in the inventory",
    body=AdoptBody,
    failures=(404, 409),
    tags=("servers",),
)
def adopt(
    service: Service, caller: Identity, body: AdoptBody, server_id: int, once: Once | None = None
) -> ServerDetail:
    gpus = [Gpu(gpu.gpu_id, gpu.type, gpu.vendor, gpu.memory_mib, gpu.uuid) for gpu in body.gpus]
    return _server(lambda: service.manager.adopt(server_id, gpus, once=once))


@routes.add(
    "POST",
    "/api/reset",
    Role.OPERATOR,
    "End all leases and empty the queue",
    body=ResetBody,
    tags=("servers",),
)
def reset(service: Service, caller: Identity, body: ResetBody, once: Once | None = None) -> Done:
    service.manager.reset(once=once)
    return {"success": True}


@routes.add(
    "GET",
    "/api/teams",
    Role.READER,
    "Rules of the teams, and what each holds",
    tags=("teams",),
)
def teams(service: Service, caller: Identity) -> TeamsView:
    return service.manager.teams()


@routes.add(
    "GET",
    "/api/cluster",
    Role.READER,
    "The stored cluster: settings, servers, teams, windows, as its file has them",
    tags=("cluster",),
)
def cluster(service: Service, caller: Identity) -> ClusterView:
    return service.manager.cluster()


@routes.add(
    "PUT",
    "/api/cluster",
    Role.OPERATOR,
    "Make the cluster what these sections define, in one commit; a section that is left out stays",
    body=ClusterBody,
    failures=(409,),
    max_bytes=MAX_CLUSTER_BYTES,
    tags=("cluster",),
)
def apply(service: Service, caller: Identity, body: ClusterBody, once: Once | None = None) -> ClusterDiff:
    options = ApplyOptions(tuple(body.remove), tuple(body.retire), body.force)
    if body.dry_run:
        return service.manager.diff(body.sections, options)
    return service.manager.apply(body.sections, options, revision=body.revision, once=once)


@routes.add(
    "GET",
    "/api/maintenance",
    Role.READER,
    "Maintenance windows, the next first",
    tags=("servers",),
)
def maintenance(service: Service, caller: Identity) -> MaintenanceAnswer:
    return {"windows": service.manager.maintenance()}


@routes.add(
    "POST",
    "/api/maintenance",
    Role.OPERATOR,
    "Add a maintenance window",
    body=MaintenanceBody,
    tags=("servers",),
)
def add_maintenance(
    service: Service, caller: Identity, body: MaintenanceBody, once: Once | None = None
) -> WindowView:
    return service.manager.add_maintenance(body, dry_run=body.dry_run, once=once)


@routes.add(
    "POST",
    "/api/maintenance/remove",
    Role.OPERATOR,
    "Remove a maintenance window",
    body=MaintenanceRemoveBody,
    tags=("servers",),
)
def remove_maintenance(
    service: Service, caller: Identity, body: MaintenanceRemoveBody, once: Once | None = None
) -> MaintenanceRemoveAnswer:
    return {"window": service.manager.remove_maintenance(body.id, dry_run=body.dry_run, once=once)}


@routes.add(
    "POST",
    "/api/reports",
    Role.AGENT,
    "Report the GPUs of a server; the answer names those to be cleaned",
    failures=(413,),
    tags=("servers",),
)
def reports(service: Service, caller: Identity) -> ReportAnswer:
    flask.request.max_content_length = MAX_REPORT_BYTES
    try:
        report = read_report(raw_body())
        if caller.server not in ("*", report.server):
            raise ProblemError(
                403, f"this token is of server {caller.server}; the report is of {report.server}"
            )
        return service.receiver.receive(report)
    except ReportError as error:
        raise ProblemError(400, str(error)) from error


@routes.add(
    "GET",
    "/api/agent/jobs",
    Role.AGENT,
    "Jobs that should be on a server: the request is held until they are others than those known",
    query=AgentJobsQuery,
    tags=("servers",),
)
def agent_jobs(service: Service, caller: Identity, query: AgentJobsQuery) -> Any:
    _require_agent(caller, query.server)
    check_version(query.version)
    board, bell = service.receiver.board, service.receiver.board.doorbell
    before = bell.mark(query.server)
    answer = board.jobs(query.server)
    if answer["known"] == query.known:
        if service.held.hold(flask.g.counted_as, lambda: bool(bell.mark(query.server) != before), query.wait):
            return flask.Response(status=204)  # nobody gets it: this request is carried out again
        return {"known": query.known}
    return answer


@routes.add(
    "POST",
    "/api/agent/logs",
    Role.AGENT,
    "Bring a part of a job's output that somebody asked for",
    body=LogsBody,
    tags=("servers",),
)
def agent_logs(service: Service, caller: Identity, body: LogsBody, once: Once | None = None) -> Done:
    _require_agent(caller, body.server)
    jobs = service.manager.stored_jobs
    for question in jobs.questions(body.server):
        if (question["key"], question["n"]) == (body.key, body.n):
            jobs.keep_output(body.server, question, body.part)
    return {"success": True}


def check_version(version: str) -> None:
    """Raise 409 for an agent whose version does not go with this one's: major and minor must be equal."""
    if version.split(".")[:2] != __version__.split(".")[:2]:
        raise ProblemError(
            409, f"this agent is {version or 'of no version'} and the service {__version__}: install the same"
        )


def _require_agent(caller: Identity, server: str) -> None:
    if caller.server not in ("*", server):
        raise ProblemError(403, f"this token is of server {caller.server}, not of {server}")


@routes.add(
    "POST",
    "/api/jobs/order",
    Role.USER,
    "Tell the agent of a server what to do with the job of a lease",
    body=OrderBody,
    failures=(404,),
    tags=("leases",),
)
def order_job(service: Service, caller: Identity, body: OrderBody, once: Once | None = None) -> Ordered:
    require_run_jobs(caller)
    number = service.manager.order_job(body.server, body.key, body.order, owner=owner_required(caller))
    service.held.look_soon()
    return {"n": number}


@routes.add(
    "GET",
    "/api/jobs",
    Role.READER,
    "Jobs of a server's agent as last reported: the caller's own, for an operator all",
    query=AgentStateQuery,
    tags=("leases",),
)
def agent_state(service: Service, caller: Identity, query: AgentStateQuery) -> AgentState:
    state = service.manager.agent_state(query.server)
    if caller.is_operator:
        return state
    readable = service.watch.read(
        lambda cluster, now: {
            key for key, _, lease in jobs_on(cluster, query.server) if may_read(caller, lease.request)
        }
    )
    return {**state, "runs": {key: run for key, run in state["runs"].items() if key in readable}}


@routes.add(
    "GET",
    "/api/jobs/output",
    Role.READER,
    "Part of the output of a job that an agent runs; for its owner, their team and operators",
    query=OutputQuery,
    failures=(404,),
    tags=("leases",),
)
def job_output(service: Service, caller: Identity, query: OutputQuery) -> dict[str, Any]:
    server, key, lease_id = query.server, query.key, query.task_id or ""
    try:
        of = service.manager.job_of(server, key, lease_id)
    except LeaseNotFoundError:
        raise ProblemError(404, f"no lease on {server} has the job {key}") from None
    if not may_read(caller, of):
        raise ProblemError(403, "a job's output is for its owner, their team and operators")
    part = service.manager.job_output(
        server, key, query.offset, lease_id=lease_id, on_question=service.held.look_soon
    )
    # As clients take it: they escape what would steer a terminal, and this is to be as the job wrote it.
    return {**part, "text": b64encode(str(part.get("text", "")).encode()).decode()}


@routes.add(
    "GET",
    "/api/result",
    Role.READER,
    "Result of the job of a lease that has ended, for 7 days; for its owner, their team and operators",
    query=ResultQuery,
    failures=(404,),
    tags=("leases",),
)
def result(service: Service, caller: Identity, query: ResultQuery) -> JobResult:
    found = service.manager.result_of(query.task_id, query.fencing_token)
    if found is None or not may_read(caller, found):
        raise ProblemError(404, f"no result of {query.task_id} with fencing token {query.fencing_token}")
    return found


@routes.add(
    "GET",
    "/api/gpus",
    Role.READER,
    "Use of every GPU as last reported, by server, with its leases",
    query=GpusQuery,
    tags=("servers",),
)
def gpus(service: Service, caller: Identity, query: GpusQuery) -> Page[ServerUse]:
    if query.servers:
        return {"items": use_of(service.manager, query.servers), "next": None}
    names = service.watch.read(lambda cluster, now: [state.name for state in cluster.nodes])
    end = query.after + query.limit
    page = use_of(service.manager, names[query.after : end])
    return {"items": page, "next": end if end < len(names) else None}


@routes.add(
    "GET",
    "/api/status",
    Role.READER,
    "Free and allocated capacity of every server",
    query=StatusQuery,
    tags=("servers",),
)
def status(service: Service, caller: Identity, query: StatusQuery) -> Summary:
    summary = service.manager.summary()
    if query.limit is not None or query.after:
        servers = summary["servers"]
        end = len(servers) if query.limit is None else query.after + query.limit
        summary["servers"] = servers[query.after : end]
        summary["next"] = end if end < len(servers) else None
    return summary


@routes.add(
    "GET",
    "/api/leases",
    Role.READER,
    "Live leases, oldest first",
    query=PageQuery,
    tags=("leases",),
)
def leases(service: Service, caller: Identity, query: PageQuery) -> Page[Allocation]:
    later = [lease for lease in service.manager.leases() if lease["fencing_token"] > query.after]
    page = later[: query.limit]
    return {"items": page, "next": page[-1]["fencing_token"] if len(later) > len(page) else None}


@routes.add(
    "GET",
    "/api/leases/changes",
    Role.READER,
    "Leases and requests that changed since a version, once some have: the request is held until then",
    query=ChangesQuery,
    tags=("leases",),
)
def lease_changes(service: Service, caller: Identity, query: ChangesQuery) -> Any:
    def is_due() -> bool:
        return service.watch.has_changed_leases(query.after)

    if service.held.hold(flask.g.counted_as, is_due, query.timeout_s):
        return flask.Response(status=204)  # nobody gets it: this request is carried out again
    return service.manager.lease_changes(query.after, prefix=query.prefix)


@routes.add(
    "GET",
    "/api/leases/preempting",
    Role.READER,
    "Leases that are being preempted",
    tags=("leases",),
)
def preempting(service: Service, caller: Identity) -> Page[Allocation]:
    return {"items": service.manager.preempting(), "next": None}


@routes.add(
    "GET",
    "/api/slurm",
    Role.READER,
    "Jobs that Slurm placed, the latest submitted first",
    tags=("leases",),
)
def slurm_jobs(service: Service, caller: Identity) -> Page[SlurmJob]:
    return {"items": service.manager.slurm_jobs(), "next": None}


@routes.add(
    "POST",
    "/api/slurm",
    Role.USER,
    "Replace what is known of the jobs of a cluster of Slurm",
    body=SlurmBody,
    tags=("leases",),
)
def keep_slurm_jobs(service: Service, caller: Identity, body: SlurmBody, once: Once | None = None) -> Done:
    service.manager.keep_slurm_jobs(body.cluster, body.jobs)
    return {"success": True}


@routes.add(
    "GET",
    "/api/task",
    Role.READER,
    "Lease or pending request of a task",
    query=TaskQuery,
    failures=(404, 409),
    tags=("leases",),
)
def task(service: Service, caller: Identity, query: TaskQuery) -> Submission:
    if not query.exact:
        return service.manager.named(query.task_id, pending=query.pending, fencing_token=query.fencing_token)
    found = service.manager.status_of(query.task_id)
    if found is None:
        raise ProblemError(
            404, f"task {query.task_id!r} has neither a lease nor a pending request", kind=NO_LEASE
        )
    return found


@routes.add(
    "GET",
    "/api/queue",
    Role.READER,
    "Pending requests in queue order, with their estimated start",
    query=PageQuery,
    tags=("queue",),
)
def queue(service: Service, caller: Identity, query: PageQuery) -> Page[QueueEntry]:
    entries = service.manager.queue()
    end = query.after + query.limit
    page = entries[query.after : end]
    return {"items": page, "next": end if end < len(entries) else None, "total": len(entries)}


@routes.add(
    "GET",
    "/api/coming",
    Role.READER,
    "Demands that tasks of running DAGs will make, the next first",
    query=PageQuery,
    tags=("queue",),
)
def coming(service: Service, caller: Identity, query: PageQuery) -> Page[ComingDemand]:
    demands = service.manager.coming()
    end = query.after + query.limit
    return {
        "items": demands[query.after : end],
        "next": end if end < len(demands) else None,
        "total": len(demands),
    }


@routes.add(
    "GET",
    "/api/history",
    Role.READER,
    "Changes in the history, oldest first",
    query=HistoryQuery,
    tags=("history",),
)
def history(service: Service, caller: Identity, query: HistoryQuery) -> Page[Change]:
    page = service.manager.history(query.after, query.limit)
    found = [change for change in page if matches(change, query.by, query.what)]
    return {
        "items": cast("list[Change]", found),
        "next": page[-1]["version"] if len(page) == query.limit else None,
    }


@routes.add(
    "GET",
    "/api/snapshot",
    Role.READER,
    "The whole state, with which the history can be replayed",
    tags=("history",),
)
def snapshot(service: Service, caller: Identity) -> SnapshotAnswer:
    return {"snapshot": service.manager.snapshot()}


@routes.add(
    "GET",
    "/api/explain",
    Role.READER,
    "Explain a request without making it: does it fit now, where, why not, and when",
    query=ExplainQuery,
    tags=("queue",),
)
def explain(service: Service, caller: Identity, query: ExplainQuery) -> Explanation:
    return service.manager.explain(query)


@routes.add(
    "GET",
    "/api/task/explain",
    Role.READER,
    "Explain why a pending request waits, and when it should start",
    query=NameQuery,
    failures=(404, 409),
    tags=("queue",),
)
def explain_task(service: Service, caller: Identity, query: NameQuery) -> Explanation:
    return service.manager.explain_named(query.name)


@routes.add(
    "GET",
    "/api/trends",
    Role.READER,
    "Utilisation, queue and waits over the last hours",
    query=UsageHistoryQuery,
    tags=("history",),
)
def usage_history(service: Service, caller: Identity, query: UsageHistoryQuery) -> Trend:
    return service.watch.usage_history(query.hours)


@routes.add(
    "GET",
    "/api/report",
    Role.READER,
    "GPU-hours granted and what became of them, by team, user, DAG or GPU type",
    query=ReportQuery,
    tags=("history",),
)
def report(service: Service, caller: Identity, query: ReportQuery) -> Report:
    return service.manager.report(query.by, query.since)


@routes.add(
    "GET",
    "/api/estimates",
    Role.READER,
    "How often the estimated starts of pending requests came true",
    tags=("history",),
)
def estimates(service: Service, caller: Identity) -> EstimatesView:
    return service.manager.estimates()


@routes.add("GET", "/api/caller", Role.READER, "Name, role and teams of the caller")
def who(service: Service, caller: Identity) -> CallerAnswer:
    return {"name": caller.name, "role": str(caller.role), "teams": list(caller.teams)}


@routes.add("GET", "/livez", None, "Check that the service runs; its store is not asked")
def livez(service: Service, caller: Identity | None) -> Health:
    return {"status": "ok", "version": __version__, "format": STORED_FORMAT}


@routes.add("GET", "/readyz", None, "Check that the service reaches its store and may change it")
def readyz(service: Service, caller: Identity | None) -> Health:
    service.watch.check()
    store = service.manager.store
    if store.closed:
        raise StateClosedError("the store", store.closed)
    return livez(service, caller)


@routes.add("GET", "/healthz", None, "The same as /readyz")
def healthz(service: Service, caller: Identity | None) -> Health:
    return readyz(service, caller)


@routes.add("GET", "/metrics", Role.READER, "Prometheus metrics")
def metrics(service: Service, caller: Identity) -> Any:
    return flask.Response(service.metrics.text(), content_type="text/plain; version=0.0.4; charset=utf-8")


@routes.add("GET", "/openapi.json", Role.READER, "This interface as an OpenAPI 3.1 document")
def openapi(service: Service, caller: Identity) -> Any:
    return document(routes.all, service.manager.gpu_range(), flask.request.script_root)


def _meant(
    service: Service, name: str, number: int | None, *, pending: bool, exact: bool
) -> tuple[str, int | None]:
    """Return the full lease id of that name, with the fencing token of a lease or the sequence in the queue.

    `number` is the caller's own, with which the name is a full id, and so it is where nothing has that name:
    what is repeated may be over.
    """
    if exact or number is not None:
        return name, number
    try:
        entry = service.manager.read(lambda cluster, now: find(cluster, name, pending=pending))
    except LeaseNotFoundError:
        return name, None
    return entry.lease_id, entry.fencing_token if isinstance(entry, Lease) else entry.sequence


def _needed(once: Once | None, fencing_token: int | None) -> Once | None:
    """Return the idempotency key unless a fencing token is given, with which no repeat acts twice."""
    return once if fencing_token is None else None


def _server(change: Callable[[], T]) -> T:
    try:
        return change()
    except UnknownNodeError as error:
        raise ProblemError(404, str(error), kind=UNKNOWN_SERVER, server=error.node) from error
