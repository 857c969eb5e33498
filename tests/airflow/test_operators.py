"""Operators: the job of a training, the lease of a task group, and their ends."""

import os
import sys
import warnings
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from airflow.providers.standard.operators.bash import BashOperator
    from airflow.sdk import DAG, BaseOperator, TaskGroup, task_group
    from airflow.sdk.api.datamodels._generated import TaskInstanceState
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    from resource_manager.airflow import (
        GPUAllocateOperator,
        GPUReleaseOperator,
        GPUTrainingOperator,
        gpu_lease,
        listener,
    )
    from resource_manager.airflow.operators import lease
    from resource_manager.airflow.task_trigger.events import EndState
    from resource_manager.airflow.version_compat import (
        AirflowException,
        AirflowFailException,
        AirflowTaskTerminated,
    )

from resource_manager.agent.probe import registered_job
from resource_manager.core.changes import Outcome
from resource_manager.core.models import Gpu, Node
from resource_manager.jobs.launchers import LauncherUnreachableError, job_key
from resource_manager.jobs.launchers.fake import FakeLauncher
from tests.agent.reporting import server
from tests.airflow.asking import report_of
from tests.airflow.tasks import TASK, again, asked, context_of, deferral, ended, fire, until
from tests.eventually import wait_for

pytestmark = pytest.mark.usefixtures("notes", "wanted", "fast_triggers")


def started(launcher, **arguments):
    """Return the job that a training starts, in a try of its own."""
    task_id = f"t{len(launcher.jobs)}"
    operator = GPUTrainingOperator(task_id=task_id, **{"command": "train", **arguments})
    left = deferral(lambda: operator.execute(context_of(replace(TASK, task_id=task_id))))
    assert left.method_name == "execute_ended"
    known = len(launcher.jobs)
    until(left.trigger, lambda: len(launcher.jobs) > known)
    return launcher.jobs[-1]


def test_a_try_needs_a_worker_twice_to_ask_and_to_collect(manager, gpu_launcher):
    for number in range(4):
        manager.submit(f"holds{number}", 8, 8)
    gpu_launcher.ends("train", output='epoch 1\n{"loss": 0.25}\n')
    operator, runs = GPUTrainingOperator(task_id="t", gpus=8, command="train"), []
    runs.append("asks")
    left = deferral(lambda: operator.execute(context_of()))
    event = fire(left.trigger, lambda: manager.release_resources("holds2"))
    assert manager.status_of(TASK.lease_id) is None, "its GPUs are free before a worker collects"
    runs.append("collects")
    assert getattr(operator, left.method_name)(context_of(), event=event) == {"loss": 0.25}
    assert runs == ["asks", "collects"]


def in_worker(operator, **state):
    """Return the task instance as listeners in its worker get it."""
    fields: dict[str, Any] = {"task": operator, **vars(context_of()["ti"]), **state}
    return RuntimeTaskInstance.model_construct(**fields)


@pytest.mark.parametrize("exit_code", [0, 3])
def test_an_end_is_kept_until_airflow_has_it(manager, gpu_launcher, variables, wanted, exit_code):
    """What is left of a try may fail, such as the XCom with the result: then the job does not run again."""
    gpu_launcher.ends("train", exit_code=exit_code)
    operator = GPUTrainingOperator(task_id="t", gpus=8, command="train")
    event = fire(asked(operator))
    assert len(variables) == 1
    with suppress(AirflowException):
        operator.execute_ended(context_of(), event)
    assert len(variables) == (exit_code == 0), "the next try of a job that failed is a new one"
    listener.on_task_instance_failed(previous_state=None, task_instance=in_worker(operator), error=None)
    listener.on_task_instance_success(previous_state=None, task_instance=in_worker(BaseOperator(task_id="t")))
    assert len(variables) == (exit_code == 0)
    listener.on_task_instance_success(previous_state=None, task_instance=in_worker(operator))
    assert len(variables) == (exit_code == 0), "Airflow has refused the success, and another try comes"
    wanted(False)
    listener.on_task_instance_success(previous_state=None, task_instance=in_worker(operator))
    assert variables == {}


@pytest.mark.parametrize("state", [TaskInstanceState.UP_FOR_RETRY, TaskInstanceState.FAILED])
def test_a_success_is_kept_for_the_next_try_while_there_is_one(manager, gpu_launcher, variables, state):
    """As where Airflow refuses the result of each try; else it stays among Airflow's Variables for good."""
    operator = GPUTrainingOperator(task_id="t", gpus=8, command="train")
    fire(asked(operator))
    listener.on_task_instance_failed(None, in_worker(operator, state=state), None)
    assert len(variables) == (state is TaskInstanceState.UP_FOR_RETRY)


def test_a_run_that_is_made_again_does_not_take_an_end_of_the_deleted_one(manager, gpu_launcher, variables):
    operator = GPUTrainingOperator(task_id="t", gpus=8, command="train")
    fire(asked(operator))
    assert len(variables) == 1
    fire(asked(operator))
    assert len(gpu_launcher.jobs) == 2


@pytest.mark.parametrize("exit_code", [0, 3])
def test_a_retry_collects_the_end_that_no_worker_has_collected_and_asks_for_nothing(
    manager, gpu_launcher, variables, exit_code
):
    gpu_launcher.ends("train", exit_code=exit_code, output='{"loss": 0.25}\n')
    operator = GPUTrainingOperator(task_id="t", gpus=8, command="train", retries=2)
    fire(asked(operator, max_tries=2))  # its event is lost
    before = manager.history()
    in_retry = context_of(try_number=2, max_tries=2)
    if exit_code:
        with pytest.raises(AirflowException, match="exit code 3"):
            operator.execute(in_retry)
    else:
        assert operator.execute(in_retry) == {"loss": 0.25}
        again = context_of(try_number=3, max_tries=2)
        assert operator.execute(again) == {"loss": 0.25}, "Airflow could not store the result"
    assert (manager.history(), len(variables)) == (before, exit_code == 0)


def test_a_cleared_task_does_not_take_an_end_of_before_for_its_own(manager, gpu_launcher, variables):
    operator = GPUTrainingOperator(task_id="t", gpus=8, command="train", retries=1)
    fire(asked(operator, max_tries=1))
    assert len(variables) == 1
    asked(operator, try_number=2, max_tries=2)
    assert variables == {}


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"container": {"callback": print}}, "container cannot be stored with the request: .*builtin"),
        ({"command": 70_000 * "x"}, "have 70,[0-9]+ bytes together, at most 65,536"),
        ({"command": None}, "command is missing: only an image has one of its own"),
        (
            {"env": "{'A': '1'}"},
            "t: env must be a dictionary, got a str: one template for all of it needs a ",
        ),
        ({"slurm": "{'qos': 'high'}", "launcher": "slurm"}, "t: slurm must be a dictionary, got a str"),
        ({"launcher": "shh"}, "t: launcher must be one of .*, got 'shh'"),
        ({"launcher": "ssh", "image": "train:1"}, "t: the ssh launcher runs no images"),
    ],
)
def test_what_cannot_be_handed_to_the_triggerer_is_refused_before_it_asks(manager, wrong, reason):
    operator = GPUTrainingOperator(task_id="t", gpus=2, command="{{ params.command }}")
    vars(operator).update({"command": "train", **wrong})  # as rendered
    with pytest.raises(AirflowFailException, match=reason):
        operator.execute(context_of())
    assert manager.leases() == []


def test_numbers_and_none_of_native_templates_are_accepted(manager, gpu_launcher):
    gpu_launcher.runs()
    odd = {"gpu_types": None, "team": 5}
    words = ["train", "--epochs", 3]
    assert started(gpu_launcher, gpus=2, command=words, **odd).command == ("train", "--epochs", "3")
    rendered: Any = None
    of_image = GPUTrainingOperator(task_id="t", gpus=2, image="train:1", command=rendered)
    assert of_image.job_template().command == ()
    assert [lease["team"] for lease in manager.leases()] == ["5"]


ONE_GPU = [Node("a", 0, {"cpus": 8}, (Gpu(0, "A100", memory_mib=81920),))]


@pytest.mark.skipif(sys.platform != "linux", reason="processes register themselves on Linux")
@pytest.mark.parametrize("gpu_inventory", [[server(gpus=2)]])
def test_a_task_in_a_lease_is_known_as_its_job_and_told_when_it_idles(manager, idle_told, capfd):
    with DAG("d") as dag, gpu_lease(gpus=2, idle_after=1e-6):
        BaseOperator(task_id="before")
        with TaskGroup("inner"):
            BaseOperator(task_id="work")
    BaseOperator(task_id="outside", dag=dag)
    allocate: Any = dag.get_task("gpu_lease.allocate")
    allocation = allocate.execute(context_of(replace(TASK, task_id="allocate")))
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
    wait_for(idle_told.is_set)
    assert "have computed nothing for" in capfd.readouterr().out


@pytest.mark.parametrize("gpu_inventory", [ONE_GPU])
def test_the_operators_limit_a_job_to_its_gpu_fraction(gpu_launcher):
    gpu_launcher.runs()
    with DAG("d"), gpu_lease(gpus=1, gpu_milli=500) as lease:
        pass
    environment = started(gpu_launcher, gpus=1, gpu_milli=250, command="true").environment
    assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=20480M"
    shared = lease.environment()
    assert shared["CUDA_VISIBLE_DEVICES"] == shared["NVIDIA_VISIBLE_DEVICES"] == lease.devices
    assert (shared["CUDA_DEVICE_ORDER"], shared["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]) == ("PCI_BUS_ID", "50")


def test_a_gpu_fraction_that_a_template_gives_is_in_the_environment_once_it_is_known():
    with DAG("d"), gpu_lease(gpus=1, gpu_milli="{{ params.milli }}") as lease:
        work: Any = BashOperator(task_id="work", bash_command="true", env=lease.environment())
    allocation = {"gpu_milli": 125, "gpu_ids": [0], "gpu_uuids": [], "server_name": "a", "task_id": "t"}
    work.render_template_fields({"ti": SimpleNamespace(xcom_pull=lambda task_ids: allocation)})
    assert work.env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "12.5"
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in lease.environment("amd")


NESTED = "[" * 300 + "]" * 300


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ('{"loss": 0.5}', {"loss": 0.5}),
        ("epoch 3", "epoch 3"),
        *((line, line) for line in ('{"loss": NaN}', "-Infinity", "1e999", "9" * 30, r'"\ud800"')),
        *(
            (line, line)
            for line in (
                r'"a\u0000b"',
                r'[{"\u0000": 1}]',
                '{"__id__": 5}',
                '[{"__classname__": 1}]',
                '{"__type": "dict", "__var": {}}',
            )
        ),
        ('"a\0b"', '"a\ufffdb"'),
        pytest.param("[" * 100_000, "[" * 100_000, id="deep"),
        pytest.param(NESTED, NESTED, id="nested"),
        ('{"a": [[1], {"b": "c"}]}', {"a": [[1], {"b": "c"}]}),
    ],
)
def test_the_last_line_is_json_only_where_an_xcom_can_hold_it(manager, line, value):
    ended = {"state": EndState.JOB_ENDED, "exit_code": 0, "last_line": line}
    assert (
        GPUTrainingOperator(task_id="t", gpus=2, command="train").execute_ended(context_of(), ended) == value
    )


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
def test_the_use_of_the_gpus_is_a_line_of_the_log_and_an_xcom(manager, said_by, usage, line):
    train = GPUTrainingOperator(task_id="t", gpus=2, command="train")
    said, pushed = said_by(train), {}
    context = context_of(xcom_push=lambda key, value: pushed.update({key: value}))
    ended = {"state": EndState.JOB_ENDED, "exit_code": 0, "last_line": "1", "gpu_usage": usage}
    assert train.execute_ended(context, ended) == 1
    assert line in said
    assert pushed == {"gpu_usage": usage}


def test_a_task_ended_by_a_user_does_not_start_its_job(manager, connect, gpu_launcher, wanted):
    """Airflow calls `on_kill` from a signal handler and continues `execute` unless it raises."""
    train = GPUTrainingOperator(task_id="t", gpus=2, command="true")

    def submit_and_kill(*asked, **demand):
        status = manager.submit(*asked, **demand)
        wanted(True)
        train.on_kill()
        assert len(manager.leases()) == 1
        wanted(False)
        train.on_kill()
        return status

    connect(Mock(wraps=manager, submit=submit_and_kill))
    with pytest.raises(AirflowTaskTerminated):
        train.execute(context_of())
    assert manager.leases() == gpu_launcher.jobs == []


@pytest.mark.parametrize(
    ("work", "more", "outcome"),
    [
        ("success", "success", Outcome.SUCCESS),
        ("success", "failed", ""),
        ("success", None, ""),
        (OSError("no answer"), None, ""),
    ],
)
def test_a_release_teaches_a_runtime_only_if_all_of_the_group_succeeded(
    manager, monkeypatch, work, more, outcome
):
    """If not, a user may have ended a task, whose process has some seconds until the GPUs are free."""
    monkeypatch.setattr(lease, "ENDING_S", 0.2)
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

    release: Any = dag.get_task("gpu_lease.release")
    release.lease = manager.leases()[0]
    of_release = replace(TASK, task_id="gpu_lease.release")
    context = context_of(of_release, get_task_states=get_task_states)
    if outcome:
        release.execute(context)
    else:
        waits = deferral(lambda: release.execute(context))
        event = fire(waits.trigger)
        assert len(manager.leases()) == 1
        getattr(release, waits.method_name)(context, event=event)
    (ended,) = [change for change in manager.history() if change["change"] == "released"]
    assert ended.get("outcome", "") == outcome


def test_a_release_waits_for_a_task_of_its_lease_that_a_user_has_cleared_meanwhile(manager):
    with DAG("d") as dag, gpu_lease(gpus=2):
        BaseOperator(task_id="work")
    allocate: Any = dag.get_task("gpu_lease.allocate")
    release: Any = dag.get_task("gpu_lease.release")
    allocated = context_of(replace(TASK, task_id="gpu_lease.allocate"))
    release.lease = allocate.execute(allocated)
    states = {"gpu_lease.work": "failed"}
    context = context_of(get_task_states=lambda **_: {"r": states})
    waits = deferral(lambda: release.execute(context)).trigger
    assert waits.pause_s == 0.0, "in a test of a DAG nobody waits for processes"
    event = fire(waits)
    states["gpu_lease.work"] = "running"
    deferral(lambda: release.execute_release(context, event))
    assert len(manager.leases()) == 1
    states["gpu_lease.work"] = "success"
    release.execute_release(context, event)
    assert manager.leases() == []


@pytest.mark.parametrize("gpu_inventory", [[server(gpus=2)]])
def test_a_release_waits_for_no_process_where_an_agent_sees_it(manager):
    with DAG("d") as dag, gpu_lease(gpus=2):
        BaseOperator(task_id="work")
    allocate: Any = dag.get_task("gpu_lease.allocate")
    release: Any = dag.get_task("gpu_lease.release")
    release.lease = allocate.execute(context_of())
    report_of(manager)
    release.execute(context_of(get_task_states=lambda **_: {"r": {"work": "failed"}}))
    assert manager.leases() == []


def test_a_task_of_a_lease_that_has_ended_is_refused(manager):
    """Who clears a task alone, after the release, gets none of the GPUs, which may be others' by then."""
    with DAG("d") as dag, gpu_lease(gpus=2):
        BaseOperator(task_id="work")
        BaseOperator(task_id="clean").as_teardown()
    allocate: Any = dag.get_task("gpu_lease.allocate")
    allocation = allocate.execute(context_of())
    manager.release_resources(allocation["task_id"])
    allocate.execute(context_of())
    for task_id, error in (
        ("gpu_lease.work", pytest.raises(AirflowFailException, match=r"clear gpu_lease\.allocate, too")),
        ("gpu_lease.clean", pytest.raises(NotImplementedError)),
    ):
        task: Any = dag.get_task(task_id)
        lease.join_lease(SimpleNamespace(task=task, xcom_pull=lambda task_ids: allocation))
        with error:
            task.execute(context_of())


def test_a_task_that_resumes_once_its_lease_has_ended_is_refused(manager):
    with DAG("d") as dag, gpu_lease(gpus=2):
        BaseOperator(task_id="work")
    allocate: Any = dag.get_task("gpu_lease.allocate")
    allocation = allocate.execute(context_of())
    manager.release_resources(allocation["task_id"])
    task: Any = dag.get_task("gpu_lease.work")
    lease.join_lease(SimpleNamespace(task=task, xcom_pull=lambda task_ids: allocation))
    with pytest.raises(AirflowFailException, match=r"clear gpu_lease\.allocate, too"):
        task.resume_execution(next_method="execute_complete", next_kwargs={}, context=context_of())


def test_a_task_of_a_group_is_under_the_lease_that_is_allocated_before_it_and_released_after_it():
    """Others of the group would be refused for a lease that they do not need, or that ended as it should."""
    with DAG("d") as dag, TaskGroup("g"):
        steps = {}
        for name in ("first", "second"):
            allocate = GPUAllocateOperator(task_id=f"allocate_{name}", gpus=1)
            release = GPUReleaseOperator(task_id=f"release_{name}", lease=allocate.output)
            allocate >> BaseOperator(task_id=f"work_{name}") >> release
            steps[name] = allocate, release
        steps["first"][1] >> BaseOperator(task_id="between") >> steps["second"][0]
        steps["second"][1] >> BaseOperator(task_id="notify")
        BaseOperator(task_id="beside")
        steps["second"][0] >> BaseOperator(task_id="report")
    pulled = []
    for task_id in ("work_first", "between", "work_second", "notify", "beside", "report"):
        task = dag.get_task(f"g.{task_id}")
        lease.join_lease(SimpleNamespace(task=task, xcom_pull=lambda task_ids: pulled.append(task_ids)))
    assert pulled == ["g.allocate_first", "g.allocate_second"]


def test_a_task_is_under_a_lease_that_nothing_releases_before_its_run_is_over():
    with DAG("d") as dag, TaskGroup("g"):
        GPUAllocateOperator(task_id="allocate", gpus=1) >> BaseOperator(task_id="work")
    pulled = []
    lease.join_lease(
        SimpleNamespace(task=dag.get_task("g.work"), xcom_pull=lambda task_ids: pulled.append(task_ids))
    )
    assert pulled == ["g.allocate"]


def test_a_pair_outside_of_any_group_is_a_lease_of_the_tasks_between_it():
    with DAG("d") as dag:
        allocate = GPUAllocateOperator(task_id="allocate", gpus=1)
        release = GPUReleaseOperator(task_id="release", lease=allocate.output)
        with TaskGroup("g"):
            inner = BaseOperator(task_id="inner")
        between = [BaseOperator(task_id="work"), inner]
        BaseOperator(task_id="before") >> allocate >> between >> release >> BaseOperator(task_id="after")
    pulled = []
    for task in dag.tasks:
        under = SimpleNamespace(task=task, xcom_pull=lambda task_ids, by=task.task_id: pulled.append(by))
        lease.join_lease(under)
    assert sorted(pulled) == ["g.inner", "work"]


NO_ALLOCATION = [{"task_id": "t", "fencing_token": 1}], "abc", 3, {"a": 1}


@pytest.mark.parametrize("value", NO_ALLOCATION)
def test_a_release_of_anything_but_an_allocation_says_what_it_takes(manager, value):
    release = GPUReleaseOperator(task_id="release", lease=value)
    with pytest.raises(AirflowFailException, match=r"lease must be the allocation of one .*expand\(lease="):
        release.execute(context_of())


def test_one_release_of_a_mapped_allocation_is_an_import_error_and_a_mapped_one_is_not():
    with DAG("d"):
        allocate = GPUAllocateOperator.partial(task_id="allocate").expand(gpus=[1, 2])
        GPUReleaseOperator.partial(task_id="release").expand(lease=allocate.output)
        with pytest.raises(TypeError, match=r"^again: lease must be the allocation of one "):
            GPUReleaseOperator(task_id="again", lease=allocate.output)


def test_a_task_after_a_mapped_allocation_is_of_none_of_its_leases(manager):
    with DAG("d") as dag:
        allocate = GPUAllocateOperator.partial(task_id="allocate").expand(gpus=[1, 2])
        allocate >> BaseOperator(task_id="work")
    with pytest.raises(AirflowException, match=r"allocate is mapped: put it .* into a mapped task group"):
        lease.join_lease(SimpleNamespace(task=dag.get_task("work")))


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
    manager, gpu_launcher, notes, restart, try_number, max_tries, jobs
):
    gpu_launcher.runs()

    def execute(jobs, **tries):
        train = GPUTrainingOperator(task_id="t", gpus=2, command="true", retries=1, restart_on_clear=restart)
        left = deferral(lambda: train.execute(context_of(**tries)))
        until(left.trigger, lambda: "job_log_place" in notes and len(gpu_launcher.jobs) == jobs)
        [lease] = manager.leases()
        notes.clear()
        return lease["fencing_token"], left.trigger.after_token

    first, _ = execute(1, max_tries=1)
    again, after = execute(jobs, try_number=try_number, max_tries=max_tries)
    assert (len(gpu_launcher.jobs), again == first) == (jobs, jobs == 1)
    assert after == (first if jobs == 2 else 0)


@pytest.mark.parametrize(
    ("max_tries", "clears", "jobs"),
    [
        (2, 0, 1),  # a retry, as try 1 could not reach the job
        (2, 1, 2),
        (3, 0, 2),  # Airflow 3.0 and 3.1 count no clear of a run that goes on
    ],
)
def test_a_retry_does_not_look_like_a_clear_when_the_dag_has_fewer_retries_than_its_run_began_with(
    manager, gpu_launcher, notes, max_tries, clears, jobs
):
    gpu_launcher.runs()

    def execute(retries, jobs, clears=0, **tries):
        arguments: Any = {"command": "true", "retries": retries, "restart_on_clear": True}
        operator = GPUTrainingOperator(task_id="t", gpus=2, **arguments)
        context = {**context_of(**tries), "dag_run": SimpleNamespace(clear_number=clears)}
        left = deferral(lambda: operator.execute(context))
        until(left.trigger, lambda: "job_log_place" in notes and len(gpu_launcher.jobs) == jobs)
        notes.clear()

    execute(2, 1, max_tries=2)
    execute(max_tries - 1, jobs, clears, try_number=2, max_tries=max_tries)
    assert len(gpu_launcher.jobs) == jobs


class Refuses(FakeLauncher):
    """Launcher that no connection is made to."""

    def prepare(self, job):
        raise LauncherUnreachableError(
            "server gpu-server-0 does not answer by ssh:\n" + 50 * "host key changed "
        )


def test_a_job_that_was_never_started_frees_its_gpus_at_once_and_says_why(manager, launch_by):
    """No connection was made, so nothing can run: the next try gets other GPUs."""
    launch_by(lambda place: Refuses())
    operator = GPUTrainingOperator(task_id="t", gpus=8, command="train", launcher="ssh")
    with pytest.raises(AirflowException, match=r"^server gpu-server-0 does not answer by ssh:\nhost key"):
        ended(operator)
    assert manager.leases() == []
    released = manager.history()[-1]
    assert (released["outcome"], released["failed_nodes"]) == ("FAILED", ["gpu-server-0"])
    assert released["reason"].startswith("server gpu-server-0 does not answer by ssh")


def test_a_job_that_was_stopped_before_its_start_asks_for_gpus_again(manager, gpu_launcher, notes):
    """As after a worker was killed between the end of the job and the release of its lease."""
    gpu_launcher.runs("train")
    trigger = asked(GPUTrainingOperator(task_id="t", gpus=8, command="train"))
    until(trigger, gpu_launcher.running)
    [before] = manager.leases()
    gpu_launcher.stop(gpu_launcher.jobs[0].key)
    notes.clear()
    until(again(trigger), gpu_launcher.running)
    [after] = manager.leases()
    assert after["fencing_token"] > before["fencing_token"]
    assert len(gpu_launcher.jobs) == 2


def test_the_lease_says_where_the_job_is_before_it_starts(manager, launch_by, gpu_launcher):
    seen = []

    def starting(job):
        seen.append(manager.status_of(TASK.lease_id)["job_places"])
        gpu_launcher.start(job)

    launch_by(lambda place: Mock(wraps=gpu_launcher, start=starting))
    ended(GPUTrainingOperator(task_id="t", gpus=8, command="train"))
    assert [place["machine"] for [place] in seen] == ["fake"]
