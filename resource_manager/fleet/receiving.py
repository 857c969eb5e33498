"""Receipt of reports: what each changes is committed, and the report kept for those who look."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NotRequired

from pydantic_core import from_json, to_json
from typing_extensions import TypedDict

from resource_manager.agent.report_format import Report, ReportError
from resource_manager.agent.sending import CLEANING_INTERVAL_S
from resource_manager.core.changes import AgentLost, Change, GpuCleaned, GpuClosed, JobEnd, Outcome, Released
from resource_manager.core.cluster import ClusterState, NodeState
from resource_manager.core.cluster_settings import ClusterSettings
from resource_manager.core.maintenance import to_the_minute
from resource_manager.core.models import Lease
from resource_manager.core.search import is_unsearched
from resource_manager.errors import StoreFullError
from resource_manager.fleet.health import health_table
from resource_manager.fleet.lease_use import GpuSample, IdleRules, LeaseUse, sample_gpus, sample_leases
from resource_manager.fleet.search_answers import opened_by
from resource_manager.fleet.sightings import (
    Sightings,
    gone_in_words,
    is_list_wanted,
    leases_gone,
    partners,
    sightings_after,
)
from resource_manager.fleet.silence import SILENT_INTERVALS, LastReport, SilenceWatch
from resource_manager.fleet.transitions import Rules, transitions
from resource_manager.manager.asking import asked_by
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.manager.state_marks import StateMarks
from resource_manager.scheduling import allocator
from resource_manager.storage import Store

logger = logging.getLogger(__name__)

DEFAULT_INTERVAL_S = 10.0
MAX_CLOCK_OFFSET_S = 6 * 3600.0
"""Largest difference of a server's clock from the store's; a report with a larger one is old."""

STATE_MAX_AGE_S = 0.25
"""Age of the state on which a report is judged first; what it changes is decided on the newest."""

WAITED_FOR_INTERVAL_S = 1.0
"""Time between two reports of a server whose GPUs a pending request may get."""

LIST_INTERVAL_S = 5.0
"""Least time between two lists of jobs in reports that come faster than usual: each reads all of /proc."""

MAX_FAST_REPORTS_PER_S = 50
"""Reports a second that a receiver asks for beyond the agents' own interval."""


class GpuToClean(TypedDict):
    """GPU on which no process of an ended lease should be left."""

    gpu_id: int
    uuid: str
    task_id: str


class ReportAnswer(TypedDict):
    """Answer to a report; `next_s` asks for the next one sooner than by the agent's interval.

    `jobs` asks it to list the jobs that run on the server. `generation` is what the agent is to
    remember of the state.
    """

    server: str
    watched: bool
    cleaning: list[GpuToClean]
    next_s: NotRequired[float | None]
    jobs: NotRequired[bool | None]
    generation: NotRequired[str]


@dataclass(slots=True)
class Record:
    """State of a server's reports so far: `received_at` by the store's clock, of the last good one.

    `clean` counts reports in a row without a condition, by GPU id, -1 for the server; `gpus` are the last
    samples by GPU id, `leases` the use so far by fencing token, `jobs` what was seen of placed jobs, which
    were last listed at `listed_at`.
    """

    received_at: float
    interval_s: float
    at: float
    boot_id: str | None = None
    uptime_s: float | None = None
    hostname: str = ""
    clean: dict[int, int] = field(default_factory=dict)
    gpus: dict[int, GpuSample] = field(default_factory=dict)
    leases: dict[int, LeaseUse] = field(default_factory=dict)
    jobs: Sightings = field(default_factory=Sightings)
    listed_at: float = 0.0

    @property
    def silent_at(self) -> float:
        """The time at which what the agent last reported says nothing of now."""
        return self.received_at + SILENT_INTERVALS * self.interval_s

    def to_json(self) -> bytes:
        return to_json(self)

    @classmethod
    def from_json(cls, text: bytes | None) -> Record | None:
        """Return the record, or None for text that is none."""
        try:
            found = cls(**(stored := from_json(text or b"")))
            found.clean = {int(key): int(count) for key, count in stored["clean"].items()}
            found.gpus = {int(key): GpuSample(**use) for key, use in stored["gpus"].items()}
            found.leases = {int(key): LeaseUse(**use) for key, use in stored["leases"].items()}
            absent = {int(key): (count, at) for key, (count, at) in stored["jobs"]["absent"].items()}
            found.jobs = Sightings(stored["jobs"]["seen"], absent)
        except (ValueError, TypeError, AttributeError, KeyError):
            return None
        return found


def rules_of(settings: ClusterSettings) -> Rules:
    """Return the rules of these settings."""
    return Rules(health_table(settings.health), settings.rogue == "avoid", settings.clean_timeout_s)


class ReportReceiver:
    """Receiver of the reports of all servers of a manager's store; thread-safe."""

    def __init__(self, manager: GPUResourceManager) -> None:
        self._manager = manager
        self._store = manager.store
        self._lock = threading.Lock()
        self._second = 0
        self._fast = 0
        self._has_received = False
        self.marks = StateMarks(manager)
        self.silence = SilenceWatch(ClusterSettings().silent_after_s)

    def receive(self, report: Report, text: bytes) -> ReportAnswer:
        """Commit what the report shows, keep it, and return what its agent should know.

        Raises `ReportError` for a report that is out of order, and `UnknownNodeError`.
        """
        self._has_received = True
        self.marks.hear(report.generation)
        now = self._store.now()
        before = Record.from_json(self._store.reports.records([report.server]).get(report.server))
        check_order(report, before, now)
        clean, uses = ({}, {}) if before is None else (before.clean, before.leases)
        interval_s = report.interval_s or DEFAULT_INTERVAL_S
        record = Record(now, interval_s, report.at, report.boot_id, report.uptime_s, report.hostname)
        record.listed_at = now if report.jobs is not None else 0.0 if before is None else before.listed_at
        if report.error is not None and before is not None:
            record.received_at = before.received_at  # nothing is known of its GPUs: as if it were silent

        jobs = Sightings() if before is None else before.jobs
        elsewhere = self._sightings_elsewhere(report.server, jobs)

        def judge(cluster: ClusterState, now: float) -> list[Change]:
            outcome = transitions(cluster, report, clean, rules_of(cluster.settings), now)
            record.clean = outcome.clean
            opened = opened_by(cluster.node(report.server), report, cluster.settings, now)
            changes = [*opened, *(_with_use(change, uses) for change in outcome.changes)]
            known = {**elsewhere, report.server: record.jobs}
            return [*changes, *_ends(leases_gone(cluster, report.server, known), cluster, now)]

        def read(cluster: ClusterState, now: float) -> ReportAnswer | None:
            state = cluster.node(report.server)
            record.jobs = sightings_after(state, report, jobs)
            changes = judge(cluster, now)
            self._sample(state, report, before, record, IdleRules(cluster))
            return None if changes else self._answer(cluster, report, record)

        answer = self._manager.look(read, STATE_MAX_AGE_S)
        try:  # before the changes: a watched server without a record is a silent one
            self._store.reports.put(report.server, text, record.to_json(), SILENT_INTERVALS * interval_s)
        except StoreFullError as error:
            logger.warning("the report of %s was not kept: %s", report.server, error)
        if answer is None:
            with asked_by(f"agent:{report.server}") as asking:
                made = self._manager.commit(judge)
            names = asking.names()
            for change in made:
                _log(change, names)
            answer = self._manager.look(
                lambda cluster, now: self._answer(cluster, report, record), STATE_MAX_AGE_S
            )
        return {**answer, "generation": told} if (told := self.marks.told) else answer

    def _sightings_elsewhere(self, server: str, jobs: Sightings) -> dict[str, Sightings]:
        """Return those of the servers of other members, while jobs of gangs on this one are not seen."""
        if not jobs.absent:
            return {}
        names = self._manager.look(lambda cluster, now: partners(cluster.node(server), jobs), STATE_MAX_AGE_S)
        return {name: record.jobs for name, record in records_of(self._store, names).items()} if names else {}

    def _sample(
        self, state: NodeState, report: Report, before: Record | None, record: Record, rules: IdleRules
    ) -> None:
        """Add to the record what the report says of the use; warn of leases that became idle by it."""
        uses, samples, passed_s = {}, {}, 0.0
        if before is not None:
            uses, samples = before.leases, before.gpus
            passed_s = min(record.received_at - before.received_at, SILENT_INTERVALS * before.interval_s)
        record.gpus = sample_gpus(state, report)
        record.leases = sample_leases(state, report, uses, samples, rules, record.received_at, passed_s)
        tokens = {lease.fencing_token: lease for lease in state.leases.values()}
        for token, use in record.leases.items():
            if token not in tokens:
                continue
            limit_s = rules.after_s(tokens[token])
            if use.idle_since is None or record.received_at - use.idle_since < limit_s:
                continue
            if before is None or before.received_at - use.idle_since < limit_s:
                logger.warning(
                    "lease %s computes nothing on %s for %.0f s", tokens[token].lease_id, state.name, limit_s
                )

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
        if answer["cleaning"]:
            answer["next_s"] = CLEANING_INTERVAL_S
        elif cluster.pending and state.watched and state.leases and self._may_hurry():
            answer["next_s"] = WAITED_FOR_INTERVAL_S
        is_time = "next_s" not in answer or record.received_at - record.listed_at >= LIST_INTERVAL_S
        if is_time and (
            is_unsearched(state.drained)
            or (state.watched and is_list_wanted(state, report.machine, record.jobs))
        ):
            answer["jobs"] = True
        return answer

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
        if not self._has_received:
            return []
        names = self._manager.look(
            lambda cluster, now: [s.name for s in cluster.nodes if s.watched and s.silent is None]
        )
        records = records_of(self._store, names)
        now = self._store.now()
        agents = {
            name: LastReport(-math.inf, DEFAULT_INTERVAL_S)
            if (record := records.get(name)) is None
            else LastReport(record.received_at, record.interval_s)
            for name in names
        }
        self.silence.silent_after_s = self._manager.look(
            lambda cluster, now: cluster.settings.silent_after_s, STATE_MAX_AGE_S
        )
        lost = self.silence.lost(agents, now)

        def step(cluster: ClusterState, now: float) -> list[Change]:
            known = (cluster.by_name.get(name) for name in lost)
            return [
                AgentLost(state.name, now, agents[state.name].at if state.name in records else now)
                for state in known
                if state is not None and state.watched and state.silent is None
            ]

        with asked_by(""):  # silence is nobody's doing
            changes = self._manager.commit(step) if lost else []
        for change in changes:
            _log(change, {})
        return changes


def records_of(store: Store, servers: Iterable[str]) -> dict[str, Record]:
    """Return the records of those of the servers that have reported."""
    found = {name: Record.from_json(text) for name, text in store.reports.records(servers).items()}
    return {name: record for name, record in found.items() if record is not None}


def check_order(report: Report, before: Record | None, now: float) -> None:
    """Raise `ReportError` for a report that is older than the last one, or of another machine.

    Reports are ordered by the time since the server's start, as its clock may be wrong. Another start counts
    only if it was after the last report: else another machine reports under this name.
    """
    offset_s = report.at - now
    if abs(offset_s) > MAX_CLOCK_OFFSET_S:
        direction = "ahead of" if offset_s > 0 else "before"
        raise ReportError(
            f"report: made {abs(offset_s) / 3600:.0f} h {direction} the store's time: "
            "it is an old one, or the server's clock is wrong"
        )
    if before is None:
        return
    if report.boot_id is None or report.uptime_s is None or before.uptime_s is None:
        if report.at <= before.at:
            raise ReportError("report: older than the last one of this server")
    elif report.boot_id == before.boot_id:
        if report.uptime_s <= before.uptime_s:
            raise ReportError("report: older than the last one of this server")
    elif now < before.silent_at and now - report.uptime_s < before.received_at:
        raise ReportError(
            f"report: of {report.hostname or 'another machine'}, but {before.hostname or 'another machine'} "
            f"reports as {report.server}: one server, one agent"
        )


def _with_use(change: Change, uses: Mapping[int, LeaseUse]) -> Change:
    """Return the change with what was measured of the lease, if it tells that a GPU is clean after one."""
    if not isinstance(change, GpuCleaned) or (use := uses.get(change.fencing_token)) is None:
        return change
    energy_kwh = None if use.energy_kwh is None else round(use.energy_kwh / use.gpus, 6)
    return replace(change, busy=None if use.busy is None else round(use.busy, 4), energy_kwh=energy_kwh)


def _ends(gone: Iterable[Lease], cluster: ClusterState, now: float) -> Iterator[Change]:
    """Yield the ends of leases whose jobs are gone."""
    for lease in gone:
        yield from allocator.release(
            cluster,
            lease.lease_id,
            now,
            fencing_token=lease.fencing_token,
            outcome=Outcome.CANCELLED if lease.revoked else Outcome.FAILED,
            job_end=JobEnd.ENDED,
            reason=gone_in_words(lease, now),
        )


def _log(change: Change, names: Mapping[str, str]) -> None:
    match change:
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
