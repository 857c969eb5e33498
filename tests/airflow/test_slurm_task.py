"""What a task on Slurm may ask for: Slurm's own terms, and a refusal by name of the rest."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from resource_manager.airflow import GPUTrainingOperator
from resource_manager.airflow.slurm import board
from resource_manager.airflow.slurm import task as slurm_task
from resource_manager.airflow.slurm.board import SlurmBoard
from resource_manager.airflow.slurm.task import UNUSED, _batch_request
from resource_manager.airflow.slurm.trigger import SlurmTrigger
from resource_manager.airflow.version_compat import AirflowFailException
from resource_manager.core.models import JobPlace
from resource_manager.jobs.launchers import JobState, JobStatus, LauncherUnreachableError
from resource_manager.jobs.launchers.slurm import Look, Said, Seen
from resource_manager.manager.demand import Demand
from tests.airflow.tasks import TASK, context_of, deferral, fire

SENT = {"gpus", "cpus", "resources", "gpu_types", "nodes", "team", "owner", "expected_runtime"} | {
    "preempt_grace",
    "labels",
}
OF_A_LEASE = {"lease_id", "ttl", "quarantine"}
"""Of the lease that a job on Slurm does not have; they change nothing of what it gets."""

GIVEN: dict[str, Any] = {
    "gpu_memory": "40GB",
    "max_runtime": timedelta(hours=1),
    "types": "best",
    "priority": 3,
    "link": "require",
    "gpu_milli": 500,
    "max_wait": timedelta(hours=1),
}


def test_each_field_of_a_demand_is_sent_to_slurm_or_refused() -> None:
    assert Demand.model_fields.keys() == SENT | OF_A_LEASE | set(UNUSED)


@pytest.mark.parametrize(("name", "value"), GIVEN.items())
def test_what_slurm_cannot_be_asked_is_refused_by_its_name(name: str, value: object) -> None:
    given: dict[str, Any] = {name: value}
    operator = GPUTrainingOperator(task_id="train", launcher="slurm", command="true", gpus=1, **given)
    with pytest.raises(AirflowFailException, match=f"^{name} has no meaning on Slurm: leave it out"):
        _batch_request(operator, {}, SimpleNamespace())  # type: ignore[arg-type]


@pytest.fixture
def answers_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """Return answers_by(board): triggers ask that one for their jobs on Slurm."""
    return lambda board: monkeypatch.setattr(SlurmBoard, "of", lambda *_: board)


def test_the_next_triggerer_goes_on_in_the_output_and_fires_how_far_it_is(
    answers_by: Any, pause: Any, notes: dict[str, Any]
) -> None:
    asked = []

    class Board:
        async def seen(self, key: str, offset: int) -> Seen:
            asked.append((key, offset))
            return Seen("two\nthree\n", offset + 10, JobStatus(JobState.FINISHED, 0), None)

    pause({"airflow.task_trigger.base.MIN_DEFERRAL_S": 0.0})
    answers_by(Board())
    trigger = SlurmTrigger(TASK, "k", {"launcher": "slurm"})
    path, arguments = trigger.serialize()
    assert path.endswith(".SlurmTrigger")
    notes["job_log_place"] = {"job": "k", "offset": 4, "last_line": "one"}
    event = {"offset": 14, "last_line": "three", "reasons": []}
    assert fire(SlurmTrigger(**arguments)) == event
    assert asked == [("k", 4)]


def test_a_triggerer_that_stood_still_takes_slurm_for_silent_no_longer_than_a_question_takes(
    answers_by: Any, pause: Any, notes: dict[str, Any]
) -> None:
    """While it stood still it heard nothing of the answer to its question."""
    fails = [True, True]

    class Board:
        async def seen(self, key: str, offset: int) -> Seen:
            if fails:
                fails.pop()
                time.sleep(0.4)
                raise LauncherUnreachableError("cut off")
            return Seen("", offset, JobStatus(JobState.FINISHED, 0), None)

    pause({"airflow.task_trigger.base.MIN_DEFERRAL_S": 0.0, "airflow.slurm.trigger.MAX_STEP_S": 0.1})
    answers_by(Board())
    trigger = SlurmTrigger(TASK, "k", {"launcher": "slurm"}, unreachable_s=0.3)
    assert "unreachable" not in fire(trigger)
    fails += [True] * 4
    assert fire(trigger)["unreachable"] == "cut off"


def test_an_error_of_airflows_own_ends_no_watch_on_slurm(monkeypatch: Any, pause: Any) -> None:
    """Those that asked waited for ever for an answer."""

    class Launcher:
        def __init__(self, place: JobPlace) -> None:
            if fails:
                raise fails.pop()

        def read_all(self, offsets: dict[str, int], since: float | None) -> Look:
            return Look({key: Seen("", 0, JobStatus(JobState.FINISHED, 0), None) for key in offsets}, "", [])

        def close(self) -> None: ...

    fails = [RuntimeError("API_SERVER_ERROR")]
    monkeypatch.setattr(board, "SlurmLauncher", Launcher)
    pause({"airflow.slurm.board.POLL_S": 0.0, "airflow.task_trigger.base.MIN_DEFERRAL_S": 0.0})
    event = fire(SlurmTrigger(TASK, "k", {"launcher": "slurm"}))
    assert (event["offset"], fails) == (0, [])


def test_a_list_of_jobs_that_takes_too_long_ends_no_watch_on_slurm(monkeypatch: Any, pause: Any) -> None:
    """Each further question asked for the list again and failed, until all tasks on that Slurm had failed."""
    with_list = []

    class Launcher:
        def __init__(self, place: JobPlace) -> None: ...

        def read_all(self, offsets: dict[str, int], since: float | None) -> Look:
            with_list.append(since is not None)
            if since is not None and len(with_list) < 5:
                raise LauncherUnreachableError("Slurm gave no answer within 60 s")
            return Look({key: Seen("", 0, JobStatus(JobState.FINISHED, 0), None) for key in offsets}, "", [])

        def close(self) -> None: ...

    monkeypatch.setattr(board, "SlurmLauncher", Launcher)
    pause({"airflow.slurm.board.POLL_S": 0.0, "airflow.task_trigger.base.MIN_DEFERRAL_S": 0.0})
    fire(SlurmTrigger(TASK, "k", {"launcher": "slurm"}))
    assert with_list == [True, False]


def test_the_look_at_slurm_is_in_nobodys_context(monkeypatch: Any, pause: Any) -> None:
    """Else what is said of all jobs is in the log of the task that came first."""
    task_of_log, seen = ContextVar("task_of_log", default=""), []

    class Launcher:
        def __init__(self, place: JobPlace) -> None: ...

        def read_all(self, offsets: dict[str, int], since: float | None) -> Look:
            seen.append(task_of_log.get())
            return Look({key: Seen("", 0, JobStatus(JobState.FINISHED, 0), None) for key in offsets}, "", [])

        def close(self) -> None: ...

    monkeypatch.setattr(board, "SlurmLauncher", Launcher)
    pause({"airflow.slurm.board.POLL_S": 0.0, "airflow.task_trigger.base.MIN_DEFERRAL_S": 0.0})
    task_of_log.set("first")
    fire(SlurmTrigger(TASK, "k", {"launcher": "slurm"}))
    assert seen == [""]


def test_a_result_that_airflow_could_not_store_is_taken_by_the_next_try(
    monkeypatch: Any, manager: Any, variables: dict[str, str]
) -> None:
    jobs: dict[str, JobState] = {}

    class Launcher:
        def __init__(self, place: JobPlace) -> None: ...

        def current(self, lease_id: str) -> str:
            return next(
                (key for key, state in jobs.items() if state != JobState.ABSENT), f"job-{len(jobs) + 1}"
            )

        def status(self, key: str) -> JobStatus:
            return JobStatus(jobs.get(key, JobState.ABSENT))

        def start(self, job: Any) -> None:
            jobs[job.key] = JobState.FINISHED

        def stop(self, key: str) -> None:
            jobs[key] = JobState.ABSENT

        def read_all(self, offsets: dict[str, int], since: float | None = None) -> Look:
            words = {"reason": "", "wait": "", "where": "n1", "end": "", "partition": ""}
            said = Said(id="7", state="COMPLETED", never=False, begins_at=None, **words)
            return Look({key: Seen("", 0, JobStatus(JobState.FINISHED, 0), said) for key in offsets}, "", [])

        def close(self) -> None: ...

    monkeypatch.setattr(slurm_task, "SlurmLauncher", Launcher)
    monkeypatch.setattr(slurm_task, "publish", lambda *_: None)
    operator = GPUTrainingOperator(task_id="t", launcher="slurm", command="true", gpus=1, retries=1)
    deferral(lambda: operator.execute(context_of(max_tries=1)))
    event = {"offset": 0, "last_line": '{"loss": 1}', "reasons": []}
    assert operator.execute_on_slurm(context_of(max_tries=1), event) == {"loss": 1}
    assert operator.execute(context_of(try_number=2, max_tries=1)) == {"loss": 1}
    assert len(jobs) == 1
    deferral(lambda: operator.execute(context_of(try_number=3, max_tries=3)))
    assert len(jobs) == 2, "it was cleared"


@pytest.mark.parametrize("end", ["goes on", "removed"])
def test_a_clear_starts_one_new_job_in_its_try(
    monkeypatch: Any, manager: Any, variables: dict[str, str], end: str
) -> None:
    """What held the new job back was changed between its trigger's last look and the worker's."""
    words = {"reason": "", "wait": "", "where": "", "end": "", "partition": ""}
    said = Said(id="7", state="PENDING", never=False, begins_at=None, **words)
    started: list[str] = []
    stopped: list[str] = []

    class Launcher:
        def __init__(self, place: JobPlace) -> None: ...

        def current(self, lease_id: str) -> str:
            return f"job-{len(stopped) + 1}"

        def status(self, key: str) -> JobStatus:
            return JobStatus(JobState.RUNNING if key in started else JobState.ABSENT)

        def start(self, job: Any) -> None:
            started.append(job.key)

        def stop(self, key: str) -> None:
            stopped.append(key)

        def read_all(self, offsets: dict[str, int], since: float | None = None) -> Look:
            seen = Seen("", 0, JobStatus(JobState.RUNNING), said if end == "goes on" else None)
            return Look(dict.fromkeys(offsets, seen), "", [])

        def close(self) -> None: ...

    monkeypatch.setattr(slurm_task, "SlurmLauncher", Launcher)
    monkeypatch.setattr(slurm_task, "publish", lambda *_: None)
    operator = GPUTrainingOperator(
        task_id="t", launcher="slurm", command="true", gpus=1, retries=1, restart_on_clear=True
    )
    cleared = context_of(try_number=2, max_tries=2)
    deferral(lambda: operator.execute(context_of(max_tries=1)))
    deferral(lambda: operator.execute(cleared))
    assert (started, stopped) == (["job-1", "job-2"], ["job-1"])
    event = {"offset": 0, "last_line": "", "reasons": []}
    deferral(lambda: operator.execute_on_slurm(cleared, event))
    assert (started, stopped) == (["job-1", "job-2"], ["job-1"])
