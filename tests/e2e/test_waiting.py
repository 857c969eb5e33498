"""Tasks that wait for GPUs in a real Airflow: their cost, and their delay after a release."""

import os
from datetime import datetime
from itertools import pairwise
from statistics import median
from typing import Any

import pytest
import redis

from tests.e2e.bench import wait_for
from tests.e2e.test_faults import needs_docker
from tests.eventually import TIMEOUT_FACTOR

WAITING = int(os.environ.get("WAITING_JOBS", "200"))
QUEUED_S = 10.0
"""Longest time from the start of a task's worker to its request in the queue."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900 + 3 * WAITING)]


def test_a_pending_request_starts_within_seconds_of_the_release(bench):
    first, second = bench.one_trains_one_waits(seconds=2)
    line = "waiting for GPUs: position 1 in the queue, no server with 8 local: "
    wait_for(lambda: second.log().count(line) == 2, what="a line of the worker, and one of the trigger")
    first.finish()
    second.wait_until("success")
    assert " for GPUs: no server with 8 local: none is free anywhere" in second.log(), "kept after the wait"
    assert "beat on 0,1,2,3,4,5,6,7 of here" in second.log()


@pytest.mark.parametrize("launcher", ["local", "ssh", pytest.param("docker", marks=needs_docker)])
def test_a_released_gpu_soon_runs_the_next_process(bench, launcher, record_property):
    """Measured by the jobs' clocks: from one's last line, by way of the grant, to the next one's first."""
    runs = [bench.run(f"{launcher}_job", seconds=6) for _ in range(11)]
    for run in runs:
        run.wait_until("success", 600)
    grants = {each["lease"]["request"]["lease_id"]: each["at"] for each in bench.history("granted")}
    jobs = sorted(
        ((grants[run.lease_id], [beat["at"] for beat in run.beats()]) for run in runs),
        key=lambda job: job[1][0],
    )
    pairs = list(pairwise(jobs))
    figures = {
        "grant_to_first_line_s": [beats[0] - granted for _, (granted, beats) in pairs],
        "last_line_to_next_grant_s": [granted - before[-1] for (_, before), (granted, _) in pairs],
        "last_line_to_next_first_line_s": [beats[0] - before[-1] for (_, before), (_, beats) in pairs],
    }
    for name, seconds in figures.items():
        assert min(seconds) > 0
        record_property(f"{launcher}_{name}", seconds)
        values = " ".join(f"{value:.2f}" for value in sorted(seconds))
        print(f"{launcher} {name}: p50 {median(seconds):.2f},", values)


def test_a_sensor_waits_for_free_gpus_and_allocates_nothing(bench):
    first, sensor = bench.one_trains_one_waits("sensor_job")
    assert not bench.manager.queue()
    first.finish()
    sensor.wait_until("success")
    assert "the GPUs are free on here" in sensor.log()
    assert sensor.ended_at() > first.beats()[-1]["at"]
    assert sensor.lease_id not in {request["lease_id"] for request in bench.grants()}


def test_a_sensor_for_more_than_any_server_has_fails_at_once(bench):
    sensor = bench.run("sensor_job", gpus=9)
    sensor.wait_until("failed")
    assert "gpus must be between" in sensor.log()


def test_mapped_tasks_that_wait_cost_no_slot_and_three_connections(bench, record_property):
    """Slots are counted by Airflow's task states, connections by Redis' client list.

    `WAITING_JOBS=1000` tries more.
    """
    # After a restart of Redis nothing is granted for a while.
    wait_for(
        lambda: bench.manager.allocate_resources("holder", 8, 8, gpu_types=["local"], ttl=7200),
        what="a lease on all GPUs",
    )
    run = bench.run("waiting_jobs")
    wait_for(lambda: run.count("deferred") == WAITING, 3 * WAITING, f"{WAITING} tasks deferred", 1.0)
    wait_for(lambda: len(bench.manager.queue()) == WAITING, 60, f"{WAITING} requests in the queue")
    assert run.count("running", "queued", "scheduled") == 0
    started = started_at(run)
    queued_s = [
        request["queued_at"] - started[int(request["task_id"].rpartition("/")[2])]
        for request in bench.manager.queue()
    ]
    record_property("start_to_queued_s", queued_s)
    all_queued_s = max(request["queued_at"] for request in bench.manager.queue()) - min(started.values())
    record_property("first_start_to_last_queued_s", round(all_queued_s, 1))
    print(f"start of a task -> its request in the queue: p50 {median(queued_s):.2f}, max {max(queued_s):.2f}")
    assert max(queued_s) <= QUEUED_S * TIMEOUT_FACTOR
    with redis.Redis.from_url(bench.store_url) as server:
        clients = {client["addr"].rpartition(":")[2] for client in server.client_list()}
    connections = clients & bench.ports_of("triggerer")
    record_property("redis_connections_of_the_triggerer", len(connections))
    print(WAITING, "tasks wait; connections of the triggerer to Redis:", len(connections))
    assert len(connections) <= 3, "one that waits for changes, one for reasons of waits, one for all else"
    run.mark_run("failed")
    wait_for(lambda: not bench.manager.queue(), 120, "leaving the queue")
    assert bench.manager.release_resources("holder")


def started_at(run):
    """Return when Airflow started each of the mapped tasks, by map index, in seconds since the epoch."""
    found: dict[str, Any] = {}
    while len(found) < WAITING:
        tasks = run.bench.api.call("GET", f"{run.path}/taskInstances?limit=50&offset={len(found)}")
        for task in tasks["task_instances"]:
            found[task["map_index"]] = datetime.fromisoformat(task["start_date"]).timestamp()
    return found
