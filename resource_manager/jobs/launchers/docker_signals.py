"""Standing look at the containers of a Docker engine."""

from __future__ import annotations

import threading
import time
from queue import Empty, SimpleQueue

from resource_manager.core.models import JobPlace
from resource_manager.jobs.launchers.base import JobState, LauncherError
from resource_manager.jobs.launchers.docker import DockerLauncher

OUTPUT_EVERY_S = 1.0
"""Interval of asking when each job printed its last line: the engine tells of ends only."""


class DockerSignals:
    """Standing look at the jobs of a place, by one stream of the engine's events."""

    def __init__(self, place: JobPlace) -> None:
        self._launcher = DockerLauncher(place)
        self._output_at: dict[str, int] = {}
        self._asked_at = time.monotonic()
        self._unseen: set[str] = set()
        self._said: SimpleQueue[str | LauncherError] = SimpleQueue()
        self._is_closed = False
        threading.Thread(target=self._follow, name="gpu-docker", daemon=True).start()

    def watch(self, key: str) -> None:
        self._output_at[key] = 0
        self._unseen.add(key)

    def forget(self, key: str) -> None:
        self._output_at.pop(key, None)

    def changed(self, timeout_s: float) -> set[str]:
        changed = self._ended_before() | self._grown()
        while not changed or not self._said.empty():
            try:
                said = self._said.get(timeout=timeout_s)
            except Empty:
                break
            if isinstance(said, LauncherError):
                raise said
            if said:
                changed.add(said)
            else:
                self._unseen.update(self._output_at)
                changed |= self._ended_before()
        return changed.intersection(self._output_at)

    def close(self) -> None:
        self._is_closed = True

    def _ended_before(self) -> set[str]:
        """Return the jobs of whose ends no event may have told: they were before it."""
        unseen, self._unseen = self._unseen.intersection(self._output_at), set()
        return {key for key in unseen if self._launcher.status(key).state is not JobState.RUNNING}

    def _grown(self) -> set[str]:
        """Return the jobs that have printed since they were last asked."""
        if time.monotonic() - self._asked_at < OUTPUT_EVERY_S:
            return set()
        before = self._output_at
        self._output_at = {key: self._launcher.last_output_at(key) for key in before}
        self._asked_at = time.monotonic()
        return {key for key, at in self._output_at.items() if at != before[key]}

    def _follow(self) -> None:
        """Hand on what the engine says, until this is closed or it says nothing any more."""
        try:
            while not self._is_closed:
                for name in self._launcher.ends():
                    self._said.put(name)
                    if self._is_closed:
                        break
        except LauncherError as error:
            self._said.put(error)
