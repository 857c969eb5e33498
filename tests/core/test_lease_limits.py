"""Why a lease is preempted where it is not for a request."""

from __future__ import annotations

from resource_manager.core.lease_limits import IDLE, LIMITS, in_words
from resource_manager.core.maintenance import is_window, preemptor_in_words


def test_a_limit_is_said_as_such_and_a_request_by_its_name() -> None:
    assert in_words(IDLE, "idle") == "preempted: its GPUs computed nothing for too long"
    assert in_words("dag/run/task", "dag.task") == "preempted for dag.task"


def test_a_limit_has_the_name_of_its_field_and_is_no_window() -> None:
    assert [preemptor_in_words(each) for each in LIMITS] == ["idle", "max_runtime", "requeue_after"]
    assert not any(map(is_window, LIMITS))
