"""Steps of a task that outlast an outage of the GPU manager: its try goes on once the manager answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from resource_manager.airflow.task_trigger.waits import AnswerTrigger
from resource_manager.errors import StoreRefusedError, is_outage


@contextmanager
def outlasting_outages(
    operator: Any,
    step: str,
    event: Mapping[str, Any],
    *,
    begins: bool = False,
    at_most: timedelta | None = None,
    **more: Any,
) -> Iterator[None]:
    """Leave the worker if the manager does not answer inside; once it does, the step is called again.

    What is done inside must be such that it can be repeated at any point. The step gets the same event and
    `more`, in the same try, which fails if the outage lasts for longer than `at_most`. Where it `begins`,
    nothing runs yet: it fails, too, if the store refuses its user, as with a wrong password.
    """
    try:
        yield
        return
    except Exception as error:
        if not is_outage(error) or (begins and is_outage(error, StoreRefusedError)):
            raise
        limit = "" if at_most is None else f", if it does within max_wait = {at_most}"
        operator.log.warning("the GPU manager does not answer; going on once it does%s: %s", limit, error)
    operator.defer(
        trigger=AnswerTrigger(dict(event), gpu_conn_id=operator.gpu_conn_id),
        method_name=step,
        kwargs=more,
        timeout=at_most,
    )
