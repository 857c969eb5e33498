"""Jobs on Slurm that are ended with their tasks: those that the login node says, whatever callers tell of."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from resource_manager import GPUResourceManager
from resource_manager.cli import main, reconciling
from resource_manager.cli.reconciling import AirflowLogin
from resource_manager.core.models import JobPlace
from resource_manager.errors import InvalidRequestError, StoreUnavailableError
from resource_manager.jobs import reconcile, slurm_records
from resource_manager.jobs.launchers import LauncherError, NoAnswerError
from resource_manager.jobs.launchers.slurm import Look
from resource_manager.jobs.reconcile import Action, ActionKind, Reconciliation
from resource_manager.jobs.task_identity import TaskIdentity
from resource_manager.manager.results import SlurmJob
from resource_manager.manager.slurm_jobs import MAX_CLUSTERS
from tests.cli.targets import holding
from tests.manager.test_slurm_jobs import slurm_job

RUNS = TaskIdentity("here", "d", "run1", "train")
GONE = TaskIdentity("here", "d", "run0", "train")


class States:
    """Airflow in which one task is unfinished."""

    def instance(self) -> str:
        return "here"

    def unfinished(self, identities: Iterable[TaskIdentity]) -> set[TaskIdentity]:
        return {RUNS}.intersection(identities)

    def run_is_unfinished(self, dag_id: str, run_id: str) -> bool:
        return run_id == RUNS.run_id


def job_of(identity: TaskIdentity, number: int, key: str = "", **more: object) -> SlurmJob:
    told = slurm_job(number, time.time(), labels=identity.labels, **more)
    return {**told, "key": key or told["key"]}


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the keys of the jobs that are stopped on the login node."""
    stopped: list[str] = []

    class LoginNode:
        def __init__(self, place: JobPlace) -> None:
            assert place.conn_id == "slurm"

        def read_all(self, offsets: Mapping[str, int], since: float) -> Look:
            return Look({}, "c", [job_of(RUNS, 1), job_of(GONE, 2)])

        def stop(self, key: str) -> None:
            stopped.append(key)

        def close(self) -> None: ...

    monkeypatch.setattr(slurm_records, "SlurmLauncher", LoginNode)
    return stopped


@pytest.mark.parametrize("key", ["", "gpu-k-1a2b3c4d-1", "../../.ssh"])
def test_a_caller_has_no_job_ended_and_no_folder_removed_by_what_they_tell_of(
    stopped: list[str], key: str
) -> None:
    with GPUResourceManager.from_url("memory://") as manager:
        manager.keep_slurm_jobs("false", [job_of(GONE, 1, key)])
        slurm_records.end_left_behind(manager, States(), "here")
        assert stopped == ["gpu-k-1a2b3c4d-2"]
        stopped.clear()
        manager.keep_slurm_jobs("false", [])
        manager.keep_slurm_jobs("c", [job_of(RUNS, 1)])
        slurm_records.end_left_behind(manager, States(), "here")
        assert stopped == []


def test_files_that_nobody_collects_are_removed_a_day_after_the_end_of_a_job_whose_task_has_ended(
    stopped: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its task's last try failed while the login node was away: until then a clear goes on with the job."""
    ended: Any = {"ended_at": time.time() - 90_000.0}
    jobs = [
        job_of(RUNS, 1, **ended, uncollected=True),
        job_of(GONE, 2, **ended, uncollected=True),
        job_of(GONE, 3, **ended, uncollected=False),  # it was collected
        job_of(GONE, 4, **ended),
        job_of(GONE, 5, ended_at=time.time() - 80_000.0, uncollected=True),
    ]
    read_all = "resource_manager.jobs.slurm_records.SlurmLauncher.read_all"
    monkeypatch.setattr(read_all, lambda *_, **__: Look({}, "c", jobs))
    with GPUResourceManager.from_url("memory://") as manager:
        manager.keep_slurm_jobs("c", jobs)
        [action] = slurm_records.end_left_behind(manager, States(), "here")
        assert (stopped, action.detail) == (
            ["gpu-k-1a2b3c4d-2"],
            "files of job 2 on Slurm, as its task has ended",
        )


def see(monkeypatch: pytest.MonkeyPatch, jobs: list[SlurmJob], stop: Callable[[str], None]) -> None:
    """Have the login node say these jobs, and do this where one is to be stopped."""
    login_node = "resource_manager.jobs.slurm_records.SlurmLauncher"
    monkeypatch.setattr(f"{login_node}.read_all", lambda *_, **__: Look({}, "c", jobs))
    monkeypatch.setattr(f"{login_node}.stop", lambda _, key: stop(key))


def test_live_jobs_end_before_the_files_of_hundreds_that_are_over_are_removed_some_at_a_time(
    stopped: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Live ones kept their GPUs meanwhile, for longer than a run of the reconciler may take."""
    over: Any = {"ended_at": time.time() - 90_000.0, "uncollected": True}
    jobs = [job_of(GONE, number, **over) for number in range(1, slurm_records.MAX_REMOVED + 3)]
    jobs += [job_of(GONE, 1001), job_of(GONE, 1002)]

    def stop(key: str) -> None:
        stopped.append(key)
        jobs[:] = [job for job in jobs if job["key"] != key]

    see(monkeypatch, jobs, stop)
    with GPUResourceManager.from_url("memory://") as manager:
        manager.keep_slurm_jobs("c", [job_of(GONE, 1001)])
        slurm_records.end_left_behind(manager, States(), "here")
        assert stopped[:3] == ["gpu-k-1a2b3c4d-1001", "gpu-k-1a2b3c4d-1002", "gpu-k-1a2b3c4d-1"]
        assert len(stopped) == slurm_records.MAX_REMOVED + 2
        slurm_records.end_left_behind(manager, States(), "here")
        assert jobs == []


def test_a_task_that_is_cleared_while_other_jobs_are_ended_goes_on_with_its_job(
    stopped: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    states = States()

    def stop(key: str) -> None:
        stopped.append(key)
        monkeypatch.setattr(states, "unfinished", set)  # all were cleared

    see(monkeypatch, [job_of(GONE, 1), job_of(GONE, 2)], stop)
    with GPUResourceManager.from_url("memory://") as manager:
        manager.keep_slurm_jobs("c", [job_of(GONE, 1), job_of(GONE, 2)])
        slurm_records.end_left_behind(manager, states, "here")
    assert stopped == ["gpu-k-1a2b3c4d-1"]


@pytest.mark.parametrize("ended_at", [None, 1000.0])
def test_a_job_that_cannot_be_ended_leaves_no_other_as_it_is(
    stopped: list[str], monkeypatch: pytest.MonkeyPatch, ended_at: float | None
) -> None:
    """As one on a node that is down: those after it ran on, round by round."""
    jobs = [job_of(GONE, number, ended_at=ended_at, uncollected=True) for number in (1, 2)]

    def stop(key: str) -> None:
        if key.endswith("-1"):
            raise LauncherError("Slurm still has job 1")
        stopped.append(key)

    see(monkeypatch, jobs, stop)
    with GPUResourceManager.from_url("memory://") as manager:
        manager.keep_slurm_jobs("c", [job_of(GONE, 1)])
        kept, ended = slurm_records.end_left_behind(manager, States(), "here")
        assert (kept.action, ended.action) == (ActionKind.KEPT, ActionKind.STOPPED)
        assert "job 1 on Slurm: Slurm still has job 1" in kept.detail
        assert (stopped, len(manager.slurm_jobs())) == (["gpu-k-1a2b3c4d-2"], 2)


def test_a_login_node_that_gives_no_answer_is_asked_once(
    stopped: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(key: str) -> None:
        stopped.append(key)
        raise NoAnswerError("no answer")

    see(monkeypatch, [job_of(GONE, 1), job_of(GONE, 2)], stop)
    with GPUResourceManager.from_url("memory://") as manager:
        manager.keep_slurm_jobs("c", [job_of(GONE, 1), job_of(GONE, 2)])
        [kept] = slurm_records.end_left_behind(manager, States(), "here")
    assert (kept.detail, len(stopped)) == ("its jobs may still run: no answer", 1)


def test_an_account_in_whose_folder_no_such_job_is_leaves_the_list_of_jobs_as_it_is(
    stopped: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of the command's own unit: from an empty list nobody would end the job any more."""
    read_all = "resource_manager.jobs.slurm_records.SlurmLauncher.read_all"
    monkeypatch.setattr(read_all, lambda *_, **__: Look({}, "c", []))
    with GPUResourceManager.from_url("memory://") as manager:
        manager.keep_slurm_jobs("c", [job_of(RUNS, 1), job_of(GONE, 2)])
        [kept] = slurm_records.end_left_behind(manager, States(), "here")
        assert (kept.action, stopped) == (ActionKind.KEPT, [])
        assert "none of its jobs is in this account's folder" in kept.detail
        assert len(manager.slurm_jobs()) == 2


def test_the_command_ends_jobs_of_tasks_that_have_ended_as_the_dag_does(
    stopped: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the DAG they ran to the end of their time."""
    monkeypatch.setattr(AirflowLogin, "states", lambda login: States())
    with GPUResourceManager.from_url("memory://") as manager:
        manager.keep_slurm_jobs("c", [job_of(RUNS, 1), job_of(GONE, 2)])
        command = ["reconcile", "--airflow-url", "http://airflow"]
        done = CliRunner().invoke(main, command, obj=holding(manager))
    assert (done.exit_code, stopped) == (0, ["gpu-k-1a2b3c4d-2"])
    assert "job 2 on Slurm, as its task has ended" in done.output


def test_clusters_that_callers_told_of_end_no_reconciler(
    stopped: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of as many clusters as can be kept, by any user, ended the command that should go on."""
    rounds = 0

    def next_round(_: float) -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(AirflowLogin, "states", lambda login: States())
    monkeypatch.setattr(reconciling, "time", SimpleNamespace(sleep=next_round))
    with GPUResourceManager.from_url("memory://") as manager:
        for number in range(MAX_CLUSTERS):
            manager.keep_slurm_jobs(f"c{number}", [] if number else [job_of(GONE, 1)])
        command = ["reconcile", "--airflow-url", "http://airflow", "--every", "20"]
        done = CliRunner().invoke(main, command, obj=holding(manager))
    assert (done.exit_code, len(stopped)) == (130, 2), done.output
    assert done.output.count("slurm: its jobs in the list of jobs are not up to date") == 2


@pytest.mark.parametrize("options", [[], ["--every", "20"]])
def test_what_was_ended_is_shown_though_slurm_could_not_be_reconciled(
    options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does an error of one round that names a request end the rounds."""
    errors = iter(
        [InvalidRequestError("{gpus} are wrong"), StoreUnavailableError("away"), KeyboardInterrupt()]
    )

    def fail(*_: object) -> list[Action]:
        raise next(errors)

    ended = Action("k", "train", ActionKind.RELEASED, "its task has ended")
    monkeypatch.setattr(AirflowLogin, "states", lambda login: States())
    monkeypatch.setattr(reconcile, "reconcile", lambda *_: Reconciliation([ended], 0))
    monkeypatch.setattr(slurm_records, "end_left_behind", fail)
    monkeypatch.setattr(reconciling, "time", SimpleNamespace(sleep=lambda _: None))
    with GPUResourceManager.from_url("memory://") as manager:
        command = ["reconcile", "--airflow-url", "http://airflow", *options]
        done = CliRunner().invoke(main, command, obj=holding(manager))
    assert done.output.count("train: its task has ended") == (2 if options else 1), done.output
    assert done.exit_code == (130 if options else 2)
