"""Reproducible random draws from numbers alone (SplitMix64), for policies that must be stateless."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

Below = Callable[[int], int]
"""(limit) -> a random integer from 0 to limit - 1, a new one at each call."""

_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """Return 64 well-mixed bits of an integer (Steele, Lea and Flood, SplitMix, OOPSLA 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@cache
def _start(seed: int) -> int:
    return mix(seed)


def stream(seed: int, position: int) -> Below:
    """Return a function that draws one integer below its argument at each call."""
    state = mix(_start(seed) ^ position)

    def below(limit: int) -> int:
        nonlocal state
        # `mix` inlined, because a call takes as long as the mixing itself.
        value = (state + 0x9E3779B97F4A7C15) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        state = value ^ (value >> 31)
        return state % limit

    return below
