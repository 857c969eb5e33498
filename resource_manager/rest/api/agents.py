"""Operations of agents, and of the jobs that they run."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import flask

from resource_manager import __version__
from resource_manager.agent.probe import MAX_REPORT_BYTES
from resource_manager.agent.report_format import ReportError, read_report
from resource_manager.fleet.receiving import ReportAnswer
from resource_manager.manager.agent_jobs import UNKNOWN_RUN, AgentState, jobs_on
from resource_manager.manager.stored_jobs import JobResult
from resource_manager.rest import agent_schemas
from resource_manager.rest.answers import Done, Ordered
from resource_manager.rest.api.operations import routes
from resource_manager.rest.auth import Identity
from resource_manager.rest.held_requests import UNCHANGED
from resource_manager.rest.ownership import may_read, owner_required, require_run_jobs
from resource_manager.rest.problems import ProblemError
from resource_manager.rest.routing import raw_body
from resource_manager.rest.service import Service
from resource_manager.rest.tokens import Role

RUNS_NO_JOBS = "inside Airflow no jobs are given to agents: --run-jobs needs the --url of a gpu-manager serve"
"""Refusal as by a service that is out: the agent turns to its next one, and no job is placed with it."""


@routes.add(
    "POST",
    "/api/reports",
    Role.AGENT,
    failures=(400, 413, 415),
    tag="servers",
    described=agent_schemas.ReportBody,
)
def reports(service: Service, caller: Identity) -> ReportAnswer:
    """Report the GPUs of a server; the answer names those to be cleaned."""
    flask.request.max_content_length = MAX_REPORT_BYTES
    try:
        report = read_report(raw_body())
        if service.embedded and report.place is not None:
            raise ProblemError(503, RUNS_NO_JOBS)
        if caller.server not in ("*", report.server):
            raise ProblemError(
                403, f"this token is of server {caller.server}; the report is of {report.server}"
            )
        return service.receiver.receive(report)
    except ReportError as error:
        raise ProblemError(400, str(error)) from error


@routes.add("GET", "/api/agent/jobs", Role.AGENT, failures=(409,), tag="servers")
def agent_jobs(service: Service, caller: Identity, query: agent_schemas.AgentJobsQuery) -> Any:
    """Jobs that should be on a server: the request is held until they are others than those known."""
    _require_agent(caller, query.server)
    check_version(query.version)
    if flask.request.environ.get(UNCHANGED):  # the agent asks again at once
        return {"known": query.known}
    board, bell = service.receiver.board, service.receiver.board.doorbell
    before = bell.mark(query.server)
    answer = board.jobs(query.server, query.known)
    if answer["known"] == query.known:
        service.held.hold(flask.g.counted_as, lambda: bool(bell.mark(query.server) != before), query.wait)
        return {"known": query.known}
    return answer


@routes.add("POST", "/api/agent/logs", Role.AGENT, max_bytes=agent_schemas.MAX_LOGS_BYTES, tag="servers")
def agent_logs(service: Service, caller: Identity, body: agent_schemas.LogsBody) -> Done:
    """Bring a part of a job's output that somebody asked for."""
    _require_agent(caller, body.server)
    jobs = service.manager.stored_jobs
    for question in jobs.questions(body.server):
        if (question["key"], question["n"]) == (body.key, body.n):
            jobs.keep_output(body.server, question, body.part.model_dump())
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


@routes.add("POST", "/api/jobs/order", Role.USER, failures=(404,), tag="leases")
def order_job(service: Service, caller: Identity, body: agent_schemas.OrderBody) -> Ordered:
    """Tell the agent of a server what to do with the job of a lease."""
    require_run_jobs(caller)
    number = service.manager.order_job(body.server, body.key, body.order, owner=owner_required(caller))
    service.held.look_soon()
    return {"n": number}


@routes.add("GET", "/api/jobs", Role.READER, tag="leases")
def agent_state(service: Service, caller: Identity, query: agent_schemas.AgentStateQuery) -> AgentState:
    """Jobs of a server's agent as last reported: others' jobs are unknown to who is no operator."""
    state = service.manager.agent_state(query.server)
    if caller.is_operator:
        return state
    readable = service.watch.read(
        lambda cluster, now: {
            key for key, _, lease in jobs_on(cluster, query.server) if may_read(caller, lease.request)
        }
    )
    runs = {key: run if key in readable else UNKNOWN_RUN for key, run in state["runs"].items()}
    return {**state, "runs": runs}


@routes.add("GET", "/api/jobs/output", Role.READER, failures=(404,), tag="leases", waits=True)
def job_output(service: Service, caller: Identity, query: agent_schemas.OutputQuery) -> dict[str, Any]:
    """Part of the output of a job that an agent runs; for its owner, their team and operators."""
    server, key, lease_id = query.server, query.key, query.task_id or ""
    if not may_read(caller, service.manager.job_of(server, key, lease_id)):
        raise ProblemError(403, "a job's output is for its owner, their team and operators")
    part = service.manager.job_output(
        server, key, query.offset, lease_id=lease_id, on_question=service.held.look_soon
    )
    # As clients take it: they escape what would steer a terminal, and this is to be as the job wrote it.
    return {**part, "text": b64encode(part.get("text", "").encode()).decode()}


@routes.add("GET", "/api/result", Role.READER, failures=(404,), tag="leases")
def result(service: Service, caller: Identity, query: agent_schemas.ResultQuery) -> JobResult:
    """Result of the job of a lease that has ended, for 7 days; for its owner, their team and operators."""
    found = service.manager.result_of(query.task_id, query.fencing_token, owner=owner_required(caller))
    if found is None or not may_read(caller, found):
        which = "" if query.fencing_token is None else f" with fencing token {query.fencing_token}"
        raise ProblemError(404, f"no result of {query.task_id}{which}")
    return found
