"""Access paths of a worker to the manager; all take the same calls."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from resource_manager.manager.aio import AsyncGPUResourceManager
from resource_manager.manager.manager import GPUResourceManager

CANCELLED = 0.2
PATIENCE_S = 0.005
"""The share of awaited requests that are cancelled, and the longest that those are waited for."""


class Awaited:
    """The asyncio face, on a loop of its own; each call blocks its thread and may be cancelled on the way.

    A cancelled call raises `concurrent.futures.CancelledError`.
    """

    def __init__(self, manager: GPUResourceManager, seed: int) -> None:
        self.manager = manager
        self._face = AsyncGPUResourceManager(manager)
        self._rng = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._face, name)
        return lambda *args, **options: self._wait_for(self._ask(method(*args, **options)))

    def close(self) -> None:
        self._wait_for(self._face.close())

    def _wait_for(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    async def _ask(self, call: Coroutine[Any, Any, Any]) -> Any:
        request = asyncio.ensure_future(call)
        if self._rng.random() < CANCELLED:
            await asyncio.sleep(self._rng.random() * PATIENCE_S)
            request.cancel()
        return await request


ACCESS_PATHS: dict[str, Callable[[GPUResourceManager, int], Any]] = {
    "threads": lambda manager, seed: manager,
    "asyncio": Awaited,
}
