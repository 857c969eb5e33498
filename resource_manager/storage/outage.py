"""The error for a store that cannot be reached, inside and outside Airflow, and readings that many share."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from resource_manager.errors import StoreFullError, StoreRefusedError, StoreUnavailableError


def outage(message: str, error: type[StoreUnavailableError] = StoreUnavailableError) -> StoreUnavailableError:
    """Return an error of that class; inside Airflow it is an `AirflowException` too."""
    if "airflow.exceptions" in sys.modules or "airflow.sdk.exceptions" in sys.modules:
        return _in_airflow()[error](message)
    return error(message)


class SharedReading:
    """The last reading of a store: who asked before it began takes what it brought, or its error.

    Else all who ask for the newest state, one at a time, would read it in turn, or wait for the timeout of a
    store that hangs.
    """

    def __init__(self) -> None:
        self._began_at = float("-inf")
        self._error: StoreUnavailableError | None = None

    def is_due(self, asked_at: float) -> bool:
        """Return whether somebody who asked at that time, by the steady clock, has to read.

        Raises the error of the reading that failed for them, too.
        """
        if asked_at > self._began_at:
            return True
        if self._error is not None:
            raise type(self._error)(*self._error.args) from self._error
        return False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read inside."""
        began_at = time.monotonic()
        try:
            yield
        except StoreUnavailableError as error:
            self._began_at, self._error = began_at, error
            raise
        self._began_at, self._error = began_at, None


@cache
def _in_airflow() -> dict[type[StoreUnavailableError], type[StoreUnavailableError]]:
    from resource_manager.airflow.version_compat import AirflowException

    return {
        kind: type(f"Airflow{kind.__name__}", (kind, AirflowException), {})
        for kind in (StoreUnavailableError, StoreFullError, StoreRefusedError)
    }
