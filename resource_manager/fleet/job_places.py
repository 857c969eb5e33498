"""Places of stored jobs: of a new lease they are stored once the agents of all its servers know of it.

That a server's agent has reported of late, or that a question of it is held, proves too little: it may have
died since, and a lease that has places is kept for as long as nobody knows whether its jobs run. One whose
job would run into maintenance by then is given back.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import partial

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import JobPlace, has_stored_job
from resource_manager.errors import LeaseNotFoundError
from resource_manager.jobs.running_job import RunningJob
from resource_manager.manager import serializers
from resource_manager.manager.agent_jobs import is_there, leases_on
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.manager.results import Allocation
from resource_manager.scheduling import lease_steps

AGENT = "agent"
"""Name of the launcher whose jobs agents run."""

STATE_MAX_AGE_S = 0.25
"""Age of a state on which a report that changes nothing may be judged."""


def unplaced_on(cluster: ClusterState, server: str) -> list[Allocation]:
    """Return the leases with a member on a server whose stored jobs wait for their places."""
    return [
        serializers.allocation(cluster, lease)
        for lease in leases_on(cluster, server)
        if has_stored_job(lease.request.labels) and not lease.places and not lease.quarantined
    ]


def place_jobs(manager: GPUResourceManager, server: str, leases: Iterable[Allocation]) -> bool:
    """Store the places of those of these jobs that the agents of all members know and tell.

    The agent of `server` knows of these leases. Returns whether there are any such jobs.
    """
    has_placed = False
    for lease in leases:
        servers = [member["server_name"] for member in lease["members"]]
        if not manager.stored_jobs.note_known(lease["fencing_token"], server, servers):
            continue
        places = [manager.agent_state(each)["place"] for each in servers]
        known = [
            JobPlace(AGENT, each, **place)
            for each, place in zip(servers, places, strict=True)
            if place is not None
        ]
        if len(known) == len(places):
            lease_id, token = lease["task_id"], lease["fencing_token"]
            is_late = partial(lease_steps.too_late, lease_id=lease_id, fencing_token=token)
            manager.decide(is_late, lambda cluster, now: None, max_age_s=STATE_MAX_AGE_S)
            with suppress(LeaseNotFoundError):  # also where its request waits again
                manager.place_job(lease_id, known, fencing_token=token)
            has_placed = True
    return has_placed


def have_not_begun(manager: GPUResourceManager, lease: Allocation) -> bool:
    """Return whether the agents of all members tell, each at the place of its job, that it has not begun."""
    for job in RunningJob.all_of(lease):
        state = manager.agent_state(job.server)
        run = state["runs"].get(job.key)
        if not is_there(state["place"], job.place) or (run is not None and run["state"] != "absent"):
            return False
    return True
