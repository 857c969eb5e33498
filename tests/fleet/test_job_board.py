"""What should be on a server whose agent runs jobs, and what its reports do to the leases of stored jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from resource_manager import GPUResourceManager, MemoryStore, Settings
from resource_manager.agent.report_format import read_report
from resource_manager.core.models import RUNS_JOBS, Gpu, Node
from resource_manager.errors import NeverFitsError
from resource_manager.fleet.receiving import ReportReceiver
from resource_manager.jobs.launchers import job_key
from tests.agent.reporting import as_text, gpu, report
from tests.builders import Clock

PLACE = {"machine": "gpu-a/1", "folder": "/jobs", "mark": "m", "user": "train"}
JOB = {"command": ["python", "train.py"], "env": {"A": "b"}}


class Fleet:
    """Manager and receiver, with agents that report what a test says they run."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.clock.now = 1e6
        nodes = [
            Node(name, number, {"cpus": 64}, address=name, labels=RUNS_JOBS, job_user="train")
            for number, name in enumerate(("gpu-a", "gpu-b"))
        ]
        self.manager = GPUResourceManager(
            Settings(store="memory://"), store=MemoryStore(clock=self.clock), inventory=nodes
        )
        self.receiver = ReportReceiver(self.manager)
        self.board = self.receiver.board

    def submit(self, task: str, **more: Any) -> Mapping[str, Any]:
        return self.manager.submit(task, 0, 8, job=JOB, owner="ada", server="gpu-a", **more)

    def report(self, *runs: dict[str, Any], name: str = "gpu-a", place: Any = PLACE) -> None:
        self.clock.now += 1
        said = report(self.clock.now, gpu(0), name=name, place=place, runs=list(runs))
        self.receiver.receive(read_report(as_text(said)))

    def wanted(self, name: str = "gpu-a") -> dict[str, str]:
        return {item["key"]: item["want"] for item in self.board.jobs(name)["jobs"]}


def run(key: str, state: str = "running", **known: Any) -> dict[str, Any]:
    return {
        "key": key,
        "state": state,
        "exit_code": 0 if state == "finished" else None,
        "ended_at": 5.0 if state == "finished" else None,
        "checkpoint_at": None,
        "preempted": False,
        "want": "run",
        "n": "",
        "error": None,
        "refusal": None,
        "began": True,
        "last_line": "",
        "ended": False,
        **known,
    }


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    monkeypatch.setattr("resource_manager.manager.requests.gpu_range", lambda cluster: (0, 8))
    return Fleet()


def test_a_job_is_placed_before_it_is_offered(fleet: Fleet) -> None:
    lease = fleet.submit("t")
    assert fleet.wanted() == {}, "where it would be is not known yet"
    assert fleet.manager.leases()[0]["job_places"] == []
    fleet.report()
    [placed] = fleet.manager.leases()[0]["job_places"]
    assert (placed["launcher"], placed["folder"], placed["user"]) == ("agent", "/jobs", "train")
    [item] = fleet.board.jobs("gpu-a")["jobs"]
    assert (item["want"], item["token"], item["user"]) == ("run", lease["fencing_token"], "train")
    assert item["spec"]["command"] == ["python", "train.py"]
    environment = item["spec"]["environment"]
    assert (environment["A"], environment["GPU_LEASE_ID"]) == ("b", "t")
    assert fleet.board.jobs("gpu-b")["jobs"] == [], "nothing for another server"


def test_what_is_wanted_changes_the_mark_and_the_hash(fleet: Fleet) -> None:
    fleet.report()
    before, known = fleet.board.doorbell.mark("gpu-a"), fleet.board.jobs("gpu-a")["known"]
    assert fleet.board.doorbell.mark("gpu-a") == before
    fleet.submit("t")
    assert fleet.board.doorbell.mark("gpu-a") != before
    assert fleet.board.jobs("gpu-a")["known"] != known
    placed = fleet.board.doorbell.mark("gpu-a")
    fleet.manager.order_job("gpu-a", job_key("t", 1), {"want": "stop"})
    assert fleet.board.doorbell.mark("gpu-a") != placed
    assert fleet.wanted() == {job_key("t", 1): "stop"}


def test_the_end_of_a_job_releases_its_lease_with_the_result(fleet: Fleet) -> None:
    fleet.report()
    token = fleet.submit("t")["fencing_token"]
    key = job_key("t", token)
    fleet.wanted()
    fleet.report(run(key))
    assert fleet.manager.leases()[0]["state"] == "RUNNING"
    fleet.report(run(key, "finished", exit_code=3, last_line="boom"))
    assert fleet.manager.leases() == []
    found = fleet.manager.result_of("t", token)
    assert found is not None
    assert (found["exit_code"], found["last_line"], found["owner"]) == (3, "boom", "ada")
    assert fleet.manager.history()[-1]["outcome"] == "FAILED"
    assert fleet.wanted() == {key: "forget"}


def test_reports_keep_a_lease_and_silence_frees_nothing(fleet: Fleet) -> None:
    fleet.report()
    token = fleet.submit("t", ttl=100)["fencing_token"]
    key = job_key("t", token)
    fleet.report(run(key))
    for _ in range(5):
        fleet.clock.now += 60
        fleet.report(run(key))
        assert fleet.manager.leases()[0]["state"] == "RUNNING"
    fleet.clock.now += 1000
    fleet.manager.expire_and_schedule()
    assert fleet.manager.leases()[0]["state"] == "ERROR", "quarantined, not freed"
    fleet.report(run(key))
    assert fleet.manager.leases()[0]["state"] == "RUNNING"


def test_a_job_without_a_lease_is_ended(fleet: Fleet) -> None:
    fleet.report(run(job_key("gone", 4)), run(job_key("over", 5), "finished"))
    assert fleet.wanted() == {job_key("gone", 4): "stop", job_key("over", 5): "forget"}


def test_a_job_that_did_not_start_waits_again_elsewhere(fleet: Fleet) -> None:
    fleet.report()
    fleet.report(name="gpu-b")
    token = fleet.manager.submit("t", 0, 8, job=JOB, prefer_server="gpu-a")["fencing_token"]
    fleet.wanted()
    why = {"refusal": "NotStartedError", "error": "/jobs cannot be written: disk full"}
    fleet.report(run(job_key("t", token), "absent", **why))
    [lease] = fleet.manager.leases()
    assert (lease["server_name"], lease["fencing_token"] > token) == ("gpu-b", True)
    assert "disk full" in str(fleet.manager.history())
    assert fleet.manager.stored_jobs.job("t") == JOB


def test_a_preempted_job_is_told_and_its_request_waits_again(fleet: Fleet) -> None:
    fleet.report()
    token = fleet.submit("t")["fencing_token"]
    key = job_key("t", token)
    fleet.report(run(key))
    fleet.manager.submit("urgent", 0, 60, priority=5, server="gpu-a")
    fleet.manager.preempt("t", preemptor="urgent")
    [item] = fleet.board.jobs("gpu-a")["jobs"]
    assert (item["want"], item["signal"]) == ("preempt", "TERM")
    assert item["grace_s"] > 0
    fleet.report(run(key, "finished", exit_code=143, preempted=True))
    assert [lease["task_id"] for lease in fleet.manager.leases()] == ["urgent"]
    assert [entry["task_id"] for entry in fleet.manager.queue()] == ["t"]
    assert fleet.manager.stored_jobs.job("t") == JOB


def test_an_order_about_the_job_of_no_lease_is_refused(fleet: Fleet) -> None:
    fleet.report()
    token = fleet.submit("t")["fencing_token"]
    for server, key in (("gpu-a", job_key("t", token + 1)), ("gpu-b", job_key("t", token))):
        with pytest.raises(Exception, match="no live lease"):
            fleet.manager.order_job(server, key, {"want": "stop"})
    with pytest.raises(ValueError, match="want must be one of prepare, run, terminate, preempt, stop"):
        fleet.manager.order_job("gpu-a", job_key("t", token), {"want": "reboot"})


def test_the_end_of_a_gang_is_that_of_the_member_that_failed_first(fleet: Fleet) -> None:
    for name in ("gpu-a", "gpu-b"):
        fleet.report(name=name)
    token = fleet.manager.submit("t", 0, 8, nodes=2, job=JOB)["fencing_token"]
    first, second = (job_key("t", token, rank) for rank in (0, 1))
    assert [fleet.wanted("gpu-a"), fleet.wanted("gpu-b")] == [{first: "run"}, {second: "run"}]
    fleet.report(run(first), name="gpu-a")
    before = fleet.board.doorbell.mark("gpu-a")
    fleet.report(run(second, "finished", exit_code=5, ended_at=6.0, last_line="boom"), name="gpu-b")
    assert fleet.board.doorbell.mark("gpu-a") != before, "its agent is told at once"
    assert fleet.wanted("gpu-a") == {first: "terminate"}
    fleet.report(run(first, "finished", exit_code=143, ended_at=7.0), name="gpu-a")
    assert fleet.manager.leases() == []
    found = fleet.manager.result_of("t", token)
    assert found is not None
    assert (found["exit_code"], found["last_line"]) == (5, "boom")


def test_a_job_goes_to_no_server_whose_agent_runs_none() -> None:
    nodes = [
        Node("gpu-a", 0, {"cpus": 8}, (Gpu(0),)),
        Node("gpu-b", 1, {"cpus": 8}, (Gpu(0),), labels=RUNS_JOBS, job_user="train"),
    ]
    with GPUResourceManager.from_url("memory://", inventory=nodes) as manager:
        assert manager.submit("t", 1, job=JOB)["server_name"] == "gpu-b"
        assert manager.submit("waits", 1, job=JOB)["state"] == "WAITING"
        with pytest.raises(
            NeverFitsError, match=r"gpu-a has not jobs=agent as its label: a server with a job_user has it"
        ):
            manager.submit("never", 1, job=JOB, server="gpu-a")
