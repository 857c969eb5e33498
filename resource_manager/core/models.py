"""Values of the resource manager: nodes, requests, placements and leases."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from resource_manager.core.direct_init import direct_copy, direct_init, direct_new
from resource_manager.core.gpu_memory import as_gpu_memory
from resource_manager.errors import InvalidRequestError
from resource_manager.words import Words

MILLI_PER_GPU = 1000
"""Parts of one GPU; a request for a GPU fraction states a number of them in `gpu_milli`."""

MAX_PRIORITY = 2**31 - 1
"""Upper bound of Airflow's `priority_weight`; every queue order computes with it exactly."""

MAX_RENEWAL_S = 86_400.0
"""Longest life that a renewal may state."""

MAX_TIME_S = 1e12
"""Latest time of a job that is taken from outside, in seconds since the epoch."""

USER_PRIORITY = 1000
"""Highest priority that a request may state, unless the cluster says otherwise or an operator asks."""

GANG_PORTS = (29500, 29999)
"""First and last port at which the members of a gang meet on a server whose inventory names none."""

KEY_SEPARATOR = "\x1f"
"""Separator of lease id and fencing token in the key of a remainder; no lease id has control characters."""

PREEMPT_GRACE_S = 60.0
"""Time that a preempted job has, after its signal, to save what it did."""

Amount = int | float
"""A quantity of a divisible resource; integers stay exact, floats are allowed."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One physical GPU of a node: its index on the node, type, vendor, memory and, where known, identity."""

    gpu_id: int
    gpu_type: str = ""
    vendor: str = "nvidia"
    memory_mib: int = 0
    uuid: str = ""

    @property
    def is_mig(self) -> bool:
        """True for a MIG device; a process sees one of them, so a lease takes no more."""
        return self.uuid.startswith("MIG-")


RUNS_JOBS = {"jobs": "agent"}
"""Label of a server whose agent runs jobs: one with a `job_user`."""

STORED = {"job": "stored"}
"""Label of a request whose job is stored."""


def has_stored_job(labels: Mapping[str, str]) -> bool:
    """Return whether a request with these labels brought its job."""
    return STORED.items() <= labels.items()


@dataclass(frozen=True, slots=True)
class Node:
    """A server (or NUMA node, base station, device): divisible resources by name, and GPUs.

    `resources` maps a name that includes the unit (`cpus`, `memory_mib`) to the total amount. `interface` is
    the network interface at `address`, empty if unknown. `islands` are the ids of GPUs that NVLink, or else a
    NUMA node, joins; empty if unknown. `mps` is the folder of the MPS daemons that the node's agent keeps for
    GPU fractions, empty if it keeps none. `confine` says whether plain jobs run within walls, empty: as the
    cluster says; `writable` are the paths there that they may write to. `job_user` is the Unix user as whom
    its agent runs jobs, empty if it runs none.
    """

    name: str
    server_id: int
    resources: Mapping[str, Amount] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] = ()
    address: str = ""
    vendor: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    gang_ports: tuple[int, int] = GANG_PORTS
    interface: str = ""
    islands: tuple[tuple[int, ...], ...] = ()
    mps: str = ""
    confine: str = ""
    writable: tuple[str, ...] = ()
    job_user: str = ""


@dataclass(frozen=True, slots=True)
class Utility:
    """Utility of a task by its completion time: a sigmoid around a target (Bao et al., INFOCOM 2018).

    `priority` is the maximum; at `target_s` after the request the utility is half of it. The higher
    `sensitivity_per_s`, the faster it falls; at 0 time does not matter.
    """

    priority: float
    target_s: float
    sensitivity_per_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("priority", "target_s", "sensitivity_per_s"):
            value = getattr(self, name)
            if not 0.0 <= value < math.inf:
                said = Words.parameter("utility" if name == "priority" else name)
                raise InvalidRequestError("{} must be a finite number of 0 or more, got {}", said, value)

    def of(self, duration_s: float) -> float:
        """Return the utility of completing `duration_s` after the request."""
        exponent = self.sensitivity_per_s * (duration_s - self.target_s)
        shrunk = math.exp(-abs(exponent))
        return self.priority * (shrunk if exponent > 0 else 1.0) / (1.0 + shrunk)


class Spread(StrEnum):
    """Distribution of a gang: one member a server, or as many as fit."""

    SERVERS = "servers"
    PACK = "pack"


class TypeChoice(StrEnum):
    """Choice among the types of GPU of a request: the first that fits now, or what the policy picks."""

    FIRST = "first"
    BEST = "best"


class Link(StrEnum):
    """Choice among the GPUs of a node: of one island, of few, or whichever comes first."""

    REQUIRE = "require"
    PREFER = "prefer"
    ANY = "any"


@direct_init
@dataclass(frozen=True, slots=True)
class Request:
    """Demand on one node: GPUs (whole ones or a fraction of one) and amounts, with constraints.

    `gpus` GPUs of `gpu_milli` thousandths each; a GPU fraction (below 1000) asks for exactly one GPU.
    Empty `gpu_types` means any type; `types` says whether their order counts. `gpu_memory`, as `40GB`, is
    the least memory of each GPU, or of the fraction (`gpu_memory.as_gpu_memory`). `link` says whether several
    GPUs of a node are of one of its islands.
    `preferred_node` is tried first, `required_node` is the only choice.
    The node's labels must equal those of `labels_required`; `labels` are the request's own.
    `ttl_s` is the lifetime of the lease without renewal; infinite by default, which suits a simulation.
    `quarantine` keeps the capacity allocated after expiry until an operator or the reconciler confirms that
    the job is gone. `utility` matters only under admission by price. A request that is not `preemptible` is
    never taken for another one, and in return stops at its team's guarantee. When a lease is preempted, its
    job gets `preempt_signal`, and is killed `preempt_grace_s` later. A pending request preempts others only
    after `preemption_delay_s`, by default that of the teams' rules.
    `idle_below` (percent) and `idle_after_s` say when the lease counts as idle, and `idle_action` if it is
    then released; None and empty: as the settings say. `on_idle` says whether its request then waits again.
    A lease ends after `max_runtime_s`; after `requeue_after_s` it ends and its request waits again.
    The task should have ended at `deadline_at`, in seconds of the store's clock.

    With `nodes` above 1 it is a gang: the demand is that of each of so many members, on as many nodes or,
    with `spread="pack"`, on fewer. All members must be on nodes of one value of the label `same`, and should
    be on nodes of one value of the label `prefer_same`. For one member these three are as by default.
    """

    lease_id: str
    gpus: int = 0
    gpu_milli: int = MILLI_PER_GPU
    resources: Mapping[str, Amount] = field(default_factory=dict)
    gpu_types: tuple[str, ...] = ()
    vendor: str = ""
    preferred_node: str | None = None
    required_node: str | None = None
    priority: int = 0
    team: str = ""
    owner: str = ""
    ttl_s: float = math.inf
    expected_runtime_s: float | None = None
    quarantine: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    utility: Utility | None = None
    labels_required: Mapping[str, str] = field(default_factory=dict)
    preemptible: bool = True
    nodes: int = 1
    spread: Spread = Spread.SERVERS
    same: str = ""
    prefer_same: str = ""
    idle_below: float | None = None
    idle_after_s: float | None = None
    preempt_grace_s: float = PREEMPT_GRACE_S
    preempt_signal: str = "TERM"
    preemption_delay_s: float | None = None
    types: TypeChoice = TypeChoice.BEST
    gpu_memory: str = ""
    idle_action: str = ""
    on_idle: str = "end"
    max_runtime_s: float | None = None
    requeue_after_s: float | None = None
    link: Link = Link.PREFER
    deadline_at: float | None = None
    shape: tuple[object, ...] = field(init=False, repr=False, compare=False)
    """Hashable key of all fields that decide where the request fits; equal shapes fit the same nodes."""
    is_particular: bool = field(init=False, repr=False, compare=False)
    """True if it does not take any GPUs: it names types, a vendor or an amount of memory, or `is_linked`."""
    is_linked: bool = field(init=False, repr=False, compare=False)
    """True if it takes only GPUs of one island."""

    def __post_init__(self) -> None:
        if not self.lease_id:
            raise InvalidRequestError("{lease_id} must not be empty")
        if self.gpus < 0:
            raise InvalidRequestError("{gpus} must not be negative, got {}", self.gpus)
        if not 0 < self.gpu_milli <= MILLI_PER_GPU:
            text = "{gpu_milli} must be between 1 and {}, got {}"
            raise InvalidRequestError(text, MILLI_PER_GPU, self.gpu_milli)
        if self.gpu_milli != MILLI_PER_GPU and self.gpus != 1:
            text = "{gpu_milli}={} goes with {gpus}=1, got {gpus}={}"
            raise InvalidRequestError(text, self.gpu_milli, self.gpus)
        if self.gpu_memory:
            try:
                object.__setattr__(self, "gpu_memory", as_gpu_memory(self.gpu_memory))
            except ValueError as error:
                raise InvalidRequestError("{gpu_memory} {}", error) from None
        amounts = tuple(self.resources.items())
        for name, amount in amounts:
            if not 0 <= amount < math.inf:
                text = "{resources}: {} must be a finite amount of 0 or more, got {}"
                raise InvalidRequestError(text, name, amount)
        if self.utility is not None and self.expected_runtime_s is None:
            text = "{utility} needs {expected_runtime_s} beside it"
            raise InvalidRequestError(text, field="expected_runtime_s")
        if not self.ttl_s > 0:
            raise InvalidRequestError("{ttl_s} must be above 0, got {}", self.ttl_s)
        for name in ("max_runtime_s", "requeue_after_s"):
            limit_s = getattr(self, name)
            if limit_s is not None and not self.preempt_grace_s < limit_s < math.inf:
                text = "{} must be above {preempt_grace_s} ({:g} s), the time to save what was done, got {:g}"
                raise InvalidRequestError(text, Words.parameter(name), self.preempt_grace_s, limit_s)
        shape = (
            self.gpus,
            self.gpu_milli,
            amounts if len(amounts) < 2 else tuple(sorted(amounts)),
            self.gpu_types,
            self.gpu_memory,
            self.vendor,
            self.link,
            self.required_node,
            tuple(sorted(self.labels_required.items())),
        )
        if self.nodes != 1:
            if self.nodes < 1:
                raise InvalidRequestError("{nodes} must be 1 or more, got {}", self.nodes)
            shape += (self.nodes, self.spread, self.same, self.prefer_same)  # type: ignore[assignment]
        elif self.same or self.prefer_same or self.spread is not Spread.SERVERS:
            for name, value in (("same", ""), ("prefer_same", ""), ("spread", Spread.SERVERS)):
                object.__setattr__(self, name, value)  # one member is together with itself
        object.__setattr__(self, "shape", shape)
        is_linked = self.link is Link.REQUIRE and self.gpus > 1
        is_particular = bool(self.gpu_types or self.vendor or self.gpu_memory or is_linked)
        object.__setattr__(self, "is_linked", is_linked)
        object.__setattr__(self, "is_particular", is_particular)

    def for_task(self, lease_id: str) -> Request:
        """Return a copy of the request for another task, without validating the other fields again."""
        if not lease_id:
            raise InvalidRequestError("{lease_id} must not be empty")
        return _copy_request(self, lease_id)


_copy_request = direct_copy(Request, "lease_id")


@direct_init
@dataclass(frozen=True, slots=True)
class Placement:
    """A node by name and the ids of its GPUs, selected for a request.

    `gpu_uuids` are the identities of the GPUs at the grant, in the order of `gpu_ids`; empty unless the
    inventory names all of them. They decide which devices are allocated, whatever their ids become. `port` is
    where the processes of a gang meet, 0 if there is none.
    """

    node: str
    gpu_ids: tuple[int, ...] = ()
    gpu_uuids: tuple[str, ...] = ()
    port: int = 0


@dataclass(frozen=True, slots=True)
class JobPlace:
    """Place of the job of one member of a lease, stored before the job starts: who asks about it asks there.

    `launcher` runs it, reached by `address` and the Airflow connection `conn_id`. `machine` is what the
    machine, or the Docker engine, says it is; `folder` is the absolute path of the jobs there and `mark` a
    number that only this folder has; both are empty for a container. `user` is the account that it runs as.
    `walls` is what keeps the job to its GPUs and folder: `bubblewrap`, or `none:` and why; empty if unasked.
    """

    launcher: str
    address: str = ""
    conn_id: str = ""
    machine: str = ""
    folder: str = ""
    mark: str = ""
    user: str = ""
    walls: str = ""


@direct_init
@dataclass(frozen=True, slots=True)
class Lease:
    """A granted request: its members are allocated until the lease is released or expires.

    `fencing_token` only grows over the lifetime of a state; times are seconds of the store's clock.
    """

    request: Request
    members: tuple[Placement, ...]
    fencing_token: int
    granted_at: float
    expires_at: float = math.inf
    queued_at: float | None = None
    quarantined: bool = False
    ranks: tuple[int, ...] = ()
    """Ranks of the members of a remainder; empty for a whole lease, whose members are in order of rank."""
    sequence: int = 0
    """The request's number in the order of arrival, at which it waits again if the lease is given back."""
    preempted_by: str = ""
    """The pending request for which the lease is being preempted; empty if it is not."""
    preempt_until: float = math.inf
    """The end of its preemption, also of one that was taken back."""
    checkpoint_at: float | None = None
    places: tuple[JobPlace, ...] = ()
    """Places of the jobs by member, before any of them starts; empty while no process of ours was placed."""
    revoked: bool = False
    """True if it was released while its job may run, or had ended before a restore: it cannot be renewed."""

    @property
    def lease_id(self) -> str:
        return self.request.lease_id

    @property
    def arrived_at(self) -> float:
        """When its request arrived, in seconds: it waited from then, or was granted at once."""
        return self.granted_at if self.queued_at is None else self.queued_at

    @property
    def placement(self) -> Placement:
        """The first member, which is the only one unless several nodes were asked for."""
        return self.members[0]

    @property
    def key(self) -> str:
        """Key of the lease among all: its id, for a remainder followed by its fencing token."""
        return f"{self.request.lease_id}{KEY_SEPARATOR}{self.fencing_token}" if self.ranks else self.lease_id

    @property
    def ranked(self) -> Iterator[tuple[int, Placement]]:
        """The members with their ranks."""
        return zip(self.ranks, self.members, strict=True) if self.ranks else enumerate(self.members)

    def without(self, ranks: Collection[int]) -> Lease | None:
        """Return the remainder without these members; None if no member is left.

        What was said of the life of the lease ends with it: its end, preemption, checkpoint, revocation.
        """
        left = [(rank, member) for rank, member in self.ranked if rank not in ranks]
        kept = [index for index, (rank, _) in enumerate(self.ranked) if rank not in ranks]
        if not left:
            return None
        return replace(
            self,
            members=tuple(member for _, member in left),
            places=tuple(self.places[index] for index in kept) if self.places else (),
            ranks=tuple(rank for rank, _ in left),
            quarantined=True,
            expires_at=math.inf,
            preempted_by="",
            preempt_until=math.inf,
            checkpoint_at=None,
            revoked=False,
        )

    def on(self, node: str) -> Iterator[Placement]:
        """Yield the members on that node."""
        return (member for member in self.members if member.node == node)


new_lease = direct_new(Lease)
