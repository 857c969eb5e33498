"""What keeps a request from servers, in words: closed ones, those that fit never, and not now."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from resource_manager.core import server_facts as facts
from resource_manager.core.fit import UNSTATED, ShortageKind
from resource_manager.core.maintenance import as_text, to_the_minute
from resource_manager.core.models import MILLI_PER_GPU, RUNS_JOBS, Request, Spread
from resource_manager.core.names import short
from resource_manager.core.refusal import ServerShort
from resource_manager.manager.plurals import counted, one_of, plural
from resource_manager.manager.request_words import (
    MAX_SHOWN,
    ONE_MIG_DEVICE,
    among_labelled,
    amount_word,
    gpu_word,
    label_words,
    needed,
    of_island,
    parts_of,
    unit_of,
    unstated_words,
    with_article,
)

if TYPE_CHECKING:  # a client of the service loads neither state nor scheduling
    from resource_manager.core.node_state import NodeState


MAX_REASON = 240
"""Maximum length of why a server is closed to one request, with its times."""


def why_closed_words(fact: facts.WhyClosed) -> str:
    """Return why a server is closed, as a clause."""
    match fact:
        case facts.InWindow():
            why = f": {fact.reason}" if fact.reason else ""
            assumed = " of unknown length: state expected_runtime" if fact.is_assumed else ""
            again = f", which comes again too soon for a run{assumed}" if fact.is_too_often else ""
            return f"maintenance from {as_text(fact.begin)} until {as_text(fact.end)}{again}{why}"
        case facts.StartFailed():
            why = f": {fact.reason}" if fact.reason else ""
            until = to_the_minute(fact.until)
            return f"its start failed there at {to_the_minute(fact.at)}{why}; avoided until {until}"
        case facts.IsDrained():
            return ("failed" if fact.failed else "drained") + (f": {fact.reason}" if fact.reason else "")
        case facts.IsSilent():
            return f"has been {_silent(fact)}"
        case facts.LeftInventory():
            return "left the inventory"
    return "has no address in the inventory, which each member of a gang needs"


def _silent(fact: facts.IsSilent) -> str:
    return f"silent since {to_the_minute(fact.since)}"


def silence_of(state: NodeState) -> str:
    """Return since when the server's agent is silent, `silent since 2026-12-01T14:03Z`, or nothing."""
    return "" if state.silent is None else _silent(facts.IsSilent(state.silent.since))


def withheld_server_words(fact: facts.Withheld, request: Request) -> str:
    """Return a closed server and what it has, as a sentence."""
    if isinstance(fact, facts.MoreClosed):
        return f"{fact.count} more are closed"
    if isinstance(fact, facts.WithheldGpus):
        gpus = "; ".join(map(short, withheld_words(fact.gpus)))
        return f"on {short(fact.node)} {gpus}" if fact.node else gpus
    has = f"has {fact.has}{unit_of(request)} free" if request.gpus else "could take it"
    who, why = f"{short(fact.node)} {has} but", fact.why
    match why:
        case facts.WithheldGpus():
            return f"{who} {'; '.join(map(short, withheld_words(why.gpus)))}"
        case facts.InWindow() | facts.StartFailed():
            return f"{who} is closed to it: {short(why_closed_words(why), MAX_REASON)}"
        case facts.IsSilent():
            return f"{who} {why_closed_words(why)}"
    reason = f": {short(why.reason)}" if why.reason else ""
    return f"{who} is {'marked as failed' if why.failed else 'drained'}{reason}"


def withheld_words(gpus: Iterable[facts.WithheldGpu]) -> list[str]:
    """Say of which GPUs nothing is granted, or not all: `GPU 3 is closed: xid 79`."""
    found = [
        f"GPU {gpu.gpu_id} is being cleaned after its last lease"
        if gpu.closed is None
        else f"GPU {gpu.gpu_id} is closed: {gpu.closed}"
        for gpu in gpus
    ]
    return found if len(found) <= MAX_SHOWN else [*found[:MAX_SHOWN], f"{len(found) - MAX_SHOWN} more"]


def never_fits_words(fact: facts.NeverFits, request: Request) -> str:
    """Return why no server could ever take the request, or the gang, as a sentence."""
    required, nodes, label = request.required_node, request.nodes, request.same
    match fact:
        case facts.LabelsMissing():
            if request.labels_required == RUNS_JOBS:
                who = "no server has an" if required is None else f"{short(required)} has no"
                hint = "set job_user of a server, or use gpu-manager run, which works over ssh"
                return f"{who} agent that runs jobs: {hint}"
            labels = plural(len(request.labels_required), "label")
            by_agent = RUNS_JOBS.items() <= request.labels_required.items()
            hint = ": a server with a job_user has it" if by_agent else ""
            if required is None:
                return f"no server has {label_words(request)} as its {labels}{hint}"
            return f"{short(required)} lacks the {labels} {label_words(request)}{hint}"
        case facts.LabelUnknown():
            return f"no server has the label {short(label)}, which the servers of the gang must share"
        case facts.AddressesMissing():
            have = "has" if fact.missing == 1 else "have"
            return (
                f"each server of a gang needs an address in the inventory, and {fact.missing} of the "
                f"{fact.able} that could take it {have} none, such as {short(fact.node)}"
            )
        case facts.OneServerOnly():
            return (
                f"a gang of {nodes} needs {nodes} servers, and the request is for {short(required or '')} "
                "only: leave the server out, or ask for spread pack"
            )
        case facts.TooFewServers():
            servers = f"{'servers with' if request.spread is Spread.SERVERS else 'times'} {needed(request)}"
            what = f"a gang of {nodes} needs {nodes} {servers}"
            if not label:
                return f"{what}: the inventory has {fact.most}"
            largest = f"{short(label)}={short(fact.domain)}"
            return f"{what} in one {short(label)}: the largest, {largest}, has {fact.most}"
    return among_labelled(request) + _no_server_ever(fact, request)


def _no_server_ever(fact: facts.NoServerEver, request: Request) -> str:
    required = request.required_node
    who = "no server could ever" if required is None else f"{short(required)} could never"
    match fact:
        case facts.NoServer():
            gone = (
                "the inventory has no server" if required is None else f"{short(required)} left the inventory"
            )
            return f"no server could ever satisfy {needed(request)}: {gone}"
        case facts.KindMissing():
            gpu = gpu_word(request, 1)
            lacks = (
                f"no server has {with_article(gpu)}"
                if required is None
                else f"{short(required)} has no {gpu}"
            )
            if fact.unstated:
                return f"{lacks}: {unstated_words(fact.unstated)}"
            return lacks + _types_instead(fact.types, request)
        case facts.TooFewGpus():
            has = f"the largest, {short(fact.node)}, has" if required is None else "it has"
            if request.is_linked and not fact.most:
                return f"{who} satisfy {needed(request)}: the inventory names no islands of such GPUs"
            if not fact.of_mig:
                return f"{who} satisfy {needed(request)}: {has} {fact.most}"
            others = f", and {has} {fact.most} other {plural(fact.most, 'GPU')}" if fact.most else ""
            return f"{who} satisfy {needed(request)}: {ONE_MIG_DEVICE}{others}"
        case facts.AmountShort():
            return f"{who} satisfy {needed(request)}: {_lack(fact, request)}"
    return f"no server has {'both ' if parts_of(request) == 2 else ''}{needed(request)}"


def _types_instead(types: Sequence[str], request: Request) -> str:
    """Return the types that a part of their name may mean, else the nearest ones: an A100 is no H100."""
    if not types:
        return ""
    wanted = [name.casefold() for name in request.gpu_types]
    meant = [short(each) for each in types if any(name in each.casefold() for name in wanted)]
    if meant:
        return f": did you mean {one_of(meant[:MAX_SHOWN])}?"
    from difflib import get_close_matches  # no call that goes well needs it

    near = get_close_matches(request.gpu_types[0][:100], types, MAX_SHOWN, 0.0)
    return f": the nearest is {one_of(map(short, near))}"


def not_now_words(fact: facts.NotNow, request: Request) -> str:
    """Return why no server takes the request now, as a sentence."""
    match fact:
        case facts.NoFreeServer():
            return among_labelled(request) + _no_free_server(fact.lack, request)
        case facts.MembersFree():
            one = fact.count == 1
            where = f" in {short(request.same)}={short(fact.domain)}" if request.same else ""
            if request.spread is Spread.SERVERS:
                what = f"the {request.nodes} servers needed {'has' if one else 'have'}"
            else:
                what = f"its {request.nodes} members {'fits' if one else 'fit'}:"
            detail = f"{fact.count} of {what} {needed(request)} free{where}"
            if isinstance(fact.but, facts.NoPort):
                ports = f"{short(fact.but.node)} ({fact.but.first} to {fact.but.last})"
                return f"{detail}, but all gang_ports of {ports} are in use"
            return detail if fact.but is None else f"{detail}, but the policy found no placement"
        case facts.NextServer():
            return f"the next, {short(fact.node)}: {_lack(fact.lack, request)}"
        case facts.Unreleased():
            return (
                f"{fact.lease} on {short(fact.node)} is quarantined, since its job may "
                "still run: release the lease once the job is known to be gone"
            )
    return (
        f"{short(fact.node)} would fit it, but what is free there is kept for {fact.preemptor}, "
        "for which leases are being preempted"
    )


def _no_free_server(lack: facts.Lack, request: Request) -> str:
    what = needed(request)
    if request.required_node is not None:
        return f"{short(request.required_node)} cannot fit {what} now: {_lack(lack, request)}"
    if not isinstance(lack, facts.GpusShort):
        return f"no server with {what}: {_lack(lack, request)}"
    most, node = lack.most, short(lack.node)
    if request.gpu_milli != MILLI_PER_GPU:
        largest = f"the most free is {most} milli on {node}" if most else "none has any free"
        return f"no GPU with {request.gpu_milli} milli free: {largest}"
    wanted = f"{request.gpus} {gpu_word(request, request.gpus)}"
    largest = f"largest free is {most} on {node}" if most else "none is free anywhere"
    return f"no server with {wanted}: {largest}"


def _lack(lack: facts.Lack | facts.FreeShort, request: Request) -> str:
    match lack:
        case facts.GpusShort():
            return f"{lack.most}{unit_of(request)} free"
        case facts.AmountShort():
            free = " free" if lack.free else ""
            return f"the most {amount_word(lack.name)}{free} is {lack.most:g} on {short(lack.node)}"
        case facts.FreeShort() if lack.unit == "gpus":
            return f"{counted(lack.has, 'GPU')}{of_island(request)} free"
        case facts.FreeShort():
            return f"{max(lack.has, 0):g} {amount_word(lack.unit, lack.has)} free"
    return f"no server has {'both' if parts_of(request) == 2 else 'all of it'} free at once"


def server_short_words(fact: ServerShort, request: Request) -> str:
    """Return what one server lacks for the request, as a clause."""
    shortage, ever, total = fact.shortage, fact.ever, fact.total
    has, wants, name = shortage.has, shortage.wants, shortage.name
    match shortage.kind:
        case ShortageKind.SERVER:
            return f"the request is for {request.required_node} only"
        case ShortageKind.LABELS:
            return f"the request is for servers with {label_words(request)} only"
        case ShortageKind.GPU_TYPE:
            return f"has no {gpu_word(request, 1)}{f': {unstated_words()}' if name == UNSTATED else ''}"
        case ShortageKind.GPUS if ever and fact.of_mig:
            return f"{ONE_MIG_DEVICE}; it has {has} other {plural(has, 'GPU')}, {wants} requested"
        case ShortageKind.GPUS if ever:
            return f"has {counted(has, 'GPU')}{of_island(request)} in total, {wants} requested"
        case ShortageKind.GPUS if request.gpu_milli != MILLI_PER_GPU:
            return f"at most {has} milli of one GPU free, {wants} requested"
        case ShortageKind.GPUS:
            return f"{has} of {counted(total, 'GPU')}{of_island(request)} free, {wants} requested"
    if ever:
        return f"has {has:g} {amount_word(name, has)} in total, {wants:g} requested"
    return f"{max(has, 0):g} of {total:g} {amount_word(name, total)} free, {wants:g} requested"
