"""Rules by which a state is scheduled: policy and order of its settings, looked up in this process."""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from resource_manager.core.cluster import ClusterState
from resource_manager.core.cluster_settings import ClusterSettings
from resource_manager.core.models import Placement, Request
from resource_manager.core.refusal import Grounds, misconfigured
from resource_manager.errors import PolicyError
from resource_manager.scheduling.placement.gangs import select_members
from resource_manager.scheduling.placement.policies import Policy, get_policy, package_of, scores_of
from resource_manager.scheduling.placement.policies.first_fit import first_fit
from resource_manager.scheduling.queue.orders import QueueDiscipline, get_order, priority
from resource_manager.scheduling.queue.price_admission import PriceAdmission
from resource_manager.scheduling.scheduling_pass import Limits, SchedulingPass

logger = logging.getLogger(__name__)

FAULT_SHOWN_S = 60.0
"""For so long after a fault of the policy it is a notice, and is logged once."""

OTHER_POLICY = "gpu-manager apply sets another policy"


@dataclass(frozen=True, slots=True)
class WithoutFaults:
    """A policy that has no place for a request for which `policy` fails, so that releases go on."""

    policy: Policy
    note: Callable[[str], None]

    def __call__(self, cluster: ClusterState, request: Request) -> Placement | None:
        try:
            return self.policy(cluster, request)
        except PolicyError as error:
            self.note(str(error))
            return None

    def scores(self, cluster: ClusterState, request: Request) -> dict[str, int]:
        """Return the scores of the policy, none if it fails."""
        try:
            return scores_of(self.policy, cluster, request)
        except PolicyError as error:
            self.note(str(error))
            return {}

    def fault(self, cluster: ClusterState, request: Request) -> str:
        """Return why the policy has no place for a request that fits."""
        try:
            chosen = select_members(cluster, request, self.policy)
        except PolicyError as error:
            return f"{error}; {OTHER_POLICY}"
        return "" if chosen else f"the policy chooses no server for it; {OTHER_POLICY}"


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

    _fault: str
    _failed_at: float

    def __init__(self) -> None:
        settings = ClusterSettings()
        self._last = settings, self._look_up(settings)

    def of(self, cluster: ClusterState) -> Rules:
        settings, rules = self._last
        if cluster.settings is not settings:  # identity first: comparing the values costs 2 us a call
            if cluster.settings != settings:
                rules = self._look_up(cluster.settings)
            self._last = cluster.settings, rules
        return rules

    def refusal(self, cluster: ClusterState) -> Grounds | None:
        """Return why nothing is granted by the state's settings, or not all that fits: its policy failed."""
        refusal = self.of(cluster).refusal
        if refusal is None and time.monotonic() - self._failed_at <= FAULT_SHOWN_S:
            return misconfigured(f"{self._fault}; {OTHER_POLICY}")
        return refusal

    def _note(self, fault: str) -> None:
        if time.monotonic() - self._failed_at > FAULT_SHOWN_S:
            logger.error("%s", fault)
        self._fault, self._failed_at = fault, time.monotonic()

    def _look_up(self, settings: ClusterSettings) -> Rules:
        self._fault, self._failed_at = "", -math.inf
        refusal = None
        policy: Policy = first_fit
        order = priority
        try:
            order = get_order(settings.order)
            policy = get_policy(settings.policy)
            if package_of(settings.policy):
                policy = WithoutFaults(policy, self._note)
        except PolicyError as error:
            package = settings.policy_package or "another version of this software"
            process = f"{os.getpid()} on {socket.gethostname()}"
            refusal = misconfigured(f"{error}: install {package} where process {process} runs")
        return Rules(policy, order, Limits(price_admission(settings), settings.maintenance_guard_s), refusal)


def price_admission(settings: ClusterSettings) -> PriceAdmission | None:
    """Return the prices to admit by; None where admission is open."""
    if settings.admission == "open" or settings.price_low is None or settings.price_high is None:
        return None
    return PriceAdmission(settings.price_low, settings.price_high)
