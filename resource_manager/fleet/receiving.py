"""Receipt of reports: each is judged on the state, what it changes is committed, and it is kept."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Mapping
from typing import NotRequired

from typing_extensions import TypedDict

from resource_manager.agent.report_format import Report
from resource_manager.agent.sending import CLEANING_INTERVAL_S
from resource_manager.core.changes import AgentLost, Change, GpuClosed, Preempting, Released
from resource_manager.core.cluster import ClusterState
from resource_manager.core.cluster_settings import ClusterSettings
from resource_manager.core.gpu_state import shared_gpus
from resource_manager.core.lease_limits import LIMITS, in_words
from resource_manager.core.maintenance import to_the_minute
from resource_manager.core.search import is_unsearched
from resource_manager.fleet.job_board import JobBoard
from resource_manager.fleet.job_places import STATE_MAX_AGE_S
from resource_manager.fleet.judgement import DEFAULT_INTERVAL_S, Judgement, check_order, judge
from resource_manager.fleet.records import Record, keep, records_of
from resource_manager.fleet.sightings import is_list_wanted, partners
from resource_manager.fleet.silence import MISSED_INTERVALS, LastReport, SilenceWatch
from resource_manager.manager.commit.asking import asked_by
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.manager.state_marks import StateMarks
from resource_manager.scheduling import lease_steps
from resource_manager.storage.clock import JUMP_S

logger = logging.getLogger(__name__)

WAITED_FOR_INTERVAL_S = 1.0
"""Time between two reports of a server whose GPUs a pending request may get."""

LIST_INTERVAL_S = 5.0
"""Least time between two lists of jobs in reports that come faster than usual: each reads all of /proc."""

RECORD_MAX_AGE_S = 1.0
"""Age of a server's record beyond which it is read again: while this process slept, another service may have
received newer reports.
"""

TURNS = 64
"""Most reports that are judged at once; those of one server are in turn, as after a sleep many may wait."""

MAX_FAST_REPORTS_PER_S = 50
"""Reports a second that a receiver asks for beyond the agents' own interval."""


class GpuToClean(TypedDict):
    """GPU on which no process of an ended lease should be left."""

    gpu_id: int
    uuid: str
    task_id: str


class MpsWanted(TypedDict):
    """MPS daemons that an agent is to keep: the folder of them all, and the UUIDs of their GPUs."""

    folder: str
    uuids: list[str]


class ReportAnswer(TypedDict):
    """Answer to a report; `next_s` asks for the next one sooner than by the agent's interval.

    `mps` names the daemons to keep, on a server whose inventory says so. `jobs` asks it to list the jobs that
    run on the server. `generation` is what the agent is to remember of the state.
    """

    server: str
    watched: bool
    cleaning: list[GpuToClean]
    next_s: NotRequired[float | None]
    jobs: NotRequired[bool | None]
    generation: NotRequired[str]
    mps: NotRequired[MpsWanted]


class ReportReceiver:
    """Receiver of the reports of all servers of a manager's store; thread-safe."""

    def __init__(self, manager: GPUResourceManager) -> None:
        self._manager = manager
        self._store = manager.store
        self._lock = threading.Lock()
        self._turns = [threading.Lock() for _ in range(TURNS)]
        self._second = 0
        self._fast = 0
        self._received: dict[str, LastReport] = {}
        """The last report of each server that this process has received."""
        self.marks = StateMarks(manager)
        self.board = JobBoard(manager, self._is_behind)
        self.silence = SilenceWatch(ClusterSettings().silent_after_s)

    def receive(self, report: Report) -> ReportAnswer:
        """Commit what the report shows, keep it, and return what its agent should know.

        Raises `ReportError` for a report that is out of order, and `UnknownNodeError`.
        """
        with self._turns[hash(report.server) % TURNS]:
            return self._receive(report)

    def _receive(self, report: Report) -> ReportAnswer:
        before, read_at = self._record_before(report)
        self.marks.hear(report.generation, f"the agent of {report.server}")
        elsewhere = self._records_elsewhere(report.server, before)
        judged: list[Judgement] = []
        """The judgements of the report; the last one is of the state on which it was committed."""

        def step(cluster: ClusterState, now: float) -> list[Change]:
            nonlocal before, read_at
            if abs(now - read_at) > RECORD_MAX_AGE_S:
                before, read_at = self._record_before(report)
            judged.append(judge(cluster, report, before, elsewhere, now))
            return judged[-1].changes

        with asked_by(f"agent:{report.server}") as asking:
            answer = self._manager.decide(
                step,
                lambda cluster, now: self._answer(cluster, report, judged[-1].record),
                max_age_s=STATE_MAX_AGE_S,
            )
        record = judged[-1].record
        if abs(self._store.now() - read_at) > RECORD_MAX_AGE_S:
            self._record_before(report)
        keep(self._store, report, record)
        self._received[report.server] = LastReport(record.received_at, record.interval_s)
        self.board.settle(report, record)
        for lease_id, limit_s in judged[-1].became_idle.items():
            logger.warning("lease %s computes nothing on %s for %.0f s", lease_id, report.server, limit_s)
        _log(asking.changes, asking.names())
        return {**answer, "generation": told} if (told := self.marks.mark) else answer

    def _record_before(self, report: Report) -> tuple[Record | None, float]:
        """Return the record before that report, and when it was read; raises `ReportError` for an old one."""
        read_at = self._store.now()
        before = records_of(self._store, [report.server]).get(report.server)
        check_order(report, before, read_at)
        return before, read_at

    def _records_elsewhere(self, server: str, before: Record | None) -> dict[str, Record]:
        """Return those of the servers of other members, while gangs on this one are not seen or idle."""
        idle = [] if before is None else [token for token, use in before.leases.items() if use.idle_since]
        if before is None or not (before.jobs.absent or idle):
            return {}

        def names(cluster: ClusterState, now: float) -> set[str]:
            leases = [lease for lease in cluster.node(server).leases.values() if lease.fencing_token in idle]
            others = {member.node for lease in leases for member in lease.members} - {server}
            return others | set(partners(cluster.node(server), before.jobs))

        found = self._manager.read(names, STATE_MAX_AGE_S)
        return records_of(self._store, found) if found else {}

    def _answer(self, cluster: ClusterState, report: Report, record: Record) -> ReportAnswer:
        state = cluster.node(report.server)
        answer: ReportAnswer = {
            "server": state.name,
            "watched": state.watched,
            "cleaning": [
                {"gpu_id": entry.gpu_id, "uuid": entry.uuid, "task_id": entry.lease_id}
                for entry in state.cleaning.values()
            ],
        }
        if state.node.mps:
            answer["mps"] = {"folder": state.node.mps, "uuids": shared_gpus(state)}
        if answer["cleaning"]:
            answer["next_s"] = CLEANING_INTERVAL_S
        elif cluster.pending and state.watched and state.leases and self._may_hurry():
            answer["next_s"] = WAITED_FOR_INTERVAL_S
        is_time = "next_s" not in answer or abs(record.received_at - record.listed_at) >= LIST_INTERVAL_S
        if is_time and (
            is_unsearched(state.drained)
            or (state.watched and is_list_wanted(state, report.machine, record.jobs))
        ):
            answer["jobs"] = True
        return answer

    def _is_behind(self) -> bool:
        """Return whether the state is an older dump; in a window the last check may be of before it."""
        if self._store.suspension.until > self._store.now():
            self.marks.check()
        return self.marks.is_behind

    def _may_hurry(self) -> bool:
        """Count a report that is asked for early; return False above `MAX_FAST_REPORTS_PER_S`."""
        second = int(time.monotonic())
        with self._lock:
            if second != self._second:
                self._second, self._fast = second, 0
            self._fast += 1
            return self._fast <= MAX_FAST_REPORTS_PER_S

    def note_silence(self) -> list[Change]:
        """Commit the loss of every agent that has been silent for too long; return the changes.

        To be called regularly. A process that receives no reports cannot tell a silent agent from one that
        does not reach it: before its first report it finds none.
        """
        if not self._received:
            return []
        names = self._manager.read(
            lambda cluster, now: {s.name for s in cluster.nodes if s.watched and s.silent is None}
        )
        now = self._store.now()
        agents = {
            name: last
            for name in names
            if (last := self._received.get(name)) and abs(now - last.at) <= MISSED_INTERVALS * last.interval_s
        }
        records = records_of(self._store, names - agents.keys())  # another service may have their reports
        for name in names - agents.keys():
            record = records.get(name)
            if record is None:
                agents[name] = LastReport(-math.inf, DEFAULT_INTERVAL_S)
            else:  # one of times to come is of before the clock was set back
                at = record.received_at if record.received_at <= now + JUMP_S else -math.inf
                agents[name] = LastReport(at, record.interval_s)
        self.silence.silent_after_s = self._manager.read(
            lambda cluster, now: cluster.settings.silent_after_s, STATE_MAX_AGE_S
        )
        lost = self.silence.lost(agents, now)

        def step(cluster: ClusterState, now: float) -> list[Change]:
            known = [state for name in lost if (state := cluster.by_name.get(name)) is not None]
            silent = [state for state in known if state.watched and state.silent is None]
            leases = {lease.lease_id: lease for state in silent for lease in state.leases.values()}
            return [
                *(
                    AgentLost(
                        state.name, now, agents[state.name].at if agents[state.name].at > -math.inf else now
                    )
                    for state in silent
                ),
                *(
                    change
                    for lease in leases.values()
                    for change in lease_steps.unbegun(cluster, lease, now, {state.name for state in silent})
                ),
            ]

        if not lost:
            return []
        with asked_by(""):  # silence is nobody's doing
            changes = self._manager.commit(step)
        _log(changes, {})
        return changes


def _log(changes: Iterable[Change], names: Mapping[str, str]) -> None:
    for change in changes:
        match change:
            case Preempting() if change.preemptor in LIMITS:
                name = names.get(change.lease_id, change.lease_id)
                logger.warning("lease %s is %s", name, in_words(change.preemptor, ""))
            case Released():
                name = names.get(change.lease_id, change.lease_id)
                logger.warning("lease %s is released: %s", name, change.reason)
            case GpuClosed():
                logger.warning("GPU %d of %s is closed: %s", change.gpu_id, change.node, change.reason)
            case AgentLost():
                logger.warning(
                    "%s has been silent since %s: it takes no new leases until its agent reports",
                    change.node,
                    to_the_minute(change.since),
                )
