"""The error for a store that is out, in the form that whoever runs us expects."""

from __future__ import annotations

import sys
from functools import cache

from resource_manager.errors import StoreUnavailableError


def outage(message: str) -> StoreUnavailableError:
    """A `StoreUnavailableError` which inside Airflow is an `AirflowException` too."""
    if "airflow.exceptions" in sys.modules or "airflow.sdk.exceptions" in sys.modules:
        return _in_airflow()(message)
    return StoreUnavailableError(message)


@cache
def _in_airflow() -> type[StoreUnavailableError]:
    from airflow.sdk.exceptions import AirflowException

    class AirflowStoreUnavailableError(StoreUnavailableError, AirflowException):
        """The store cannot be reached from inside Airflow."""

    return AirflowStoreUnavailableError
