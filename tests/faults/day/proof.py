"""Proof that the day lost nothing that was promised, from the ledger of the jobs and the history."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from demo.timeline import overlaps
from resource_manager.core.changes import (
    Change,
    Drained,
    Expired,
    GpuClosed,
    GpuOpened,
    Granted,
    MembersReleased,
    Outcome,
    Preempting,
    Released,
)
from resource_manager.manager.results import QueueEntry
from resource_manager.manager.serializers import is_of_one_course
from tests.faults.day import plan
from tests.faults.day.plan import DayJob

TOLERANCE_S = 1.0
"""Difference between the clocks of jobs and store, which are one machine's here."""

ON_SLURM = "slurm/"
"""What the names of jobs in the ledger begin with that Slurm placed, without a lease."""

MAX_UNSEEN = 20
"""Most leases that are granted between the last look at the history and the restore."""

ENDING_S = 5.0
"""Time beyond its grace after which a preempted job must have been killed."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Records of a day at its end; times are seconds since 1970."""

    jobs: list[DayJob]
    began: float
    ended: float
    faults: list[tuple[float, str]]
    tasks: dict[str, dict[str, Any]]
    beats: list[dict[str, Any]]
    changes: list[Change]
    left: list[str]
    """Leases, except those on the server that vanished, and pending requests that are left."""
    dead_gpus: list[tuple[str, int]]
    vanished: str
    window: tuple[list[str], float, float]
    cuts: list[tuple[str, float, float]] = field(default_factory=list)
    """Servers that were cut off, and the time in which a job there may have been lost by that."""
    lost: tuple[float, float] = (0.0, 0.0)
    """Time of the backup, and that at which the state went back to it."""
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """Times in which nothing is granted: while owners confirm their leases, and during the upgrade."""
    looks: list[Look] = field(default_factory=list)
    load: float = 0.0

    def struck(self, held: Iterable[Span]) -> set[str]:
        """Return the jobs that lost a GPU, their server, a worker or lease, which may cost them a try.

        The upgrade kills workers: those that compute, and those that ask for GPUs or collect an end.
        """
        closed = {(c.node, c.gpu_id): c.at for c in self.changes if isinstance(c, GpuClosed) and c.stop}
        lost_at = next((at for at, what in self.faults if "vanishes" in what), math.inf)
        backup_at, restored_at = self.lost
        upgrades = [at for at, what in self.faults if "upgraded" in what]
        of_airflow = [job.name for job in self.jobs if not job.by_hand and job.name in self.tasks]
        unseen = self.unseen
        at_work = {
            name
            for name in of_airflow
            if any(self.tasks[name]["began"] <= at <= self.tasks[name]["ended"] for at in upgrades)
        }
        return (
            {
                span.name
                for span in held
                if any(span.begin <= closed.get((span.node, gpu), -1.0) <= span.end for gpu in span.gpu_ids)
                or (span.node == self.vanished and span.end >= lost_at)
                or any(
                    span.node == node and span.begin <= end and span.end >= at for node, at, end in self.cuts
                )
                or (span.queued_at <= restored_at and span.end >= backup_at)
            }
            | at_work
            | {  # requests that waited, which the state of before does not know
                name
                for name, task in self.tasks.items()
                if any(backup_at <= at <= restored_at for at in task.get("submitted_at", ()))
            }
            | {_job_of(beat) for beat in self.beats if _token_of(beat) in unseen}
        )

    @property
    def unseen(self) -> range:
        """Fencing tokens of leases that the restore lost, granted after the last look at the history."""
        granted = [(c.at, c.lease.fencing_token) for c in self.changes if isinstance(c, Granted)]
        restored_at = self.lost[1]
        after = [token for at, token in granted if at > restored_at]
        before = [token for at, token in granted if at <= restored_at]
        last = max(before, default=0)
        return range(last + 1, min(*after, last + 1 + MAX_UNSEEN)) if before and after else range(0)


@dataclass(frozen=True, slots=True)
class Look:
    """What somebody outside saw of a pending request: why it waits, and when it should start, if known."""

    at: float
    name: str
    sequence: int
    kind: str
    reason: str
    earliest: float | None = None
    latest: float | None = None

    @classmethod
    def of(cls, at: float, entry: QueueEntry) -> Look:
        start = entry.get("estimated_start")
        is_known = start is not None and start["at"] is not None and not is_of_one_course(start)
        bounds = (start["earliest"], start["latest"]) if start and is_known else (None, None)
        return cls(at, entry["task_id"], entry["sequence"], entry["kind"], entry["reason"], *bounds)

    def named(self, names: Mapping[str, str]) -> Look:
        """Return the look with the name of the request's job in the place of its id."""
        return replace(self, name=names.get(self.name, self.name).rpartition("/")[2])


@dataclass(frozen=True, slots=True)
class Span:
    """Time for which a member of a lease held its GPUs; a gang has one for each member."""

    name: str
    token: int
    rank: int
    node: str
    gpu_ids: tuple[int, ...]
    queued_at: float
    begin: float
    end: float = math.inf
    sequence: int = 0


def spans(changes: Iterable[Change], lost: tuple[float, float] = (0.0, 0.0)) -> list[Span]:
    """Return the time of each member of each lease, in the order of the grants.

    A lease that was granted after the backup, whose time is the first of `lost`, ended with the restore.
    """
    held: dict[tuple[int, int], Span] = {}
    for change in changes:
        if isinstance(change, Granted):
            lease = change.lease
            for rank, member in enumerate(lease.members):
                name = lease.lease_id.rpartition("/")[2]
                queued_at = min(lease.queued_at or lease.granted_at, lease.granted_at)
                key = lease.fencing_token, rank
                held[key] = Span(
                    name,
                    *key,
                    member.node,
                    member.gpu_ids,
                    queued_at,
                    lease.granted_at,
                    sequence=lease.sequence,
                )
        elif isinstance(change, Released | Expired | MembersReleased):
            for key, span in held.items():
                ended = key[0] == change.fencing_token and span.end == math.inf
                if ended and (not isinstance(change, MembersReleased) or key[1] in change.ranks):
                    held[key] = replace(span, end=change.at)
    backup_at, restored_at = lost
    return [
        replace(span, end=min(span.end, restored_at)) if backup_at < span.begin < restored_at else span
        for span in held.values()
    ]


def preempted(changes: Iterable[Change]) -> list[str]:
    """Return the name of the job for each preemption."""
    return [_name(c) for c in changes if isinstance(c, Preempting)]


def _name(change: Released | Expired | Preempting) -> str:
    return change.lease_id.rpartition("/")[2]


def _job_of(beat: Mapping[str, Any]) -> str:
    return str(beat["task"].rpartition("/")[2])


def _token_of(beat: Mapping[str, Any]) -> int:
    return int(beat["process"].split("-")[0])


def broken(found: Evidence) -> list[str]:
    """Return the promises that the day broke, each as a line."""
    held = spans(found.changes, found.lost)
    tokens = [change.lease.fencing_token for change in found.changes if isinstance(change, Granted)]
    return [
        *([] if tokens == sorted(set(tokens)) else ["fencing tokens do not rise"]),
        *overlaps([(span.name, span.node, span.gpu_ids, span.begin, span.end) for span in held]),
        *_shared(found.beats),
        *_processes(found, held),
        *_jobs(found, found.struck(held)),
        *_closed(found),
        *(f"{name} is left over" for name in found.left),
    ]


def not_shown(found: Evidence) -> Iterator[str]:
    """Yield what the day proves nothing about, since it did not come to it."""
    held = spans(found.changes, found.lost)
    if not found.struck(held):
        yield "no job lost a GPU or its server"
    if not preempted(found.changes):
        yield "nothing was preempted"
    if not any(span.begin > span.queued_at for span in held):
        yield "nobody waited"
    if not any(job.by_hand for job in found.jobs):
        yield "nobody ran a job from a terminal"


def remarks(found: Evidence) -> Iterator[str]:
    """Yield what was odd, though nothing that we promise was broken."""
    struck = found.struck(spans(found.changes, found.lost))
    for job in found.jobs:
        if job.name not in struck and _lost_by_airflow(found, job.name):
            tries = ", ".join(map(str, found.tasks[job.name]["unrecorded"]))
            yield f"Airflow has no record of try {tries} of {job.name}, whose job ran right in one go"


def _lost_by_airflow(found: Evidence, name: str) -> bool:
    """Return True if Airflow has no record of the task's earlier tries, and nothing else knows of a failure.

    By the history no lease of it ended but preempted, or at last with success; by the ledger each
    lease had one process on each of its servers.
    """
    task = found.tasks.get(name, {})
    if not task.get("unrecorded") or task["unrecorded"] != list(range(1, task["try_number"])):
        return False
    ends = [c for c in found.changes if isinstance(c, Released | Expired) and _name(c) == name]
    outcomes = [c.outcome if isinstance(c, Released) else "expired" for c in ends]
    given_back = {Outcome.PREEMPTED, Outcome.NOT_STARTED}
    processes: dict[tuple[str, str], set[str]] = defaultdict(set)
    for beat in found.beats:
        if beat["task"].rpartition("/")[2] == name:
            processes[beat["process"].split("-")[0], beat["member"]].add(beat["process"])
    ran_once = all(len(own) == 1 for own in processes.values())
    return ran_once and outcomes[-1:] == [Outcome.SUCCESS] and given_back.issuperset(outcomes[:-1])


def _shared(beats: Iterable[dict[str, Any]]) -> list[str]:
    """Return a line for each GPU, of Slurm's too, that had two processes at once by the ledger alone."""
    of_process: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for beat in beats:
        of_process[f"{beat['task']} {beat['process']}"].append(beat)
    ran = [
        (process, own[0]["server"], map(int, own[0]["gpus"].split(",")), own[0]["at"], own[-1]["at"])
        for process, own in of_process.items()
    ]
    return [line.replace("was allocated to", "had processes of") for line in overlaps(ran)]


def _processes(found: Evidence, held: Sequence[Span]) -> Iterator[str]:
    """Yield the processes that ran without their lease, or when their GPUs were another's already."""
    of_process: dict[str, list[dict[str, Any]]] = {}
    for beat in found.beats:
        if not beat["task"].startswith(ON_SLURM):
            of_process.setdefault(beat["process"], []).append(beat)
    leased = {(span.token, span.rank): span for span in held}
    for own in of_process.values():
        token, rank, node = _token_of(own[0]), int(own[0]["member"] or 0), own[0]["server"]
        span = leased.get((token, rank))
        name, gpus = _job_of(own[0]), tuple(map(int, own[0]["gpus"].split(",")))
        is_unseen = span is None and token in found.unseen
        if not is_unseen and (span is None or (span.name, span.node, span.gpu_ids) != (name, node, gpus)):
            yield f"{name} ran on {gpus} of {node} without a lease of them"
            continue
        began, last = own[0]["at"] if span is None else span.begin, own[-1]["at"]
        for other in held:
            is_next = other.node == node and other.begin > began and {*other.gpu_ids} & {*gpus}
            if is_next and last > other.begin + TOLERANCE_S:
                yield f"{name} still ran on {node} when {other.name} was granted its GPUs"


def _jobs(found: Evidence, struck: set[str]) -> Iterator[str]:
    of_member: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for beat in found.beats:
        of_member[beat["task"].rpartition("/")[2], beat["member"]].append(beat)
    for job in found.jobs:
        task = found.tasks.get(job.name)
        if task is None or task["state"] != "success":
            yield f"{job.name} did not succeed: {None if task is None else task['state']}"
            continue
        if task["try_number"] > 1 and job.name not in struck and not _lost_by_airflow(found, job.name):
            yield f"{job.name} needed {task['try_number']} tries, though nothing struck it"
        ranks = [str(rank) for rank in range(job.nodes)] if job.nodes > 1 else [""]
        for rank in ranks:
            own = of_member[job.name, rank]
            last = [beat for beat in own if beat["process"] == own[-1]["process"]]
            if not last or last[-1]["at"] - last[0]["at"] < job.seconds - 2 * TOLERANCE_S:
                yield f"{job.name} succeeded, but rank {rank or 0} did not run for its {job.seconds:g} s"
            steps = [beat["step"] for beat in own if "step" in beat]
            if job.preemptible and job.name not in struck and steps != list(range(len(steps))):
                yield f"{job.name} lost steps, or did some twice"


def _closed(found: Evidence) -> Iterator[str]:
    gone: set[tuple[str, int]] = set()
    noticed: set[tuple[str, int]] = set()
    for change in found.changes:
        if isinstance(change, GpuClosed):
            gone.add((change.node, change.gpu_id))
            noticed |= gone
        elif isinstance(change, GpuOpened):
            gone.discard((change.node, change.gpu_id))
        elif isinstance(change, Drained) and change.node == found.vanished:
            gone |= {(change.node, gpu) for gpu in range(plan.GPUS)}
        elif isinstance(change, Granted):
            for member in change.lease.members:
                if any((member.node, gpu) in gone for gpu in member.gpu_ids):
                    name = change.lease.lease_id.rpartition("/")[2]
                    yield f"{name} was granted a GPU of {member.node} that was gone"
    for gpu in found.dead_gpus:
        if gpu not in noticed:
            yield f"nobody noticed that GPU {gpu[1]} of {gpu[0]} was gone"
    servers, begin, end = found.window
    ran = {
        (beat["task"].rpartition("/")[2], beat["server"])
        for beat in found.beats
        if beat["server"] in servers and begin + plan.GRACE_S + ENDING_S < beat["at"] < end
    }
    yield from (f"{name} ran on {server} during its maintenance" for name, server in sorted(ran))
