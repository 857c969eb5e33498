"""Quotas of teams: which requests must not start although they fit, and the refusals that say so."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Request
from resource_manager.core.names import name_of
from resource_manager.core.refusal import (
    Fact,
    Grounds,
    OverGuarantee,
    OverLimit,
    OverOwnersLimit,
    OverRuntime,
    RefusalKind,
    UsedBy,
)
from resource_manager.core.team_ledger import UNNAMED, Account, TeamLedger, milli_of
from resource_manager.core.teams import milli_of_gpus

MAX_HOLDERS = 3
"""Maximum number of those that use a quota among the facts of a refusal."""

NO_MORE: Mapping[str, int] = MappingProxyType({})


class StopKind(StrEnum):
    """Rules by which a request must not start."""

    LIMIT = "limit"
    OWNER = "owner"
    RUNTIME = "runtime"
    GUARANTEE = "guarantee"


@dataclass(frozen=True, slots=True)
class Stop:
    """The rule that stops a request, and the account whose rule it is."""

    kind: StopKind
    account: Account


def stop_of(ledger: TeamLedger, request: Request) -> Stop | None:
    """Return the first rule that stops the request now, or None."""
    asked = milli_of(request)
    own = ledger.of(request)
    runtime_s, longest_s = request.expected_runtime_s, own.team.max_runtime_s
    if runtime_s is not None and longest_s is not None and runtime_s > longest_s:
        return Stop(StopKind.RUNTIME, own)
    if not asked:
        return None
    for account in own.path:
        if account.limit is not None and account.allocated + asked > account.limit:
            return Stop(StopKind.LIMIT, account)
    most = own.team.max_gpus_per_owner
    if most is not None and own.by_owner.get(request.owner, 0) + asked > milli_of_gpus(most):
        return Stop(StopKind.OWNER, own)
    if _stays_for_good(ledger, request):
        for end, account in enumerate(own.path, 1):
            if account.fixed + asked > account.guaranteed or (
                account.team.guaranteed_by_type and not types_left(own.path[:end], request, fixed=True)
            ):
                return Stop(StopKind.GUARANTEE, account)
    return None


def _stays_for_good(ledger: TeamLedger, request: Request) -> bool:
    """Return True if nobody may take back what a lease of the request holds."""
    return ledger.rules.preemption and not request.preemptible


def within_guarantee(ledger: TeamLedger | None, request: Request) -> Request:
    """Return the request as it may be placed: if it is not preemptible, on types of its team's guarantee.

    Of those the leases that must not be preempted stay inside the guarantee with this one. A request that a
    quota stops is left as it is.
    """
    if ledger is None or not _stays_for_good(ledger, request) or not milli_of(request):
        return request
    return on_types(request, types_left(ledger.of(request).path, request, fixed=True))


def on_types(request: Request, types: Collection[str] | None) -> Request:
    """Return the request on these types of GPU alone, in their order; as it is if there are none."""
    accepted = tuple(types or request.gpu_types)
    return request if accepted == request.gpu_types else replace(request, gpu_types=accepted)


def types_left(
    accounts: Iterable[Account],
    request: Request,
    more: Mapping[str, int] = NO_MORE,
    *,
    fixed: bool = False,
) -> list[str] | None:
    """Return the types of GPU of which none of the teams is over its guarantee with the request.

    None if no guarantee of theirs is by type. Each holds `more` thousandths than now; `fixed`: only what they
    hold that must not be preempted counts.
    """
    found: list[str] | None = None
    for account in accounts:
        if account.team.guaranteed_by_type:
            requested_milli = milli_of(request) + more.get(account.name, 0)
            by_type = account.fixed_by_type if fixed else account.by_type
            inside = types_inside(account, request, requested_milli, by_type)
            found = inside if found is None else [gpu_type for gpu_type in found if gpu_type in inside]
    return found


def types_inside(
    account: Account, request: Request, requested_milli: int, by_type: Mapping[str, int]
) -> list[str]:
    """Return the types of GPU the request accepts of which the team stays inside its guarantee with it.

    `by_type` is what it holds of each: all, or only what must not be preempted.
    """
    typed = account.team.guaranteed_by_type
    return [
        gpu_type
        for gpu_type in request.gpu_types or typed
        if by_type.get(gpu_type, 0) + requested_milli <= milli_of_gpus(typed.get(gpu_type, 0))
    ]


def stays_inside(account: Account, request: Request, more: int = 0) -> bool:
    """Return True if the team, holding `more` thousandths than now, stays inside its guarantee with it."""
    asked = milli_of(request) + more
    if account.allocated + asked > account.guaranteed:
        return False
    return not account.team.guaranteed_by_type or bool(types_inside(account, request, asked, account.by_type))


def all_stay_inside(accounts: Sequence[Account], request: Request, more: Mapping[str, int] = NO_MORE) -> bool:
    """Return True if each team, holding `more` thousandths than now, stays inside its guarantee with it.

    Where several guarantees are by type, they must do so of one type.
    """
    return (
        all(stays_inside(account, request, more.get(account.name, 0)) for account in accounts)
        and types_left(accounts, request, more) != []
    )


def typed_above(ledger: TeamLedger, request: Request) -> list[Account]:
    """Return those of the request's team and the ones above it whose guarantees of its GPUs are by type."""
    if not milli_of(request):
        return []
    return [account for account in ledger.of(request).path if account.team.guaranteed_by_type]


def as_guaranteed(ledger: TeamLedger, request: Request) -> Request:
    """Return the request on those types of GPU of which all teams above it stay inside their guarantees."""
    return on_types(request, types_left(typed_above(ledger, request), request))


def by_right(ledger: TeamLedger, request: Request) -> list[Request]:
    """Return the request on the types of GPU of which its team stays inside its guarantee with it.

    Which of the teams above it decides depends on whose leases it takes: the types of all come first, then
    those of each. Empty without such types, and if no guarantee is by type.
    """
    typed = typed_above(ledger, request)
    rows = (typed, *([account] for account in typed))
    types = dict.fromkeys(tuple(types_left(row, request) or ()) for row in rows)
    found = [on_types(request, each) for each in types if each]
    # Where a team decides whose guarantee is of any type, so is the right.
    return [*found, request] if 0 < len(typed) < len(ledger.of(request).path) else found


def may_start(ledger: TeamLedger, request: Request, blocked: Collection[str]) -> bool:
    """Return True if no quota stops the request, and no team's request that does not fit blocks it.

    `blocked` are the teams with such a request. Behind another team's request only one goes on that stays
    inside its own team's guarantee: it is what that team was promised.
    """
    if blocked and not passes(ledger, request, blocked):
        return False
    return stop_of(ledger, request) is None


def passes(ledger: TeamLedger, request: Request, blocked: Collection[str]) -> bool:
    """Return True if the request goes on behind other teams' requests that do not fit."""
    if not ledger.rules.teams or request.team in blocked:
        return False
    return all_stay_inside(ledger.of(request).path, request)


def quota_refusal(cluster: ClusterState, request: Request) -> Grounds | None:
    """Return the refusal of a request that a quota stops, or None."""
    if (ledger := cluster.ledger) is None or (stop := stop_of(ledger, request)) is None:
        return None
    return Grounds(RefusalKind.QUOTA, (_fact(cluster, ledger, request, stop),), request)


def type_refusal(ledger: TeamLedger, request: Request, types: Collection[str]) -> Grounds:
    """Return the refusal of a request that servers could only give GPUs of types outside its guarantee."""
    asked, of_these = milli_of(request), replace(request, gpu_types=tuple(sorted(types)))
    for account in ledger.of(request).path:
        inside = types_inside(account, of_these, asked, account.fixed_by_type)
        outside = [gpu_type for gpu_type in of_these.gpu_types if gpu_type not in inside]
        if account.team.guaranteed_by_type and outside:
            break
    return Grounds(RefusalKind.QUOTA, (_over_guarantee(account, outside, asked),), request)


def _over_guarantee(account: Account, types: Collection[str], requested_milli: int) -> OverGuarantee:
    """Return what the team is guaranteed of these types, and holds of them for good."""
    typed = account.team.guaranteed_by_type
    held = sum(account.fixed_by_type.get(name, 0) for name in types)
    guaranteed = tuple((name, typed.get(name, 0)) for name in types)
    return OverGuarantee(account.name, account.guaranteed, guaranteed, held, requested_milli)


def _fact(cluster: ClusterState, ledger: TeamLedger, request: Request, stop: Stop) -> Fact:
    account, asked = stop.account, milli_of(request)
    team, rules = account.name, account.team
    match stop.kind:
        case StopKind.RUNTIME:
            assert request.expected_runtime_s is not None
            assert rules.max_runtime_s is not None
            return OverRuntime(team, rules.max_runtime_s, request.expected_runtime_s)
        case StopKind.LIMIT:
            assert account.limit is not None
            return _over_limit(cluster, account, account.limit, asked)
        case StopKind.OWNER:
            assert rules.max_gpus_per_owner is not None
            held = account.by_owner.get(request.owner, 0)
            return OverOwnersLimit(request.owner, team, rules.max_gpus_per_owner, held, asked)
    in_all = OverGuarantee(team, account.guaranteed, (), account.fixed, asked)
    typed = rules.guaranteed_by_type
    if not typed:
        return in_all
    path = ledger.of(request).path
    left_below = types_left(path[: path.index(account)], request, fixed=True)
    by_type = _over_guarantee(account, left_below or request.gpu_types or typed, asked)
    is_enough = by_type.held + asked <= milli_of_gpus(sum(amount for _, amount in by_type.by_type))
    return in_all if is_enough and account.fixed + asked > account.guaranteed else by_type


def _over_limit(cluster: ClusterState, account: Account, limit: int, requested_milli: int) -> OverLimit:
    """Return by whom the limit is used, largest first: teams below, else owners, else leases."""
    if account.children:
        used_by = UsedBy.TEAMS
        found = {child.name: child.allocated for child in account.children if child.allocated}
    elif set(account.by_owner) - {""}:
        used_by, found = UsedBy.OWNERS, dict(account.by_owner)
    else:
        used_by = UsedBy.LEASES
        found = {
            name_of(lease): milli_of(lease.request)
            for lease in cluster.leases.values()
            if lease.request.team == account.name and milli_of(lease.request)
        }
    largest = sorted(found.items(), key=lambda item: (-item[1], item[0] in ("", UNNAMED), item[0]))
    shown, more = tuple(largest[:MAX_HOLDERS]), max(len(largest) - MAX_HOLDERS, 0)
    return OverLimit(account.name, limit, account.allocated, requested_milli, used_by, shown, more)


def shares_by_weight(ledger: TeamLedger) -> dict[str, float]:
    """Return each team's part of the whole by weight, divided down the tree; those not named share one."""
    found: dict[str, float] = {}

    def divide(accounts: list[Account], part: float) -> None:
        total = sum(account.team.weight for account in accounts)
        for account in accounts:
            found[account.name] = part * account.team.weight / total if total else 0.0
            divide(account.children, found[account.name])

    divide(ledger.tops, 1.0)
    return found
