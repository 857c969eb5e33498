"""The service under Airflow's /gpu: agents use our own tokens on one route, others are users of Airflow."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import httpx
import pytest
from fastapi import HTTPException, Request
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.routing import Mount

from resource_manager import GPUResourceManager
from resource_manager.core.refusal import RefusalKind
from resource_manager.errors import StoreRefusedError, StoreUnavailableError
from resource_manager.manager.refusal_wording import Refusal
from resource_manager.manager.state_marks import StateMarks
from resource_manager.rest import tokens
from resource_manager.rest.assemble import mark_file, persistence_of
from resource_manager.rest.auth import Identity
from resource_manager.rest.tokens import Role, TokenFile
from tests.agent.reporting import as_text, gpu, report, server
from tests.eventually import wait_for

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from resource_manager.airflow import webapp


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GPUResourceManager]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with GPUResourceManager.from_url("memory://", inventory=[server("gpu-a")]) as manager:
        yield manager


class Client:
    """Client of an ASGI app without a server."""

    def __init__(self, app: Any) -> None:
        self.app = app

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        async def answer() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://airflow") as client:
                return await client.request(method, path, **more)

        return asyncio.run(answer())


@pytest.fixture
def mounted(manager: GPUResourceManager) -> Iterator[Client]:
    """A client of the app mounted as Airflow mounts it; its chores end before the manager."""
    with closing(webapp.Gate()) as gate:
        yield Client(Starlette(routes=[Mount("/gpu", gate)]))


class Airflow:
    """What an Airflow tells the app within it; its log-in knows nobody until there is a `caller`."""

    def __init__(self, manager: GPUResourceManager) -> None:
        self.caller: Identity | None = None
        self.has_connection = True
        self.open_manager = lambda: manager

    async def identify(self, request: Request) -> Identity:
        if self.caller is None:
            raise HTTPException(401, "Invalid JWT token")
        return self.caller

    def know_ada(self, role: Role = Role.READER) -> None:
        """Know ada, in that role, whoever asks."""
        self.caller = Identity("ada", role)


@pytest.fixture
def airflow(manager: GPUResourceManager) -> Airflow:
    return Airflow(manager)


@pytest.fixture
def client(airflow: Airflow) -> Iterator[Client]:
    """A client of the app in that Airflow."""
    given = lambda: airflow.open_manager(), lambda: "test", lambda: airflow.has_connection
    with closing(webapp.Gate(airflow.identify, *given)) as gate:
        yield Client(Starlette(routes=[Mount("/gpu", gate)]))


def test_it_knows_an_older_dump_by_its_mark_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, airflow: Airflow
) -> None:
    pytest.importorskip("sqlalchemy", "2.0")  # Airflow 3.0 has an older one, without a database of ours
    from tests.storage.dumps import dump_of_sqlite

    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
    database = tmp_path / "state.db"
    url = f"sqlite:///{database}"
    with GPUResourceManager.from_url(url, inventory=[server("gpu-a")]) as manager:
        bring_back = dump_of_sqlite(database)
        manager.drain("gpu-a")
        manager.resume("gpu-a")
        marks = StateMarks(manager, check_every_s=0.0)
        marks.keep_in([mark_file(manager.settings)])
        marks.check()
    bring_back()
    with (
        GPUResourceManager.from_url(url) as manager,
        closing(webapp.Gate(airflow.identify, lambda: manager, lambda: "test", lambda: True)) as gate,
    ):
        gate.bridge()
        refused = manager.allocate("t", 2)
        assert isinstance(refused, Refusal)
        assert refused.kind is RefusalKind.MISCONFIGURED


def token_of(manager: GPUResourceManager, role: Role, server: str = "") -> dict[str, str]:
    text = tokens.create(persistence_of(manager.settings).tokens, "name", role, server=server)
    return {"Authorization": f"Bearer {text}", "Content-Type": "application/json"}


def body(manager: GPUResourceManager) -> bytes:
    return as_text(report(manager.store.now(), gpu(0), gpu(1)))


def test_a_store_that_does_not_answer_is_tried_once_for_all_who_ask(client: Client, airflow: Airflow) -> None:
    """Each try may take the store's timeout, for which the others would wait in turn."""
    tries = []

    def manager_of_tasks() -> NoReturn:
        tries.append(1)
        raise StoreUnavailableError("redis://r does not answer")

    airflow.know_ada()
    airflow.open_manager = manager_of_tasks
    for _ in range(3):
        answer = client.request("GET", "/gpu/api/status")
        assert (answer.status_code, answer.json()["detail"]) == (503, "redis://r does not answer")
    assert len(tries) == 1


def test_a_store_with_a_new_password_is_opened_as_its_connection_is_now(
    client: Client,
    airflow: Airflow,
    manager: GPUResourceManager,
    pause: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It answered 503 until Airflow's API server was started again."""

    def refuse(*_: Any) -> NoReturn:
        raise StoreRefusedError("redis://r: invalid username-password pair")

    def status() -> int:
        return client.request("GET", "/gpu/api/status").status_code

    pause({"airflow.webapp.LOGIN_EVERY_S": 0.05})
    airflow.know_ada()
    assert status() == 200
    headers = token_of(manager, Role.AGENT, "gpu-a")
    reports = {"content": body(manager), "headers": headers}
    assert client.request("POST", "/gpu/api/reports", **reports).status_code == 200
    monkeypatch.setattr(manager.store, "refresh", refuse)
    again = Mock(side_effect=[manager, StoreRefusedError("still"), manager])
    airflow.open_manager = again
    wait_for(lambda: again.call_count > 2, 15.0)
    assert status() == 503
    with GPUResourceManager.from_url("memory://", inventory=[server("gpu-a")]) as another:
        another.submit("there", 1)
        airflow.open_manager = lambda: another
        wait_for(lambda: status() == 200, 15.0)
        leases = client.request("GET", "/gpu/api/leases").json()["items"]
        assert [lease["task_id"] for lease in leases] == ["there"]
        assert client.request("POST", "/gpu/api/reports", **reports).status_code == 200
        assert another.agent_state("gpu-a")["is_silent"] is False


def test_a_connection_that_comes_later_is_shown_instead_of_the_settings(
    client: Client, airflow: Airflow, pause: Any
) -> None:
    """Airflow says that there is none also when its database does not answer."""
    pause({"airflow.webapp.LOGIN_EVERY_S": 0.05})
    airflow.know_ada()
    airflow.has_connection = False
    assert client.request("GET", "/gpu/api/leases").json()["items"] == []
    with GPUResourceManager.from_url("memory://", inventory=[server("gpu-a")]) as another:
        another.submit("there", 1)
        airflow.open_manager, airflow.has_connection = lambda: another, True
        wait_for(lambda: client.request("GET", "/gpu/api/leases").json()["items"] != [], 15.0)


def test_who_waits_gets_what_a_lease_held_that_nobody_renews(
    client: Client, airflow: Airflow, manager: GPUResourceManager, pause: Any
) -> None:
    """A client of the service leaves that to it, and Airflow's triggers may have nothing to wait for."""
    airflow.know_ada(Role.OPERATOR)
    pause({"rest.chores.EXPIRE_EVERY_S": 0.1})
    assert client.request("GET", "/gpu/livez").status_code == 200
    manager.allocate("left", gpus=2, ttl=0.5)
    manager.submit("waits", gpus=2)
    wait_for(lambda: (found := manager.status_of("waits")) is not None and found["state"] == "RUNNING", 15.0)


@pytest.mark.parametrize(("text", "detail"), [(None, "no such file"), ("\n", "there is no secret in it")])
def test_without_the_secret_for_its_notices_the_service_does_not_begin(
    client: Client,
    airflow: Airflow,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    text: str | None,
    detail: str,
) -> None:
    """Else what `serve` refuses would send them without a signature, which their receivers must refuse."""
    path = tmp_path / "secret"
    if text is not None:
        path.write_text(text)
        path.chmod(0o600)
    monkeypatch.setenv("GPU_MANAGER_NOTICE_SECRET", str(path))
    airflow.know_ada()
    answer = client.request("GET", "/gpu/api/status")
    assert (answer.status_code, answer.json()["detail"]) == (503, f"{path}: {detail}")


def test_agents_that_wait_for_the_store_leave_airflow_its_threads(client: Client, airflow: Airflow) -> None:
    asked, answers = threading.Event(), threading.Event()

    def manager_of_tasks() -> NoReturn:
        asked.set()
        answers.wait(60)
        raise StoreUnavailableError("redis://r does not answer")

    airflow.open_manager = manager_of_tasks

    async def main() -> list[int]:
        transport = httpx.ASGITransport(app=client.app)
        headers = {"Authorization": f"Bearer {tokens.PREFIX}_x_y"}
        async with httpx.AsyncClient(transport=transport, base_url="http://airflow") as agents:
            calls = [asyncio.create_task(agents.post("/gpu/api/reports", headers=headers)) for _ in range(50)]
            while not asked.is_set():
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert await asyncio.wait_for(run_in_threadpool(int), 20) == 0, "a page of Airflow's own"
            answers.set()
            return [answer.status_code for answer in await asyncio.gather(*calls)]

    assert set(asyncio.run(main())) == {503}


def test_an_agent_reports_to_airflow(client: Client, manager: GPUResourceManager) -> None:
    headers = token_of(manager, Role.AGENT, "gpu-a")
    answer = client.request("POST", "/gpu/api/reports", content=body(manager), headers=headers)
    assert (answer.status_code, answer.json()["watched"]) == (200, True)
    assert "gpu-manager-silence of agents" in {thread.name for thread in threading.enumerate()}


def test_wrong_tokens_of_agents_do_not_have_all_tokens_read_each_time(
    client: Client, manager: GPUResourceManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They need no log-in of Airflow, and few threads look at them."""
    monkeypatch.setattr("resource_manager.rest.auth.TOKEN_CACHE_S", 3600.0)
    monkeypatch.setattr(TokenFile, "read", read := Mock(return_value={}))
    headers = {"Authorization": f"Bearer {tokens.PREFIX}_x_y"}
    statuses = {client.request("POST", "/gpu/api/reports", headers=headers).status_code for _ in range(9)}
    assert (statuses, read.call_count) == ({401}, 1)


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/gpu/api/status"), ("POST", "/gpu/api/allocate"), ("GET", "/gpu/api/reports/../status")],
)
def test_an_agents_token_opens_nothing_else(
    client: Client, manager: GPUResourceManager, method: str, path: str
) -> None:
    headers = token_of(manager, Role.AGENT, "gpu-a")
    assert client.request(method, path, headers=headers).status_code == 401
    assert manager.history() == []


def test_an_agent_that_runs_jobs_is_told_that_it_needs_a_service(
    client: Client, manager: GPUResourceManager
) -> None:
    """Else jobs are placed with an agent that never gets them; it turns to its next service."""
    headers = token_of(manager, Role.AGENT, "gpu-a")
    place = {"machine": "m", "folder": "/home/ada/jobs", "mark": "1", "user": "ada"}
    with_jobs = as_text({**report(manager.store.now(), gpu(0)), "place": place})
    for method, path, content in (
        ("POST", "reports", with_jobs),
        ("GET", "agent/jobs?server=gpu-a", None),
        ("POST", "agent/logs", "{}"),
    ):
        answer = client.request(method, f"/gpu/api/{path}", headers=headers, content=content)
        assert (answer.status_code, "the --url of a gpu-manager serve" in answer.text) == (503, True)
    assert manager.history() == []


@pytest.mark.parametrize("role", [Role.USER, Role.OPERATOR])
def test_other_tokens_of_ours_are_nothing_to_airflow(
    client: Client, manager: GPUResourceManager, role: Role
) -> None:
    headers = token_of(manager, role)
    assert (
        client.request("POST", "/gpu/api/reports", content=body(manager), headers=headers).status_code == 401
    )
    refused = client.request("GET", "/gpu/api/status", headers=headers)
    assert refused.status_code == 401
    assert "POST /auth/token" in refused.json()["detail"], "it says what a program sends"


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({}, "Not authenticated"),
        ({"Authorization": "Bearer eyJ.of.another"}, "Invalid JWT token"),
        ({"Cookie": "_token=eyJ.of.another"}, "Invalid JWT token"),
    ],
)
def test_airflows_own_refusal_says_what_a_program_sends(
    mounted: Client, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str], words: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Airflow's own, on import
        from airflow.api_fastapi.app import create_auth_manager
    monkeypatch.setattr(webapp, "get_auth_manager", create_auth_manager)
    refused = mounted.request("GET", "/gpu/api/status", headers=headers)
    assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
    assert refused.json()["detail"].startswith(f"{words}: send the header Authorization: Bearer TOKEN")
    browser = mounted.request("GET", "/gpu/", headers={"Accept": "text/html", **headers})
    assert (browser.status_code, "/login?next=" in browser.headers["location"]) == (303, True)


def test_wrong_tokens_and_strangers_are_refused(client: Client, manager: GPUResourceManager) -> None:
    for text in ("gpm_0_0", "eyJ.of.airflow", ""):
        headers = {"Authorization": f"Bearer {text}", "Content-Type": "application/json"}
        answer = client.request("POST", "/gpu/api/reports", content=body(manager), headers=headers)
        assert answer.status_code == 401, text
    assert client.request("POST", "/gpu/api/reports", content=body(manager)).status_code == 401
    assert manager.history() == []


def test_a_request_for_changes_is_held_without_a_thread_of_the_app(
    client: Client, airflow: Airflow, manager: GPUResourceManager
) -> None:
    airflow.know_ada()
    held = webapp.WORKERS + webapp.MAX_STREAMS + 1
    manager.submit("holds", 2)

    async def main() -> list[list[str]]:
        transport = httpx.ASGITransport(app=client.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://airflow", timeout=60) as asks:
            path = "/gpu/api/leases/changes"
            version = (await asks.get(path)).json()["version"]
            query = {"after": version, "timeout_s": 25}
            calls = []
            for _ in range(held):
                calls.append(asyncio.create_task(asks.get(path, params=query)))
                await asyncio.sleep(0.05)  # of one caller only so many are begun at once
            assert (await asks.get("/gpu/api/status")).is_success
            assert not any(call.done() for call in calls)
            await asyncio.to_thread(manager.release, "holds")
            return [answer.json()["ended"] for answer in await asyncio.gather(*calls)]

    assert asyncio.run(main()) == [["holds"]] * held
