"""Calls of every route with hostile values in their fields, parameters and headers."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from pydantic import BaseModel

from resource_manager.rest.api import routes
from resource_manager.rest.console import pages
from resource_manager.rest.routing import Route
from tests.security import hostile

DEEP: Any = "x"
for _ in range(200):
    DEEP = [DEEP]

VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**53 + 1,
    2**63,
    2**64,
    10**400,
    -(10**400),
    0.5,
    -0.0,
    5e-324,
    1e308,
    float("nan"),
    float("inf"),
    "",
    " ",
    "0",
    "-0",
    "1e9",
    "0x10",
    "NaN",
    "9" * 5000,
    "x" * 10_000,
    "٣",
    "²",
    "true",
    "null",
    "30d",
    "1e999d",
    "2026-02-30T25:61",
    "9999-12-31T23:59:59+14:00",
    "0001-01-01T00:00:00-14:00",
    "*",
    "a[0]",
    "a.b[9999999999]",
    "\ud800",
    "👩‍🚀" * 50,
    [],
    [[]],
    [None],
    ["a", "a"],
    list(range(2000)),
    {},
    {"": ""},
    {"a": None},
    {"a": {"b": {}}},
    {"x" * 300: 1},
    DEEP,
    *hostile.NAMES,
    *hostile.UNPRINTABLE,
)

PLAUSIBLE: dict[str, Any] = {
    "task_id": "t",
    "required_gpus": 2,
    "required_cpus": 1,
    "gpus": 1,
    "fencing_token": 1,
    "confirm": True,
    "id": "t",
    "name": "t",
    "key": "u",
    "places": [{"launcher": "ssh", "address": "a", "machine": "m", "folder": "/f", "mark": "m", "user": "u"}],
    "requests": [{"task_id": "t", "required_gpus": 2, "required_cpus": 1}],
    "sections": {"teams": {"a": {"guaranteed": 1}}},
    "servers": ["gpu-server-0"],
    "from": "2030-01-01T00:00Z",
    "until": "2030-01-02T00:00Z",
    "exact": True,
    "dry_run": True,
}

HEADERS = ("Idempotency-Key", "Content-Type", "Accept", "traceparent", "X-Forwarded-For", "Last-Event-ID")
STREAMS = ("/events",)
"""Answers that do not end."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call; `body` is None for routes without one."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes | None


def all_routes() -> list[Route]:
    return [route for route in (*routes.all, *pages.routes.all) if route.path not in STREAMS]


def calls(rng: random.Random) -> Iterator[Call]:
    """Yield calls of all routes again and again, each time with other values."""
    while True:
        for route in all_routes():
            yield _call(route, rng)


def _call(route: Route, rng: random.Random) -> Call:
    path = re.sub(
        r"<(?:\w+:)?\w+>", lambda found: quote(_text(rng.choice((0, *VALUES))), safe=""), route.path
    )
    query = _fields(route.query, rng)
    if query:
        pairs = [(name, _text(value)) for name, value in query.items()]
        path += "?" + urlencode(pairs, errors="replace")
    headers, body = {}, None
    if route.changes:
        headers["Content-Type"] = "application/json"
        body = json.dumps(_fields(route.body, rng), default=str).encode()
        if rng.random() < 0.1:
            body = body[: rng.randrange(len(body) + 1)]
        if rng.random() < 0.05:
            body = json.dumps(rng.choice(VALUES)).encode()
        if route.page and rng.random() < 0.8:
            headers["Content-Type"] = "application/x-www-form-urlencoded"
            form = {name: _text(value) for name, value in _fields(route.body, rng).items()}
            body = urlencode(form, errors="replace").encode()
    if rng.random() < 0.2:
        value = _text(rng.choice(VALUES)).encode("latin-1", "replace").decode("latin-1")
        headers[rng.choice(HEADERS)] = re.sub(r"[\x00-\x1f\x7f]", "", value).strip()[:4000]
    return Call(route.method, path, headers, body)


def _fields(model: type[BaseModel] | None, rng: random.Random) -> dict[str, Any]:
    names = [] if model is None else [field.alias or name for name, field in model.model_fields.items()]
    given = {name: PLAUSIBLE[name] for name in names if name in PLAUSIBLE}
    for name in rng.sample(names, min(rng.choice((1, 1, 2, 5)), len(names))):
        given[name] = rng.choice(VALUES)
    if rng.random() < 0.05:
        given["unknown"] = rng.choice(VALUES)
    return given


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text.encode("utf-8", "replace").decode()[:6000]
