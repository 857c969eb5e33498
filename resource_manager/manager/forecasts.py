"""Expected starts with intervals: shared by all who ask, kept with their outcomes, and corrected by these."""

from __future__ import annotations

import math
import random
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter

from pydantic import TypeAdapter, ValidationError

from resource_manager.core.changes import Change, Granted
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Request
from resource_manager.core.names import name_of
from resource_manager.core.refusal import NotEstimated
from resource_manager.core.runtimes import runs_before
from resource_manager.errors import StoreError
from resource_manager.manager import results, serializers
from resource_manager.manager.commit.replica import Replica
from resource_manager.manager.queue_view import Age, for_a_while
from resource_manager.scheduling.reasons.announced_arrivals import Arrival, LagWalk
from resource_manager.scheduling.reasons.lease_ends import DrawnEnds, began_at
from resource_manager.scheduling.reasons.runtime_quantiles import COVERED, Coverage, RuntimeModel, RunWalk
from resource_manager.scheduling.reasons.start_estimates import RISK, Start, forecast_starts
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from resource_manager.storage import Store

MAX_ESTIMATE_S = 1.0
"""Processor time after which the starts that are left are not estimated, while somebody waits for them."""

BACKGROUND_S = 2.0
"""The same while nobody waits."""

RECORD = "estimates/starts"
"""Name of the record of estimates, beside the state; no server can have it."""

MAX_OUTCOMES = 1000
MAX_GIVEN = 2000
MAX_WALK = 5000
"""Maximum number of changes of the history that are looked at to learn from."""

ENOUGH_OUTCOMES = 100
"""Outcomes of a kind from which on it is told whether its intervals are calibrated."""

TOLERANCE = 0.05

MARGIN_S = 1.0
"""Part of each interval at both its ends: a grant takes a moment, and so does asking for it."""

FIRST_OFFSETS = (0.1, 0.1, 0)
"""Widening, in the logarithm of the wait, with which each kind begins: plays share what they do not know."""

CALIBRATED, FEW_DATA, UNKNOWN = "calibrated", "few data", "unknown"

HORIZONS_S = {"within 10 min": 600.0, "within an hour": 3600.0, "later": math.inf}
"""Kinds of estimates by how far they look ahead at most."""

MAX_SHOWN = 50
"""Maximum of outcomes that are shown one by one."""

NOT_YET = Start(None, why=NotEstimated(soon=True))


@dataclass(frozen=True, slots=True)
class GivenEstimate:
    """The first estimate that a request was given, in seconds since the epoch; `median` None: unknown."""

    at: float
    kind: str = ""
    median: float | None = None
    earliest: float | None = None
    latest: float | None = None
    is_overdue: bool = False
    """Whether the request was pending beyond the interval, which has been learnt from."""


@dataclass(frozen=True, slots=True)
class EstimateOutcome:
    """An estimate, and when the request did start."""

    lease_id: str
    given: GivenEstimate
    started_at: float
    name: str = ""

    @property
    def is_inside(self) -> bool:
        """Whether the start was in the interval."""
        earliest, latest = self.given.earliest, self.given.latest
        return (earliest is None or earliest <= self.started_at) and (
            latest is None or self.started_at <= latest
        )


@dataclass(slots=True)
class EstimateRecord:
    """What is kept of estimates: those given to pending requests, by sequence, and the last outcomes."""

    version: int = 0
    given: dict[int, GivenEstimate] = field(default_factory=dict)
    outcomes: list[EstimateOutcome] = field(default_factory=list)
    coverage: dict[str, tuple[float, float, int]] = field(default_factory=dict)

    def note(self, change: Change) -> None:
        """Take note of a grant; all kinds learn how far to widen their intervals."""
        if not isinstance(change, Granted):
            return
        lease = change.lease
        if (found := self.given.pop(lease.sequence, None)) is None:
            return
        outcome = EstimateOutcome(lease.lease_id, found, lease.granted_at, name_of(lease))
        self.outcomes = [*self.outcomes[1 - MAX_OUTCOMES :], outcome]
        if found.median is not None and not found.is_overdue:
            self._learn(found, outcome.started_at)

    def note_overdue(self, now: float) -> None:
        """Learn from requests that are pending beyond their intervals, without waiting for their starts."""
        for sequence, given in self.given.items():
            if given.latest is not None and given.latest < now and not given.is_overdue:
                self.given[sequence] = replace(given, is_overdue=True)
                self._learn(given, now)

    def _learn(self, given: GivenEstimate, at: float) -> None:
        """Move both ends of the intervals of that kind by where a start, or a wait up to now, fell."""
        low, high, seen = (math.log(_wait_s(each, given.at)) for each in (given.earliest, given.latest, at))
        coverage = Coverage(*self.coverage.get(given.kind, FIRST_OFFSETS))
        coverage.note(seen, low, high)
        below, above = max(coverage.below, 0.0), max(coverage.above, 0.0)  # never narrower than the plays
        self.coverage[given.kind] = below, above, coverage.outcomes

    def widened(self, start: Start, now: float) -> Start:
        """Return the start with the interval that outcomes of its kind ask for."""
        if start.at is None:
            return start
        below, above, _ = self.coverage.get(kind_of(start, now), FIRST_OFFSETS)
        wait_s = _wait_s(start.at, now)
        low_s = min(_wait_s(start.earliest, now) * math.exp(-below), wait_s)
        high_s = max(_wait_s(start.latest, now) * math.exp(above), wait_s)
        later_s = 0.0 if math.isinf(high_s) else now + high_s - (start.latest or start.at)
        return replace(
            start,
            earliest=max(min(now + low_s, start.at) - MARGIN_S, now),
            latest=None if math.isinf(high_s) else max(now + high_s, start.at) + MARGIN_S,
            ends_by=None if start.ends_by is None else start.ends_by + later_s,
        )

    def give(self, cluster: ClusterState, starts: Mapping[str, Start], now: float) -> None:
        """Keep the first estimate of each pending request, and no other."""
        given, self.given = self.given, {}
        in_order = sorted(cluster.pending.values(), key=attrgetter("sequence"))
        for pending in in_order[:MAX_GIVEN]:  # the last are too far away to have times
            start = starts[pending.lease_id]
            self.given[pending.sequence] = given.get(pending.sequence) or GivenEstimate(
                now, kind_of(start, now), start.at, start.earliest, start.latest
            )

    def answer(self, start: Start, now: float) -> results.ExpectedStart:
        """Return the start with how far it is to be trusted."""
        return serializers.estimate(start, self.confidence(kind_of(start, now)))

    def view(self) -> results.EstimatesView:
        """Return how often the last estimates came true, and the last of them."""
        found = [self._quality(kind) for kind in ("", *HORIZONS_S, UNKNOWN)]
        return {
            "kinds": [each for each in found if each["estimates"]],
            "started": [_started(outcome) for outcome in self.outcomes[: -MAX_SHOWN - 1 : -1]],
        }

    def _quality(self, kind: str) -> results.EstimateQuality:
        """Return how often those of a kind came true, of all kinds if it is empty."""
        outcomes = [each for each in self.outcomes if kind in ("", each.given.kind)]
        known = [each for each in outcomes if each.given.median is not None]
        errors = [abs(each.started_at - (each.given.median or 0.0)) for each in known]
        return {
            "kind": kind or "all",
            "estimates": len(outcomes),
            "inside_percent": 100 * sum(each.is_inside for each in known) / len(known) if known else None,
            "median_error_s": statistics.median(errors) if errors else None,
            "confidence": self.confidence(kind) if kind != UNKNOWN else UNKNOWN,
        }

    def confidence(self, kind: str) -> str:
        """Return whether the intervals of that kind, or of all, hold as many outcomes as they say.

        The earlier half of the last ones and the later half both have to: requests that wait for the same
        lease are right or wrong together, and so many of them may make up for as many others by chance.
        """
        kinds = (kind,) if kind else HORIZONS_S
        found = [each.is_inside for each in self.outcomes if each.given.kind in kinds]
        found += [False for given in self.given.values() if given.is_overdue and given.kind in kinds]
        halves = found[: len(found) // 2], found[len(found) // 2 :]
        if len(found) < ENOUGH_OUTCOMES or any(
            abs(sum(half) / len(half) - COVERED) > TOLERANCE for half in halves
        ):
            return FEW_DATA
        return CALIBRATED


RECORDS = TypeAdapter(EstimateRecord)


def kind_of(start: Start, now: float) -> str:
    """Return the kind of an estimate: by how far it looks ahead."""
    if start.at is None:
        return UNKNOWN
    return next(kind for kind, horizon_s in HORIZONS_S.items() if start.at - now < horizon_s)


def _started(outcome: EstimateOutcome) -> results.StartedRequest:
    given = outcome.given
    return {
        "task_id": outcome.lease_id,
        "name": outcome.name or outcome.lease_id,
        "estimated_at": given.at,
        "at": given.median,
        "earliest": given.earliest,
        "latest": given.latest,
        "started_at": outcome.started_at,
        "inside": given.median is not None and outcome.is_inside,
    }


def _wait_s(at: float | None, now: float) -> float:
    return math.inf if at is None else max(at - now, 1.0)


def kept_record(store: Store) -> EstimateRecord:
    """Return what is kept of estimates; nothing of a form that a newer service beside this one writes."""
    found = store.reports.records([RECORD]).get(RECORD, b"")
    with suppress(ValidationError):
        return RECORDS.validate_json(found)
    return EstimateRecord()


class Forecasts:
    """Expected starts of a store's pending requests, computed by one thread for all who ask; thread-safe.

    What costs much is computed in the background: meanwhile the last answer is given, at most about
    `MAX_AGE_S` old. `rules` returns the circumstances once grants go on.
    """

    def __init__(self, store: Store, rules: Callable[[ClusterState, float], SchedulingPass]) -> None:
        self._store, self._rules = store, rules
        self._replica = Replica(store)
        self._mutex = threading.Lock()
        self._learning = threading.Lock()
        self._runs: RunWalk | None = None
        self._lags = LagWalk()
        self.learnt_to = 0
        """Version up to which runtimes and lags are learnt."""
        self._age = Age()
        self._starts: dict[str, results.ExpectedStart] = {}
        self._thread: threading.Thread | None = None

    def shared(self, cluster: ClusterState, now: float) -> Callable[[str], results.ExpectedStart]:
        """Return the function (lease id) -> its expected start, of this state or of a little before."""
        with self._mutex:
            if not self._age.is_fresh(cluster.version, now):
                if self._age.is_cheap:
                    self.update(cluster, now, MAX_ESTIMATE_S)
                elif self._thread is None:
                    self._thread = threading.Thread(target=self._in_background, daemon=True)
                    self._thread.start()
            starts = self._starts
        return lambda lease_id: starts.get(lease_id) or serializers.estimate(NOT_YET)

    def update(self, cluster: ClusterState, now: float, limit_s: float) -> None:
        """Estimate all starts anew, in so much processor time, and learn from those that came since."""
        with self._age.measured(cluster.version, now):
            starts = self._forecast(cluster, now, limit_s)
            record = kept_record(self._store)
            before = record.given.copy()
            for version, change in self._changes(max(record.version, cluster.version - MAX_WALK)):
                record.note(change)
                record.version = version
            record.note_overdue(now)
            starts = {lease_id: record.widened(start, now) for lease_id, start in starts.items()}
            record.give(cluster, starts, now)
            if record.given != before:
                with suppress(StoreError):  # who may only read, or finds it full, is answered as well
                    self._store.reports.put(RECORD, b"{}", RECORDS.dump_json(record), 1.0)
            self._starts = {lease_id: record.answer(start, now) for lease_id, start in starts.items()}

    def alone(self, cluster: ClusterState, now: float, request: Request) -> results.ExpectedStart:
        """Return the expected start of one request, as if it were queued now unless it is."""
        extra = () if request.lease_id in cluster.pending else (request,)
        starts = self._forecast(cluster, now, MAX_ESTIMATE_S, extra, request.lease_id)
        record = kept_record(self._store)
        return record.answer(record.widened(starts[request.lease_id], now), now)

    def ends_by(self, cluster: ClusterState, now: float) -> dict[str, float]:
        """Return when what has a deadline should end, four times of five, by lease id, as far as is known."""
        found: dict[str, float | None] = {}
        if waiting := [each for each in cluster.pending.values() if each.request.deadline_at is not None]:
            start_of = self.shared(cluster, now)
            found = {each.lease_id: start_of(each.lease_id)["ends_by"] for each in waiting}
        if running := [each for each in cluster.leases.values() if each.request.deadline_at is not None]:
            with self._learning:
                estimate = self._model(cluster).estimate
            for lease in running:
                is_known = cluster.runtimes.runtime_of(lease.request) is not None
                runtime = estimate(lease.request) if is_known else None  # other tasks tell nothing
                began = began_at(lease)
                left = None if runtime is None else runtime.given(now - began)
                found[lease.lease_id] = None if left is None else began + left.at(1 - RISK)
        return {lease_id: max(ends_by, now) for lease_id, ends_by in found.items() if ends_by is not None}

    def coming(self, cluster: ClusterState, now: float) -> list[results.ComingDemand]:
        """Return the announced demands, the next first, those of unknown time last."""
        if cluster.announced and cluster.pending:  # what comes after them goes by their starts
            self.shared(cluster, now)
        demands = [serializers.coming(arrival) for arrival in self._arrivals(cluster, now)]
        return sorted(demands, key=lambda each: math.inf if each["at"] is None else each["at"])

    def _arrivals(self, cluster: ClusterState, now: float) -> list[Arrival]:
        if not cluster.announced:
            return []
        starts = {
            lease_id: (start["earliest"] or start["at"], start["at"], start["latest"] or start["at"])
            for lease_id, start in self._starts.items()
            if start["at"] is not None
        }
        with self._learning:
            runtime_of = self._model(cluster).estimate
            return list(self._lags.arrivals(cluster, now, runtime_of, starts))

    def _in_background(self) -> None:
        try:
            with suppress(StoreError), self._replica:  # it is made again for who asks next
                self.update(self._replica.refresh(), self._store.now(), BACKGROUND_S)
        finally:
            self._thread = None

    def _forecast(
        self,
        cluster: ClusterState,
        now: float,
        limit_s: float,
        extra: Sequence[Request] = (),
        wanted: str = "",
    ) -> dict[str, Start]:
        current = self._rules(cluster, now)
        requests = (*(pending.request for pending in cluster.pending.values()), *extra)
        if not requests:
            return {}
        draw = random.Random(cluster.version).random
        with self._learning:
            drawn = DrawnEnds(cluster, requests, self._model(cluster).estimate, draw, now)
        arrivals = [each for each in self._arrivals(cluster, now) if each.times is not None]
        return forecast_starts(
            cluster,
            current,
            drawn,
            extra,
            for_a_while(limit_s),
            (wanted,) if wanted else (),
            sorted(arrivals, key=lambda arrival: arrival.at(0.5)),
        )

    def learn(self, cluster: ClusterState, now: float) -> None:
        """Learn runtimes and lags from what the history has of late."""
        with self._learning:
            self._model(cluster)

    def _model(self, cluster: ClusterState) -> RuntimeModel:
        """Return the runtimes that are learnt from the history, and from what the state knows of others."""
        changes = list(self._changes(max(self.learnt_to, cluster.version - MAX_WALK)))
        if self._runs is None:
            # What the walk learns itself is left out of what the state knows already.
            known = [each for version, each in changes if version <= cluster.version]
            self._runs = RunWalk(RuntimeModel(runs_before(cluster.runtimes.runs, (), known)))
        for self.learnt_to, change in changes:
            self._runs.add(change)
            self._lags.add(change)
        return self._runs.model

    def _changes(self, after: int) -> Iterator[tuple[int, Change]]:
        while page := self._store.history(after):
            yield from page
            after = page[-1][0]
