"""What callers read: servers, leases, the queue and the history."""

from __future__ import annotations

from typing import TypeVar, cast

import flask

from resource_manager.core.cluster import ClusterState
from resource_manager.errors import NO_LEASE
from resource_manager.fleet.server_use import measures_of, use_of
from resource_manager.manager import results, serializers
from resource_manager.manager.report import Report, ReportQuery
from resource_manager.manager.use_results import ServerUse
from resource_manager.manager.wording import matches
from resource_manager.rest import schemas
from resource_manager.rest.answers import Change, Done, Page, SnapshotAnswer, Trend
from resource_manager.rest.api.operations import routes
from resource_manager.rest.auth import Identity
from resource_manager.rest.ownership import owner_required
from resource_manager.rest.problems import ProblemError
from resource_manager.rest.service import Service
from resource_manager.rest.tokens import Role

T = TypeVar("T")


@routes.add("GET", "/api/gpus", Role.READER, tag="servers")
def gpus(service: Service, caller: Identity, query: schemas.GpusQuery) -> Page[ServerUse]:
    """Use of every GPU as last reported, by server, with its leases."""
    if query.servers:
        return {"items": use_of(service.manager, query.servers), "next": None}
    names = service.watch.read(lambda cluster, now: [state.name for state in cluster.nodes])
    page = _page_of(names, query)
    return {"items": use_of(service.manager, page["items"]), "next": page["next"]}


@routes.add("GET", "/api/status", Role.READER, tag="servers")
def status(service: Service, caller: Identity, query: schemas.ListQuery) -> results.Summary:
    """Free and allocated capacity of every server."""
    summary = service.manager.summary()
    if query.limit is not None or query.after:
        page = _page_of(summary["servers"], query)
        summary["servers"], summary["next"] = page["items"], page["next"]
    return summary


@routes.add("GET", "/api/leases", Role.READER, tag="leases")
def leases(service: Service, caller: Identity, query: schemas.PageQuery) -> Page[results.Allocation]:
    """Live leases, oldest first."""
    later = [lease for lease in service.manager.leases() if lease["fencing_token"] > query.after]
    page = later[: query.limit]
    return {"items": page, "next": page[-1]["fencing_token"] if len(later) > len(page) else None}


@routes.add("GET", "/api/leases/changes", Role.READER, tag="leases")
def lease_changes(service: Service, caller: Identity, query: schemas.ChangesQuery) -> results.LeaseChanges:
    """Leases and requests that changed since a version, once some have: the request is held until then."""
    service.watch.read(lambda cluster, now: None)
    service.held.hold(
        flask.g.counted_as, lambda: service.watch.has_changed_leases(query.after), query.timeout_s
    )
    return service.manager.lease_changes(query.after, prefix=query.prefix)


@routes.add("GET", "/api/leases/preempting", Role.READER, tag="leases")
def preempting(service: Service, caller: Identity) -> Page[results.Allocation]:
    """Leases that are being preempted."""
    return {"items": service.manager.preempting(), "next": None}


@routes.add("GET", "/api/slurm", Role.READER, tag="leases")
def slurm_jobs(service: Service, caller: Identity) -> Page[results.SlurmJob]:
    """Jobs that Slurm placed, the latest submitted first."""
    return {"items": service.manager.slurm_jobs(), "next": None}


@routes.add("POST", "/api/slurm", Role.USER, tag="leases")
def keep_slurm_jobs(service: Service, caller: Identity, body: schemas.SlurmBody) -> Done:
    """Replace what is known of the jobs of a cluster of Slurm."""
    service.manager.keep_slurm_jobs(body.cluster, body.jobs)
    return {"success": True}


@routes.add("GET", "/api/task", Role.READER, failures=(404, 409), tag="leases")
def task(service: Service, caller: Identity, query: schemas.TaskQuery) -> results.Submission:
    """Lease or pending request of a task; with `timeout_s`, once it no longer waits."""
    if query.timeout_s:
        lease_id = query.task_id if query.exact else _named(service, caller, query)["task_id"]
        service.watch.read(lambda cluster, now: None)
        service.held.hold(
            flask.g.counted_as,
            lambda: not service.watch.is_pending(lease_id),
            query.timeout_s,
            answer_if_full=True,
        )
    if not query.exact:
        return _named(service, caller, query)
    found = _exactly(service, query)
    if found is None:
        nothing = "neither a lease nor a pending request"
        if query.fencing_token is not None:
            nothing = f"no lease with fencing token {query.fencing_token}"
        elif query.pending is not None:
            nothing = "no pending request" if query.pending else "no lease"
        raise ProblemError(404, f"task {query.task_id!r} has {nothing}", kind=NO_LEASE)
    return found


def _exactly(service: Service, query: schemas.TaskQuery) -> results.Submission | None:
    """Return what has that full lease id, within the limits that `named` knows, too."""
    token = query.fencing_token
    if token is None:
        found = service.manager.status_of(query.task_id)
        is_meant = found is not None and query.pending in (None, found["state"] == "WAITING")
        return found if is_meant else None

    def view(cluster: ClusterState, now: float) -> results.Submission | None:
        lease = cluster.holding(query.task_id, token)
        return None if lease is None else serializers.allocation(cluster, lease)

    return None if query.pending else service.manager.read(view)


def _named(service: Service, caller: Identity, query: schemas.TaskQuery) -> results.Submission:
    token, owner = query.fencing_token, owner_required(caller)
    return service.manager.named(query.task_id, pending=query.pending, fencing_token=token, owner=owner)


@routes.add("GET", "/api/queue", Role.READER, tag="queue")
def queue(service: Service, caller: Identity, query: schemas.ListQuery) -> Page[results.QueueEntry]:
    """Pending requests in queue order, with their estimated start."""
    return _page_of(service.manager.queue(), query)


@routes.add("GET", "/api/coming", Role.READER, tag="queue")
def coming(service: Service, caller: Identity, query: schemas.ListQuery) -> Page[results.ComingDemand]:
    """Demands that tasks of running DAGs will make, the next first."""
    return _page_of(service.manager.coming(), query)


def _page_of(items: list[T], query: schemas.ListQuery | schemas.PageQuery) -> Page[T]:
    end = len(items) if query.limit is None else query.after + query.limit
    return {"items": items[query.after : end], "next": end if end < len(items) else None}


@routes.add("GET", "/api/history", Role.READER, tag="history")
def history(service: Service, caller: Identity, query: schemas.HistoryQuery) -> Page[Change]:
    """Changes in the history, oldest first."""
    page = service.manager.history(query.after, query.limit)
    found = [change for change in page if matches(change, query.by, query.what)]
    return {
        "items": cast("list[Change]", found),
        "next": page[-1]["version"] if len(page) == query.limit else None,
    }


@routes.add("GET", "/api/snapshot", Role.READER, tag="history")
def snapshot(service: Service, caller: Identity) -> SnapshotAnswer:
    """The whole state, with which the history can be replayed."""
    return {"snapshot": service.manager.snapshot()}


@routes.add("GET", "/api/explain", Role.READER, tag="queue")
def explain(service: Service, caller: Identity, query: schemas.ExplainQuery) -> results.Explanation:
    """Explain a request without making it: does it fit now, where, why not, and when."""
    return service.manager.explain(query)


@routes.add("GET", "/api/task/explain", Role.READER, failures=(404, 409), tag="queue")
def explain_task(service: Service, caller: Identity, query: schemas.NameQuery) -> results.Explanation:
    """Explain why a pending request waits, and when it should start."""
    return service.manager.explain_named(query.name)


@routes.add("GET", "/api/trends", Role.READER, tag="history")
def usage_history(service: Service, caller: Identity, query: schemas.UsageHistoryQuery) -> Trend:
    """Utilisation, queue and waits over the last hours."""
    return service.watch.usage_history(query.hours)


@routes.add("GET", "/api/report", Role.READER, tag="history")
def report(service: Service, caller: Identity, query: ReportQuery) -> Report:
    """GPU-hours granted and what became of them, by team, user, DAG or GPU type."""
    manager = service.manager
    accounts = service.accounts.of(manager)
    return accounts.report(query, measures=measures_of(manager), prices=manager.prices())


@routes.add("GET", "/api/estimates", Role.READER, tag="history")
def estimates(service: Service, caller: Identity) -> results.EstimatesView:
    """How often the estimated starts of pending requests came true."""
    return service.manager.estimates()
