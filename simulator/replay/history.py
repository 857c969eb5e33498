"""A recorded history as a workload: the external events, separated from the scheduler's decisions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from resource_manager.core.changes import (
    Cancelled,
    Change,
    Expired,
    Granted,
    MembersReleased,
    Queued,
    Released,
)
from resource_manager.core.models import Lease, Request
from resource_manager.errors import CorruptStateError
from resource_manager.storage import SQL_SCHEMES, open_store
from resource_manager.storage.history_file import History, StoreHistory, change_of, collect, snapshot_of
from resource_manager.storage.redis.client import SCHEMES
from simulator.errors import InputError
from simulator.io.rows import MAX_VALUE, read_json_lines
from simulator.replay.workload import EventBatch, ExternalChange, Job, RecordedEnd, Workload

STORE_SCHEMES = tuple(f"{scheme}://" for scheme in (*SCHEMES, *SQL_SCHEMES))


def read_history(source: str) -> History:
    """Return the history in a file of `gpu-manager history --export`, or in the Redis or database at a URL.

    Raises `InputError` with file, line and reason, or `StoreError`.
    """
    if source.startswith(STORE_SCHEMES):
        with closing(open_store(source)) as store:
            return collect(StoreHistory(store))
    path = Path(source)
    rows = read_json_lines(path)
    first = next(rows, None)
    if first is None:
        raise InputError("the file is empty; expected a history export", path=path)
    row = first
    try:
        before = snapshot_of(first.values)
        changes: list[Change] = []
        last = before.version
        for row in rows:
            change = change_of(row.values)
            version = row.values.get("version")
            # A gap is possible only right after the snapshot: changes that the store had already dropped.
            if not isinstance(version, int) or version <= last or (changes and version > last + 1):
                raise row.fail(f"version is {version!r} after {last}; lines are missing or in another order")
            last = version
            if not 0 <= change.at <= MAX_VALUE:
                raise row.fail(f"at is {change.at}, not a time from 0 to {MAX_VALUE:,} s")
            changes.append(change)
    except CorruptStateError as error:
        raise row.fail(str(error)) from error
    return History(before, tuple(changes))


def workload_of(history: History, name: str) -> Workload:
    """Return arrivals with each job's run time, and the operators' changes; the replay decides the grants.

    A commit of the manager is a run of changes made at one time whose grants come last. A repeated task id
    gets a number, so that both jobs can exist at once where the replay is slower than the record.
    """
    history = _rename(history)
    changes = history.changes
    outcomes = {c.lease_id: c.outcome for c in changes if isinstance(c, Released)}
    leases = {c.lease.lease_id: c.lease for c in changes if isinstance(c, Granted)}
    at_first = (*history.before.leases, *history.before.remainders)
    ends = _ends(changes, [*at_first, *leases.values()])
    before = replace(
        history.before,
        leases=tuple(_endless(lease) for lease in history.before.leases),
        remainders=tuple(
            replace(lease, request=_endless_request(lease.request)) for lease in history.before.remainders
        ),
        pending=tuple(
            replace(entry, request=_endless_request(entry.request)) for entry in history.before.pending
        ),
        watched=(),  # nobody says in a replay when a GPU is clean
        cleaning=(),
    )

    def job(request: Request, at: float) -> Job:
        lease = leases.get(request.lease_id)
        runtime_s = math.inf
        if lease is not None and lease.lease_id in ends:
            runtime_s = max(ends[lease.lease_id] - lease.granted_at, 0.0)
        return Job(_endless_request(request), at, runtime_s, lease, outcomes.get(request.lease_id, ""))

    queued = {entry.lease_id for entry in history.before.pending}
    batches: list[EventBatch] = []
    granting = True
    for change in changes:
        is_grant = isinstance(change, Granted)
        if not batches or change.at != batches[-1].at or (granting and not is_grant):
            batches.append(EventBatch(change.at))
        granting = is_grant
        batch = batches[-1]
        if isinstance(change, Queued):
            queued.add(change.request.lease_id)
            batch.arrivals.append(job(change.request, change.at))
        elif isinstance(change, Granted):
            if change.lease.lease_id not in queued:
                batch.arrivals.append(job(change.lease.request, change.at))
        elif isinstance(change, Released | Expired):
            batch.external.append(RecordedEnd(change.lease_id))
        elif isinstance(change, ExternalChange):
            batch.external.append(change)
    held = [
        Job(
            lease.request,
            lease.granted_at,
            ends.get(lease.lease_id, math.inf) - lease.granted_at,
            lease,
            outcomes.get(lease.lease_id, ""),
        )
        for lease in (*before.leases, *before.remainders)
    ]
    waited = [job(entry.request, entry.queued_at) for entry in before.pending]
    return Workload(name, before, tuple(batches), (*held, *waited))


def _ends(changes: Iterable[Change], leases: Iterable[Lease]) -> dict[str, float]:
    """Return the end of each task, in seconds: for a gang that of its last member."""
    members = {lease.lease_id: len(lease.members) for lease in leases}
    ends: dict[str, float] = {}
    for change in changes:
        if isinstance(change, Released | Expired):
            ends[change.lease_id] = change.at
        elif isinstance(change, MembersReleased) and change.lease_id in members:
            members[change.lease_id] -= len(change.ranks)
            if not members[change.lease_id]:
                ends[change.lease_id] = change.at
    return ends


def _endless_request(request: Request) -> Request:
    """Return the request with a lifetime limited only by its recorded end."""
    return replace(request, ttl_s=math.inf)


def _endless(lease: Lease) -> Lease:
    return replace(lease, request=_endless_request(lease.request), expires_at=math.inf, quarantined=False)


def _rename(history: History) -> History:
    """Return the history with a number appended to each task id that was used before.

    What is left of a gang may end after its id was used again, so an end goes by its fencing token.
    """
    uses: Counter[str] = Counter()
    names: dict[int, str] = {}
    """Name by fencing token."""

    def name(task_id: str) -> str:
        return task_id if uses[task_id] <= 1 else f"{task_id}#{uses[task_id]}"

    def named(request: Request) -> Request:
        return replace(request, lease_id=name(request.lease_id))

    def named_lease(lease: Lease) -> Lease:
        names[lease.fencing_token] = name(lease.lease_id)
        return replace(lease, request=named(lease.request))

    def first(lease: Lease) -> Lease:
        uses[lease.lease_id] += 1
        return named_lease(lease)

    before = history.before
    remainders, leases = tuple(map(first, before.remainders)), tuple(map(first, before.leases))
    uses.update(entry.lease_id for entry in before.pending)
    pending = {entry.lease_id for entry in before.pending}
    waiting = tuple(replace(entry, request=named(entry.request)) for entry in before.pending)
    renamed: list[Change] = []
    for change in history.changes:
        if isinstance(change, Queued):
            uses[change.request.lease_id] += 1
            pending.add(change.request.lease_id)
            renamed.append(replace(change, request=named(change.request)))
        elif isinstance(change, Granted):
            task_id = change.lease.lease_id
            if task_id not in pending:
                uses[task_id] += 1
            pending.discard(task_id)
            renamed.append(replace(change, lease=named_lease(change.lease)))
        elif isinstance(change, Released | Expired | MembersReleased):
            known = names.get(change.fencing_token)
            renamed.append(replace(change, lease_id=known or name(change.lease_id)))
        elif isinstance(change, Cancelled):
            pending.discard(change.lease_id)
            renamed.append(replace(change, lease_id=name(change.lease_id)))
        else:
            renamed.append(change)
    return History(replace(before, remainders=remainders, leases=leases, pending=waiting), tuple(renamed))
