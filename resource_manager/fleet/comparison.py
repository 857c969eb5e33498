"""Comparison of a server's GPUs in the inventory with those that it reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from resource_manager.agent.report_format import GpuReport, Report
from resource_manager.core.models import Gpu
from resource_manager.fleet.inventory_text import usable


class Verdict(StrEnum):
    """Result of a comparison: only with `DIFFERENT` the inventory is wrong, or a GPU is gone."""

    SAME = "same"
    RENUMBERED = "other numbers"
    DIFFERENT = "different"
    NOT_PINNED = "not pinned"


@dataclass(frozen=True, slots=True)
class Comparison:
    """GPUs by UUID: `missing` on the server, `unknown` to the inventory, with another number, or changed.

    A GPU that does not answer is missing. `renumbered` maps a UUID to its number in the inventory and on the
    server, `changed` has one line for each type or memory that differs.
    """

    verdict: Verdict
    missing: Mapping[str, int] = field(default_factory=dict)
    unknown: Mapping[str, int] = field(default_factory=dict)
    renumbered: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    changed: tuple[str, ...] = ()

    def in_words(self) -> str:
        """Return one line for people."""
        if self.verdict is Verdict.NOT_PINNED:
            return (
                "the inventory names no UUIDs for all of its GPUs: adopt pins those that the server reports"
            )
        parts = [f"missing: {_listed(self.missing)}"] if self.missing else []
        parts += [f"not in the inventory: {_listed(self.unknown)}"] if self.unknown else []
        parts += self.changed
        parts += [f"GPU {old} is now {new}" for old, new in self.renumbered.values()]
        return "; ".join(parts) or "as in the inventory"


def compare(inventory: Iterable[Gpu], report: Report) -> Comparison:
    """Return how a server's report differs from its GPUs in the inventory."""
    expected = list(inventory)
    found = {gpu.uuid: gpu for gpu in usable(report) if gpu.uuid}
    if not all(gpu.uuid for gpu in expected) or (not expected and not found):
        return Comparison(Verdict.NOT_PINNED if expected else Verdict.SAME)
    pinned = {gpu.uuid: gpu for gpu in expected}
    both = {uuid: (gpu, found[uuid]) for uuid, gpu in pinned.items() if uuid in found}
    missing = {uuid: gpu.gpu_id for uuid, gpu in pinned.items() if uuid not in found}
    unknown = {uuid: gpu.index for uuid, gpu in found.items() if uuid not in pinned}
    renumbered = {
        uuid: (gpu.gpu_id, now.index) for uuid, (gpu, now) in both.items() if gpu.gpu_id != now.index
    }
    changed = tuple(line for gpu, now in both.values() for line in _changes(gpu, now))
    different = missing or unknown or changed
    verdict = Verdict.DIFFERENT if different else Verdict.RENUMBERED if renumbered else Verdict.SAME
    return Comparison(verdict, missing, unknown, renumbered, changed)


def _changes(gpu: Gpu, report: GpuReport) -> Iterable[str]:
    for name, before, now in (
        ("type", gpu.gpu_type, report.type),
        ("memory_mib", gpu.memory_mib, report.memory_mib),
    ):
        if before and now and before != now:  # what one of the two does not say cannot differ
            yield f"{gpu.uuid}: {name} {now}, in the inventory {before}"


def _listed(gpus: Mapping[str, int]) -> str:
    return ", ".join(f"{uuid} (GPU {index})" for uuid, index in gpus.items())
