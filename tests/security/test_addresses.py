"""Addresses: a caller with the role user cannot make the service or the reconciler connect to any."""

from __future__ import annotations

import http.server
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from flask.testing import FlaskClient

from resource_manager import GPUResourceManager, ResourceManagerError
from resource_manager.core.models import JobPlace, Request
from resource_manager.jobs.launchers import LauncherError, open_at
from resource_manager.jobs.task_identity import TaskIdentity
from resource_manager.rest.client import ServiceClient
from resource_manager.rest.console.cells import task_link
from resource_manager.rest.tokens import Role

AsRole = Callable[..., FlaskClient]


@pytest.fixture
def no_connections(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return the addresses this test tries to reach; threads that earlier tests left are none of its own."""
    tried: list[object] = []
    earlier = set(threading.enumerate()) - {threading.current_thread()}

    def refuse(sock: socket.socket, address: object) -> None:
        if threading.current_thread() not in earlier:
            tried.append(address)
        raise OSError("no connection in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    return tried


def test_no_request_makes_the_service_connect_anywhere(no_connections: list[object], as_role: AsRole) -> None:
    evil = "http://169.254.169.254/latest"
    user = as_role(Role.USER, "ada")
    payload = {
        "task_id": evil,
        "required_gpus": 2,
        "required_cpus": 1,
        "team": evil,
        "labels": {"launcher": "ssh", "address": evil, "host": evil, "launcher_conn_id": evil, "url": evil},
    }
    assert user.post("/api/submit", json=payload).status_code == 200
    assert user.post("/api/submit", json={**payload, "address": evil}).status_code == 400
    assert user.post("/api/allocate", json={**payload, "server": evil}).status_code == 400
    for path in ("/", "/leases", "/queue", "/api/leases", f"/api/task?task_id={evil}", "/metrics"):
        user.get(path, headers={"X-Forwarded-Host": "evil.example", "Referer": evil}).close()
    assert user.post("/api/release", json={"task_id": evil}).status_code == 200
    assert no_connections == []


@pytest.mark.parametrize("launcher", ["ssh", "docker"])
def test_a_label_cannot_use_the_credentials_of_another_system(
    launcher: str, monkeypatch: pytest.MonkeyPatch, no_connections: list[object]
) -> None:
    """Labels of the lease name the connection, so its type is checked before it is used."""
    monkeypatch.setenv(
        "AIRFLOW_CONN_BILLING",
        # pragma: allowlist nextline secret
        '{"conn_type": "http", "host": "bank", "login": "u", "password": "hunter2"}',
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(LauncherError, match=f"'billing' is of type http, not {launcher}") as caught:
            open_at(JobPlace(launcher, "server.example", "billing"))
    assert "hunter2" not in str(caught.value)
    assert no_connections == []


@pytest.mark.parametrize("launcher", ["ssh", "docker"])
def test_a_label_can_only_name_allowed_connections(
    launcher: str, monkeypatch: pytest.MonkeyPatch, no_connections: list[object]
) -> None:
    monkeypatch.setenv("GPU_MANAGER_LAUNCHER_CONNECTIONS", "gpu_servers, registry")
    monkeypatch.setenv("AIRFLOW_CONN_BASTION", f'{{"conn_type": "{launcher}", "host": "bastion"}}')
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(LauncherError, match="'bastion' is not in GPU_MANAGER_LAUNCHER_CONNECTIONS"):
            open_at(JobPlace(launcher, "server.example", "bastion"))
        monkeypatch.setenv("GPU_MANAGER_LAUNCHER_CONNECTIONS", "gpu_servers, bastion")
        monkeypatch.setenv("AIRFLOW_CONN_BASTION", '{"conn_type": "http", "host": "bastion"}')
        with pytest.raises(
            LauncherError, match="is of type http"
        ):  # an allowed connection needs the right type too
            open_at(JobPlace(launcher, "server.example", "bastion"))
    assert no_connections == []


@pytest.mark.parametrize("name", ["../local", "LOCAL", "os.system", "", "local\n"])
def test_a_label_can_only_name_known_launchers(name: str) -> None:
    with pytest.raises(LauncherError, match="unknown launcher"):
        open_at(JobPlace(name))


class Redirecting(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(307)
        self.send_header("Location", "http://127.0.0.1:1/steal")
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def redirecting() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), Redirecting) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_client_sends_its_token_to_no_other_address(redirecting: str) -> None:
    client = ServiceClient(redirecting, "gpm_1_secret")
    with pytest.raises(ResourceManagerError, match="is not a GPU manager: POST /api/allocate gave 307") as e:
        client.allocate_resources("t", 2, 1)
    assert "secret" not in str(e.value)
    client.close()


@pytest.mark.parametrize("url", ["file:///etc/passwd", "gopher://x", "http:///x", "http://[::1", "x"])
def test_only_http_urls_are_accepted_as_a_service(url: str) -> None:
    def call() -> None:
        client = ServiceClient(url)
        try:
            client.get_resource_summary()
        finally:
            client.close()

    with pytest.raises(ResourceManagerError) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://x", "file:///etc/passwd", "redis+sentinel://", "python://x", "x://"])
def test_only_known_kinds_of_store_are_opened(url: str) -> None:
    with pytest.raises(ResourceManagerError):
        GPUResourceManager.from_url(url).get_resource_summary()


CLIMBING = [
    {"dag_id": "..", "run_id": "..", "task_id": "x"},
    {"dag_id": "d", "run_id": "..", "task_id": ".."},
    {"dag_id": "d", "run_id": ".", "task_id": "t"},
    {"dag_id": "d/../../../auth", "run_id": "r", "task_id": "t"},
    {"dag_id": "d", "run_id": "r", "task_id": "../../../logout?x="},
    {"dag_id": "d", "run_id": "r", "task_id": "t", "map_index": "/../../../../../auth/logout"},
    {"dag_id": "d", "run_id": "r", "task_id": "t", "map_index": "1/../../../x"},
    {"dag_id": "d", "run_id": "r", "task_id": "t", "map_index": ".."},
    {"dag_id": "d", "run_id": "r", "task_id": "t", "map_index": "\uff11"},
]


@pytest.mark.parametrize("labels", CLIMBING, ids=str)
def test_labels_lead_to_no_other_page_of_airflow(labels: dict[str, str]) -> None:
    """Neither a person, by the link in the console, nor the reconciler, with its Airflow user."""
    service: Any = SimpleNamespace(airflow_url="https://airflow.example/base", instance=None)
    assert task_link(Request("t", labels=labels), service) is None
    whole = {"map_index": "-1", **labels, "instance": "production"}
    assert TaskIdentity.from_labels(whole) is None


def test_a_run_with_a_slash_stays_one_part_of_the_link() -> None:
    service: Any = SimpleNamespace(airflow_url="https://airflow.example", instance=None)
    labels = {"dag_id": "d\u00e9j\u00e0", "run_id": "a/../b%2e", "task_id": "g.t", "map_index": "12"}
    link = task_link(Request("t", labels=labels), service)
    assert link == "https://airflow.example/dags/d%C3%A9j%C3%A0/runs/a%2F..%2Fb%252e/tasks/g.t/mapped/12"


@pytest.mark.parametrize("scheme", ["javascript", "https"])
def test_a_link_to_the_next_page_goes_nowhere_else(scheme: str, as_role: AsRole) -> None:
    reader = as_role(Role.READER)
    for path in ("/leases", "/queue", "/"):
        for query in (f"_scheme={scheme}&_external=1", "_anchor=x", "_method=POST"):
            assert reader.get(f"{path}?{query}").status_code == 400
