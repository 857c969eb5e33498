"""Whose lease it is: one name for a dag, run, task and map index, the same on every try."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class TaskIdentity:
    """A task instance without its tries; `map_index` is -1 for a task that is not mapped."""

    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1

    @classmethod
    def of(cls, task_instance: Any) -> Self:
        """The identity of any of Airflow's task instance classes."""
        map_index = task_instance.map_index
        return cls(
            task_instance.dag_id,
            task_instance.run_id,
            task_instance.task_id,
            -1 if map_index is None else map_index,
        )

    @classmethod
    def from_labels(cls, labels: Mapping[str, str]) -> Self | None:
        """The identity that `labels` wrote, or None for a lease that belongs to no task of Airflow."""
        try:
            return cls(labels["dag_id"], labels["run_id"], labels["task_id"], int(labels["map_index"]))
        except (KeyError, ValueError):
            return None

    @property
    def lease_id(self) -> str:
        """The task id under which the manager knows it."""
        suffix = "" if self.map_index < 0 else f"[{self.map_index}]"
        return f"{self.dag_id}/{self.run_id}/{self.task_id}{suffix}"

    @property
    def labels(self) -> dict[str, str]:
        return {
            "dag_id": self.dag_id,
            "run_id": self.run_id,
            "task_id": self.task_id,
            "map_index": str(self.map_index),
        }
