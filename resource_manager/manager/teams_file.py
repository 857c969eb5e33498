"""The teams file: what each team is guaranteed and may hold, as TOML; the same form as a REST body."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from resource_manager.core.models import Amount
from resource_manager.core.teams import (
    FILE_NAMES,
    HALF_LIFE_S,
    MIN_RUNTIME_S,
    PREEMPTION_DELAY_S,
    TEAM_NAMES,
    Team,
    Teams,
)
from resource_manager.errors import InvalidRequestError, TeamsFileError, place_in
from resource_manager.manager.demand import Name, in_words

MAX_TEAMS = 10_000
MAX_GPUS = 4_000_000
_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(|s|m|min|h|d|w)")


def seconds_of(text: str) -> float:
    """Return the seconds of a duration such as `3d`, `12h`, `10min` or `90`; raises `ValueError`."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"must be seconds or a text such as 45s, 10min, 12h, 3d, got {text!r}")
    return float(found[1]) * _UNITS_S[found[2]]


def _duration(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return seconds_of(value)
    except ValueError as error:
        raise PydanticCustomError("duration", "{reason}", {"reason": str(error)}) from None


Duration = Annotated[
    float, BeforeValidator(_duration), Field(ge=0, le=10 * 365 * 86_400, allow_inf_nan=False)
]
Gpus = (
    Annotated[int, Field(strict=True, ge=0, le=MAX_GPUS)]
    | Annotated[float, Field(strict=True, ge=0, le=MAX_GPUS, allow_inf_nan=False)]
)
Weight = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class TeamTable(BaseModel):
    """One `[teams.NAME]` table."""

    model_config = ConfigDict(extra="forbid")

    guaranteed: Gpus | dict[Name, Gpus] = Field(
        default=0, description="GPUs the team can always get; per type too: { A100 = 8, H100 = 8 }."
    )
    limit: Gpus | None = Field(default=None, description="GPUs the team may hold at most.")
    weight: Weight = Field(default=1.0, description="Share of what no guarantee needs.")
    parent: Name | None = Field(default=None, description="The team above: its numbers bound this one too.")
    max_runtime: Annotated[Duration, Field(gt=0)] | None = Field(
        default=None, description="Longest runtime of the team's jobs: seconds, or 45s, 10min, 12h, 3d."
    )
    max_gpus_per_owner: Gpus | None = Field(
        default=None, description="GPUs that one owner may hold in the team."
    )
    min_runtime: Duration | None = Field(
        default=None, description="Time after its start in which the team's leases are not preempted."
    )
    idle_below: Annotated[float, Field(strict=True, ge=0, le=100, allow_inf_nan=False)] | None = Field(
        default=None, description="Utilization in percent below which a GPU of the team's leases is idle."
    )
    idle_after: Annotated[Duration, Field(gt=0)] | None = Field(
        default=None, description="Time for which the team's leases may be idle without a warning."
    )

    def team(self, name: str) -> Team:
        """Return the rules of the team of that name."""
        guaranteed: Amount
        if isinstance(self.guaranteed, dict):
            guaranteed, by_type = sum(self.guaranteed.values()), self.guaranteed
        else:
            guaranteed, by_type = self.guaranteed, {}
        stated = {key: getattr(self, file_name) for file_name, key in TEAM_NAMES.items()}
        stated |= {"guaranteed": guaranteed, "parent": self.parent or ""}
        return Team(name, guaranteed_by_type=by_type, **stated)


class TeamsTable(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid")

    preemption: bool = Field(
        default=False, strict=True, description="Leases may be preempted for teams inside their guarantee."
    )
    min_runtime: Duration = Field(
        default=MIN_RUNTIME_S, description="Time after its start in which a lease is not preempted."
    )
    preemption_delay: Duration = Field(
        default=PREEMPTION_DELAY_S, description="Time that a request waits before it preempts."
    )
    half_life: Annotated[Duration, Field(gt=0)] = Field(
        default=HALF_LIFE_S, description="Time in which past use counts half."
    )
    gpu_weights: dict[Name, Weight] = Field(
        default_factory=dict, description="Weight of a type of GPU in past use; 1 if not named."
    )
    teams: dict[Name, TeamTable] = Field(
        default_factory=dict, max_length=MAX_TEAMS, description="The teams by name."
    )

    def rules(self) -> Teams:
        """Return the rules of all teams."""
        stated = {key: getattr(self, file_name) for file_name, key in FILE_NAMES.items()}
        return Teams(tuple(table.team(name) for name, table in self.teams.items()), **stated)


def load_teams(path: Path | str) -> Teams:
    """Return the rules of a TOML file; raises `TeamsFileError` with file, line and reason."""
    path = Path(path)
    text = _read(path)
    try:
        value = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        line = re.search(r"line (\d+)", str(error))
        raise TeamsFileError(f"{path}:{line[1] if line else 1}: {error}") from error
    try:
        return TeamsTable.model_validate(value).rules()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        # Behind a team's field come the branches of a union, which no reader knows.
        where = place_in(first["loc"][:3])
        reason = "is not a key of this file" if first["type"] == "extra_forbidden" else in_words(first)
        if where[-1] == "[key]":
            where[-1] = "name"
        raise TeamsFileError(f"{path}:{_line_of(text, where)}: {'.'.join(where)}: {reason}") from error


def located(error: InvalidRequestError, path: Path) -> TeamsFileError:
    """Return the error of rules that the state contradicts, with the place in the file they came from."""
    place = (error.field or "").removeprefix("teams.")
    team, _, key = place.rpartition(".")
    where = ["teams", team, key] if team and key in TEAM_NAMES else ["teams", place]
    return TeamsFileError(f"{path}:{_line_of(_read(path), where)}: {error}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise TeamsFileError(f"{path}: {reason}") from error


def _line_of(text: str, where: list[str]) -> int:
    """Return the line of a key, else of its team's table; 1 if neither is found."""
    team = where[1] if len(where) > 1 and where[0] == "teams" else None
    key = where[2] if team is not None and len(where) > 2 else None if team is not None else where[0]
    section: str | None = None
    head = 1
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\s*(.+?)\s*\]\s*(#.*)?$", line):
            section = header[1]
            if team is not None and _is_table(section, team):
                head = number
                if key is None:
                    return number
        elif key is not None and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[.=]", line):
            if (team is None and section is None) or (team is not None and _is_table(section or "", team)):
                return number
        elif team is not None and section == "teams" and re.match(rf"\s*{_quoted(team)}\s*[.=]", line):
            return number
    return head


def _is_table(section: str, team: str) -> bool:
    return re.fullmatch(rf"teams\s*\.\s*{_quoted(team)}(\s*\..*)?", section) is not None


def _quoted(name: str) -> str:
    return rf"[\"']?{re.escape(name)}[\"']?"


__all__ = ["TeamTable", "TeamsTable", "load_teams", "located"]
