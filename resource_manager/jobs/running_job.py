"""Jobs of a lease, each at the place that the lease names: any process finds it, or knows that it cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from resource_manager.core.models import MILLI_PER_GPU, JobPlace
from resource_manager.jobs.launchers import Job, Launcher, LauncherError, job_key, open_at, terminal
from resource_manager.jobs.launchers.devices import with_share


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
    """Return the job of an allocation's member: with its devices, and the lease in environment and labels."""
    member = next(each for each in allocation["members"] if each["rank"] == rank)
    lease = {
        "GPU_LEASE_ID": allocation["task_id"],
        "GPU_LEASE_FENCING_TOKEN": str(allocation["fencing_token"]),
        "GPU_SERVER": member["server_name"],
    }
    is_share = allocation["gpu_milli"] < MILLI_PER_GPU and (member["vendor"] or "nvidia") == "nvidia"
    return Job(
        key=key,
        command=tuple(with_share(command) if is_share and not more.get("image") else command),
        environment={**(environment or {}), **lease},
        gpu_ids=tuple(member["gpu_ids"]),
        gpu_uuids=tuple(member["gpu_uuids"]),
        gpu_milli=allocation["gpu_milli"],
        gpu_memory_mib=member["gpu_memory_mib"],
        mps_folder=member.get("mps_folder", ""),
        user=member.get("user", ""),
        confine=member.get("confine", "off"),
        writable=tuple(member.get("writable", ())),
        vendor=member["vendor"] or "nvidia",
        cpus=member["cpu_count"],
        port=member["port"],
        labels={**allocation.get("labels", {}), "lease": str(allocation["fencing_token"])},
        **more,
    )


def address_of(launcher: str, member: Mapping[str, Any]) -> str:
    """Return how a launcher reaches the server of a member: an agent by its name, as it is never called."""
    return str(member["server_name" if launcher == "agent" else "address"])


@dataclass(frozen=True, slots=True)
class RunningJob:
    """Job of a lease's member on one server; `rank` is the member's, 0 for the only one.

    Its `place` is stored in the lease, or where it is about to be prepared: then it has no machine yet.
    """

    key: str
    task_id: str
    fencing_token: int
    place: JobPlace
    rank: int = 0
    server: str = ""

    @classmethod
    def all_of(cls, allocation: Mapping[str, Any]) -> tuple[RunningJob, ...]:
        """Return the placed jobs of an allocation in the order of their ranks; none if no job was placed.

        A server is asked at the inventory's address: that of a place is the word of the lease's owner.
        """
        places = []
        for member, stored in zip(allocation["members"], allocation["job_places"], strict=False):
            place = JobPlace(**stored)
            if place.address:
                place = replace(place, address=address_of(place.launcher, member))
            places.append(place)
        return cls._at(allocation, places)

    @classmethod
    def planned(
        cls, allocation: Mapping[str, Any], launcher: str, conn_id: str | None
    ) -> tuple[RunningJob, ...]:
        """Return the jobs of an allocation that was not placed, as this launcher would run them."""
        addresses = (address_of(launcher, member) for member in allocation["members"])
        return cls._at(allocation, [JobPlace(launcher, address, conn_id or "") for address in addresses])

    @classmethod
    def _at(cls, allocation: Mapping[str, Any], places: Sequence[JobPlace]) -> tuple[RunningJob, ...]:
        """Return the jobs at these places, one a member."""
        lease_id, token = allocation["task_id"], allocation["fencing_token"]
        return tuple(
            cls(
                job_key(lease_id, token, member["rank"], allocation["nodes"]),
                lease_id,
                token,
                place,
                member["rank"],
                member["server_name"],
            )
            for member, place in zip(allocation["members"], places, strict=False)
        )

    def open(self) -> Launcher:
        """Open the job's launcher at its place; raises `LauncherError`, also where `local` is elsewhere."""
        is_planned = self.place.launcher == "local" and not self.place.machine
        if is_planned and not terminal.is_here(self.place.address, self.server):
            raise LauncherError(
                f"server {self.server} (address {self.place.address or 'none'}) is not this machine, "
                f"{terminal.own_name()}, where launcher 'local' would run the job: set launcher='ssh', or "
                f"{terminal.OWN_SERVER}={self.server} if this is that server"
            )
        return open_at(self.place)
