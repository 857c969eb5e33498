"""Base of the triggers: plain arguments, an event that is no sooner than Airflow can take it, calls that
outlast outages."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, asdict, dataclass, fields
from functools import cache
from typing import Any, TypeVar

from airflow.configuration import conf
from airflow.triggers.base import BaseTrigger, TriggerEvent

from resource_manager.airflow.hook import DEFAULT_CONNECTION
from resource_manager.airflow.resuming import OF_TRY
from resource_manager.airflow.shared_manager import SharedManager
from resource_manager.airflow.task_state import is_wanted
from resource_manager.airflow.task_trigger.events import Event, storable
from resource_manager.airflow.version_compat import AirflowException, in_thread
from resource_manager.core.models import MAX_RENEWAL_S
from resource_manager.errors import ResourceManagerError, is_outage
from resource_manager.jobs import reconcile
from resource_manager.jobs.task_identity import TaskIdentity
from resource_manager.manager.commit.asking import asked_by
from resource_manager.manager.lease_service import LeaseService

T = TypeVar("T")

POLL_S = 1.0
OUTAGE_POLL_S = 5.0
MIN_DEFERRAL_S = conf.getfloat("workers", "min_heartbeat_interval", fallback=5.0) + 2.0
"""Shortest time before a trigger fires: Airflow's scheduler fails a task that resumes before the scheduler
has read that the task was deferred (apache/airflow issues 71580 and 72716). A worker's supervisor may see up
to its heartbeat interval late that the process of a deferred task is over."""

RENEW_EVERY_S = 40.0
"""Longest time between two renewals: an owner has to learn in the recovery window, of a minute unless set,
that a store which was set back has lost the lease."""


def renewal_pause_s(part_s: float, grace_s: float = math.inf) -> float:
    """Return the time between two renewals: that part of a lease's life, if it is no longer than allowed.

    A lease that a limit ends is over after its grace, in which its owner has to learn that.
    """
    return min(part_s, RENEW_EVERY_S, max(grace_s / 3, 1.0))


LAUNCHER_THREADS = 32
"""Calls of launchers at the same time; one to a server out of reach takes half a minute."""


@cache
def launcher_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(LAUNCHER_THREADS, "gpu-launcher")


def handover_s() -> float:
    """Return the life of a lease whose task goes from worker to triggerer or back, when nobody renews it.

    Airflow fails a task that is queued for longer than that.
    """
    return min(max(conf.getfloat("scheduler", "task_queued_timeout"), 1.0), MAX_RENEWAL_S)


@contextmanager
def failing_alone(what: str) -> Iterator[None]:
    """Raise `TypeError` for each error of the block, which makes that part of a trigger.

    Airflow fails the task of such a trigger. By any other error its triggerer ends, with all its triggers,
    and so does the next one that takes them.
    """
    try:
        yield
    except Exception as error:
        raise TypeError(
            f"{what} cannot be made in this process: {type(error).__name__}: {error}; "
            "install what the workers have in the triggerers, too, in the same versions"
        ) from error


@dataclass(eq=False, repr=False)
class PlainTrigger(BaseTrigger):
    """Trigger whose fields are its arguments, which are plain values."""

    _: KW_ONLY
    gpu_conn_id: str = DEFAULT_CONNECTION

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._began_at = time.monotonic()

    @property
    def shared(self) -> SharedManager:
        return SharedManager.of(self.gpu_conn_id)

    async def _fire(self, event: Event | Mapping[str, Any]) -> TriggerEvent:
        """Return the event with the number of the task's try, after `MIN_DEFERRAL_S` at the earliest."""
        await asyncio.sleep(max(self._began_at + MIN_DEFERRAL_S - time.monotonic(), 0.0))
        of_try = {} if self.task_instance is None else {OF_TRY: self.task_instance.try_number}
        return TriggerEvent(storable({**(event.plain() if isinstance(event, Event) else event), **of_try}))

    def serialize(self) -> tuple[str, dict[str, Any]]:
        arguments = {each.name: getattr(self, each.name) for each in fields(self)}
        return f"{type(self).__module__}.{type(self).__qualname__}", arguments


@dataclass(eq=False, repr=False)
class TaskBoundTrigger(PlainTrigger):
    """Trigger of one task instance, which asks the manager in its name."""

    identity: TaskIdentity

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.identity, dict):  # as `serialize` gave it
            self.identity = TaskIdentity(**self.identity)
        self._calling: asyncio.Future[Any] | None = None

    def serialize(self) -> tuple[str, dict[str, Any]]:
        path, arguments = super().serialize()
        return path, {**arguments, "identity": asdict(self.identity)}

    def __repr__(self) -> str:
        """Return a name without the arguments, which may have what must not be in a log."""
        return f"<{type(self).__name__} of {self.identity.lease_id}>"

    async def ask(self, act: Callable[[LeaseService], T]) -> T:
        """Return what the manager answers, however long it takes to answer; it may be asked again."""
        return await self.outlast(lambda: self.shared.call(act))

    async def outlast(self, act: Callable[[], Awaitable[T]]) -> T:
        """Do what asks the manager, again and again while it does not answer."""
        while True:
            try:
                with asked_by(self.identity.by):
                    return await act()
            except Exception as error:
                if not is_outage(error):
                    raise
                self.log.warning("the GPU manager does not answer; trying again: %s", error)
            await asyncio.sleep(OUTAGE_POLL_S)

    async def _hand_over(self, fencing_token: int, event: Event | Mapping[str, Any]) -> TriggerEvent:
        """Return the event as `_fire` does, with the task's lease renewed until a worker takes it over."""
        lease_id = self.identity.lease_id
        with suppress(ResourceManagerError, AirflowException):  # the worker finds out
            await self.ask(
                lambda manager: manager.renew(lease_id, fencing_token=fencing_token, for_s=handover_s())
            )
        return await self._fire(event)

    def begin_launcher(
        self, act: Callable[..., T], *args: Any, threads: ThreadPoolExecutor | None = None, **options: Any
    ) -> asyncio.Future[T]:
        """Begin a call of launchers in a thread of these, or of those for all launchers; one at a time."""
        threads = threads or launcher_threads()
        self._calling = asyncio.ensure_future(in_thread(act, *args, executor=threads, **options))
        return self._calling

    async def await_launcher(self) -> None:
        """Wait for the call of launchers that is under way: a thread outlives its cancelled trigger."""
        if self._calling is not None:
            await asyncio.wait([self._calling])

    async def end_unless_wanted(self) -> None:
        """End the job and lease of a task that a user ended; keep those of a cleared or moved task.

        Airflow also cancels a trigger that another triggerer took over, so the task's state is read first.
        """
        if await in_thread(is_wanted, self.identity):
            return
        entry = await self.shared.call(lambda manager: manager.status_of(self.identity.lease_id))
        if entry is not None and TaskIdentity.from_labels(entry["labels"]) == self.identity:
            manager = await self.shared.call(lambda manager: manager)
            with asked_by(self.identity.by):
                done = await in_thread(reconcile.end, manager, entry, executor=launcher_threads())
            self.log.info("the task was ended in Airflow; %s: %s", done.action, done.detail)
