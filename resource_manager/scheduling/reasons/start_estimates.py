"""Estimated starts of pending requests: the queue played forward through the ends of leases.

Each play goes through the allocator's own steps. One play with expected runtimes gives a start, many with
drawn ones a median and an interval that should hold four starts of five.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Lease, Request
from resource_manager.core.names import name_of
from resource_manager.core.refusal import (
    EndUnknown,
    Fact,
    Grounds,
    NoKnownEnd,
    NotEstimated,
    PriceUnknown,
    RefusalKind,
    TooFar,
)
from resource_manager.scheduling import allocator
from resource_manager.scheduling.placement.gang_slots import could_start
from resource_manager.scheduling.reasons.announced_arrivals import Arrival
from resource_manager.scheduling.reasons.capacity_grounds import (
    leases_in_the_way,
    no_capacity,
    unreleased_lease,
)
from resource_manager.scheduling.reasons.feasibility import standings
from resource_manager.scheduling.reasons.lease_ends import (
    MAX_PLAYS,
    DrawnEnds,
    Ends,
    expected_end,
    within_limit,
)
from resource_manager.scheduling.reasons.play_events import (
    apply_cleaned,
    apply_event,
    grant,
    openings,
    preempt,
    reopenings,
    requests_of,
)
from resource_manager.scheduling.reasons.runtime_quantiles import MISSED
from resource_manager.scheduling.scheduling_pass import SchedulingPass

MAX_STEPS = 500
"""Maximum number of steps of a play, each a lease's end; a request that starts later gets no estimate.

Windows that are over once more have as many steps of their own.
"""

LONG_QUEUE = 100
"""Number of pending requests above which leases that end at about the same time end together in a play."""

TOGETHER = 0.05
"""Part of the time until an end within which others end with it: little beside what runtimes vary by."""

RISK = 0.2
"""Probability of missing a deadline from which on it is at risk."""

CLEANING_S = 1.0
"""Assumed time until GPUs whose lease has ended are clean."""


@dataclass(frozen=True, slots=True)
class Start:
    """Estimated start of a request; `at` is None if it is unknown, on the grounds in `why`.

    Four times of five it should be between `earliest` and `latest`, None without a bound, and the task should
    end by `ends_by`, None where no runtime of it is known. `plays` is the number of plays that this stands
    on. In most of them the request starts on `node`, when the lease named `after` ends, if it waits for one.
    """

    at: float | None
    node: str | None = None
    why: Grounds | Fact | None = None
    earliest: float | None = None
    latest: float | None = None
    after: str = ""
    plays: int = 1
    ends_by: float | None = None


LATER = Start(None, why=NotEstimated())


@dataclass(slots=True)
class _Play:
    """One play: how far it came, and of each start by lease id: time, node, lease that ended, own end."""

    starts: dict[str, tuple[float, str, Lease | None, float | None]] = field(default_factory=dict)
    endless: set[str] = field(default_factory=set)
    guesses: set[str] = field(default_factory=set)
    """Leases that would not have begun without the end of one whose runtime is not known."""
    at: float = 0.0
    is_cut: bool = False
    too_far: bool = False


def estimate_starts(
    cluster: ClusterState,
    current: SchedulingPass,
    extra: Iterable[Request] = (),
    goes_on: Callable[[], bool] = lambda: True,
    wanted: Collection[str] = (),
    arrivals: Sequence[Arrival] = (),
    since: float | None = None,
) -> dict[str, Start]:
    """Estimate the start of every pending request, and of `extra` ones as if they were queued now.

    A lease is assumed to end when its runtime is over, at its limit at the latest, and never if neither is
    known: its TTL is renewed while the job runs and tells nothing about its end. Announced demands are queued
    when they should be made. Once `goes_on` returns False, the starts that are left are not estimated, nor
    others than those `wanted` once these are known. The cluster is left unchanged. Times are seconds of the
    store's clock.
    """
    since = current.now if since is None else since
    starts: dict[str, Start] = {}
    with cluster.trial():
        cluster.apply(*allocator.enqueue(cluster, extra, current.now))
        if not cluster.pending:
            return starts
        ends_at = partial(expected_end, cluster=cluster)
        running = [
            (within_limit(cluster.ledger, lease, ends_at(lease, since), since), lease)
            for lease in cluster.leases.values()
        ]
        own = frozenset(cluster.pending)
        events = chain(running, requests_of(arrivals))
        play = _play(cluster, current, events, ends_at, goes_on, wanted or own, since)
        for lease_id in own & play.starts.keys():
            at, node, after, end = play.starts[lease_id]
            starts[lease_id] = Start(
                at, node, None, at, at, "" if after is None else name_of(after), ends_by=end
            )
        if wanted and starts.keys() >= set(wanted):
            return starts
        if play.is_cut:
            return dict.fromkeys(own & cluster.pending.keys(), LATER) | starts
        last = replace(current, now=play.at, suspended=None)
        unknown = _why_unknown(cluster, last, play.endless, wanted or own, too_far=play.too_far)
        left = own - starts.keys()
        why = [(request, found) for request, found in unknown if request.lease_id in left]
    for request, found in why:  # without one: what the closed servers have now, not what they will have
        starts[request.lease_id] = Start(None, why=no_capacity(cluster, request) if found is None else found)
    return starts


def forecast_starts(
    cluster: ClusterState,
    current: SchedulingPass,
    drawn: DrawnEnds,
    extra: Sequence[Request] = (),
    goes_on: Callable[[], bool] = lambda: True,
    wanted: Collection[str] = (),
    arrivals: Sequence[Arrival] = (),
) -> dict[str, Start]:
    """Estimate starts as `estimate_starts`, with intervals: by plays in which runtimes are drawn.

    There are `MAX_PLAYS`, or as many as end while `goes_on` returns True. If all runtimes are certain, one
    counts for all, which would be equal; unlike expected runtimes, these are of team and shape. A play ends
    once those `wanted` have started, by default all.
    """
    starts = estimate_starts(cluster, current, extra, goes_on, wanted, arrivals, drawn.now)
    if LATER in starts.values():
        return starts
    plays: list[_Play] = []
    count = MAX_PLAYS if drawn.vary or arrivals else 1
    with cluster.trial():
        cluster.apply(*allocator.enqueue(cluster, extra, current.now))
        while len(plays) < count:
            with cluster.trial():
                events = chain(drawn.running(), requests_of(arrivals, drawn.draw))
                play = _play(cluster, current, events, drawn, goes_on, wanted or starts, drawn.now)
            if play.is_cut:
                break
            plays.append(play)
    if plays:
        for lease_id in wanted or starts:
            found = _of_plays(plays, lease_id, starts[lease_id], drawn.now)
            starts[lease_id] = replace(found, plays=len(plays) * (MAX_PLAYS // count))
    return starts


def _of_plays(plays: Sequence[_Play], lease_id: str, expected: Start, now: float) -> Start:
    """Return the start by the quantiles of the plays, or as expected if these stand on a guess.

    What other tasks took would mislead. The expected start goes by known ends alone; others may come first.
    """
    found = [play.starts[lease_id] for play in plays if lease_id in play.starts]
    if expected.at is None:
        return expected
    if 2 * sum(lease_id in play.guesses for play in plays) > len(found):
        return replace(expected, earliest=now)
    times = sorted(at for at, _, _, _ in found)
    ends = sorted(end for _, _, _, end in found if end is not None)

    def at(level: float, times: Sequence[float] = times) -> float | None:
        place = int(level * len(plays))
        return times[place] if place < len(times) else None

    median = at(0.5)
    if median is None:
        return Start(None, why=TooFar(MAX_STEPS))
    [(node, _)] = Counter(node for _, node, _, _ in found).most_common(1)
    leases = {each.lease_id: each for _, _, each, _ in found if each is not None}
    [(first, _)] = Counter("" if each is None else each.lease_id for _, _, each, _ in found).most_common(1)
    after = name_of(leases[first]) if first else ""
    return Start(median, node, None, at(MISSED), at(1 - MISSED), after, ends_by=at(1 - RISK, ends))


def _play(
    cluster: ClusterState,
    current: SchedulingPass,
    events: Iterable[tuple[float | None, Lease | Request]],
    ends_at: Ends,
    goes_on: Callable[[], bool],
    wanted: Collection[str],
    since: float,
) -> _Play:
    """Play the queue of the cluster forward, in its trial, until nothing wanted is pending.

    `events` are running leases with their ends, and requests with the times at which they are queued. Those
    before the pass, from `since` on, come without a grant.
    """
    now = current.now
    play, missing = _Play(at=now), set(wanted)
    ends: list[tuple[float, float, Lease | Request | None]] = [
        (opening, -number, None) for number, opening in enumerate(openings(cluster, now), start=1)
    ]
    for number, (end, event) in enumerate(events, start=len(ends) + 1):
        if end is None:
            play.endless.add(event.lease_id)
        else:
            ends.append((end, event.fencing_token if isinstance(event, Lease) else -number, event))
    heapq.heapify(ends)
    after: Lease | None = None
    ended: list[Lease | None] = []
    """Leases that have ended since the last grants."""
    reopened: set[tuple[float, float]] = set()
    """Ends of windows that come again, each with its number among events."""
    steps = 0
    is_long = len(cluster.pending) > LONG_QUEUE
    together = TOGETHER if is_long else 0.0
    may_preempt = preempts = cluster.teams.preemption and not is_long
    clean_at = since + CLEANING_S
    if clean_at <= now:
        apply_cleaned(cluster, now)
    while ends and ends[0][0] < now:
        ended.append(apply_event(cluster, heapq.heappop(ends)[2], now))
    dirty = any(state.cleaning for state in cluster.nodes)

    def is_unknown(lease: Lease) -> bool:
        return not lease.preempted_by and cluster.runtimes.runtime_of(lease.request) is None

    while steps < MAX_STEPS:
        steps += 1
        if not goes_on():
            play.is_cut = True
            return play
        at_that_time = SchedulingPass(
            current.policy, current.order, play.at, current.suspended, current.limits
        )
        is_guess = after is not None and (after.lease_id in play.guesses or is_unknown(after))
        for lease in grant(cluster, at_that_time, ended):
            own_end = ends_at(lease, play.at)
            ends_by = None if is_unknown(lease) else own_end
            play.starts.setdefault(lease.lease_id, (play.at, lease.placement.node, after, ends_by))
            if is_guess:
                play.guesses.add(lease.lease_id)
            missing.discard(lease.lease_id)
            end = within_limit(cluster.ledger, lease, own_end, play.at)
            if end is None:
                play.endless.add(lease.lease_id)
            else:
                heapq.heappush(ends, (end, lease.fencing_token, lease))
        is_over = not missing
        for lease in preempt(cluster, at_that_time) if preempts and not is_over else ():
            heapq.heappush(ends, (lease.preempt_until, lease.fencing_token + 0.5, lease))
        if dirty and not is_over:
            play.at, dirty = clean_at, False
            apply_cleaned(cluster, play.at)
            continue
        if is_over or not ends:
            return play
        play.at, place, entry = heapq.heappop(ends)
        steps -= (play.at, place) in reopened
        preempts = may_preempt and entry is None  # in each step it would cost more than all else
        after = apply_event(cluster, entry, play.at)
        ended = [after]
        last, total, count = play.at + together * (play.at - now), play.at, 1
        while ends and ends[0][0] <= last and (is_long or isinstance(ends[0][2], Request)):
            end, _, entry = heapq.heappop(ends)
            ended.append(apply_event(cluster, entry, end))
            total, count = total + end, count + 1
        if is_long:
            play.at = total / count
        for opening in reopenings(cluster, ended, now, play.at):
            if opening[:2] not in reopened and len(reopened) < MAX_STEPS:
                reopened.add(opening[:2])
                heapq.heappush(ends, opening)
    play.too_far = True
    return play


def _why_unknown(
    cluster: ClusterState,
    current: SchedulingPass,
    endless: Collection[str],
    wanted: Collection[str],
    *,
    too_far: bool,
) -> Iterator[tuple[Request, Grounds | Fact | None]]:
    """Yield the wanted requests that no known lease end lets start, and why; None for closed servers."""
    in_the_way: dict[tuple[object, ...], Fact] = {}
    ahead: Grounds | Fact | None = None
    """Reason for which the first request that blocks the queue has no start."""
    only = set(cluster.pending)
    for standing in standings(cluster, current, only=only):
        request = standing.entry.request
        why: Grounds | Fact | None
        match standing.refusal.kind:
            case RefusalKind.NEVER_FITS:
                why = standing.refusal
            case RefusalKind.MAINTENANCE:
                why = standing.refusal if cluster.windows else None
            case RefusalKind.NO_CAPACITY if not could_start(cluster, request):
                why = None
            case RefusalKind.PRICE:
                why = PriceUnknown()
            case _ if too_far:
                why = TooFar(MAX_STEPS)
            case RefusalKind.QUOTA:  # it blocks nobody
                why = standing.refusal
            case RefusalKind.BEHIND_QUEUE:
                why = ahead or standing.refusal  # who is before it may have another reason, or run
            case RefusalKind.AWAITING_RELEASE:
                why = unreleased_lease(cluster.nodes, request)
                ahead = ahead or why
            case _:
                if request.shape not in in_the_way:
                    in_the_way[request.shape] = _endless(cluster, request, endless)
                why = in_the_way[request.shape]
                ahead = ahead or why
        if request.lease_id in wanted:
            yield request, why
        if ahead is not None:  # nobody else's reason is needed any more, each of which costs much
            only.intersection_update(wanted)


def _endless(cluster: ClusterState, request: Request, endless: Collection[str]) -> EndUnknown | NoKnownEnd:
    found = [lease for lease in leases_in_the_way(cluster, request) if lease.lease_id in endless]
    if not found:
        return NoKnownEnd()
    return EndUnknown(name_of(found[0]), len(found) - 1)
