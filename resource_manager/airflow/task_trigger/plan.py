"""What a task has to be carried through: its request, its job, and its limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from resource_manager.jobs.gang_job import DoneWhen
from resource_manager.jobs.job_template import JobTemplate
from resource_manager.manager.demand import Demand


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """Request and job of a task, and its limits in seconds, None for no limit.

    `is_weight`: the priority is Airflow's own, and is cut to the highest that the cluster allows. The others
    are parameters of `GPUTrainingOperator`.
    """

    demand: Demand
    job: JobTemplate
    is_weight: bool
    ttl_s: float
    max_wait_s: float | None
    timeout_s: float | None
    unreachable_s: float
    done_when: DoneWhen
    start_attempts: int
    stale_grace_s: float

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Return the plan that `to_dict` wrote."""
        own = {
            "demand": Demand.of(**value["demand"]),
            "job": JobTemplate.from_dict(value["job"]),
            "done_when": DoneWhen(value["done_when"]),
        }
        return cls(**{**value, **own})

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values; raises `InvalidRequestError` for a job that cannot be stored."""
        own = {
            "demand": self.demand.model_dump(mode="json", exclude_unset=True),
            "job": self.job.to_dict(),
            "done_when": self.done_when.value,
        }
        return {**{name: getattr(self, name) for name in self.__dataclass_fields__}, **own}
