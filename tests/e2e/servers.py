"""Servers of the end-to-end tests: sshd, the GPU manager's REST service and one that takes mails."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Thread
from types import MappingProxyType
from typing import Any

import psutil
import pytest

from demo.stack import answers, free_ports
from tests.e2e.bench import wait_for

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin")


class SSHServer:
    """Debian's sshd on loopback, which accepts root with one key and sets `variables` for its sessions."""

    def __init__(self, home, address="127.0.0.1", variables=MappingProxyType({}), port=None):
        self.home = home
        self.address = address
        self.port = port or free_ports(1)[0]
        self.prefix: tuple[str, ...] = ()
        self.key = home / "key"
        for name in ("key", "host_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / name)], check=True
            )
        (home / "authorized_keys").write_text((home / "key.pub").read_text())
        (home / "config").write_text(
            f"Port {self.port}\nListenAddress {address}\nHostKey {home}/host_key\nPidFile none\n"
            f"AuthorizedKeysFile {home}/authorized_keys\nStrictModes no\nUsePAM no\nPermitRootLogin yes\n"
            + (
                f"SetEnv {' '.join(f'{name}={value}' for name, value in variables.items())}\n"
                if variables
                else ""
            )
        )
        self.process: Any = None

    def share_key(self, other):
        """Accept the key of another server, too, instead of one of its own."""
        for name in ("key", "key.pub", "authorized_keys"):
            shutil.copy(other.home / name, self.home / name)

    def start(self):
        Path("/run/sshd").mkdir(exist_ok=True)
        command = [*self.prefix, str(SSHD), "-D", "-e", "-f", str(self.home / "config")]
        with (self.home / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log, start_new_session=True)
        wait_for(lambda: answers(self.port, self.address), 60.0, "sshd")

    def stop(self):
        """Kill the server and its sessions, as if the machine had lost its network."""
        server = psutil.Process(self.process.pid)  # or what it was started by
        for process in [server, *server.children()]:
            with suppress(psutil.NoSuchProcess):
                process.suspend()  # a session that began meanwhile would outlive it
        for process in server.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if "sshd" in process.name():
                    process.kill()
        self.process.kill()
        self.process.wait()

    @property
    def connection(self):
        """Airflow connection to this server."""
        return json.dumps(
            {
                "conn_type": "ssh",
                "host": self.address,
                "login": "root",
                "extra": {"key_file": str(self.key), "no_host_key_check": True, "conn_timeout": 5},
            }
        )


@pytest.fixture(scope="session")
def ssh_server(tmp_path_factory):
    """Run one sshd for all tests; import this fixture by name where it is used."""
    if SSHD is None or os.geteuid() != 0:
        pytest.skip("needs sshd (Debian: openssh-server) and root")
    server = SSHServer(tmp_path_factory.mktemp("sshd"))
    server.start()
    yield server
    if server.process.poll() is None:
        server.stop()


class Service:
    """`gpu-manager serve` with a token for one user, as an Airflow would have."""

    USER = "airflow"

    def __init__(self, home):
        [self.port] = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self.tokens = home / "tokens.json"
        self.token = subprocess.run(
            [*self._program, "--store", "memory://", "token", "create", self.USER, "--role", "user"],
            env={**os.environ, "GPU_MANAGER_TOKENS": str(self.tokens)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        self.process: Any = None

    _program = (sys.executable, "-m", "resource_manager.cli")

    def start(self, bench):
        """Serve the store of a bench, which stops the service with its other processes."""
        command = [*self._program, "serve", "--port", str(self.port), "--tokens", str(self.tokens)]
        command += ["--max-connections-per-address", "512"]  # all of a test come from one
        self.process = bench.spawn("service", command)
        wait_for(lambda: answers(self.port), 120.0, "the service")

    def kill(self):
        self.process.kill()
        self.process.wait()

    @property
    def connection(self):
        """Airflow connection to this server."""
        return json.dumps({"conn_type": "gpu_manager", "host": self.url, "password": self.token})


class _Mail(StreamRequestHandler):
    """One conversation in SMTP; the texts of its mails go into `server.mails`."""

    server: Any

    def handle(self):
        self.wfile.write(b"220 here\r\n")
        while line := self.rfile.readline():
            verb = line[:4].strip().upper()
            if verb == b"DATA":
                self.wfile.write(b"354 go on\r\n")
                text = b"".join(iter(self.rfile.readline, b".\r\n"))
                self.server.mails.append(text.decode())
            self.wfile.write(b"221 bye\r\n" if verb == b"QUIT" else b"250 ok\r\n")


class MailServer(ThreadingTCPServer):
    """Server on loopback that keeps what it is sent, in `mails`."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Mail)
        self.mails = []
        Thread(target=self.serve_forever, daemon=True).start()

    @property
    def connection(self):
        """Airflow connection to this server."""
        plain = {"disable_ssl": True, "disable_tls": True, "from_email": "airflow@example.com"}
        host, port = self.server_address[:2]
        return json.dumps({"conn_type": "smtp", "host": host, "port": port, "extra": plain})
