"""Airflow's executors on the databases that they allow; `test_versions.py` has LocalExecutor on SQLite.

MariaDB is not among them: it refuses statements of Airflow's scheduler (`WITH … DELETE`), which then ends.
It needs what the extra `test-airflow` brings: `make test-airflow TESTS=tests/e2e/test_executors.py`.
"""

import re
from importlib.util import find_spec

import pytest

from tests.e2e.bench import TIMEOUT_FACTOR, Bench
from tests.e2e.test_versions import test_a_retry_takes_the_lease_of_a_killed_worker_and_another_waits_for_it
from tests.sql_servers import MySQL, Postgres

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900 * TIMEOUT_FACTOR),
    pytest.mark.skipif(
        not (find_spec("airflow.providers.celery") and find_spec("aiomysql")),
        reason="needs the Celery provider and aiomysql (make test-airflow TESTS=tests/e2e/test_executors.py)",
    ),
]
__all__ = ["test_a_retry_takes_the_lease_of_a_killed_worker_and_another_waits_for_it"]

DRIVERS = {Postgres: "postgresql+psycopg2://postgres", MySQL: "mysql+mysqldb://root"}


class Distributed(Bench):
    """Bench of components that are started one by one, as `airflow standalone` has LocalExecutor only."""

    def spawn(self, name, command, **options):
        if name != "airflow":
            return super().spawn(name, command, **options)
        self.command("db", "migrate")
        for component in ("scheduler", "dag-processor", "triggerer", "api-server"):
            self.start(component)
        return super().spawn("worker", [self.program, "celery", "worker", "--concurrency", "4"])


@pytest.fixture(
    scope="module",
    params=[("LocalExecutor", Postgres), ("CeleryExecutor", Postgres), ("CeleryExecutor", MySQL)],
    ids=lambda pair: f"{pair[0]} on {pair[1].__name__}",
)
def airflow(tmp_path_factory, request):
    executor, kind = request.param
    if missing := kind.missing():
        pytest.skip(missing)
    if kind is MySQL and not find_spec("MySQLdb"):
        pytest.skip("Airflow needs mysqlclient for MySQL (make test-airflow WITH=mysqlclient TESTS=…)")
    database = kind()
    try:
        ask = database.psql if kind is Postgres else database.sql
        ask("CREATE DATABASE airflow" + ("" if kind is Postgres else " CHARACTER SET utf8mb4"))
        url = f"{DRIVERS[kind]}@127.0.0.1:{database.port}/airflow"
        settings = {"AIRFLOW__CORE__EXECUTOR": executor, "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": url}
        bench = (Bench if executor == "LocalExecutor" else Distributed)(
            tmp_path_factory.mktemp("airflow"), **settings
        )
        bench.environment |= {
            "AIRFLOW__CELERY__BROKER_URL": bench.store_url.replace("/0", "/1"),
            "AIRFLOW__CELERY__RESULT_BACKEND": f"db+{url}",
        }
        with bench:
            bench.switch_the_reconciler_on()
            yield bench
        if executor == "CeleryExecutor":
            assert re.search(r"Task execute_workload\S* succeeded", (bench.home / "worker.log").read_text())
    finally:
        database.stop()


def test_the_triggerer_is_killed(bench):
    trains, waits = bench.one_trains_one_waits(seconds=2)
    bench.kill("triggerer")
    bench.start("triggerer")
    bench.both_end_well(trains, waits, 300)
