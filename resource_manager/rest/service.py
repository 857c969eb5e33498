"""Service object shared by the routes of one app."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import flask

from resource_manager.fleet.receiving import ReportReceiver
from resource_manager.jobs.airflow_api import AirflowTaskStates, NextTries
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.rest.auth import Authenticator
from resource_manager.rest.console.cluster_page import NoticeCache
from resource_manager.rest.console.history_pages import RecentChanges
from resource_manager.rest.console.use_page import AccountsCache, SlurmCache
from resource_manager.rest.held_requests import HeldRequests
from resource_manager.rest.limits import Limits
from resource_manager.rest.observability.metrics import Metrics
from resource_manager.rest.sign_on.log_in import SignOnDesk
from resource_manager.rest.state_follower import StateFollower

EXTENSION = "gpu_manager"


@dataclass(frozen=True, slots=True)
class Service:
    """Manager with the parts that serve it over HTTP; `secret` signs sessions and CSRF tokens.

    `airflow_url` is the address of Airflow's pages, for links to tasks: None if unknown, empty if they are on
    the same server. `instance` is the id of that Airflow, None if unknown. `airflow_api` opens its API
    with the rights of the caller, or of this service; None without a log-in there. `sign_on` is None where
    people cannot log in by the provider of the cluster: inside Airflow, and in a service without tokens.
    `embedded` is true if the console is shown in a frame of Airflow.
    """

    manager: GPUResourceManager
    authenticator: Authenticator
    limits: Limits
    watch: StateFollower
    held: HeldRequests
    metrics: Metrics
    receiver: ReportReceiver
    secret: str = field(repr=False)
    airflow_url: str | None = None
    instance: str | None = None
    airflow_api: Callable[[], AirflowTaskStates] | None = None
    embedded: bool = False
    max_streams: int = 64
    sign_on: SignOnDesk | None = None
    accounts: AccountsCache = field(default_factory=AccountsCache)
    on_slurm: SlurmCache = field(default_factory=SlurmCache)
    recent: RecentChanges = field(default_factory=RecentChanges)
    notices: NoticeCache = field(default_factory=NoticeCache)
    next_tries: NextTries = field(default_factory=NextTries)


def current_service() -> Service:
    """Return the service of the app that handles this request."""
    return cast(Service, flask.current_app.extensions[EXTENSION])
