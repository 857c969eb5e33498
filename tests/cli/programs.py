"""Programs of `gpu-manager` in processes of their own, on a server that is here or behind a real sshd."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from resource_manager import GPUResourceManager
from tests.e2e.servers import SSHServer

GPU_MANAGER = [sys.executable, "-m", "resource_manager.cli"]
MARK = "TEST_MARK"


def environment_of(folder: Path, store: str, ssh: SSHServer | None = None) -> dict[str, str]:
    """Return the environment for a store with one server: this machine, or one that ssh reaches.

    Its processes are found by the mark in it.
    """
    address = ""
    folder.mkdir(exist_ok=True)
    if ssh is not None:
        address = f'address = "root@{ssh.address}:{ssh.port}"'
        with_key = folder / "bin" / "ssh"  # the ssh program with a configuration of the test
        with_key.parent.mkdir()
        with_key.write_text(
            f"#!/bin/sh\nexec {shutil.which('ssh')} -F none -i {ssh.key} -o StrictHostKeyChecking=no "
            '-o UserKnownHostsFile=/dev/null -o LogLevel=ERROR "$@"\n'
        )
        with_key.chmod(0o755)
    inventory = folder / "servers.toml"
    inventory.write_text(f'[[servers]]\nname = "s"\ngpus = 2\ncpus = 8\n{address}\n')
    GPUResourceManager.from_url(store, inventory=inventory).close()
    return {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "GPU_MANAGER_STORE": store,
        "GPU_MANAGER_JOBS_DIR": str(folder / "jobs"),
        MARK: uuid.uuid4().hex,
    }


def manager_of(environment: dict[str, str]) -> GPUResourceManager:
    """Return a manager on the store of that environment."""
    return GPUResourceManager.from_url(environment["GPU_MANAGER_STORE"])


def begun(environment: dict[str, str], *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Return the running program, its output in pipes."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([*GPU_MANAGER, *arguments], env=environment, text=True, **pipes)


def piped(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program to its end."""
    command = [*GPU_MANAGER, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


def left_of(environment: dict[str, str]) -> Iterator[psutil.Process]:
    """Yield the processes with the mark of that environment, or with it in their arguments, as over ssh."""
    mark = environment[MARK]
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and (
                process.environ().get(MARK) == mark or any(mark in word for word in process.cmdline())
            ):
                yield process
        except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            continue
