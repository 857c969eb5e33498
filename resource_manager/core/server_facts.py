"""Facts about servers: why one is closed, why a request fits none ever, or none now."""

from __future__ import annotations

from resource_manager.core.fact import fact
from resource_manager.core.models import Amount


@fact
class InWindow:
    """A maintenance window, from `begin` until `end` in seconds of the store's clock.

    `is_too_often`: it comes again before a run of the request could end. `is_assumed`: nobody knows for how
    long it runs.
    """

    begin: float
    end: float
    reason: str
    is_too_often: bool = False
    is_assumed: bool = False


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


WhyClosed = InWindow | StartFailed | IsDrained | IsSilent | LeftInventory | NoAddress
"""What a server says of itself against a request that fits it."""

Closure = InWindow | StartFailed | IsDrained | IsSilent | WithheldGpus
"""Why a server that could take the request is closed."""


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


Withheld = ClosedServer | MoreClosed | WithheldGpus


@fact
class LabelsMissing:
    """No server has the labels that the request requires."""


@fact
class NoServer:
    """The inventory has no server that the request allows."""


@fact
class KindMissing:
    """No server has GPUs of the kind; those of `unstated` would do but for memory that is not stated.

    `types` are those that there are, if the request names others.
    """

    unstated: str = ""
    types: tuple[str, ...] = ()


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


NoServerEver = NoServer | KindMissing | TooFewGpus | AmountShort | NeverTogether
NeverFits = NoServerEver | LabelsMissing | LabelUnknown | AddressesMissing | OneServerOnly | TooFewServers


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


@fact
class FreeForPreemptor:
    """What is free on the server would do, but waits for a request for which leases are being preempted."""

    node: str
    preemptor: str


NotNow = NoFreeServer | MembersFree | NextServer | Unreleased | FreeForPreemptor
