"""The hook of the `gpu_manager` connection."""

from __future__ import annotations

from typing import Any

from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowException, AirflowNotFoundException

from resource_manager.errors import ResourceManagerError
from resource_manager.manager import GPUResourceManager


class GPUManagerHook(BaseHook):
    """Gives the manager behind a connection, or the one of the settings where no connection is named."""

    conn_name_attr = "gpu_conn_id"
    default_conn_name = "gpu_manager_default"
    conn_type = "gpu_manager"
    hook_name = "GPU resource manager"

    def __init__(self, gpu_conn_id: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.gpu_conn_id = gpu_conn_id
        self._manager: GPUResourceManager | None = None

    def get_conn(self) -> GPUResourceManager:
        """The manager; raises `AirflowException` in one line where there is none."""
        if self._manager is None:
            try:
                self._manager = self._connect()
            except ResourceManagerError as error:
                raise AirflowException(f"no GPU manager: {error}") from error
        return self._manager

    def _connect(self) -> GPUResourceManager:
        if self.gpu_conn_id is None:
            return GPUResourceManager()
        try:
            connection = self.get_connection(self.gpu_conn_id)
        except AirflowNotFoundException as error:
            raise AirflowException(
                f"connection {self.gpu_conn_id!r} is not defined; add it with type gpu_manager, "
                "or leave gpu_conn_id out to use the GPU_MANAGER_* settings"
            ) from error
        if not connection.host:
            raise AirflowException(
                f"connection {self.gpu_conn_id!r} names no store: put its URL into the host"
            )
        return GPUResourceManager.from_url(connection.host, **connection.extra_dejson)

    def test_connection(self) -> tuple[bool, str]:
        """For the button in Airflow's connection form."""
        try:
            summary = self.get_conn().get_resource_summary()
        except Exception as error:
            return False, str(error)
        return True, f"{summary['total_servers']} servers"
