"""Identity of an Airflow task instance (DAG, run, task, map index), equal on every try; names its lease."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from resource_manager.core.names import task_of


def task_as_caller(instance: str, dag_id: str, task_id: str = "") -> str:
    """Return the name in the history of what a task of that Airflow asks for, or a DAG without a task."""
    return "/".join(filter(None, (f"airflow:{instance}", dag_id, task_id)))


@dataclass(frozen=True, slots=True)
class TaskIdentity:
    """Task instance without its tries; `map_index` is -1 for a task that is not mapped.

    `instance` is the id of its Airflow: the other names of two Airflow instances on one store may be equal.
    """

    instance: str
    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1

    @classmethod
    def of(cls, task_instance: Any, instance: str) -> Self:
        """Return the identity of a task instance, of any of Airflow's classes, in the Airflow of this id."""
        map_index = task_instance.map_index
        return cls(
            instance,
            task_instance.dag_id,
            task_instance.run_id,
            task_instance.task_id,
            -1 if map_index is None else map_index,
        )

    @classmethod
    def from_labels(cls, labels: Mapping[str, str]) -> Self | None:
        """Return the identity that `labels` wrote, or None for a lease that belongs to no Airflow task."""
        if "instance" not in labels or "map_index" not in labels or (parts := task_of(labels)) is None:
            return None
        return cls(labels["instance"], *parts)

    @property
    def lease_id(self) -> str:
        """Lease id of the task instance: `instance:dag/run/task`, with `/index` if it is mapped.

        It is unique: an instance id has no colon, and a slash within a name, which Airflow can be
        configured to allow in run ids, is written as `%2F`.
        """
        parts = [_without_slash(name) for name in (self.dag_id, self.run_id, self.task_id)]
        if self.map_index >= 0:
            parts.append(str(self.map_index))
        return f"{self.instance}:{'/'.join(parts)}"

    @property
    def by(self) -> str:
        """Name of the task in the history."""
        return task_as_caller(self.instance, self.dag_id, self.task_id)

    @property
    def labels(self) -> dict[str, str]:
        return {
            "instance": self.instance,
            "dag_id": self.dag_id,
            "run_id": self.run_id,
            "task_id": self.task_id,
            "map_index": str(self.map_index),
        }


def _without_slash(name: str) -> str:
    return name.replace("%", "%25").replace("/", "%2F")


def probe_id() -> str:
    """A task id for a request that only asks: of nobody who holds or waits for anything."""
    return f"what-if-{os.urandom(6).hex()}"
