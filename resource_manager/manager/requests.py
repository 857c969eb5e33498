"""Conversion of a `Demand` to a `Request` on the servers there are: ranges, names of servers, repeats."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from datetime import datetime
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any

from resource_manager import errors
from resource_manager.core.cluster import ClusterState
from resource_manager.core.identifiers import check_names
from resource_manager.core.models import (
    MILLI_PER_GPU,
    Link,
    Request,
    Spread,
    TypeChoice,
    Utility,
    has_stored_job,
)
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.commit.asking import asking
from resource_manager.manager.commit.protocol import Transactions
from resource_manager.manager.demand import Demand
from resource_manager.manager.request_words import describe
from resource_manager.storage.codec import as_stored
from resource_manager.words import Words

BUILT_IN = default_inventory()
BUILT_IN_GPUS = (2, 8)
"""The original's servers, and the minimum and maximum of GPUs that a task may request there."""

_PLAIN = re.compile("[!-~]*").fullmatch
_NAMES = ("lease_id", "team", "owner", "vendor", "same", "prefer_same")
_names_in = attrgetter(*_NAMES)

_SHARED = {
    each.name: name
    for each in fields(Request)
    if (name := each.name.removesuffix("_s")) in Demand.model_fields
}
"""Fields of a `Request` -> those of the same meaning in a `Demand`, where a duration has no unit."""

REQUEST_NAMES = {
    **_SHARED,
    "target_s": "target",
    "sensitivity_per_s": "sensitivity",
    "deadline_at": "deadline",
}
"""Names of a `Request` and its utility -> those of a `Demand`."""

_OTHERS = {"lease_id", "resources", "utility", "ttl"}
_FIELDS = {name: field for field, name in _SHARED.items() if name not in _OTHERS}
"""Fields of a `Demand` -> those of a `Request` with the same default; the others need a look at more."""

_KINDS: dict[str, Callable[[Any], object]] = {
    "gpu_types": tuple,
    "types": TypeChoice,
    "link": Link,
    "spread": Spread,
}
"""Fields whose values a `Request` has as another type."""


def request_of(commits: Transactions, demand: Demand) -> Request:
    """Return the request of a demand on the servers of the replica, as who asks may make it."""
    who = asking()
    is_operator = who is not None and who.is_operator

    known = commits.known()
    if known is not None and not isinstance(demand.deadline, float):  # that counts by the store's clock
        try:
            return build_request(demand, known, is_operator=is_operator)
        except errors.InvalidRequestError:  # it may be older than the cluster that takes it
            pass
    return commits.read(lambda cluster, now: build_request(demand, cluster, now, is_operator=is_operator))


def build_request(
    demand: Demand, cluster: ClusterState, now: float = 0.0, *, is_operator: bool = False
) -> Request:
    """Return the request of this demand on these servers; raises `InvalidRequestError` (a `ValueError`).

    A deadline that is a duration begins `now`. The priority of an operator's is free; others have a
    `PriorityError` above `max_priority`. `gpus` must be in `gpu_range`, or 1 with a GPU fraction; `cpus` at
    most those of the largest server.
    """
    if not cluster.nodes:
        raise errors.NoServersError
    settings = cluster.settings
    try:
        if demand.gpu_milli == MILLI_PER_GPU:
            _check_gpus(cluster, demand.gpus)
        if demand.priority > 0 and not is_operator:
            _check_priority(cluster, demand)
        most_cpus = cluster.largest.get("cpus", 0)
        if not 1 <= demand.cpus <= most_cpus:
            text = "{cpus} must be between 1 and {:g} (what the largest server has), got {}"
            raise errors.InvalidRequestError(text, most_cpus, demand.cpus)
        prefer, server = demand.prefer_server, demand.server
        request = Request(
            demand.lease_id,  # given or not: that of a question has a default
            resources={**demand.resources, "cpus": demand.cpus},
            preferred_node=None if prefer is None else server_name(cluster, prefer, "prefer_server"),
            required_node=None if server is None else server_name(cluster, server, "server"),
            ttl_s=settings.lease_ttl_s if demand.ttl is None else demand.ttl,
            utility=_utility(demand),
            deadline_at=_deadline_at(demand, now),
            **_given(demand),
        )
        return request if _is_plain(request) else _checked(request)
    except errors.InvalidRequestError as error:
        error.rename({**REQUEST_NAMES, **demand.names})
        raise


@cache
def _own_defaults(kind: type[Demand]) -> frozenset[str]:
    """Return the fields of which a subclass of `Demand` has another default."""
    known = Demand.model_fields
    return frozenset(
        name
        for name, own in kind.model_fields.items()
        if name in known
        and (own.default, own.default_factory) != (known[name].default, known[name].default_factory)
    )


def _given(demand: Demand) -> dict[str, Any]:
    """Return what was given of the fields that a request has too: with all it would take twice as long."""
    given: dict[str, Any] = {}
    for name in demand.model_fields_set | _own_defaults(type(demand)):
        if name in _FIELDS:
            kind = _KINDS.get(name)
            value = getattr(demand, name)
            given[_FIELDS[name]] = value if kind is None else kind(value)
    return given


def check_limits(demand: Demand) -> None:
    """Raise `InvalidRequestError` for a runtime limit within the grace, whatever servers there are."""
    try:
        Request(
            demand.lease_id,
            preempt_grace_s=demand.preempt_grace,
            max_runtime_s=demand.max_runtime,
            requeue_after_s=demand.requeue_after,
        )
    except errors.InvalidRequestError as error:
        error.rename({**REQUEST_NAMES, **demand.names})
        raise


def _deadline_at(demand: Demand, now: float) -> float | None:
    if isinstance(demand.deadline, datetime):
        return demand.deadline.timestamp()
    return None if demand.deadline is None else now + demand.deadline


def gpu_range(cluster: ClusterState) -> tuple[int, int]:
    """Return the minimum and maximum of whole GPUs a task may request, by stored inventory and settings."""
    settings = cluster.settings
    is_built_in, largest = _inventory_limits(cluster)
    least, most = BUILT_IN_GPUS if is_built_in else (1, max(largest, 1))
    if settings.max_gpus is not None:
        most = settings.max_gpus
        least = min(least, most)
    if settings.min_gpus is not None:
        least = settings.min_gpus
        most = max(least, most)
    return least, most


def _inventory_limits(cluster: ClusterState) -> tuple[bool, int]:
    """Return whether the inventory is the built-in one, and the GPUs of its largest server.

    Computed once for each inventory: every inventory gives the cluster a new `largest`.
    """
    known = cluster.policy_cache.get(_inventory_limits)
    if known is None or known[0] is not cluster.largest:
        nodes = cluster.inventory
        largest = max((len(node.gpus) for node in nodes), default=0)
        known = cluster.policy_cache[_inventory_limits] = (cluster.largest, nodes == BUILT_IN, largest)
    return known[1], known[2]


def _check_gpus(cluster: ClusterState, gpus: int) -> None:
    settings = cluster.settings
    least, most = gpu_range(cluster)
    if least <= gpus <= most:
        return
    is_built_in, largest = _inventory_limits(cluster)
    if gpus < least:
        setting, is_set, may_help = "min_gpus of the cluster", settings.min_gpus is not None, gpus >= 0
    else:
        setting, is_set, may_help = "max_gpus of the cluster", settings.max_gpus is not None, gpus <= largest
    if is_set:
        why = f"set by {setting}"
    else:
        why = "the inventory is the built-in one" if is_built_in else f"the largest server has {largest}"
        if may_help:
            why += f"; {setting} sets another limit"
    if least == most:
        raise errors.InvalidRequestError("{gpus} must be {}, got {} ({})", least, gpus, why)
    raise errors.InvalidRequestError("{gpus} must be between {} and {} ({}), got {}", least, most, why, gpus)


def _check_priority(cluster: ClusterState, demand: Demand) -> None:
    team = next((team for team in cluster.teams.teams if team.name == demand.team), None)
    most, whose = cluster.settings.max_priority, "the cluster"
    if team is not None and team.max_priority is not None:
        most, whose = team.max_priority, f"team {team.name}"
    if demand.priority > most:
        text = "{priority} must be at most {} (max_priority of {}), got {}"
        raise errors.PriorityError(most, text, most, whose, demand.priority)


def _is_plain(request: Request) -> bool:
    """Return True for a request that `_checked` would only copy, as most are.

    Its names are short, of visible ASCII characters, and it has neither lists nor mappings besides the CPUs.
    """
    is_more = request.gpu_types or request.labels or request.labels_required or len(request.resources) > 1
    return not is_more and all(map(_PLAIN, _names_in(request)))


def _checked(request: Request) -> Request:
    """Return the request as it is read back; raises `InvalidRequestError` if it must not be stored.

    A request that other processes could not read would lock all of them out of the state, and a name must
    not be able to forge a log line. No caller states that a request has a stored job: under its id
    the job of another may be stored still.
    """
    single = {field: (name,) for field, name in zip(_NAMES, _names_in(request), strict=True)}
    several = {
        "gpu_types": request.gpu_types,
        "resources": request.resources,
        "labels": chain.from_iterable(request.labels.items()),
        "labels_required": chain.from_iterable(request.labels_required.items()),
    }
    check_names({**single, **several})
    if has_stored_job(request.labels):
        raise errors.InvalidRequestError(
            "{labels} may not have job=stored: it says that a job came with the request"
        )
    return as_stored(request)


def server_name(cluster: ClusterState, server: int | str, field: str | None = None) -> str:
    """Return the name of the server with this name or number; raises `UnknownNodeError` with that field.

    A number may be text, as from templates, forms and command-line options.
    """
    state = None
    if isinstance(server, str):
        state = cluster.by_name.get(server)
        if state is None and server.isascii() and server.isdecimal() and len(server) < 10:
            state = cluster.by_server_id.get(int(server))
    elif not isinstance(server, bool):
        state = cluster.by_server_id.get(server)
    if state is None:
        raise errors.UnknownNodeError(server, cluster.by_name, field=field)
    return state.name


def gpu_number(cluster: ClusterState, node: str, gpu: int | str) -> int:
    """Return the number of the node's GPU with this number or UUID; raises `InvalidRequestError`."""
    text = str(gpu)
    for each in cluster.node(node).node.gpus:
        if text == str(each.gpu_id) or (each.uuid and text == each.uuid):
            return each.gpu_id
    said = "server {} has no GPU {!r}: name its number or UUID"
    raise errors.InvalidRequestError(said, node, text[:60], field="gpu")


def is_repeat(cluster: ClusterState, request: Request) -> bool:
    """Return True if this very request holds a lease or is pending.

    Raises `DuplicateTaskError` for another request, and for a revoked lease, under which nobody may begin.
    """
    lease = cluster.leases.get(request.lease_id)
    pending = cluster.pending.get(request.lease_id)
    if lease is None and pending is None:
        return False
    before = lease.request if lease is not None else pending.request  # type: ignore[union-attr]
    if before.owner != request.owner:
        raise errors.DuplicateTaskError(request.lease_id, "belongs to another owner: use another task id")
    if lease is not None and lease.revoked:
        raise errors.DuplicateTaskError(
            request.lease_id,
            "has a lease that nobody can renew, whose job may still run: release it once none does, or use "
            "another task id",
        )
    if before.shape != request.shape:
        verb = "holds" if lease is not None else "waits for"
        raise errors.DuplicateTaskError(
            request.lease_id,
            f"already {verb} {describe(before)}; release it before asking for {describe(request)}",
        )
    return True


def _utility(demand: Demand) -> Utility | None:
    if demand.utility is None:
        for name, value in (("target", demand.target), ("sensitivity", demand.sensitivity)):
            if value:
                raise errors.InvalidRequestError(
                    "{} needs {utility} as well", Words.parameter(name), field="utility"
                )
        return None
    if demand.target is None:
        raise errors.InvalidRequestError("{utility} needs {target} as well", field="target")
    return Utility(demand.utility, demand.target, demand.sensitivity)
