"""The pool as nodes of the resource manager, and the ledger that allocates them with its allocator."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from resource_manager.core.cluster import ClusterState
from resource_manager.core.fit import could_ever_fit
from resource_manager.core.models import MILLI_PER_GPU, Gpu, Lease, Node, Request
from resource_manager.scheduling import allocator, lease_steps
from resource_manager.scheduling.placement.policies.glb import glb, rank_vendors
from resource_manager.scheduling.queue.orders import fifo
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from simulator.errors import InputError
from simulator.vgpu.scenario import Card, Scenario
from simulator.vgpu.tasks import Profile

DIMENSIONS = ("compute_tflops", "memory_gb", "bandwidth_gbps")
PARTITIONS = "partitions"
"""Resource of which a node has one if tasks must not share the node."""

Amounts = tuple[float, float, float]
"""Compute (TFLOPS), memory (GB) and bandwidth (GB/s)."""


def effective_card(card: Card) -> Amounts:
    """Return the amounts of one card times its coefficients."""
    alpha, beta, gamma = card.coefficients
    return (card.compute_tflops * alpha, card.memory_gb * beta, card.bandwidth_gbps * gamma)


def build_nodes(scenario: Scenario) -> list[Node]:
    """Return the scenario's nodes; the coefficients are applied here, once, to the total of each node."""
    nodes = []
    for server_id, spec in enumerate(scenario.nodes):
        card = scenario.cards[spec.card]
        totals = {
            name: amount * spec.cards for name, amount in zip(DIMENSIONS, effective_card(card), strict=True)
        }
        if scenario.scheduling.partition == "node":
            totals[PARTITIONS] = 1
        nodes.append(
            Node(
                spec.name,
                server_id,
                totals,
                tuple(
                    Gpu(i, spec.card, card.vendor, round(card.memory_gb * 1024)) for i in range(spec.cards)
                ),
                vendor=card.vendor,
                labels={"link_gbps": f"{spec.link_gbps:g}"},
            )
        )
    return nodes


def slices_needed(demand: Amounts, card: Card) -> int:
    """Return the slices of a card that cover the demand; `card.slices` + 1 if not even all of them do."""
    needed = max(
        amount * card.slices / total for amount, total in zip(demand, effective_card(card), strict=True)
    )
    return math.ceil(min(needed - 1e-9, card.slices + 1))  # it may be infinite


class Ledger:
    """Allocated amounts by node, as leases of a `ClusterState`.

    A task is admitted by its quota. With `admission` usage or max the lease is replaced later by one with
    the amounts granted to the task in the last tick: the amounts of a lease never change, so a new lease
    takes its place (same node, next fencing token). Every state is valid in the resource manager too.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        scheduling = scenario.scheduling
        self.cluster = ClusterState(build_nodes(scenario))
        self.policy = partial(
            glb,
            balance=scheduling.balance,
            vendor_fallback=scheduling.vendor_fallback,
            performance=scheduling.performance,
            uncounted=(PARTITIONS,),  # GLB scores the three amounts of the document
        )
        self._requests = {profile.name: self._requests_of(profile) for profile in scenario.profiles}
        for profile in scenario.profiles:
            self._refuse_impossible(profile)

    @property
    def follows_usage(self) -> bool:
        """True if the allocated amounts follow usage; slices stay whole, used or not."""
        scheduling = self.scenario.scheduling
        return scheduling.admission != "quota" and scheduling.partition != "slices"

    def admit(self, task_id: str, profile: Profile, now: float) -> Lease | None:
        """Grant a lease to the task; None while nothing fits."""
        current = SchedulingPass(self.policy, fifo, now)
        for request in self._ranked_requests(profile):
            for change in allocator.allocate(self.cluster, request.for_task(task_id), current):
                self.cluster.apply(change)
                return self.cluster.leases[task_id]
        return None

    def release(self, task_id: str, now: float, outcome: str) -> None:
        """Release the lease of the task."""
        for change in lease_steps.release(self.cluster, task_id, now, outcome=outcome):
            self.cluster.apply(change)

    def reallocate(self, booked: Mapping[str, Amounts], now: float) -> None:
        """Replace the allocated amounts of these tasks, cut to the capacity of their nodes."""
        leases = [self.cluster.leases[task_id] for task_id in booked]
        for lease in leases:
            self.release(lease.lease_id, now, "rebooked")
        for lease in leases:
            free = self.cluster.node(lease.placement.node).free
            amounts = {
                name: max(0.0, min(amount, free[name]))
                for name, amount in zip(DIMENSIONS, booked[lease.lease_id], strict=True)
            }
            request = replace(lease.request, resources={**lease.request.resources, **amounts})
            self.cluster.apply(allocator.grant(self.cluster, request, lease.members, now))

    def quota(self, lease: Lease, profile: Profile) -> Amounts:
        """Return the task's limit in the sandbox: demand times oversubscription, or its slices."""
        if self.scenario.scheduling.partition != "slices":
            return self.booked(profile)
        state = self.cluster.node(lease.placement.node)
        card = self.scenario.cards[state.node.gpus[0].gpu_type]
        share = slices_needed(self.booked(profile), card) / card.slices
        compute, memory, bandwidth = effective_card(card)
        return (compute * share, memory * share, bandwidth * share)

    def booked(self, profile: Profile) -> Amounts:
        """Return the amounts allocated at admission: demand times oversubscription."""
        factor = self.scenario.scheduling.oversubscription
        compute, memory, bandwidth = profile.demand
        return (compute * factor, memory * factor, bandwidth * factor)

    def _requests_of(self, profile: Profile) -> list[Request]:
        """Return one request; with slices one per card type, because the size of a slice differs."""
        cards = {name: card for name, card in self.scenario.cards.items() if card.vendor in profile.vendors}
        booked = self.booked(profile)
        partition = self.scenario.scheduling.partition
        if partition != "slices":
            resources: dict[str, float] = dict(zip(DIMENSIONS, booked, strict=True))
            if partition == "node":
                resources[PARTITIONS] = 1
            return [Request(profile.name, resources=resources, gpu_types=tuple(cards))]
        # Rounded down, so that all slices of a card fit on it.
        return [
            Request(profile.name, 1, needed * MILLI_PER_GPU // card.slices, gpu_types=(name,))
            for name, card in cards.items()
            if (needed := slices_needed(booked, card)) <= card.slices
        ]

    def _ranked_requests(self, profile: Profile) -> Iterable[Request]:
        requests = self._requests[profile.name]
        if len(requests) == 1:
            return requests
        scheduling = self.scenario.scheduling
        whole = Request(
            profile.name,
            resources=dict(zip(DIMENSIONS, profile.demand, strict=True)),
            gpu_types=tuple(name for request in requests for name in request.gpu_types),
        )
        vendors = rank_vendors(self.cluster, whole, scheduling.performance)
        if not scheduling.vendor_fallback:
            vendors = vendors[:1]
        cards = self.scenario.cards
        return [each for vendor in vendors for each in requests if cards[each.gpu_types[0]].vendor == vendor]

    def _refuse_impossible(self, profile: Profile) -> None:
        for request in self._requests[profile.name]:
            if any(could_ever_fit(state.node, request) for state in self.cluster.nodes):
                return
        needs = ", ".join(
            f"{amount:g} {name}" for name, amount in zip(DIMENSIONS, self.booked(profile), strict=True)
        )
        raise InputError(
            f"profile {profile.name!r} fits no node, not even an empty one: it needs {needs}"
            f" of {' or '.join(profile.vendors)}",
            path=self.scenario.name,
        )
