"""Health of a GPU: which conditions a report shows, and what the manager does about each."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from resource_manager.agent.reports import GpuReport
from resource_manager.errors import ResourceManagerError, place_in


class HealthAction(StrEnum):
    """Action on a condition; closing never ends a lease."""

    IGNORE = "ignore"
    NOTE = "note"
    CLOSE_AFTER_LEASE = "close after lease"
    CLOSE_NOW = "close now"
    CLOSE_SERVER = "close server"


class HealthTableError(ResourceManagerError, ValueError):
    """A health table that cannot be read; the message says file and reason."""


class Rule(BaseModel):
    """One table of the file; `catalog` is the immediate action that NVIDIA's catalogue gives for the XID.

    With `recovers` a GPU that was closed for it is opened once reports no longer show it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    condition: str = Field(min_length=1, max_length=250, pattern="^[^;]*$")
    action: HealthAction
    text: str = Field(max_length=250)
    todo: str = Field(default="", max_length=250)
    catalog: str = Field(default="", max_length=250)
    recovers: bool = False


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    conditions: list[Rule]


@dataclass(frozen=True, slots=True)
class Finding:
    """A condition that a report shows, what the manager does about it, and what a person should do."""

    condition: str
    action: HealthAction
    text: str
    todo: str


HealthTable = Mapping[str, Rule]
"""Rule of each condition by its name."""


def load_health_table(path: Path | None = None) -> HealthTable:
    """Return the built-in table, with the rules of the file in place of those of the same condition.

    Raises `HealthTableError`.
    """
    table = _built_in()
    return table if path is None else {**table, **_read(str(path), _text_of(path))}


@cache
def _built_in() -> HealthTable:
    return _read("health.toml", (files(__package__) / "health.toml").read_text(encoding="utf-8"))


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise HealthTableError(f"{path}: {reason}") from error


def _read(name: str, text: str) -> dict[str, Rule]:
    try:
        rules = _File.model_validate(tomllib.loads(text)).conditions
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(place_in(first["loc"]))
        raise HealthTableError(f"{name}: {where}: {first['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise HealthTableError(f"{name}: {error}") from error
    found = {rule.condition: rule for rule in rules}
    if len(found) != len(rules):
        raise HealthTableError(f"{name}: a condition is there twice")
    return found


def findings(gpu: GpuReport, table: HealthTable) -> tuple[Finding, ...]:
    """Return what the report of a GPU shows, the most severe first; without what the table ignores."""
    found = [_finding(condition, table) for condition in _conditions(gpu)]
    if not found:
        return ()
    order = list(HealthAction)
    kept = [finding for finding in found if finding.action is not HealthAction.IGNORE]
    return tuple(sorted(kept, key=lambda finding: -order.index(finding.action)))


def _finding(condition: str, table: HealthTable) -> Finding:
    rule = table.get(condition)
    if rule is None:
        return Finding(condition, HealthAction.NOTE, "not in the health table", "look it up in the catalogue")
    return Finding(condition, rule.action, rule.text, rule.todo)


def _conditions(gpu: GpuReport) -> Iterator[str]:
    """Yield the names of the conditions that the report shows; what is unknown shows nothing."""
    if gpu.lost:
        yield "gpu lost"
    if gpu.rows_failed:
        yield "row remap failed"
    if gpu.rows_pending:
        yield "row remap pending"
    if gpu.pages_pending:
        yield "page retirement pending"
    if gpu.recovery_action not in (None, "none"):
        yield f"recovery action: {gpu.recovery_action}"
    if any(reason.startswith("hardware") for reason in gpu.throttle_reasons or ()):
        yield "hardware slowdown"
    if gpu.vendor_state is not None:
        yield f"state: {gpu.vendor_state}"
    for xid in gpu.xids or ():
        yield f"xid {xid.xid}"
