"""Grounds of a refusal: kind and numbers, which the edge puts into words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar, dataclass_transform

from resource_manager.core.fit import Shortage
from resource_manager.core.models import Amount, Request

Class = TypeVar("Class")


class RefusalKind(StrEnum):
    """Reasons for a refusal."""

    NO_CAPACITY = "no_capacity"
    BEHIND_QUEUE = "behind_queue"
    QUOTA = "quota"
    PRICE = "price"
    RECOVERING = "recovering"
    LOCK_BUSY = "lock_busy"
    MAINTENANCE = "maintenance"
    AWAITING_RELEASE = "awaiting_release"
    MISCONFIGURED = "misconfigured"
    TASK_TAKEN = "task_taken"
    NEVER_FITS = "never_fits"


def _fields(value: Any) -> tuple[Any, ...]:
    return tuple(getattr(value, name) for name in value.__match_args__)


def _equals(value: Any, other: Any) -> bool:
    return type(value) is type(other) and _fields(value) == _fields(other)


def _hash(value: Any) -> int:
    return hash((type(value), _fields(value)))


def _text(value: Any) -> str:
    fields = zip(value.__match_args__, _fields(value), strict=True)
    return f"{type(value).__name__}({', '.join(f'{name}={field!r}' for name, field in fields)})"


@dataclass_transform(frozen_default=True)
def fact(cls: type[Class]) -> type[Class]:
    """Make the class a slotted value, frozen for the type checker.

    The methods are shared, since those that `dataclass` writes for each of fifty classes take a tenth of the
    time in which a command starts.
    """
    for name, method in (("__eq__", _equals), ("__hash__", _hash), ("__repr__", _text)):
        setattr(cls, name, method)
    return dataclass(eq=False, repr=False, slots=True)(cls)


# ---- of the store and the process ----


@fact
class RecoveryWindow:
    """Time without grants after a restart of the store, or after a jump of its clock by `clock_jump_s`.

    Its start is so many seconds ago, its end so many from now.
    """

    began_ago_s: float
    resumes_in_s: float
    clock_jump_s: float = 0.0


@fact
class Misconfigured:
    """Somebody has to set the cluster, or this process, right, as the text of the edge says."""

    text: str


# ---- why one server is closed, or a part of it ----


@fact
class InWindow:
    """A maintenance window, from `begin` until `end` in seconds of the store's clock."""

    begin: float
    end: float
    reason: str


@fact
class StartFailed:
    """The job's start failed there at that time; the server is avoided `until` then."""

    at: float
    reason: str
    until: float


@fact
class IsDrained:
    """An operator closed the server, or it is marked as failed."""

    reason: str
    failed: bool = False


@fact
class IsSilent:
    """The server's agent has not reported since that time, in seconds of the store's clock."""

    since: float


@fact
class WithheldGpu:
    """A GPU of which not all is granted: closed for that reason, or without one being cleaned."""

    gpu_id: int
    closed: str | None = None


@fact
class WithheldGpus:
    """GPUs of a server that are closed or being cleaned."""

    gpus: tuple[WithheldGpu, ...]
    node: str = ""


@fact
class LeftInventory:
    """The server left the inventory."""


@fact
class NoAddress:
    """The server has no address, which each member of a gang needs."""


Closure = InWindow | StartFailed | IsDrained | IsSilent | WithheldGpus


@fact
class ClosedServer:
    """A closed server that could take the request; `has` GPUs, or milli of one, are free there."""

    node: str
    has: int
    why: Closure


@fact
class MoreClosed:
    """So many more servers are closed."""

    count: int


# ---- it fits no server, even an empty one ----


@fact
class LabelsMissing:
    """No server has the labels that the request requires."""


@fact
class NoServer:
    """The inventory has no server that the request allows."""


@fact
class KindMissing:
    """No server has GPUs of the kind; those of `unstated` would do but for memory that is not stated."""

    unstated: str = ""


@fact
class TooFewGpus:
    """The largest server has so many GPUs of the kind; `of_mig` says that there are MIG devices besides."""

    node: str
    most: int
    of_mig: bool


@fact
class AmountShort:
    """The largest amount of a resource on any server is below the demand: `free`, or in total."""

    name: str
    most: Amount
    node: str
    free: bool = True


@fact
class NeverTogether:
    """Servers have each of the amounts, and none has all of them."""


@fact
class LabelUnknown:
    """No server has the label that all members of the gang must share."""


@fact
class AddressesMissing:
    """So many of the servers that could take members have no address, such as `node`."""

    missing: int
    able: int
    node: str


@fact
class OneServerOnly:
    """The request names one server for members that must be on several."""


@fact
class TooFewServers:
    """The inventory, or the largest domain of the label, takes so many of the members."""

    most: int
    domain: str


# ---- it fits no open server now ----


@fact
class GpusShort:
    """So many GPUs are free, or for a GPU fraction milli of one."""

    most: int
    node: str = ""


@fact
class NotAtOnce:
    """Servers have each of the amounts free, and none has all of them."""


Lack = GpusShort | AmountShort | NotAtOnce


@fact
class NoFreeServer:
    """No open server has room; `lack` is what the best of them is short of."""

    lack: Lack


@fact
class FreeShort:
    """So much is free on that server: `unit` is gpus, or a resource."""

    has: Amount
    unit: str


@fact
class MembersFree:
    """So many members of the gang fit now, in the domain of that value of the label."""

    count: int
    domain: str
    but: NoPort | NoPlacement | None = None


@fact
class NextServer:
    """The server nearest to taking one more member of the gang, and what it lacks."""

    node: str
    lack: FreeShort | Lack


@fact
class NoPort:
    """All gang ports of the server where the gang would meet are in use."""

    node: str
    first: int
    last: int


@fact
class NoPlacement:
    """The policy found no placement."""


@fact
class Unreleased:
    """A quarantined lease without which the request would fit."""

    lease: str
    node: str


# ---- it fits, and may not start ----


@fact
class FreeNow:
    """What is free on the server that the request would get: GPUs, milli of one, or its first resource."""

    amount: Amount
    node: str


@fact
class Ahead:
    """A request ahead, at that position; with `by_gpus` its GPUs are what is short."""

    name: str
    position: int
    request: Request
    by_gpus: bool


@fact
class NextPass:
    """It is granted at the next pass over the queue; `first` if no request is ahead."""

    first: bool


@fact
class HeldForAhead:
    """A request ahead blocks the queue by the rule of its order; `reserved` if it could use this server."""

    ahead: Ahead
    reserved: bool
    rule: str


@fact
class WouldDelay:
    """Starting now could delay a request ahead; `unknown_runtime` if a short stated runtime would not."""

    ahead: Ahead
    unknown_runtime: bool


@fact
class NoPlaceInTime:
    """A request ahead has no reservation, since only so many before it get one."""

    ahead: Ahead
    places: int


@fact
class MayStartAnyTime:
    """A request ahead may start at any moment, since the runtime of that lease or request is unknown."""

    ahead: Ahead
    endless: str = ""
    is_lease: bool = False


@fact
class PriceNotCovered:
    """The utility does not exceed the price on that server and so many more."""

    utility: float
    price: float
    node: str
    more: int


@fact
class StillHeld:
    """A preempted lease is held after the end of its preemption."""

    lease: str
    node: str


@fact
class WaitsForEnds:
    """Leases preempted for the request end within that time: this one and so many more."""

    lease: str
    node: str
    more: int
    within_s: float


@fact
class OverRuntime:
    """The team may run jobs of at most that time, in seconds."""

    team: str
    most_s: float
    stated_s: float


class UsedBy(StrEnum):
    """Kinds of what uses a limit."""

    TEAMS = "teams"
    OWNERS = "owners"
    LEASES = "leases"


@fact
class OverLimit:
    """The team's limit, what it holds and what is asked, in milli; by whom it is used, and so many more."""

    team: str
    limit: int
    held: int
    asked: int
    used_by: UsedBy
    users: tuple[tuple[str, int], ...]
    more: int


@fact
class OverOwnersLimit:
    """What the owner may hold of the team's GPUs, and holds and asks for, in milli."""

    owner: str
    team: str
    most: float
    held: int
    asked: int


@fact
class OverGuarantee:
    """What the team is guaranteed, and holds that is not preemptible, in milli; GPUs if it is by type."""

    team: str
    guaranteed: int
    by_type: tuple[tuple[str, float], ...]
    held: int
    asked: int


# ---- verdicts and estimates ----


@fact
class ServerShort:
    """What one server is short of: now, or `ever`; `total` is what it has of it in all.

    For a GPU fraction `has` is the most milli free on one GPU. `of_mig` says that it has MIG devices.
    """

    shortage: Shortage
    ever: bool
    total: Amount = 0
    of_mig: bool = False


@fact
class PriceUnknown:
    """It is unknown when the utility will exceed the price."""


@fact
class NotEstimated:
    """The queue is too long for an estimate, or for one at once: it comes `soon`."""

    soon: bool = False


@fact
class TooFar:
    """More than so many leases end before the start."""

    ends: int


@fact
class EndUnknown:
    """The end of a lease in the way, and of so many more, is unknown."""

    lease: str
    more: int


@fact
class NoKnownEnd:
    """No lease whose end is known frees enough."""


Fact = (
    RecoveryWindow
    | Misconfigured
    | Closure
    | LeftInventory
    | NoAddress
    | ClosedServer
    | MoreClosed
    | LabelsMissing
    | NoServer
    | KindMissing
    | TooFewGpus
    | AmountShort
    | NeverTogether
    | LabelUnknown
    | AddressesMissing
    | OneServerOnly
    | TooFewServers
    | NoFreeServer
    | MembersFree
    | NextServer
    | Unreleased
    | FreeNow
    | NextPass
    | HeldForAhead
    | WouldDelay
    | NoPlaceInTime
    | MayStartAnyTime
    | PriceNotCovered
    | StillHeld
    | WaitsForEnds
    | OverRuntime
    | OverLimit
    | OverOwnersLimit
    | OverGuarantee
    | ServerShort
    | PriceUnknown
    | NotEstimated
    | TooFar
    | EndUnknown
    | NoKnownEnd
)


@dataclass(frozen=True, slots=True)
class Grounds:
    """Grounds of a refusal: its kind, and facts about the request, the most important first.

    `retry_after_s` is set if it is known when a retry can succeed.
    """

    kind: RefusalKind
    facts: tuple[Fact, ...]
    request: Request | None = None
    retry_after_s: float | None = None


def recovering(window: RecoveryWindow) -> Grounds:
    """Return the grounds of every refusal during the recovery window."""
    return Grounds(RefusalKind.RECOVERING, (window,), retry_after_s=window.resumes_in_s)


def misconfigured(text: str) -> Grounds:
    """Return the grounds of every refusal while somebody has to set something right."""
    return Grounds(RefusalKind.MISCONFIGURED, (Misconfigured(text),))
