"""Deadlines at risk: found by the expected ends of leases and requests, and told once through the history."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain

from resource_manager.core.changes import Change, DeadlineRisk
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Lease
from resource_manager.core.pending import PendingRequest
from resource_manager.manager.commit.protocol import Transactions
from resource_manager.manager.forecasts import Forecasts
from resource_manager.manager.queue_view import QueueView

RELIEF = 0.5
"""Part of the time until its expected end by which that has to be before the deadline for one to be at risk
no longer: each look draws other plays, and each service has learnt from other runs.
"""


class Deadlines:
    """Check of the deadlines that leases and pending requests state."""

    _commits: Transactions
    _forecasts: Forecasts
    _queue: QueueView

    def check_deadlines(self) -> int:
        """Store which deadlines are at risk from now on, and which no longer; return how many changed.

        One is at risk if the task should end by then with a probability of less than `1 - RISK`. What has an
        unknown end stays as it was until its deadline has passed. Runtimes and lags are learnt meanwhile.
        """
        version, risks = self._commits.read(lambda cluster, now: (cluster.version, _risks(cluster, now)))
        if version > self._forecasts.learnt_to:  # also while nobody reads an estimate: the history is long
            self._queue.read(self._forecasts.learn)
        if not risks:
            return 0
        ends_by = self._queue.read(self._forecasts.ends_by)
        told: list[Change] = []

        def step(cluster: ClusterState, now: float) -> list[Change]:
            told[:] = []
            for lease_id, deadline_at in _risks(cluster, now).items():
                before = cluster.at_risk.get(lease_id)
                if now >= deadline_at:
                    end: float | None = max(ends_by.get(lease_id, now), now)
                elif (end := ends_by.get(lease_id, before)) is not None:
                    spare_s = 0.0 if before is None else RELIEF * (end - now)
                    if end + spare_s <= deadline_at:
                        end = None
                if (end is None) != (before is None):
                    told.append(DeadlineRisk(lease_id, now, end))
            return told

        self._commits.run(step, lambda cluster, now: None)
        return len(told)


def _risks(cluster: ClusterState, now: float) -> dict[str, float]:
    """Return the deadlines by lease id, infinite for what was at risk and is over."""
    entries: Iterator[Lease | PendingRequest] = chain(cluster.leases.values(), cluster.pending.values())
    found = dict.fromkeys(cluster.at_risk, math.inf)
    for entry in entries:
        if entry.request.deadline_at is not None:
            found[entry.lease_id] = entry.request.deadline_at
    return found
