"""The state in Redis: commits in one Lua script, reads of what changed.

Keys, all under one hash tag: `meta` (format, epoch, version, counters, the server that holds the data),
`inventory` (the nodes), hashes that keep of every lease, waiting request and closed node the changes that
still count, and the stream `changes` whose entry `<version>-0` is the change that led to that version.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

from resource_manager.cluster import ClusterState, Snapshot
from resource_manager.errors import (
    CorruptStateError,
    LockedError,
    StaleStateError,
    StateLostError,
    StateUnconfirmedError,
)
from resource_manager.locks import Lock, RedisLock
from resource_manager.models import (
    Cancelled,
    Change,
    Drained,
    Expired,
    Granted,
    InventoryChanged,
    Lease,
    Node,
    Quarantined,
    Queued,
    Released,
    Renewed,
    Restored,
    Waiting,
)
from resource_manager.redis_client import RedisClient, load_script
from resource_manager.schemas import (
    FORMAT_VERSION,
    change_from_json,
    change_to_json,
    check_format,
    snapshot_from_dict,
    snapshot_to_dict,
)
from resource_manager.server_clock import CLOCK_TOLERANCE_S, ServerClock

PARTS = ("meta", "inventory", "leases", "renewals", "quarantined", "waiting", "drained", "changes", "lock")
OPERATIONS: dict[type, str] = {
    Granted: "grant",
    Released: "end",
    Expired: "end",
    Renewed: "renew",
    Quarantined: "quarantine",
    Queued: "wait",
    Cancelled: "cancel",
    Drained: "drain",
    Restored: "restore",
    InventoryChanged: "inventory",
}


class _Inventory(NamedTuple):
    version: bytes
    nodes: tuple[Node, ...]
    retired: tuple[str, ...]


class RedisStore:
    """Keeps about the last `history_length` changes; safe to share by threads.

    Redis may lose its last writes when it restarts or a replica takes over. The store notices that another
    server process holds the data, and for `reconfirm_s` seconds from then refuses commits that grant
    (`StateUnconfirmedError`): within that time every owner has renewed its lease, or learnt that it is gone.
    """

    def __init__(
        self, client: RedisClient, *, history_length: int = 100_000, reconfirm_s: float = 60.0
    ) -> None:
        self._client = client
        self._history_length = history_length
        self._reconfirm_s = reconfirm_s
        self._keys = tuple(client.key(part) for part in PARTS)
        self._commit = load_script("examine", "commit")
        self._refresh = load_script("examine", "refresh")
        self._write = load_script("write")
        self._epoch: str = ""
        self._inventory = _Inventory(b"", (), ())
        self._clock = ServerClock(client.time)

    def now(self) -> float:
        return self._clock.now()

    def refresh(self, replica: ClusterState | None) -> ClusterState | None:
        known = -1 if replica is None else replica.version
        answer = self._read(known)
        if answer is None:
            return None
        if answer[5] == b"state":
            return self._whole_state(answer)
        assert replica is not None
        for text in answer[6]:
            replica.apply(change_from_json(text))
        return replica

    def commit(
        self, version: int, changes: Sequence[Change], *, now: float, lock_token: str | None = None
    ) -> None:
        operations: list[str] = []
        fencing, last_node, inventory = "", "", ""
        for change in changes:
            kind = type(change)
            if kind is Granted:
                fencing, last_node = str(change.lease.fencing_token), change.lease.placement.node  # type: ignore[union-attr]
            elif kind is InventoryChanged and not inventory:
                inventory, forgotten = self._inventory_after(version, changes)
                for node in forgotten:
                    operations += ("forget", node, "")
            operations += (OPERATIONS[kind], _key(change), change_to_json(change))
        # The id tells a commit that is sent again, after its answer was lost, from somebody else's.
        commit_id = os.urandom(12).hex()
        answer = self._run(
            self._commit,
            FORMAT_VERSION,
            self._epoch,
            version,
            repr(now),
            CLOCK_TOLERANCE_S,
            lock_token or "",
            commit_id,
            self._history_length,
            self._reconfirm_s,
            fencing,
            last_node,
            inventory,
            *operations,
        )
        if answer[0] != b"ok":
            self._refuse(answer, version)

    def initialise(self, snapshot: Snapshot) -> bool:
        return self._write_state("initialise", snapshot)

    def replace(self, snapshot: Snapshot, *, lock_token: str | None = None) -> None:
        self._write_state("replace", snapshot)

    def history(self, after: int = 0, limit: int = 1000) -> list[tuple[int, Change]]:
        with self._client.reporting():
            entries: Any = self._client.driver.xrange(
                self._client.key("changes"), f"{after + 1}-0", "+", count=limit
            )
        return [(int(entry.partition(b"-")[0]), change_from_json(fields[b"c"])) for entry, fields in entries]

    def lock(self) -> Lock:
        return RedisLock(self._client)

    def close(self) -> None:
        self._client.close()

    # ---- reading ----

    def _read(self, known: int) -> list[Any] | None:
        answer = self._run(
            self._refresh,
            FORMAT_VERSION,
            self._epoch,
            self._reconfirm_s,
            known,
            self._inventory.version,
            len(self._inventory.nodes),
        )
        if answer[0] == b"empty" and not self._epoch and known < 0:
            return None
        if answer[0] != b"ok":
            self._refuse(answer, known)
        return answer

    def _whole_state(self, answer: list[Any]) -> ClusterState:
        epoch, fencing, sequence, last_node, inventory_version, inventory = answer[6:12]
        leases, renewals, quarantined, waiting, drained = (
            dict(zip(flat[::2], flat[1::2], strict=True)) for flat in answer[12:17]
        )
        if inventory:
            self._inventory = self._parse_inventory(inventory_version, inventory)
        self._epoch = epoch.decode()
        held = [
            _lease(text, renewals.get(task_id), task_id in quarantined) for task_id, text in leases.items()
        ]
        held.sort(key=lambda lease: lease.fencing_token)
        in_use = {lease.placement.node for lease in held}
        retired = tuple(name for name in self._inventory.retired if name in in_use)
        gone = set(self._inventory.retired) - in_use
        nodes = tuple(node for node in self._inventory.nodes if node.name not in gone)
        names = {node.name for node in nodes}
        return ClusterState.from_snapshot(
            Snapshot(
                version=answer[3],
                fencing=int(fencing),
                sequence=int(sequence),
                nodes=nodes,
                leases=tuple(held),
                waiting=tuple(sorted(map(_waiting, waiting.values()), key=lambda w: w.sequence)),
                drained=tuple(
                    change
                    for change in map(change_from_json, drained.values())
                    if isinstance(change, Drained) and change.node in names
                ),
                retired=retired,
                last_node=last_node.decode() or None,
            )
        )

    def _parse_inventory(self, version: bytes, text: bytes) -> _Inventory:
        try:
            snapshot = snapshot_from_dict(json.loads(text))
        except ValueError as error:
            raise CorruptStateError(f"{self._client.address}: key 'inventory' holds no JSON") from error
        return _Inventory(version, snapshot.nodes, snapshot.retired)

    # ---- writing ----

    def _inventory_after(self, version: int, changes: Sequence[Change]) -> tuple[str, list[str]]:
        """The inventory as the changes leave it, and the closed nodes it no longer knows.

        Which node leaves at once and which stays, retired, is the fold's to say: an inventory changes so
        rarely that the whole state is read for it.
        """
        answer = self._read(-1)
        if answer is None or answer[3] != version:
            raise StaleStateError(version, None if answer is None else answer[3])
        cluster = self._whole_state(answer)
        for change in changes:
            cluster.apply(change)
        snapshot = cluster.snapshot()
        still_closed = {drained.node for drained in snapshot.drained}
        closed = [name.decode() for name in answer[16][::2]]
        return _inventory_json(snapshot), [name for name in closed if name not in still_closed]

    def _write_state(self, mode: str, snapshot: Snapshot) -> bool:
        parts: list[str] = []
        for lease in snapshot.leases:
            parts += ("lease", lease.task_id, change_to_json(Granted(lease, lease.granted_at)))
        for waiting in snapshot.waiting:
            queued = change_to_json(Queued(waiting.request, waiting.queued_at))
            parts += ("waiting", waiting.task_id, f"{waiting.sequence} {queued}")
        for drained in snapshot.drained:
            parts += ("drained", drained.node, change_to_json(drained))
        epoch = os.urandom(12).hex()
        answer = self._run(
            self._write,
            FORMAT_VERSION,
            epoch,
            mode,
            snapshot.version,
            snapshot.fencing,
            snapshot.sequence,
            snapshot.last_node or "",
            _inventory_json(snapshot),
            *parts,
        )
        if answer[0] == b"ok":
            self._epoch = answer[5].decode()
            return True
        if answer[0] != b"exists":
            self._refuse(answer, snapshot.version)
        return bool(answer[5].decode() == epoch)  # written by a first try whose answer was lost

    # ---- talking to the server ----

    def _run(self, script: Any, *args: Any) -> list[Any]:
        begin = time.monotonic()
        answer: list[Any] = self._client.run(script, self._keys, args)
        self._clock.learn(int(answer[1]), int(answer[2]), begin)
        return answer

    def _refuse(self, answer: list[Any], version: int) -> NoReturn:
        status, stored = answer[0].decode(), answer[3]
        detail = answer[4].decode()
        where = self._client.address
        match status:
            case "stale":
                missed = answer[5] if len(answer) > 5 else ()
                raise StaleStateError(version, stored, missed=tuple(map(change_from_json, missed)))
            case "locked":
                raise LockedError(version)
            case "clock":
                raise StaleStateError(
                    version, stored, f"decided more than {CLOCK_TOLERANCE_S:g} s off the store's clock; retry"
                )
            case "resting":
                raise StateUnconfirmedError(
                    f"{where} was restarted or failed over; nothing is granted for another {detail} s, "
                    "in which owners renew their leases",
                    rest_s=float(detail),
                )
            case "format":
                check_format(detail, f"the state in {where}")
            case "empty" if not self._epoch:
                raise StaleStateError(version, None, f"{where} holds no state; write the first one")
        raise StateLostError(
            f"{where} has lost the state that was read from it before (version {version}; now: "
            f"{status if status != 'behind' else stored}); restore its data, or check which jobs still run "
            "and start over with a reset"
        )


def _key(change: Change) -> str:
    """The field under which Redis keeps what a change is about."""
    if isinstance(change, Granted):
        return change.lease.task_id
    if isinstance(change, Queued):
        return change.request.task_id
    if isinstance(change, Drained | Restored):
        return change.node
    if isinstance(change, InventoryChanged):
        return ""
    return change.task_id


def _lease(text: bytes, renewal: bytes | None, quarantined: bool) -> Lease:
    change = change_from_json(text)
    if not isinstance(change, Granted):
        raise CorruptStateError(f"not a lease: {text[:120]!r}")
    lease = change.lease
    if renewal is not None:
        renewed = change_from_json(renewal)
        if not isinstance(renewed, Renewed):
            raise CorruptStateError(f"not a renewal: {renewal[:120]!r}")
        lease = replace(lease, expires_at=renewed.expires_at, quarantined=False)
    return replace(lease, quarantined=True) if quarantined else lease


def _waiting(text: bytes) -> Waiting:
    sequence, _, body = text.partition(b" ")
    change = change_from_json(body)
    if not isinstance(change, Queued):
        raise CorruptStateError(f"not a waiting request: {text[:120]!r}")
    return Waiting(change.request, change.at, int(sequence))


def _inventory_json(snapshot: Snapshot) -> str:
    only_nodes = Snapshot(0, 0, 0, nodes=snapshot.nodes, retired=snapshot.retired)
    return json.dumps(snapshot_to_dict(only_nodes), separators=(",", ":"))
