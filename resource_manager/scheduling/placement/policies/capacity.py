"""Node size by which policies that weigh CPU against GPU normalise both."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Capacity:
    """Largest node: the name of its CPU resource, its amount of it, and its GPU milli."""

    cpu_name: str
    cpu: int
    gpu_milli: int


CORES = Capacity("cpus", 128, 8000)
"""CPU counted in cores, as in inventories."""

CPU_MILLI = Capacity("cpu_milli", 128_000, 8000)
"""CPU counted in thousandths of a core, as in cluster traces."""
