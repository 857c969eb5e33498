"""What a DAG run is announced to ask for, from its serialised DAG and the number of its task instances."""

from __future__ import annotations

from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.providers.standard.operators.bash import BashOperator
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG, task

from resource_manager import GPUResourceManager
from resource_manager.airflow import (
    GPUAllocateOperator,
    GPUAvailableSensor,
    GPUTrainingOperator,
    announcing,
    with_gpus,
)
from resource_manager.airflow.announcing import announce, tasks_to_come
from resource_manager.core.announced import MAX_AFTER, MAX_AFTER_BYTES, MAX_OF_RUN

BashWithGPUs = with_gpus(BashOperator, gpus=2, expected_runtime=timedelta(hours=2))


def serialised(dag: DAG) -> Any:
    """Return the DAG as a scheduler has it."""
    try:
        from airflow.serialization.serialized_objects import DagSerialization as Serialization
    except ImportError:  # before 3.1
        from airflow.serialization.serialized_objects import SerializedDAG as Serialization  # type: ignore[assignment, attr-defined]
    return Serialization.from_dict(Serialization.to_dict(dag))


def run_of(dag: DAG, monkeypatch: pytest.MonkeyPatch, **instances: int) -> Any:
    """Return a run of the DAG, with so many unfinished task instances of each task, else one."""
    counts = dict.fromkeys(dag.task_ids, 1) | instances
    monkeypatch.setattr(announcing, "_instances", lambda _: {name: n for name, n in counts.items() if n})
    return SimpleNamespace(
        dag=serialised(dag), dag_id=dag.dag_id, run_id="r", team_name=None, triggering_user_name=None
    )


def train(task_id: str, **demand: Any) -> Any:
    return GPUTrainingOperator(task_id=task_id, command=["true"], **{"gpus": 2, **demand})


def test_each_task_with_a_plain_demand_comes_after_the_nearest_ones_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with DAG("etl", start_date=datetime(2024, 1, 1), schedule=None) as dag:
        prepare = BashOperator(task_id="prepare", bash_command="true")
        first = train("first", gpus=4, gpu_types=["A100"], expected_runtime=timedelta(days=1, hours=1))
        bash = BashWithGPUs(task_id="bash", bash_command="true", gpu_demand={"cpus": 3})
        join = EmptyOperator(task_id="join")
        mapped = GPUTrainingOperator.partial(task_id="mapped", gpus=2).expand(command=[["a"]] * 5)
        rendered = train("rendered", gpus="{{ params.gpus }}")

        @task.gpu(gpus=2)
        def last() -> None: ...

        prepare >> first >> [bash, join] >> mapped >> rendered >> last()
    tasks = {each.task_id: each for each in tasks_to_come(run_of(dag, monkeypatch, mapped=5))}
    assert {name: each.after for name, each in tasks.items()} == {
        "first": (),
        "bash": ("first",),
        "mapped": ("bash", "first"),
        "last": ("mapped",),
    }, "the demand of `rendered` is known in its task alone"
    assert (tasks["mapped"].copies, tasks["first"].copies) == (5, 1)
    assert tasks["first"].demand["expected_runtime"] == timedelta(days=1, hours=1)

    with GPUResourceManager.from_url("memory://") as manager:
        announce(manager, "i", "etl", "r", tasks.values())
        coming = {each["name"]: each for each in manager.coming()}
        runtimes = manager.read(
            lambda cluster, now: [a.request.expected_runtime_s for a in cluster.announced.values()]
        )
    assert coming.keys() == {f"etl.{name}" for name in tasks}
    assert coming["etl.first"]["gpu_types"] == ["A100"]
    assert coming["etl.bash"]["required_gpus"] == 2
    assert sorted(filter(None, runtimes)) == [7200.0, 90_000.0]


def test_a_mapped_task_of_with_gpus_asks_for_what_its_class_does_unless_its_copies_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operator: Any = BashWithGPUs
    rendered: Any = with_gpus(BashOperator, gpus="{{ params.gpus }}")
    each = {"bash_command": ["a", "b"]}
    with DAG("etl", start_date=datetime(2024, 1, 1), schedule=None) as dag:
        operator.partial(task_id="mapped", gpu_demand={"cpus": 3}).expand(**each)
        operator.partial(task_id="kwargs").expand_kwargs([{"bash_command": "a"}])
        operator.partial(task_id="differ", bash_command="a").expand(gpu_demand=[{"gpus": 1}, {"gpus": 4}])
        operator.partial(task_id="rows").expand_kwargs([{"bash_command": "a", "gpu_demand": {"gpus": 1}}])
        rendered.partial(task_id="rendered").expand(**each)
    tasks = {each.task_id: each.demand for each in tasks_to_come(run_of(dag, monkeypatch))}
    assert tasks.keys() == {"mapped", "kwargs"}
    assert {name: tasks["mapped"][name] for name in ("gpus", "cpus", "expected_runtime")} == {
        "gpus": 2,
        "cpus": 3,
        "expected_runtime": 7200.0,
    }


def test_a_mapped_function_asks_for_what_its_decorator_says(monkeypatch: pytest.MonkeyPatch) -> None:
    with DAG("etl", start_date=datetime(2024, 1, 1), schedule=None) as dag:

        @task.gpu(gpus=1, resources={"memory_mib": 8})
        def mapped(x: int) -> None: ...

        mapped.expand(x=[1, 2])
    [each] = tasks_to_come(run_of(dag, monkeypatch, mapped=2))
    assert (each.demand["gpus"], each.demand["resources"], each.copies) == (1, {"memory_mib": 8}, 2)


def test_what_will_not_ask_for_a_lease_of_this_cluster_is_not_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would stand in what is to come until its run ends, and what comes after it would have no time."""
    other: Any = with_gpus(BashOperator, gpus=2, gpu_conn_id="other")
    with DAG("etl", start_date=datetime(2024, 1, 1), schedule=None) as dag:
        others = [train("on_slurm", launcher="slurm"), train("elsewhere", gpu_conn_id="other")]
        GPUAvailableSensor(task_id="looks", gpus=4) >> others >> train("here")
        other(task_id="bash", bash_command="true")
        other.partial(task_id="mapped").expand(bash_command=["true"])
        GPUTrainingOperator.partial(task_id="trains", gpus=2, gpu_conn_id="other").expand(command=["a"])
        GPUTrainingOperator.partial(task_id="each", gpus=2, command="a").expand(gpu_conn_id=["other"])
    assert [(each.task_id, each.after) for each in tasks_to_come(run_of(dag, monkeypatch))] == [("here", ())]


@pytest.mark.parametrize("elsewhere", [{"gpu_conn_id": "other"}, {"launcher": "slurm"}])
def test_a_mapped_task_asks_for_what_the_default_arguments_of_its_dag_say(
    monkeypatch: pytest.MonkeyPatch, elsewhere: dict[str, str]
) -> None:
    """It was announced to the default cluster, and stayed there until its run ended."""

    def announced(**default_args: Any) -> dict[str, int]:
        with DAG("etl", start_date=datetime(2024, 1, 1), schedule=None, default_args=default_args) as dag:
            GPUTrainingOperator.partial(task_id="mapped").expand(command=["a", "b"])
            GPUTrainingOperator.partial(task_id="own", gpus=1).expand(command=["a", "b"])
            GPUTrainingOperator.partial(task_id="differ", command="a").expand(gpus=[1, 4])
        return {each.task_id: each.demand["gpus"] for each in tasks_to_come(run_of(dag, monkeypatch))}

    assert announced(gpus=2) == {"mapped": 2, "own": 1}
    assert announced(gpus=2, **elsewhere) == {}


def test_a_default_argument_of_the_dag_says_nothing_of_tasks_that_do_not_take_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A default launcher took those that ask for a lease all the same out of what is to come."""
    with DAG(
        "etl", start_date=datetime(2024, 1, 1), schedule=None, default_args={"launcher": "slurm"}
    ) as dag:

        @task.gpu(gpus=1)
        def mapped(x: int) -> None: ...

        mapped.expand(x=[1, 2])
        GPUAllocateOperator.partial(task_id="allocates", gpus=1).expand(cpus=[1, 2])
        GPUTrainingOperator.partial(task_id="on_slurm", gpus=1).expand(command=["a", "b"])
    assert {each.task_id for each in tasks_to_come(run_of(dag, monkeypatch))} == {"mapped", "allocates"}


def test_finished_tasks_of_a_cleared_run_and_unknown_numbers_of_mapped_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with DAG("etl", start_date=datetime(2024, 1, 1), schedule=None) as dag:

        @task
        def commands() -> list[list[str]]:
            return [["true"]]

        mapped = GPUTrainingOperator.partial(task_id="mapped", gpus=2).expand(command=commands())
        train("done") >> mapped
    [each] = tasks_to_come(run_of(dag, monkeypatch, done=0))
    assert (each.task_id, each.copies, each.after) == ("mapped", 0, ("done",))


def test_a_dag_of_two_thousand_tasks_is_cut_and_one_that_is_wrong_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with DAG("wide", start_date=datetime(2024, 1, 1), schedule=None) as dag:
        end = train("end")
        for number in range(2000):
            EmptyOperator(task_id=f"t{number}") >> end
        for number in range(MAX_OF_RUN + 50):
            train(f"g{number}") >> end
    tasks = tasks_to_come(run_of(dag, monkeypatch))
    assert len(tasks) == MAX_OF_RUN
    assert "end" not in {each.task_id for each in tasks}, "the next ones come first"
    with DAG("wrong", start_date=datetime(2024, 1, 1), schedule=None) as dag:
        train("large", gpus=64)
        train("weighty", priority_weight=1_000_000)
    with GPUResourceManager.from_url("memory://") as manager:
        announce(manager, "i", "wrong", "r", tasks_to_come(run_of(dag, monkeypatch)))
        assert [(each["name"], each["priority"]) for each in manager.coming()] == [("wrong.weighty", 1000)]


def test_a_task_after_many_with_long_ids_is_announced_after_as_many_as_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [f"{number:02d}{'x' * 180}" for number in range(MAX_AFTER)]
    with DAG("d" * 180, start_date=datetime(2024, 1, 1), schedule=None) as dag:
        [train(name) for name in names] >> train("last")
    [last] = [each for each in tasks_to_come(run_of(dag, monkeypatch)) if each.task_id == "last"]
    with GPUResourceManager.from_url("memory://") as manager:
        announce(manager, "i", dag.dag_id, "r", [last])
        [known] = manager.read(lambda cluster, now: [*cluster.announced.values()])
    sizes = [len(name) + len(f"i/{dag.dag_id}/r/") for name in names]
    assert len(known.after) == MAX_AFTER_BYTES // sizes[0] < MAX_AFTER


def test_a_dag_without_gpus_costs_no_query() -> None:
    with DAG("plain", start_date=datetime(2024, 1, 1), schedule=None) as dag:
        EmptyOperator(task_id="t")
    run = SimpleNamespace(dag=serialised(dag))  # without the ids by which its task instances are read
    assert tasks_to_come(run) == []
