"""The manager for asyncio: the same methods, awaitable, run on threads so that the loop never blocks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from resource_manager.errors import ResourceManagerError
from resource_manager.manager.lease_changes import has_news
from resource_manager.manager.lease_service import LeaseService
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.manager.original import OriginalNames
from resource_manager.manager.results import LeaseChanges, Submission

P = ParamSpec("P")
R = TypeVar("R")

WAIT_AT_ONCE_S = 1.0
"""For so long a wait keeps its thread: then another one has its turn, and one that was cancelled is gone."""


def _awaitable(
    method: Callable[Concatenate[Any, P], R], *, waits: bool = False
) -> Callable[Concatenate[AsyncGPUResourceManager, P], Coroutine[Any, Any, R]]:
    @wraps(method)
    async def call(self: AsyncGPUResourceManager, /, *args: P.args, **kwargs: P.kwargs) -> R:
        bound: Callable[[], R] = partial(getattr(self.manager, method.__name__), *args, **kwargs)

        def unless_closed() -> R:
            self._require_open()
            return bound()

        self._require_open()
        executor, run = (self.waiting, unless_closed) if waits else (self.executor, bound)
        # In a copy of this task's context: it may say who asks.
        return await asyncio.get_running_loop().run_in_executor(executor, copy_context().run, run)

    return call


class AsyncGPUResourceManager:
    """A lease service, awaitable: a client of a service, or a manager, by default `GPUResourceManager()`.

    A cancelled call may still be carried out. Waits have threads of their own: however many there are, other
    calls go on.
    """

    def __init__(self, manager: LeaseService | None = None, *, max_workers: int = 10) -> None:
        self.manager = manager or GPUResourceManager()
        self.executor = ThreadPoolExecutor(max_workers, thread_name_prefix="gpu-manager")
        self.waiting = ThreadPoolExecutor(max_workers, thread_name_prefix="gpu-manager-wait")
        self._is_closed = False

    def _require_open(self) -> None:
        if self._is_closed:
            raise ResourceManagerError("this AsyncGPUResourceManager is closed: make another one")

    allocate = _awaitable(GPUResourceManager.allocate)  # with a store only
    try_allocate = _awaitable(LeaseService.try_allocate)
    try_allocate_batch = _awaitable(LeaseService.try_allocate_batch)
    submit = _awaitable(LeaseService.submit)
    cancel = _awaitable(LeaseService.cancel)
    announce = _awaitable(LeaseService.announce)
    withdraw = _awaitable(LeaseService.withdraw)
    coming = _awaitable(LeaseService.coming)
    renew = _awaitable(LeaseService.renew)
    renew_all = _awaitable(LeaseService.renew_all)
    place_job = _awaitable(LeaseService.place_job)
    release = _awaitable(LeaseService.release)
    release_members = _awaitable(LeaseService.release_members)
    preempt = _awaitable(LeaseService.preempt)
    expire_and_schedule = _awaitable(LeaseService.expire_and_schedule)
    status_of = _awaitable(LeaseService.status_of)
    result_of = _awaitable(LeaseService.result_of)
    order_job = _awaitable(LeaseService.order_job)
    agent_state = _awaitable(LeaseService.agent_state)
    job_output = _awaitable(LeaseService.job_output)
    named = _awaitable(LeaseService.named)
    _wait = _awaitable(LeaseService.wait, waits=True)
    _lease_changes = _awaitable(LeaseService.lease_changes, waits=True)
    leases = _awaitable(LeaseService.leases)
    preempting = _awaitable(LeaseService.preempting)
    queue = _awaitable(LeaseService.queue)
    explain = _awaitable(LeaseService.explain)
    explain_named = _awaitable(LeaseService.explain_named)
    caller_name = _awaitable(LeaseService.caller_name)
    stated_owner = _awaitable(LeaseService.stated_owner)
    require_owner = _awaitable(LeaseService.require_owner)
    summary = _awaitable(LeaseService.summary)
    servers = _awaitable(LeaseService.servers)
    server = _awaitable(LeaseService.server)
    gpus = _awaitable(LeaseService.gpus)
    drain = _awaitable(LeaseService.drain)
    resume = _awaitable(LeaseService.resume)
    searched = _awaitable(LeaseService.searched)
    adopt = _awaitable(LeaseService.adopt)
    cluster = _awaitable(LeaseService.cluster)
    diff = _awaitable(LeaseService.diff)
    apply = _awaitable(LeaseService.apply)
    teams = _awaitable(LeaseService.teams)
    maintenance = _awaitable(LeaseService.maintenance)
    add_maintenance = _awaitable(LeaseService.add_maintenance)
    remove_maintenance = _awaitable(LeaseService.remove_maintenance)
    snapshot = _awaitable(LeaseService.snapshot)
    history = _awaitable(LeaseService.history)
    estimates = _awaitable(LeaseService.estimates)
    slurm_jobs = _awaitable(LeaseService.slurm_jobs)
    keep_slurm_jobs = _awaitable(LeaseService.keep_slurm_jobs)
    report = _awaitable(LeaseService.report)
    reset = _awaitable(LeaseService.reset)

    allocate_resources = _awaitable(OriginalNames.allocate_resources)
    release_resources = _awaitable(OriginalNames.release_resources)
    get_resource_summary = _awaitable(OriginalNames.get_resource_summary)
    reset_resources = _awaitable(OriginalNames.reset_resources)
    allocate_batch = _awaitable(OriginalNames.allocate_batch)
    allocate_resources_async = allocate_resources  # the original's name (section 10.2.4)

    async def wait(self, lease_id: str, timeout_s: float) -> Submission | None:
        """Return as `LeaseService.wait` does."""
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(deadline - time.monotonic(), 0.0)
            found = await self._wait(lease_id, min(left_s, WAIT_AT_ONCE_S))
            if found is None or found["state"] != "WAITING" or left_s <= WAIT_AT_ONCE_S:
                return found

    async def lease_changes(self, after: int = -1, timeout_s: float = 0.0, prefix: str = "") -> LeaseChanges:
        """Return as `LeaseService.lease_changes` does."""
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(deadline - time.monotonic(), 0.0)
            found = await self._lease_changes(after, min(left_s, WAIT_AT_ONCE_S), prefix)
            if has_news(found) or left_s <= WAIT_AT_ONCE_S:
                return found
            after = found["version"]

    async def close(self) -> None:
        """Wait for running calls, then close; a wait and a later call raise `ResourceManagerError`."""
        self._is_closed = True
        await asyncio.to_thread(self.waiting.shutdown)
        await asyncio.to_thread(self.executor.shutdown)
        await asyncio.to_thread(self.manager.close)

    async def __aenter__(self) -> AsyncGPUResourceManager:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
