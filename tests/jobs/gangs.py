"""Leases of several members, as the manager's answers have them."""

import socket

from resource_manager.jobs.gang_job import GangJob
from resource_manager.jobs.launchers import Job


def gang_allocation(nodes=3, gpus=2, token=1, lease_id="d/r/gang", **labels):
    """Return the allocation of a gang whose servers are all this machine, by the local launcher."""
    return {
        "task_id": lease_id,
        "fencing_token": token,
        "nodes": nodes,
        "labels": {"launcher": "local", "host": socket.gethostname(), **labels},
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
    """Return the jobs of the allocation and what they run: the shell command with its rank as MY_RANK."""
    gang = GangJob.of(allocation)
    wanted = [
        Job(job.key, ("/bin/sh", "-c", command), {"MY_RANK": str(job.rank)}, **more) for job in gang.jobs
    ]
    return gang, wanted
