"""Hostile commands for `run`, and hostile output and answers of servers for the reader's terminal."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import click
import pytest
from werkzeug.serving import make_server
from werkzeug.wrappers import Response

from resource_manager import GPUResourceManager
from resource_manager.cli import main
from resource_manager.cli.base import Failure
from resource_manager.core.models import JobPlace
from resource_manager.jobs.directories import job_states
from resource_manager.jobs.launchers import (
    LAUNCHERS,
    Job,
    JobState,
    LauncherUnreachableError,
    job_key,
    ssh_standing,
    terminal,
)
from resource_manager.jobs.launchers.local import LocalLauncher
from resource_manager.jobs.launchers.ssh import SSHLauncher
from resource_manager.jobs.launchers.ssh_python import SSHPython
from resource_manager.jobs.launchers.ssh_standing import MAX_ANSWER_BYTES
from resource_manager.jobs.launchers.terminal import SSHProgram
from resource_manager.jobs.reconcile import ActionKind, reconcile
from resource_manager.jobs.task_identity import TaskIdentity
from tests.cli.targets import holding
from tests.eventually import wait_until_ended
from tests.security import hostile
from tests.ssh_account import logged_in

STEERING = "\x1b]0;title\x07\x1b]52;c;cm0gLXJm\x07\x1b[6n\x1b[2J\x1bP$qm\x1b\\\x9b5n\x1b"
"""Title, clipboard, a request for an answer, an empty screen; and an escape that its next chunk goes on."""

SSHD = """# As sshd does: the last argument is for the login shell.
for last; do :; done
exec /bin/sh -c "$last"
"""


def with_ssh(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this shell script be the program ssh."""
    program = folder / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


@pytest.mark.parametrize("here", [True, False], ids=["here", "ssh"])
def test_a_command_reaches_its_server_word_for_word(
    here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is expanded or split on the way, and none of it becomes an option of ssh or python."""
    with_ssh(SSHD, tmp_path, monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GPU_MANAGER_JOBS_DIR", str(tmp_path / "jobs"))
    monkeypatch.chdir(tmp_path)
    words = [*hostile.NAMES, *hostile.UNPRINTABLE, "", " ", "-c", "--", "a'b\"c\\", "'''", '"""', "\udcff"]
    words = [word for word in words if "\0" not in word]
    show = "import json, os, sys; json.dump([sys.argv[1:], os.environ['EVIL']], open('said', 'w'))"
    evil = "$(touch pwned)\n'\"; touch pwned"
    job = Job("gpu-t-00000000-1", (sys.executable, "-c", show, *words), {"EVIL": evil})
    place = LocalLauncher(place=JobPlace("terminal", "-oProxyCommand=touch pwned@h")).prepare(job)
    assert terminal.attend(place, job, here).wait(60) == 0
    assert json.loads((tmp_path / "said").read_text()) == [words, evil]
    assert not (tmp_path / "pwned").exists()


class Terminal(io.StringIO):
    """Standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_output_of_a_job_does_not_steer_the_readers_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_MANAGER_JOBS_DIR", str(tmp_path))
    with redirect_stdout(shown := Terminal()), GPUResourceManager.from_url("memory://") as manager:
        lease = manager.allocate_resources("t", 2, 1)
        assert lease is not None
        launcher = LocalLauncher()
        text = f"\x1b[1;31mloss\x1b[0m\t1\r50 %\x1b[K\n{STEERING}"
        job = Job(job_key("t", lease["fencing_token"]), (sys.executable, "-c", f"print({text!r})"))
        manager.place_job("t", [launcher.prepare(job)], fencing_token=lease["fencing_token"])
        launcher.start(job)
        wait_until_ended(launcher, job.key)
        main(["logs", "t"], standalone_mode=False, obj=holding(manager))
        launcher.stop(job.key)
    colours, steering = shown.getvalue().split("\n")[:2]
    assert colours == "\x1b[1;31mloss\x1b[0m\t1\r50 %\x1b[K"
    assert steering.isprintable()
    assert "]0;title" in steering


def test_an_error_with_a_servers_words_does_not_steer_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    @main.command("fails")
    def fails() -> None:
        raise Failure(f"server s: {STEERING}\nforged", 1, f"see {STEERING}")

    @main.command("misused")
    def misused() -> None:
        raise click.UsageError(f"server s: {STEERING}\nforged")

    try:
        for name in ("fails", "misused"):
            with pytest.raises(SystemExit):
                main([name])
    finally:
        for name in ("fails", "misused"):
            del main.commands[name]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)


def test_what_a_service_says_of_a_report_does_not_steer_the_agents_terminal() -> None:
    service = make_server("127.0.0.1", 0, Response(json.dumps({"detail": STEERING}), 400), threaded=True)
    threading.Thread(target=service.serve_forever, args=(0.01,)).start()
    address = f"http://127.0.0.1:{service.port}"
    command = [sys.executable, "-m", "resource_manager.cli", "agent", "--server", "s", "--url", address]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, encoding="utf-8") as agent:
        assert agent.stderr is not None
        line = agent.stderr.readline()
        agent.terminate()
        assert agent.stderr.read() == ""
    service.shutdown()
    service.server_close()
    assert line.startswith(f"s: {address} refused the report: 400: ")
    assert line.endswith("\n")
    assert line[:-1].isprintable()


class Liar:
    """Server whose account answers what a job has put there."""

    host = "h"

    def __init__(self, answer: str) -> None:
        self.answer = answer

    def run(self, program: str, timeout_s: float, library: str = "") -> tuple[int, str, str]:
        return 0, self.answer, ""


STATUS = {"state": "running", "exit_code": None, "ended_at": None, "checkpoint_at": None, "preempted": False}
LIES: list[Any] = [
    *("", "\n\n", "bye", "[", "[" * 100_000, "[]", "null", "NaN", "9" * 5000, "{}", '{"state": []}'),
    *({**STATUS, "state": "gone"}, {**STATUS, "exit_code": "0"}, {**STATUS, "checkpoint_at": float("nan")}),
    *({"text": 1, "offset": 1}, {"text": None}, {"running": {"a": 1}}),
]


@pytest.mark.parametrize("lie", LIES, ids=range(len(LIES)))
def test_a_job_that_answers_for_its_server_is_a_server_that_cannot_be_asked(lie: Any) -> None:
    launcher = SSHLauncher(JobPlace("ssh", "h"), Liar(lie if isinstance(lie, str) else json.dumps(lie)))
    key = "gpu-t-00000000-1"
    for ask in (launcher.status, launcher.logs, launcher.tail):
        with pytest.raises(LauncherUnreachableError, match=r"^server h answers to .* in an unknown form$"):
            ask(key)
    with pytest.raises(LauncherUnreachableError):
        launcher.preempt(key, 1.0)
    with pytest.raises(LauncherUnreachableError):
        launcher.prepare(Job(key, ("true",)))


def test_an_answer_does_not_lead_a_log_back() -> None:
    with pytest.raises(LauncherUnreachableError):
        SSHLauncher(JobPlace("ssh", "h"), Liar('{"text": "", "offset": -1}')).logs("k")


def test_the_answers_of_a_server_are_taken(tmp_path: Path) -> None:
    statuses: tuple[Any, ...] = (STATUS, job_states.status(str(tmp_path), "absent"))
    for known in statuses:
        status = SSHLauncher(JobPlace("ssh", "h"), Liar("motd\n" + json.dumps(known))).status("k")
        assert status.state == JobState(known["state"])


def pour(channel: Any, command: str) -> None:
    while True:
        channel.sendall(b"y" * 100_000)


def drip(channel: Any, command: str) -> None:
    while True:
        channel.sendall(b"y")
        time.sleep(0.01)


def end_without_a_status(channel: Any, command: str) -> None:
    channel.shutdown_write()


def vanish(channel: Any, command: str) -> None:
    channel.recv(1)
    channel.get_transport().close()


def die_of_a_signal(channel: Any, command: str) -> None:
    channel.recv(1)
    channel.sendall_stderr(b"Segmentation fault")
    channel.close()  # without an exit status, as a server's end of such a program


@pytest.mark.parametrize(
    ("act", "timeout_s", "reason"),
    [
        (pour, 60.0, f"it sends more than {MAX_ANSWER_BYTES:,} bytes"),
        (drip, 0.2, "no answer within 0.2 s"),
        (end_without_a_status, 60.0, "it does not say how the program ended"),
        (vanish, 60.0, "the connection was over before the program"),
    ],
)
def test_a_server_that_never_ends_its_answer_is_given_up(
    act: Any, timeout_s: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_standing, "ANSWER_S", 0.5)
    server = SSHPython("h", lambda: logged_in(act))
    with pytest.raises(LauncherUnreachableError, match=f"^server h does not answer by ssh: {reason}$"):
        server.run("pass", timeout_s)
    server.close()


def test_what_a_signal_ended_says_what_it_said() -> None:
    server = SSHPython("h", lambda: logged_in(die_of_a_signal))
    assert server.run("pass", 60.0) == (-1, "", "Segmentation fault")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exec yes", f"it sends more than {MAX_ANSWER_BYTES:,} bytes"),
        ("exec sleep 60", "no answer within 0.2 s"),
    ],
)
def test_a_program_for_ssh_that_never_ends_its_answer_is_ended(
    script: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_ssh(script, tmp_path, monkeypatch)
    with pytest.raises(LauncherUnreachableError, match=f"^server h does not answer by ssh: {reason}$"):
        SSHProgram("h").run("pass", 0.2 if "sleep" in script else 60.0)


def test_an_answer_that_is_no_text_is_a_server_that_cannot_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_ssh(r"printf '\377\n'", tmp_path, monkeypatch)
    with pytest.raises(LauncherUnreachableError, match="in an unknown form"):
        SSHLauncher(JobPlace("ssh", "h"), SSHProgram("h")).status("gpu-t-00000000-1")


def test_one_lying_server_keeps_no_other_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease on it stays, as its job may run; those behind it are ended."""
    monkeypatch.setenv("GPU_MANAGER_JOBS_DIR", str(tmp_path))
    launchers = {"liar": SSHLauncher(JobPlace("ssh", "h"), Liar("bye")), "": LocalLauncher()}
    monkeypatch.setitem(LAUNCHERS, "ssh", lambda place: launchers[place.conn_id])
    with GPUResourceManager.from_url("memory://") as manager:
        for name, connection in (("on-liar", "liar"), ("after", "")):
            task = TaskIdentity("production", "d", "r", name, -1)
            lease = manager.allocate_resources(task.lease_id, 2, 1, labels=task.labels)
            assert lease is not None
            place = JobPlace("ssh", "h", connection, machine="m", folder=str(tmp_path))
            manager.place_job(task.lease_id, [place], fencing_token=lease["fencing_token"])
        kept, ended = reconcile(manager, NothingRuns(), "production").actions
        assert (kept.action, ended.action) == (ActionKind.KEPT, ActionKind.RELEASED)
        assert "server h answers to stop of job" in kept.detail
        assert [lease["task_id"] for lease in manager.leases()] == [kept.task_id]


class NothingRuns:
    """Airflow in which every task has ended."""

    def unfinished(self, identities: Iterable[TaskIdentity]) -> set[TaskIdentity]:
        return set()

    def run_is_unfinished(self, dag_id: str, run_id: str) -> bool:
        return False
