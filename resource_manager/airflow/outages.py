"""Steps of a task that outlast an outage of the GPU manager: its try goes on once the manager answers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from resource_manager.airflow.triggers import OUTAGE_POLL_S, PauseTrigger
from resource_manager.errors import LockTimeoutError, StoreUnavailableError
from resource_manager.rest.client import ServiceUnavailableError

Step = Callable[[Any, Any, dict[str, Any]], Any]
"""Method of an operator that is resumed with the context and the event of a trigger."""


def outlasts_outages(step: Step) -> Step:
    """Repeat the step with the same event, in the same try, for as long as the manager does not answer.

    The step must be one that can be repeated at any point.
    """

    @functools.wraps(step)
    def repeated(
        operator: Any, context: Any, event: dict[str, Any], asked_for: Mapping[str, Any] | None = None
    ) -> Any:
        event = event if asked_for is None else dict(asked_for)
        try:
            return step(operator, context, event)
        except Exception as error:
            if not is_outage(error):
                raise
            operator.log.warning("the GPU manager does not answer; trying again: %s", error)
        pause = PauseTrigger(OUTAGE_POLL_S)
        return operator.defer(trigger=pause, method_name=step.__name__, kwargs={"asked_for": event})

    return repeated


def is_outage(error: BaseException | None) -> bool:
    """Return True if the store or the service does not answer, or if that is what caused the error."""
    outages = (StoreUnavailableError, ServiceUnavailableError, LockTimeoutError)
    return error is not None and (isinstance(error, outages) or is_outage(error.__cause__))
