"""Dataset of hosts, base stations, user devices and job graphs, as values in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

METRIC_PERIOD_S = 1200
"""Period (s) after which the metrics of base stations and user devices repeat."""

BS_METRIC_STEP_S = 600
"""The capacity of a base station changes only at multiples of this (s)."""

NO_METRIC = -1
"""Value in the metric arrays for a second without a metric of the user device."""

Kind = Literal["Cloud", "BS", "UE"]
KINDS: tuple[Kind, ...] = ("Cloud", "BS", "UE")
TIERS: dict[str, tuple[Kind, ...]] = {
    "host": ("Cloud",),
    "host+bs": ("Cloud", "BS"),
    "host+bs+ue": ("Cloud", "BS", "UE"),
}
"""Name of a set of tiers -> the kinds of device in it."""


@dataclass(frozen=True, slots=True)
class Category:
    """Category of executors: the capacity each holds, and its preparation time."""

    category_id: int
    cpus: int
    memory_mib: int
    prepare_s: int


@dataclass(frozen=True, slots=True)
class Task:
    """Task of a job graph; `parents` and `children` are pairs of (task id, size of the data).

    `output_size` is the sum of the data for the children, which a user device uploads after computing.
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
class JobGraph:
    """Graph of tasks that arrives as a whole; `task_ids` in the order of the table."""

    job_id: int
    arrival_s: int
    task_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Device:
    """Host, base station or user device; `index` is its position in `Dataset.devices`.

    A task computes for `compute_s * compute_factor` seconds. `rate` (data units per second) is that of the
    host's cloud or of the base station; that of a user device changes every second and is in the metrics.
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
    """All inputs of a plan.

    `devices` are hosts, base stations, then user devices, each in the order of its table. The metric arrays
    have one row per device (`ue_*`: per user device) and one column per second of the metric period.
    """

    name: str
    categories: dict[int, Category]
    jobs: dict[int, JobGraph]
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
        """Index of the first user device in `devices`; index minus this is the row in `ue_*`."""
        return len(self.devices) - len(self.ue_rate)

    @cached_property
    def capacity_changes(self) -> dict[int, list[tuple[int, int, int]]]:
        """Second of the metric period -> (device, cpus, memory_mib) of the devices that change then.

        A user device keeps its last capacity while it is offline, and starts with that of its first metric.
        """
        changes: dict[int, list[tuple[int, int, int]]] = {}
        for device in self.devices:
            if device.kind == "Cloud":
                continue
            first, last = device.online_s, device.offline_s
            cpus = self.cpus[device.index, first : last + 1]
            memory = self.memory_mib[device.index, first : last + 1]
            differs = (np.diff(cpus, prepend=cpus[-1]) != 0) | (np.diff(memory, prepend=memory[-1]) != 0)
            for at in np.flatnonzero(differs).tolist():
                change = (device.index, int(cpus[at]), int(memory[at]))
                changes.setdefault(first + at, []).append(change)
        return changes

    @cached_property
    def leaving(self) -> dict[int, list[int]]:
        """Second of the metric period -> user devices that go offline at its end."""
        leaving: dict[int, list[int]] = {}
        for device in self.devices[self.first_ue :]:
            leaving.setdefault(device.offline_s, []).append(device.index)
        return leaving

    @cached_property
    def joining(self) -> dict[int, list[int]]:
        """Second of the metric period -> user devices that come online."""
        joining: dict[int, list[int]] = {}
        for device in self.devices[self.first_ue :]:
            joining.setdefault(device.online_s, []).append(device.index)
        return joining

    @cached_property
    def rate_rows(self) -> list[list[int]]:
        """`ue_rate` as lists, because single values of lists are faster to read."""
        rows: list[list[int]] = self.ue_rate.tolist()
        return rows

    def first_capacity(self, device: Device) -> tuple[int, int]:
        """Return (cpus, memory_mib) at the start; for a user device, those of its first metric."""
        at = device.index, device.online_s
        return int(self.cpus[at]), int(self.memory_mib[at])

    def is_online(self, device: Device, second: int) -> bool:
        return device.online_s <= second % METRIC_PERIOD_S <= device.offline_s
