"""Identity of an Airflow task instance (DAG, run, task, map index), equal on every try; names its lease."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self
from urllib.parse import quote

from resource_manager.core.names import task_of

MAX_NAMES_LENGTH = 3000
"""Maximum length of the run ids, and of the task ids, in one address; proxies refuse one of 8 KiB."""

SEPARATOR = len("&task_ids=")


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
        return {**asdict(self), "map_index": str(self.map_index)}


def runs_and_tasks(identities: Iterable[TaskIdentity]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield DAG id, run ids and task ids such that all these tasks of all these runs are the identities.

    Each task of a run comes once, whatever its map indexes, and runs of which the same tasks are wanted come
    together, as far as their names go into one address.
    """
    of_runs: dict[tuple[str, str], set[str]] = defaultdict(set)
    for each in identities:
        of_runs[each.dag_id, each.run_id].add(each.task_id)
    runs: dict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    for (dag_id, run_id), task_ids in of_runs.items():
        for part in _parts(sorted(task_ids)):
            runs[dag_id, tuple(part)].append(run_id)
    for (dag_id, tasks), run_ids in runs.items():
        for part in _parts(run_ids):
            yield dag_id, part, [*tasks]


def _parts(names: Iterable[str]) -> Iterator[list[str]]:
    part: list[str] = []
    length = 0
    for name in names:
        size = len(quote(name, safe="")) + SEPARATOR
        if part and length + size > MAX_NAMES_LENGTH:
            yield part
            part, length = [], 0
        part.append(name)
        length += size
    if part:
        yield part


def _without_slash(name: str) -> str:
    return name.replace("%", "%25").replace("/", "%2F")
