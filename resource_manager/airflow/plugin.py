"""Plugin that Airflow loads by the entry point `airflow.plugins`: service under /gpu, listener, macro."""

from __future__ import annotations

from airflow.plugins_manager import AirflowPlugin

from resource_manager.airflow import listener
from resource_manager.airflow.registration import AT_START, FASTAPI_APP, PAGES
from resource_manager.jobs.launchers import build_docker_cmd


class GPUResourceManagerPlugin(AirflowPlugin):
    """Plugin that registers the service, the listener and the macro of `resource_manager`."""

    name = "gpu_resource_manager"
    fastapi_apps = [FASTAPI_APP]  # noqa: RUF012 - Airflow declares it as a list
    fastapi_root_middlewares = [AT_START]  # noqa: RUF012
    external_views = PAGES
    listeners = [listener]  # noqa: RUF012
    macros = [build_docker_cmd]  # noqa: RUF012
