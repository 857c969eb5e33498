"""Expected runtime of a request: stated, else learnt from runs of the same task, else unknown."""

from __future__ import annotations

import pytest

from resource_manager.core.changes import Expired, Granted, Released
from resource_manager.core.models import Lease, Placement, Request
from resource_manager.scheduling.runtime_history import (
    ENOUGH_RUNTIMES,
    KEPT_RUNTIMES,
    Confidence,
    Runtime,
    RuntimeHistory,
    stated_runtime,
    task_key,
)


def run(
    history: RuntimeHistory, task_id: str, seconds: float, outcome: str = "SUCCESS", **more: object
) -> None:
    request = Request(task_id, 2, **more)  # type: ignore[arg-type]
    history.add(Granted(Lease(request, (Placement("a", (0, 1)),), 1, 100.0), 100.0))
    history.add(Released(task_id, 1, 100.0 + seconds, outcome))


def test_the_learnt_runtime_is_the_median_of_the_task_s_runs() -> None:
    history = RuntimeHistory()
    for number, seconds in enumerate((100.0, 300.0, 200.0), 1):
        run(history, f"train_{number}", seconds)
        known = history.runtime_of(Request("train_77", 2))
        assert known is not None
        assert known.confidence is (Confidence.GOOD if number >= ENOUGH_RUNTIMES else Confidence.FAIR)
    assert history.runtime_of(Request("train_9", 2)) == Runtime(200.0, Confidence.GOOD)
    assert history.runtime_of(Request("other", 2)) is None


def test_leases_that_did_not_succeed_add_to_the_service_of_their_job() -> None:
    history = RuntimeHistory()
    assert history.attained_gpu_s(Request("t", 2)) == 0.0
    run(history, "t", 100.0, "FAILED")
    run(history, "t", 50.0, "PREEMPTED")
    run(history, "other", 7.0, "FAILED")
    assert history.attained_gpu_s(Request("t", 2)) == 2 * 150.0
    assert history.attained_gpu_s(Request("t#3", 2)) == 2 * 150.0  # as a replay names the third lease


@pytest.mark.parametrize("outcome", ["SUCCESS", ""])
def test_the_next_job_of_the_same_name_starts_without_service(outcome: str) -> None:
    history = RuntimeHistory()
    run(history, "t", 100.0, "FAILED")
    run(history, "t", 1.0, outcome)
    assert history.attained_gpu_s(Request("t", 2)) == 0.0


def test_an_expired_lease_and_a_gpu_fraction_count_as_service() -> None:
    history = RuntimeHistory()
    request = Request("t", 1, 500)
    history.add(Granted(Lease(request, (Placement("a", (0,)),), 1, 0.0), 0.0))
    history.add(Expired("t", 1, 600.0))
    assert history.attained_gpu_s(request) == 300.0


def test_attained_service_is_bounded_in_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource_manager.scheduling.runtime_history.MAX_TASKS", 2)
    history = RuntimeHistory()
    for name in ("a", "b", "c"):
        run(history, name, 10.0, "FAILED")
    assert [history.attained_gpu_s(Request(name, 2)) for name in "abc"] == [0.0, 20.0, 20.0]


def test_a_stated_runtime_takes_precedence() -> None:
    history = RuntimeHistory()
    run(history, "t1", 100.0)
    stated = Request("t2", 2, expected_runtime_s=5.0)
    assert history.runtime_of(stated) == stated_runtime(stated) == Runtime(5.0, Confidence.GOOD)
    assert stated_runtime(Request("t2", 2)) is None


def test_runs_of_one_dag_and_task_are_one_task() -> None:
    labels = {"instance": "i", "dag_id": "d", "task_id": "t", "run_id": "r1"}
    assert task_key(Request("x", labels=labels)) == "i/d/t"
    history = RuntimeHistory()
    run(history, "instance:d/r1/t", 60.0, labels=labels)
    assert history.runtime_of(Request("y", labels={**labels, "run_id": "r2"})) == Runtime(
        60.0, Confidence.FAIR
    )
    assert history.runtime_of(Request("y", labels={**labels, "instance": "staging"})) is None


def test_failed_cancelled_and_expired_runs_are_ignored() -> None:
    history = RuntimeHistory()
    run(history, "t1", 5.0, "FAILED")
    run(history, "t2", 5.0, "CANCELLED")
    run(history, "t5", 5.0, "")
    history.add(Granted(Lease(Request("t3", 2), (Placement("a", (0, 1)),), 7, 0.0), 0.0))
    history.add(Expired("t3", 7, 50.0))
    history.add(Released("never seen", 1, 50.0))
    assert history.runtime_of(Request("t4", 2)) is None
    assert history.live_count == 0


def test_a_lease_granted_before_the_history_counts_too() -> None:
    history = RuntimeHistory()
    history.take_over([Lease(Request("t1", 2), (Placement("a", (0, 1)),), 3, 10.0)])
    history.add(Released("t1", 3, 40.0, "SUCCESS"))
    assert history.runtime_of(Request("t2", 2)) == Runtime(30.0, Confidence.FAIR)


def test_only_the_last_runs_of_the_last_tasks_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource_manager.scheduling.runtime_history.MAX_TASKS", 2)
    history = RuntimeHistory()
    for _ in range(KEPT_RUNTIMES):
        run(history, "a", 1_000.0)
    for _ in range(KEPT_RUNTIMES):
        run(history, "a", 10.0)
    assert history.runtime_of(Request("a", 2)) == Runtime(10.0, Confidence.GOOD)
    run(history, "b", 1.0)
    run(history, "c", 1.0)
    assert history.runtime_of(Request("a", 2)) is None
    assert history.runtime_of(Request("b", 2)) == history.runtime_of(Request("c", 2)) is not None
