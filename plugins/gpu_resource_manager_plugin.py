"""Registers the GPU resource manager with Airflow."""

from airflow.plugins_manager import AirflowPlugin


class GPUResourceManagerPlugin(AirflowPlugin):
    """Everything it registers lives in `resource_manager`."""

    name = "gpu_resource_manager"
