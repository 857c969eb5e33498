"""Queries: leases, queue, servers, history and the cluster, as of now."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Lease, Node, Request
from resource_manager.core.name_lookup import find, find_preferring_pending
from resource_manager.errors import ResourceManagerError
from resource_manager.lazy import lazy_module
from resource_manager.manager import (
    cluster_results,
    explanations,
    lease_changes,
    maintenance_windows,
    serializers,
    server_views,
    team_views,
)
from resource_manager.manager.arguments import Dumpable
from resource_manager.manager.cluster_change import NO_OPTIONS, ApplyOptions, cluster_view, plan
from resource_manager.manager.cluster_file.sections import ClusterDefinition, ClusterForm
from resource_manager.manager.commit.asking import asking, user_name
from resource_manager.manager.commit.group import Reader
from resource_manager.manager.commit.protocol import Transactions
from resource_manager.manager.demand import DemandArguments, WhatIf
from resource_manager.manager.forecasts import Forecasts, kept_record
from resource_manager.manager.queue_view import QueueView, SharedEntries, for_a_while
from resource_manager.manager.recorded_changes import recorded
from resource_manager.manager.refusal_wording import detail_of
from resource_manager.manager.requests import gpu_range, request_of, server_name
from resource_manager.manager.results import (
    Allocation,
    EstimatesView,
    Explanation,
    LeaseChanges,
    QueueEntry,
    Recorded,
    SlurmJob,
    Submission,
    Summary,
)
from resource_manager.manager.server_views import server_detail
from resource_manager.manager.use_results import ServerUse
from resource_manager.manager.wording import what_of
from resource_manager.scheduling.accounting.gpu_hours import Measure
from resource_manager.scheduling.reasons.alternatives import alternatives
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from resource_manager.settings import Settings
from resource_manager.storage import Store, codec

if TYPE_CHECKING:
    from resource_manager.manager import slurm_jobs
    from resource_manager.manager.report import Accounts, Report
else:  # few commands make a report
    slurm_jobs = lazy_module("resource_manager.manager.slurm_jobs")

T = TypeVar("T")

MAX_ALTERNATIVES_S = 0.5
"""Processor time after which no further alternative to a request is tried."""

EXPIRE_EVERY_S = 1.0
"""Interval at which a process that waits expires leases that are due."""


@dataclass(frozen=True, slots=True)
class AgentReports:
    """Functions that read what agents reported; injected, since `fleet` imports this package.

    `use_of` returns the use of the GPUs of these servers, by default of all; `measures_of` what was measured
    of the leases that run, by fencing token.
    """

    use_of: Callable[[Queries, Sequence[str] | None], list[ServerUse]]
    measures_of: Callable[[Queries], Mapping[int, Measure]]


class Queries:
    """Queries of the state that `Transactions` change; none of them changes it."""

    _commits: Transactions
    _queue: QueueView
    _entries: SharedEntries
    _forecasts: Forecasts
    _agent_reports: AgentReports | None
    store: Store
    settings: Settings

    @property
    def _required_reports(self) -> AgentReports:
        if self._agent_reports is None:
            raise ResourceManagerError(
                "this manager reads no reports of agents: open it by resource_manager.fleet.opening"
            )
        return self._agent_reports

    def caller_name(self) -> str:
        """Return the operating system's name of the user who runs this process."""
        return user_name()

    def stated_owner(self, owner: str) -> str | None:
        """Return `owner`: a caller with the store itself is believed."""
        return owner

    def require_owner(self, entry: Mapping[str, Any]) -> None:
        """Raise nothing: a caller with the store itself may end any lease or request."""

    def status_of(self, lease_id: str) -> Submission | None:
        """Return the task's allocation (RUNNING, ERROR if quarantined), queue entry (WAITING), or None."""
        return self._commits.read(
            lambda cluster, now: status_in(self._commits, cluster, lease_id, now, self._entries.entry)
        )

    def named(
        self,
        name: str,
        *,
        pending: bool | None = None,
        fencing_token: int | None = None,
        owner: str | None = None,
    ) -> Submission:
        """Return what a full lease id, a short id, `dag.task[3]` or `dag.task` names, as `status_of` does.

        With `pending` only a pending request, with False only a lease (of that fencing token); what is the
        `owner`'s comes before others'. All methods that change something take full ids alone: act on the id
        and number that this returns. Raises `LeaseNotFoundError`, and `AmbiguousNameError`, which lists them,
        if there are several.
        """

        def view(cluster: ClusterState, now: float) -> Submission:
            entry = find(cluster, name, pending=pending, fencing_token=fencing_token, owner=owner)
            if isinstance(entry, Lease):
                return serializers.allocation(cluster, entry)
            return self._entries.entry(cluster, entry.lease_id, self._commits.explaining(cluster, now))

        return self._commits.read(view)

    def wait(self, lease_id: str, timeout_s: float) -> Submission | None:
        """Wait until a pending request is granted or gone, at most that long; return as `status_of` does.

        Meanwhile leases that are due expire. Raises `StoreUnavailableError`.
        """
        deadline = time.monotonic() + timeout_s

        def is_decided() -> bool:
            return self._commits.read(lambda cluster, now: lease_id not in cluster.pending)

        while (left_s := deadline - time.monotonic()) > 0:
            found = self.store.await_decision(lease_id, is_decided, min(left_s, EXPIRE_EVERY_S))
            if isinstance(found, Lease):
                return self._allocation_of(found)
            if not found:
                self._commits.expire_and_schedule()
            elif is_decided():
                break
        return self.status_of(lease_id)

    def lease_changes(self, after: int = -1, timeout_s: float = 0.0, prefix: str = "") -> LeaseChanges:
        """Return what changed of leases and requests after a version, once something has, or at the timeout.

        Only of those whose ids begin with `prefix`; renewals, placed jobs and announced demands do not count.
        If the history no longer has that version, the answer is all of them.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            found = lease_changes.since(self._commits, self.store, after, prefix)
            left_s = deadline - time.monotonic()
            if left_s <= 0 or lease_changes.has_news(found):
                return found
            after = found["version"]
            time.sleep(min(left_s, lease_changes.POLL_S))

    def leases(self) -> list[Allocation]:
        """Return every live lease, and every remainder of a gang, as an allocation, oldest first."""
        return self._commits.read(
            lambda cluster, now: [
                serializers.allocation(cluster, lease)
                for lease in sorted(
                    (*cluster.leases.values(), *cluster.remainders.values()),
                    key=lambda lease: lease.fencing_token,
                )
            ]
        )

    def slurm_jobs(self) -> list[SlurmJob]:
        """Return the jobs on Slurm, as last told; they are no leases and hold nothing of the state."""
        return slurm_jobs.jobs_on_slurm(self.store)

    def preempting(self) -> list[Allocation]:
        """Return the leases that are being preempted as allocations; cheap while there are none."""
        return self._commits.read(
            lambda cluster, now: [
                serializers.allocation(cluster, cluster.leases[lease_id])
                for lease_id in sorted(cluster.preempting)
            ]
        )

    def queue(self, *, estimated: bool = True) -> list[QueueEntry]:
        """Return every pending request in queue order, with position, `kind` and `reason` of the wait.

        `estimated` adds `estimated_start`, which costs more than all the rest. Callers share one answer,
        which of a long queue may be some seconds old.
        """
        if estimated:
            return self._queue.entries()
        return self._commits.read(lambda cluster, now: self._queue_in(cluster, now, estimated=False))

    def explain(
        self,
        lease_id: Dumpable | str | None = None,
        gpus: int | None = None,
        cpus: int | None = None,
        prefer_server: int | str | None = None,
        **options: Unpack[DemandArguments],
    ) -> Explanation:
        """Explain if and where the request would be granted now, or why not and when; changes nothing.

        Without a `lease_id` it is asked of nobody who holds or waits for anything.
        """
        demand = WhatIf.of(lease_id, gpus, cpus, prefer_server, **options)
        request = request_of(self._commits, demand)
        return self._queue.read(lambda cluster, now: self._explanation_in(cluster, now, request))

    def explain_named(self, name: str) -> Explanation:
        """Explain why the pending request of that name waits, and when it should start.

        It may be a full lease id, a short id, `dag.task[3]` or `dag.task`, as of `named`; of several the
        pending one is meant. For one that has a lease, the reason says so.
        """

        def view(cluster: ClusterState, now: float) -> Explanation:
            return self._explanation_in(cluster, now, find_preferring_pending(cluster, name).request)

        return self._queue.read(view)

    def history(self, after: int = 0, limit: int = 1000, *, by: str = "", what: str = "") -> list[Recorded]:
        """Return the changes after version `after`, oldest first: `version` and the change's own keys.

        With `by` only those asked for by that name (`*` stands for any text), with `what` only those of that
        kind (`What`). Raises `InvalidRequestError` for another `what`.
        """
        return recorded(self.store, after, limit, by, what_of(what))

    def gpus(self, servers: Sequence[str] = ()) -> list[ServerUse]:
        """Return the use of every GPU as last reported, by server: of these servers, by default of all."""
        return self._required_reports.use_of(self, servers or None)

    def report(self, by: Sequence[str] = ("team",), since: float | str = "30d") -> Report:
        """Return the GPU-hours of the last time, in seconds or as `30d`, by these keys.

        Raises `InvalidRequestError` for another key or time.
        """
        from resource_manager.manager.report import ReportQuery

        query = ReportQuery.of(by, since)
        measures = self._required_reports.measures_of(self)
        return self.accounts().report(query, measures=measures, prices=self.prices())

    def estimates(self) -> EstimatesView:
        """Return how often the estimated starts of pending requests came true."""
        return kept_record(self.store).view()

    def accounts(self) -> Accounts:
        """Return the account of the kept history and of the jobs on Slurm, of which reports are made."""
        from resource_manager.manager.report import Accounts

        accounts = Accounts(self, self.store.now())
        slurm_jobs.add_hours(accounts.hours, self.slurm_jobs(), accounts.now)
        return accounts

    def prices(self) -> Mapping[str, float]:
        """Return the cluster's price of an hour of a GPU by type."""
        return self._commits.read(lambda cluster, now: cluster.settings.prices)

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as plain values, as `codec.snapshot_from_dict` reads it; without secrets."""

        def view(cluster: ClusterState, now: float) -> dict[str, Any]:
            snapshot = cluster.snapshot()
            return codec.snapshot_to_dict(replace(snapshot, settings=snapshot.settings.masked))

        return self._commits.read(view)

    def teams(self) -> cluster_results.TeamsView:
        """Return the rules of the teams, and what each holds."""
        return self._commits.read(lambda cluster, now: team_views.view(cluster))

    def maintenance(self) -> list[cluster_results.WindowView]:
        """Return the maintenance windows, with what still runs on their servers."""
        return self._commits.read(maintenance_windows.view)

    def summary(self) -> Summary:
        """Return the free and allocated capacity of every server; at most `cache_ttl_s` old."""

        def view(cluster: ClusterState, now: float) -> Summary:
            wrong = self._commits.misconfigured(cluster)
            found = server_views.summary(cluster)
            return found if wrong is None else {**found, "misconfigured": detail_of(wrong)}

        return self._commits.read(view, self.settings.cache_ttl_s)

    def read(self, reader: Reader[T], max_age_s: float = 0.0) -> T:
        """Return the reader's answer on the state as of now, or of at most `max_age_s` ago."""
        return self._commits.read(reader, max_age_s)

    def servers(self) -> list[cluster_results.ServerSummary]:
        """Return the servers of the summary."""
        return self.summary()["servers"]

    def server(self, server: int | str) -> cluster_results.ServerDetail:
        """Return one server with its GPUs and the leases on each; raises `UnknownNodeError`."""
        return self._commits.read(lambda cluster, now: server_detail(cluster, server_name(cluster, server)))

    def cluster(self) -> cluster_results.ClusterView:
        """Return the stored cluster: what `apply` takes again, and its revision."""
        return self._commits.read(lambda cluster, now: cluster_view(cluster))

    def diff(
        self, definition: ClusterDefinition | ClusterForm, options: ApplyOptions | None = None
    ) -> cluster_results.ClusterDiff:
        """Return what `apply` would change; raises `InvalidRequestError`."""
        defined = definition if isinstance(definition, ClusterDefinition) else definition.definition()
        return self._commits.read(
            lambda cluster, now: plan(cluster, defined, options or NO_OPTIONS, now).view()
        )

    def gpu_range(self) -> tuple[int, int]:
        """Return the minimum and maximum of whole GPUs a task may request, on the replica's servers."""
        return self._commits.peek_replica(lambda cluster, now: gpu_range(cluster))

    @property
    def inventory(self) -> tuple[Node, ...]:
        """The servers of this process's replica, without those that left."""
        return self._commits.peek_replica(lambda cluster, now: cluster.inventory)

    def _queue_in(self, cluster: ClusterState, now: float, *, estimated: bool = True) -> list[QueueEntry]:
        entries = serializers.queue(cluster, self._commits.explaining(cluster, now))
        if estimated and entries:
            start_of = self._forecasts.shared(cluster, now)
            for entry in entries:
                entry["estimated_start"] = start_of(entry["task_id"])
        return entries

    def _explanation_in(self, cluster: ClusterState, now: float, request: Request) -> Explanation:
        answer = explanations.explanation(cluster, request, self._commits.explaining(cluster, now))
        if answer["could_ever_fit"] and answer["kind"] is not None:
            start = answer["estimated_start"] = self._forecasts.alone(cluster, now, request)
            if request.deadline_at is not None and (start["ends_by"] or now) > request.deadline_at:
                answer["late_end"] = start["ends_by"] or now
            resuming, goes_on = self._commits.resuming(cluster, now), for_a_while(MAX_ALTERNATIVES_S)
            least, teams = gpu_range(cluster)[0], () if (who := asking()) is None else who.teams
            sooner = alternatives(cluster, resuming, request, goes_on, least, teams)
            answer["alternatives"] = [{"change": each.change, "at": each.at} for each in sooner]
        return answer

    def _allocation_of(self, lease: Lease) -> Allocation:
        """Return a new lease as an allocation; this process may not have read the state that has it."""

        def view(cluster: ClusterState, now: float) -> Allocation:
            for member in lease.members:
                cluster.node(member.node)  # an error here has the inventory read again
            return serializers.allocation(cluster, lease)

        return self._commits.peek_replica(view)


def status_in(
    commits: Transactions,
    cluster: ClusterState,
    lease_id: str,
    now: float,
    entry_of: Callable[[ClusterState, str, SchedulingPass], QueueEntry] = serializers.queue_entry,
) -> Submission | None:
    """Return the task's allocation or queue entry in that state, None if it has neither."""
    if (lease := cluster.leases.get(lease_id)) is not None:
        return serializers.allocation(cluster, lease)
    if lease_id not in cluster.pending:
        return None
    return entry_of(cluster, lease_id, commits.explaining(cluster, now))
