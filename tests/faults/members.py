"""Members of gangs, followed through the history without the cluster state that it examines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from resource_manager.core.changes import Change, Expired, Granted, MembersReleased, Released
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Lease, Placement, Spread

Owner = tuple[str, int]
"""A lease by its id and fencing token; a remainder has those of its lease."""

Told = tuple[str, tuple[int, ...], int]
"""A member as answers have it: server, GPUs, port."""

Held = frozenset[tuple[str, int, int, Told]]
"""All members at one moment, with lease id, fencing token and rank."""


def told_members(answer: dict[str, Any]) -> dict[int, Told]:
    """Return the members of a lease in an answer, by rank."""
    return {
        member["rank"]: (member["server_name"], tuple(member["gpu_ids"]), member["port"])
        for member in answer["members"]
    }


def told_leases(answer: dict[str, Any]) -> Held:
    """Return all members in an answer that lists leases."""
    return frozenset(
        (lease["task_id"], lease["fencing_token"], rank, member)
        for lease in answer["leases"]
        for rank, member in told_members(lease).items()
    )


class Members:
    """Who holds which GPU and port at each position of the history, members and remainders alike."""

    def __init__(self) -> None:
        self.granted: dict[Owner, dict[int, Told]] = {}
        self.ends: dict[Owner, list[tuple[int, frozenset[int]]]] = defaultdict(list)
        """Positions at which members of a lease were released, and their ranks."""
        self.ranks: dict[Owner, list[tuple[int, frozenset[int]]]] = {}
        """Ranks that each lease held, from which position on."""
        self.states: list[Held] = [frozenset()]
        self._holders: dict[tuple[str, int], tuple[str, int, int]] = {}
        self._ports: dict[tuple[str, int], Owner] = {}

    def follow(self, position: int, change: Change) -> Iterator[str]:
        """Take the change at that position; yield what it breaks."""
        if isinstance(change, Granted):
            yield from self._begin(position, change.lease)
        elif isinstance(change, Released | Expired | MembersReleased):
            yield from self._end(position, change)
        else:
            self.states.append(self.states[-1])

    def held_at(self, owner: Owner, position: int) -> frozenset[int]:
        """Return the ranks of the lease, or of its remainder, that are held then."""
        held: frozenset[int] = frozenset()
        for begin, ranks in self.ranks.get(owner, ()):
            if begin <= position:
                held = ranks
        return held

    def agrees(self, cluster: ClusterState) -> bool:
        """Return True if the state has these members, each on its server, under a lease or a remainder."""
        leases = {lease.key: lease for lease in (*cluster.leases.values(), *cluster.remainders.values())}
        on_servers = {(state.name, key) for state in cluster.nodes for key in state.leases}
        named = {(member.node, key) for key, lease in leases.items() for member in lease.members}
        return self.states[-1] == _members_of(leases.values()) and on_servers == named

    def _begin(self, position: int, lease: Lease) -> Iterator[str]:
        request, members, owner = lease.request, lease.members, (lease.lease_id, lease.fencing_token)
        name = f"{lease.lease_id} ({lease.fencing_token})"
        if len(members) != request.nodes or any(len(member.gpu_ids) != request.gpus for member in members):
            yield f"{name} got {members}, which is not all that it asked for"
        if request.spread is Spread.SERVERS and len({member.node for member in members}) != len(members):
            yield f"{name} got several members on a server: {members}"
        ports = [member.port for member in members]
        if bool(ports[0]) != (request.nodes > 1) or any(ports[1:]):
            yield f"{name} got the ports {ports}"
        for rank, member in enumerate(members):
            for gpu_id in member.gpu_ids:
                other = self._holders.setdefault((member.node, gpu_id), (*owner, rank))
                if other != (*owner, rank):
                    yield f"GPU {gpu_id} of {member.node} has two holders: {other} and {(*owner, rank)}"
            if member.port and self._ports.setdefault((member.node, member.port), owner) != owner:
                meets = self._ports[member.node, member.port]
                yield f"port {member.port} of {member.node} is of {meets} and {owner}"
        self.granted[owner] = {rank: _told(member) for rank, member in enumerate(members)}
        self.ranks[owner] = [(position, frozenset(self.granted[owner]))]
        self.states.append(self.states[-1] | {(*owner, *each) for each in self.granted[owner].items()})

    def _end(self, position: int, change: Released | Expired | MembersReleased) -> Iterator[str]:
        owner = (change.lease_id, change.fencing_token)
        held = self.held_at(owner, position)
        ended = frozenset(change.ranks) if isinstance(change, MembersReleased) else held
        if isinstance(change, MembersReleased) and not (ended and ended <= held):
            yield f"members {sorted(ended)} of {owner} ended, of which it held {sorted(held)}"
        if not isinstance(change, MembersReleased) and held != frozenset(self.granted.get(owner, ())):
            yield f"{owner} ended as a whole when it held only {sorted(held)}"
        for rank in ended & held:
            node, gpu_ids, port = self.granted[owner][rank]
            for gpu_id in gpu_ids:
                if self._holders.get((node, gpu_id)) == (*owner, rank):
                    del self._holders[node, gpu_id]
            if self._ports.get((node, port)) == owner:
                del self._ports[node, port]
        if not isinstance(change, Expired):
            self.ends[owner].append((position, ended))
        self.ranks.setdefault(owner, []).append((position, held - ended))
        self.states.append(
            frozenset(each for each in self.states[-1] if each[:2] != owner or each[2] not in ended)
        )


def _told(member: Placement) -> Told:
    return member.node, member.gpu_ids, member.port


def _members_of(leases: Any) -> Held:
    return frozenset(
        (lease.lease_id, lease.fencing_token, rank, _told(member))
        for lease in leases
        for rank, member in lease.ranked
    )


def room_for(cluster: ClusterState, gpus: int, cpus: int, nodes: int, spread: str) -> bool:
    """Return True if whole GPUs and CPUs for all members are free now, by counting."""
    counts: Sequence[int] = [
        min(sum(milli == 1000 for milli in state.gpu_free.values()) // gpus, int(state.free["cpus"]) // cpus)
        for state in cluster.nodes
        if state.is_open
    ]
    return sum(min(count, 1) if spread == Spread.SERVERS else count for count in counts) >= nodes
