"""Answers of a service as a client takes them: of the shape they should have, and harmless to show."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Mapping
from typing import (
    Any,
    Literal,
    NotRequired,
    TypedDict,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from resource_manager.manager.results import (
    Allocation,
    ClusterDiff,
    ClusterView,
    Explanation,
    QueueEntry,
    ServerDetail,
    ServerSummary,
    Submission,
    Summary,
    TeamsView,
    WindowView,
)

_STEERING = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters, and those that turn the direction of text: no name or reason has one."""

MAX_DEPTH = 50
MAX_NUMBER = 2**63


def harmless(value: Any, depth: int = 0) -> Any:
    """Return JSON whose texts cannot steer a terminal: what would is escaped. Raises `ValueError` if deep."""
    if isinstance(value, str):
        return value if value.isprintable() else _STEERING.sub(lambda found: ascii(found[0])[1:-1], value)
    if isinstance(value, list | dict) and depth > MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH}")
    if isinstance(value, list):
        return [harmless(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {
            harmless(key): _harmless_file(item) if key == "toml" else harmless(item, depth + 1)
            for key, item in value.items()
        }
    return value


def _harmless_file(text: Any) -> Any:
    """Return the text of a file, the only one with several lines."""
    return "\n".join(map(harmless, text.split("\n"))) if isinstance(text, str) else harmless(text)


def mismatch(value: Any, kind: Any, where: str = "") -> str | None:
    """Return where and why JSON is not of that type, a `TypedDict`, its fields or a part; None if it is."""
    origin, of = get_origin(kind), get_args(kind)
    if kind is Any:
        return None
    if kind in (int, float) and type(value) in (int, kind):
        return None if -MAX_NUMBER < value < MAX_NUMBER else f"{where or 'it'} is no number"
    if origin in (Union, types.UnionType):
        found = [mismatch(value, each, where) for each in of]
        return None if None in found else next((each for each in found if each), None)
    if origin is NotRequired:
        return mismatch(value, of[0], where)
    if origin is Literal:
        return None if value in of else f"{where or 'it'} is not one of {', '.join(map(str, of))}"
    if is_typeddict(kind) or isinstance(kind, dict):
        return _mismatched_field(value, kind if isinstance(kind, dict) else _fields(kind), where)
    expected = dict if origin is Mapping else origin or kind
    if kind is None or kind is types.NoneType:
        return None if value is None else f"{where or 'it'} is no null"
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        return f"{where or 'it'} is no {expected.__name__}"
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not of:
        return None
    return next(
        filter(None, (mismatch(item, of[-1], f"{where}[{str(key)[:40]}]") for key, item in items)), None
    )


def _mismatched_field(value: Any, fields: Mapping[str, Any], where: str) -> str | None:
    if not isinstance(value, dict):
        return f"{where or 'it'} is no object"
    for name, hint in fields.items():
        path = f"{where}.{name}" if where else name
        if name in value:
            if found := mismatch(value[name], hint, path):
                return found
        elif get_origin(hint) is not NotRequired:
            return f"{path} is missing"
    return None


@functools.cache
def _fields(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


class _Recorded(TypedDict):
    """The keys that each change of the history has."""

    version: int
    change: str
    at: float


def _with(name: str, kind: Any) -> Any:
    """Return the type of an answer whose member `name` is of that type, and which may be a page."""
    return {name: kind, "next": NotRequired[int | None]}


def answer_of(method: str, path: str) -> Any:
    """Return the type of the answer to a call."""
    known = f"{method} {re.sub('/[0-9]+', '', path)}"
    if known == "GET /api/gpus":
        from resource_manager.agent.use import ServerUse  # with much that no other call needs

        return _with("items", list[ServerUse])
    if known == "GET /api/report":
        from resource_manager.manager.report import Report

        return Report
    return _ANSWERS.get(known, dict[str, Any])


_ANSWERS: dict[str, Any] = {
    "GET /api/caller": {"name": str, "role": str, "teams": list[str]},
    "GET /api/cluster": ClusterView,
    "GET /api/explain": Explanation,
    "GET /api/history": _with("items", list[_Recorded]),
    "GET /api/leases": _with("items", list[Allocation]),
    "GET /api/leases/preempting": _with("items", list[Allocation]),
    "GET /api/maintenance": _with("windows", list[WindowView]),
    "GET /api/queue": _with("items", list[QueueEntry]),
    "GET /api/servers": ServerDetail,
    "GET /api/status": Summary,
    "GET /api/task": Submission,
    "GET /api/task/explain": Explanation,
    "GET /api/teams": TeamsView,
    "POST /api/allocate": Allocation,
    "POST /api/allocate/batch": _with("results", list[Allocation | None]),
    "POST /api/maintenance": WindowView,
    "POST /api/maintenance/remove": _with("window", WindowView | None),
    "POST /api/place": Allocation,
    "POST /api/preempt": Allocation,
    "POST /api/release": {"quarantined": bool},
    "POST /api/renew": Allocation,
    "POST /api/reset": {"success": bool},
    "POST /api/servers/adopt": ServerDetail,
    "POST /api/servers/drain": ServerSummary,
    "POST /api/servers/resume": ServerSummary,
    "POST /api/servers/searched": ServerSummary,
    "POST /api/submit": Submission,
    "PUT /api/cluster": ClusterDiff,
}
