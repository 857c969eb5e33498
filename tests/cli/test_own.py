"""Leases and requests of the caller, the history with the caller's rights, and a wait told once a reason."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resource_manager import GPUResourceManager
from resource_manager.cli import waiting
from resource_manager.storage.history_file import collect, to_lines
from tests.cli.targets import Run


def ids(run: Run, *arguments: str) -> list[str]:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.stderr
    return [entry["task_id"] for entry in json.loads(done.stdout)]


def test_mine_are_the_leases_and_requests_of_the_caller(run: Run, manager: GPUResourceManager) -> None:
    manager.submit("theirs", 8, owner="bob", server="gpu-server-1")
    assert run("allocate", "mine", "--gpus", "8", "--server", "gpu-server-0").exit_code == 0
    assert run("hold", "--gpus", "8", "--for", "1h", "--server", "2").exit_code == 0
    held = manager.leases()[-1]["task_id"]
    manager.submit("their-request", 8, owner="bob", server="gpu-server-0")
    assert run("submit", "my-request", "--gpus", "8", "--server", "gpu-server-0").exit_code == 0
    assert ids(run, "leases") == ["theirs", "mine", held]
    assert ids(run, "leases", "--mine") == ["mine", held]
    assert ids(run, "queue", "--mine") == ["my-request"]
    assert len(ids(run, "queue")) == 2


@pytest.mark.usefixtures("without_a_name")
def test_a_user_without_a_name_holds_gpus(run: Run) -> None:
    done = run("hold", "--gpus", "2", "--for", "1h", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["task_id"].startswith(f"hand:{os.getuid()}@")


def test_leases_of_one_server_by_name_or_id(run: Run, manager: GPUResourceManager) -> None:
    for server in (0, 1):
        manager.submit(f"on-{server}", 8, server=server)
    assert ids(run, "leases", "--server", "1") == ids(run, "leases", "--server", "gpu-server-1") == ["on-1"]
    assert ids(run, "leases", "--server", "3", "--mine") == []
    wrong = run("leases", "--server", "gpu-servr-1")
    assert (wrong.exit_code, "did you mean gpu-server-1" in wrong.stderr) == (2, True)


def test_the_history_is_exported_through_the_service_as_from_the_store(
    run: Run, manager: GPUResourceManager, tmp_path: Path
) -> None:
    for number in range(4):
        manager.submit(f"t{number}", 8)
    manager.release("t1")
    file = tmp_path / "history.jsonl"
    done = run("history", "--export", str(file))
    assert done.output == f"{file}: 5 changes\n"
    assert file.read_text().splitlines() == list(to_lines(collect(manager)))
    archive = tmp_path / "archive.jsonl"
    assert run("history", "--archive", str(archive)).output.endswith(": 5 new changes\n")
    manager.release("t2")
    assert run("history", "--archive", str(archive)).output == f"{archive}: 1 new change\n"


def test_a_wait_is_told_once_a_kind_of_reason_and_place(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def entry(kind: str, position: int, reason: str) -> dict[str, Any]:
        waits = {"state": "WAITING", "kind": kind, "position": position, "reason": reason}
        return {"task_id": "t", "name": "t", "short_id": "vnpm", **waits}

    looks: list[Any] = [
        None,  # it is unknown before it asks
        *(entry("awaiting_release", 1, f"waits for a; within {left} s") for left in (9, 8, 7)),
        entry("no_capacity", 1, "none is free"),
        {**entry("no_capacity", 0, ""), "state": "RUNNING"},
    ]
    signals = SimpleNamespace(
        result=lambda asked: asked, pause=lambda _: None, check=lambda: None, first=None
    )
    manager = SimpleNamespace(
        status_of=lambda lease_id: looks.pop(0), wait=lambda lease_id, timeout_s: looks.pop(0)
    )
    session: Any = SimpleNamespace(
        ask=lambda call: call(manager),
        wait_for=lambda call: call(manager),
        begin=lambda call: entry("no_capacity", 2, "1 ahead"),
        signals=signals,
    )
    waiting.wait_for_grant(session, SimpleNamespace(lease_id="t"))
    assert capsys.readouterr().err.splitlines() == [
        "gpu-manager: t vnpm waits at position 2: 1 ahead",
        "gpu-manager: t vnpm waits at position 1: waits for a; within 9 s",
        "gpu-manager: t vnpm waits at position 1: none is free",
    ]
