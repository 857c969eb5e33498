"""A recorded history as a workload: the external events, separated from the scheduler's decisions."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from resource_manager.core.changes import (
    Cancelled,
    Change,
    Expired,
    Granted,
    MembersReleased,
    Outcome,
    Preempting,
    Quarantined,
    Queued,
    Released,
    Renewed,
)
from resource_manager.core.models import Lease, Request
from resource_manager.errors import CorruptStateError
from resource_manager.scheduling.accounting.lives import lives_of
from resource_manager.scheduling.preemption.requeueing import restarts_of
from resource_manager.scheduling.queue.giving_back import GIVEN_BACK
from resource_manager.scheduling.queue.runtime_limits import count_of
from resource_manager.storage import SQL_SCHEMES, open_store
from resource_manager.storage.history_file import History, StoreHistory, change_of, collect, snapshot_of
from resource_manager.storage.redis import SCHEMES
from simulator.errors import InputError
from simulator.io.rows import MAX_VALUE, read_json_lines
from simulator.replay.operations import Operations, Parts, endless_request
from simulator.replay.workload import Workload

STORE_SCHEMES = tuple(f"{scheme}://" for scheme in (*SCHEMES, *SQL_SCHEMES))


def read_history(source: str) -> History:
    """Return the history in a file of `gpu-manager history --export`, or in the Redis or database at a URL.

    Raises `InputError` with file, line and reason, or `StoreError`.
    """
    if source.startswith("sqlite:") and not Path(urlsplit(source).path[1:]).exists():
        raise InputError("no such file", path=source)  # opened, it would be made
    if source.startswith(STORE_SCHEMES):
        with closing(open_store(source)) as store:
            return collect(StoreHistory(store))
    if "://" in source:
        scheme = source.partition("://")[0]
        raise InputError(f"--history reads a file, Redis or a database, not {scheme}://")
    path = Path(source)
    rows = read_json_lines(path)
    first = next(rows, None)
    if first is None:
        raise InputError("the file is empty; expected a history export", path=path)
    row = first
    try:
        before = snapshot_of(first.values)
        changes: list[Change] = []
        tokens: set[int] = set()
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
            if isinstance(change, Granted):
                if change.lease.fencing_token in tokens:
                    raise row.fail(f"the fencing_token {change.lease.fencing_token} was granted before")
                tokens.add(change.lease.fencing_token)
            changes.append(change)
    except CorruptStateError as error:
        raise row.fail(str(error)) from error
    return History(before, tuple(changes))


def workload_of(history: History, name: str) -> Workload:
    """Return the jobs with their run times and the external events; the replay decides the rest.

    A repeated task id gets a number, so that both jobs can exist at once where the replay is slower than the
    record. A request that is queued again with the end of its lease is the same job.
    """
    history, again = _rename(history)
    before = replace(
        history.before,
        leases=tuple(map(_endless, history.before.leases)),
        remainders=tuple(map(_endless, history.before.remainders)),
        pending=tuple(
            replace(entry, request=endless_request(entry.request)) for entry in history.before.pending
        ),
    )
    parts = Parts(lives_of(before, history.changes).lives.values(), again)
    operations = Operations(before, parts)
    for change in history.changes:
        operations.add(change)
    present = [parts.job(lease.request, lease.granted_at) for lease in (*before.leases, *before.remainders)]
    present += [parts.job(entry.request, entry.queued_at) for entry in before.pending]
    return Workload(name, before, operations.batches(), tuple(present), is_recorded=True)


def _endless(lease: Lease) -> Lease:
    return replace(lease, request=endless_request(lease.request), expires_at=math.inf)


def _rename(history: History) -> tuple[History, set[int]]:
    """Return the history with a number appended to each task id that was used before.

    What is left of a gang may end after its id was used again, so a lease goes by its fencing token. Requests
    that were queued again are left out: returned are the tokens of the leases that they had before.
    """
    uses: Counter[str] = Counter()
    leases: dict[int, Lease] = {}
    """Renamed lease by fencing token."""
    again: set[int] = set()

    def name(task_id: str) -> str:
        return task_id if uses[task_id] <= 1 else f"{task_id}#{uses[task_id]}"

    def named(request: Request) -> Request:
        return replace(request, lease_id=name(request.lease_id))

    def named_lease(lease: Lease) -> Lease:
        found = leases[lease.fencing_token] = replace(lease, request=named(lease.request))
        return found

    def first(lease: Lease) -> Lease:
        uses[lease.lease_id] += 1
        return named_lease(lease)

    before = history.before
    remainders, held = tuple(map(first, before.remainders)), tuple(map(first, before.leases))
    uses.update(entry.lease_id for entry in before.pending)
    pending = {entry.lease_id for entry in before.pending}
    waiting = tuple(replace(entry, request=named(entry.request)) for entry in before.pending)
    renamed: list[Change] = []
    previous: Change | None = None
    for change in history.changes:
        match change:
            case Queued(request=request):
                pending.add(request.lease_id)
                if isinstance(previous, Released) and _is_queued_again(
                    previous, leases.get(previous.fencing_token), change
                ):
                    again.add(previous.fencing_token)
                else:
                    uses[request.lease_id] += 1
                    renamed.append(replace(change, request=named(request)))
            case Granted(lease=lease):
                if lease.lease_id not in pending:
                    uses[lease.lease_id] += 1
                pending.discard(lease.lease_id)
                renamed.append(replace(change, lease=named_lease(lease)))
            case Released() | Expired() | MembersReleased() | Renewed() | Quarantined() | Preempting():
                known = leases.get(change.fencing_token)
                new = name(change.lease_id) if known is None else known.lease_id
                if isinstance(change, Preempting) and change.preemptor:
                    change = replace(change, preemptor=name(change.preemptor))
                renamed.append(replace(change, lease_id=new))
            case Cancelled(lease_id=lease_id):
                pending.discard(lease_id)
                renamed.append(replace(change, lease_id=name(lease_id)))
            case _:
                renamed.append(change)
        previous = change
    return History(
        replace(before, remainders=remainders, leases=held, pending=waiting), tuple(renamed)
    ), again


def _is_queued_again(end: Released, lease: Lease | None, change: Queued) -> bool:
    """Return True if the request of the lease that ended is pending again, at its old place or at the end."""
    return (
        end.outcome in (Outcome.PREEMPTED, Outcome.NOT_STARTED, Outcome.IDLE)
        and (end.lease_id, end.at) == (change.request.lease_id, change.at)
        and lease is not None
        and (
            lease.sequence == change.sequence
            or count_of(change.request.labels, GIVEN_BACK) > count_of(lease.request.labels, GIVEN_BACK)
            or restarts_of(change.request.labels) > restarts_of(lease.request.labels)
        )
    )
