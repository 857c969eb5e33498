"""What becomes of a preempted lease."""

from __future__ import annotations

import pytest

from resource_manager.core.changes import (
    Cancelled,
    Granted,
    JobPlaced,
    MaintenanceChanged,
    Quarantined,
    Queued,
    Released,
)
from resource_manager.core.maintenance import Window
from resource_manager.core.models import JobPlace
from resource_manager.core.teams import Team
from resource_manager.scheduling import lease_steps
from resource_manager.scheduling.preemption.requeueing import restarts_of
from resource_manager.scheduling.queue.orders import fifo
from resource_manager.scheduling.reasons.lease_ends import began_at
from tests.scheduling.preemption.test_preempting import cancel
from tests.scheduling.shared_cluster import Shared


def test_the_victim_waits_at_its_old_place_in_time_with_its_server_preferred() -> None:
    shared = Shared(Team("vision", 2), Team("nlp", 2))
    shared.submit("other", 4, team="nlp")
    shared.submit("x", 3, team="nlp", labels={"model": "bert"})
    queued_at = shared.now
    shared.release("other", "SUCCESS")
    granted = shared.state.leases["x"]
    assert (granted.queued_at, granted.sequence) == (queued_at, 2)
    shared.submit("mine", 2, team="vision")
    shared.submit("later", 4, team="nlp")
    shared.release("x")
    pending = shared.state.pending["x"]
    assert (pending.queued_at, pending.sequence) == (queued_at, 2)
    assert pending.request.preferred_node == "a"
    more = {"restart_count": "1", "ran_s": "3", "preempted_after_s": "4"}
    assert pending.request.labels == {"model": "bert", **more}
    assert restarts_of(pending.request.labels) == 1
    assert [entry.lease_id for entry in fifo(shared.state, shared.now)] == ["x", "later"]


def test_a_job_goes_on_from_what_the_leases_of_this_try_ran_and_no_failed_one_before() -> None:
    """A try that failed after nine hours counted, too: the next one was expected to end at once."""
    shared = Shared(Team("vision", 4))
    shared.submit("x", 4, team="nlp")
    shared.now += 32_400.0
    shared.release("x", "FAILED")
    shared.submit("x", 4, team="nlp")
    ran_s = 0.0
    for number, seconds in enumerate((1800.0, 600.0)):
        begun = shared.state.leases["x"].granted_at
        shared.now += seconds
        shared.submit(f"mine{number}", 4, team="vision")
        shared.release("x")
        ran_s += shared.now - begun
        shared.release(f"mine{number}", "SUCCESS")
    lease = shared.state.leases["x"]
    assert began_at(lease) == lease.granted_at - ran_s


def test_a_victim_that_never_waited_keeps_the_time_of_its_grant() -> None:
    shared = Shared(Team("vision", 4))
    shared.submit("x", 4, team="nlp")
    began = shared.now
    shared.submit("mine", 4, team="vision")
    shared.release("x")
    assert shared.state.pending["x"].queued_at == began


def test_a_job_that_was_told_before_its_preemption_was_taken_back_waits_again() -> None:
    shared = Shared(Team("vision", 4))
    shared.submit("x", 4, team="nlp")
    shared.submit("mine", 4, team="vision")
    cancel(shared, "mine")
    shared.submit("next", 4, team="nlp")
    assert [type(change) for change in shared.release("x")] == [Released, Queued, Granted]
    assert set(shared.state.leases) == {"x"}  # at its old place
    shared.release("x")
    assert set(shared.state.leases) == {"next"}  # it was taken from nobody: it is over


def test_what_ended_too_late_and_what_a_window_takes_are_not_taken_back() -> None:
    shared = Shared(Team("vision", 4), letters="ab")
    shared.submit("x", 4, team="nlp", preempt_grace_s=1.0)
    shared.submit("y", 4, team="nlp")
    shared.do([MaintenanceChanged((Window(1, ("b",), shared.now, shared.now + 100.0, preempt=True),), 0.0)])
    shared.tick()
    shared.submit("mine", 4, team="vision")
    shared.tick(5.0)
    assert shared.state.leases["x"].quarantined
    assert cancel(shared, "mine") == [Cancelled("mine", shared.now)]


def test_a_lease_held_beyond_its_grace_is_quarantined_and_the_preemptor_goes_on_waiting() -> None:
    shared = Shared(Team("vision", 4))
    shared.submit("x", 4, team="nlp", preempt_grace_s=10.0)
    shared.submit("mine", 4, team="vision")
    assert shared.tick(10.0) == []
    (late,) = shared.tick(1.0)
    assert isinstance(late, Quarantined)
    kind, detail = shared.refusal("mine")
    assert (kind, detail) == (
        "awaiting_release",
        "x vnpm on a is still held after its preemption: release it once its job is known to be gone",
    )
    shared.do(lease_steps.renew(shared.state, "x", shared.now))
    assert shared.state.leases["x"].quarantined
    shared.release("x", "")
    assert set(shared.state.leases) == {"mine"}
    assert not shared.state.pending


@pytest.mark.parametrize(
    ("more", "becomes"), [({}, ["mine"]), ({"quarantine": True}, ["x"]), ({"places": 1}, ["x"])]
)
def test_a_lease_held_beyond_its_grace_ends_with_its_ttl_unless_a_job_may_live(
    more: dict[str, bool], becomes: list[str]
) -> None:
    """As of a worker that was killed after the grace: its GPUs were nobody's to free."""
    shared = Shared(Team("vision", 4))
    quarantine = "quarantine" in more
    shared.submit("x", 4, team="nlp", preempt_grace_s=10.0, ttl_s=60.0, quarantine=quarantine)
    if "places" in more:
        token = shared.state.leases["x"].fencing_token
        shared.do([JobPlaced("x", token, (JobPlace("local"),), shared.now)])
    shared.submit("mine", 4, team="vision")
    shared.tick(20.0)
    shared.do(lease_steps.renew(shared.state, "x", shared.now))
    shared.tick(59.0)
    assert list(shared.state.leases) == ["x"]
    shared.tick(2.0)
    assert list(shared.state.leases) == becomes


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "9" * 10])
def test_a_label_that_is_no_count_counts_as_none(text: str) -> None:
    assert restarts_of({"restart_count": text}) == 0
    assert restarts_of({"restart_count": "9" * 9}) == 999_999_999
