"""Registration of this process with a lease, where nobody started it with the lease in its environment."""

from __future__ import annotations

import os
from contextlib import suppress

from resource_manager.jobs.launchers.base import job_key

registration: list[int] = []
"""The descriptor of this process's registration, if it has one."""


def register_process(lease_id: str, fencing_token: int) -> None:
    """Register this process and all that it starts as a job of the lease, until it ends or registers again.

    An open descriptor is named after the job: the server's agent finds it, whatever the process's namespaces
    are, and it goes with the process, so that another one that gets its number later is not taken for it.
    Without effect where the system has no such descriptors: there are no agents there.
    """
    create = getattr(os, "memfd_create", None)
    if create is None:
        return
    with suppress(OSError):  # no descriptor is left: the job must run all the same
        descriptor: int = create(job_key(lease_id, fencing_token))
        while registration:
            os.close(registration.pop())
        registration.append(descriptor)
