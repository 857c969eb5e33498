"""Proves from the records of all workers and the store's history that no promise was broken.

The history is the order of commits. Every operation must find its place in that order between the moment
it was asked for and the moment it was answered (linearizability), every change must be legal on the state
before it, and what owners believed to hold, by what they were told, must never overlap.
"""

from __future__ import annotations

import bisect
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from resource_manager.core.changes import (
    Cancelled,
    Change,
    ClusterSettingsChanged,
    Expired,
    Granted,
    MembersReleased,
    Queued,
    Released,
    Renewed,
)
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Lease, Node
from resource_manager.errors import ResourceManagerError
from resource_manager.scheduling import allocator
from resource_manager.storage.clock import CLOCK_TOLERANCE_S
from tests.faults.members import Members, Told, room_for, told_leases, told_members
from tests.faults.preemptions import Preemptions
from tests.faults.worker import LOCK_TIMEOUT_S

REQUESTS = {"allocate", "submit"}

RELEASES = {"release", "release_members"}

ALL_RANKS = range(3)
"""The most members that a worker asks for."""

SWEPT = "SWEPT"
"""The outcome of what the run released, when the workers had ended."""

Shape = tuple[int, int, int, str]
"""A demand: GPUs, CPUs, nodes, spread."""


def _shape(asked: dict[str, Any]) -> Shape:
    return asked["gpus"], asked["cpus"], asked.get("nodes", 1), asked.get("spread", "servers")


@dataclass(slots=True)
class Operation:
    """One call: when it began and ended (never, if its process died), and what was asked and answered."""

    name: str
    kind: str
    task_id: str
    begin: float
    asked: dict[str, Any]
    end: float = math.inf
    answer: dict[str, Any] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        """The process that asked."""
        return int(self.name.split(".")[1])

    @property
    def token(self) -> int:
        """The fencing number it is about; 0 if there is none."""
        return int(self.answer.get("fencing_token", self.asked.get("fencing_token", 0)))

    @property
    def owner(self) -> tuple[str, int]:
        """The lease that it is about."""
        return self.task_id, self.token

    @property
    def result(self) -> str:
        return str(self.answer.get("result", ""))


def read_records(folder: Path) -> list[Operation]:
    operations: dict[str, Operation] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            value = json.loads(line)
            name = value.pop("operation")
            if "begin" in value:
                operations[name] = Operation(
                    name, value.pop("kind"), value.pop("task_id"), value.pop("begin"), value
                )
            else:
                operations[name].end = value.pop("end")
                operations[name].answer = value
    return list(operations.values())


def check(
    nodes: Sequence[Node],
    operations: Sequence[Operation],
    history: Sequence[tuple[int, Change]],
    *,
    wall_minus_monotonic_s: float,
    rests: Sequence[tuple[float, float]] = (),
    jumps: Sequence[tuple[float, float]] = (),
    may_lose: bool = False,
) -> list[str]:
    """Every broken promise, in words; empty if there is none.

    `rests` are the times (steady clock) in which nothing needed to be granted, `jumps` those at which the
    store's clock jumped, with the seconds; `may_lose` says that Redis itself was made to lose acknowledged
    writes, so that answers need not be in the history any more.
    """
    for operation in operations if jumps else ():
        if "expires_at" in operation.answer:
            operation.answer["expires_at"] -= _jumped_by(jumps, operation)
    shapes = {_shape(operation.asked) for operation in operations if operation.kind in REQUESTS}
    replay = _Replay(nodes, history, shapes)
    complaints = replay.complaints
    complaints += check_beliefs(operations, wall_minus_monotonic_s, may_lose=may_lose)
    if not may_lose:
        complaints += check_order(operations, replay, rests)
        complaints += _check_members(operations, replay)
        complaints += _check_applied(operations, history)
    return complaints


def _jumped_by(jumps: Sequence[tuple[float, float]], operation: Operation) -> float:
    """Return by how much the store's clock had jumped in all at the answer, at most if that is not sure."""
    before = sum(seconds for at, seconds in jumps if at <= operation.begin)
    meanwhile = [seconds for at, seconds in jumps if operation.begin < at <= operation.end]
    return max(accumulate(meanwhile, initial=before))


def check_older(operations: Iterable[Operation]) -> list[str]:
    """That processes which met a change that they do not know decide nothing, but renew and release."""
    complaints = []
    for operation in operations:
        by_token = operation.kind in {"renew", "release"}
        if operation.result and operation.result not in {"renewed", "released", "gone", "none"}:
            complaints.append(f"{operation.name} of an older build answered {operation.answer}")
        elif by_token and "NewerFormatError" in operation.answer.get("error", ""):
            complaints.append(f"{operation.name} of an older build did not {operation.kind} a lease")
    return complaints


# ---- what owners believe ----


def check_beliefs(
    operations: Iterable[Operation], wall_minus_monotonic_s: float, *, may_lose: bool = False
) -> list[str]:
    """That no GPU is held twice by what owners were told.

    A lease is believed in from the answer that granted it until its release is asked for, a renewal is
    refused, or its last known end comes, less the tolerance of clocks. That is the end told last: a renewal
    after a jump back of the store's clock brings it forward. Once members were released, the others have no
    such end, unless that release may be lost. A fencing number with other members is found too.
    """
    begins: dict[tuple[str, int], float] = {}
    places: dict[tuple[str, int], dict[int, Told]] = {}
    operations = list(operations)
    renewed_at: dict[tuple[str, int], float] = defaultdict(lambda: -math.inf)
    for operation in operations:
        if operation.result == "renewed":
            renewed_at[operation.owner] = max(renewed_at[operation.owner], operation.begin)
    known_end: dict[tuple[str, int], float] = defaultdict(lambda: -math.inf)
    ended: dict[tuple[str, int], dict[int, float]] = defaultdict(lambda: defaultdict(lambda: math.inf))
    complaints = []
    for operation in operations:
        answer = operation.answer
        lease = (operation.task_id, operation.token)
        if operation.result == "granted":
            begins[lease] = min(begins.get(lease, math.inf), operation.end)
            members = told_members(answer)
            if places.setdefault(lease, members) != members:
                complaints.append(f"{lease} had the members {places[lease]}, then {members}")
        if operation.result in {"granted", "renewed"} and operation.end >= renewed_at[lease]:
            known_end[lease] = max(known_end[lease], answer["expires_at"])
        if operation.kind == "release_members" and operation.result == "released" and not may_lose:
            known_end[lease] = math.inf
        for rank in operation.asked.get("ranks", ALL_RANKS) if operation.kind in RELEASES else ():
            ended[lease][rank] = min(ended[lease][rank], operation.begin)
        if operation.kind in {"renew", "release"} and operation.result == "gone":
            for rank in ALL_RANKS:
                ended[lease][rank] = min(ended[lease][rank], operation.end)
    by_gpu: dict[tuple[str, int], list[tuple[float, float, tuple[str, int]]]] = defaultdict(list)
    for lease, begin in begins.items():
        for rank, (server, gpu_ids, _) in places[lease].items():
            until = min(known_end[lease] - CLOCK_TOLERANCE_S - wall_minus_monotonic_s, ended[lease][rank])
            if begin < until:  # else the answer was read when the lease was over: nothing was believed
                for gpu_id in gpu_ids:
                    by_gpu[server, gpu_id].append((begin, until, lease))
    for gpu, beliefs in by_gpu.items():
        beliefs.sort()
        _, latest, holder = beliefs[0]
        for begin, until, lease in beliefs[1:]:
            if begin < latest:
                complaints.append(f"{gpu} was held by {holder} and {lease} for {latest - begin:.3f} s")
            if until > latest:
                latest, holder = until, lease
    return complaints


# ---- the history ----


class _Replay:
    """The history applied step by step: what was legal, and which leases lived at which versions."""

    def __init__(
        self,
        nodes: Sequence[Node],
        history: Sequence[tuple[int, Change]],
        shapes: Iterable[Shape],
    ) -> None:
        self.complaints: list[str] = []
        self.shapes = tuple(shapes)
        self.members = Members()
        self.preemptions = Preemptions()
        self.sweeps: set[int] = set()
        """Positions of what the run released itself."""
        self.cluster = ClusterState(nodes)
        self.positions: dict[tuple[str, str, int], list[int]] = defaultdict(list)
        self.lives: dict[tuple[str, int], list[int]] = {}
        self.held: dict[str, list[list[int]]] = defaultdict(list)
        self.waits: dict[str, list[list[int]]] = defaultdict(list)
        self.asked_anew: list[tuple[int, str]] = []
        self.length = len(history)
        self.states_fitting: list[dict[Shape, bool]] = [self._fitting()]
        for position, (version, change) in enumerate(history, 1):
            self._note(position, change)
            for broken in self.preemptions.follow(self.cluster, change):
                self.complaints.append(f"version {version}: {broken}")
            for broken in self.members.follow(position, change):
                self.complaints.append(f"version {version}: {broken}")
            try:
                self.cluster.apply(change)
                allocator.check(self.cluster)
            except ResourceManagerError as error:
                self.complaints.append(f"version {version}: {type(change).__name__} is not legal: {error}")
            if not self.members.agrees(self.cluster):
                self.complaints.append(f"version {version}: the servers have not the members of the leases")
            self.states_fitting.append(self._fitting())

    def _fitting(self) -> dict[Shape, bool]:
        if self.cluster.pending:
            return {}  # nobody overtakes those who wait
        return {shape: room_for(self.cluster, *shape) for shape in self.shapes}

    def _note(self, position: int, change: Change) -> None:
        if isinstance(change, Granted):
            lease = change.lease
            if any(task == lease.lease_id and token >= lease.fencing_token for task, token in self.lives):
                self.complaints.append(f"the fencing number of {lease.lease_id} did not grow")
            life = [position, self.length + 1]
            self.lives[lease.lease_id, lease.fencing_token] = life
            self.held[lease.lease_id].append(life)
            self.positions["granted", lease.lease_id, lease.fencing_token].append(position)
            if lease.lease_id in self.cluster.pending:
                self.waits[lease.lease_id][-1][1] = position
            else:
                self.asked_anew.append((position, lease.lease_id))
        elif isinstance(change, Queued):
            self.waits[change.request.lease_id].append([position, self.length + 1])
            if change.request.lease_id != self.preemptions.victim:
                self.asked_anew.append((position, change.request.lease_id))
        elif isinstance(change, Cancelled):
            self.positions["cancelled", change.lease_id, 0].append(position)
            if change.lease_id in self.cluster.pending:
                self.waits[change.lease_id][-1][1] = position
        elif isinstance(change, MembersReleased):
            life = self.lives.get((change.lease_id, change.fencing_token), [])
            life[1:] = [min(position, *life[1:], self.length + 1)]  # its remainder is no lease
            if change.outcome == SWEPT:
                self.sweeps.add(position)
        elif isinstance(change, Released | Expired | Renewed):
            key = (change.lease_id, change.fencing_token)
            if isinstance(change, Released) and change.outcome == SWEPT:
                self.sweeps.add(position)
            kind = type(change).__name__.lower()
            self.positions[kind, *key].append(position)
            if not isinstance(change, Renewed) and key in self.lives:
                self.lives[key][1] = position
            held: Lease | None = self.cluster.leases.get(change.lease_id)
            if isinstance(change, Expired) and held is not None and held.expires_at > change.at:
                self.complaints.append(f"{key} expired {held.expires_at - change.at:.3f} s before its end")


def check_order(
    operations: Sequence[Operation], replay: _Replay, rests: Sequence[tuple[float, float]]
) -> list[str]:
    """That every operation has a place in the history between its beginning and its end."""
    complaints: list[str] = []
    begin_of = [-math.inf] * (replay.length + 2)
    end_of = [math.inf] * (replay.length + 2)
    begin_of[0] = end_of[0] = -math.inf
    asked: dict[str, float] = {}
    for operation in operations:
        if operation.kind in REQUESTS:
            asked[operation.task_id] = min(asked.get(operation.task_id, math.inf), operation.begin)
    for (kind, task_id, _), positions in replay.positions.items():
        for position in positions:
            if kind == "granted":
                if task_id not in asked:
                    complaints.append(f"{task_id} was granted a lease that nobody asked for")
                begin_of[position] = asked.get(task_id, -math.inf)
    for operation in operations:
        complaints += _bound(operation, replay, begin_of, end_of)
    complaints += _bound_cancellations(operations, replay, end_of)
    # A commit comes after all that were asked for later in the history began, and before any later one ended.
    for position in range(1, replay.length + 1):
        begin_of[position] = max(begin_of[position], begin_of[position - 1])
    for position in range(replay.length, 0, -1):
        end_of[position] = min(end_of[position], end_of[position + 1])
    for position in range(1, replay.length + 1):
        if begin_of[position] > end_of[position]:
            complaints.append(f"change {position} of the history was answered before it can have been made")
    spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for operation in operations:
        first = max(bisect.bisect_left(end_of, operation.begin, 1, replay.length + 1) - 1, 0)
        last = bisect.bisect_right(begin_of, operation.end, 0, replay.length + 1) - 1
        if operation.kind in REQUESTS:
            # Behind an answer that never came, or was an error, the request may still have been on its way.
            spans[operation.task_id].append((first, last if operation.result else replay.length))
        if not _explained(operation, replay, first, last, rests):
            complaints.append(
                f"{operation.kind} of {operation.task_id} answered {operation.answer}, "
                f"which no state between changes {first} and {last} explains"
            )
    for position, task_id in replay.asked_anew:
        if not any(first < position <= last for first, last in spans[task_id]):
            complaints.append(f"change {position} gave {task_id} what nobody was asking for at that time")
    return complaints


def _check_applied(operations: Sequence[Operation], history: Sequence[tuple[int, Change]]) -> list[str]:
    """That each cluster whose `apply` was answered was stored once, and none that nobody applied."""
    stored = Counter(
        int(change.settings.idle_after_s)
        for _, change in history
        if isinstance(change, ClusterSettingsChanged)
    )
    asked = [operation for operation in operations if operation.kind == "apply"]
    answered = {operation.asked["number"] for operation in asked if operation.result}
    complaints = [
        f"cluster {number} was answered as applied, and is not stored" for number in answered - stored.keys()
    ]
    # One that was asked for twice at the same time may have been applied, replaced, and applied again.
    known = {operation.asked["number"] for operation in asked}
    return complaints + [
        f"cluster {number} is stored, and nobody applied it" for number in stored.keys() - known
    ]


def _bound_cancellations(operations: Sequence[Operation], replay: _Replay, end_of: list[float]) -> list[str]:
    """Each answer that a task was cancelled has a cancellation of its own, made before it."""
    answered: dict[str, list[float]] = defaultdict(list)
    for operation in operations:
        if operation.result == "cancelled":
            answered[operation.task_id].append(operation.end)
    complaints = []
    for task_id, ends in answered.items():
        positions = replay.positions.get(("cancelled", task_id, 0), [])
        if len(ends) > len(positions):
            complaints.append(f"{len(ends)} times {task_id} was answered as cancelled, not {len(positions)}")
        for position, end in zip(positions, sorted(ends), strict=False):
            end_of[position] = min(end_of[position], end)
    return complaints


def _bound(operation: Operation, replay: _Replay, begin_of: list[float], end_of: list[float]) -> list[str]:
    """Narrows when the change behind an answer can have been committed."""
    if operation.result == "waiting" and (waits := replay.waits.get(operation.task_id)):
        end_of[waits[0][0]] = min(end_of[waits[0][0]], operation.end)
    if operation.result not in {"granted", "renewed", "released"}:
        return []
    if operation.result == "released":
        positions = _release_behind(operation, replay)
    else:
        positions = replay.positions.get((operation.result, operation.task_id, operation.token), [])
    if not positions:
        lease = f"{operation.task_id} ({operation.token})"
        return [f"{operation.kind} of {lease} was answered, but is not in the history"]
    if operation.result == "granted":
        end_of[positions[0]] = min(end_of[positions[0]], operation.end)
    elif operation.result == "released":
        end_of[positions[0]] = min(end_of[positions[0]], operation.end)
        begin_of[positions[0]] = max(begin_of[positions[0]], operation.begin)
    return []


def _release_behind(operation: Operation, replay: _Replay) -> list[int]:
    """Return the position of what the operation released: those members, or all that were left."""
    ranks = operation.asked.get("ranks")
    return [
        position
        for position, ended in replay.members.ends.get(operation.owner, ())
        if (ended == set(ranks) if ranks else not replay.members.held_at(operation.owner, position))
    ]


def _check_members(operations: Sequence[Operation], replay: _Replay) -> list[str]:
    """That answers name the members that were granted, and each release was answered to one who asked."""
    complaints: list[str] = []
    answered: Counter[tuple[tuple[str, int], int]] = Counter()
    asked: dict[tuple[str, int], list[frozenset[int]]] = defaultdict(list)
    for operation in operations:
        if operation.kind in RELEASES:
            asked[operation.owner].append(frozenset(operation.asked.get("ranks", ())))
        if operation.result == "granted":
            told, granted = told_members(operation.answer), replay.members.granted.get(operation.owner)
            if told != granted:
                complaints.append(f"{operation.owner} was answered to have {told}, not {granted}")
            restarts = replay.preemptions.restarts.get(operation.owner, 0)
            if operation.answer.get("restarts", restarts) != restarts:
                complaints.append(f"{operation.owner} was preempted {restarts} times before, not as answered")
        elif operation.result == "released":
            for position in _release_behind(operation, replay):
                answered[operation.owner, position] += 1
    for (owner, position), times in answered.items():
        if times > 1:
            complaints.append(
                f"change {position} ended members of {owner}: {times} were told that it was they"
            )
    for owner, ends in replay.members.ends.items():
        for position, ranks in ends:
            if position not in replay.sweeps and not {ranks, frozenset[int]()} & set(asked[owner]):
                complaints.append(
                    f"change {position} ended {sorted(ranks)} of {owner}, which nobody asked for"
                )
    return complaints


def _explained(
    operation: Operation,
    replay: _Replay,
    first: int,
    last: int,
    rests: Sequence[tuple[float, float]],
) -> bool:
    """Return True if a state from `first` to `last` gives the answer."""
    life = replay.lives.get((operation.task_id, operation.token))
    if (
        operation.result in {"none", "gone", "not waiting"}
        and operation.end - operation.begin > LOCK_TIMEOUT_S
    ):
        return True  # it also answers so when the lock was not free in time
    if operation.result in {"granted", "renewed"}:
        return life is not None and life[0] <= last and first < life[1]
    if operation.kind in RELEASES and operation.result == "gone":
        ranks, held = set(operation.asked.get("ranks", ())), replay.members.held_at
        states = (held(operation.owner, position) for position in range(first, last + 1))
        return any(not ranks <= state if ranks else not state for state in states)
    if operation.result == "listed":
        told = told_leases(operation.answer)
        return any(told == replay.members.states[position] for position in range(first, last + 1))
    if operation.result == "gone":
        return life is None or first < life[0] or last >= life[1]
    waits = replay.waits.get(operation.task_id, ())
    if operation.result == "waiting":
        return any(begin <= last and first < end for begin, end in waits)
    if operation.result == "cancelled":
        cancelled = replay.positions.get(("cancelled", operation.task_id, 0), ())
        return any(first < position <= last for position in cancelled)
    if operation.result == "not waiting":
        return not any(begin <= first and last < end for begin, end in waits)
    if operation.result == "absent":
        return _somewhere_absent([*waits, *replay.held.get(operation.task_id, ())], first, last)
    if operation.result == "none":
        if any(operation.begin < until and operation.end > since for since, until in rests):
            return True
        shape = _shape(operation.asked)
        return any(not replay.states_fitting[position].get(shape) for position in range(first, last + 1))
    return True


def _somewhere_absent(spans: Iterable[list[int] | tuple[int, ...]], first: int, last: int) -> bool:
    """Return True if a state from `first` to `last` lies in none of the spans."""
    at = first
    for begin, end in sorted(map(tuple, spans)):
        if begin <= at < end:
            at = end
    return at <= last
