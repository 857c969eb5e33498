"""The error for a store that cannot be reached, inside and outside Airflow."""

from __future__ import annotations

import sys
from functools import cache

from resource_manager.errors import StoreFullError, StoreRefusedError, StoreUnavailableError


def outage(message: str, error: type[StoreUnavailableError] = StoreUnavailableError) -> StoreUnavailableError:
    """Return an error of that class; inside Airflow it is an `AirflowException` too."""
    if "airflow.exceptions" in sys.modules or "airflow.sdk.exceptions" in sys.modules:
        return _in_airflow()[error](message)
    return error(message)


@cache
def _in_airflow() -> dict[type[StoreUnavailableError], type[StoreUnavailableError]]:
    from resource_manager.airflow.version_compat import AirflowException

    class AirflowStoreUnavailableError(StoreUnavailableError, AirflowException):
        """The store cannot be reached from inside Airflow."""

    class AirflowStoreFullError(StoreFullError, AirflowException):
        """The memory of the store is full, found inside Airflow."""

    class AirflowStoreRefusedError(StoreRefusedError, AirflowException):
        """The store refuses its user, found inside Airflow."""

    return {
        StoreUnavailableError: AirflowStoreUnavailableError,
        StoreFullError: AirflowStoreFullError,
        StoreRefusedError: AirflowStoreRefusedError,
    }
