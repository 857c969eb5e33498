"""Jobs on Slurm beside the state: told by those who watch them, shown with leases, counted in the report."""

import json
from dataclasses import replace
from typing import Any

import pytest

from resource_manager import GPUResourceManager
from resource_manager.agent.report_format import check_report
from resource_manager.errors import InvalidRequestError
from resource_manager.fleet.receiving import ReportReceiver
from resource_manager.fleet.records import records_of
from resource_manager.manager import slurm_jobs
from resource_manager.manager.report import ReportQuery
from resource_manager.manager.results import SlurmJob
from resource_manager.manager.slurm_jobs import MAX_CLUSTERS
from resource_manager.storage import MemoryStore
from resource_manager.storage.reports import RECORD_TTL_S
from tests.agent.reporting import as_text, gpu, report
from tests.builders import node


def slurm_job(number, now, **more) -> SlurmJob:
    """Return a job that runs for an hour and has waited for one."""
    job: Any = {
        "source": "slurm",
        "cluster": "c",
        "conn_id": "slurm",
        "key": f"gpu-k-1a2b3c4d-{number}",
        "task_id": f"a:d/r/t/{number}",
        "id": str(number),
        "state": "RUNNING",
        "reason": "",
        "wait": "",
        "where": "n1 GPU 0-1",
        "partition": "gpu",
        "owner": "ann",
        "team": "vision",
        "labels": {"dag_id": "d"},
        "gpus": 2,
        "nodes": 2,
        "exit_code": None,
        "begins_at": None,
        "submitted_at": now - 7200.0,
        "started_at": now - 3600.0,
        "ended_at": None,
        **more,
    }
    return job


@pytest.fixture
def manager():
    with GPUResourceManager.from_url("memory://") as manager:
        yield manager


def test_the_jobs_of_several_clusters_are_kept_until_told_anew(manager):
    now = manager.store.now()
    manager.keep_slurm_jobs("c", [slurm_job(1, now), slurm_job(2, now)])
    manager.keep_slurm_jobs("d", [slurm_job(3, now, cluster="d", submitted_at=now)])
    assert [each["id"] for each in manager.slurm_jobs()] == ["3", "1", "2"]
    manager.keep_slurm_jobs("c", [])
    assert [each["id"] for each in manager.slurm_jobs()] == ["3"]
    assert manager.leases() == manager.queue() == []


def test_callers_fill_the_store_with_no_names_of_clusters():
    began = now = 1e6
    store = MemoryStore(clock=lambda: now)
    for number in range(MAX_CLUSTERS):
        slurm_jobs.keep(store, f"c{number}", [slurm_job(number, now)])
        now = began + 1
    now += RECORD_TTL_S - 1.5
    with pytest.raises(InvalidRequestError, match="cluster: jobs of 16 clusters are kept already"):
        slurm_jobs.keep(store, "d", [])
    slurm_jobs.keep(store, "c3", [])
    now += 1  # the first is forgotten, the last are not
    slurm_jobs.keep(store, "d", [slurm_job(99, now)])
    ids = {int(job["id"]) for job in slurm_jobs.jobs_on_slurm(store)}
    assert ids == {99, *range(1, MAX_CLUSTERS)} - {3}


def test_the_jobs_of_a_cluster_are_kept_for_seven_days_whenever_it_was_first_told_of():
    """Once the list of clusters had lapsed, the next watcher made one of its own cluster alone."""
    began = now = 1e6
    store = MemoryStore(clock=lambda: now)
    for hour in range(200):
        now = began + 3600.0 * hour
        slurm_jobs.keep(store, "c", [slurm_job(1, now)])
        if hour < 160:
            slurm_jobs.keep(store, "d", [slurm_job(2, now)])
    assert {job["id"] for job in slurm_jobs.jobs_on_slurm(store)} == {"1", "2"}
    now += RECORD_TTL_S - 3600.0
    assert {job["id"] for job in slurm_jobs.jobs_on_slurm(store)} == {"1"}


def test_a_server_may_be_called_slurm():
    with GPUResourceManager.from_url("memory://", inventory=[replace(node("a"), name="slurm")]) as manager:
        manager.keep_slurm_jobs("c", [slurm_job(1, 1e6)])
        assert records_of(manager.store, ["slurm"]) == {}
        said = report(manager.store.now(), gpu(0), name="slurm")
        ReportReceiver(manager).receive(check_report(json.loads(as_text(said))))
        assert [job["id"] for job in manager.slurm_jobs()] == ["1"]


def test_the_report_counts_them_beside_leases(manager):
    now = manager.store.now()
    ended = {"ended_at": now, "state": "COMPLETED", "exit_code": 0}
    manager.keep_slurm_jobs(
        "c",
        [
            slurm_job(1, now, **ended),
            slurm_job(2, now, **{**ended, "exit_code": 1, "state": "FAILED"}),
            slurm_job(3, now, **{**ended, "exit_code": None, "state": "PREEMPTED"}),
            slurm_job(4, now, started_at=None, state="PENDING"),
        ],
    )
    [row] = manager.accounts().report(ReportQuery(by=["source"]), measures={}, prices={})["rows"]
    assert row["group"] == {"source": "slurm"}
    hours = {name: round(row[name], 2) for name in ("granted", "used", "failed", "preempted", "waited")}
    assert hours == {"granted": 12.0, "used": 4.0, "failed": 4.0, "preempted": 4.0, "waited": 5.0}
