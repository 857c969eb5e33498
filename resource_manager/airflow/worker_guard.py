"""End of what a task started under a lease in a worker: with the task's process, or when its time is over.

A task that is killed ends nothing itself, and its lease expires while its children compute: its guard does.
"""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from resource_manager.jobs.job_preemption import grace_of
from resource_manager.jobs.launchers.base import job_key

if TYPE_CHECKING:
    import psutil

    from resource_manager.manager.results import Allocation

STOP_S = 15.0
"""Time in which what an operator started should end, once its lease is lost or its time is over."""

END_POLL_S = 0.1


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


def children() -> list[psutil.Process]:
    """Return the processes that this one has started, and those that these have."""
    import psutil

    return psutil.Process().children(recursive=True)


def end_children(stop: Callable[[], object] | None, *, before: Collection[psutil.Process]) -> None:
    """End what this process started after those `before`; what is left after `STOP_S` is killed.

    `stop` tells it to end, SIGTERM if that is None. No end is read: Airflow signals the same processes again.
    """
    started = [child for child in children() if child not in before]
    if stop is None:
        _signal(started, signal.SIGTERM)
    else:
        with suppress(Exception):  # Airflow calls it again, and tells of that
            stop()
    _await_end(started)
    _signal(started, signal.SIGKILL)
    _await_end(started)


def end_this_process(reason: str, stop: Callable[[], object] = lambda: None) -> None:
    """Kill this process and its children, once `stop` has ended what runs elsewhere, or after `STOP_S`."""
    print(f"ending this task: {reason}", flush=True)
    stopping = threading.Thread(target=stop, name="gpu-lease-stop", daemon=True)
    stopping.start()
    stopping.join(STOP_S)
    _signal(children(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def tell_this_process(lease: Allocation) -> float:
    """Send this process the signal that its lease is taken; return the seconds until it is killed.

    One that would kill it without any grace is SIGTERM, on which Airflow calls the operator's `on_kill`.
    """
    number = signal.Signals[f"SIG{lease['preempt_signal']}"]
    os.kill(os.getpid(), signal.SIGTERM if signal.getsignal(number) is signal.SIG_DFL else number)
    return grace_of(lease)


def _signal(processes: Iterable[psutil.Process], number: int) -> None:
    import psutil

    for process in processes:
        with suppress(psutil.Error):  # it has ended by itself
            process.send_signal(number)


def _await_end(processes: Iterable[psutil.Process]) -> None:
    ends_at = time.monotonic() + STOP_S
    while any(map(_is_running, processes)) and time.monotonic() < ends_at:
        time.sleep(END_POLL_S)


def _is_running(process: psutil.Process) -> bool:
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
