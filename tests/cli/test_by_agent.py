"""`run` on a server where nobody logs in: by a real service and a real agent, which runs the command."""

from __future__ import annotations

import getpass
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from resource_manager import GPUResourceManager
from resource_manager.cli import by_agent
from resource_manager.core.models import JobPlace
from resource_manager.jobs.launchers import Job, job_key, terminal
from resource_manager.manager.agent_jobs import note_opened
from resource_manager.rest import tokens
from resource_manager.rest.auth import TOKEN_CACHE_S
from resource_manager.rest.redis_persistence import RedisTokens
from resource_manager.rest.tokens import Role
from resource_manager.storage.redis.client import RedisClient
from tests.cli.programs import MARK, begun, left_of, piped
from tests.eventually import wait_for
from tests.jobs.launchers.conftest import Board
from tests.redis_server import RedisServer


@pytest.fixture(scope="module")
def environment(
    embedded_redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """Yield the environment of a person who may use the service, and log in nowhere."""
    folder, store = tmp_path_factory.mktemp("by-agent"), embedded_redis.fresh_url()
    server = f'[[servers]]\nname = "gpu-c"\ngpus = 1\ncpus = 8\njob_user = "{getpass.getuser()}"\n'
    (folder / "servers.toml").write_text(server)
    GPUResourceManager.from_url(store, inventory=folder / "servers.toml").close()
    kept = RedisTokens(RedisClient.from_url(store))
    person = tokens.create(kept, "ada", Role.USER, run_jobs=True)
    agent = tokens.create(kept, "agent", Role.AGENT, server="gpu-c")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    own = {**os.environ, MARK: folder.name, terminal.OWN_SERVER: "gpu-z", "HOME": str(folder)}
    own.pop("GPU_MANAGER_STORE", None)
    jobs = {"GPU_MANAGER_JOBS_DIR": str(folder / "jobs"), "GPU_MANAGER_AGENT_TOKEN": agent}
    with ExitStack() as stack:

        def program(environment: dict[str, str], *arguments: str) -> None:
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            process = stack.enter_context(begun(environment, *arguments, **quiet))
            stack.callback(process.terminate)

        program({**own, "GPU_MANAGER_STORE": store}, "serve", "--port", url.rpartition(":")[2])
        program({**own, **jobs}, "agent", "--server", "gpu-c", "--url", url, "--run-jobs", "--every", "2s")
        with GPUResourceManager.from_url(store) as manager:
            wait_for(lambda: manager.agent_state("gpu-c")["place"], 60)
            yield {**own, "GPU_MANAGER_URL": url, "GPU_MANAGER_TOKEN": person, "TEST_STORE": store}


@pytest.fixture
def manager(environment: dict[str, str]) -> Iterator[GPUResourceManager]:
    with GPUResourceManager.from_url(environment["TEST_STORE"]) as manager:
        yield manager
        wait_for(lambda: not manager.leases())


def test_no_process_of_the_agent_gets_its_token(environment: dict[str, str]) -> None:
    """A job may read what any process of its user was started with, but not what the agent was."""
    probes: list[dict[str, str]] = []

    def is_found() -> bool:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                own = process.environ()
                if own.get(MARK) == environment[MARK] and "--loop" in process.cmdline():
                    probes.append(own)
        return bool(probes)

    wait_for(is_found, 60)
    assert "GPU_MANAGER_AGENT_TOKEN" not in probes[0]


def test_a_command_runs_by_the_agent_with_its_output_and_its_exit_code(
    environment: dict[str, str], manager: GPUResourceManager
) -> None:
    script = "echo on GPU $CUDA_VISIBLE_DEVICES; echo to stderr >&2; exit 7"
    done = piped(environment, "run", "--gpus", "1", "--", "sh", "-c", script)
    assert (done.returncode, done.stdout) == (7, "on GPU 0\nto stderr\n"), done.stderr
    assert done.stderr.splitlines()[-1] == (
        "gpu-manager: server gpu-c has no address in the inventory, so no ssh can reach it; its agent runs "
        "the command, which gets no input from here"
    )
    [placed] = [change for change in manager.history() if change["change"] == "jobplaced"]
    assert placed["places"][0]["launcher"] == "agent"
    assert [change["outcome"] for change in manager.history() if change["change"] == "released"] == ["FAILED"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_job_and_frees_its_gpus(
    environment: dict[str, str], manager: GPUResourceManager, number: signal.Signals
) -> None:
    process = begun(environment, "run", "--gpus", "1", "--", "sh", "-c", "echo ready; sleep 600; : in vain")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert manager.leases() == []
    assert not [each for each in left_of(environment) if "in vain" in " ".join(each.cmdline())]


@pytest.mark.parametrize(
    ("here", "code", "line"),
    [
        ("gpu-c", 4, r"\S+ could not be given back: .*token.*; then gpu-manager stop \S+"),
        ("gpu-z", 143, r".*token.*; its agent ends the command 60 s after the last renewal"),
    ],
    ids=["a command here", "by the agent"],
)
def test_a_command_ends_as_it_does_though_its_token_is_revoked(
    environment: dict[str, str], manager: GPUResourceManager, tmp_path: Path, here: str, code: int, line: str
) -> None:
    """By the agent it was waited for without an end; here its exit code was lost."""
    kept = RedisTokens(RedisClient.from_url(environment["TEST_STORE"]))
    eve = tokens.create(kept, "eve", Role.USER, run_jobs=True)
    own = {**environment, "GPU_MANAGER_TOKEN": eve, terminal.OWN_SERVER: here}
    script = f"echo ready; until [ -e {tmp_path}/end ]; do sleep 0.05; done; exit 4"
    process = begun(own, "run", "--gpus", "1", "--", "sh", "-c", script)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    [lease] = manager.leases()
    [token_id] = [key for key, token in kept.read().items() if token.name == "eve"]
    kept.delete(token_id)
    if here == "gpu-c":
        time.sleep(TOKEN_CACHE_S + 0.5)  # for so long the service knows it still
        (tmp_path / "end").touch()
    _, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    assert any(re.fullmatch(f"gpu-manager: {line}", each) for each in said.splitlines()), said
    (tmp_path / "end").touch()
    manager.release(
        lease["task_id"], fencing_token=lease["fencing_token"], job_end="gone", reason="seen by the test"
    )


@pytest.mark.parametrize("is_closed", [False, True], ids=["whose reader ends", "that is closed"])
def test_an_output_that_nobody_reads_ends_with_the_command(
    environment: dict[str, str], manager: GPUResourceManager, tmp_path: Path, is_closed: bool
) -> None:
    """The command waited for ever, and renewed the lease of a job that had ended."""
    until = f"until [ -e {tmp_path}/end ]; do sleep 0.05; done"
    script = f"touch {tmp_path}/begun; echo 1; {until}; echo 2; exit 4"
    words = ("run", "--gpus", "1", "--", "sh", "-c", script)
    with begun(environment, *words, preexec_fn=(lambda: os.close(1)) if is_closed else None) as process:
        assert process.stdout is not None
        if not is_closed:
            assert process.stdout.readline() == "1\n"
        process.stdout.close()
        wait_for(lambda: (tmp_path / "begun").exists(), 60)
        (tmp_path / "end").touch()
        try:
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 4
    assert "Traceback" not in said
    assert ("gpu-manager: standard output: Broken pipe: the rest" in said) is not is_closed


def test_a_shell_needs_a_log_in_and_names_submit(
    environment: dict[str, str], manager: GPUResourceManager
) -> None:
    done = piped(environment, "shell", "--gpus", "1")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        "so no ssh can reach it; its agent runs jobs: gpu-manager submit NAME --server gpu-c …"
    )


def test_code_is_not_copied_where_nobody_logs_in(
    environment: dict[str, str], manager: GPUResourceManager, tmp_path: Path
) -> None:
    done = piped(environment, "run", "--gpus", "1", "--sync", str(tmp_path), "--", "true")
    assert done.returncode == 1
    assert "no ssh can reach it; its agent runs jobs" in done.stderr.splitlines()[-1]


def test_a_command_whose_output_cannot_be_read_has_its_exit_code_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It had ended, and its caller waited for ever, and renewed its lease."""
    monkeypatch.setattr(by_agent, "PATIENCE_S", 0.2)
    monkeypatch.setattr(by_agent, "LOOK_EVERY_S", 0.05)
    board = Board(str(tmp_path))
    note_opened(board)
    launcher = by_agent.AgentTerminal(JobPlace("agent", "here"))
    log = '"${GPU_JOB_LOCK%/lock}"/log'
    job = Job(job_key("t", 7), ("/bin/sh", "-c", f"rm {log}; mkdir {log}; exit 5"))
    launcher.prepare(job)
    launcher.start(job)
    process = by_agent.AgentProcess(launcher, job.key)
    wait_for(lambda: process.poll() is not None)
    board.jobs.close()
    assert process.poll() == 5
    assert "gpu-manager: the rest of the command's output cannot be read: " in capsys.readouterr().err
