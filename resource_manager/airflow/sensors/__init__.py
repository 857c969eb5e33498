"""Sensor for free GPUs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from airflow.sdk import BaseSensorOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from resource_manager.airflow.demand import Demand, team_of
from resource_manager.airflow.hook import DEFAULT_CONNECTION, GPUManagerHook
from resource_manager.airflow.triggers import FreeCapacityTrigger, identity_of
from resource_manager.airflow.wait_log import WaitLog, describe_vacancy
from resource_manager.core.models import MILLI_PER_GPU
from resource_manager.core.refusal import RefusalKind
from resource_manager.errors import InvalidRequestError, ResourceManagerError


class GPUAvailableSensor(BaseSensorOperator):
    """Succeed once such a request would be granted; allocates nothing, so another request may come first.

    `gpus`, `cpus`, `server`, `gpu_type` and `gpu_milli` as for `GPUOperator`, and the parameters of every
    sensor. It asks with the task's `priority_weight`, and for the team of the task's pool.
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
        self._waiting_log = WaitLog()

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
        if not self.poke(context):
            self.defer(
                trigger=FreeCapacityTrigger(self._arguments(context), self.gpu_conn_id, self.poke_interval),
                method_name="execute_vacant",
                timeout=timedelta(seconds=self.timeout),
            )
        return None

    def execute_vacant(self, context: Any, event: dict[str, Any]) -> None:
        """Log the reasons of the wait and finish.

        Raises `AirflowFailException` if no server can ever grant the request any more.
        """
        if event["reasons"]:
            self.log.info("waited for GPUs: %s", "; then: ".join(event["reasons"]))
        if event["server_name"] is None:
            raise AirflowFailException(event["detail"])
        self.log.info("the GPUs are free on %s", event["server_name"])

    def _arguments(self, context: Any) -> dict[str, Any]:
        identity, _ = identity_of(context)
        demand = Demand(
            self.gpus, self.cpus, gpu_type=self.gpu_type, gpu_milli=self.gpu_milli, server=self.server
        )
        return {
            "lease_id": f"{identity.lease_id} (sensor)",
            **demand.shape(),
            "priority": self.priority_weight,
            "team": team_of(self, None, context),
        }
