"""`ServiceClient` has the results and errors of the manager's own methods."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import warnings
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import flask
import httpx
import pytest
from click.testing import CliRunner
from flask.testing import FlaskClient

from resource_manager import GPUResourceManager
from resource_manager.cli import main
from resource_manager.core.models import Request
from resource_manager.errors import InvalidRequestError, ResourceManagerError, UnknownNodeError
from resource_manager.manager.cluster_file.sections import ClusterForm
from resource_manager.manager.demand import Demand
from resource_manager.rest.client import ServiceClient
from resource_manager.rest.client_errors import ServiceError, ServiceUnavailableError
from resource_manager.rest.connection import PAGE, ServiceConnection
from tests.builders import Clock, granted_lease
from tests.cli.targets import holding


@pytest.fixture
def client(open_client: FlaskClient) -> Iterator[ServiceClient]:
    app: flask.Flask = open_client.application
    client = ServiceClient("http://localhost", transport=httpx.WSGITransport(app))
    yield client
    client.close()


def test_a_preferred_server_is_named_by_id_or_name(client: ServiceClient) -> None:
    for task_id, server in (("a", 2), ("b", "gpu-server-3")):
        lease = client.allocate_resources(task_id, 2, 1, server)
        assert lease is not None
        assert lease["server_id"] == int(str(server)[-1])
    assert granted_lease(client.submit("c", 2, 1, "gpu-server-1"))["server_id"] == 1
    assert client.explain("d", 2, 1, "gpu-server-2")["server_name"] == "gpu-server-2"
    with pytest.raises(UnknownNodeError, match="'nowhere' is not in the inventory of 4 servers"):
        client.submit("e", 2, 1, "nowhere")


def test_an_airflow_itself_is_no_gpu_manager_and_the_address_of_its_plugin_is_said() -> None:
    answer = httpx.Response(404, json={"error": "API route not found"})
    client = ServiceClient("http://airflow:8080", transport=httpx.MockTransport(lambda _: answer))
    with pytest.raises(ServiceError, match=r"is not a GPU manager: .* is http://airflow:8080/gpu$"):
        client.summary()
    client.close()


def test_explain_sends_every_option_that_affects_the_answer(
    client: ServiceClient, manager: GPUResourceManager, built_requests: list[tuple[Demand, Request]]
) -> None:
    payload: dict[str, Any] = {
        "resources": {"licences": 2, "memory_mib": 1.5},
        "priority": 7,
        "team": "vision",
    }
    expected = manager.explain("e", 2, 1, **payload)
    built_requests.clear()
    assert client.explain("e", 2, 1, **payload) == expected
    assert "licences" in expected["servers"][0]["reasons"][0]
    assert built_requests[0][0].model_dump().items() >= payload.items()
    assert client.explain("e", 2, 1)["would_be_granted"]
    for wrong in (["memory_mib"], ["memory_mib=-1"], ["a=1", "a=2"], ["cpus=1"], ["a=1e999"]):
        with pytest.raises(InvalidRequestError, match=r"^resources"):
            client._http.get(
                dict, "/api/explain", {"required_gpus": 2, "required_cpus": 1, "resources": wrong}
            )


def test_lists_are_read_to_the_last_page_and_a_queue_that_moves_on_as_a_whole(
    client: ServiceClient, manager: GPUResourceManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager.apply(ClusterForm.model_validate({"servers": [{"name": "a", "gpus": 8, "cpus": 3 * PAGE}]}))
    held, pending = 2 * PAGE + 1, PAGE + 1
    for number in range(held):
        manager.allocate(f"t{number}", gpu_milli=1)
    for number in range(pending):
        manager.submit(f"w{number}", 8, 1)
    assert [lease["task_id"] for lease in client.leases()] == [f"t{number}" for number in range(held)]
    read = manager.queue

    def queue_that_moves_on() -> Any:
        entries = read()
        manager.cancel(entries[0]["task_id"])
        return entries

    monkeypatch.setattr(manager, "queue", queue_that_moves_on)
    assert [entry["task_id"] for entry in client.queue()] == [f"w{number}" for number in range(pending)]


def test_a_change_is_read_behind_a_page_of_others(client: ServiceClient, manager: GPUResourceManager) -> None:
    for _ in range(PAGE // 2 + 1):
        manager.drain(0)
        manager.resume(0)
    manager.submit("t", 2)
    manager.release("t")
    assert [change["change"] for change in client.history(what="release")] == ["released"]


def test_demands_are_announced_and_withdrawn(client: ServiceClient) -> None:
    assert client.announce("d/r/t", 2, after=["d/r/s"], copies=0, labels={"dag_id": "d"})
    [entry] = client.coming()
    assert (entry["task_id"], entry["copies"], entry["at"]) == ("d/r/t", 0, None)
    assert [client.withdraw(["d/r/t"], reason="skipped") for _ in range(2)] == [1, 0]
    assert client.coming() == []


def test_a_missing_lease_or_request_is_none_or_false(client: ServiceClient) -> None:
    assert client.status_of("t") is None
    assert client.release_resources("t") is False
    assert client.cancel("t") is False
    for number in range(4):
        client.allocate_resources(f"t{number}", 8, 1)
    assert client.allocate_resources("t", 8, 1) is None
    assert client.allocate_batch([{"task_id": "t", "required_gpus": 8, "required_cpus": 1}]) == [None]


SMALL = {"required_gpus": 2, "required_cpus": 1}
TIMES = {
    *("granted_at", "expires_at", "queued_at", "at", "waited_s", "estimated_start", "until"),
    *("owner", "by", "drained_by", "closed_by"),
}
"""Keys whose values differ between two calls, or between a named caller and none."""

CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("allocate_resources", ("t", 2, 1, "gpu-server-2"), {}),
    ("allocate_resources", ("t", 2, 1, 99), {}),
    ("allocate_resources", ("t", 2, 1), {"server": 3}),
    ("allocate_resources", ("t", 2, 1, "nowhere"), {}),
    ("allocate_resources", ("t", 2, 1), {"server": "nowhere"}),
    ("allocate_resources", ("t", 2, 1), {"server": 99}),
    ("allocate_resources", ("t", 9, 1), {}),
    ("allocate_resources", ("held", 4, 1), {}),
    ("allocate_resources", ("held", 2, 1), {}),
    ("allocate_resources", ("t", 8, 64), {"priority": 1}),
    ("try_allocate", ("t", 2, 1, "gpu-server-2"), {}),
    ("try_allocate", ("t", 8, 64), {}),
    ("try_allocate", ("waits", 8, 1), {}),
    ("try_allocate", ("t", 2, 1), {"gpu_types": ["H900"]}),
    ("submit", ("t", 2, 1), {"gpu_types": ["H900"]}),
    ("submit", ("held", 4, 1), {}),
    ("submit", ("t", 9, 1), {}),
    ("submit", ("t", 2, 99), {}),
    ("submit", ("t",), {"required_gpus": 9, "required_cpus": 1}),
    ("submit", ("t", 2, 1, "nowhere"), {}),
    ("allocate_batch", ([{"task_id": "t", "gpus": 2, "prefer_server": 3}],), {}),
    ("allocate_batch", ([{"task_id": "t", "gpus": 9}],), {}),
    ("submit", ("waits", 2, 1), {}),
    ("submit", ("t", 8, 64), {}),
    ("allocate_batch", ([],), {}),
    ("allocate_batch", ([{"task_id": "held", **SMALL, "resources": None}],), {}),
    ("allocate_batch", ([{"task_id": "t", **SMALL, "prefer_server_id": "gpu-server-1"}],), {}),
    ("allocate_batch", ([{"task_id": "held", **SMALL, "required_gpus": 3}],), {}),
    ("release_resources", ("held",), {"fencing_token": 1, "outcome": "SUCCESS"}),
    ("release_resources", ("held",), {"fencing_token": 9}),
    ("release_resources", ("waits",), {}),
    ("renew", ("held",), {}),
    ("renew", ("held",), {"fencing_token": 9}),
    ("renew", ("waits",), {}),
    ("preempt", ("full3",), {}),
    ("preempt", ("full3",), {"preemptor": "waits"}),
    ("preempt", ("full3",), {"dry_run": True}),
    ("preempt", ("full3",), {"preemptor": "held"}),
    ("preempt", ("held",), {}),
    ("preempt", ("nobody",), {}),
    ("cancel", ("waits",), {}),
    ("cancel", ("waits",), {"reason": "no longer wanted"}),
    ("cancel", ("held",), {}),
    ("explain", ("t", 2, 1), {"resources": {"licences": 2, "memory_mib": 1.5}, "priority": 7, "team": "x"}),
    ("explain", ("t", 8, 1, "gpu-server-9"), {}),
    ("drain", ("gpu-server-1",), {"reason": "fans", "failed": True}),
    ("drain", (99,), {}),
    ("drain", (-1,), {}),
    ("drain", ("nowhere",), {}),
    ("resume", (1,), {}),
    ("resume", (99,), {}),
    ("searched", (1, ["gpu-t-0a1b2c3d-7"]), {"age_s": 1.5}),
    ("searched", (99, []), {}),
    ("status_of", ("waits",), {}),
    ("status_of", ("nobody",), {}),
    ("get_resource_summary", (), {}),
    ("leases", (), {}),
    ("queue", (), {}),
    ("history", (), {"after": 1, "limit": 2}),
    ("history", (), {"limit": 5000}),
    ("history", (), {"limit": 0}),
    ("reset_resources", (), {}),
]


@pytest.mark.parametrize(("method", "args", "options"), CALLS)
def test_a_call_has_the_same_outcome_as_on_the_manager(
    client: ServiceClient, method: str, args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    with GPUResourceManager.from_url("memory://") as manager:
        assert outcome(client, method, args, options) == outcome(manager, method, args, options)


def outcome(manager: Any, method: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    manager.allocate_resources("held", 2, 1)
    manager.allocate_batch(
        [{"task_id": f"full{i}", "required_gpus": 5, "required_cpus": 32} for i in range(4)]
    )
    manager.submit("waits", 8, 1)
    try:
        answer = getattr(manager, method)(*args, **options)
        return timeless(answer), timeless(manager.history())
    except ResourceManagerError as error:
        return type(error), str(error), vars(error)


def timeless(value: Any) -> Any:
    if isinstance(value, list):
        return [timeless(item) for item in value]
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if key not in TIMES}
    return value


def test_an_option_that_json_cannot_express_is_an_invalid_request(client: ServiceClient) -> None:
    for wrong in ({"ttl": float("inf")}, {"team": "\ud800"}, {"labels": {"a": object()}}):
        with pytest.raises(InvalidRequestError, match="cannot be sent to a service"):
            client.submit("t", 2, 1, **wrong)


def test_a_wrong_path_of_the_service_is_not_reported_as_a_missing_lease(client: ServiceClient) -> None:
    client.allocate_resources("t", 2, 1)
    client._http.client.base_url = "http://localhost/elsewhere"
    for call in (client.status_of, client.release_resources, client.cancel, client.renew):
        with pytest.raises(ServiceError, match=r"there is no (GET|POST) /elsewhere/"):
            call("t")


def refused_first(times: float, headers: dict[str, str]) -> httpx.MockTransport:
    """Return a service that refuses so many calls with 429, as a proxy does, and answers the next one."""
    calls = iter(range(1000))

    def answer(request: httpx.Request) -> httpx.Response:
        if next(calls) < times:
            return httpx.Response(429, headers=headers)
        return httpx.Response(200, json={"items": [], "next": None})

    return httpx.MockTransport(answer)


@pytest.mark.parametrize(
    ("headers", "least_s", "lines"),
    [
        ({"Retry-After": "5"}, 5.0, [r"http://localhost has too many calls; asking again in 5\.\d s"]),
        ({"Retry-After": "0"}, 0.0, []),
        ({}, 0.0, []),
    ],
)
def test_a_call_that_is_one_too_many_is_sent_again_no_sooner_than_the_service_says(
    headers: dict[str, str], least_s: float, lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    with ServiceClient("http://localhost", transport=refused_first(3, headers), clock=clock) as client:
        assert client.leases() == []
    assert len(clock.sleeps) == 3
    assert all(pause_s > least_s for pause_s in clock.sleeps)
    for record, line in zip(caplog.records, lines, strict=True):
        assert re.fullmatch(line, record.getMessage())


def test_a_service_that_refuses_all_calls_is_told_from_another_program() -> None:
    clock, transport = Clock(), refused_first(float("inf"), {"Retry-After": "5"})
    with (
        ServiceClient("http://localhost", transport=transport, clock=clock) as client,
        pytest.raises(ServiceUnavailableError, match=r"refused GET /api/\w+; ask again later$"),
    ):
        client.leases()
    assert 20 < sum(clock.sleeps) < 40


def test_a_command_says_on_stderr_why_its_answer_takes_longer() -> None:
    service = refused_first(1, {"Retry-After": "5"})
    client = ServiceClient("http://localhost", transport=service, clock=Clock())
    done = CliRunner().invoke(main, ["queue", "--json"], obj=holding(client))
    assert done.exit_code == 0
    assert re.fullmatch(r"http://localhost has too many calls; asking again in 5\.\d s\n", done.stderr)


class _Port(BaseHTTPRequestHandler):
    """Tell callers from which port of theirs they asked: another one is another connection."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = json.dumps({"port": self.client_address[1]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_a_forked_child_has_a_connection_of_its_own() -> None:
    """On that of its parent each could read the other's answer: a renewal of another lease, for one."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Port)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        connection = ServiceConnection(f"http://127.0.0.1:{server.server_port}", None, 30.0, 0.0)
        mine = connection.get(dict, "/")
        assert connection.get(dict, "/") == mine
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python itself, since 3.12
            child = os.fork()
        if child == 0:
            signal.alarm(20)
            os._exit(connection.get(dict, "/") == mine)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert connection.get(dict, "/") == mine
        connection.close()
    finally:
        server.shutdown()
        server.server_close()
        serving.join()
