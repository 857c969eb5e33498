"""From what a caller asks for to a `Request`: ranges, names of servers, and asking twice for the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TypedDict

from resource_manager import allocator
from resource_manager.cluster import ClusterState
from resource_manager.errors import DuplicateTaskError, InvalidRequestError, UnknownNodeError
from resource_manager.models import MAX_PRIORITY, MILLI_PER_GPU, Amount, Request, Utility, check_printable
from resource_manager.schemas import as_stored
from resource_manager.settings import Settings


class RequestOptions(TypedDict, total=False):
    """What a request may say beyond the original's four arguments; see `models.Request`."""

    gpu_milli: int
    gpu_types: Sequence[str]
    vendor: str
    resources: Mapping[str, Amount] | None
    priority: int
    team: str
    owner: str
    ttl_s: float | None
    required_server: int | str | None
    quarantine: bool
    labels: Mapping[str, str] | None
    expected_runtime_s: float | None
    utility: float | None
    target_s: float | None
    sensitivity_per_s: float


def build_request(
    cluster: ClusterState,
    settings: Settings,
    task_id: str,
    required_gpus: int,
    required_cpus: int,
    prefer_server_id: int | str | None = None,
    *,
    gpu_milli: int = MILLI_PER_GPU,
    gpu_types: Sequence[str] = (),
    vendor: str = "",
    resources: Mapping[str, Amount] | None = None,
    priority: int = 0,
    team: str = "",
    owner: str = "",
    ttl_s: float | None = None,
    required_server: int | str | None = None,
    quarantine: bool = False,
    labels: Mapping[str, str] | None = None,
    expected_runtime_s: float | None = None,
    utility: float | None = None,
    target_s: float | None = None,
    sensitivity_per_s: float = 0.0,
) -> Request:
    """The request these arguments name; raises `InvalidRequestError` (a `ValueError`) if out of range.

    `required_gpus` lies in the settings' range (2 to 8), or is 1 with a share `gpu_milli` below 1000;
    `required_cpus` is at least 1 and at most what the largest server has. `utility` (with `target_s`,
    `sensitivity_per_s` and `expected_runtime_s`) is what finishing in good time is worth, see
    `models.Utility`; it matters under admission by price.
    """
    _check_whole(
        required_gpus=required_gpus, required_cpus=required_cpus, gpu_milli=gpu_milli, priority=priority
    )
    if gpu_milli == MILLI_PER_GPU and not settings.min_gpus <= required_gpus <= settings.max_gpus:
        raise InvalidRequestError(
            f"required_gpus must be between {settings.min_gpus} and {settings.max_gpus}, got {required_gpus}",
            field="required_gpus",
        )
    most_cpus = cluster.largest.get("cpus", 0)
    if not 1 <= required_cpus <= most_cpus:
        raise InvalidRequestError(
            f"required_cpus must be between 1 and {most_cpus:g}, got {required_cpus}",
            field="required_cpus",
        )
    preferred_node, required_node = (
        None if server is None else server_name(cluster, server, field)
        for field, server in (("prefer_server_id", prefer_server_id), ("required_server", required_server))
    )
    request = Request(
        task_id=task_id,
        gpus=required_gpus,
        gpu_milli=gpu_milli,
        resources={**(resources or {}), "cpus": required_cpus},
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


def checked(request: Request) -> Request:
    """The request as it will be read again; raises `InvalidRequestError` if it must not get into a store.

    What no other process could read again would lock all of them out of the state, and a name must not be
    able to forge a line of a log.
    """
    names = {name: getattr(request, name) for name in ("task_id", "team", "owner", "vendor")}
    several = {
        "gpu_types": request.gpu_types,
        "resources": request.resources,
        "labels": chain.from_iterable(request.labels.items()),
    }
    check_printable({**names, **{name: "".join(texts) for name, texts in several.items()}})
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
    """The name of the server with this name or number; raises `UnknownNodeError`, about that field."""
    state = (
        cluster.by_name.get(server)
        if isinstance(server, str)
        else None
        if isinstance(server, bool)
        else cluster.by_server_id.get(server)
    )
    if state is None:
        raise UnknownNodeError(server, len(cluster.nodes), field=field)
    return state.name


def same_as_before(cluster: ClusterState, request: Request) -> bool:
    """Whether the task already holds or waits for just this; raises `DuplicateTaskError` if for another."""
    lease = cluster.leases.get(request.task_id)
    waiting = cluster.waiting.get(request.task_id)
    if lease is None and waiting is None:
        return False
    before = lease.request if lease is not None else waiting.request  # type: ignore[union-attr]
    if before.shape != request.shape:
        verb = "holds" if lease is not None else "waits for"
        raise DuplicateTaskError(
            request.task_id,
            f"already {verb} {allocator.describe(before)}; release it before asking for "
            f"{allocator.describe(request)}",
        )
    return True


def _utility(priority: float | None, target_s: float | None, sensitivity_per_s: float) -> Utility | None:
    if priority is None:
        if target_s is not None or sensitivity_per_s:
            raise InvalidRequestError(
                "target_s and sensitivity_per_s need utility beside them", field="utility"
            )
        return None
    if target_s is None:
        raise InvalidRequestError("utility needs target_s beside it", field="target_s")
    return Utility(priority, target_s, sensitivity_per_s)
