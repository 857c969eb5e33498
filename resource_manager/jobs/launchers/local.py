"""Launcher of jobs on this machine, detached from the worker that starts them."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import Future
from dataclasses import asdict
from threading import Thread
from typing import Any

from resource_manager.core.models import JobPlace
from resource_manager.jobs.directories import calls, job_files, job_states
from resource_manager.jobs.launchers import standing_program
from resource_manager.jobs.launchers.base import LauncherUnreachableError
from resource_manager.jobs.launchers.directory_launcher import (
    DirectoryLauncher,
    failure,
    kind_of_failure,
    refusal,
    time_for,
)

LOCAL = JobPlace("local")
"""Place of jobs on this machine before one was prepared."""


class LocalSignals:
    """Standing look at the jobs of a place on this machine."""

    def __init__(self, place: JobPlace) -> None:
        self._place = place
        self._lookout = job_states.Lookout(place.folder)
        self.watch, self.forget = self._lookout.watch, self._lookout.forget

    def changed(self, timeout_s: float) -> set[str]:
        until = time.monotonic() + timeout_s
        try:
            job_files.verify(job_files.ANY, asdict(self._place))
            while not (found := self._lookout.changed()) and time.monotonic() < until:
                time.sleep(standing_program.TICK_S)
        except (job_files.RefusedError, OSError) as error:
            raise LauncherUnreachableError(f"jobs in {self._place.folder} cannot be seen: {error}") from error
        return set(found)

    def close(self) -> None:
        """Do nothing: there is no connection."""


class LocalLauncher(DirectoryLauncher):
    """Launcher that runs jobs as process groups of this machine, each with a directory under `root`."""

    def __init__(self, root: str | None = None, place: JobPlace = LOCAL) -> None:
        default = os.environ.get("GPU_MANAGER_JOBS_DIR", job_files.DEFAULT_ROOT)
        super().__init__(place, root or default, socket.gethostname())

    def ask(self, act: str, **arguments: Any) -> dict[str, Any]:
        """Call it in a thread of its own, which is left where the folder's file system hangs."""
        key = arguments.get("key", job_files.ANY)
        failed = failure(act, key, self.host)
        answer: Future[dict[str, Any]] = Future()

        def act_there() -> None:
            try:
                if (place := self.place_for(act)) is not None:
                    job_files.verify(key, place)
                answer.set_result(calls.ACTS[act](self.root, **arguments) or {})
            except BaseException as error:
                answer.set_exception(error)

        try:
            Thread(target=act_there, daemon=True, name=f"look at {key}").start()
            return answer.result(time_for(arguments))
        except job_files.RefusedError as error:
            raise refusal(type(error).__name__, str(error), failed) from error
        except TimeoutError as error:
            raise LauncherUnreachableError(f"{failed}: {self.root} does not answer") from error
        except (OSError, RuntimeError) as error:
            raise kind_of_failure(act)(f"{failed}: {error}") from error
