"""`GPUResourceManager`: the only place where lock, store and allocator meet."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, TypeVar, Unpack

from resource_manager.core.changes import (
    Change,
    Drained,
    JobEnd,
    MembersReleased,
    Released,
    ReleaseResult,
    Resumed,
)
from resource_manager.core.cluster import ClusterState, Snapshot
from resource_manager.core.cluster_settings import ClusterSettings
from resource_manager.core.identifiers import check_text
from resource_manager.core.maintenance import Window
from resource_manager.core.models import Gpu, JobPlace, Lease, Node, Request
from resource_manager.core.name_lookup import find
from resource_manager.core.names import display_name, name_of, short
from resource_manager.core.refusal import (
    RecoveryWindow,
    Refusal,
    RefusalKind,
    lock_busy,
    misconfigured,
    no_servers,
    recovering,
)
from resource_manager.core.search import OUTDATED, is_searchable, outdated, searched, without_lease
from resource_manager.errors import (
    ClusterChangedError,
    CorruptStateError,
    DuplicateTaskError,
    InvalidRequestError,
    LeaseNotFoundError,
    LockTimeoutError,
    NoServersError,
    OtherOwnerError,
    SettingsError,
    StateLostError,
    StateUnconfirmedError,
)
from resource_manager.manager import maintenance, repeats, serializers, teams
from resource_manager.manager.arguments import ORIGINAL_NAMES, DemandArguments, DemandOptions, Dumpable
from resource_manager.manager.asking import Step, asking, checked_by, this_user
from resource_manager.manager.cluster_change import NO_OPTIONS, ApplyOptions, cluster_view, plan, revision_of
from resource_manager.manager.cluster_file.reading import load_inventory
from resource_manager.manager.cluster_file.sections import ClusterDefinition, ClusterForm, settings_of
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.commit.group import Reader
from resource_manager.manager.commit.protocol import Observer, Transactions
from resource_manager.manager.demand import Demand
from resource_manager.manager.maintenance import WindowForm
from resource_manager.manager.queue_view import QueueView, for_a_while
from resource_manager.manager.requests import (
    build_request,
    checked,
    gpu_number,
    gpu_range,
    is_repeat,
    server_name,
)
from resource_manager.manager.results import (
    Allocation,
    ClusterDiff,
    ClusterView,
    ExpectedStart,
    Explanation,
    QueueEntry,
    Recorded,
    ServerDetail,
    ServerSummary,
    Submission,
    Summary,
    TeamsView,
    WindowView,
)
from resource_manager.manager.server_gpus import adoption, server_detail
from resource_manager.manager.wording import matches, what_of
from resource_manager.scheduling import allocator
from resource_manager.scheduling.feasibility import refusals_of
from resource_manager.scheduling.policies import get_policy, nothing_fits, package_of
from resource_manager.scheduling.queue_order import QueueDiscipline, get_order
from resource_manager.scheduling.start_estimates import Start, estimate_starts
from resource_manager.settings import Settings
from resource_manager.storage import Store, codec, open_store
from resource_manager.storage.backup import in_utc
from resource_manager.storage.mark import Mark
from resource_manager.storage.once import Once

logger = logging.getLogger(__name__)

T = TypeVar("T")

HOW_TO_CHANGE = "gpu-manager apply changes it"

CLUSTER_FIELDS = {field.name for field in fields(ClusterSettings)} - {"policy_package"}
HISTORY_PAGE = 1000

MAX_ITEMS = 16
"""Requests of a batch that are decided at once; others have their turn before the next ones."""

GANG_ITEMS = 8
"""Requests that take as long to decide as a gang."""

EXPIRE_EVERY_S = 1.0
"""Time after which a process that waits for a request expires the leases that are due."""


class GPUResourceManager:
    """Leases on named GPUs and CPUs of one server each, kept in a store that many processes share.

    `GPUResourceManager()` reads `Settings`; `from_url` takes everything as arguments. The cluster is that of
    the store: `inventory` and `cluster`, fields of `ClusterSettings`, are for an empty one. All times are
    seconds of the store's clock. Thread-safe. `by` is who asks, for the history: by default the user of this
    process; `asked_by` names another one for some calls.

    A lease is asked for by the fields of a `Demand`, `submit("t", 2, cpus=8)`, or by a whole one in the place
    of `lease_id`.
    """

    TOTAL_SERVERS: ClassVar[int] = 4
    GPUS_PER_SERVER: ClassVar[int] = 8
    CPUS_PER_SERVER: ClassVar[int] = 64
    RESOURCE_VAR_NAME: ClassVar[str] = "gpu_resource_status"
    LOCK_VAR_NAME: ClassVar[str] = "gpu_resource_lock"

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        store: Store | None = None,
        inventory: Iterable[Node] | None = None,
        cluster: Mapping[str, Any] | None = None,
        observer: Observer | None = None,
        by: str | None = None,
    ) -> None:
        is_original = settings is None
        self.settings = Settings.load() if settings is None else settings
        self.store = store or open_store(
            self.settings.store, self.settings, variable=self.RESOURCE_VAR_NAME, lock=self.LOCK_VAR_NAME
        )
        who = this_user() if by is None else checked_by(by)
        self._commits = Transactions(self.store, self.settings.lock_timeout_s, who, observer)
        self._queue = QueueView(self.store, self._queue_in)
        self._stated = dict(cluster or {})
        self._nodes = None if inventory is None else tuple(inventory)
        scheme = self.settings.store.partition("://")[0]
        self._has_servers = scheme == "memory" or (is_original and scheme == "airflow")
        self._initialise()

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        inventory: Iterable[Node] | str | Path | None = None,
        observer: Observer | None = None,
        by: str | None = None,
        **settings: Any,
    ) -> GPUResourceManager:
        """Return a manager on the store at `url`; nothing is read from the environment.

        `inventory`, nodes or a TOML file, and fields of `ClusterSettings` such as `policy` and `order` are
        those of an empty store; where it has others, `SettingsError` is raised. Other keywords are fields of
        `Settings`. Raises `ClusterFileError` and `StoreError`.
        """
        if isinstance(inventory, str | Path):
            inventory = load_inventory(inventory)
        stated = {name: value for name, value in settings.items() if name in CLUSTER_FIELDS}
        own = Settings.of({"store": url, **{key: settings[key] for key in settings if key not in stated}})
        return cls(own, inventory=inventory, cluster=stated, observer=observer, by=by)

    @property
    def observer(self) -> Observer | None:
        """The receiver of measurements; may be set later."""
        return self._commits.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._commits.observer = observer

    def read_from(self, look: Callable[[Reader[Any]], Any]) -> None:
        """Have reads answered by that function of a reader, with a replica of its own."""
        self._commits.look = look

    @property
    def inventory(self) -> tuple[Node, ...]:
        """The servers of this process's replica, without those that left."""
        return self._commits.peek_replica(lambda cluster, now: _inventory(cluster))

    def order(self, cluster: ClusterState) -> QueueDiscipline:
        """Return the order of the queue in that state."""
        return self._commits.order(cluster)

    # ---- the original's interface ----

    def allocate_resources(
        self,
        task_id: str,
        required_gpus: int,
        required_cpus: int,
        prefer_server_id: int | str | None = None,
        **options: Unpack[DemandOptions],
    ) -> Allocation | None:
        """Grant a lease now and return it as a dict, or None if nothing fits or the lock is not free.

        A request never overtakes pending requests. The same request for a task that holds its lease returns
        that lease. `options` are further fields of a `Demand`. Raises `ValueError`
        (`InvalidRequestError`) for an invalid request, and `StoreError` if the store is unavailable.
        """
        try:
            request = self.build_request(task_id, required_gpus, required_cpus, prefer_server_id, **options)
        except NoServersError as error:
            logger.warning("no lease for task %r: %s", task_id, error)
            return None
        except InvalidRequestError as error:
            error.rename(ORIGINAL_NAMES)
            raise
        return _granted(self._allocate([request], serializers.allocation)[0])

    def release_resources(self, task_id: str, *, fencing_token: int | None = None, outcome: str = "") -> bool:
        """End the task's lease; return False without one (of that fencing token), or if the lock is not free.

        `outcome` (SUCCESS, FAILED, …) is written to the history.
        """
        try:
            result = self.release(task_id, fencing_token=fencing_token, outcome=outcome)
        except LockTimeoutError as error:
            logger.error("not released: %s", error)
            return False
        return result is ReleaseResult.RELEASED

    def get_resource_summary(self) -> Summary:
        """Return the free and allocated capacity of every server; at most `cache_ttl_s` old."""

        def view(cluster: ClusterState, now: float) -> Summary:
            wrong = self._commits.misconfigured(cluster)
            found = serializers.summary(cluster)
            return found if wrong is None else {**found, "misconfigured": wrong.detail}

        return self._commits.read(view, self.settings.cache_ttl_s)

    def reset_resources(self, *, once: Once | None = None) -> bool:
        """Drop all leases and the queue, keep the cluster; return False if the lock is not free.

        Dangerous while jobs run. Fencing tokens keep growing, so an old holder cannot pass as a new one.
        """
        try:
            self._commits.replace(self._emptied(), once)
        except LockTimeoutError as error:
            logger.error("not reset: %s", error)
            return False
        logger.warning("all resources were reset")
        return True

    def allocate_batch(
        self, requests: Iterable[Mapping[str, Any] | Demand | Request]
    ) -> list[Allocation | None]:
        """Allocate as `allocate_resources` for each, a few in a commit; each is granted or None by itself.

        A mapping has fields of a `Demand`, under either of their names.
        """
        return [_granted(result) for result in self.try_allocate_batch(requests)]

    # ---- leases and the queue ----

    def allocate(
        self,
        lease_id: Dumpable | str | None = None,
        gpus: int | None = None,
        cpus: int | None = None,
        prefer_server: int | str | None = None,
        **options: Unpack[DemandArguments],
    ) -> Lease | Refusal:
        """Grant a lease now, or return the refusal, also for a busy lock or a request that can never fit.

        Otherwise as `allocate_resources`: raises `ValueError` for numbers outside the limits and unknown
        servers, and `StoreError` if the store is unavailable.
        """
        try:
            request = self.build_request(lease_id, gpus, cpus, prefer_server, **options)
        except NoServersError:
            return no_servers()
        return self._allocate([request], lambda cluster, lease: lease)[0]

    def try_allocate(
        self,
        lease_id: Dumpable | str | None = None,
        gpus: int | None = None,
        cpus: int | None = None,
        prefer_server: int | str | None = None,
        *,
        once: Once | None = None,
        **options: Unpack[DemandArguments],
    ) -> Allocation | Refusal:
        """Allocate as `allocate`, with the lease as the dict of `allocate_resources`.

        With the idempotency key `once`, as every method that takes one: a repeat changes nothing and gets
        the lease of the first call, or `AlreadyDoneError` if that has ended.
        """
        try:
            request = self.build_request(lease_id, gpus, cpus, prefer_server, **options)
        except NoServersError:
            return no_servers()
        return self._allocate([request], serializers.allocation, once)[0]

    def try_allocate_batch(
        self, requests: Iterable[Mapping[str, Any] | Demand | Request], *, once: Once | None = None
    ) -> list[Allocation | Refusal]:
        """Answer as `allocate_batch`, with a refusal in the place of each None.

        An item whose id is taken is refused as `task_taken`. Raises `InvalidRequestError`, granting nothing,
        if an item is invalid or an id is there twice.
        """
        items = list(requests)
        try:
            asked = [
                checked(item)
                if isinstance(item, Request)
                else self.build_request(item)
                if isinstance(item, Demand)
                else self.build_request(**item)
                for item in items
            ]
        except NoServersError:
            return [no_servers()] * len(items)
        if len({request.lease_id for request in asked}) != len(asked):
            raise InvalidRequestError("a batch must not have a lease id twice", field="lease_id")
        answers: list[Allocation | Refusal] = []
        while (start := len(answers)) < len(asked):
            part = _next_part(asked, start)
            if answers and isinstance(last := answers[-1], Refusal) and last.kind is RefusalKind.LOCK_BUSY:
                answers += [last] * len(part)
            else:
                of_part = None if once is None else once.part(start)
                answers += self._allocate(part, serializers.allocation, of_part, in_batch=True)
                if once is not None and of_part is not None:
                    once.repeated = once.repeated or of_part.repeated
        return answers

    def submit(
        self,
        lease_id: Dumpable | str | None = None,
        gpus: int | None = None,
        cpus: int | None = None,
        prefer_server: int | str | None = None,
        *,
        once: Once | None = None,
        **options: Unpack[DemandArguments],
    ) -> Submission:
        """Queue the request; return an allocation (`state` RUNNING) or a queue entry (WAITING).

        `cpus` defaults to 1. Submitting the same request again returns the task's allocation or queue entry.
        Raises as `allocate_resources` does, and `LockTimeoutError`.
        """
        request = self.build_request(lease_id, gpus, cpus, prefer_server, **options)

        def step(cluster: ClusterState, now: float) -> list[Change]:
            if is_repeat(cluster, request):
                return []
            return allocator.submit(cluster, request, *self._commits.rules(cluster), now)

        def status(cluster: ClusterState, now: float) -> Submission:
            found = self._status(cluster, request.lease_id, now)
            assert found is not None  # read from the state that the step led to
            return found

        return self._commits.run(step, status, once=repeats.of_submission(once, request.lease_id, status))

    def release(
        self,
        lease_id: str,
        *,
        fencing_token: int | None = None,
        owner: str | None = None,
        outcome: str = "",
        job_end: JobEnd | str = JobEnd.UNKNOWN,
        reason: str = "",
        failed_nodes: Collection[str] = (),
        once: Once | None = None,
    ) -> ReleaseResult:
        """End the lease if it has that fencing token and owner, as far as they are given.

        `outcome` (SUCCESS, FAILED, …) and `reason` are written to the history. The remainder of a gang needs
        its token. `job_end` is what the caller knows of a job that was placed: without it, its release is a
        `JobPlacedError`; `forced` quarantines the lease. The task's next request avoids `failed_nodes`, on
        which its job could not be started, for a while.
        """
        end = _job_end(job_end, reason)
        check_text(reason=reason)
        return self._release(
            lease_id,
            lambda cluster, now: allocator.release(
                cluster,
                lease_id,
                now,
                fencing_token=fencing_token,
                owner=owner,
                outcome=outcome,
                job_end=end,
                reason=reason,
                failed_nodes=failed_nodes,
            ),
            outcome,
            once,
            has_token=fencing_token is not None,
        )

    def _release(
        self, lease_id: str, decide: Step, outcome: str, once: Once | None, *, has_token: bool
    ) -> ReleaseResult:
        check_text(outcome=outcome)
        is_over = True
        lease: Lease | None = None

        def step(cluster: ClusterState, now: float) -> list[Change]:
            nonlocal is_over, lease
            lease = cluster.leases.get(lease_id)
            decided = decide(cluster, now)
            is_over = any(type(change) in (Released, MembersReleased) for change in decided)
            return self._commits.with_dispatch(cluster, decided, now)

        try:
            is_over = self._commits.run(
                step,
                lambda cluster, now: is_over,
                once=repeats.of_release(once),
                held=lease_id if has_token else None,
            )
        except (LeaseNotFoundError, OtherOwnerError) as error:
            logger.warning("not released: %s", error)
            return ReleaseResult.NOT_HELD if lease is None else ReleaseResult.OTHER_HOLDER
        if not is_over:
            logger.warning("quarantined %s: released by force, its job may run", _called(lease, lease_id))
            return ReleaseResult.QUARANTINED
        if logger.isEnabledFor(logging.INFO):
            logger.info("released %s", _called(lease, lease_id))
        return ReleaseResult.RELEASED

    def release_members(
        self,
        lease_id: str,
        ranks: Collection[int],
        *,
        fencing_token: int,
        owner: str | None = None,
        outcome: str = "",
        job_end: JobEnd | str = JobEnd.UNKNOWN,
        once: Once | None = None,
    ) -> ReleaseResult:
        """End these members of a gang; quarantine the others until they are released by the fencing token.

        Such a remainder has no time to live, and its lease id may be queued again. All members at once, or
        the last ones of a remainder, end it as `release` does.
        """
        end = _job_end(job_end)
        return self._release(
            lease_id,
            lambda cluster, now: allocator.release_members(
                cluster,
                lease_id,
                ranks,
                now,
                fencing_token=fencing_token,
                owner=owner,
                outcome=outcome,
                job_end=end,
            ),
            outcome,
            once,
            has_token=True,
        )

    def cancel(
        self,
        lease_id: str,
        *,
        owner: str | None = None,
        sequence: int | None = None,
        reason: str = "",
        once: Once | None = None,
    ) -> bool:
        """Remove a pending request from the queue; return False if there is none (of that `sequence`).

        Raises `OtherOwnerError` if it is not that owner's.
        """
        check_text(reason=reason)

        def step(cluster: ClusterState, now: float) -> list[Change]:
            cancelled = allocator.cancel(cluster, lease_id, now, reason, owner=owner, sequence=sequence)
            return self._commits.with_dispatch(cluster, cancelled, now)

        try:
            self._commits.run(step, _nothing, once=repeats.of_done(once))
        except LeaseNotFoundError:
            return False
        return True

    def renew(
        self,
        lease_id: str,
        *,
        fencing_token: int | None = None,
        owner: str | None = None,
        checkpoint_at: float | None = None,
        once: Once | None = None,
    ) -> Allocation:
        """Restart the lease's time to live; `checkpoint_at` is when its job last saved what it did.

        The answer's `state` is PREEMPTING if the job must end by `until`.

        Raises `LeaseNotFoundError` if the lease has ended, and `OtherOwnerError` if it is not that owner's.
        """
        return self._commits.run(
            lambda cluster, now: allocator.renew(
                cluster, lease_id, now, fencing_token=fencing_token, owner=owner, checkpoint_at=checkpoint_at
            ),
            lambda cluster, now: serializers.allocation(cluster, cluster.leases[lease_id]),
            once=repeats.of_renewal(once, lease_id, serializers.allocation),
            held=lease_id if fencing_token is not None else None,
        )

    def place_job(
        self,
        lease_id: str,
        places: Sequence[JobPlace],
        *,
        fencing_token: int,
        owner: str | None = None,
    ) -> Allocation:
        """Store where the jobs of a lease are about to start, one place a member; before any of them does.

        From now on the lease is quarantined rather than expired, and released only with a `job_end`. The
        answer's `job_places` are those of whoever came first. Raises as `renew` does.
        """

        def view(cluster: ClusterState, now: float) -> Allocation:
            return serializers.allocation(cluster, cluster.leases[lease_id])

        return self._commits.run(
            lambda cluster, now: allocator.place_job(
                cluster, lease_id, places, now, fencing_token=fencing_token, owner=owner
            ),
            view,
        )

    def preempt(
        self,
        lease_id: str,
        *,
        preemptor: str = "",
        fencing_token: int | None = None,
        dry_run: bool = False,
        once: Once | None = None,
    ) -> Allocation:
        """Take a lease for the pending request `preemptor`, or for the first that waits for what it holds.

        Its job is told and has its grace to save what it did; then its request waits again at its old place.
        With `dry_run` nothing is changed; the answer is the same. Raises `LeaseNotFoundError`, and
        `NotPreemptibleError` if it is not preemptible or nobody would start.
        """

        def step(cluster: ClusterState, now: float) -> list[Change]:
            return allocator.preempt(
                cluster,
                lease_id,
                *self._commits.rules(cluster),
                now,
                fencing_token=fencing_token,
                preemptor=preemptor,
            )

        def view(cluster: ClusterState, now: float) -> Allocation:
            return serializers.allocation(cluster, cluster.leases[lease_id])

        def tried(cluster: ClusterState, now: float) -> Allocation:
            with cluster.trial():
                for change in step(cluster, now):
                    cluster.apply(change)
                return view(cluster, now)

        if dry_run:
            return self._commits.read(tried)
        return self._commits.run(step, view, once=repeats.of_renewal(once, lease_id, serializers.allocation))

    def require_owner(self, entry: Mapping[str, Any]) -> None:
        """Let this caller end the lease or pending request: with the store itself, any.

        A `ServiceClient` raises where the service would refuse it.
        """

    def status_of(self, lease_id: str) -> Submission | None:
        """Return the task's allocation (RUNNING, ERROR if quarantined), queue entry (WAITING), or None."""
        return self._commits.read(lambda cluster, now: self._status(cluster, lease_id, now))

    def named(
        self, name: str, *, pending: bool | None = None, fencing_token: int | None = None
    ) -> Submission:
        """Return what a full lease id, a short id, `dag.task[3]` or `dag.task` names, as `status_of` does.

        With `pending` only a pending request, with False only a lease (of that fencing token). All methods
        that change something take full ids alone: act on the id and number that this returns. Raises
        `LeaseNotFoundError`, and `AmbiguousNameError`, which lists them, if there are several.
        """

        def view(cluster: ClusterState, now: float) -> Submission:
            entry = find(cluster, name, pending=pending, fencing_token=fencing_token)
            if isinstance(entry, Lease):
                return serializers.allocation(cluster, entry)
            found = self._status(cluster, entry.lease_id, now)
            assert found is not None
            return found

        return self._commits.read(view)

    def wait(self, lease_id: str, timeout_s: float) -> Submission | None:
        """Wait until a pending request is granted, at most that long; return as `status_of` does.

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
                self.expire_and_schedule()
            elif is_decided():
                break
        return self.status_of(lease_id)

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

        `estimated` adds `estimated_start`, which costs more than all the rest. Who asks for the same is given
        the same, of a long queue for some seconds.
        """
        if estimated:
            return self._queue.entries()
        return self._commits.read(lambda cluster, now: self._queue_in(cluster, now, estimated=False))

    def expected_starts(self) -> dict[str, ExpectedStart]:
        """Return the expected start of each pending request, as `estimated_start` of the queue."""
        return {entry["task_id"]: entry["estimated_start"] for entry in self._queue.entries()}

    def _queue_in(self, cluster: ClusterState, now: float, *, estimated: bool = True) -> list[QueueEntry]:
        rules = self._commits.rules(cluster)
        entries = serializers.queue(cluster, *rules, now, self._suspension(cluster, now))
        if estimated and entries:
            starts = self._starts_in(cluster, now)
            for entry in entries:
                entry["estimated_start"] = serializers.estimate(starts[entry["task_id"]])
        return entries

    def _starts_in(self, cluster: ClusterState, now: float, *extra: Request) -> dict[str, Start]:
        """Return the expected starts in the caller's state, and of extra requests as if they were queued."""
        resumes_at = now + max(self._commits.resumes_in_s(now), 0.0)
        policy, order = self._commits.usual_policy(cluster), self.order(cluster)
        return estimate_starts(cluster, policy, order, resumes_at, extra, for_a_while())

    def _explanation_in(self, cluster: ClusterState, now: float, request: Request) -> Explanation:
        suspension = self._suspension(cluster, now)
        policy, order = self._commits.rules(cluster)
        policy = policy if suspension is None else nothing_fits
        answer = serializers.explanation(cluster, request, policy, order, now, suspension)
        if answer["could_ever_fit"] and answer["kind"] is not None:
            extra = () if request.lease_id in cluster.pending else (request,)
            start = self._starts_in(cluster, now, *extra)[request.lease_id]
            answer["estimated_start"] = serializers.estimate(start)
        return answer

    def _suspension(self, cluster: ClusterState, now: float) -> Refusal | None:
        """Return why nothing is granted to anybody now: a recovery window, or a wrong configuration."""
        window = self._commits.recovery_window(cluster, now)
        return self._commits.misconfigured(cluster) if window is None else recovering(window)

    def explain(
        self,
        lease_id: Dumpable | str | None = None,
        gpus: int | None = None,
        cpus: int | None = None,
        prefer_server: int | str | None = None,
        **options: Unpack[DemandArguments],
    ) -> Explanation:
        """Explain if and where the request would be granted now, or why not and when; changes nothing."""
        request = self.build_request(lease_id, gpus, cpus, prefer_server, any_priority=True, **options)
        return self._queue.look(lambda cluster, now: self._explanation_in(cluster, now, request))

    def explain_named(self, name: str) -> Explanation:
        """Explain why the pending request of that name waits, and when it should start.

        It may be a full lease id, a short id, `dag.task[3]` or `dag.task`, as of `named`. What has a lease
        has that as its reason.
        """

        def view(cluster: ClusterState, now: float) -> Explanation:
            return self._explanation_in(cluster, now, find(cluster, name).request)

        return self._queue.look(view)

    def history(self, after: int = 0, limit: int = 1000, *, by: str = "", what: str = "") -> list[Recorded]:
        """Return the changes after version `after`, oldest first: `version` and the change's own keys.

        Only those that `by` asked for, where `*` stands for any text, and that do `what` (of `What`), as far
        as they are given. Raises `InvalidRequestError` for another `what`.
        """
        wanted = what_of(what)
        if not by and wanted is None:
            return self._recorded(after, limit)
        found: list[Recorded] = []
        while len(found) < limit and (page := self._recorded(after, HISTORY_PAGE)):
            found += (change for change in page if matches(change, by, wanted))
            after = page[-1]["version"]
        return found[:limit]

    def _recorded(self, after: int, limit: int) -> list[Recorded]:
        return [
            {"version": version, **codec.change_to_dict(change)}
            for version, change in self.store.history(after, limit)
        ]

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as plain values, as `schemas.snapshot_from_dict` reads it."""
        return self._commits.read(lambda cluster, now: codec.snapshot_to_dict(cluster.snapshot()))

    # ---- teams ----

    def teams(self) -> TeamsView:
        """Return the rules of the teams, and what each holds."""
        return self._commits.read(lambda cluster, now: teams.view(cluster))

    # ---- maintenance ----

    def maintenance(self) -> list[WindowView]:
        """Return the maintenance windows, with what still runs on their servers."""
        return self._commits.read(maintenance.view)

    def add_maintenance(
        self, asked: WindowForm, *, dry_run: bool = False, once: Once | None = None
    ) -> WindowView:
        """Keep servers free in a window of time; return it, with `dry_run` without adding it.

        Raises `InvalidRequestError` for an unknown server, or a window that ends before it begins or is over.
        """

        def plan(cluster: ClusterState, now: float) -> Window:
            return maintenance.window_of(cluster, asked, now)

        if dry_run:
            return self._commits.read(
                lambda cluster, now: maintenance.as_view(cluster, plan(cluster, now), now)
            )
        made: list[Window] = []

        def step(cluster: ClusterState, now: float) -> list[Change]:
            made[:] = [plan(cluster, now)]
            return [maintenance.replaced(cluster, [*cluster.windows, *made], now)]

        def added(cluster: ClusterState, now: float) -> WindowView:
            return maintenance.as_view(cluster, made[0], now)

        return self._commits.run(step, added, once=repeats.of_window(once))

    def remove_maintenance(
        self, window_id: int, *, dry_run: bool = False, once: Once | None = None
    ) -> WindowView | None:
        """Remove a maintenance window, and grant the pending requests that now fit; return what it was.

        None if there is none of that number, as after a removal before.
        """

        def view(cluster: ClusterState, now: float) -> WindowView | None:
            return maintenance.numbered(cluster, window_id, now)

        if dry_run:
            return self._commits.read(view)
        removed: WindowView | None = None

        def step(cluster: ClusterState, now: float) -> list[Change]:
            nonlocal removed
            removed = view(cluster, now)
            if removed is None:
                return []
            rest = [window for window in cluster.windows if window.window_id != window_id]
            return self._commits.with_dispatch(cluster, [maintenance.replaced(cluster, rest, now)], now)

        def answer(cluster: ClusterState, now: float) -> WindowView | None:
            return removed

        step_of, repeat = repeats.of_answer(once, step, answer)
        return self._commits.run(step_of, answer, once=repeat)

    # ---- servers ----

    def drain(
        self,
        server: int | str,
        gpu: int | str | None = None,
        *,
        reason: str = "",
        failed: bool = False,
        once: Once | None = None,
    ) -> ServerSummary:
        """Drain the server, or one GPU of it by number or UUID: no new leases, its current ones stay.

        `failed` marks a server as broken. Raises `InvalidRequestError` for an unknown GPU.
        """
        check_text(reason=reason)
        if gpu is None:
            return self._server_change(
                server, lambda name, now: Drained(name, now, reason, bool(failed)), once
            )
        if failed:
            raise InvalidRequestError("failed is said of a whole server, not of one GPU", field="failed")
        return self._gpu_change(server, gpu, partial(allocator.drain_gpu, reason=reason), once)

    def resume(
        self, server: int | str, gpu: int | str | None = None, *, once: Once | None = None
    ) -> ServerSummary:
        """Reopen a drained or silent server, or one closed GPU of it, and grant the pending that now fit.

        What ended leases held on the GPU is taken as clean. Raises `InvalidRequestError` for an unknown GPU.
        """
        if gpu is None:
            return self._server_change(server, Resumed, once)
        return self._gpu_change(server, gpu, allocator.resume_gpu, once)

    def searched(
        self, server: int | str, jobs: Sequence[str], *, age_s: float = 0.0, once: Once | None = None
    ) -> ServerSummary:
        """Note the keys of all jobs that a launcher saw on a server without an agent, `age_s` ago.

        A server that waits for its search after a restore opens if each has its lease, else its reason names
        the others.
        """
        name = self._commits.peek_replica(lambda cluster, now: server_name(cluster, server))

        def step(cluster: ClusterState, now: float) -> list[Change]:
            state = cluster.node(name)
            drained = state.drained
            if drained is None or state.watched or not is_searchable(drained, cluster.settings, now - age_s):
                return []
            changes = list(searched(drained, without_lease(state, jobs), now, is_complete=True))
            return self._commits.with_dispatch(cluster, changes, now)

        return self._server_step(name, step, once)

    def look(self, reader: Reader[T], max_age_s: float = 0.0) -> T:
        """Return the reader's answer on the state as of now, or of at most `max_age_s` ago."""
        return self._commits.read(reader, max_age_s)

    def commit(self, step: Step) -> list[Change]:
        """Commit what `step` decides on the newest state, and the grants that it allows; return all of it.

        The step may be called several times, and must not change the state.
        """
        made: list[Change] = []

        def with_grants(cluster: ClusterState, now: float) -> list[Change]:
            made[:] = self._commits.with_dispatch(cluster, step(cluster, now), now)
            return list(made)

        self._commits.run(with_grants, _nothing)
        return made

    def distrust(self, mark: Mark) -> str:
        """Grant nothing, as the state lacks the change of that mark; close its servers for all. Return why.

        Ends with `trust`; the servers open with the state that `store restore` or a reset puts in its place.
        """
        newest = in_utc(mark.at)
        why = (
            f"the state in the store is {OUTDATED}{newest} (version {mark.version}) that a service, its "
            "archive or an agent has seen: gpu-manager store restore FILE of the newest backup, or "
            "gpu-manager reset if no job runs"
        )
        self._commits.distrusted = misconfigured(why)

        def close(cluster: ClusterState, now: float) -> list[Change]:
            return [outdated(state.name, now, newest) for state in cluster.nodes if state.drained is None]

        if self.inventory:
            self.commit(close)
        return why

    def trust(self) -> None:
        """Take back `distrust`."""
        self._commits.distrusted = None

    def server(self, server: int | str) -> ServerDetail:
        """Return one server with its GPUs and the leases on each; raises `UnknownNodeError`."""
        return self._commits.read(
            lambda cluster, now: server_detail(cluster.node(server_name(cluster, server)))
        )

    def adopt(self, server: int | str, gpus: Sequence[Gpu], *, once: Once | None = None) -> ServerDetail:
        """Give a server these GPUs in the inventory; no file takes them back unless it is forced.

        Raises `ServerInUseError` while it has leases.
        """
        name = self._commits.peek_replica(lambda cluster, now: server_name(cluster, server))

        def view(cluster: ClusterState, now: float) -> ServerDetail:
            return server_detail(cluster.node(name))

        step, repeat = repeats.of_answer(once, lambda cluster, now: adoption(cluster, name, gpus, now), view)
        answer = self._commits.run(step, view, exclusive=True, once=repeat)
        self.expire_and_schedule()
        return answer

    # ---- the cluster ----

    def cluster(self) -> ClusterView:
        """Return the stored cluster: what `apply` takes again, and its revision."""
        return self._commits.read(lambda cluster, now: cluster_view(cluster))

    def diff(
        self, definition: ClusterDefinition | ClusterForm, options: ApplyOptions | None = None
    ) -> ClusterDiff:
        """Return what `apply` would change; raises `InvalidRequestError`."""
        defined = definition if isinstance(definition, ClusterDefinition) else definition.definition()
        return self._commits.read(
            lambda cluster, now: plan(cluster, defined, options or NO_OPTIONS, now).view()
        )

    def apply(
        self,
        definition: ClusterDefinition | ClusterForm,
        options: ApplyOptions | None = None,
        *,
        revision: str | None = None,
        once: Once | None = None,
    ) -> ClusterDiff:
        """Make the cluster what is defined, in one commit, and return what that changed.

        Raises `InvalidRequestError`, changing nothing, if any of it is refused, and `ClusterChangedError` if
        the stored cluster has another revision than that of the difference which was shown.
        """
        defined = definition if isinstance(definition, ClusterDefinition) else definition.definition()
        made: list[ClusterDiff] = []

        def step(cluster: ClusterState, now: float) -> list[Change]:
            found = plan(cluster, defined, options or NO_OPTIONS, now)
            if revision is not None and revision != found.revision:
                raise ClusterChangedError(
                    "the cluster was changed since its difference was shown: look again"
                )
            if found.refusals:
                raise found.refusals[0]
            made[:] = [found.view()]
            return found.changes

        def answer(cluster: ClusterState, now: float) -> ClusterDiff:
            return {**made[0], "revision": revision_of(cluster)}

        step_of, repeat = repeats.of_answer(once, step, answer)
        done = self._commits.run(step_of, answer, exclusive=True, once=repeat)
        self.expire_and_schedule()
        return done

    def expire_and_schedule(self) -> list[Recorded]:
        """Expire leases that are due and grant pending requests that fit; return the changes made."""
        return [codec.change_to_dict(change) for change in self._commits.expire_and_schedule()]

    def close(self) -> None:
        """Close the store's connections."""
        self.store.close()

    def __enter__(self) -> GPUResourceManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def build_request(
        self,
        lease_id: Dumpable | str | None = None,
        gpus: int | None = None,
        cpus: int | None = None,
        prefer_server: int | str | None = None,
        *,
        any_priority: bool = False,
        **options: Unpack[DemandArguments],
    ) -> Request:
        """Return the request of a `Demand`, or of its fields, on the replica's servers.

        With `any_priority` also one that only an operator may make.
        """
        demand = Demand.of(lease_id, gpus, cpus, prefer_server, **options)
        who = asking()
        is_operator = any_priority or (who is not None and who.is_operator)

        def build(cluster: ClusterState, now: float) -> Request:
            return build_request(demand, cluster, is_operator=is_operator)

        try:
            return self._commits.peek_replica(build)
        except InvalidRequestError:  # it may be older than the cluster that takes it
            return self._commits.read(build)

    def gpu_range(self) -> tuple[int, int]:
        """Return the minimum and maximum of whole GPUs a task may request, on the replica's servers."""
        return self._commits.peek_replica(lambda cluster, now: gpu_range(cluster))

    # ---- shared by all operations ----

    def _allocate(
        self,
        requests: Sequence[Request],
        view: Callable[[ClusterState, Lease], T],
        once: Once | None = None,
        *,
        in_batch: bool = False,
    ) -> list[T | Refusal]:
        """Decide the requests at once; those `in_batch` whose ids are taken are refused, not the others."""
        taken: dict[str, Refusal] = {}

        def is_fresh(cluster: ClusterState, request: Request) -> bool:
            try:
                return not is_repeat(cluster, request)
            except DuplicateTaskError as error:
                if not in_batch:
                    raise
                taken[request.lease_id] = Refusal(RefusalKind.TASK_TAKEN, str(error))
                return False

        def step(cluster: ClusterState, now: float) -> list[Change]:
            taken.clear()
            fresh = [request for request in requests if is_fresh(cluster, request)]
            return (
                allocator.allocate_in_order(cluster, fresh, *self._commits.rules(cluster), now)
                if fresh
                else []
            )

        def answers_in(cluster: ClusterState, now: float) -> list[tuple[Lease, T] | Refusal]:
            leases = [cluster.leases.get(request.lease_id) for request in requests]
            refused = [
                request
                for request, lease in zip(requests, leases, strict=True)
                if lease is None and request.lease_id not in taken
            ]
            why = taken | (self._refusals(cluster, refused, now) if refused else {})
            return [
                why[request.lease_id]
                if lease is None or request.lease_id in taken
                else (lease, view(cluster, lease))
                for request, lease in zip(requests, leases, strict=True)
            ]

        results: list[tuple[Lease, T] | Refusal]
        try:
            results = self._commits.run(
                step,
                answers_in,
                once=repeats.of_grants(once, requests, view),
                refused=lambda cluster: any(request.lease_id not in cluster.leases for request in requests),
            )
        except LockTimeoutError as error:
            results = [lock_busy(error.waited_s)] * len(requests)
        except StateUnconfirmedError as error:
            unconfirmed = error
            window = self._commits.peek_replica(lambda cluster, now: _window_of(cluster, unconfirmed))
            results = [recovering(window)] * len(requests)
        answers: list[T | Refusal] = []
        for request, result in zip(requests, results, strict=True):
            if isinstance(result, Refusal):
                name = short(display_name(request.lease_id, request.labels))
                logger.warning("no lease for %s: %s: %s", name, result.kind, result.detail)
                answers.append(result)
            else:
                lease, answer = result
                for member in lease.members if logger.isEnabledFor(logging.INFO) else ():
                    gpu_ids = ",".join(map(str, member.gpu_ids))
                    logger.info("%s holds GPUs %s of %s", name_of(lease), gpu_ids, member.node)
                answers.append(answer)
        return answers

    def _refusals(self, cluster: ClusterState, requests: Sequence[Request], now: float) -> dict[str, Refusal]:
        """Return the reasons why the requests were not granted in that state."""
        suspension = self._suspension(cluster, now)
        return refusals_of(cluster, requests, *self._commits.rules(cluster), now, suspension)

    def _status(self, cluster: ClusterState, lease_id: str, now: float) -> Submission | None:
        suspension = self._suspension(cluster, now)
        return serializers.status(cluster, lease_id, *self._commits.rules(cluster), now, suspension)

    def _allocation_of(self, lease: Lease) -> Allocation:
        """Return a new lease as an allocation; this process may not have read the state that has it."""

        def view(cluster: ClusterState, now: float) -> Allocation:
            for member in lease.members:
                cluster.node(member.node)  # an error here has the inventory read again
            return serializers.allocation(cluster, lease)

        return self._commits.peek_replica(view)

    def _server_change(
        self, server: int | str, make: Callable[[str, float], Change], once: Once | None
    ) -> ServerSummary:
        name = self._commits.peek_replica(lambda cluster, now: server_name(cluster, server))
        return self._server_step(
            name, lambda cluster, now: self._commits.with_dispatch(cluster, [make(name, now)], now), once
        )

    def _gpu_change(
        self,
        server: int | str,
        gpu: int | str,
        decide: Callable[[ClusterState, str, int, float], list[Change]],
        once: Once | None,
    ) -> ServerSummary:
        name = self._commits.peek_replica(lambda cluster, now: server_name(cluster, server))

        def step(cluster: ClusterState, now: float) -> list[Change]:
            changes = decide(cluster, name, gpu_number(cluster, name, gpu), now)
            return self._commits.with_dispatch(cluster, changes, now)

        return self._server_step(name, step, once)

    def _server_step(self, name: str, step: Step, once: Once | None) -> ServerSummary:
        def view(cluster: ClusterState, now: float) -> ServerSummary:
            return serializers.server(cluster.node(name))

        step_of, repeat = repeats.of_answer(once, step, view)
        return self._commits.run(step_of, view, once=repeat)

    def _initialise(self) -> None:
        """Give an empty store what this manager was told of its cluster; write nothing to another one.

        Raises `SettingsError` if the stored cluster is not what this manager was told.
        """
        stated = settings_of(self._stated)
        get_policy(stated.policy), get_order(stated.order)
        settings = replace(stated, policy_package=package_of(stated.policy))
        if self._stated or self._nodes is not None or self._has_servers:
            try:
                is_first = self._commits.initialise(ClusterState(self._first_nodes()), settings)
            except (CorruptStateError, StateLostError) as error:
                # Every operation will raise the same error; only a reset helps, and that needs a manager.
                logger.error("%s", error)
                return
            if not is_first:
                self._commits.peek_replica(lambda cluster, now: self._require_same(cluster, settings, now))

    def _first_nodes(self) -> tuple[Node, ...]:
        if self._nodes is not None:
            return self._nodes
        if not self._has_servers:
            return ()
        return default_inventory(self.TOTAL_SERVERS, self.GPUS_PER_SERVER, self.CPUS_PER_SERVER)

    def _require_same(self, cluster: ClusterState, settings: ClusterSettings, now: float) -> None:
        for name in self._stated:
            given, stored = getattr(settings, name), getattr(cluster.settings, name)
            if given != stored:
                raise SettingsError(f"{name} is {stored!r} in the store, not {given!r}: {HOW_TO_CHANGE}")
        found = plan(cluster, ClusterDefinition(nodes=self._nodes), NO_OPTIONS, now).lines
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            raise SettingsError(f"the store has another inventory ({found[0]}{more}): {HOW_TO_CHANGE}")

    def _emptied(self) -> Snapshot:
        """Return the stored cluster without leases and queue; what a new store gets if it cannot be read."""
        try:
            known = self._commits.read(lambda cluster, now: cluster.snapshot())
        except (CorruptStateError, StateLostError):
            known = replace(ClusterState(self._first_nodes()).snapshot(), settings=settings_of(self._stated))
        empty = ClusterState(node for node in known.nodes if node.name not in known.retired).snapshot()
        return replace(
            empty,
            settings=known.settings,
            teams=known.teams,
            windows=known.windows,
            adoptions=known.adoptions,
        )


def _next_part(requests: Sequence[Request], start: int) -> list[Request]:
    """Return the requests from `start` on that are decided at once, the same ones each time."""
    part: list[Request] = []
    left = MAX_ITEMS
    for request in requests[start:]:
        left -= 1 if request.nodes == 1 else GANG_ITEMS
        if left < 0:
            break
        part.append(request)
    return part


def _job_end(value: JobEnd | str, reason: str = "") -> JobEnd:
    """Return the knowledge of a job's end; raises `InvalidRequestError`."""
    try:
        end = JobEnd(value)
    except ValueError:
        known = ", ".join(repr(str(each)) for each in JobEnd if each)
        raise InvalidRequestError(f"job_end must be one of {known}, got {value!r}", field="job_end") from None
    if end is JobEnd.GONE and not reason.strip():
        raise InvalidRequestError("reason must say how the job is known to be gone", field="reason")
    return end


def _inventory(cluster: ClusterState) -> tuple[Node, ...]:
    return tuple(state.node for state in cluster.nodes if not state.retired)


def _window_of(cluster: ClusterState, error: StateUnconfirmedError) -> RecoveryWindow:
    left_s = error.remaining_s
    began_ago_s = max(cluster.settings.confirmation_window_s - left_s, 0.0)
    return RecoveryWindow(began_ago_s, left_s, error.clock_jump_s)


def _nothing(cluster: ClusterState, now: float) -> None:
    """Read nothing of the state."""


def _granted(result: Allocation | Refusal) -> Allocation | None:
    """Return the original's answer: an allocation or None."""
    return None if isinstance(result, Refusal) else result


__all__ = ["GPUResourceManager", "Observer"]


def _called(lease: Lease | None, lease_id: str) -> str:
    """Return the name of a lease; its id if it is a remainder, or was not there."""
    return short(lease_id) if lease is None else name_of(lease)
