"""Operations on servers, teams and the cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from resource_manager.core.models import Gpu
from resource_manager.errors import UNKNOWN_SERVER, UnknownNodeError
from resource_manager.manager.cluster_change import ApplyOptions
from resource_manager.manager.cluster_results import (
    ClusterDiff,
    ClusterView,
    ServerDetail,
    ServerSummary,
    TeamsView,
    WindowView,
)
from resource_manager.rest import schemas
from resource_manager.rest.answers import Done, MaintenanceAnswer, MaintenanceRemoveAnswer
from resource_manager.rest.api.operations import routes
from resource_manager.rest.auth import Identity
from resource_manager.rest.problems import ProblemError
from resource_manager.rest.service import Service
from resource_manager.rest.tokens import Role
from resource_manager.storage.once import Once

T = TypeVar("T")

MAX_CLUSTER_BYTES = 16 * 1024 * 1024
"""Maximum size of the definition of a cluster, enough for the servers of the largest."""


@routes.add("POST", "/api/servers/<int:server_id>/drain", Role.OPERATOR, failures=(404,), tag="servers")
def drain(
    service: Service, caller: Identity, body: schemas.DrainBody, server_id: int, once: Once | None = None
) -> ServerSummary:
    """Drain a server or one of its GPUs: it takes no new leases."""
    return _server(
        lambda: service.manager.drain(server_id, body.gpu, reason=body.reason, failed=body.failed, once=once)
    )


@routes.add("POST", "/api/servers/<int:server_id>/resume", Role.OPERATOR, failures=(404,), tag="servers")
def resume(
    service: Service, caller: Identity, body: schemas.ResumeBody, server_id: int, once: Once | None = None
) -> ServerSummary:
    """Resume a drained server or a closed GPU: it takes new leases again."""
    return _server(lambda: service.manager.resume(server_id, body.gpu, once=once))


@routes.add("POST", "/api/servers/<int:server_id>/searched", Role.OPERATOR, failures=(404,), tag="servers")
def searched(
    service: Service, caller: Identity, body: schemas.SearchedBody, server_id: int, once: Once | None = None
) -> ServerSummary:
    """All jobs that a launcher saw on a server: closed since a restore, it opens if each has its lease."""
    return _server(lambda: service.manager.searched(server_id, body.jobs, age_s=body.age_s, once=once))


@routes.add("GET", "/api/servers/<int:server_id>", Role.READER, failures=(404,), tag="servers")
def server(service: Service, caller: Identity, server_id: int) -> ServerDetail:
    """One server with its GPUs and the leases on each."""
    return _server(lambda: service.manager.server(server_id))


@routes.add("POST", "/api/servers/<int:server_id>/adopt", Role.OPERATOR, failures=(404, 409), tag="servers")
def adopt(
    service: Service, caller: Identity, body: schemas.AdoptBody, server_id: int, once: Once | None = None
) -> ServerDetail:
    """Replace the GPUs of a server without leases in the inventory."""
    gpus = [Gpu(gpu.gpu_id, gpu.type, gpu.vendor, gpu.memory_mib, gpu.uuid) for gpu in body.gpus]
    return _server(lambda: service.manager.adopt(server_id, gpus, once=once))


@routes.add("POST", "/api/reset", Role.OPERATOR, tag="servers")
def reset(service: Service, caller: Identity, body: schemas.ResetBody, once: Once | None = None) -> Done:
    """End all leases and empty the queue."""
    service.manager.reset(once=once)
    return {"success": True}


@routes.add("GET", "/api/teams", Role.READER, tag="teams")
def teams(service: Service, caller: Identity) -> TeamsView:
    """Rules of the teams, and what each holds."""
    return service.manager.teams()


@routes.add("GET", "/api/cluster", Role.READER, tag="cluster")
def cluster(service: Service, caller: Identity) -> ClusterView:
    """The stored cluster: settings, servers, teams, windows, as its file has them."""
    return service.manager.cluster()


@routes.add("PUT", "/api/cluster", Role.OPERATOR, failures=(409,), max_bytes=MAX_CLUSTER_BYTES, tag="cluster")
def apply(
    service: Service, caller: Identity, body: schemas.ClusterBody, once: Once | None = None
) -> ClusterDiff:
    """Make the cluster what these sections define, in one commit; a section that is left out stays."""
    options = ApplyOptions(tuple(body.remove), tuple(body.retire), body.force)
    if body.dry_run:
        return service.manager.diff(body.sections, options)
    return service.manager.apply(body.sections, options, revision=body.revision, once=once)


@routes.add("GET", "/api/maintenance", Role.READER, tag="servers")
def maintenance(service: Service, caller: Identity) -> MaintenanceAnswer:
    """Maintenance windows, the next first."""
    return {"windows": service.manager.maintenance()}


@routes.add("POST", "/api/maintenance", Role.OPERATOR, tag="servers")
def add_maintenance(
    service: Service, caller: Identity, body: schemas.MaintenanceBody, once: Once | None = None
) -> WindowView:
    """Add a maintenance window."""
    return service.manager.add_maintenance(body, dry_run=body.dry_run, once=once)


@routes.add("POST", "/api/maintenance/remove", Role.OPERATOR, tag="servers")
def remove_maintenance(
    service: Service, caller: Identity, body: schemas.MaintenanceRemoveBody, once: Once | None = None
) -> MaintenanceRemoveAnswer:
    """Remove a maintenance window."""
    return {"window": service.manager.remove_maintenance(body.id, dry_run=body.dry_run, once=once)}


def _server(change: Callable[[], T]) -> T:
    try:
        return change()
    except UnknownNodeError as error:
        raise ProblemError(404, str(error), kind=UNKNOWN_SERVER, server=error.node) from error
