"""REST service inside Airflow's API server, under /gpu; Airflow authenticates the users of every route."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import flask
from a2wsgi import WSGIMiddleware
from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import AccessView, DagAccessEntity
from airflow.configuration import conf
from fastapi import HTTPException, Request
from fastapi.security import HTTPBearer
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, RedirectResponse, Response

from resource_manager.airflow.hook import GPUManagerHook
from resource_manager.airflow.version_compat import AirflowException, in_thread, user_of
from resource_manager.errors import ResourceManagerError, is_login_refused
from resource_manager.jobs.airflow_api import AirflowTaskStates
from resource_manager.jobs.airflow_instance import publish_instance
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.rest.api.agents import RUNS_NO_JOBS
from resource_manager.rest.app import create_app
from resource_manager.rest.assemble import build, mark_file, persistence_of
from resource_manager.rest.auth import Identity, TokenAuthenticator
from resource_manager.rest.chores import begin_chores
from resource_manager.rest.events import CLIENT_GONE
from resource_manager.rest.held_requests import PARK, Parked
from resource_manager.rest.private_file import secret_in
from resource_manager.rest.problems import TITLES, ProblemError
from resource_manager.rest.sessions import MemorySessions
from resource_manager.rest.tokens import PREFIX, Role

NAME = "GPU resource manager"

THREADS = 4
WORKERS = 16
MAX_STREAMS = 24
OUTAGE_S = 5.0
"""Time after a failure in which no call tries to reach the store again: others wait for each try."""

LOGIN_EVERY_S = 10.0
"""Time between two looks at whether the store refuses the login, as after a change of its password."""

IDENTITY_KEY = "gpu_manager.identity"


REPORTS = "/api/reports"
"""The one route that takes our own agent tokens, as agents are no users of Airflow."""

JOBS = "/api/agent/"
"""Where an agent asks for the jobs that it should run, which only a service of its own answers."""


class AirflowAuthenticator:
    """Return the identity that `Gate` stored in the ASGI scope."""

    login = False

    def identify(self, request: flask.Request, *, fresh: bool = True) -> Identity | None:
        identity: Identity | None = request.environ["asgi.scope"].get(IDENTITY_KEY)
        return identity


def role_of(user: Any) -> Role | None:
    """Return the role of an Airflow user, None if they may not see Airflow.

    The right to edit pools gives operator, to trigger DAG runs user, to view Airflow reader.
    `is_authorized_custom_view` alone is not enough: the default auth manager grants it to every viewer,
    for any method.
    """
    manager = get_auth_manager()
    if manager.is_authorized_pool(method="PUT", user=user):
        return Role.OPERATOR
    if manager.is_authorized_dag(method="POST", access_entity=DagAccessEntity.RUN, user=user):
        return Role.USER
    if manager.is_authorized_custom_view(method="GET", resource_name=NAME, user=user):
        return Role.READER
    return Role.READER if manager.is_authorized_view(access_view=AccessView.WEBSITE, user=user) else None


def manager_of_tasks() -> GPUResourceManager:
    """Return the manager that tasks use: of the default connection, else of the settings."""
    return GPUManagerHook().on_store()


async def user_identity(request: Request) -> Identity:
    """Return the caller with their role; raise `HTTPException` for an unknown one or one without a role."""
    bearer = await HTTPBearer(auto_error=False)(request)
    user = await user_of(request, bearer)
    role = await run_in_threadpool(role_of, user)
    if role is None:
        raise HTTPException(403, f"{user.get_name()} may not see the GPUs")
    return Identity(str(user.get_name()), role, ambient=bearer is None)


class Gate:
    """ASGI app that authenticates the caller, then calls the Flask app, which is created at first use.

    It waits for the store in threads of its own: those of Airflow's API server are few and serve all pages.
    `identify` returns the caller of a request, `open_manager` the manager, `instance_of` the Airflow's id,
    `has_connection` whether the manager is that of a connection: that of the settings is replaced by one.
    """

    def __init__(
        self,
        identify: Callable[[Request], Awaitable[Identity]] = user_identity,
        open_manager: Callable[[], GPUResourceManager] = manager_of_tasks,
        instance_of: Callable[[], str] = publish_instance,
        has_connection: Callable[[], bool] = lambda: GPUManagerHook().is_defined(),
    ) -> None:
        self._identity_of = identify
        self._open_manager = open_manager
        self._instance_of = instance_of
        self._has_connection = has_connection
        self._threads = ThreadPoolExecutor(THREADS, "gpu-gate")
        self._lock = threading.Lock()
        self._bridge: Any = None
        self._problem = ""
        self._again_at = 0.0
        self._tokens: TokenAuthenticator | None = None
        self._ends = ExitStack()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000})
            return
        request = Request(scope, receive)
        try:
            identity = await self._identify(request)
            bridge = self._bridge or await in_thread(self.bridge, executor=self._threads)
        except HTTPException as error:
            await _refuse(request, error)(scope, receive, send)
            return
        except ProblemError as error:
            await _problem(error.status, error.detail)(scope, receive, send)
            return
        except (ResourceManagerError, AirflowException) as error:
            await _problem(503, str(error))(scope, receive, send)
            return
        scope[IDENTITY_KEY] = identity
        if not scope["path"].endswith(("/events", "/changes")):
            await bridge(scope, receive, send)
            return
        gone = threading.Event()
        scope[CLIENT_GONE] = gone.is_set
        listener = asyncio.create_task(_listen(receive, gone))
        try:
            await _bridge_or_hold(bridge, scope, send, gone)
        finally:
            gone.set()
            listener.cancel()

    async def _identify(self, request: Request) -> Identity | None:
        """Return the caller: an agent by our own token on its one route, else a user of Airflow.

        None is an agent with a wrong token, whom the app refuses and counts.
        """
        scheme, _, text = request.headers.get("authorization", "").partition(" ")
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        is_ours = scheme.lower() == "bearer" and text.startswith(f"{PREFIX}_")
        if is_ours and path.startswith(JOBS):
            raise ProblemError(503, RUNS_NO_JOBS)
        if path != REPORTS or not is_ours:
            return await self._identity_of(request)
        return await in_thread(self._agent_of, text.strip(), executor=self._threads)

    def _agent_of(self, text: str) -> Identity | None:
        with self._lock:
            if self._tokens is None:
                store = persistence_of(self._open_manager().settings).tokens
                self._tokens = TokenAuthenticator(store, MemorySessions())
        return self._tokens.agent_of(text)

    def bridge(self) -> Any:
        """Return the Flask app behind a WSGI bridge; raise if the store cannot be reached."""
        with self._lock:
            if self._bridge is None:
                if time.monotonic() < self._again_at:
                    raise ResourceManagerError(self._problem)
                try:
                    is_connected = self._has_connection()  # before: it may come meanwhile
                    self._bridge = self._make_bridge(self._open_manager(), is_connected)
                except (ResourceManagerError, AirflowException) as error:
                    self._problem, self._again_at = str(error), time.monotonic() + OUTAGE_S
                    raise
            return self._bridge

    def _make_bridge(self, manager: GPUResourceManager, is_connected: bool) -> Any:
        instance = self._instance_of()  # published again, in case it failed at the start
        secret = hashlib.sha256(f"{NAME}:{conf.get('api', 'secret_key')}".encode()).hexdigest()
        path = os.environ.get("GPU_MANAGER_NOTICE_SECRET")
        notice_key = secret_in(Path(path) if path else None)
        service = build(
            manager,
            AirflowAuthenticator(),
            secret,
            airflow_url=urlsplit(conf.get("api", "base_url", fallback="") or "").path,
            instance=instance,
            airflow_api=_api_of_caller,
            embedded=True,
            max_streams=MAX_STREAMS,
        )
        service.receiver.marks.keep_in([mark_file(manager.settings)])
        closed = threading.Event()

        def log_in_again() -> None:
            """Go on with the connection as it is now, once its login is refused, or it is there at all."""
            try:
                if is_connected or not self._has_connection():
                    service.watch.check()
                    return
            except ResourceManagerError as error:
                if not is_login_refused(error):
                    return
            if closed.is_set():
                return
            manager = self._open_manager()
            manager.servers()  # raises while this login is refused, too
            bridge = self._make_bridge(manager, is_connected=True)
            with self._lock:
                self._bridge, self._tokens = bridge, None
            closed.set()
            service.watch.close()

        login = ("login", LOGIN_EVERY_S, log_in_again)
        for chore in begin_chores(service, notice_key, closed, [login]):
            self._ends.callback(chore.join)
        self._ends.callback(service.watch.close)
        self._ends.callback(closed.set)
        app: Any = create_app(service)
        return WSGIMiddleware(app, workers=WORKERS + MAX_STREAMS)

    def close(self) -> None:
        """End the service's threads."""
        self._threads.shutdown()
        self._ends.close()


def _api_of_caller() -> AirflowTaskStates:
    """Return Airflow's API, here or at its public address, with the rights of who called."""
    scope = flask.request.environ["asgi.scope"]
    _, _, token = flask.request.headers.get("Authorization", "").partition(" ")
    url = conf.get("api", "base_url", fallback="") or ""
    if not url.startswith("http"):
        host, port = scope["server"]
        url = f"{scope['scheme']}://{f'[{host}]' if ':' in host else host}:{port}{url}"
    return AirflowTaskStates(url, token=token.strip() or flask.request.cookies.get("_token", ""))


def _refuse(request: Request, error: HTTPException) -> Response:
    """Redirect a browser to the log-in page; answer a program with a problem document."""
    if (
        error.status_code == 401
        and request.method == "GET"
        and "text/html" in request.headers.get("accept", "")
    ):
        url = get_auth_manager().get_url_login()
        return RedirectResponse(f"{url}?next={quote(str(request.url), safe='')}", 303)
    detail = str(error.detail)
    if error.status_code == 401:
        detail += (
            ": send the header Authorization: Bearer TOKEN, with Airflow's token of a user (POST /auth/token "
            "with username and password gives one); a browser logs in to Airflow first"
        )
    return _problem(error.status_code, detail)


def _problem(status: int, detail: str) -> Response:
    title = TITLES.get(status, "Error")
    body = {"type": "about:blank", "title": title, "status": status, "detail": detail, "error": detail}
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {"Cache-Control": "no-store"}
    return JSONResponse(body, status, headers, media_type="application/problem+json")


async def _bridge_or_hold(bridge: Any, scope: Any, send: Any, gone: threading.Event) -> None:
    """Have the request answered, again when it is resumed if the app parks it: it has no thread till then."""
    loop, resumed = asyncio.get_running_loop(), asyncio.Event()
    is_parked = False

    def resume(is_due: bool) -> None:
        loop.call_soon_threadsafe(resumed.set)

    def park() -> Parked:
        nonlocal is_parked
        is_parked = True
        return Parked(resume, gone.is_set)

    async def send_unless_parked(message: Any) -> None:
        if not is_parked:
            await send(message)

    await bridge({**scope, PARK: park}, _nothing, send_unless_parked)
    if is_parked:
        await resumed.wait()
        await bridge(scope, _nothing, send)


async def _listen(receive: Any, gone: threading.Event) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    gone.set()


async def _nothing() -> Any:
    return {"type": "http.request", "body": b"", "more_body": False}
