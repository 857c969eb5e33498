"""Answers about servers, teams and the cluster, as they are told."""

from __future__ import annotations

from typing import Any

from typing_extensions import TypedDict  # typing's own is not read by pydantic before 3.12

from resource_manager.core.models import Amount


class ClosedGpu(TypedDict):
    """A GPU that takes no new leases; with `stop`, leases on it are marked as failed."""

    gpu_id: int
    uuid: str
    reason: str
    closed_at: float
    closed_by: str
    stop: bool


class CleaningGpu(TypedDict):
    """Part of a GPU that an ended lease held, until no process of it is seen there."""

    gpu_id: int
    task_id: str
    name: str
    fencing_token: int
    gpu_milli: int
    since: float


class ServerSummary(TypedDict):
    """One server; `closed_…` is unused capacity that takes no new leases, in none of the free ones.

    `watched`: an agent reports its GPUs. `silent_since`: the time of its last report, if it has stopped to.
    """

    server_id: int
    server_name: str
    available_gpus: Amount
    closed_gpus: Amount
    total_gpus: Amount
    available_cpus: Amount
    closed_cpus: Amount
    total_cpus: Amount
    running_tasks: int
    gpu_utilization: str
    cpu_utilization: str
    state: str
    drained: bool
    drain_reason: str
    drained_by: str
    retired: bool
    address: str
    gpu_types: list[str]
    free_gpu_milli: dict[str, int]
    watched: bool
    silent_since: float | None
    gpus_closed: list[ClosedGpu]
    gpus_cleaning: list[CleaningGpu]


class InventoryGpu(TypedDict):
    """One GPU of the inventory, `uuid` empty if it is not pinned, and the tasks whose leases are on it."""

    gpu_id: int
    uuid: str
    type: str
    vendor: str
    memory_mib: int
    free_milli: int
    task_ids: list[str]


class ServerDetail(ServerSummary):
    """One server with its GPUs, by ascending number, and what is stated of the walls of plain jobs there."""

    gpus: list[InventoryGpu]
    confine: str
    writable: list[str]


class TeamView(TypedDict):
    """One team: its rules and what it holds, in GPUs; `team` is empty for all that have no rules.

    `borrowed` is what it and the teams below it hold beyond the guarantee.
    """

    team: str
    parent: str | None
    guaranteed: Amount
    guaranteed_by_type: dict[str, Amount]
    limit: Amount | None
    weight: float
    max_runtime_s: float | None
    max_gpus_per_owner: Amount | None
    min_runtime_s: float | None
    idle_below: float | None
    idle_after_s: float | None
    idle_action: str | None
    max_priority: int | None
    user: str
    allocated: Amount
    borrowed: Amount
    allocated_by_type: dict[str, Amount]
    allocated_by_owner: dict[str, Amount]
    waiting: int
    waiting_gpus: Amount


class TeamsView(TypedDict):
    """The rules of all teams, and the teams in the order of their file; `capacity` is all GPUs."""

    preemption: bool
    min_runtime_s: float
    preemption_delay_s: float
    half_life_s: float
    gpu_weights: dict[str, float]
    capacity: int
    teams: list[TeamView]


class ClusterDiff(TypedDict):
    """Difference of a file from the stored cluster, in lines.

    `refused` has the reasons why it cannot be applied; `revision` is that of the stored cluster.
    """

    changed: bool
    lines: list[str]
    refused: list[str]
    revision: str


class ClusterView(TypedDict):
    """Stored cluster: `sections` in the form of its file, `toml` as its text."""

    revision: str
    sections: dict[str, Any]
    toml: str


WindowView = TypedDict(
    "WindowView",
    {
        "id": int,
        "servers": list[str],
        "from": str,
        "until": str,
        "every": str | None,
        "reason": str,
        "preempt": bool,
        "is_open": bool,
        "begins_in_s": float,
        "running": list[str],
    },
)
"""One maintenance window: when it is open now or next; `running` are the leases on its servers.

`begins_in_s` is in seconds by the store's clock, 0 while it is open.
"""
