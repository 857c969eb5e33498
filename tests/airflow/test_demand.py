"""Request of a task by an operator's parameters, and the end of its lease."""

import warnings
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from tests.builders import present

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from resource_manager.airflow import GPUAllocateOperator, GPUTrainingOperator
    from resource_manager.airflow.task_demand import demand_of, end_lease, owner_of
    from resource_manager.airflow.version_compat import AirflowException, AirflowFailException


from resource_manager.core.models import JobPlace
from tests.airflow.asking import ask
from tests.airflow.tasks import TASK, context_of


def test_a_request_that_no_server_can_meet_fails_without_retry(manager):
    for demand, words in (
        (
            {"gpus": 9},
            r"^gpus must be between 2 and 8 \(the inventory is the built-in one\), got 9$",
        ),
        ({"gpus": "many"}, "gpus must be a whole number, got 'many'"),
        ({"gpus": 2.5}, r"gpus must be a whole number, got 2\.5"),
        ({"gpus": 2, "cpus": [8]}, r"cpus must be a whole number, got \[8\]"),
        (
            {"gpus": 2, "cpus": 100},
            r"^cpus must be between 1 and 64 \(what the largest server has\), got 100",
        ),
        ({"gpus": 1, "gpu_milli": 1000 / 3}, r"gpu_milli must be a whole number, got 333\."),
        ({"gpus": 2, "priority": 0.5}, r"priority must be a whole number, got 0\.5"),
        ({"gpus": 2, "server": "nowhere"}, "nowhere"),
        ({"gpus": 2, "server": "²"}, "²"),
        ({"gpus": 2, "prefer_server": "nowhere"}, "prefer_server 'nowhere' is not in"),
        (
            {"gpus": 0.5},
            r"gpus must be a whole number, got 0\.5; that GPU fraction is gpus=1, gpu_milli=500$",
        ),
        ({"gpus": "0.25"}, "got '0.25'; that GPU fraction is gpus=1, gpu_milli=250$"),
        ({"gpus": 2, "gpu_types": "H900"}, "H900"),
        ({"gpus": 2, "ttl": timedelta(0)}, r"^ttl must be greater than 0, got "),
        ({"gpus": 2, "expected_runtime": timedelta(-1)}, "^expected_runtime must be greater than 0"),
        ({"gpus": 2, "gpu_types": "x" * 9000}, "^gpu_types must have at most 250 characters"),
        ({"gpus": 2, "gpu_milli": 500}, "^gpu_milli=500 goes with gpus=1, got gpus=2$"),
    ):
        with pytest.raises(AirflowFailException, match=words):
            ask(manager, TASK, **demand)
    assert manager.leases() == []


def test_a_task_without_a_deadline_has_that_of_its_run():
    airflow = pytest.importorskip("airflow.sdk.definitions.deadline")  # from Airflow 3.1 on
    began, references = datetime(2030, 1, 31, 18, tzinfo=UTC), airflow.DeadlineReference
    alerts = [
        SimpleNamespace(reference=reference, interval=timedelta(hours=hours))
        for reference, hours in (
            (references.DAGRUN_QUEUED_AT, 3),
            (references.FIXED_DATETIME(began), 2),
            (references.DAGRUN_LOGICAL_DATE, 1),
        )
    ]
    if hasattr(references, "AVERAGE_RUNTIME"):  # from Airflow 3.2 on
        alerts.append(SimpleNamespace(reference=references.AVERAGE_RUNTIME(3), interval=timedelta(0)))
    context = {
        "dag": SimpleNamespace(deadline=alerts),
        "dag_run": SimpleNamespace(start_date=began, logical_date=None),
    }
    operator = GPUTrainingOperator(task_id="t", gpus=2, command="true")
    asked = operator.given_fields()
    assert demand_of(operator, asked, context, "t").deadline == began + timedelta(hours=2)
    assert demand_of(operator, {**asked, "deadline": "1h"}, context, "t").deadline == 3600
    assert demand_of(operator, asked, {}, "t").deadline is None


def test_a_required_server_is_waited_for_and_a_preferred_one_is_not(manager):
    manager.allocate_resources("holds", 8, 1, prefer_server_id=2)
    assert ask(manager, TASK, 2, prefer_server=2)["server_id"] == 0
    other = replace(TASK, task_id="pinned")
    assert ask(manager, other, 2, server="gpu-server-2")["state"] == "WAITING"
    manager.release_resources("holds")
    assert ask(manager, other, 2, server="2")["server_name"] == "gpu-server-2"


def test_strings_of_templates_are_parsed(manager):
    status = ask(manager, TASK, "4", "8", prefer_server=" 2 ")
    assert (status["server_id"], status["gpu_devices"], status["cpu_count"]) == (2, "0,1,2,3", 8)


def test_a_changed_request_ends_the_lease_of_the_earlier_try(manager):
    first = ask(manager, TASK, 2)
    second = ask(manager, TASK, 4)
    assert len(second["gpu_ids"]) == 4
    assert second["fencing_token"] > first["fencing_token"]
    assert len(manager.leases()) == 1


def test_a_quarantined_lease_is_renewed_by_the_request_of_its_task(manager):
    ask(manager, TASK, 2, ttl=timedelta(microseconds=1))
    manager.expire_and_schedule()
    assert manager.status_of(TASK.lease_id)["quarantined"]
    assert not ask(manager, TASK, 2)["quarantined"]


def test_a_lease_with_an_unreachable_job_is_not_ended(manager):
    lease = ask(manager, TASK, 2)
    elsewhere = JobPlace("local", machine="elsewhere", folder="/jobs", mark="f00d", user="ada")
    manager.place_job(TASK.lease_id, [elsewhere], fencing_token=lease["fencing_token"])
    with pytest.raises(AirflowException, match=r"elsewhere.*stay allocated until it is gone"):
        end_lease(manager, TASK, "")
    assert len(manager.leases()) == 1


def test_a_weight_above_the_highest_priority_is_cut_and_the_log_says_so(manager, caplog):
    operator = GPUTrainingOperator(task_id="t", gpus=2, command="train", priority_weight=5000)
    assert operator.lease(context_of(), manager, labels={})["priority"] == 1000
    assert "priority_weight 5000 is cut to 1000: priority must be at most 1000" in caplog.text


def test_a_stated_priority_above_the_highest_fails_the_task(manager):
    operator = GPUTrainingOperator(task_id="t", gpus=2, command="train", priority=5000)
    with pytest.raises(AirflowFailException, match="priority must be at most 1000"):
        operator.lease(context_of(), manager, labels={})


@pytest.mark.parametrize("empty", ["None", "", " "])
def test_what_a_template_leaves_empty_has_the_operators_default(manager, empty):
    """A trigger form hands over `None` as text for each of its fields that is not filled in."""
    operator = GPUTrainingOperator(
        task_id="t",
        gpus="2",
        command="train",
        priority_weight=7,
        priority=empty,
        ttl=empty,
        quarantine=empty,
        team=empty,
    )
    allocation = operator.lease(context_of(), manager, labels={})
    assert present(allocation["expires_at"]) - allocation["granted_at"] == 120
    assert (allocation["priority"], allocation["team"]) == (7, "")
    (granted,) = manager.history()
    assert granted["lease"]["request"]["quarantine"] is True


@pytest.mark.parametrize(
    ("run", "owner"),
    [
        ({"triggering_user_name": "ada"}, "ada"),
        ({"triggering_user_name": None}, "dagmar"),
        ({}, "dagmar"),
    ],
    ids=["triggered", "scheduled", "before Airflow 3.1"],
)
def test_who_triggered_the_run_owns_the_lease_else_the_tasks_owner(run, owner):
    operator = GPUAllocateOperator(task_id="t", owner="dagmar", gpus=1)
    assert owner_of(operator, {"dag_run": SimpleNamespace(**run)}) == owner
    assert (
        demand_of(operator, operator.given_fields(), {"dag_run": SimpleNamespace(**run)}, "t").owner == owner
    )
