"""Templates: the text of a trigger form is inserted, and not rendered a second time."""

from __future__ import annotations

import shlex
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow warns on import
    from airflow.dag_processing.dagbag import DagBag
    from airflow.sdk import DAG

    from resource_manager.airflow import GPUAllocateOperator, GPUTrainingOperator
    from resource_manager.airflow.operators.lease import GPULease
    from resource_manager.airflow.task_demand import demand_of
    from resource_manager.airflow.version_compat import AirflowException, AirflowFailException

from resource_manager import GPUResourceManager
from resource_manager.jobs.launchers import build_docker_cmd
from resource_manager.jobs.task_identity import TaskIdentity
from tests.airflow.asking import ask
from tests.conftest import ROOT
from tests.security import hostile

EVIL = (*hostile.TEMPLATES, "{{ params.secret }}", "{{ ''.__class__.__mro__ }}", "{%- for x in () %}")


def rendered(operator: Any, **context: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # pragma: allowlist nextline secret
        operator.render_template_fields({"params": {"secret": "hunter2", **context}, **context})
    return operator


@pytest.mark.parametrize("text", EVIL)
def test_form_values_are_rendered_once(text: str) -> None:
    with DAG("d", schedule=None):
        operator = GPUTrainingOperator(
            task_id="t",
            gpus="{{ params.gpus }}",
            command=["train", "--name", "{{ params.name }}"],
            env={"NAME": "{{ params.name }}"},
            image="{{ params.name }}",
            server="{{ params.name }}",
            prefer_server="{{ params.name }}",
            team="{{ params.name }}",
            gpu_types="{{ params.name }}",
        )
    found = rendered(operator, name=text, gpus=2)
    assert found.command == ["train", "--name", text]
    assert found.env == {"NAME": text}
    fields = (found.image, found.server, found.prefer_server, found.team, found.gpu_types)
    assert fields == (text,) * 5
    assert found.gpus == "2"


def test_the_example_form_passes_templates_on_as_text() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dag = DagBag(str(ROOT / "dags" / "submit_training.py")).dags["submit_training"]
    params = {
        **dag.params.dump(),
        "command": "echo {{ 7 * 7 }}",
        "image": "{{ 7 * 7 }}",
        "gpus": 2,
        "cpus": 1,
        "prefer_server": "{{ 8 }}",
    }
    found = rendered(dag.get_task("train"), **params)
    assert (found.command, found.image, found.prefer_server) == ("echo {{ 7 * 7 }}", "{{ 7 * 7 }}", "{{ 8 }}")


@pytest.mark.parametrize(
    "text", [*EVIL, *hostile.SHELL, *hostile.OPTIONS[:1], 'it\'s "quoted"', "a') }}{{ 7"]
)
def test_the_docker_command_of_a_lease_keeps_its_words_apart(text: str) -> None:
    """`GPULease.docker_command` puts an image and a command into the source of a template."""
    with DAG("d", schedule=None):
        lease = GPULease(GPUAllocateOperator(task_id="allocate", gpus=2))
        command = f"train {shlex.quote(text)}"
        operator = GPUTrainingOperator(task_id="t", gpus=2, command=lease.docker_command("image:1", command))
    allocation = {"task_id": "t", "gpu_ids": [0, 1], "cpu_count": 1, "fencing_token": 1}
    context = {
        "ti": SimpleNamespace(xcom_pull=lambda task_ids: allocation),
        "macros": SimpleNamespace(gpu_resource_manager=SimpleNamespace(build_docker_cmd=build_docker_cmd)),
    }
    words = shlex.split(rendered(operator, **context).command)
    assert words[-3:] == ["image:1", "train", text]


def demand_rendered_as(gpus: str) -> Any:
    operator = GPUAllocateOperator(task_id="t", gpus="{{ params.gpus }}")
    operator.gpus = gpus
    return demand_of(operator, operator.given_fields(), {}, "t")


@pytest.mark.parametrize("gpus", ["2; touch pwned", "{{ 2 }}", "2\x1b[2J", "0x2", "٢"])
def test_an_invalid_number_in_a_form_is_refused_in_one_line(gpus: str) -> None:
    with pytest.raises(AirflowFailException, match="gpus must be a whole number") as caught:
        demand_rendered_as(gpus)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("gpus", ["2", " 2\n"])
def test_a_number_in_a_form_is_accepted(gpus: str) -> None:
    assert demand_rendered_as(gpus).gpus == 2


def test_a_task_does_not_continue_with_a_lease_of_another_owner_under_its_id() -> None:
    """Otherwise a caller who guesses a task's lease id could release its GPUs during the training."""
    identity = TaskIdentity("production", "d", "r", "t")
    with GPUResourceManager.from_url("memory://") as manager:
        manager.submit(identity.lease_id, 2, owner="mallory", quarantine=True, labels=identity.labels)
        with pytest.raises(AirflowException, match="belongs to owner 'mallory', not to 'airflow'"):
            ask(manager, identity, 2, owner="airflow")
        manager.release_resources(identity.lease_id)
        assert ask(manager, identity, 2, owner="airflow")["owner"] == "airflow"
