"""Check of the plugin in a running Airflow."""

from __future__ import annotations

from demo.stack import AirflowApi


def assert_loaded_once(api: AirflowApi) -> None:
    """Assert that Airflow loaded the plugin once, with all its parts and without an error."""
    assert api.call("GET", "/plugins/importErrors")["import_errors"] == []
    (plugin,) = (p for p in api.call("GET", "/plugins")["plugins"] if p["name"] == "gpu_resource_manager")
    counts = {part: len(plugin[part]) for part in ("fastapi_apps", "external_views", "listeners", "macros")}
    assert counts == {"fastapi_apps": 1, "external_views": 1, "listeners": 1, "macros": 1}
