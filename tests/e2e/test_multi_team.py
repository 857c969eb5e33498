"""Airflow's own teams, since 3.3: the team that owns a DAG's bundle is the team of its leases."""

import json

import pytest

from tests.e2e.bench import Bench

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


class OfVision(Bench):
    """Bench whose DAGs belong to the team `vision`, which has to exist before they are read."""

    def spawn(self, name, command, **options):
        if name == "airflow":
            self.command("db", "migrate")
            self.command("teams", "create", "vision")
        return super().spawn(name, command, **options)


@pytest.fixture(scope="module")
def airflow(tmp_path_factory):
    home = tmp_path_factory.mktemp("airflow")
    bundle = {
        "name": "of-vision",
        "classpath": "airflow.dag_processing.bundles.local.LocalDagBundle",
        "kwargs": {"path": str(home / "dags")},
        "team_name": "vision",
    }
    settings = {
        "AIRFLOW__CORE__MULTI_TEAM": "True",
        "AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST": json.dumps([bundle]),
    }
    with OfVision(home, **settings) as bench:
        bench.start(
            "triggerer", "--team-name", "vision", "--skip-serve-logs"
        )  # the usual one has other triggers
        yield bench


def test_the_lease_of_a_task_is_its_teams(bench):
    run = bench.run("local_job", seconds=1)
    run.wait_until("success")
    assert [(request["lease_id"], request["team"]) for request in bench.grants()] == [
        (run.lease_id, "vision")
    ]
