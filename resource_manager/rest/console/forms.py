"""Queries and forms of the console's pages."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

import flask
from pydantic import BaseModel, Field

from resource_manager.manager.demand_fields import LeaseId, Text
from resource_manager.rest import auth
from resource_manager.rest.schemas import DrainBody, Query, ResumeBody

PER_PAGE = 100


class ServersQuery(Query):
    """Filter of the servers to show."""

    q: Text = ""
    state: Literal["", "IDLE", "PARTIAL", "FULL", "ERROR", "DRAINED"] = ""
    page: Annotated[int, Field(ge=1, le=10_000)] = 1


class RowsQuery(Query):
    """Ids of the servers whose rows are asked for."""

    ids: list[Annotated[int, Field(ge=0)]] = Field(default=[], max_length=2 * PER_PAGE)


class ListQuery(Query):
    """One page of the leases or the queue, filtered by a text, or only those of the caller."""

    q: Annotated[str, Field(max_length=1000)] = ""
    mine: bool = False
    page: Annotated[int, Field(ge=1, le=10_000)] = 1


class TimelineQuery(Query):
    """Past hours to show, of servers whose name contains a text."""

    hours: Annotated[float, Field(ge=0.1, le=168)] = 6
    q: Text = ""
    page: Annotated[int, Field(ge=1, le=10_000)] = 1


class UseQuery(Query):
    """Key to group by, and how many days back."""

    by: Literal["team", "user", "dag", "gpu_type", "source"] = "team"
    days: Annotated[float, Field(ge=0.01, le=3650)] = 7


class EventsQuery(Query):
    """Events after a version of the state."""

    after: Annotated[int, Field(ge=0, le=2**53)] = 0


class ResumeForm(ResumeBody):
    """Server that a button acts on, by its name: an `apply` may give its number to another one meanwhile."""

    server: Text


class DrainForm(ResumeForm, DrainBody):
    """The same with what a drain says."""


class TaskForm(Query):
    """Task that a button acts on."""

    task_id: LeaseId
    fencing_token: int | None = None
    sequence: int | None = None
    end_task: bool = False


class LeaseQuery(Query):
    """Lease or pending request to show; with its fencing token `token` that lease and no other of its id."""

    id: LeaseId
    token: Annotated[int, Field(ge=0, le=2**53)] | None = None


class HoldQuery(Query):
    """Name of a form that takes GPUs, and of its lease: a form that is sent twice takes them once."""

    name: str = Field(pattern=r"^[0-9a-f]{8}$", default_factory=lambda: secrets.token_hex(4))


def form_of(model: type[BaseModel]) -> Any:
    fields = {key: value for key, value in flask.request.form.items() if key != auth.CSRF_FIELD}
    return model.model_validate(fields, strict=False)
