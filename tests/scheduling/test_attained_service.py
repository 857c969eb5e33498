"""Service that a job attained with leases that did not end it."""

from __future__ import annotations

import pytest

from resource_manager.core.changes import Expired, Granted, Released
from resource_manager.core.models import Lease, Placement, Request
from resource_manager.scheduling.attained_service import AttainedService


def run(
    history: AttainedService, task_id: str, seconds: float, outcome: str = "SUCCESS", **more: object
) -> None:
    request = Request(task_id, 2, **more)  # type: ignore[arg-type]
    history.add(Granted(Lease(request, (Placement("a", (0, 1)),), 1, 100.0), 100.0))
    history.add(Released(task_id, 1, 100.0 + seconds, outcome))


def test_leases_that_did_not_succeed_add_to_the_service_of_their_job() -> None:
    history = AttainedService()
    assert history.attained_gpu_s(Request("t", 2)) == 0.0
    run(history, "t", 100.0, "FAILED")
    run(history, "t", 50.0, "PREEMPTED")
    run(history, "other", 7.0, "FAILED")
    assert history.attained_gpu_s(Request("t", 2)) == 2 * 150.0
    assert history.attained_gpu_s(Request("t#3", 2)) == 2 * 150.0  # as a replay names the third lease


@pytest.mark.parametrize("outcome", ["SUCCESS", ""])
def test_the_next_job_of_the_same_name_starts_without_service(outcome: str) -> None:
    history = AttainedService()
    run(history, "t", 100.0, "FAILED")
    run(history, "t", 1.0, outcome)
    assert history.attained_gpu_s(Request("t", 2)) == 0.0


def test_an_expired_lease_and_a_gpu_fraction_count_as_service() -> None:
    history = AttainedService()
    request = Request("t", 1, 500)
    history.add(Granted(Lease(request, (Placement("a", (0,)),), 1, 0.0), 0.0))
    history.add(Expired("t", 1, 600.0))
    assert history.attained_gpu_s(request) == 300.0


def test_attained_service_is_bounded_in_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource_manager.scheduling.attained_service.MAX_TASKS", 2)
    history = AttainedService()
    for name in ("a", "b", "c"):
        run(history, name, 10.0, "FAILED")
    assert [history.attained_gpu_s(Request(name, 2)) for name in "abc"] == [0.0, 20.0, 20.0]


def test_a_lease_granted_before_the_history_counts_too() -> None:
    history = AttainedService()
    history.take_over([Lease(Request("t1", 2), (Placement("a", (0, 1)),), 3, 10.0)])
    history.add(Released("t1", 3, 40.0, "FAILED"))
    history.add(Released("never seen", 1, 50.0))
    assert history.attained_gpu_s(Request("t1", 2)) == 2 * 30.0
    assert history.live_count == 0
