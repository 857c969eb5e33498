"""What Airflow resumes an operator with: the event of the try that runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from resource_manager.airflow.task_trigger.notes import TASK_NOTES

OF_TRY = "of_try"
"""Key of the number of the try that left its worker, in the events of our triggers."""


class Resumes:
    """Methods of an operator that is never resumed with the event of an earlier try.

    Airflow 3.0, and 3.1 before it was mended (apache/airflow issue 56704), resumes a retry with the event
    that the failed try ended with.
    """

    log: Any
    execute: Callable[..., Any]

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Any) -> Any:
        """Resume with the event of this try; begin with `execute` instead of that of another one."""
        event = (next_kwargs or {}).get("event")
        if isinstance(event, Mapping) and OF_TRY in event:
            if event[OF_TRY] != context["ti"].try_number:
                self.log.info("Airflow resumed with the end of try %s; this try begins", event[OF_TRY])
                context["ti"].xcom_push(key=TASK_NOTES, value={})  # Airflow removes no XComs then
                return self.execute(context)
            plain = {name: value for name, value in event.items() if name != OF_TRY}
            next_kwargs = {**(next_kwargs or {}), "event": plain}
        return super().resume_execution(next_method, next_kwargs, context)  # type: ignore[misc]
