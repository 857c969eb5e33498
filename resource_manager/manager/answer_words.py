"""Words for what an answer holds: names, times, numbers; light, since every command loads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from resource_manager.core.names import display_name, full_name, short


def name_in_words(entry: Mapping[str, Any]) -> str:
    """Return display name and short id of an allocation or queue entry, as `names.name_of` of a lease."""
    return f"{short(entry['name'])} {short_id_in_words(entry)}"


def short_id_in_words(entry: Mapping[str, Any]) -> str:
    """Return the short id, with the ranks of the remainder of a gang."""
    members = entry.get("members", ())
    ranks = ranges(member["rank"] for member in members) if members and len(members) < entry["nodes"] else ""
    return f"{entry['short_id']} rank {ranks}" if ranks else str(entry["short_id"])


def recorded_name(change: Mapping[str, Any]) -> str:
    """Return display name and short id of the lease or request that a change brings, empty if it does not."""
    entry = change.get("lease", change)
    if (request := entry.get("request")) is None:
        return ""
    if change["change"] == "announced":  # it has its number, and the short id made of it, once it asks
        return short(display_name(request["lease_id"], request.get("labels", {})))
    return full_name(request["lease_id"], request.get("labels", {}), entry.get("sequence", 0))


def ranges(ids: Iterable[int]) -> str:
    """Return numbers with neighbours joined: `0–3, 6`."""
    runs: list[list[int]] = []
    for number in sorted(ids):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def duration(seconds: float) -> str:
    """Format seconds as `45 s`, `12 min`, `3.5 h`, `2.0 d`."""
    for unit, size, rounding in (("d", 86_400.0, 180.0), ("h", 3600.0, 30.0)):  # no `24.0 h`, no `60 min`
        if seconds >= size - rounding:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{max(seconds, 0):.0f} s"


def short_uuid(uuid: str) -> str:
    """Return the first two parts of a GPU's UUID, for tables: `GPU-8f6a2c1e`."""
    return "-".join(uuid.split("-")[:2])
