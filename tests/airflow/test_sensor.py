"""Sensor for free GPUs."""

import warnings
from typing import Any
from unittest.mock import Mock

import pytest

from tests.builders import granted_lease

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from resource_manager.airflow.sensors import GPUAvailableSensor
    from resource_manager.airflow.task_trigger.waits import FreeCapacityTrigger
    from resource_manager.airflow.version_compat import AirflowFailException

    try:  # since 3.2
        from airflow.sdk.exceptions import AirflowSkipException
    except ImportError:
        from airflow.exceptions import AirflowSkipException  # type: ignore[no-redef]

from resource_manager import GPUResourceManager
from resource_manager.core.models import Gpu, Node
from resource_manager.manager.cluster_file.sections import ClusterForm
from tests.airflow.tasks import context_of, fire
from tests.builders import redefine


def test_a_sensor_logs_why_it_waits_and_why_it_waited(manager, said_by):
    sensor = GPUAvailableSensor(task_id="s", gpus=8, cpus=64, deferrable=False)
    said = said_by(sensor)
    for number in range(4):
        manager.submit(f"holds{number}", 8, 8)
    assert not sensor.poke(context_of())
    assert not sensor.poke(context_of())
    waits = "waiting for free GPUs: no server with 8 GPUs: none is free anywhere"
    assert "\n".join(said).count(waits) == 1
    sensor.execute_vacant(context_of(), {"server_name": "gpu-server-2", "reasons": ["full", "reserved"]})
    assert "waited for GPUs: full; then: reserved" in "\n".join(said)
    assert "the GPUs are free on gpu-server-2" in "\n".join(said)


def test_a_sensor_asks_with_the_priority_and_team_of_the_next_task(manager, connect):
    for number in range(4):
        manager.submit(f"holds{number}", 6, 6)
    manager.submit("waits", 8, 8, priority=3)
    connect(seen := Mock(wraps=manager))
    asks: dict[str, Any] = {"gpus": 2, "cpus": 2, "deferrable": False, "pool": "vision"}
    assert GPUAvailableSensor(task_id="s", priority_weight=7, **asks).poke(context_of())
    assert not GPUAvailableSensor(task_id="s", priority_weight=0, **asks).poke(context_of())
    asked = [call.args[0] for call in seen.explain.call_args_list]
    assert [(demand.priority, demand.team) for demand in asked] == [(7, "vision"), (0, "vision")]


@pytest.mark.parametrize("deferrable", [True, False])
def test_a_sensor_asks_with_the_priority_that_the_request_would_have(manager, deferrable):
    options: dict[str, Any] = {"gpus": 2, "cpus": 2, "deferrable": deferrable}
    GPUAvailableSensor(task_id="s", priority_weight=5000, **options).execute(context_of())
    with pytest.raises(AirflowFailException, match="priority must be at most 1000"):
        GPUAvailableSensor(task_id="s", priority=5000, **options).execute(context_of())


def test_a_sensor_that_waits_follows_the_highest_priority(manager, fast_triggers):
    held = [manager.submit(f"holds{number}", 8, 8) for number in range(4)]
    asks = {"task_id": "x", "gpus": 2, "cpus": 2, "priority": 900}
    lower = ClusterForm.model_validate({"cluster": {"max_priority": 10}})

    def then():
        manager.apply(lower)
        manager.release("holds0", fencing_token=granted_lease(held[0])["fencing_token"])

    assert "server_name" in fire(FreeCapacityTrigger(asks, poke_interval_s=0.01, is_weight=True), then)
    stated = fire(FreeCapacityTrigger(asks, poke_interval_s=0.01))
    assert "priority must be at most 10" in stated["detail"]


@pytest.mark.parametrize("gpus", [8, 6])
def test_a_sensor_fails_once_no_server_of_the_inventory_could_ever_fit_it(connect, fast_triggers, gpus):
    """With 8 the number is out of range then, with 6 of that type no server fits."""
    large, small = (
        [Node("a", 0, {"cpus": 8}, tuple(Gpu(i, "A100") for i in range(8)))],
        [
            Node("a", 0, {"cpus": 8}, tuple(Gpu(i, "A100") for i in range(2))),
            Node("b", 1, {"cpus": 8}, tuple(Gpu(i, "V100") for i in range(6))),
        ],
    )
    with GPUResourceManager.from_url("memory://", inventory=large) as manager:
        connect(manager)
        held = manager.submit("holds", 8, 1)
        wait = FreeCapacityTrigger(
            {"task_id": "x", "gpus": gpus, "gpu_types": ["A100"]}, poke_interval_s=0.01
        )

        def shrink():
            redefine(manager, nodes=small)
            manager.release_resources("holds", fencing_token=granted_lease(held)["fencing_token"])

        event = fire(wait, shrink)
        assert "server_name" not in event
        sensor = GPUAvailableSensor(task_id="s", gpus=gpus)
        words = "between 1 and 6" if gpus == 8 else "no server could ever satisfy 6 A100"
        with pytest.raises(AirflowFailException, match=words):
            sensor.execute_vacant(context_of(), event)


@pytest.mark.parametrize("deferrable", [True, False])
def test_a_sensor_that_fails_softly_is_skipped_at_its_first_look_too(manager, deferrable):
    options: dict[str, Any] = {"soft_fail": True, "deferrable": deferrable}
    sensor = GPUAvailableSensor(task_id="s", gpus=2, gpu_types="H900", **options)
    with pytest.raises(AirflowSkipException, match=r"soft_fail is set|no server has an H900"):
        sensor.execute(context_of())
