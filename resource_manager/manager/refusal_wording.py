"""Words for the grounds of a refusal, the same ones at all interfaces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from resource_manager.core import refusal, server_facts
from resource_manager.core.models import MILLI_PER_GPU, Request, Spread
from resource_manager.core.names import short
from resource_manager.core.refusal import Fact, Grounds, RefusalKind
from resource_manager.core.team_ledger import UNNAMED
from resource_manager.errors import NO_SERVERS, LockTimeoutError
from resource_manager.manager.plurals import counted
from resource_manager.manager.request_words import amount_word, gpu_word, gpus, needed, number
from resource_manager.manager.server_words import (
    never_fits_words,
    not_now_words,
    server_short_words,
    why_closed_words,
    withheld_server_words,
    withheld_words,
)
from resource_manager.storage.refusals import recovery_text

if TYPE_CHECKING:  # a client of the service loads neither state nor scheduling
    from resource_manager.scheduling.preemption.victim_right import PreemptionRight

MAX_DETAIL = 480
"""Maximum length of a sentence, so that no interface has to shorten it and all show the same."""

AT_THE_NEXT_PASS = "granted at the next pass over the queue, within seconds"

ANY = Request("any")
"""Stands for the request in facts that are about none."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal's kind and one sentence; `retry_after_s` if it is known when a retry can succeed."""

    kind: RefusalKind
    detail: str
    retry_after_s: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "detail", short(self.detail, MAX_DETAIL))

    def __str__(self) -> str:
        return self.detail


def refusal_of(grounds: Grounds) -> Refusal:
    return Refusal(grounds.kind, detail_of(grounds), grounds.retry_after_s)


def lock_busy(waited_s: float) -> Refusal:
    """Return the refusal of a request for which the lock could not be acquired in time."""
    return Refusal(RefusalKind.LOCK_BUSY, str(LockTimeoutError(waited_s)))


def no_servers() -> Refusal:
    """Return the refusal of every request while the store has no cluster."""
    return refusal_of(refusal.misconfigured(NO_SERVERS))


def detail_of(why: Grounds | Fact | None) -> str:
    """Return the grounds, or one fact, as a sentence; empty for none."""
    if why is None:
        return ""
    if not isinstance(why, Grounds):
        return short(words_of(why, ANY), MAX_DETAIL)
    request = why.request or ANY
    return short("; ".join(words_of(fact, request) for fact in why.facts), MAX_DETAIL)


def reasons_of(facts: Iterable[Fact], request: Request) -> list[str]:
    """Return one server's reasons against the request in words, one for each GPU that is withheld."""
    found: list[str] = []
    for fact in facts:
        if isinstance(fact, server_facts.WithheldGpus):
            found += withheld_words(fact.gpus)
        else:
            found.append(words_of(fact, request))
    return found


def words_of(fact: Fact, request: Request) -> str:
    match fact:
        case refusal.RecoveryWindow():
            return recovery_text(fact.began_ago_s, fact.resumes_in_s, fact.clock_jump_s)
        case refusal.Misconfigured():
            return f"misconfigured: {fact.text}"
        case refusal.ServerShort():
            return server_short_words(fact, request)
    if isinstance(fact, server_facts.WhyClosed):
        return why_closed_words(fact)
    if isinstance(fact, server_facts.Withheld):
        return withheld_server_words(fact, request)
    if isinstance(fact, server_facts.NotNow):
        return not_now_words(fact, request)
    if isinstance(fact, refusal.OverQuota):
        return _quota(fact)
    if isinstance(fact, refusal.Unestimated):
        return _no_estimate(fact)
    if isinstance(fact, refusal.Behind):
        return _behind(fact, request)
    if isinstance(fact, refusal.Waiting):
        return _waits(fact)
    return never_fits_words(fact, request)


# ---- it fits, and may not start ----


def _behind(fact: refusal.Behind, request: Request) -> str:
    match fact:
        case refusal.FreeNow():
            return _free_now(fact, request)
        case refusal.NextPass():
            then = AT_THE_NEXT_PASS if fact.waits else "it fits by now, ask again"
            return f"no request is ahead: {then}" if fact.first else then
        case refusal.HeldForAhead():
            who, rule = _who(fact.ahead), f", {fact.rule}" if fact.rule else ""
            return f"reserved for {who}{rule}" if fact.reserved else f"{who} is ahead{rule}"
        case refusal.WouldDelay():
            detail = f"starting now could delay {_who(fact.ahead)}"
            state_it = ", because its runtime is unknown: state expected_runtime"
            return f"{detail}{state_it}" if fact.unknown_runtime else detail
        case refusal.BeyondPass():
            return f"nothing overtakes {_who(fact.last)}: {fact.count} wait for the same servers"
    noun = "lease " if fact.is_lease else ""
    cause = f": the runtime of {noun}{fact.endless} is unknown" if fact.endless else ""
    return f"{_who(fact.ahead)} may start at any moment{cause}, so nothing overtakes it"


def _free_now(fact: refusal.FreeNow, request: Request) -> str:
    if request.nodes != 1:
        if request.spread is Spread.SERVERS:
            return f"{request.nodes} servers have {needed(request)} free"
        return f"{needed(request)} are free {request.nodes} times"
    where = f"free on {short(fact.node)}"
    if not request.gpus:
        name = amount_word(next(iter(request.resources), "cpus"), fact.amount)
        return f"{fact.amount:g} {name} {'is' if fact.amount == 1 else 'are'} {where}"
    if request.gpu_milli != MILLI_PER_GPU:
        return f"{fact.amount} milli of a GPU are {where}"
    gpus = gpu_word(request, int(fact.amount))
    return f"{fact.amount} {gpus} {'is' if fact.amount == 1 else 'are'} {where}"


def _who(ahead: refusal.Ahead) -> str:
    request = ahead.request
    needs = needed(request)
    if ahead.by_gpus:
        needs = f"{request.gpus}" if request.gpu_milli == MILLI_PER_GPU else f"{request.gpu_milli} milli"
    return f"{ahead.name} (position {ahead.position}, needs {needs})"


def _waits(fact: refusal.Waiting) -> str:
    match fact:
        case refusal.PriceNotCovered():
            more = f" and {fact.more} more" if fact.more else ""
            return (
                f"utility {fact.utility:g} does not exceed the price {fact.price:g} on "
                f"{short(fact.node)}{more}"
            )
        case refusal.StillHeld():
            return (
                f"{fact.lease} on {short(fact.node)} is still held after its preemption: "
                "release it once its job is known to be gone"
            )
    more = f" and {fact.more} more" if fact.more else ""
    return (
        f"waits for {fact.lease} on {short(fact.node)}{more} to end, preempted for "
        f"it; within {fact.within_s:.0f} s"
    )


def _no_estimate(fact: refusal.Unestimated) -> str:
    match fact:
        case refusal.EndUnknown():
            others = f" and {fact.more} more" if fact.more else ""
            return (
                f"the end of {fact.lease}{others} is unknown; "
                "state runtimes: expected_runtime, --expected-runtime"
            )
        case refusal.NoKnownEnd():
            return "no lease whose end is known frees enough capacity for it"
        case refusal.TooFar():
            return f"more than {fact.ends} leases end before it"
        case refusal.NotEstimated(soon=True):
            return "not estimated yet: the queue is long, ask again in 10 seconds"
        case refusal.NotEstimated():
            return "not estimated: the queue is too long for it"
    return "it is unknown when its utility will exceed its price"


# ---- teams ----


def _quota(fact: refusal.OverQuota) -> str:
    who = team_words(fact.team)
    match fact:
        case refusal.OverRuntime():
            most, stated = fact.most_s / 3600, fact.stated_s / 3600
            return f"{who} may run jobs of at most {most:g} h (max_runtime); expected_runtime is {stated:g} h"
        case refusal.OverLimit():
            return (
                f"{who} may hold {gpus(fact.limit)} (limit) and holds {number(fact.held)}: "
                f"{_exceed(fact.asked)} it; used by {_users(fact)}"
            )
        case refusal.OverOwnersLimit():
            owner = short(fact.owner) if fact.owner else "an owner without a name"
            return (
                f"{owner} may hold {counted(fact.most, 'GPU')} of {who} (max_gpus_per_owner) "
                f"and holds {number(fact.held)}: {_exceed(fact.asked)} it"
            )
    guaranteed = " and ".join(f"{amount:g} {short(name)}" for name, amount in fact.by_type)
    more = _exceed(fact.asked, " of one type" if len(fact.by_type) > 1 else "")
    return (
        f"{who} is guaranteed {guaranteed or gpus(fact.guaranteed)} and holds {number(fact.held)} for jobs "
        f"that are not preemptible: {more} it; a preemptible job may use what is free beyond "
        "that"
    )


def _exceed(amount: int, which: str = "") -> str:
    return f"{number(amount)} more{which} {'exceeds' if amount <= MILLI_PER_GPU else 'exceed'}"


def _users(fact: refusal.OverLimit) -> str:
    def called(name: str) -> str:
        match fact.used_by:
            case refusal.UsedBy.TEAMS:
                return team_words(name)
            case refusal.UsedBy.OWNERS:
                return short(name) if name else "no owner"
        return name

    named = [f"{called(name)} ({number(held)})" for name, held in fact.users]
    return ", ".join(named + ([f"{fact.more} more"] if fact.more else [])) or "nobody"


def team_words(team: str) -> str:
    """Return `team vision`, or words for the teams without rules of their own."""
    return "the rest (teams without rules)" if team == UNNAMED else f"team {short(team)}"


def right_words(right: PreemptionRight) -> str:
    """Say why a request may take leases: `since its priority 5 is above theirs in the team`."""
    reasons = []
    if right.others:
        of = f"{number(right.would_hold)} of {gpus(right.guaranteed)}"
        reasons.append(f"{team_words(right.team)} stays inside its guarantee ({of})")
        reasons += [f"{team_words(team)} is {number(beyond)} beyond its own" for team, beyond in right.others]
    if right.priority is not None:
        reasons.append(f"its priority {right.priority} is above theirs in the team")
    return "since " + " and ".join(reasons)
