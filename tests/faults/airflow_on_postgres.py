"""A PostgreSQL of its own with an Airflow database in it, to be stopped and restarted."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from tests.faults.redis_servers import free_port

PRELOAD = ("airflow.models.variable", "airflow.utils.session", "psycopg2", "sqlalchemy.event")


def programs() -> Path | None:
    """The folder with initdb and postgres; None if there is no PostgreSQL."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    found = shutil.which("initdb")
    folders += [Path(found).resolve().parent] if found else []
    return next((folder for folder in folders if (folder / "initdb").exists()), None)


def what_is_missing() -> str:
    """Why Airflow cannot run on PostgreSQL here; empty if it can."""
    if programs() is None:
        return "needs PostgreSQL's initdb and postgres (Debian: postgresql)"
    for name, package in (
        ("airflow", "the extra 'airflow'"),
        ("psycopg2", "psycopg2-binary"),
        ("asyncpg", "asyncpg"),
    ):
        if find_spec(name) is None:
            return f"needs {package}"
    return ""


class Postgres:
    """One cluster in a temporary folder, run as the user postgres where this is root."""

    def __init__(self) -> None:
        found = programs()
        assert found is not None
        self._programs = found
        self._folder = Path(tempfile.mkdtemp(prefix="faults-postgres-"))
        self._user = "postgres" if os.geteuid() == 0 else None
        if self._user:
            shutil.chown(self._folder, self._user)
        self.port = free_port()
        data = str(self._folder / "data")
        initdb = [str(found / "initdb"), "-D", data, "-U", "postgres", "-A", "trust", "--no-sync"]
        subprocess.run(initdb, user=self._user, check=True, capture_output=True, cwd="/")
        options = f"-k {self._folder} -h 127.0.0.1 -p {self.port} -c fsync=off -c max_connections=300"
        self._command = [str(found / "postgres"), "-D", data, *options.split()]
        self.start()

    def start(self) -> None:
        with (self._folder / "log").open("ab") as log:
            self.process = subprocess.Popen(self._command, user=self._user, stdout=log, stderr=log, cwd="/")
        deadline = time.monotonic() + 60
        ready = [str(self._programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        while subprocess.run(ready, check=False).returncode != 0:
            if time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL did not start: {(self._folder / 'log').read_text()[-500:]}")
            time.sleep(0.05)

    def restart(self, away_s: float) -> None:
        """An immediate shutdown, as a crash: connections are dropped and the log is replayed."""
        self._shut_down()
        time.sleep(away_s)
        self.start()

    def pids(self) -> list[int]:
        """The server and all its children."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [self.process.pid, *map(int, children)]

    def _shut_down(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.process.send_signal(signal.SIGQUIT)
        self.process.wait()

    def stop(self) -> None:
        self._shut_down()
        shutil.rmtree(self._folder, ignore_errors=True)


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
