"""Routes as values: path, role, body, query and handler, whose return type is the answer.

The app, the documents and the tests read them.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast, get_type_hints

import flask
from pydantic import BaseModel
from pydantic_core import to_json
from werkzeug.exceptions import HTTPException
from werkzeug.wrappers import Response as WerkzeugResponse

from resource_manager.errors import ResourceManagerError, StoreError
from resource_manager.manager.commit.asking import as_caller, asked_by
from resource_manager.rest import auth, problems
from resource_manager.rest.auth import Identity
from resource_manager.rest.limits import MAX_FORM_BYTES, network_of
from resource_manager.rest.problems import ProblemError
from resource_manager.rest.service import Service, current_service
from resource_manager.rest.tokens import Role
from resource_manager.storage.once import Once

logger = logging.getLogger(__name__)

MAX_KEY_LENGTH = 255

Handler = Callable[..., Any]
H = TypeVar("H", bound=Handler)


@dataclass(frozen=True, slots=True)
class Route:
    """One operation; `role` None admits callers without a token; `failures` adds to the usual statuses.

    Body, query and answer are what the handler's annotations say.
    """

    method: str
    path: str
    role: Role | None
    handler: Handler
    summary: str
    page: bool
    """True if the answer is HTML for people."""
    body: type[BaseModel] | None
    query: type[BaseModel] | None
    answer: Any
    """Type of what the handler returns; None if it says no more than Any."""
    takes_key: bool
    """True if the route takes an idempotency key; repeats of the others change nothing more."""
    failures: tuple[int, ...] = ()
    tag: str = "service"
    max_bytes: int | None = None
    """Maximum size of the body; None: that of all routes."""
    waits: bool = False
    """Whether it may wait for an agent in its thread."""
    described: type[BaseModel] | None = None
    """Body as documents describe it, where the handler reads it itself."""

    @property
    def changes(self) -> bool:
        return self.method not in auth.SAFE_METHODS


class Routes:
    """Routes of a blueprint in the order of their declaration: of pages, or of programs."""

    def __init__(self, *, page: bool = False) -> None:
        self.all: list[Route] = []
        self._page = page

    def add(self, method: str, path: str, role: Role | None, **more: Any) -> Callable[[H], H]:
        """Return a decorator for the handler of this operation, whose docstring is its summary."""

        def declare(handler: H) -> H:
            hints = get_type_hints(handler)
            body, query, answer = hints.get("body"), hints.get("query"), hints["return"]
            answer = None if answer is Any else answer
            summary = " ".join((handler.__doc__ or "").split()).removesuffix(".")
            self.all.append(
                Route(
                    method,
                    path,
                    role,
                    handler,
                    summary,
                    self._page,
                    body,
                    query,
                    answer,
                    "once" in hints,
                    **more,
                )
            )
            return handler

        return declare

    def register(self, blueprint: flask.Blueprint) -> None:
        for route in self.all:
            blueprint.add_url_rule(
                route.path,
                endpoint=f"page_{route.handler.__name__}" if route.page else route.handler.__name__,
                view_func=_view(route),
                methods=[route.method],
                provide_automatic_options=False,
            )


def _view(route: Route) -> Callable[..., flask.typing.ResponseReturnValue]:
    """Return the view of a route: role, rate limit, CSRF, validation, idempotency key, then the handler."""

    def answer(**path: Any) -> flask.Response:
        service = current_service()
        if route.page:
            flask.request.max_content_length = MAX_FORM_BYTES
        if route.max_bytes is not None:
            flask.request.max_content_length = route.max_bytes
        identity = None
        try:
            identity = admit(service, route.role)
            if identity is not None and route.changes:
                auth.check_csrf(service.secret, identity)
            if route.changes and "If-Match" in flask.request.headers:
                raise ProblemError(
                    400, "If-Match is not read: give the revision or fencing_token in the body"
                )
            turn = (
                service.limits.running(flask.g.counted_as, route.waits, route.path)
                if flask.g.is_named
                else nullcontext()
            )
            is_operator = identity is not None and identity.is_operator
            name = as_caller(identity.name) if identity else ""
            teams = identity.teams if identity and not is_operator else ()
            with turn, asked_by(name, is_operator=is_operator, teams=teams) as flask.g.asking:
                return carry_out(service, identity, path)
        except StoreError as error:
            if identity is None or route.role is None:  # strangers must not learn the address or the error
                raise problems.without_details(error) from error
            raise

    def carry_out(service: Service, identity: Identity | None, path: dict[str, Any]) -> flask.Response:
        arguments = dict(path)
        if route.query is not None:
            arguments["query"] = _query(route.query)
        once = None
        if route.body is not None:
            raw = raw_body()
            arguments["body"] = route.body.model_validate_json(raw or b"{}")
            if route.takes_key:
                once = arguments["once"] = _once(identity, raw)
        response = _respond(route.handler(service, identity, **arguments))
        if once is not None and once.repeated:
            response.headers["Idempotent-Replay"] = "true"
        return response

    @functools.wraps(route.handler)
    def view(**path: Any) -> flask.Response:
        try:  # pages answer their errors as pages
            return answer(**path)
        except Exception as error:
            if not route.page:
                raise
            return _error_page(problems.problem_of(error))

    return view


def html_page(template: str, service: Service, caller: Identity | None, **values: Any) -> str:
    """Return a page for that caller, as HTML."""
    csrf = auth.csrf_token(service.secret, caller)
    may_hold = caller is not None and caller.role >= Role.USER
    return flask.render_template(
        template, service=service, caller=caller, csrf=csrf, may_hold=may_hold, **values
    )


def _error_page(problem: ProblemError) -> flask.Response:
    """Return a page with the problem; redirect an unknown caller to the log-in page if there is one."""
    service = current_service()
    if problem.status == 401 and service.authenticator.login and "Authorization" not in flask.request.headers:
        return cast(flask.Response, flask.redirect(flask.url_for("gpu.page_login", next=_wanted()), 303))
    title = problems.TITLES.get(problem.status, "Error")
    page = html_page("error.html", service, flask.g.get("identity"), title=title, detail=problem.detail)
    response = flask.Response(page, problem.status, headers=problem.headers)
    if problem.status == 503 and flask.request.method == "GET":
        response.headers["Refresh"] = problem.headers.get("Retry-After", "10")  # it shows what there is then
    return response


def _wanted() -> str | None:
    """Return the page to lead to after the log-in, None for the first; say of a form that it did nothing."""
    request = flask.request
    if request.method == "GET":
        is_first = request.endpoint == "gpu.page_servers"
        return None if is_first else f"{request.script_root}{request.full_path}".rstrip("?")
    if request.endpoint == "gpu.page_logout":
        return None
    flask.flash("Nothing was done: you are not logged in any more. Log in and do it again.")
    page = re.fullmatch(r"https?://[^/]+(/[^#]*)", request.referrer or "")
    return None if page is None or "/act/" in page[1] else page[1]


def unknown_path(error: HTTPException) -> flask.Response:
    """Answer an unknown path: a browser gets a page with the menu, a program a problem document."""
    problem = problems.from_http(error)
    if flask.request.accept_mimetypes.best_match(("application/json", "text/html")) != "text/html":
        return problem.response()
    try:
        admit(current_service(), None)  # who is logged in finds the menu there
    except ProblemError as error_of_caller:
        problem = error_of_caller
    return _error_page(problem)


def admit(service: Service, role: Role | None) -> Identity | None:
    """Count the call against the caller's limit and return the caller, None if unknown on an open route.

    Too many wrong tokens shut out wrong tokens of that address only: others behind it go on. Sets
    `flask.g.identity`, `is_named` and `counted_as`.
    """
    request = flask.request
    address = network_of(request.remote_addr or "?")
    identity, expired = None, None
    is_fresh = role is not None and not service.limits.is_locked_out(address)
    try:
        if request.path != "/livez":  # life shows also while the tokens cannot be read
            identity = service.authenticator.identify(request, fresh=is_fresh)
    except auth.ExpiredTokenError as error:
        expired = error
    except ResourceManagerError:  # of the store, or a broken file of tokens
        if role is not None:  # an open route needs no caller: that the service is live must be seen
            raise
    flask.g.identity = identity
    # In an open service all have the same name.
    flask.g.is_named = identity is not None and not isinstance(service.authenticator, auth.OpenAuthenticator)
    flask.g.counted_as = f"caller {identity.name}" if identity and flask.g.is_named else f"address {address}"
    service.limits.count(flask.g.counted_as)
    if identity is None and role is not None and "Authorization" in request.headers:
        if expired is not None:
            raise expired
        service.limits.count_failure(address)
    return auth.authorise(identity, role)


def _once(identity: Identity | None, raw: bytes) -> Once | None:
    """Return the request's `Idempotency-Key`, for this caller and exactly this request."""
    key = flask.request.headers.get("Idempotency-Key")
    if key is None or identity is None:
        return None
    if not 0 < len(key) <= MAX_KEY_LENGTH:
        raise ProblemError(400, f"Idempotency-Key must have 1 to {MAX_KEY_LENGTH} characters")
    request = f"{flask.request.method} {flask.request.path}".encode() + b"\0" + raw
    return Once(identity.name, key, hashlib.sha256(request).hexdigest()[:32])


def raw_body() -> bytes:
    """Return the body, which must be JSON if there is one; raises 415."""
    request = flask.request
    raw = request.get_data(cache=True)
    if raw and request.mimetype != "application/json":
        raise ProblemError(415, "send Content-Type: application/json")
    if (encoding := request.headers.get("Content-Encoding", "identity")) != "identity":
        raise ProblemError(415, f"send the body as it is, without Content-Encoding: {encoding}")
    return raw


def _query(model: type[BaseModel]) -> BaseModel:
    values: dict[str, Any] = {}
    for name, items in flask.request.args.lists():
        known = model.model_fields.get(name)
        is_list = known is not None and str(known.annotation).startswith(("list", "dict"))
        if not is_list and len(items) > 1:
            raise ProblemError(400, f"{name} is given {len(items)} times")
        values[name] = items if is_list else items[0]
    return model.model_validate(values)


def _respond(answer: Any) -> flask.Response:
    if isinstance(answer, WerkzeugResponse):
        return cast(flask.Response, answer)
    if isinstance(answer, str):
        return flask.Response(answer, content_type="text/html; charset=utf-8")
    # Several times as fast as the standard library's encoder, which is noticeable at a thousand servers.
    return flask.Response(to_json(answer, inf_nan_mode="null"), content_type="application/json")
