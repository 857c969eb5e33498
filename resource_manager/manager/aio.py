"""The manager for asyncio: the same methods, awaitable, run on threads so that the loop never blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from resource_manager.manager.manager import GPUResourceManager

P = ParamSpec("P")
R = TypeVar("R")


def _awaitable(
    method: Callable[Concatenate[GPUResourceManager, P], R],
) -> Callable[Concatenate[AsyncGPUResourceManager, P], Coroutine[Any, Any, R]]:
    @wraps(method)
    async def call(self: AsyncGPUResourceManager, /, *args: P.args, **kwargs: P.kwargs) -> R:
        bound = partial(method, self.manager, *args, **kwargs)
        # In a copy of this task's context: it may say who asks.
        return await asyncio.get_running_loop().run_in_executor(self.executor, copy_context().run, bound)

    return call


class AsyncGPUResourceManager:
    """An awaitable wrapper of a manager, by default `GPUResourceManager()`, which documents each method.

    A cancelled call may still be carried out.
    """

    def __init__(self, manager: GPUResourceManager | None = None, *, max_workers: int = 10) -> None:
        self.manager = GPUResourceManager() if manager is None else manager
        self.executor = ThreadPoolExecutor(max_workers, thread_name_prefix="gpu-manager")

    allocate_resources = _awaitable(GPUResourceManager.allocate_resources)
    allocate_resources_async = allocate_resources  # the original's name (section 10.2.4)
    allocate = _awaitable(GPUResourceManager.allocate)
    release_resources = _awaitable(GPUResourceManager.release_resources)
    get_resource_summary = _awaitable(GPUResourceManager.get_resource_summary)
    reset_resources = _awaitable(GPUResourceManager.reset_resources)
    allocate_batch = _awaitable(GPUResourceManager.allocate_batch)
    submit = _awaitable(GPUResourceManager.submit)
    release = _awaitable(GPUResourceManager.release)
    place_job = _awaitable(GPUResourceManager.place_job)
    release_members = _awaitable(GPUResourceManager.release_members)
    cancel = _awaitable(GPUResourceManager.cancel)
    renew = _awaitable(GPUResourceManager.renew)
    status_of = _awaitable(GPUResourceManager.status_of)
    named = _awaitable(GPUResourceManager.named)
    explain_named = _awaitable(GPUResourceManager.explain_named)
    wait = _awaitable(GPUResourceManager.wait)
    leases = _awaitable(GPUResourceManager.leases)
    queue = _awaitable(GPUResourceManager.queue)
    explain = _awaitable(GPUResourceManager.explain)
    history = _awaitable(GPUResourceManager.history)
    cluster = _awaitable(GPUResourceManager.cluster)
    diff = _awaitable(GPUResourceManager.diff)
    apply = _awaitable(GPUResourceManager.apply)
    drain = _awaitable(GPUResourceManager.drain)
    resume = _awaitable(GPUResourceManager.resume)
    searched = _awaitable(GPUResourceManager.searched)
    server = _awaitable(GPUResourceManager.server)
    adopt = _awaitable(GPUResourceManager.adopt)
    expire_and_schedule = _awaitable(GPUResourceManager.expire_and_schedule)

    async def close(self) -> None:
        """Wait for running calls, then close the manager."""
        await asyncio.to_thread(self.executor.shutdown)
        await asyncio.to_thread(self.manager.close)

    async def __aenter__(self) -> AsyncGPUResourceManager:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
