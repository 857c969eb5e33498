"""Answers that manager, client and service return: dictionaries with the original's keys."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal, NotRequired, TypeVar, cast

from typing_extensions import TypedDict  # typing's own is not read by pydantic before 3.12

from resource_manager.core.models import Amount
from resource_manager.manager.cluster_results import ServerSummary

T = TypeVar("T")


def answer_of(kind: type[T], thing: object, **more: Any) -> T:
    """Return an answer of that kind: each of its keys from `more`, else from the attribute of that name."""
    return cast("T", {key: more[key] if key in more else getattr(thing, key) for key in kind.__annotations__})


class ReleaseResult(StrEnum):
    """Answer to a release: done, quarantined as its job may run, or no lease has that id, token and owner."""

    RELEASED = "released"
    QUARANTINED = "quarantined"
    NOT_HELD = "not_held"
    OTHER_HOLDER = "other_holder"


Recorded = dict[str, Any]
"""A change of the history: `version`, `change` (its kind) and the change's own keys."""


class Requested(TypedDict):
    """The demand as an allocation and a queue entry repeat it."""

    gpu_milli: int
    gpu_types: list[str]
    types: str
    gpu_memory: str
    link: str
    nodes: int
    resources: dict[str, Amount]
    priority: int
    preemptible: bool
    preempt_grace_s: float
    preempt_signal: str
    team: str
    owner: str
    expected_runtime_s: float | None
    max_runtime_s: float | None
    requeue_after_s: float | None
    on_idle: str
    deadline_at: float | None
    late_end: float | None
    labels: dict[str, str]


class Member(TypedDict):
    """One server of a lease, in the order of the ranks.

    `mps_folder` is that of the MPS daemon that enforces the lease's part of a GPU; empty for whole GPUs, and
    where the part is accounted only. `user` is the account there as which a plain job of the team runs, empty
    if none is stated. `confine` says whether a plain job there runs within walls, in which it
    may write to `writable`.
    """

    rank: int
    server_id: int
    server_name: str
    address: str
    gpu_ids: list[int]
    gpu_uuids: list[str]
    vendor: str
    gpu_memory_mib: int
    mps_folder: str
    user: str
    confine: str
    writable: list[str]
    cpu_count: Amount
    port: int
    interface: str
    job_user: str


class Place(TypedDict):
    """Where the job of a member is, as `core.models.JobPlace`."""

    launcher: str
    address: str
    conn_id: str
    machine: str
    folder: str
    mark: str
    user: str
    walls: str


class Allocation(Requested):
    """A lease. Times are seconds since the epoch by the store's clock; `expires_at` None: never.

    `name` and `short_id`, such as `my_dag.train[3]` and `k7wd`, are what people call it.
    `gpu_memory_mib` is the lease's part of the memory of each of its GPUs, 0 if not in the inventory.
    `gpu_uuids` are the GPUs' identities at the grant, empty if the inventory names none; `gpu_ids` are the
    numbers of these devices now, without those that left the inventory.
    `gpu_failed` is the reason if one of its GPUs failed: its owner must stop the job; else empty.
    `members` has one entry a server, by rank; the other keys describe the first. PREEMPTING: the job must end
    by `until`, for the request `preempted_by`, or at the limit of that name; `until` stays where that was
    taken back, since the job was told. ERROR: the lease is quarantined. Both have a `reason`; one that is
    `revoked` cannot be renewed. `job_places` has one entry a member once the job was placed.
    """

    server_id: int
    server_name: str
    gpu_ids: list[int]
    cpu_count: Amount
    gpu_devices: str
    gpu_uuids: list[str]
    task_id: str
    name: str
    short_id: str
    address: str
    vendor: str
    gpu_memory_mib: int
    fencing_token: int
    granted_at: float
    expires_at: float | None
    queued_at: float | None
    state: Literal["RUNNING", "PREEMPTING", "ERROR"]
    quarantined: bool
    preempted_by: str | None
    until: float | None
    checkpoint_at: float | None
    gpu_failed: str
    job_places: list[Place]
    revoked: bool
    reason: str
    members: list[Member]


class Renewal(TypedDict):
    """Renewal of one lease among several; `checkpoint_at` is when its job last saved what it did.

    It is asked for `by` that name where nobody asks for all of them; a service takes its caller's.
    """

    task_id: str
    fencing_token: int
    checkpoint_at: NotRequired[float | None]
    by: NotRequired[str]


class LeaseChanges(TypedDict):
    """Leases and pending requests that changed since a version, each as it is now; `version` is the next one.

    `pending` and `ended` are ids: of requests that wait, and of those that neither wait nor have a lease.
    `is_whole`: it is all of them, whether changed or not, and what is not there has ended.
    """

    version: int
    is_whole: bool
    leases: list[Allocation]
    pending: list[str]
    ended: list[str]


class ExpectedStart(TypedDict):
    """Start in seconds since the epoch, its server and confidence; `at` None: unknown, `detail` says why.

    Four starts of five should be between `earliest` and `latest`, None without a bound; `confidence` tells
    whether it was so. `after` names the lease whose end it waits for; `plays` is how often the queue was
    played forward for it. Four times of five the task should end by `ends_by`.
    """

    at: float | None
    earliest: float | None
    latest: float | None
    after: str
    plays: int
    ends_by: float | None
    server_name: str | None
    confidence: str
    detail: str


class ComingDemand(TypedDict):
    """Announced demand: `copies` requests (0: of unknown number), which a task should make at `at`.

    Times are seconds since the epoch. Four times of five it should ask between `earliest` and `latest`; all
    three are None if that is unknown, and `detail` says whose history is missing.
    """

    task_id: str
    name: str
    required_gpus: int
    gpu_milli: int
    gpu_types: list[str]
    nodes: int
    copies: int
    team: str
    owner: str
    priority: int
    labels: dict[str, str]
    announced_at: float
    at: float | None
    earliest: float | None
    latest: float | None
    detail: str


class EstimateQuality(TypedDict):
    """How often estimated starts of a kind came true, of the last outcomes.

    `inside_percent` is of those with an interval, `median_error_s` how far off the median the middle one was;
    None without any. `confidence` is what such estimates say of themselves.
    """

    kind: str
    estimates: int
    inside_percent: float | None
    median_error_s: float | None
    confidence: str


class StartedRequest(TypedDict):
    """A request with its first estimate, in seconds since the epoch, and its start; None: unknown or open."""

    task_id: str
    name: str
    estimated_at: float
    at: float | None
    earliest: float | None
    latest: float | None
    started_at: float
    inside: bool


class EstimatesView(TypedDict):
    """Quality of the estimates by kind, all first, and the last requests that started, the latest first."""

    kinds: list[EstimateQuality]
    started: list[StartedRequest]


class QueueEntry(Requested):
    """A pending request: position from 1 in queue order; `kind` and `reason` of the wait."""

    task_id: str
    name: str
    short_id: str
    state: Literal["WAITING"]
    position: int
    kind: str
    reason: str
    sequence: int
    queued_at: float
    waited_s: float
    required_gpus: int
    required_cpus: Amount
    estimated_start: NotRequired[ExpectedStart]


Submission = Allocation | QueueEntry
"""Which of the two it is says `state`."""


class SlurmJob(TypedDict):
    """A job on Slurm: what its task asked for, and what Slurm says. Times are seconds since the epoch.

    `conn_id` is the Airflow connection of its login node, empty where Airflow itself runs on one. `state` and
    `reason` are Slurm's own words, `wait` is the reason in the user's; `where` are its nodes and
    GPUs; `begins_at` is Slurm's estimate of a pending job's start.
    """

    source: str
    cluster: str
    conn_id: str
    key: str
    task_id: str
    id: str
    state: str
    reason: str
    wait: str
    where: str
    partition: str
    owner: str
    team: str
    labels: dict[str, str]
    gpus: int
    nodes: int
    exit_code: int | None
    begins_at: float | None
    submitted_at: float | None
    started_at: float | None
    ended_at: float | None
    uncollected: NotRequired[bool]
    """Whether it has ended and its files are still on Slurm, for its task's next step."""


class Summary(TypedDict):
    """All servers, and how many leases and pending requests there are; `next` on one page of them."""

    total_servers: int
    servers: list[ServerSummary]
    leases: int
    queue_length: int
    version: int
    next: NotRequired[int | None]
    misconfigured: NotRequired[str]
    """Why nothing is granted, if the cluster or this process is to be set right."""


class ServerVerdict(TypedDict):
    """One server's answer to a request; `score` is the policy's, higher is better."""

    server_id: int
    server_name: str
    fits: bool
    could_fit: bool
    reasons: list[str]
    score: int | None


class Quotes(TypedDict):
    """Prices of a request now: where it would start, and of an hour on every server."""

    price_per_hour: float | None
    price: float | None
    utility: float | None
    covered: bool | None
    servers: dict[str, float]


class SoonerStart(TypedDict):
    """One change of the request with which it would start sooner, and when, in seconds since the epoch."""

    change: str
    at: float


class Explanation(TypedDict):
    """Explanation if and where a request would be granted now, or why not: overall and per server.

    `servers` say whether one of the `nodes` members fits.
    """

    task_id: str
    nodes: int
    admission: Quotes | None
    fits: bool
    would_be_granted: bool
    kind: str | None
    reason: str
    could_ever_fit: bool
    server_name: str | None
    gpu_ids: list[int]
    members: list[Member]
    sharing: str
    policy: str
    servers: list[ServerVerdict]
    would_preempt: list[str]
    deadline_at: float | None
    late_end: float | None
    estimated_start: NotRequired[ExpectedStart]
    alternatives: NotRequired[list[SoonerStart]]
