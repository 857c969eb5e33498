"""Server for tests of walls: this machine in a mount namespace of its own, with five device files as GPUs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PYTHON = "/usr/bin/python3"
ORDINARY = 54321
"""Id of a user who has no name and no rights."""

DEVICES = ("null", "zero", "full", "random", "urandom")
"""What stands for the GPUs 0 to 4; all differ in what a reader gets."""

BUILD = """
set -e
mkdir "$1/dev" && mount -t tmpfs dev "$1/dev" && cd "$1/dev" && mkdir pts shm
for number in 0:3 1:5 2:7 3:8 4:9; do mknod -m 666 nvidia${number%:*} c 1 ${number#*:}; done
for name in nvidiactl nvidia-uvm nvidia-uvm-tools; do mknod -m 666 $name c 1 3; done
cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty .
ln -s /proc/self/fd fd
mount --move "$1/dev" /dev
mount --bind "$1/home" /home
echo built
exec sleep 600
"""


class WalledServer:
    """Account of this machine in that namespace, in which the ssh launcher's programs run as its user."""

    host = "walled"

    def __init__(self, process: int, folder: Path, uid: int) -> None:
        self.process = process
        self.home = folder / "home"
        """The folder that is /home there."""
        self.uid = uid
        self.path = "/usr/bin:/bin"

    def command(self, *command: str) -> list[str]:
        """Return the command as the account runs it."""
        account = (
            ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups"] if self.uid else []
        )
        environment = ["env", "-i", "-C", "/home", f"PATH={self.path}", "HOME=/home"]
        return ["nsenter", f"--mount=/proc/{self.process}/ns/mnt", *account, *environment, *command]

    def run(self, program: str, timeout_s: float, library: str = "") -> tuple[int, str, str]:
        """Run a Python program; return exit code, output and standard error."""
        command = self.command(PYTHON, "-I", "-S", "-")
        done = subprocess.run(
            command, input=f"{library}\n{program}", capture_output=True, text=True, timeout=timeout_s
        )
        return done.returncode, done.stdout, done.stderr


@contextmanager
def walled_server(folder: Path, uid: int) -> Iterator[WalledServer]:
    """Yield a server with its account's home in the folder; skip the test where there can be none."""
    needed = ("bwrap", "unshare", "nsenter", "setpriv", "mknod")
    lacking = [name for name in needed if shutil.which(name) is None]
    if lacking or os.geteuid() != 0 or not os.path.exists(PYTHON):
        pytest.skip(f"needs root, {PYTHON} and {', '.join(lacking or needed)}")
    (folder / "home").mkdir()
    os.chown(folder / "home", uid, uid)
    for path in (folder, *folder.parents[:2]):
        path.chmod(path.stat().st_mode | 0o055)
    command = ["unshare", "--mount", "sh", "-c", BUILD, "sh", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "built\n":
                pytest.skip("no mount namespace with device files can be made here")
            yield WalledServer(process.pid, folder, uid)
        finally:
            process.kill()
