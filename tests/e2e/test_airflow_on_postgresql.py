"""Airflow on PostgreSQL, as in most installations; two cases, since the manager never uses that database."""

import os

import pytest

from tests.e2e.bench import TIMEOUT_FACTOR, Bench
from tests.e2e.servers import POSTGRES, PostgreSQL

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900 * TIMEOUT_FACTOR)]


@pytest.fixture(scope="module")
def airflow(tmp_path_factory):
    if POSTGRES is None or os.geteuid() != 0:
        pytest.skip("needs PostgreSQL's server (Debian: postgresql) and root")
    with PostgreSQL() as database:
        home = tmp_path_factory.mktemp("airflow")
        settings = {
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": database.url,
            "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
        }
        with Bench(home, ssh_port=22, **settings) as bench:
            bench.switch_the_reconciler_on()
            bench.database = database
            yield bench


def test_a_job_waits_and_trains(bench):
    first, second = bench.one_trains_one_waits(seconds=2)
    first.finish()
    second.wait_until("success")
    assert "waiting for GPUs: position 1 in the queue" in second.log()
    assert bench.database.query("select count(*) from task_instance where dag_id = 'local_job'") == [(2,)]


def test_the_triggerer_is_killed(bench):
    trains, waits = bench.one_trains_one_waits(seconds=2)
    bench.kill("triggerer")
    bench.start("triggerer")
    bench.both_end_well(trains, waits, 300)
