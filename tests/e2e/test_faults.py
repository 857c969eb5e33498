"""Failures of components, and their effect on jobs and GPUs; docs/airflow.md has the table of outcomes."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.builders import present
from tests.e2e.bench import TTL_S, wait_for

IMAGE = os.environ.get("TEST_IMAGE", "python:3.11-slim")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def containers(bench):
    """Return the containers of this Airflow's jobs; other stacks may use the same engine."""
    own = f"label=gpu-manager.instance={bench.instance}"
    listing = ["docker", "ps", "--all", "--quiet", "--filter", "label=gpu-manager.dag_id", "--filter", own]
    return subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split()


needs_docker = pytest.mark.skipif(
    shutil.which("docker") is None
    or subprocess.run(["docker", "image", "inspect", IMAGE], capture_output=True).returncode != 0,
    reason=f"needs a Docker engine with the image {IMAGE}",
)


def job_processes(bench):
    """Return the live processes of jobs."""
    found = []
    for process in bench.processes():
        try:
            if any(word.endswith("beat.py") for word in process.cmdline()):
                found.append(process)
        except psutil.Error:
            pass
    return found


def clear_while_it_trains(run):
    """Clear its task; return once the second try has taken over the job.

    The first try's trigger goes on until Airflow cancels it, and would end the job in its place.
    """
    run.clear()
    run.wait_until_deferred(try_number=2)
    wait_for(lambda: "started by an earlier execution; watching it" in run.log(), what="the second one")


def test_the_process_of_a_job_is_killed(bench):
    run = bench.run("local_job")
    run.wait_until_training()
    job_processes(bench)[0].kill()
    wait_for(lambda: len(run.processes()) == 2, what="a second job")
    run.finish()
    run.wait_until("success")
    assert len(run.processes()) == 2
    assert "exit code 137" in run.log(1)


def test_the_worker_of_a_python_task_is_killed(bench):
    run = bench.run("python_job")
    wait_for(run.beats, what="start")
    job = job_processes(bench)[0]
    supervisor = job.parent().parent()
    task = job.parent()
    for process in (supervisor, task, job):
        process.kill()
    wait_for(lambda: len(run.processes()) == 2, 200, "a second try")
    run.finish()
    run.wait_until("success")


@pytest.mark.parametrize("state", ["failed", "success"])
def test_a_python_task_is_marked_while_it_runs(bench, state):
    """Its GPUs are granted again only once its process and all its children are gone."""
    run = bench.run("python_job")
    wait_for(run.beats, what="start")
    waits = bench.run("local_job")
    waits.wait_until_waiting()
    run.mark(state)
    waits.wait_until_training()
    assert not any(beat["at"] > waits.beats()[0]["at"] for beat in run.beats())
    waits.finish()
    waits.wait_until("success")


@pytest.mark.parametrize("place", ["asked", "collecting", "collected"])
def test_the_worker_of_a_job_is_killed_before_or_after_the_job(bench, place):
    """A job needs a worker to ask for GPUs and to collect its end; it runs once all the same."""
    run = bench.run("lingering_job", linger=place)
    if place != "asked":
        run.wait_until_training()
        run.finish()
    noted = Path(f"{bench.ledger}-{place}")
    number = wait_for(lambda: noted.exists() and noted.read_text(), 180, f"lingering when {place}")
    task = psutil.Process(int(number))
    for process in (present(task.parent()), task):
        process.kill()
    if place == "asked":
        run.wait_until_deferred(try_number=2)
        run.finish()
    run.wait_until("success", 300)
    assert len(run.processes()) == 1


def test_the_triggerer_is_killed(bench):
    trains, waits = bench.one_trains_one_waits(seconds=2)
    wait_for(lambda: trains.xcom("job_log_place")["offset"], what="a note of how far the log is")
    bench.kill("triggerer")
    time.sleep(TTL_S + 2)  # without renewals the lease expires, and its GPUs stay allocated
    bench.start("triggerer")
    bench.both_end_well(trains, waits)
    assert trains.log().count("the job begins") == 1


def test_a_triggerer_sleeps_until_another_has_taken_its_tasks_and_wakes(bench):
    """Then both run the triggers of the same tasks, until Airflow takes them from the one that slept."""
    trains, waits = bench.one_trains_one_waits(seconds=2)
    sleepers = bench.suspend("triggerer")
    bench.start("triggerer", "--skip-serve-logs")

    def state():
        return bench.manager.status_of(trains.lease_id)["state"]

    wait_for(lambda: state() == "ERROR", what="a lease that nobody renews")
    wait_for(lambda: state() == "RUNNING", 180, "a triggerer that renews it")
    for process in sleepers:
        process.resume()
    bench.both_end_well(trains, waits)
    bench.kill("triggerer")
    bench.start("triggerer")


def test_the_scheduler_is_killed(bench):
    trains, waits = bench.one_trains_one_waits(seconds=2)
    bench.kill("scheduler")
    time.sleep(3)
    bench.start("scheduler")
    bench.both_end_well(trains, waits)


@pytest.mark.parametrize("state", ["failed", "success"])
def test_a_task_is_marked_while_it_trains(bench, state):
    run = bench.run("local_job")
    run.wait_until_training()
    run.mark(state)
    wait_for(lambda: not job_processes(bench), TTL_S + 30, "the end of the job")
    run.wait_until(state)


@pytest.mark.parametrize("state", ["failed", "success"])
def test_a_task_is_marked_while_it_waits(bench, state):
    trains, waits = bench.one_trains_one_waits()
    waits.mark(state)
    wait_for(lambda: not bench.manager.queue(), TTL_S + 30, "leaving the queue")
    trains.finish()
    trains.wait_until("success")
    assert not waits.beats()


def test_a_task_is_cleared_while_it_trains(bench):
    run = bench.run("local_job")
    run.wait_until_training()
    clear_while_it_trains(run)
    run.finish()
    run.wait_until("success")
    assert len(run.processes()) == 1


def test_a_task_is_cleared_while_it_waits(bench):
    trains, waits = bench.one_trains_one_waits(seconds=2)
    waits.clear()
    waits.wait_until_deferred(try_number=2)
    trains.finish()
    waits.wait_until("success")
    assert len(waits.processes()) == 1


def test_a_dag_run_is_deleted_while_it_trains(bench):
    run = bench.run("local_job")
    run.wait_until_training()
    run.mark_run("failed")  # Airflow does not delete an unfinished run
    run.delete()
    wait_for(lambda: not job_processes(bench), TTL_S + 30, "the end of the job")


def test_redis_is_restarted(bench):
    trains, waits = bench.one_trains_one_waits(seconds=2)
    redis = next(process for process in bench.processes() if "redis" in process.name())
    redis.send_signal(signal.SIGKILL)
    time.sleep(5)
    bench.start_redis()
    bench.both_end_well(trains, waits)


def test_the_server_of_a_job_is_gone_for_a_while(bench, ssh_server):
    run = bench.run("ssh_job")
    run.wait_until_training()
    ssh_server.stop()
    try:
        wait_for(lambda: run.task()["try_number"] >= 2, 120, "a second try")
        assert len(bench.manager.leases()) == 1
    finally:
        ssh_server.start()
    run.finish()
    run.wait_until("success")
    assert len(run.processes()) == 1
    assert "its GPUs stay allocated" in run.log(1)


def test_an_ssh_job_of_a_task_marked_failed_is_stopped(bench):
    run = bench.run("ssh_job")
    run.wait_until_training()
    run.mark("failed")
    wait_for(lambda: not job_processes(bench), TTL_S + 30, "the end of the job")


@needs_docker
def test_clear_and_mark_never_run_two_containers_at_once(bench):
    run = bench.run("docker_job")
    run.wait_until_training()
    clear_while_it_trains(run)
    run.finish()
    run.wait_until("success")
    assert len(run.processes()) == 1
    assert "beat on 0,1,2,3,4,5,6,7 of by-docker" in run.log()
    other = bench.run("docker_job")
    other.wait_until_training()
    other.mark("failed")
    wait_for(lambda: not containers(bench), TTL_S + 30, "the end of the container")


def test_a_request_that_can_never_be_granted_fails_at_once(bench):
    run = bench.run("local_job", gpus=9)
    run.wait_until("failed", 60)
    assert "9" in run.log()
    assert run.task()["try_number"] == 1


def test_a_job_that_fails_is_retried_with_a_new_lease(bench):
    run = bench.run("local_job", seconds=1, exit_code=3)
    run.wait_until("failed", 200)
    # A try that Airflow itself loses (see docs/airflow.md) leaves its job to the next try, which starts none.
    collected = [number for number in (1, 2, 3) if "ended with exit code 3" in run.log(number)]
    assert len(run.processes()) == len(collected) >= 2
    assert collected[-1] == 3
