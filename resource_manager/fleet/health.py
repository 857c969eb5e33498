"""Health of a GPU: which conditions a report shows, and what the manager does about each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, lru_cache
from importlib.resources import as_file, files

from resource_manager.agent.report_format import GpuReport
from resource_manager.core.cluster_settings import HealthRule
from resource_manager.manager.cluster_file.reading import load_health


class HealthAction(StrEnum):
    """Action on a condition; closing never ends a lease."""

    IGNORE = "ignore"
    NOTE = "note"
    CLOSE_AFTER_LEASE = "close after lease"
    CLOSE_NOW = "close now"
    CLOSE_SERVER = "close server"


@dataclass(frozen=True, slots=True)
class Finding:
    """A condition that a report shows, what the manager does about it, and what a person should do."""

    condition: str
    action: HealthAction
    text: str
    todo: str


HealthTable = Mapping[str, HealthRule]
"""Rule of each condition by its name."""


@lru_cache(maxsize=8)
def health_table(rules: tuple[HealthRule, ...] = ()) -> HealthTable:
    """Return the built-in table, with these rules in place of those of the same condition."""
    built_in = _built_in()
    return {**built_in, **{rule.condition: _completed(rule, built_in.get(rule.condition)) for rule in rules}}


def _completed(rule: HealthRule, built_in: HealthRule | None) -> HealthRule:
    """Return the rule with the texts of the built-in one where it has none."""
    if built_in is None:
        return rule
    return replace(rule, text=rule.text or built_in.text, todo=rule.todo or built_in.todo)


@cache
def _built_in() -> HealthTable:
    with as_file(files(__package__) / "health.toml") as path:
        return {rule.condition: rule for rule in load_health(path)}


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
    return Finding(condition, HealthAction(rule.action), rule.text, rule.todo)


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
