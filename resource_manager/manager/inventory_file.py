"""The inventory of servers: the original's default, or a TOML file."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from resource_manager.core.models import GANG_PORTS, Gpu, Node
from resource_manager.errors import InventoryError

Amount = Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, allow_inf_nan=False)]

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

Port = Annotated[int, Field(ge=1, le=65535)]

MAX_SERVERS = 1_000_000
MAX_GPUS = 4_000_000
MAX_GPUS_OF_SERVER = 1024


class GpuGroup(BaseModel):
    """Equal GPUs of one server; `ids` lists them if they are not numbered from 0 without gaps.

    `uuids` pins which devices they are, in the order of the ids. `pci`, `numa_node` and `nvlink_group` say
    where they are, for people.
    """

    model_config = ConfigDict(extra="forbid")

    count: int | None = Field(default=None, ge=1, le=MAX_GPUS_OF_SERVER)
    ids: list[Annotated[int, Field(ge=0)]] | None = None
    type: str = ""
    vendor: Vendor = "nvidia"
    memory_mib: int = Field(default=0, ge=0)
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
                raise ValueError(f"{name} has {len(texts)} entries for {self.size} GPUs")
        return self

    @property
    def size(self) -> int:
        return len(self.ids) if self.ids is not None else self.count or 0


class Server(BaseModel):
    """One `[[servers]]` table; with `count` it means that many servers, with `{id}` in the name."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9._{}-]+$")
    id: int | None = Field(default=None, ge=0)
    count: int | None = Field(default=None, ge=1, le=100_000)
    gpus: Annotated[int, Field(ge=0, le=MAX_GPUS_OF_SERVER)] | list[GpuGroup] = 0
    gpu_type: str = ""
    gpu_memory_mib: int = Field(default=0, ge=0)
    vendor: Vendor = "nvidia"
    cpus: int = Field(ge=0)
    memory_mib: int | None = Field(default=None, ge=0)
    resources: dict[str, Amount] = Field(default_factory=dict)
    address: str = ""
    labels: dict[str, str] = Field(default_factory=dict)
    gang_ports: tuple[Port, Port] = GANG_PORTS
    interface: str = Field(default="", max_length=15, pattern=r"^[A-Za-z0-9._@-]*$")

    @model_validator(mode="after")
    def _pattern_of_names(self) -> Server:
        if self.count is not None and "{id}" not in self.name:
            raise ValueError("with count, name must contain {id}")
        if self.count is not None and self.id is not None:
            raise ValueError("give either count or id")
        if self.gang_ports[0] > self.gang_ports[1]:
            raise ValueError(f"gang_ports must be the first and the last port, got {list(self.gang_ports)}")
        if "cpus" in self.resources or (self.memory_mib is not None and "memory_mib" in self.resources):
            raise ValueError("cpus and memory_mib have keys of their own; remove them from resources")
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
                Gpu(gpu_id, self.gpu_type, self.vendor, self.gpu_memory_mib) for gpu_id in range(groups)
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


class InventoryFile(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid")

    servers: list[Server] = Field(min_length=1)


def load_inventory(path: Path | str) -> tuple[Node, ...]:
    """Return the servers of a TOML file; raises `InventoryError` with file, line and reason."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InventoryError(f"{path}: {reason}") from error
    try:
        value = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also for a number with thousands of digits
        line = re.search(r"line (\d+)", str(error))
        raise InventoryError(f"{path}:{line[1] if line else 1}: {error}") from error
    try:
        inventory = InventoryFile.model_validate(value)
    except ValidationError as error:
        # Of the errors of a union of types, the deepest is about the intended type.
        errors = error.errors(include_url=False)
        first = max(
            (found for found in errors if found["loc"][:3] == errors[0]["loc"][:3]),
            key=lambda found: len(found["loc"]),
        )
        raise InventoryError(
            f"{path}:{_line_of(text, first['loc'])}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from error
    servers = sum(server.count or 1 for server in inventory.servers)
    gpus = sum((server.count or 1) * server.gpu_count for server in inventory.servers)
    if servers > MAX_SERVERS or gpus > MAX_GPUS:
        raise InventoryError(
            f"{path}:1: {servers:,} servers with {gpus:,} GPUs; at most {MAX_SERVERS:,} and {MAX_GPUS:,}"
        )
    return _nodes(inventory, path, text)


def _nodes(inventory: InventoryFile, path: Path, text: str) -> tuple[Node, ...]:
    nodes: list[Node] = []
    names: set[str] = set()
    ids: set[int] = set()
    uuids: set[str] = set()
    next_id = 0
    for position, server in enumerate(inventory.servers):
        for _ in range(server.count or 1):
            server_id = server.id if server.id is not None else next_id
            name = server.name.replace("{id}", str(server_id))
            gpus = server.gpu_list()
            pinned = [gpu.uuid for gpu in gpus if gpu.uuid]
            reason = (
                f"server name {name!r} is used twice"
                if name in names
                else f"server id {server_id} is used twice"
                if server_id in ids
                else f"a GPU id of {name!r} is used twice"
                if len({gpu.gpu_id for gpu in gpus}) != len(gpus)
                else f"a GPU's UUID of {name!r} is used twice"
                if len(set(pinned)) != len(pinned) or not uuids.isdisjoint(pinned)
                else ""
            )
            if reason:
                raise InventoryError(f"{path}:{_line_of(text, ('servers', position))}: {reason}")
            names.add(name)
            ids.add(server_id)
            uuids.update(pinned)
            next_id = server_id + 1
            resources: dict[str, int | float] = {"cpus": server.cpus}
            if server.memory_mib is not None:
                resources["memory_mib"] = server.memory_mib
            resources.update(server.resources)
            nodes.append(
                Node(
                    name,
                    server_id,
                    resources,
                    gpus,
                    server.address,
                    server.vendor,
                    dict(server.labels),
                    server.gang_ports,
                    server.interface,
                )
            )
    return tuple(nodes)


def _line_of(text: str, location: tuple[Any, ...]) -> int:
    """Return the line of a table's key, or of the table's head; 1 if unknown."""
    position = location[1] if len(location) > 1 and isinstance(location[1], int) else None
    key = location[2] if len(location) > 2 else None
    seen = -1
    head = 1
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"\s*\[\[\s*servers\s*\]\]", line):
            if seen == position:
                break
            seen += 1
            if seen == position:
                head = number
        elif (
            position is None
            and len(location) == 1
            and re.match(rf"\s*\[*{re.escape(str(location[0]))}\b", line)
        ) or (
            seen == position
            and key is not None
            and re.match(rf"\s*\[*(servers\.)?{re.escape(str(key))}\b", line)
        ):
            return number
    return head
