"""Changes: the only way to change a state; their list is the audit trail and a replayable trace.

`by` names who asked for a change: a person, a program or a server's agent. It is empty for what time brings,
and for what a change makes possible for others, such as the grants of requests that waited.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from resource_manager.core.cluster_settings import ClusterSettings
from resource_manager.core.direct_init import direct_init, direct_new
from resource_manager.core.maintenance import Window
from resource_manager.core.models import JobPlace, Lease, Node, Request
from resource_manager.core.teams import Teams


@direct_init
@dataclass(frozen=True, slots=True)
class Granted:
    """A lease begins; if its request was pending, it leaves the queue."""

    lease: Lease
    at: float
    by: str = ""


new_granted = direct_new(Granted)


class Outcome(StrEnum):
    """Outcome of a run, as the history has it; callers outside Airflow may write others."""

    SUCCESS = "SUCCESS"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    PREEMPTED = "PREEMPTED"
    NOT_STARTED = "NOT_STARTED"
    EVICTED = "EVICTED"
    """Preempted, and not queued again: nobody would attend the job in a terminal that has ended."""
    IDLE = "IDLE"
    """Released as its GPUs computed nothing for too long."""
    TIMED_OUT = "TIMED_OUT"
    """Ended at its longest runtime."""


class JobEnd(StrEnum):
    """Knowledge of who releases a lease about the end of its placed job.

    ENDED: a launcher saw that it is gone; GONE: a person says so; FORCED: nobody knows, and the lease ends
    all the same: its GPUs stay allocated until somebody does.
    """

    UNKNOWN = ""
    ENDED = "ended"
    GONE = "gone"
    FORCED = "forced"


@direct_init
@dataclass(frozen=True, slots=True)
class Released:
    """A lease ends because its owner, an operator or the reconciler released it.

    `reason` is a sentence for people: why its job did not start on the nodes `failed_nodes`, or how it is
    known to be gone.
    """

    lease_id: str
    fencing_token: int
    at: float
    outcome: str = ""
    reason: str = ""
    failed_nodes: tuple[str, ...] = ()
    by: str = ""


new_released = direct_new(Released)


@dataclass(frozen=True, slots=True)
class MembersReleased:
    """Members of a lease end; its other members become a remainder, quarantined until they end the same way.

    A remainder has no TTL, and its lease id may be queued again. The members of a remainder may end in
    several steps; with the last one it ends itself.
    """

    lease_id: str
    fencing_token: int
    ranks: tuple[int, ...]
    at: float
    outcome: str = ""
    by: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Preempting:
    """A lease is taken for the pending request `preemptor`: its job must end by `until`.

    Else it is quarantined. It holds its capacity until it ends; what that frees is reserved for that
    request. A window or a limit (`core.lease_limits`) is a preemptor too, for which nothing is reserved.
    `by_operator`: a person decided it, not the scheduler. Without a `preemptor` the preemption is taken back,
    as that request does not wait any more: a job that was told meanwhile may still end for it.
    """

    lease_id: str
    fencing_token: int
    preemptor: str
    until: float
    at: float
    by_operator: bool = False
    by: str = ""


@dataclass(frozen=True, slots=True)
class Renewed:
    """A lease is extended to `expires_at`; a quarantined one becomes active again.

    One that is held beyond the end of its preemption is quarantined all the same. `checkpoint_at` is when its
    job last saved what it did.
    """

    lease_id: str
    fencing_token: int
    at: float
    expires_at: float = math.inf
    checkpoint_at: float | None = None
    by: str = ""


@dataclass(frozen=True, slots=True)
class Expired:
    """A lease ends because its TTL passed without renewal."""

    lease_id: str
    fencing_token: int
    at: float
    by: str = ""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A lease was not renewed, but its job may still run: the capacity stays allocated.

    `revoked`: it was released while its job may run, so nobody may renew it.
    """

    lease_id: str
    fencing_token: int
    at: float
    revoked: bool = False
    by: str = ""


@dataclass(frozen=True, slots=True)
class JobPlaced:
    """The jobs of a lease are about to start at these places, one a member: from now on they may run."""

    lease_id: str
    fencing_token: int
    places: tuple[JobPlace, ...]
    at: float
    by: str = ""


@dataclass(frozen=True, slots=True)
class Queued:
    """A request becomes pending; `sequence` is its number in the order of arrival."""

    request: Request
    queued_at: float
    sequence: int
    at: float
    by: str = ""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A pending request leaves the queue without a lease."""

    lease_id: str
    at: float
    reason: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True)
class DeadlineRisk:
    """A lease or pending request should end by `ends_by`, after its deadline; None: not any more."""

    lease_id: str
    at: float
    ends_by: float | None = None
    by: str = ""


@dataclass(frozen=True, slots=True)
class Announced:
    """A task of a DAG run will make this request; its lease id is that of the task without a map index.

    It holds nothing, and ends when the task asks, of a mapped one the first. `after` are the lease ids of the
    tasks with GPUs before it. `copies` is the number of mapped tasks, 0 if that is not known yet.
    """

    request: Request
    at: float
    after: tuple[str, ...] = ()
    copies: int = 1
    by: str = ""

    @property
    def lease_id(self) -> str:
        return self.request.lease_id


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A task of a DAG run will not make the request that was announced."""

    lease_id: str
    at: float
    reason: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True)
class Drained:
    """A node takes no new leases; its existing leases continue. `failed` marks a broken server."""

    node: str
    at: float
    reason: str = ""
    failed: bool = False
    by: str = ""


@dataclass(frozen=True, slots=True)
class Resumed:
    """A drained node takes new leases again; one whose agent is silent does so as a node without an agent."""

    node: str
    at: float
    by: str = ""


@dataclass(frozen=True, slots=True)
class TeamsChanged:
    """The rules of the teams are replaced; empty ones end them.

    `lines` say what differs from the rules before, for people; so they do of other parts of the cluster.
    """

    teams: Teams
    at: float
    lines: tuple[str, ...] = ()
    by: str = ""


@dataclass(frozen=True, slots=True)
class MaintenanceChanged:
    """The maintenance windows are replaced; without any, no server is kept from taking leases."""

    windows: tuple[Window, ...]
    at: float
    lines: tuple[str, ...] = ()
    by: str = ""


@dataclass(frozen=True, slots=True)
class AgentSeen:
    """A node is watched from now on: what a lease held there is freed only once it is seen to be clean.

    One whose agent was silent takes new leases again.
    """

    node: str
    at: float
    by: str = ""


@dataclass(frozen=True, slots=True)
class AgentLost:
    """The agent of a node is silent: it takes no new leases until it is seen again; its leases stay.

    `since` is the time of its last report.
    """

    node: str
    at: float
    since: float
    by: str = ""


@dataclass(frozen=True, slots=True)
class GpuClosed:
    """A GPU takes no new leases; its existing leases continue. With `stop` they are marked as failed.

    `reason` is the name of the condition, then `; ` and details. `uuid` is the pinned identity, if any. A GPU
    that is closed already gets the new reason.
    """

    node: str
    gpu_id: int
    uuid: str
    reason: str
    at: float
    stop: bool = False
    by: str = ""


@dataclass(frozen=True, slots=True)
class GpuOpened:
    """A closed GPU takes new leases again."""

    node: str
    gpu_id: int
    at: float
    by: str = ""


@dataclass(frozen=True, slots=True)
class GpuCleaned:
    """No process of an ended lease is left on a GPU: what the lease held there is free.

    `busy` is the part of the measured time, from 0 to 1, in which the lease computed, `energy_kwh` what it
    took on this GPU; None if its server did not measure them.
    """

    node: str
    gpu_id: int
    fencing_token: int
    at: float
    busy: float | None = None
    energy_kwh: float | None = None
    by: str = ""


@dataclass(frozen=True, slots=True)
class InventoryChanged:
    """The inventory is replaced; a node that left it but is in use stays, retired, until it is free.

    `replaced` are the nodes of the inventory before that changed or left it, with their places there, and
    `added` the names of those that are new: see `inventory_before`. `adopted` names the node whose GPUs were
    adopted as its server reports them.
    """

    nodes: tuple[Node, ...]
    at: float
    replaced: tuple[tuple[int, Node], ...] = ()
    added: tuple[str, ...] = ()
    adopted: str = ""
    lines: tuple[str, ...] = ()
    by: str = ""


@dataclass(frozen=True, slots=True)
class ClusterSettingsChanged:
    """The settings of the cluster are replaced; `lines` say what differs."""

    settings: ClusterSettings
    at: float
    lines: tuple[str, ...] = ()
    by: str = ""


Change = (
    Granted
    | Released
    | MembersReleased
    | Preempting
    | Renewed
    | Expired
    | Quarantined
    | JobPlaced
    | Queued
    | Cancelled
    | DeadlineRisk
    | Announced
    | Withdrawn
    | Drained
    | Resumed
    | TeamsChanged
    | MaintenanceChanged
    | AgentSeen
    | AgentLost
    | GpuClosed
    | GpuOpened
    | GpuCleaned
    | InventoryChanged
    | ClusterSettingsChanged
)

ENDS = (Released, Expired, MembersReleased)
"""Kinds that end a lease, or some of its members."""
