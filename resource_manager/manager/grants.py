"""Requests that are made: granted at once, alone or in a batch, or queued."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, Unpack

from resource_manager import errors
from resource_manager.core.changes import Change
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import RUNS_JOBS, STORED, Lease, Request
from resource_manager.core.names import display_name, name_of, short
from resource_manager.core.refusal import Grounds, RefusalKind, recovering, window_left
from resource_manager.manager import repeats, serializers
from resource_manager.manager.arguments import Dumpable
from resource_manager.manager.commit.protocol import Transactions
from resource_manager.manager.demand import Demand, DemandArguments
from resource_manager.manager.plurals import numbered_gpus
from resource_manager.manager.queries import status_in
from resource_manager.manager.refusal_wording import Refusal, detail_of, lock_busy, no_servers, refusal_of
from resource_manager.manager.requests import is_repeat, request_of
from resource_manager.manager.results import Allocation, Submission
from resource_manager.manager.stored_jobs import StoredJobs
from resource_manager.scheduling import allocator
from resource_manager.scheduling.reasons.feasibility import refusals_of
from resource_manager.storage.once import Once

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_ITEMS = 16
"""Requests of a batch that are decided at once; others have their turn before the next ones."""

GANG_ITEMS = 8
"""Requests that take as long to decide as a gang."""


class Grants:
    """Commands that make requests, each one commit or more of `Transactions`."""

    _commits: Transactions
    stored_jobs: StoredJobs

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
            request = request_of(self._commits, Demand.of(lease_id, gpus, cpus, prefer_server, **options))
        except errors.NoServersError as error:
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
            request = request_of(self._commits, Demand.of(lease_id, gpus, cpus, prefer_server, **options))
        except errors.NoServersError as error:
            logger.warning("no lease: %s", error)
            return no_servers()
        return self._explained([request], self._allocate([request], serializers.allocation, once))[0]

    def try_allocate_batch(
        self, requests: Iterable[Mapping[str, Any] | Dumpable], *, once: Once | None = None
    ) -> list[Allocation | Refusal]:
        """Answer as `allocate_batch`, with a refusal in the place of each None.

        An item whose id is taken is refused as `task_taken`. Raises `InvalidRequestError`, granting nothing,
        if an item is invalid or an id is there twice.
        """
        items = list(requests)
        try:
            asked = [self._item(number, item) for number, item in enumerate(items)]
        except errors.NoServersError as error:
            logger.warning("no leases: %s", error)
            return [no_servers()] * len(items)
        if len({request.lease_id for request in asked}) != len(asked):
            raise errors.InvalidRequestError("a batch must not have a lease id twice", field="lease_id")
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

    def _item(self, number: int, item: Mapping[str, Any] | Dumpable) -> Request:
        try:
            demand = Demand.of(**item) if isinstance(item, Mapping) else Demand.of(item)
            return request_of(self._commits, demand)
        except errors.InvalidRequestError as error:
            if first := error.words.first:
                error.rename({first: f"requests.{number}.{first}"})
            raise

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

        `cpus` defaults to 1. Submitting the same request again returns the task's allocation or queue entry;
        with another job it is a `DuplicateTaskError`. Raises as `allocate_resources` does, and
        `LockTimeoutError`.
        """
        request = request_of(self._commits, Demand.of(lease_id, gpus, cpus, prefer_server, **options))
        rows = []
        if job is not None:
            required = {**request.labels_required, **RUNS_JOBS}
            request = replace(request, labels={**request.labels, **STORED}, labels_required=required)
            rows = [self.stored_jobs.row_of_job(request.lease_id, request.owner, job)]

        is_known = False

        def step(cluster: ClusterState, now: float) -> list[Change]:
            nonlocal is_known
            is_known = is_repeat(cluster, request)
            if is_known:
                return []
            try:
                return allocator.submit(cluster, request, self._commits.deciding(cluster, now))
            except errors.NeverFitsError as error:
                raise errors.NeverFitsError(detail_of(error.grounds)) from None

        def granted(cluster: ClusterState, now: float) -> Allocation | None:
            lease = cluster.leases.get(request.lease_id)
            return None if lease is None else serializers.allocation(cluster, lease)

        repeat = repeats.of_submission(once, request.lease_id, granted)
        lease = self._commits.run(step, granted, once=repeat, jobs=rows)
        if is_known and job is not None and not self.stored_jobs.has(request.lease_id, request.owner, job):
            why = "already waits or runs, and not with this job: cancel or stop it, or use another task id"
            raise errors.DuplicateTaskError(request.lease_id, why)
        found = lease or self._commits.explain(
            lambda cluster, now: status_in(self._commits, cluster, request.lease_id, now)
        )
        if found is None:
            gone = f"task {request.lease_id!r} was queued, and has ended or been cancelled since"
            raise errors.LeaseNotFoundError(request.lease_id, message=gone)
        return found

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
            except errors.DuplicateTaskError as error:
                if not in_batch:
                    raise
                taken[request.lease_id] = Refusal(RefusalKind.TASK_TAKEN, str(error))
                return False

        def step(cluster: ClusterState, now: float) -> list[Change]:
            taken.clear()
            fresh = [request for request in requests if is_fresh(cluster, request)]
            if not fresh:
                return []
            return allocator.allocate_in_order(cluster, fresh, self._commits.deciding(cluster, now))

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
                once=repeats.of_grants(once, requests, view, taken),
                may_retry=lambda cluster: any(request.lease_id not in cluster.leases for request in requests),
            )
        except errors.LockTimeoutError as error:
            results = [lock_busy(error.waited_s)] * len(requests)
        except errors.StateUnconfirmedError as error:
            window_s = self._commits.peek_replica(lambda cluster, now: cluster.settings.confirmation_window_s)
            window = window_left(window_s, error.remaining_s, error.clock_jump_s)
            results = [refusal_of(recovering(window))] * len(requests)
        for lease, _ in (result for result in results if isinstance(result, tuple)):
            for member in lease.members if logger.isEnabledFor(logging.INFO) else ():
                logger.info("%s holds %s of %s", name_of(lease), numbered_gpus(member.gpu_ids), member.node)
        return [result[1] if isinstance(result, tuple) else result for result in results]

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
