"""What breaks, and what becomes of the jobs and their GPUs; docs/airflow.md has the table of outcomes."""

import os
import shutil
import signal
import subprocess
import time
from itertools import pairwise

import psutil
import pytest

from tests.e2e.bench import TTL_S, wait_for

IMAGE = os.environ.get("TEST_IMAGE", "python:3.11-slim")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def containers():
    """The job containers that the engine knows."""
    listing = ["docker", "ps", "--all", "--quiet", "--filter", "label=gpu-manager.dag_id"]
    return subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split()


needs_docker = pytest.mark.skipif(
    shutil.which("docker") is None
    or subprocess.run(["docker", "image", "inspect", IMAGE], capture_output=True).returncode != 0,
    reason=f"needs a Docker engine with the image {IMAGE}",
)


def job_processes(bench):
    """The processes of jobs that are alive."""
    found = []
    for process in bench.processes():
        try:
            if any(word.endswith("beat.py") for word in process.cmdline()):
                found.append(process)
        except psutil.Error:
            pass
    return found


def test_what_waits_starts_within_seconds_of_the_release(bench):
    first, second = bench.run("local_job", seconds=25), None
    first.wait_until_training()
    second = bench.run("local_job", seconds=2)
    second.wait_until_waiting()
    second.wait_until("success")
    assert "waiting for GPUs: place 1 in the queue, no server has room for 8 GPUs" in second.log()
    assert "beat on 0,1,2,3,4,5,6,7 of here" in second.log()


def test_a_freed_gpu_runs_the_next_process_soon(bench, record_property):
    """By the jobs' own clocks: from the release to the first line that the next job writes."""
    runs = [bench.run("local_job", seconds=10) for _ in range(4)]
    for run in runs:
        run.wait_until("success", 300)
    history = bench.manager.history(limit=100_000)
    released = {change["task_id"]: change["at"] for change in history if change["change"] == "released"}
    runs.sort(key=lambda run: run.beats()[0]["at"])
    took = [second.beats()[0]["at"] - released[first.lease_id] for first, second in pairwise(runs)]
    record_property("release_to_next_process_s", took)
    print("release to next process, seconds:", [round(seconds, 1) for seconds in took])
    assert min(took) > 0


def test_the_process_of_a_job_is_killed(bench):
    run = bench.run("local_job", seconds=8)
    run.wait_until_training()
    job_processes(bench)[0].kill()
    run.wait_until("success")
    assert len(run.processes()) == 2
    assert "exit code 137" in run.log(1)


def test_the_worker_of_a_python_task_is_killed(bench):
    run = bench.run("python_job", seconds=12)
    wait_for(run.beats, what="start")
    job = job_processes(bench)[0]
    supervisor = job.parent().parent()
    task = job.parent()
    for process in (supervisor, task, job):
        process.kill()
    run.wait_until("success", 200)
    assert len(run.processes()) == 2


def test_the_triggerer_is_killed(bench):
    trains = bench.run("local_job", seconds=20)
    trains.wait_until_training()
    waits = bench.run("local_job", seconds=2)
    waits.wait_until_waiting()
    bench.kill("triggerer")
    time.sleep(TTL_S + 2)  # nobody renews: the lease runs out, and its GPUs stay held
    bench.start("triggerer")
    trains.wait_until("success", 200)
    waits.wait_until("success", 200)
    assert len(trains.processes()) == len(waits.processes()) == 1


def test_the_scheduler_is_killed(bench):
    trains = bench.run("local_job", seconds=20)
    trains.wait_until_training()
    waits = bench.run("local_job", seconds=2)
    waits.wait_until_waiting()
    bench.kill("scheduler")
    time.sleep(3)
    bench.start("scheduler")
    trains.wait_until("success", 200)
    waits.wait_until("success", 200)
    assert len(trains.processes()) == len(waits.processes()) == 1


@pytest.mark.parametrize("state", ["failed", "success"])
def test_a_task_is_marked_while_it_trains(bench, state):
    run = bench.run("local_job", seconds=120)
    run.wait_until_training()
    run.mark(state)
    wait_for(lambda: not job_processes(bench), TTL_S + 30, "the end of the job")
    run.wait_until(state)


@pytest.mark.parametrize("state", ["failed", "success"])
def test_a_task_is_marked_while_it_waits(bench, state):
    trains = bench.run("local_job", seconds=25)
    trains.wait_until_training()
    waits = bench.run("local_job", seconds=120)
    waits.wait_until_waiting()
    waits.mark(state)
    wait_for(lambda: not bench.manager.queue(), TTL_S + 30, "leaving the queue")
    trains.wait_until("success")
    assert not waits.beats()


def test_a_task_is_cleared_while_it_trains(bench):
    run = bench.run("local_job", seconds=25)
    run.wait_until_training()
    run.clear()
    run.wait_until("success")
    assert len(run.processes()) == 1
    assert "the job was started before; going on with it" in run.log()


def test_a_task_is_cleared_while_it_waits(bench):
    trains = bench.run("local_job", seconds=25)
    trains.wait_until_training()
    waits = bench.run("local_job", seconds=2)
    waits.wait_until_waiting()
    waits.clear()
    waits.wait_until("success")
    assert len(waits.processes()) == 1


def test_a_dag_run_is_deleted_while_it_trains(bench):
    run = bench.run("local_job", seconds=120)
    run.wait_until_training()
    run.mark_run("failed")  # Airflow deletes no run that goes on
    run.delete()
    wait_for(lambda: not job_processes(bench), TTL_S + 30, "the end of the job")


def test_redis_is_restarted(bench):
    trains = bench.run("local_job", seconds=25)
    trains.wait_until_training()
    waits = bench.run("local_job", seconds=2)
    waits.wait_until_waiting()
    redis = next(process for process in bench.processes() if "redis" in process.name())
    redis.send_signal(signal.SIGKILL)
    time.sleep(5)
    bench.start_redis()
    trains.wait_until("success", 200)
    waits.wait_until("success", 200)
    assert len(trains.processes()) == len(waits.processes()) == 1


def test_the_server_of_a_job_is_gone_for_a_while(bench, ssh_server):
    run = bench.run("ssh_job", seconds=60)
    run.wait_until_training()
    ssh_server.stop()
    try:
        wait_for(lambda: run.task()["try_number"] == 2, 120, "a second try")
        assert len(bench.manager.leases()) == 1
    finally:
        ssh_server.start()
    run.wait_until("success", 200)
    assert len(run.processes()) == 1
    assert "its GPUs stay held" in run.log(1)


def test_an_ssh_job_of_a_task_marked_failed_is_stopped(bench):
    run = bench.run("ssh_job", seconds=120)
    run.wait_until_training()
    run.mark("failed")
    wait_for(lambda: not job_processes(bench), TTL_S + 30, "the end of the job")


@needs_docker
def test_a_container_runs_beside_no_other_through_clear_and_mark(bench):
    run = bench.run("docker_job", seconds=20)
    run.wait_until_training()
    run.clear()
    run.wait_until("success")
    assert len(run.processes()) == 1
    assert "beat on 0,1,2,3,4,5,6,7 of by-docker" in run.log()
    other = bench.run("docker_job", seconds=120)
    other.wait_until_training()
    other.mark("failed")
    wait_for(lambda: not containers(), TTL_S + 30, "the end of the container")


def test_what_can_never_be_granted_fails_at_once(bench):
    run = bench.run("local_job", gpus=9)
    run.wait_until("failed", 60)
    assert "9" in run.log()
    assert run.task()["try_number"] == 1


def test_a_job_that_fails_is_retried_with_a_new_lease(bench):
    run = bench.run("local_job", seconds=1, exit_code=3)
    run.wait_until("failed", 200)
    assert len(run.processes()) == 3
    assert "exit code 3" in run.log()
