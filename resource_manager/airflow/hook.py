"""Hook of the `gpu_manager` connection."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from airflow.sdk.exceptions import AirflowRuntimeError

from resource_manager.airflow.provider_info import get_provider_info
from resource_manager.airflow.version_compat import AirflowException, AirflowNotFoundException, BaseHook
from resource_manager.errors import ResourceManagerError, is_login_refused, redact
from resource_manager.fleet.opening import open_manager
from resource_manager.jobs.airflow_instance import instance_id
from resource_manager.jobs.task_identity import task_as_caller
from resource_manager.manager.lease_service import LeaseService
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.manager.plurals import counted
from resource_manager.rest.client import ServiceClient
from resource_manager.settings import Settings
from resource_manager.storage.outage import outage

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator, Connection

T = TypeVar("T")

DEFAULT_CONNECTION = "gpu_manager_default"

SETTINGS_FOR_S = 30.0
"""Time for which the settings are used before the connection is looked for again: Airflow says that there is
none also when its database does not answer."""

SERVICE = ("http://", "https://")
"""Beginnings of the URL of a service; others are of stores."""

WITH_PASSWORD = ("postgresql", "mysql", "redis", "rediss", "redis+sentinel")
"""Stores with a login."""


class GPUManagerHook(BaseHook):
    """Return the manager behind a connection.

    The connection's host is the URL of a store (`postgresql://user@host/database`, `redis://…`, `airflow://`)
    or of the REST service (`https://…`). Its password is that of the store, unless the URL has one, or the
    token of the service. For as long as the default connection is not defined, the
    `GPU_MANAGER_*` settings are used. `task` asks, in the history of a store; a service goes by the token.
    """

    conn_name_attr = "gpu_conn_id"
    default_conn_name = DEFAULT_CONNECTION
    conn_type = "gpu_manager"
    hook_name = "GPU resource manager"

    @staticmethod
    def get_ui_field_behaviour() -> dict[str, Any]:
        """Return what the form shows of Airflow's own fields, for Airflow before 3.2."""
        behaviour = get_provider_info()["connection-types"][0]["ui-field-behaviour"]
        return {name.replace("-", "_"): value for name, value in behaviour.items()}

    def __init__(
        self, gpu_conn_id: str = DEFAULT_CONNECTION, *, task: BaseOperator | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.gpu_conn_id = gpu_conn_id
        self._task = task
        self._manager: LeaseService | None = None
        self._read_again_at = math.inf

    def get_conn(self) -> LeaseService:
        """Return the lease service, opened once; raises `AirflowException` if it cannot be opened.

        One of the settings is replaced by that of the connection once there is one.
        """
        manager, now = self._manager, time.monotonic()
        if manager is not None and now < self._read_again_at:
            return manager
        self._read_again_at = now + SETTINGS_FOR_S  # other threads go on meanwhile
        try:
            connection = self._connection()
        except (ResourceManagerError, AirflowException):
            if manager is None:
                raise
            return manager
        if manager is None or connection is not None:
            self._manager = None  # the connection counts, even if it cannot be opened
            self._manager = manager = self._opened(connection)
        if connection is not None:
            self._read_again_at = math.inf
        return manager

    def ask(self, act: Callable[[LeaseService], T]) -> T:
        """Return what the lease service answers; a refused login is tried once more as the connection is now.

        A triggerer or scheduler lives for months, and passwords and tokens do not.
        """
        try:
            return act(self.get_conn())
        except ResourceManagerError as error:
            if not self.forgets(error):
                raise
        return act(self.get_conn())

    def forgets(self, error: Exception) -> bool:
        """Return whether it is a refused login; then the connection is read again when it is used next."""
        if not is_login_refused(error):
            return False
        self._manager = None
        return True

    def is_defined(self) -> bool:
        """Return whether the connection is there, rather than settings in its place."""
        return self._connection() is not None

    def on_store(self) -> GPUResourceManager:
        """Return a manager on the store itself; raises `ResourceManagerError` if that is a service's."""
        return self._on_store(self._connection())

    def _opened(self, connection: Connection | None) -> LeaseService:
        try:
            if connection is not None and (url := connection.host or "").startswith(SERVICE):
                return ServiceClient(url, connection.password)
            return self._on_store(connection)
        except ResourceManagerError as error:
            raise AirflowException(f"connection {self.gpu_conn_id!r}: {error}") from error

    def _on_store(self, connection: Connection | None) -> GPUResourceManager:
        if connection is None:
            return open_manager(Settings.load(), by=self._by())
        url = connection.host or ""
        if url.startswith(SERVICE):
            raise ResourceManagerError(
                f"connection {self.gpu_conn_id!r} names the service at {redact(url)}: use the console there"
            )
        if "://" not in url:
            raise AirflowException(
                f"connection {self.gpu_conn_id!r}: its host must be the URL of a store or of the service, "
                f"not {url!r}"
            )
        options = {name: value for name, value in connection.extra_dejson.items() if value not in (None, "")}
        url = with_password(url, connection.password)
        return open_manager(Settings.of({"store": url, **options}), by=self._by())

    def _connection(self) -> Connection | None:
        """Return the connection, None for the default one that is not defined: the settings are used."""
        try:
            return self.get_connection(self.gpu_conn_id)
        except AirflowNotFoundException as error:
            variable = f"AIRFLOW_CONN_{self.gpu_conn_id.upper()}"
            if os.environ.get(variable):  # Airflow passes over what it cannot read
                raise AirflowException(
                    f"connection {self.gpu_conn_id!r}: {variable} is neither JSON nor a URL of a connection"
                ) from None
            if self.gpu_conn_id == DEFAULT_CONNECTION:
                return None
            raise AirflowException(
                f"connection {self.gpu_conn_id!r} is not defined; add it with type gpu_manager"
            ) from error
        except AirflowRuntimeError as error:
            raise outage(f"connection {self.gpu_conn_id!r}: Airflow does not answer: {error}") from error

    def _by(self) -> str | None:
        if self._task is None:
            return None
        return task_as_caller(instance_id(), self._task.dag_id, self._task.task_id)

    def test_connection(self) -> tuple[bool, str]:
        """Return whether the manager answers, and a line about it, for Airflow's connection form."""
        try:
            servers = self.get_conn().servers()
        except Exception as error:
            return False, str(error)
        free = sum(server["available_gpus"] for server in servers)
        closed = sum(server["closed_gpus"] for server in servers)
        total = sum(server["total_gpus"] for server in servers)
        gpus = f"{free} of {counted(total, 'GPU')} free" + (f", {closed} closed" if closed else "")
        return True, f"{counted(len(servers), 'server')}, {gpus}, seen from {socket.gethostname()}"


def with_password(url: str, password: str | None) -> str:
    """Return the URL of a store with that password, which Airflow keeps encrypted, unless it has one."""
    scheme, _, rest = url.partition("://")
    login, at, place = rest.rpartition("@")
    if not password or ":" in login or scheme not in WITH_PASSWORD:
        return url
    return f"{scheme}://{login}:{quote(password, safe='')}@{place if at else rest}"
