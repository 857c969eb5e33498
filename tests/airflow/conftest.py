"""Fixtures of the provider's tests: those for authors of DAGs, with still less waiting."""

import json

import pytest


@pytest.fixture
def manager(gpu_manager):
    """Manager in memory behind every connection."""
    return gpu_manager


@pytest.fixture
def fast_triggers(manager, monkeypatch):
    """Triggers that read the state and the job's output without pauses."""
    monkeypatch.setattr("resource_manager.airflow.task_trigger.member_watch.READ_S", 0.2)
    monkeypatch.setattr("resource_manager.airflow.shared_manager.MAX_AGE_S", 0.0)
    monkeypatch.setattr("resource_manager.airflow.shared_manager.EXPIRE_EVERY_S", 0.0)


class Variables(dict):
    """Airflow's Variables, as far as ours are read and written."""

    def set(self, key, text, before):
        self[key] = text

    def delete(self, key):
        del self[key]


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    """Airflow Variables of the test by name, where the ends of tasks are kept."""
    kept = Variables()
    monkeypatch.setattr("resource_manager.airflow.task_results.CurrentAccess", lambda: kept)
    monkeypatch.setattr("airflow.sdk.Variable.delete", kept.delete)
    return kept


@pytest.fixture
def notes(monkeypatch):
    """XComs that triggers stored in Airflow, by key."""
    kept = {}

    async def note(identity, key, value):
        kept[key] = json.loads(json.dumps(value))

    async def noted(identity, key):
        return kept.get(key)

    monkeypatch.setattr("resource_manager.airflow.task_trigger.notes.note", note)
    monkeypatch.setattr("resource_manager.airflow.task_trigger.notes.noted", noted)
    return kept


@pytest.fixture
def wanted(monkeypatch):
    """Say whether Airflow still wants the task: `wanted(False)`; it does until then."""

    def say(is_wanted):
        for module in ("base", "task_lease"):
            monkeypatch.setattr(
                f"resource_manager.airflow.task_trigger.{module}.is_wanted", lambda identity: is_wanted
            )

    say(True)
    return say
