"""Sensor for free GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from airflow.sdk import BaseSensorOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from resource_manager.errors import InvalidRequestError, ResourceManagerError
from resource_manager.models import MILLI_PER_GPU
from resource_manager.provider.demand import Demand
from resource_manager.provider.hook import DEFAULT_CONNECTION, GPUManagerHook
from resource_manager.provider.triggers import VacancyTrigger, identity_of


class GPUAvailableSensor(BaseSensorOperator):
    """Succeed once such a request would be granted; allocates nothing, so another request may come first.

    `gpus`, `cpus`, `server`, `gpu_type` and `gpu_milli` as for `GPUOperator`, and the parameters of every
    sensor.
    """

    template_fields: Sequence[str] = ("gpus", "cpus", "server", "gpu_type")

    def __init__(
        self,
        *,
        gpus: int | str,
        cpus: int | str = 1,
        server: int | str | None = None,
        gpu_type: str | Sequence[str] = (),
        gpu_milli: int = MILLI_PER_GPU,
        deferrable: bool = True,
        gpu_conn_id: str = DEFAULT_CONNECTION,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.gpus = gpus
        self.cpus = cpus
        self.server = server
        self.gpu_type = gpu_type
        self.gpu_milli = gpu_milli
        self.deferrable = deferrable
        self.gpu_conn_id = gpu_conn_id

    def poke(self, context: Any) -> bool:
        """Return whether the request would be granted now.

        Raises `AirflowFailException` if the request is wrong or no server could ever grant it, and
        `AirflowException` if the manager cannot answer.
        """
        manager = GPUManagerHook(self.gpu_conn_id).get_conn()
        try:
            answer = manager.explain(**self._arguments(context))
        except InvalidRequestError as error:
            raise AirflowFailException(str(error)) from None
        except ResourceManagerError as error:
            raise AirflowException(str(error)) from error
        if not answer["could_ever_fit"]:
            raise AirflowFailException(answer["reason"])
        return bool(answer["would_be_granted"])

    def execute(self, context: Any) -> Any:
        if not self.deferrable:
            return super().execute(context)
        if not self.poke(context):
            self.defer(
                trigger=VacancyTrigger(self._arguments(context), self.gpu_conn_id, self.poke_interval),
                method_name="execute_vacant",
                timeout=timedelta(seconds=self.timeout),
            )
        return None

    def execute_vacant(self, context: Any, event: dict[str, Any]) -> None:
        """Finish after the wait; the GPUs are free."""
        self.log.info("the GPUs are free on %s", event["server_name"])

    def _arguments(self, context: Any) -> dict[str, Any]:
        identity, _ = identity_of(context)
        demand = Demand(
            self.gpus, self.cpus, gpu_type=self.gpu_type, gpu_milli=self.gpu_milli, server=self.server
        )
        return {"task_id": f"{identity.lease_id} (sensor)", **demand.shape()}
