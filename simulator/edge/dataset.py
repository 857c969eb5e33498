"""A dataset of hosts, base stations, user devices and job graphs, as values in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

METRIC_PERIOD_S = 1200
"""The metrics of base stations and user devices repeat after this many seconds."""

BS_METRIC_STEP_S = 600
"""The capacity of a base station changes only at multiples of this."""

NO_METRIC = -1
"""Stands in the metric arrays for a second in which a user device reported nothing."""

Kind = Literal["Cloud", "BS", "UE"]
KINDS: tuple[Kind, ...] = ("Cloud", "BS", "UE")
TIERS: dict[str, tuple[Kind, ...]] = {
    "host": ("Cloud",),
    "host+bs": ("Cloud", "BS"),
    "host+bs+ue": ("Cloud", "BS", "UE"),
}
"""Name of a choice of tiers -> the kinds of device that it may use."""


@dataclass(frozen=True, slots=True)
class Category:
    """What an executor of this category holds, and how long it takes to get ready."""

    category_id: int
    cpus: int
    memory_mib: int
    prepare_s: int


@dataclass(frozen=True, slots=True)
class Task:
    """One task of a job graph; `parents` and `children` are pairs of (task id, size of the data).

    `output_size` is the sum of what the children read: what a user device uploads once it has computed.
    """

    task_id: int
    job_id: int
    category_id: int
    parents: tuple[tuple[int, int], ...]
    children: tuple[tuple[int, int], ...]
    compute_s: int
    output_size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "output_size", sum(size for _, size in self.children))


@dataclass(frozen=True, slots=True)
class Job:
    """A graph of tasks that arrives as a whole; `task_ids` in the order of the table."""

    job_id: int
    arrival_s: int
    task_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Device:
    """A host, a base station or a user device; `index` is its place in `Dataset.devices`.

    A task computes for `compute_s * compute_factor` seconds. `rate` is in data units per second: that of
    the host's cloud or of the base station; a user device's changes every second and stands in the metrics.
    A user device is online from `online_s` to `offline_s`, both included, in every metric period.
    """

    index: int
    kind: Kind
    device_id: int
    compute_factor: int
    rate: int = 0
    cloud_id: int = -1
    online_s: int = 0
    offline_s: int = METRIC_PERIOD_S - 1

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.device_id}"


@dataclass(frozen=True, eq=False)
class Dataset:
    """Everything a plan is made from.

    `devices` are hosts, base stations, then user devices, each in the order of its table. The metric arrays
    have a row a device (`ue_*`: a row a user device) and a column a second of the metric period.
    """

    name: str
    categories: dict[int, Category]
    jobs: dict[int, Job]
    tasks: dict[int, Task]
    devices: tuple[Device, ...]
    cpus: npt.NDArray[np.int32]
    memory_mib: npt.NDArray[np.int32]
    ue_rate: npt.NDArray[np.int32]
    ue_bs: npt.NDArray[np.int32]
    by_name: dict[tuple[str, int], Device] = field(init=False)

    def __post_init__(self) -> None:
        found = {(device.kind, device.device_id): device for device in self.devices}
        object.__setattr__(self, "by_name", found)

    @cached_property
    def first_ue(self) -> int:
        """Index of the first user device in `devices`; row of a device minus this is its row in `ue_*`."""
        return len(self.devices) - len(self.ue_rate)

    @cached_property
    def capacity_changes(self) -> dict[int, tuple[tuple[int, int, int], ...]]:
        """Second of the metric period -> (device, cpus, memory_mib) of the devices that change then.

        A user device keeps its last capacity while it is offline, and starts with that of its first metric.
        """
        changes: dict[int, list[tuple[int, int, int]]] = {}
        for device in self.devices[len([d for d in self.devices if d.kind == "Cloud"]) :]:
            first, last = device.online_s, device.offline_s
            cpus = self.cpus[device.index, first : last + 1]
            memory = self.memory_mib[device.index, first : last + 1]
            differs = (np.diff(cpus, prepend=cpus[-1]) != 0) | (np.diff(memory, prepend=memory[-1]) != 0)
            for at in np.flatnonzero(differs).tolist():
                change = (device.index, int(cpus[at]), int(memory[at]))
                changes.setdefault(first + at, []).append(change)
        return {second: tuple(found) for second, found in changes.items()}

    @cached_property
    def leaving(self) -> dict[int, tuple[int, ...]]:
        """Second of the metric period -> user devices that go offline when it is over."""
        leaving: dict[int, list[int]] = {}
        for device in self.devices[self.first_ue :]:
            leaving.setdefault(device.offline_s, []).append(device.index)
        return {second: tuple(found) for second, found in leaving.items()}

    @cached_property
    def joining(self) -> dict[int, tuple[int, ...]]:
        """Second of the metric period -> user devices that come online."""
        joining: dict[int, list[int]] = {}
        for device in self.devices[self.first_ue :]:
            joining.setdefault(device.online_s, []).append(device.index)
        return {second: tuple(found) for second, found in joining.items()}

    @cached_property
    def rate_rows(self) -> list[list[int]]:
        """`ue_rate` as lists, which are quicker to read one by one."""
        rows: list[list[int]] = self.ue_rate.tolist()
        return rows

    def first_capacity(self, device: Device) -> tuple[int, int]:
        """(cpus, memory_mib) at the start: for a user device, those of its first metric."""
        return int(self.cpus[device.index, device.online_s]), int(
            self.memory_mib[device.index, device.online_s]
        )

    def is_online(self, device: Device, second: int) -> bool:
        return device.online_s <= second % METRIC_PERIOD_S <= device.offline_s
