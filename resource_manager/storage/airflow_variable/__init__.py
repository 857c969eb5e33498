"""The state in one Airflow Variable, under a Redis lock."""

DEFAULT_VARIABLE = "gpu_resource_status"
DEFAULT_LOCK = "gpu_resource_lock"
