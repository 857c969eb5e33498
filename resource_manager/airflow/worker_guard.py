"""Guard of a worker: ends what a task started under a lease once the task's process is dead.

A task that is killed ends nothing itself, and its lease expires while its children compute.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from resource_manager.jobs.launchers.base import job_key


def guard(parent: int, lease_id: str, token: str, key: str) -> None:
    """Wait until the parent is dead, then kill all processes of the lease: by environment, or registration.

    Only the standard library, since it runs in an interpreter of its own, in seconds of the parent's death.
    """
    import os
    import signal
    import time

    marks = {f"GPU_LEASE_ID={lease_id}".encode(), f"GPU_LEASE_FENCING_TOKEN={token}".encode()}
    while os.getppid() == parent:
        time.sleep(0.2)
    quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < 1.0:  # what begins meanwhile is killed, too
        for process in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{process}/environ", "rb") as environment:
                    is_marked = marks <= set(environment.read().split(b"\0"))
                folder = f"/proc/{process}/fd"
                if is_marked or any(
                    os.readlink(f"{folder}/{number}").startswith(f"/memfd:{key} ")
                    for number in os.listdir(folder)
                ):
                    os.kill(int(process), signal.SIGKILL)
                    quiet_since = time.monotonic()
            except OSError:
                continue  # it has ended, or is another user's
        time.sleep(0.1)


@contextmanager
def guarded(lease_id: str, token: int) -> Iterator[None]:
    """Have a guard for the block; without effect where the system has no /proc."""
    if not os.path.isdir("/proc/self"):
        yield
        return
    call = (os.getpid(), lease_id, str(token), job_key(lease_id, token))
    program = f"{inspect.getsource(guard)}\nguard(*{call!r})\n"
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", f"from __future__ import annotations\n{program}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # Airflow's supervisor waits until nobody has the task's own
        stderr=subprocess.DEVNULL,
        env={},  # the task's own has the lease, and the guard would kill itself first
        start_new_session=True,
        cwd="/",
    )
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()
