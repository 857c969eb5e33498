"""Fixtures of the provider's tests: those for authors of DAGs, with still less waiting."""

import pytest


@pytest.fixture
def manager(gpu_manager):
    """Manager in memory behind every connection."""
    return gpu_manager


@pytest.fixture
def fast_triggers(manager, monkeypatch):
    """Triggers that read the state and the job's output without pauses."""
    monkeypatch.setattr("resource_manager.airflow.member_watch.READ_S", 0.2)
    monkeypatch.setattr("resource_manager.airflow.shared_manager.MAX_AGE_S", 0.0)
    monkeypatch.setattr("resource_manager.airflow.shared_manager.EXPIRE_EVERY_S", 0.0)
