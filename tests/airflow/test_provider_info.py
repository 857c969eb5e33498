"""Provider description, as Airflow reads it."""

import runpy
import warnings
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name, walk_packages
from typing import Any

import pytest

import resource_manager.airflow
from tests.airflow.examples import EXAMPLES, is_readable

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from resource_manager.airflow.provider_info import get_provider_info


@pytest.mark.filterwarnings("ignore")
def test_the_description_fits_airflows_schema_and_names_every_module_with_a_class_for_users():
    from airflow.providers_manager import _create_provider_info_schema_validator
    from airflow.sdk import BaseOperator, BaseSensorOperator
    from airflow.triggers.base import BaseTrigger

    from resource_manager.airflow.version_compat import BaseHook

    info = get_provider_info()
    _create_provider_info_schema_validator().validate(info)
    integrations = {one["integration-name"] for one in info["integrations"]}
    bases = {
        "sensors": BaseSensorOperator,  # before operators, as a sensor is one
        "operators": BaseOperator,
        "hooks": BaseHook,
        "triggers": BaseTrigger,
    }
    found: dict[str, set[Any]] = {kind: set() for kind in (*bases, "")}
    package = resource_manager.airflow
    for module in walk_packages(package.__path__, f"{package.__name__}."):
        if ".example_dags" in module.name or ".decorators" in module.name:
            continue  # read by tests of their own
        for value in vars(import_module(module.name)).values():
            if (
                isinstance(value, type)
                and value.__module__ == module.name
                and value.__name__ not in ("GPUOperator", "PlainTrigger", "TaskBoundTrigger")
            ):
                found[next((kind for kind, base in bases.items() if issubclass(value, base)), "")].add(
                    module.name
                )
    for kind in bases:
        (entry,) = info[kind]
        assert entry["integration-name"] in integrations
        assert set(entry["python-modules"]) == found[kind]


def test_every_class_of_the_provider_description_can_be_imported():
    info = get_provider_info()
    (connection,) = info["connection-types"]
    assert resolve_name(connection["hook-class-name"]).conn_type == connection["connection-type"]
    for name in [*info["extra-links"], *(entry["class-name"] for entry in info["task-decorators"])]:
        assert resolve_name(name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_can_be_read_from_the_version_on_that_it_names(example: Path) -> None:
    from resource_manager.airflow.version_compat import AirflowException

    if is_readable(example):
        assert runpy.run_path(str(example))["dag"].dag_id == example.stem
    else:
        with pytest.raises((ImportError, AirflowException)):
            runpy.run_path(str(example))
