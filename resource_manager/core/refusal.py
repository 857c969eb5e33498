"""Refusals: the reason why a request is not granted now, in one sentence that all interfaces show."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from resource_manager.core.cluster import ClusterState
from resource_manager.core.fit import (
    accepted_gpu_ids,
    accepts_node,
    could_ever_fit,
    count_gpus,
    fits,
    has_labels,
    has_mig_devices_for,
)
from resource_manager.core.gpu_state import withheld
from resource_manager.core.maintenance import to_the_minute
from resource_manager.core.models import MILLI_PER_GPU, Lease, Request
from resource_manager.core.names import name_of, short
from resource_manager.core.node_state import ClosedToRequest, NodeState
from resource_manager.core.search import awaits_restore
from resource_manager.errors import NO_SERVERS, LockTimeoutError

MAX_DETAIL = 480
"""Maximum length of a sentence, so that no interface has to shorten it and all show the same."""

MAX_REASON = 240
"""Maximum length of why a server is closed to one request, with its times."""

MAX_TYPES = 3

ONE_MIG_DEVICE = "a lease on MIG devices has gpus=1, since CUDA shows a process one of them"

SPELT_WITH_AN = "AEFHILMNORSX"
"""Letters whose names begin with a vowel: an A100, an RTX 6000, but a V100."""


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


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal's kind and one sentence; `retry_after_s` if it is known when a retry can succeed."""

    kind: RefusalKind
    detail: str
    retry_after_s: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "detail", short(self.detail, MAX_DETAIL))

    def __str__(self) -> str:
        return self.detail


@dataclass(frozen=True, slots=True)
class RecoveryWindow:
    """Time without grants after a restart of the store, or after a jump of its clock by `clock_jump_s`.

    Its start is so many seconds ago, its end so many from now.
    """

    began_ago_s: float
    resumes_in_s: float
    clock_jump_s: float = 0.0


def recovering(window: RecoveryWindow) -> Refusal:
    """Return the refusal of every request during the recovery window."""
    what = "restarted or restored"
    if window.clock_jump_s:
        way = "forward" if window.clock_jump_s > 0 else "back"
        what = f"the store's clock jumped {way} by {abs(window.clock_jump_s):.0f} s, seen"
    return Refusal(
        RefusalKind.RECOVERING,
        f"recovering: {what} {window.began_ago_s:.0f} s ago; grants resume in "
        f"{window.resumes_in_s:.0f} s (until then the owners of leases renew them)",
        window.resumes_in_s,
    )


def lock_busy(waited_s: float) -> Refusal:
    """Return the refusal of a request for which the lock could not be acquired in time."""
    return Refusal(RefusalKind.LOCK_BUSY, str(LockTimeoutError(waited_s)))


def misconfigured(detail: str) -> Refusal:
    """Return the refusal of every request while somebody has to set the cluster, or this process, right."""
    return Refusal(RefusalKind.MISCONFIGURED, f"misconfigured: {detail}")


def no_servers() -> Refusal:
    """Return the refusal of every request while the store has no cluster."""
    return misconfigured(NO_SERVERS)


def never_fits(cluster: ClusterState, request: Request) -> Refusal | None:
    """Return the refusal of a request that fits no server of the inventory even when empty, else None."""
    states = [state for state in cluster.nodes if not state.retired]
    if any(could_ever_fit(state.node, request) for state in states):
        return None
    allowed = [state for state in states if request.required_node in (None, state.name)]
    labelled = [state for state in allowed if has_labels(state.node, request)]
    if allowed and not labelled:
        required, what = request.required_node, "label" if len(request.labels_required) == 1 else "labels"
        who = "no server has" if required is None else f"{short(required)} has not"
        return Refusal(RefusalKind.NEVER_FITS, f"{who} {label_words(request)} as its {what}")
    return Refusal(RefusalKind.NEVER_FITS, _among_labelled(request) + _never(labelled, request))


def _never(allowed: list[NodeState], request: Request) -> str:
    """Say why none of these servers, all that the request allows, could fit it even when empty."""
    required = request.required_node
    if not allowed:
        gone = "the inventory has no server" if required is None else f"{short(required)} left the inventory"
        return f"no server could ever satisfy {needed(request)}: {gone}"
    if not any(accepts_node(state.node, request) for state in allowed) or (
        request.gpus and not any(state.node.gpus for state in allowed)
    ):
        gpu = gpu_word(request, 1)
        return f"no server has {_a(gpu)}" if required is None else f"{short(required)} has no {gpu}"
    who = "no server could ever" if required is None else f"{short(required)} could never"
    best = max(allowed, key=lambda state: count_gpus(state.node, request))
    most = count_gpus(best.node, request)
    if most < request.gpus:
        has = f"the largest, {short(best.name)}, has {most}" if required is None else f"it has {most}"
        if any(has_mig_devices_for(state.node, request) for state in allowed):
            has = f"{ONE_MIG_DEVICE}, and {has} other GPUs" if most else ONE_MIG_DEVICE
        return f"{who} satisfy {needed(request)}: {has}"
    if lack := lack_of(allowed, request, ever=True):
        return f"{who} satisfy {needed(request)}: {lack}"
    return f"no server has {'both ' if _parts(request) == 2 else ''}{needed(request)}"


def no_capacity(cluster: ClusterState, request: Request) -> Refusal:
    """Return the refusal of a request that fits no open server now but could fit an empty one."""
    usable = [state for state in cluster.nodes if could_ever_fit(state.node, request) and not state.retired]
    is_open = [
        state for state in usable if state.is_open and (not state.closed_gpus or state.could_fit(request))
    ]
    if not is_open:
        return Refusal(kind_of_closed(usable), closed_servers(usable, request))
    detail = _among_labelled(request) + _nearest(is_open, request)
    if unreleased := unreleased_lease(is_open, request):
        return Refusal(RefusalKind.AWAITING_RELEASE, f"{detail}; {unreleased}")
    free_but_closed = [state for state in usable if not state.is_open and _fits_without(state, [], request)]
    if free_but_closed:
        detail = f"{detail}; {closed_servers(free_but_closed, request)}"
    marked = [state for state in is_open if request.gpus and (state.closed_gpus or state.cleaning)]
    for state in marked:
        if reasons := withheld(state, accepted_gpu_ids(state.node, request)):
            detail = f"{detail}; on {short(state.name)} {'; '.join(map(short, reasons))}"
            break
    return Refusal(RefusalKind.NO_CAPACITY, detail)


def leases_in_the_way(cluster: ClusterState, request: Request) -> Iterator[Lease]:
    """Yield the leases on open servers that could fit the request when empty."""
    for state in cluster.nodes:
        if state.is_open and state.could_fit(request):
            yield from state.leases.values()


def unreleased_lease(states: Iterable[NodeState], request: Request) -> str:
    """Say which quarantined lease to release so that the request can start; empty if there is none."""
    for state in states:
        unconfirmed = [lease for lease in state.leases.values() if lease.quarantined]
        if unconfirmed and state.is_open and _fits_without(state, unconfirmed, request):
            return (
                f"{name_of(unconfirmed[0])} on {short(state.name)} was not renewed, but its job may "
                "still run: release the lease once the job is known to be gone"
            )
    return ""


def free_on(state: NodeState, request: Request) -> str:
    """Return a phrase such as `2 A100 are free on s1`: GPUs, or else the first resource of the request."""
    where = f"free on {short(state.name)}"
    if not request.gpus:
        name = next(iter(request.resources), "cpus")
        return f"{state.free.get(name, 0):g} {name} are {where}"
    eligible = state.eligible_gpus(request)
    if request.gpu_milli != MILLI_PER_GPU:
        most = max((state.gpu_free[gpu_id] for gpu_id in eligible), default=0)
        return f"{most} milli of a GPU are {where}"
    count = len(eligible)
    return f"{count} {gpu_word(request, count)} {'is' if count == 1 else 'are'} {where}"


def needed(request: Request) -> str:
    """Return the demand as a phrase, such as `4 A100 and 32 cpus`."""
    parts = []
    if request.gpus:
        parts.append(
            f"{request.gpus} {gpu_word(request, request.gpus)}"
            if request.gpu_milli == MILLI_PER_GPU
            else f"{request.gpu_milli} milli of one {gpu_word(request, 1)}"
        )
    for name, amount in list(request.resources.items())[:MAX_TYPES]:
        parts.append(f"{amount:g} {'cpu' if name == 'cpus' and amount == 1 else short(name)}")
    return " and ".join(parts) if len(parts) < 3 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def label_words(request: Request) -> str:
    """Return the required labels as a phrase, such as `zone=a and rack=7`."""
    return " and ".join(f"{short(name)}={short(value)}" for name, value in request.labels_required.items())


def _among_labelled(request: Request) -> str:
    return f"of the servers with {label_words(request)}: " if request.labels_required else ""


def _parts(request: Request) -> int:
    return len(request.resources) + (request.gpus > 0)


def _a(noun: str) -> str:
    """Return the noun with its article: `a GPU`, `an A100`."""
    is_spelt = noun[1:2].isupper() or noun[1:2].isdigit()
    return f"{'an' if noun[0] in (SPELT_WITH_AN if is_spelt else 'AEIOUaeiou') else 'a'} {noun}"


def needs(cluster: ClusterState, request: Request) -> str:
    """Return what a pending request lacks, for brackets: `needs 6` GPUs, or all if GPUs are not short."""
    if not request.gpus or any(
        state.is_open and state.could_fit(request) and _gpus_suffice(state, request)
        for state in cluster.nodes
    ):
        return f"needs {needed(request)}"
    return f"needs {request.gpus if request.gpu_milli == MILLI_PER_GPU else f'{request.gpu_milli} milli'}"


def gpu_word(request: Request, count: int) -> str:
    """Return the noun for the requested GPUs: `A100`, `A100 or H100`, `GPUs by nvidia` or `GPU`."""
    if request.gpu_types:
        types = [short(name) for name in request.gpu_types[:MAX_TYPES]]
        more = ["another type"] if len(request.gpu_types) > MAX_TYPES else []
        return " or ".join(types + more)
    return f"GPU{'' if count == 1 else 's'}{f' by {short(request.vendor)}' if request.vendor else ''}"


def _nearest(states: list[NodeState], request: Request) -> str:
    """Describe the free capacity of the best of these open servers, none of which fits the request."""
    what = needed(request)
    if request.required_node is not None:
        return f"{short(request.required_node)} cannot fit {what} now: {lack_of(states, request)}"
    if request.gpus:
        best = max(states, key=lambda state: most_free(state, request))
        most = most_free(best, request)
        if request.gpu_milli != MILLI_PER_GPU and most < request.gpu_milli:
            largest = f"the most free is {most} milli on {short(best.name)}" if most else "none has any free"
            return f"no GPU with {request.gpu_milli} milli free: {largest}"
        if request.gpu_milli == MILLI_PER_GPU and most < request.gpus:
            wanted = f"{request.gpus} {gpu_word(request, request.gpus)}"
            largest = f"largest free is {most} on {short(best.name)}" if most else "none is free anywhere"
            return f"no server with {wanted}: {largest}"
        states = [state for state in states if _gpus_suffice(state, request)]
    return f"no server with {what}: {lack_of(states, request)}"


def most_free(state: NodeState, request: Request) -> int:
    """Return the node's number of free eligible GPUs; for a GPU fraction, the most milli free on one GPU."""
    if request.gpu_milli == MILLI_PER_GPU:
        any_gpu = not (request.gpu_types or request.vendor or state.has_mig)
        return state.whole_free if any_gpu else len(state.eligible_gpus(request))
    accepted = accepted_gpu_ids(state.node, request)
    return max((state.gpu_free[gpu_id] for gpu_id in accepted if gpu_id in state.gpu_free), default=0)


def _gpus_suffice(state: NodeState, request: Request) -> bool:
    return len(state.eligible_gpus(request)) >= request.gpus


def lack_of(states: list[NodeState], request: Request, *, ever: bool = False) -> str:
    """Describe the resource that is short, on the server with most of it: free, or with `ever` in total.

    Empty if with `ever` no single resource is short.
    """
    free = "" if ever else " free"
    if not ever and request.gpus and not any(_gpus_suffice(state, request) for state in states):
        best = max(states, key=lambda state: most_free(state, request))
        unit = "" if request.gpu_milli == MILLI_PER_GPU else " milli"
        return f"{most_free(best, request)}{unit} free"
    for name, amount in request.resources.items():

        def has(state: NodeState, name: str = name) -> float:
            return (state.node.resources if ever else state.free).get(name, 0)

        best = max(states, key=has)
        if has(best) < amount:
            return f"the most {short(name)}{free} is {max(has(best), 0):g} on {short(best.name)}"
    return "" if ever else f"no server has {'both' if _parts(request) == 2 else 'all of it'} free at once"


def kind_of_closed(states: Iterable[NodeState]) -> RefusalKind:
    """Return the kind of a refusal by these closed servers: not searched, missing, or in maintenance."""
    states = list(states)
    if any(awaits_restore(state.drained) for state in states):
        return RefusalKind.RECOVERING
    is_missing = any(
        state.silent is not None or (isinstance(state.drained, ClosedToRequest) and state.drained.failed)
        for state in states
    )
    return RefusalKind.NO_CAPACITY if is_missing else RefusalKind.MAINTENANCE


def silence_of(state: NodeState) -> str:
    """Return since when the server's agent is silent, `silent since 2026-12-01T14:03Z`, or nothing."""
    return "" if state.silent is None else f"silent since {to_the_minute(state.silent.since)}"


def closed_servers(states: list[NodeState], request: Request) -> str:
    """Describe the closed servers or GPUs: `s3 has 8 but is drained: broken fan`."""
    parts = []
    for state in states[:MAX_TYPES]:
        has = "could take it"
        if request.gpus:
            unit = "" if request.gpu_milli == MILLI_PER_GPU else " milli"
            has = f"has {most_free(state, request)}{unit}"
        if state.is_open:
            reasons = withheld(state, state.closed_gpus.keys() & accepted_gpu_ids(state.node, request))
            parts.append(f"{short(state.name)} {has} but {'; '.join(map(short, reasons))}")
            continue
        drained = state.drained
        if isinstance(drained, ClosedToRequest):
            parts.append(
                f"{short(state.name)} {has} but is closed to it: {short(drained.reason, MAX_REASON)}"
            )
            continue
        if drained is None and state.silent is not None:
            parts.append(f"{short(state.name)} {has} but has been {silence_of(state)}")
            continue
        closed = "marked as failed" if drained is not None and drained.failed else "drained"
        why = f": {short(drained.reason)}" if drained is not None and drained.reason else ""
        parts.append(f"{short(state.name)} {has} but is {closed}{why}")
    if len(states) > MAX_TYPES:
        parts.append(f"{len(states) - MAX_TYPES} more are closed")
    return "; ".join(parts)


def _fits_without(state: NodeState, gone: Collection[Lease], request: Request) -> bool:
    """Return True if the request would fit the node if it were open and the leases in `gone` had ended."""
    free = state.capacity_without_leases
    for lease in state.leases.values():
        if lease not in gone:
            for member in lease.on(state.name):
                free = free.minus(lease.request, state.gpu_ids_of(member))
    return fits(state.node, request, free)
