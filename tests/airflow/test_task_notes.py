"""Notes of tasks: they tell waiting from training, stay true to the state, and leave a user's note alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import create_engine, select
from sqlalchemy.orm import scoped_session, sessionmaker

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from airflow import settings as airflow_settings
    from airflow.models import import_all_models
    from airflow.models.taskinstance import TaskInstance, TaskInstanceNote

    from resource_manager.airflow.task_notes import AUTHOR, TaskNotes

from resource_manager import GPUResourceManager
from resource_manager.core.models import Gpu, Node
from resource_manager.jobs.task_identity import TaskIdentity
from resource_manager.manager.serializers import name_in_words
from resource_manager.storage.memory import MemoryStore
from tests.builders import Clock

TASK = TaskIdentity("here", "d", "r", "train")
LABELS = {**TASK.labels, "launcher": "local"}


@pytest.fixture
def database(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Database with Airflow's own tables of task instances and notes, and one task in the first."""
    engine = create_engine(f"sqlite:///{tmp_path}/airflow.db")
    sessions = scoped_session(sessionmaker(engine, expire_on_commit=False))
    monkeypatch.setattr(airflow_settings, "Session", sessions)
    import_all_models()  # their foreign keys need the others
    tables = [TaskInstance.__table__, TaskInstanceNote.__table__]
    TaskInstance.metadata.create_all(engine, tables)
    is_text = type(tables[0].c.id.type).__name__ != "Uuid"  # before 3.2
    row_id = str(uuid4()) if is_text else uuid4()
    row = {"id": row_id, "dag_id": "d", "run_id": "r", "task_id": "train", "map_index": -1}
    others = {"try_number": 1, "max_tries": 0, "pool": "default_pool", "pool_slots": 1}
    with engine.begin() as connection:
        connection.execute(tables[0].insert().values(**row, **others))
    yield sessions
    sessions.remove()
    engine.dispose()


def note(sessions: Any) -> TaskInstanceNote | None:
    with sessions() as session:
        found: TaskInstanceNote | None = session.scalar(select(TaskInstanceNote))
    return found


def content(sessions: Any) -> str:
    found = note(sessions)
    assert found is not None
    assert found.user_id == AUTHOR
    return str(found.content)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def manager(clock: Clock) -> Iterator[GPUResourceManager]:
    node = Node("gpu-a", 0, {"cpus": 8}, (Gpu(0), Gpu(1)))
    with GPUResourceManager(store=MemoryStore(clock=clock), inventory=[node]) as manager:
        yield manager


def test_a_note_tells_waiting_from_training_and_what_was(
    database: Any, manager: GPUResourceManager, clock: Clock
) -> None:
    notes = TaskNotes(manager.store, "here")
    manager.submit("other", 1)
    name = name_in_words(manager.submit(TASK.lease_id, 2, labels=LABELS))
    assert name.startswith(f"{TASK.dag_id}.{TASK.task_id} ")
    notes.update()
    assert content(database).startswith("**Waiting** for 2 GPUs since ")
    assert f"Why and until when: [`{name}` in the GPU console](" in content(database)
    clock.now += 600
    manager.release("other")
    notes.update()
    assert content(database).startswith("**Training** on GPUs 0, 1 of gpu-a since ")
    assert f", after 10 min of waiting. [`{name}` in the GPU console](" in content(database)
    clock.now += 60
    manager.release(TASK.lease_id)
    notes.update()
    assert content(database).startswith("**Trained** on GPUs 0, 1 of gpu-a from ")


@pytest.mark.parametrize("instance", ["here", "elsewhere"])
def test_a_users_note_and_tasks_of_others_are_left_alone(
    instance: str, database: Any, manager: GPUResourceManager
) -> None:
    if instance == "here":
        with database() as session:
            kept = TaskInstanceNote(content="mine", user_id="ada")
            kept.ti_id = session.scalar(select(TaskInstance.id))
            session.add(kept)
            session.commit()
    notes = TaskNotes(manager.store, "here")
    identity = TaskIdentity(instance, "d", "r", "train")
    manager.submit(identity.lease_id, 1, labels=identity.labels)
    manager.submit("gone", 1, labels=TaskIdentity("here", "d", "r", "gone").labels)
    notes.update()
    found = note(database)
    assert (found and found.content) == ("mine" if instance == "here" else None)
