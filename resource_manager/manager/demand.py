"""Conversion of a caller's arguments to a `Request`: ranges, names of servers, repeated requests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, TypedDict

from resource_manager.core.cluster import ClusterState
from resource_manager.core.identifiers import check_names
from resource_manager.core.models import MAX_PRIORITY, MILLI_PER_GPU, Amount, Request, Utility
from resource_manager.errors import DuplicateTaskError, InvalidRequestError, UnknownNodeError
from resource_manager.manager.inventory_file import default_inventory
from resource_manager.scheduling import allocator
from resource_manager.settings import Settings
from resource_manager.storage.codec import as_stored

BUILT_IN = default_inventory()
BUILT_IN_GPUS = (2, 8)
"""The original's servers, and the minimum and maximum of GPUs that a task may request there."""


class RequestOptions(TypedDict, total=False):
    """Options of a request beyond the original's four arguments; see `models.Request`."""

    gpu_milli: int
    gpu_types: Sequence[str]
    vendor: str
    resources: Mapping[str, Amount] | None
    priority: int
    team: str
    owner: str
    ttl_s: float | None
    server: int | str | None
    quarantine: bool
    labels: Mapping[str, str] | None
    expected_runtime_s: float | None
    utility: float | None
    target_s: float | None
    sensitivity_per_s: float


class AliasedOptions(RequestOptions, total=False):
    """The same options, with the original's names of `lease_id`, `gpus`, `cpus` and `prefer_server`."""

    task_id: str | None
    required_gpus: int | None
    required_cpus: int | None
    prefer_server_id: int | str | None


def build_request(
    cluster: ClusterState,
    settings: Settings,
    lease_id: str | None = None,
    gpus: int | None = None,
    cpus: int | None = None,
    prefer_server: int | str | None = None,
    *,
    task_id: str | None = None,
    required_gpus: int | None = None,
    required_cpus: int | None = None,
    prefer_server_id: int | str | None = None,
    gpu_milli: int = MILLI_PER_GPU,
    gpu_types: Sequence[str] = (),
    vendor: str = "",
    resources: Mapping[str, Amount] | None = None,
    priority: int = 0,
    team: str = "",
    owner: str = "",
    ttl_s: float | None = None,
    server: int | str | None = None,
    quarantine: bool = False,
    labels: Mapping[str, str] | None = None,
    expected_runtime_s: float | None = None,
    utility: float | None = None,
    target_s: float | None = None,
    sensitivity_per_s: float = 0.0,
) -> Request:
    """Return the request of these arguments; raises `InvalidRequestError` (a `ValueError`) if out of range.

    `gpus` is in `gpu_range`, or 1 with a GPU fraction `gpu_milli` below 1000; `cpus` is at least 1, the
    default, and at most that of the largest server. `task_id`, `required_gpus`, `required_cpus` and
    `prefer_server_id` are the original's names; errors use the name that was given. `utility` (with
    `target_s`, `sensitivity_per_s` and `expected_runtime_s`) is the value of finishing in time, see
    `models.Utility`; it matters under admission by price.
    """
    id_name, lease_id = _one_of_aliases("lease_id", lease_id, "task_id", task_id)
    if lease_id is None:
        raise InvalidRequestError(f"{id_name} is missing", field=id_name)
    gpus_name, gpus = _one_of_aliases("gpus", gpus, "required_gpus", required_gpus)
    cpus_name, cpus = _one_of_aliases("cpus", cpus, "required_cpus", required_cpus)
    prefer_name, prefer_server = _one_of_aliases(
        "prefer_server", prefer_server, "prefer_server_id", prefer_server_id
    )
    if gpus is None:
        raise InvalidRequestError("gpus is missing", field="gpus")
    if cpus is None:
        cpus = 1
    if not isinstance(gpus, int) or isinstance(gpus, bool):
        raise InvalidRequestError(
            f"{gpus_name} must be a whole number, got {gpus!r}{fraction_advice(gpus, gpus_name)}",
            field=gpus_name,
        )
    _check_whole(**{cpus_name: cpus, "gpu_milli": gpu_milli, "priority": priority})
    if gpu_milli == MILLI_PER_GPU:
        _check_gpus(cluster, settings, gpus_name, gpus)
    most_cpus = cluster.largest.get("cpus", 0)
    if not 1 <= cpus <= most_cpus:
        raise InvalidRequestError(
            f"{cpus_name} must be between 1 and {most_cpus:g} (what the largest server has), got {cpus}",
            field=cpus_name,
        )
    preferred_node = None if prefer_server is None else server_name(cluster, prefer_server, prefer_name)
    required_node = None if server is None else server_name(cluster, server, "server")
    try:
        request = Request(
            lease_id=lease_id,
            gpus=gpus,
            gpu_milli=gpu_milli,
            resources={**(resources or {}), "cpus": cpus},
            gpu_types=tuple(gpu_types),
            vendor=vendor,
            preferred_node=preferred_node,
            required_node=required_node,
            priority=priority,
            team=team,
            owner=owner,
            ttl_s=settings.lease_ttl_s if ttl_s is None else ttl_s,
            expected_runtime_s=expected_runtime_s,
            quarantine=quarantine,
            labels=dict(labels or {}),
            utility=_utility(utility, target_s, sensitivity_per_s),
        )
        return checked(request)
    except InvalidRequestError as error:
        if error.field != "lease_id" or error.field == id_name:
            raise
        raise InvalidRequestError(error.named({"lease_id": id_name}), field=id_name) from None


def gpu_range(cluster: ClusterState, settings: Settings) -> tuple[int, int]:
    """Return the minimum and maximum of whole GPUs a task may request, by stored inventory and settings."""
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
        nodes = tuple(state.node for state in cluster.nodes if not state.retired)
        largest = max((len(node.gpus) for node in nodes), default=0)
        known = cluster.policy_cache[_inventory_limits] = (cluster.largest, nodes == BUILT_IN, largest)
    return known[1], known[2]


def _check_gpus(cluster: ClusterState, settings: Settings, name: str, gpus: int) -> None:
    least, most = gpu_range(cluster, settings)
    if least <= gpus <= most:
        return
    is_built_in, largest = _inventory_limits(cluster)
    if gpus < least:
        setting, is_set, may_help = "GPU_MANAGER_MIN_GPUS", settings.min_gpus is not None, gpus >= 0
    else:
        setting, is_set, may_help = "GPU_MANAGER_MAX_GPUS", settings.max_gpus is not None, gpus <= largest
    if is_set:
        why = f"set by {setting}"
    else:
        why = "the inventory is the built-in one" if is_built_in else f"the largest server has {largest}"
        if may_help:
            why += f"; {setting} sets another limit"
    if least == most:
        raise InvalidRequestError(f"{name} must be {least}, got {gpus} ({why})", field=name)
    raise InvalidRequestError(f"{name} must be between {least} and {most} ({why}), got {gpus}", field=name)


def fraction_advice(wanted: object, name: str = "gpus") -> str:
    """Return advice to request that GPU fraction, as the end of a message; empty if it is not a fraction."""
    try:
        milli = round(MILLI_PER_GPU * float(wanted))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return ""
    return f"; that GPU fraction is {name}=1, gpu_milli={milli}" if 0 < milli < MILLI_PER_GPU else ""


def _one_of_aliases(name: str, value: Any, original: str, original_value: Any) -> tuple[str, Any]:
    """Return the name used and its value; raises `InvalidRequestError` if both were given and differ."""
    if original_value is None:
        return name, value
    if value is not None and value != original_value:
        raise InvalidRequestError(
            f"{name}={value!r} and {original}={original_value!r} are two values of one option: give one",
            field=name,
        )
    return original, original_value


def checked(request: Request) -> Request:
    """Return the request as it is read back; raises `InvalidRequestError` if it must not be stored.

    A request that other processes could not read would lock all of them out of the state, and a name must
    not be able to forge a log line.
    """
    single = {name: (getattr(request, name),) for name in ("lease_id", "team", "owner", "vendor")}
    several = {
        "gpu_types": request.gpu_types,
        "resources": request.resources,
        "labels": chain.from_iterable(request.labels.items()),
    }
    check_names({**single, **several})
    runtime_s = request.expected_runtime_s
    if runtime_s is not None and not 0 < runtime_s < math.inf:
        raise InvalidRequestError(
            f"expected_runtime_s must be a finite number above 0, got {runtime_s}", field="expected_runtime_s"
        )
    stored = as_stored(request)
    if abs(stored.priority) > MAX_PRIORITY:
        raise InvalidRequestError(
            f"priority must be between -{MAX_PRIORITY} and {MAX_PRIORITY}", field="priority"
        )
    return stored


def _check_whole(**numbers: object) -> None:
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidRequestError(f"{name} must be a whole number, got {value!r}", field=name)


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
        raise UnknownNodeError(server, len(cluster.nodes), field=field)
    return state.name


def is_repeat(cluster: ClusterState, request: Request) -> bool:
    """Return True if this very request holds a lease or is pending; another is a `DuplicateTaskError`."""
    lease = cluster.leases.get(request.lease_id)
    pending = cluster.pending.get(request.lease_id)
    if lease is None and pending is None:
        return False
    before = lease.request if lease is not None else pending.request  # type: ignore[union-attr]
    if before.owner != request.owner:
        raise DuplicateTaskError(
            request.lease_id, "belongs to another owner: use another task id", owner=before.owner
        )
    if before.shape != request.shape:
        verb = "holds" if lease is not None else "waits for"
        raise DuplicateTaskError(
            request.lease_id,
            f"already {verb} {allocator.describe(before)}; release it before asking for "
            f"{allocator.describe(request)}",
        )
    return True


def _utility(priority: float | None, target_s: float | None, sensitivity_per_s: float) -> Utility | None:
    if priority is None:
        if target_s is not None or sensitivity_per_s:
            raise InvalidRequestError("target_s and sensitivity_per_s need utility as well", field="utility")
        return None
    if target_s is None:
        raise InvalidRequestError("utility needs target_s as well", field="target_s")
    return Utility(priority, target_s, sensitivity_per_s)
