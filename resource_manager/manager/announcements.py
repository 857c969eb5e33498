"""Announced demands: what tasks of running DAGs will ask for, and when; they hold nothing and bind nobody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Unpack

from resource_manager.core.announced import (
    ANNOUNCED_FOR_S,
    MAX_AFTER,
    MAX_AFTER_BYTES,
    MAX_ANNOUNCED,
    MAX_OF_RUN,
    run_of,
)
from resource_manager.core.changes import Announced, Change, Withdrawn
from resource_manager.core.cluster import ClusterState
from resource_manager.core.identifiers import check_names, check_text
from resource_manager.core.models import Request
from resource_manager.errors import InvalidRequestError
from resource_manager.manager.arguments import Dumpable
from resource_manager.manager.commit.protocol import Transactions
from resource_manager.manager.demand import Demand, DemandArguments
from resource_manager.manager.forecasts import Forecasts
from resource_manager.manager.queue_view import QueueView
from resource_manager.manager.requests import request_of
from resource_manager.manager.results import ComingDemand

MAX_COPIES = 1_000_000

FORGOTTEN = "it was announced a week ago"
CROWDED = "its owner announced the most, and no more are kept"


class Announcements:
    """Demands that tasks will make, each one commit of `Transactions`."""

    _commits: Transactions
    _forecasts: Forecasts
    _queue: QueueView

    def announce(
        self,
        lease_id: Dumpable | str | None = None,
        gpus: int | None = None,
        cpus: int | None = None,
        prefer_server: int | str | None = None,
        *,
        after: Sequence[str] = (),
        copies: int = 1,
        **options: Unpack[DemandArguments],
    ) -> bool:
        """Announce the request that a task will make, once those of the lease ids `after` have ended.

        It ends once the task asks, or is forgotten after a week. Mapped tasks are announced as one, by the
        lease id without a map index, with their number as `copies` (0: not known yet). Returns whether it is
        announced now: False if its task has asked already, if another owner announced it, or beyond
        `MAX_OF_RUN` of an owner's DAG run and `MAX_ANNOUNCED` in all, where the last of the owner with most
        gives way to another's. What is announced already stays unchanged. Raises as `submit` does for
        numbers outside the limits.
        """
        request = request_of(self._commits, Demand.of(lease_id, gpus, cpus, prefer_server, **options))
        check_names({"after": after})
        if type(copies) is not int:  # else no other process could read the state
            raise InvalidRequestError("{copies} must be a whole number, got {!r}", copies)
        if len(after) > MAX_AFTER or not 0 <= copies <= MAX_COPIES:
            text = "{after} may have {} ids and {copies} must be from 0 to {:,}, got {} and {:,}"
            raise InvalidRequestError(text, MAX_AFTER, MAX_COPIES, len(after), copies)
        if (size := sum(len(each.encode()) for each in after)) > MAX_AFTER_BYTES:
            raise InvalidRequestError("{after} has {:,} bytes, at most {:,} are kept", size, MAX_AFTER_BYTES)

        def step(cluster: ClusterState, now: float) -> list[Change]:
            lease_id = request.lease_id
            recent = [each for each in cluster.announced.values() if now - each.at <= ANNOUNCED_FOR_S]
            old = cluster.announced.keys() - {each.lease_id for each in recent}
            withdrawn: list[Change] = [Withdrawn(name, now, FORGOTTEN) for name in sorted(old)]
            has_asked = lease_id in cluster.pending or lease_id in cluster.leases
            if has_asked or any(each.lease_id == lease_id for each in recent):
                return withdrawn
            crowded_out = _crowded_out(recent, request)
            if crowded_out is None:
                return withdrawn
            withdrawn += [Withdrawn(each.lease_id, now, CROWDED) for each in crowded_out]
            return [*withdrawn, Announced(request, now, tuple(after), copies)]

        def is_announced(cluster: ClusterState, now: float) -> bool:
            known = cluster.announced.get(request.lease_id)
            return known is not None and known.request.owner == request.owner

        return self._commits.run(step, is_announced)

    def withdraw(
        self, lease_ids: Collection[str] = (), *, run: str = "", owner: str | None = None, reason: str = ""
    ) -> int:
        """Withdraw the announced demands of these ids, or of a DAG run; return how many there were.

        `run` is the part of their ids before `/task`; with an `owner` only that owner's.
        """
        check_text(reason=reason)
        wanted = set(lease_ids)
        withdrawn: list[Change] = []

        def step(cluster: ClusterState, now: float) -> list[Change]:
            withdrawn[:] = [
                Withdrawn(each.lease_id, now, reason)
                for each in cluster.announced.values()
                if (each.lease_id in wanted or (run and run_of(each.lease_id) == run))
                and owner in (None, each.request.owner)
            ]
            return [*withdrawn]

        self._commits.run(step, lambda cluster, now: None)
        return len(withdrawn)

    def coming(self) -> list[ComingDemand]:
        """Return the announced demands, the next first, those of unknown time last."""
        return self._queue.read(self._forecasts.coming)


def _crowded_out(recent: Sequence[Announced], request: Request) -> list[Announced] | None:
    """Return the demand that gives way to this request, none if there is space; None if none may."""
    mine = [each for each in recent if each.request.owner == request.owner]
    if sum(run_of(each.lease_id) == run_of(request.lease_id) for each in mine) >= MAX_OF_RUN:
        return None
    if len(recent) < MAX_ANNOUNCED:
        return []
    [(owner, count)] = Counter(each.request.owner for each in recent).most_common(1)
    if count <= len(mine) + 1:
        return None
    return [max((each for each in recent if each.request.owner == owner), key=lambda each: each.at)]
