"""Flask app: the blueprint, with metrics, logs, spans and security headers around every request."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from urllib.parse import quote

import flask
from flask.sessions import SecureCookieSession, SecureCookieSessionInterface
from itsdangerous import URLSafeTimedSerializer

from resource_manager.manager.answer_words import duration
from resource_manager.manager.commit.asking import Asking
from resource_manager.manager.plurals import counted, numbered_gpus
from resource_manager.manager.serializers import deadline_in_words, interval_in_words
from resource_manager.manager.server_views import usage_in_words
from resource_manager.manager.wording import by_whom, describe
from resource_manager.rest import api, problems
from resource_manager.rest.console import actions, joints, pages, token_log_in  # noqa: F401 - actions and log-in add their routes
from resource_manager.rest.limits import MAX_BODY_BYTES
from resource_manager.rest.observability.tracing import request_span
from resource_manager.rest.routing import unknown_path
from resource_manager.rest.service import EXTENSION, Service
from resource_manager.rest.sessions import SESSION_LIFE_S
from resource_manager.rest.sign_on import routes as _sign_on  # noqa: F401 - it adds its routes
from resource_manager.rest.signing import LenientSigner
from resource_manager.storage import codec

logger = logging.getLogger("resource_manager.rest.access")

COOKIE = "gpu_manager_session"

MAX_LOGGED = 20
"""The most changes of one request in the access log."""


class CookieSessions(SecureCookieSessionInterface):
    """Sessions of Flask that services share whose clocks differ, without the cost of one for programs."""

    def get_signing_serializer(self, app: flask.Flask) -> URLSafeTimedSerializer | None:
        signs = super().get_signing_serializer(app)
        if signs is not None:
            signs.signer = LenientSigner
        return signs

    def open_session(self, app: flask.Flask, request: flask.Request) -> SecureCookieSession | None:
        return super().open_session(app, request) if "Cookie" in request.headers else self.session_class()


def create_app(service: Service, *, secure_cookies: bool = False) -> flask.Flask:
    """Create the WSGI app of a service; set `secure_cookies` if it is reached by HTTPS only."""
    app = flask.Flask("resource_manager.rest", static_folder=None)
    app.secret_key = service.secret
    app.session_interface = CookieSessions()
    app.extensions[EXTENSION] = service
    app.config.update(
        MAX_CONTENT_LENGTH=MAX_BODY_BYTES,
        MAX_FORM_MEMORY_SIZE=MAX_BODY_BYTES,
        SESSION_COOKIE_NAME=COOKIE,
        SESSION_COOKIE_HTTPONLY=True,
        SESSION_COOKIE_SAMESITE="Strict",
        SESSION_COOKIE_SECURE=secure_cookies,
        PERMANENT_SESSION_LIFETIME=SESSION_LIFE_S,
    )
    app.json.sort_keys = False  # type: ignore[attr-defined]
    problems.install(app)
    for status in (404, 405):
        app.register_error_handler(status, unknown_path)
    app.register_blueprint(create_blueprint())
    app.add_template_filter(duration)
    app.add_template_filter(usage_in_words, "usage")
    app.add_template_filter(interval_in_words, "interval")
    app.add_template_filter(deadline_in_words, "deadline")
    app.add_template_filter(counted)
    app.add_template_filter(numbered_gpus)
    app.add_template_filter(joints.joints)
    _observe(app, service)
    return app


def create_blueprint() -> flask.Blueprint:
    """Create the blueprint with all routes: the REST interface and the console."""
    blueprint = flask.Blueprint(
        "gpu", "resource_manager.rest.console", template_folder="templates", static_folder="static"
    )
    api.routes.register(blueprint)
    pages.routes.register(blueprint)
    return blueprint


def _log(request: flask.Request, response: flask.Response, seconds: float) -> None:
    identity = flask.g.get("identity")
    path = quote(request.path)  # escaped here: inside Airflow the log format is Airflow's
    made = _changes_of(flask.g.get("asking"))
    logger.info(
        "%s %s %d%s",
        request.method,
        path,
        response.status_code,
        "".join(f"; {each}" for each in made),
        extra={
            "method": request.method,
            "path": path,
            "status": response.status_code,
            "duration_ms": round(1000 * seconds, 2),
            "caller": identity.name if identity else None,
            "address": request.remote_addr,
            **({"changes": made} if made else {}),
        },
    )


def _observe(app: flask.Flask, service: Service) -> None:
    @app.before_request
    def begin() -> None:
        flask.g.started = time.perf_counter()
        flask.g.scope = ExitStack()
        service.metrics.in_progress.inc()
        flask.g.scope.callback(service.metrics.in_progress.dec)
        rule = flask.request.url_rule
        name = f"{flask.request.method} {rule.rule if rule else 'unknown'}"
        flask.g.span = flask.g.scope.enter_context(request_span(name, flask.request.headers))

    @app.after_request
    def finish(response: flask.Response) -> flask.Response:
        request = flask.request
        rule = request.url_rule.rule if request.url_rule else "unknown"
        method = request.method if request.url_rule else "other"
        seconds = time.perf_counter() - flask.g.started
        if response.mimetype != "text/event-stream":
            service.metrics.requests.labels(method, rule, str(response.status_code)).observe(seconds)
        if flask.g.span is not None:
            flask.g.span.set_attribute("http.response.status_code", response.status_code)
        if logger.isEnabledFor(logging.INFO):
            _log(request, response, seconds)
        return _guard(response, service)

    @app.teardown_request
    def end(error: BaseException | None) -> None:
        scope = flask.g.pop("scope", None)
        if scope is not None:
            scope.close()


def _changes_of(asking: Asking | None) -> list[str]:
    """Return the changes that a request made, in words and with who asked for them; not those of others."""
    asked = [] if asking is None else [change for change in asking.changes if change.by]
    shown = [codec.change_to_dict(change) for change in asked[:MAX_LOGGED]]
    names = {} if asking is None else asking.names()
    more = [f"and {len(asked) - MAX_LOGGED} more"] if len(asked) > MAX_LOGGED else []
    return [by_whom(f"{each['change']} {describe(each, names)}", each) for each in shown] + more


def _guard(response: flask.Response, service: Service) -> flask.Response:
    """Add the security headers: they forbid browsers all that the service's own pages do not need."""
    ancestors = "'self'" if service.embedded else "'none'"
    headers = response.headers
    headers.setdefault(
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        f"form-action 'self'; base-uri 'none'; frame-ancestors {ancestors}",
    )
    headers.setdefault("X-Content-Type-Options", "nosniff")
    headers.setdefault("Referrer-Policy", "same-origin")
    headers.setdefault("X-Frame-Options", "SAMEORIGIN" if service.embedded else "DENY")
    if flask.request.endpoint != "gpu.static":
        headers.setdefault("Cache-Control", "no-store")
    return response
