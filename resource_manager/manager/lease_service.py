"""`LeaseService`: what callers of the manager may ask, whether it is on a store here or behind HTTP."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, Unpack

from resource_manager.core.changes import JobEnd
from resource_manager.core.models import Gpu, JobPlace
from resource_manager.manager.agent_jobs import AgentState
from resource_manager.manager.arguments import Dumpable
from resource_manager.manager.cluster_results import (
    ClusterDiff,
    ClusterView,
    ServerDetail,
    ServerSummary,
    TeamsView,
    WindowView,
)
from resource_manager.manager.refusal_wording import Refusal
from resource_manager.manager.results import (
    Allocation,
    ComingDemand,
    EstimatesView,
    Explanation,
    LeaseChanges,
    QueueEntry,
    Recorded,
    ReleaseResult,
    Renewal,
    SlurmJob,
    Submission,
    Summary,
)
from resource_manager.manager.stored_jobs import JobResult

if TYPE_CHECKING:  # with pydantic, which a client of a service needs only for what is in them
    from resource_manager.manager.cluster_change import ApplyOptions
    from resource_manager.manager.cluster_file.sections import ClusterForm
    from resource_manager.manager.demand import DemandArguments
    from resource_manager.manager.maintenance_windows import WindowForm
    from resource_manager.manager.report import Report
    from resource_manager.manager.use_results import ServerUse


class LeaseService(Protocol):
    """Leases on GPUs: `GPUResourceManager` on a store, `ServiceClient` over HTTP; both raise the same errors.

    `AsyncGPUResourceManager` has the same methods, awaitable. A demand is given by its fields,
    `submit("t", 2, cpus=8)`, or as a whole `Demand` in the place of `lease_id`.
    """

    # ---- leases and the queue ----

    def try_allocate(
        self,
        lease_id: Dumpable | str | None = None,
        gpus: int | None = None,
        cpus: int | None = None,
        prefer_server: int | str | None = None,
        **options: Unpack[DemandArguments],
    ) -> Allocation | Refusal:
        """Grant a lease now, or return the refusal."""

    def try_allocate_batch(
        self, requests: Iterable[Mapping[str, Any] | Dumpable]
    ) -> list[Allocation | Refusal]:
        """Grant several leases now; each is granted or refused by itself."""

    def submit(
        self,
        lease_id: Dumpable | str | None = None,
        gpus: int | None = None,
        cpus: int | None = None,
        prefer_server: int | str | None = None,
        *,
        job: Mapping[str, Any] | None = None,
        **options: Unpack[DemandArguments],
    ) -> Submission:
        """Grant a lease now, or queue the request; store its job, which an agent runs."""

    def result_of(self, lease_id: str, fencing_token: int | None = None) -> JobResult | None:
        """Return the result of the job of a lease that has ended, by default of the newest."""

    def order_job(self, server: str, key: str, order: Mapping[str, Any]) -> str:
        """Tell an agent what to do with a job; return the number of the order."""

    def agent_state(self, server: str) -> AgentState:
        """Return what an agent last said of its jobs."""

    def job_output(self, server: str, key: str, offset: int, *, lease_id: str = "") -> dict[str, Any]:
        """Return a part of a job's output, which its agent sends now; of one that is over by its lease."""

    def cancel(self, lease_id: str, *, sequence: int | None = None, reason: str = "") -> bool:
        """Remove a pending request; return False if there is none (of that `sequence`)."""

    def announce(
        self,
        lease_id: Dumpable | str | None = None,
        gpus: int | None = None,
        cpus: int | None = None,
        prefer_server: int | str | None = None,
        *,
        after: Sequence[str] = (),
        copies: int = 1,
        **options: Unpack[DemandArguments],
    ) -> bool:
        """Announce the request that a task will make after others; it holds nothing."""

    def withdraw(self, lease_ids: Collection[str] = (), *, run: str = "", reason: str = "") -> int:
        """Withdraw announced demands of this caller, by ids or by DAG run; return how many there were."""

    def coming(self) -> list[ComingDemand]:
        """Return the announced demands, the next first."""

    def renew(
        self,
        lease_id: str,
        *,
        fencing_token: int | None = None,
        checkpoint_at: float | None = None,
        for_s: float | None = None,
    ) -> Allocation:
        """Restart a lease's time to live, which is `for_s` once if that is longer."""

    def renew_all(self, renewals: Sequence[Renewal]) -> list[bool]:
        """Renew several leases at once; return of each whether it is still held."""

    def place_job(self, lease_id: str, places: Sequence[JobPlace], *, fencing_token: int) -> Allocation:
        """Store where the jobs of a lease are about to start."""

    def release(
        self,
        lease_id: str,
        *,
        fencing_token: int | None = None,
        outcome: str = "",
        job_end: JobEnd | str = JobEnd.UNKNOWN,
        reason: str = "",
        failed_nodes: Collection[str] = (),
    ) -> ReleaseResult:
        """End a lease; raises `JobPlacedError` if `job_end` does not say that its job is gone."""

    def release_members(
        self,
        lease_id: str,
        ranks: Collection[int],
        *,
        fencing_token: int,
        outcome: str = "",
        job_end: JobEnd | str = JobEnd.UNKNOWN,
        reason: str = "",
    ) -> ReleaseResult:
        """End members of a gang; the others stay quarantined."""

    def preempt(
        self, lease_id: str, *, preemptor: str = "", fencing_token: int | None = None, dry_run: bool = False
    ) -> Allocation:
        """Take a lease for a pending request."""

    def expire_and_schedule(self) -> list[Recorded]:
        """Expire leases that are due and schedule the queue, where nobody else does; return the changes."""

    def status_of(self, lease_id: str) -> Submission | None:
        """Return the lease or pending request of that id."""

    def named(
        self, name: str, *, pending: bool | None = None, fencing_token: int | None = None
    ) -> Submission:
        """Return the one lease or pending request of that name, short id or id."""

    def wait(self, lease_id: str, timeout_s: float) -> Submission | None:
        """Return as `status_of`, once a pending request is granted or gone, at most that much later.

        Where nobody answers it raises at once: the request keeps its place, and may be waited for again.
        """

    def lease_changes(self, after: int = -1, timeout_s: float = 0.0, prefix: str = "") -> LeaseChanges:
        """Return what changed of leases and requests after a version, once something has, or at the timeout.

        Only of those whose ids begin with `prefix`. Where waiting needs a thread a service answers at once.
        """

    def leases(self) -> list[Allocation]:
        """Return all leases, the oldest first."""

    def preempting(self) -> list[Allocation]:
        """Return the leases that are being preempted."""

    def queue(self, *, estimated: bool = True) -> list[QueueEntry]:
        """Return the pending requests in queue order, if `estimated` with `estimated_start`."""

    def explain(
        self,
        lease_id: Dumpable | str | None = None,
        gpus: int | None = None,
        cpus: int | None = None,
        prefer_server: int | str | None = None,
        **options: Unpack[DemandArguments],
    ) -> Explanation:
        """Explain if, where or why not a request would be granted now."""

    def explain_named(self, name: str) -> Explanation:
        """Explain why the pending request of that name waits."""

    # ---- who asks ----

    def caller_name(self) -> str:
        """Return the name of this caller, which the leases that they ask for by hand have as their owner."""

    def stated_owner(self, owner: str) -> str | None:
        """Return the owner of the leases of a caller who states `owner`; None where callers log in."""

    def require_owner(self, entry: Mapping[str, Any]) -> None:
        """Raise `ResourceManagerError` if this caller may not end the lease or pending request."""

    # ---- servers and the cluster ----

    def summary(self) -> Summary:
        """Return the free and allocated capacity of every server."""

    def servers(self) -> list[ServerSummary]:
        """Return the servers of the summary."""

    def server(self, server: int | str) -> ServerDetail:
        """Return one server with its GPUs and the leases on each."""

    def gpus(self, servers: Sequence[str] = ()) -> list[ServerUse]:
        """Return the use of every GPU as last reported, by server: of these servers, by default of all."""

    def drain(
        self, server: int | str, gpu: int | str | None = None, *, reason: str = "", failed: bool = False
    ) -> ServerSummary:
        """Give no new leases on a server, or on one GPU of it."""

    def resume(self, server: int | str, gpu: int | str | None = None) -> ServerSummary:
        """Give new leases again on a server, or on one GPU of it."""

    def searched(self, server: int | str, jobs: Sequence[str], *, age_s: float = 0.0) -> ServerSummary:
        """Note the jobs that were seen on a server without an agent."""

    def adopt(self, server: int | str, gpus: Sequence[Gpu]) -> ServerDetail:
        """Give a server these GPUs in the inventory."""

    def cluster(self) -> ClusterView:
        """Return the stored cluster."""

    def diff(self, definition: ClusterForm, options: ApplyOptions | None = None) -> ClusterDiff:
        """Return what `apply` would change."""

    def apply(
        self, definition: ClusterForm, options: ApplyOptions | None = None, *, revision: str | None = None
    ) -> ClusterDiff:
        """Make the cluster what is defined."""

    def teams(self) -> TeamsView:
        """Return the rules of the teams, and what each holds."""

    def maintenance(self) -> list[WindowView]:
        """Return the maintenance windows."""

    def add_maintenance(self, form: WindowForm, *, dry_run: bool = False) -> WindowView:
        """Keep servers free in a window of time."""

    def remove_maintenance(self, window_id: int, *, dry_run: bool = False) -> WindowView | None:
        """Remove a maintenance window; return what it was."""

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as plain values."""

    def history(self, after: int = 0, limit: int = 1000, *, by: str = "", what: str = "") -> list[Recorded]:
        """Return the changes after a version, the oldest first."""

    def slurm_jobs(self) -> list[SlurmJob]:
        """Return the jobs on Slurm, as last told, which are no leases."""

    def keep_slurm_jobs(self, cluster: str, jobs: Sequence[SlurmJob]) -> None:
        """Replace what is known of the jobs of a cluster of Slurm."""

    def report(self, by: Sequence[str] = ("team",), since: float | str = "30d") -> Report:
        """Return the GPU-hours of the last time by these keys."""

    def estimates(self) -> EstimatesView:
        """Return how often the estimated starts of pending requests came true."""

    def reset(self) -> None:
        """Drop all leases and the queue, keep the cluster."""

    # ---- the service itself ----

    def close(self) -> None:
        """Close its connections."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
