"""Gangs through the manager, the service and the command line: one lease, its members, and what is left."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from resource_manager import AsyncGPUResourceManager, GPUResourceManager
from resource_manager.cli import main
from resource_manager.core.models import Gpu, Node
from resource_manager.errors import InvalidRequestError, NeverFitsError
from resource_manager.manager.results import ReleaseResult
from resource_manager.rest.client import ServiceClient
from tests.builders import granted_lease
from tests.cli.targets import holding
from tests.listening import client_of

NODES = [
    Node(
        name,
        number,
        {"cpus": 8},
        tuple(Gpu(i, uuid=f"GPU-{name}{i}") for i in range(4)),
        f"10.0.0.{number}",
        labels={"rack": "x"},
    )
    for number, name in enumerate("abc")
]


@pytest.fixture
def manager() -> Iterator[GPUResourceManager]:
    with GPUResourceManager.from_url("memory://", inventory=NODES) as manager:
        yield manager


@pytest.fixture
def client(manager: GPUResourceManager, tmp_path: Path) -> Iterator[ServiceClient]:
    with client_of(manager, tmp_path) as client:
        yield client


def command(manager: GPUResourceManager, *words: str) -> Any:
    return CliRunner().invoke(main, list(words), obj=holding(manager))


def test_a_lease_names_its_members_in_the_order_of_their_ranks(client: ServiceClient) -> None:
    lease = client.submit("g", 4, cpus=2, nodes=2, same="rack")
    assert lease["state"] == "RUNNING"
    expected = [
        {
            "rank": rank,
            "server_id": rank,
            "server_name": name,
            "gpu_ids": [0, 1, 2, 3],
            "gpu_uuids": [f"GPU-{name}{i}" for i in range(4)],
            "cpu_count": 2,
            "address": f"10.0.0.{rank}",
            "port": 29500 if rank == 0 else 0,
        }
        for rank, name in enumerate("ab")
    ]
    members: list[Mapping[str, Any]] = [*lease["members"]]
    assert [{key: member[key] for key in expected[0]} for member in members] == expected
    assert (lease["server_name"], lease["gpu_devices"], lease["nodes"]) == ("a", "0,1,2,3", 2)
    again = granted_lease(client.submit("g", 4, cpus=2, nodes=2, same="rack"))
    assert again["members"] == lease["members"], "a retry"
    with pytest.raises(InvalidRequestError, match=r"already holds 2 times 4 GPUs"):
        client.submit("g", 4, cpus=2, nodes=3)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"nodes": 0}, "nodes must be greater than or equal to 1, got 0"),
        ({"nodes": 4}, "a gang of 4 needs 4 servers with 1 GPU and 1 CPU: the inventory has 3"),
        (
            {"nodes": 2, "same": "zone"},
            "no server has the label zone, which the servers of the gang must share",
        ),
        ({"nodes": 2, "same": "rack,zone"}, "same must name one label, got 'rack,zone'"),
        ({"nodes": 2, "same": ["rack", "zone"]}, r"same must name one label, got ['rack', 'zone']"),
        ({"nodes": 2, "spread": "thin"}, "spread must be 'servers' or 'pack', got 'thin'"),
        (
            {"nodes": 2, "server": "a"},
            "and the request is for a only: leave the server out, or ask for spread pack",
        ),
    ],
)
def test_bad_input_is_refused_at_once_in_one_line(
    manager: GPUResourceManager, client: ServiceClient, asked: dict[str, Any], said: str
) -> None:
    for each in (manager, client):
        with pytest.raises(InvalidRequestError) as caught:
            each.submit("g", 1, **asked)
        assert said in str(caught.value).replace(": must", " must")
        assert "\n" not in str(caught.value)
    assert manager.queue() == []


def test_servers_without_addresses_and_used_up_ports_are_named() -> None:
    bare = [Node(name, number, {"cpus": 8}, (Gpu(0),)) for number, name in enumerate("ab")]
    with GPUResourceManager.from_url("memory://", inventory=bare) as manager:
        with pytest.raises(NeverFitsError, match="each server of a gang needs an address in the inventory"):
            manager.submit("g", 1, nodes=2)
        assert manager.submit("single", 1)["state"] == "RUNNING"
    few = [
        Node(name, number, {"cpus": 8}, (Gpu(0), Gpu(1)), name, gang_ports=(7000, 7000))
        for number, name in enumerate("ab")
    ]
    with GPUResourceManager.from_url("memory://", inventory=few) as manager:
        manager.submit("g", 1, nodes=2)
        waits = manager.submit("h", 1, nodes=2)
        assert waits["state"] == "WAITING"
        assert "all gang_ports of a (7000 to 7000) are in use" in waits["reason"]


def test_members_end_alone_and_the_rest_is_quarantined_under_its_token(
    manager: GPUResourceManager, client: ServiceClient
) -> None:
    token = manager.submit("g", 4, nodes=3)["fencing_token"]  # type: ignore[typeddict-item]
    assert client.release_members("g", [0, 2], fencing_token=token) is ReleaseResult.RELEASED
    assert client.release_members("g", [0], fencing_token=token) is ReleaseResult.NOT_HELD
    [rest] = client.leases()
    assert (rest["state"], [member["rank"] for member in rest["members"]]) == ("ERROR", [1])
    assert manager.status_of("g") is None
    again = manager.submit("g", 4, nodes=2)
    assert [member["server_name"] for member in again["members"]] == ["a", "c"]  # type: ignore[typeddict-item]
    assert len(client.leases()) == 2
    assert not client.release_resources("h", fencing_token=token)
    assert client.release_resources("g", fencing_token=token)
    assert [lease["fencing_token"] for lease in client.leases()] == [again["fencing_token"]]  # type: ignore[typeddict-item]
    assert [entry["change"] for entry in manager.history()].count("membersreleased") == 2


def test_the_service_refuses_ranks_without_a_token(client: ServiceClient) -> None:
    answer = client._http.client.post("/api/release", json={"task_id": "g", "ranks": [0]})
    assert answer.status_code == 400
    assert "ranks needs fencing_token" in answer.text


def test_the_commands_take_and_show_gangs(manager: GPUResourceManager) -> None:
    done = command(manager, "submit", "g", "--gpus", "4", "--cpus", "2", "--nodes", "2", "--same", "rack")
    assert done.exit_code == 0, done.output
    assert done.output.splitlines() == [
        "g vnpm: 2 members, fencing token 1",
        "  rank 0: GPUs 0,1,2,3 and 2 CPUs of a (10.0.0.0:29500)",
        "  rank 1: GPUs 0,1,2,3 and 2 CPUs of b (10.0.0.1)",
    ]
    shown = command(manager, "leases").output
    assert all(name in shown for name in ("a", "b"))
    waits = command(manager, "submit", "h", "--gpus", "4", "--nodes", "2")
    assert "1 of the 2 servers needed has 4 GPUs and 1 CPU free; the next, a: 0 GPUs free" in waits.output
    assert "2 × 4" in command(manager, "queue").output
    explained = command(manager, "explain", "--gpus", "4", "--nodes", "2")
    assert (explained.exit_code, "1 of the 2 servers" in explained.output) == (1, True)
    assert re.search(r"server ┃ a member of 2 fits ┃", explained.output)
    assert re.findall(r"│ ([abc]) +│ (\w+) ", explained.output) == [
        ("a", "later"),
        ("b", "later"),
        ("c", "yes"),
    ]
    assert "g" in command(manager, "status").output
    bad = command(manager, "release", "g", "--rank", "0")
    assert (bad.exit_code, "--rank needs --fencing-token" in bad.output) == (2, True)
    done = command(manager, "release", "g", "--rank", "0", "--fencing-token", "1", "--json")
    assert json.loads(done.output)["success"]
    assert [lease["members"][0]["rank"] for lease in manager.leases()] == [1, 0], "the rest, and h"


def test_explain_counts_servers_and_names_the_members(manager: GPUResourceManager) -> None:
    found = manager.explain("g", 4, nodes=3)
    assert (found["fits"], [member["server_name"] for member in found["members"]]) == (True, ["a", "b", "c"])
    manager.drain("b", reason="fan")
    found = manager.explain("g", 4, nodes=3)
    assert (found["kind"], found["reason"]) == (
        "maintenance",
        "2 of the 3 servers needed have 4 GPUs and 1 CPU free; b has 4 free but is drained: fan",
    )


def test_the_asyncio_manager_takes_gangs(manager: GPUResourceManager) -> None:
    async def steps() -> ReleaseResult:
        asking = AsyncGPUResourceManager(manager)
        lease = await asking.submit("g", 1, nodes=2)
        return await asking.release_members("g", [1], fencing_token=lease["fencing_token"])  # type: ignore[typeddict-item]

    assert asyncio.run(steps()) is ReleaseResult.RELEASED


def test_a_request_for_one_server_is_stored_without_any_field_of_gangs(manager: GPUResourceManager) -> None:
    manager.submit("t", 1, nodes=1, spread="pack", same="rack", prefer_same="rack")
    text = json.dumps(manager.history()[-1])
    for word in ("nodes", "spread", "same", "ranks", "port"):
        assert word not in text
