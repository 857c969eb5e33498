"""Environment by which the processes of a gang find each other: ours, torchrun's and MPI's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from resource_manager.jobs.launchers import job_key

HOSTFILE = "GPU_HOSTFILE"
"""Variable with the path of a file that `mpirun --hostfile` reads."""


def gang_environment(allocation: Mapping[str, Any], rank: int) -> dict[str, str]:
    """Return the variables of the process of one member; empty for a lease of one server.

    `RANK` and `WORLD_SIZE` are left to `torchrun`, which reads the `PET_` variables in place of its options.
    """
    if not is_gang(allocation):
        return {}
    members = allocation["members"]
    first, counts = members[0], [len(member["gpu_ids"]) for member in members]
    own, interface = counts[rank], members[rank]["interface"]
    address, port = host_of(first["address"]), str(first["port"])
    return {
        "GPU_NODE_RANK": str(rank),
        "GPU_NODES_NUM": str(len(members)),
        "GPU_NODES_IPS": "\n".join(host_of(member["address"]) for member in members),
        "GPU_MASTER_ADDR": address,
        "GPU_MASTER_PORT": port,
        "GPU_GPUS_PER_NODE": str(own),
        "GPU_GPUS_NUM": str(sum(counts)),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "PET_NNODES": str(len(members)),
        "PET_NPROC_PER_NODE": str(max(1, own)),
        "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": address,
        "PET_MASTER_PORT": port,
        # A name for files, as torchrun uses it, so not the lease id with its slashes.
        "PET_RDZV_ID": job_key(allocation["task_id"], allocation["fencing_token"]),
        **({"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface} if interface else {}),
    }


def hostfile(allocation: Mapping[str, Any]) -> str:
    """Return the text of an MPI hostfile: a line for each server, with a slot for each GPU, at least one."""
    slots: dict[str, int] = {}
    for member in allocation["members"]:
        host = host_of(member["address"])
        slots[host] = slots.get(host, 0) + max(1, len(member["gpu_ids"]))
    return "".join(f"{host} slots={count}\n" for host, count in slots.items())


def is_gang(allocation: Mapping[str, Any]) -> bool:
    return int(allocation.get("nodes", 1)) > 1


def host_of(address: str) -> str:
    """Return the host of an address of the inventory, such as `user@host:22` or `tcp://host:2375`."""
    return urlsplit(address if "://" in address else f"//{address}").hostname or ""
