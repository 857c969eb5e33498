"""The names of the original design, which answer as it says: None and False instead of a reason."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Unpack

from resource_manager.errors import DuplicateTaskError, InvalidRequestError, LockTimeoutError
from resource_manager.manager.arguments import ORIGINAL_NAMES, Dumpable
from resource_manager.manager.lease_service import LeaseService
from resource_manager.manager.refusal_wording import Refusal
from resource_manager.manager.results import Allocation, ReleaseResult, Summary

if TYPE_CHECKING:
    from resource_manager.manager.demand import DemandOptions

logger = logging.getLogger(__name__)


class OriginalNames:
    """Methods of the original design, of any lease service."""

    def allocate_resources(
        self: LeaseService,
        task_id: str,
        required_gpus: int,
        required_cpus: int,
        prefer_server_id: int | str | None = None,
        **options: Unpack[DemandOptions],
    ) -> Allocation | None:
        """Grant a lease now and return it as a dict, or None where it is refused, for whatever reason.

        A request never overtakes pending requests. The same request for a task that holds its lease returns
        that lease. `options` are further fields of a `Demand`. Raises `ValueError`
        (`InvalidRequestError`) for an invalid request, and `StoreError` if the store is unavailable.
        """
        try:
            answer = self.try_allocate(task_id, required_gpus, required_cpus, prefer_server_id, **options)
        except DuplicateTaskError:
            raise
        except InvalidRequestError as error:
            error.rename(ORIGINAL_NAMES)
            raise
        return _granted(answer)

    def release_resources(
        self: LeaseService, task_id: str, *, fencing_token: int | None = None, outcome: str = ""
    ) -> bool:
        """End the task's lease; return False without one (of that fencing token), or if the lock is not free.

        `outcome` (SUCCESS, FAILED, …) is written to the history.
        """
        try:
            result = self.release(task_id, fencing_token=fencing_token, outcome=outcome)
        except LockTimeoutError as error:
            logger.error("not released: %s", error)
            return False
        return result is ReleaseResult.RELEASED

    def get_resource_summary(self: LeaseService) -> Summary:
        """Return the free and allocated capacity of every server."""
        return self.summary()

    def reset_resources(self: LeaseService) -> bool:
        """Drop all leases and the queue, keep the cluster; return False if the lock is not free."""
        try:
            self.reset()
        except LockTimeoutError as error:
            logger.error("not reset: %s", error)
            return False
        return True

    def allocate_batch(
        self: LeaseService, requests: Iterable[Mapping[str, Any] | Dumpable]
    ) -> list[Allocation | None]:
        """Allocate as `allocate_resources` for each, a few in a commit; each is granted or None by itself.

        A mapping has fields of a `Demand`, under either of their names.
        """
        return [_granted(result) for result in self.try_allocate_batch(requests)]


def _granted(result: Allocation | Refusal) -> Allocation | None:
    return None if isinstance(result, Refusal) else result
