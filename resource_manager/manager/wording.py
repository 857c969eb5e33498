"""Changes of the history in words, the same ones in commands, pages and logs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from fnmatch import translate
from functools import lru_cache
from itertools import islice
from typing import Any, Self, TypeVar

from resource_manager.core.lease_limits import LIMITS
from resource_manager.core.maintenance import as_text, preemptor_in_words
from resource_manager.core.models import MILLI_PER_GPU, Gpu
from resource_manager.core.names import short
from resource_manager.errors import InvalidRequestError
from resource_manager.manager.answer_words import recorded_name
from resource_manager.manager.plurals import counted, numbered_gpus, times

T = TypeVar("T")

MAX_LINES = 50
"""The most lines of a change, which stay in the history; a last one says that there are more."""

MAX_LINE = 300


class What(StrEnum):
    """What a change does, in the words of the commands: what the history can be asked for.

    `kinds` are those of the changes that do it, as the history writes them.
    """

    kinds: tuple[str, ...]

    def __new__(cls, text: str, *kinds: str) -> Self:
        self = str.__new__(cls, text)
        self._value_, self.kinds = text, kinds
        return self

    SUBMIT = "submit", "queued"
    GRANT = "grant", "granted"
    PLACE = "place", "jobplaced"
    RENEW = "renew", "renewed"
    RELEASE = "release", "released", "membersreleased"
    EXPIRE = "expire", "expired"
    QUARANTINE = "quarantine", "quarantined"
    CANCEL = "cancel", "cancelled"
    DEADLINE = "deadline", "deadlinerisk"
    ANNOUNCE = "announce", "announced", "withdrawn"
    PREEMPT = "preempt", "preempting"
    DRAIN = "drain", "drained", "gpuclosed"
    RESUME = "resume", "resumed", "gpuopened"
    CLEAN_GPU = "clean-gpu", "gpucleaned"
    AGENT = "agent", "agentseen", "agentlost"
    MAINTENANCE = "maintenance", "maintenancechanged"
    TEAMS = "teams", "teamschanged"
    SERVERS = "servers", "inventorychanged"
    SETTINGS = "settings", "clustersettingschanged"


WORDS = {
    kind: what if number == 0 else f"{what} ({kind})"
    for what in What
    for number, kind in enumerate(what.kinds)
}
"""Kind of change -> what it does, with the kind of those that are not the usual one."""


def bounded(lines: Iterable[str]) -> tuple[str, ...]:
    """Return the lines of a change, at most `MAX_LINES` and one, each of at most `MAX_LINE` characters."""
    rest = (line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - 1]}…" for line in lines)
    kept = tuple(islice(rest, MAX_LINES))
    more = sum(1 for _ in rest)
    return (*kept, f"and {more} more") if more else kept


def changed_in_words(what: str, before: Any, after: Any) -> str:
    """Return a line of a difference: `~ order priority → fifo`."""
    return f"~ {what} {value_in_words(before)} → {value_in_words(after)}"


def entries_changed(old: Mapping[str, T], new: Mapping[str, T]) -> Iterator[tuple[str, str, list[T]]]:
    """Yield sign and key of each entry that differs, by key, and its values before and after."""
    for key in sorted({*old, *new}):
        values = [entries[key] for entries in (old, new) if key in entries]
        if len(values) == 1:
            yield "+" if key in new else "-", key, values
        elif old[key] != new[key]:
            yield "~", key, values


def value_in_words(value: Any) -> str:
    """Return a value as a file has it, `unset` for none."""
    if value is None or value == "":
        return "unset"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {value_in_words(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return str(list(value))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def gpus_in_words(gpus: Iterable[Gpu]) -> str:
    """Return GPUs by type: `8 × H100`, `4 × A100, 4 × GPU`."""
    found = Counter(gpu.gpu_type or "GPU" for gpu in gpus)
    return ", ".join(f"{number} × {gpu_type}" for gpu_type, number in found.items()) or "no GPU"


def what_of(text: str) -> What | None:
    """Return what is asked of the history, None for an empty text; raises `InvalidRequestError`."""
    try:
        return What(text) if text else None
    except ValueError:
        known = ", ".join(What)
        raise InvalidRequestError("{what} must be one of {}, got {!r:.60}", known, text) from None


def matches(change: Mapping[str, Any], by: str, what: What | None) -> bool:
    """Return True if the change does that and was asked for by that name, as far as they are given.

    A `*` in the name stands for any text.
    """
    if what is not None and change["change"] not in what.kinds:
        return False
    return not by or _pattern(by).match(change.get("by", "")) is not None


@lru_cache(maxsize=64)
def _pattern(by: str) -> re.Pattern[str]:
    """Return the pattern of a name in which `*` stands for any text and all else for itself."""
    return re.compile(translate(re.sub(r"[?[]", r"[\g<0>]", by)))


NO_NAMES: Mapping[str, str] = {}


def describe(change: Mapping[str, Any], names: Mapping[str, str] = NO_NAMES) -> str:
    """Return what a change of any kind is about, and what it says, in one line.

    `names` are those of leases and requests that it mentions and does not bring, by id.
    """
    if "lease" in change:
        return f"{recorded_name(change)} on {content_of(change)}"
    if "request" in change:
        asks = "will ask" if change["change"] == "announced" else "asks"
        request = change["request"]
        gpus = request.get("gpus", 0) * request.get("gpu_milli", MILLI_PER_GPU) / MILLI_PER_GPU
        return f"{recorded_name(change)} {asks} for {times(request.get('nodes', 1), counted(gpus, 'GPU'))}"
    subject = _name(change.get("lease_id", ""), names) or change.get("node", "")
    return f"{subject} {content_of(change, names)}".strip()


def content_of(change: Mapping[str, Any], names: Mapping[str, str] = NO_NAMES) -> str:
    """Return what a change says beyond its kind, and the lease or server that it is about."""
    if "lines" in change:
        return "; ".join(change["lines"])
    where = _where(change)
    told = [str(change[name]) for name in ("outcome", "reason") if change.get(name)]
    if change.get("failed"):
        told.insert(0, "failed")
    if change["change"] == "quarantined":
        told.append("released by force" if change.get("revoked") else "not ended or renewed in time")
    if change["change"] == "deadlinerisk":
        told.append(risk_in_words(change.get("ends_by")))
    if "preemptor" in change:
        by = change["preemptor"]
        told.append(LIMITS.get(by) or (f"for {_name(preemptor_in_words(by), names)}" if by else "taken back"))
    return ": ".join(filter(None, (where, ", ".join(told))))


def risk_in_words(ends_by: float | None) -> str:
    """Return what a change of a deadline's risk says, in a clause."""
    if ends_by is None:
        return "is not expected to miss its deadline any more"
    return f"may miss its deadline: it should end by {as_text(ends_by)}"


def _name(lease_id: str, names: Mapping[str, str]) -> str:
    return names.get(lease_id, short(lease_id))


def by_whom(text: str, change: Mapping[str, Any]) -> str:
    """Return a text about a change with who asked for it, if somebody did."""
    return f"{text}, by {change['by']}" if change.get("by") else text


def _where(change: Mapping[str, Any]) -> str:
    """Return the part of a lease or server that a change is about, empty if it is about all of it."""
    if "lease" in change:
        return "; ".join(
            f"{member['node']}, {numbered_gpus(member.get('gpu_ids', ()))}"
            for member in change["lease"]["members"]
        )
    if "gpu_id" in change:
        return f"GPU {change['gpu_id']}"
    if "ranks" in change:
        return f"ranks {', '.join(map(str, change['ranks']))}"
    if "places" in change:
        return ", ".join(filter(None, (place.get("address") for place in change["places"])))
    return counted(len(change["nodes"]), "server") if "nodes" in change else ""
