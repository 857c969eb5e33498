"""Leases of several members, as the manager's answers have them."""

from dataclasses import asdict

from resource_manager.jobs.gang_job import GangJob
from resource_manager.jobs.launchers import Job


def gang_allocation(nodes=3, gpus=2, token=1, lease_id="d/r/gang", **labels):
    """Return the allocation of a gang whose servers are all this machine, by the local launcher."""
    return {
        "task_id": lease_id,
        "fencing_token": token,
        "nodes": nodes,
        "labels": {"launcher": "local", **labels},
        "job_places": [],
        "members": [
            {
                "rank": rank,
                "server_id": rank,
                "server_name": f"gpu-{rank}",
                "address": f"127.0.0.{rank + 1}",
                "gpu_ids": list(range(gpus)),
                "gpu_uuids": [],
                "vendor": "nvidia",
                "gpu_memory_mib": 0,
                "interface": "",
                "cpu_count": 1,
                "port": 29500 if rank == 0 else 0,
            }
            for rank in range(nodes)
        ],
    }


def gang_of(allocation, command, **more):
    """Return the jobs of the allocation, which is placed, and what they run: the command with its MY_RANK."""
    wanted = wanted_of(GangJob.planned(allocation, "local", None), command, **more)
    if not allocation["job_places"]:
        prepared = GangJob.planned(allocation, "local", None).prepare(wanted)
        assert not prepared.failed
        allocation["job_places"] = [asdict(place) for place in prepared.places]
    return GangJob.of(allocation), wanted


def wanted_of(gang, command, **more):
    """Return what the jobs run: the shell command with its rank as MY_RANK."""
    return [Job(job.key, ("/bin/sh", "-c", command), {"MY_RANK": str(job.rank)}, **more) for job in gang.jobs]


def place(manager, allocation):
    """Prepare the jobs of a lease on this machine; return the allocation with their places."""
    planned = GangJob.planned(allocation, "local", None)
    prepared = planned.prepare([Job(job.key, ("true",)) for job in planned.jobs])
    assert not prepared.failed
    return manager.place_job(
        allocation["task_id"], prepared.places, fencing_token=allocation["fencing_token"]
    )
