"""The sections of teams in a cluster file: what each team is guaranteed and may hold."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from resource_manager.core.models import MAX_PRIORITY, Amount
from resource_manager.core.teams import (
    FILE_NAMES,
    HALF_LIFE_S,
    MIN_RUNTIME_S,
    PREEMPTION_DELAY_S,
    TEAM_NAMES,
    Team,
    Teams,
)
from resource_manager.manager.cluster_file.durations import Duration, Seconds
from resource_manager.manager.demand_fields import Name

MAX_TEAMS = 10_000
MAX_GPUS = 4_000_000

Gpus = (
    Annotated[int, Field(ge=0, le=MAX_GPUS)] | Annotated[float, Field(ge=0, le=MAX_GPUS, allow_inf_nan=False)]
)
UnixUser = Annotated[str, Field(max_length=32, pattern=r"^([a-z_][a-z0-9_-]*)?$")]
Weight = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Percent = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]


class TeamTable(BaseModel, extra="forbid", strict=True):
    """One `[teams.NAME]` table."""

    guaranteed: Gpus | dict[Name, Gpus] = Field(
        default=0, description="GPUs the team can always get; per type too: { A100 = 8, H100 = 8 }."
    )
    limit: Gpus | None = Field(default=None, description="GPUs the team may hold at most.")
    weight: Weight = Field(default=1.0, description="Share of what no guarantee needs.")
    parent: Name | None = Field(default=None, description="The team above: its numbers bound this one too.")
    max_runtime: Seconds | None = Field(
        default=None, description="Longest runtime of the team's jobs: seconds, or 45s, 10min, 12h, 3d."
    )
    max_gpus_per_owner: Gpus | None = Field(
        default=None, description="GPUs that one owner may hold in the team."
    )
    min_runtime: Duration | None = Field(
        default=None, description="Time after its start in which the team's leases are not preempted."
    )
    idle_below: Percent | None = Field(
        default=None, description="Utilization in percent below which a GPU of the team's leases is idle."
    )
    idle_after: Seconds | None = Field(
        default=None, description="Time for which the team's leases may be idle without a warning."
    )
    idle_action: Literal["warn", "release"] | None = Field(
        default=None, description="release: the team's leases that are idle for so long are released."
    )
    max_priority: Annotated[int, Field(ge=0, le=MAX_PRIORITY)] | None = Field(
        default=None, description="Highest priority that the team's requests may state."
    )
    user: UnixUser = Field(
        default="",
        description="Account on the servers as which the team's plain jobs run; ssh logs in as it.",
    )

    def team(self, name: str) -> Team:
        guaranteed: Amount
        if isinstance(self.guaranteed, dict):
            guaranteed, by_type = sum(self.guaranteed.values()), self.guaranteed
        else:
            guaranteed, by_type = self.guaranteed, {}
        stated = {key: getattr(self, file_name) for file_name, key in TEAM_NAMES.items()}
        stated |= {"guaranteed": guaranteed, "parent": self.parent or ""}
        return Team(name, guaranteed_by_type=by_type, **stated)


class TeamsTable(BaseModel, extra="forbid", strict=True):
    """The keys of all teams, and the teams."""

    preemption: bool = Field(
        default=False, description="Leases may be preempted for teams inside their guarantee."
    )
    min_runtime: Duration = Field(
        default=MIN_RUNTIME_S, description="Time after its start in which a lease is not preempted."
    )
    preemption_delay: Duration = Field(
        default=PREEMPTION_DELAY_S, description="Time that a request waits before it preempts."
    )
    half_life: Seconds = Field(default=HALF_LIFE_S, description="Time in which past use counts half.")
    gpu_weights: dict[Name, Weight] = Field(
        default_factory=dict, description="Weight of a type of GPU in past use; 1 if not named."
    )
    teams: dict[Name, TeamTable] = Field(
        default_factory=dict, max_length=MAX_TEAMS, description="The teams by name."
    )

    def rules(self) -> Teams:
        stated = {key: getattr(self, file_name) for file_name, key in FILE_NAMES.items()}
        return Teams(tuple(table.team(name) for name, table in self.teams.items()), **stated)
