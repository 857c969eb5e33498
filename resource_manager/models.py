"""Values of the resource manager: nodes, requests, placements, leases and the changes of state."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from resource_manager.direct_init import direct_copy, direct_init
from resource_manager.errors import InvalidRequestError

MILLI_PER_GPU = 1000
"""A GPU is divided into this many parts; a request for a share names some of them."""

MAX_PRIORITY = 2**31 - 1
"""The most that Airflow's `priority_weight` can be; every order computes with it exactly."""

UNPRINTABLE = "\\x00-\\x1f\\x7f-\\x9f\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060\\u2066-\\u2069\\ufeff"
"""Characters no name may have, for a regular expression's brackets: those that end lines, steer terminals,
turn the direction of writing, or cannot be seen."""

_UNPRINTABLE = re.compile(f"[{UNPRINTABLE}\ud800-\udfff]")


def check_printable(texts: Mapping[str, str]) -> None:
    """Raises `InvalidRequestError` for a text, by the name of its field, with an `UNPRINTABLE` character.

    Names and reasons stand in logs, terminals and pages; there they must not pass for anything else.
    """
    for field_name, text in texts.items():
        if _UNPRINTABLE.search(text):
            raise InvalidRequestError(
                f"{field_name} has a control or an invisible character: {text[:200]!a}", field=field_name
            )


Amount = int | float
"""A quantity of a divisible resource; integers stay exact, floats are allowed."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One physical GPU of a node: its index there, and what it is."""

    gpu_id: int
    gpu_type: str = ""
    vendor: str = "nvidia"
    memory_mib: int = 0


@dataclass(frozen=True, slots=True)
class Node:
    """A server (or NUMA node, base station, device): divisible resources by name, and GPUs.

    `resources` maps a name that carries its unit (`cpus`, `memory_mib`) to the total amount.
    """

    name: str
    server_id: int
    resources: Mapping[str, Amount] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] = ()
    address: str = ""
    vendor: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Utility:
    """What finishing is worth by the time it takes: a sigmoid around a target (Bao et al., INFOCOM 2018).

    `priority` is the most it can be worth; at `target_s` after the request it is worth half of that, and
    falls off the faster the higher `sensitivity_per_s` is; 0 means that time does not matter.
    """

    priority: float
    target_s: float
    sensitivity_per_s: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("priority", 0.0), ("target_s", 0.0), ("sensitivity_per_s", 0.0)):
            value = getattr(self, name)
            if not least <= value < math.inf:
                raise InvalidRequestError(f"utility {name} must be a finite number of 0 or more, got {value}")

    def of(self, duration_s: float) -> float:
        """The worth of finishing that long after the request."""
        exponent = self.sensitivity_per_s * (duration_s - self.target_s)
        shrunk = math.exp(-abs(exponent))
        return self.priority * (shrunk if exponent > 0 else 1.0) / (1.0 + shrunk)


@direct_init
@dataclass(frozen=True, slots=True)
class Request:
    """What a task asks of one node: GPUs (whole or a share of one) and amounts, with constraints.

    `gpus` GPUs of `gpu_milli` thousandths each; a share (below 1000) asks for exactly one GPU.
    `gpu_types` empty means any type. `preferred_node` is tried first, `required_node` is the only one.
    `ttl_s` is the life of the lease without renewal; infinite by default, which suits a simulation.
    `quarantine` keeps the capacity held after expiry until someone confirms that the job is gone.
    `utility` matters under admission by price only.
    """

    task_id: str
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
    shape: tuple[object, ...] = field(init=False, repr=False, compare=False)
    """Hashable key of everything that decides where the request fits; equal shapes fit equally."""

    def __post_init__(self) -> None:
        if not self.task_id:
            raise InvalidRequestError("task_id must not be empty", field="task_id")
        if self.gpus < 0:
            raise InvalidRequestError(f"gpus must not be negative, got {self.gpus}", field="gpus")
        if self.gpu_milli != MILLI_PER_GPU and (self.gpus != 1 or not 0 < self.gpu_milli < MILLI_PER_GPU):
            raise InvalidRequestError(
                f"a share asks for one GPU and 1 to 999 milli of it, got {self.gpus} x {self.gpu_milli}",
                field="gpu_milli",
            )
        amounts = tuple(self.resources.items())
        for name, amount in amounts:
            if not 0 <= amount < math.inf:
                raise InvalidRequestError(
                    f"{name} must be a finite amount of 0 or more, got {amount}", field=name
                )
        if self.utility is not None and self.expected_runtime_s is None:
            raise InvalidRequestError(
                "a utility needs expected_runtime_s beside it", field="expected_runtime_s"
            )
        if not self.ttl_s > 0:
            raise InvalidRequestError(f"ttl_s must be above 0, got {self.ttl_s}", field="ttl_s")
        object.__setattr__(
            self,
            "shape",
            (self.gpus, self.gpu_milli, amounts, self.gpu_types, self.vendor, self.required_node),
        )

    def for_task(self, task_id: str) -> Request:
        """The same demand of another task; what has been checked is not checked again."""
        if not task_id:
            raise InvalidRequestError("task_id must not be empty", field="task_id")
        copy: Request = _copy_request(self, task_id)
        return copy


_copy_request = direct_copy(Request, "task_id")


@direct_init
@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes: a node by name, and the ids of its GPUs."""

    node: str
    gpu_ids: tuple[int, ...] = ()


@direct_init
@dataclass(frozen=True, slots=True)
class Lease:
    """A request that holds its placement until it is released or expires.

    `fencing_token` only grows over the life of a state; times are seconds of the store's clock.
    """

    request: Request
    placement: Placement
    fencing_token: int
    granted_at: float
    expires_at: float = math.inf
    queued_at: float | None = None
    quarantined: bool = False

    @property
    def task_id(self) -> str:
        return self.request.task_id


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request in the queue; `sequence` is its place in the order of arrival."""

    request: Request
    queued_at: float
    sequence: int

    @property
    def task_id(self) -> str:
        return self.request.task_id


# ---- changes: the only way a state moves; their list is the audit trail and a replayable trace ----


@direct_init
@dataclass(frozen=True, slots=True)
class Granted:
    """A lease begins; if the task waited, it leaves the queue."""

    lease: Lease
    at: float


@direct_init
@dataclass(frozen=True, slots=True)
class Released:
    """A lease ends because its owner, an operator or the reconciler said so."""

    task_id: str
    fencing_token: int
    at: float
    outcome: str = ""


@dataclass(frozen=True, slots=True)
class Renewed:
    """A lease lives on until `expires_at`; a quarantined one is active again."""

    task_id: str
    fencing_token: int
    at: float
    expires_at: float = math.inf


@dataclass(frozen=True, slots=True)
class Expired:
    """A lease ends because nobody renewed it."""

    task_id: str
    fencing_token: int
    at: float


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Nobody renewed the lease, but its job may still run: the capacity stays held."""

    task_id: str
    fencing_token: int
    at: float


@dataclass(frozen=True, slots=True)
class Queued:
    """A request begins to wait."""

    request: Request
    at: float


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A waiting request gives up."""

    task_id: str
    at: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Drained:
    """A node takes no new leases; the ones it has live on. `failed` marks a broken server."""

    node: str
    at: float
    reason: str = ""
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Restored:
    """A drained node takes leases again."""

    node: str
    at: float


@dataclass(frozen=True, slots=True)
class InventoryChanged:
    """The list of nodes is now this one; a node that left but is in use stays, retired, until free."""

    nodes: tuple[Node, ...]
    at: float


Change = (
    Granted
    | Released
    | Renewed
    | Expired
    | Quarantined
    | Queued
    | Cancelled
    | Drained
    | Restored
    | InventoryChanged
)
