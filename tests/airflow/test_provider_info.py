"""Provider description, as Airflow reads it."""

import runpy
import warnings
from pathlib import Path
from pkgutil import resolve_name

import pytest

from tests.airflow.examples import EXAMPLES, is_readable

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from resource_manager.airflow.provider_info import get_provider_info


def test_every_class_of_the_provider_description_can_be_imported():
    info = get_provider_info()
    (connection,) = info["connection-types"]
    assert resolve_name(connection["hook-class-name"]).conn_type == connection["connection-type"]
    for name in [*info["extra-links"], *(entry["class-name"] for entry in info["task-decorators"])]:
        assert resolve_name(name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_can_be_read_from_the_version_on_that_it_names(example: Path) -> None:
    from airflow.exceptions import AirflowException

    if is_readable(example):
        assert runpy.run_path(str(example))["dag"].dag_id == example.stem
    else:
        with pytest.raises((ImportError, AirflowException)):
            runpy.run_path(str(example))
