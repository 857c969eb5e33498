"""Random plays: steps of any kind on a small cluster, by any order and any placement policy.

A play is made by its seed alone, so a seed that fails is the whole report.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import TypeVar

from resource_manager.core.changes import (
    Change,
    Drained,
    Granted,
    Outcome,
    Preempting,
    Resumed,
    TeamsChanged,
)
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Gpu, Lease, Link, Node, Placement, Request, Spread, TypeChoice
from resource_manager.core.teams import Team, Teams
from resource_manager.errors import ResourceManagerError
from resource_manager.scheduling import allocator, lease_steps
from resource_manager.scheduling.placement.policies import get_policy
from resource_manager.scheduling.queue.orders import ORDERS, get_order
from resource_manager.scheduling.scheduling_pass import SchedulingPass

POLICIES = (
    "first_fit", "best_fit", "weighted_fit", "round_robin", "least_loaded", "dot_product", "gpu_packing",
    "gpu_clustering", "fgd",
)  # fmt: skip
TYPES = ("A100", "H100", "MI300")
TEAMS = ("p", "q", "r", "s")

T = TypeVar("T")
Decide = Callable[[ClusterState], list[Change]]


class Play:
    """One cluster, its rules, and the steps that chance takes on it."""

    def __init__(self, seed: int, *, crowded: bool = False) -> None:
        """Begin a play; a `crowded` one is of teams that take few GPUs and parts from each other."""
        self.chance = random.Random(seed)
        self.crowded = crowded
        self.nodes = _nodes(self.chance, crowded)
        self.state = ClusterState(self.nodes)
        self.policy = get_policy(self.chance.choice(POLICIES))
        self.order = get_order(self.chance.choice(list(ORDERS)) + self.chance.choice(["", "+backfill"]))
        self.now = 1000.0
        self.requests = 0
        self.steps: list[object] = [self.nodes, self.order, self.policy]
        if crowded or self.chance.random() < 0.85:
            teams = _teams(self.chance, self.nodes)
            self._apply([TeamsChanged(replace(teams, preemption=crowded or teams.preemption), 0.0)])

    @property
    def current(self) -> SchedulingPass:
        return SchedulingPass(self.policy, self.order, self.now)

    def copy(self) -> Play:
        """Return a play that goes on from here by itself."""
        other = Play.__new__(Play)
        vars(other).update(vars(self))
        other.state = ClusterState.from_snapshot(self.state.snapshot())
        other.steps = [*self.steps]
        return other

    def do(self, name: str, change: Decide) -> None:
        """Take one step, and the pass that follows it; a refusal changes nothing."""
        try:
            changes = self.decide(lambda state: allocator.with_dispatch(state, change(state), self.current))
        except ResourceManagerError as error:
            self.steps.append((self.now, name, f"refused: {error!r}"))
        else:
            self.steps.append((self.now, name))
            self._apply(changes)

    def decide(self, change: Decide) -> list[Change]:
        """Return what is decided; the state stays as it is, and a replica decides the same."""
        before = content_of(self.state)
        replica = ClusterState.from_snapshot(self.state.snapshot())
        try:
            changes = change(self.state)
        finally:
            assert content_of(self.state) == before, self
        assert change(replica) == changes, self
        return changes

    def settle(self) -> None:
        """Make a pass; a second one has nothing left to decide, unless the first has preempted.

        A request that waits for preempted leases to end blocks no other from the next pass on.
        """
        before = len(self.steps)
        self.do("pass", lambda state: [])
        if any(isinstance(step, Preempting) for step in self.steps[before:]):
            self.settle()
        else:
            assert self.decide(lambda state: allocator.schedule_pending(state, self.current)) == [], self

    def course(self) -> Iterator[None]:
        """Take 10 to 50 steps, and yield after each."""
        for _ in range(self.chance.randint(10, 50)):
            self.step()
            yield

    def step(self) -> None:
        """Let time pass, and do one thing."""
        self.now += self.chance.choice([0.0, 0.1, 1.0, 5.0, 30.0, 61.0, 200.0])
        self.chance.choices(
            (
                *(self._submit, self._release, self._release_members, self._release_remainder, self._cancel),
                *(self._end_preempted, self._drain, self._close_gpu, self._renew, self._preempt, self._tick),
            ),
            (45, 15, 4, 3, 5, 4, 4, 3, 3, 2, 10),
        )[0]()

    def request(self) -> Request:
        self.requests += 1
        request = _request(self.chance, f"j{self.requests}", self.nodes)
        if not self.crowded:
            return request
        is_part = self.chance.random() < 0.6
        return replace(
            request,
            gpus=1 if is_part else min(request.gpus, 2),
            gpu_milli=self.chance.choice([250, 500, 700]) if is_part else 1000,
            resources={},
            gpu_types=(),
            vendor="",
            labels_required={},
            nodes=1,
            spread=Spread.SERVERS,
            same="",
            prefer_same="",
            preemption_delay_s=0.0,
        )

    def end_preempted(self, lease_id: str) -> None:
        ended = Outcome.PREEMPTED
        self.do(
            f"end {lease_id}", lambda state: lease_steps.release(state, lease_id, self.now, outcome=ended)
        )

    def end(self, lease: Lease) -> None:
        name, token = f"release {lease.lease_id}", lease.fencing_token
        self.do(name, lambda state: lease_steps.release(state, lease.lease_id, self.now, fencing_token=token))

    def open_all(self) -> None:
        """Open every server and GPU."""
        for node in self.nodes:
            if self.state.node(node.name).drained:
                self._resume(node.name)
            for gpu in list(self.state.node(node.name).closed_gpus):
                self._open_gpu(node.name, gpu)

    def _submit(self) -> None:
        request = self.request()
        self.steps.append(request)
        try:
            changes = self.decide(lambda state: allocator.submit(state, request, self.current))
        except ResourceManagerError as error:
            self.steps.append((self.now, "submit", f"refused: {error!r}"))
        else:
            self._apply(changes)

    def _release(self) -> None:
        if self.state.leases:
            self.end(self._one_of(self.state.leases.values()))

    def _release_members(self) -> None:
        if gangs := [lease for lease in self.state.leases.values() if len(lease.members) > 1]:
            lease = self._one_of(gangs)
            ranks, token = [self._one_of(lease.ranked)[0]], lease.fencing_token
            self.do(
                f"release {ranks} of {lease.lease_id}",
                lambda state: lease_steps.release_members(
                    state, lease.lease_id, ranks, self.now, fencing_token=token
                ),
            )

    def _release_remainder(self) -> None:
        if self.state.remainders:
            self.end(self._one_of(self.state.remainders.values()))

    def _cancel(self) -> None:
        if self.state.pending:
            lease_id = self._one_of(sorted(each.lease_id for each in self.state.pending.values()))
            self.do(f"cancel {lease_id}", lambda state: lease_steps.cancel(state, lease_id, self.now))

    def _end_preempted(self) -> None:
        for lease_id in sorted(self.state.preempting):
            if lease_id in self.state.leases and self.chance.random() < 0.7:
                self.end_preempted(lease_id)

    def _drain(self) -> None:
        name = self._one_of(self.nodes).name
        if self.state.node(name).drained:
            self._resume(name)
        else:
            self.do(f"drain {name}", lambda state: [Drained(name, self.now, "by hand")])

    def _resume(self, name: str) -> None:
        self.do(f"resume {name}", lambda state: [Resumed(name, self.now)])

    def _close_gpu(self) -> None:
        node = self._one_of(self.nodes)
        gpu = self._one_of(node.gpus).gpu_id
        if gpu in self.state.node(node.name).closed_gpus:
            self._open_gpu(node.name, gpu)
        else:
            self.do(
                f"close {node.name} {gpu}",
                lambda state: allocator.drain_gpu(state, node.name, gpu, self.now),
            )

    def _open_gpu(self, node: str, gpu: int) -> None:
        self.do(f"open {node} {gpu}", lambda state: allocator.resume_gpu(state, node, gpu, self.now))

    def _renew(self) -> None:
        if self.state.leases:
            lease_id = self._one_of(sorted(self.state.leases))
            self.do(f"renew {lease_id}", lambda state: lease_steps.renew(state, lease_id, self.now))

    def _preempt(self) -> None:
        if self.state.leases:
            lease_id = self._one_of(sorted(self.state.leases))
            self.do(f"preempt {lease_id}", lambda state: lease_steps.preempt(state, lease_id, self.current))

    def _tick(self) -> None:
        self.do("expire", lambda state: lease_steps.expire(state, self.now))

    def _one_of(self, values: Iterable[T]) -> T:
        return self.chance.choice([*values])

    def _apply(self, changes: Sequence[Change]) -> None:
        for change in changes:
            self.steps.append(change)
            if isinstance(change, Granted):
                assert is_as_demanded(self.state, change.lease), self
            self.state.apply(change)
        allocator.check(self.state)

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps))


def content_of(state: ClusterState) -> dict[str, object]:
    """Return all that the state says, whatever the order in which its parts came."""
    snapshot = state.snapshot()
    content: dict[str, object] = {}
    for each in fields(snapshot):
        value = getattr(snapshot, each.name)
        if isinstance(value, Mapping):
            value = value.items()
        content[each.name] = sorted(map(repr, value)) if isinstance(value, Iterable) else repr(value)
    content["free"] = [
        (each.name, sorted(each.gpu_free.items()), sorted(each.free.items())) for each in state.nodes
    ]
    if state.ledger is not None:
        content["accounts"] = [
            (
                each.name,
                each.allocated,
                each.fixed,
                _amounts(each.by_type),
                _amounts(each.by_owner),
            )
            for each in state.ledger.accounts.values()
        ]
    return content


def _amounts(amounts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted((name, amount) for name, amount in amounts.items() if amount)


def is_as_demanded(state: ClusterState, lease: Lease) -> bool:
    """Return whether the places of a lease are what its request demands, each rule written a second time."""
    request, members = lease.request, lease.members
    servers = [member.node for member in members]
    values = {state.node(server).node.labels.get(request.same) for server in servers}
    return (
        len(members) == request.nodes
        and (request.spread is not Spread.SERVERS or len({*servers}) == len(servers))
        and (request.nodes == 1 or not request.same or (len(values) == 1 and None not in values))
        and all(_member_is_as_demanded(state, request, member) for member in members)
    )


def _member_is_as_demanded(state: ClusterState, request: Request, member: Placement) -> bool:
    server = state.node(member.node)
    gpus = [gpu for gpu in server.node.gpus if gpu.gpu_id in member.gpu_ids]
    return (
        server.is_open
        and len(gpus) == len({*member.gpu_ids}) == request.gpus
        and not {*member.gpu_ids} & {*server.closed_gpus}
        and request.required_node in (None, member.node)
        and request.labels_required.items() <= server.node.labels.items()
        and (not request.is_linked or any({*member.gpu_ids} <= {*island} for island in _islands(server.node)))
        and all(
            gpu.gpu_type in (request.gpu_types or TYPES)
            and request.vendor in ("", gpu.vendor)
            and not (gpu.is_mig and request.gpus > 1)
            for gpu in gpus
        )
    )


def _islands(node: Node) -> Sequence[Sequence[int]]:
    return node.islands or [[gpu.gpu_id for gpu in node.gpus]]


def _nodes(chance: random.Random, crowded: bool) -> list[Node]:
    return [_node(chance, number, crowded) for number in range(chance.randint(1, 2 if crowded else 4))]


def _node(chance: random.Random, number: int, crowded: bool) -> Node:
    count = chance.choice([1, 2] if crowded else [1, 2, 4, 4, 8])
    types = chance.choices(TYPES, k=count) if chance.random() < 0.25 else [chance.choice(TYPES)] * count
    gpus = tuple(
        Gpu(
            gpu_id,
            gpu_type,
            "amd" if gpu_type == "MI300" else "nvidia",
            uuid=f"{'MIG' if chance.random() < 0.15 else 'GPU'}-{number}-{gpu_id}",
        )
        for gpu_id, gpu_type in enumerate(types)
    )
    half = count // 2
    return Node(
        f"s{number}",
        number,
        {"cpus": chance.choice([4, 8, 16])},
        gpus,
        labels={"zone": chance.choice("ab")} if chance.random() < 0.8 else {},
        islands=(tuple(range(half)), tuple(range(half, count))) if half > 1 and chance.random() < 0.6 else (),
    )


def _teams(chance: random.Random, nodes: Sequence[Node]) -> Teams:
    """Return teams, some of them below a parent, whose guarantees the cluster can keep."""
    free = Counter(gpu.gpu_type for node in nodes for gpu in node.gpus)
    parent = chance.random() < 0.35
    is_typed = not parent and chance.random() < 0.35
    total = chance.randint(0, free.total()) if parent else free.total()
    teams = [Team("parent", total)] if parent else []
    for name in TEAMS[: chance.randint(1, 4)]:
        by_type = {each: chance.randint(0, free[each]) for each in free} if is_typed else {}
        free.subtract(by_type)
        guaranteed = sum(by_type.values()) if is_typed else chance.randint(0, total)
        total -= guaranteed
        teams.append(
            Team(
                name,
                guaranteed,
                by_type,
                limit=chance.choice([None, None, None, guaranteed + chance.randint(0, 4)]),
                weight=chance.choice([0.5, 1.0, 2.0]),
                parent="parent" if parent else "",
                max_gpus_per_owner=chance.choice([None, None, None, 3]),
                max_runtime_s=chance.choice([None, None, None, None, 500.0]),
            )
        )
    return Teams(
        tuple(teams),
        preemption=chance.random() < 0.75,
        min_runtime_s=chance.choice([0.0, 0.0, 100.0]),
        preemption_delay_s=chance.choice([0.0, 0.0, 30.0]),
    )


def _request(chance: random.Random, lease_id: str, nodes: Sequence[Node]) -> Request:
    def rarely(one_in: int, value: T, otherwise: T) -> T:
        return value if chance.random() * one_in < 1.0 else otherwise

    gpus = chance.choice([0, 1, 1, 1, 2, 2, 3, 4, 4, 8])
    members = chance.choice([1, 1, 1, 1, 1, 1, 2, 2, 3])
    is_gang = members > 1
    return Request(
        lease_id,
        gpus,
        rarely(3, chance.choice([100, 250, 333, 500, 700]), 1000) if gpus == 1 else 1000,
        {"cpus": chance.choice([1, 2, 4])} if chance.random() < 0.6 else {},
        gpu_types=rarely(3, tuple(chance.sample(TYPES, chance.randint(1, 2))), ()),
        vendor=rarely(10, chance.choice(["amd", "nvidia"]), ""),
        preferred_node=rarely(10, chance.choice(nodes).name, None),
        required_node=rarely(10, chance.choice(nodes).name, None),
        labels_required=rarely(10, {"zone": "a"}, {}),
        priority=chance.choice([0, 0, 1, 2, 5]),
        team=chance.choice([*TEAMS, "", "other"]),
        owner=chance.choice(["ada", "bob"]),
        ttl_s=chance.choice([50.0, 300.0, 1e5, 1e5]),
        expected_runtime_s=chance.choice([None, 10.0, 100.0, 1000.0]),
        quarantine=chance.random() < 0.1,
        preemptible=chance.random() < 0.8,
        preempt_grace_s=chance.choice([5.0, 60.0]),
        preemption_delay_s=rarely(5, chance.choice([0.0, 60.0]), None),
        max_runtime_s=rarely(5, chance.choice([100.0, 600.0]), None),
        requeue_after_s=rarely(10, chance.choice([100.0, 600.0]), None),
        deadline_at=rarely(5, chance.choice([1500.0, 3000.0]), None),
        types=chance.choice(list(TypeChoice)),
        link=rarely(6, chance.choice(list(Link)), Link.PREFER),
        nodes=members,
        spread=chance.choice(list(Spread)) if is_gang else Spread.SERVERS,
        same=rarely(3, "zone", "") if is_gang else "",
        prefer_same=rarely(3, "zone", "") if is_gang else "",
    )
