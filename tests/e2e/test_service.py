"""Airflow on the REST service: every operator's calls go over HTTP to a real `gpu-manager serve`."""

import time

import pytest

from resource_manager.jobs.launchers.base import job_key
from tests.e2e.bench import wait_for
from tests.e2e.servers import Service

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture
def served(bench, service):
    """Stack with the REST service on its store."""
    service.start(bench)
    yield bench
    service.kill()


def test_a_job_waits_and_trains_through_the_service(served, service):
    first, second = served.one_trains_one_waits("service_job")
    first.finish()
    second.wait_until_training()
    assert served.manager.status_of(second.lease_id)["owner"] == Service.USER
    service.kill()
    time.sleep(3)  # the job runs on without renewals
    service.start(served)
    second.finish()
    second.wait_until("success")
    assert "waiting for GPUs: position 1 in the queue, no server with 8 local: " in second.log()
    assert len(second.processes()) == 1


def test_a_sensor_and_a_lease_go_through_the_service(served):
    first = served.run("local_job")
    first.wait_until_training()
    run = served.run("service_lease")
    wait_for(lambda: run.states()["available"] == "deferred", what="a sensor that waits")
    first.finish()
    run.wait_until("success")
    log = run.log(task_id="gpu_lease.step")
    grants = [change["lease"] for change in served.history("granted")]
    [lease] = [lease for lease in grants if run.run_id in lease["request"]["lease_id"]]
    assert "on 0,1,2,3,4,5,6,7 of here" in log
    key = job_key(lease["request"]["lease_id"], lease["fencing_token"])
    assert f"memfd:{key} (deleted)" in log, "the task's process is known by its lease"
    assert lease["request"]["owner"] == Service.USER


def test_a_job_marked_failed_is_stopped_through_the_service(served):
    run = served.run("service_job")
    run.wait_until_training()
    run.mark("failed")
    wait_for(lambda: served.manager.status_of(run.lease_id) is None, 60, "the end of the lease")
