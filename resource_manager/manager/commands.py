"""Commands about leases and the queue: grant, queue, renew, release, cancel, preempt."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from resource_manager.core.changes import Change, JobEnd, MembersReleased, Released, ReleaseResult
from resource_manager.core.cluster import ClusterState
from resource_manager.core.identifiers import check_text
from resource_manager.core.models import RUNS_JOBS, STORED, JobPlace, Lease, Request, has_stored_job
from resource_manager.core.names import display_name, name_of, short
from resource_manager.core.refusal import Grounds, RecoveryWindow, RefusalKind, recovering
from resource_manager.errors import (
    DuplicateTaskError,
    InvalidRequestError,
    LeaseNotFoundError,
    LockTimeoutError,
    NeverFitsError,
    NewerFormatError,
    NoServersError,
    OtherOwnerError,
    StateUnconfirmedError,
)
from resource_manager.lazy import lazy_module
from resource_manager.manager import repeats, serializers
from resource_manager.manager.agent_jobs import reported_end
from resource_manager.manager.arguments import Dumpable
from resource_manager.manager.commit.asking import Step, checked_by, with_by
from resource_manager.manager.commit.protocol import Transactions
from resource_manager.manager.plurals import numbered_gpus
from resource_manager.manager.queries import status_in
from resource_manager.manager.refusal_wording import Refusal, detail_of, lock_busy, no_servers, refusal_of
from resource_manager.manager.requests import checked, is_repeat, request_of
from resource_manager.manager.results import Allocation, Recorded, Renewal, SlurmJob, Submission
from resource_manager.manager.stored_jobs import JobEnded, JobResult, StoredJobs
from resource_manager.scheduling import allocator, lease_steps
from resource_manager.scheduling.reasons.feasibility import refusals_of
from resource_manager.storage import Store, codec
from resource_manager.storage.jobs import JobRow
from resource_manager.storage.once import Once

if TYPE_CHECKING:
    from resource_manager.manager import slurm_jobs
    from resource_manager.manager.demand import DemandArguments
else:
    slurm_jobs = lazy_module("resource_manager.manager.slurm_jobs")

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_ITEMS = 16
"""Requests of a batch that are decided at once; others have their turn before the next ones."""

GANG_ITEMS = 8
"""Requests that take as long to decide as a gang."""


class Commands:
    """Commands about leases and the queue, each one commit or more of `Transactions`."""

    _commits: Transactions
    store: Store
    stored_jobs: StoredJobs

    def keep_slurm_jobs(self, cluster: str, jobs: Sequence[SlurmJob]) -> None:
        """Replace what is known of the jobs of a cluster of Slurm, which `slurm_jobs` returns."""
        slurm_jobs.keep(self.store, cluster, jobs)

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
            request = request_of(self._commits, lease_id, gpus, cpus, prefer_server, **options)
        except NoServersError as error:
            logger.warning("no lease: %s", error)
            return no_servers()
        return self._explained([request], self._allocate([request], lambda cluster, lease: lease))[0]

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
            request = request_of(self._commits, lease_id, gpus, cpus, prefer_server, **options)
        except NoServersError as error:
            logger.warning("no lease: %s", error)
            return no_servers()
        return self._explained([request], self._allocate([request], serializers.allocation, once))[0]

    def try_allocate_batch(
        self, requests: Iterable[Mapping[str, Any] | Dumpable | Request], *, once: Once | None = None
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
                else request_of(self._commits, **item)
                if isinstance(item, Mapping)
                else request_of(self._commits, item)
                for item in items
            ]
        except NoServersError as error:
            logger.warning("no leases: %s", error)
            return [no_servers()] * len(items)
        if len({request.lease_id for request in asked}) != len(asked):
            raise InvalidRequestError("a batch must not have a lease id twice", field="lease_id")
        answers: list[Allocation | Refusal | None] = []
        while (start := len(answers)) < len(asked):
            part = _next_part(asked, start)
            if answers and isinstance(last := answers[-1], Refusal) and last.kind is RefusalKind.LOCK_BUSY:
                answers += [last] * len(part)
            else:
                of_part = None if once is None else once.part(start)
                answers += self._allocate(part, serializers.allocation, of_part, in_batch=True)
                if once is not None and of_part is not None:
                    once.repeated = once.repeated or of_part.repeated
        return self._explained(asked, answers)

    def submit(
        self,
        lease_id: Dumpable | str | None = None,
        gpus: int | None = None,
        cpus: int | None = None,
        prefer_server: int | str | None = None,
        *,
        job: Mapping[str, Any] | None = None,
        once: Once | None = None,
        **options: Unpack[DemandArguments],
    ) -> Submission:
        """Queue the request; return an allocation (`state` RUNNING) or a queue entry (WAITING).

        `job` (a `JobTemplate` as plain values) is stored in the same commit, until a day after its lease. It
        goes to servers whose agents run jobs.

        `cpus` defaults to 1. Submitting the same request again returns the task's allocation or queue entry.
        Raises as `allocate_resources` does, and `LockTimeoutError`.
        """
        request = request_of(self._commits, lease_id, gpus, cpus, prefer_server, **options)
        rows = []
        if job is not None:
            required = {**request.labels_required, **RUNS_JOBS}
            request = replace(request, labels={**request.labels, **STORED}, labels_required=required)
            rows = [self.stored_jobs.row_of_job(request.lease_id, request.owner, job)]

        def step(cluster: ClusterState, now: float) -> list[Change]:
            if is_repeat(cluster, request):
                return []
            try:
                return allocator.submit(cluster, request, self._commits.deciding(cluster, now))
            except NeverFitsError as error:
                raise NeverFitsError(detail_of(error.grounds)) from None

        def granted(cluster: ClusterState, now: float) -> Allocation | None:
            lease = cluster.leases.get(request.lease_id)
            return None if lease is None else serializers.allocation(cluster, lease)

        repeat = repeats.of_submission(once, request.lease_id, granted)
        lease = self._commits.run(step, granted, once=repeat, jobs=rows)
        found = lease or self._commits.explain(
            lambda cluster, now: status_in(self._commits, cluster, request.lease_id, now)
        )
        if found is None:
            raise LeaseNotFoundError(
                f"task {request.lease_id!r} was queued, and has ended or been cancelled since"
            )
        return found

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
        result: JobEnded | None = None,
        also: Step | None = None,
        once: Once | None = None,
    ) -> ReleaseResult:
        """End the lease if it has that fencing token and owner, as far as they are given.

        `outcome` (SUCCESS, FAILED, …) and `reason` are written to the history. The remainder of a gang needs
        its token. `job_end` is what the caller knows of a job that was placed: without it, its release is a
        `JobPlacedError`; `forced` quarantines the lease. The task's next request avoids `failed_nodes`, on
        which its job could not be started, for a while. `result` is stored in the same commit, for
        `result_of`; it needs the fencing token. That of a stored job that has ended is by default what its
        agents reported. `also` says what else the commit changes, on the state after the release.
        """
        end = _job_end(job_end, reason)
        check_text(reason=reason)
        rows: list[JobRow] = []
        if result is not None and fencing_token is None:
            raise InvalidRequestError("{result} needs {fencing_token} beside it", field="result")
        if fencing_token is not None and (result is not None or end is JobEnd.ENDED):
            lease = self._commits.read(lambda cluster, now: cluster.leases.get(lease_id))
            if lease is not None and result is None and has_stored_job(lease.request.labels):
                result = reported_end(self.store, lease)
            if lease is not None and result is not None:
                rows = self.stored_jobs.rows_of_result(lease, result, outcome, reason)
        return self._release(
            lease_id,
            lambda cluster, now: lease_steps.release(
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
            jobs=rows,
            also=also,
        )

    def _release(
        self,
        lease_id: str,
        decide: Step,
        outcome: str,
        once: Once | None,
        *,
        has_token: bool,
        jobs: Sequence[JobRow] = (),
        also: Step | None = None,
    ) -> ReleaseResult:
        check_text(outcome=outcome)
        is_over = True
        lease: Lease | None = None

        def step(cluster: ClusterState, now: float) -> list[Change]:
            nonlocal is_over, lease
            lease = cluster.leases.get(lease_id)
            decided = decide(cluster, now)
            is_over = any(type(change) in (Released, MembersReleased) for change in decided)
            if also is not None:
                with cluster.trial():
                    for change in decided:
                        cluster.apply(change)
                    decided = [*decided, *also(cluster, now)]
            return self._commits.with_dispatch(cluster, decided, now)

        try:
            is_over = self._commits.run(
                step,
                lambda cluster, now: is_over,
                once=repeats.of_release(once),
                lease_id=lease_id if has_token else None,
                jobs=jobs,
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

    def result_of(self, lease_id: str, fencing_token: int | None = None) -> JobResult | None:
        """Return the result that was stored as the lease was released, for 7 days.

        Without its fencing token, that of the newest lease of this id that has one.
        """
        return self.stored_jobs.result(lease_id, fencing_token)

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
            lambda cluster, now: lease_steps.release_members(
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
            cancelled = lease_steps.cancel(cluster, lease_id, now, reason, owner=owner, sequence=sequence)
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
        for_s: float | None = None,
        once: Once | None = None,
    ) -> Allocation:
        """Restart the lease's time to live; `checkpoint_at` is when its job last saved what it did.

        With `for_s`, at most a day, it lives for so many seconds if that is longer.
        The answer's `state` is PREEMPTING if the job must end by `until`.

        Raises `LeaseNotFoundError` if the lease has ended, and `OtherOwnerError` if it is not that owner's.
        """
        return self._commits.run(
            lambda cluster, now: lease_steps.renew(
                cluster,
                lease_id,
                now,
                fencing_token=fencing_token,
                owner=owner,
                checkpoint_at=checkpoint_at,
                for_s=for_s,
            ),
            lambda cluster, now: serializers.allocation(cluster, cluster.leases[lease_id]),
            once=repeats.of_renewal(once, lease_id, serializers.allocation),
            lease_id=lease_id if fencing_token is not None else None,
        )

    def renew_all(self, renewals: Sequence[Renewal], *, owner: str | None = None) -> list[bool]:
        """Renew several leases in one commit; return of each whether it is still held, by that owner."""
        held: list[bool] = []

        def step(cluster: ClusterState, now: float) -> list[Change]:
            held.clear()
            changes: list[Change] = []
            for each in renewals:
                token, saved_at = each["fencing_token"], each.get("checkpoint_at")
                try:
                    renewed = lease_steps.renew(
                        cluster,
                        each["task_id"],
                        now,
                        fencing_token=token,
                        owner=owner,
                        checkpoint_at=saved_at,
                    )
                except (LeaseNotFoundError, OtherOwnerError):
                    held.append(False)
                else:
                    changes += with_by(renewed, checked_by(each.get("by", "")), cluster.sequence)
                    held.append(True)
            return changes

        try:
            return self._commits.run(step, lambda cluster, now: list(held))
        except NewerFormatError:  # of such a state each lease is renewed for itself
            return [self._is_renewed(each, owner) for each in renewals]

    def _is_renewed(self, renewal: Renewal, owner: str | None) -> bool:
        token, saved_at = renewal["fencing_token"], renewal.get("checkpoint_at")
        try:
            self.renew(renewal["task_id"], fencing_token=token, owner=owner, checkpoint_at=saved_at)
        except (LeaseNotFoundError, OtherOwnerError):
            return False
        return True

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
            lambda cluster, now: lease_steps.place_job(
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
            return lease_steps.preempt(
                cluster,
                lease_id,
                self._commits.deciding(cluster, now),
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

    def expire_and_schedule(self) -> list[Recorded]:
        """Expire leases that are due and grant pending requests that fit; return the changes made."""
        return [codec.change_to_dict(change) for change in self._commits.expire_and_schedule()]

    def _allocate(
        self,
        requests: Sequence[Request],
        view: Callable[[ClusterState, Lease], T],
        once: Once | None = None,
        *,
        in_batch: bool = False,
    ) -> list[T | Refusal | None]:
        """Decide the requests at once, with None for those that `_explained` has to find the reason for.

        Those `in_batch` whose ids are taken are refused, not the others.
        """
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
                allocator.allocate_in_order(cluster, fresh, self._commits.deciding(cluster, now))
                if fresh
                else []
            )

        def answers_in(cluster: ClusterState, now: float) -> list[tuple[Lease, T] | Refusal | None]:
            return [
                taken[request.lease_id]
                if request.lease_id in taken
                else None
                if (lease := cluster.leases.get(request.lease_id)) is None
                else (lease, view(cluster, lease))
                for request in requests
            ]

        results: list[tuple[Lease, T] | Refusal | None]
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
            results = [refusal_of(recovering(window))] * len(requests)
        answers: list[T | Refusal | None] = []
        for result in results:
            if isinstance(result, tuple):
                lease, answer = result
                for member in lease.members if logger.isEnabledFor(logging.INFO) else ():
                    logger.info(
                        "%s holds %s of %s", name_of(lease), numbered_gpus(member.gpu_ids), member.node
                    )
                answers.append(answer)
            else:
                answers.append(result)
        return answers

    def _explained(
        self, requests: Sequence[Request], answers: Sequence[T | Refusal | None]
    ) -> list[T | Refusal]:
        """Return the answers with a refusal in the place of each None, for all of them in one look."""
        refused = [request for request, answer in zip(requests, answers, strict=True) if answer is None]

        def view(cluster: ClusterState, now: float) -> dict[str, Grounds]:
            return refusals_of(cluster, refused, self._commits.explaining(cluster, now))

        why = self._commits.explain(view) if refused else {}
        explained: list[T | Refusal] = []
        for request, answer in zip(requests, answers, strict=True):
            if answer is None:
                answer = refusal_of(why[request.lease_id])
            if isinstance(answer, Refusal):
                name = short(display_name(request.lease_id, request.labels))
                logger.warning("no lease for %s: %s: %s", name, answer.kind, answer.detail)
            explained.append(answer)
        return explained


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
        raise InvalidRequestError("{job_end} must be one of {}, got {!r}", known, value) from None
    if end is JobEnd.GONE and not reason.strip():
        raise InvalidRequestError("{reason} must say how the job is known to be gone")
    return end


def _window_of(cluster: ClusterState, error: StateUnconfirmedError) -> RecoveryWindow:
    left_s = error.remaining_s
    began_ago_s = max(cluster.settings.confirmation_window_s - left_s, 0.0)
    return RecoveryWindow(began_ago_s, left_s, error.clock_jump_s)


def _nothing(cluster: ClusterState, now: float) -> None:
    """Read nothing of the state."""


def _called(lease: Lease | None, lease_id: str) -> str:
    """Return the name of a lease; its id if it is a remainder, or was not there."""
    return short(lease_id) if lease is None else name_of(lease)
