"""A recorded history as lines of JSON: the state before its first change, then the changes."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from resource_manager.core import changes as kinds
from resource_manager.core.attained_service import Attained, with_service
from resource_manager.core.changes import Change, Outcome
from resource_manager.core.cluster import Snapshot
from resource_manager.core.inventory import inventory_before
from resource_manager.core.models import Lease
from resource_manager.core.node_state import Cleaning
from resource_manager.core.pending import PendingRequest
from resource_manager.core.runtimes import job_id_of, runs_before
from resource_manager.core.teams import Teams
from resource_manager.errors import CorruptStateError, StoreError
from resource_manager.storage import codec
from resource_manager.storage.base import Store
from resource_manager.storage.draft_file import replacing

PAGE = 1000

C = TypeVar("C", kinds.Announced, kinds.Released)

_OF_A_LEASE = (*kinds.ENDS, kinds.Preempting, kinds.Renewed, kinds.Quarantined, kinds.JobPlaced)


class HistorySource(Protocol):
    """A source of a state and its history, such as the manager."""

    def snapshot(self) -> dict[str, Any]: ...

    def history(self, after: int = 0, limit: int = PAGE) -> list[dict[str, Any]]: ...


class StoreHistory:
    """Snapshot and history of a store, read without a manager; the store is not changed.

    Raises `StoreError` if the store holds no state.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def snapshot(self) -> dict[str, Any]:
        cluster = self._store.refresh(None)
        if cluster is None:
            raise StoreError("the store holds no state: there is no history to read")
        return codec.snapshot_to_dict(cluster.snapshot())

    def history(self, after: int = 0, limit: int = PAGE) -> list[dict[str, Any]]:
        return [
            {"version": version, **codec.change_to_dict(change)}
            for version, change in self._store.history(after, limit)
        ]


@dataclass(frozen=True, slots=True)
class History:
    """The state before the first change, and the changes in order.

    `forgotten` counts the changes left out because their lease or pending request is older than the history.
    """

    before: Snapshot
    changes: tuple[Change, ...]
    forgotten: int = 0


def collect(source: HistorySource) -> History:
    """Return the history that the source still has, back to its last reset."""
    now = codec.snapshot_from_dict(source.snapshot())
    entries: list[dict[str, Any]] = []
    while page := source.history(entries[-1]["version"] if entries else 0, PAGE):
        entries += [entry for entry in page if entry["version"] <= now.version]
        if page[-1]["version"] >= now.version or not entries:
            break
    start = len(entries)
    while start and entries[start - 1]["version"] == now.version - (len(entries) - start):
        start -= 1
    return before_changes(now, [change_of(entry) for entry in entries[start:]])


def change_of(entry: Mapping[str, Any]) -> Change:
    """Return the change in an entry of `history`; raises `CorruptStateError`."""
    return codec.change_from_dict({key: value for key, value in entry.items() if key != "version"})


def before_changes(now: Snapshot, changes: list[Change]) -> History:
    """Return the history that led to `now`, undoing the changes as far as they reveal the earlier state."""
    granted = {(c.lease.lease_id, c.lease.fencing_token) for c in changes if isinstance(c, kinds.Granted)}
    queued = {c.request.lease_id for c in changes if isinstance(c, kinds.Queued)}
    lives: defaultdict[int, list[Change]] = defaultdict(list)
    for change in changes:
        if isinstance(change, _OF_A_LEASE):
            lives[change.fencing_token].append(change)
    leases = tuple(
        _lease_before(lease, lives[lease.fencing_token])
        for lease in now.leases
        if (lease.lease_id, lease.fencing_token) not in granted
    )
    remainders = tuple(
        lease for lease in now.remainders if (lease.lease_id, lease.fencing_token) not in granted
    )
    pending = [entry for entry in now.pending if entry.lease_id not in queued]
    pending += _pending_before(changes)
    kept, forgotten = _known(changes, leases, pending)
    nodes = next((inventory_before(c) for c in changes if isinstance(c, kinds.InventoryChanged)), now.nodes)
    tokens = [c.lease.fencing_token for c in changes if isinstance(c, kinds.Granted)]
    heard = {c.node for c in changes if isinstance(c, kinds.AgentSeen | kinds.AgentLost)}
    version = now.version - len(changes)
    before = Snapshot(
        version=version,
        last_fencing_token=min(tokens) - 1 if tokens else now.last_fencing_token,
        sequence=_sequence_before(now, changes, [*leases, *remainders, *pending]),
        nodes=nodes,
        leases=leases,
        remainders=remainders,
        pending=tuple(pending),
        drained=_drained_before(now, changes) if version else (),
        # Those before the first recorded rules are unknown, and taken to be none.
        teams=Teams() if any(isinstance(c, kinds.TeamsChanged) for c in changes) else now.teams,
        windows=() if any(isinstance(c, kinds.MaintenanceChanged) for c in changes) else now.windows,
        # Before the first recorded ones, which those were.
        settings=next(
            (c.settings for c in changes if isinstance(c, kinds.ClusterSettingsChanged)), now.settings
        ),
        watched=_watched_before(now, changes),
        silent=tuple(lost for lost in now.silent if lost.node not in heard),
        closed_gpus=_closed_gpus_before(now, changes),
        cleaning=_cleaning_before(now, changes),
        failed_starts=_not_among(now.failed_starts, changes, kinds.Released),
        runtimes=runs_before(now.runtimes, leases, changes),
        attained=_attained_before(now, leases, changes),
        announced=_not_among(now.announced, changes, kinds.Announced),
        at_risk={} if any(isinstance(c, kinds.DeadlineRisk) for c in changes) else now.at_risk,
    )
    return History(before, tuple(kept), forgotten)


def _not_among(entries: tuple[C, ...], changes: Iterable[Change], kind: type[C]) -> tuple[C, ...]:
    """Return the entries that none of the changes of that kind is."""
    names = {entry.lease_id for entry in entries}
    known = [change for change in changes if isinstance(change, kind) and change.lease_id in names]
    return tuple(entry for entry in entries if entry not in known)


def _attained_before(now: Snapshot, leases: Iterable[Lease], changes: Iterable[Change]) -> Attained:
    """Return the attained service without what the changes added, of the jobs that did not end with them."""
    running = {(lease.lease_id, lease.fencing_token): lease for lease in leases}
    before: dict[str, int] = dict(now.attained)
    for change in changes:
        if isinstance(change, kinds.Granted):
            running[change.lease.lease_id, change.lease.fencing_token] = change.lease
        elif isinstance(change, kinds.ENDS):
            lease = running.pop((change.lease_id, change.fencing_token), None)
            job = job_id_of(change.lease_id)
            if isinstance(change, kinds.Released) and change.outcome in ("", Outcome.SUCCESS):
                before.pop(job, None)
            elif lease is not None and job in before:
                before[job] -= with_service({}, lease, change.at)[job]
    return {job: gpu_ms for job, gpu_ms in before.items() if gpu_ms > 0}


def _lease_before(lease: Lease, changes: Iterable[Change]) -> Lease:
    """Return a lease without what these changes of its life say."""
    for change in changes:
        match change:
            case kinds.Preempting():
                lease = replace(lease, preempted_by="", preempt_until=math.inf)
            case kinds.Quarantined():
                lease = replace(lease, quarantined=False, revoked=False)
            case kinds.Renewed():
                lease = replace(lease, quarantined=False, checkpoint_at=None)
            case kinds.JobPlaced():
                lease = replace(lease, places=())
    return lease


def _sequence_before(
    now: Snapshot, changes: Sequence[Change], present: Iterable[Lease | PendingRequest]
) -> int:
    """Return the number of the last request that arrived before, one below the first that arrived later.

    A request that is queued again keeps its number and the time of its arrival.
    """
    arrivals = [(c.queued_at, c.sequence) for c in changes if isinstance(c, kinds.Queued)]
    arrivals += [(c.lease.arrived_at, c.lease.sequence) for c in changes if isinstance(c, kinds.Granted)]
    first = min((number for at, number in arrivals if at >= changes[0].at), default=now.sequence + 1)
    return max([first - 1, *(each.sequence for each in present)])


def _pending_before(changes: list[Change]) -> list[PendingRequest]:
    """Return the requests that were pending before the first change, found by their grants.

    A request that was granted at once beside a queue was never in it, though its grant has a `queued_at`.
    """
    seen: set[str] = set()
    found: list[PendingRequest] = []
    for change in changes:
        if isinstance(change, kinds.Queued):
            seen.add(change.request.lease_id)
        elif isinstance(change, kinds.Granted):
            lease = change.lease
            if lease.queued_at is not None and lease.queued_at < changes[0].at and lease.lease_id not in seen:
                found.append(PendingRequest(lease.request, lease.queued_at, lease.sequence))
            seen.discard(lease.lease_id)
        elif isinstance(change, kinds.Cancelled):
            seen.discard(change.lease_id)
    return sorted(found, key=lambda entry: entry.sequence)


def _drained_before(now: Snapshot, changes: list[Change]) -> tuple[kinds.Drained, ...]:
    """Return the nodes drained before: still drained now, or first mentioned by a restore."""
    first: dict[str, Change] = {}
    for change in changes:
        if isinstance(change, kinds.Granted):
            for member in change.lease.members:
                first.setdefault(member.node, change)
        elif isinstance(change, kinds.Drained | kinds.Resumed):
            first.setdefault(change.node, change)
    still = [entry for entry in now.drained if entry.node not in first]
    return (*still, *(kinds.Drained(node, c.at) for node, c in first.items() if isinstance(c, kinds.Resumed)))


def _watched_before(now: Snapshot, changes: list[Change]) -> tuple[str, ...]:
    """Return the nodes watched before: still watched now, or first mentioned by the loss of their agent."""
    first: dict[str, Change] = {}
    for change in changes:
        if isinstance(change, kinds.AgentSeen | kinds.AgentLost):
            first.setdefault(change.node, change)
    still = [node for node in now.watched if node not in first]
    return (*still, *(node for node, change in first.items() if isinstance(change, kinds.AgentLost)))


def _closed_gpus_before(now: Snapshot, changes: list[Change]) -> tuple[kinds.GpuClosed, ...]:
    """Return the GPUs closed before: still closed now, or opened before anything else happened to them.

    An operator may open a GPU that is open: it counts as closed before, which no grant contradicts.
    """
    first: dict[tuple[str, int], Change] = {}
    for change in changes:
        if isinstance(change, kinds.Granted):
            for member in change.lease.members:
                for gpu_id in member.gpu_ids:
                    first.setdefault((member.node, gpu_id), change)
        elif isinstance(change, kinds.GpuClosed | kinds.GpuOpened):
            first.setdefault((change.node, change.gpu_id), change)
    still = [each for each in now.closed_gpus if (each.node, each.gpu_id) not in first]
    opened = [change for change in first.values() if isinstance(change, kinds.GpuOpened)]
    return (*still, *(kinds.GpuClosed(each.node, each.gpu_id, "", "unknown", each.at) for each in opened))


def _cleaning_before(now: Snapshot, changes: list[Change]) -> tuple[Cleaning, ...]:
    """Return what is being cleaned now and was before: its lease ended before the first change."""
    ended = {change.fencing_token for change in changes if isinstance(change, kinds.ENDS)}
    return tuple(entry for entry in now.cleaning if entry.fencing_token not in ended)


def _known(
    changes: Iterable[Change], leases: Iterable[Lease], pending: Iterable[PendingRequest]
) -> tuple[list[Change], int]:
    """Return the changes whose lease or pending request is known, and the number of the others."""
    live = {(lease.lease_id, lease.fencing_token) for lease in leases}
    queue = {entry.lease_id for entry in pending}
    kept: list[Change] = []
    forgotten = 0
    for change in changes:
        if isinstance(change, kinds.Granted):
            live.add((change.lease.lease_id, change.lease.fencing_token))
            queue.discard(change.lease.lease_id)
        elif isinstance(change, kinds.Queued):
            queue.add(change.request.lease_id)
        elif isinstance(change, _OF_A_LEASE):
            key = (change.lease_id, change.fencing_token)
            if key not in live:
                forgotten += 1
                continue
            if isinstance(change, kinds.Released | kinds.Expired):
                live.remove(key)
        elif isinstance(change, kinds.Cancelled):
            if change.lease_id not in queue:
                forgotten += 1
                continue
            queue.remove(change.lease_id)
        kept.append(change)
    return kept, forgotten


def to_lines(history: History) -> Iterator[str]:
    """Yield the lines of a history file without line ends; the last change has its version in the store."""
    yield json.dumps({"snapshot": codec.snapshot_to_dict(history.before)}, ensure_ascii=False)
    first = history.before.version + history.forgotten + 1
    for version, change in enumerate(history.changes, start=first):
        entry = {"version": version, **codec.change_to_dict(change)}
        yield json.dumps(entry, ensure_ascii=False)


def write_file(history: History, path: Path) -> None:
    """Write the lines to a file, completely or not at all."""
    with replacing(path) as file:
        file.writelines(f"{line}\n" for line in to_lines(history))


def snapshot_of(first: Mapping[str, Any]) -> Snapshot:
    """Return the state in the first line of a history file; raises `CorruptStateError`."""
    value = first.get("snapshot")
    if not isinstance(value, dict):
        raise CorruptStateError('the first line of a history must be the state before it: {"snapshot": …}')
    return codec.snapshot_from_dict(value)
