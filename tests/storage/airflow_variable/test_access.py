"""The store in an Airflow Variable, against a real Airflow: its database, and a task's execution API."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.redis_server import RedisServer

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


@pytest.fixture(scope="module")
def airflow_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return a process environment with a migrated Airflow database of its own."""
    pytest.importorskip("airflow", reason="needs the extra 'airflow'", exc_type=ImportError)
    home = tmp_path_factory.mktemp("airflow")
    environment = {
        **os.environ,
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(home / "dags"),
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db",
        "AIRFLOW__LOGGING__LOGGING_LEVEL": "ERROR",
        "PYTHONPATH": str(ROOT),
    }
    run([sys.executable, "-m", "airflow", "db", "migrate"], environment)
    return environment


def run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.e2e
def test_the_contract_holds_on_airflows_database(airflow_environment: dict[str, str]) -> None:
    options = [
        "-q",
        "-W",
        "default",
        "-p",
        "no:cacheprovider",
        "-k",
        "not (airflow-2 or airflow-3 or airflow-4)",
    ]
    contract = str(HERE.parent / "test_contract.py")
    output = run(
        [sys.executable, "-m", "pytest", *options, contract],
        {**airflow_environment, "STORES_UNDER_TEST": "airflow"},
    )
    assert " passed" in output


@pytest.mark.e2e
def test_a_real_task_allocates_and_releases(
    airflow_environment: dict[str, str], embedded_redis: RedisServer
) -> None:
    folder = Path(airflow_environment["AIRFLOW__CORE__DAGS_FOLDER"])
    folder.mkdir()
    script = shutil.copy(HERE / "inside_airflow.py", folder)
    output = run(
        [sys.executable, str(script)],
        {**airflow_environment, "GPU_MANAGER_REDIS_URL": embedded_redis.fresh_url()},
    )
    seen = json.loads(output.rpartition("SEEN ")[2])
    print(json.dumps(seen, indent=1))
    assert seen["state"] == "success"
    assert (seen["way_in_task"], seen["way_outside"]) == ("TaskAccess", "DatabaseAccess")
    assert seen["missing"] is None
    assert seen["granted"]["gpu_devices"] == "0,1,2,3"
    assert seen["seen_outside"] == ["kept"]
    assert seen["released_outside"] is True
    assert seen["servers"] == 4
    # A write succeeds only if the stored text is the expected one: none, then "a".
    assert (seen["written"], seen["scratch"]) == ([False, True, False, False, True], "b")
    for call in ("database_out", "task_out", "read_refused", "write_refused"):
        assert seen[call]["is_airflow_exception"]
        assert "gpu_resource_status" in seen[call]["text"]
    # The execution API answers "not found" when only the database behind it is down.
    assert "is gone (deleted, or Airflow's database is down)" in seen["state_lost"]
