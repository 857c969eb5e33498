"""Jobs of agents behind a firewall: each server is a network namespace that takes no connection.

What `docs/agent-jobs.md` says is done as it stands there: a certificate that is its own authority in front of
the service, tokens, an agent of an ordinary user, and jobs that are submitted.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.stack import REPOSITORY, answers, free_ports
from resource_manager import GPUResourceManager
from tests.e2e.bench import wait_for
from tests.faults.namespaces import Namespace, what_is_missing

MISSING = what_is_missing() or (
    "" if shutil.which("nginx") and shutil.which("openssl") else "needs nginx, openssl"
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]

NAME = "gpu-manager.example"
PROGRAM = (sys.executable, "-m", "resource_manager.cli")
PAGE = (REPOSITORY / "docs" / "agent-jobs.md").read_text()
ORDINARY = 65534
PREFIX = str(Path(sys.base_prefix).resolve())
FOR_ALL = """
set -e
case $0 in /root/*) ;; *) exec "$@" ;; esac
mount --bind "$0" /mnt
mount -t tmpfs -o mode=755 root /root
mkdir -p "$0"
mount --move /mnt "$0" 2>/dev/null || mount --bind /mnt "$0"
exec "$@"
"""
"""What lets an ordinary user of a namespace run a Python that is in the home of root."""


def block(begin: str) -> str:
    """Return the line of a command of the page that begins so."""
    [found] = re.findall(rf"^ *({re.escape(begin)}.*)$", PAGE, re.M)
    return str(found)


class Firewalled:
    """Server `gpu-a`: a namespace that drops what is sent to it unasked, and an agent in it."""

    def __init__(self, folder: Path, certificate: Path) -> None:
        self.zone = Namespace()
        self.home = folder / "home"
        self.home.mkdir()
        os.chown(self.home, ORDINARY, ORDINARY)
        self.certificate = certificate
        self.token = ""
        self.url = ""
        self.agent: subprocess.Popen[bytes] | None = None
        self._log = folder / "agent.log"
        (Path("/etc/netns") / self.zone.name).mkdir(parents=True)
        (Path("/etc/netns") / self.zone.name / "hosts").write_text(
            f"{self.zone.address} {NAME}\n127.0.0.1 localhost\n"
        )
        for rule in (
            ("-A", "INPUT", "-m", "conntrack", "--ctstate", "ESTABLISHED", "-j", "ACCEPT"),
            ("-P", "INPUT", "DROP"),
        ):
            subprocess.run(["ip", "netns", "exec", self.zone.name, "iptables", *rule], check=True)

    def start(self) -> None:
        said = block("gpu-manager agent --server gpu-a").split()[1:]
        words = [self.url if word.startswith("https:") else word for word in said]
        account = ["setpriv", f"--reuid={ORDINARY}", f"--regid={ORDINARY}", "--clear-groups"]
        variables = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(self.home),
            "SSL_CERT_FILE": str(self.certificate),
            "GPU_MANAGER_AGENT_TOKEN": self.token,
        }
        program = ["sh", "-c", FOR_ALL, PREFIX, *account, *PROGRAM, *words, "--every", "1s"]
        with self._log.open("a") as log:
            self.agent = subprocess.Popen(
                ["ip", "netns", "exec", self.zone.name, *program], env=variables, cwd="/", stderr=log
            )

    def kill(self) -> None:
        if self.agent is not None:
            self.agent.kill()
            self.agent.wait()

    def close(self) -> None:
        self.kill()
        shutil.rmtree(Path("/etc/netns") / self.zone.name)
        self.zone.close()


class World:
    """The service behind nginx, the server behind its firewall, and a person who submits jobs."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o755)
        self.folder = folder
        self.port, tls = free_ports(2)
        self.environment = {
            **os.environ,
            "HOME": str(folder),
            "GPU_MANAGER_STORE": f"sqlite:///{folder}/state.db",
        }
        subprocess.run(block("openssl req"), shell=True, cwd=folder, check=True, capture_output=True)
        self.server = Firewalled(folder, folder / "certificate.pem")
        self.server.url = f"https://{NAME}:{tls}"
        toml = re.search(r"    \[\[servers\]\]\n(    \w.*\n)+", PAGE)
        assert toml is not None
        cluster = toml[0].replace("    ", "").replace('"train"', '"nobody"')
        (folder / "servers.toml").write_text(cluster)
        self.call("apply", "--yes", "servers.toml")
        self.server.token = self.call(*block("gpu-manager token create gpu-a").split()[1:]).strip()
        token = self.call(*block("gpu-manager token create ada").split()[1:]).strip()
        self.by_ada = {
            **os.environ,
            "GPU_MANAGER_URL": f"http://127.0.0.1:{self.port}",
            "GPU_MANAGER_TOKEN": token,
        }
        self.service: subprocess.Popen[bytes] | None = None
        self._nginx = self._start_nginx(tls)
        self.manager = GPUResourceManager.from_url(self.environment["GPU_MANAGER_STORE"])

    def _start_nginx(self, port: int) -> subprocess.Popen[bytes]:
        site = (REPOSITORY / "resource_manager/deploy/nginx/gpu-manager.conf").read_text()
        site = site.replace("443 ssl", f"{port} ssl").replace("127.0.0.1:5000", f"127.0.0.1:{self.port}")
        site = site.replace("/etc/ssl/gpu-manager", str(self.folder))
        files = f"pid {self.folder}/nginx.pid; error_log {self.folder}/nginx.log;"
        whole = f"daemon off; {files} events {{}} http {{ access_log off; {site} }}"
        (self.folder / "nginx.conf").write_text(whole)
        return subprocess.Popen(["nginx", "-c", str(self.folder / "nginx.conf")], stderr=subprocess.DEVNULL)

    def start_service(self) -> None:
        options = ("--port", str(self.port), "--behind-https", "--trusted-proxy", "127.0.0.1")
        with (self.folder / "service.log").open("a") as log:
            self.service = subprocess.Popen(
                [*PROGRAM, "serve", *options], env=self.environment, stderr=log, stdout=log
            )
        wait_for(lambda: answers(self.port), 60, "the service")

    def kill_service(self) -> None:
        assert self.service is not None
        self.service.kill()
        self.service.wait()

    def call(self, *words: str) -> str:
        done = subprocess.run(
            [*PROGRAM, *words], env=self.environment, cwd=self.folder, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ada(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*PROGRAM, *words], env=self.by_ada, capture_output=True, text=True)

    def submit(self, name: str, script: str, *options: str) -> None:
        done = self.ada("submit", name, "--gpus", "2", *options, "--", "sh", "-c", script)
        assert done.returncode == 0, done.stderr

    def lease(self, name: str) -> dict[str, Any] | None:
        found = self.manager.status_of(name)
        return None if found is None else dict(found)

    def wait_until_free(self) -> None:
        wait_for(lambda: self.manager.leases() == [], 60, "the end of all leases")

    def close(self) -> None:
        self.server.close()
        if self.service is not None:
            self.kill_service()
        self._nginx.terminate()
        self._nginx.wait()
        self.manager.close()


@pytest.fixture
def world() -> Iterator[World]:
    with tempfile.TemporaryDirectory() as folder:  # that of pytest is for its own user
        made = World(Path(folder))
        try:
            made.start_service()
            made.server.start()
            wait_for(lambda: made.manager.agent_state("gpu-a")["place"], 30, "the agent's first report")
            yield made
        finally:
            made.close()
            for name in ("agent", "service", "nginx"):
                print((Path(folder) / f"{name}.log").read_text()[-2000:])


class Beats:
    """Job that writes its process id five times a second until it is told to end."""

    def __init__(self, world: World, name: str) -> None:
        self.path, self.go = world.server.home / f"{name}.beats", world.server.home / f"{name}.go"
        self.script = (
            f"while [ ! -e {self.go} ]; do echo $$ >> {self.path}; sleep 0.2; done; echo done; exit 3"
        )

    def lines(self) -> list[str]:
        return self.path.read_text().split() if self.path.exists() else []

    def wait(self, more: int = 3) -> None:
        seen = len(self.lines())
        wait_for(lambda: len(self.lines()) >= seen + more, 60, "the next lines of the job")

    def check_one_process(self) -> None:
        assert len(set(self.lines())) == 1


def begun(world: World, name: str = "t") -> Beats:
    beats = Beats(world, name)
    world.submit(name, beats.script)
    beats.wait()
    return beats


def check_end(world: World, beats: Beats, name: str = "t") -> None:
    """Let the job end; its lease ends with its result, and it had one process."""
    beats.go.touch()
    world.wait_until_free()
    found = world.manager.result_of(name)
    assert found is not None
    assert (found["exit_code"], found["last_line"]) == (3, "done")
    beats.check_one_process()


def test_from_a_bare_server_to_a_job(world: World) -> None:
    """The page as it stands; nobody can connect to the server, and no job reads the agent's token."""
    inside = f"{world.server.zone.address.rpartition('.')[0]}.2"
    with pytest.raises(TimeoutError):  # where nothing dropped it, it would be refused
        socket.create_connection((inside, 22), 1.0)
    tokens = "cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep -c ^GPU_MANAGER_AGENT"
    spy = f"id -un; echo $EPOCHS; {tokens}; true"
    world.submit("train", spy, "-e", "EPOCHS=3")
    done = world.ada("logs", "-f", "train")
    assert done.stdout == "nobody\n3\n0\n", done.stderr
    world.wait_until_free()
    assert re.fullmatch(
        r"train ended at \d\d:\d\d with exit code 0 \(SUCCESS\): 0\n", world.ada("status", "train").stdout
    )
    assert world.ada("logs", "train").stdout == "nobody\n3\n0\n"


def test_agent_killed_before_the_grant_and_while_its_job_runs_and_ends(world: World) -> None:
    world.server.kill()
    beats = Beats(world, "t")
    world.submit("t", beats.script)
    world.server.start()
    beats.wait()
    world.server.kill()
    beats.wait()
    world.server.start()
    beats.wait()
    world.server.kill()
    beats.go.touch()
    time.sleep(1)
    assert world.lease("t") is not None, "silence of the agent frees nothing"
    world.server.start()
    check_end(world, beats)


def test_service_killed_while_a_job_starts_runs_and_ends(world: World) -> None:
    beats = Beats(world, "t")
    world.submit("t", beats.script)
    world.kill_service()
    time.sleep(1)
    world.start_service()
    beats.wait()
    world.kill_service()
    beats.wait()
    beats.go.touch()
    time.sleep(1)
    assert world.lease("t") is not None
    world.start_service()
    check_end(world, beats)


def test_network_cut_before_the_grant_places_nothing_until_the_agent_is_back(world: World) -> None:
    """The service holds the question of an agent that will not hear its answer."""
    time.sleep(2)
    world.server.zone.cut()
    beats = Beats(world, "t")
    world.submit("t", beats.script)
    time.sleep(2)
    assert [lease["job_places"] for lease in world.manager.leases()] == [[]]
    world.server.zone.join()
    beats.wait()
    check_end(world, beats)


def test_network_cut_while_a_job_runs_and_ends(world: World) -> None:
    beats = begun(world)
    world.server.zone.cut()
    beats.wait(10)
    wait_for(lambda: world.manager.agent_state("gpu-a")["is_silent"], 120, "the agent is silent")
    beats.go.touch()
    time.sleep(1)
    assert world.lease("t") is not None, "nobody has said that its job is gone"
    world.server.zone.join()
    check_end(world, beats)


def test_a_stop_while_the_server_is_cut_off_keeps_the_lease_and_succeeds_later(world: World) -> None:
    beats = begun(world)
    world.server.zone.cut()
    wait_for(lambda: world.manager.agent_state("gpu-a")["is_silent"], 120, "the agent is silent")
    stopped = world.ada("stop", "t")
    assert stopped.returncode == 1, stopped
    assert "silent" in stopped.stderr
    assert world.lease("t") is not None
    beats.wait()
    world.server.zone.join()
    wait_for(lambda: world.ada("stop", "t").returncode == 0, 60, "the stop")
    world.wait_until_free()
    seen = len(beats.lines())
    time.sleep(1)
    assert len(beats.lines()) == seen, "the job is gone"
    beats.check_one_process()
