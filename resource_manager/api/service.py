"""What the routes of one app share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import flask

from resource_manager.api.auth import Authenticator
from resource_manager.api.idempotency import Replies
from resource_manager.api.limits import Limits
from resource_manager.api.metrics import Metrics
from resource_manager.api.watch import Watch
from resource_manager.manager import GPUResourceManager

EXTENSION = "gpu_manager"


@dataclass(frozen=True, slots=True)
class Service:
    """The manager and everything around it; `secret` signs sessions and CSRF tokens.

    `airflow_url` is where Airflow's pages are, for links to tasks: None if unknown, empty if they are on
    this very server. `instance` is the id of that Airflow, or None if unknown. `embedded` says that the
    console is shown inside Airflow's frame.
    """

    manager: GPUResourceManager
    authenticator: Authenticator
    limits: Limits
    replies: Replies
    watch: Watch
    metrics: Metrics
    secret: str = field(repr=False)
    airflow_url: str | None = None
    instance: str | None = None
    embedded: bool = False
    max_streams: int = 64


def service() -> Service:
    """The service of the app that handles this request."""
    return cast(Service, flask.current_app.extensions[EXTENSION])


def owner_of(view: dict[str, Any]) -> str:
    return str(view.get("owner") or "")
