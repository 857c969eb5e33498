"""Attained service: what the leases with which a job did not end took, bounded, as part of the state."""

from __future__ import annotations

import math
from collections.abc import Mapping

from resource_manager.core.models import MILLI_PER_GPU, Lease
from resource_manager.core.runtimes import job_id_of, run_s

MAX_JOBS = 1000
"""Maximum of jobs; beyond it, the one that attained service longest ago is forgotten."""

Attained = Mapping[str, int]
"""GPU milliseconds by job, the job that attained service last is last."""


def with_service(known: Attained, lease: Lease, at: float) -> Attained:
    """Return what is known with the service of a lease that ended then, but not its job."""
    request, job = lease.request, job_id_of(lease.lease_id)
    gpus = request.gpus * len(lease.members) * request.gpu_milli / MILLI_PER_GPU
    gpu_ms = math.floor(gpus * run_s(lease.granted_at, at) * 1000 + 0.5)
    others = {name: amount for name, amount in known.items() if name != job}
    if len(others) >= MAX_JOBS:
        del others[next(iter(others))]
    return others | {job: known.get(job, 0) + gpu_ms}


def without_job(known: Attained, lease_id: str) -> Attained:
    """Return what is known without a job, which ended; the same object if nothing is known of it."""
    job = job_id_of(lease_id)
    return {name: amount for name, amount in known.items() if name != job} if job in known else known
