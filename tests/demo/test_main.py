"""Errors and output of the demo without a stack; tests/e2e runs the demo itself."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from demo import __main__ as demo
from demo import compose
from demo.stack import AirflowApi, Stack, StackError
from resource_manager import GPUResourceManager
from resource_manager.manager.answer_words import name_in_words


def test_an_unwritable_file_is_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> list[str]:
        (tmp_path / "nonexistent" / "history.jsonl").write_text("")
        return []

    assert demo.exit_code(run) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("demo failed: [Errno 2] No such file or directory")


def test_an_error_while_the_stack_runs_leaves_no_folder(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with pytest.raises(OSError, match="no space is left"), demo.in_folder(home, nullcontext()):
        raise OSError("no space is left")
    assert not home.exists()


def test_a_stack_that_does_not_start_keeps_its_folder_with_the_logs(tmp_path: Path) -> None:
    @contextmanager
    def fails() -> Iterator[None]:
        raise StackError("Redis did not start")
        yield

    with pytest.raises(StackError), demo.in_folder(tmp_path, fails()):
        pass
    assert tmp_path.exists()


def test_one_gpu_can_be_asked_for(tmp_path: Path) -> None:
    """As the form of the DAG submit_training offers; of the built-in servers it takes two at least."""
    inventory = Stack(tmp_path, settings=demo.SETTINGS).environment["GPU_MANAGER_INVENTORY"]
    with GPUResourceManager.from_url("memory://", inventory=inventory) as manager:
        assert manager.gpu_range() == (1, 8)
        servers = manager.get_resource_summary()["servers"]
    assert [(server["total_gpus"], server["total_cpus"]) for server in servers] == 4 * [(8, 64)]


def test_a_stack_without_a_service_has_no_address_of_one(tmp_path: Path) -> None:
    assert Stack(tmp_path).service_url is None
    assert Stack(tmp_path, service_port=5000).service_url == "http://localhost:5000"


def test_up_says_where_dags_go_and_reads_that_folder_every_10_s(tmp_path: Path) -> None:
    stack = Stack(tmp_path, dags=tmp_path / "dags", service_port=5000)
    assert stack.environment["AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL"] == "10"
    (stack.home / "simple_auth_manager_passwords.json.generated").write_text('{"admin": "word"}')
    assert f"DAGs         {tmp_path / 'dags'}, read every 10 s" in demo.places_of(stack)


def test_a_docker_engine_that_hangs_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\nexec sleep 600\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert not demo.docker_answers(0.1)


def test_a_taken_port_is_replaced_by_the_next_free_one(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        wanted = taken.getsockname()[1]
        port = demo.port_near("Airflow", wanted)
        assert wanted < port < wanted + 100
        assert capsys.readouterr().out == f"port {wanted} is taken: Airflow is on {port}\n"
    assert demo.port_near("Airflow", port) == port
    assert capsys.readouterr().out == ""


def test_an_airflow_too_busy_to_answer_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    passwords = tmp_path / "passwords.json"
    passwords.write_text('{"admin": "secret"}')  # pragma: allowlist secret
    with socket.create_server(("127.0.0.1", 0)) as silent:
        api = AirflowApi(f"http://127.0.0.1:{silent.getsockname()[1]}", passwords, 0.1)
        assert demo.exit_code(lambda: [api.run_state("train_digits", "r")]) == 1
        api.close()
    again = "run it again on a less busy machine"
    assert capsys.readouterr().err == f"demo failed: Airflow does not answer: timed out; {again}\n"


def test_lines_of_the_demo_fit_80_columns() -> None:
    manager = GPUResourceManager.from_url("memory://")
    news = demo._Progress()

    def lines() -> list[str]:
        servers = manager.get_resource_summary()["servers"]
        return list(news.lines(servers, manager.leases(), manager.queue()))

    def submit(number: int) -> str:
        labels = {"dag_id": "train_digits", "run_id": "run-1767225600", "task_id": f"train_8gpu_{number}2cpu"}
        return name_in_words(manager.submit(f"train_digits/run/{number}", 8, 8, labels=labels))

    names = [submit(number) for number in range(5)]
    first = lines()
    assert len(first) == 6
    assert first[-1] == "GPUs: 0 free, 32 used, 0 closed of 32"
    assert f"{names[4]} waits" in first
    assert max(map(len, first)) <= 80 - len("123.5 s  ")
    assert lines() == []
    manager.drain(0)
    manager.release_resources("train_digits/run/0")
    assert lines() == [f"{names[0]} ended", "GPUs: 0 free, 24 used, 8 closed of 32"]


def test_compose_without_docker_fails_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result: Any = CliRunner().invoke(compose.main)
    assert result.exit_code == 1
    assert result.output == (
        "compose check failed: the program docker is missing; install Docker with Compose\n"
    )


def test_compose_that_is_told_to_end_leaves_no_container(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, ...]] = []
    airflow = SimpleNamespace(close=lambda: None)
    stack = SimpleNamespace(run=lambda *words, check: calls.append(words), airflow=airflow)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(compose, "Compose", lambda folder, store: stack)
    monkeypatch.setattr(compose, "check", lambda stack: os.kill(os.getpid(), signal.SIGTERM))
    assert CliRunner().invoke(compose.main).exit_code == 143
    assert ["down" in words for words in calls] == [True]
