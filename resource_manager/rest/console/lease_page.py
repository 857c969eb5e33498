"""One lease or pending request: what it asked for, where it is, its events, and the end of its job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resource_manager.core.cluster import ClusterState
from resource_manager.core.maintenance import as_text
from resource_manager.core.models import Link, Request, TypeChoice
from resource_manager.core.name_lookup import find
from resource_manager.core.names import short
from resource_manager.errors import LeaseNotFoundError
from resource_manager.fleet.job_places import AGENT
from resource_manager.fleet.server_use import use_of
from resource_manager.jobs import reconcile
from resource_manager.jobs.airflow_api import AirflowUnavailableError
from resource_manager.jobs.running_job import RunningJob, is_remainder
from resource_manager.manager import answer_words, serializers
from resource_manager.manager.plurals import counted
from resource_manager.manager.recorded_changes import lease_of, names_at, token_of
from resource_manager.manager.results import Recorded
from resource_manager.manager.stored_jobs import AgentJob
from resource_manager.manager.use_results import GpuUse
from resource_manager.manager.wording import by_whom, content_of
from resource_manager.rest.auth import Identity
from resource_manager.rest.console import cells
from resource_manager.rest.console.history_pages import introduces
from resource_manager.rest.ownership import may_read, owner_required
from resource_manager.rest.problems import ProblemError
from resource_manager.rest.service import Service
from resource_manager.scheduling.reasons.start_estimates import LATER

MAX_EVENTS = 100

TASK_ENDED = " Its task has ended in Airflow, which does not try it again."

WORDS = {
    "membersreleased": "members released",
    "jobplaced": "its job is about to start",
    "cancelled": "left the queue",
    "preempting": "is being preempted",
    "deadlinerisk": "deadline",
}
"""Words for the kinds of changes whose names are none."""


def demand_rows(request: Request) -> list[tuple[str, str]]:
    """Return what a request asks for, as names and values."""
    cpus = counted(float(request.resources.get("cpus", 0)), "CPU")
    rows = [("Asks for", f"{cells.gpus_asked(request)}, {cpus}")]
    others = {name: amount for name, amount in request.resources.items() if name != "cpus"}
    rows += [(name, f"{amount:g}") for name, amount in others.items()]
    types = ", ".join(request.gpu_types)
    is_first = types and request.types == TypeChoice.FIRST
    rows += [("GPU type", f"{types}: the first that fits" if is_first else types), ("Vendor", request.vendor)]
    link = "" if request.link is Link.PREFER else str(request.link)
    rows += [("GPU memory", request.gpu_memory), ("Link of its GPUs", link)]
    rows += [("Only on", request.required_node or ""), ("Rather on", request.preferred_node or "")]
    runtime = request.expected_runtime_s
    rows += [("Expected runtime", "" if runtime is None else answer_words.duration(runtime))]
    limits = {"Longest runtime": request.max_runtime_s, "Waits again after": request.requeue_after_s}
    rows += [(name, answer_words.duration(limit)) for name, limit in limits.items() if limit is not None]
    deadline = "" if request.deadline_at is None else as_text(request.deadline_at)
    rows += [("Deadline", deadline), ("If idle", request.idle_action)]
    rows += [("Server labels", _pairs(request.labels_required)), ("Labels", _pairs(request.labels))]
    return [(name, value) for name, value in rows if value]


def _pairs(labels: Any) -> str:
    return ", ".join(f"{name}={value}" for name, value in labels.items())


def look_at(service: Service, caller: Identity, name: str, token: int | None = None) -> dict[str, Any]:
    """Return what the page of the lease of that name shows, also once it has ended.

    With a fencing token it is that lease, or what is left of it, whoever has its id by now. Raises
    `ProblemError` if nothing is known of it, and `AmbiguousNameError`.
    """
    lease_id = service.watch.read(lambda cluster, now: _id_of(cluster, name))

    queue = service.manager.queue() if token is None else []
    entry = next((each for each in queue if each["task_id"] == lease_id), None)

    def view(cluster: ClusterState, now: float) -> dict[str, Any]:
        found: dict[str, Any] = {"lease": None, "waiting": None, "now": now, "totals": cells.totals(cluster)}
        request, newest = None, cluster.leases.get(lease_id)
        found["is_newest"] = token is None or (newest is not None and newest.fencing_token == token)
        if (lease := newest if token is None else cluster.holding(lease_id, token)) is not None:
            request = lease.request
            colour = cells.colours_of(cluster, [lease])[lease.key]
            found["lease"] = cells.lease_row(cluster, lease, colour, caller, service)
            found["walls"] = serializers.walls_in_words(lease)
            found["is_remainder"] = bool(lease.ranks)
        elif token is None and lease_id in cluster.pending:
            request = cluster.pending[lease_id].request
            newer = service.manager.status_of(lease_id) if entry is None else None
            found["waiting"] = entry or {**(newer or {}), "estimated_start": serializers.estimate(LATER)}
        if request is not None:
            found |= {
                "asked": demand_rows(request),
                "request_of": request,
                "link": cells.task_link(request, service),
                "may_end": caller.is_operator or request.owner == caller.name,
            }
        return found

    found = service.watch.read(view)
    if found.get("may_end"):
        found |= _task_after(service, found["lease"] or found["waiting"])
    if found["lease"] is not None:
        sharing = serializers.sharing_in_words(found["request_of"], found["lease"]["members"])
        said = {"Its part of the GPU": sharing, "Walls around its job": found["walls"]}
        found["asked"] += [(name, text) for name, text in said.items() if text]
    changes = service.recent.newest(service.manager.history, found["totals"]["version"])
    is_over = found["lease"] is None and found["waiting"] is None
    if is_over:
        lease_id = next((lease_of(change) for change in changes if introduces(change, name)), lease_id)
    events = [
        change
        for change in changes
        if lease_of(change) == lease_id and (found["is_newest"] or token_of(change) == token)
    ][:MAX_EVENTS]
    if is_over and not events:
        if token is None:
            raise ProblemError(
                404, f"{name} has no lease, waits for none, and is not among the newest changes"
            )
        detail = f"no lease of {name} with fencing token {token} is held or among the newest changes"
        raise ProblemError(404, detail)
    if is_over:
        entries = (change.get("lease", change).get("request") for change in events)
        labels: dict[str, str] = next((entry.get("labels", {}) for entry in entries if entry is not None), {})
        found["link"] = cells.task_link(Request(lease_id, labels=labels), service)
    names_of = names_at(events, changes)
    names = [] if found["lease"] is None else [member["server_name"] for member in found["lease"]["members"]]
    uses = use_of(service.manager, names) if names else []
    shown = [answer_words.name_in_words(entry) for entry in (found["lease"], found["waiting"]) if entry]
    shown += filter(None, map(answer_words.recorded_name, events))
    return {
        **found,
        "lease_id": lease_id,
        "jobs": _jobs_to_read(service, caller, lease_id, token, found["lease"], found["waiting"]),
        "name": [*shown, short(lease_id)][0],
        "events": [(change["at"], describe_event(change, names_of[change["version"]])) for change in events],
        "uses": _uses(uses, found["lease"]),
    }


def _jobs_to_read(
    service: Service, caller: Identity, lease_id: str, token: int | None, lease: Any, waiting: Any
) -> list[AgentJob]:
    """Return the jobs of a lease, else of the ended one, whose output an agent has for this caller."""
    if lease is not None:
        jobs = RunningJob.all_of(lease)
        return [
            {"server": job.server, "key": job.key}
            for job in jobs
            if job.place.launcher == AGENT and may_read(caller, lease)
        ]
    owner = owner_required(caller)
    result = None if waiting is not None else service.manager.result_of(lease_id, token, owner=owner)
    return result["jobs"] if result is not None and may_read(caller, result) else []


def _id_of(cluster: ClusterState, name: str) -> str:
    """Return the full id of the lease or pending request of that name, or the name if nothing has it.

    Links have full ids, and the page says whose the lease is before anything is done to it.
    """
    if name in cluster.leases or name in cluster.pending:
        return name
    try:
        return find(cluster, name).lease_id
    except LeaseNotFoundError:
        return name


def _uses(uses: Any, lease: Any) -> list[tuple[str, GpuUse]]:
    """Return the GPUs of the lease with the names of their servers, of servers whose agents report."""
    return [
        (server["server_name"], gpu)
        for server in uses
        if server["age_s"] is not None
        for gpu in server["gpus"]
        if any(each["fencing_token"] == lease["fencing_token"] for each in gpu["leases"])
    ]


def describe_event(change: Recorded, names: Mapping[str, str]) -> str:
    """Return an event of a lease as a phrase; `names` are those of what it mentions, by lease id."""
    text = WORDS.get(change["change"], str(change["change"]))
    content = content_of(change, names)
    joined = f"{text} on {content}" if "lease" in change else f"{text}: {content}" if content else text
    return by_whom(joined, change)


def _task_after(service: Service, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return what becomes of the task of a lease or pending request that ends, if it has one.

    The task of what is left of a gang goes on under another lease.
    """
    identity = None if is_remainder(entry) else reconcile.task_of(entry)
    if identity is None:
        return {"after_stop": "", "may_end_task": False}
    if service.airflow_api is None:
        what = "Airflow tries its task again if it has tries left: mark it as failed there to end it"
    else:
        what = service.next_tries.of(entry, identity, service.airflow_api)
    return {"after_stop": f" {what}.", "may_end_task": service.airflow_api is not None}


def end_task(
    service: Service, caller: Identity, lease_id: str, *, fencing_token: int | None, sequence: int | None
) -> None:
    """End in Airflow the task of a lease or pending request, before anything else of it is ended.

    Raises `ProblemError` if it is another's, or another one by now, or Airflow does not do so.
    """
    entry: Mapping[str, Any] = service.manager.status_of(lease_id) or {}
    if not entry or fencing_token != entry.get("fencing_token") or sequence != entry.get("sequence"):
        raise ProblemError(404, f"{short(lease_id)} is not the same lease or pending request any more")
    identity = reconcile.task_of(entry)
    if identity is None or service.airflow_api is None:
        raise ProblemError(409, f"{short(lease_id)} is of no task that could be ended in Airflow from here")
    _require_owner(caller, entry)
    try:
        airflow = service.airflow_api()
        # The labels are their owner's word; a service of its own has a log-in of its own there.
        may_end = caller.is_operator or service.embedded or airflow.owner_of(identity) == caller.name
        if not may_end:
            raise ProblemError(
                403,
                f"Airflow does not say that the run or the task is {caller.name}'s: mark it as failed there; "
                "nothing was stopped",
            )
        airflow.end_task(identity, service.instance)
    except AirflowUnavailableError as error:
        raise ProblemError(502, f"{error}; nothing was stopped") from error


def _require_owner(caller: Identity, entry: Mapping[str, Any]) -> None:
    if not caller.is_operator and entry["owner"] != caller.name:
        raise ProblemError(
            403, f"{answer_words.name_in_words(entry)} is not yours: only its owner or an operator stops it"
        )


def stop_job(
    service: Service, caller: Identity, lease_id: str, fencing_token: int, *, task_ended: bool = False
) -> str:
    """Stop the job of a lease through its launcher, release the lease and return what was done.

    A task that was ended in Airflow before may have released it already.

    Raises `ProblemError` if the lease is not this one's any more or the job may still run.
    """

    def view(cluster: ClusterState, now: float) -> Any:
        lease = cluster.holding(lease_id, fencing_token)
        return None if lease is None else serializers.allocation(cluster, lease)

    entry = service.watch.read(view)
    ended = TASK_ENDED if task_ended else ""
    if entry is None and task_ended:
        return f"{short(lease_id)} is released.{ended}"
    if entry is None:
        raise ProblemError(404, f"{short(lease_id)} does not hold this lease any more")
    _require_owner(caller, entry)
    done = reconcile.end(service.manager, entry)
    if done.problem:
        raise ProblemError(409, done.problem)
    return f"{done.name} is released: {done.detail}.{ended}"
