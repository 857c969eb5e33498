"""Backups of a state in a file, and the restore of one as another incarnation of the state."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from resource_manager import errors
from resource_manager.core.cluster import ClusterState, Snapshot
from resource_manager.core.models import Lease, has_stored_job
from resource_manager.core.search import restored, unsearched
from resource_manager.storage import codec
from resource_manager.storage.base import Store
from resource_manager.storage.draft_file import replacing
from resource_manager.storage.incarnation import backup_id_of, new_id, new_incarnation
from resource_manager.storage.jobs import LIVE_S, JobRow, job_name
from resource_manager.storage.locks import Lock

NUMBERS_LEFT_FREE = 2**32
"""Distance of version and fencing token from those in the backup: more than were given after it."""

SEQUENCES_LEFT_FREE = 8192
"""The same for the numbers of requests: few, since short ids are used up by them."""

LARGEST_NUMBER = 2**52
"""Largest version, fencing token or number of a request in a backup: Redis counts on exactly from there."""

LOCK_TIMEOUT_S = 30.0

JOBS_AT_ONCE = 200
"""Stored jobs that are read at once: each may have some 64 KiB."""


@dataclass(frozen=True, slots=True)
class Backup:
    """A state, the time of its backup by its store's clock, and the rows of the service's tokens.

    `is_final`: the state takes no change after it. `incarnation` is that of the state. `jobs` are the stored
    ones of its leases and requests, by their ids, as the store has them: encrypted if it has keys.
    """

    snapshot: Snapshot
    taken_at: float
    incarnation: str
    backup_id: str
    is_final: bool = False
    tokens: tuple[dict[str, Any], ...] = ()
    jobs: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """What it is, for people."""
        return f"the backup of {in_utc(self.taken_at)}"


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore did: the time since the backup, and the servers closed until they were searched."""

    pause_s: float
    unsearched: tuple[str, ...]


def in_utc(seconds: float) -> str:
    """Return a time as people and logs write it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def write_backup(
    store: Store, path: Path, tokens: Sequence[dict[str, Any]] = (), *, closing: str | None = None
) -> Backup:
    """Write the state to a file that only its owner may read, whole or not at all.

    With `closing`, the reason, the state is closed for every later change, at the very version that the file
    has. Raises `BackupRefusedError`, `StoreError` and `OSError`.
    """
    known: dict[tuple[str, int], str] = {}
    while True:
        cluster = store.refresh(None)
        if cluster is None:
            raise errors.BackupRefusedError("the store holds no state: there is nothing to back up")
        snapshot, is_final = cluster.snapshot(), closing is not None
        jobs = _stored_jobs(store, snapshot, known)
        backup = Backup(snapshot, store.now(), store.incarnation, new_id(), is_final, tuple(tokens), jobs)
        try:
            with replacing(path, 0o600) as file:
                json.dump(_to_dict(backup), file, ensure_ascii=False)
                file.flush()
                os.fsync(file.fileno())
                if closing is not None:
                    store.close_state(cluster.version, closing)
        except errors.StaleStateError:
            continue  # a commit came in between: the file lacks it
        return backup


def read_backup(path: Path) -> Backup:
    """Return what `write_backup` wrote; raises `CorruptStateError` and `OSError`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        backup = Backup(
            codec.snapshot_from_dict(value["state"]),
            float(value["taken_at"]),
            str(value["incarnation"]),
            str(value["backup_id"]),
            bool(value["is_final"]),
            tuple(dict(row) for row in value["tokens"]),
            {lease_id: str.strip(text) for lease_id, text in value.get("jobs", {}).items()},
        )
        ClusterState.from_snapshot(backup.snapshot)  # else restored, it could never be opened
        if not (backup.name and re.fullmatch("[0-9a-f]*", backup.incarnation)):
            raise ValueError(backup.incarnation)
        numbers = backup.snapshot.version, backup.snapshot.last_fencing_token, backup.snapshot.sequence
        if max(numbers) > LARGEST_NUMBER:
            raise ValueError(numbers)
        return backup
    except errors.CorruptStateError as error:
        raise type(error)(f"{path}: {error}") from error
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise errors.CorruptStateError(f"{path} is not a file of gpu-manager store backup") from error


def restore(store: Store, backup: Backup, *, force: bool = False) -> Restored:
    """Make the state of a backup the store's, as another incarnation, in one commit on the version it read.

    Without `force` it takes the place of a state only if nothing is lost by that: of none, of one without
    servers, of one that its own final backup closed, or of an older one on which nothing was granted since,
    such as a dump. Leases end later by the time since the backup. Where the state went on after its backup,
    those without a placed job keep their own end, and cannot be renewed after it, since their GPUs may have
    been granted again; servers are closed until they were searched for jobs that it does not know. Raises
    `BackupRefusedError`, `StoreError` and `LockTimeoutError`.
    """
    lock = store.lock()
    if not lock.acquire(LOCK_TIMEOUT_S):
        raise errors.LockTimeoutError(LOCK_TIMEOUT_S)
    try:
        while True:
            stored = _stored(store, lock, force=force)
            is_whole = backup.is_final and not force
            if not force:
                _require_replaceable(store, stored, backup)
            now = store.now()
            is_later = (
                store.incarnation == backup.incarnation or backup_id_of(store.incarnation) == backup.backup_id
            )
            went_on = stored if is_later else None
            snapshot = _continued(backup, stored, now, is_whole=is_whole, went_on=went_on)
            if new := _rows_of(backup, without=stored):  # else a lease without its job ends as its agent asks
                store.jobs.write(new)
            try:
                store.restore(
                    snapshot,
                    None if stored is None else stored.version,
                    incarnation=new_incarnation(
                        now, max(backup.incarnation, store.incarnation), backup.backup_id
                    ),
                    suspended_until=now + snapshot.settings.confirmation_window_s,
                    history_until=backup.snapshot.version if store.incarnation == backup.incarnation else 0,
                    lock=lock,
                )
            except errors.StaleStateError as error:
                if isinstance(error.__cause__, errors.LockError):  # it would be so each time
                    raise
                continue  # a commit came in between: it may be one that must not be lost
            if len(jobs := _rows_of(backup)) > len(new):  # not before: the stored state might go on
                store.jobs.write(jobs)
            names = () if is_whole else tuple(node.name for node in snapshot.nodes)
            return Restored(max(now - backup.taken_at, 0.0), names)
    finally:
        with suppress(errors.LockError, errors.StoreUnavailableError):  # what is written stands
            lock.release()


def _owners_of_jobs(snapshot: Snapshot) -> dict[str, str]:
    """Return the owners of the leases and requests that have stored jobs, by their ids."""
    requests = [lease.request for lease in snapshot.leases] + [each.request for each in snapshot.pending]
    return {each.lease_id: each.owner for each in requests if has_stored_job(each.labels)}


def _stored_jobs(store: Store, snapshot: Snapshot, known: dict[tuple[str, int], str]) -> dict[str, str]:
    """Return the stored jobs by ids, after reading those that are not `known` by id and number of request.

    A busy store commits while all are read, and what is to be its last version would never be that.
    """
    owners = _owners_of_jobs(snapshot)
    numbers = [(each.lease_id, each.sequence) for each in snapshot.leases]
    numbers += [(each.lease_id, each.sequence) for each in snapshot.pending]
    keys = [key for key in numbers if key[0] in owners]
    names = {job_name(key[0]): key for key in keys if key not in known}
    every = [*names]
    for start in range(0, len(every), JOBS_AT_ONCE):
        texts = store.jobs.texts(every[start : start + JOBS_AT_ONCE])
        known.update((names[name], text) for name, text in texts.items())
    return {key[0]: known[key] for key in keys if key in known}


def _rows_of(backup: Backup, without: ClusterState | None = None) -> list[JobRow]:
    """Return the rows of the stored jobs, without those whose ids a state has jobs of its own for."""
    owners = _owners_of_jobs(backup.snapshot)
    others = {} if without is None else _owners_of_jobs(without.snapshot())
    return [
        JobRow(job_name(lease_id), owners[lease_id], text, LIVE_S)
        for lease_id, text in backup.jobs.items()
        if lease_id in owners and lease_id not in others
    ]


def _stored(store: Store, lock: Lock, *, force: bool) -> ClusterState | None:
    """Return the state that a backup will replace; with `force` an unreadable one is emptied first."""
    try:
        return store.refresh(None)
    except errors.StateLostError:  # a Variable that is gone
        return None
    except errors.CorruptStateError:
        if not force:
            raise
        store.replace(ClusterState().snapshot(), lock=lock)
        return store.refresh(None)


def _require_replaceable(store: Store, stored: ClusterState | None, backup: Backup) -> None:
    """Raise `BackupRefusedError` if leases of the stored state could be lost."""
    if stored is None or not (stored.nodes or stored.leases or stored.pending):
        return
    if backup_id_of(store.incarnation) == backup.backup_id:
        raise errors.BackupRefusedError(
            f"{backup.name} was restored here before, and the state went on (version {stored.version}): "
            "--force takes it back to the backup"
        )
    if store.incarnation == backup.incarnation:
        if store.closed and stored.version == backup.snapshot.version:
            return
        # A closed state takes no change, but its version jumps with a fail-over of its store.
        is_before = stored.version < backup.snapshot.version or (store.closed and backup.is_final)
        if is_before and not _has_granted(stored, backup):
            return
        if stored.version == backup.snapshot.version:
            raise errors.BackupRefusedError(
                f"nothing has changed here since {backup.name} (version {stored.version}): there is nothing "
                "to restore"
            )
    raise errors.BackupRefusedError(
        f"the store holds a state already (version {stored.version}), which {backup.name} (version "
        f"{backup.snapshot.version}) does not go on from: --force gives it up"
    )


def _has_granted(stored: ClusterState, backup: Backup) -> bool:
    """Return whether a lease was granted after the backup, as on a dump of its state."""
    known = {(lease.lease_id, lease.granted_at) for lease in backup.snapshot.leases}
    return any(
        lease.granted_at > backup.taken_at and (lease.lease_id, lease.granted_at) not in known
        for lease in stored.leases.values()
    )


def _continued(
    backup: Backup, stored: ClusterState | None, now: float, *, is_whole: bool, went_on: ClusterState | None
) -> Snapshot:
    """Return the state of the backup as it goes on; `is_whole` if nothing was granted after it.

    `went_on` is the stored state if it is what the backup's became, or was.
    """
    before = backup.snapshot
    pause_s = max(now - backup.taken_at, 0.0)
    beyond = round(now * 1000)
    version, token, sequence = (
        (0, 0, 0) if stored is None else (stored.version, stored.last_fencing_token, stored.sequence)
    )
    drained = {each.node: each for each in before.drained}
    if not is_whole:
        names = {*drained, *(node.name for node in before.nodes)}
        drained = {name: unsearched(name, now, drained.get(name), backup.name) for name in sorted(names)}
        others = restored(now, backup.name)
        drained[others.node] = others
    return replace(
        before,
        version=max(before.version + NUMBERS_LEFT_FREE, version + 1, beyond),
        last_fencing_token=max(before.last_fencing_token + NUMBERS_LEFT_FREE, token, beyond),
        sequence=max(before.sequence, sequence) + SEQUENCES_LEFT_FREE,
        leases=tuple(
            _later(lease, pause_s)
            if is_whole or lease.places
            else _ended(lease, now)
            if _may_be_granted_again(lease, before, went_on, now)
            else lease
            for lease in before.leases
        ),
        drained=tuple(drained.values()),
    )


def _may_be_granted_again(lease: Lease, before: Snapshot, went_on: ClusterState | None, now: float) -> bool:
    """Return True if a lease ended after the backup, by its own end or by the state that took its place."""
    if went_on is None or went_on.version < before.version:
        is_gone = False
    else:
        is_gone = went_on.holding(lease.lease_id, lease.fencing_token) is None
    return is_gone or (lease.expires_at <= now and not lease.request.quarantine)


def _ended(lease: Lease, now: float) -> Lease:
    """Return the lease as one that nobody can renew in the window that follows, and that ends after it."""
    return replace(lease, expires_at=min(lease.expires_at, now), revoked=True)


def _later(lease: Lease, pause_s: float) -> Lease:
    """Return the lease with its ends as much later as nobody could renew it or end its job."""
    return replace(lease, expires_at=lease.expires_at + pause_s, preempt_until=lease.preempt_until + pause_s)


def _to_dict(backup: Backup) -> dict[str, Any]:
    return {
        "taken_at": backup.taken_at,
        "incarnation": backup.incarnation,
        "backup_id": backup.backup_id,
        "is_final": backup.is_final,
        "state": codec.snapshot_to_dict(backup.snapshot),
        "tokens": backup.tokens,
        "jobs": backup.jobs,
    }
