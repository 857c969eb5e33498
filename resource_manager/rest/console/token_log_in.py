"""The page to log in with a token."""

from __future__ import annotations

from typing import Any

import flask

from resource_manager.rest import auth
from resource_manager.rest.auth import Identity, TokenAuthenticator
from resource_manager.rest.console.pages import own_page, routes
from resource_manager.rest.limits import network_of
from resource_manager.rest.problems import ProblemError
from resource_manager.rest.routing import html_page
from resource_manager.rest.service import Service
from resource_manager.rest.tokens import Role


@routes.add("GET", "/login", None)
def login(service: Service, caller: Identity | None) -> Any:
    """The page to log in."""
    return _login_page(service, caller)


def _login_page(service: Service, caller: Identity | None, error: str = "") -> flask.Response:
    provider = service.sign_on.settings() if service.sign_on else None
    destination = flask.request.values.get("next", "")
    page = html_page("login.html", service, caller, sign_on=provider, next=destination, error=error)
    return flask.Response(page, 401 if error else 200)


@routes.add("POST", "/login", None)
def do_login(service: Service, caller: Identity | None) -> Any:
    """Log in with a token."""
    authenticator = service.authenticator
    if not isinstance(authenticator, TokenAuthenticator):
        raise ProblemError(404, "this service has no log-in of its own")
    auth.refuse_other_pages(flask.request)
    address = network_of(flask.request.remote_addr or "?")
    text = flask.request.form.get("token", "").strip()
    try:
        token = authenticator.token_of(text, fresh=not service.limits.is_locked_out(address))
    except auth.ExpiredTokenError as expired:
        return _login_page(service, caller, expired.detail)
    if token is None:
        service.limits.count_failure(address)
        return _login_page(service, caller, "Unknown token.")
    if token.server:
        raise ProblemError(403, "an agent's token sends reports only: log in with another")
    authenticator.begin_session(token)
    return flask.redirect(own_page(flask.request.form.get("next", "")), 303)


@routes.add("POST", "/logout", Role.READER)
def logout(service: Service, caller: Identity) -> Any:
    """Log out."""
    if isinstance(service.authenticator, TokenAuthenticator):
        service.authenticator.end_session()
    return flask.redirect(flask.url_for("gpu.page_login"), 303)
