"""Manager of a connection for all triggers of a triggerer: one wait for all leases, one renewal for many."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import Context
from typing import Any, ClassVar, Self, TypeVar
from weakref import WeakKeyDictionary

from resource_manager.airflow.hook import GPUManagerHook
from resource_manager.airflow.version_compat import in_thread
from resource_manager.errors import LeaseNotFoundError
from resource_manager.manager.cluster_results import WindowView
from resource_manager.manager.commit.asking import asked_by
from resource_manager.manager.lease_service import LeaseService
from resource_manager.manager.results import (
    Allocation,
    ExpectedStart,
    Explanation,
    LeaseChanges,
    QueueEntry,
    Renewal,
)
from resource_manager.manager.use_results import ServerUse

T = TypeVar("T")

PAUSE_S = 0.4
"""Shortest time between two waits for changes: on a busy cluster they come all the time."""

EXPIRE_EVERY_S = 5.0
"""Interval of expiring leases and scheduling pending requests, which the service does if there is one."""

RETRY_S = 2.0
"""Pause after a wait for changes that failed."""

REASONS_EVERY_S = 10.0
"""Interval of reading why requests wait."""

NEW_REASON_S = 1.0
"""Interval of reading it while some have come that were not read yet."""

ESTIMATE_EVERY_S = 30.0

WINDOWS_EVERY_S = 10.0
"""Interval of reading the maintenance windows."""

USE_EVERY_S = 10.0
"""Interval of reading what the GPUs of all watched leases do."""

MAX_SERVERS = 100
"""Servers whose use is read by one call."""

RENEW_TOGETHER_S = 1.0
"""Time for which a renewal waits for others, at most a tenth of its lease's life."""


class OnePerLoop:
    """Class of which each event loop has one instance for the same arguments."""

    _all: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, MutableMapping[Any, Any]]]
    _of_loop: ClassVar[type[MutableMapping[Any, Any]]] = dict

    def __init_subclass__(cls) -> None:
        cls._all = WeakKeyDictionary()

    @classmethod
    def of(cls, *arguments: Any) -> Self:
        """Return the instance of the running event loop for these arguments."""
        instances = cls._all.setdefault(asyncio.get_running_loop(), cls._of_loop())
        instance: Self | None = instances.get(arguments)
        if instance is None:
            instance = instances[arguments] = cls(*arguments)
        return instance


class SharedManager(OnePerLoop):
    """Manager of one connection in one event loop.

    A thread asks it, another waits for changes of leases, one reads why requests wait, and one what sensors
    ask: a long queue with its estimates takes seconds, in which no task would take its next step.
    """

    def __init__(self, gpu_conn_id: str) -> None:
        self._hook = GPUManagerHook(gpu_conn_id)
        self._asking = ThreadPoolExecutor(1, "gpu-manager")
        self._waiting = ThreadPoolExecutor(1, "gpu-changes")
        self._reasons = ThreadPoolExecutor(1, "gpu-reasons")
        self._explaining = ThreadPoolExecutor(1, "gpu-explain")
        self._clock = asyncio.get_running_loop().time
        self._manager: LeaseService | None = None
        self._prefix = ""
        self._version = -1
        self._leases: dict[str, Allocation] = {}
        self._pending: set[str] = set()
        self._problem: Exception | None = None
        self._watching: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self._following: asyncio.Task[None] | None = None
        self._reading = asyncio.Lock()
        self._read_at = self._expired_at = float("-inf")
        self._queue: dict[str, QueueEntry] = {}
        self._starts: dict[str, ExpectedStart] = {}
        self._reading_queue: asyncio.Task[None] | None = None
        self._queue_at = self._estimated_at = float("-inf")
        self._windows: dict[str, WindowView] = {}
        self._reading_windows = asyncio.Lock()
        self._windows_at = float("-inf")
        self._uses: dict[str, ServerUse | None] = {}
        self._use_wanted: dict[str, float] = {}
        self._reading_use = asyncio.Lock()
        self._use_at = float("-inf")
        self._renewals: list[tuple[Renewal, asyncio.Future[bool]]] = []
        self._renewing: asyncio.Task[None] | None = None

    async def call(self, act: Callable[[LeaseService], T]) -> T:
        """Call a function with the manager, without blocking the event loop."""
        return await in_thread(self._hook.ask, act, executor=self._asking)

    async def explain(self, arguments: Mapping[str, Any]) -> Explanation:
        """Return what `LeaseService.explain` does, which may estimate for a second or two."""
        await self.call(lambda manager: manager)  # opens it, in its own thread
        return await in_thread(
            self._hook.ask, lambda manager: manager.explain(**arguments), executor=self._explaining
        )

    def service(self) -> LeaseService:
        """Return the connection's manager, or client of a service."""
        return self._hook.get_conn()

    # ---- leases and requests ----

    @contextmanager
    def watching(self, lease_id: str, changed: asyncio.Event) -> Iterator[None]:
        """Keep `known` up to date inside; the event is set when it changes, or cannot be known."""
        self._include(lease_id)
        self._watching[lease_id].add(changed)
        if self._following is None or self._following.done():
            # Not in the name of whoever came first.
            self._following = asyncio.create_task(self._follow(), context=Context())
        try:
            yield
        finally:
            self._watching[lease_id].discard(changed)
            if not self._watching[lease_id]:
                del self._watching[lease_id]

    @staticmethod
    async def until_set(changed: asyncio.Event, timeout_s: float) -> None:
        """Wait for an event of `watching`, at most that long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):  # `wait_for` of Python 3.11 may swallow a cancellation
                await changed.wait()

    async def catch_up(self, lease_id: str) -> None:
        """Read what changed up to now, of this lease too; those who ask at once share one reading."""
        asked_at = self._clock()
        async with self._reading:
            await self._newest()
            self._include(lease_id)
            if self._read_at <= asked_at:
                began_at, after, prefix = self._clock(), self._version, self._prefix
                found = await self.call(lambda manager: manager.lease_changes(after, prefix=prefix))
                self._take(found, after, prefix)
                self._read_at = began_at

    async def _newest(self) -> LeaseService:
        """Return the manager; reading begins again with another one, as of a connection that comes late."""
        manager = await self.call(lambda manager: manager)
        if manager is not self._manager:
            self._manager, self._version, self._read_at = manager, -1, float("-inf")
        return manager

    def _include(self, lease_id: str) -> None:
        """Have the leases of this one's Airflow told; those of any, once there is one of another."""
        prefix = lease_id[: lease_id.find(":") + 1]
        if self._version < 0 and not self._watching:
            self._prefix = prefix
        elif not lease_id.startswith(self._prefix):
            self._prefix, self._version, self._read_at = "", -1, float("-inf")

    def known(self, lease_id: str) -> Allocation | None:
        """Return the lease as last told, None if it has none; raises if there may be newer ones."""
        if self._problem is not None:
            raise self._problem
        return self._leases.get(lease_id)

    async def waiting(self, lease_id: str, changed: asyncio.Event | None = None) -> QueueEntry | None:
        """Return the pending request, with a reason that may be `REASONS_EVERY_S` old; None if there is none.

        One that has come since the last reading is None for `NEW_REASON_S`, too: see `is_waiting`. So is one
        whose event of `watching` is set before the queue is read.
        """
        age_s = self._clock() - self._queue_at
        is_new = lease_id in self._pending and lease_id not in self._queue
        reading = self._reading_queue
        if reading is None and (age_s >= REASONS_EVERY_S or (is_new and age_s >= NEW_REASON_S)):
            reading = self._reading_queue = asyncio.create_task(self._take_queue(), context=Context())
        if reading is not None:
            await _first_of(reading, changed)
            if not reading.done():
                return None
            reading.result()
        entry = self._queue.get(lease_id)
        if entry is None or not self.is_waiting(lease_id):
            return None
        return {**entry, "waited_s": entry["waited_s"] + self._clock() - self._queue_at}

    async def _take_queue(self) -> None:
        try:
            manager = await self.call(lambda manager: manager)
            entries = await in_thread(self._read_queue, manager, executor=self._reasons)
        finally:
            self._reading_queue = None
        self._queue = {entry["task_id"]: entry for entry in entries}
        self._queue_at = self._clock()

    def is_waiting(self, lease_id: str) -> bool:
        """Return whether there is a pending request, as last told."""
        return lease_id in self._pending

    def _read_queue(self, manager: LeaseService) -> list[QueueEntry]:
        """Return the queue with estimated starts, which cost more than all the rest."""
        now = time.monotonic()
        queue = manager.queue(estimated=False)
        missing = [entry for entry in queue if "estimated_start" not in entry]
        if missing and now - self._estimated_at > ESTIMATE_EVERY_S:
            self._starts = {entry["task_id"]: entry["estimated_start"] for entry in manager.queue()}
            self._estimated_at = now
        for entry in missing:
            if entry["task_id"] in self._starts:  # otherwise it was queued after the last estimate
                entry["estimated_start"] = self._starts[entry["task_id"]]
        return queue

    async def _follow(self) -> None:
        """Wait for changes of the leases that are watched, all of them by one call, while there are any."""
        while self._watching:
            began_at = self._clock()
            try:
                manager = await self._newest()
                after, prefix = self._version, self._prefix
                found = await in_thread(self._wait, manager, after, prefix, executor=self._waiting)
            except Exception as error:  # else they wait for ever; one of no outage fails their tries
                self._hook.forgets(error)
                self._problem = error
                self._tell(self._watching)
                await asyncio.sleep(RETRY_S)
                continue
            if manager is self._manager:
                self._take(found, after, prefix)
            await asyncio.sleep(max(began_at + PAUSE_S - self._clock(), 0.0))

    def _wait(self, manager: LeaseService, after: int, prefix: str) -> LeaseChanges:
        if time.monotonic() - self._expired_at >= EXPIRE_EVERY_S:
            manager.expire_and_schedule()
            self._expired_at = time.monotonic()
        return manager.lease_changes(after, EXPIRE_EVERY_S, prefix)

    def _take(self, changes: LeaseChanges, after: int, prefix: str) -> None:
        """Take over the answer to a question; that to another one may have been quicker and known more."""
        had_problem, self._problem = self._problem is not None, None
        leases = {each["task_id"]: each for each in changes["leases"]}
        if prefix == self._prefix and (after == self._version or changes["version"] >= self._version):
            if changes["is_whole"]:
                self._leases, self._pending = {}, set()
            self._version = changes["version"]
            for lease_id in (*changes["ended"], *changes["pending"]):
                self._leases.pop(lease_id, None)
            self._pending.difference_update(changes["ended"], leases)
            self._pending.update(changes["pending"])
            self._leases.update(leases)
        is_for_all = changes["is_whole"] or had_problem
        self._tell(self._watching if is_for_all else [*changes["ended"], *changes["pending"], *leases])

    def _tell(self, lease_ids: Iterable[str]) -> None:
        for lease_id in lease_ids:
            for changed in self._watching.get(lease_id, ()):
                changed.set()

    # ---- renewals ----

    async def renew(self, renewal: Renewal, ttl_s: float) -> None:
        """Renew a lease of that life, with others that are due; raises `LeaseNotFoundError`."""
        renewed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._renewals.append((renewal, renewed))
        if self._renewing is None or self._renewing.done():
            pause_s = min(RENEW_TOGETHER_S, ttl_s / 10)
            self._renewing = asyncio.create_task(self._renew_all(pause_s), context=Context())
        if not await renewed:
            raise LeaseNotFoundError(renewal["task_id"], renewal["fencing_token"])

    async def _renew_all(self, pause_s: float) -> None:
        while self._renewals:
            await asyncio.sleep(pause_s)
            asked, self._renewals = self._renewals, []
            due = [renewal for renewal, _ in asked]
            try:
                with asked_by(""):  # each renewal says by whom
                    answers = await self.call(lambda manager, due=due: manager.renew_all(due))  # type: ignore[misc]
            except Exception as error:
                for _, renewed in asked:
                    if not renewed.done():
                        renewed.set_exception(error)
                continue
            for (_, renewed), is_held in zip(asked, answers, strict=True):
                if not renewed.done():  # its trigger was cancelled
                    renewed.set_result(is_held)

    # ---- servers ----

    async def under_maintenance(self) -> dict[str, WindowView]:
        """Return the open maintenance window of each lease that runs in one, read every `WINDOWS_EVERY_S`."""
        async with self._reading_windows:
            if self._clock() - self._windows_at > WINDOWS_EVERY_S:
                found = await self.call(lambda manager: manager.maintenance())
                self._windows = {
                    lease: each for each in found if each["is_open"] for lease in each["running"]
                }
                self._windows_at = self._clock()
        return self._windows

    async def gpus(self, servers: Sequence[str]) -> list[ServerUse]:
        """Return the use of the GPUs of these servers, read for all who ask every `USE_EVERY_S`."""
        async with self._reading_use:
            now = self._clock()
            self._use_wanted.update(dict.fromkeys(servers, now))
            if now - self._use_at >= USE_EVERY_S or not self._uses.keys() >= set(servers):
                self._use_wanted = {
                    name: at for name, at in self._use_wanted.items() if now - at <= 3 * USE_EVERY_S
                }
                names = sorted(self._use_wanted)
                rows = await self.call(lambda manager: _uses_of(manager, names))
                self._uses = {**dict.fromkeys(names), **{row["server_name"]: row for row in rows}}
                self._use_at = now
            return [row for name in servers if (row := self._uses[name]) is not None]


async def _first_of(reading: asyncio.Task[None], changed: asyncio.Event | None) -> None:
    """Wait until the reading is over or the event, if there is one, is set."""
    setting = asyncio.create_task((changed or asyncio.Event()).wait())
    try:
        await asyncio.wait({reading, setting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        setting.cancel()


def _uses_of(manager: LeaseService, servers: Sequence[str]) -> list[ServerUse]:
    parts = (servers[start : start + MAX_SERVERS] for start in range(0, len(servers), MAX_SERVERS))
    return [row for part in parts for row in manager.gpus(part)]
