"""Twenty operators and sensors of Airflow's providers, each with arguments with which it ends by itself."""

import sys
import warnings
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import gettempdir
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from airflow.providers.common.io.operators.file_transfer import FileTransferOperator
    from airflow.providers.standard.operators.bash import BashOperator
    from airflow.providers.standard.operators.datetime import BranchDateTimeOperator
    from airflow.providers.standard.operators.empty import EmptyOperator
    from airflow.providers.standard.operators.latest_only import LatestOnlyOperator
    from airflow.providers.standard.operators.python import (
        BranchExternalPythonOperator,
        BranchPythonOperator,
        ExternalPythonOperator,
        PythonOperator,
        ShortCircuitOperator,
    )
    from airflow.providers.standard.operators.smooth import SmoothOperator
    from airflow.providers.standard.operators.weekday import BranchDayOfWeekOperator
    from airflow.providers.standard.sensors.bash import BashSensor
    from airflow.providers.standard.sensors.date_time import DateTimeSensor, DateTimeSensorAsync
    from airflow.providers.standard.sensors.filesystem import FileSensor
    from airflow.providers.standard.sensors.python import PythonSensor
    from airflow.providers.standard.sensors.time import TimeSensor
    from airflow.providers.standard.sensors.time_delta import TimeDeltaSensor, WaitSensor
    from airflow.providers.standard.sensors.weekday import DayOfWeekSensor

SOON = timedelta(seconds=2)
NEXT, MIDNIGHT = "next", datetime(2026, 1, 1, tzinfo=UTC)
DAYS = {"Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"}


def devices():
    """Return what a function in a process of the task sees of the lease."""
    import os

    assert os.environ["GPU_LEASE_ID"], "no lease"
    return os.environ["CUDA_VISIBLE_DEVICES"]


def next_task():
    """Return the task that comes next, if there is a lease."""
    import os

    return os.environ["GPU_LEASE_ID"] and "next"


OPERATORS: dict[Any, dict[str, Any]] = {
    BashOperator: {"bash_command": 'test -n "$GPU_LEASE_ID" && echo "$CUDA_VISIBLE_DEVICES"'},
    PythonOperator: {"python_callable": devices},
    ShortCircuitOperator: {"python_callable": devices},
    BranchPythonOperator: {"python_callable": next_task},
    ExternalPythonOperator: {"python_callable": devices, "python": sys.executable, "expect_airflow": False},
    BranchExternalPythonOperator: {
        "python_callable": next_task,
        "python": sys.executable,
        "expect_airflow": False,
    },
    EmptyOperator: {},
    LatestOnlyOperator: {},
    SmoothOperator: {},
    BranchDateTimeOperator: {
        "follow_task_ids_if_true": NEXT,
        "follow_task_ids_if_false": NEXT,
        "target_lower": MIDNIGHT,
        "target_upper": MIDNIGHT,
    },
    BranchDayOfWeekOperator: {
        "follow_task_ids_if_true": NEXT,
        "follow_task_ids_if_false": NEXT,
        "week_day": DAYS,
    },
    FileTransferOperator: {
        "src": f"file://{Path(__file__)}",
        "dst": f"file://{gettempdir()}/{{{{ ti.task_id }}}}",
        "overwrite": True,
    },
    BashSensor: {"bash_command": 'test -n "$GPU_LEASE_ID"'},
    PythonSensor: {"python_callable": devices},
    FileSensor: {"filepath": __file__, "poke_interval": 1, "deferrable": True},
    DateTimeSensor: {"target_time": MIDNIGHT},
    DateTimeSensorAsync: {"target_time": MIDNIGHT},
    TimeSensor: {"target_time": MIDNIGHT.time()},
    TimeDeltaSensor: {"delta": SOON, "deferrable": True},
    WaitSensor: {"time_to_wait": SOON, "deferrable": True},
    DayOfWeekSensor: {"week_day": DAYS},
}
"""Class -> its own arguments; several defer."""
