"""DAGs of 2,000 mapped tasks, on PostgreSQL: they lock SQLite for longer than Airflow's scheduler waits."""

import pytest

from tests.e2e.bench import Bench, wait_for
from tests.e2e.test_coming import coming, withdrawn
from tests.sql_servers import Postgres, running_sql

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def airflow(tmp_path_factory):
    with running_sql(Postgres) as database:
        database.psql("CREATE DATABASE airflow")
        url = f"postgresql+psycopg2://postgres@127.0.0.1:{database.port}/airflow"
        home = tmp_path_factory.mktemp("airflow")
        with Bench(home, AIRFLOW__DATABASE__SQL_ALCHEMY_CONN=url) as bench:
            bench.switch_the_reconciler_on()
            yield bench


def test_two_thousand_mapped_tasks_are_announced_once_and_leave_nothing_behind(bench):
    never, run = bench.run("coming_mapped"), bench.run("coming_many")

    def announced():
        entries = bench.history("announced")
        copies = [(each["request"]["labels"]["dag_id"], each["copies"]) for each in entries]
        return [each for each in copies if each[0] in (never.dag_id, run.dag_id)]

    wait_for(lambda: len(announced()) == 2, 120, "the announcements")
    never.wait_until("failed", 600)
    wait_for(lambda: "job" in withdrawn(bench, [never]), 60, "the withdrawal of 2,000 mapped tasks, as one")
    assert withdrawn(bench, [never])["job"] == "the run has ended"

    def requests():
        return [
            each for each in (*bench.manager.leases(), *bench.manager.queue()) if run.dag_id in each["name"]
        ]

    wait_for(lambda: len(requests()) > 1, 300, "the requests of the first ones")
    assert coming(bench) == {}, "served by the first, whichever it is"
    run.mark_run("failed")
    wait_for(lambda: not requests(), 300, "the end of what the run requests for")
    assert sorted(announced()) == [("coming_many", 2000), ("coming_mapped", 2000)], "once each"
    assert coming(bench) == {}
