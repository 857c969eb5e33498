"""The node size against which policies that weigh CPU against GPU measure both."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Capacity:
    """The largest node: the name of its CPU resource, how much it has, and its GPU milli."""

    cpu_name: str
    cpu: int
    gpu_milli: int


CORES = Capacity("cpus", 128, 8000)
"""CPU counted in cores, as inventories do."""

CPU_MILLI = Capacity("cpu_milli", 128_000, 8000)
"""CPU counted in thousandths of a core, as cluster traces do."""
