"""Run a real task of a real Airflow that allocates and releases; print its observations as JSON.

To be copied to the DAGs folder of an AIRFLOW_HOME with a migrated database; GPU_MANAGER_REDIS_URL names a
Redis server.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any
from unittest.mock import Mock, patch

from airflow.sdk import DAG, task

from resource_manager.errors import StateLostError, StoreUnavailableError
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.storage.airflow_variable.access import CurrentAccess, DatabaseAccess, TaskAccess

REDIS_URL = os.environ["GPU_MANAGER_REDIS_URL"]
SEEN: dict[str, Any] = {}


@task
def train() -> None:
    access = CurrentAccess()
    SEEN["way_in_task"] = type(access._access()).__name__
    SEEN["missing"] = access.get("no_such_variable")
    with GPUResourceManager.from_url("airflow://", redis_url=REDIS_URL) as manager:
        allocations: list[float] = []
        releases: list[float] = []
        for i in range(25):
            begin = time.perf_counter()
            granted = manager.allocate_resources(f"task-{i}", 2, 8)
            allocations.append(time.perf_counter() - begin)
            assert granted is not None
            begin = time.perf_counter()
            assert manager.release_resources(f"task-{i}")
            releases.append(time.perf_counter() - begin)
        SEEN["allocate_p50_ms"] = statistics.median(allocations) * 1000
        SEEN["release_p50_ms"] = statistics.median(releases) * 1000
        SEEN["granted"] = manager.allocate_resources("kept", 4, 16)
    with errors_from_the_supervisor():
        SEEN["read_refused"] = outage(lambda: TaskAccess().get("gpu_resource_status"))
        SEEN["write_refused"] = outage(lambda: TaskAccess().set("gpu_resource_status", "{}", None))
    with no_variables():
        try:
            GPUResourceManager.from_url("airflow://", redis_url=REDIS_URL).leases()
        except StateLostError as error:
            SEEN["state_lost"] = str(error)
        SEEN["task_out"] = outage(lambda: TaskAccess().set("gpu_resource_status", "{}", None))


def outage(call: Callable[[], object]) -> dict[str, Any]:
    """Return the error that the call raises for an unreachable Airflow."""
    from resource_manager.airflow.version_compat import AirflowException

    try:
        call()
    except StoreUnavailableError as error:
        return {"is_airflow_exception": isinstance(error, AirflowException), "text": str(error)}
    return {}


@contextmanager
def errors_from_the_supervisor() -> Iterator[None]:
    """Answer every message of the task to its supervisor with an error."""
    from airflow.sdk.exceptions import ErrorType
    from airflow.sdk.execution_time import task_runner
    from airflow.sdk.execution_time.comms import ErrorResponse

    refusing = Mock(send=lambda message: ErrorResponse(error=ErrorType.API_SERVER_ERROR))
    with patch.object(task_runner, "SUPERVISOR_COMMS", refusing):
        yield


@contextmanager
def no_variables() -> Iterator[None]:
    """Remove the table of Variables from the database for the duration."""
    from airflow import settings
    from sqlalchemy import text as sql

    assert settings.engine is not None
    with settings.engine.begin() as connection:
        connection.execute(sql("ALTER TABLE variable RENAME TO elsewhere"))
    yield
    with settings.engine.begin() as connection:
        connection.execute(sql("ALTER TABLE elsewhere RENAME TO variable"))


with DAG("inside_airflow", schedule=None, start_date=datetime(2025, 1, 1)) as dag:
    train()


def main() -> None:
    with GPUResourceManager.from_url("airflow://", redis_url=REDIS_URL, inventory=default_inventory()):
        pass  # the cluster is stored, as an administrator does; tasks find it
    SEEN["state"] = str(dag.test().state)
    with GPUResourceManager.from_url("airflow://", redis_url=REDIS_URL) as manager:
        SEEN["way_outside"] = type(CurrentAccess()._access()).__name__
        SEEN["seen_outside"] = [lease["task_id"] for lease in manager.leases()]
        SEEN["released_outside"] = manager.release_resources("kept")
    database = DatabaseAccess()
    text = database.get("gpu_resource_status")
    SEEN["servers"] = len(json.loads(text or "{}")["servers"])
    SEEN["written"] = [
        database.set("scratch", *values)
        for values in (("a", "b"), ("a", None), ("b", None), ("b", "other"), ("b", "a"))
    ]
    SEEN["scratch"] = database.get("scratch")
    with no_variables():
        SEEN["database_out"] = outage(lambda: database.get("gpu_resource_status"))
    print("SEEN " + json.dumps(SEEN))


if __name__ == "__main__":
    main()
