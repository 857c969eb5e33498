"""Bodies and queries of the routes of agents and of the jobs that they run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from resource_manager.agent.probe import MAX_ERROR
from resource_manager.agent.report_format import ExitCode, Report, Time
from resource_manager.jobs.directories.job_files import LOG_CHUNK_BYTES
from resource_manager.manager.demand_fields import LeaseId, Text
from resource_manager.rest.schemas import Body, Query

MAX_LOGS_BYTES = 2 * 2**20
"""Most bytes of a body with a part of a job's output: each of its 256 KiB may need six in JSON."""

MAX_PART = LOG_CHUNK_BYTES + MAX_ERROR
"""Most characters of such a part, which may begin with a line of the agent's own."""

ServerName = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9._-]+$")]
JobKey = ServerName


class AgentJobsQuery(Query):
    """`GET /api/agent/jobs`."""

    server: ServerName
    known: Text = ""
    wait: Annotated[float, Field(ge=0, le=60)] = 0.0
    version: Text = ""


class ReportBody(Report):
    """`POST /api/reports`: what the probe of a server saw, in at most 8 MiB."""


class JobStatus(Body):
    """State of a job as its agent sees it."""

    state: Literal["absent", "running", "finished"]
    exit_code: ExitCode | None
    ended_at: Time | None
    checkpoint_at: Time | None
    preempted: bool


class OutputPart(Body):
    """Part of the output of a job: its text, the byte after it, whether that is all, and the job's state."""

    text: Annotated[str, Field(max_length=MAX_PART)]
    offset: Annotated[int, Field(ge=0, le=2**53)]
    is_all: bool
    status: JobStatus


class NoOutput(Body):
    """Reason why an agent cannot read an output."""

    error: Annotated[str, Field(max_length=MAX_ERROR)]


class LogsBody(Body):
    """`POST /api/agent/logs`: a part of the output of a job, as asked for by the number `n`."""

    server: ServerName
    key: JobKey
    n: Text
    part: OutputPart | NoOutput


class AgentStateQuery(Query):
    """`GET /api/jobs`."""

    server: ServerName


class OutputQuery(AgentStateQuery):
    """`GET /api/jobs/output`."""

    key: JobKey
    offset: Annotated[int, Field(ge=-16 * 1024, le=2**53)] = 0
    task_id: LeaseId | None = Field(
        default=None, description="Lease of the job, by which it is found once it is over."
    )


class OrderBody(Body):
    """`POST /api/jobs/order`."""

    server: ServerName
    key: JobKey
    order: dict[str, Any] = Field(
        description="`want`: prepare, run, terminate, preempt or stop; and its own."
    )


class ResultQuery(Query):
    """`GET /api/result`."""

    task_id: LeaseId
    fencing_token: Annotated[int, Field(ge=0, le=2**53)] | None = None
