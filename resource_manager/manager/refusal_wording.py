"""Words for the grounds of a refusal, the same ones at all interfaces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from resource_manager.core.fit import UNSTATED, ShortageKind
from resource_manager.core.maintenance import as_text, to_the_minute
from resource_manager.core.models import MILLI_PER_GPU, RUNS_JOBS, Amount, Link, Request, Spread
from resource_manager.core.names import short
from resource_manager.core.refusal import (
    AddressesMissing,
    Ahead,
    AmountShort,
    ClosedServer,
    EndUnknown,
    Fact,
    FreeNow,
    FreeShort,
    GpusShort,
    Grounds,
    HeldForAhead,
    InWindow,
    IsDrained,
    IsSilent,
    KindMissing,
    LabelsMissing,
    LabelUnknown,
    Lack,
    LeftInventory,
    MayStartAnyTime,
    MembersFree,
    Misconfigured,
    MoreClosed,
    NeverTogether,
    NextPass,
    NextServer,
    NoAddress,
    NoFreeServer,
    NoKnownEnd,
    NoPlaceInTime,
    NoPort,
    NoServer,
    NotEstimated,
    OneServerOnly,
    OverGuarantee,
    OverLimit,
    OverOwnersLimit,
    OverRuntime,
    PriceNotCovered,
    PriceUnknown,
    RecoveryWindow,
    RefusalKind,
    ServerShort,
    StartFailed,
    StillHeld,
    TooFar,
    TooFewGpus,
    TooFewServers,
    Unreleased,
    UsedBy,
    WaitsForEnds,
    WithheldGpu,
    WithheldGpus,
    WouldDelay,
)
from resource_manager.core.team_ledger import UNNAMED
from resource_manager.errors import NO_SERVERS, LockTimeoutError, Words, recovery_text
from resource_manager.manager.plurals import counted, plural

if TYPE_CHECKING:  # a client of the service loads neither state nor scheduling
    from resource_manager.core.node_state import NodeState
    from resource_manager.scheduling.preemption.victims import PreemptionRight

MAX_DETAIL = 480
"""Maximum length of a sentence, so that no interface has to shorten it and all show the same."""

MAX_REASON = 240
"""Maximum length of why a server is closed to one request, with its times."""

MAX_SHOWN = 3
"""Maximum number of GPUs, types or resources named in a sentence."""

ONE_MIG_DEVICE = "a lease on MIG devices has gpus=1, since CUDA shows a process one of them"

SPELT_WITH_AN = "AEFHILMNORSX"
"""Letters whose names begin with a vowel: an A100, an RTX 6000, but a V100."""

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
    """Return the grounds as a refusal in words."""
    return Refusal(grounds.kind, detail_of(grounds), grounds.retry_after_s)


def lock_busy(waited_s: float) -> Refusal:
    """Return the refusal of a request for which the lock could not be acquired in time."""
    return Refusal(RefusalKind.LOCK_BUSY, str(LockTimeoutError(waited_s)))


def no_servers() -> Refusal:
    """Return the refusal of every request while the store has no cluster."""
    return refusal_of(Grounds(RefusalKind.MISCONFIGURED, (Misconfigured(NO_SERVERS),)))


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
        found += withheld_words(fact.gpus) if isinstance(fact, WithheldGpus) else [words_of(fact, request)]
    return found


def words_of(fact: Fact, request: Request) -> str:
    """Return a fact about the request in words."""
    return str(_sentence(fact, request))


def never_words(grounds: Grounds) -> Words:
    """Return the grounds on which a request fits no server, naming its parameters."""
    (fact,), request = grounds.facts, grounds.request or ANY
    return Words("{}", _sentence(fact, request))


def _sentence(fact: Fact, request: Request) -> str | Words:
    match fact:
        case RecoveryWindow():
            return recovery_text(fact.began_ago_s, fact.resumes_in_s, fact.clock_jump_s)
        case Misconfigured():
            return f"misconfigured: {fact.text}"
        case InWindow() | StartFailed() | IsDrained() | IsSilent() | LeftInventory() | NoAddress():
            return _closure(fact)
        case ClosedServer() | MoreClosed() | WithheldGpus():
            return _closed(fact, request)
        case ServerShort():
            return _server_short(fact, request)
        case NoFreeServer() | MembersFree() | NextServer() | Unreleased() | AmountShort():
            return _not_now(fact, request)
        case OverRuntime() | OverLimit() | OverOwnersLimit() | OverGuarantee():
            return _quota(fact)
        case EndUnknown() | NoKnownEnd() | TooFar() | NotEstimated() | PriceUnknown():
            return _no_estimate(fact)
        case FreeNow() | NextPass() | HeldForAhead() | WouldDelay() | NoPlaceInTime() | MayStartAnyTime():
            return _behind(fact, request)
        case PriceNotCovered() | StillHeld() | WaitsForEnds():
            return _waits(fact)
    return _never(fact, request)


# ---- servers that are closed ----


def _closure(fact: InWindow | StartFailed | IsDrained | IsSilent | LeftInventory | NoAddress) -> str:
    match fact:
        case InWindow():
            why = f": {fact.reason}" if fact.reason else ""
            return f"maintenance from {as_text(fact.begin)} until {as_text(fact.end)}{why}"
        case StartFailed():
            why = f": {fact.reason}" if fact.reason else ""
            until = to_the_minute(fact.until)
            return f"its start failed there at {to_the_minute(fact.at)}{why}; avoided until {until}"
        case IsDrained():
            return ("failed" if fact.failed else "drained") + (f": {fact.reason}" if fact.reason else "")
        case IsSilent():
            return f"has been {_silent(fact)}"
        case LeftInventory():
            return "left the inventory"
    return "has no address in the inventory, which each member of a gang needs"


def _silent(fact: IsSilent) -> str:
    return f"silent since {to_the_minute(fact.since)}"


def silence_of(state: NodeState) -> str:
    """Return since when the server's agent is silent, `silent since 2026-12-01T14:03Z`, or nothing."""
    return "" if state.silent is None else _silent(IsSilent(state.silent.since))


def _closed(fact: ClosedServer | MoreClosed | WithheldGpus, request: Request) -> str:
    if isinstance(fact, MoreClosed):
        return f"{fact.count} more are closed"
    if isinstance(fact, WithheldGpus):
        gpus = "; ".join(map(short, withheld_words(fact.gpus)))
        return f"on {short(fact.node)} {gpus}" if fact.node else gpus
    has = f"has {fact.has}{_unit(request)}" if request.gpus else "could take it"
    who, why = f"{short(fact.node)} {has} but", fact.why
    match why:
        case WithheldGpus():
            return f"{who} {'; '.join(map(short, withheld_words(why.gpus)))}"
        case InWindow() | StartFailed():
            return f"{who} is closed to it: {short(_closure(why), MAX_REASON)}"
        case IsSilent():
            return f"{who} {_closure(why)}"
    reason = f": {short(why.reason)}" if why.reason else ""
    return f"{who} is {'marked as failed' if why.failed else 'drained'}{reason}"


def withheld_words(gpus: Iterable[WithheldGpu]) -> list[str]:
    """Say of which GPUs nothing is granted, or not all: `GPU 3 is closed: xid 79`."""
    found = [
        f"GPU {gpu.gpu_id} is being cleaned after its last lease"
        if gpu.closed is None
        else f"GPU {gpu.gpu_id} is closed: {gpu.closed}"
        for gpu in gpus
    ]
    return found if len(found) <= MAX_SHOWN else [*found[:MAX_SHOWN], f"{len(found) - MAX_SHOWN} more"]


# ---- never ----


def _never(
    fact: LabelsMissing
    | NoServer
    | KindMissing
    | TooFewGpus
    | NeverTogether
    | LabelUnknown
    | AddressesMissing
    | OneServerOnly
    | TooFewServers,
    request: Request,
) -> str | Words:
    required, nodes, label = request.required_node, request.nodes, request.same
    match fact:
        case LabelsMissing():
            who = "no server has" if required is None else f"{short(required)} has not"
            labels = plural(len(request.labels_required), "label")
            hint = ": a server with a job_user has it" if _runs_by_agent(request) else ""
            return f"{who} {label_words(request)} as its {labels}{hint}"
        case LabelUnknown():
            return Words("{same}={}: no server has that label", short(label))
        case AddressesMissing():
            have = "has" if fact.missing == 1 else "have"
            return Words(
                "{nodes}={}: each server of a gang needs an address in the inventory, and {} of the {} that "
                "could take it {} none, such as {}",
                *(nodes, fact.missing, fact.able, have, short(fact.node)),
            )
        case OneServerOnly():
            return Words(
                "{nodes}={} needs {} servers, and {server}={} allows one: leave it out, or ask for "
                "{spread}=pack",
                *(nodes, nodes, short(required or "")),
            )
        case TooFewServers():
            servers = f"{'servers with' if request.spread is Spread.SERVERS else 'times'} {needed(request)}"
            what = Words("{nodes}={} needs {} {}", nodes, nodes, servers)
            if not label:
                return Words("{}: the inventory has {}", what, fact.most)
            largest = f"the largest, {short(label)}={short(fact.domain)}, has {fact.most}"
            return Words("{} in one {}: {}", what, short(label), largest)
    return _among_labelled(request) + _no_server_ever(fact, request)


def _no_server_ever(fact: NoServer | KindMissing | TooFewGpus | NeverTogether, request: Request) -> str:
    required = request.required_node
    who = "no server could ever" if required is None else f"{short(required)} could never"
    match fact:
        case NoServer():
            gone = (
                "the inventory has no server" if required is None else f"{short(required)} left the inventory"
            )
            return f"no server could ever satisfy {needed(request)}: {gone}"
        case KindMissing():
            gpu = gpu_word(request, 1)
            lacks = f"no server has {_a(gpu)}" if required is None else f"{short(required)} has no {gpu}"
            return f"{lacks}: {_unstated(fact.unstated)}" if fact.unstated else lacks
        case TooFewGpus():
            has = f"the largest, {short(fact.node)}, has" if required is None else "it has"
            if request.is_linked and not fact.most:
                return f"{who} satisfy {needed(request)}: the inventory names no islands of such GPUs"
            if not fact.of_mig:
                return f"{who} satisfy {needed(request)}: {has} {fact.most}"
            others = f", and {has} {fact.most} other {plural(fact.most, 'GPU')}" if fact.most else ""
            return f"{who} satisfy {needed(request)}: {ONE_MIG_DEVICE}{others}"
    return f"no server has {'both ' if _parts(request) == 2 else ''}{needed(request)}"


# ---- not now ----


def _not_now(
    fact: NoFreeServer | MembersFree | NextServer | Unreleased | AmountShort, request: Request
) -> str:
    match fact:
        case NoFreeServer():
            return _among_labelled(request) + _no_free_server(fact.lack, request)
        case MembersFree():
            what = "servers have" if request.spread is Spread.SERVERS else "members fit:"
            where = f" in {short(request.same)}={short(fact.domain)}" if request.same else ""
            detail = f"{fact.count} of {request.nodes} {what} {needed(request)} free{where}"
            if isinstance(fact.but, NoPort):
                ports = f"{short(fact.but.node)} ({fact.but.first} to {fact.but.last})"
                return f"{detail}, but all gang_ports of {ports} are in use"
            return detail if fact.but is None else f"{detail}, but the policy found no placement"
        case NextServer():
            return f"the next, {short(fact.node)}: {_lack(fact.lack, request)}"
        case Unreleased():
            return (
                f"{fact.lease} on {short(fact.node)} was not renewed, but its job may "
                "still run: release the lease once the job is known to be gone"
            )
    required = request.required_node
    who = "no server could ever" if required is None else f"{short(required)} could never"
    return f"{_among_labelled(request)}{who} satisfy {needed(request)}: {_lack(fact, request)}"


def _no_free_server(lack: Lack, request: Request) -> str:
    what = needed(request)
    if request.required_node is not None:
        return f"{short(request.required_node)} cannot fit {what} now: {_lack(lack, request)}"
    if not isinstance(lack, GpusShort):
        return f"no server with {what}: {_lack(lack, request)}"
    most, node = lack.most, short(lack.node)
    if request.gpu_milli != MILLI_PER_GPU:
        largest = f"the most free is {most} milli on {node}" if most else "none has any free"
        return f"no GPU with {request.gpu_milli} milli free: {largest}"
    wanted = f"{request.gpus} {gpu_word(request, request.gpus)}"
    largest = f"largest free is {most} on {node}" if most else "none is free anywhere"
    return f"no server with {wanted}: {largest}"


def _lack(lack: Lack | FreeShort, request: Request) -> str:
    match lack:
        case GpusShort():
            return f"{lack.most}{_unit(request)} free"
        case AmountShort():
            free = " free" if lack.free else ""
            return f"the most {amount_word(lack.name)}{free} is {lack.most:g} on {short(lack.node)}"
        case FreeShort() if lack.unit == "gpus":
            return f"{counted(lack.has, 'GPU')}{_of_island(request)} free"
        case FreeShort():
            return f"{max(lack.has, 0):g} {amount_word(lack.unit, lack.has)} free"
    return f"no server has {'both' if _parts(request) == 2 else 'all of it'} free at once"


def _server_short(fact: ServerShort, request: Request) -> str:
    shortage, ever, total = fact.shortage, fact.ever, fact.total
    has, wants, name = shortage.has, shortage.wants, shortage.name
    match shortage.kind:
        case ShortageKind.SERVER:
            return f"the request is for {request.required_node} only"
        case ShortageKind.LABELS:
            return f"the request is for servers with {label_words(request)} only"
        case ShortageKind.GPU_TYPE:
            kind = " ".join(filter(None, (*request.gpu_types, request.vendor, request.gpu_memory)))
            return f"has no GPU of {kind}{f': {_unstated()}' if shortage.name == UNSTATED else ''}"
        case ShortageKind.GPUS if ever and fact.of_mig:
            return f"{ONE_MIG_DEVICE}; it has {has} other {plural(has, 'GPU')}, {wants} requested"
        case ShortageKind.GPUS if ever:
            return f"has {counted(has, 'GPU')}{_of_island(request)} in total, {wants} requested"
        case ShortageKind.GPUS if request.gpu_milli != MILLI_PER_GPU:
            return f"at most {has} milli of one GPU free, {wants} requested"
        case ShortageKind.GPUS:
            return f"{has} of {counted(total, 'GPU')}{_of_island(request)} free, {wants} requested"
    if ever:
        return f"has {has:g} {amount_word(name, has)} in total, {wants:g} requested"
    return f"{max(has, 0):g} of {total:g} {amount_word(name, total)} free, {wants:g} requested"


# ---- it fits, and may not start ----


def _behind(
    fact: FreeNow | NextPass | HeldForAhead | WouldDelay | NoPlaceInTime | MayStartAnyTime, request: Request
) -> str:
    match fact:
        case FreeNow():
            return _free_now(fact, request)
        case NextPass():
            return f"no request is ahead: {AT_THE_NEXT_PASS}" if fact.first else AT_THE_NEXT_PASS
        case HeldForAhead():
            who, rule = _who(fact.ahead), f", {fact.rule}" if fact.rule else ""
            return f"reserved for {who}{rule}" if fact.reserved else f"{who} is ahead{rule}"
        case WouldDelay():
            detail = f"starting now could delay {_who(fact.ahead)}"
            state_it = ", because its runtime is unknown: state expected_runtime"
            return f"{detail}{state_it}" if fact.unknown_runtime else detail
        case NoPlaceInTime():
            who = _who(fact.ahead)
            return f"nothing overtakes {who}: only {fact.places} before it have a place in time"
    noun = "lease " if fact.is_lease else ""
    cause = f": the runtime of {noun}{fact.endless} is unknown" if fact.endless else ""
    return f"{_who(fact.ahead)} may start at any moment{cause}, so nothing overtakes it"


def _free_now(fact: FreeNow, request: Request) -> str:
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


def _who(ahead: Ahead) -> str:
    request = ahead.request
    needs = needed(request)
    if ahead.by_gpus:
        needs = f"{request.gpus}" if request.gpu_milli == MILLI_PER_GPU else f"{request.gpu_milli} milli"
    return f"{ahead.name} (position {ahead.position}, needs {needs})"


def _waits(fact: PriceNotCovered | StillHeld | WaitsForEnds) -> str:
    match fact:
        case PriceNotCovered():
            more = f" and {fact.more} more" if fact.more else ""
            return (
                f"utility {fact.utility:g} does not exceed the price {fact.price:g} on "
                f"{short(fact.node)}{more}"
            )
        case StillHeld():
            return (
                f"{fact.lease} on {short(fact.node)} is still held after its preemption: "
                "release it once its job is known to be gone"
            )
    more = f" and {fact.more} more" if fact.more else ""
    return (
        f"waits for {fact.lease} on {short(fact.node)}{more} to end, preempted for "
        f"it; within {fact.within_s:.0f} s"
    )


def _no_estimate(fact: EndUnknown | NoKnownEnd | TooFar | NotEstimated | PriceUnknown) -> str:
    match fact:
        case EndUnknown():
            others = f" and {fact.more} more" if fact.more else ""
            return (
                f"the end of {fact.lease}{others} is unknown; "
                "state runtimes: expected_runtime, --expected-runtime"
            )
        case NoKnownEnd():
            return "no lease whose end is known frees enough capacity for it"
        case TooFar():
            return f"more than {fact.ends} leases end before it"
        case NotEstimated(soon=True):
            return "not estimated yet: the queue is long, ask again in 10 seconds"
        case NotEstimated():
            return "not estimated: the queue is too long for it"
    return "it is unknown when its utility will exceed its price"


# ---- teams ----


def _quota(fact: OverRuntime | OverLimit | OverOwnersLimit | OverGuarantee) -> str:
    who = team_words(fact.team)
    match fact:
        case OverRuntime():
            most, stated = fact.most_s / 3600, fact.stated_s / 3600
            return f"{who} may run jobs of at most {most:g} h (max_runtime); expected_runtime is {stated:g} h"
        case OverLimit():
            return (
                f"{who} may hold {gpus(fact.limit)} (limit) and holds {number(fact.held)}: "
                f"{_exceed(fact.asked)} it; used by {_users(fact)}"
            )
        case OverOwnersLimit():
            owner = short(fact.owner) if fact.owner else "an owner without a name"
            return (
                f"{owner} may hold {counted(fact.most, 'GPU')} of {who} (max_gpus_per_owner) "
                f"and holds {number(fact.held)}: {_exceed(fact.asked)} it"
            )
    guaranteed = " and ".join(f"{amount:g} {short(name)}" for name, amount in fact.by_type)
    return (
        f"{who} is guaranteed {guaranteed or gpus(fact.guaranteed)} and holds {number(fact.held)} for jobs "
        f"that are not preemptible: {_exceed(fact.asked)} it; a preemptible job may use what is free beyond "
        "that"
    )


def _exceed(amount: int) -> str:
    return f"{number(amount)} more {'exceeds' if amount <= MILLI_PER_GPU else 'exceed'}"


def _users(fact: OverLimit) -> str:
    def called(name: str) -> str:
        match fact.used_by:
            case UsedBy.TEAMS:
                return team_words(name)
            case UsedBy.OWNERS:
                return short(name) if name else "no owner"
        return name

    named = [f"{called(name)} ({number(held)})" for name, held in fact.users]
    return ", ".join(named + ([f"{fact.more} more"] if fact.more else [])) or "nobody"


def team_words(team: str) -> str:
    """Return `team vision`, or words for the teams without rules of their own."""
    return "the rest (teams without rules)" if team == UNNAMED else f"team {short(team)}"


def number(milli: int) -> str:
    """Return thousandths of GPUs as a number of GPUs: `4`, `0.5`."""
    return f"{milli / MILLI_PER_GPU:g}"


def gpus(milli: int) -> str:
    """Return thousandths of GPUs as a number with its noun: `4 GPUs`."""
    return counted(milli / MILLI_PER_GPU, "GPU")


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


# ---- requests ----


def needed(request: Request) -> str:
    """Return the demand as a phrase, such as `4 A100 and 32 CPUs`."""
    parts = []
    if request.gpus:
        parts.append(
            f"{request.gpus} {gpu_word(request, request.gpus)}"
            if request.gpu_milli == MILLI_PER_GPU
            else f"{request.gpu_milli} milli of one {gpu_word(request, 1)}"
        )
    for name, amount in list(request.resources.items())[:MAX_SHOWN]:
        parts.append(f"{amount:g} {amount_word(name, amount)}")
    return " and ".join(parts) if len(parts) < 3 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def describe(request: Request) -> str:
    """Return all of the request's demand in words."""
    parts = [
        counted(request.gpus, "GPU")
        if request.gpu_milli == MILLI_PER_GPU
        else f"{request.gpu_milli} milli of a GPU"
    ]
    if request.gpu_types:
        parts[0] += f" of type {' or '.join(request.gpu_types)}"
    if request.vendor:
        parts[0] += f" by {request.vendor}"
    if request.gpu_memory:
        parts[0] += f" with {request.gpu_memory}"
    if request.link is not Link.PREFER:
        parts[0] += f" of {'one island' if request.is_linked else 'any island'}"
    parts += [f"{amount} {amount_word(name, amount)}" for name, amount in request.resources.items()]
    if request.required_node is not None:
        parts.append(f"on {request.required_node}")
    parts += [f"with label {name}={value}" for name, value in request.labels_required.items()]
    return f"{request.nodes} times {', '.join(parts)}" if request.nodes != 1 else ", ".join(parts)


def amount_word(name: str, amount: Amount = 2) -> str:
    """Return the noun for so much of a resource: `CPU`, `CPUs`, or the name of any other."""
    return plural(amount, "CPU") if name == "cpus" else short(name)


def label_words(request: Request) -> str:
    """Return the required labels as a phrase, such as `zone=a and rack=7`."""
    return " and ".join(f"{short(name)}={short(value)}" for name, value in request.labels_required.items())


def _runs_by_agent(request: Request) -> bool:
    return RUNS_JOBS.items() <= request.labels_required.items()


def gpu_word(request: Request, count: int) -> str:
    """Return the noun for the requested GPUs: `A100 or H100`, `GPUs by nvidia`, `GPU with 40GB` or `GPU`."""
    memory = f" with {request.gpu_memory}" if request.gpu_memory else ""
    if count != 1:
        memory += _of_island(request)
    if request.gpu_types:
        types = [short(name) for name in request.gpu_types[:MAX_SHOWN]]
        more = ["another type"] if len(request.gpu_types) > MAX_SHOWN else []
        return " or ".join(types + more) + memory
    return f"{plural(count, 'GPU')}{f' by {short(request.vendor)}' if request.vendor else ''}{memory}"


def _of_island(request: Request) -> str:
    return " of one island" if request.is_linked else ""


def _unstated(node: str = "") -> str:
    of = f" of {short(node)}" if node else ""
    return f"the memory of the GPUs{of} is not stated: give {UNSTATED} of the server in the cluster's file"


def _among_labelled(request: Request) -> str:
    return f"of the servers with {label_words(request)}: " if request.labels_required else ""


def _parts(request: Request) -> int:
    return len(request.resources) + (request.gpus > 0)


def _unit(request: Request) -> str:
    return "" if request.gpu_milli == MILLI_PER_GPU else " milli"


def _a(noun: str) -> str:
    """Return the noun with its article: `a GPU`, `an A100`."""
    is_spelt = noun[1:2].isupper() or noun[1:2].isdigit()
    return f"{'an' if noun[0] in (SPELT_WITH_AN if is_spelt else 'AEIOUaeiou') else 'a'} {noun}"
