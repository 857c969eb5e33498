"""Airflow's own operators under leases on a real Airflow: run, and their workers and triggerers killed."""

import json
from itertools import cycle, islice
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from resource_manager.cli import main
from tests.builders import present
from tests.e2e import pool_dag
from tests.e2e.bench import Bench, wait_for
from tests.e2e.servers import ssh_server
from tests.e2e.test_faults import needs_docker
from tests.sql_servers import Postgres, running_sql

__all__ = ["ssh_server"]

pytestmark = [pytest.mark.e2e, needs_docker, pytest.mark.timeout(900)]

IN_WORKER = ("bash", "python", "mapped", "sensor", "deferrable")
ELSEWHERE = ("ssh", "docker")
SERVER = """
[[servers]]
name = "{kind}"
gpus = 8
gpu_type = "{kind}"
cpus = 64
"""
SERVERS = "".join(SERVER.replace("{kind}", kind) for kind in IN_WORKER)
SERVERS += SERVER.replace("{kind}", "ssh") + 'address = "127.0.0.1:{ssh_port}"\n'
SERVERS += SERVER.replace("{kind}", "docker") + 'address = "{docker}"\n'


@pytest.fixture(scope="module")
def database():
    """URL of a database for Airflow: SQLite is locked for too long with so many tasks at once."""
    with running_sql(Postgres) as server:
        server.psql("CREATE DATABASE airflow")
        yield f"postgresql+psycopg2://postgres@127.0.0.1:{server.port}/airflow"


@pytest.fixture(scope="module")
def airflow(tmp_path_factory, database, ssh_server):
    settings = {
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": database,
        "AIRFLOW_CONN_TEST_SSH": ssh_server.connection,
        "AIRFLOW_CONN_FS_DEFAULT": json.dumps({"conn_type": "fs"}),
        "AIRFLOW__CORE__PARALLELISM": "20",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    home = tmp_path_factory.mktemp("airflow")
    bench = Bench(home, ssh_port=ssh_server.port, servers=SERVERS, **settings)
    pool_of_tasks = bench.dags / "pool_of_tasks.py"
    pool_of_tasks.write_text(pool_dag.source(300))
    words = ["convert-dags", str(pool_of_tasks), "--pool", "gpu=1", "--write"]
    assert "300 tasks converted, 3 not" in CliRunner().invoke(main, words).stderr
    with bench:
        bench.switch_the_reconciler_on()
        yield bench


def runs_of_all_kinds(bench):
    """Return a run of each kind and one more that waits for its GPUs, by kind; a mapped one has two tasks."""
    kinds = (*IN_WORKER, *ELSEWHERE)
    first = {kind: bench.run(f"kept_{kind}") for kind in kinds}
    wait_for(lambda: len(bench.manager.leases()) == len(kinds) + 1, 240, "a lease for each kind")
    second = {kind: bench.run(f"kept_{kind}") for kind in kinds}
    first["mapped"].map_indexes = second["mapped"].map_indexes = range(2)
    return first, second


def may_go_on(bench, *runs):
    """Let the deferrable operator go on behind its deferral."""
    for run in runs:
        Path(f"{bench.ledger}-file-{run.run_id}").touch()


def kill_the_worker(bench, run):
    """Kill the task of the first try and its supervisor."""
    noted = Path(f"{bench.ledger}-worker-{run.run_id}")
    task = psutil.Process(int(wait_for(lambda: noted.exists() and noted.read_text(), what="the worker")))
    for process in (present(task.parent()), task):
        process.kill()


def begins(run, processes=1, timeout_s=240):
    wait_for(lambda: len(run.processes()) >= processes, timeout_s, f"process {processes} of {run.dag_id}")


def all_end_well(runs):
    for run in runs:
        run.finish()
    for run in runs:
        run.wait_until("success", 300)


def test_a_killed_worker_leaves_no_gpu_with_two_processes(bench):
    first, second = runs_of_all_kinds(bench)
    may_go_on(bench, *first.values(), *second.values())
    for kind, run in first.items():
        begins(run, 2 if kind == "mapped" else 1)
    for run in first.values():
        kill_the_worker(bench, run)
    for kind in IN_WORKER:  # the retry, or the one that waited
        both = first[kind], second[kind]
        before = 2 if kind == "mapped" else 1
        wait_for(lambda: sum(len(run.processes()) for run in both) > before, 240, f"another {kind}")  # noqa: B023
    for kind in ELSEWHERE:
        first[kind].wait_until_deferred(try_number=2)
    bench.kill("triggerer")
    bench.start("triggerer")
    for kind in ELSEWHERE:
        lives = len(first[kind].beats())
        wait_for(lambda run=first[kind], lives=lives: len(run.beats()) > lives + 50, what="more beats")
        assert len(first[kind].processes()) == 1
        assert not second[kind].beats()
    all_end_well([*first.values(), *second.values()])
    assert {kind: len(run.processes()) for kind, run in first.items()} == {
        kind: 3 if kind == "mapped" else 2 for kind in first
    }
    assert {kind: len(run.processes()) for kind, run in second.items()} == {
        kind: 2 if kind == "mapped" else 1 for kind in second
    }


def test_a_killed_triggerer_loses_no_lease_and_no_wait(bench):
    first, second = runs_of_all_kinds(bench)
    first["deferrable"].wait_until_deferred()
    for kind, run in first.items():
        if kind != "deferrable":
            begins(run, 2 if kind == "mapped" else 1)
    for kind, run in second.items():
        if kind != "mapped":
            run.wait_until_waiting()
    before = {lease["task_id"]: lease["fencing_token"] for lease in bench.manager.leases()}
    bench.kill("triggerer")
    bench.start("triggerer")
    may_go_on(bench, *first.values(), *second.values())
    begins(first["deferrable"])
    assert {lease["task_id"]: lease["fencing_token"] for lease in bench.manager.leases()} == before
    all_end_well([*first.values(), *second.values()])
    for kind in first:
        for run in (first[kind], second[kind]):
            assert len(run.processes()) == (2 if kind == "mapped" else 1)


def test_twenty_operators_of_providers_run_under_leases(bench):
    run = bench.run("kept_of_providers")
    run.wait_until("success", 600)
    asked = {
        grant["labels"]["task_id"] for grant in bench.grants() if grant["labels"]["dag_id"] == run.dag_id
    }
    tasks = {name for name in run.states() if name.startswith("job_")}
    assert len(tasks) >= 20
    from tests.airflow.any_operators import OPERATORS

    empty = {f"job_{number}" for number, each in enumerate(OPERATORS) if each.__name__ == "EmptyOperator"}
    assert tasks - asked == empty  # Airflow gives it to no worker


def test_three_hundred_tasks_of_a_pool_run_converted(bench):
    bench.api.call("POST", "/pools", {"name": "gpu", "slots": 8})  # for those that could not be converted
    run = bench.run("pool_of_tasks")
    run.wait_until("success", 800)
    # Airflow 3.0 now and then sends a task to a worker before it is stored as queued, and it fails unseen.
    pages = [f"{run.path}/taskInstances?limit=100&offset={start}" for start in range(0, 400, 100)]
    tasks = [task for page in pages for task in bench.api.call("GET", page)["task_instances"]]
    assert len(tasks) > 300
    assert sum(task["try_number"] > 1 for task in tasks) <= 3
    granted = [grant for grant in bench.grants() if grant["labels"]["dag_id"] == run.dag_id]
    asked = {grant["labels"]["task_id"]: grant["gpus"] for grant in granted}
    shapes = islice(cycle(pool_dag.shapes()), 300)
    assert len(asked) == sum(not shape.startswith("EmptyOperator") for shape in shapes)
    assert set(asked.values()) == {1, 2}
