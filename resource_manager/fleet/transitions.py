"""Changes that a report shows: which GPUs are to be closed, opened, or are clean again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from resource_manager.agent.report_format import GpuReport, ProcessReport, Report
from resource_manager.core.changes import (
    AgentSeen,
    Change,
    Drained,
    GpuCleaned,
    GpuClosed,
    GpuOpened,
    Resumed,
)
from resource_manager.core.cluster import ClusterState
from resource_manager.core.cluster_settings import HealthRule
from resource_manager.core.gpu_state import DRAINED, cleaning_on, condition_of, leases_on, present_id
from resource_manager.core.identifiers import token_of_key
from resource_manager.core.maintenance import to_the_minute
from resource_manager.core.models import Lease
from resource_manager.core.names import listed, name_of, short
from resource_manager.core.node_state import Cleaning, NodeState
from resource_manager.core.search import is_unsearched
from resource_manager.fleet.health import HealthAction, findings, health_table

CLEAN_REPORTS = 3
"""Number of reports in a row without a condition after which a GPU that recovers by itself is opened."""

ROGUE = "rogue process"
NOT_CLEANED = "not cleaned"
UNKNOWN_UUID = "unknown uuid"
MISSING_UUID = "uuid missing"
SERVER = -1
"""Key under which clean reports of the server are counted, beside those of GPUs."""

MPS_SERVER = "nvidia-cuda-mps-server"

MAX_REASON = 400
MAX_NAME = 60
MAX_SERVER_REASON = 960
MAX_LISTED = 8
MAX_COMMAND = 80


def is_pinned(state: NodeState) -> bool:
    """Return True if the inventory has the UUID of every GPU: else reports are only for display."""
    return bool(state.gpu_free) and len(state.gpu_uuids) == len(state.gpu_free)


def tells_nothing(state: NodeState, report: Report) -> bool:
    """Return True if an agent could not say how the GPUs of its server are."""
    return report.error is not None and bool(state.gpu_free)


def transitions(
    cluster: ClusterState, report: Report, clean: dict[int, int], now: float
) -> tuple[list[Change], dict[int, int]]:
    """Return what the report changes, and how many reports in a row were clean. Raises `UnknownNodeError`.

    These counts are by the number of a closed GPU, `SERVER` for the server; `clean` are those before. A
    report without GPUs because of an error says nothing, unless the server has none. One of a server
    without pinned UUIDs, or without GPUs, says only that its agent is not silent.
    """
    state = cluster.node(report.server)
    if tells_nothing(state, report):
        return [], {}
    reading = _Reading(cluster, state, report, clean, now)
    if is_pinned(state):
        return reading.outcome()
    is_new = state.silent is not None or (not state.gpu_free and not state.watched)
    return [*([AgentSeen(state.name, now)] if is_new else []), *reading.cleaned()], {}


@dataclass
class _Reading:
    """One report against one node of the state."""

    _cluster: ClusterState
    _state: NodeState
    _report: Report
    _before: dict[int, int]
    _now: float
    _clean: dict[int, int] = field(default_factory=dict)
    _found: dict[int, tuple[HealthRule, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings = self._cluster.settings
        self._table, self._avoids_rogues = health_table(settings.health), settings.rogue == "avoid"
        self._reported = {gpu.uuid: gpu for gpu in self._report.gpus if gpu.uuid is not None}

    def outcome(self) -> tuple[list[Change], dict[int, int]]:
        changes: list[Change] = []
        if self._state.silent is not None or (not self._state.watched and self._lists_processes()):
            changes.append(AgentSeen(self._state.name, self._now))
        changes += self.cleaned()
        for gpu_id in self._state.gpu_free:
            changes += self._gpu(gpu_id, self._reported.get(self._state.gpu_uuids[gpu_id]))
        changes += self._server()
        return changes, self._clean

    def _lists_processes(self) -> bool:
        """Return True if the server can say when a GPU is clean."""
        return all(gpu.processes is not None for gpu in self._report.gpus if not gpu.lost)

    # ---- cleaning ----

    def cleaned(self) -> Iterator[Change]:
        for entry in self._state.cleaning.values():
            uuid = entry.uuid or self._state.gpu_uuids.get(entry.gpu_id, "")
            is_unseen = uuid not in self._reported and uuid not in self._state.gpu_uuids.values()
            if self._left_of(entry) == [] or is_unseen:  # of which no report will ever tell
                yield GpuCleaned(entry.node, entry.gpu_id, entry.fencing_token, self._now)

    def _left_of(self, entry: Cleaning) -> list[ProcessReport] | None:
        """Return the processes on the GPU that are, or may be, of an ended lease; None if nobody can say.

        One that cannot be read may be, unless another lease has a part of the GPU, whose it may be, too.
        """
        gpu = self._reported.get(entry.uuid or self._state.gpu_uuids.get(entry.gpu_id, ""))
        if gpu is None or gpu.lost or gpu.processes is None:
            return None
        here = present_id(self._state, entry)
        is_clear = not self._avoids_rogues or (here is not None and any(leases_on(self._state, here)))
        return [
            process
            for process in gpu.processes
            if is_of(process, entry.lease_id, entry.fencing_token)
            or not (is_clear or process.lease_source != "unreadable" or is_mps_server(self._state, process))
        ]

    def _overdue(self, gpu_id: int) -> Iterator[str]:
        """Yield the reason if something on the GPU has not become clean in time."""
        for entry in cleaning_on(self._state, gpu_id):
            left = self._left_of(entry)
            if left != [] and self._now - entry.since > self._cluster.settings.clean_timeout_s:
                named = ", ".join(map(_named, left[:MAX_LISTED])) if left else "it cannot be seen"
                lease = _lease_words(entry.name, entry.fencing_token)
                yield f"{NOT_CLEANED}; {lease}, which ended at {to_the_minute(entry.since)}: {named}"

    # ---- one GPU ----

    def _gpu(self, gpu_id: int, gpu: GpuReport | None) -> Iterator[Change]:
        reason, stop = self._fault(gpu_id, gpu)
        closed = self._state.closed_gpus.get(gpu_id)
        if reason is not None:
            if closed is None or self._is_worse(reason, stop, closed):
                uuid = self._state.gpu_uuids[gpu_id]
                if closed is not None and condition_of(closed) == DRAINED:  # an operator ends that, no report
                    reason = f"{closed.reason}; {reason}"
                yield GpuClosed(self._state.name, gpu_id, uuid, reason[:MAX_REASON], self._now, stop)
        elif closed is not None and self._recovers(closed.reason) and self._counted(gpu_id):
            yield GpuOpened(self._state.name, gpu_id, self._now)

    def _counted(self, key: int) -> bool:
        """Count a clean report; return True if there were enough in a row."""
        self._clean[key] = self._before.get(key, 0) + 1
        return self._clean[key] >= CLEAN_REPORTS

    def _fault(self, gpu_id: int, gpu: GpuReport | None) -> tuple[str | None, bool]:
        """Return the reason to close the GPU, None if there is none, and whether its job must stop."""
        for finding in self._findings(gpu_id, gpu):
            if finding.action in (HealthAction.CLOSE_NOW, HealthAction.CLOSE_AFTER_LEASE):
                text = self._state.gpu_uuids[gpu_id] if gpu is None else finding.text
                return f"{finding.condition}; {text}", finding.action == HealthAction.CLOSE_NOW
        for reason in chain(self._overdue(gpu_id), self._rogue(gpu_id, gpu)) if gpu is not None else ():
            return reason, False
        return None, False

    def _findings(self, gpu_id: int, gpu: GpuReport | None) -> tuple[HealthRule, ...]:
        """Return what the report shows of the GPU, without XIDs from before somebody opened it."""
        if gpu is None:
            return (self._table[MISSING_UUID],)
        if gpu_id in self._found:
            return self._found[gpu_id]
        opened = self._state.opened_gpus.get(gpu_id)
        if opened is not None and gpu.xids:
            offset_s = self._now - self._report.at  # the server's clock may be wrong
            later = [xid for xid in gpu.xids if xid.at + offset_s > opened.at]
            gpu = gpu.model_copy(update={"xids": later})
        self._found[gpu_id] = findings(gpu, self._table)
        return self._found[gpu_id]

    def _is_worse(self, reason: str, stop: bool, closed: GpuClosed) -> bool:
        if stop != closed.stop:
            return stop
        return self._recovers(closed.reason) and not self._recovers(reason)

    def _recovers(self, reason: str) -> bool:
        condition = reason.partition("; ")[0]
        if condition in (ROGUE, NOT_CLEANED):
            return True
        rule = self._table.get(condition)
        return rule is not None and rule.recovers

    def _rogue(self, gpu_id: int, gpu: GpuReport) -> Iterator[str]:
        for process in rogue_processes(self._state, gpu_id, gpu) if self._avoids_rogues else ():
            yield f"{ROGUE}; {_named(process)}{_of_lease(self._cluster, self._state, process)}"

    # ---- the server ----

    def _server(self) -> Iterator[Change]:
        drained = self._state.drained
        reason = self._server_fault()
        if reason is not None:
            if self._is_held(drained) and reason.startswith(UNKNOWN_UUID):
                return  # it takes no leases, and the end of this fault would open it
            if drained is None or not drained.failed:
                reason = reason[:MAX_SERVER_REASON]
                if drained is not None and is_unsearched(drained):
                    reason = f"{reason}; {drained.reason}"
                yield Drained(self._state.name, self._now, reason, failed=True)
        elif self._is_mismatch(drained) and not is_unsearched(drained) and self._counted(SERVER):
            yield Resumed(self._state.name, self._now)

    @staticmethod
    def _is_held(drained: Drained | None) -> bool:
        """Return True if an operator, or a restore, closed the server, which no report opens."""
        return drained is not None and not drained.failed and not is_unsearched(drained)

    @staticmethod
    def _is_mismatch(drained: Drained | None) -> bool:
        """Return True if the server was closed because of a UUID that the inventory lacked."""
        return drained is not None and drained.failed and drained.reason.startswith(f"{UNKNOWN_UUID}; ")

    def _server_fault(self) -> str | None:
        pinned = set(self._state.gpu_uuids.values())
        if self._reported.keys() - pinned:
            here, there = (listed(sorted(uuids), MAX_LISTED) for uuids in (pinned, self._reported))
            return f"{UNKNOWN_UUID}; inventory: {here}; server: {there}"
        for gpu_id, uuid in self._state.gpu_uuids.items():
            for finding in self._findings(gpu_id, self._reported.get(uuid)):
                if finding.action == HealthAction.CLOSE_SERVER:
                    return f"{finding.condition}; GPU {gpu_id}: {finding.text}"
        return None


def rogue_processes(state: NodeState, gpu_id: int, gpu: GpuReport) -> list[ProcessReport]:
    """Return the processes on a GPU that belong to no lease there, present or being cleaned.

    A process of which that cannot be read is none, nor is one without a mark beside a lease whose job runs in
    any tasks of its DAG run: they carry none where nobody gave them one. Nor is one that only draws, as it
    may just have found all GPUs, nor the server of the MPS daemon that the agent keeps for fractions.
    """
    if not gpu.processes:
        return []
    leases = list(leases_on(state, gpu_id))
    dirty = list(state.cleaning.values())
    unmarked = any(lease.request.labels.get("scope") == "run" for lease in leases)
    return [
        process
        for process in gpu.processes
        if process.lease_source != "unreadable"
        and not (process.lease_source == "none" and unmarked)
        and not process.draws
        and not is_mps_server(state, process)
        and not any(is_of(process, lease.lease_id, lease.fencing_token) for lease in leases)
        and not any(is_of(process, entry.lease_id, entry.fencing_token) for entry in dirty)
    ]


def is_mps_server(state: NodeState, process: ProcessReport) -> bool:
    """Return True for a process by which clients of the node's own MPS daemons compute: it has no mark."""
    return bool(state.node.mps) and (process.command or "").split(" ")[0].endswith(MPS_SERVER)


def is_of(process: ProcessReport, lease_id: str, fencing_token: int) -> bool:
    """Return True if the process belongs to that lease, by the mark of its job or by the lease's id."""
    if process.job is not None:
        return token_of_key(process.job) == fencing_token
    return process.lease_id == lease_id


def _of_lease(cluster: ClusterState, state: NodeState, process: ProcessReport) -> str:
    """Say of which lease a rogue process is, by its mark: `; of lease t (token 17), which has ended`."""
    found = token_of_key(process.job or "")
    token = None if found < 0 else found
    if token is None and not process.lease_id:
        return ""
    lease = _marked(cluster, process.lease_id, token)
    if lease is not None:
        where = "other GPUs here" if state.name in {m.node for m in lease.members} else lease.placement.node
        has = f"which is quarantined on {where}" if lease.quarantined else f"which has {where}"
        return f"; of {_lease_words(name_of(lease), lease.fencing_token, lease.request.owner)}, {has}"
    entries = (entry for each in cluster.nodes for entry in each.cleaning.values())
    ended = next((entry for entry in entries if token is not None and entry.fencing_token == token), None)
    if ended is not None:
        return f"; of {_lease_words(ended.name, token)}, which ended at {to_the_minute(ended.since)}"
    who = _lease_words(process.lease_id, token) if process.lease_id else f"job {process.job}"
    if token is not None and token > cluster.last_fencing_token:
        return f"; of {who}, which is unknown here"
    return f"; of {who}, which has ended"


def _marked(cluster: ClusterState, lease_id: str | None, token: int | None) -> Lease | None:
    """Return the lease of a process's mark, by its fencing token if the mark has one."""
    if token is None:
        return cluster.leases.get(lease_id or "")
    leases = chain(cluster.leases.values(), cluster.remainders.values())
    return next((lease for lease in leases if lease.fencing_token == token), None)


def _lease_words(name: str, token: int | None, owner: str = "") -> str:
    known = [f"token {token}"] if token is not None else []
    known += [f"owner {short(owner, MAX_NAME)}"] if owner else []
    return f"lease {short(name, MAX_NAME)}" + (f" ({', '.join(known)})" if known else "")


def _named(process: ProcessReport) -> str:
    command = (process.command or "")[:MAX_COMMAND]
    return f"pid {process.pid} of {short(process.user or 'unknown', MAX_NAME)}" + (
        f": {command}" if command else ""
    )
