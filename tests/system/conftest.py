"""A migrated database of Airflow and a store for the system tests, which run the examples of the provider.

`DAG.test` of Airflow 3.3 cannot read deadlines: that example runs in `tests/e2e/test_examples.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import resource_manager.airflow
from demo.stack import REPOSITORY
from resource_manager import GPUResourceManager

EXAMPLES = Path(resource_manager.airflow.__file__).parent / "example_dags"
BUNDLE = {
    "name": "examples",
    "classpath": "airflow.dag_processing.bundles.local.LocalDagBundle",
    "kwargs": {"path": str(EXAMPLES)},
}


BUNDLES = ("AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST", json.dumps([BUNDLE]))
"""Environment variable and value."""


@pytest.fixture(scope="session")
def database() -> None:
    """Create the database in the home of `tests/conftest.py`, with the examples as its DAGs."""
    program = Path(sys.executable).parent / "airflow"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(*BUNDLES)
        for words in (("db", "migrate"), ("dags", "reserialize")):
            subprocess.run([program, *words], check=True, capture_output=True)


@pytest.fixture
def store(database: None, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of a store with the servers of the demo, as in an installation."""
    from resource_manager.airflow import listener
    from resource_manager.jobs.airflow_instance import instance_id

    monkeypatch.setenv(*BUNDLES)
    monkeypatch.setenv("GPU_MANAGER_STORE", redis_url)
    GPUResourceManager.from_url(
        redis_url, inventory=REPOSITORY / "resource_manager" / "deploy" / "servers.toml"
    ).close()
    monkeypatch.setenv("GPU_MANAGER_JOBS_DIR", str(tmp_path / "jobs"))
    monkeypatch.setenv("GPU_MANAGER_INSTANCE", "system-test")
    instance_id.cache_clear()
    yield redis_url
    listener.finish()
    instance_id.cache_clear()
