"""An Airflow database on a PostgreSQL of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from tests.sql_servers import Postgres, postgresql_programs

PRELOAD = ("airflow.models.variable", "airflow.utils.session", "psycopg2", "sqlalchemy.event")


def what_is_missing() -> str:
    """Why Airflow cannot run on PostgreSQL here; empty if it can."""
    if postgresql_programs() is None:
        return "needs PostgreSQL's initdb and postgres (Debian: postgresql)"
    for name, package in (
        ("airflow", "the extra 'airflow'"),
        ("psycopg2", "psycopg2-binary"),
        ("asyncpg", "asyncpg"),
    ):
        if find_spec(name) is None:
            return f"needs {package}"
    return ""


def airflow_on(postgres: Postgres, home: Path) -> dict[str, str]:
    """Migrates a database for Airflow; the environment in which it is Airflow's."""
    address = f"postgresql+psycopg2://postgres@127.0.0.1:{postgres.port}/postgres"
    environment = {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": address,
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONNECT_ARGS": "tests.faults.airflow_on_postgres.CONNECT",
        "AIRFLOW__LOGGING__LOGGING_LEVEL": "ERROR",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, "-m", "airflow", "db", "migrate"]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )
    if done.returncode != 0:
        raise RuntimeError(f"airflow db migrate failed: {done.stderr[-2000:]}")
    return environment


CONNECT = {"connect_timeout": 5}
