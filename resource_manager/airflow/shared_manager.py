"""State of the manager, read once for all triggers of a triggerer over one connection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, TypeVar
from weakref import WeakKeyDictionary

from resource_manager.airflow.hook import GPUManagerHook
from resource_manager.airflow.version_compat import in_thread
from resource_manager.jobs.running_job import is_remainder
from resource_manager.manager.results import Allocation, ExpectedStart, Submission, WindowView
from resource_manager.manager.service import LeaseService

T = TypeVar("T")

MAX_AGE_S = 0.5
"""Triggers that ask within this time share one reading."""

EXPIRE_EVERY_S = 5.0
"""Interval of expiring leases and scheduling pending requests, which the service does if there is one."""

ESTIMATE_EVERY_S = 30.0

WINDOWS_EVERY_S = 10.0
"""Interval of reading the maintenance windows."""


class SharedManager:
    """Manager of one connection, used from a single thread of its own."""

    _all: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, SharedManager]]] = (
        WeakKeyDictionary()
    )

    def __init__(self, gpu_conn_id: str) -> None:
        self._hook = GPUManagerHook(gpu_conn_id)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gpu-manager")
        self._reading = asyncio.Lock()
        self._read_at = float("-inf")
        self._tasks: dict[str, Submission] = {}
        self._starts: dict[str, ExpectedStart] = {}
        self._preempting: dict[tuple[str, int], Allocation] = {}
        self._windows: dict[str, WindowView] = {}
        self._estimated_at = self._expired_at = self._preempting_at = self._windows_at = float("-inf")

    @classmethod
    def of(cls, gpu_conn_id: str) -> SharedManager:
        """Return the shared instance for a connection in the running event loop."""
        managers = cls._all.setdefault(asyncio.get_running_loop(), {})
        if gpu_conn_id not in managers:
            managers[gpu_conn_id] = cls(gpu_conn_id)
        return managers[gpu_conn_id]

    async def call(self, act: Callable[[LeaseService], T]) -> T:
        """Call a function with the manager, without blocking the event loop."""
        return await in_thread(lambda: act(self._hook.get_conn()), executor=self._thread)

    async def status_of(self, lease_id: str) -> Submission | None:
        """Return the task's lease or pending request, at most `MAX_AGE_S` old, or None."""
        async with self._reading:
            clock = asyncio.get_running_loop().time
            if clock() - self._read_at > MAX_AGE_S:
                everything = await self.call(self._read)
                self._tasks = {entry["task_id"]: entry for entry in everything}
                self._read_at = clock()
        return self._tasks.get(lease_id)

    def expire(self) -> None:
        """Read anew for the next who asks: a task has just changed something."""
        self._read_at = float("-inf")

    async def preempting(self) -> dict[tuple[str, int], Allocation]:
        """Return the leases that are being preempted, by id and fencing token, as of `MAX_AGE_S` ago."""
        async with self._reading:
            clock = asyncio.get_running_loop().time
            if clock() - self._preempting_at > MAX_AGE_S:
                found = await self.call(lambda manager: manager.preempting())
                self._preempting = {(entry["task_id"], entry["fencing_token"]): entry for entry in found}
                self._preempting_at = clock()
        return self._preempting

    async def under_maintenance(self) -> dict[str, WindowView]:
        """Return the open maintenance window of each lease that runs in one, read every `WINDOWS_EVERY_S`."""
        async with self._reading:
            clock = asyncio.get_running_loop().time
            if clock() - self._windows_at > WINDOWS_EVERY_S:
                found = await self.call(lambda manager: manager.maintenance())
                self._windows = {
                    lease: each for each in found if each["is_open"] for lease in each["running"]
                }
                self._windows_at = clock()
        return self._windows

    def _read(self, manager: LeaseService) -> list[Submission]:
        """Return the queue, with estimated starts, and the leases; the queue first, to miss no grant.

        What is left of a gang is none of them: its task has a new request or none.
        """
        now = time.monotonic()
        if now - self._expired_at > EXPIRE_EVERY_S:
            manager.expire_and_schedule()
            self._expired_at = now
        queue = manager.queue(estimated=False)
        missing = [entry for entry in queue if "estimated_start" not in entry]
        if missing and now - self._estimated_at > ESTIMATE_EVERY_S:
            self._starts = {entry["task_id"]: entry["estimated_start"] for entry in manager.queue()}
            self._estimated_at = now
        for entry in missing:
            if entry["task_id"] in self._starts:  # otherwise it was queued after the last estimate
                entry["estimated_start"] = self._starts[entry["task_id"]]
        return queue + _whole(manager.leases())


def _whole(leases: list[Allocation]) -> list[Allocation]:
    return [lease for lease in leases if not is_remainder(lease)]
