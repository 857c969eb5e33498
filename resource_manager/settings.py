"""Settings, read once from the environment (`GPU_MANAGER_*`) and an optional TOML file."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, ValidationError, field_validator

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


class Settings(BaseModel, frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False):
    """Every setting of a process with its default; `GPU_MANAGER_LOCK_TIMEOUT_S=5` sets `lock_timeout_s`.

    What belongs to the cluster is stored with it: see `ClusterSettings`.
    """

    store: str = Field(
        default="airflow://",
        description="Store of the state: airflow:// (an Airflow Variable), redis://…, rediss://…, "
        "redis+sentinel://…, unix://…, postgresql://…, mysql://…, sqlite:///… or memory://.",
    )
    redis_url: str = Field(
        default="redis://localhost:6379/0",
        description="The Redis whose lock guards the airflow:// store; a redis:// store brings its own.",
    )
    inventory: Path | None = Field(
        default=None,
        description="TOML file of the cluster that `gpu-manager diff` and `apply` take without an argument.",
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
    instance: Annotated[str, AfterValidator(valid_instance)] | None = Field(
        default=None,
        description="Id of this Airflow in the ids of its leases, as several may share a store; without it, "
        "the API server creates a random id.",
    )
    job_keys: str = Field(
        default="",
        repr=False,
        description="Fernet keys that encrypt stored jobs, with spaces between: the first encrypts, all "
        "decrypt; the same in workers, triggerer and service.",
    )

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Yield the settings without the passwords of the URLs."""
        for name, value in super().__repr_args__():
            yield name, redact(value) if name in ("store", "redis_url") else value

    @field_validator("lock_timeout_s", "cache_ttl_s", "history_length", "history_bytes", mode="before")
    @classmethod
    def _number(cls, value: object) -> object:
        if isinstance(value, bool):
            raise ValueError(f"must be a number, got {value}")
        return value

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Load the settings from the file that `GPU_MANAGER_SETTINGS` names, overridden by `GPU_MANAGER_*`.

        In a process of Airflow, what neither states comes from the section `[gpu_manager]` of its
        configuration. Raises `SettingsError` that names the setting and its source.
        """
        environ = os.environ if environ is None else environ
        values = _of_airflow()
        sources = {name: f"[{AIRFLOW_SECTION}] {name} of airflow.cfg" for name in values}
        if path := environ.get(FILE_VARIABLE):
            in_file = _read_file(Path(path))
            values |= in_file
            sources |= {name: f"setting {name!r}" for name in in_file}
        for name in cls.model_fields:
            if (variable := PREFIX + name.upper()) in environ:
                values[name], sources[name] = environ[variable], variable
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
            reason = re.sub("^Input should ", "must ", first["msg"].removeprefix("Value error, "))
            if first["type"] == "extra_forbidden":
                from difflib import get_close_matches  # no setting that is right needs it

                near = get_close_matches(name[:100], cls.model_fields, 1)
                reason = "there is no such setting" + "".join(f"; did you mean {each}?" for each in near)
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
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not TOML: {error}"
        raise SettingsError(f"{FILE_VARIABLE}={path}: {reason}") from error
