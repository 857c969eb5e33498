"""Grounds of a refusal: kind and numbers, which the edge puts into words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from resource_manager.core import server_facts
from resource_manager.core.fact import fact
from resource_manager.core.fit import Shortage
from resource_manager.core.models import Amount, Request


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


# ---- of the store and the process ----


@fact
class RecoveryWindow:
    """Time without grants after a restart of the store, or after a jump of its clock by `clock_jump_s`.

    Its start is so many seconds ago, its end so many from now.
    """

    began_ago_s: float
    resumes_in_s: float
    clock_jump_s: float = 0.0


def window_left(window_s: float, left_s: float, clock_jump_s: float) -> RecoveryWindow:
    """Return the recovery window of `window_s` that ends in `left_s`."""
    return RecoveryWindow(max(window_s - left_s, 0.0), left_s, clock_jump_s)


@fact
class Misconfigured:
    """Somebody has to set the cluster, or this process, right, as the text of the edge says."""

    text: str


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
    """It is granted at the next pass over the queue, if it `waits`; `first` if no request is ahead."""

    first: bool
    waits: bool = True


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
class BeyondPass:
    """A pass starts none behind that request, the last of so many that wait for the same servers."""

    last: Ahead
    count: int


@fact
class MayStartAnyTime:
    """A request ahead may start at any moment, since the runtime of that lease or request is unknown."""

    ahead: Ahead
    endless: str = ""
    is_lease: bool = False


Behind = FreeNow | NextPass | HeldForAhead | WouldDelay | BeyondPass | MayStartAnyTime


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


Waiting = PriceNotCovered | StillHeld | WaitsForEnds


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


OverQuota = OverRuntime | OverLimit | OverOwnersLimit | OverGuarantee


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


Unestimated = EndUnknown | NoKnownEnd | TooFar | NotEstimated | PriceUnknown

Fact = (
    RecoveryWindow
    | Misconfigured
    | server_facts.WhyClosed
    | server_facts.Withheld
    | server_facts.NeverFits
    | server_facts.NotNow
    | Behind
    | Waiting
    | OverQuota
    | ServerShort
    | Unestimated
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
