"""Dictionaries in which manager, client and service return the use of the GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from typing_extensions import TypedDict


class GpuLease(TypedDict):
    """Lease on a GPU; `idle_s` is the time for which it has computed nothing, once that is too long.

    `released_in_s` is the time until it is released for that, from five minutes before; None if it is not.
    `walls` is what keeps its job on that server to its GPUs: `bubblewrap`, or `none:` and why; empty if
    nothing is to.
    """

    task_id: str
    name: str
    short_id: str
    team: str
    owner: str
    gpu_milli: int
    fencing_token: int
    idle_s: float | None
    released_in_s: float | None
    walls: str


class GpuProcess(TypedDict):
    """Process on a GPU; None is what the agent may not read. `rogue`: it belongs to no lease there."""

    pid: int
    user: str | None
    command: str | None
    memory_mib: int | None
    lease_id: str | None
    rogue: bool


class GpuFinding(TypedDict):
    """Condition of a GPU, what the manager does about it, and what a person should do."""

    condition: str
    action: str
    text: str
    todo: str


class GpuUse(TypedDict):
    """One GPU of the inventory; None is what its server did not report.

    `closed` is the reason why it takes no new leases, `cleaning` names the ended leases whose processes may
    be left. `idle`: a lease on it has computed nothing for longer than it may. `sharing` says whether
    something keeps the fractions on it to their parts, empty if it has none.
    """

    gpu_id: int
    uuid: str
    type: str
    memory_mib: int | None
    memory_used_mib: int | None
    utilization_percent: int | None
    temperature_c: int | None
    power_w: float | None
    leases: list[GpuLease]
    processes: list[GpuProcess] | None
    health: list[GpuFinding]
    closed: str
    cleaning: list[str]
    rogue: bool
    idle: bool
    sharing: str


class ServerUse(TypedDict):
    """One server, which takes new leases if `is_open`; `age_s` is the time since its last report, or None.

    `drain_reason` is why it was drained, that it is retired, or since when its agent is silent. `error` is
    the report's, `agent_version` that of the agent that sent it, `machine` tells the server from others, as
    in the place of a job.
    """

    server_id: int
    server_name: str
    state: str
    is_open: bool
    drain_reason: str
    watched: bool
    age_s: float | None
    error: str
    driver: str | None
    agent_version: str | None
    machine: str | None
    gpus: list[GpuUse]


def idle_in_words(gpus: Iterable[GpuUse], lease_id: str) -> str:
    """Return that a lease computes nothing, if it does so for too long or is soon released for it."""
    for lease in (lease for gpu in gpus for lease in gpu["leases"] if lease["task_id"] == lease_id):
        if (left_s := lease["released_in_s"]) is not None:
            return f"its GPUs compute nothing: unless they do, they are released in {left_s:.0f} s"
        if lease["idle_s"] is not None:
            return (
                f"its GPUs have computed nothing for {lease['idle_s']:.0f} s; they are not released for that"
            )
    return ""


class IdleWarning:
    """Warning that the GPUs of a lease compute nothing: once, and again after they have computed."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._is_idle = False

    def see(self, gpus: Iterable[GpuUse], lease_id: str) -> None:
        """Warn if the lease has become idle, or is so soon to be released for it."""
        words = idle_in_words(gpus, lease_id)
        if words and not self._is_idle:
            self._say(words)
        self._is_idle = bool(words)
