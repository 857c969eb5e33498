"""Names for authors of DAGs, and the plugin of the package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import resource_manager.airflow

REPOSITORY = Path(__file__).parent.parent.parent


def in_a_process_of_its_own(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.strip().splitlines()[-1]


@pytest.mark.filterwarnings("ignore")
def test_every_public_name_can_be_imported_and_no_other() -> None:
    names = resource_manager.airflow.__all__
    assert all(callable(getattr(resource_manager.airflow, name)) for name in names)
    assert set(names) <= set(dir(resource_manager.airflow))
    with pytest.raises(ImportError, match="GPUTrainOperator"):
        from resource_manager.airflow import GPUTrainOperator  # type: ignore[attr-defined]  # noqa: F401


def test_a_name_is_imported_at_its_first_use() -> None:
    code = (
        "import sys, resource_manager.airflow as ours\n"
        "before = 'airflow' in sys.modules\n"
        "from resource_manager.airflow import gpu_lease, with_gpus\n"
        "print(before, *(f'resource_manager.airflow.{name}' in sys.modules for name in "
        "('operators.lease', 'operators.training', 'sensors')))"
    )
    assert in_a_process_of_its_own(code) == "False True False False"


@pytest.mark.filterwarnings("ignore")
def test_the_reconciler_dag_takes_one_line() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from resource_manager.airflow import reconcile_dag

    usual = reconcile_dag()
    assert (usual.dag_id, usual.max_active_runs, usual.catchup) == ("gpu_reconcile", 1, False)
    assert usual.description
    own = reconcile_dag("ours", schedule=timedelta(minutes=5), gpu_conn_id="other", tags=["ops"])
    task: Any
    (task,) = own.tasks
    assert [own.dag_id, own.schedule, task.gpu_conn_id] == ["ours", timedelta(minutes=5), "other"]
    assert own.tags == {"ops"}


@pytest.mark.parametrize("folder", ["empty", "with the file"])
def test_the_plugin_is_loaded_once(folder: str, tmp_path: Path) -> None:
    plugins = tmp_path if folder == "empty" else REPOSITORY / "plugins"
    code = (
        "import json\n"
        "from airflow import plugins_manager as manager\n"
        "manager.ensure_plugins_loaded()\n"
        "get = getattr(manager, '_get_plugins', None)\n"  # since 3.2
        "errors = get()[1] if get else manager.import_errors\n"
        "ours = [each for each in manager.get_plugin_info() if each['name'] == 'gpu_resource_manager']\n"
        "parts = ('fastapi_apps', 'external_views', 'listeners', 'macros')\n"
        "has = [part for part in parts if part != 'external_views' or part in ours[0]]\n"  # since 3.1
        "print(json.dumps([errors, [[len(each[part]) for part in has] for each in ours], len(has)]))"
    )
    environment = {"AIRFLOW_HOME": str(tmp_path / "home"), "AIRFLOW__CORE__PLUGINS_FOLDER": str(plugins)}
    errors, counts, parts = json.loads(in_a_process_of_its_own(code, **environment))
    assert (errors, counts) == ({}, [[1, 1, 1] if parts == 3 else [1, 2, 1, 1]])  # two pages
    assert parts >= 3
