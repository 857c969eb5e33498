"""Commands on leases and pending requests that exist: renew, release, cancel, preempt."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import nullcontext

from resource_manager import errors
from resource_manager.core.changes import Change, JobEnd, MembersReleased, Outcome, Released
from resource_manager.core.cluster import ClusterState
from resource_manager.core.identifiers import check_text
from resource_manager.core.models import JobPlace, Lease, has_stored_job
from resource_manager.core.names import name_of, short
from resource_manager.manager import repeats, serializers
from resource_manager.manager.agent_jobs import NO_END, reported_end
from resource_manager.manager.commit.asking import Step, asked_by, asking, checked_by, with_by
from resource_manager.manager.commit.group import Reader
from resource_manager.manager.commit.protocol import Transactions
from resource_manager.manager.results import Allocation, Recorded, ReleaseResult, Renewal
from resource_manager.manager.stored_jobs import JobExit, JobResult, StoredJobs
from resource_manager.scheduling import lease_steps
from resource_manager.storage import Store, codec
from resource_manager.storage.jobs import JobRow
from resource_manager.storage.once import Once

logger = logging.getLogger(__name__)


class Commands:
    """Commands about leases and pending requests, each one commit or more of `Transactions`."""

    _commits: Transactions
    store: Store
    stored_jobs: StoredJobs

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
        result: JobExit | None = None,
        also: Step | None = None,
        once: Once | None = None,
    ) -> ReleaseResult:
        """End the lease; with `fencing_token` or `owner` only if it has them.

        `outcome` (SUCCESS, FAILED, …) and `reason` go to the history. `job_end` says what the caller knows of
        a placed job: without it the release is a `JobPlacedError`, with `forced` the lease is quarantined.
        The next request of the task avoids `failed_nodes`, where its job did not start, for a while. `result`
        is stored in the same commit for `result_of` and needs the fencing token; of a stored job it is by
        default what its agents reported, and FAILED if the job is gone. `also` makes further changes, on the
        state after the release. A remainder of a gang needs its token.
        """
        end = _job_end(job_end, reason)
        check_text(outcome=outcome, reason=reason)
        if result is not None and fencing_token is None:
            raise errors.InvalidRequestError("{result} needs {fencing_token} beside it")
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
            once,
            has_token=fencing_token is not None,
            jobs=self._rows_of_end(lease_id, fencing_token, end, result, outcome, reason),
            also=also,
        )

    def _rows_of_end(
        self,
        lease_id: str,
        fencing_token: int | None,
        end: JobEnd,
        result: JobExit | None,
        outcome: str,
        reason: str,
    ) -> list[JobRow]:
        """Return the rows of the result to store; none for a remainder, since its gang has one."""
        if fencing_token is None or (result is None and end not in (JobEnd.ENDED, JobEnd.GONE)):
            return []
        lease = self._commits.read(lambda cluster, now: cluster.leases.get(lease_id))
        if lease is None or lease.fencing_token != fencing_token:
            return []
        if result is None and has_stored_job(lease.request.labels):
            result = NO_END if end is JobEnd.GONE else reported_end(self.store, lease)
        if result is None:
            return []
        outcome = outcome or (Outcome.FAILED if end is JobEnd.GONE else "")
        return self.stored_jobs.rows_of_result(lease, result, outcome, reason)

    def _release(
        self,
        lease_id: str,
        decide: Step,
        once: Once | None,
        *,
        has_token: bool,
        jobs: Sequence[JobRow] = (),
        also: Step | None = None,
    ) -> ReleaseResult:
        is_over = True
        lease: Lease | None = None

        def step(cluster: ClusterState, now: float) -> list[Change]:
            nonlocal is_over, lease
            lease = cluster.leases.get(lease_id)
            decided = decide(cluster, now)
            is_over = any(type(change) in (Released, MembersReleased) for change in decided)
            if also is not None:
                with cluster.trial():
                    cluster.apply(*decided)
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
        except (errors.LeaseNotFoundError, errors.OtherOwnerError) as error:
            # Who names a lease by its fencing token acts on the result: another may have ended it just now.
            logger.log(logging.DEBUG if has_token else logging.WARNING, "not released: %s", error)
            return ReleaseResult.NOT_HELD if lease is None else ReleaseResult.OTHER_HOLDER
        if not is_over:
            logger.warning("quarantined %s: released by force, its job may run", _called(lease, lease_id))
            return ReleaseResult.QUARANTINED
        if logger.isEnabledFor(logging.INFO):
            logger.info("released %s", _called(lease, lease_id))
        return ReleaseResult.RELEASED

    def result_of(
        self, lease_id: str, fencing_token: int | None = None, *, owner: str | None = None
    ) -> JobResult | None:
        """Return the result that was stored as the lease was released, for 7 days.

        Without its fencing token, that of the newest lease of this id that has one: of the `owner`, if given
        and if they have one, else of all.
        """
        return self.stored_jobs.result(lease_id, fencing_token, owner)

    def release_members(
        self,
        lease_id: str,
        ranks: Collection[int],
        *,
        fencing_token: int,
        owner: str | None = None,
        outcome: str = "",
        job_end: JobEnd | str = JobEnd.UNKNOWN,
        reason: str = "",
        once: Once | None = None,
    ) -> ReleaseResult:
        """End these members of a gang; quarantine the others until they are released by the fencing token.

        Such a remainder has no time to live, and its lease id may be queued again. All members at once, or
        the last ones of a remainder, end it as `release` does.
        """
        end = _job_end(job_end, reason)
        check_text(outcome=outcome, reason=reason)
        as_gone = JobEnd.GONE if end is JobEnd.ENDED else end  # without these members the gang has no end
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
                reason=reason,
            ),
            once,
            has_token=True,
            jobs=self._rows_of_end(lease_id, fencing_token, as_gone, None, outcome, reason),
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
            self._commits.run(step, lambda cluster, now: None, once=repeats.of_done(once))
        except errors.LeaseNotFoundError:
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

        Raises `LeaseNotFoundError` if the lease has ended, or a state that replaced its own lacks it, and
        `OtherOwnerError` if it is not that owner's.
        """
        try:
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
                _allocation_of(lease_id),
                once=repeats.of_lease(once, lease_id, serializers.allocation),
                lease_id=lease_id if fencing_token is not None else None,
            )
        except errors.StateLostError as error:
            if not any(self._commits.lost([(lease_id, fencing_token)])):
                raise
            raise errors.LeaseNotFoundError(lease_id, fencing_token) from error

    def renew_all(self, renewals: Sequence[Renewal], *, owner: str | None = None) -> list[bool]:
        """Renew several leases in one commit; return of each whether it is still held, by that owner."""
        held: list[bool] = []

        def step(cluster: ClusterState, now: float) -> list[Change]:
            held.clear()
            changes: list[Change] = []
            for each in renewals:
                lease_id, token, saved_at = each["task_id"], each["fencing_token"], each.get("checkpoint_at")
                try:
                    renewed = lease_steps.renew(
                        cluster, lease_id, now, fencing_token=token, owner=owner, checkpoint_at=saved_at
                    )
                except (errors.LeaseNotFoundError, errors.OtherOwnerError):
                    held.append(False)
                else:
                    changes += with_by(renewed, checked_by(each.get("by", "")), cluster.sequence)
                    held.append(True)
            return changes

        try:
            return self._commits.run(step, lambda cluster, now: list(held))
        except errors.NewerFormatError:
            # a newer version wrote this state: only steps about one lease are carried out on it
            return [self._is_renewed(each, owner) for each in renewals]
        except errors.StateLostError:
            # a lease that is there counts as renewed; its owner learns of the lost state at its next renewal
            lost = self._commits.lost([(each["task_id"], each["fencing_token"]) for each in renewals])
            if not any(lost):
                raise
            return [not is_lost for is_lost in lost]

    def _is_renewed(self, renewal: Renewal, owner: str | None) -> bool:
        token, saved_at = renewal["fencing_token"], renewal.get("checkpoint_at")
        who = asking()
        is_named = bool(self._commits.by if who is None else who.by)
        try:
            with nullcontext() if is_named else asked_by(renewal.get("by", "")):
                self.renew(renewal["task_id"], fencing_token=token, owner=owner, checkpoint_at=saved_at)
        except (errors.LeaseNotFoundError, errors.OtherOwnerError):
            return False
        return True

    def place_job(
        self, lease_id: str, places: Sequence[JobPlace], *, fencing_token: int, owner: str | None = None
    ) -> Allocation:
        """Store where the jobs of a lease are about to start, one place a member; before any of them does.

        From now on the lease is quarantined rather than expired, and released only with a `job_end`. The
        answer's `job_places` are those of whoever came first. Raises as `renew` does.
        """
        return self._commits.run(
            lambda cluster, now: lease_steps.place_job(
                cluster, lease_id, places, now, fencing_token=fencing_token, owner=owner
            ),
            _allocation_of(lease_id),
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

        view = _allocation_of(lease_id)

        def tried(cluster: ClusterState, now: float) -> Allocation:
            with cluster.trial():
                cluster.apply(*step(cluster, now))
                return view(cluster, now)

        if dry_run:
            return self._commits.read(tried)
        return self._commits.run(step, view, once=repeats.of_lease(once, lease_id, serializers.allocation))

    def expire_and_schedule(self) -> list[Recorded]:
        """Expire leases that are due and grant pending requests that fit; return the changes made."""
        return [codec.change_to_dict(change) for change in self._commits.expire_and_schedule()]


def _job_end(value: JobEnd | str, reason: str) -> JobEnd:
    try:
        end = JobEnd(value)
    except ValueError:
        known = ", ".join(repr(str(each)) for each in JobEnd if each)
        raise errors.InvalidRequestError("{job_end} must be one of {}, got {!r}", known, value) from None
    if end is JobEnd.GONE and not reason.strip():
        raise errors.InvalidRequestError("{reason} must say how the job is known to be gone")
    return end


def _called(lease: Lease | None, lease_id: str) -> str:
    """Return the name of a lease; its id if it is a remainder, or was not there."""
    return short(lease_id) if lease is None else name_of(lease)


def _allocation_of(lease_id: str) -> Reader[Allocation]:
    return lambda cluster, now: serializers.allocation(cluster, cluster.leases[lease_id])
