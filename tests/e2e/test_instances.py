"""Two real Airflow instances, production and staging, on one store: neither changes the other's leases.

Staging's processes name another inventory file, which changes nothing: the cluster is the stored one.
"""

import json
import subprocess
import sys

import pytest

from tests.e2e.bench import Bench, Run, wait_for
from tests.eventually import TIMEOUT_FACTOR

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

NO_SSH = 1
"""Port of the inventory's ssh server, which these tests do not use."""

TTL_S = str(round(60 * TIMEOUT_FACTOR))


@pytest.fixture(scope="module")
def production(tmp_path_factory):
    """Airflow whose API server generates its instance id."""
    with Bench(tmp_path_factory.mktemp("production"), NO_SSH, TEST_TTL_S=TTL_S) as bench:
        yield bench


@pytest.fixture(scope="module")
def staging(tmp_path_factory, production):
    """Airflow with a configured id, on production's store, whose jobs write into the same ledger."""
    other = tmp_path_factory.mktemp("other") / "servers.toml"
    other.write_text(production.inventory.read_text())
    settings = {
        "GPU_MANAGER_STORE": production.store_url,
        "GPU_MANAGER_REDIS_URL": production.store_url,
        "GPU_MANAGER_INVENTORY": str(other),
        "GPU_MANAGER_INSTANCE": "staging",
        "LEDGER": str(production.ledger),
        "TEST_TTL_S": TTL_S,
    }
    with Bench(tmp_path_factory.mktemp("staging"), NO_SSH, **settings) as bench:
        bench.ledger, bench.store_url = production.ledger, production.store_url
        other.write_text('[[servers]]\nname = "elsewhere"\ngpus = 1\ncpus = 1\n')
        yield bench


def train(bench, run_id, gpus):
    """Start a run of `local_job` with this id; return it once its job runs."""
    path = "/dags/local_job"
    wait_for(lambda: bench.api.knows("local_job"), what="the reading of local_job")
    bench.api.call("PATCH", path, {"is_paused": False})
    body = {"dag_run_id": run_id, "logical_date": None, "conf": {"gpus": gpus, "seconds": 3600}}
    bench.api.call("POST", f"{path}/dagRuns", body)
    run = Run(bench, "local_job", run_id)
    run.wait_until_training()
    return run


def reconcile_by_command(bench, *words):
    """Run `gpu-manager reconcile` on this Airflow's machine, without its environment."""
    user, password = bench.api.login
    login = ("--airflow-url", bench.url, "--airflow-user", user, "--airflow-password", password)
    store = bench.environment["GPU_MANAGER_STORE"]
    command = [sys.executable, "-m", "resource_manager.cli", "--store", store, "reconcile", *login, "--json"]
    return subprocess.run([*command, *words], capture_output=True, text=True)


def goes_on(run, lease):
    """Assert that the job still writes, under the same lease."""
    before = len(run.beats())
    wait_for(lambda: len(run.beats()) > before + 2, what=f"more of {run.lease_id}")
    held = run.bench.manager.status_of(run.lease_id)
    assert held is not None
    assert held["fencing_token"] == lease["fencing_token"]
    assert len(run.processes()) == 1


def looked_after(done):
    """Return the leases that staging's reconciler acted on; it leaves production's two unchanged."""
    assert done["other_instances"] == 2
    return {action["task_id"] for action in done["actions"]}


def test_an_airflow_never_ends_the_leases_of_another(production, staging):
    assert staging.instance == "staging"
    assert production.instance not in ("", "staging")
    stored = production.manager.cluster()

    # Tasks with the same names hold different GPUs at the same time.
    ours, theirs = train(production, "nightly", 2), train(staging, "nightly", 2)
    unknown_to_staging = train(production, "ours-alone", 2)
    leases = {lease["task_id"]: lease for lease in production.manager.leases()}
    assert set(leases) == {
        f"{production.instance}:local_job/nightly/job",
        f"{production.instance}:local_job/ours-alone/job",
        "staging:local_job/nightly/job",
    }
    held = [gpu for lease in leases.values() for gpu in lease["gpu_ids"]]
    assert len(held) == len(set(held)) == 6
    assert leases[theirs.lease_id]["labels"]["instance"] == "staging"

    # Staging's reconciler only counts production's leases, also that of a run that staging does not have.
    run_id = staging.api.trigger("gpu_reconcile")
    wait_for(lambda: staging.api.run_state("gpu_reconcile", run_id) == "success", 300, "staging's reconciler")
    log = staging.api.log("gpu_reconcile", run_id, "reconcile")
    assert "leases and requests of other Airflow instances, left unchanged: 2" in log
    assert ours.lease_id not in log
    assert unknown_to_staging.lease_id not in log

    # So does the command, which reads the instance id of the Airflow at the address.
    done = reconcile_by_command(staging)
    assert looked_after(json.loads(done.stdout)) <= {theirs.lease_id}
    done = reconcile_by_command(staging, "--instance", production.instance)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"has the instance id 'staging', not '{production.instance}': correct" in done.stderr
    for run in (ours, theirs, unknown_to_staging):
        goes_on(run, leases[run.lease_id])

    # Ending, clearing and deleting in staging ends only staging's leases, by the listener and the trigger.
    theirs.mark("failed")
    wait_for(lambda: production.manager.status_of(theirs.lease_id) is None, 120, "the end in staging")
    theirs.wait_until("failed")  # otherwise the scheduler may end the run after it was cleared
    theirs.clear()
    wait_for(lambda: len(theirs.processes()) == 2, 200, "the cleared job in staging")
    theirs.mark_run("failed")
    wait_for(lambda: production.manager.status_of(theirs.lease_id) is None, 120, "the end of staging's run")
    theirs.delete()
    for run in (ours, unknown_to_staging):
        goes_on(run, leases[run.lease_id])

    # Production identifies its leases by the id in its Variable, in a task and when a user ends one.
    ours.finish()
    ours.wait_until("success")
    unknown_to_staging.mark("failed")
    wait_for(lambda: not production.manager.leases(), 120, "the end in production")
    assert production.manager.cluster() == stored
    production.check_ledger()
    production.check_free()
