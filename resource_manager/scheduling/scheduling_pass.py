"""Circumstances of one decision, which every step of scheduling is given as one value."""

from __future__ import annotations

from dataclasses import dataclass

from resource_manager.core.cluster import ClusterState
from resource_manager.core.cluster_settings import MAINTENANCE_GUARD_S
from resource_manager.core.direct_init import direct_init
from resource_manager.core.models import Request
from resource_manager.core.refusal import Grounds
from resource_manager.scheduling.placement.gangs import Members
from resource_manager.scheduling.placement.policies import Policy
from resource_manager.scheduling.queue.orders import QueueDiscipline
from resource_manager.scheduling.queue.price_admission import PriceAdmission


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on who may start beside the capacity, by the settings of the cluster.

    With `admission`, a request whose utility does not exceed its price stays pending although it fits, and
    blocks no other. `maintenance_guard_s` is what an unknown runtime counts as before a maintenance window.
    """

    admission: PriceAdmission | None = None
    maintenance_guard_s: float = MAINTENANCE_GUARD_S


NO_LIMITS = Limits()


@direct_init
@dataclass(frozen=True, slots=True)
class SchedulingPass:
    """Circumstances of a decision: placement policy, queue order, time, and what keeps from starting.

    `now` is in seconds of the store's clock. `suspended` is why nothing is granted or preempted, for example
    a recovery window; None where grants go on.
    """

    policy: Policy
    order: QueueDiscipline
    now: float
    suspended: Grounds | None = None
    limits: Limits = NO_LIMITS

    def admits(self, cluster: ClusterState, request: Request, members: Members, queued_at: float) -> bool:
        """Return True if the request, which fits these placements, may start there."""
        admission = self.limits.admission
        return admission is None or admission.admits(cluster, request, members, queued_at, self.now)
