"""Operators: the job of a training, the lease of a task group, and their ends."""

import os
import sys
import warnings
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from airflow.sdk import DAG, BaseOperator, TaskGroup, task_group

    try:  # since 3.2
        from airflow.sdk.exceptions import TaskDeferred
    except ImportError:
        from airflow.exceptions import TaskDeferred

    from resource_manager.airflow import use_meter
    from resource_manager.airflow.operators import GPUTrainingOperator, gpu_lease, lease, training
    from resource_manager.airflow.triggers import TriggerState
    from resource_manager.airflow.version_compat import AirflowException, AirflowTaskTerminated

from resource_manager.agent.probe import registered_job
from resource_manager.core.changes import Outcome
from resource_manager.core.models import Gpu, Node
from resource_manager.core.teams import Team, Teams
from resource_manager.errors import CorruptStateError, LockTimeoutError, StoreUnavailableError
from resource_manager.jobs.launchers import LAUNCHERS, LauncherUnreachableError, job_key
from resource_manager.jobs.launchers.fake import FakeLauncher
from resource_manager.rest.client import ServiceUnavailableError
from tests.agent.reporting import server
from tests.airflow.asking import report_of
from tests.airflow.tasks import TASK, context_of, fire
from tests.builders import redefine
from tests.eventually import wait_for


def started(launcher, **arguments):
    """Return the job that a training starts, in a try of its own."""
    task_id = f"t{len(launcher.jobs)}"
    operator = GPUTrainingOperator(task_id=task_id, **arguments)
    with pytest.raises(TaskDeferred) as deferred:
        operator.execute(context_of(replace(TASK, task_id=task_id)))
    assert deferred.value.method_name == "execute_ended"
    return launcher.jobs[-1]


def test_numbers_and_none_of_native_templates_are_accepted(manager, gpu_launcher):
    odd = {"gpu_types": None, "team": 5}
    words = ["train", "--epochs", 3]
    assert started(gpu_launcher, gpus=2, command=words, **odd).command == ("train", "--epochs", "3")
    assert started(gpu_launcher, gpus=2, command=None).command == ()
    assert [lease["team"] for lease in manager.leases()] == ["5", ""]


ONE_GPU = [Node("a", 0, {"cpus": 8}, (Gpu(0, "A100", memory_mib=81920),))]


@pytest.mark.skipif(sys.platform != "linux", reason="processes register themselves on Linux")
@pytest.mark.parametrize("gpu_inventory", [[server(gpus=2)]])
def test_a_task_in_a_lease_is_known_as_its_job_and_told_when_it_idles(manager, monkeypatch, capfd):
    monkeypatch.setattr(use_meter, "LOOK_EVERY_S", 0.01)
    with DAG("d") as dag, gpu_lease(gpus=2, idle_after=1e-6):
        BaseOperator(task_id="before")
        with TaskGroup("inner"):
            BaseOperator(task_id="work")
    BaseOperator(task_id="outside", dag=dag)
    allocation = dag.get_task("gpu_lease.allocate").execute(context_of(replace(TASK, task_id="allocate")))
    pulled = []

    def pull(task_ids):
        pulled.append(task_ids)
        return allocation

    for task_id in ("outside", "gpu_lease.allocate", "gpu_lease.release"):
        lease.join_lease(SimpleNamespace(task=dag.get_task(task_id), xcom_pull=pull))
    assert pulled == []
    lease.join_lease(SimpleNamespace(task=dag.get_task("gpu_lease.inner.work"), xcom_pull=pull))
    assert pulled == ["gpu_lease.allocate"]
    assert registered_job(os.getpid()) == job_key(allocation["task_id"], allocation["fencing_token"])
    report_of(manager, utilization_percent=0)
    said = []
    wait_for(lambda: said.append(capfd.readouterr().out) or "have computed nothing for" in "".join(said))


@pytest.mark.parametrize("gpu_inventory", [ONE_GPU])
def test_the_operators_limit_a_job_to_its_gpu_fraction(gpu_launcher):
    with DAG("d"), gpu_lease(gpus=1, gpu_milli=500) as lease:
        pass
    environment = started(gpu_launcher, gpus=1, gpu_milli=250, command="true").environment
    assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=20480M"
    shared = lease.environment()
    assert shared["CUDA_VISIBLE_DEVICES"] == shared["NVIDIA_VISIBLE_DEVICES"] == lease.devices
    assert (shared["CUDA_DEVICE_ORDER"], shared["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]) == ("PCI_BUS_ID", "50")


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ('{"loss": 0.5}', {"loss": 0.5}),
        ("epoch 3", "epoch 3"),
        *((line, line) for line in ('{"loss": NaN}', "-Infinity", "1e999", "9" * 30, r'"\ud800"')),
        pytest.param("[" * 100_000, "[" * 100_000, id="deep"),
    ],
)
def test_the_last_line_is_json_only_where_an_xcom_can_hold_it(manager, line, value):
    ended = {"state": TriggerState.JOB_ENDED, "exit_code": 0, "last_line": line}
    assert GPUTrainingOperator(task_id="t", gpus=2).execute_ended(context_of(), ended) == value


@pytest.mark.parametrize(
    ("usage", "line"),
    [
        (
            {"mean_utilization_percent": 71.2, "peak_memory_mib": 63488, "memory_mib": 81920},
            "GPU use while this job ran: mean 71 %, peak memory 62 of 80 GB",
        ),
        (
            {"mean_utilization_percent": None, "peak_memory_mib": 1024, "memory_mib": None},
            "GPU use while this job ran: peak memory 1 GB",
        ),
    ],
)
def test_the_use_of_the_gpus_is_a_line_of_the_log_and_an_xcom(manager, monkeypatch, usage, line):
    train = GPUTrainingOperator(task_id="t", gpus=2)
    said, pushed, context = [], {}, context_of()
    monkeypatch.setattr(train.log, "info", lambda text, *values: said.append(text % values))
    monkeypatch.setattr(context["ti"], "xcom_push", lambda key, value: pushed.update({key: value}))
    ended = {"state": TriggerState.JOB_ENDED, "exit_code": 0, "last_line": "1", "gpu_usage": usage}
    assert train.execute_ended(context, ended) == 1
    assert line in said
    assert pushed == {"gpu_usage": usage}


def test_a_task_ended_by_a_user_does_not_start_its_job(manager, gpu_launcher, monkeypatch):
    """Airflow calls `on_kill` from a signal handler and continues `execute` unless it raises."""
    train = GPUTrainingOperator(task_id="t", gpus=2, command="true")
    submit = manager.submit

    def submit_and_kill(*asked, **demand):
        status = submit(*asked, **demand)
        monkeypatch.setattr(training, "is_wanted", lambda identity: True)
        train.on_kill()
        assert len(manager.leases()) == 1
        monkeypatch.setattr(training, "is_wanted", lambda identity: False)
        train.on_kill()
        return status

    monkeypatch.setattr(manager, "submit", submit_and_kill)
    with pytest.raises(AirflowTaskTerminated):
        train.execute(context_of())
    assert manager.leases() == gpu_launcher.jobs == []


@pytest.fixture
def preempted(manager):
    """Return a function that lets a stronger request take the lease of the task, if it has one."""
    redefine(manager, teams=Teams((Team("vision", 32),), True, 0.0, 0.0))

    def take():
        manager.submit("stronger", 8, team="vision", server=manager.leases()[0]["server_name"])
        (found,) = manager.preempting()
        return found

    return take


def trains(gpu_launcher):
    """Return the operator of a task whose job trains on all GPUs of a server."""
    gpu_launcher.runs("train")
    operator = GPUTrainingOperator(task_id="t", gpus=8, command="train", team="nlp", server="gpu-server-0")
    with pytest.raises(TaskDeferred):
        operator.execute(context_of())
    return operator


def waits_again(operator, call):
    """Run a step of the task that ends with a wait for GPUs, in the same try."""
    with pytest.raises(TaskDeferred) as deferred:
        call()
    assert deferred.value.method_name == "execute_granted"


def test_a_preempted_task_waits_again_in_its_try_and_then_goes_on(manager, gpu_launcher, preempted):
    gpu_launcher.runs("train")
    operator = GPUTrainingOperator(
        task_id="t", gpus=8, command="train", team="nlp", server="gpu-server-0", preempt_grace=5
    )
    with pytest.raises(TaskDeferred) as deferred:
        operator.execute(context_of())
    taken = preempted()
    event = fire(deferred.value.trigger)
    assert event == {"state": TriggerState.PREEMPTED}
    waits_again(operator, lambda: operator.execute_ended(context_of(), {**event, "fencing_token": 1}))
    assert gpu_launcher.stopped == gpu_launcher.jobs
    (waiting,) = manager.queue()
    assert waiting["task_id"] == taken["task_id"]
    assert manager.status_of("stronger")["state"] == "RUNNING"
    manager.release("stronger")
    with pytest.raises(TaskDeferred) as again:
        operator.execute(context_of())
    assert again.value.method_name == "execute_ended"
    assert [job.environment["GPU_RESTART_COUNT"] for job in gpu_launcher.jobs] == ["0", "1"]


def test_a_wait_counts_from_the_preemption_not_from_the_first_request(manager, gpu_launcher, preempted):
    gpu_launcher.runs("train")
    limit = timedelta(hours=1)
    operator = GPUTrainingOperator(
        task_id="t", gpus=8, command="train", team="nlp", server="gpu-server-0", max_wait=limit
    )
    with pytest.raises(TaskDeferred):
        operator.execute(context_of())
    event = {"state": TriggerState.PREEMPTED, "fencing_token": preempted()["fencing_token"]}
    with pytest.raises(TaskDeferred) as deferred:
        operator.execute_ended(context_of(), event)
    trigger, [waiting] = deferred.value.trigger, manager.queue()
    assert trigger.max_wait_s == limit.total_seconds()
    assert 0.0 < trigger.before_s <= waiting["waited_s"]
    manager.release("stronger")
    lease = manager.status_of(waiting["task_id"])
    waited_s = lease["granted_at"] - lease["queued_at"] - trigger.before_s
    assert fire(trigger)["waited_s"] == pytest.approx(waited_s), "without the time that its job ran"


@pytest.mark.parametrize("call", ["status_of", "release", "submit"])
@pytest.mark.parametrize(
    "error",
    [StoreUnavailableError("no answer"), ServiceUnavailableError(503, "no answer"), LockTimeoutError(5.0)],
)
def test_a_preempted_task_outlasts_an_outage_in_its_try(
    manager, gpu_launcher, preempted, monkeypatch, call, error
):
    operator = trains(gpu_launcher)
    event = {"state": TriggerState.PREEMPTED, "fencing_token": preempted()["fencing_token"]}

    def unreachable(*_, **__):
        raise error

    with monkeypatch.context() as outage:
        outage.setattr(manager, call, unreachable)
        for _ in range(2):  # it may last longer than one pause
            with pytest.raises(TaskDeferred) as deferred:
                operator.execute_ended(context_of(), event)
            assert deferred.value.method_name == "execute_ended"
            assert deferred.value.trigger.event == event
    waits_again(operator, lambda: operator.execute_ended(context_of(), event))
    assert [entry["state"] for entry in manager.queue()] == ["WAITING"]
    assert manager.status_of("stronger")["state"] == "RUNNING"


def test_an_error_of_the_manager_that_is_no_outage_fails_the_try(
    manager, gpu_launcher, preempted, monkeypatch
):
    operator = trains(gpu_launcher)
    event = {"state": TriggerState.PREEMPTED, "fencing_token": preempted()["fencing_token"]}

    def wrong(*_, **__):
        raise CorruptStateError("cannot be read")

    monkeypatch.setattr(manager, "release", wrong)
    with pytest.raises(CorruptStateError):
        operator.execute_ended(context_of(), event)


def test_a_new_process_of_the_task_ends_the_job_of_its_preempted_lease(manager, gpu_launcher, preempted):
    """As after the worker was killed in the middle of it: the try that follows finds the lease as it is."""
    operator = trains(gpu_launcher)
    preempted()
    waits_again(operator, lambda: operator.execute(context_of()))
    assert manager.status_of("stronger")["state"] == "RUNNING"


@pytest.mark.parametrize("event", [TriggerState.LEASE_LOST, TriggerState.JOB_ENDED])
def test_a_task_whose_lease_another_process_queued_again_goes_on(manager, gpu_launcher, preempted, event):
    operator = trains(gpu_launcher)
    taken = preempted()
    manager.release(taken["task_id"], outcome=Outcome.PREEMPTED, job_end="ended")
    ended = {"state": event, "exit_code": 143, "last_line": "", "fencing_token": taken["fencing_token"]}
    waits_again(operator, lambda: operator.execute_ended(context_of(), ended))


@pytest.mark.parametrize(("exit_code", "outcome"), [(0, Outcome.SUCCESS), (7, Outcome.FAILED)])
def test_a_job_that_had_ended_when_its_lease_was_taken_ends_its_task(
    manager, gpu_launcher, preempted, exit_code, outcome
):
    gpu_launcher.ends("train", exit_code=exit_code, output='{"loss": 0.5}\n')
    operator = GPUTrainingOperator(task_id="t", gpus=8, command="train", team="nlp", server="gpu-server-0")
    with pytest.raises(TaskDeferred):
        operator.execute(context_of())
    preempted()
    if exit_code:
        with pytest.raises(AirflowException, match="the job ended with exit code 7"):
            operator.execute(context_of())
    else:
        assert operator.execute(context_of()) == {"loss": 0.5}
    [ended] = [change for change in manager.history() if change["change"] == "released"]
    assert ended["outcome"] == outcome
    assert manager.status_of("stronger")["state"] == "RUNNING"


def test_a_job_that_fails_while_nobody_takes_its_lease_fails_the_task(manager, gpu_launcher, preempted):
    operator = GPUTrainingOperator(task_id="t", gpus=8, command="train", team="nlp", server="gpu-server-0")
    with pytest.raises(TaskDeferred):
        operator.execute(context_of())
    ended = {"state": TriggerState.JOB_ENDED, "exit_code": 1, "last_line": "oh", "fencing_token": 1}
    with pytest.raises(AirflowException, match="the job ended with exit code 1: oh"):
        operator.execute_ended(context_of(), ended)


@pytest.mark.parametrize(
    ("work", "more", "outcome"),
    [
        ("success", "success", Outcome.SUCCESS),
        ("success", "failed", ""),
        ("success", None, ""),
        (OSError("no answer"), None, ""),
    ],
)
def test_a_release_teaches_a_runtime_only_if_all_of_the_group_succeeded(manager, work, more, outcome):
    with DAG("d") as dag, gpu_lease(gpus=2):
        BaseOperator(task_id="work") >> BaseOperator(task_id="more")
    allocated = replace(TASK, task_id="gpu_lease.allocate")
    manager.allocate_resources(allocated.lease_id, 2, 1, labels={**allocated.labels, "scope": "run"})
    states = {"gpu_lease.work": work, "gpu_lease.more": more, "gpu_lease.allocate": "success"}

    def get_task_states(dag_id, task_ids, run_ids, map_index):
        (asked,) = task_ids
        if isinstance(states[asked], Exception):
            raise states[asked]
        return {run_ids[0]: {asked: states[asked]} if states[asked] else {}}

    release = dag.get_task("gpu_lease.release")
    release.lease = manager.leases()[0]
    of_release = replace(TASK, task_id="gpu_lease.release")
    release.execute(context_of(of_release, get_task_states=get_task_states))
    (ended,) = [change for change in manager.history() if change["change"] == "released"]
    assert ended.get("outcome", "") == outcome


def test_a_lease_in_a_mapped_group_belongs_to_its_map_index():
    leases = []

    @task_group
    def group(number):
        with gpu_lease(gpus=2) as lease:
            leases.append(lease)

    with DAG("d"):
        group.override(group_id="plain")(1)
        group.expand(number=[1, 2])
    plain, mapped = leases
    assert plain.value("x") == "{{ ti.xcom_pull(task_ids='plain.gpu_lease.allocate')['x'] }}"
    pull = "ti.xcom_pull(task_ids='group.gpu_lease.allocate', map_indexes=ti.map_index)"
    assert mapped.value("x") == f"{{{{ {pull}['x'] }}}}"
    assert pull in mapped.docker_command("image")


@pytest.mark.parametrize(
    ("restart", "try_number", "max_tries", "jobs"),
    [
        (False, 2, 3, 1),
        (True, 2, 1, 1),  # a retry goes on with its job
        (True, 2, 2, 2),
        (True, 3, 2, 1),  # the retry after the first try since the clear
        (True, 1, 1, 1),
    ],
)
def test_a_cleared_task_starts_anew_only_if_it_is_asked_to(
    manager, gpu_launcher, restart, try_number, max_tries, jobs
):
    def execute(**tries):
        train = GPUTrainingOperator(task_id="t", gpus=2, command="true", retries=1, restart_on_clear=restart)
        with pytest.raises(TaskDeferred):
            train.execute(context_of(**tries))
        [lease] = manager.leases()
        return lease["fencing_token"]

    first = execute(max_tries=1)
    again = execute(try_number=try_number, max_tries=max_tries)
    assert (len(gpu_launcher.jobs), again == first) == (jobs, jobs == 1)


class Refuses(FakeLauncher):
    """Launcher that no connection is made to."""

    def prepare(self, job):
        raise LauncherUnreachableError(
            "server gpu-server-0 does not answer by ssh:\n" + 50 * "host key changed "
        )


def test_a_job_that_was_never_started_frees_its_gpus_at_once_and_says_why(manager, monkeypatch):
    """No connection was made, so nothing can run: the next try gets other GPUs."""
    for name in LAUNCHERS:
        monkeypatch.setitem(LAUNCHERS, name, lambda place: Refuses())
    operator = GPUTrainingOperator(task_id="t", gpus=8, command="train", launcher="ssh")
    with pytest.raises(AirflowException, match=r"^server gpu-server-0 does not answer by ssh:\nhost key"):
        operator.execute(context_of())
    assert manager.leases() == []
    ended = manager.history()[-1]
    assert (ended["outcome"], ended["failed_nodes"]) == ("FAILED", ["gpu-server-0"])
    assert ended["reason"].startswith("server gpu-server-0 does not answer by ssh")


def test_a_job_that_was_stopped_before_its_start_asks_for_gpus_again(manager, gpu_launcher, monkeypatch):
    """As after a worker was killed between the end of the job and the release of its lease."""
    gpu_launcher.runs("train")
    operator = GPUTrainingOperator(task_id="t", gpus=8, command="train")
    with pytest.raises(TaskDeferred):
        operator.execute(context_of())
    [before] = manager.leases()
    gpu_launcher.stop(gpu_launcher.jobs[0].key)
    with pytest.raises(TaskDeferred):
        operator.execute(context_of(try_number=2))
    [after] = manager.leases()
    assert after["fencing_token"] > before["fencing_token"]
    assert len(gpu_launcher.jobs) == 2


def test_the_lease_says_where_the_job_is_before_it_starts(manager, gpu_launcher, monkeypatch):
    seen = []
    start = gpu_launcher.start

    def starting(job):
        seen.append(manager.status_of(TASK.lease_id)["job_places"])
        start(job)

    monkeypatch.setattr(gpu_launcher, "start", starting)
    with pytest.raises(TaskDeferred):
        GPUTrainingOperator(task_id="t", gpus=8, command="train").execute(context_of())
    assert [place["machine"] for [place] in seen] == ["fake"]


def test_a_lease_that_was_revoked_is_ended_by_its_task(manager, gpu_launcher):
    gpu_launcher.runs("train")
    operator = GPUTrainingOperator(task_id="t", gpus=8, command="train")
    with pytest.raises(TaskDeferred):
        operator.execute(context_of())
    token = manager.status_of(TASK.lease_id)["fencing_token"]
    manager.release(TASK.lease_id, job_end="forced")
    with pytest.raises(AirflowException, match="the lease was ended by another client"):
        operator.execute_ended(context_of(), {"state": TriggerState.LEASE_LOST, "fencing_token": token})
    assert manager.leases() == []
    assert len(gpu_launcher.stopped) == 1
