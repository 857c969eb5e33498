"""The section `[[servers]]` of a cluster file, and the servers of the original."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain, islice
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator

from resource_manager.core.models import GANG_PORTS, RUNS_JOBS, Gpu, Node
from resource_manager.errors import InvalidRequestError
from resource_manager.manager.demand_fields import MAX_AMOUNT, Text
from resource_manager.manager.plurals import counted

Amount = (
    Annotated[int, Field(ge=0, le=MAX_AMOUNT)]
    | Annotated[float, Field(ge=0, le=MAX_AMOUNT, allow_inf_nan=False)]
)

Vendor = Literal["nvidia", "amd", "ascend"]
"""Vendors whose GPUs a launcher can assign to a job."""


def default_inventory(servers: int = 4, gpus: int = 8, cpus: int = 64) -> tuple[Node, ...]:
    """Return `servers` equal servers named gpu-server-0, gpu-server-1, …"""
    return tuple(
        Node(f"gpu-server-{i}", i, {"cpus": cpus}, tuple(Gpu(gpu_id) for gpu_id in range(gpus)))
        for i in range(servers)
    )


Uuid = Annotated[str, Field(min_length=1, max_length=96, pattern=r"^[A-Za-z0-9/_.-]+$")]
"""Identity of a GPU or MIG device, as its maker's library gives it: `GPU-…`, `MIG-…`."""

PciAddress = Annotated[str, Field(pattern=r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")]

Confine = Literal["off", "try", "must"]


def _writable(path: str) -> str:
    of_system = ("", "/dev", "/proc", "/sys", "/run")
    if not re.fullmatch(r"(/|~/|~$)[^\0-\x1f\x7f]*", path) or path.rstrip("/") in of_system:
        raise ValueError(
            f"must be an absolute path, or one that begins with ~/, and no system's, got {path!r:.60}"
        )
    return path


WritablePath = Annotated[str, Field(max_length=1000), AfterValidator(_writable)]
"""Absolute path on a server, or one in the home of the user there, who runs the job."""

Port = Annotated[int, Field(ge=1, le=65535)]

MAX_SERVERS = 1_000_000
MAX_GPUS = 4_000_000
MAX_GPUS_OF_SERVER = 1024


class GpuGroup(BaseModel, extra="forbid", strict=True):
    """Equal GPUs of one server; `ids` lists them if they are not numbered from 0 without gaps.

    `uuids` pins which devices they are, in the order of the ids. `pci` says where they are, for people;
    GPUs of one `nvlink_group`, or else `numa_node`, are an island.
    """

    count: int | None = Field(default=None, ge=1, le=MAX_GPUS_OF_SERVER)
    ids: list[Annotated[int, Field(ge=0)]] | None = None
    type: Text = ""
    vendor: Vendor = "nvidia"
    memory_mib: int = Field(default=0, ge=0, le=MAX_AMOUNT)
    uuids: list[Uuid] | None = None
    pci: list[PciAddress] | None = None
    numa_node: int | None = Field(default=None, ge=0)
    nvlink_group: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _check_count(self) -> GpuGroup:
        if (self.count is None) == (self.ids is None):
            raise ValueError("give either count or ids")
        for name, texts in (("uuids", self.uuids), ("pci", self.pci)):
            if texts is not None and len(texts) != self.size:
                raise ValueError(f"{name} has {counted(len(texts), 'value')} for {counted(self.size, 'GPU')}")
        return self

    @property
    def size(self) -> int:
        return len(self.ids) if self.ids is not None else self.count or 0


MPS_FOLDER = "/run/gpu-manager-mps"
_FOLDER = re.compile(r"/[A-Za-z0-9._/-]{1,39}")  # the path of a socket in it has 107 characters at most


def _mps(value: object) -> object:
    if not isinstance(value, bool) and not (isinstance(value, str) and _FOLDER.fullmatch(value)):
        raise ValueError(
            f"must be true, or the absolute path of a folder of at most 40 letters, got {value!r:.60}"
        )
    return value


class Server(BaseModel, extra="forbid", strict=True):
    """One `[[servers]]` table; with `count` it means that many servers, with `{id}` in name and address."""

    name: str = Field(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9._{}-]+$")
    id: int | None = Field(default=None, ge=0)
    count: int | None = Field(default=None, ge=1, le=100_000)
    gpus: Annotated[int, Field(ge=0, le=MAX_GPUS_OF_SERVER)] | list[GpuGroup] = 0
    gpu_type: Text = ""
    gpu_memory_mib: int = Field(default=0, ge=0, le=MAX_AMOUNT)
    vendor: Vendor | Literal[""] = "nvidia"
    cpus: int = Field(ge=0, le=MAX_AMOUNT)
    memory_mib: int | None = Field(default=None, ge=0, le=MAX_AMOUNT)
    resources: dict[Text, Amount] = Field(default_factory=dict)
    address: Text = ""
    labels: dict[Text, Text] = Field(default_factory=dict)
    gang_ports: tuple[Port, Port] = Field(default=GANG_PORTS, strict=False)  # an array is no tuple
    islands: list[list[Annotated[int, Field(ge=0)]]] | None = Field(
        default=None,
        max_length=MAX_GPUS_OF_SERVER,
        description="Ids of GPUs that NVLink joins; unset: as the nvlink_group, else the numa_node, of each.",
    )
    interface: str = Field(default="", max_length=15, pattern=r"^[A-Za-z0-9._@-]*$")
    mps: Annotated[bool | str, BeforeValidator(_mps)] = Field(
        default=False,
        description="true: the agent keeps MPS daemons for GPU fractions, under /run/gpu-manager-mps or the "
        "folder that stands here instead.",
    )
    confine: Confine | None = Field(
        default=None, description="Walls around plain jobs (off, try, must); unset: as the cluster's."
    )
    writable: list[WritablePath] = Field(
        default_factory=list,
        max_length=100,
        description="Paths that a job within walls may write to, besides its folder and the cluster's.",
    )

    job_user: str = Field(
        default="",
        max_length=32,
        pattern=r"^([a-z_][a-z0-9_.-]*\$?)?$",
        description="Unix user as whom the server's agent runs jobs (gpu-manager agent --run-jobs); unset: "
        "it runs none.",
    )

    @model_validator(mode="after")
    def _pattern_of_names(self) -> Server:
        if self.count is not None and "{id}" not in self.name:
            raise ValueError("with count, name must contain {id}")
        if re.search("[{}]", self.name.replace("{id}", "")):
            raise ValueError(f"name may have {{id}} and no other brace, got {self.name!r}")
        if self.count is not None and self.id is not None:
            raise ValueError("give either count or id")
        if self.gang_ports[0] > self.gang_ports[1]:
            raise ValueError(f"gang_ports must be the first and the last port, got {list(self.gang_ports)}")
        if "cpus" in self.resources or (self.memory_mib is not None and "memory_mib" in self.resources):
            raise ValueError("cpus and memory_mib have keys of their own; remove them from resources")
        if not self.resources.keys().isdisjoint(("gpus", "gpu_milli")):
            raise ValueError("gpus and gpu_milli have a key of their own: gpus; remove them from resources")
        joined = list(chain.from_iterable(self.islands or ()))
        if joined and (len({*joined}) < len(joined) or {*joined} - {gpu.gpu_id for gpu in self.gpu_list()}):
            raise ValueError("islands must name GPUs of the server, each once")
        return self

    @property
    def gpu_count(self) -> int:
        if isinstance(self.gpus, int):
            return self.gpus
        return sum(group.size for group in self.gpus)

    def gpu_list(self) -> tuple[Gpu, ...]:
        groups = self.gpus
        if isinstance(groups, int):
            return tuple(
                Gpu(gpu_id, self.gpu_type, self.vendor or "nvidia", self.gpu_memory_mib)
                for gpu_id in range(groups)
            )
        found: list[Gpu] = []
        for group in groups:
            ids = group.ids if group.ids is not None else range(len(found), len(found) + group.size)
            uuids = group.uuids if group.uuids is not None else [""] * group.size
            found += [
                Gpu(gpu_id, group.type, group.vendor, group.memory_mib, uuid)
                for gpu_id, uuid in zip(ids, uuids, strict=True)
            ]
        return tuple(found)

    def joined(self, gpus: tuple[Gpu, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the islands that are stated, else those of the groups of GPUs."""
        if self.islands is not None or isinstance(self.gpus, int):
            return tuple(map(tuple, self.islands or ()))
        ids, found = iter(gpus), dict[tuple[str, int], list[int]]()
        for group in self.gpus:
            kind, number = "nvlink", group.nvlink_group
            if number is None:
                kind, number = "numa", group.numa_node
            for gpu in islice(ids, group.size):
                if number is not None:
                    found.setdefault((kind, number), []).append(gpu.gpu_id)
        return tuple(tuple(island) for island in found.values() if len(found) > 1)

    def node(self, name: str, server_id: int, gpus: tuple[Gpu, ...]) -> Node:
        resources: dict[str, int | float] = {"cpus": self.cpus}
        if self.memory_mib is not None:
            resources["memory_mib"] = self.memory_mib
        return Node(
            name,
            server_id,
            {**resources, **self.resources},
            gpus,
            self.address.replace("{id}", str(server_id)),
            self.vendor,
            {**self.labels, **(RUNS_JOBS if self.job_user else {})},
            self.gang_ports,
            self.interface,
            self.joined(gpus),
            MPS_FOLDER if self.mps is True else self.mps or "",
            self.confine or "",
            tuple(self.writable),
            self.job_user,
        )


def nodes_of(servers: Sequence[Server]) -> tuple[Node, ...]:
    """Return the nodes of a section; raises `InvalidRequestError`, whose field is the server's."""
    number = sum(server.count or 1 for server in servers)
    gpus = sum((server.count or 1) * server.gpu_count for server in servers)
    if number > MAX_SERVERS or gpus > MAX_GPUS:
        raise InvalidRequestError(
            "{:,} servers with {:,} GPUs; at most {:,} and {:,}",
            *(number, gpus, MAX_SERVERS, MAX_GPUS),
            field="servers",
        )
    nodes: list[Node] = []
    names: set[str] = set()
    ids: set[int] = set()
    uuids: set[str] = set()
    next_id = 0
    for position, server in enumerate(servers):
        for _ in range(server.count or 1):
            server_id = server.id if server.id is not None else next_id
            name = server.name.replace("{id}", str(server_id))
            listed = server.gpu_list()
            pinned = [gpu.uuid for gpu in listed if gpu.uuid]
            is_twice = {
                f"server name {name!r}": name in names,
                f"server id {server_id}": server_id in ids,
                f"a GPU id of {name!r}": len({gpu.gpu_id for gpu in listed}) != len(listed),
                f"a GPU's UUID of {name!r}": len({*pinned}) != len(pinned) or not uuids.isdisjoint(pinned),
            }
            if what := next((what for what, twice in is_twice.items() if twice), ""):
                raise InvalidRequestError("{} is used twice", what, field=f"servers.{position}")
            names.add(name)
            ids.add(server_id)
            uuids.update(pinned)
            next_id = server_id + 1
            nodes.append(server.node(name, server_id, listed))
    return tuple(nodes)
