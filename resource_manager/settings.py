"""Settings, read once from the environment (`GPU_MANAGER_*`) and an optional TOML file."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from resource_manager.errors import SettingsError, redact

PREFIX = "GPU_MANAGER_"
FILE_VARIABLE = "GPU_MANAGER_SETTINGS"
AIRFLOW_SECTION = "gpu_manager"
INSTANCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")


def valid_instance(text: str) -> str:
    """Return the text if it is a valid instance id of an Airflow; raises `ValueError`."""
    if INSTANCE.fullmatch(text) is None:
        raise ValueError(
            "an instance is 1 to 40 letters, digits, '.', '_' or '-', the first a letter or digit, "
            f"not {text[:60]!r}"
        )
    return text


class Settings(BaseModel):
    """Every setting with its default; `GPU_MANAGER_LEASE_TTL_S=600` sets `lease_ttl_s`."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    store: str = Field(
        default="airflow://",
        description="Store of the state: airflow:// (an Airflow Variable), redis://…, rediss://…, "
        "redis+sentinel://…, unix://…, postgresql://…, mysql://…, sqlite:///… or memory://.",
    )
    redis_url: str = Field(
        default="redis://localhost:6379/0",
        description="The Redis whose lock guards the airflow:// store; a redis:// store brings its own.",
    )
    policy: str = Field(default="first_fit", description="Placement policy.")
    order: str = Field(
        default="priority",
        description="Order of the pending requests: priority (equal ones first come, first served), fifo, "
        "srtf, srsf, fair_share or tiresias; with +backfill appended, later requests may fill gaps where "
        "they delay no earlier one.",
    )
    admission: Literal["open", "price"] = Field(
        default="open",
        description="price: a request with a utility waits, although it fits, until its utility covers the "
        "price of its resources, which grows with their use.",
    )
    price_low: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="admission price: utility an hour for all of one resource of an idle server.",
    )
    price_high: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="admission price: utility an hour for all of one resource of a full server.",
    )
    inventory: Path | None = Field(
        default=None, description="TOML file with the servers; without one, 4 servers x 8 GPUs x 64 CPUs."
    )
    min_gpus: int | None = Field(
        default=None,
        ge=0,
        description="Minimum of whole GPUs a task may request; unset: 1, or 2 while the stored inventory is "
        "the built-in one.",
    )
    max_gpus: int | None = Field(
        default=None,
        ge=1,
        description="Maximum of whole GPUs a task may request; unset: the GPUs of the largest server.",
    )
    lease_ttl_s: float = Field(
        default=86_400.0,
        gt=0,
        description="Time to live of a lease without renewal, unless the request sets one.",
    )
    lock_timeout_s: float = Field(default=60.0, gt=0, description="Longest wait for the lock.")
    cache_ttl_s: float = Field(
        default=0.0, ge=0, description="Maximum age of a summary; 0 reads the latest changes each time."
    )
    history_length: int = Field(
        default=100_000, ge=1000, description="Number of changes a Redis or SQL store keeps, about."
    )
    history_bytes: int = Field(
        default=256 * 2**20,
        ge=8 * 2**20,
        description="Memory that these changes may take in a Redis store, about; oldest dropped first.",
    )
    lease_confirmation_window_s: float = Field(
        default=60.0,
        ge=0,
        description="Recovery window: pause of new grants after a restart of Redis or a failover, in which "
        "owners renew their leases or learn that they are gone; longer than the time between two renewals.",
    )

    maintenance_guard_s: float = Field(
        default=28_800.0,
        ge=0,
        allow_inf_nan=False,
        description="Runtime that a task without a known one is assumed to have before a maintenance window.",
    )

    health: Path | None = Field(
        default=None,
        description="TOML file with other actions for conditions of GPUs; see docs/gpus.md.",
    )
    rogue: Literal["avoid", "ignore"] = Field(
        default="avoid",
        description="avoid: a GPU with a process that belongs to no lease there takes no new leases.",
    )
    idle_below: float = Field(
        default=5.0,
        ge=0,
        le=100,
        description="Utilization in percent below which a GPU of a lease counts as idle.",
    )
    idle_after_s: float = Field(
        default=3600.0, gt=0, description="Time for which a lease may be idle without a warning."
    )
    silent_after_s: float = Field(
        default=60.0,
        ge=15,
        allow_inf_nan=False,
        description="Time without a report of its agent after which a server takes no new leases; an agent "
        "that reports more rarely is given three of its intervals.",
    )
    clean_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="Time after the end of a lease until a GPU on which its processes remain is closed.",
    )

    prices: Path | None = Field(
        default=None,
        description="TOML file with the price of an hour of a GPU by type, for reports; see "
        "docs/command-line.md.",
    )

    instance: str | None = Field(
        default=None,
        description="Id of this Airflow in the ids of its leases, as several may share a store; without it, "
        "the API server creates a random id.",
    )

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Yield the settings without the passwords of the URLs."""
        for name, value in super().__repr_args__():
            yield name, redact(value) if name in ("store", "redis_url") else value

    @field_validator("instance")
    @classmethod
    def _name_of_an_instance(cls, value: str | None) -> str | None:
        return None if value is None else valid_instance(value)

    @model_validator(mode="after")
    def _range_of_gpus(self) -> Settings:
        if self.min_gpus is not None and self.max_gpus is not None and self.min_gpus > self.max_gpus:
            raise ValueError(f"min_gpus ({self.min_gpus}) is above max_gpus ({self.max_gpus})")
        return self

    @model_validator(mode="after")
    def _ends_of_prices(self) -> Settings:
        if self.admission == "price" and (self.price_low is None or self.price_high is None):
            raise ValueError("admission = price needs price_low and price_high")
        if self.price_low is not None and self.price_high is not None and self.price_low > self.price_high:
            raise ValueError(f"price_low ({self.price_low}) is above price_high ({self.price_high})")
        return self

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Load the settings from the file that `GPU_MANAGER_SETTINGS` names, overridden by `GPU_MANAGER_*`.

        In a process of Airflow, what neither states comes from the section `[gpu_manager]` of its
        configuration. Raises `SettingsError` that names the setting and its source.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = _of_airflow()
        from_airflow = set(values)
        if path := environ.get(FILE_VARIABLE):
            in_file = _read_file(Path(path))
            values.update(in_file)
            from_airflow -= in_file.keys()
        names = {PREFIX + name.upper(): name for name in cls.model_fields}
        from_environment = {names[key]: value for key, value in environ.items() if key in names}
        values.update(from_environment)
        sources = {name: f"[{AIRFLOW_SECTION}] {name} of airflow.cfg" for name in from_airflow}
        sources.update({name: PREFIX + name.upper() for name in from_environment})
        return cls.of(values, sources)

    @classmethod
    def of(cls, values: Mapping[str, Any], sources: Mapping[str, str] | None = None) -> Settings:
        """Return settings with these values; raises `SettingsError` that names the first wrong one."""
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(str(part) for part in first["loc"])
            source = (sources or {}).get(name, f"setting {name!r}")
            reason = first["msg"].removeprefix("Value error, ")
            raise SettingsError(f"{source if name else 'settings'}: {reason}") from error


def _of_airflow() -> dict[str, Any]:
    """Return what Airflow's configuration states, in a process that has read it."""
    if "airflow.configuration" not in sys.modules:
        return {}
    from airflow.configuration import conf

    section = conf.getsection(AIRFLOW_SECTION) or {}
    return {name: value for name, value in section.items() if value not in (None, "")}


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            return tomllib.load(stream)
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"{FILE_VARIABLE}={path}: {error}") from error
