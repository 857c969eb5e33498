"""Check of the plugin in a running Airflow."""

from __future__ import annotations

from demo.stack import AirflowApi


def assert_loaded_once(api: AirflowApi) -> None:
    """Assert that Airflow loaded the plugin once, with all its parts and without an error."""
    (plugin,) = (p for p in api.call("GET", "/plugins")["plugins"] if p["name"] == "gpu_resource_manager")
    parts = {"fastapi_apps", "external_views", "listeners", "macros"}
    if "external_views" not in plugin:  # before 3.1
        parts.remove("external_views")
    else:
        assert api.call("GET", "/plugins/importErrors")["import_errors"] == []
    counts = {**dict.fromkeys(parts, 1), **({"external_views": 2} if "external_views" in parts else {})}
    assert {part: len(plugin[part]) for part in parts} == counts
