"""The rule of backfill, said plainly and slowly, for requests of one server each; and random queues."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

from resource_manager.core.changes import Drained, Granted, Quarantined, Queued
from resource_manager.core.cluster import ClusterState
from resource_manager.core.fit import FreeCapacity, accepted_gpu_ids, pick_gpus, usable_gpus
from resource_manager.core.models import Gpu, Lease, Node, Placement, Request
from resource_manager.core.node_state import NodeState
from resource_manager.scheduling.placement.gangs import Members
from resource_manager.scheduling.placement.policies.first_fit import first_fit
from resource_manager.scheduling.queue.backfill import MAX_RESERVATIONS
from resource_manager.scheduling.queue.orders import QueueDiscipline

Use = tuple[Request, Placement, float, float]
"""A request, its place, and from when to when it is there."""


def runtime_s(request: Request) -> float:
    """Return for how long a lease of the request lasts: for its runtime, or until a limit that it states."""
    ends = (request.expected_runtime_s, request.max_runtime_s, request.requeue_after_s)
    return min((each for each in ends if each is not None), default=math.inf)


def least_free(node: NodeState, uses: Iterable[Use], start: float, end: float) -> FreeCapacity:
    """Return what is free from start to end beside the uses."""
    there = [use for use in uses if use[1].node == node.name]
    least = None
    for time in {start, *(begin for _, _, begin, _ in there if start < begin < end)}:
        free = node.capacity_without_leases
        for request, place, begin, until in there:
            if begin <= time < until:
                free = free.minus(request, place.gpu_ids)
        least = free if least is None else least.intersect(free)
    assert least is not None
    return least


def gpus_for(node: NodeState, request: Request, free: FreeCapacity) -> tuple[int, ...] | None:
    """Return the GPUs of the node that the request takes of what is free, or None if it does not fit."""
    usable = usable_gpus(node.node, request, free.gpus)
    enough = all(free.amounts.get(name, 0) >= amount for name, amount in request.resources.items())
    if not (node.is_open and node.could_fit(request) and enough and len(usable) >= request.gpus):
        return None
    return pick_gpus(request, usable, free.gpus)


def plain_pass(cluster: ClusterState, order: QueueDiscipline, now: float) -> list[tuple[str, Members]]:
    """Return which pending requests start now, and where.

    The first of those that do not fit reserve the earliest start, or, if it is unknown, hold back what they
    could use: the GPUs of the kind, and the amounts, of each server.
    """
    uses = [
        (
            lease.request,
            place,
            lease.granted_at,
            math.inf if lease.quarantined else lease.granted_at + runtime_s(lease.request),
        )
        for lease in cluster.leases.values()
        for place in lease.members
    ]
    holding: list[Request] = []
    started: list[tuple[str, Members]] = []
    reserved = 0

    def holders_on(node: NodeState) -> list[Request]:
        return [request for request in holding if node.is_open and node.could_fit(request)]

    def left(node: NodeState, free: FreeCapacity) -> FreeCapacity:
        for request in holders_on(node):
            taken = accepted_gpu_ids(node.node, request) if request.gpus else set()
            gpus = {gpu_id: 0 if gpu_id in taken else milli for gpu_id, milli in free.gpus.items()}
            free = FreeCapacity(gpus, free.amounts).minus(request, ())
        return free

    def reserve(request: Request) -> bool:
        for start in sorted({now, *(end for *_, end in uses if now < end < math.inf)}):
            for node in cluster.nodes:
                end = start + runtime_s(request)
                gpu_ids = gpus_for(node, request, least_free(node, uses, start, end))
                if gpu_ids is not None and not holders_on(node):
                    uses.append((request, Placement(node.name, gpu_ids), start, end))
                    return True
        return False

    def start(request: Request) -> bool:
        choice = first_fit(cluster, request)
        if choice is None:
            return False
        end = now + runtime_s(request)
        for node in (cluster.by_name[choice.node], *cluster.candidates(request)):
            free = left(node, least_free(node, uses, now, end).intersect(node.capacity))
            gpu_ids = gpus_for(node, request, free)
            if gpu_ids is not None:
                place = Placement(node.name, gpu_ids)
                cluster.apply(Granted(Lease(request, (place,), cluster.last_fencing_token + 1, now), now))
                uses.append((request, place, now, end))
                started.append((request.lease_id, (place,)))
                return True
        return False

    with cluster.trial():
        for pending in order(cluster, now):
            request = pending.request
            could_start = any(node.is_open and node.could_fit(request) for node in cluster.nodes)
            if not could_start or start(request):
                continue
            if reserved == MAX_RESERVATIONS:
                continue
            if reserve(request):
                reserved += 1
            else:
                holding.append(request)
    return started


def random_queue(draw: random.Random) -> ClusterState:
    """Return servers of two kinds with leases, and a queue of requests, of which some are particular."""
    types = ("A100", "V100")
    servers = []
    for number in range(draw.randint(1, 4)):
        kind = draw.choice(types)
        gpus = tuple(
            Gpu(gpu_id, draw.choice(types) if draw.random() < 0.1 else kind)
            for gpu_id in range(draw.choice((2, 4)))
        )
        cpus = draw.choice((4, 8, 16))
        servers.append(Node(f"s{number}", number, {"cpus": cpus}, gpus, labels={"rack": draw.choice("ab")}))
    cluster = ClusterState(servers)
    unknown = draw.choice((0.0, 0.1, 0.3))
    for number in range(draw.randint(0, 8)):
        request = _request(draw, f"held {number}", unknown)
        if place := first_fit(cluster, request):
            lease = Lease(request, (place,), number + 1, float(draw.randint(0, 5)))
            cluster.apply(Granted(lease, lease.granted_at))
            if draw.random() < 0.1:
                cluster.apply(Quarantined(lease.lease_id, lease.fencing_token, 5.0))
    for number in range(draw.choice((3, 8, 20, MAX_RESERVATIONS + 20))):
        request = _request(draw, f"waits {number}", unknown)
        cluster.apply(Queued(request, float(number), cluster.sequence + 1, float(number)))
    if draw.random() < 0.2:
        cluster.apply(Drained(draw.choice(servers).name, 5.0))
    return cluster


def _request(draw: random.Random, lease_id: str, unknown: float) -> Request:
    gpus = draw.choice((0, 1, 1, 2, 4))
    return Request(
        lease_id,
        gpus,
        draw.choice((300, 500, 1000)) if gpus == 1 else 1000,
        {"cpus": draw.randint(0, 4)},
        (draw.choice(("A100", "V100")),) if gpus and draw.random() < 0.2 else (),
        required_node="s0" if draw.random() < 0.1 else None,
        priority=draw.randrange(3),
        expected_runtime_s=None if draw.random() < unknown else float(draw.randint(1, 40)),
        preempt_grace_s=0.0,  # so that limits may be short
        max_runtime_s=float(draw.randint(1, 40)) if draw.random() < 0.1 else None,
        requeue_after_s=float(draw.randint(1, 40)) if draw.random() < 0.1 else None,
        labels_required={"rack": draw.choice("ab")} if draw.random() < 0.1 else {},
    )
