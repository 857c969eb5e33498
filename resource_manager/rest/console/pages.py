"""Console: pages that show and change the cluster, and the events that keep them current."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import flask
from pydantic import ValidationError

from resource_manager.core.cluster import ClusterState
from resource_manager.core.name_lookup import contains
from resource_manager.errors import InvalidRequestError, ResourceManagerError, StoreError
from resource_manager.fleet.server_use import KeptReport, kept_reports, use_of
from resource_manager.manager.plurals import counted
from resource_manager.manager.report import ReportQuery
from resource_manager.manager.results import Explanation, QueueEntry
from resource_manager.manager.serializers import coming_in_words, gpus_coming
from resource_manager.rest import api
from resource_manager.rest.auth import Identity
from resource_manager.rest.console import (
    alerts,
    cells,
    cluster_page,
    demand_form,
    forms,
    lease_page,
    timeline,
    use_page,
)
from resource_manager.rest.console.history_pages import describe_health, health_history
from resource_manager.rest.events import CLIENT_GONE, EventStream
from resource_manager.rest.openapi import document
from resource_manager.rest.problems import ProblemError, from_validation
from resource_manager.rest.routing import Routes, html_page
from resource_manager.rest.schemas import ExplainQuery
from resource_manager.rest.service import Service
from resource_manager.rest.tokens import Role
from resource_manager.words import Words

routes = Routes(page=True)

FIRST = 5
"""Number of pending requests, and of maintenance windows, beside the servers."""


@routes.add("GET", "/", Role.READER)
def servers(service: Service, caller: Identity, query: forms.ServersQuery) -> Any:
    """Servers."""
    entries = service.manager.queue()

    def view(cluster: ClusterState, now: float) -> dict[str, Any]:
        found = cells.matching(cluster.nodes, query.q, query.state)
        shown, paging = _paged(found, query.page)
        mapped = found if len(cluster.nodes) > forms.PER_PAGE else []
        return {
            **_side(cluster, now, entries),
            "rows": cells.server_rows(cluster, shown, now),
            "map": [_dot(i, state.name, cells.level(state), state.is_open) for i, state in enumerate(mapped)],
            **paging,
        }

    shown = service.watch.read(view)
    cells.show_use(shown["rows"], _last_reports(service, [row["name"] for row in shown["rows"]]))
    return html_page("servers.html", service, caller, query=query, **shown)


@routes.add("GET", "/fragments/servers", Role.READER)
def server_rows(service: Service, caller: Identity, query: forms.RowsQuery) -> Any:
    """Rows of servers."""

    def view(cluster: ClusterState, now: float) -> tuple[list[dict[str, Any]], float]:
        known = [cluster.by_server_id.get(server_id) for server_id in query.ids]
        return cells.server_rows(cluster, [state for state in known if state is not None], now), now

    rows, now = service.watch.read(view)
    cells.show_use(rows, _last_reports(service, [row["name"] for row in rows]))
    return html_page("server_rows.html", service, caller, rows=rows, now=now)


@routes.add("GET", "/servers/<int:server_id>", Role.READER)
def server(service: Service, caller: Identity, server_id: int) -> Any:
    """One server and its GPUs."""
    left = ProblemError(404, f"server {server_id} is not in the inventory")

    def view(cluster: ClusterState, now: float) -> dict[str, Any]:
        state = cluster.by_server_id.get(server_id)
        if state is None:
            raise left
        leases = sorted(state.leases.values(), key=lambda lease: lease.fencing_token)
        colours = cells.colours_of(cluster, leases)
        return {
            "row": cells.server_rows(cluster, [state], now)[0],
            "leases": [
                cells.lease_row(cluster, lease, colours[lease.key], caller, service) for lease in leases
            ],
            "colours": {lease.fencing_token: cells.css_classes(colours[lease.key]) for lease in leases},
            "now": now,
            "totals": cells.totals(cluster),
        }

    shown = service.watch.read(view)
    uses = use_of(service.manager, [shown["row"]["name"]])
    if not uses:  # it has left meanwhile
        raise left
    recent = service.recent.newest(service.manager.history, shown["totals"]["version"])
    changes = health_history(recent, shown["row"]["name"])
    more = {"use": uses[0], "changes": changes, "describe": describe_health}
    return html_page("server.html", service, caller, **more, **shown)


@routes.add("GET", "/fragments/side", Role.READER)
def side(service: Service, caller: Identity) -> Any:
    """Tiles and queue beside the servers."""
    entries = service.manager.queue()
    shown = service.watch.read(lambda cluster, now: _side(cluster, now, entries))
    return html_page("side.html", service, caller, **shown)


@routes.add("GET", "/lease", Role.READER)
def lease(service: Service, caller: Identity, query: forms.LeaseQuery) -> Any:
    """One lease or pending request."""
    shown = lease_page.look_at(service, caller, query.id, query.token)
    return html_page("lease.html", service, caller, **shown)


@routes.add("GET", "/leases", Role.READER)
def leases(service: Service, caller: Identity, query: forms.ListQuery) -> Any:
    """Leases."""
    text = query.q.casefold()

    def view(cluster: ClusterState, now: float) -> dict[str, Any]:
        found = [
            lease
            for lease in (*cluster.leases.values(), *cluster.remainders.values())
            if (not query.mine or lease.request.owner == caller.name)
            and (
                not text
                or contains(lease, text)
                or text in lease.request.owner.casefold()
                or any(text in member.node.casefold() for member in lease.members)
            )
        ]
        found.sort(key=lambda lease: lease.fencing_token)
        shown, paging = _paged(found, query.page)
        colours = cells.colours_of(cluster, shown)
        rows = [cells.lease_row(cluster, lease, colours[lease.key], caller, service) for lease in shown]
        return {"rows": rows, "now": now, "totals": cells.totals(cluster), **paging}

    on_slurm = [
        job
        for job in service.on_slurm.of(service.manager)
        if (not query.mine or job["owner"] == caller.name)
        and any(text in job[name].casefold() for name in ("task_id", "owner", "where"))
    ]
    jobs = {"on_slurm": on_slurm[: forms.PER_PAGE], "more_on_slurm": len(on_slurm) - forms.PER_PAGE}
    return html_page("leases.html", service, caller, query=query, **jobs, **service.watch.read(view))


@routes.add("GET", "/queue", Role.READER)
def queue(service: Service, caller: Identity, query: forms.ListQuery) -> Any:
    """The queue."""
    entries = service.manager.queue()

    def view(cluster: ClusterState, now: float) -> dict[str, Any]:
        found = [
            entry
            for entry in _pending(cluster, entries)
            if contains(cluster.pending[entry["task_id"]], query.q)
            and (not query.mine or entry["owner"] == caller.name)
        ]
        shown, paging = _paged(found, query.page)
        rows = [_waiting(entry, cluster, caller) for entry in shown]
        coming = [{**each, "gpus": gpus_coming(each)} for each in announced if not query.q]
        summary = coming_in_words(announced, now)
        totals = cells.totals(cluster)
        return {"rows": rows, "now": now, "totals": totals, "coming": coming, "summary": summary, **paging}

    announced = [each for each in service.manager.coming() if not query.mine or each["owner"] == caller.name]
    return html_page("queue.html", service, caller, query=query, **service.watch.read(view))


@routes.add("GET", "/timeline", Role.READER)
def leases_over_time(service: Service, caller: Identity, query: forms.TimelineQuery) -> Any:
    """Leases over time."""

    def view(cluster: ClusterState, now: float) -> tuple[list[str], dict[str, Any]]:
        return [state.name for state in cells.matching(cluster.nodes, query.q, "")], cells.totals(cluster)

    found, totals = service.watch.read(view)
    names, paging = _paged(found, query.page)
    shown = timeline.look_at(service, names, query.hours)
    return html_page("timeline.html", service, caller, query=query, totals=totals, **shown, **paging)


@routes.add("GET", "/use", Role.READER)
def use(service: Service, caller: Identity, query: forms.UseQuery) -> Any:
    """GPU-hours, and what became of them."""
    asked = ReportQuery(by=[query.by], since=query.days * 86_400)
    shown = use_page.look_at(service.accounts.of(service.manager), service.manager, asked)
    return html_page("use.html", service, caller, query=query, **shown)


@routes.add("GET", "/estimates", Role.READER)
def estimates(service: Service, caller: Identity) -> Any:
    """How often estimated starts came true."""
    return html_page("estimates.html", service, caller, **service.manager.estimates())


@routes.add("GET", "/cluster", Role.READER)
def cluster(service: Service, caller: Identity) -> Any:
    """The stored cluster, and its last changes."""
    return html_page("cluster.html", service, caller, **cluster_page.look_at(service.manager, service.recent))


@routes.add("GET", "/charts", Role.READER)
def charts(service: Service, caller: Identity) -> Any:
    """Utilisation, waits and queue."""
    return html_page("charts.html", service, caller)


@routes.add("GET", "/what-if", Role.READER)
def what_if(service: Service, caller: Identity) -> Any:
    """Explain a request without making it."""
    given = {key: value for key, value in flask.request.args.items() if value and key != "for"}
    answer, error = None, ""
    if given:
        try:
            answer = service.manager.explain(ExplainQuery.model_validate(given))
        except (ValueError, ResourceManagerError) as wrong:
            error = plain(wrong)
    return what_if_page(service, caller, flask.request.args, answer, error)


def what_if_page(
    service: Service, caller: Identity, form: Mapping[str, str], answer: Explanation | None, error: str
) -> str:
    """Return the page with what was typed into its form, and the answer or what is wrong with it."""
    now, known = service.watch.read(lambda cluster, now: (now, demand_form.known(cluster)))
    least, most = service.manager.gpu_range()
    shown = {"gpus": str(least), "cpus": "1", **demand_form.given_in(form)}
    first, others = demand_form.fields()
    answered = {"answer": answer, "error": error, "now": now, "first": first, "others": others}
    hold = flask.url_for("gpu.page_act_hold", **forms.HoldQuery().model_dump())
    more = {"given_for": form.get("for") or "1h", "gpus": (min(least, 1), most), "known": known, "hold": hold}
    return html_page("what_if.html", service, caller, given=shown, **more, **answered)


@routes.add("GET", "/docs", Role.READER)
def docs(service: Service, caller: Identity) -> Any:
    """Documentation of the REST interface, with forms to call it."""
    described = document(tuple(api.routes.all), service.manager.gpu_range(), flask.request.script_root)
    roles = {(route.method.lower(), route.handler.__name__): route.role for route in api.routes.all}
    pretty = partial(json.dumps, indent=2)
    return html_page("docs.html", service, caller, document=described, roles=roles, pretty=pretty)


@routes.add("GET", "/events", Role.READER)
def events(service: Service, caller: Identity, query: forms.EventsQuery) -> Any:
    """Changes as server-sent events."""
    last = flask.request.headers.get("Last-Event-ID", "")
    after = int(last) if last.isdecimal() and len(last) < 16 else query.after
    environ = flask.request.environ
    gone = environ.get("waitress.client_disconnected") or environ.get("asgi.scope", {}).get(
        CLIENT_GONE, lambda: False
    )
    stream = EventStream(service, flask.g.counted_as, after, gone)
    return flask.Response(stream, content_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


def _last_reports(service: Service, servers: list[str]) -> dict[str, KeptReport]:
    """Return the last reports of these servers; none while the store does not answer."""
    try:
        return kept_reports(service.manager.store, servers)
    except StoreError:
        return {}


def _pending(cluster: ClusterState, entries: Sequence[QueueEntry]) -> list[QueueEntry]:
    """Return the entries that are pending in this state too, which may be newer."""
    return [entry for entry in entries if entry["task_id"] in cluster.pending]


def _side(cluster: ClusterState, now: float, entries: Sequence[QueueEntry]) -> dict[str, Any]:
    """Return the totals, the alerts, and who waits first and why."""
    first = [
        {**entry, "asks": cells.gpus_asked(cluster.pending[entry["task_id"]].request)}
        for entry in _pending(cluster, entries)[:FIRST]
    ]
    oldest = min((entry.queued_at for entry in cluster.pending.values()), default=None)
    return {
        "now": now,
        "totals": cells.totals(cluster),
        "alerts": alerts.alerts(cluster) + alerts.under_maintenance(cluster, now),
        "waiting": first,
        "oldest": oldest,
        "windows": cells.coming_maintenance(cluster, now)[:FIRST],
    }


def own_page(address: str) -> str:
    """Return the address if it is a path of this service, else that of the console's first page."""
    is_own = address.startswith("/") and address[1:2] not in ("/", "\\") and address.isprintable()
    return address if is_own else flask.url_for("gpu.page_servers")


def _paged(rows: list[Any], page: int) -> tuple[list[Any], dict[str, int]]:
    pages = max(1, -(-len(rows) // forms.PER_PAGE))
    page = min(page, pages)
    shown = rows[(page - 1) * forms.PER_PAGE : page * forms.PER_PAGE]
    return shown, {"page": page, "pages": pages, "found": len(rows)}


def _dot(index: int, name: str, level: int, is_open: bool) -> dict[str, Any]:
    return {"page": index // forms.PER_PAGE + 1, "name": name, "level": level, "open": is_open}


def _waiting(entry: dict[str, Any], cluster: ClusterState, caller: Identity) -> dict[str, Any]:
    request = cluster.pending[entry["task_id"]].request
    return {
        **entry,
        "asks": cells.gpus_asked(request),
        "types": ", ".join(request.gpu_types),
        "cpus": counted(float(entry["required_cpus"]), "CPU"),
        "may_cancel": caller.is_operator or request.owner == caller.name,
    }


def plain(wrong: Exception) -> str:
    """Return the error of a form in one sentence."""
    words = wrong.words if isinstance(wrong, InvalidRequestError) else Words("{}", wrong)
    if isinstance(wrong, ValidationError):
        problem = from_validation(wrong)
        words = Words("{}", problem.detail)
        if (template := problem.members.get("template")) is not None:
            words = Words(template)
    return words.named(demand_form.LABELS)
