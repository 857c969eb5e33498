"""Sensor for free GPUs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from airflow.sdk import BaseSensorOperator

from resource_manager import errors
from resource_manager.airflow import task_demand
from resource_manager.airflow.hook import DEFAULT_CONNECTION, GPUManagerHook
from resource_manager.airflow.resuming import Resumes
from resource_manager.airflow.task_state import identity_of
from resource_manager.airflow.task_trigger.events import Vacancy
from resource_manager.airflow.task_trigger.waits import FreeCapacityTrigger
from resource_manager.airflow.version_compat import AirflowException, AirflowFailException
from resource_manager.airflow.wait_log import WaitLog, describe_vacancy
from resource_manager.core.refusal import RefusalKind
from resource_manager.manager.demand import Demand
from resource_manager.manager.results import Explanation


class GPUAvailableSensor(task_demand.TakesDemand, Resumes, BaseSensorOperator):
    """Succeed once such a request would be granted; allocates nothing, so another request may come first.

    Parameters as for `GPUOperator`, without `max_wait`, and those of every sensor.
    """

    template_fields: Sequence[str] = tuple(task_demand.ATTRIBUTES.values())

    @task_demand.takes_demand
    def __init__(
        self, *, deferrable: bool = True, gpu_conn_id: str = DEFAULT_CONNECTION, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.deferrable = deferrable
        self.gpu_conn_id = gpu_conn_id
        task_demand.check_at_parse(self.task_id, self.given_fields())
        self._waiting_log = WaitLog()

    def poke(self, context: Any) -> bool:
        """Return whether the request would be granted now; False during an outage of the manager.

        Raises `AirflowFailException` if the request is wrong or no server could ever grant it, and
        `AirflowException` if the manager cannot answer it for another reason.
        """
        try:
            answer = self._explanation(self._demand(context))
        except errors.NoServersError as error:
            self.log.warning("still waiting: %s", error)
            return False
        except errors.InvalidRequestError as error:
            raise AirflowFailException(str(error)) from None
        except Exception as error:
            if errors.is_outage(error) and not errors.is_outage(error, errors.StoreRefusedError):
                self.log.warning("the GPU manager does not answer; still waiting: %s", error)
                return False
            if isinstance(error, errors.ResourceManagerError):
                raise AirflowException(str(error)) from error
            raise
        if answer["kind"] == RefusalKind.NEVER_FITS:
            raise AirflowFailException(answer["reason"])
        if not answer["would_be_granted"]:
            line = describe_vacancy(answer)
            if self._waiting_log.due(answer["kind"], answer["reason"], line, time.monotonic()):
                self.log.info("%s", line)
        return bool(answer["would_be_granted"])

    def execute(self, context: Any) -> Any:
        if not self.deferrable:
            return super().execute(context)
        return self.resume_execution("execute_request", None, context)  # as it skips where it should not fail

    def execute_request(self, context: Any) -> None:
        """Finish if the GPUs are free, else wait in the triggerer."""
        if not self.poke(context):
            asked = self._demand(context).model_dump(exclude_unset=True)
            self.defer(
                trigger=FreeCapacityTrigger(
                    asked, self.poke_interval, is_weight=self._has_weight, gpu_conn_id=self.gpu_conn_id
                ),
                method_name="execute_vacant",
                timeout=timedelta(seconds=self.timeout),
            )

    def execute_vacant(self, context: Any, event: dict[str, Any]) -> None:
        """Log the reasons of the wait and finish.

        Raises `AirflowFailException` if no server can ever grant the request any more.
        """
        found = Vacancy.model_validate(event)
        if found.reasons:
            self.log.info("waited for GPUs: %s", "; then: ".join(found.reasons))
        if found.server_name is None:
            raise AirflowFailException(found.detail)
        self.log.info("the GPUs are free on %s", found.server_name)

    def _demand(self, context: Any) -> Demand:
        lease_id = f"{identity_of(context).lease_id} (sensor)"
        return task_demand.demand_of(self, self.given_fields(), context, lease_id)

    @property
    def _has_weight(self) -> bool:
        return self.given_fields()["priority"] is None

    def _explanation(self, demand: Demand) -> Explanation:
        manager = GPUManagerHook(self.gpu_conn_id).get_conn()
        try:
            return manager.explain(demand)
        except errors.PriorityError as error:
            if not self._has_weight:
                raise
            return manager.explain(task_demand.cut(demand, error))
