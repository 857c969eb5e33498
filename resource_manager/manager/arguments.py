"""Arguments by which Python callers give a `Demand`, without pydantic: a client of a service needs none."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Dumpable(Protocol):
    """A `Demand`, as far as this module knows it."""

    def model_dump(self, *, exclude_unset: bool = False) -> dict[str, Any]: ...


POSITIONAL = ("lease_id", "gpus", "cpus", "prefer_server")
"""Fields that may be given by position; a whole `Demand` may stand in the place of the first."""

ALIASES = {
    "task_id": "lease_id",
    "required_gpus": "gpus",
    "required_cpus": "cpus",
    "prefer_server_id": "prefer_server",
}
"""Names of the original design -> the fields of a `Demand`."""

ORIGINAL_NAMES = {name: alias for alias, name in ALIASES.items()}


def arguments_of(positional: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given fields by name: `positional` are those of `POSITIONAL`, or a whole `Demand` first.

    Raises `TypeError` for one given twice.
    """
    if positional and hasattr(positional[0], "model_dump"):
        options = {**positional[0].model_dump(exclude_unset=True), **options}
        positional = (None, *positional[1:])
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in zip(POSITIONAL, positional, strict=False):
        if value is not None:
            if name in given:
                raise TypeError(f"{name} is given twice")
            given[name] = value
    return given


def what_if_id() -> str:
    """Return a lease id for a demand that is only asked about: of nobody who holds or waits for anything."""
    return f"what-if-{os.urandom(6).hex()}"
