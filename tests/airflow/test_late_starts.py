"""Jobs that Airflow would begin too late to end before a maintenance window."""

import warnings
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from resource_manager.airflow import GPUTrainingOperator
    from resource_manager.airflow.decorators.gpu import GPUDecoratedOperator

from resource_manager import GPUResourceManager, MemoryStore, Settings
from resource_manager.core.maintenance import as_text
from resource_manager.jobs.launchers import LauncherUnreachableError
from resource_manager.manager.maintenance_windows import WindowForm
from tests.airflow.tasks import TASK, again, asked, context_of, deferral, fire, until
from tests.builders import Clock, nodes

BEGIN, END = 3600.0, 7200.0
RUNTIME = 3500
"""A job that is granted its GPUs until 100 ends before the window; one that begins later does not."""

GRANTED = {"state": "granted", "waited_s": 50.0, "reasons": []}


@pytest.fixture
def clock():
    clock = Clock()
    clock.now = 0.0
    return clock


@pytest.fixture
def late(connect, gpu_launcher, fast_triggers, notes, wanted, clock):
    """Return a manager with a clock of the test, on two servers of 8 GPUs with a window on the first."""
    gpu_launcher.runs("train")
    settings = Settings(store="memory://")
    fleet = [replace(node, address=f"10.0.0.{node.server_id}") for node in nodes("ab", 8)]
    own = GPUResourceManager(
        settings, store=MemoryStore(clock=clock), inventory=fleet, cluster={"min_gpus": 1}
    )
    connect(own)
    add_window(own, "a")
    return own


def add_window(manager, *servers, begin=BEGIN, end=END):
    times = {"from": as_text(begin), "until": as_text(end)}
    manager.add_maintenance(WindowForm.of(servers=list(servers), **times))


def training(**more):
    asked = {"gpus": 8, "expected_runtime": RUNTIME, **more}
    return GPUTrainingOperator(task_id="t", command="train", **asked)


def function_task(calls, **more):
    def function():
        calls.append(1)
        return 42

    asked = {"gpus": 8, "expected_runtime": RUNTIME, **more}
    return GPUDecoratedOperator(task_id="t", python_callable=function, op_args=[], op_kwargs={}, **asked)


def waits(call):
    """Take a step of a function's task that leaves its worker until GPUs are granted."""
    assert deferral(call).method_name == "execute_granted"


def waits_again(manager, trigger):
    """Run the trigger until its request is pending."""
    until(again(trigger), lambda: manager.status_of(TASK.lease_id)["state"] == "WAITING")


def begins(gpu_launcher, trigger, jobs=1):
    """Run the trigger until it watches its job, and so many were started."""
    until(again(trigger), lambda: len(gpu_launcher.jobs) == jobs and gpu_launcher.running())


def waited_until_50(operator, manager, clock, *held):
    """Let the task wait behind leases that end at 50; return its trigger."""
    for server in held:
        manager.submit(f"holds {server}", 8, server=server, expected_runtime=50)
    trigger = deferral(lambda: operator.execute(context_of())).trigger
    clock.now = 50.0
    manager.release("holds a")
    assert [entry["server_name"] for entry in manager.leases() if "holds" not in entry["task_id"]] == ["a"]
    return trigger


def ends_of(manager):
    ended = (entry for entry in manager.history() if entry["change"] == "released")
    return [(entry.get("outcome"), entry["at"]) for entry in ended]


@pytest.mark.parametrize("limit", [{}, {"max_runtime": RUNTIME}])
def test_a_job_that_would_begin_too_late_waits_again_in_its_try(late, gpu_launcher, clock, capsys, limit):
    trigger = waited_until_50(training(**limit), late, clock, "a", "b")
    clock.now = 101.0
    late.submit("later", 8, expected_runtime=9000)
    waits_again(late, trigger)
    assert gpu_launcher.jobs == []
    assert ends_of(late)[-1] == ("NOT_STARTED", 101.0)
    assert (
        "the job begins too late to end before the maintenance "
        "from 1970-01-01T01:00Z until 1970-01-01T02:00Z; waiting again"
    ) in capsys.readouterr().out
    first, second = late.queue()
    assert (first["labels"].get("restart_count"), first["queued_at"]) == (None, 0.0)
    assert "maintenance from 1970-01-01T01:00Z" in first["reason"]
    assert second["task_id"] == "later"
    clock.now = END
    late.expire_and_schedule()
    begins(gpu_launcher, trigger)
    assert [job.environment["GPU_RESTART_COUNT"] for job in gpu_launcher.jobs] == ["0"]


def test_a_job_that_begins_in_time_keeps_its_lease(late, gpu_launcher, clock):
    trigger = waited_until_50(training(), late, clock, "a", "b")
    clock.now = 100.0
    begins(gpu_launcher, trigger)


def test_a_limit_that_ends_a_job_before_the_window_lets_it_begin(late, gpu_launcher, clock):
    trigger = waited_until_50(training(requeue_after=3000), late, clock, "a", "b")
    clock.now = 101.0
    begins(gpu_launcher, trigger)


def test_it_begins_at_once_where_no_window_is_ahead(late, gpu_launcher, clock):
    trigger = waited_until_50(training(), late, clock, "a", "b")
    clock.now = 101.0
    late.release("holds b")
    begins(gpu_launcher, trigger)
    assert [job.environment["GPU_SERVER"] for job in gpu_launcher.jobs] == ["b"]


def test_a_gang_is_given_back_as_a_whole(late, gpu_launcher, clock):
    operator = training(nodes=2, launcher="ssh")
    late.submit("holds b", 8, server="b", expected_runtime=50)
    trigger = asked(operator)
    clock.now = 50.0
    late.release("holds b")
    assert len(late.leases()[0]["members"]) == 2
    clock.now = 101.0
    waits_again(late, trigger)
    assert gpu_launcher.jobs == late.leases() == []


def test_a_job_that_runs_already_is_watched(late, gpu_launcher, clock):
    trigger = waited_until_50(training(), late, clock, "a", "b")
    begins(gpu_launcher, trigger)
    for clock.now in (1000.0, BEGIN + 1.0):
        late.renew(TASK.lease_id)
        begins(gpu_launcher, trigger)
    assert gpu_launcher.stopped == []


@pytest.mark.parametrize(("begin", "gives_back"), [(55.0, True), (61.0, False)])
def test_a_runtime_that_is_not_stated_counts_for_an_open_window_only(
    late, gpu_launcher, clock, begin, gives_back
):
    operator = training(expected_runtime=None, server="b")
    late.submit("holds b", 8, server="b", expected_runtime=50)
    trigger = asked(operator)
    clock.now = 50.0
    late.release("holds b")
    add_window(late, "b", begin=begin)
    clock.now = 60.0
    if gives_back:
        waits_again(late, trigger)
        assert gpu_launcher.jobs == []
    else:
        begins(gpu_launcher, trigger)


def test_a_server_that_cannot_be_asked_for_the_job_keeps_the_lease(
    late, launch_by, gpu_launcher, notes, clock
):
    def silent(key):
        raise LauncherUnreachableError("no route to a")

    operator = training(unreachable_timeout=timedelta(0))
    trigger = waited_until_50(operator, late, clock, "a", "b")
    begins(gpu_launcher, trigger)
    clock.now = 101.0
    launch_by(lambda place: Mock(wraps=gpu_launcher, status=silent))
    notes.clear()  # a new try
    event = fire(again(trigger))
    assert event["detail"].startswith("no route to a; its GPUs stay allocated")
    assert late.status_of(TASK.lease_id)["state"] == "RUNNING"


@pytest.mark.parametrize("limit", [{}, {"max_runtime": RUNTIME}])
def test_a_function_that_would_begin_too_late_is_not_called(late, clock, limit):
    calls: list[Any] = []
    operator = function_task(calls, **limit)
    waited_until_50(operator, late, clock, "a", "b")
    clock.now = 101.0
    waits(lambda: operator.execute_granted(context_of(), GRANTED))
    assert calls == []
    assert ends_of(late)[-1] == ("NOT_STARTED", 101.0)
    clock.now = END
    late.expire_and_schedule()
    assert operator.execute_granted(context_of(), GRANTED) == 42
    assert calls == [1]
