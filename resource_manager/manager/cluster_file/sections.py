"""The sections of a cluster file as forms, and what they define as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from resource_manager.core.cluster_settings import ClusterSettings, HealthRule, Notice, SignOn
from resource_manager.core.models import MAX_PRIORITY, Node
from resource_manager.core.teams import Teams
from resource_manager.errors import SettingsError
from resource_manager.manager.cluster_file.durations import Duration, Seconds
from resource_manager.manager.cluster_file.notice_tables import NoticeTable
from resource_manager.manager.cluster_file.servers import Confine, Server, WritablePath, nodes_of
from resource_manager.manager.cluster_file.sign_on import SignOnSection
from resource_manager.manager.cluster_file.team_tables import Percent, TeamsTable
from resource_manager.manager.demand import in_words
from resource_manager.manager.demand_fields import Name
from resource_manager.manager.maintenance_windows import WindowForm
from resource_manager.manager.plurals import one_of
from resource_manager.scheduling.queue.orders import BACKFILL_SUFFIX, ORDERS

Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
HealthAction = Literal["ignore", "note", "close after lease", "close now", "close server"]
Condition = Annotated[str, Field(min_length=1, max_length=250, pattern="^[^;]*$")]
Sentence = Annotated[str, Field(max_length=250)]

DEFAULTS = ClusterSettings()


class ClusterSection(BaseModel, extra="forbid", strict=True):
    """The section `[cluster]`: how the cluster grants."""

    policy: Name = Field(default=DEFAULTS.policy, description="Placement policy.")
    order: Name = Field(
        default=DEFAULTS.order,
        description=f"Order of the pending requests, equal ones first come, first served: {one_of(ORDERS)}; "
        f"with {BACKFILL_SUFFIX} appended, later requests may fill gaps where they delay no earlier one.",
    )
    admission: Literal["open", "price"] = Field(
        default="open",
        description="price: a request with a utility waits, although it fits, until its utility covers the "
        "price of its resources, which grows with their use.",
    )
    price_low: Rate | None = Field(
        default=None,
        description="admission price: utility an hour for all of one resource of an idle server.",
    )
    price_high: Rate | None = Field(
        default=None,
        description="admission price: utility an hour for all of one resource of a full server.",
    )
    min_gpus: int | None = Field(
        default=None,
        ge=0,
        description="Minimum of whole GPUs a task may request; unset: 1, or 2 with the original's servers.",
    )
    max_gpus: int | None = Field(
        default=None,
        ge=1,
        description="Maximum of whole GPUs a task may request; unset: the GPUs of the largest server.",
    )
    max_priority: int = Field(
        default=DEFAULTS.max_priority,
        ge=0,
        le=MAX_PRIORITY,
        description="Highest priority a request may state, unless its team has another or an operator asks.",
    )
    lease_ttl: Seconds = Field(
        default=DEFAULTS.lease_ttl_s,
        description="Time to live of a lease without renewal, unless the request sets one.",
    )
    maintenance_guard: Duration = Field(
        default=DEFAULTS.maintenance_guard_s,
        description="Runtime that a task without a known one is assumed to have before a maintenance window.",
    )
    confirmation_window: Duration = Field(
        default=DEFAULTS.confirmation_window_s,
        description="Recovery window: pause of new grants after restart, fail-over or restore of the store, "
        "or a jump of its clock, in which owners renew their leases or learn that they are gone; longer than "
        "the time between two renewals.",
    )
    clean_timeout: Seconds = Field(
        default=DEFAULTS.clean_timeout_s,
        description="Time after the end of a lease until a GPU on which its processes remain is closed.",
    )
    silent_after: Annotated[Duration, Field(ge=15)] = Field(
        default=DEFAULTS.silent_after_s,
        description="Time without a report of its agent after which a server takes no new leases; an agent "
        "that reports more rarely is given three of its intervals.",
    )
    rogue: Literal["avoid", "ignore"] = Field(
        default="avoid",
        description="avoid: a GPU with a process that belongs to no lease there takes no new leases.",
    )
    idle_below: Percent = Field(
        default=DEFAULTS.idle_below,
        description="Utilization in percent below which a GPU of a lease counts as idle.",
    )
    idle_after: Seconds = Field(
        default=DEFAULTS.idle_after_s, description="Time for which a lease may be idle without a warning."
    )
    idle_action: Literal["warn", "release"] = Field(
        default="warn",
        description="release: a lease that was measured to be idle for so long is preempted, as idle.",
    )
    confine: Confine = Field(
        default="off",
        description="Walls around plain jobs, for servers that do not state it: must: a job that cannot have "
        "them does not start; try: it runs without, and its lease says why.",
    )
    writable: tuple[WritablePath, ...] = Field(
        default=(),
        strict=False,  # an array is no tuple
        max_length=100,
        description="Paths on the servers that a job within walls may write to, besides its own folder.",
    )
    prices: dict[Name, Price] = Field(
        default_factory=dict, description="Price of an hour of a GPU by type, for reports."
    )

    @model_validator(mode="after")
    def _bounds(self) -> ClusterSection:
        if self.min_gpus is not None and self.max_gpus is not None and self.min_gpus > self.max_gpus:
            raise ValueError(f"min_gpus ({self.min_gpus}) is above max_gpus ({self.max_gpus})")
        if self.admission == "price" and (self.price_low is None or self.price_high is None):
            raise ValueError("admission = price needs price_low and price_high")
        if self.price_low is not None and self.price_high is not None and self.price_low > self.price_high:
            raise ValueError(f"price_low ({self.price_low}) is above price_high ({self.price_high})")
        return self

    def settings(self) -> ClusterSettings:
        """Return the settings, without rules of health and sign-on."""
        return ClusterSettings(**{field: getattr(self, key) for key, field in KEYS.items()})


KEYS = {
    name.removesuffix("_s"): name
    for name in (each.name for each in fields(ClusterSettings))
    if name not in ("health", "policy_package", "sign_on", "notices")
}
"""Key of `[cluster]` -> field of `ClusterSettings`."""


class HealthEntry(BaseModel, extra="forbid", strict=True):
    """What is done about one condition; texts that are not stated are those of the built-in table."""

    action: HealthAction
    text: Sentence = ""
    todo: Sentence = ""
    catalog: Sentence = Field(default="", description="What the maker's catalogue says, for readers.")
    recovers: bool = False


class WeeklyWindow(WindowForm):
    """One entry of `[[maintenance]]`; a window of one time is added by `gpu-manager maintenance add`."""

    every: Literal["week"] = Field(description="week: the window comes again every 7 times 24 hours.")


class ClusterForm(TeamsTable):
    """A whole file, or several joined; a section that it lacks stays as it is."""

    cluster: ClusterSection | None = None
    servers: list[Server] | None = None
    maintenance: list[WeeklyWindow] | None = Field(default=None, max_length=1000)
    health: dict[Condition, HealthAction | HealthEntry] | None = None
    sign_on: SignOnSection | None = None
    notices: list[NoticeTable] | None = Field(default=None, max_length=100)

    def definition(self) -> ClusterDefinition:
        """Return what the form defines; raises `InvalidRequestError`."""
        stated = self.model_fields_set
        section = self.cluster if self.cluster is not None and self.cluster.model_fields_set else None
        has_teams = bool(stated & TEAMS_KEYS) and bool(self.teams or stated & TEAMS_KEYS - {"teams"})
        given = {
            "cluster": section is not None,
            "servers": bool(self.servers),
            "teams": has_teams,
            "maintenance": bool(self.maintenance),
            "health": bool(self.health),
            "sign_on": self.sign_on is not None,
            "notices": bool(self.notices),
        }
        return ClusterDefinition(
            settings=None if section is None else section.settings(),
            health=health_rules(self.health) if self.health else None,
            nodes=nodes_of(self.servers) if self.servers else None,
            teams=self.rules() if has_teams else None,
            windows=tuple(self.maintenance) if self.maintenance else None,
            sign_on=None if self.sign_on is None else self.sign_on.settings(),
            notices=tuple(each.notice() for each in self.notices) if self.notices else None,
            empty=tuple(
                name for name, is_given in given.items() if not is_given and name in map(section_of, stated)
            ),
        )


TEAMS_KEYS = set(TeamsTable.model_fields)


def section_of(key: str) -> str:
    """Return the section that a key at the top of a file belongs to."""
    return "teams" if key in TEAMS_KEYS else key


def health_rules(entries: Mapping[str, HealthAction | HealthEntry]) -> tuple[HealthRule, ...]:
    """Return the rules of a section, by condition."""
    found = []
    for condition, entry in sorted(entries.items()):
        stated = HealthEntry(action=entry) if isinstance(entry, str) else entry
        found.append(HealthRule(condition, **stated.model_dump(exclude={"catalog"})))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class ClusterDefinition:
    """What is to become of the cluster; None leaves it as it is.

    `settings` are without rules of health, sign-on and notices. `empty` names sections that are there and
    say nothing.
    """

    settings: ClusterSettings | None = None
    health: tuple[HealthRule, ...] | None = None
    nodes: tuple[Node, ...] | None = None
    teams: Teams | None = None
    windows: tuple[WindowForm, ...] | None = None
    sign_on: SignOn | None = None
    notices: tuple[Notice, ...] | None = None
    empty: tuple[str, ...] = ()


def settings_of(stated: Mapping[str, Any]) -> ClusterSettings:
    """Return settings with these fields of `ClusterSettings`; raises `SettingsError`."""
    names = {field: key for key, field in KEYS.items()}
    try:
        section = ClusterSection(**{names.get(field, field): value for field, value in stated.items()})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(KEYS.get(str(part), part)) for part in first["loc"])
        reason = in_words(first)
        raise SettingsError(f"{name}: {reason}" if name else reason) from error
    return section.settings()
