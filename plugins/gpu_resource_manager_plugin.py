"""Plugin for an Airflow that has the package on its PYTHONPATH instead of installed.

An installed package registers the plugin by its entry point. This file then defines nothing, since Airflow
reports an error for a plugin that it finds twice.
"""

from importlib.metadata import entry_points

if not any(point.name == "gpu_resource_manager" for point in entry_points(group="airflow.plugins")):
    from resource_manager.airflow.plugin import GPUResourceManagerPlugin as GPUResourceManagerPlugin
