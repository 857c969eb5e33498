"""First requests of tasks while the manager does not answer: the try goes on once it does."""

import logging
import warnings
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from resource_manager.airflow import (
        GPUAllocateOperator,
        GPUReleaseOperator,
        GPUTrainingOperator,
    )
    from resource_manager.airflow.decorators.gpu import GPUDecoratedOperator
    from resource_manager.airflow.in_worker import released
    from resource_manager.airflow.sensors import GPUAvailableSensor
    from resource_manager.airflow.version_compat import AirflowException, AirflowFailException

from resource_manager import GPUResourceManager, MemoryStore, Settings
from resource_manager.core.teams import Team, Teams
from resource_manager.errors import (
    CorruptStateError,
    LockTimeoutError,
    StateLostError,
    StoreRefusedError,
    StoreUnavailableError,
)
from resource_manager.jobs.launchers import LauncherUnreachableError
from resource_manager.manager.results import ReleaseResult
from resource_manager.rest.client_errors import ServiceUnavailableError
from resource_manager.storage.outage import outage
from tests.airflow.asking import ask
from tests.airflow.tasks import TASK, again, asked, context_of, deferral, fire, until
from tests.builders import redefine

OUTAGES = [
    StoreUnavailableError("no answer"),
    ServiceUnavailableError(503, "no answer"),
    LockTimeoutError(5.0),
]
RAN: list[Any] = []


def function():
    RAN.append(1)
    return 42


OPERATORS = {
    "training": lambda **more: GPUTrainingOperator(task_id="t", gpus=2, command="train", **more),
    "cleared training": lambda **more: GPUTrainingOperator(
        task_id="t", gpus=2, command="train", restart_on_clear=True, **more
    ),
    "allocation": lambda **more: GPUAllocateOperator(task_id="t", gpus=2, **more),
    "@task.gpu": lambda **more: GPUDecoratedOperator(
        task_id="t", gpus=2, python_callable=function, op_args=[], op_kwargs={}, **more
    ),
}


@contextmanager
def out(manager, monkeypatch, error, *calls):
    """Let these calls of the manager fail inside."""

    def unreachable(*_, **__):
        raise error

    with monkeypatch.context() as outage:
        for call in calls or ("submit", "status_of", "explain", "queue", "expire_and_schedule"):
            outage.setattr(manager, call, unreachable)
        yield


def resumed(operator, deferred, context):
    """Take the step as Airflow does: with the event that the trigger fires once the manager answers."""
    step = getattr(operator, deferred.method_name)
    return step(context, **deferred.kwargs, event=fire(deferred.trigger))


def has_gone_on(operator, manager, gpu_launcher, take):
    """Take a step that must end with the lease granted, and what the operator does with it."""
    if isinstance(operator, GPUTrainingOperator):
        left = deferral(take)
        assert left.method_name == "execute_ended"
        assert fire(left.trigger)["exit_code"] == 0
        assert [job.command[-1] for job in gpu_launcher.jobs] == ["train"]
    elif isinstance(operator, GPUAllocateOperator):
        assert take()["state"] == "RUNNING"
    else:
        assert take() == 42
        assert RAN == [1]
    granted = [change for change in manager.history() if change["change"] == "granted"]
    assert len(granted) == 1


@pytest.mark.parametrize("error", OUTAGES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("name", OPERATORS)
def test_a_first_request_outlasts_an_outage_in_its_try(
    manager, gpu_launcher, fast_triggers, monkeypatch, said_by, name, error
):
    RAN.clear()
    operator = OPERATORS[name]()
    context, said = context_of(try_number=2, max_tries=1), said_by(operator, logging.WARNING)
    with out(manager, monkeypatch, error):
        left = deferral(lambda: operator.execute(context))
        again = deferral(lambda: asked_again(operator, left, context))
    assert manager.leases() == manager.queue() == []
    line = f"the GPU manager does not answer; going on once it does: {error}"
    assert [words for words in said if "Task Runner" not in words] == [line] * 2
    has_gone_on(operator, manager, gpu_launcher, lambda: resumed(operator, again, context))


def asked_again(operator, deferred, context):
    """Take the step without its trigger: reads may be answered again before writes are."""
    step = getattr(operator, deferred.method_name)
    return step(context, **deferred.kwargs, event=deferred.trigger.event)


@pytest.mark.parametrize("name", OPERATORS)
def test_an_answer_that_was_lost_is_asked_for_again(manager, gpu_launcher, fast_triggers, monkeypatch, name):
    """The request arrived: the repetition finds the lease that it was granted."""
    RAN.clear()
    operator, context, submit = OPERATORS[name](), context_of(max_tries=1), manager.submit

    def losing(*asked, **more):
        submit(*asked, **more)
        raise StoreUnavailableError("no answer")

    with monkeypatch.context() as outage:
        outage.setattr(manager, "submit", losing)
        left = deferral(lambda: operator.execute(context))
    has_gone_on(operator, manager, gpu_launcher, lambda: resumed(operator, left, context))


@pytest.mark.parametrize("is_before", [True, False])
def test_a_cleared_task_ends_no_request_of_its_own(
    manager, gpu_launcher, fast_triggers, monkeypatch, is_before
):
    """The answer to its request is lost: the repetition ends neither its place in the queue nor its grant."""
    gpu_launcher.runs()
    operator, submit = OPERATORS["cleared training"](), manager.submit
    if is_before:
        deferral(lambda: operator.execute(context_of(max_tries=0)))
    before = [lease["fencing_token"] for lease in manager.leases()]
    cleared = context_of(try_number=2, max_tries=1)

    def losing(*asked, **more):
        submit(*asked, **more)
        raise StoreUnavailableError("no answer")

    with monkeypatch.context() as outage:
        outage.setattr(manager, "submit", losing)
        left = deferral(lambda: operator.execute(cleared))
    [requested] = manager.leases()
    assert requested["fencing_token"] not in before
    deferral(lambda: resumed(operator, left, cleared))
    assert manager.leases() == [requested]


@pytest.mark.parametrize("name", OPERATORS)
def test_a_connection_that_cannot_be_opened_is_waited_for(
    manager, gpu_launcher, fast_triggers, connect_by, name
):
    RAN.clear()
    operator, context, tried = OPERATORS[name](), context_of(max_tries=1), []

    def opened(hook):
        tried.append(hook)
        if len(tried) < 3:
            raise AirflowException("connection 'x': no answer") from StoreUnavailableError("no answer")
        return manager

    connect_by(opened)
    left = deferral(lambda: operator.execute(context))
    has_gone_on(operator, manager, gpu_launcher, lambda: resumed(operator, left, context))


@pytest.mark.parametrize("max_wait", [None, timedelta(minutes=5)])
@pytest.mark.parametrize("name", OPERATORS)
def test_the_wait_for_an_answer_ends_with_max_wait(manager, gpu_launcher, monkeypatch, name, max_wait):
    operator = OPERATORS[name](max_wait=max_wait)
    with out(manager, monkeypatch, OUTAGES[0]):
        left = deferral(lambda: operator.execute(context_of(max_tries=1)))
    assert left.timeout == max_wait


@pytest.mark.parametrize(
    "error", [CorruptStateError("it says why"), outage("it says why", StoreRefusedError)]
)
@pytest.mark.parametrize("name", OPERATORS)
def test_an_error_that_is_no_outage_uses_up_the_try(manager, gpu_launcher, monkeypatch, name, error):
    """So does a store that refuses its user, before anything runs: a wrong password stays wrong."""
    operator = OPERATORS[name]()
    with (
        out(manager, monkeypatch, error, "submit"),
        pytest.raises(AirflowException, match="it says why"),
    ):
        operator.execute(context_of(max_tries=1))


def test_a_function_that_meets_an_outage_is_not_run_again_in_its_try(manager):
    def asks():
        raise StoreUnavailableError("of the function's own")

    operator = GPUDecoratedOperator(task_id="t", gpus=2, python_callable=asks, op_args=[], op_kwargs={})
    with pytest.raises(StoreUnavailableError, match="of the function's own"):
        operator.execute(context_of())
    assert manager.leases() == []


@pytest.mark.parametrize("name", ["allocation", "@task.gpu"])
def test_a_request_that_waited_too_long_during_an_outage_is_cancelled_after_it(
    manager, fast_triggers, monkeypatch, name
):
    for number in range(4):
        manager.submit(f"holds{number}", 8, 8)
    operator, context = OPERATORS[name](max_wait=timedelta(0)), context_of(max_tries=1)
    waits = deferral(lambda: operator.execute(context))
    event = fire(waits.trigger)
    with out(manager, monkeypatch, OUTAGES[0]):
        again = deferral(lambda: operator.execute_granted(context, event))
    with pytest.raises(AirflowException, match="no GPUs within max_wait"):
        resumed(operator, again, context)
    assert manager.queue() == []


@pytest.mark.parametrize(
    "error", [*OUTAGES, StoreRefusedError("new password")], ids=lambda error: type(error).__name__
)
@pytest.mark.parametrize("call", ["status_of", "maintenance", "place_job", "release"])
def test_a_trigger_outlasts_an_outage_at_each_of_its_steps(
    manager, connect, gpu_launcher, fast_triggers, notes, wanted, call, error
):
    left, ask, calls = asked(OPERATORS["training"]()), getattr(manager, call), []

    def out_for_a_while(*given, **more):
        calls.append(1)
        if len(calls) <= 3:
            raise error
        return ask(*given, **more)

    connect(Mock(wraps=manager, **{call: out_for_a_while}))
    assert fire(left)["exit_code"] == 0
    assert len(calls) > 3
    assert len(gpu_launcher.jobs) == 1
    assert manager.leases() == []


@pytest.mark.parametrize("call", ["status_of", "release"])
def test_a_preempted_task_outlasts_an_outage_in_its_try(
    manager, gpu_launcher, fast_triggers, notes, wanted, monkeypatch, said_by, call
):
    redefine(manager, teams=Teams((Team("vision", 32),), True, 0.0, 0.0))
    gpu_launcher.runs("train")
    left = asked(GPUTrainingOperator(task_id="t", gpus=8, command="train", server="gpu-server-0"))
    until(left, lambda: gpu_launcher.jobs)
    manager.submit("stronger", 8, team="vision", server="gpu-server-0")

    def unreachable(*_, **__):
        raise OUTAGES[0]

    second = again(left)
    said = said_by(second, logging.WARNING)
    with monkeypatch.context() as outage:
        outage.setattr(manager, call, unreachable)
        until(second, lambda: len(said) > 2)
    until(again(left), lambda: manager.status_of("stronger")["state"] == "RUNNING")
    assert [entry["state"] for entry in manager.queue()] == ["WAITING"]


@pytest.mark.parametrize("call", ["prepare", "start", "stop"])
def test_a_task_outlasts_an_outage_of_the_service_that_its_agent_is_asked_through(
    manager, launch_by, gpu_launcher, fast_triggers, notes, wanted, call
):
    real, calls = getattr(gpu_launcher, call), []

    def out_for_a_while(*given, **more):
        calls.append(1)
        if len(calls) <= 3:
            raise LauncherUnreachableError("no answer") from OUTAGES[0]
        return real(*given, **more)

    launch_by(lambda place: Mock(wraps=gpu_launcher, **{call: out_for_a_while}))
    assert fire(asked(OPERATORS["training"](unreachable_timeout=timedelta(seconds=5))))["exit_code"] == 0
    assert len(gpu_launcher.jobs) == 1
    assert [change["change"] for change in manager.history()].count("granted") == 1
    assert manager.leases() == []


def test_an_error_of_the_manager_that_is_no_outage_fails_the_try(
    manager, connect, gpu_launcher, fast_triggers, notes, wanted
):
    left = asked(OPERATORS["training"]())

    def wrong(*_, **__):
        raise CorruptStateError("cannot be read")

    connect(Mock(wraps=manager, release=wrong))
    assert fire(left) == {"state": "failed", "detail": "cannot be read"}


def test_a_release_outlasts_an_outage(manager, fast_triggers, monkeypatch):
    context = context_of()
    held = OPERATORS["allocation"]().execute(context)
    release = GPUReleaseOperator(task_id="r", lease=held)
    with out(manager, monkeypatch, OUTAGES[0]):
        left = deferral(lambda: release.execute(context))
    assert len(manager.leases()) == 1
    resumed(release, left, context)
    assert manager.leases() == []


@pytest.mark.parametrize("error", OUTAGES, ids=lambda error: type(error).__name__)
def test_an_outage_between_the_grant_and_the_work_uses_up_no_try(manager, connect, pause, error):
    """The first renewal, which says that the lease is still there, is asked for again before the work."""
    RAN.clear()
    pause({"manager.patience.ASK_AGAIN_S": 0.0})
    lost = iter([error, error])

    def renew(*names, **how):
        for each in lost:
            raise each
        return manager.renew(*names, **how)

    connect(Mock(wraps=manager, renew=renew))
    assert OPERATORS["@task.gpu"]().execute(context_of()) == 42
    assert RAN == [1]
    assert manager.leases() == []


@pytest.mark.parametrize("is_carried_out", [False, True])
def test_a_worker_releases_the_gpus_of_its_work_though_the_first_answer_is_lost(
    manager, connect, pause, is_carried_out, capsys
):
    pause({"manager.patience.ASK_AGAIN_S": 0.0})
    answers = iter([ServiceUnavailableError(503, "cut")])

    def release(*names, **how):
        lost = next(answers, None)
        result = manager.release(*names, **how) if is_carried_out or lost is None else None
        if lost is not None:
            raise lost
        return result

    connect(Mock(wraps=manager, release=release))
    assert OPERATORS["@task.gpu"]().execute(context_of()) == 42
    assert manager.leases() == []
    assert "not released" not in capsys.readouterr().out


def test_a_release_whose_answer_was_lost_is_told_as_done_and_one_by_others_is_not(manager, pause):
    pause({"manager.patience.ASK_AGAIN_S": 0.0})
    lease = ask(manager, TASK, 2)
    lost = iter([ServiceUnavailableError(503, "cut")])

    def release(*names, **how):
        result = manager.release(*names, **how)
        for error in lost:
            raise error
        return result

    service = Mock(wraps=manager, release=release)
    assert released(service, lease) is ReleaseResult.RELEASED
    assert released(service, lease) is ReleaseResult.NOT_HELD


@pytest.mark.parametrize("name", OPERATORS)
def test_a_store_without_servers_leaves_the_task_its_other_tries(manager, connect, name):
    """It was emptied, perhaps, and its cluster will be applied."""
    connect(GPUResourceManager(Settings(store="redis://unused"), store=MemoryStore()))
    with pytest.raises(AirflowException, match="no servers yet: gpu-manager apply FILE") as failed:
        OPERATORS[name]().execute(context_of())
    assert not isinstance(failed.value, AirflowFailException)


def test_a_sensor_waits_for_the_servers_of_a_store(manager, connect, fast_triggers):
    empty = GPUResourceManager(Settings(store="redis://unused"), store=MemoryStore())
    connect(empty)
    sensor = GPUAvailableSensor(task_id="s", gpus=2, poke_interval=0.01)
    waits = deferral(lambda: sensor.execute(context_of()))
    assert fire(waits.trigger, lambda: connect(manager))["server_name"] == "gpu-server-0"


@pytest.mark.parametrize("exit_code", [0, 3])
def test_a_job_that_ended_has_though_its_store_has_lost_the_lease(
    manager, connect, gpu_launcher, fast_triggers, notes, wanted, exit_code
):
    left = asked(OPERATORS["training"]())
    gpu_launcher.ends(exit_code=exit_code)

    def lost(*given, **more):
        if gpu_launcher.jobs:
            raise StateLostError("the state is gone")
        return manager.status_of(*given, **more)

    connect(Mock(wraps=manager, status_of=lost))
    assert fire(left)["exit_code"] == exit_code


def test_a_sensor_waits_for_an_answer(manager, fast_triggers, monkeypatch):
    deferrable, poking = (GPUAvailableSensor(task_id="s", gpus=2, deferrable=each) for each in (True, False))
    with out(manager, monkeypatch, OUTAGES[0]):
        assert not poking.poke(context_of())
        waits = deferral(lambda: deferrable.execute(context_of()))
    assert fire(waits.trigger)["server_name"] == "gpu-server-0"
    assert poking.poke(context_of())
    for error in CorruptStateError("it says why"), StoreRefusedError("it says why"):
        with out(manager, monkeypatch, error), pytest.raises(AirflowException, match="it says why"):
            poking.poke(context_of())
