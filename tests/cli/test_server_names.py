"""Servers whose names are numbers: in every command a name goes before an id."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from resource_manager import GPUResourceManager
from resource_manager.core.models import Gpu, Node
from tests.cli.targets import Run


@pytest.fixture
def manager() -> Iterator[GPUResourceManager]:
    """Servers 1 and 2, whose ids are 0 and 1."""
    nodes = [Node(str(number + 1), number, {"cpus": 8}, (Gpu(0),)) for number in range(2)]
    with GPUResourceManager.from_url("memory://", inventory=nodes) as manager:
        manager.submit("on_1", 1, server="1")
        yield manager


@pytest.mark.parametrize("name", ["1", "0"])
@pytest.mark.parametrize("command", ["drain", "resume"])
@pytest.mark.parametrize("gpu", [(), ("--gpu", "0")])
def test_the_server_of_that_name_is_closed_and_opened(
    run: Run, name: str, command: str, gpu: tuple[str, ...]
) -> None:
    done = run(command, name, *gpu, "--json")
    assert (done.exit_code, json.loads(done.stdout)["server_name"]) == (0, "1")


def test_the_server_of_that_name_is_shown_and_asked(run: Run) -> None:
    shown = json.loads(run("leases", "--server", "1", "--json").stdout)
    assert [lease["task_id"] for lease in shown] == ["on_1"]
    assert [row["server_name"] for row in json.loads(run("top", "1", "--once", "--json").stdout)] == ["1"]
    for command in ("verify", "adopt"):
        done = run(command, "1")
        assert (done.exit_code, "server 1 has no address" in done.stderr) == (3, True)
