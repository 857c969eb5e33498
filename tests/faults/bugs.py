"""Bugs to plant in a worker's process, each of which the checker must find."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from resource_manager.core.changes import Expired, JobEnd, Preempting, Quarantined, Queued, Released
from resource_manager.core.cluster import ClusterState
from resource_manager.scheduling import allocator, lease_steps
from resource_manager.scheduling.preemption import victim_right
from resource_manager.scheduling.preemption.requeueing import requeued
from resource_manager.scheduling.preemption.victim_bounds import VictimBounds
from resource_manager.storage.airflow_variable.store import VariableStore
from resource_manager.storage.redis.lock import RedisLock
from resource_manager.storage.redis.store import RedisStore


def no_version_check() -> None:
    """The Redis store's: what was decided on an old state is committed."""
    from resource_manager.storage.redis import client
    from resource_manager.storage.redis import store as redis_store

    load = client.load_script.__wrapped__

    def careless(*names: str) -> client.Script:
        text = load(*names).text
        return client.Script(text.replace("if version ~= expected then", "if false then"))

    redis_store.load_script = careless  # type: ignore[assignment, attr-defined]


def no_lock() -> None:
    """The Variable store's in a task, which has nothing else: everybody gets the lock, at once."""
    RedisLock._step = lambda self, step, token: [1, 0] if step == "acquire" else 1  # type: ignore[method-assign]


def no_fencing() -> None:
    for name in ("release", "renew"):
        setattr(lease_steps, name, partial(_without_fencing, getattr(lease_steps, name)))


def _without_fencing(step: Any, *arguments: Any, **options: Any) -> Any:
    return step(*arguments, **{**options, "fencing_token": None})


def lost_release() -> None:
    for store in (RedisStore, VariableStore):
        store.commit = _forgetful(store.commit)  # type: ignore[method-assign]


def _forgetful(commit: Callable[..., None]) -> Callable[..., None]:
    def forgetful(self: Any, version: int, changes: Any, **options: Any) -> None:
        if not all(isinstance(change, Released) for change in changes) or random.random() < 0.8:
            commit(self, version, changes, **options)

    return forgetful


def no_remainder() -> None:
    """A gang ends with the first of its members, and frees what the others still use."""

    def careless(cluster: Any, lease_id: str, ranks: Any, now: float, **options: Any) -> Any:
        return lease_steps.release(cluster, lease_id, now, **options)

    lease_steps.release_members = careless


def lost_victim() -> None:
    """The request of a preempted lease is not pending again."""
    lease_steps.requeued = lambda cluster, lease, outcome, now: []  # type: ignore[attr-defined]


def victim_last() -> None:
    """The request of a preempted lease waits behind all others."""

    def late(cluster: Any, lease: Any, outcome: str, now: float) -> Any:
        again = requeued(cluster, lease, outcome, now)
        return [replace(each, queued_at=now) for each in again if isinstance(each, Queued)]

    lease_steps.requeued = late  # type: ignore[attr-defined]


def forgotten_restart() -> None:
    """A preempted job starts again as if it were the first time, once its request is granted again."""
    grant = allocator.grant

    def careless(cluster: Any, request: Any, *arguments: Any) -> Any:
        return grant(cluster, replace(request, labels={}), *arguments)

    allocator.grant = careless  # type: ignore[assignment]


def no_right() -> None:
    """Leases are taken of everybody: of teams inside their guarantee, and of jobs as urgent as the taker."""
    victim_right.Right.leases = lambda self: list(self._cluster.leases.values())  # type: ignore[method-assign]
    victim_right.Right.allows = lambda self, lease: True  # type: ignore[method-assign]
    VictimBounds.exclude = lambda self, kind, request, planned: False  # type: ignore[method-assign]


def early_grant() -> None:
    """Grant what a preempted lease holds before its release is known."""
    apply = ClusterState.apply

    def careless(self: Any, *together: Any) -> None:
        for change in together:
            apply(self, change)
            if isinstance(change, Preempting):
                self._deallocate(self.leases[change.lease_id])

    ClusterState.apply = careless  # type: ignore[method-assign]


def expired_job() -> None:
    """A lease whose job was placed expires at its end, as one without a job does."""
    expire = lease_steps.expire

    def careless(cluster: Any, now: float) -> Any:
        return [
            Expired(each.lease_id, each.fencing_token, now) if isinstance(each, Quarantined) else each
            for each in expire(cluster, now)
        ]

    lease_steps.expire = careless


def absent_elsewhere() -> None:
    """Whoever looks for a job looks in a folder of their own, and takes what is not there for gone."""
    from resource_manager.jobs.gang_job import GangJob

    GangJob.of = classmethod(lambda cls, entry: None)  # type: ignore[method-assign, assignment]
    release_of_anybody()


def release_of_anybody() -> None:
    """A release frees the GPUs of a job that runs."""
    release = lease_steps.release

    def careless(cluster: Any, *arguments: Any, **options: Any) -> Any:
        return release(cluster, *arguments, **{**options, "job_end": JobEnd.ENDED})

    lease_steps.release = careless


def deaf_job() -> None:
    """A job in a terminal goes on without its caller, and its caller takes it for gone."""
    from resource_manager.cli import attended

    attended.Attended._end = lambda self, launcher: (None, None)  # type: ignore[method-assign]


def no_walls() -> None:
    """An agent starts a job without the walls that it must have."""
    from resource_manager.agent import job_runner

    job_runner.AgentJobs._prepare = lambda self, key, item: []  # type: ignore[method-assign]


def no_search() -> None:
    """A restore opens the servers at once, as if nothing had been granted after the backup."""
    from resource_manager.storage import backup

    continued = backup._continued

    def careless(*arguments: Any, **options: Any) -> Any:
        return continued(*arguments, **{**options, "is_whole": True})

    backup._continued = careless


OF_AGENTS = ("no walls", "no search")
"""Bugs that only jobs of agents can show."""

OF_TERMINALS = ("expired job", "absent elsewhere", "release of anybody", "deaf job")
"""Bugs that only jobs in terminals can show."""

OF_PREEMPTION = ("early grant", "forgotten restart", "lost victim", "no right", "victim last")
"""Bugs that only a run with preemption can show."""

BUGS: dict[str, Callable[[], None]] = {
    "no version check": no_version_check,
    "no lock": no_lock,
    "no fencing": no_fencing,
    "lost release": lost_release,
    "no remainder": no_remainder,
    "lost victim": lost_victim,
    "victim last": victim_last,
    "no right": no_right,
    "early grant": early_grant,
    "forgotten restart": forgotten_restart,
    "expired job": expired_job,
    "absent elsewhere": absent_elsewhere,
    "release of anybody": release_of_anybody,
    "deaf job": deaf_job,
    "no walls": no_walls,
    "no search": no_search,
}
"""Of the first two each store has its own; the other survives it."""
