"""Rules by which a state is scheduled: policy and order of its settings, looked up in this process."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, replace

from resource_manager.core.cluster import ClusterState
from resource_manager.core.cluster_settings import ClusterSettings
from resource_manager.core.refusal import Refusal, misconfigured
from resource_manager.errors import PolicyError
from resource_manager.scheduling.policies import Policy, get_policy, nothing_fits
from resource_manager.scheduling.price_admission import PriceAdmission
from resource_manager.scheduling.queue_order import QueueDiscipline, get_order, priority


@dataclass(frozen=True, slots=True)
class Rules:
    """Policy and order of a cluster; with `refusal` this process lacks one of them and grants nothing."""

    policy: Policy
    order: QueueDiscipline
    refusal: Refusal | None = None


class RuleBook:
    """Rules of the settings that were used last; thread-safe."""

    def __init__(self) -> None:
        settings = ClusterSettings()
        self._last = settings, self._look_up(settings)

    def of(self, cluster: ClusterState) -> Rules:
        """Return the rules of the state's settings."""
        settings, rules = self._last
        if cluster.settings is not settings:  # identity first: comparing the values costs 2 us a call
            if cluster.settings != settings:
                rules = self._look_up(cluster.settings)
            self._last = cluster.settings, rules
        return rules

    def _look_up(self, settings: ClusterSettings) -> Rules:
        refusal = None
        policy: Policy = nothing_fits
        order = priority
        try:
            order = get_order(settings.order)
            policy = get_policy(settings.policy)
        except PolicyError as error:
            package = settings.policy_package or "another version of this software"
            refusal = misconfigured(f"{error}: install {package} where process {_this_process()} runs")
        order = replace(
            order,
            admission=price_admission(settings),
            maintenance_guard_s=settings.maintenance_guard_s,
        )
        return Rules(policy, order, refusal)


def price_admission(settings: ClusterSettings) -> PriceAdmission | None:
    """Return the prices to admit by; None where admission is open."""
    if settings.admission == "open" or settings.price_low is None or settings.price_high is None:
        return None
    return PriceAdmission(settings.price_low, settings.price_high)


def _this_process() -> str:
    return f"{os.getpid()} on {socket.gethostname()}"
