"""Provider description, as Airflow reads it."""

import warnings
from pkgutil import resolve_name

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from resource_manager.airflow.provider_info import get_provider_info


def test_every_class_of_the_provider_description_can_be_imported():
    info = get_provider_info()
    (connection,) = info["connection-types"]
    assert resolve_name(connection["hook-class-name"]).conn_type == connection["connection-type"]
    for name in [*info["extra-links"], *(entry["class-name"] for entry in info["task-decorators"])]:
        assert resolve_name(name)
