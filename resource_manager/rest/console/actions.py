"""What the buttons of the console do."""

from __future__ import annotations

from typing import Any

import flask

from resource_manager.core.cluster import ClusterState
from resource_manager.core.name_lookup import name_in
from resource_manager.core.names import name_of
from resource_manager.errors import InvalidRequestError
from resource_manager.manager import answer_words
from resource_manager.manager.cluster_results import ServerSummary
from resource_manager.rest import api
from resource_manager.rest.auth import Identity
from resource_manager.rest.console import demand_form, lease_page
from resource_manager.rest.console.forms import DrainForm, HoldQuery, ResumeForm, TaskForm, form_of
from resource_manager.rest.console.pages import plain, routes, what_if_page
from resource_manager.rest.problems import ProblemError
from resource_manager.rest.schemas import CancelBody, PreemptBody, ReleaseBody
from resource_manager.rest.service import Service
from resource_manager.rest.tokens import Role


@routes.add("POST", "/act/servers/drain", Role.OPERATOR)
def act_drain(service: Service, caller: Identity) -> Any:
    """Drain."""
    form = form_of(DrainForm)
    server = service.manager.drain(form.server, form.gpu, reason=form.reason, failed=form.failed)
    return _back_from(server, form.gpu, "takes no new leases")


@routes.add("POST", "/act/servers/resume", Role.OPERATOR)
def act_resume(service: Service, caller: Identity) -> Any:
    """Resume."""
    form = form_of(ResumeForm)
    server = service.manager.resume(form.server, form.gpu)
    return _back_from(server, form.gpu, "takes leases again")


def _back_from(server: ServerSummary, gpu: int | str | None, what: str) -> Any:
    """Go back to where the button of a server, or of one of its GPUs, is."""
    if gpu is None:
        return _back(f"{server['server_name']} {what}.", "gpu.page_servers")
    message = f"GPU {gpu} of {server['server_name']} {what}."
    return _back(message, "gpu.page_server", server_id=server["server_id"])


@routes.add("POST", "/act/release", Role.USER)
def act_release(service: Service, caller: Identity) -> Any:
    """Release."""
    form = form_of(TaskForm)
    body = ReleaseBody(
        task_id=form.task_id, fencing_token=form.fencing_token, outcome="released in the console"
    )
    name = _name(service, form)
    api.leases.release(service, caller, body)
    return _back(f"{name} is released.", "gpu.page_leases")


@routes.add("POST", "/act/stop", Role.USER)
def act_stop(service: Service, caller: Identity) -> Any:
    """Stop the job of a lease and release it."""
    form = form_of(TaskForm)
    if form.fencing_token is None:
        raise ProblemError(400, "fencing_token is missing")
    _end_task(service, caller, form)
    done = lease_page.stop_job(service, caller, form.task_id, form.fencing_token, task_ended=form.end_task)
    return _back(done, "gpu.page_lease", id=form.task_id)


@routes.add("POST", "/act/preempt", Role.OPERATOR)
def act_preempt(service: Service, caller: Identity) -> Any:
    """Preempt a lease for who waits for it."""
    form = form_of(TaskForm)
    done = api.leases.preempt(
        service, caller, PreemptBody(task_id=form.task_id, fencing_token=form.fencing_token)
    )
    grace = answer_words.duration(done["preempt_grace_s"])
    name = answer_words.name_in_words(done)
    message = f"{name} is {done['reason']}: its job has {grace} to save what it did."
    return _back(message, "gpu.page_lease", id=form.task_id)


@routes.add("POST", "/act/cancel", Role.USER)
def act_cancel(service: Service, caller: Identity) -> Any:
    """Cancel."""
    form = form_of(TaskForm)
    name = _name(service, form)
    _end_task(service, caller, form)
    api.leases.cancel(service, caller, CancelBody(task_id=form.task_id, sequence=form.sequence))
    ended = lease_page.TASK_ENDED if form.end_task else ""
    return _back(f"{name} is no longer in the queue.{ended}", "gpu.page_queue")


def _end_task(service: Service, caller: Identity, form: TaskForm) -> None:
    if form.end_task:
        numbers = {"fencing_token": form.fencing_token, "sequence": form.sequence}
        lease_page.end_task(service, caller, form.task_id, **numbers)


def _name(service: Service, form: TaskForm) -> str:
    """Return the name of the lease or pending request that a button is about to end."""

    def view(cluster: ClusterState, now: float) -> str:
        token = form.fencing_token
        lease = None if token is None else cluster.holding(form.task_id, token)
        return name_in(cluster, form.task_id) if lease is None else name_of(lease)

    return service.watch.read(view)


def _back(message: str, endpoint: str, **place: Any) -> flask.typing.ResponseReturnValue:
    flask.flash(message)
    return flask.redirect(flask.url_for(endpoint, **place), 303)


@routes.add("POST", "/act/hold", Role.USER)
def act_hold(service: Service, caller: Identity, query: HoldQuery) -> Any:
    """Take GPUs for a time, or wait for them."""
    try:
        body = demand_form.held_for(flask.request.form, caller, query.name)
        done = api.leases.submit(service, caller, body)
    except (ValueError, InvalidRequestError, ProblemError) as wrong:
        page = what_if_page(service, caller, flask.request.form, None, plain(wrong))
        return flask.Response(page, getattr(wrong, "status", 400))
    name = answer_words.name_in_words(done)
    message = f"{name} waits: {done['reason']}." if done["state"] == "WAITING" else f"{name} is yours."
    return _back(message, "gpu.page_lease", id=done["task_id"])
