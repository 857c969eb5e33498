"""Places of a lease's jobs, derived from the lease alone, so that any process finds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from resource_manager.jobs.launchers import Job, Launcher, job_key, open_launcher


def is_remainder(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry of `leases()` is what is left of a gang whose other members were released."""
    return "members" in entry and len(entry["members"]) < entry["nodes"]


def job_of(
    allocation: Mapping[str, Any],
    key: str,
    command: Sequence[str],
    *,
    rank: int = 0,
    environment: Mapping[str, str] | None = None,
    **more: Any,
) -> Job:
    """Return the job of an allocation's member: with its devices, and the lease in the environment."""
    member = allocation["members"][rank]
    lease = {
        "GPU_LEASE_ID": allocation["task_id"],
        "GPU_LEASE_FENCING_TOKEN": str(allocation["fencing_token"]),
        "GPU_SERVER": member["server_name"],
    }
    return Job(
        key=key,
        command=tuple(command),
        environment={**(environment or {}), **lease},
        gpu_ids=tuple(member["gpu_ids"]),
        gpu_uuids=tuple(member["gpu_uuids"]),
        gpu_milli=allocation["gpu_milli"],
        gpu_memory_mib=member["gpu_memory_mib"],
        vendor=member["vendor"] or "nvidia",
        cpus=member["cpu_count"],
        port=member["port"],
        **more,
    )


@dataclass(frozen=True, slots=True)
class RunningJob:
    """Place of the job of a lease's member on one server; `rank` is the member's, 0 for the only one."""

    key: str
    task_id: str
    fencing_token: int
    launcher: str
    address: str = ""
    conn_id: str | None = None
    rank: int = 0
    server: str = ""

    @classmethod
    def all_of(cls, allocation: Mapping[str, Any]) -> tuple[RunningJob, ...]:
        """Return the jobs of an allocation in the order of their ranks; none for a lease without a launcher.

        A lease of one server has one job, whose key has no rank.
        """
        labels = allocation["labels"]
        launcher = labels.get("launcher")
        if launcher is None:
            return ()
        lease_id, token = allocation["task_id"], allocation["fencing_token"]
        is_gang = allocation.get("nodes", 1) > 1
        return tuple(
            cls(
                key=job_key(lease_id, token, member["rank"] if is_gang else None),
                task_id=lease_id,
                fencing_token=token,
                launcher=launcher,
                address=labels.get("host", "") if launcher == "local" else member["address"],
                conn_id=labels.get("launcher_conn_id"),
                rank=member["rank"],
                server=member["server_name"],
            )
            for member in allocation["members"]
        )

    def open(self) -> Launcher:
        """Open the job's launcher; raises `LauncherError`."""
        return open_launcher(self.launcher, self.address, self.conn_id)
