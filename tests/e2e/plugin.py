"""What a running Airflow says of our plugin."""

from __future__ import annotations

from demo.stack import AirflowApi


def assert_loaded_once(api: AirflowApi) -> None:
    """One plugin of ours with all it brings, and no complaint."""
    assert api.call("GET", "/plugins/importErrors")["import_errors"] == []
    (plugin,) = (p for p in api.call("GET", "/plugins")["plugins"] if p["name"] == "gpu_resource_manager")
    counts = {part: len(plugin[part]) for part in ("fastapi_apps", "external_views", "listeners", "macros")}
    assert counts == {"fastapi_apps": 1, "external_views": 1, "listeners": 1, "macros": 1}
