"""When leases end in a play of the queue: when they are expected to, or by runtimes that are drawn."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Lease, Request
from resource_manager.core.names import is_hold
from resource_manager.core.runtimes import KEPT_RUNTIMES, RAN, class_of
from resource_manager.core.team_ledger import TeamLedger
from resource_manager.scheduling.queue.runtime_limits import at_limit, count_of
from resource_manager.scheduling.reasons.runtime_quantiles import POINTS, RuntimeQuantiles

MAX_PLAYS = 40
"""Maximum number of plays with drawn runtimes."""

STRATA = MAX_PLAYS + 1
"""Number of parts of the levels, a prime: over the plays, a lease's end is drawn from each but one."""

COMMON = 0.5
"""Part of the runs of a play that are all at one level: errors of estimated runtimes do not average out."""

OVERDUE_FRACTION = 0.1
"""Part of its age for which a task past its expected end is assumed to run on."""

Ends = Callable[[Lease, float], float | None]
"""(lease, now) -> the end of its job, never before now; None if it is unknown."""


def expected_end(lease: Lease, now: float, cluster: ClusterState) -> float | None:
    """Return a lease's expected end, never before now; None if its runtime is unknown."""
    end = _end(lease, now, cluster.runtimes.runtime_of)
    if end is None or end >= now:
        return end
    return now + max(OVERDUE_FRACTION * (now - began_at(lease)), 1.0)


def _end(lease: Lease, now: float, runtime_of: Callable[[Request], float | None]) -> float | None:
    """Return when a lease ends by that runtime, or by its preemption; None if that is unknown."""
    if lease.quarantined:
        return None
    if lease.preempted_by:
        return max(lease.preempt_until, now)
    runtime = runtime_of(lease.request)
    return None if runtime is None else began_at(lease) + runtime


def began_at(lease: Lease) -> float:
    """Return when a job would have begun that had run in one go as long as by now.

    One that was preempted goes on from what it saved, so that its earlier leases count, of this try alone.
    """
    return lease.granted_at - count_of(lease.request.labels, RAN)


def within_limit(ledger: TeamLedger | None, lease: Lease, end: float | None, now: float) -> float | None:
    """Return when a lease ends whose job ends at `end`, None for never: at its limit at the latest."""
    limit_at = at_limit(ledger, lease)
    if lease.quarantined or lease.preempted_by or limit_at == math.inf:
        return end
    return max(limit_at, now) if end is None else min(end, max(limit_at, now))


class DrawnEnds:
    """Ends of leases by runtimes that are drawn from their quantiles, given how long they have run already.

    `draw` returns a number from 0 to below 1. `vary` is False if all ends are certain or unknown.
    """

    def __init__(
        self,
        cluster: ClusterState,
        requests: Iterable[Request],
        quantiles_of: Callable[[Request], RuntimeQuantiles | None],
        draw: Callable[[], float],
        now: float,
    ) -> None:
        self.draw, self._quantiles_of, self.now = draw, quantiles_of, now
        self._known: dict[tuple[object, ...], RuntimeQuantiles | None] = {}
        self._over = {name: len(runs) for name, runs in cluster.runtimes.runs.items()}
        self._elapsed: dict[str, list[float]] = defaultdict(list)
        """How long leases of a class have run of which few are over."""
        for lease in cluster.leases.values():
            name = class_of(lease.request)
            if self._over.get(name, 0) < KEPT_RUNTIMES and not lease.quarantined:  # it may be over long since
                self._elapsed[name].append(now - began_at(lease))
        self._fixed: list[tuple[float | None, Lease]] = []
        self._ends: list[tuple[list[float], int, int, Lease]] = []
        """Running leases with the quantiles of their ends, and a stride and a begin through the strata."""
        self._plays = 0
        self._common = 0.5
        """Level of the runs of this play that are all at one."""
        self._of_many = 1 + int(draw() * MAX_PLAYS), int(draw() * STRATA)
        for lease in cluster.leases.values():
            found = None if lease.quarantined else self._of(lease.request)
            if lease.preempted_by or found is None:
                end = within_limit(cluster.ledger, lease, self(lease, now), now)
                self._fixed.append((end, lease))
            else:
                began = began_at(lease)
                left = found.given(now - began).log_s
                limit_at = at_limit(cluster.ledger, lease)
                ends = [min(began + math.exp(log_s), limit_at) for log_s in left]
                own = 1 + int(draw() * MAX_PLAYS), int(draw() * STRATA)
                self._ends.append((ends, *(self._of_many if draw() < COMMON else own), lease))
        self.vary = any(ends[0] < ends[-1] for ends, _, _, _ in self._ends) or any(
            found is not None and found.log_s[0] < found.log_s[-1] for found in map(self._of, requests)
        )

    def running(self) -> list[tuple[float | None, Lease]]:
        """Return the leases of now, each with an end that is drawn for one play.

        Levels are drawn from strata (Latin hypercube; McKay, Beckman and Conover, Technometrics 1979).
        """
        draw, now, found, play = self.draw, self.now, self._fixed.copy(), self._plays
        self._plays += 1
        self._common = ((self._of_many[0] * play + self._of_many[1]) % STRATA + draw()) / STRATA
        for ends, stride, begin, lease in self._ends:  # for thousands of leases, in each play
            place = ((stride * play + begin) % STRATA + draw()) * (POINTS / STRATA)
            index = int(place)
            end = ends[index]
            end += (ends[index + 1] - end) * (place - index)
            found.append((end if end > now else now, lease))
        return found

    def _of(self, request: Request) -> RuntimeQuantiles | None:
        by_hand = is_hold(request.lease_id, request.labels)
        key = (class_of(request), request.team, request.shape, request.expected_runtime_s, by_hand)
        if key not in self._known:
            found, name = self._quantiles_of(request), class_of(request)
            if found is not None and request.expected_runtime_s is None and name in self._elapsed:
                found = found.beside(self._over.get(name, 0), self._elapsed[name])
            self._known[key] = found
        return self._known[key]

    def __call__(self, lease: Lease, now: float) -> float | None:
        elapsed_s = now - began_at(lease)
        return _end(lease, now, lambda request: self._drawn_s(request, elapsed_s))

    def _drawn_s(self, request: Request, elapsed_s: float) -> float | None:
        found = self._of(request)
        if found is None:
            return None
        return found.given(elapsed_s).at(self._common if self.draw() < COMMON else self.draw())
