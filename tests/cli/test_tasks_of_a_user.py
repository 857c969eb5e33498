"""What a user comes for: each task is one command of the docs, and its answer is on the screen."""

from __future__ import annotations

import re
import shlex
import time
from typing import Any

import pytest

from resource_manager import GPUResourceManager
from resource_manager.core.models import Gpu, Node
from resource_manager.storage.memory import MemoryStore
from tests.builders import Clock
from tests.cli.targets import Run
from tests.test_architecture import ROOT

HOUR_S = 3600
SERVERS = [Node(f"gpu-{name}", i, {"cpus": 64}, tuple(map(Gpu, range(8)))) for i, name in enumerate("abc")]

ON_SCREEN = {
    "which GPU is free": ["gpu-a", "███████·", "1/8"],
    "who holds GPU 3 of gpu-b, since when": ["d.train", "0–3", "kim", "vision", "1.0 h"],
    "why my job waits, until when": [
        "no server with 8 GPUs: largest free is 4 on gpu-b",
        "Should start: in ",
        ", few data), when d.train",
    ],
    "stop a task's job": [
        "d.train",
        "released",
        "Airflow may try its task again: stop --end-task ends that, too",
    ],
    "which team wasted most in the last week": ["nlp wasted most: 8.0 of 22.0 GPU-hours (8.0 failed)"],
    "take one GPU for an hour": ["GPU 7 and 1 CPU of gpu-"],
    "close one GPU": ["gpu-a: GPU 7 drained"],
    "open it again": ["gpu-a: GPU 7 takes leases again"],
}
"""Words of the answer to each task."""


def table() -> list[tuple[str, str]]:
    """Return the tasks of the page and their commands."""
    text = (ROOT / "docs/command-line.md").read_text()
    return re.findall(r"^\| ([^|]+) \| `gpu-manager ([^`]+)` \|$", text, re.MULTILINE)


@pytest.fixture
def manager() -> GPUResourceManager:
    """Manager of three servers whose last two hours were those of the tasks."""
    clock = Clock()
    clock.now = time.time() - 2 * HOUR_S
    manager = GPUResourceManager(store=MemoryStore(clock=clock), inventory=SERVERS)
    manager.submit("failing", 8, team="nlp")
    clock.now += HOUR_S
    manager.release("failing", outcome="FAILED", reason="exit code 3")
    task = {"instance": "here", "dag_id": "d", "run_id": "r", "task_id": "train", "map_index": "-1"}
    of_kim: dict[str, Any] = {"owner": "kim", "team": "vision", "expected_runtime": 2 * HOUR_S}
    manager.submit("train", 4, server="gpu-b", labels=task, **of_kim)
    for server in ("gpu-a", "gpu-c"):
        manager.submit(f"on-{server}", 7, server=server, team="nlp")
    manager.submit("eval", 8, team="vision", labels={**task, "task_id": "eval"})
    clock.now += HOUR_S
    return manager


def test_the_page_has_every_task() -> None:
    assert [task for task, _ in table()] == list(ON_SCREEN)


@pytest.mark.parametrize(("task", "command"), table())
def test_a_task_is_one_command(task: str, command: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    screen = run(*shlex.split(command)).output
    for words in ON_SCREEN[task]:
        assert words in screen
