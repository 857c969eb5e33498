"""Idle release: a lease that was measured to compute nothing is preempted; what is unknown is not idle."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resource_manager.core.changes import Outcome
from resource_manager.core.teams import Team, Teams
from resource_manager.fleet.server_use import use_of
from resource_manager.manager.use_results import idle_in_words
from tests.agent.reporting import gpu, process, server
from tests.builders import redefine
from tests.fleet.test_receiving import Service


def service_of(**more: Any) -> Service:
    return Service(server(), **{"idle_after_s": 60.0, "idle_action": "release", **more})


def lease_of(service: Service, lease_id: str = "t") -> dict[str, Any] | None:
    return next((dict(each) for each in service.manager.leases() if each["task_id"] == lease_id), None)


def idle_for(service: Service, seconds: int) -> None:
    for _ in range(seconds // 10 + 1):
        service.report(gpu(0), gpu(1))


def test_an_idle_lease_is_preempted_as_idle_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    service = service_of()
    token = service.allocate("t", 1, preempt_grace=30)["fencing_token"]
    idle_for(service, 60)
    lease = lease_of(service)
    assert lease is not None
    assert (lease["state"], lease["preempted_by"], lease["until"]) == (
        "PREEMPTING",
        "idle",
        service.clock.now + 30,
    )
    assert lease["reason"] == "preempted: its GPUs computed nothing for too long"
    assert "is preempted: its GPUs computed nothing for too long" in caplog.text
    idle_for(service, 10)
    assert service.kinds.count("preempting") == 1
    service.manager.release("t", fencing_token=token, outcome=Outcome.PREEMPTED)
    assert (service.manager.leases(), service.manager.queue()) == ([], [])
    assert service.manager.history()[-1]["outcome"] == "IDLE"


def test_its_request_waits_again_at_the_end_of_the_queue_if_it_asked_for_that() -> None:
    service = service_of()
    service.allocate("t", 2, on_idle="requeue")
    service.clock.now += 1
    service.manager.submit("next", 2, 1)
    idle_for(service, 60)
    service.manager.release("t", outcome=Outcome.PREEMPTED)
    service.report(gpu(0), gpu(1))  # they are clean
    assert [lease["task_id"] for lease in service.manager.leases()] == ["next"]
    [entry] = service.manager.queue()
    assert (entry["task_id"], entry["labels"]["restart_count"]) == ("t", "1")


def test_a_lease_that_nobody_ends_is_free_after_its_grace() -> None:
    service = service_of()
    service.allocate("t", 2, ttl=36_000)
    idle_for(service, 60)
    idle_for(service, 70)
    service.manager.expire_and_schedule()
    assert service.manager.leases() == []


@pytest.mark.parametrize(
    ("cluster", "team", "own", "is_released"),
    [
        ("warn", None, "", False),
        ("warn", "release", "", True),
        ("release", "warn", "", False),
        ("release", "warn", "release", True),
        ("release", "release", "warn", False),
    ],
)
def test_request_team_and_cluster_say_what_is_done(
    cluster: str, team: str | None, own: str, is_released: bool
) -> None:
    service = service_of(idle_action=cluster)
    redefine(service.manager, teams=Teams((Team("a", idle_action=team),)))
    service.allocate("t", 1, team="a", idle_action=own)
    idle_for(service, 60)
    assert ("preempting" in service.kinds) is is_released


def test_its_owner_is_told_five_minutes_before() -> None:
    service = service_of(idle_after_s=600.0)
    service.allocate("t", 1)

    def words() -> str:
        return idle_in_words((gpu for row in use_of(service.manager) for gpu in row["gpus"]), "t")

    idle_for(service, 280)
    assert words() == ""
    idle_for(service, 10)
    assert words() == "its GPUs compute nothing: unless they do, they are released in 300 s"


RUNNING = process(lease_id="t", lease_source="environment")
UNSEEN = process(lease_source="unreadable")
IDLE_GPU = st.sampled_from(
    [{}, {"utilization_percent": 0, "processes": [RUNNING]}, {"utilization_percent": None}]
)
OTHER_GPU = st.sampled_from(
    [
        {"utilization_percent": None, "processes": None},
        {"utilization_percent": None, "processes": [RUNNING]},
        {"utilization_percent": None, "processes": [UNSEEN]},
        {"utilization_percent": 50, "processes": [RUNNING]},
        {"utilization_percent": 50, "processes": None},
        None,
    ]
)
"""What a GPU reports that computes, or of which nobody knows; None: it is missing in the report."""


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(IDLE_GPU | OTHER_GPU, IDLE_GPU | OTHER_GPU, st.sampled_from([5.0, 10.0, 20.0, 45.0])),
        max_size=25,
    )
)
def test_a_lease_is_never_released_without_measures_of_all_its_gpus_for_all_of_the_time(
    reports: list[tuple[Any, Any, float]],
) -> None:
    """A gap of more than three intervals says nothing of the time between, and the time begins again."""
    service = service_of()
    service.allocate("t", 2)
    idle_since: float | None = None
    for first, second, after_s in reports:
        known = [gpu(number, **more) for number, more in enumerate((first, second)) if more is not None]
        service.report(*known, after_s=after_s)
        now = service.clock.now
        is_idle = len(known) == 2 and all(_computes_nothing(more) for more in (first, second))
        if not is_idle:
            idle_since = None
        elif idle_since is None or after_s > 30.0:
            idle_since = now
        lease = lease_of(service)
        assert lease is not None
        assert bool(lease["preempted_by"]) == (idle_since is not None and now - idle_since >= 60.0)
        if lease["preempted_by"]:
            return


def _computes_nothing(more: dict[str, Any]) -> bool:
    utilization, processes = more.get("utilization_percent", 0), more.get("processes", [])
    return utilization == 0 or processes == []
