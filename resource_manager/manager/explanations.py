"""Whether, where and when a request would fit, as it is told."""

from __future__ import annotations

from resource_manager.core.changes import Change, Granted
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Lease, Request
from resource_manager.core.names import listed, name_of
from resource_manager.core.refusal import RefusalKind
from resource_manager.manager.refusal_wording import detail_of, reasons_of, right_words
from resource_manager.manager.results import Explanation, Quotes, ServerVerdict, answer_of
from resource_manager.manager.serializers import member_view, sharing_in_words
from resource_manager.scheduling import allocator, lease_steps
from resource_manager.scheduling.placement.gangs import Members, select_members
from resource_manager.scheduling.placement.policies import scores_of
from resource_manager.scheduling.preemption.preempting import would_preempt
from resource_manager.scheduling.preemption.victim_right import right_to
from resource_manager.scheduling.queue.price_admission import PriceAdmission
from resource_manager.scheduling.queue.quotas import within_guarantee
from resource_manager.scheduling.queue.windows import closed_for
from resource_manager.scheduling.reasons.feasibility import Verdict, explain, refusals_of
from resource_manager.scheduling.scheduling_pass import SchedulingPass


def explanation(cluster: ClusterState, request: Request, current: SchedulingPass) -> Explanation:
    """Explain whether and where the request would be granted now, or why not: overall and per server.

    Leases whose life is over are not in its way: the decision about a request ends them first, and those who
    wait get what that frees. They also get what else is free by now, before one that they come before.
    """
    is_new = request.lease_id not in cluster.pending
    due = lease_steps.expire(cluster, current.now) if current.suspended is None else []
    if due and is_new:
        due = allocator.with_dispatch(cluster, due, current)
    with cluster.trial():
        cluster.apply(*due)
        grants: list[Change] = []
        if is_new and request.lease_id not in cluster.leases:
            grants = allocator.allocate_in_order(cluster, [request], current)
        leases = (change.lease for change in grants if isinstance(change, Granted))
        granted = next((lease for lease in leases if lease.lease_id == request.lease_id), None)
        if granted is None:
            cluster.apply(*grants)
        return _explanation(cluster, request, current, granted)


def _explanation(
    cluster: ClusterState, request: Request, current: SchedulingPass, granted: Lease | None
) -> Explanation:
    placed = within_guarantee(cluster.ledger, request)
    with closed_for(cluster, request, current):
        verdicts = explain(cluster, placed)
        scores: dict[str, int] = {}
        members = None
        if current.suspended is None:
            scores = scores_of(current.policy, cluster, placed)
            members = select_members(cluster, request, current.policy)
    kind, reason = None, ""
    if granted is not None:  # where it delays nobody ahead of it
        members = granted.members
    elif request.lease_id in cluster.leases:
        reason = "the task has a lease already"
    else:
        refusal = refusals_of(cluster, [request], current)[request.lease_id]
        kind, reason = str(refusal.kind), detail_of(refusal)
    victims: list[Lease] = []
    if kind is not None and current.suspended is None:
        victims = would_preempt(cluster, request, current)
    if victims:
        named = listed(list(map(name_of, victims)))
        reason = f"{reason}; would preempt {named}, {right_words(right_to(cluster, request, victims))}"
    admission = current.limits.admission
    places = [member_view(cluster, request, rank, member) for rank, member in enumerate(members or ())]
    return {
        "task_id": request.lease_id,
        "nodes": request.nodes,
        "admission": None if admission is None else quotes(cluster, request, admission, members, current.now),
        "fits": members is not None,
        "would_be_granted": granted is not None,
        "kind": kind,
        "reason": reason,
        "could_ever_fit": kind != RefusalKind.NEVER_FITS,
        "server_name": members[0].node if members else None,
        "gpu_ids": list(members[0].gpu_ids) if members else [],
        "members": places,
        "sharing": sharing_in_words(request, places),
        "policy": cluster.settings.policy,
        "servers": [verdict(answer, placed, scores.get(answer.node)) for answer in verdicts],
        "would_preempt": [lease.lease_id for lease in victims],
        "deadline_at": request.deadline_at,
        "late_end": None,
    }


def verdict(answer: Verdict, request: Request, score: int | None = None) -> ServerVerdict:
    """Return one server's answer to `explain`; `score` is the policy's, higher is better."""
    reasons = reasons_of(answer.reasons, request)
    return answer_of(ServerVerdict, answer, server_name=answer.node, reasons=reasons, score=score)


def quotes(
    cluster: ClusterState, request: Request, admission: PriceAdmission, members: Members | None, now: float
) -> Quotes:
    """Return the price of the request now on every server, and on the one where it would start.

    `price` and `utility` are None without a utility, `covered` if the request fits on no server now.
    """
    waiting = cluster.pending.get(request.lease_id)
    since = now if waiting is None else waiting.queued_at
    chosen = None if members is None else admission.quote(cluster, request, members, since, now)
    return {
        "price_per_hour": None if chosen is None else chosen.price_per_hour,
        "price": None if chosen is None else chosen.price,
        "utility": None if chosen is None else chosen.utility,
        "covered": None if chosen is None else chosen.covered,
        "servers": {state.name: admission.price_per_hour(state, request) for state in cluster.nodes},
    }
