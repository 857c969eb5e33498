"""`ServiceClient` says what the manager's own methods say, asked of a service."""

from __future__ import annotations

from collections.abc import Iterator

import flask
import httpx
import pytest
from flask.testing import FlaskClient

from resource_manager.client import ServiceClient
from resource_manager.errors import UnknownNodeError


@pytest.fixture
def client(open_client: FlaskClient) -> Iterator[ServiceClient]:
    app: flask.Flask = open_client.application
    client = ServiceClient("http://localhost")
    client._http = httpx.Client(base_url=client.url, transport=httpx.WSGITransport(app))
    yield client
    client.close()


def test_the_server_to_try_first_goes_by_its_number_or_its_name(client: ServiceClient) -> None:
    for task_id, server in (("a", 2), ("b", "gpu-server-3")):
        lease = client.allocate_resources(task_id, 2, 1, server)
        assert lease is not None
        assert lease["server_id"] == int(str(server)[-1])
    assert client.submit("c", 2, 1, "gpu-server-1")["server_id"] == 1
    assert client.explain("d", 2, 1, "gpu-server-2")["server_name"] == "gpu-server-2"
    with pytest.raises(UnknownNodeError, match="'nowhere' is not in the inventory of 4 servers"):
        client.submit("e", 2, 1, "nowhere")


def test_lists_are_read_to_their_end(client: ServiceClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource_manager.client.PAGE", 3)
    for number in range(16):
        client.allocate_resources(f"t{number}", 2, 1)
    for number in range(4):
        client.submit(f"w{number}", 8, 1)
    assert [lease["task_id"] for lease in client.leases()] == [f"t{number}" for number in range(16)]
    assert [entry["task_id"] for entry in client.queue()] == [f"w{number}" for number in range(4)]


def test_what_is_not_there_is_none_or_false(client: ServiceClient) -> None:
    assert client.status_of("t") is None
    assert client.release_resources("t") is False
    assert client.cancel("t") is False
    for number in range(4):
        client.allocate_resources(f"t{number}", 8, 1)
    assert client.allocate_resources("t", 8, 1) is None
    assert client.allocate_batch([{"task_id": "t", "required_gpus": 8, "required_cpus": 1}]) == [None]
