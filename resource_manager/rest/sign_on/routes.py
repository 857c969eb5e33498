"""Routes of sign-on: of the console by way of the browser, of the command line by a code (RFC 8628)."""

from __future__ import annotations

from typing import Annotated, Any

import flask
from pydantic import Field

from resource_manager.rest.answers import CallerAnswer, DeviceAnswer, Done, LogInAnswer
from resource_manager.rest.api import routes
from resource_manager.rest.auth import Identity, TokenAuthenticator
from resource_manager.rest.console.pages import own_page
from resource_manager.rest.console.pages import routes as pages
from resource_manager.rest.limits import network_of
from resource_manager.rest.problems import ProblemError
from resource_manager.rest.schemas import Body, Query
from resource_manager.rest.service import Service
from resource_manager.rest.sign_on.log_in import LOG_IN_S, SignOnDesk
from resource_manager.rest.sign_on.provider import Provider
from resource_manager.rest.tokens import Role

COOKIE = "gpu_manager_sign_on"

DEVICE_INTERVAL_S = 5.0


class DeviceBody(Body):
    """`POST /api/login/token`."""

    device_code: Annotated[str, Field(min_length=1, max_length=5000)]


class SignOnQuery(Query):
    """Page of the console to go to afterwards."""

    next: Annotated[str, Field(max_length=2000)] = ""


def _desk(service: Service) -> tuple[SignOnDesk, Provider]:
    if service.sign_on is None:
        raise ProblemError(404, "this service has no sign-on")
    return service.sign_on, service.sign_on.provider(network_of(flask.request.remote_addr or "?"))


def _redirect_uri() -> str:
    scheme = "https" if flask.current_app.config["SESSION_COOKIE_SECURE"] else None
    return flask.url_for("gpu.page_signed_on", _external=True, _scheme=scheme)


@pages.add("GET", "/sign-on", None)
def sign_on(service: Service, caller: Identity | None, query: SignOnQuery) -> Any:
    """Log in at the provider."""
    desk, provider = _desk(service)
    address, cookie = desk.begin(provider, _redirect_uri(), own_page(query.next))
    response = flask.redirect(address, 303)
    _set_cookie(response, cookie, LOG_IN_S)
    return response


@pages.add("GET", "/signed-on", None)
def signed_on(service: Service, caller: Identity | None) -> Any:
    """Come back from the provider."""
    desk, provider = _desk(service)
    answer = flask.request.args.to_dict()
    token, destination = desk.end(provider, _redirect_uri(), flask.request.cookies.get(COOKIE, ""), answer)
    desk.authenticator.begin_session(token)
    # Browsers send the session's cookie with what our own page asks for, not with a redirect of the provider.
    response = flask.make_response(flask.render_template("signed_on.html", service=service, next=destination))
    _set_cookie(response, "", 0)
    return response


def _set_cookie(response: Any, text: str, max_age_s: int) -> None:
    response.set_cookie(
        COOKIE,
        text,
        max_age=max_age_s,
        path=flask.url_for("gpu.page_signed_on"),
        secure=flask.current_app.config["SESSION_COOKIE_SECURE"],
        httponly=True,
        samesite="Lax",  # the provider's page sends the browser back
    )


@routes.add("POST", "/api/login", None, failures=(403, 404))
def begin_login(service: Service, caller: Identity | None) -> DeviceAnswer:
    """Begin a log-in on the command line."""
    _, provider = _desk(service)
    begun = provider.begin_device()
    complete, interval = begun.get("verification_uri_complete"), begun.get("interval")
    answer: DeviceAnswer = {
        "user_code": begun["user_code"],
        "verification_uri": begun["verification_uri"],
        "device_code": begun["device_code"],
        "interval_s": max(float(interval), 1.0) if isinstance(interval, int | float) else DEVICE_INTERVAL_S,
    }
    if isinstance(complete, str):
        answer["verification_uri_complete"] = complete
    return answer


@routes.add("POST", "/api/login/token", None, failures=(403, 404))
def end_login(service: Service, caller: Identity | None, body: DeviceBody) -> LogInAnswer:
    """Fetch the token of a log-in."""
    desk, provider = _desk(service)
    made = desk.end_device(provider, body.device_code)
    if made is None:
        return {"token": None, "expires_at": None, "caller": None}
    token, text = made
    who: CallerAnswer = {"name": token.name, "role": token.role, "teams": list(token.teams)}
    return {"token": text, "expires_at": token.expires_at, "caller": who}


@routes.add("DELETE", "/api/login", Role.READER, failures=(400,))
def log_out(service: Service, caller: Identity) -> Done:
    """End the log-in whose token is sent."""
    authenticator = service.authenticator
    text = flask.request.headers.get("Authorization", "").partition(" ")[2].strip()
    if not isinstance(authenticator, TokenAuthenticator) or not authenticator.end_log_in(text):
        raise ProblemError(
            400, f"the token of {caller.name} is of no log-in: gpu-manager token revoke ends it"
        )
    return {"success": True}
