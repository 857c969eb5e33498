"""Jobs that agents run: orders to them, their states as last reported, and parts of their output."""

from __future__ import annotations

import json
import math
import re
import secrets
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NotRequired, Protocol

from typing_extensions import TypedDict

from resource_manager.core.cluster import ClusterState
from resource_manager.core.identifiers import job_key, token_of_key
from resource_manager.core.models import JobPlace, Lease, Request
from resource_manager.errors import (
    InvalidRequestError,
    LeaseNotFoundError,
    OtherOwnerError,
    ResourceManagerError,
)
from resource_manager.manager.commit.job_ends import is_on_agents
from resource_manager.manager.commit.protocol import Transactions
from resource_manager.manager.stored_jobs import JobExit, JobResult, Question, StoredJobs, check_job
from resource_manager.storage import Store

OUTPUT_TIMEOUT_S = 20.0
ASK_AGAIN_S = 1.0
LOOK_S = 0.05

STARTS = ("prepare", "run")
ORDERS = (*STARTS, "terminate", "preempt", "stop")
SIGNALS = ("TERM", "USR2")
MAX_GRACE_S = 86400

_NO_JOB = "no lease on {} has the job {}"

UNKNOWN_RUN = {"state": "unknown"}
"""What is told of another's run: that the agent has it, so that nobody takes it for gone."""


class AgentSilentError(ResourceManagerError):
    """An agent did not answer in time."""


class AgentState(TypedDict):
    """What the agent of a server last said of its jobs: where they are, and of each what is known, by key.

    `place` is None for an agent that runs none. `is_silent`: it has not reported for several intervals, and
    `has_reported` then, whether it did within a week.
    """

    server: str
    place: dict[str, str] | None
    runs: dict[str, dict[str, Any]]
    is_silent: bool
    has_reported: NotRequired[bool]


class AgentService(Protocol):
    """What an agent is told and asked through: a manager on the store, or a client of a service."""

    def order_job(self, server: str, key: str, order: Mapping[str, Any]) -> str: ...

    def agent_state(self, server: str) -> AgentState: ...

    def job_output(self, server: str, key: str, offset: int, *, lease_id: str = "") -> dict[str, Any]: ...


_opened: list[weakref.ref[AgentService]] = []
_own: ContextVar[Callable[[], AgentService] | None] = ContextVar("service of a task's agents", default=None)


def note_opened(service: AgentService) -> None:
    """Have the jobs of agents asked for by this service, the last that this process has opened."""
    _opened[:] = [weakref.ref(service)]


def ask_agents_through(opening: Callable[[], AgentService]) -> None:
    """Have the jobs of agents asked for by this service, from here on and in this task, or thread, alone."""
    _own.set(opening)


def opened_service() -> AgentService:
    """Return this task's service, or else the one that this process opened last.

    Raises `ResourceManagerError` if there is none.
    """
    if (opening := _own.get()) is not None:
        return opening()
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

        Later orders have greater numbers. `order` is as `check_order` wants it. Raises `OtherOwnerError`,
        `LeaseNotFoundError` if no lease has that job, and `TooManyJobsError`, but not to end a placed job.
        """
        check_order(order)
        lease = self._lease_of_job(server, key)
        if lease is None:
            raise LeaseNotFoundError(key, message=_NO_JOB.format(server, key))
        request = lease.request
        if owner is not None and request.owner != owner:
            raise OtherOwnerError(request.lease_id, request.owner, owner)
        number = f"{round(self.store.now() * 1e6):017d} {secrets.token_hex(4)}"
        needs_room = request.owner != "" and ("spec" in order or not is_on_agents(lease))
        self.stored_jobs.give_order(key, {**order, "n": number}, request.owner, needs_room=needs_room)
        self.stored_jobs.ring(server)
        return number

    def _lease_of_job(self, server: str, key: str) -> Lease | None:
        def view(cluster: ClusterState, now: float) -> Lease | None:
            return next((lease for name, _, lease in jobs_on(cluster, server) if name == key), None)

        return self._commits.read(view)

    def job_of(self, server: str, key: str, lease_id: str = "") -> Request | JobResult:
        """Return whose job that is on a server: its request, or by the id of its lease its result.

        Raises `LeaseNotFoundError`.
        """
        lease = self._lease_of_job(server, key)
        if lease is not None:
            return lease.request
        found = self.stored_jobs.result(lease_id, token_of_key(key)) if lease_id else None
        if found is None or {"server": server, "key": key} not in found["jobs"]:
            raise LeaseNotFoundError(key, message=_NO_JOB.format(server, key))
        return found

    def agent_state(self, server: str) -> AgentState:
        """Return what the agent of a server last said of its jobs."""
        return state_of_agent(self.store, server)

    def job_output(
        self,
        server: str,
        key: str,
        offset: int,
        *,
        lease_id: str = "",
        on_question: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Return a part of a job's output, which its agent sends now, as `job_states.logs` does.

        A job that is over is found by the id of its lease. `on_question` is called when its agent can hear.
        Raises `LeaseNotFoundError`, and `AgentSilentError` if the agent does not answer.
        """
        self.job_of(server, key, lease_id)
        if self.agent_state(server)["is_silent"]:
            raise AgentSilentError(f"the agent of {server} is silent, and has the output of job {key}")
        question: Question = {"key": key, "offset": offset, "n": secrets.token_hex(6)}
        now = time.monotonic()
        ends_at, ask_at = now + OUTPUT_TIMEOUT_S, now
        while (now := time.monotonic()) < ends_at:
            if now >= ask_at:
                self.stored_jobs.ask(server, question)
                self.stored_jobs.ring(server)
                on_question()
                ask_at = now + ASK_AGAIN_S
            part = self.stored_jobs.output(question)
            if part is not None:
                return part
            time.sleep(LOOK_S)
        raise AgentSilentError(
            f"the agent of {server} sent no output of job {key} within {OUTPUT_TIMEOUT_S:g} s"
        )


def check_order(order: Mapping[str, Any]) -> None:
    """Raise `InvalidRequestError` for an order that no agent can carry out.

    It has `want`, one of `ORDERS`, and may have `grace_s` and the `signal` of a preemption. One to prepare or
    run a job has its `spec`: `command`, `environment`, and maybe `files` and `port`.
    """
    want, spec = order.get("want"), order.get("spec")
    if want not in ORDERS:
        raise InvalidRequestError("{want} must be one of {}", ", ".join(ORDERS))
    if order.keys() - {"want", "grace_s", "signal", "spec"} or (want in STARTS) != isinstance(spec, Mapping):
        raise InvalidRequestError(
            "{order} may have want, grace_s and signal, and to {} a spec", " or ".join(STARTS)
        )
    if not _is_number(order.get("grace_s", 0), MAX_GRACE_S):
        raise InvalidRequestError("{grace_s} must be 0 to {:,} seconds", MAX_GRACE_S)
    if order.get("signal", "TERM") not in SIGNALS:
        raise InvalidRequestError("{signal} must be one of {}", ", ".join(SIGNALS))
    if isinstance(spec, Mapping):
        check_job({"command": spec.get("command"), "env": spec.get("environment")})
        files = spec.get("files", {})
        are_texts = isinstance(files, Mapping) and all(
            re.fullmatch("[A-Za-z_]+", name) and isinstance(text, str) for name, text in files.items()
        )
        port = spec.get("port", 0)
        if not are_texts or not isinstance(port, int) or not _is_number(port, 65535):
            raise InvalidRequestError("{spec} may have files, texts by the names of variables, and a port")


def _is_number(value: object, most: int) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most


def state_of_agent(store: Store, server: str) -> AgentState:
    """Return what the agent of a server last said of its jobs."""
    text = store.reports.reports([server]).get(server)
    if text is None:
        has_reported = server in store.reports.records([server])
        return {"server": server, "place": None, "runs": {}, "is_silent": True, "has_reported": has_reported}
    report = json.loads(text)
    return {
        "server": server,
        "place": report.get("place"),
        "runs": {run["key"]: run for run in report.get("runs") or ()},
        "is_silent": False,
    }


def is_there(place: Mapping[str, str] | None, job: JobPlace) -> bool:
    """Return whether an agent that says it is at `place` has the folder in which a job was placed."""
    return place is not None and all(
        place[name] == getattr(job, name) for name in ("machine", "folder", "mark")
    )


def run_at(state: AgentState, job: JobPlace, key: str) -> dict[str, Any] | None:
    """Return what an agent last said of a job; None if nothing, or if it has not the job's folder."""
    return state["runs"].get(key) if is_there(state["place"], job) else None


def end_of(runs: Sequence[Mapping[str, Any]]) -> JobExit:
    """Return the end of a lease's jobs, by their ranks: that of the one that failed first, if one did."""
    bad = [run for run in runs if run["exit_code"] != 0]
    first = min(bad, key=lambda run: run["ended_at"] or math.inf) if bad else runs[0]
    return {"exit_code": first["exit_code"], "last_line": first["last_line"], "ended_at": first["ended_at"]}


NO_END: JobExit = {"exit_code": None, "last_line": "", "ended_at": None}
"""End of a job of which nobody saw any."""


def reported_end(store: Store, lease: Lease) -> JobExit | None:
    """Return the end of a lease's jobs as its agents last reported it; None if one of them did not."""
    jobs = zip(jobs_of(lease), lease.places, strict=False)
    runs = [run_at(state_of_agent(store, node), place, key) for (node, key, _), place in jobs]
    ended = [run for run in runs if run is not None and run["state"] != "running"]
    return end_of(ended) if ended and len(ended) == len(runs) else None


def leases_on(cluster: ClusterState, server: str) -> list[Lease]:
    """Return the leases with a member on a server, those included that are left of a gang."""
    state = cluster.by_name.get(server)
    return [] if state is None else list(state.leases.values())


def jobs_on(cluster: ClusterState, server: str) -> Iterator[tuple[str, int, Lease]]:
    """Yield key, rank and lease of the jobs that leases may have on a server."""
    for lease in leases_on(cluster, server):
        for node, key, rank in jobs_of(lease):
            if node == server:
                yield key, rank, lease


def jobs_of(lease: Lease) -> Iterator[tuple[str, str, int]]:
    """Yield server, key and rank of the jobs that a lease may have."""
    for rank, placed in lease.ranked:
        yield placed.node, job_key(lease.lease_id, lease.fencing_token, rank, lease.request.nodes), rank


def of_no_lease(cluster: ClusterState, keys: Collection[str], here: Iterable[str] = ()) -> list[str]:
    """Return those of the keys in a server's folder that are jobs of no lease, besides those `here`.

    Other servers may share the folder, as where the homes are on NFS: their jobs are left alone.
    """
    own = {*here}
    left = [key for key in keys if key not in own]
    tokens = {token_of_key(key) for key in left}
    leases = (*cluster.leases.values(), *cluster.remainders.values()) if left else ()
    elsewhere = {key for lease in leases if lease.fencing_token in tokens for _, key, _ in jobs_of(lease)}
    return [key for key in left if key not in elsewhere]
