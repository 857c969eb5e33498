"""The hash `gpus` in Redis: agents of nodes, the last transition of each GPU, and what is being cleaned.

The last is written by commit.lua at the end of a lease or of members of one: the JSON of the lease and of
each such end, a line each; where a restore came in between, then the JSON of what was left of the lease, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from resource_manager.core import changes
from resource_manager.core.cluster import Snapshot
from resource_manager.core.gpu_state import GpuChange
from resource_manager.core.models import Lease, Placement, Request
from resource_manager.core.node_state import Cleaning
from resource_manager.errors import CorruptStateError
from resource_manager.storage.codec import change_from_json, change_to_json


def field_of(change: changes.AgentSeen | changes.AgentLost | GpuChange | Cleaning) -> str:
    """Return the field of a change; a GPU's later transition replaces the earlier one."""
    match change:
        case changes.AgentSeen() | changes.AgentLost():
            return f"watched {change.node}"
        case changes.GpuClosed() | changes.GpuOpened():
            return f"gpu {change.gpu_id} {change.node}"
        case changes.GpuCleaned() | Cleaning():
            return f"cleaning {change.gpu_id} {change.fencing_token} {change.node}"


def fields_of(snapshot: Snapshot) -> dict[str, str]:
    transitions: list[changes.AgentSeen | changes.AgentLost | GpuChange] = [
        changes.AgentSeen(each, 0.0) for each in snapshot.watched
    ]
    transitions += [*snapshot.silent, *snapshot.closed_gpus, *snapshot.opened_gpus]
    return {
        **{field_of(change): change_to_json(change) for change in transitions},
        **{field_of(entry): _ended_lease(entry) for entry in snapshot.cleaning},
    }


def _ended_lease(entry: Cleaning) -> str:
    """Return a lease and its end, as commit.lua keeps them, from which `_cleaning` reads the entry."""
    request = Request(entry.lease_id, 1, gpu_milli=entry.milli, labels=entry.labels)
    placement = Placement(entry.node, (entry.gpu_id,), (entry.uuid,) if entry.uuid else ())
    lease = Lease(request, (placement,), entry.fencing_token, entry.since, sequence=entry.sequence)
    ended = changes.Released(entry.lease_id, entry.fencing_token, entry.since)
    return f"{change_to_json(changes.Granted(lease, entry.since))}\n{change_to_json(ended)}"


def read(stored: Mapping[bytes, bytes], names: Collection[str]) -> dict[str, list[Any]]:
    """Return the parts of a `Snapshot` that are in the hash, by their names there.

    Entries of nodes that are not among `names` have left: only their closures stay. Raises
    `CorruptStateError`.
    """
    known: defaultdict[str, list[Any]] = defaultdict(list)
    for key, value in stored.items():
        name, text = key.decode(errors="replace"), value.decode(errors="replace")
        change = _cleaning(name, text) if name.startswith("cleaning ") else change_from_json(text)
        match change:
            case changes.AgentSeen() | changes.AgentLost() if change.node not in names:
                pass
            case changes.GpuOpened() | Cleaning() if change.node not in names:
                pass
            case changes.AgentSeen():
                known["watched"].append(change.node)
            case changes.AgentLost():
                known["watched"].append(change.node)
                known["silent"].append(change)
            case changes.GpuClosed():
                known["closed_gpus"].append(change)
            case changes.GpuOpened():
                known["opened_gpus"].append(change)
            case Cleaning():
                known["cleaning"].append(change)
            case _:
                raise CorruptStateError(f"not the state of a GPU: {text[:120]!r}")
    return known


def _cleaning(name: str, text: str) -> Cleaning:
    """Parse an entry: a lease and its ends, after a restore also what was left of that lease and its ends."""
    first, *others = map(change_from_json, text.split("\n"))
    try:
        _, number, token, node = name.split(" ", 3)
        gpu_id, milli = int(number), 0
        lease, held = _members_on(first, node, gpu_id)
        uuids = dict(zip(held[0][1].gpu_ids, held[0][1].gpu_uuids, strict=False))
        for change in others:
            if isinstance(change, changes.Granted):
                lease, held = _members_on(change, node, gpu_id)
            else:
                ranks = _ranks(change, lease)
                milli += lease.request.gpu_milli * sum(rank in ranks for rank, _ in held)
        return Cleaning(
            node,
            gpu_id,
            uuids.get(gpu_id, ""),
            int(token),
            milli,
            lease.lease_id,
            others[-1].at,
            lease.request.labels,
            lease.sequence,
        )
    except (ValueError, LookupError):
        raise CorruptStateError(f"not an ended lease on a GPU: {name[:120]!r}") from None


def _members_on(granted: changes.Change, node: str, gpu_id: int) -> tuple[Lease, list[tuple[int, Placement]]]:
    """Return a lease and its members, by rank, that hold a GPU; raises `ValueError` if it is no lease."""
    if not isinstance(granted, changes.Granted):
        raise ValueError("not a lease")
    lease = granted.lease
    return lease, [each for each in lease.ranked if each[1].node == node and gpu_id in each[1].gpu_ids]


def _ranks(end: changes.Change, lease: Lease) -> Collection[int]:
    """Return the ranks that a change ends; raises `ValueError` if it is no end."""
    if isinstance(end, changes.MembersReleased):
        return end.ranks
    if isinstance(end, changes.Released | changes.Expired):
        return [rank for rank, _ in lease.ranked]
    raise ValueError("not an end")
