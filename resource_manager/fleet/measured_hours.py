"""What the servers measured of the leases that they run, for the report of the GPU-hours."""

from __future__ import annotations

from collections.abc import Mapping

from resource_manager.fleet.records import records_of
from resource_manager.manager.queries import Queries
from resource_manager.scheduling.accounting.gpu_hours import Measure, measure_of


def measures_of(manager: Queries) -> Mapping[int, Measure]:
    """Return what the servers measured so far of the leases that they run, by fencing token.

    What they measured of those that have ended is in the history.
    """
    servers = manager.read(lambda cluster, now: [state.name for state in cluster.nodes if state.watched])
    found: dict[int, list[tuple[float, float | None]]] = {}
    for record in records_of(manager.store, servers).values() if servers else ():
        for token, use in record.leases.items():
            if use.busy is not None:
                found.setdefault(token, []).append((use.busy, use.energy_kwh))
    return {token: measure_of(parts) for token, parts in found.items()}
