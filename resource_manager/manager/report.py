"""Report of the GPU-hours: who was granted how many, what became of them, what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, ValidationError
from typing_extensions import TypedDict

from resource_manager.errors import InvalidRequestError
from resource_manager.manager.cluster_file.durations import Seconds
from resource_manager.manager.demand import complaint, in_words
from resource_manager.scheduling.accounting.gpu_hours import (
    CATEGORIES,
    GpuHours,
    Hours,
    Measure,
    account,
    hours_by,
)
from resource_manager.storage.history_file import HistorySource, collect

DAY_S = 86_400.0
MAX_STEPS = 60

Key = Literal["team", "user", "dag", "gpu_type", "source"]


def _listed(value: object) -> object:
    """Return the parts of texts that are separated by commas, each once."""
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts):
        return list(dict.fromkeys(part.strip() for text in texts for part in text.split(",") if part.strip()))
    return value


class ReportQuery(BaseModel, extra="forbid"):
    """What to group by, and how far back."""

    by: Annotated[list[Key], BeforeValidator(_listed), Field(min_length=1, max_length=5)] = Field(
        default=["team"], description="Keys to group by: team, user, dag, gpu_type, source."
    )
    since: Seconds = Field(default=30 * DAY_S, description="How far back, in seconds or as 45min, 12h, 30d.")

    @classmethod
    def of(cls, by: Sequence[str], since: float | str) -> Self:
        """Return the query; raises `InvalidRequestError`."""
        try:
            return cls.model_validate({"by": list(by), "since": since})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            words = complaint(".".join(map(str, first["loc"])), in_words(first))
            raise InvalidRequestError(words) from error


class ReportRow(TypedDict):
    """GPU-hours of one group: `granted` is the sum of the six after it; `waited` are hours of requests.

    `cost` is by the price list, None without a price; `energy_kwh` None if no server measured it.
    """

    granted: float
    used: float
    idle: float
    failed: float
    preempted: float
    quarantined: float
    unknown: float
    waited: float
    leases: int
    cost: float | None
    energy_kwh: float | None
    group: dict[str, str]


class Report(TypedDict):
    """Rows, the most granted first, and their sum. Times are seconds since the epoch.

    `history_since` is the time of the oldest change kept: what ended before is in no report.
    """

    since: float
    until: float
    history_since: float | None
    by: list[str]
    rows: list[ReportRow]
    total: ReportRow


class Accounts:
    """Account of the history of a source up to now, from which reports are made."""

    def __init__(self, source: HistorySource, now: float) -> None:
        recorded = collect(source)
        self.now = now
        self.history_since = recorded.changes[0].at if recorded.changes and recorded.before.version else None
        self.hours: GpuHours = account(recorded.before, recorded.changes, now)

    def report(
        self, query: ReportQuery, *, measures: Mapping[int, Measure], prices: Mapping[str, float]
    ) -> Report:
        """Return the report for a query."""
        since = self.now - query.since
        found = hours_by(self.hours, query.by, since, self.now, measures=measures, prices=prices)
        total = hours_by(self.hours, (), since, self.now, measures=measures, prices=prices)
        rows = [_row(hours, dict(zip(query.by, values, strict=True))) for values, hours in found.items()]
        rows.sort(key=lambda row: (-row["granted"], -row["waited"]))
        return {
            "since": since,
            "until": self.now,
            "history_since": self.history_since,
            "by": list(query.by),
            "rows": rows,
            "total": _row(total.get((), Hours()), {}),
        }

    def series(
        self, since_s: float, *, measures: Mapping[int, Measure]
    ) -> tuple[list[float], dict[str, list[float]]]:
        """Return the starts of up to `MAX_STEPS` steps, and the GPU-hours of each category in them."""
        step_s = since_s / min(MAX_STEPS, max(1, round(since_s / 60)))
        starts = [self.now - since_s + step_s * i for i in range(round(since_s / step_s))]
        steps = [
            hours_by(self.hours, (), start, start + step_s, measures=measures).get((), Hours())
            for start in starts
        ]
        return starts, {name: [hours.by_category[name] for hours in steps] for name in CATEGORIES}


def _row(hours: Hours, group: dict[str, str]) -> ReportRow:
    return {
        "group": group,
        "granted": hours.granted,
        **hours.by_category,  # type: ignore[typeddict-item]
        "waited": hours.waited,
        "leases": len(hours.leases),
        "cost": hours.cost,
        "energy_kwh": hours.energy_kwh,
    }
