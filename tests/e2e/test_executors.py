"""Executors of Airflow, also two at once, on the databases they allow; `test_versions.py` has SQLite.

MariaDB is not among them: it refuses statements of Airflow's scheduler (`WITH … DELETE`), which then ends.
It needs what the extra `test-airflow` brings: `make test-airflow TESTS=tests/e2e/test_executors.py`.
"""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.bench import INVENTORY, Bench, wait_for
from tests.e2e.test_versions import test_a_retry_takes_the_lease_of_a_killed_worker_and_another_waits_for_it
from tests.e2e.test_with_gpus import SERVER, all_end_well, begins, kill_the_worker
from tests.sql_servers import MySQL, Postgres, running_sql

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (find_spec("airflow.providers.celery") and find_spec("aiomysql")),
        reason="needs the Celery provider and aiomysql (make test-airflow TESTS=tests/e2e/test_executors.py)",
    ),
]
__all__ = ["test_a_retry_takes_the_lease_of_a_killed_worker_and_another_waits_for_it"]

DRIVERS = {Postgres: "postgresql+psycopg2://postgres", MySQL: "mysql+mysqldb://root"}
EDGE = "airflow.providers.edge3.executors.EdgeExecutor"
WORKERS = {
    "CeleryExecutor": ["celery", "worker", "--concurrency", "4"],
    EDGE: ["edge", "worker", "--concurrency", "4", "--edge-hostname", "gpu-server"],
}
EDGE_HOST = WORKERS[EDGE][-1]


class Distributed(Bench):
    """Bench of components that are started one by one, as `airflow standalone` has LocalExecutor only.

    The executor named last gets the tasks that the tests kill in their worker, the first one all others.
    """

    def __init__(self, home, executors, database, **settings):
        self.executors = executors.split(",")
        super().__init__(
            home,
            servers=INVENTORY + SERVER.replace("{kind}", "bash"),
            AIRFLOW__CORE__EXECUTOR=executors,
            AIRFLOW__DATABASE__SQL_ALCHEMY_CONN=database,
            TEST_EXECUTOR=self.executors[-1],
            PYTHONPATH=str(Path(__file__).parents[2]),
        )
        self.environment |= {
            "AIRFLOW__CELERY__BROKER_URL": self.store_url.replace("/0", "/1"),
            "AIRFLOW__CELERY__RESULT_BACKEND": f"db+{database}",
            "AIRFLOW__EDGE__API_ENABLED": str(EDGE in self.executors),
            "AIRFLOW__EDGE__API_URL": f"{self.url}/edge_worker/v1/rpcapi",
            "AIRFLOW__EDGE__JOB_POLL_INTERVAL": "1",
            "AIRFLOW__EDGE__HEARTBEAT_INTERVAL": "5",
        }

    def spawn(self, name, command, **options):
        if name != "airflow":
            return super().spawn(name, command, **options)
        self.command("db", "migrate")
        for component in ("scheduler", "dag-processor", "triggerer", "api-server"):
            started = self.start(component)
        self._wait_until_ready(started)  # a worker of EdgeExecutor ends without an API server
        for executor in set(self.executors) & set(WORKERS):
            started = super().spawn(executor, [self.program, *WORKERS[executor]])
        return started


@pytest.fixture(
    scope="module",
    params=[
        ("LocalExecutor", Postgres),
        ("CeleryExecutor", Postgres),
        ("CeleryExecutor", MySQL),
        (EDGE, Postgres),
        (f"LocalExecutor,{EDGE}", Postgres),
    ],
    ids=lambda pair: f"{pair[0]} on {pair[1].__name__}",
)
def airflow(tmp_path_factory, request):
    executors, kind = request.param
    if kind is MySQL and not find_spec("MySQLdb"):
        pytest.skip("Airflow needs mysqlclient for MySQL (make test-airflow WITH=mysqlclient TESTS=…)")
    with running_sql(kind) as database:
        ask = database.psql if kind is Postgres else database.sql
        ask("CREATE DATABASE airflow" + ("" if kind is Postgres else " CHARACTER SET utf8mb4"))
        url = f"{DRIVERS[kind]}@127.0.0.1:{database.port}/airflow"
        with Distributed(tmp_path_factory.mktemp("airflow"), executors, url) as bench:
            bench.switch_the_reconciler_on()
            yield bench
        if "CeleryExecutor" in bench.executors:
            log = (bench.home / "CeleryExecutor.log").read_text()
            assert re.search(r"Task execute_workload\S* succeeded", log)


def test_an_operator_whose_worker_is_killed_runs_again_or_the_one_that_waits_does(bench):
    first = bench.run("kept_bash")
    begins(first)
    second = bench.run("kept_bash")
    second.wait_until_waiting()
    runs = first, second
    kill_the_worker(bench, first)
    wait_for(lambda: sum(len(run.processes()) for run in runs) > 1, 240, "another process")
    all_end_well(runs)
    assert (len(first.processes()), len(second.processes())) == (2, 1)
    assert {run.task()["hostname"] == EDGE_HOST for run in runs} == {bench.executors[-1] == EDGE}


def test_the_triggerer_is_killed(bench):
    trains, waits = bench.one_trains_one_waits(seconds=2)
    bench.kill("triggerer")
    bench.start("triggerer")
    bench.both_end_well(trains, waits, 300)
