"""Resources that the workers of a run share: servers, access paths, services; one class a setting."""

from __future__ import annotations

import contextlib
import random
import shutil
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from resource_manager.core.changes import Change
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.storage.airflow_variable import store
from resource_manager.storage.sql import sqlite
from tests.faults import namespaces
from tests.faults.airflow_tasks import Airflow, AirflowTask
from tests.faults.processes import Forked, Process, Service
from tests.faults.proxy import Proxy
from tests.faults.redis_servers import SentinelGroup, Server
from tests.faults.worker import ALL_CHANGES, LOCK_TIMEOUT_S, TTL_S, Assignment, inventory
from tests.shifted_clock import ShiftedClock, time_shifted_by
from tests.sql_servers import MariaDB, MySQL, Postgres, SqlServer

DISK = ("appendonly yes", "appendfsync always")
PROCESSES = ("kill worker", "kill worker", "stop worker", "stop worker")
NETWORK = ("lose answers", "lose answers", "cut", "partition", "delay", "repeat requests")
CLOCK = () if ShiftedClock.missing() else ("jump clock", "jump clock")
REDIS = ("restart redis", "fill memory", "read only", "flush scripts", "stop redis")

DATABASE = ("restart database", "restart database", "stop database")

AIRFLOW = ("kill supervisor", "stop supervisor", "stop api server", "stop api server")


class OneRedis:
    """A Redis with an append-only file, and a proxy for each worker."""

    name = "one server"
    kinds: tuple[str, ...] = (*PROCESSES, *NETWORK, *REDIS, *CLOCK)
    once = ""
    """A fault that comes once, in the middle."""

    has_older_build = False
    """True if every other worker runs an older build of the package, until it is upgraded."""

    may_lose = False
    starts_afresh = True
    """True if processes may be killed, or taken for dead, and others started in their place."""

    seconds = 5.0
    """How long faults go on, where nothing else is asked for."""

    pauses_s = (0.1, 0.8)
    longest_sleep_s = 1.8 * TTL_S
    patience_s = 60.0
    """How long after the last fault a worker may still be at work."""

    store_kind = "redis"
    redis_options: tuple[str, ...] = DISK

    def __init__(self, folder: Path, workers: int, rng: random.Random) -> None:
        self.folder = folder
        self.rng = rng
        self.namespace = folder.name
        self.clock = ShiftedClock() if CLOCK else None
        self.server = Server(folder / "server", 'save ""', *self.redis_options, clock=self.clock)
        self.proxies = [Proxy(str(self.server.socket)) for _ in range(workers)]
        self.services: list[Service] = []

    def assignment(self, slot: int) -> dict[str, Any]:
        """Return the addresses for a worker in that slot."""
        return {"store": self.proxies[slot].url(self.namespace)}

    def start(self, assignment: Assignment) -> Process:
        """A worker."""
        return Forked(assignment)

    def manager(self) -> GPUResourceManager:
        """A manager that no fault comes between."""
        url = f"unix://{self.server.socket}?namespace={self.namespace}"
        return self._manager(url)

    def _manager(self, url: str, **settings: Any) -> GPUResourceManager:
        return GPUResourceManager.from_url(
            url,
            inventory=inventory(),
            lease_ttl_s=TTL_S,
            lock_timeout_s=4 * LOCK_TIMEOUT_S,
            confirmation_window_s=TTL_S,
            **settings,
        )

    def history(self, manager: GPUResourceManager) -> list[tuple[int, Change]]:
        history: list[tuple[int, Change]] = []
        while batch := manager.store.history(after=history[-1][0] if history else 0, limit=10_000):
            history += batch
        return history

    def stop(self) -> None:
        for service in self.services:
            service.process.kill()
        for proxy in self.proxies:
            proxy.close()
        self.server.kill()
        if self.clock is not None:
            self.clock.close()


class Services(OneRedis):
    """Two services, each behind a proxy of its own; every other worker asks them, the rest go to Redis."""

    name = "services"
    kinds = (*OneRedis.kinds, *("kill service", "kill service", "stop service", "stop service"))

    def __init__(self, folder: Path, workers: int, rng: random.Random) -> None:
        super().__init__(folder, workers + 2, rng)
        self.manager().close()  # the first state, with its servers
        for number in range(2):
            url = self.proxies[workers + number].url(self.namespace)
            place = folder / f"service-{number}"
            self.services.append(Service(url, place, folder / "stop", folder / "halts"))
        for service in self.services:
            service.wait_until_up()

    def assignment(self, slot: int) -> dict[str, Any]:
        if slot % 2:
            return super().assignment(slot)
        return {"store": "", "services": tuple(service.url for service in self.services)}


class NoDisk(OneRedis):
    """A Redis without persistence that is restarted and reset by an operator once old leases are over."""

    name = "no disk"
    kinds = ("stop worker", *NETWORK, "flush scripts", "stop redis")
    once = "wipe redis"
    may_lose = True
    starts_afresh = False  # who starts afresh on an empty Redis cannot know that there was a state
    redis_options = ()


class Sentinels(OneRedis):
    """A primary, a replica that lags, and a sentinel that promotes it."""

    name = "sentinel"
    kinds = PROCESSES
    once = "fail over"
    may_lose = True

    def __init__(self, folder: Path, workers: int, rng: random.Random) -> None:
        self.folder = folder
        self.rng = rng
        self.group = SentinelGroup(folder / "servers")
        self.group.wait_until_joined()
        self.server = self.group.primary
        self.proxies = []
        self.services = []

    def assignment(self, slot: int) -> dict[str, Any]:
        return {"store": self.group.url()}

    def manager(self) -> GPUResourceManager:
        self.group.wait_until_led()
        return self._manager(self.group.url())

    def stop(self) -> None:
        self.group.stop()


class Namespaces(OneRedis):
    """Three network namespaces with the workers in them, joined to Redis by links that can be hurt."""

    name = "namespaces"
    kinds: tuple[str, ...] = (
        *PROCESSES,
        "restart redis",
        "stop redis",
        "link down",
        "link down",
        "packet loss",
    )
    redis_options = (*DISK, "bind 0.0.0.0", "protected-mode no")

    def __init__(self, folder: Path, workers: int, rng: random.Random) -> None:
        super().__init__(folder, 0, rng)
        self.zones = [namespaces.Namespace() for _ in range(3)]
        if namespaces.has_netem():
            self.kinds = (*self.kinds, "link delay")

    def assignment(self, slot: int) -> dict[str, Any]:
        zone = self.zones[slot % len(self.zones)]
        return {
            "store": f"redis://{zone.address}:{self.server.port}/0?namespace={self.namespace}",
            "netns": zone.name,
        }

    def stop(self) -> None:
        for zone in self.zones:
            zone.close()
        super().stop()


class Variables(OneRedis):
    """The state in a Variable of a real Airflow on PostgreSQL, under a lock in Redis."""

    name = "variables"
    kinds = (*PROCESSES, *NETWORK, *CLOCK, "restart redis", "stop redis", "restart postgres", "stop postgres")
    store_kind = "variables"
    lock_life_s = 2.0
    postgres: Postgres
    """Started once for all runs; the environment has to name its Airflow."""

    def __init__(self, folder: Path, workers: int, rng: random.Random) -> None:
        super().__init__(folder, workers, rng)
        store.CHANGES_KEPT = ALL_CHANGES  # also where this process is the last to write
        self.variable = f"faults_{folder.name.replace('-', '_')}_{time.time_ns()}"

    def assignment(self, slot: int) -> dict[str, Any]:
        return {
            "store": f"airflow://{self.variable}",
            "redis_url": self.proxies[slot].url(self.namespace),
            "lock_life_s": self.lock_life_s,
        }

    def manager(self) -> GPUResourceManager:
        url = f"unix://{self.server.socket}?namespace={self.namespace}"
        return self._manager(f"airflow://{self.variable}", redis_url=url)


class Tasks(Variables):
    """The same, reached by tasks of that Airflow through their supervisors and its execution API.

    That API cannot compare and set, so nobody sleeps for longer than a writer keeps in hand of the life of
    its lock: what a longer sleep in the middle of a write does is a stated limit of the store.
    """

    name = "tasks"
    kinds = (*PROCESSES, *NETWORK, "restart redis", "stop redis", *AIRFLOW)
    seconds = 30.0
    pauses_s = (0.4, 2.0)
    lock_life_s = 6.0
    longest_sleep_s = 1.0
    patience_s = 180.0
    airflow: Airflow
    """Started once for all runs."""

    def __init__(self, folder: Path, workers: int, rng: random.Random) -> None:
        super().__init__(folder, workers, rng)
        self.triggered: list[Future[str]] = []

    def start(self, assignment: Assignment) -> AirflowTask:
        task, triggered = self.airflow.start(assignment)
        self.triggered.append(triggered)
        return task

    def stop(self) -> None:
        try:
            for triggered in self.triggered:
                self.airflow.give_up(triggered)
        finally:
            super().stop()


class Databases(OneRedis):
    """A database server, started once for all runs, and a proxy for each worker."""

    kinds = (*PROCESSES, "lose answers", "lose answers", "cut", "partition", "delay", *DATABASE, *CLOCK)
    store_kind = "sql"
    server_class: type[SqlServer]
    database: SqlServer

    def __init__(self, folder: Path, workers: int, rng: random.Random) -> None:
        self.rng = rng
        self.clock = self.database.clock
        if self.clock is not None:
            self.clock.jump(-self.clock.shift_s)  # what the run before left
        self.namespace = f"{folder.name}-{time.time_ns()}"
        self.proxies = [Proxy(str(self.database.socket)) for _ in range(workers)]
        self.services = []

    def assignment(self, slot: int) -> dict[str, Any]:
        return {"store": self._url(self.proxies[slot].port)}

    def manager(self) -> GPUResourceManager:
        return self._manager(self._url(self.database.port))

    def _url(self, port: int) -> str:
        url = self.database.url.replace(f":{self.database.port}/", f":{port}/")
        return f"{url}?namespace={self.namespace}"

    def stop(self) -> None:
        for proxy in self.proxies:
            proxy.close()


class OnPostgreSQL(Databases):
    """The state in a PostgreSQL that is killed and stopped."""

    name = "postgresql"
    server_class = Postgres


class OnMariaDB(Databases):
    """The state in a MariaDB that is killed and stopped."""

    name = "mariadb"
    server_class = MariaDB


class OnMySQL(Databases):
    """The state in a MySQL that is killed and stopped."""

    name = "mysql"
    server_class = MySQL


class OnSQLite(OneRedis):
    """The state in a file, which another process now and then keeps locked."""

    name = "sqlite"
    kinds = (*PROCESSES, "lock file", "lock file", *CLOCK)
    store_kind = "sql"

    def __init__(self, folder: Path, workers: int, rng: random.Random) -> None:
        self.rng = rng
        self.clock = ShiftedClock() if CLOCK else None
        if self.clock is not None:  # that of this machine
            sqlite.time = time_shifted_by(self.clock.file)  # type: ignore[assignment, attr-defined]
        self.file = folder / "state.db"
        self.services = []
        self.proxies = []

    def assignment(self, slot: int) -> dict[str, Any]:
        clock = {} if self.clock is None else {"clock": str(self.clock.file)}
        return {"store": f"sqlite:///{self.file}", **clock}

    def manager(self) -> GPUResourceManager:
        return self._manager(f"sqlite:///{self.file}")

    def stop(self) -> None:
        sqlite.time = time  # type: ignore[attr-defined]
        if self.clock is not None:
            self.clock.close()


RESTORES = ("restore", "restore", *PROCESSES)


class Restores(OneRedis):
    """A Redis whose state is taken back to backups; what was granted after them is lost."""

    name = "restores"
    kinds = (*RESTORES, *CLOCK, "cut", "lose answers", "restart redis")
    once = "restore"
    may_lose = True


class RestoresOnPostgreSQL(OnPostgreSQL):
    """The same on PostgreSQL."""

    name = "restores on postgresql"
    kinds = (*RESTORES, *CLOCK, "cut", "lose answers")
    once = "restore"
    may_lose = True


class RestoresOnMariaDB(OnMariaDB):
    """The same on MariaDB."""

    name = "restores on mariadb"
    kinds = RestoresOnPostgreSQL.kinds
    once = "restore"
    may_lose = True


class RestoresOnVariables(Variables):
    """The same in a Variable."""

    name = "restores on variables"
    kinds = (*RESTORES, *CLOCK, "cut", "lose answers", "restart redis")
    once = "restore"
    may_lose = True


class RestoresOnSQLite(OnSQLite):
    """The same in a file."""

    name = "restores on sqlite"
    kinds = (*RESTORES, *CLOCK)
    once = "restore"
    may_lose = True


class TwoFormats(OneRedis):
    """A Redis with workers of two builds; a newer process writes what the older build does not know."""

    name = "two formats"
    kinds = (*PROCESSES, *CLOCK, "cut", "lose answers")
    once = "newer change"
    seconds = 8.0
    has_older_build = True


class TwoFormatsOnPostgreSQL(OnPostgreSQL):
    """The same on PostgreSQL."""

    name = "two formats on postgresql"
    kinds = (*PROCESSES, "cut", "lose answers")
    once = "newer change"
    has_older_build = True


class TwoFormatsOnSQLite(OnSQLite):
    """The same in a file."""

    name = "two formats on sqlite"
    kinds = (*PROCESSES, "lock file")
    once = "newer change"
    has_older_build = True


SETTINGS: dict[str, type[OneRedis]] = {
    setup.name: setup
    for setup in (
        OneRedis,
        Services,
        NoDisk,
        Sentinels,
        Namespaces,
        Variables,
        Tasks,
        OnPostgreSQL,
        OnMariaDB,
        OnMySQL,
        OnSQLite,
        Restores,
        RestoresOnPostgreSQL,
        RestoresOnMariaDB,
        RestoresOnSQLite,
        RestoresOnVariables,
        TwoFormats,
        TwoFormatsOnPostgreSQL,
        TwoFormatsOnSQLite,
    )
}


def setting_of(seed: int) -> str:
    """The setting of a seed where none is named: of ten, two on one server, one with failing GPUs."""
    settings = {2: "services", 3: "no disk", 4: "sentinel", 5: "failing gpus", 6: "restores"}
    return {**settings, 7: "services", 8: "two formats", 9: "sentinel"}.get(seed % 10, "one server")


def remove(folder: Path) -> None:
    with contextlib.suppress(OSError):
        shutil.rmtree(folder)
