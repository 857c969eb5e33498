"""The layout of a state in Redis: changes as hash fields and stream entries, whole states read from them.

For every lease, pending request and closed node Redis keeps the changes that are in effect, as the same
JSON as in the stream. A whole state is the inventory with these changes applied.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from resource_manager.core import changes
from resource_manager.core.attained_service import MAX_JOBS
from resource_manager.core.cluster import ClusterState, Snapshot
from resource_manager.core.cluster_settings import ClusterSettings
from resource_manager.core.failed_starts import MAX_FAILED_STARTS, FailedStarts, by_time, with_failed_start
from resource_manager.core.inventory import Adoption
from resource_manager.core.models import KEY_SEPARATOR, Node
from resource_manager.core.pending import PendingRequest
from resource_manager.core.runtimes import KEPT_RUNTIMES, MAX_CLASSES, job_id_of
from resource_manager.core.team_ledger import Use
from resource_manager.core.teams import Teams
from resource_manager.errors import CorruptStateError
from resource_manager.storage.codec import (
    change_from_json,
    change_to_json,
    snapshot_from_dict,
    snapshot_to_dict,
)
from resource_manager.storage.jobs import JobRow
from resource_manager.storage.redis import gpu_layout
from resource_manager.storage.redis.lease_layout import ChangeT, read_as, read_lease, read_remainder

_ID = attrgetter("lease_id")
_NODE = attrgetter("node")

OPERATIONS: dict[type, tuple[str, Callable[[Any], str]]] = {
    changes.Granted: ("grant", attrgetter("lease.lease_id")),
    changes.Released: ("end", _ID),
    changes.MembersReleased: (
        "members",
        lambda change: f"{change.lease_id}{KEY_SEPARATOR}{change.fencing_token}",
    ),
    changes.Preempting: ("preempt", _ID),
    changes.Expired: ("end", _ID),
    changes.Renewed: ("renew", _ID),
    changes.Quarantined: ("quarantine", _ID),
    changes.JobPlaced: ("place", _ID),
    changes.Queued: ("queue", attrgetter("request.lease_id")),
    changes.Cancelled: ("cancel", _ID),
    changes.DeadlineRisk: ("rule", lambda change: f"{RISK}{change.lease_id}"),
    changes.Announced: ("rule", lambda change: f"{ANNOUNCED}{change.lease_id}"),
    changes.Withdrawn: ("unrule", lambda change: f"{ANNOUNCED}{change.lease_id}"),
    changes.Drained: ("drain", _NODE),
    changes.Resumed: ("resume", _NODE),
    changes.TeamsChanged: ("rule", lambda change: TEAMS),
    changes.MaintenanceChanged: ("rule", lambda change: MAINTENANCE),
    changes.AgentSeen: ("set gpu", gpu_layout.field_of),
    changes.AgentLost: ("set gpu", gpu_layout.field_of),
    changes.GpuClosed: ("set gpu", gpu_layout.field_of),
    changes.GpuOpened: ("set gpu", gpu_layout.field_of),
    changes.GpuCleaned: ("unset gpu", gpu_layout.field_of),
    changes.InventoryChanged: ("inventory", lambda change: ""),
    changes.ClusterSettingsChanged: ("rule", lambda change: SETTINGS),
}
"""The operation of commit.lua for each kind of change, and the hash field that it is about."""

TEAMS = "teams"
MAINTENANCE = "maintenance"
SETTINGS = "settings"
"""Fields of the rules, each with the change that made that part of them."""

FAILED_STARTS = "failed_starts"
"""Field of the rules with the releases of leases whose jobs did not start, a line each."""

RUNS = "runs:"  # what was learnt of a class of task: when (a version), and runs
ATTAINED = "attained:"  # the service a job attained: when (a version), and GPU ms
RISK = "risk:"  # the change by which a lease or request may miss its deadline
ANNOUNCED = "announced:"  # the change by which a demand was announced
USE = "use:"  # a team's decayed use
"""Beginnings of the names of further fields of the rules."""

LAST_PORT = "last_port:"
"""Prefix of the names of servers in `meta`, where the last port of a gang on them is kept."""


class Inventory(NamedTuple):
    """The nodes as stored, `retired` ones included, adoptions, and the version that wrote them."""

    version: bytes = b""
    nodes: tuple[Node, ...] = ()
    retired: tuple[str, ...] = ()
    adoptions: tuple[Adoption, ...] = ()


def operations(change: changes.Change) -> list[str]:
    """Return the arguments of commit.lua for a change: for each part operation, hash field and text."""
    kind, field = OPERATIONS[type(change)]
    if isinstance(change, changes.DeadlineRisk) and change.ends_by is None:
        kind = "unrule"
    itself = [kind, field(change), change_to_json(change)]
    if isinstance(change, changes.Granted) and (port := (first := change.lease.members[0]).port):
        return ["port", f"{LAST_PORT}{first.node}", str(port), *itself]
    if isinstance(change, changes.ClusterSettingsChanged):
        return [*window_part(change.settings), *itself]
    if not isinstance(change, changes.ENDS):
        return itself
    return [*_learnt(change), *itself, *_failed_start(change)]


def _learnt(change: changes.Released | changes.Expired | changes.MembersReleased) -> list[str]:
    """Return what to learn from the end of a lease; it comes before it."""
    if not isinstance(change, changes.Released) or change.outcome not in ("", changes.Outcome.SUCCESS):
        return ["attain", change.lease_id, f"{change.fencing_token} {MAX_JOBS} {change.at!r}"]
    forget = ["forget attained", f"{ATTAINED}{job_id_of(change.lease_id)}", ""]
    if change.outcome != changes.Outcome.SUCCESS:
        return forget
    return [*forget, "learn", change.lease_id, f"{MAX_CLASSES} {KEPT_RUNTIMES} {change.at!r}"]


def use_operations(uses: Mapping[str, Use]) -> list[str]:
    """Return the arguments of commit.lua for the decayed use of teams after a commit."""
    return [part for team, use in uses.items() for part in ("use", f"{USE}{team}", json.dumps(use))]


def job_operations(rows: Sequence[JobRow]) -> list[str]:
    """Return the arguments of commit.lua for the jobs and results that a commit stores."""
    return [
        part
        for row in rows
        for part in ("job", f"{row.name} {row.whose} {round(1000 * row.keep_s)}", row.text)
    ]


def _failed_start(change: changes.Change) -> list[str]:
    """Return the release that is remembered because of the nodes that it names."""
    if not isinstance(change, changes.Released) or not change.failed_nodes:
        return []
    return ["failed", str(MAX_FAILED_STARTS), change_to_json(change)]


def parts_of(snapshot: Snapshot) -> list[str]:
    """Return the arguments of replace_state.lua for a state: part, field and JSON of each entry."""
    parts: list[str] = []
    for lease in (*snapshot.leases, *snapshot.remainders):
        parts += ("lease", lease.key, change_to_json(changes.Granted(lease, lease.granted_at)))
    for pending in snapshot.pending:
        queued = changes.Queued(pending.request, pending.queued_at, pending.sequence, pending.queued_at)
        parts += ("pending", pending.lease_id, change_to_json(queued))
    for drained in snapshot.drained:
        parts += ("drained", drained.node, change_to_json(drained))
    if snapshot.teams:
        parts += ("rule", TEAMS, change_to_json(changes.TeamsChanged(snapshot.teams, 0.0)))
    if snapshot.settings != ClusterSettings():
        parts += ("rule", SETTINGS, change_to_json(changes.ClusterSettingsChanged(snapshot.settings, 0.0)))
        parts += window_part(snapshot.settings)
    if snapshot.windows:
        parts += ("rule", MAINTENANCE, change_to_json(changes.MaintenanceChanged(snapshot.windows, 0.0)))
    if snapshot.failed_starts:
        parts += ("rule", FAILED_STARTS, "\n".join(map(change_to_json, snapshot.failed_starts)))
    for number, (name, runs) in enumerate(snapshot.runtimes.items(), start=-len(snapshot.runtimes)):
        parts += ("rule", f"{RUNS}{name}", json.dumps([number, *runs]))
    for number, (job, gpu_ms) in enumerate(snapshot.attained.items(), start=-len(snapshot.attained)):
        parts += ("rule", f"{ATTAINED}{job}", json.dumps([number, gpu_ms]))
    for lease_id, ends_by in snapshot.at_risk.items():
        parts += ("rule", f"{RISK}{lease_id}", change_to_json(changes.DeadlineRisk(lease_id, 0.0, ends_by)))
    for announced in snapshot.announced:
        parts += ("rule", f"{ANNOUNCED}{announced.lease_id}", change_to_json(announced))
    for team, use in snapshot.use.items():
        parts += ("rule", f"{USE}{team}", json.dumps(use))
    for field, text in gpu_layout.fields_of(snapshot).items():
        parts += ("gpu", field, text)
    for node, port in snapshot.last_ports.items():
        parts += ("port", f"{LAST_PORT}{node}", str(port))
    return parts


def window_part(settings: ClusterSettings) -> tuple[str, str, str]:
    """Return the argument of the scripts that keeps the recovery window in `meta`, for preflight.lua."""
    return "port", "confirmation_window_s", str(settings.confirmation_window_s)


def forgetting(
    snapshot: Snapshot, drained: Sequence[bytes], gpus: Sequence[bytes], meta: Sequence[bytes]
) -> list[str]:
    """Return the operations that forget what these hashes have of servers that the state lacks by now."""
    kept = {each.node for each in snapshot.drained} | gpu_layout.fields_of(snapshot).keys()
    forgotten: list[str] = []
    for operation, fields in (("forget", drained[::2]), ("forget gpu", gpus[::2])):
        for field in fields:
            if (name := field.decode()) not in kept:
                forgotten += (operation, name, "")
    names = (field.decode(errors="replace") for field in meta[::2])
    ports = {name.removeprefix(LAST_PORT) for name in names if name.startswith(LAST_PORT)}
    for node in sorted(ports - snapshot.last_ports.keys()):
        forgotten += ("forget port", f"{LAST_PORT}{node}", "")
    return forgotten


def inventory_to_json(snapshot: Snapshot) -> str:
    only_nodes = Snapshot(
        0, 0, 0, nodes=snapshot.nodes, retired=snapshot.retired, adoptions=snapshot.adoptions
    )
    return json.dumps(snapshot_to_dict(only_nodes), separators=(",", ":"))


def inventory_from_json(version: bytes, text: bytes) -> Inventory:
    """Parse an inventory; raises `CorruptStateError`."""
    try:
        snapshot = snapshot_from_dict(json.loads(text))
    except (ValueError, RecursionError, AttributeError) as error:
        raise CorruptStateError(f"the inventory in Redis is not JSON: {error}") from error
    return Inventory(version, snapshot.nodes, snapshot.retired, snapshot.adoptions)


def lacks_leases(leases: Sequence[bytes], others: Iterable[Sequence[bytes]]) -> bool:
    """Return whether one of the other hashes is about a lease that is not there: its end leaves nothing.

    Somebody deleted the key of the leases, or Redis dropped it. Leases that nobody renewed leave no trace.
    """
    known = frozenset(leases[::2])
    return any(not known.issuperset(flat[::2]) for flat in others)


def read_state(version: int, answer: Sequence[Any], inventory: Inventory) -> ClusterState:
    """Return the state in refresh.lua's answer: fencing, sequence, last node and nine hashes.

    Raises `CorruptStateError`.
    """
    fencing, sequence, last_node = answer[:3]
    leases, renewals, quarantined, pending, drained, rules, gpus, meta, preempting = (
        dict(zip(flat[::2], flat[1::2], strict=True)) for flat in answer[3:12]
    )
    separator = KEY_SEPARATOR.encode()
    remainders = [
        read_remainder(leases.pop(key), quarantined.get(key, b"")) for key in list(leases) if separator in key
    ]
    held = [
        read_lease(text, renewals.get(lease_id), preempting.get(lease_id), quarantined.get(lease_id))
        for lease_id, text in leases.items()
    ]
    held.sort(key=lambda lease: lease.fencing_token)
    in_use = {member.node for lease in (*held, *remainders) for member in lease.members}
    gone = set(inventory.retired) - in_use
    nodes = tuple(node for node in inventory.nodes if node.name not in gone)
    names = {node.name for node in nodes}
    closed = (
        change for change in map(change_from_json, drained.values()) if isinstance(change, changes.Drained)
    )
    return ClusterState.from_snapshot(
        Snapshot(
            version=version,
            last_fencing_token=_number(fencing),
            sequence=_number(sequence),
            nodes=nodes,
            leases=tuple(held),
            pending=tuple(sorted(map(_pending, pending.values()), key=lambda entry: entry.sequence)),
            drained=tuple(closed),
            retired=tuple(name for name in inventory.retired if name in in_use),
            last_node=last_node.decode(errors="replace") or None,
            teams=_rule(rules, TEAMS, changes.TeamsChanged(Teams(), 0.0)).teams,
            use=_uses(rules),
            windows=_rule(rules, MAINTENANCE, changes.MaintenanceChanged((), 0.0)).windows,
            settings=_rule(rules, SETTINGS, changes.ClusterSettingsChanged(ClusterSettings(), 0.0)).settings,
            adoptions=inventory.adoptions,
            failed_starts=_failed_starts(rules.get(FAILED_STARTS.encode(), b"")),
            runtimes={name: tuple(map(float, runs)) for name, runs in _in_order(rules, RUNS)},
            attained={job: int(gpu_ms) for job, [gpu_ms] in _in_order(rules, ATTAINED)},
            at_risk={risk.lease_id: risk.ends_by or 0.0 for risk in _each(rules, RISK, changes.DeadlineRisk)},
            announced=tuple(_each(rules, ANNOUNCED, changes.Announced)),
            remainders=tuple(sorted(remainders, key=lambda lease: lease.fencing_token)),
            last_ports={node: _number(port) for node, port in _fields(meta, LAST_PORT) if node in names},
            **{name: tuple(entries) for name, entries in gpu_layout.read(gpus, names).items()},
        )
    )


def _fields(stored: Mapping[bytes, bytes], beginning: str) -> Iterator[tuple[str, bytes]]:
    """Yield what follows that beginning in the names of fields that have it, and their texts."""
    for name, text in stored.items():
        if name.startswith(beginning.encode()):
            yield name.decode(errors="replace").removeprefix(beginning), text


def _pending(text: bytes) -> PendingRequest:
    change = read_as(text, changes.Queued, "a pending request")
    return PendingRequest(change.request, change.queued_at, change.sequence)


def _rule(rules: Mapping[bytes, bytes], field: str, default: ChangeT) -> ChangeT:
    text = rules.get(field.encode())
    return default if text is None else read_as(text, type(default), f"a change for the field {field}")


def _failed_starts(text: bytes) -> tuple[changes.Released, ...]:
    known: FailedStarts = {}
    for line in text.splitlines():
        known = with_failed_start(known, read_as(line, changes.Released, "a release"))
    return by_time(known)


def _each(rules: Mapping[bytes, bytes], beginning: str, kind: type[ChangeT]) -> Iterator[ChangeT]:
    """Yield the changes in the fields with that beginning."""
    for _, text in sorted(_fields(rules, beginning)):
        yield read_as(text, kind, f"a change for the field {beginning}")


def _uses(rules: Mapping[bytes, bytes]) -> dict[str, Use]:
    found: dict[str, Use] = {}
    for team, text in _fields(rules, USE):
        try:
            amount, at = json.loads(text)
            found[team] = Use(float(amount), float(at))
        except (ValueError, TypeError) as error:
            raise CorruptStateError(f"not the use of a team: {text[:120]!r}") from error
    return found


def _in_order(rules: Mapping[bytes, bytes], beginning: str) -> list[tuple[str, list[float]]]:
    """Return the names and numbers of the fields with that beginning, the one that changed last is last."""
    found: list[tuple[int, str, list[float]]] = []
    for name, text in _fields(rules, beginning):
        try:
            version, *numbers = json.loads(text)
            found.append((int(version), name, [*map(float, numbers)]))
        except (ValueError, TypeError) as error:
            raise CorruptStateError(f"not what was learnt of {beginning}{name}: {text[:120]!r}") from error
    return [(name, numbers) for _, name, numbers in sorted(found)]


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise CorruptStateError(f"not a whole number: {text[:120]!r}") from None
