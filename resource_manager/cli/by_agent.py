"""Command on a server where nobody logs in: its agent runs it, and its output comes to this terminal."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from resource_manager.cli.base import harmless
from resource_manager.cli.endings import KILLED
from resource_manager.cli.session import say
from resource_manager.core.models import JobPlace
from resource_manager.errors import ResourceManagerError, is_outage
from resource_manager.jobs.launchers import Job, JobState, JobStatus, LauncherError
from resource_manager.jobs.launchers.agent import AgentLauncher
from resource_manager.manager.agent_jobs import AgentSilentError
from resource_manager.manager.patience import patiently

LOOK_EVERY_S, MAX_LOOK_EVERY_S = 0.5, 2.0
"""Pause between two looks, and the longest between two at the output of a quiet job."""

PATIENCE_S = 30.0
"""Time in which a service or agent that is started again should answer, within the TTL of the lease."""


class AgentTerminal(AgentLauncher):
    """Launcher of a job whose output this process shows."""

    def sign(self, key: str) -> None:
        """Do nothing: the lease that this process renews is the sign, and the agent ends a job without it."""

    def prepare(self, job: Job) -> JobPlace:
        prepare_it = super().prepare
        return patiently(lambda: prepare_it(job), PATIENCE_S, may_pass=_may_pass)

    def _ordered(self, key: str, want: str, **order: Any) -> Mapping[str, Any]:
        """Have the agent do something, again if nobody answered meanwhile: it does it once."""
        order_it = super()._ordered
        return patiently(lambda: order_it(key, want, **order), PATIENCE_S, may_pass=_may_pass)


def _may_pass(error: ResourceManagerError) -> bool:
    """Return whether the service, or an agent that had reported, was silent as when it is started again."""
    return isinstance(error.__cause__, AgentSilentError) or is_outage(error)


class AgentProcess:
    """Job that an agent runs, as a process of this terminal, which shows its output until it ends."""

    def __init__(self, launcher: AgentLauncher, key: str) -> None:
        self._launcher, self._key = launcher, key
        self._code: int | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"output of {key}", daemon=True)
        self._thread.start()

    def poll(self) -> int | None:
        """Return the exit code once the job has ended and all of its output was shown."""
        return self._code

    def terminate(self) -> None:
        """Show no more; the job itself is ended by its launcher."""
        self._stop.set()

    kill = terminate

    def wait(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def _follow(self) -> None:
        """Show the output; of a quiet job only its state is looked at as often, which nobody has to send."""
        offset, ask_at, pause_s, give_up_at, is_shown = 0, 0.0, 0.0, math.inf, True
        while not self._stop.is_set():
            try:
                is_due = time.monotonic() >= ask_at
                if not is_due and self._launcher.status(self._key).state is JobState.RUNNING:
                    self._stop.wait(LOOK_EVERY_S)
                    continue
                part = self._launcher.logs(self._key, offset)
            except LauncherError as error:  # the agent or the service is silent: the job goes on
                ended, now = self._end(), time.monotonic()
                give_up_at = math.inf if ended is None else min(give_up_at, now + PATIENCE_S)
                if ended is not None and now > give_up_at:
                    say(f"the rest of the command's output cannot be read: {error}")
                    self._code = _code_of(ended)
                    return
                self._stop.wait(LOOK_EVERY_S)
                continue
            give_up_at = math.inf
            if part.text and is_shown:
                try:
                    _show(part.text)
                except OSError as error:  # nobody reads on, or a disk is full: the job goes on all the same
                    say(f"standard output: {error.strerror}: the rest of the command's output is not shown")
                    is_shown = False
            is_more, offset = part.offset != offset, part.offset
            pause_s = 0.0 if is_more else min(max(2 * pause_s, LOOK_EVERY_S), MAX_LOOK_EVERY_S)
            ask_at = time.monotonic() + pause_s
            if not is_more and part.status.state is not JobState.RUNNING:
                self._code = _code_of(part.status)
                return

    def _end(self) -> JobStatus | None:
        """Return how the job has ended, None while that is not known."""
        with suppress(LauncherError):
            if (status := self._launcher.status(self._key)).state is not JobState.RUNNING:
                return status
        return None


def _code_of(ended: JobStatus) -> int:
    """Return the exit code of a job; one that was killed, or whose server was started again, left none."""
    return KILLED if ended.exit_code is None else ended.exit_code


def _show(text: str) -> None:
    """Write a part of a job's output, escaped where it would steer the terminal."""
    if sys.stdout is None:  # it is closed
        return
    sys.stdout.write(harmless(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
