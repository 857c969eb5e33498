"""Errors and output of the demo without a stack; tests/e2e runs the demo itself."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from demo import __main__ as demo
from demo import compose
from demo.stack import AirflowApi, Stack
from resource_manager import GPUResourceManager
from resource_manager.manager.answer_words import name_in_words


def test_an_unwritable_file_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "run", lambda picture, history, store: history.write_text(""))
    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)
    result: Any = CliRunner().invoke(demo.main, ["--history", "/nonexistent/history.jsonl"])
    assert result.exit_code == 1
    assert result.stderr.startswith("demo failed: [Errno 2] No such file or directory")
    assert len(result.stderr.splitlines()) == 1


def test_an_error_while_the_stack_runs_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setattr(demo.tempfile, "mkdtemp", lambda prefix: str(home))
    monkeypatch.setattr(demo, "Stack", lambda home, **options: nullcontext())
    with pytest.raises(OSError, match="no space is left"), demo._stack("redis"):
        raise OSError("no space is left")
    assert not home.exists()


def test_a_stack_that_does_not_start_keeps_its_folder_with_the_logs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(home: Path, **options: Any) -> None:
        raise demo.StackError("Redis did not start")

    monkeypatch.setattr(demo.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    monkeypatch.setattr(demo, "Stack", fail)
    with pytest.raises(demo.StackError), demo._stack("redis"):
        pass
    assert tmp_path.exists()


def test_one_gpu_can_be_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As the form of the DAG submit_training offers; of the built-in servers it takes two at least."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(demo.tempfile, "mkdtemp", lambda prefix: str(tmp_path / "home"))
    monkeypatch.setattr(demo.shutil, "rmtree", lambda home: None)
    monkeypatch.setattr(demo, "Stack", lambda home, **options: nullcontext(given.update(options)))
    with demo._stack("redis"):
        pass
    inventory = given["settings"]["GPU_MANAGER_INVENTORY"]
    with GPUResourceManager.from_url("memory://", inventory=inventory) as manager:
        assert manager.gpu_range() == (1, 8)
        servers = manager.get_resource_summary()["servers"]
    assert [(server["total_gpus"], server["total_cpus"]) for server in servers] == 4 * [(8, 64)]


def test_a_stack_without_a_service_has_no_address_of_one(tmp_path: Path) -> None:
    assert Stack(tmp_path).service_url is None
    assert Stack(tmp_path, service_port=5000).service_url == "http://localhost:5000"


def test_up_says_where_dags_go_and_reads_that_folder_every_10_s(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stack = Stack(tmp_path, dags=tmp_path / "dags", service_port=5000)
    assert stack.environment["AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL"] == "10"
    (stack.home / "simple_auth_manager_passwords.json.generated").write_text('{"admin": "word"}')
    monkeypatch.setattr(demo, "_stack", lambda *_, **__: nullcontext(stack))
    monkeypatch.setattr(demo, "port_near", lambda what, wanted: wanted)
    monkeypatch.setattr(demo, "docker_answers", lambda: True)
    monkeypatch.setattr(demo.time, "sleep", signal.default_int_handler)
    said = CliRunner().invoke(demo.main, ["up"]).stdout
    assert f"DAGs         {tmp_path / 'dags'}, read every 10 s\n" in said


def test_a_docker_engine_that_hangs_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\nexec sleep 600\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(demo, "DOCKER_S", 0.1)
    assert not demo.docker_answers()


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


def test_an_airflow_too_busy_to_answer_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    passwords = tmp_path / "passwords.json"
    passwords.write_text('{"admin": "secret"}')  # pragma: allowlist secret
    with socket.create_server(("127.0.0.1", 0)) as silent:
        api = AirflowApi(f"http://127.0.0.1:{silent.getsockname()[1]}", passwords, 0.1)
        monkeypatch.setattr(demo, "run", lambda *_: [api.run_state("train_digits", "r")])
        done = CliRunner().invoke(demo.main, [])
        api.close()
    again = "run it again on a less busy machine"
    assert (done.exit_code, done.stderr) == (1, f"demo failed: Airflow does not answer: timed out; {again}\n")


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
