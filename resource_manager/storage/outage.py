"""The error for a store that cannot be reached, inside and outside Airflow, and who shares it."""

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


class SharedOutage:
    """The last read of a store, if it failed: who asked before it began gets its error.

    Else all who ask a store that hangs, one at a time, would wait for its timeout in turn.
    """

    def __init__(self) -> None:
        self._last: tuple[float, StoreUnavailableError] | None = None

    @contextmanager
    def reading(self, asked_at: float) -> Iterator[None]:
        """Read inside for somebody who asked at that time, by the steady clock."""
        if self._last is not None and asked_at <= self._last[0]:
            error = self._last[1]
            raise type(error)(*error.args) from error
        began = time.monotonic()
        try:
            yield
        except StoreUnavailableError as error:
            self._last = began, error
            raise
        self._last = None


@cache
def _in_airflow() -> dict[type[StoreUnavailableError], type[StoreUnavailableError]]:
    from resource_manager.airflow.version_compat import AirflowException

    return {
        kind: type(f"Airflow{kind.__name__}", (kind, AirflowException), {})
        for kind in (StoreUnavailableError, StoreFullError, StoreRefusedError)
    }
