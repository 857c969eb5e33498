"""One standing look at all jobs of a place, for the triggers that watch them."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from weakref import WeakValueDictionary

from resource_manager.airflow.shared_manager import OnePerLoop
from resource_manager.airflow.version_compat import of_same_loop
from resource_manager.core.models import JobPlace
from resource_manager.errors import ResourceManagerError
from resource_manager.jobs.launchers.base import JobSignals
from resource_manager.jobs.launchers.registry import has_signals, open_signals

logger = logging.getLogger(__name__)

TURN_S = 0.2
"""Longest time until a job that is to be watched is."""

LINGER_S = 30.0
"""Time for which the look goes on without a job: the next one comes soon."""

RETRY_S = 5.0

LOOKS_AT_ONCE = 8
"""Most jobs of a place that are looked at at the same time."""


class PlaceWatch(OnePerLoop):
    """Look at the jobs of one place, in a thread of its own; while it stands, nobody need look at a job.

    It lives for as long as somebody watches a job there.
    """

    _of_loop = WeakValueDictionary

    def __init__(self, place: JobPlace) -> None:
        self.is_standing = False
        self.threads = ThreadPoolExecutor(LOOKS_AT_ONCE, "gpu-look")
        """For the looks at single jobs: a silent server must not occupy the threads of all triggers."""
        self._place = place
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._watching: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self, key: str, changed: asyncio.Event) -> Iterator[None]:
        """Set the event inside when the job ends, its output grows, or the look at it stands no more."""
        with self._lock:
            self._watching[key].add(changed)
            if self._thread is None and has_signals(self._place):
                run = partial(self._run, of_same_loop())
                self._thread = threading.Thread(target=run, name="gpu-place", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._watching[key].discard(changed)
                if not self._watching[key]:
                    del self._watching[key]

    def _run(self, enter: Callable[[], None]) -> None:
        enter()
        while not self._is_over():
            try:
                with closing(open_signals(self._place)) as signals:
                    self._follow(signals)
            except ResourceManagerError as error:
                logger.info("its jobs are looked at one by one: %s", error)
            except Exception:
                logger.exception("its jobs are looked at one by one: %s", self._place)
            self.is_standing = False
            if keys := self._keys():
                self._tell(keys)
                time.sleep(RETRY_S)

    def _follow(self, signals: JobSignals) -> None:
        """Tell of changes until there has been no job for a while."""
        known: set[str] = set()
        used_at = time.monotonic()
        while not self._loop.is_closed() and time.monotonic() - used_at < LINGER_S:
            if wanted := self._keys():
                used_at = time.monotonic()
            for key in wanted - known:
                signals.watch(key)
            for key in known - wanted:
                signals.forget(key)
            known = wanted
            self._tell(signals.changed(TURN_S) & known)
            self.is_standing = True

    def _is_over(self) -> bool:
        """Return whether the thread ends: the next job then starts another one."""
        with self._lock:
            is_over = self._loop.is_closed() or not self._watching
            if is_over:
                self._thread = None
        return is_over

    def _keys(self) -> set[str]:
        with self._lock:
            return set(self._watching)

    def _tell(self, keys: Iterable[str]) -> None:
        with self._lock:
            events = [changed for key in keys for changed in self._watching.get(key, ())]
        for changed in events:
            try:
                self._loop.call_soon_threadsafe(changed.set)
            except RuntimeError:  # the loop was closed
                return
