"""The plugin for an Airflow to which the package is not installed but put on PYTHONPATH.

An installed package brings it by its entry point; then there is nothing here, for Airflow complains of a
plugin that it finds twice.
"""

from importlib.metadata import entry_points

if not any(point.name == "gpu_resource_manager" for point in entry_points(group="airflow.plugins")):
    from resource_manager.airflow.plugin import GPUResourceManagerPlugin as GPUResourceManagerPlugin
