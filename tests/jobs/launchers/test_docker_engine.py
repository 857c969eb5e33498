"""One client a Docker engine, and its events instead of looks; the engine is a stand-in that counts calls."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from resource_manager.core.models import JobPlace
from resource_manager.jobs.launchers import (
    JobState,
    JobStatus,
    LauncherUnreachableError,
    docker_engine,
)
from resource_manager.jobs.launchers.docker import DockerLauncher
from resource_manager.jobs.launchers.docker_signals import DockerSignals
from tests.e2e.servers import SSHD, SSHServer
from tests.eventually import wait_for

pytest.importorskip("docker")

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Engine(ThreadingHTTPServer):
    """Engine with containers by name and their states; an empty event ends a stream of events."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.about: dict[str, Any] = {"ID": "engine-1", "Name": "gpu-a"}
        self.api_version = "1.43"
        self.containers: dict[str, dict[str, Any]] = {}
        self.calls: Counter[str] = Counter()
        self.events: SimpleQueue[str] = SimpleQueue()

    def run(self, key: str, status: str = "running") -> None:
        state = {"Status": status, "Error": "", "ExitCode": 3, "FinishedAt": "2026-01-01T00:00:00Z"}
        self.containers[key] = {"State": state}

    @property
    def place(self) -> JobPlace:
        return JobPlace("docker", f"tcp://127.0.0.1:{self.server_address[1]}", machine=self.about["ID"])


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Engine

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].split("/")
        what = path[-1]
        self.server.calls[what] += 1
        if what == "version":
            self._say({"ApiVersion": self.server.api_version})
        elif path[1] != f"v{self.server.api_version}":
            self._say({"message": f"client version {path[1][1:]} is too old. Minimum is 1.44"}, 400)
        elif what == "events":
            self._stream()
        elif what == "info":
            self._say(self.server.about)
        elif path[2] in ("containers", "volumes"):
            found = self.server.containers.get(path[3])
            self._say(found or {"message": f"none of the {path[2]}"}, 200 if found else 404)
        else:
            self._say("OK")

    def _say(self, value: Any, code: int = 200) -> None:
        text = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while name := self.server.events.get():
            line = json.dumps({"Actor": {"Attributes": {"name": name}}}).encode() + b"\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.events.put("")
        server.shutdown()
    docker_engine._shared.clear()


def test_all_who_look_at_jobs_share_one_client_and_ask_once_who_the_engine_is(engine: Engine) -> None:
    engine.run("a")
    for _ in range(5):
        with closing(DockerLauncher(engine.place)) as launcher:
            assert launcher.status("a") == JobStatus(JobState.RUNNING)
    assert engine.calls["version"] == engine.calls["info"] == 1
    assert engine.calls["json"] == 5


def test_a_client_is_replaced_when_it_is_old(engine: Engine) -> None:
    first = docker_engine.shared_engine(engine.place.address, None)
    assert docker_engine.shared_engine(engine.place.address, None) is first
    first.opened_at -= docker_engine.MAX_AGE_S
    assert docker_engine.shared_engine(engine.place.address, None) is not first
    pools = first.api.get_adapter(first.api.base_url).poolmanager.pools
    assert len(pools) == 1, "who looks at jobs goes on with the old one"
    del first
    assert len(pools) == 0, "its connections are closed"


def test_another_engine_at_the_address_is_noticed_before_a_job_is_taken_for_gone(engine: Engine) -> None:
    engine.run("a")
    place = engine.place
    with closing(DockerLauncher(place)) as launcher:
        assert launcher.status("a").state is JobState.RUNNING
        engine.containers.clear()
        assert launcher.status("a").state is JobState.ABSENT
        engine.about = {"ID": "engine-2", "Name": "gpu-b"}
        for look in (launcher.status, launcher.logs, launcher.tail, launcher.terminate):
            with pytest.raises(LauncherUnreachableError, match="job a is in the Docker engine engine-1"):
                look("a")
    with closing(DockerLauncher(engine.place)) as launcher:  # of a job that was prepared there since
        assert launcher.status("b").state is JobState.ABSENT


def test_an_engine_that_was_upgraded_is_asked_in_its_new_version(engine: Engine) -> None:
    """Docker 29 refuses what Docker 24 spoke; who watches a job may have asked it for days."""
    engine.run("a", status="exited")
    with closing(DockerLauncher(engine.place)) as watching:
        assert watching.status("a").state is JobState.FINISHED
        engine.api_version = "1.52"
        with pytest.raises(LauncherUnreachableError, match=r"client version 1\.43 is too old"):
            watching.status("a")
        assert watching.status("a").state is JobState.FINISHED
        engine.api_version = "1.43"  # taken back
    assert docker_engine.shared_engine(engine.place.address, None).current_info() == engine.about, (
        "which is asked before a job is started or stopped"
    )


def test_a_lost_connection_by_ssh_is_silence_and_the_next_call_makes_another(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDK lets paramiko's errors through, and keeps a connection that is closed."""
    from paramiko import SSHException

    def lost(_: str) -> None:
        raise SSHException("SSH session not active")

    engine.run("a")
    with closing(DockerLauncher(engine.place)) as launcher:
        client = docker_engine.shared_engine(engine.place.address, None).api
        monkeypatch.setattr(client, "inspect_container", lost)
        with pytest.raises(LauncherUnreachableError, match="does not answer: SSH session not active"):
            launcher.status("a")
        assert launcher.status("a").state is JobState.RUNNING


BRIDGE = """
import os, socket, threading
engine = socket.create_connection(("127.0.0.1", {port}))
def pump(read, write):
    while data := read(65536):
        write(data)
threading.Thread(target=pump, args=(lambda size: os.read(0, size), engine.sendall), daemon=True).start()
pump(engine.recv, lambda data: os.write(1, data))
"""


@pytest.mark.e2e
def test_an_engine_by_ssh_is_reached_again_once_its_sshd_is(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if SSHD is None or os.geteuid() != 0:
        pytest.skip("needs sshd (Debian: openssh-server) and root")
    (tmp_path / "bridge").write_text(BRIDGE.format(port=engine.server_address[1]))
    (tmp_path / "docker").write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path}/bridge\n")
    (tmp_path / "docker").chmod(0o755)
    server = SSHServer(tmp_path, variables={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text(f"Host *\n  IdentityFile {server.key}\n")
    host = f"127.0.0.1:{server.port}"
    host_key = (tmp_path / "host_key.pub").read_text()
    (tmp_path / ".ssh" / "known_hosts").write_text(f"[127.0.0.1]:{server.port} {host_key}")
    monkeypatch.setenv("HOME", str(tmp_path))
    engine.run("a")
    server.start()
    try:
        with closing(DockerLauncher(JobPlace("docker", f"root@{host}", machine="engine-1"))) as launcher:
            assert launcher.status("a").state is JobState.RUNNING
            server.stop()
            with pytest.raises(LauncherUnreachableError, match=rf"ssh://root@{host} does not answer: "):
                launcher.status("a")
            server.start()
            with pytest.raises(LauncherUnreachableError, match="SSH session not active"):
                launcher.status("a")
            assert launcher.status("a").state is JobState.RUNNING
    finally:
        server.stop()


def told(signals: DockerSignals) -> set[str]:
    """Return the jobs that are told of next."""
    return wait_for(lambda: signals.changed(0.2), 10.0)


def test_an_end_is_told_by_an_event_and_one_from_before_the_watch_too(engine: Engine) -> None:
    for key in ("a", "b", "forgotten"):
        engine.run(key)
    engine.run("over", status="exited")
    with closing(DockerSignals(engine.place)) as signals:
        for key in ("a", "b", "forgotten"):
            signals.watch(key)
        signals.forget("forgotten")
        assert signals.changed(0.2) == set()
        for name in ("forgotten", "of somebody else", "a"):
            engine.events.put(name)
        assert told(signals) == {"a"}
        signals.watch("over")
        assert told(signals) == {"over"}


def test_a_stream_of_events_that_ends_is_an_error(engine: Engine) -> None:
    engine.run("a")
    with closing(DockerSignals(engine.place)) as signals:
        signals.watch("a")
        engine.events.put("")
        with pytest.raises(LauncherUnreachableError, match="its events came to an end"):
            told(signals)
