"""Console: pages that show and change the cluster, and the events that keep them current."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import flask
from pydantic import Field, ValidationError

from resource_manager.core.cluster import ClusterState
from resource_manager.core.name_lookup import contains, name_in
from resource_manager.errors import InvalidRequestError, ResourceManagerError, StoreError, Words
from resource_manager.fleet.server_use import KeptReport, kept_reports, use_of
from resource_manager.manager import answer_words
from resource_manager.manager.demand_fields import LeaseId, Text
from resource_manager.manager.plurals import counted
from resource_manager.manager.report import ReportQuery
from resource_manager.manager.results import QueueEntry
from resource_manager.manager.serializers import coming_in_words, gpus_coming
from resource_manager.manager.slurm_jobs import is_live
from resource_manager.rest import api, auth
from resource_manager.rest.auth import Identity, TokenAuthenticator
from resource_manager.rest.console import (
    alerts,
    cells,
    cluster_page,
    demand_form,
    lease_page,
    timeline,
    use_page,
)
from resource_manager.rest.console.server_history import describe_change, health_history
from resource_manager.rest.events import CLIENT_GONE, EventStream
from resource_manager.rest.limits import network_of
from resource_manager.rest.openapi import document
from resource_manager.rest.problems import ProblemError, from_validation
from resource_manager.rest.routing import Routes
from resource_manager.rest.schemas import (
    Body,
    CancelBody,
    DrainBody,
    ExplainQuery,
    PreemptBody,
    ReleaseBody,
    ResumeBody,
)
from resource_manager.rest.service import Service
from resource_manager.rest.tokens import Role

routes = Routes()

PER_PAGE = 100

FIRST = 5
"""Number of pending requests, and of maintenance windows, beside the servers."""


class ServersQuery(Body):
    """Filter of the servers to show."""

    q: Text = ""
    state: Literal["", "IDLE", "PARTIAL", "FULL", "ERROR", "DRAINED"] = ""
    page: Annotated[int, Field(ge=1, le=10_000)] = 1
    task: Annotated[str, Field(max_length=1000)] = ""


class RowsQuery(Body):
    """Ids of the servers whose rows are asked for."""

    ids: list[Annotated[int, Field(ge=0)]] = Field(default=[], max_length=2 * PER_PAGE)


class ListQuery(Body):
    """One page of the leases or the queue, filtered by a text, or only those of the caller."""

    q: Annotated[str, Field(max_length=1000)] = ""
    mine: bool = False
    page: Annotated[int, Field(ge=1, le=10_000)] = 1


class TimelineQuery(Body):
    """Past hours to show, of servers whose name contains a text."""

    hours: Annotated[float, Field(ge=0.1, le=168)] = 6
    q: Text = ""
    page: Annotated[int, Field(ge=1, le=10_000)] = 1


class UseQuery(Body):
    """Key to group by, and how many days back."""

    by: Literal["team", "user", "dag", "gpu_type", "source"] = "team"
    days: Annotated[float, Field(ge=0.01, le=3650)] = 7


class EventsQuery(Body):
    """Events after a version of the state."""

    after: Annotated[int, Field(ge=0, le=2**53)] = 0


class TaskForm(Body):
    """Task that a button acts on."""

    task_id: LeaseId
    fencing_token: int | None = None
    sequence: int | None = None
    end_task: bool = False


class LeaseQuery(Body):
    """Lease or pending request to show."""

    id: LeaseId


@routes.add("GET", "/", Role.READER, "Servers", query=ServersQuery, page=True)
def servers(service: Service, caller: Identity, query: ServersQuery) -> Any:
    if query.task:
        return flask.redirect(flask.url_for("gpu.page_lease", id=query.task))
    entries = service.manager.queue()

    def view(cluster: ClusterState, now: float) -> dict[str, Any]:
        found = cells.matching(cluster.nodes, query.q, query.state)
        shown, paging = _paged(found, query.page)
        mapped = found if len(cluster.nodes) > PER_PAGE else []
        return {
            "now": now,
            **_side(cluster, now, entries),
            "rows": cells.server_rows(cluster, shown, now),
            "map": [_dot(i, state.name, cells.level(state), state.is_open) for i, state in enumerate(mapped)],
            "totals": cells.totals(cluster),
            **paging,
        }

    shown = service.watch.read(view)
    cells.show_use(shown["rows"], _last_reports(service, [row.name for row in shown["rows"]]))
    return _page("servers.html", service, caller, query=query, **shown)


@routes.add("GET", "/fragments/servers", Role.READER, "Rows of servers", query=RowsQuery, page=True)
def server_rows(service: Service, caller: Identity, query: RowsQuery) -> Any:
    def view(cluster: ClusterState, now: float) -> tuple[list[cells.ServerRow], float]:
        known = [cluster.by_server_id.get(server_id) for server_id in query.ids]
        return cells.server_rows(cluster, [state for state in known if state is not None], now), now

    rows, now = service.watch.read(view)
    cells.show_use(rows, _last_reports(service, [row.name for row in rows]))
    return _page("server_rows.html", service, caller, rows=rows, now=now)


@routes.add("GET", "/servers/<int:server_id>", Role.READER, "One server and its GPUs", page=True)
def server(service: Service, caller: Identity, server_id: int) -> Any:
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
            "colours": {lease.lease_id: cells.css_classes(colours[lease.key]) for lease in leases},
            "now": now,
            "totals": cells.totals(cluster),
        }

    shown = service.watch.read(view)
    uses = use_of(service.manager, [shown["row"].name])
    if not uses:  # it has left meanwhile
        raise left
    changes = health_history(service.manager, shown["row"].name, shown["totals"]["version"])
    more = {"use": uses[0], "changes": changes, "describe": describe_change}
    return _page("server.html", service, caller, **more, **shown)


@routes.add("GET", "/fragments/side", Role.READER, "Tiles and queue beside the servers", page=True)
def side(service: Service, caller: Identity) -> Any:
    entries = service.manager.queue()

    def view(cluster: ClusterState, now: float) -> dict[str, Any]:
        return {"now": now, "totals": cells.totals(cluster), **_side(cluster, now, entries)}

    return _page("side.html", service, caller, **service.watch.read(view))


@routes.add("GET", "/lease", Role.READER, "One lease or pending request", query=LeaseQuery, page=True)
def lease(service: Service, caller: Identity, query: LeaseQuery) -> Any:
    shown = lease_page.look_at(service, caller, query.id)
    return _page("lease.html", service, caller, **shown)


@routes.add("GET", "/leases", Role.READER, "Leases", query=ListQuery, page=True)
def leases(service: Service, caller: Identity, query: ListQuery) -> Any:
    def view(cluster: ClusterState, now: float) -> dict[str, Any]:
        text = query.q.casefold()
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

    text = query.q.casefold()
    on_slurm = [
        job
        for job in service.manager.slurm_jobs()
        if is_live(job)
        and (not query.mine or job["owner"] == caller.name)
        and any(text in job[name].casefold() for name in ("task_id", "owner", "where"))
    ]
    return _page("leases.html", service, caller, query=query, on_slurm=on_slurm, **service.watch.read(view))


@routes.add("GET", "/queue", Role.READER, "The queue", query=ListQuery, page=True)
def queue(service: Service, caller: Identity, query: ListQuery) -> Any:
    entries = service.manager.queue()

    def view(cluster: ClusterState, now: float) -> dict[str, Any]:
        found = [
            entry
            for entry in _pending(cluster, entries)
            if contains(cluster.pending[entry["task_id"]], query.q)
            and (not query.mine or entry["owner"] == caller.name)
        ]
        shown, paging = _paged(found, query.page)
        rows = [_waiting(entry, cluster, caller, service) for entry in shown]
        coming = [{**each, "gpus": gpus_coming(each)} for each in announced if not query.q]
        summary = coming_in_words(announced, now)
        totals = cells.totals(cluster)
        return {"rows": rows, "now": now, "totals": totals, "coming": coming, "summary": summary, **paging}

    announced = [each for each in service.manager.coming() if not query.mine or each["owner"] == caller.name]
    return _page("queue.html", service, caller, query=query, **service.watch.read(view))


@routes.add("GET", "/timeline", Role.READER, "Leases over time", query=TimelineQuery, page=True)
def leases_over_time(service: Service, caller: Identity, query: TimelineQuery) -> Any:
    def view(cluster: ClusterState, now: float) -> tuple[list[str], dict[str, Any]]:
        return [state.name for state in cells.matching(cluster.nodes, query.q, "")], cells.totals(cluster)

    found, totals = service.watch.read(view)
    names, paging = _paged(found, query.page)
    shown = timeline.look_at(service, names, query.hours)
    return _page("timeline.html", service, caller, query=query, totals=totals, **shown, **paging)


@routes.add("GET", "/use", Role.READER, "GPU-hours, and what became of them", query=UseQuery, page=True)
def use(service: Service, caller: Identity, query: UseQuery) -> Any:
    asked = ReportQuery(by=[query.by], since=query.days * 86_400)
    shown = use_page.look_at(service.accounts.of(service.manager), service.manager, asked)
    return _page("use.html", service, caller, query=query, **shown)


@routes.add("GET", "/estimates", Role.READER, "How often estimated starts came true", page=True)
def estimates(service: Service, caller: Identity) -> Any:
    return _page("estimates.html", service, caller, **service.manager.estimates())


@routes.add("GET", "/cluster", Role.READER, "The stored cluster, and its last changes", page=True)
def cluster(service: Service, caller: Identity) -> Any:
    return _page("cluster.html", service, caller, **cluster_page.look_at(service.manager))


@routes.add("GET", "/charts", Role.READER, "Utilisation, waits and queue", page=True)
def charts(service: Service, caller: Identity) -> Any:
    return _page("charts.html", service, caller)


@routes.add("GET", "/what-if", Role.READER, "Explain a request without making it", page=True)
def what_if(service: Service, caller: Identity) -> Any:
    given = {key: value for key, value in flask.request.args.items() if value}
    answer, error = None, ""
    if given:
        try:
            answer = service.manager.explain(ExplainQuery.model_validate(given))
        except (ValueError, ResourceManagerError) as wrong:
            error = _plain(wrong)
    now = service.watch.read(lambda cluster, now: now)
    least, most = service.manager.gpu_range()
    shown = {"gpus": str(least), "cpus": "1", **demand_form.given_in(flask.request.args)}
    first, others = demand_form.fields()
    answered = {"answer": answer, "error": error, "now": now, "first": first, "others": others}
    answered["may_hold"] = caller.role >= Role.USER
    return _page("what_if.html", service, caller, given=shown, gpus=(min(least, 1), most), **answered)


@routes.add("POST", "/act/hold", Role.USER, "Take GPUs for a time, or wait for them", page=True)
def act_hold(service: Service, caller: Identity) -> Any:
    done = api.leases.submit(service, caller, demand_form.held_for(flask.request.form, caller))
    name = answer_words.name_in_words(done)
    flask.flash(f"{name} waits: {done['reason']}." if done["state"] == "WAITING" else f"{name} is yours.")
    return flask.redirect(flask.url_for("gpu.page_lease", id=done["task_id"]), 303)


@routes.add(
    "GET", "/docs", Role.READER, "Documentation of the REST interface, with forms to call it", page=True
)
def docs(service: Service, caller: Identity) -> Any:
    described = document(api.routes.all, service.manager.gpu_range(), flask.request.script_root)
    roles = {(route.method.lower(), route.handler.__name__): route.role for route in api.routes.all}
    return _page("docs.html", service, caller, document=described, roles=roles, pretty=_pretty)


@routes.add("GET", "/events", Role.READER, "Changes as server-sent events", query=EventsQuery, page=True)
def events(service: Service, caller: Identity, query: EventsQuery) -> Any:
    last = flask.request.headers.get("Last-Event-ID", "")
    after = int(last) if last.isdecimal() and len(last) < 16 else query.after
    environ = flask.request.environ
    gone = environ.get("waitress.client_disconnected") or environ.get("asgi.scope", {}).get(
        CLIENT_GONE, lambda: False
    )
    response = flask.Response(
        EventStream(service, flask.g.counted_as, after, gone), content_type="text/event-stream"
    )
    response.headers["X-Accel-Buffering"] = "no"
    return response


@routes.add("POST", "/act/servers/<int:server_id>/drain", Role.OPERATOR, "Drain", page=True)
def act_drain(service: Service, caller: Identity, server_id: int) -> Any:
    body = _form(DrainBody)
    api.servers.drain(service, caller, body, server_id)
    return _back_from(server_id, body.gpu, "takes no new leases")


@routes.add("POST", "/act/servers/<int:server_id>/resume", Role.OPERATOR, "Resume", page=True)
def act_resume(service: Service, caller: Identity, server_id: int) -> Any:
    body = _form(ResumeBody)
    api.servers.resume(service, caller, body, server_id)
    return _back_from(server_id, body.gpu, "takes leases again")


def _back_from(server_id: int, gpu: int | str | None, what: str) -> Any:
    """Go back to where the button of a server, or of one of its GPUs, is."""
    if gpu is None:
        return _back("gpu.page_servers", f"Server {server_id} {what}.")
    flask.flash(f"GPU {gpu} of server {server_id} {what}.")
    return flask.redirect(flask.url_for("gpu.page_server", server_id=server_id), 303)


@routes.add("POST", "/act/release", Role.USER, "Release", page=True)
def act_release(service: Service, caller: Identity) -> Any:
    form = _form(TaskForm)
    body = ReleaseBody(
        task_id=form.task_id, fencing_token=form.fencing_token, outcome="released in the console"
    )
    name = _name(service, form)
    api.leases.release(service, caller, body)
    return _back("gpu.page_leases", f"{name} is released.")


@routes.add("POST", "/act/stop", Role.USER, "Stop the job of a lease and release it", page=True)
def act_stop(service: Service, caller: Identity) -> Any:
    form = _form(TaskForm)
    if form.fencing_token is None:
        raise ProblemError(400, "fencing_token is missing")
    _end_task(service, caller, form)
    flask.flash(lease_page.stop_job(service, caller, form.task_id, form.fencing_token))
    return flask.redirect(flask.url_for("gpu.page_lease", id=form.task_id), 303)


@routes.add("POST", "/act/preempt", Role.OPERATOR, "Preempt a lease for who waits for it", page=True)
def act_preempt(service: Service, caller: Identity) -> Any:
    form = _form(TaskForm)
    done = api.leases.preempt(
        service, caller, PreemptBody(task_id=form.task_id, fencing_token=form.fencing_token)
    )
    grace = answer_words.duration(done["preempt_grace_s"])
    name = answer_words.name_in_words(done)
    flask.flash(f"{name} is {done['reason']}: its job has {grace} to save what it did.")
    return flask.redirect(flask.url_for("gpu.page_lease", id=form.task_id), 303)


@routes.add("POST", "/act/cancel", Role.USER, "Cancel", page=True)
def act_cancel(service: Service, caller: Identity) -> Any:
    form = _form(TaskForm)
    name = _name(service, form)
    _end_task(service, caller, form)
    api.leases.cancel(service, caller, CancelBody(task_id=form.task_id, sequence=form.sequence))
    return _back("gpu.page_queue", f"{name} is no longer in the queue.")


@routes.add("GET", "/login", None, "The page to log in", page=True)
def login(service: Service, caller: Identity | None) -> Any:
    csrf = auth.csrf_token(service.secret, caller) if caller else ""
    return _login_page(service, caller, csrf=csrf)


def _login_page(service: Service, caller: Identity | None, **values: Any) -> str:
    provider = service.sign_on.settings() if service.sign_on else None
    destination = flask.request.args.get("next", "")
    return flask.render_template(
        "login.html", service=service, caller=caller, sign_on=provider, next=destination, **values
    )


@routes.add("POST", "/login", None, "Log in with a token", page=True)
def do_login(service: Service, caller: Identity | None) -> Any:
    authenticator = service.authenticator
    if not isinstance(authenticator, TokenAuthenticator):
        raise ProblemError(404, "this service has no log-in of its own")
    auth.refuse_other_pages(flask.request)
    address = network_of(flask.request.remote_addr or "?")
    text = flask.request.form.get("token", "").strip()
    error = "Unknown token."
    try:
        token = authenticator.find(text, fresh=not service.limits.is_locked_out(address))
    except auth.ExpiredTokenError as expired:
        token, error = None, expired.detail
    else:
        if token is None:
            service.limits.count_failure(address)
    if token is None:
        page = _login_page(service, None, error=error)
        return flask.Response(page, status=401)
    if token.server:
        raise ProblemError(403, "an agent's token sends reports only: log in with another")
    authenticator.begin_session(token)
    return flask.redirect(flask.url_for("gpu.page_servers"), 303)


@routes.add("POST", "/logout", Role.READER, "Log out", page=True)
def logout(service: Service, caller: Identity) -> Any:
    if isinstance(service.authenticator, TokenAuthenticator):
        service.authenticator.end_session()
    return flask.redirect(flask.url_for("gpu.page_login"), 303)


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
    """Return the alerts, and who waits first and why."""
    first = [
        {**entry, "asks": cells.gpus_asked(cluster.pending[entry["task_id"]].request)}
        for entry in _pending(cluster, entries)[:FIRST]
    ]
    oldest = min((entry.queued_at for entry in cluster.pending.values()), default=None)
    return {
        "alerts": alerts.alerts(cluster) + alerts.under_maintenance(cluster, now),
        "waiting": first,
        "oldest": oldest,
        "windows": cells.coming_maintenance(cluster, now)[:FIRST],
    }


def _page(template: str, service: Service, caller: Identity, **values: Any) -> str:
    return flask.render_template(
        template, service=service, caller=caller, csrf=auth.csrf_token(service.secret, caller), **values
    )


def _form(model: type[Body]) -> Any:
    fields = {key: value for key, value in flask.request.form.items() if key != auth.CSRF_FIELD}
    return model.model_validate(fields)


def _end_task(service: Service, caller: Identity, form: TaskForm) -> None:
    if form.end_task:
        numbers = {"fencing_token": form.fencing_token, "sequence": form.sequence}
        lease_page.end_task(service, caller, form.task_id, **numbers)


def _name(service: Service, form: TaskForm) -> str:
    """Return the name of the lease or pending request that a button is about to end."""
    return service.watch.read(lambda cluster, now: name_in(cluster, form.task_id))


def _back(endpoint: str, message: str) -> flask.typing.ResponseReturnValue:
    flask.flash(message)
    return flask.redirect(flask.url_for(endpoint), 303)


def _paged(rows: list[Any], page: int) -> tuple[list[Any], dict[str, int]]:
    pages = max(1, -(-len(rows) // PER_PAGE))
    page = min(page, pages)
    shown = rows[(page - 1) * PER_PAGE : page * PER_PAGE]
    return shown, {"page": page, "pages": pages, "found": len(rows)}


def _dot(index: int, name: str, level: int, is_open: bool) -> dict[str, Any]:
    return {"page": index // PER_PAGE + 1, "name": name, "level": level, "open": is_open}


def _waiting(
    entry: dict[str, Any], cluster: ClusterState, caller: Identity, service: Service
) -> dict[str, Any]:
    request = cluster.pending[entry["task_id"]].request
    return {
        **entry,
        "asks": cells.gpus_asked(request),
        "types": ", ".join(request.gpu_types),
        "cpus": counted(float(entry["required_cpus"]), "CPU"),
        "start": entry["estimated_start"],
        "link": cells.task_link(request, service),
        "may_cancel": caller.is_operator or request.owner == caller.name,
    }


def _plain(wrong: Exception) -> str:
    """Return the error of a form in one sentence."""
    words = wrong.words if isinstance(wrong, InvalidRequestError) else Words("{}", wrong)
    if isinstance(wrong, ValidationError):
        problem = from_validation(wrong)
        words = Words("{}", problem.detail)
        if (template := problem.members.get("template")) is not None:
            words = Words(template)
    return words.named(demand_form.LABELS)


def _pretty(value: Any) -> str:
    return json.dumps(value, indent=2)
