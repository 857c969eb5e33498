"""What is kept of a server's reports: the last one, and a record of all of them that outlives it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from pydantic import TypeAdapter, ValidationError

from resource_manager.agent.report_format import Report, ReportError, read_report
from resource_manager.errors import StoreFullError
from resource_manager.fleet.lease_use import GpuSample, LeaseUse
from resource_manager.fleet.sightings import Sightings
from resource_manager.fleet.silence import SILENT_INTERVALS
from resource_manager.storage import Store
from resource_manager.storage.clock import JUMP_S

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Record:
    """State of a server's reports so far: `received_at` by the store's clock, of the last good one.

    `clean` counts reports in a row without a condition, by GPU id, -1 for the server; `gpus` are the last
    samples by GPU id, `leases` the use so far by fencing token, `jobs` what was seen of placed jobs, which
    were last listed at `listed_at`. `mps` are the UUIDs of the GPUs whose MPS daemon ran. `has_place` says
    whether the agent runs jobs.
    """

    received_at: float
    interval_s: float
    at: float
    boot_id: str | None = None
    uptime_s: float | None = None
    hostname: str = ""
    clean: dict[int, int] = field(default_factory=dict)
    gpus: dict[int, GpuSample] = field(default_factory=dict)
    leases: dict[int, LeaseUse] = field(default_factory=dict)
    jobs: Sightings = field(default_factory=Sightings)
    listed_at: float = 0.0
    mps: tuple[str, ...] = ()
    has_place: bool = False

    def tells_of(self, now: float) -> bool:
        """Return whether what the agent last reported tells of now: not if it is old, or of before a jump."""
        return self.received_at - JUMP_S <= now <= self.received_at + SILENT_INTERVALS * self.interval_s


_RECORD = TypeAdapter(Record)


def record_to_json(record: Record) -> bytes:
    return _RECORD.dump_json(record)


def record_from_json(text: bytes) -> Record | None:
    """Return the record that `record_to_json` wrote, or None for text that is none."""
    try:
        return _RECORD.validate_json(text)
    except ValidationError:
        return None


def keep(store: Store, report: Report, record: Record) -> None:
    """Keep a report for as long as it says something of now, and the record; a full store keeps neither."""
    body = report.model_dump_json(exclude_defaults=True).encode()
    try:
        store.reports.put(report.server, body, record_to_json(record), SILENT_INTERVALS * record.interval_s)
    except StoreFullError as error:
        logger.warning("the report of %s was not kept: %s", report.server, error)


def records_of(store: Store, servers: Iterable[str]) -> dict[str, Record]:
    """Return the records of those of the servers that have reported."""
    found = {name: record_from_json(text) for name, text in store.reports.records(servers).items()}
    return {name: record for name, record in found.items() if record is not None}


def reports_of(store: Store, servers: Iterable[str]) -> dict[str, Report]:
    """Return the last reports of those of the servers that have one; one that cannot be read is left out."""
    found: dict[str, Report] = {}
    for name, text in store.reports.reports(servers).items():
        try:
            found[name] = read_report(text)
        except ReportError as error:
            logger.warning("the report of %s cannot be shown: %s", name, error)
    return found
