"""GPU memory as a demand: `40GB` as the vendor calls the card, `22.5GiB` as the driver reports it."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Protocol

MIB_PER_GIB = 1024
BYTES_PER_MIB = 2**20
BYTES_PER_GB = 10**9
MOST_GIB = 2**20
"""The most that a demand may ask of one GPU, in GB or GiB."""

NOMINAL_GB = {"T4": 16, "A10": 24, "A10G": 24, "L4": 24, "A30": 24, "A40": 48, "L40": 48, "L40S": 48}
"""GB in the data sheet of cards that report less, since error correction takes a part of it."""

_TEXT = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*(GB|GiB)")
_MAKER = re.compile(r"(?:NVIDIA |Tesla )+")


class Card(Protocol):
    """What is known of a GPU: `models.Gpu`, which stands on this module."""

    @property
    def gpu_type(self) -> str: ...
    @property
    def memory_mib(self) -> int: ...
    @property
    def is_mig(self) -> bool: ...


def as_gpu_memory(text: str) -> str:
    """Return the text as it is stored, such as `40GB`; raises `ValueError`."""
    found = _TEXT.fullmatch(text.strip())
    if found is None or not 0 < float(found[1]) <= MOST_GIB:
        raise ValueError(f"must be an amount in GB or GiB such as 40GB or 22.5GiB, got {text!r:.100}")
    whole, _, part = found[1].partition(".")
    return f"{int(whole)}{'.' if part.rstrip('0') else ''}{part.rstrip('0')}{found[2]}"


def has_memory(gpu: Card, gpu_memory: str, gpu_milli: int = 1000) -> bool:
    """Return True if the GPU, or that share of it, is known to have so much memory in all."""
    amount, is_nominal = _amount(gpu_memory)
    has = nominal_gb(gpu) if is_nominal else gpu.memory_mib / MIB_PER_GIB
    return has * gpu_milli >= amount * 1000


def is_unstated(gpu: Card, gpu_memory: str) -> bool:
    """Return True if nothing is known of the GPU's memory in that unit."""
    return not (nominal_gb(gpu) if _amount(gpu_memory)[1] else gpu.memory_mib)


def nominal_gb(gpu: Card) -> float:
    """Return the GPU's memory in GB: that of its data sheet where it reports less; 0 if it is unknown."""
    reported = gpu.memory_mib * BYTES_PER_MIB / BYTES_PER_GB
    if gpu.is_mig:
        return reported
    return max(reported, NOMINAL_GB.get(_MAKER.sub("", gpu.gpu_type), 0))


@lru_cache(maxsize=1000)
def _amount(gpu_memory: str) -> tuple[float, bool]:
    found = _TEXT.fullmatch(gpu_memory)
    assert found is not None
    return float(found[1]), found[2] == "GB"
