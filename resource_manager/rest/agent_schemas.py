"""Bodies and queries of the routes of agents and of the jobs that they run."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from resource_manager.manager.demand_fields import LeaseId, Text
from resource_manager.rest.schemas import Body

MAX_LOGS_BYTES = 2 * 2**20
"""Most bytes of a body with a part of a job's output: each of its 256 KiB may need six in JSON."""

ServerName = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9._-]+$")]


JobKey = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9._-]+$")]


class AgentJobsQuery(Body):
    """`GET /api/agent/jobs`."""

    server: ServerName
    known: Text = ""
    wait: Annotated[float, Field(ge=0, le=60)] = 0.0
    version: Text = ""


class LogsBody(Body):
    """`POST /api/agent/logs`: a part of the output of a job, as asked for by the number `n`."""

    server: ServerName
    key: JobKey
    n: Text
    part: dict[str, Any]


class AgentStateQuery(Body):
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


class ResultQuery(Body):
    """`GET /api/result`."""

    task_id: LeaseId
    fencing_token: Annotated[int, Field(ge=0, le=2**53)] | None = None
