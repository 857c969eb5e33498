"""Airflow's own operators under leases on a real Airflow: run, and their workers and triggerers killed."""

from pathlib import Path

import psutil
import pytest

from tests.e2e.bench import TIMEOUT_FACTOR, Bench, wait_for
from tests.e2e.servers import ssh_server

__all__ = ["ssh_server"]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900 * TIMEOUT_FACTOR)]


@pytest.fixture(scope="module")
def airflow(tmp_path_factory, ssh_server):
    settings = {
        "AIRFLOW_CONN_TEST_SSH": ssh_server.connection,
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    with Bench(tmp_path_factory.mktemp("airflow"), ssh_port=ssh_server.port, **settings) as bench:
        bench.switch_the_reconciler_on()
        yield bench


def kill_the_worker(bench, run):
    """Kill the task of the first try and its supervisor."""
    noted = Path(f"{bench.ledger}-worker-{run.dag_id}")
    task = psutil.Process(int(wait_for(lambda: noted.exists() and noted.read_text(), what="the worker")))
    for process in (task.parent(), task):
        process.kill()


@pytest.mark.parametrize("kind", ["bash", "python", "ssh"])
def test_a_killed_worker_leaves_no_gpu_with_two_processes(bench, kind):
    run = bench.run(f"kept_{kind}")
    wait_for(run.beats, what="the job")
    kill_the_worker(bench, run)
    if kind == "ssh":
        wait_for(
            lambda: run.task()["try_number"] == 2 and run.task()["state"] == "deferred",
            180,
            "the wait of a retry",
        )
        lives = len(run.beats())
        wait_for(lambda: len(run.beats()) > lives, what="another beat")
        assert [lease["server_name"] for lease in bench.manager.leases()] == ["by-ssh"]
    else:
        wait_for(lambda: len(run.processes()) == 2, 240, "a second process")
    run.finish()
    run.wait_until("success", 300)
    assert len(run.processes()) == 2


def test_a_killed_triggerer_loses_no_lease_of_a_deferred_operator(bench):
    run = bench.run("kept_deferrable")
    run.wait_until_deferred()
    [before] = wait_for(bench.manager.leases, what="the lease")
    bench.kill("triggerer")
    bench.start("triggerer")
    Path(f"{bench.ledger}-file-{run.run_id}").touch()
    run.wait_until("success", 300)
    releases = [change for change in bench.history("released") if change["task_id"] == run.lease_id]
    assert [change["fencing_token"] for change in releases] == [before["fencing_token"]]


def test_twenty_operators_of_providers_run_under_leases(bench):
    run = bench.run("kept_of_providers")
    run.wait_until("success", 600)
    asked = {
        grant["labels"]["task_id"] for grant in bench.grants() if grant["labels"]["dag_id"] == run.dag_id
    }
    tasks = {name for name in run.states() if name.endswith(".job")}
    assert len(tasks) >= 20
    from tests.airflow.any_operators import OPERATORS

    empty = {
        f"group_{number}.job" for number, each in enumerate(OPERATORS) if each.__name__ == "EmptyOperator"
    }
    assert tasks - asked == empty  # Airflow gives it to no worker
