"""Jobs that agents run: orders to them, their states as last reported, and parts of their output."""

from __future__ import annotations

import json
import secrets
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from typing_extensions import TypedDict

from resource_manager.core.cluster import ClusterState
from resource_manager.core.identifiers import job_key
from resource_manager.core.models import Lease
from resource_manager.errors import (
    InvalidRequestError,
    LeaseNotFoundError,
    OtherOwnerError,
    ResourceManagerError,
)
from resource_manager.manager.commit.protocol import Transactions
from resource_manager.manager.stored_jobs import StoredJobs
from resource_manager.storage import Store

OUTPUT_TIMEOUT_S = 20.0
LOOK_S = 0.05

ORDERS = ("prepare", "run", "terminate", "preempt", "stop")


class AgentSilentError(ResourceManagerError):
    """An agent did not answer in time."""


class AgentState(TypedDict):
    """What the agent of a server last said of its jobs: where they are, and of each what is known, by key.

    `place` is None for an agent that runs none. `is_silent`: it has not reported for several intervals.
    """

    server: str
    place: dict[str, str] | None
    runs: dict[str, dict[str, Any]]
    is_silent: bool


class AgentService(Protocol):
    """What an agent is told and asked through: a manager on the store, or a client of a service."""

    def order_job(self, server: str, key: str, order: Mapping[str, Any]) -> str: ...

    def agent_state(self, server: str) -> AgentState: ...

    def job_output(self, server: str, key: str, offset: int) -> dict[str, Any]: ...


_opened: list[weakref.ref[AgentService]] = []


def note_opened(service: AgentService) -> None:
    """Have the jobs of agents asked for by this service, the last that this process has opened."""
    _opened[:] = [weakref.ref(service)]


def opened_service() -> AgentService:
    """Return the service that this process opened last; raises `ResourceManagerError` if there is none."""
    service = _opened[0]() if _opened else None
    if service is None:
        raise ResourceManagerError("no lease service is open here, by which a server's agent could be asked")
    return service


class AgentJobCommands:
    """Orders to agents, and what they answer, by the store that manager and service share."""

    _commits: Transactions
    store: Store
    stored_jobs: StoredJobs

    def order_job(self, server: str, key: str, order: Mapping[str, Any], *, owner: str | None = None) -> str:
        """Tell the agent of a server what to do with the job of a lease there; return the order's number.

        Later orders have greater numbers.
        `order` has `want`, one of `ORDERS`, and what goes with it. Raises `LeaseNotFoundError` if no lease
        has that job, and `OtherOwnerError`.
        """
        if order.get("want") not in ORDERS:
            raise InvalidRequestError("{want} must be one of {}", ", ".join(ORDERS), field="want")
        self._require_job(server, key, owner)
        number = f"{round(self.store.now() * 1e6):017d} {secrets.token_hex(4)}"
        self.stored_jobs.give_order(key, {**order, "n": number})
        self.stored_jobs.ring()
        return number

    def _require_job(self, server: str, key: str, owner: str | None) -> None:
        def view(cluster: ClusterState, now: float) -> Lease | None:
            return next((lease for name, _, lease in jobs_on(cluster, server) if name == key), None)

        lease = self._commits.read(view)
        if lease is None:
            raise LeaseNotFoundError(key)
        if owner is not None and lease.request.owner != owner:
            raise OtherOwnerError(lease.lease_id, lease.request.owner, owner)

    def agent_state(self, server: str) -> AgentState:
        """Return what the agent of a server last said of its jobs."""
        text = self.store.reports.reports([server]).get(server)
        report = {} if text is None else json.loads(text)
        return {
            "server": server,
            "place": report.get("place"),
            "runs": {run["key"]: run for run in report.get("runs") or ()},
            "is_silent": text is None,
        }

    def job_output(self, server: str, key: str, offset: int, *, owner: str | None = None) -> dict[str, Any]:
        """Return a part of a job's output, which its agent sends now, as `directory_job.logs` does.

        Raises as `order_job`, and `AgentSilentError` if the agent does not answer.
        """
        self._require_job(server, key, owner)
        return self.awaited_output(key, self.ask_output(server, key, offset))

    def ask_output(self, server: str, key: str, offset: int) -> str:
        """Ask the agent for a part of a job's output; return the number of the question."""
        number = secrets.token_hex(6)
        self.stored_jobs.give_order(f"{key}/output", {"offset": offset, "n": number})
        self.stored_jobs.ring()
        return number

    def awaited_output(self, key: str, number: str) -> dict[str, Any]:
        """Return the part that was asked for by that number; raises `AgentSilentError`."""
        ends_at = time.monotonic() + OUTPUT_TIMEOUT_S
        while time.monotonic() < ends_at:
            part = self.stored_jobs.output(key)
            if part is not None and part["n"] == number:
                return dict(part["part"])
            time.sleep(LOOK_S)
        raise AgentSilentError(f"the agent sent no output of job {key} within {OUTPUT_TIMEOUT_S:g} s")


def jobs_on(cluster: ClusterState, server: str) -> Iterator[tuple[str, int, Lease]]:
    """Yield key, rank and lease of the jobs that leases may have on a server."""
    state = cluster.by_name.get(server)
    if state is None:
        return
    left = (lease for lease in cluster.remainders.values() if lease.on(server))
    for lease in {lease.fencing_token: lease for lease in (*state.leases.values(), *left)}.values():
        for rank, placed in lease.ranked:
            if placed.node == server:
                is_gang = lease.request.nodes > 1
                yield job_key(lease.lease_id, lease.fencing_token, rank if is_gang else None), rank, lease
