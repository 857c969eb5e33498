"""Health of a GPU: which conditions a report shows, and what the manager does about each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
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


HealthTable = Mapping[str, HealthRule]
"""Rule of each condition by its name."""


@lru_cache(maxsize=8)
def health_table(rules: tuple[HealthRule, ...] = ()) -> HealthTable:
    """Return the built-in table with these rules, which have its texts where they have none."""
    table = dict(_built_in())
    for rule in rules:
        usual = table.get(rule.condition, rule)
        table[rule.condition] = replace(rule, text=rule.text or usual.text, todo=rule.todo or usual.todo)
    return table


@cache
def _built_in() -> HealthTable:
    with as_file(files(__package__) / "health.toml") as path:
        return {rule.condition: rule for rule in load_health(path)}


def findings(gpu: GpuReport, table: HealthTable) -> tuple[HealthRule, ...]:
    """Return the rules of what a report shows of a GPU, the most severe first; without what they ignore."""
    unlisted = "not in the health table", "look it up in the catalogue"
    found = [table.get(each) or HealthRule(each, HealthAction.NOTE, *unlisted) for each in _conditions(gpu)]
    order: list[str] = list(HealthAction)
    kept = [rule for rule in found if rule.action != HealthAction.IGNORE]
    return tuple(sorted(kept, key=lambda rule: -order.index(rule.action)))


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
