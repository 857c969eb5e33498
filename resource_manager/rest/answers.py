"""Answers that only the service gives, and how a client takes any: checked, and harmless to show.

Those that the manager gives as well are in `manager/results.py`. The routes' return types name them all.
"""

from __future__ import annotations

import functools
import re
from typing import Any, Generic, NotRequired, TypeVar

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from resource_manager.manager.cluster_results import WindowView
from resource_manager.manager.results import Allocation

T = TypeVar("T")

MAX_HOLD_S = 25.0
"""Longest time that a request is held: proxies end those that are silent for longer, often 30 or 60 s."""


class Page(TypedDict, Generic[T]):
    """One page of a list; `next` is null on the last one."""

    items: list[T]
    next: int | None


class Change(TypedDict):
    """One change of the history, by its number: besides these keys it has those of its kind, `change`."""

    version: int
    change: str
    at: float


class Ordered(TypedDict):
    """Number of an order, which the report of its agent repeats once it is carried out."""

    n: str


class Done(TypedDict):
    """Confirmation of a change."""

    success: bool
    task_id: NotRequired[str]


class ReleaseAnswer(Done):
    """Confirmation of a release; `quarantined` if the lease was ended by force while its job may run."""

    quarantined: bool


class RefusedRequest(TypedDict):
    """Refusal of a request of a batch: its kind and one sentence."""

    kind: str
    detail: str


class BatchAnswer(TypedDict):
    """Answers to a batch: an entry for each request, in order: its allocation, or null and a refusal."""

    results: list[Allocation | None]
    refusals: list[RefusedRequest | None]


class AnnounceAnswer(TypedDict):
    """Whether the demand is announced now."""

    announced: bool


class WithdrawAnswer(TypedDict):
    """How many demands were withdrawn."""

    withdrawn: int


class RenewBatchAnswer(TypedDict):
    """Of each lease, in the order of the renewals, whether it is still held by the caller."""

    renewed: list[bool]


class MaintenanceAnswer(TypedDict):
    """The maintenance windows that are open or to come, the next first."""

    windows: list[WindowView]


class MaintenanceRemoveAnswer(TypedDict):
    """The maintenance window that was removed; null if there was none of that number, as after a removal."""

    window: WindowView | None


class Trend(TypedDict):
    """Columns of equal length; null for a time without data.

    `time` has the starts of the steps, in seconds since the epoch; `allocated` is the part of all GPUs in
    percent, `queue` the mean length of the queue, `wait` and `longest` the mean and the longest wait of the
    requests granted, in seconds.
    """

    time: list[int]
    allocated: list[float | None]
    queue: list[float | None]
    wait: list[float | None]
    longest: list[float | None]


class CallerAnswer(TypedDict):
    """The caller as the service knows them, and the teams they may name; none: any team."""

    name: str
    role: str
    teams: list[str]


class SnapshotAnswer(TypedDict):
    """The whole state, as the first line of an exported history has it."""

    snapshot: dict[str, Any]


class DeviceAnswer(TypedDict):
    """Begun log-in: `user_code` is entered at `verification_uri`; `device_code` is asked about meanwhile."""

    user_code: str
    verification_uri: str
    verification_uri_complete: NotRequired[str]
    device_code: str
    interval_s: float


class LogInAnswer(TypedDict):
    """State of a log-in: nulls until the person has logged in, then their token, which is not stored."""

    token: str | None
    expires_at: float | None
    caller: CallerAnswer | None


class Health(TypedDict):
    """Health of the service: `ok`, its version, and the number of the stored format that it reads."""

    status: str
    version: str
    format: int


class Problem(TypedDict):
    """Problem (RFC 9457); `error` is the original design's. A refusal has a `kind`, such as `no_capacity`."""

    type: str
    title: str
    status: int
    detail: str
    error: str


_STEERING = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters, and those that turn the direction of text: no name or reason has one."""

MAX_DEPTH = 50
MAX_NUMBER = 2**63
"""Bound of the numbers of answers: larger ones are no times, tokens or amounts."""


def harmless(value: Any, depth: int = 0) -> Any:
    """Return JSON whose texts cannot steer a terminal: what would is escaped.

    Raises `ValueError` if it is nested too deep, or has a number that is none of ours.
    """
    if isinstance(value, str):
        return value if value.isprintable() else _STEERING.sub(lambda found: ascii(found[0])[1:-1], value)
    if isinstance(value, float | int) and not -MAX_NUMBER < value < MAX_NUMBER:
        raise ValueError(f"it has the number {value:.3g}")
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


def check(answer: Any, kind: Any) -> None:
    """Raise `ValueError` with one line if JSON is not of that type; keys that it does not name are fine."""
    try:
        _adapter(kind).validate_python(answer, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part)[:40] for part in first["loc"])
        raise ValueError(f"{where}: {first['msg']}") from error


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
