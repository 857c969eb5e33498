"""`with_gpus`: what it makes of an operator, its lease in a worker, and while the operator is deferred."""

import asyncio
import json
import os
import pickle
import signal
import subprocess
import time
import warnings
from datetime import UTC, datetime, timedelta
from threading import Event
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import psutil
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from airflow.providers.standard.hooks.subprocess import SubprocessHook
    from airflow.providers.standard.operators.bash import BashOperator
    from airflow.providers.standard.operators.python import PythonOperator, PythonVirtualenvOperator
    from airflow.sdk import DAG, BaseOperator, TaskGroup, task
    from airflow.triggers.base import BaseTrigger, TaskSuccessEvent, TriggerEvent

    from resource_manager.airflow import (
        GPUAllocateOperator,
        GPUAvailableSensor,
        GPUTrainingOperator,
        gpu_lease,
        with_gpus,
    )
    from resource_manager.airflow.decorators.gpu import GPUDecoratedOperator
    from resource_manager.airflow.in_worker import reason_of
    from resource_manager.airflow.leased_operators import lease_keeping
    from resource_manager.airflow.leased_operators.kinds import kind_of
    from resource_manager.airflow.task_trigger.waits import GrantTrigger, LeaseEndTrigger
    from resource_manager.airflow.version_compat import (
        AirflowException,
        AirflowRescheduleException,
        AirflowSkipException,
        AirflowTaskTimeout,
        DownstreamTasksSkipped,
        TaskDeferred,
    )
    from tests.airflow.any_operators import OPERATORS

from resource_manager.core.identifiers import job_key
from resource_manager.core.models import Gpu, Node
from resource_manager.errors import ResourceManagerError, StoreUnavailableError
from resource_manager.jobs.launchers import Job
from resource_manager.jobs.launchers.docker import DockerLauncher
from resource_manager.jobs.launchers.docker_container import environment_of
from tests.agent.marks import jobs_with
from tests.agent.reporting import server
from tests.airflow.asking import report_of
from tests.airflow.tasks import TASK, context_of

try:  # Airflow has it since 3.1
    import greenback
except ImportError:
    greenback: Any = None  # type: ignore[no-redef]

LEASE = "test:d/r/t"


def ask_airflow():
    """Ask as synchronous code in a trigger does, such as `BaseHook.get_connection`, where Airflow lets it."""
    if greenback is not None:
        greenback.await_(asyncio.sleep(0))


class Waits(BaseTrigger):
    """Trigger of an operator that defers; `how` says what becomes of it."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def serialize(self):
        return f"{__name__}.Waits", {"how": self.how}

    async def run(self):
        await asyncio.sleep(0.5)
        if self.how == "asks":
            ask_airflow()
        if self.how == "fails":
            raise OSError("the system that was asked does not answer")
        yield TaskSuccessEvent() if self.how == "ends" else TriggerEvent({"found": self.how})


class Watches(Waits):
    """Trigger of what runs somewhere until `on_kill` ends it."""

    ended: ClassVar[list[str]] = []

    def serialize(self):
        return f"{__name__}.Watches", {"how": self.how}

    async def run(self):
        if self.how.endswith("fails"):
            raise OSError("the system that was asked does not answer")
        await asyncio.Event().wait()
        yield TriggerEvent({})

    async def on_kill(self):
        ask_airflow()
        self.ended.append(self.how)


class Defers(BaseOperator):
    """Operator that defers, and then returns its event and the lease that it sees."""

    longest = timedelta(hours=1)

    def __init__(self, *, how="value", **kwargs):
        super().__init__(**kwargs)
        self.how = how

    def execute(self, context):
        self.defer(
            trigger=(Watches if self.how.startswith("watches") else Waits)(self.how),
            method_name="execute_complete",
            kwargs={"given": 1},
            timeout=self.longest,
        )

    def execute_complete(self, context, event, given):
        return event, given, os.environ["GPU_LEASE_ID"], context["gpu_lease"]["task_id"]


def made(operator, *, owner="", demand=None, **arguments):
    return with_gpus(operator, **{"gpus": 2, **(demand or {})})(task_id="t", owner=owner, **arguments)


def end_of(manager):
    """Return how the newest lease ended, as the history has it."""
    return manager.history(0)[-1]["outcome"], manager.history(0)[-1]["reason"]


def test_dags_of_one_file_take_the_number_of_gpus_each_from_its_own_task():
    @task
    def decide():
        return 2

    for dag_id in ("one", "two"):
        with DAG(dag_id, schedule=None):
            train: Any = with_gpus(BashOperator, gpus=decide())(task_id="train", bash_command="true")
        assert train.gpu_demand["gpus"].operator.dag_id == dag_id
        assert train.upstream_task_ids == {"decide"}


def test_times_in_the_demand_of_a_task_are_values_of_json():
    """Airflow 3.0 stores a dictionary with any other value as one text, which nobody could announce by."""
    at = datetime(2030, 1, 31, 18, tzinfo=UTC)
    operator: Any = with_gpus(BashOperator, gpus=2, expected_runtime=timedelta(hours=3))
    demand = operator(task_id="t", bash_command="true", gpu_demand={"deadline": at}).gpu_demand
    assert json.loads(json.dumps(demand)) == demand
    assert (demand["expected_runtime"], demand["deadline"]) == (10_800.0, "2030-01-31T18:00:00+00:00")


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.__name__)
def test_an_operator_is_wrapped_pickled_serialised_and_mapped(operator):
    try:
        from airflow.serialization.serialized_objects import DagSerialization
    except ImportError:  # before 3.2
        from airflow.serialization.serialized_objects import SerializedDAG as DagSerialization  # type: ignore[assignment, attr-defined]

    leased = with_gpus(operator, gpus=2, expected_runtime=timedelta(hours=3))
    assert issubclass(leased, operator)
    assert with_gpus(operator, gpus=2, expected_runtime=timedelta(hours=3)) is leased
    assert pickle.loads(pickle.dumps(leased)) is leased
    with DAG("d", schedule=None) as dag, TaskGroup("group"):
        leased(task_id="one", **OPERATORS[operator])
        leased.partial(task_id="many", **OPERATORS[operator]).expand(
            gpu_demand=[{"gpus": 1}, {"cpus": "{{ ti.map_index }}"}]
        )
    found: Any = DagSerialization.from_dict(json.loads(json.dumps(DagSerialization.to_dict(dag))))
    assert found.get_task("group.one").gpu_demand["gpus"] == 2
    assert set(operator.template_fields) < set(found.get_task("group.one").template_fields)
    many: Any = dag.get_task("group.many").unmap({"gpu_demand": {"cpus": 4}})
    assert many.given_fields()["gpus"] == 2
    assert many.given_fields()["cpus"] == 4


@pytest.mark.parametrize("arguments", [{}, {"start_from_trigger": True}])
def test_no_task_begins_in_a_trigger_before_it_has_its_lease(arguments):
    class Begins(BaseOperator):
        start_from_trigger = True

        def __init__(self, *, start_from_trigger=True, **kwargs):
            super().__init__(**kwargs)
            self.start_from_trigger = start_from_trigger

    leased: Any = with_gpus(Begins, gpus=1)
    with DAG("d", schedule=None) as dag:
        leased(task_id="one", **arguments)
        leased.partial(task_id="many", **arguments).expand(gpu_demand=[{"gpus": 1}])
    assert [dag.get_task(name).start_from_trigger for name in ("one", "many")] == [False, False]


def test_a_task_is_pickled_as_its_operator_is():
    task = made(PythonOperator, python_callable=print)
    again = pickle.loads(pickle.dumps(task))
    assert (type(again), again.given_fields()) == (type(task), task.given_fields())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"env": None}, "0,1 of gpu-server-0"),
        ({"env": {"OWN": "x"}}, "0,1 of gpu-server-0x"),
        ({"env": {"OWN": "x", "CUDA_VISIBLE_DEVICES": "7"}, "append_env": True}, "0,1 of gpu-server-0x"),
    ],
)
def test_a_command_gets_its_devices_whatever_environment_it_has(manager, arguments, words):
    seen = []
    command = 'echo "$CUDA_VISIBLE_DEVICES of gpu-server-0$OWN"'
    context = context_of(xcom_push=lambda key, value: seen.append(value["task_id"]))
    assert made(BashOperator, bash_command=command, **arguments).execute(context) == words
    assert seen == [LEASE]
    assert manager.leases() == []
    assert end_of(manager) == ("SUCCESS", "exit code 0")


def test_a_function_finds_its_lease_in_the_context(manager):
    def found(gpu_lease):
        return gpu_lease["gpu_devices"], os.environ["GPU_LEASE_GPUS"]

    assert made(PythonOperator, python_callable=found).execute(context_of()) == ("0,1", "0,1")


def test_a_virtual_environment_that_inherits_nothing_gets_its_devices(manager):
    operator = made(
        PythonVirtualenvOperator, python_callable=deferred_by, inherit_env=False, env_vars={"OWN": "x"}
    )
    lease = manager.allocate_resources("t", 2, 1)
    allocation = next(entry for entry in manager.leases() if entry["task_id"] == lease["task_id"])
    kind_of(PythonVirtualenvOperator).prepare(operator, manager, allocation)
    assert operator.env_vars["OWN"] == "x"
    assert operator.env_vars["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_it_waits_in_the_triggerer_and_runs_on_the_grant(manager):
    for number in range(4):
        manager.allocate_resources(f"holds-{number}", 8, 1)
    operator = made(BashOperator, bash_command="echo done")
    with pytest.raises(TaskDeferred) as deferred:
        operator.execute(context_of())
    assert isinstance(deferred.value.trigger, GrantTrigger)
    manager.release_resources("holds-0")
    trigger: Any = deferred.value.trigger
    event = asyncio.run(anext(trigger.run())).payload
    resumed = operator.resume_execution(deferred.value.method_name, {"event": event}, context_of())
    assert resumed == "done"


@pytest.mark.parametrize("ends", ["cancel", "release"])
def test_a_request_that_somebody_ended_is_not_made_again(manager, ends):
    for number in range(4):
        manager.allocate_resources(f"holds-{number}", 8, 1)
    operator = made(BashOperator, bash_command="echo done")
    with pytest.raises(TaskDeferred) as deferred:
        operator.execute(context_of())
    if ends == "cancel":
        manager.cancel(LEASE)
    else:
        manager.release_resources("holds-0")
    trigger: Any = deferred.value.trigger
    event = asyncio.run(anext(trigger.run())).payload
    if ends == "release":
        manager.release(LEASE)
    with pytest.raises(AirflowException, match=rf"{ends}l?e?d its (request|lease)"):
        operator.resume_execution(deferred.value.method_name, {"event": event}, context_of())
    assert manager.queue() == [] or ends == "release"


def test_a_failure_releases_the_gpus_and_a_retry_waits_for_a_lost_try(manager):
    with pytest.raises(AirflowException):
        made(BashOperator, bash_command="exit 3").execute(context_of())
    assert end_of(manager) == ("FAILED", "exit code 3")
    manager.submit(LEASE, 2, 1, labels={**TASK.labels, "try": "1:a", "scope": "process"}, ttl=60, owner="")
    with pytest.raises(TaskDeferred) as deferred:
        made(BashOperator, bash_command="true").execute(context_of(try_number=2))
    assert isinstance(deferred.value.trigger, LeaseEndTrigger)


@pytest.fixture
def started(manager, connect, pause):
    """Ids of processes, none of which may run when a lease is released."""
    pids: list[int] = []

    def release(*given, **more):
        for pid in pids:
            assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        return manager.release(*given, **more)

    pause({"airflow.worker_guard.STOP_S": 0.5, "airflow.worker_guard.END_POLL_S": 0.01})
    connect(Mock(wraps=manager, release=release))
    yield pids
    for pid in filter(psutil.pid_exists, pids):
        psutil.Process(pid).kill()


def test_a_command_whose_time_is_over_has_ended_before_its_gpus_are_free(manager, started, said_by, tmp_path):
    """Airflow itself sends SIGTERM once `execute` is over, and looks no more."""

    def is_over(line):
        if line == "begun":
            raise AirflowTaskTimeout

    class Trains(BashOperator):
        def on_kill(self):
            started.append(int((tmp_path / "child").read_text()))
            super().on_kill()

    command = f"trap '' TERM; sleep 60 & echo $! > {tmp_path}/child; echo begun; wait"
    said_by(SubprocessHook, note=is_over)
    operator = made(Trains, bash_command=command)
    with pytest.raises(AirflowTaskTimeout):
        operator.execute(context_of())
    assert (len(started), manager.leases()) == (1, [])
    operator.on_kill()  # as Airflow does then
    operator.subprocess_hook.sub_process.communicate()


def by_with_gpus(function, **demand):
    return made(PythonOperator, python_callable=function, demand=demand)


def by_task_gpu(function, **demand):
    return GPUDecoratedOperator(task_id="t", gpus=2, python_callable=function, **demand)


@pytest.mark.parametrize("leased", [by_with_gpus, by_task_gpu])
def test_what_a_function_started_has_ended_before_its_gpus_are_free_if_its_time_is_over(
    manager, started, leased, bystander
):
    processes = []

    def train():
        processes.append(subprocess.Popen(["sleep", "60"]))
        started.append(processes[0].pid)
        raise AirflowTaskTimeout

    with pytest.raises(AirflowTaskTimeout):
        leased(train).execute(context_of())
    assert processes[0].wait() == -signal.SIGTERM
    assert manager.leases() == []
    assert bystander.poll() is None, "it was there before"


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (AirflowSkipException(), ""),
        (AirflowRescheduleException(datetime.now(UTC)), ""),
        (DownstreamTasksSkipped(tasks=["next"]), "SUCCESS"),
        (AirflowException(), "FAILED"),
    ],
)
@pytest.mark.parametrize("leased", [by_with_gpus, by_task_gpu])
def test_what_airflow_takes_for_no_failure_is_none_in_the_history(manager, leased, error, outcome):
    """Else each look of a sensor, and each skipped task, counts as GPU-hours that failed."""

    def work():
        raise error

    with pytest.raises(type(error)):
        leased(work).execute(context_of())
    assert manager.history(0)[-1].get("outcome", "") == outcome


@pytest.mark.parametrize("leased", [by_with_gpus, by_task_gpu])
def test_a_lease_of_a_worker_that_died_is_never_quarantined(manager, leased):
    """Nobody could look whether its process is gone: neither the next try nor the reconciler would end it."""

    def quarantine():
        return manager.read(lambda cluster, now: cluster.leases[LEASE].request.quarantine)

    assert leased(quarantine, quarantine=True).execute(context_of()) is False


def test_an_error_without_an_exit_code_is_told_by_its_class_and_none_of_its_words(manager):
    def fails():
        raise ValueError("the password is exit code 3")

    with pytest.raises(ValueError, match="the password"):
        made(PythonOperator, python_callable=fails).execute(context_of())
    assert end_of(manager) == ("FAILED", "ValueError")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("SSH operator error: exit status = -1", "exit code -1"),
        ("Docker container failed: {'Error': None, 'StatusCode': 137}", "exit code 137"),
        ("Process returned non-zero exit status 4.\nstderr: exit code 5", "exit code 4"),
        ("no command\nexit code 5", "AirflowException"),
    ],
)
def test_the_exit_code_is_read_from_what_the_operators_raise(words, reason):
    assert reason_of(AirflowException(words)) == reason


def deferred_by(manager, how="value", **arguments):
    operator = made(Defers, how=how, **arguments)
    with pytest.raises(TaskDeferred) as deferred:
        operator.execute(context_of())
    return operator, deferred.value


def fired(deferred, meanwhile=lambda: None):
    """Return the event of the trigger as a triggerer makes it of what was serialised."""
    classpath, arguments = deferred.trigger.serialize()
    trigger = getattr(lease_keeping, classpath.rpartition(".")[2])(**json.loads(json.dumps(arguments)))

    async def run():
        if greenback is not None:
            await greenback.ensure_portal()
        asyncio.get_running_loop().call_later(0.1, meanwhile)
        return await anext(trigger.run())

    return asyncio.run(asyncio.wait_for(run(), 30))


def resumed(operator, deferred, event, context=None):
    given = {**deferred.kwargs, "event": event.payload}
    return operator.resume_execution(deferred.method_name, given, context or context_of())


@pytest.mark.parametrize("longest", [timedelta(hours=1), 3600.0, 3600])
def test_an_operator_that_defers_keeps_its_lease_meanwhile_and_goes_on_under_it(
    manager, connect, monkeypatch, longest
):
    """Sensors of providers give their timeout in seconds."""
    monkeypatch.setattr(Defers, "longest", longest)
    operator, deferred = deferred_by(manager, demand={"ttl": 1})
    assert deferred.timeout > timedelta(hours=1), "Airflow would only cancel the trigger"
    [lease] = manager.leases()
    connect(seen := Mock(wraps=manager))
    event = fired(deferred)
    assert seen.renew.called
    assert resumed(operator, deferred, event) == ({"found": "value"}, 1, LEASE, LEASE)
    assert manager.leases() == []
    assert manager.history(0)[-1]["fencing_token"] == lease["fencing_token"]


@pytest.mark.parametrize("gpu_inventory", [[server(gpus=2)]])
def test_the_log_of_a_deferred_operator_says_once_that_its_gpus_compute_nothing(manager, capfd):
    """It has no process of its own by then, which would say so."""
    operator, deferred = deferred_by(manager, demand={"ttl": 1, "idle_after": 1e-6})
    report_of(manager, utilization_percent=0)
    resumed(operator, deferred, fired(deferred))
    assert capfd.readouterr().out.count("have computed nothing for") == 1


@pytest.mark.parametrize("classpath", ["no_such_module.Waits", f"{__name__}.NoSuchTrigger"])
def test_a_trigger_that_the_triggerer_does_not_have_fails_its_task_alone(manager, classpath):
    """Airflow takes a TypeError so; by any other error the triggerer ends, and nobody watches any task."""
    _, deferred = deferred_by(manager)
    _, arguments = deferred.trigger.serialize()
    missing = {"classpath": classpath, "arguments": {"how": "value"}}
    with pytest.raises(TypeError, match=f"trigger {classpath} cannot be made .* install what"):
        lease_keeping.LeaseKeepingTrigger(**{**arguments, **missing})


def test_an_operator_whose_trigger_cannot_be_made_releases_its_gpus(manager, monkeypatch):
    monkeypatch.setattr(Waits, "serialize", lambda trigger: ("no_such_module.Waits", {}))
    with pytest.raises(TypeError, match="no_such_module"):
        made(Defers).execute(context_of())
    assert manager.leases() == []
    assert end_of(manager) == ("FAILED", "TypeError")


def test_a_long_lease_is_renewed_in_each_recovery_window_while_its_operator_is_deferred(
    manager, connect, pause
):
    pause({"airflow.task_trigger.base.RENEW_EVERY_S": 0.05})
    _, deferred = deferred_by(manager, demand={"ttl": 3600})
    connect(seen := Mock(wraps=manager))
    fired(deferred)
    assert seen.renew.call_count > 3


def test_a_lease_outlives_the_time_in_which_neither_worker_nor_triggerer_renews_it(manager):
    def life_s():
        return next(lease["expires_at"] for lease in manager.leases()) - time.time()

    operator, deferred = deferred_by(manager, demand={"ttl": 1})
    lives = [life_s()]
    event = fired(deferred, lambda: lives.append(life_s()))
    lives.append(life_s())
    resumed(operator, deferred, event)
    assert lives == pytest.approx([600, 1, 600], abs=60), (
        "until a trigger, until its next renewal, until a worker"
    )


def test_a_trigger_that_fails_fails_the_task_and_releases_its_gpus(manager):
    operator, deferred = deferred_by(manager, "fails")
    with pytest.raises(Exception, match="Trigger failure"):
        resumed(operator, deferred, fired(deferred))
    assert manager.leases() == []
    assert end_of(manager) == ("FAILED", "OSError")


def test_what_a_trigger_that_fails_watches_is_ended_before_its_gpus_are_free(manager):
    operator, deferred = deferred_by(manager, "watches and fails")
    event = fired(deferred)
    assert (Watches.ended.pop(), len(manager.leases())) == ("watches and fails", 1)
    with pytest.raises(Exception, match="Trigger failure"):
        resumed(operator, deferred, event)
    assert end_of(manager) == ("FAILED", "OSError")


def test_the_trigger_of_a_deferred_operator_asks_airflow_as_without_a_lease(manager):
    """Airflow lets only the task do so in which it runs a trigger itself."""
    operator, deferred = deferred_by(manager, "asks")
    assert resumed(operator, deferred, fired(deferred))[0] == {"found": "asks"}


def test_a_gpu_that_fails_while_the_operator_is_deferred_fails_the_task(manager, connect):
    operator, deferred = deferred_by(manager)
    failed = {"gpu_failed": "xid 79"}
    connect(Mock(wraps=manager, renew=lambda *args, **more: manager.renew(*args, **more) | failed))
    with pytest.raises(Exception, match="one of its GPUs failed: xid 79"):
        resumed(operator, deferred, fired(deferred))
    assert manager.leases() == []
    assert end_of(manager) == ("FAILED", "one of its GPUs failed: xid 79")


def lost(manager):
    return lambda: manager.release(LEASE, outcome="CANCELLED")


def its_gpu_failed(manager):
    renew = manager.renew
    return lambda: setattr(
        manager, "renew", lambda *given, **more: renew(*given, **more) | {"gpu_failed": "x"}
    )


def refused(manager):
    def renew(*given, **more):
        raise ResourceManagerError("the token was revoked")

    return lambda: setattr(manager, "renew", renew)


@pytest.mark.parametrize("fault", [lost, its_gpu_failed, refused])
def test_what_a_deferred_operator_watches_is_ended_once_its_lease_is_lost_or_a_gpu_failed(manager, fault):
    """As after an outage for longer than its ttl: a pod would run on, and nobody would watch it."""
    operator, deferred = deferred_by(manager, f"watches {fault.__name__}", demand={"ttl": 1})
    event = fired(deferred, fault(manager))
    assert Watches.ended.pop() == f"watches {fault.__name__}"
    with pytest.raises(
        Exception, match=r"ended while the task was deferred|GPUs failed|renewed: the token was revoked"
    ):
        resumed(operator, deferred, event)
    assert manager.leases() == []


def test_what_a_deferred_operator_watches_is_ended_before_its_longest_runtime_is_over(manager):
    """Nobody else can tell it; the lease, of which no job was placed, ends with its grace."""
    limits = {"ttl": 1, "max_runtime": 3, "preempt_grace": 1.5}
    operator, deferred = deferred_by(manager, "watches its time", demand=limits)
    event = fired(deferred)
    assert Watches.ended.pop() == "watches its time"
    assert [lease["state"] for lease in manager.leases()] == ["PREEMPTING"]
    with pytest.raises(Exception, match="its lease is preempted: its longest runtime is over"):
        resumed(operator, deferred, event)
    assert end_of(manager)[0] == "TIMED_OUT"


def test_what_a_deferred_operator_watches_is_ended_when_its_deferral_times_out(manager, monkeypatch):
    """Airflow only cancels the trigger; what it watched would use GPUs that are granted to others."""
    monkeypatch.setattr(Defers, "longest", timedelta(seconds=1))
    operator, deferred = deferred_by(manager, "watches too long")
    event = fired(deferred)
    assert Watches.ended.pop() == "watches too long"
    assert len(manager.leases()) == 1, "until a worker has failed the task"
    with pytest.raises(Exception, match="Trigger timeout") as caught:
        resumed(operator, deferred, event)
    assert type(caught.value).__name__ == "TaskDeferralTimeout"
    assert manager.leases() == []
    assert end_of(manager) == ("FAILED", "Trigger timeout")


def silent_until(manager, is_over):
    """Return what makes the store silent for renewals until then."""
    renew = manager.renew

    def asked(*given, **more):
        if not is_over():
            raise StoreUnavailableError("no answer")
        return renew(*given, **more)

    return lambda: setattr(manager, "renew", asked)


def test_what_a_deferred_operator_watches_is_ended_in_time_while_nobody_answers(manager, pause):
    pause({"airflow.task_trigger.base.OUTAGE_POLL_S": 0.02})
    operator, deferred = deferred_by(manager, "watches a silent store", demand={"ttl": 0.5})
    event = fired(deferred, silent_until(manager, lambda: Watches.ended))
    assert Watches.ended.pop() == "watches a silent store"
    with pytest.raises(Exception, match=r"renewed for 0.375 s: the GPU manager does not answer"):
        resumed(operator, deferred, event)
    assert manager.leases() == []


def test_a_trigger_that_cannot_end_what_it_watches_outlasts_a_silent_store(manager, pause):
    """To give up would only begin the work a second time beside the first."""
    pause({"airflow.task_trigger.base.OUTAGE_POLL_S": 0.02})
    operator, deferred = deferred_by(manager, demand={"ttl": 0.2})
    ends_at = time.monotonic() + 1.0
    silent_until(manager, lambda: time.monotonic() > ends_at)()
    assert resumed(operator, deferred, fired(deferred))[0] == {"found": "value"}


def test_the_log_names_a_trigger_that_cannot_end_what_it_watches(manager, connect, said_by):
    """Its event may come after hours."""
    _, deferred = deferred_by(manager)
    connect(
        Mock(wraps=manager, renew=lambda *args, **more: manager.renew(*args, **more) | {"gpu_failed": "x"})
    )
    said = said_by(lease_keeping.LeaseKeepingTrigger)
    fired(deferred)
    assert (
        "one of its GPUs failed: x; end what it started by hand: it may still run, as Waits has no on_kill"
        in said
    )


def test_a_run_that_is_made_again_does_not_work_beside_that_of_the_deleted_one(manager):
    def deleted_and_made_again():
        with pytest.raises(TaskDeferred) as deferred:
            made(BashOperator, bash_command="true").execute(context_of(id="of the new run"))
        return type(deferred.value.trigger)

    operator = made(PythonOperator, python_callable=deleted_and_made_again)
    assert operator.execute(context_of()) is LeaseEndTrigger


def test_an_operator_that_was_cleared_while_it_waited_goes_on_after_its_deferral(manager):
    for number in range(4):
        manager.allocate_resources(f"holds-{number}", 8, 1)
    operator = made(Defers)
    for try_number in (1, 2):
        with pytest.raises(TaskDeferred) as waits:
            operator.execute(context_of(try_number=try_number))
    manager.release_resources("holds-0")
    granted = {"event": {"state": "granted"}}
    with pytest.raises(TaskDeferred) as deferred:
        operator.resume_execution(waits.value.method_name, granted, context_of(try_number=2))
    event = fired(deferred.value)
    assert resumed(operator, deferred.value, event, context_of(try_number=2))[0] == {"found": "value"}


def test_a_trigger_that_ends_the_task_releases_its_gpus(manager):
    _, deferred = deferred_by(manager, "ends")
    assert isinstance(fired(deferred), TaskSuccessEvent)
    assert manager.leases() == []
    assert manager.history(0)[-1]["outcome"] == "SUCCESS"


def test_a_lease_that_others_ended_fails_the_deferred_task(manager):
    operator, deferred = deferred_by(manager, demand={"ttl": 0.5})
    event = fired(deferred, lambda: manager.release_resources(LEASE))
    with pytest.raises(
        AirflowException,
        match="ended while the task was deferred: it expired before",
    ):
        resumed(operator, deferred, event)


def test_a_deferral_that_took_too_long_releases_the_gpus(manager):
    operator, _ = deferred_by(manager)
    with pytest.raises(Exception, match="timeout"):
        operator.resume_execution("__fail__", {"error": "Trigger timeout"}, context_of())
    assert manager.leases() == []
    assert end_of(manager) == ("FAILED", "Trigger timeout")


def test_an_operator_with_names_of_ours_is_refused():
    class Manages(BaseOperator):
        def manager(self): ...

    class Waits(BaseOperator):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.wait_limit = 5

    with pytest.raises(TypeError, match="with_gpus: Manages has its own manager"):
        with_gpus(Manages, gpus=1)
    with pytest.raises(TypeError, match="with_gpus: Waits has its own wait_limit"):
        with_gpus(Waits, gpus=1)(task_id="t")
    for other in (GPUTrainingOperator, with_gpus(BashOperator, gpus=1)):
        with pytest.raises(TypeError, match="asks for GPUs itself"):
            with_gpus(other, gpus=1)
    function: Any = made
    with pytest.raises(TypeError, match="must be the class of an operator, got <function"):
        with_gpus(function, gpus=1)
    with pytest.raises(TypeError, match=r"with_gpus: gpu: no field of a demand: did you mean gpus\?"):
        with_gpus(BashOperator, gpu=1)
    where = r"t: gpus is an argument of with_gpus: with_gpus\(BashOperator, gpus=…\)\(…\)"
    with pytest.raises(TypeError, match=where):
        with_gpus(BashOperator, gpus=1)(task_id="t", bash_command="true", gpus=2)
    with pytest.raises(TypeError, match="Invalid arguments were"):
        with_gpus(BashOperator, gpus=1)(task_id="t", bash_command="true", other=2)


@pytest.mark.parametrize("name", ["trigger_dagrun.TriggerDagRunOperator", "hitl.HITLOperator"])
def test_an_operator_whose_work_airflow_does_after_its_execute_is_refused(name):
    """Its lease would end before, and its GPUs would be given away in use."""
    module, _, name = f"airflow.providers.standard.operators.{name}".rpartition(".")
    operator = type("Ours", (type(name, (BaseOperator,), {"__module__": module}),), {})
    with pytest.raises(TypeError, match=r"with_gpus: not for Ours: .* after its execute: use gpu_lease"):
        with_gpus(operator, gpus=1)


def by_decorator(**arguments):
    @task.gpu(**arguments)
    def train(): ...

    train()


def test_a_mapped_function_for_several_servers_is_refused_when_the_dag_is_parsed():
    with pytest.raises(ValueError, match=r"nodes=2: @task\.gpu runs one function in one worker"):
        task.gpu(gpus=1, nodes=2)(lambda x: x).expand(x=[1])


def by_lease(**arguments):
    with gpu_lease(**arguments):
        pass


WAYS = {
    "GPUTrainingOperator": lambda **given: GPUTrainingOperator(task_id="t", command="true", **given),
    "partial": lambda **given: GPUTrainingOperator.partial(task_id="t", **given).expand(command=["true"]),
    "GPUAllocateOperator": lambda **given: GPUAllocateOperator(task_id="t", **given),
    "gpu_lease": by_lease,
    "@task.gpu": by_decorator,
    "@task.gpu, mapped": lambda **given: task.gpu(**given)(lambda x: x).expand(x=[1]),
    "with_gpus": lambda **given: with_gpus(BashOperator, **given)(task_id="t", bash_command="true"),
    "gpu_demand": lambda **given: with_gpus(BashOperator, gpus=1)(
        task_id="t", bash_command="true", gpu_demand=given
    ),
    "gpu_demand, mapped": lambda **given: (
        with_gpus(BashOperator, gpus=1).partial(task_id="t", gpu_demand=given).expand(bash_command=["true"])
    ),
    "GPUAvailableSensor": lambda **given: GPUAvailableSensor(task_id="t", **given),
    "sensor, mapped": lambda **given: GPUAvailableSensor.partial(task_id="t", **given).expand(cpus=[1]),
}


@pytest.mark.parametrize("way", WAYS)
def test_wrong_arguments_are_found_when_the_dag_is_parsed(way):
    for wrong, words in (
        ({"gpus": -1}, "gpus must be greater than or equal to 0, got -1"),
        ({"gpus": "two"}, "gpus must be a whole number, got 'two'"),
        ({"gpus": 1, "ttl": "soon"}, "ttl must be seconds or a text"),
        ({"gpus": 1, "gpu_memory": "80"}, "gpu_memory must be an amount in GB or GiB"),
        ({"gpus": 1, "max_runtime": 60}, r"max_runtime must be above preempt_grace \(60 s\)"),
        ({"gpus": 1, "preempt_signal": "KILL"}, "preempt_signal must be 'TERM' or 'USR2', got 'KILL'"),
    ):
        with DAG("d", schedule=None), pytest.raises(ValueError, match=words):
            WAYS[way](**wrong)


@pytest.mark.parametrize("wrong", ["gpus=2", ["gpus"]])
def test_a_demand_of_one_task_is_a_dictionary(wrong):
    with pytest.raises(TypeError, match=r"^t: gpu_demand must be a dictionary, got "):
        with_gpus(BashOperator, gpus=1)(task_id="t", bash_command="true", gpu_demand=wrong)


@pytest.mark.parametrize("way", WAYS)
def test_templates_are_left_for_the_task(way):
    with DAG("d", schedule=None):
        WAYS[way](gpus="{{ params.gpus }}", ttl="{% if x %}1h{% endif %}", labels={"model": "{{ params.m }}"})
    with DAG("d", schedule=None):
        WAYS[way](gpus=1, max_runtime=30, preempt_grace="{{ params.grace }}")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"launcher": "shh"}, "t: launcher must be one of local, ssh, docker.*, got 'shh'"),
        ({"launcher": "docker"}, "t: the docker launcher needs an image: set image"),
        ({"launcher": "ssh", "image": "train:1"}, "t: the ssh launcher runs no images"),
        ({"launcher": "slurm", "image": "train:1"}, "t: the slurm launcher runs no images"),
        ({"launcher": "ssh", "slurm": {"qos": "high"}}, "t: slurm is for launcher='slurm', got 'ssh'"),
        ({"command": "true", "slurm": {"qos": "high"}}, "t: slurm is for launcher='slurm', got ''"),
        (
            {"launcher": "ssh", "container": {"ipc": "host"}},
            "t: container is for launcher='docker', got 'ssh'",
        ),
        ({"max_wait": 60}, "t: max_wait must be a timedelta, got 60"),
        ({"unreachable_timeout": "1h"}, "t: unreachable_timeout must be a timedelta, got '1h'"),
        ({"unreachable_timeout": None}, "t: unreachable_timeout must be a timedelta, got None"),
        (
            {"launcher": "docker", "image": "train:1", "container": {"restart_policy": {"Name": "always"}}},
            "t: container: leave out restart_policy",
        ),
        ({"env": "A=1"}, "t: env must be a dictionary, got a str"),
        ({"launcher": "docker", "image": "train:1", "container": ["ipc"]}, "t: container must be a dict"),
        ({"start_attempts": 0}, "t: start_attempts must be 1 or more, got 0"),
        ({"done_when": "any"}, "t: done_when must be one of all, rank0, got 'any'"),
    ],
)
def test_a_wrong_launcher_or_duration_is_found_when_the_dag_is_parsed(wrong, words):
    with pytest.raises((TypeError, ValueError), match=words):
        GPUTrainingOperator(task_id="t", gpus=1, **wrong)
    templates: Any = {"launcher": "{{ params.launcher }}", "env": "{{ params.env }}"}
    GPUTrainingOperator(task_id="t", gpus=1, command="true", **templates)
    given = {"launcher": "", "image": "", **wrong}
    with pytest.raises((TypeError, ValueError), match=words):
        GPUTrainingOperator.partial(task_id="t", gpus=1, **given).expand(cpus=[1])


def test_what_a_mapped_task_is_given_by_expand_is_not_missed_by_the_rest():
    partial = partial_of(launcher="docker").expand(image=["a", "b"])
    assert partial.is_mapped
    partial_of(slurm={"qos": "high"}, container={}).expand(launcher=["slurm"])
    partial_of(image="train:1", container={"ipc": "host"}).expand(launcher=["docker", ""])


def partial_of(**given):
    return GPUTrainingOperator.partial(task_id="t", gpus=1, command="true", **given)


@pytest.mark.parametrize("empty", ["", (), None])
def test_a_job_without_command_and_image_is_refused_when_the_dag_is_parsed(empty):
    with pytest.raises(ValueError, match="t: command is missing: only an image has one of its own"):
        GPUTrainingOperator(task_id="t", gpus=1, command=empty)
    GPUTrainingOperator(task_id="t", gpus=1, image="{{ params.image }}", command=empty)
    GPUTrainingOperator.partial(task_id="t", gpus=1).expand(command=["true"])


@pytest.fixture
def pod(monkeypatch):
    """Operator for a pod. The provider is not installed here: a class of its name stands for it."""

    class KubernetesPodOperator(BaseOperator):
        __module__ = "airflow.providers.cncf.kubernetes.operators.pod"
        __qualname__ = "KubernetesPodOperator"

        def __init__(self, *, env_vars, node_selector=None, until_over=lambda: None, **kwargs):
            super().__init__(**kwargs)
            self.env_vars, self.node_selector, self.until_over = env_vars, node_selector, until_over

        def execute(self, context):
            self.until_over()
            return {variable.name: variable.value for variable in self.env_vars}, self.node_selector

    variable = SimpleNamespace(V1EnvVar=lambda name, value: SimpleNamespace(name=name, value=value))
    monkeypatch.setitem(__import__("sys").modules, "kubernetes", SimpleNamespace(client=variable))
    monkeypatch.setitem(__import__("sys").modules, "kubernetes.client", variable)
    return KubernetesPodOperator


def test_a_pod_is_ended_before_the_worker_that_waits_for_it(manager, at_worker_kill, pod):
    said, over = [], Event()

    @at_worker_kill
    def kill_worker(how):
        said.append("worker killed")
        over.set()

    def until_over():
        manager.release(LEASE)
        assert over.wait(30)

    operator = made(pod, env_vars=[], until_over=until_over, demand={"ttl": 1})
    operator.on_kill = lambda: said.append("pod ended")
    operator.execute(context_of())
    assert said == ["pod ended", "worker killed"]


def test_a_pod_goes_to_the_node_and_leaves_its_devices_to_kubernetes(manager, monkeypatch, pod):
    monkeypatch.setenv("GPU_MANAGER_SERVER", "gpu-server-3")  # of the worker, which matters for no pod
    operator = made(pod, env_vars=[], node_selector={"zone": "a"})
    variables, node = operator.execute(context_of())
    assert variables == {"GPU_LEASE_ID": LEASE, "GPU_LEASE_GPUS": "0,1", "GPU_SERVER": "gpu-server-0"}
    assert node == {"zone": "a", "kubernetes.io/hostname": "gpu-server-0"}


@pytest.mark.parametrize(
    "gpu_inventory", [[Node("gpu-a", 0, {"cpus": 8}, (Gpu(0), Gpu(1)), address="192.0.2.7")]]
)
@pytest.mark.parametrize("operator", ["with_gpus", "@task.gpu"])
def test_a_worker_of_another_machine_does_not_use_its_own_gpus(
    manager, own_address_only, monkeypatch, operator
):
    if operator == "with_gpus":
        work = made(PythonOperator, python_callable=lambda: "worked")
    else:
        work = GPUDecoratedOperator(task_id="t", gpus=2, python_callable=lambda: "worked")
    words = r"on gpu-a \(address 192.0.2.7\), but this worker is on .*GPU_MANAGER_SERVER.*SSHOperator"
    with pytest.raises(AirflowException, match=words):
        work.execute(context_of())
    assert manager.leases() == []
    monkeypatch.setenv("GPU_MANAGER_SERVER", "gpu-a")
    assert work.execute(context_of()) == "worked"


@pytest.mark.parametrize("form", [dict, list])
def test_the_pod_that_the_provider_builds_has_the_lease_and_the_node(manager, form):
    pod = pytest.importorskip("airflow.providers.cncf.kubernetes.operators.pod", exc_type=ImportError)
    from kubernetes import client

    operator = made(
        pod.KubernetesPodOperator,
        image="train",
        env_vars={"OWN": "x"} if form is dict else [client.V1EnvVar(name="OWN", value="x")],
        container_resources=client.V1ResourceRequirements(limits={"nvidia.com/gpu": "2"}),
        node_selector={"zone": "a"},
    )
    manager.submit(LEASE, 2, 1)
    [allocation] = manager.leases()
    operator.gpu_kind.prepare(operator, manager, allocation)
    spec = operator.build_pod_request_obj(dry_run=True).spec
    variables = {variable.name: variable.value for variable in spec.containers[0].env}
    wanted = {"OWN": "x", "GPU_LEASE_ID": LEASE, "GPU_LEASE_GPUS": "0,1", "GPU_SERVER": "gpu-server-0"}
    assert wanted.items() <= variables.items()
    assert spec.node_selector == {"zone": "a", "kubernetes.io/hostname": "gpu-server-0"}
    assert spec.containers[0].resources.limits == {"nvidia.com/gpu": "2"}


def test_a_container_of_the_provider_bears_its_job_for_the_agent_of_its_server():
    """As one of the launcher does: an agent finds it while it is on no GPU."""
    docker = pytest.importorskip("airflow.providers.docker.operators.docker", exc_type=ImportError)
    operator = made(docker.DockerOperator, image="train", environment={"OWN": "x"})
    job = Job(job_key(LEASE, 7), ())
    operator.gpu_kind.start(operator, Mock(spec=DockerLauncher, engine="unix://"), job, "")
    assert (jobs_with(operator.environment), operator.environment["OWN"]) == ({job.key}, "x")
    assert operator.environment["GPU_PREEMPT_FILE"] == environment_of(job)["GPU_PREEMPT_FILE"]
