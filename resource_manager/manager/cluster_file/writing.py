"""Writing of a cluster as the file that `apply` takes again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from resource_manager.core.cluster import ClusterState
from resource_manager.core.cluster_settings import ClusterSettings, HealthRule
from resource_manager.core.maintenance import Window, as_text
from resource_manager.core.models import GANG_PORTS, RUNS_JOBS, Gpu, Node
from resource_manager.core.teams import stated
from resource_manager.manager.cluster_file import notice_tables
from resource_manager.manager.cluster_file.positions import dotted, quoted
from resource_manager.manager.cluster_file.sections import DEFAULTS, KEYS
from resource_manager.manager.cluster_file.servers import MPS_FOLDER
from resource_manager.manager.cluster_file.sign_on import form_of

TABLES_WITHIN = {(), ("teams",), ("sign_on", "groups")}
"""Tables whose tables have a header each; others are written in one line."""

USUAL = {"vendor": "nvidia", "gang_ports": list(GANG_PORTS)}
"""Values of servers that are not stated, besides empty ones."""


def sections_of(cluster: ClusterState) -> dict[str, Any]:
    """Return what is stored, but for leases and other state, in the form of a file; no defaults."""
    teams = stated(cluster.teams)
    found: dict[str, Any] = {
        **{key: value for key, value in teams.items() if key != "teams"},
        "cluster": _settings(cluster.settings),
        "servers": list(_servers(cluster.inventory)),
        "teams": teams["teams"],
        "maintenance": [_window(window) for window in cluster.windows if window.in_file],
        "health": {rule.condition: _rule(rule) for rule in cluster.settings.health},
        "sign_on": form_of(cluster.settings.sign_on),
        "notices": [notice_tables.form_of(notice) for notice in cluster.settings.notices],
    }
    return {key: value for key, value in found.items() if value not in ({}, [])}


def _settings(settings: ClusterSettings) -> dict[str, Any]:
    values = ((key, getattr(settings, field), getattr(DEFAULTS, field)) for key, field in KEYS.items())
    return {key: _plain(value) for key, value, usual in values if value != usual}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


def _servers(nodes: Iterable[Node]) -> Iterator[dict[str, Any]]:
    next_id = 0
    for node in nodes:
        resources = dict(node.resources)
        ours = RUNS_JOBS if node.job_user else {}
        found = {
            "name": node.name,
            "id": None if node.server_id == next_id else node.server_id,
            "address": node.address,
            "cpus": resources.pop("cpus", 0),
            "memory_mib": resources.pop("memory_mib", None),
            "vendor": node.vendor,
            "interface": node.interface,
            "gang_ports": list(node.gang_ports),
            "mps": node.mps == MPS_FOLDER or node.mps,
            "confine": node.confine,
            "writable": list(node.writable),
            "job_user": node.job_user,
            "islands": [list(island) for island in node.islands],
            "resources": resources,
            "labels": {name: text for name, text in node.labels.items() if (name, text) not in ours.items()},
        }
        next_id = node.server_id + 1
        gpus = (_alike(node) or {"gpus": list(_gpus(node.gpus))}) if node.gpus else {}
        yield {**_unusual(found), **gpus}


def _unusual(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file has to state of a table."""
    return {key: value for key, value in table.items() if value not in (USUAL.get(key, ""), None, [], {})}


def _alike(node: Node) -> dict[str, Any]:
    """Return the number of a node's GPUs and what they are, if they differ in their number only."""
    first = node.gpus[0]
    vendor = node.vendor or "nvidia"
    if (
        first.uuid
        or first.vendor != vendor
        or any(gpu != replace(first, gpu_id=number) for number, gpu in enumerate(node.gpus))
    ):
        return {}
    memory_mib = first.memory_mib or None
    return _unusual({"gpus": len(node.gpus), "gpu_type": first.gpu_type, "gpu_memory_mib": memory_mib})


def _gpus(gpus: Sequence[Gpu]) -> Iterator[dict[str, Any]]:
    for _, found in groupby(gpus, key=lambda gpu: (replace(gpu, gpu_id=0, uuid=""), not gpu.uuid)):
        group = list(found)
        first = group[0]
        yield _unusual(
            {
                "ids": [gpu.gpu_id for gpu in group],
                "type": first.gpu_type,
                "vendor": first.vendor,
                "memory_mib": first.memory_mib or None,
                "uuids": [gpu.uuid for gpu in group] if first.uuid else None,
            }
        )


def _window(window: Window) -> dict[str, Any]:
    return _unusual(
        {
            "servers": list(window.servers),
            "from": as_text(window.begin),
            "until": as_text(window.end),
            "every": "week",
            "reason": window.reason,
            "preempt": window.preempt or None,
        }
    )


def _rule(rule: HealthRule) -> Any:
    if not (rule.text or rule.todo or rule.recovers):
        return rule.action
    recovers = rule.recovers or None
    return _unusual({"action": rule.action, "text": rule.text, "todo": rule.todo, "recovers": recovers})


def to_toml(sections: Mapping[str, Any]) -> str:
    """Return the sections as TOML: plain keys first, then a table, or an array of tables, for each."""
    return "\n".join(_lines((), sections)).lstrip("\n") + ("\n" if sections else "")


def _lines(path: tuple[str, ...], table: Mapping[str, Any]) -> Iterator[str]:
    tables = {key: value for key, value in table.items() if _is_table(path, key, value)}
    for key, value in table.items():
        if key not in tables:
            yield f"{dotted([key])} = {_inline(value)}"
    for key, value in tables.items():
        for entry in value if isinstance(value, list) else [value]:
            name = dotted((*path, key))
            if isinstance(value, list):
                yield from ("", f"[[{name}]]")
            elif not entry or any(not _is_table((*path, key), *item) for item in entry.items()):
                yield from ("", f"[{name}]")
            yield from _lines((*path, key), entry)


def _is_table(path: tuple[str, ...], key: str, value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(entry, dict) for entry in value)
    return isinstance(value, dict) and (path in TABLES_WITHIN or (*path, key) in TABLES_WITHIN)


def _inline(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{dotted([key])} = {_inline(item)}' for key, item in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_inline, value))}]"
    return repr(value)
