"""Lines about a wait in the task's log."""

import asyncio
import json
import re
import time
import warnings
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from resource_manager.airflow import GPUTrainingOperator
    from resource_manager.airflow.shared_manager import SharedManager
    from resource_manager.airflow.task_trigger.events import EndState, GrantState
    from resource_manager.airflow.task_trigger.waits import GrantTrigger
    from resource_manager.airflow.version_compat import AirflowException
    from resource_manager.airflow.wait_log import (
        DeadlineLog,
        WaitLog,
        describe_start,
        describe_wait,
        describe_waiting,
    )


from tests.airflow.asking import ask
from tests.airflow.tasks import TASK, context_of, fire


def test_the_log_line_of_a_wait_has_position_reason_and_start():
    status: dict[str, Any] = {"position": 2, "reason": "1 ahead in the queue"}
    assert describe_waiting(status) == "waiting for GPUs: position 2 in the queue, 1 ahead in the queue"
    now = time.time()
    status["estimated_start"] = {"at": now, "confidence": "few data"}
    assert re.search(r"; should start about \d\d:\d\d:\d\d \S+ \(few data\)$", describe_waiting(status))
    status["estimated_start"] |= {"earliest": now - 1, "latest": None, "after": "dag.train k7wd"}
    assert re.search(
        r"about \d\d:\d\d:\d\d \S+ \(\d\d:\d\d:\d\d to later, few data\), when dag.train k7wd ends$",
        describe_waiting(status),
    )
    status["estimated_start"] = {"at": None, "confidence": "unknown", "detail": "nobody knows"}
    assert describe_waiting(status).endswith("; start unknown: nobody knows")
    status["reason"] = "nobody knows"
    assert describe_waiting(status).endswith("nobody knows; start unknown"), "the same is said once"


def test_a_start_on_another_day_has_its_date_and_its_zone(monkeypatch):
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        at = {"at": 1_800_000_000.0, "earliest": 1_799_990_000.0, "latest": 1_800_100_000.0}
        words = "2027-01-15 09:00 CET (2027-01-15 06:13 to 2027-01-16 12:46, few data)"
        assert describe_start({**at, "confidence": "few data"}) == f"; should start about {words}"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_deadline_at_risk_is_one_line_and_so_is_its_end():
    lines = []
    log = DeadlineLog(SimpleNamespace(warning=lambda text, *values: lines.append(text % values)))
    for late_end in (None, 7200.0, 7260.0, None, None):
        log.see({"deadline_at": 3600.0, "late_end": late_end})
    assert lines == [
        "the deadline 1970-01-01T01:00Z is at risk: the task should end by 1970-01-01T02:00Z",
        "the deadline 1970-01-01T01:00Z is not at risk any more",
    ]


def test_a_wait_is_logged_again_only_if_it_changed():
    log = WaitLog()
    full, second = ("no_capacity", "largest free is 3"), "position 2"
    assert log.due(*full, second, 0.0)
    assert not log.due(*full, second, 1e9), "nothing changed"
    assert log.due(*full, "position 1", 1e9 + 1), "the position, long after"
    assert not log.due(*full, "position 0", 1e9 + 300), "the position alone, too soon"
    assert not log.due("no_capacity", "largest free is 2", "x", 1e9 + 30), "figures, too soon"
    assert log.due("no_capacity", "largest free is 1", "y", 1e9 + 90)
    assert log.due("behind_queue", "reserved for a", "z", 1e9 + 91), "another kind, at once"
    assert log.reasons == ["largest free is 1", "reserved for a"]
    for number in range(20):
        log.due(("price", "quota")[number % 2], f"r{number}", "l", 2e9)
    assert log.reasons == ["r15", "r16", "r17", "r18", "r19"]
    assert describe_wait(192.0, ["a", "b"]) == "waited 3 min for GPUs: a; then: b"
    assert describe_wait(4.0, []) == "waited 4 s for GPUs"


def test_the_reasons_of_a_wait_reach_the_log_of_the_task(manager, fast_triggers, said_by):
    lines = said_by(GPUTrainingOperator)
    for number in range(4):
        manager.submit(f"holds{number}", 8, 8)
    ask(manager, TASK, 8)
    event = fire(GrantTrigger(TASK), lambda: manager.release_resources("holds1"))
    full = "no server with 8 GPUs: none is free anywhere"
    assert event == json.loads(json.dumps(event))
    assert (event["state"], event["reasons"]) == (GrantState.GRANTED, [full])
    lease = manager.status_of(TASK.lease_id)
    waited_s = lease["granted_at"] - lease["queued_at"]
    operator = GPUTrainingOperator(task_id="t", gpus=8, command="true", max_wait=timedelta(seconds=1))
    ended = {"state": EndState.JOB_ENDED, "exit_code": 0, "waited_s": waited_s, "reasons": event["reasons"]}
    operator.execute_ended(context_of(), ended)
    assert re.fullmatch(rf"waited \d+ s for GPUs: {full}", lines[-1])
    manager.release_resources(TASK.lease_id)
    for number in range(4):
        manager.submit(f"again{number}", 8, 8)
    ask(manager, TASK, 8)
    with pytest.raises(AirflowException, match=f"no GPUs within max_wait = 0:00:01: {full}"):
        operator.execute_ended(context_of(), {**ended, "state": EndState.MAX_WAIT_EXCEEDED})


def test_a_pending_request_has_an_estimated_start(manager):
    for number in range(4):
        manager.submit(f"holds{number}", 8, 8, expected_runtime=600.0)
    ask(manager, TASK, 8)

    async def look():
        shared = SharedManager.of("gpu_manager_default")
        await shared.catch_up(TASK.lease_id)
        return await shared.waiting(TASK.lease_id)

    status = asyncio.run(look())
    assert status["estimated_start"]["at"] == pytest.approx(manager.leases()[0]["granted_at"] + 600, abs=1)
    assert "; should start about " in describe_waiting(status)
