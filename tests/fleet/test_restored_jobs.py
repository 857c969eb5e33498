"""Stored jobs after a restore into another store: those that go along, and those that are not there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from resource_manager.errors import LockError, StaleStateError
from resource_manager.jobs.launchers import job_key
from resource_manager.storage.backup import Backup, read_backup, restore, write_backup
from tests.fleet.test_job_board import JOB, Fleet, run
from tests.storage.test_backup import Instead

KEY = job_key("t", 1)


@pytest.fixture
def before() -> Fleet:
    """A fleet in which the job of `t` is placed and has not begun, and that of `waits` waits."""
    fleet = Fleet()
    fleet.report()
    assert fleet.submit("t")["fencing_token"] == 1
    fleet.manager.submit("waits", 0, 60, job=JOB, owner="ada", server="gpu-a")
    assert fleet.wanted() == {KEY: "run"}
    return fleet


def final_backup(fleet: Fleet, folder: Path) -> Backup:
    write_backup(fleet.store, folder / "state.json", closing="it went to another store")
    return read_backup(folder / "state.json")


def test_stored_jobs_go_along_to_another_store(before: Fleet, tmp_path: Path) -> None:
    fleet = Fleet(backup=final_backup(before, tmp_path))
    fleet.report()
    assert fleet.wanted() == {KEY: "run"}
    assert [entry["task_id"] for entry in fleet.manager.queue()] == ["waits"]
    assert fleet.manager.stored_jobs.job("waits", "ada") == JOB


def test_jobs_of_the_stored_state_give_way_only_where_the_state_does(before: Fleet, tmp_path: Path) -> None:
    """A restore that fails, as where its lock is lost, leaves the waiting request the job it came with."""
    backup = final_backup(before, tmp_path)
    fleet = Fleet()
    newer = {"command": ["python", "newer.py"]}
    for task in ("t", "waits"):
        fleet.manager.submit(task, 0, 60, job=newer, owner="ada", server="gpu-a")

    def fail(*values: Any, **options: Any) -> None:
        raise StaleStateError(0, None, "its lock was lost") from LockError("lost")

    with pytest.raises(StaleStateError):
        restore(Instead(fleet.store, restore=fail), backup, force=True)
    jobs = fleet.manager.stored_jobs
    assert [jobs.job(task, "ada") for task in ("t", "waits")] == [newer, newer]
    restore(fleet.store, backup, force=True)
    assert [jobs.job(task, "ada") for task in ("t", "waits")] == [JOB, JOB]


def test_a_lease_whose_job_is_not_stored_ends_with_the_reason(before: Fleet, tmp_path: Path) -> None:
    """As with the file of a version that left the jobs out: else its GPUs would idle for a day."""
    fleet = Fleet(backup=replace(final_backup(before, tmp_path), jobs={}))
    assert fleet.wanted() == {}
    assert len(fleet.manager.leases()) == 1, "nobody knows whether it has begun"
    fleet.report()
    assert fleet.wanted() == {}
    assert fleet.manager.leases() == []
    change = fleet.manager.history()[-1]
    assert (change["outcome"], "it is not stored any more" in change["reason"]) == ("FAILED", True)
    found = fleet.manager.result_of("t", 1)
    assert found is not None
    assert "submit it again" in found["reason"]


def test_a_job_that_runs_goes_on_though_it_is_not_stored(before: Fleet, tmp_path: Path) -> None:
    fleet = Fleet(backup=replace(final_backup(before, tmp_path), jobs={}))
    fleet.report(run(KEY))
    assert fleet.wanted() == {}
    assert [lease["task_id"] for lease in fleet.manager.leases()] == ["t"]
    fleet.report(run(KEY, "finished"))
    assert fleet.manager.history()[-1]["outcome"] == "SUCCESS"
