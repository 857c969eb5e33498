"""History of earlier leases: the service that a job has attained."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable

from resource_manager.core.changes import Change, Expired, Granted, MembersReleased, Outcome, Released
from resource_manager.core.models import MILLI_PER_GPU, Lease, Request

MAX_TASKS = 10_000


AttainedOf = Callable[[Request], float]
"""(request) -> GPU seconds that earlier leases of the same job took."""


def nothing_attained(request: Request) -> float:
    """Return 0: the service attained if nothing is known of earlier leases."""
    return 0.0


def job_key(lease_id: str) -> str:
    """Return the id that all leases of a job share: a replay numbers repeated ones `id#2`, `id#3`."""
    return re.sub(r"#\d+$", "", lease_id)


class AttainedService:
    """Service of unfinished jobs: a fold of the changes, bounded in jobs. Add each change once, in order.

    It is not part of the state: two processes may have read different parts of the history.
    """

    def __init__(self) -> None:
        self._attained: OrderedDict[str, float] = OrderedDict()
        self._live: dict[str, Lease] = {}

    def add(self, change: Change) -> None:
        """Add what a change tells.

        A lease that expired, or was released with an outcome such as FAILED, adds to the service that its job
        has attained; other ends end the job.
        """
        match change:
            case Granted(lease=lease):
                self._live[lease.lease_id] = lease
            case MembersReleased(lease_id=lease_id, fencing_token=fencing_token):
                broken = self._live.get(lease_id)
                if broken is not None and broken.fencing_token == fencing_token:
                    del self._live[lease_id]
                    self._attain(broken, max(change.at - broken.granted_at, 1.0))
            case Released() | Expired():
                lease_of = self._live.pop(change.lease_id, None)
                if lease_of is None or lease_of.fencing_token != change.fencing_token:
                    return
                seconds = max(change.at - lease_of.granted_at, 1.0)
                outcome = change.outcome if isinstance(change, Released) else Outcome.FAILED
                if outcome in ("", Outcome.SUCCESS):
                    self._attained.pop(job_key(change.lease_id), None)
                else:
                    self._attain(lease_of, seconds)

    def take_over(self, leases: Iterable[Lease]) -> None:
        """Replace the live leases by these, if the changes that led to them are not available."""
        self._live = {lease.lease_id: lease for lease in leases}

    @property
    def live_count(self) -> int:
        return len(self._live)

    def attained_gpu_s(self, request: Request) -> float:
        """Return the GPU seconds of the leases with which the job did not end."""
        return self._attained.get(job_key(request.lease_id), 0.0) if self._attained else 0.0

    def _attain(self, lease: Lease, seconds: float) -> None:
        request, key = lease.request, job_key(lease.lease_id)
        gpus = request.gpus * request.gpu_milli / MILLI_PER_GPU * len(lease.members)
        self._attained[key] = self._attained.get(key, 0.0) + gpus * seconds
        self._attained.move_to_end(key)
        while len(self._attained) > MAX_TASKS:
            self._attained.popitem(last=False)
