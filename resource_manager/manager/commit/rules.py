"""Rules by which a state is scheduled: policy and order of its settings, looked up in this process."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from resource_manager.core.cluster import ClusterState
from resource_manager.core.cluster_settings import ClusterSettings
from resource_manager.core.refusal import Grounds, misconfigured
from resource_manager.errors import PolicyError
from resource_manager.scheduling.placement.policies import Policy, get_policy
from resource_manager.scheduling.placement.policies.first_fit import first_fit
from resource_manager.scheduling.queue.orders import QueueDiscipline, get_order, priority
from resource_manager.scheduling.queue.price_admission import PriceAdmission
from resource_manager.scheduling.scheduling_pass import Limits, SchedulingPass


@dataclass(frozen=True, slots=True)
class Rules:
    """Policy, order and limits of a cluster; with `refusal` this process lacks one and grants nothing."""

    policy: Policy
    order: QueueDiscipline
    limits: Limits
    refusal: Grounds | None = None

    def at(self, now: float, suspended: Grounds | None = None) -> SchedulingPass:
        """Return the circumstances of a decision at that time."""
        return SchedulingPass(self.policy, self.order, now, suspended or self.refusal, self.limits)


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
        policy: Policy = first_fit
        order = priority
        try:
            order = get_order(settings.order)
            policy = get_policy(settings.policy)
        except PolicyError as error:
            package = settings.policy_package or "another version of this software"
            refusal = misconfigured(f"{error}: install {package} where process {_this_process()} runs")
        return Rules(policy, order, Limits(price_admission(settings), settings.maintenance_guard_s), refusal)


def price_admission(settings: ClusterSettings) -> PriceAdmission | None:
    """Return the prices to admit by; None where admission is open."""
    if settings.admission == "open" or settings.price_low is None or settings.price_high is None:
        return None
    return PriceAdmission(settings.price_low, settings.price_high)


def _this_process() -> str:
    return f"{os.getpid()} on {socket.gethostname()}"
