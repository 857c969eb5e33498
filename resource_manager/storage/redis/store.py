"""The state in Redis: commits in one Lua script, reads of the changes since the reader's version.

Keys, all under one hash tag: `meta` (format, epoch, version, counters, the server that holds the data),
`inventory` (the nodes), hashes with the changes that are in effect for every lease, pending request and
closed node, with the rules of the teams, and (`gpus`) with what is known of agents and single GPUs, the
stream `changes`, whose entry `<version>-0` is the change that led to that version, and `kinds`, the kinds of
all changes so far: a reader that does not know one of them must not trust the hashes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from resource_manager import STORED_FORMAT
from resource_manager.core.changes import Change, Granted, InventoryChanged
from resource_manager.core.cluster import ClusterState, Snapshot
from resource_manager.core.cluster_settings import ClusterSettings
from resource_manager.core.models import Lease
from resource_manager.core.team_ledger import NO_USES, Use
from resource_manager.errors import CorruptStateError, KeysFullError, StaleStateError
from resource_manager.storage import refusals
from resource_manager.storage.base import FOLD_ERRORS, NO_SUSPENSION, Store, Suspension, waits_for_owners
from resource_manager.storage.clock import CLOCK_TOLERANCE_S, ClockJump, ServerClock
from resource_manager.storage.codec import change_from_json, check_kinds, skipping
from resource_manager.storage.incarnation import new_incarnation
from resource_manager.storage.jobs import JobRow, RedisJobs
from resource_manager.storage.lineage import Lineage
from resource_manager.storage.locks import Lock
from resource_manager.storage.once import KEEP_S, MAX_KEYS, Once, References
from resource_manager.storage.redis import layout
from resource_manager.storage.redis.client import SOCKET_TIMEOUT_S, Command, RedisClient, load_script
from resource_manager.storage.redis.lease_layout import counters_after
from resource_manager.storage.redis.lock import HANDOFF_MS, RedisLock
from resource_manager.storage.redis.script_answers import known_entries, refuse, suspension_in
from resource_manager.storage.reports import RedisReports

PARTS = (
    "meta",
    "inventory",
    "leases",
    "renewals",
    "quarantined",
    "pending",
    "drained",
    "changes",
    "kinds",
    "lock",
    "rules",
    "gpus",
    "preempting",
    "lock:waiters",
)


class RedisStore(Store):
    """A store that keeps about the last `history_length` changes, in `history_bytes`; thread-safe.

    Redis may lose its last writes when it restarts or a replica takes over. The store detects that another
    server process holds the data. For `confirmation_window_s` of the cluster's settings, the recovery window,
    it refuses commits that grant or expire (`StateUnconfirmedError`): by its end every owner has renewed its
    lease, or learnt that it is gone.
    """

    is_lasting = True
    suspension = NO_SUSPENSION
    clock: ServerClock

    def __init__(
        self, client: RedisClient, *, history_length: int = 100_000, history_bytes: int = 256 * 2**20
    ) -> None:
        self._client = client
        self._history_length = history_length
        self.history_bytes = history_bytes
        self._confirmation_window_s = ClusterSettings().confirmation_window_s
        self._keys = tuple(client.key(part) for part in PARTS)
        self._commit = load_script("preflight", "once", "handover", "stream_bytes", "commit")
        self._refresh = load_script("preflight", "refresh")
        self._close = load_script("preflight", "close_state")
        self._suspend = load_script("preflight", "suspend")
        self._write = load_script("once", "stream_bytes", "replace_state")
        self.reports = RedisReports(client)
        self.jobs = RedisJobs(client)
        self._inventory = layout.Inventory()
        self._lineage = Lineage()
        self.clock = ServerClock(client.time)

    def refresh(self, replica: ClusterState | None) -> ClusterState | None:
        known = -1 if replica is None else replica.version
        answer = self._read(known)
        if answer is None:
            return None
        with refusals.reading(self._client.address):
            if answer[5] == b"state":
                replica = self._whole_state(answer)
                if layout.lacks_leases(answer[12], answer[13:15]):
                    raise refusals.torn(self._client.address, answer[3])
            else:
                assert replica is not None
                self._catch_up(replica, answer)
            self._confirmation_window_s = replica.settings.confirmation_window_s
            return replica

    def refresh_known(self) -> ClusterState:
        answer = self._read(-1)
        if answer is None:
            return ClusterState()
        for part in (15, 16, 18, 19):  # pending, drained, rules, gpus: all but leases
            answer[part] = known_entries(answer[part])
        with refusals.reading(self._client.address), skipping():
            return self._whole_state(answer)

    def commit(
        self,
        version: int,
        changes: Sequence[Change],
        *,
        now: float,
        lock: Lock | None = None,
        once: References = (),
        uses: Mapping[str, Use] = NO_USES,
        jobs: Sequence[JobRow] = (),
    ) -> None:
        assert lock is None or isinstance(lock, RedisLock)
        operations: list[str] = []
        inventory = ""
        for change in changes:
            if isinstance(change, InventoryChanged) and not inventory:
                inventory, forgotten = self._inventory_after(version, changes)
                operations = [*forgotten, *operations]  # in front: nothing is cleaned on a server that leaves
            operations += layout.operations(change)
        operations += layout.use_operations(uses)
        operations += layout.job_operations(jobs)
        # The id distinguishes a commit sent again, after its answer was lost, from another client's.
        commit_id = os.urandom(12).hex()
        self._run(
            self._commit,
            STORED_FORMAT,
            self.incarnation,
            version,
            repr(now),
            CLOCK_TOLERANCE_S,
            "" if lock is None else lock.token,
            commit_id,
            self._history_length,
            self.history_bytes,
            self._confirmation_window_s,
            *counters_after(changes),
            inventory,
            HANDOFF_MS,
            int(waits_for_owners(changes)),
            self._lineage.id_of(self.incarnation, version),
            KEEP_S,
            len(once),
            *(key.stored(reference) for key, reference in once),
            *operations,
            version=version,
            once=once,
        )
        self._lineage.note(self.incarnation, version + len(changes), commit_id)
        if lock is not None:
            lock.released()

    def initialise(self, snapshot: Snapshot) -> bool:
        return self._write_state("initialise", snapshot)

    def recall(self, once: Once) -> str | None:
        with self._client.reporting():
            key, names = self._once_keys([(once, "")])
            since = int((self.now() - KEEP_S) * 1e6)
            stored, count = self._client.ask(("GET", key), ("ZCOUNT", names, since, "+inf"))
        if stored is None and int(count) >= MAX_KEYS:
            raise KeysFullError(MAX_KEYS)
        return None if stored is None else once.reference_in(stored.decode(errors="replace"))

    def replace(self, snapshot: Snapshot, *, lock: Lock | None = None, once: References = ()) -> None:
        self._write_state("replace", snapshot, once)

    def close_state(self, version: int, reason: str) -> None:
        window_s = self._confirmation_window_s
        self._run(self._close, STORED_FORMAT, self.incarnation, window_s, version, reason, version=version)

    def restore(
        self,
        snapshot: Snapshot,
        version: int | None,
        *,
        incarnation: str,
        suspended_until: float,
        history_until: int,
        lock: Lock | None = None,
    ) -> None:
        of_restore = ("" if version is None else version, repr(suspended_until), history_until)
        self._write_state("restore", snapshot, incarnation=incarnation, of_restore=of_restore)

    def history(self, after: int = 0, limit: int = 1000) -> list[tuple[int, Change]]:
        with self._client.reporting():
            key = self._client.key("changes")
            [entries] = self._client.ask(("XRANGE", key, f"{after + 1}-0", "+", "COUNT", limit))
        with refusals.reading(self._client.address):
            return [
                # Through sentinels the driver makes a mapping of the fields.
                (int(entry.partition(b"-")[0]), change_from_json(fields[b"c" if type(fields) is dict else 1]))
                for entry, fields in entries
            ]

    def suspend(self, jump: ClockJump) -> tuple[Suspension, bool]:
        answer = self._run(
            self._suspend,
            STORED_FORMAT,
            self.incarnation,
            self._confirmation_window_s,
            jump.seconds,
            jump.since,
            CLOCK_TOLERANCE_S,
        )
        self.suspension = suspension_in(answer[4], self.now())
        return self.suspension, bool(answer[5])

    def lock(self, replica: ClusterState | None = None) -> Lock:
        return RedisLock(self._client, beside=None if replica is None else _Missed(self, replica))

    def await_decision(self, lease_id: str, is_decided: Callable[[], bool], timeout_s: float) -> Lease | bool:
        waits, woken = (self._client.key(f"pending:{kind}:{lease_id}") for kind in ("waits", "woken"))
        # An earlier request of that id may have been granted with nobody there.
        with self._client.reporting():
            self._client.ask(("DEL", woken))
        self._client.put((waits, 1, timeout_s + SOCKET_TIMEOUT_S))
        if is_decided():
            return True
        told = self._client.block_on(woken, timeout_s)
        change = None if told is None else change_from_json(told)
        return change.lease if isinstance(change, Granted) else change is not None

    def close(self) -> None:
        self._client.close()

    # ---- reading ----

    def _question(self, known: int, inventory: layout.Inventory) -> tuple[Any, ...]:
        return (
            STORED_FORMAT,
            self.incarnation,
            self._confirmation_window_s,
            known,
            inventory.version,
            len(inventory.nodes),
            self._lineage.id_of(self.incarnation, known),
        )

    def _read(self, known: int) -> list[Any] | None:
        inventory, passing = self._inventory, b"ok" if self.incarnation or known >= 0 else b"empty"
        answer = self._run(self._refresh, *self._question(known, inventory), version=known, passing=passing)
        if answer[0] == b"empty":
            return None
        if answer[5] == b"state":
            answer[11] = answer[11] or inventory  # another thread may have read a newer one meanwhile
        self.suspension = suspension_in(answer[4], self.now()) if answer[4] else NO_SUSPENSION
        self.closed = answer[-1].decode(errors="replace")
        return answer

    def _whole_state(self, answer: list[Any]) -> ClusterState:
        incarnation, fencing, sequence, last_node, inventory_version, inventory = answer[6:12]
        if not isinstance(inventory, layout.Inventory):
            inventory = self._inventory = layout.inventory_from_json(inventory_version, inventory)
        self.incarnation = incarnation.decode()
        check_kinds(kind.decode(errors="replace") for kind in answer[17])
        self._lineage.note(self.incarnation, answer[3], answer[-2].decode())
        parts = (fencing, sequence, last_node, *answer[12:17], *answer[18:22])
        return layout.read_state(answer[3], parts, inventory)

    def _catch_up(self, replica: ClusterState, answer: Sequence[Any]) -> None:
        for text in answer[6]:
            replica.apply(change_from_json(text))
        if answer[6]:
            self._lineage.note(self.incarnation, answer[3], answer[-2].decode())

    # ---- writing ----

    def _inventory_after(self, version: int, changes: Sequence[Change]) -> tuple[str, list[str]]:
        """Return the inventory after the changes, and the operations that forget what is no longer in it.

        Applying the changes to the whole state decides which nodes leave at once and which stay, retired;
        inventories change so rarely that reading the whole state is affordable.
        """
        answer = self._read(-1)
        if answer is None or answer[3] != version:
            raise StaleStateError(version, None if answer is None else answer[3])
        cluster = self._whole_state(answer)
        cluster.apply(*changes)
        snapshot = cluster.snapshot()
        forgotten = layout.forgetting(snapshot, answer[16], answer[19], answer[20])
        return layout.inventory_to_json(snapshot), forgotten

    def _once_keys(self, once: References) -> list[str]:
        """Return two keys for each: of what is kept, and of the names of all that is kept for the caller."""
        parts = ((f"once:{key.caller}:{key.key}", f"once:{key.caller}") for key, _ in once)
        return [self._client.key(part) for pair in parts for part in pair]

    def _write_state(
        self,
        mode: str,
        snapshot: Snapshot,
        once: References = (),
        *,
        incarnation: str = "",
        of_restore: Sequence[Any] = ("", "", ""),
    ) -> bool:
        incarnation = incarnation or new_incarnation(self.now(), self.incarnation)
        answer = self._run(
            self._write,
            STORED_FORMAT,
            incarnation,
            mode,
            snapshot.version,
            snapshot.last_fencing_token,
            snapshot.sequence,
            snapshot.last_node or "",
            layout.inventory_to_json(snapshot),
            *of_restore,
            KEEP_S,
            len(once),
            *(key.stored(reference) for key, reference in once),
            *layout.parts_of(snapshot),
            version=int(of_restore[0] or 0) if mode == "restore" else snapshot.version,
            once=once,
            passing=b"exists",
        )
        if answer[0] == b"ok":
            self.incarnation = answer[5].decode()
            return True
        return bool(answer[5].decode() == incarnation)  # written by an earlier try whose answer was lost

    # ---- talking to the server ----

    def _run(
        self, script: Any, *args: Any, version: int = -1, once: References = (), passing: bytes = b"ok"
    ) -> list[Any]:
        """Return the answer of a script; raises what it means, unless it is `ok` or the one that passes."""
        begin = self.clock.steady()
        answer: list[Any] = self._client.run(script, (*self._keys, *self._once_keys(once)), args)
        self.clock.learn(int(answer[1]) + int(answer[2]) * 1e-6, begin)
        if answer[0] not in (b"ok", passing):
            if answer[0] == b"empty" and not self.incarnation:
                raise refusals.no_state(self._client.address, version)
            if answer[0] == b"stale" and len(answer) > 6:
                self._lineage.note(self.incarnation, answer[3], answer[6].decode())
            refuse(answer, self._client.address, version, once, self._confirmation_window_s)
        return answer


class _Missed:
    """The question for what a replica lacks, which it takes if that is some changes and nothing is amiss."""

    def __init__(self, store: RedisStore, replica: ClusterState) -> None:
        self._store = store
        self._replica = replica

    def command(self) -> Command:
        store = self._store
        return store._refresh.command(store._keys, store._question(self._replica.version, store._inventory))

    def take(self, answer: Any) -> bool:
        if answer[0] != b"ok" or answer[4] or answer[5] != b"changes":
            return False
        with suppress(CorruptStateError, *FOLD_ERRORS):  # who reads the state is told
            self._store._catch_up(self._replica, answer)
            return True
        return False
