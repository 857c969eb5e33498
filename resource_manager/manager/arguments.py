"""Arguments by which Python callers give a `Demand`, without pydantic: a client of a service needs none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypedDict

from resource_manager.core.models import Amount


class Dumpable(Protocol):
    """A `Demand`, as far as this module knows it."""

    def model_dump(self, *, exclude_unset: bool = False) -> dict[str, Any]: ...


Asked = Dumpable | str | int | None
"""A whole `Demand`, or its first fields by position: see `POSITIONAL`."""

POSITIONAL = ("lease_id", "gpus", "cpus", "prefer_server")

ALIASES = {
    "task_id": "lease_id",
    "required_gpus": "gpus",
    "required_cpus": "cpus",
    "prefer_server_id": "prefer_server",
}
"""Names of the original design -> the fields of a `Demand`."""


class DemandFields(TypedDict, total=False):
    """Fields of a `Demand` as keywords; None leaves a field at its default."""

    lease_id: str | None
    gpus: int | None
    cpus: int | None
    gpu_milli: int | None
    resources: Mapping[str, Amount] | None
    gpu_types: Sequence[str] | None
    vendor: str | None
    labels_required: Mapping[str, str] | None
    prefer_server: int | str | None
    server: int | str | None
    team: str | None
    owner: str | None
    priority: int | None
    expected_runtime: float | timedelta | None
    ttl: float | timedelta | None
    utility: float | None
    target: float | timedelta | None
    sensitivity: float | None
    quarantine: bool | None
    labels: Mapping[str, str] | None


class DemandArguments(DemandFields, total=False):
    """The same, also under the names of the original design."""

    task_id: str | None
    required_gpus: int | None
    required_cpus: int | None
    prefer_server_id: int | str | None


def arguments_of(asked: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given fields by name; raises `TypeError` for too many or one given twice."""
    if asked and hasattr(asked[0], "model_dump"):
        asked, options = asked[1:], {**asked[0].model_dump(exclude_unset=True), **options}
        if asked:
            raise TypeError("a Demand is the only argument by position")
    if len(asked) > len(POSITIONAL):
        raise TypeError(f"only {', '.join(POSITIONAL)} may be given by position, got {len(asked)} arguments")
    named = dict(zip(POSITIONAL, asked, strict=False))
    if twice := sorted(name for name in named.keys() & options.keys() if options[name] is not None):
        raise TypeError(f"{twice[0]} is given twice")
    return {name: value for name, value in {**options, **named}.items() if value is not None}
