"""A workload: an initial state, and the external events in order of time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path

from resource_manager.core import changes
from resource_manager.core.cluster import ClusterState, Snapshot
from resource_manager.core.fit import could_ever_fit, count_gpus
from resource_manager.core.lease_limits import LIMITS
from resource_manager.core.models import MILLI_PER_GPU, Gpu, Lease, Node, Placement, Request
from resource_manager.errors import InvalidRequestError
from resource_manager.manager.cluster_file.servers import MAX_GPUS, MAX_GPUS_OF_SERVER
from resource_manager.manager.refusal_wording import detail_of
from resource_manager.scheduling.reasons.capacity_grounds import never_fits
from simulator.errors import InputError
from simulator.io.rows import MAX_VALUE, Row, read_csv, read_json_items, read_json_lines

NODE_COLUMNS = ("node", "gpus")
JOB_COLUMNS = ("job", "submit_s", "runtime_s", "gpus")
AMOUNTS = ("cpus", "memory_mib")
MORE_NODE_COLUMNS = ("gpu_type", "vendor", *AMOUNTS)
MORE_JOB_COLUMNS = (
    *("gpu_milli", "gpu_types", "vendor", *AMOUNTS),
    *("nodes", "team", "priority", "expected_runtime_s"),
)


@dataclass(frozen=True, slots=True)
class Part:
    """One lease of a job: a job that was preempted, or that gave its lease back, has several.

    Times are seconds; `preempted_at` is when it was told to end, for `preempted_by`. `waits_again`: its job
    went back to the queue. `cleaned_s` passed from its end until all its GPUs were clean. `decided_at` has
    the times of all its preemptions, also of those that were taken back.
    """

    lease: Lease
    preempted_at: float | None = None
    preempted_by: str = ""
    ended_at: float = math.inf
    outcome: str = ""
    waits_again: bool = False
    cleaned_s: float = 0.0
    decided_at: tuple[float, ...] = ()

    @property
    def ran_s(self) -> float:
        """How long its job ran; one whose job did not start gave the lease back."""
        is_given_back = self.waits_again and self.outcome == changes.Outcome.NOT_STARTED
        return 0.0 if is_given_back else max(self.ended_at - self.lease.granted_at, 0.0)


@dataclass(frozen=True, slots=True)
class Job:
    """A request that arrives, and its run time once started, in seconds.

    `runtime_s` is infinite for a job that had not ended at the end of its recording. `recorded` are the
    leases that it got there, and `outcome` how it ended.
    """

    request: Request
    submitted_at: float
    runtime_s: float
    recorded: tuple[Part, ...] = ()
    outcome: str = ""

    @property
    def waited_s(self) -> float:
        """How long it waited in the recording until its last lease, in which it did not run before."""
        ran_s = sum(part.ran_s for part in self.recorded[:-1])
        return max(self.recorded[-1].lease.granted_at - self.submitted_at - ran_s, 0.0)

    @property
    def save_s(self) -> float:
        """How long the job takes to end when it is preempted, as far as it was recorded."""
        found = (part.ended_at - part.preempted_at for part in self.recorded if part.preempted_at is not None)
        return max((seconds for seconds in found if seconds < math.inf), default=0.0)

    @property
    def clean_s(self) -> float:
        """How long its GPUs take to be clean after it, as far as it was recorded."""
        return max((part.cleaned_s for part in self.recorded), default=0.0)


ServerChange = (
    changes.Drained
    | changes.Resumed
    | changes.TeamsChanged
    | changes.MaintenanceChanged
    | changes.GpuClosed
    | changes.GpuOpened
    | changes.InventoryChanged
    | changes.ClusterSettingsChanged
)
"""A change that people and events outside of scheduling make to servers and rules."""

LeaseChange = (
    changes.Released
    | changes.Expired
    | changes.MembersReleased
    | changes.Renewed
    | changes.Quarantined
    | changes.Preempting
)
"""A change to a recorded lease; it counts only for a lease that began when that one did."""

ExternalEvent = changes.Change
"""A change other than an arrival that the scheduler did not decide; a `Preempting` if an operator did."""

Decision = tuple[str, tuple[Placement, ...] | str]
"""A decision of the scheduler: a request with its placements, or a lease with what it is preempted for."""


def decisions_of(operation: Iterable[changes.Change]) -> list[Decision]:
    """Return the decisions of the scheduler among the changes of an operation."""
    found: list[Decision] = []
    for change in operation:
        match change:
            case changes.Granted(lease=lease):
                found.append((lease.lease_id, lease.members))
            case changes.Preempting(by_operator=False) if change.preemptor not in LIMITS:
                found.append((change.lease_id, change.preemptor))
    return found


@dataclass(slots=True)
class EventBatch:
    """Events of one time: first those that end jobs or change servers, then the arrivals.

    In a recording they are one operation of the manager: `decided` is what the scheduler decided in it.
    `dispatches` is False if it did not look at the queue, `at_once` True if the arrivals were asked for
    without waiting, and `expires` True if it began with what was due.
    """

    at: float
    external: list[ExternalEvent] = field(default_factory=list)
    arrivals: list[Job] = field(default_factory=list)
    decided: list[Decision] = field(default_factory=list)
    dispatches: bool = True
    at_once: bool = False
    expires: bool = False


@dataclass(frozen=True, slots=True)
class Workload:
    """The initial state, the jobs that run or are pending in it, and the event batches in order of time.

    `is_recorded`: the batches are the operations of a manager, with its decisions.
    """

    name: str
    start: Snapshot
    batches: tuple[EventBatch, ...]
    present: tuple[Job, ...] = ()
    is_recorded: bool = False

    @classmethod
    def of(cls, name: str, cluster: ClusterState, jobs: Iterable[Job]) -> Workload:
        """Return the workload of these jobs, each of which arrives by itself in an idle cluster."""
        ordered = sorted(jobs, key=lambda job: job.submitted_at)
        batches = tuple(EventBatch(job.submitted_at, arrivals=[job]) for job in ordered)
        return cls(name, cluster.snapshot(), batches)

    @property
    def jobs(self) -> list[Job]:
        """Every job, those of the initial state first."""
        return [*self.present, *(job for batch in self.batches for job in batch.arrivals)]

    @property
    def nodes(self) -> list[Node]:
        """Every server that ever exists, those of the initial state first; a changed one appears again."""
        external = (event for batch in self.batches for event in batch.external)
        came = (
            node for event in external if isinstance(event, changes.InventoryChanged) for node in event.nodes
        )
        return [*self.start.nodes, *came]

    @property
    def last_nodes(self) -> Sequence[Node]:
        """The servers that exist at the end."""
        external = (event for batch in reversed(self.batches) for event in reversed(batch.external))
        changed = (event.nodes for event in external if isinstance(event, changes.InventoryChanged))
        return next(changed, self.start.nodes)


def read_workload(nodes_path: Path, jobs_path: Path, *, split_large_jobs: bool = False) -> Workload:
    """Return a user's own workload, from CSV files or JSON (a list of objects, or one object a line).

    With `split_large_jobs` a job of more GPUs than any server has becomes a gang. Raises `InputError` with
    file, line and reason. The columns are in docs/simulators/replay.md.
    """
    nodes = _read_nodes(nodes_path)
    rows = list(_rows(jobs_path, JOB_COLUMNS, MORE_JOB_COLUMNS))
    jobs = [_job(row) for row in rows]
    if not jobs:
        raise InputError("the file lists no job", path=jobs_path)
    names: set[str] = set()
    for row, job in zip(rows, jobs, strict=True):
        if job.request.lease_id in names:
            raise row.fail(f"job {job.request.lease_id!r} appears twice")
        names.add(job.request.lease_id)
    cluster = ClusterState(nodes)
    if split_large_jobs:
        jobs = split(jobs, cluster)
    _reject_misfits(rows, jobs, cluster, split_large_jobs)
    return Workload.of(jobs_path.stem, cluster, jobs)


def by_shape(requests: Iterable[Request]) -> dict[tuple[object, ...], Request]:
    """Return one request of each shape."""
    return {request.shape: request for request in requests}


def shapes_that_never_fit(requests: Iterable[Request], nodes: Sequence[Node]) -> set[tuple[object, ...]]:
    """Return the shapes of the requests that no node could take even when empty."""
    return {
        shape
        for shape, request in by_shape(requests).items()
        if not any(could_ever_fit(node, request) for node in nodes)
    }


def split(jobs: Iterable[Job], cluster: ClusterState) -> list[Job]:
    """Return the jobs, each with more GPUs than any server as the gang of the fewest members that fits.

    Members have equal parts of its GPUs and amounts. A job that fits in no equal parts stays as it is.
    """
    members: dict[tuple[object, ...], int] = {}
    found = []
    for job in jobs:
        request = job.request
        if request.shape not in members:
            members[request.shape] = _members(request, cluster)
        found.append(replace(job, request=_divided(request, members[request.shape])))
    return found


def _members(request: Request, cluster: ClusterState) -> int:
    gpus, most = request.gpus, max(count_gpus(state.node, request) for state in cluster.nodes)
    if request.nodes == 1 and gpus > most:
        for count in range(2, min(gpus, len(cluster.nodes)) + 1):
            is_equal = gpus % count == 0 and gpus // count <= most
            if is_equal and never_fits(cluster, _divided(request, count)) is None:
                return count
    return 1


def _divided(request: Request, members: int) -> Request:
    if members == 1:
        return request
    amounts = {name: _plain(amount / members) for name, amount in request.resources.items()}
    return replace(request, gpus=request.gpus // members, resources=amounts, nodes=members)


def _reject_misfits(
    rows: Sequence[Row], jobs: Sequence[Job], cluster: ClusterState, split_large_jobs: bool
) -> None:
    """Raise `InputError` for the first job that names an unknown GPU type or never fits."""
    nodes = [state.node for state in cluster.nodes]
    requests = [job.request for job in jobs]
    refusals = {shape: never_fits(cluster, request) for shape, request in by_shape(requests).items()}
    types = {gpu.gpu_type for node in nodes for gpu in node.gpus}
    for row, request in zip(rows, requests, strict=True):
        for gpu_type in request.gpu_types:
            if gpu_type not in types:
                known = ", ".join(sorted(filter(None, types))) or "none: the nodes have no gpu_type"
                raise row.fail(f"no node has a GPU of type {gpu_type!r}; known are {known}")
        if (refusal := refusals[request.shape]) is not None:
            advice = _advice(request, nodes, split_large_jobs)
            raise row.fail(f"job {request.lease_id!r} never fits: {detail_of(refusal)}{advice}")


def _advice(request: Request, nodes: Sequence[Node], split_large_jobs: bool) -> str:
    """Say what to do about a job that has more GPUs than any node, if that is why it does not fit."""
    if request.nodes > 1 or not 0 < max(count_gpus(node, request) for node in nodes) < request.gpus:
        return ""
    if split_large_jobs:
        return f", and no equal parts of its {request.gpus} GPUs fit on different nodes"
    return (
        "; nodes is missing, the number of nodes for a job on several, each with so many gpus; "
        "or split such jobs with --split-large-jobs"
    )


def _rows(path: Path, columns: tuple[str, ...], more: tuple[str, ...]) -> Iterator[Row]:
    """Yield the rows; raise `InputError` for a column that is missing, or one that seems misspelt."""
    read = _json_rows if path.suffix in (".json", ".jsonl") else read_csv
    checked: set[str] = {*columns, *more}
    for row in read(path, columns):
        for name in row.values.keys() - checked:
            if near := get_close_matches(name[:100], {*more} - row.values.keys(), 1):
                raise row.fail(f"the column {name} is not read: did you mean {near[0]}? Rename or remove it")
            checked.add(name)
        yield row


def _json_rows(path: Path, columns: tuple[str, ...]) -> Iterator[Row]:
    for row in read_json_lines(path) if path.suffix == ".jsonl" else read_json_items(path):
        for name in columns:
            if name not in row.values:
                raise row.fail(f"{name} is missing in {json.dumps(dict(row.values))[:80]}")
        yield row


def _read_nodes(path: Path) -> list[Node]:
    nodes: dict[str, Node] = {}
    gpus_left = MAX_GPUS
    for row in _rows(path, NODE_COLUMNS, MORE_NODE_COLUMNS):
        name = row.text("node")
        if not name or name in nodes:
            raise row.fail(f"the node name {name!r} is empty or used twice")
        vendor = row.text("vendor") or "nvidia"
        count = row.whole("gpus", most=min(MAX_GPUS_OF_SERVER, gpus_left))
        gpus_left -= count
        gpus = tuple(Gpu(gpu_id, row.text("gpu_type"), vendor) for gpu_id in range(count))
        # Gangs need an address to meet at.
        nodes[name] = Node(name, len(nodes), _amounts(row), gpus, name, vendor if gpus else "")
    if not nodes:
        raise InputError("the file lists no node", path=path)
    return list(nodes.values())


def _amounts(row: Row) -> dict[str, float]:
    """Return the divisible resources of a row; whole amounts stay integers."""
    return {name: _plain(amount) for name in AMOUNTS if (amount := row.number(name, 0.0))}


def _plain(amount: float) -> float:
    return int(amount) if amount.is_integer() else amount


def _job(row: Row) -> Job:
    if not row.text("job"):
        raise row.fail("job is empty: each job needs a name")
    runtime_s = row.number("runtime_s")
    gpus = row.whole("gpus")
    try:
        request = Request(
            row.text("job"),
            gpus,
            row.whole("gpu_milli", MILLI_PER_GPU) if gpus else MILLI_PER_GPU,
            _amounts(row),
            tuple(filter(None, row.text("gpu_types").split("|"))),
            vendor=row.text("vendor"),
            priority=row.whole("priority", 0, least=-MAX_VALUE),
            team=row.text("team"),
            expected_runtime_s=row.number("expected_runtime_s", runtime_s),
            nodes=row.whole("nodes", 1),
        )
    except InvalidRequestError as error:
        raise row.fail(str(error)) from error
    return Job(request, row.number("submit_s"), runtime_s)
