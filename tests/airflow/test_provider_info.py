"""Provider description, as Airflow reads it."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from airflow.sdk._shared.module_loading import import_string

    from resource_manager.airflow.provider_info import get_provider_info


def test_every_class_of_the_provider_description_can_be_imported():
    info = get_provider_info()
    (connection,) = info["connection-types"]
    assert import_string(connection["hook-class-name"]).conn_type == connection["connection-type"]
    for name in [*info["extra-links"], *(entry["class-name"] for entry in info["task-decorators"])]:
        assert import_string(name)
