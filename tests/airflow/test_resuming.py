"""The event that a try is resumed with: Airflow 3.0 resumes a retry with that of the failed try."""

import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from airflow.providers.standard.operators.bash import BashOperator

    from resource_manager.airflow import GPUAvailableSensor, GPUTrainingOperator, with_gpus
    from resource_manager.airflow.version_compat import AirflowException

from tests.airflow.tasks import asked, context_of, deferral, fire

pytestmark = pytest.mark.usefixtures("notes", "wanted", "fast_triggers")


def of_try(trigger, number):
    """Return the trigger as a triggerer starts it for that try of its task."""
    trigger.task_instance = SimpleNamespace(task_id="t", try_number=number)
    return trigger


def resumed(operator, method, event, try_number):
    return operator.resume_execution(method, {"event": event}, context_of(try_number=try_number))


def test_a_retry_asks_for_gpus_again_instead_of_failing_by_the_end_of_the_failed_try(manager, gpu_launcher):
    gpu_launcher.ends("train", exit_code=3)
    operator = GPUTrainingOperator(task_id="t", gpus=8, command="train", retries=1)
    event = fire(of_try(asked(operator), 1))
    with pytest.raises(AirflowException, match="exit code 3"):
        resumed(operator, "execute_ended", event, try_number=1)
    left = deferral(lambda: resumed(operator, "execute_ended", event, try_number=2))
    assert left.method_name == "execute_ended"
    fire(left.trigger)
    assert len(gpu_launcher.jobs) == 2


@pytest.mark.parametrize(
    ("operator", "method"),
    [
        (with_gpus(BashOperator, gpus=8)(task_id="t", bash_command="true"), "execute_granted"),
        (GPUAvailableSensor(task_id="t", gpus=8, poke_interval=0.1), "execute_vacant"),
    ],
)
def test_every_operator_begins_anew_in_a_retry_and_goes_on_in_its_own_try(manager, operator, method):
    for number in range(4):
        manager.submit(f"holds{number}", 8, 8)
    left = deferral(lambda: operator.execute(context_of()))
    assert left.method_name == method
    event = fire(of_try(left.trigger, 1), lambda: manager.release_resources("holds2"))
    resumed(operator, method, event, try_number=1)
    manager.submit("holds again", 8, 8)
    left = deferral(lambda: resumed(operator, method, event, try_number=2))
    assert left.method_name == method
