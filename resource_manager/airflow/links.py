"""Link from a task's page in Airflow to the GPU console."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from airflow.configuration import conf
from airflow.sdk import BaseOperatorLink

from resource_manager.jobs.airflow_instance import instance_id
from resource_manager.jobs.task_identity import TaskIdentity

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey


def console_url(lease_id: str) -> str:
    """Return the address of a lease's page in the console of this Airflow."""
    base_url = (conf.get("api", "base_url", fallback="") or "").rstrip("/")
    return f"{base_url}/gpu/lease?id={quote(lease_id, safe='')}"


class ConsoleLink(BaseOperatorLink):
    """Link to this task's lease in the GPU console."""

    name = "GPU console"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        return console_url(TaskIdentity.of(ti_key, instance_id()).lease_id)
