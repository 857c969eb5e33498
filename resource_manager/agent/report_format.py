"""Report of a server: what its probe saw, checked before anything else looks at it."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from resource_manager.agent import probe
from resource_manager.core.identifiers import UNPRINTABLE
from resource_manager.core.models import MAX_TIME_S
from resource_manager.errors import ResourceManagerError, place_in
from resource_manager.manager.cluster_file.servers import MAX_GPUS_OF_SERVER, PciAddress, Uuid, Vendor

Text = Annotated[str, Field(max_length=probe.MAX_TEXT, pattern=f"^[^{UNPRINTABLE}]*$")]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, Field(ge=0, lt=1e15, allow_inf_nan=False)]
Time = Annotated[float, Field(ge=0, le=MAX_TIME_S, allow_inf_nan=False)]
ExitCode = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class ReportError(ResourceManagerError, ValueError):
    """A report that cannot be used; the message says where and why."""


class Strict(BaseModel):
    """Model that takes no other fields and converts no types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ProcessReport(Strict):
    """Process that computes on a GPU; None is what the probe's user may not read.

    `lease_source` says where the lease or the job was found, or `none`, or `unreadable`. One of a job that
    only `draws` is told, too; it may be on GPUs that it merely found.
    """

    pid: Annotated[int, Field(gt=0, lt=2**31)]
    user: Text | None
    command: Text | None
    memory_mib: Count | None
    lease_id: Annotated[str, Field(max_length=probe.MAX_LEASE_ID, pattern=f"^[^{UNPRINTABLE}]*$")] | None
    job: Text | None
    lease_source: Literal["environment", "ancestor", "registration", "cgroup", "none", "unreadable"]
    draws: bool = False


class XidReport(Strict):
    """XID of a GPU since the last report: how often it came, and when last (seconds since 1970)."""

    xid: Annotated[int, Field(ge=0, lt=2**31)]
    count: Annotated[int, Field(ge=1, lt=2**63)]
    at: Number


class GpuReport(Strict):
    """GPU, or MIG device, as its server sees it; None is what its library or tool cannot say."""

    index: Annotated[int, Field(ge=0, lt=MAX_GPUS_OF_SERVER)]
    uuid: Uuid | None
    type: Text
    vendor: Vendor
    lost: bool
    mig: Text | None
    memory_mib: Count | None
    memory_used_mib: Count | None
    utilization_percent: Annotated[int, Field(ge=0, le=100)] | None
    temperature_c: Annotated[int, Field(ge=-273, le=1000)] | None
    power_w: Number | None
    energy_mj: Count | None
    ecc_uncorrected: Count | None
    rows_pending: bool | None
    rows_failed: bool | None
    pages_pending: bool | None
    throttle_reasons: Annotated[list[Text], Field(max_length=64)] | None
    recovery_action: Text | None
    xids: Annotated[list[XidReport], Field(max_length=probe.MAX_XIDS_OF_GPU)] | None
    pci: PciAddress | None
    numa_node: Annotated[int, Field(ge=0, lt=4096)] | None
    nvlink_group: Annotated[int, Field(ge=0, lt=MAX_GPUS_OF_SERVER)] | None
    vendor_state: Text | None
    processes: Annotated[list[ProcessReport], Field(max_length=probe.MAX_PROCESSES_OF_GPU)] | None


class JobsReport(Strict):
    """Jobs of which the server has a process, by key; `complete` if the probe could read all processes."""

    keys: Annotated[list[Text], Field(max_length=probe.MAX_JOBS)]
    complete: bool


class PlaceReport(Strict):
    """Where an agent runs jobs, as the place of a job says it."""

    machine: Text
    folder: Text
    mark: Text
    user: Text


class RunReport(Strict):
    """Job that an agent runs or ran, by key; `want` and `n` are of the last order that it has carried out.

    `error` is why it could not, `refusal` its kind. `began`: a start began it. `ended`: it is never started
    again. `last_line` is that of the output of a job that is over. `walls` are as in the place of a job.
    """

    key: Text
    state: Literal["absent", "running", "finished"]
    exit_code: ExitCode | None
    ended_at: Time | None
    checkpoint_at: Time | None
    preempted: bool
    want: Text | None
    n: Text | None
    error: Annotated[str, Field(max_length=probe.MAX_ERROR)] | None
    refusal: Text | None
    began: bool | None
    last_line: Annotated[str, Field(max_length=4000)]
    ended: bool
    walls: Text


class Report(Strict):
    """Report of one server at one moment of its own clock.

    With an `error` nothing is known of the GPUs, and this is the reason. `boot_id` and `uptime_s` order the
    reports of a server whatever its clock says.
    """

    format: Literal[1]
    server: Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9._-]+$")]
    hostname: Text
    at: Number
    boot_id: Text | None
    uptime_s: Number | None
    source: Text
    error: Annotated[str, Field(max_length=probe.MAX_ERROR, pattern=f"^[^{UNPRINTABLE}]*$")] | None
    driver: Text | None
    gpus: Annotated[list[GpuReport], Field(max_length=MAX_GPUS_OF_SERVER)]
    cpus: Annotated[int, Field(ge=1, le=1_000_000)] | None
    load_1m: Number | None
    memory_mib: Count | None
    memory_available_mib: Count | None
    disk_free_mib: Count | None
    interval_s: Annotated[float, Field(ge=0.1, le=3600, allow_inf_nan=False)] | None = None
    """Time between two reports of an agent."""
    version: Text | None = None
    """Version of the agent; a probe over ssh has none."""
    machine: Text | None = None
    """What tells this machine from others, as in the place of a job."""
    jobs: JobsReport | None = None
    """The jobs that run there, if the service asked for them."""
    mps: Annotated[list[Uuid], Field(max_length=MAX_GPUS_OF_SERVER)] | None = None
    """UUIDs of the GPUs whose MPS daemon runs; None if the agent was not asked to keep any."""
    mps_error: Text | None = None
    """Why one does not run that was asked for."""
    place: PlaceReport | None = None
    """Where the agent runs jobs; None if it runs none."""
    runs: Annotated[list[RunReport], Field(max_length=probe.MAX_JOBS)] | None = None
    """The jobs that it runs, and those that are over and still have a folder."""
    generation: Text | None = None
    """Mark of the newest state that the agent was told of."""

    @property
    def here(self) -> dict[str, str] | None:
        """Where the agent runs jobs, as it is compared with the place of a job."""
        return None if self.place is None else dict(self.place)


def read_report(text: str | bytes) -> Report:
    """Return the report in a JSON text; raises `ReportError` with one line."""
    if len(text) > probe.MAX_REPORT_BYTES:
        raise ReportError(f"report: {len(text):,} bytes; at most {probe.MAX_REPORT_BYTES:,}")
    try:
        return _without_repeats(Report.model_validate_json(text))
    except ValidationError:  # what is said of it begins with its format
        pass
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ReportError(f"report: not JSON: {error}") from error
    return check_report(value)


def check_report(value: Any) -> Report:
    """Return the report of a decoded JSON value; raises `ReportError` with one line.

    Format and number of GPUs come first: the rest of another format says nothing.
    """
    if not isinstance(value, dict):
        raise ReportError("report: not a JSON object")
    if value.get("format") != probe.FORMAT:
        newer = isinstance(value.get("format"), int) and value["format"] > probe.FORMAT
        raise ReportError(
            f"report: format {str(value.get('format'))[:20]!r}; this version reads format {probe.FORMAT}"
            + (": upgrade the service before the servers" if newer else "")
        )
    gpus = value.get("gpus")
    if isinstance(gpus, list) and len(gpus) > MAX_GPUS_OF_SERVER:
        raise ReportError(f"report: {len(gpus):,} GPUs; a server has at most {MAX_GPUS_OF_SERVER:,}")
    try:
        return _without_repeats(Report.model_validate(value))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(place_in(first["loc"]))
        raise ReportError(f"report: {where}: {first['msg']}") from error


def _without_repeats(report: Report) -> Report:
    indexes = [gpu.index for gpu in report.gpus]
    uuids = [gpu.uuid for gpu in report.gpus if gpu.uuid is not None]
    if len(set(indexes)) != len(indexes) or len(set(uuids)) != len(uuids):
        raise ReportError("report: two GPUs have one index or one UUID")
    return report
