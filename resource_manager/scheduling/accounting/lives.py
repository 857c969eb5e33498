"""The one walk over a history: lives of leases and waits of requests, from which all others read.

Hours, metrics, usage over time, timeline and replays need no kind of change but through these.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from resource_manager.core import changes
from resource_manager.core.cluster import Snapshot
from resource_manager.core.models import MILLI_PER_GPU, Lease, Node, Placement, Request
from resource_manager.core.pending import PendingRequest
from resource_manager.core.team_ledger import held_milli


class Spell(NamedTuple):
    """Time in which a lease was active all along, or quarantined: thousandths of GPUs by type.

    `outcome` is that of its end, or of the end of members, None as long as it goes on.
    """

    start: float
    end: float
    quarantined: bool
    milli: Mapping[str, int]
    outcome: str | None = None


class End(NamedTuple):
    """End of members of a lease, each with its rank, mostly of all at once: its outcome, why, and by whom."""

    ranked: tuple[tuple[int, Placement], ...]
    at: float
    outcome: str = ""
    expired: bool = False
    reason: str = ""
    by: str = ""


class Wait(NamedTuple):
    """Time of one request in the queue."""

    request: Request
    start: float
    end: float = math.inf


@dataclass(slots=True)
class Life:
    """One lease from its grant on: `granted` as it began, `lease` as it is, without members that ended.

    It waited `waited_s` for its grant. Of its preemptions there are the times of all, also of those that were
    taken back, and since when and for which request it is being preempted now. `measures` are what servers
    measured of it: the part of the time in which it computed, and energy.
    """

    granted: Lease
    lease: Lease
    since: float
    quarantined: bool
    waited_s: float = 0.0
    spells: list[Spell] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    is_over: bool = False
    preempted_at: float | None = None
    preempted_by: str = ""
    preemptor: Request | None = None
    preemptions: tuple[float, ...] = ()
    cleaned_at: float = -math.inf
    measures: list[tuple[float, float | None]] = field(default_factory=list)

    @property
    def fencing_token(self) -> int:
        return self.lease.fencing_token

    @property
    def ended_at(self) -> float:
        """When its last members ended, infinite while it lives."""
        return self.ends[-1].at if self.is_over else math.inf

    def was_quarantined(self, at: float) -> bool:
        """Return whether it was quarantined before the change of that time."""
        return next((spell.quarantined for spell in self.spells if spell.end >= at), self.quarantined)


class Lives:
    """Walk over a history from a state on; `add` takes every change once, in order.

    It knows all lives, or of those that are over the last `max_ended`. `allocated_milli` of `capacity_milli`
    thousandths of GPUs are allocated now; `pending` waits. Changes of leases that it does not know are older
    than the history.
    """

    def __init__(self, before: Snapshot, max_ended: int | None = None) -> None:
        self.lives: dict[int, Life] = {}
        self.waits: deque[Wait] = deque(maxlen=max_ended)
        self.pending: dict[str, Wait] = {}
        self.allocated_milli = 0
        self.capacity_milli = 0
        self._types: dict[tuple[str, int], str] = {}
        self._max_ended = math.inf if max_ended is None else max_ended
        self._over: deque[int] = deque()
        self._take_inventory(before.nodes)
        self.resume((*before.leases, *before.remainders), before.pending)

    def resume(self, leases: Iterable[Lease], pending: Iterable[PendingRequest]) -> None:
        """Go on with exactly these leases and requests: a reset, which no history records, ended others."""
        held = {lease.fencing_token: lease for lease in leases}
        for token in [token for token, life in self.lives.items() if not life.is_over and token not in held]:
            self.allocated_milli -= held_milli(self.lives.pop(token).lease)
        for token, lease in held.items():
            if token not in self.lives:
                self._begin(lease)
        known = self.pending
        self.pending = {
            each.lease_id: known.get(each.lease_id, Wait(each.request, each.queued_at)) for each in pending
        }

    def add(self, change: changes.Change) -> Life | None:
        """Take the next change; return the life that it is about, if it is about one that is known."""
        match change:
            case changes.Granted(lease=lease):
                wait = self._end_wait(lease.lease_id, change.at)
                life = self._begin(lease)
                since = lease.queued_at if wait is None else wait.start
                life.waited_s = 0.0 if since is None else max(lease.granted_at - since, 0.0)
                return life
            case changes.Queued(request=request):  # of a preempted lease a second time
                self._end_wait(request.lease_id, change.at)
                self.pending[request.lease_id] = Wait(request, change.at)
            case changes.Cancelled():
                self._end_wait(change.lease_id, change.at)
            case changes.InventoryChanged(nodes=nodes):
                self._take_inventory(nodes)
            case changes.GpuCleaned() | changes.Released() | changes.Expired() | changes.MembersReleased():
                return self._end(change)
            case changes.Quarantined() | changes.Renewed() | changes.Preempting() if known := self.lives.get(
                change.fencing_token
            ):
                self._turn(known, change)
                return known
        return None

    def spells(self, life: Life, now: float) -> Iterator[Spell]:
        """Yield the spells of a life up to now; what goes on has no outcome."""
        yield from life.spells
        if not life.is_over:
            yield self._spell(life, now)

    def _begin(self, lease: Lease) -> Life:
        life = Life(lease, lease, lease.granted_at, lease.quarantined)
        self.lives[lease.fencing_token] = life
        self.allocated_milli += held_milli(lease)
        return life

    def _turn(self, life: Life, change: changes.Quarantined | changes.Renewed | changes.Preempting) -> None:
        """Note what a change says of a lease that goes on: a preemption, another spell."""
        quarantined = isinstance(change, changes.Quarantined)
        if isinstance(change, changes.Preempting):
            by = change.preemptor
            life.preempted_at, life.preempted_by = (change.at if by else None), by
            life.preemptor = wait.request if (wait := self.pending.get(by)) else None
            life.preemptions = (*life.preemptions, change.at)
            life.lease = replace(life.lease, preempt_until=change.until if by else math.inf)
            return
        if isinstance(change, changes.Renewed):
            quarantined = change.at > life.lease.preempt_until
        if quarantined != life.quarantined:
            life.spells.append(self._spell(life, change.at))
            life.since, life.quarantined = change.at, quarantined

    def _end(
        self, change: changes.GpuCleaned | changes.Released | changes.Expired | changes.MembersReleased
    ) -> Life | None:
        life = self.lives.get(change.fencing_token)
        if life is None:
            return None
        if isinstance(change, changes.GpuCleaned):
            life.cleaned_at = max(life.cleaned_at, change.at)
            if change.busy is not None:
                life.measures.append((change.busy, change.energy_kwh))
            return life
        outcome = "" if isinstance(change, changes.Expired) else change.outcome
        rest: Lease | None = None
        ended = tuple(life.lease.ranked)
        if isinstance(change, changes.MembersReleased):
            rest = life.lease.without(set(change.ranks))
            ended = tuple((rank, member) for rank, member in ended if rank in change.ranks)
        # What the job of members that are left did so far has the same outcome.
        spells = [*life.spells, self._spell(life, change.at)]
        life.spells = [
            spell if spell.outcome is not None else spell._replace(outcome=outcome) for spell in spells
        ]
        is_expired, reason = isinstance(change, changes.Expired), getattr(change, "reason", "")
        life.ends.append(End(ended, change.at, outcome, is_expired, reason, change.by))
        self.allocated_milli -= held_milli(life.lease) - (0 if rest is None else held_milli(rest))
        if rest is None:
            life.is_over = True
            self._over.append(change.fencing_token)
            while len(self._over) > self._max_ended:
                self.lives.pop(self._over.popleft(), None)
        else:
            life.lease, life.since, life.quarantined = rest, change.at, True
        return life

    def _spell(self, life: Life, end: float) -> Spell:
        milli: dict[str, int] = {}
        for member in life.lease.members:
            for gpu_id in member.gpu_ids:
                gpu_type = self._types.get((member.node, gpu_id), "")
                milli[gpu_type] = milli.get(gpu_type, 0) + life.lease.request.gpu_milli
        return Spell(life.since, max(end, life.since), life.quarantined, milli)

    def _end_wait(self, lease_id: str, at: float) -> Wait | None:
        wait = self.pending.pop(lease_id, None)
        if wait is not None:
            self.waits.append(wait._replace(end=max(at, wait.start)))
        return wait

    def _take_inventory(self, nodes: Sequence[Node]) -> None:
        self._types = {(node.name, gpu.gpu_id): gpu.gpu_type for node in nodes for gpu in node.gpus}
        self.capacity_milli = MILLI_PER_GPU * len(self._types)


def lives_of(before: Snapshot, history: Iterable[changes.Change]) -> Lives:
    """Return the walk over a whole history."""
    found = Lives(before)
    for change in history:
        found.add(change)
    return found
