"""What Slurm says of all jobs that a triggerer watches: asked once every few seconds for all of them."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context

from resource_manager.airflow.shared_manager import OnePerLoop, SharedManager
from resource_manager.airflow.version_compat import AirflowException, in_thread
from resource_manager.core.models import JobPlace
from resource_manager.errors import ResourceManagerError
from resource_manager.jobs.launchers import LauncherUnreachableError
from resource_manager.jobs.launchers.slurm import Look, Seen, SlurmLauncher
from resource_manager.jobs.slurm_records import KEPT_S

logger = logging.getLogger(__name__)

POLL_S = 5.0
"""Time between two questions to Slurm, however many jobs are watched."""

PUBLISH_EVERY_S = 30.0
"""Time between two lists of the jobs for those who look at the console."""


class SlurmBoard(OnePerLoop):
    """Jobs watched on one cluster, over one connection that one thread uses; a manager is told of them."""

    def __init__(self, place: JobPlace, gpu_conn_id: str) -> None:
        self._place = place
        self._manager = SharedManager.of(gpu_conn_id)
        self._published_at = -math.inf
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gpu-slurm")
        self._wanted: dict[str, tuple[int, asyncio.Future[Seen]]] = {}
        self._polling: asyncio.Task[None] | None = None

    async def seen(self, key: str, offset: int) -> Seen:
        """Return what the next look shows of a job, with its output from `offset` on; one trigger watches it.

        Raises `LauncherError`.
        """
        future: asyncio.Future[Seen] = asyncio.get_running_loop().create_future()
        self._wanted[key] = (offset, future)
        if self._polling is None or self._polling.done():
            self._polling = asyncio.create_task(self._poll(), context=Context())  # in nobody's log
        return await future

    async def _poll(self) -> None:
        launcher = None
        try:
            while self._wanted:
                await asyncio.sleep(POLL_S)
                wanted, self._wanted = self._wanted, {}
                offsets = {key: offset for key, (offset, _) in wanted.items()}
                publishes = time.monotonic() - self._published_at >= PUBLISH_EVERY_S
                since = time.time() - KEPT_S if publishes else None
                if publishes:
                    # Before the look: the next one must not ask for a list that takes too long again.
                    self._published_at = time.monotonic()
                found: Look | ResourceManagerError
                try:
                    if launcher is None:
                        launcher = await in_thread(SlurmLauncher, self._place, executor=self._thread)
                    found = await in_thread(launcher.read_all, offsets, since, executor=self._thread)
                except ResourceManagerError as error:
                    found = error
                except Exception as error:  # Airflow's own, of the connection; else they wait for ever
                    found = LauncherUnreachableError(f"{type(error).__name__}: {error}")
                for key, (_, future) in wanted.items():
                    if future.done():  # its trigger was cancelled
                        continue
                    if isinstance(found, Look):
                        future.set_result(found.jobs[key])
                    else:
                        future.set_exception(found)
                if publishes and isinstance(found, Look):
                    await self._publish(found)
        finally:
            if launcher is not None:
                launcher.close()

    async def _publish(self, seen: Look) -> None:
        """Let the manager know of the jobs; what is shown must not stop the watching."""
        try:
            await self._manager.call(lambda manager: manager.keep_slurm_jobs(seen.cluster, seen.records))
        except (ResourceManagerError, AirflowException) as error:
            logger.warning("the jobs on Slurm are not shown: %s", error)
