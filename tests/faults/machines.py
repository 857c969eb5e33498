"""Servers that can be cut off, die with all that runs on them, and boot again: namespaces on one bridge.

Each has a network, a process tree, a machine id, a boot id, a home and an sshd of its own, so that programs
find there what they would find on a machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO

import psutil

from tests.e2e.gang_servers import GangServer, GangServers
from tests.e2e.servers import SSHD
from tests.eventually import wait_for

ROOT = Path(__file__).parents[2]

BOOT = """
hostname {name}
mount --bind {home}/machine-id /etc/machine-id
mount --bind {home}/boot-id /proc/sys/kernel/random/boot_id
exec {sshd} -D -e -f {home}/config
"""

SSH = """\
#!/bin/sh
exec {ssh} -F none -i {key} -o UserKnownHostsFile={known} -o StrictHostKeyChecking={checking} \\
    -o LogLevel=ERROR -o ConnectTimeout=2 "$@"
"""


@cache
def what_is_missing() -> str:
    """Return why there can be no such servers here; empty if there can."""
    if os.geteuid() != 0 or SSHD is None:
        return "needs root and sshd (Debian: openssh-server)"
    absent = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if absent:
        return f"needs {', '.join(absent)} (Debian: iproute2, util-linux)"
    tried = subprocess.run(["unshare", "--pid", "--fork", "--net", "--mount", "--uts", "true"], check=False)
    return "" if tried.returncode == 0 else "needs the right to make namespaces"


class Machine(GangServer):  # the servers of the end-to-end tests are not typed
    """One server: `alive` until it dies; `run` and `spawn` start programs on it."""

    home: Path
    address: str
    name: str

    def __init__(self, home: Path, bridge: str, number: int, net: str) -> None:
        super().__init__(home, bridge, number, net)
        self.name = f"gpu-{number}"

    def start(self) -> None:
        """Boot: everything that ran here before is gone, its files are not."""
        identity = self.home / "machine-id"
        if not identity.exists():
            identity.write_text(f"{uuid.uuid4().hex}\n")
        (self.home / "boot-id").write_text(f"{uuid.uuid4()}\n")
        boot = BOOT.format(name=self.name, home=self.home, sshd=SSHD)
        isolated = ("unshare", "--pid", "--fork", "--kill-child", "--mount", "--uts", "--mount-proc")
        self.prefix = (*self.inside, *isolated, "sh", "-c", boot)
        super().start()
        [init] = psutil.Process(self.process.pid).children()
        self.init: int = init.pid

    def die(self) -> None:
        """Lose power: every process here is gone at once, and the network with it."""
        self.cut()
        self.process.kill()
        self.process.wait()
        wait_for(lambda: not psutil.pid_exists(self.init))

    def boot(self) -> None:
        """Come back after `die`."""
        self.join()
        self.start()

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def words(self, *command: str) -> tuple[str, ...]:
        """Return the command that runs this one here."""
        names = ("--net", "--mount", "--uts", "--pid")
        return ("nsenter", "--target", str(self.init), *names, "--", *command)

    def new_host_key(self) -> None:
        """Have another host key, as after an installation; sshd reads it anew at its next start."""
        key = self.home / "host_key"
        for path in (key, key.with_suffix(".pub")):
            path.unlink()
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        self.die()
        self.boot()


class Machines(GangServers):
    """Several such servers, reached from here at their addresses; `store_address` is this side's."""

    servers: list[Machine]
    make = Machine

    @property
    def here(self) -> str:
        """Return the address of this machine for programs on the servers."""
        return f"{self.net}.1"

    def ssh_program(self, folder: Path, *, known_hosts: Path | None = None) -> Path:
        """Write an ssh program with the key of the servers, which checks host keys if it is told of some."""
        folder.mkdir(parents=True, exist_ok=True)
        program = folder / "ssh"
        text = SSH.format(
            ssh=shutil.which("ssh"),
            key=self.key,
            known=known_hosts or "/dev/null",
            checking="yes" if known_hosts else "no",
        )
        program.write_text(text)
        program.chmod(0o755)
        return program


class Program:
    """Program on a machine, or here without one, and its output; `pid` is its own, not that of a wrapper."""

    def __init__(
        self,
        command: tuple[str, ...],
        environment: Mapping[str, str],
        output: Path,
        machine: Machine | None = None,
    ) -> None:
        self.output = output
        words = machine.words(*command) if machine is not None else command
        file: IO[bytes]
        with output.open("ab") as file:
            self._process = subprocess.Popen(
                words,
                env={**os.environ, **environment, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                cwd=ROOT,
            )
        self._is_wrapped = machine is not None

    @property
    def pid(self) -> int:
        if not self._is_wrapped:
            return self._process.pid
        wrapper = psutil.Process(self._process.pid)
        wait_for(wrapper.children)
        return wrapper.children()[0].pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError, psutil.NoSuchProcess, IndexError):
            os.kill(self.pid, number)

    def wait(self, timeout_s: float = 60.0) -> int:
        return self._process.wait(timeout_s)

    def close(self) -> None:
        """Kill it with all that it started here."""
        with suppress(psutil.NoSuchProcess):
            family = [psutil.Process(self._process.pid)]
            family += family[0].children(recursive=True)
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self._process.wait()


def python(*words: str) -> tuple[str, ...]:
    return (sys.executable, *words)
