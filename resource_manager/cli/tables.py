"""Terminal output of the commands: status, leases, queue, explanation and history."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Sized
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from resource_manager.cli.fitted_table import WIDE, Column, FittedTable
from resource_manager.core.maintenance import to_the_minute
from resource_manager.core.models import MILLI_PER_GPU
from resource_manager.manager.answer_words import (
    duration,
    name_in_words,
    ranges,
    short_id_in_words,
    short_uuid,
)
from resource_manager.manager.plurals import counted, plural
from resource_manager.manager.serializers import (
    coming_in_words,
    deadline_in_words,
    gpus_coming,
    gpus_required,
    interval_in_words,
)
from resource_manager.manager.server_views import RETIRED, Usage, usage_in_words
from resource_manager.manager.wording import WORDS, describe
from resource_manager.rest.console.colours import Colour, Holder, assign

STATE_STYLES = {"IDLE": "green", "ERROR": "bold red", "DRAINED": "dim"}
Row = Mapping[str, Any]


def console(*, wide: bool = False) -> Console:
    """Return a console that prints names unchanged: square brackets and colons in them are not markup.

    With `wide` it is as wide as what is printed, whatever the terminal is.
    """
    return Console(highlight=False, markup=False, emoji=False, width=WIDE if wide else None, soft_wrap=wide)


def headed(line: str, shown: Group) -> Group:
    """Return what is shown, below a line about it if there is one."""
    return Group(Text(line, "red"), shown) if line else shown


def status(summary: Row, leases: Sequence[Row], queue: Sequence[Row]) -> Group:
    """Return a table of servers, with a cell for each GPU and their leases, then the pending requests."""
    colours = colours_of(leases)
    on: dict[str, list[Row]] = {}
    for lease in leases:
        for name in dict.fromkeys(member["server_name"] for member in lease["members"]):
            on.setdefault(name, []).append(lease)
    servers = summary["servers"]
    closed = [_closed_because(server) for server in servers]
    table = FittedTable(
        Column("id", 2, justify="right"),
        Column("server"),
        Column("state"),
        Column("GPUs"),
        Column("free", justify="right"),
        Column("CPUs free", 1, justify="right"),
        Column("leases", wraps=True),
        *([Column("closed because", 2, wraps=True)] if any(closed) else []),
        title=f"{counted(summary['total_servers'], 'server')}, {counted(len(leases), 'lease')}, "
        f"{len(queue)} waiting\n"
        f"GPUs: {usage(servers, 'gpus')}\nCPUs: {usage(servers, 'cpus')}",
    )
    for server, why in zip(servers, closed, strict=True):
        state = str(server.get("state", ""))
        here = on.get(server["server_name"], [])
        table.add_row(
            str(server["server_id"]),
            server["server_name"],
            Text(state, STATE_STYLES.get(state, "")),
            cells(server, here, colours),
            f"{server['available_gpus']}/{server['total_gpus']}",
            f"{server['available_cpus']:g}/{server['total_cpus']:g}",
            Text("\n").join(Text(name_in_words(lease), colours[_key(lease)].rgb) for lease in here),
            *([why] if any(closed) else []),
        )
    return Group(table, *([queue_table(queue)] if queue else []))


def _closed_because(server: Row) -> str:
    """Return why a server, or which GPUs of it, take no new leases, in one line each; empty if all do."""
    whole = [server["drain_reason"] or "drained"] if server["drained"] else []
    whole += [RETIRED] if server["retired"] else []
    if (since := server["silent_since"]) is not None:
        whole.append(f"silent since {to_the_minute(since)}")
    return "\n".join(whole + [f"GPU {gpu['gpu_id']}: {gpu['reason']}" for gpu in server["gpus_closed"]])


def usage(servers: Sequence[Row], what: str) -> str:
    """Return `18 free, 6 used, 8 closed of 32`; `what` is `gpus` or `cpus`."""
    free, closed, total = (
        sum(server[f"{kind}_{what}"] for server in servers) for kind in ("available", "closed", "total")
    )
    return usage_in_words(Usage(free, closed, total))


def colours_of(leases: Sequence[Row]) -> dict[str, Colour]:
    """Return the colour of each lease by task id and token, the same as in the web console."""
    return assign(
        Holder(
            _key(lease),
            lease["server_id"],
            tuple(lease["gpu_ids"]),
            lease["gpu_milli"],
            lease["fencing_token"],
        )
        for lease in leases
    )


def _key(lease: Row) -> str:
    return f"{lease['task_id']} {lease['fencing_token']}"


def cells(server: Row, leases: Sequence[Row], colours: Mapping[str, Colour]) -> Text:
    """Return one mark per GPU: `·` free, `x` closed, `█` allocated, `▒` in part, in its lease's colour."""
    held = {
        gpu_id: lease
        for lease in reversed(leases)
        for member in lease["members"]
        if member["server_name"] == server["server_name"]
        for gpu_id in member["gpu_ids"]
    }
    text = Text()
    for gpu_id, free_milli in server["free_gpu_milli"].items():
        lease = held.get(int(gpu_id))
        if lease is not None:
            mark = "█" if lease["gpu_milli"] == MILLI_PER_GPU else "▒"
            text.append(mark, colours[_key(lease)].rgb)
        else:
            is_free = free_milli and not (server["drained"] or server["retired"])
            text.append("·" if is_free else "x", "dim")
    return text


def leases_table(leases: Sequence[Row], now: float) -> FittedTable:
    """Return the leases: in a narrow terminal their task, server, GPUs and age; and states but RUNNING."""
    uuids = [Column("UUIDs", 6)] if any(map(_uuids, leases)) else []
    states = [Column("state")] if any(lease["state"] != "RUNNING" for lease in leases) else []
    table = FittedTable(
        Column("name", wraps=True),
        Column("id"),
        *states,
        Column("server"),
        Column("GPUs"),
        *uuids,
        Column("CPUs", 3, justify="right"),
        Column("owner", 2),
        Column("team", 1),
        Column("age", justify="right"),
        Column("renew within", 5, justify="right"),
        title=counted(len(leases), "lease"),
    )
    for lease in leases:
        ends, milli = lease.get("expires_at"), lease["gpu_milli"]
        share = "" if milli == MILLI_PER_GPU else f" ({100 * milli / MILLI_PER_GPU:g}%)"
        table.add_row(
            lease["name"],
            short_id_in_words(lease),
            *(lease["state"] for _ in states),
            "\n".join(member["server_name"] for member in lease["members"]),
            "\n".join(ranges(member["gpu_ids"]) + share for member in lease["members"]),
            *("\n".join(map(short_uuid, _uuids(lease))) for _ in uuids),
            f"{len(lease['members']) * lease['cpu_count']:g}",
            lease.get("owner", ""),
            lease.get("team", ""),
            duration(now - lease["granted_at"]),
            "never" if ends is None else duration(ends - now),
        )
    return table


def queue_table(queue: Sequence[Row]) -> Group:
    """Return the pending requests with reason and estimated start, then why any start is unknown."""
    table = FittedTable(
        Column("#", justify="right"),
        Column("name", wraps=True),
        Column("id"),
        Column("team", 2),
        Column("priority", 3, justify="right"),
        Column("GPUs", justify="right"),
        Column("CPUs", 4, justify="right"),
        Column("waits", 1, justify="right"),
        Column("reason", wraps=True),
        Column("should start"),
        title=f"{len(queue)} waiting",
    )
    why: dict[str, list[str]] = {}
    now = time.time()
    for entry in queue:
        expected = entry.get("estimated_start", UNKNOWN_START)
        table.add_row(
            str(entry["position"]),
            entry["name"],
            entry["short_id"],
            entry["team"],
            str(entry["priority"]),
            gpus_required(entry),
            f"{entry['required_cpus']:g}",
            duration(entry["waited_s"]),
            entry.get("reason", ""),
            "; ".join(filter(None, (start(expected), deadline_in_words(entry, now)))),
        )
        if (detail := expected["detail"]) and detail != entry.get("reason"):
            why.setdefault(detail, []).append(f"#{entry['position']}")
    lines = (f"{', '.join(places)} start unknown: {detail}" for detail, places in why.items())
    return Group(table, *(Text(line, "dim") for line in lines))


def coming_table(demands: Sequence[Row]) -> Group:
    """Return the announced demands, then how many GPUs they are and why any time is unknown."""
    now = time.time()
    table = FittedTable(
        Column("name", wraps=True),
        Column("team", 2),
        Column("owner", 3),
        Column("GPUs", justify="right"),
        Column("asks", wraps=True),
        title=f"{len(demands)} announced",
    )
    for each in demands:
        asks = f"time unknown: {each['detail']}"
        if each["at"] is not None:
            first, at, last = (duration(each[key] - now) for key in ("earliest", "at", "latest"))
            asks = f"in {at} ({first} to {last})"
        table.add_row(each["name"], each["team"], each["owner"], gpus_coming(each), asks)
    return Group(table, *filter(None, [Text(coming_in_words(demands, now), "dim")]))


UNKNOWN_START: Row = {"at": None, "detail": ""}


def start(estimate: Row) -> str:
    """Return `in 5 min (2 min to 9 min, calibrated)`, or `unknown`."""
    if estimate["at"] is None:
        return "unknown"
    now = time.time()
    return f"in {duration(max(estimate['at'] - now, 0))} ({interval_in_words(estimate, now)})"


def _uuids(lease: Row) -> list[str]:
    return [uuid for member in lease["members"] for uuid in member["gpu_uuids"]]


def lease_line(lease: Row) -> str:
    """Return who got what in one line, with a further line for each member of a gang."""
    if len(lease["members"]) > 1:
        lines = [
            f"{name_in_words(lease)}: {len(lease['members'])} members, fencing token {lease['fencing_token']}"
        ]
        for member in lease["members"]:
            devices = ",".join(map(str, member["gpu_ids"]))
            lines.append(
                f"  rank {member['rank']}: {_devices(member['gpu_ids'], devices)} and "
                f"{counted(member['cpu_count'], 'CPU')} of {member['server_name']} ({member['address']}"
                f"{':' + str(member['port']) if member['port'] else ''})"
            )
        return "\n".join(lines)
    devices = _devices(lease["gpu_ids"], lease["gpu_devices"])
    if lease["gpu_uuids"]:
        devices += f" ({', '.join(map(short_uuid, lease['gpu_uuids']))})"
    return (
        f"{name_in_words(lease)}: {devices} and {counted(lease['cpu_count'], 'CPU')} of "
        f"{lease['server_name']}, fencing token {lease.get('fencing_token')}"
    )


def _devices(gpu_ids: Sized, devices: str) -> str:
    return f"{plural(len(gpu_ids), 'GPU')} {devices}" if gpu_ids else "no GPU"


def explanation(answer: Row) -> Group:
    """Return the answer in a sentence, then a table of the servers."""
    if answer.get("would_be_granted"):
        on = ", ".join(dict.fromkeys(member["server_name"] for member in answer["members"]))
        verdict = Text(f"Would be granted now on {on}.", "green")
        if answer["sharing"]:
            verdict.append(f" Its part of the GPU is {answer['sharing']}.", "default")
    else:
        never = answer["kind"] == "never_fits"
        verdict = Text(
            f"{'Never' if never else 'Not now'}: {answer['reason']}.", "red" if never else "yellow"
        )
    if estimate := answer.get("estimated_start"):
        after = f", when {estimate['after']} ends" if estimate["after"] else ""
        why = estimate["detail"] if estimate["detail"] != answer["reason"] else ""
        verdict.append(f" Should start: {start(estimate)}{after}{': ' if why else ''}{why}.")
    if late := deadline_in_words(answer, time.time()):
        verdict.append(f" Its {late}.")
    if sooner := answer.get("alternatives"):
        now = time.time()
        waits = ((each["change"], each["at"] - now) for each in sooner)
        found = (f"{change}: {'now' if wait < 1 else f'in {duration(wait)}'}" for change, wait in waits)
        verdict.append(f" Sooner with {'; '.join(found)}.")
    table = FittedTable(
        Column("id", 1, justify="right"),
        Column("server"),
        Column("fits" if answer["nodes"] == 1 else f"a member of {answer['nodes']} fits"),
        Column("why not", wraps=True),
    )
    for server in answer["servers"]:
        table.add_row(
            str(server["server_id"]),
            server["server_name"],
            "yes" if server["fits"] else "later" if server["could_fit"] else "never",
            "; ".join(server["reasons"]),
        )
    return Group(verdict, table)


def history_table(changes: Sequence[Row], names: Mapping[int, Mapping[str, str]]) -> FittedTable:
    """Return the changes in the order given; `names` are those of leases by version and id."""
    table = FittedTable(
        Column("version", 1, justify="right"),
        Column("time"),
        Column("change"),
        Column("what", wraps=True),
        Column("by", wraps=True),
    )
    for change in changes:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(change["at"]))
        what = describe(change, names[change["version"]])
        table.add_row(
            str(change["version"]),
            at,
            WORDS.get(change["change"]) or change["change"],
            what,
            change.get("by", ""),
        )
    return table
