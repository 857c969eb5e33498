"""What should be on a server whose agent runs jobs, and what its reports do to the leases of stored jobs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resource_manager import GPUResourceManager, MemoryStore, Settings
from resource_manager.agent.report_format import ReportError, read_report
from resource_manager.core.changes import Change
from resource_manager.core.models import RUNS_JOBS, Gpu, JobPlace, Node
from resource_manager.errors import InvalidRequestError, NeverFitsError
from resource_manager.fleet.job_board import JobBoard
from resource_manager.fleet.receiving import ReportReceiver
from resource_manager.jobs import job_preemption
from resource_manager.jobs.launchers import job_key, walls
from resource_manager.manager.cluster_file.sections import ClusterForm
from resource_manager.storage.backup import Backup, read_backup, restore, write_backup
from resource_manager.storage.jobs import MAX_BYTES_OF_CALLER, JobRow, TooManyJobsError, job_name, order_name
from resource_manager.storage.once import digest
from tests.agent.reporting import as_text, gpu, process, report, uuid
from tests.builders import Clock, granted_lease

PLACE = {"machine": "gpu-a/1", "folder": "/jobs", "mark": "m", "user": "train"}
JOB = {"command": ["python", "train.py"], "env": {"A": "b"}}


class NotedStore(MemoryStore):
    """Store with the kinds of changes of each commit."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commits: list[list[str]] = []

    def commit(self, version: int, changes: Sequence[Change], *rest: Any, **more: Any) -> Any:
        self.commits.append([type(change).__name__ for change in changes])
        return super().commit(version, changes, *rest, **more)


class Fleet:
    """Manager and receiver, with agents that report what a test says they run."""

    def __init__(
        self, gpus: tuple[Gpu, ...] = (), confine: str = "off", *, backup: Backup | None = None
    ) -> None:
        self.clock = Clock()
        self.clock.now = 1e6
        nodes = [
            Node(
                name,
                number,
                {"cpus": 64},
                gpus,
                address=f"train@{name}",
                labels=RUNS_JOBS,
                job_user="train",
                confine=confine,
            )
            for number, name in enumerate(("gpu-a", "gpu-b"))
        ]
        self.store = NotedStore(clock=self.clock)
        if backup is not None:
            restore(self.store, backup)
        self.manager = GPUResourceManager(
            Settings(store="memory://"),
            store=self.store,
            inventory=nodes,
            cluster={"min_gpus": 0, "max_gpus": 8},
        )
        self.receiver = ReportReceiver(self.manager)
        self.board = self.receiver.board

    def submit(self, task: str, **more: Any) -> Mapping[str, Any]:
        return self.manager.submit(task, 0, 8, job=JOB, owner="ada", server="gpu-a", **more)

    def report(
        self,
        *runs: dict[str, Any],
        name: str = "gpu-a",
        place: Any = PLACE,
        gpus: tuple[dict[str, Any], ...] = (gpu(0),),
        **known: Any,
    ) -> None:
        self.clock.now += 1
        known = {"machine": PLACE["machine"], **known}
        said = report(self.clock.now, *gpus, name=name, place=place, runs=list(runs), **known)
        self.receiver.receive(read_report(as_text(said)))

    def wanted(self, name: str = "gpu-a") -> dict[str, str]:
        """Return what an agent is told that asks, and asks again with what it knows then."""
        answer = self.board.jobs(name, self.board.jobs(name)["known"])
        return {item["key"]: item["want"] for item in answer["jobs"]}


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
        "walls": "",
        "last_line": "",
        "ended": False,
        **known,
    }


@pytest.fixture
def fleet() -> Fleet:
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


def test_the_job_of_a_server_that_has_died_since_its_last_report_waits_again_elsewhere() -> None:
    """Its question is held still, and carried out again at the grant."""
    fleet = Fleet((Gpu(0, "A100", uuid=uuid(0)),))
    for name in ("gpu-a", "gpu-b"):
        fleet.report(name=name)
    known = fleet.board.jobs("gpu-a")["known"]
    fleet.manager.submit("t", 0, 8, job=JOB, prefer_server="gpu-a", ttl=600)
    for _ in range(2):
        assert fleet.board.jobs("gpu-a", known)["jobs"] == []
    for _ in range(8):
        fleet.clock.now += 10
        fleet.report(name="gpu-b")
        fleet.receiver.note_silence()
    [lease] = fleet.manager.leases()
    assert (lease["server_name"], fleet.wanted("gpu-b")) == ("gpu-b", {job_key("t", 2): "run"})


def test_a_gang_is_placed_once_the_agents_of_all_its_servers_know_of_it(fleet: Fleet) -> None:
    for name in ("gpu-a", "gpu-b"):
        fleet.report(name=name)
    token = granted_lease(fleet.manager.submit("t", 0, 8, nodes=2, job=JOB))["fencing_token"]
    for _ in range(2):
        assert fleet.wanted() == {}, "gpu-b may have died"
        fleet.report()
    other = ReportReceiver(fleet.manager).board
    other.jobs("gpu-b", known=other.jobs("gpu-b")["known"])
    assert [fleet.wanted(name) for name in ("gpu-a", "gpu-b")] == [
        {job_key("t", token, rank, 2): "run"} for rank in (0, 1)
    ], "whichever service the agents ask"


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


def test_a_server_that_left_the_cluster_is_read_no_more(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each ring would read the rings of all names that an autoscaler ever gave."""
    read: list[set[str]] = []
    rings = fleet.manager.stored_jobs.rings

    def noted(servers: Iterable[str]) -> dict[str, str]:
        read.append({*servers})
        return rings(read[-1])

    monkeypatch.setattr(fleet.manager.stored_jobs, "rings", noted)
    bell = fleet.board.doorbell
    for server in ("gpu-a", "gpu-b"):
        bell.mark(server)
    before = bell.mark("gpu-b")
    stays = {"name": "gpu-a", "id": 0, "gpus": 0, "cpus": 64}
    fleet.manager.apply(ClusterForm.model_validate({"servers": [stays]}))
    assert bell.mark("gpu-b") != before, "its question is held no longer"
    fleet.manager.stored_jobs.ring("gpu-a")
    bell.mark("gpu-a")
    assert read[-1] == {"gpu-a"}


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


def test_the_walls_that_a_job_got_are_in_its_lease(fleet: Fleet) -> None:
    for name in ("gpu-a", "gpu-b"):
        fleet.report(name=name)
    token = granted_lease(fleet.manager.submit("t", 0, 8, nodes=2, job=JOB))["fencing_token"]
    first, second = (job_key("t", token, rank, 2) for rank in (0, 1))
    fleet.wanted()
    fleet.wanted("gpu-b")

    def walls() -> list[str]:
        return [place["walls"] for place in fleet.manager.leases()[0]["job_places"]]

    fleet.report(run(second, walls="none: bwrap is missing"), name="gpu-b")
    assert walls() == ["", "none: bwrap is missing"]
    for said in ("bubblewrap", "none: of later"):
        fleet.report(run(first, walls=said))
        assert walls() == ["bubblewrap", "none: bwrap is missing"]
    changes = [change for change in fleet.manager.history() if change["change"] == "jobplaced"]
    assert len(changes) == 3, "one more for each of them, and nothing for what is known"


@pytest.mark.parametrize("who", ["its agent's report", "who stopped it"])
def test_the_end_of_a_stopped_job_is_stored_whoever_releases_its_lease(fleet: Fleet, who: str) -> None:
    fleet.report()
    token = fleet.submit("t")["fencing_token"]
    key = job_key("t", token)
    fleet.report(run(key))
    fleet.manager.order_job("gpu-a", key, {"want": "stop"})
    [item] = fleet.board.jobs("gpu-a")["jobs"]
    assert (item["want"], item["keep"]) == ("stop", True), "nobody else has its output"
    over = {"exit_code": 143, "last_line": "saved", "ended": True, "ended_at": fleet.clock.now}
    fleet.report(run(key, "finished", want="stop", **over))
    assert len(fleet.manager.leases()) == 1, "who stopped it has its time to say so"
    if who == "who stopped it":
        fleet.manager.release("t", fencing_token=token, outcome="CANCELLED", job_end="ended")
    else:
        fleet.clock.now += 30
        fleet.report(run(key, "finished", want="stop", **over))
    assert fleet.manager.leases() == []
    found = fleet.manager.result_of("t", token)
    assert found is not None
    assert (found["exit_code"], found["last_line"], found["outcome"]) == (143, "saved", "CANCELLED")
    assert found["jobs"] == [{"server": "gpu-a", "key": key}]


def test_the_end_of_a_job_its_clean_gpu_and_the_next_grant_are_one_commit() -> None:
    fleet = Fleet((Gpu(0, "A100", uuid=uuid(0)),))
    fleet.report()
    token = granted_lease(fleet.manager.submit("t", 1, 8, job=JOB, server="gpu-a"))["fencing_token"]
    key = job_key("t", token)
    computes = gpu(0, processes=[process(job=key, lease_id="t", lease_source="environment")])
    for _ in range(3):
        fleet.report(run(key), gpus=(computes,))
    fleet.manager.submit("next", 1, 8, job=JOB, server="gpu-a")
    fleet.store.commits.clear()
    fleet.report(run(key, "finished"))
    assert fleet.store.commits == [["Released", "GpuCleaned", "Granted"]]
    changes = fleet.manager.history()[-3:]
    assert changes[1]["busy"] is not None, "with what was measured of the lease"
    assert [lease["task_id"] for lease in fleet.manager.leases()] == ["next"]


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


def test_a_job_without_a_lease_is_ended_until_it_is_gone_though_it_has_its_tombstone(fleet: Fleet) -> None:
    """As where its agent was restarted within the grace, or it began just before it was forgotten."""
    runs, over, shell = job_key("gone", 4), job_key("over", 5), "attach-0123abcd"
    before = fleet.board.doorbell.mark("gpu-a")
    fleet.report(*(run(key, want="forget", ended=True) for key in (runs, shell)))
    assert fleet.board.doorbell.mark("gpu-a") != before, "its agent is told at once"
    assert fleet.wanted() == {runs: "stop"}
    fleet.report(run(runs, "finished", ended=True), run(over, "finished", ended=True))
    assert fleet.wanted() == {}


def test_a_job_starts_though_older_ones_that_run_or_are_too_long_fill_the_answer(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What runs needs no start any more, and what is too long now leaves room for what is not."""
    fleet.report()
    runs = job_key("t", fleet.submit("t")["fencing_token"])
    fleet.wanted()
    [item] = fleet.board.jobs("gpu-a")["jobs"]
    size = len(json.dumps(item))
    monkeypatch.setattr("resource_manager.fleet.job_shares.FEW", 1)
    monkeypatch.setattr("resource_manager.fleet.job_shares.MAX_SPEC_BYTES", size * 3 // 2)
    next_ = job_key("next", fleet.submit("next")["fencing_token"])
    fleet.report(run(runs))
    assert fleet.wanted() == {next_: "run"}
    assert caplog.text == "", "nothing starts later"
    fleet.manager.order_job("gpu-a", runs, {"want": "run", "spec": SPEC})
    assert runs in fleet.wanted(), "who orders it again waits for the number of that order"
    fleet.store.jobs.write([JobRow(order_name(runs), "", "", 0.0)])
    long = {**JOB, "env": {"A": "b" * size}}
    fleet.manager.submit("long", 0, 8, job=long, owner="ada", server="gpu-a")
    newest = job_key("new", fleet.submit("new")["fencing_token"])
    fleet.report(run(runs), run(next_))
    assert fleet.wanted() == {newest: "run"}
    assert "of 4, 1 later" in caplog.text


def test_what_others_run_in_the_folder_of_an_agent_is_left_alone(fleet: Fleet) -> None:
    """As `gpu-manager attach` of its user, and where the homes of several servers are on one file system."""
    fleet.report()
    elsewhere = job_key("t", fleet.submit("t")["fencing_token"])
    shell, over = "attach-0123abcd", "attach-01234567"
    before = fleet.board.doorbell.mark("gpu-b")
    others = run(elsewhere), run(shell), run(over, "absent", began=None)
    fleet.report(*others, name="gpu-b")
    assert fleet.board.doorbell.mark("gpu-b") == before
    assert fleet.wanted("gpu-b") == {}
    fleet.report(run(elsewhere, "finished"), run(shell), run(over, "finished"), name="gpu-b")
    assert fleet.wanted("gpu-b") == {over: "forget"}
    assert [lease["state"] for lease in fleet.manager.leases()] == ["RUNNING"]


def test_the_agent_of_a_job_that_a_restore_left_without_a_lease_is_told_at_once(
    fleet: Fleet, tmp_path: Path
) -> None:
    """Its question is held, and the restored state has nothing to say to it before the job is reported."""
    fleet.report()
    write_backup(fleet.manager.store, tmp_path / "backup")
    key = job_key("t", fleet.submit("t")["fencing_token"])
    fleet.report()
    assert fleet.wanted() == {key: "run"}
    restore(fleet.manager.store, read_backup(tmp_path / "backup"), force=True)
    before = fleet.board.doorbell.mark("gpu-a")
    assert fleet.wanted() == {}
    fleet.report(run(key))
    told = fleet.board.doorbell.mark("gpu-a")
    assert told != before
    assert fleet.wanted() == {key: "stop"}
    fleet.report(run(key, want="stop"))
    assert fleet.board.doorbell.mark("gpu-a") == told, "it is about to end"


def test_a_job_that_did_not_start_waits_again_elsewhere(fleet: Fleet) -> None:
    fleet.report()
    fleet.report(name="gpu-b")
    token = granted_lease(fleet.manager.submit("t", 0, 8, job=JOB, prefer_server="gpu-a"))["fencing_token"]
    fleet.wanted()
    why = {"refusal": "NotStartedError", "error": "/jobs cannot be written: disk full"}
    fleet.report(run(job_key("t", token), "absent", **why))
    [lease] = fleet.manager.leases()
    assert (lease["server_name"], lease["fencing_token"] > token) == ("gpu-b", True)
    assert "disk full" in str(fleet.manager.history())
    assert fleet.manager.stored_jobs.job("t") == JOB


def test_what_an_agent_says_of_a_start_that_failed_holds_no_lease(fleet: Fleet) -> None:
    fleet.report()
    token = fleet.submit("t")["fencing_token"]
    why = {"refusal": "NotStartedError", "error": "no folder \x1b]0;pwned\x07\n2026 forged\u202e" + 300 * "x"}
    fleet.report(run(job_key("t", token), "absent", **why))
    [entry] = fleet.manager.queue()
    assert ": no folder ?]0;pwned? 2026 forged?" in entry["reason"]


def test_a_job_that_is_known_to_have_ended_is_not_waited_for(fleet: Fleet) -> None:
    fleet.report()
    token = fleet.submit("t")["fencing_token"]
    why = {"refusal": "AlreadyEndedError", "error": "it has ended already", "ended": True}
    fleet.report(run(job_key("t", token), "absent", **why))
    assert fleet.manager.leases() == [], "as after a restore of an older state"


def test_a_job_that_did_not_start_waits_where_no_other_server_is(fleet: Fleet) -> None:
    fleet.report()
    token = fleet.submit("t")["fencing_token"]
    why = {"refusal": "NotStartedError", "error": "bwrap is missing: install bubblewrap"}
    fleet.report(run(job_key("t", token), "absent", **why))
    [entry] = fleet.manager.queue()
    assert "closed to it: its start failed there" in entry["reason"], "it is not granted again and again"
    assert "bwrap is missing: install bubblewrap; avoided until" in entry["reason"]
    fleet.clock.now += 601
    fleet.manager.expire_and_schedule()
    assert [lease["task_id"] for lease in fleet.manager.leases()] == ["t"]


def test_a_job_that_starts_nowhere_ends_with_its_reason_and_keeps_no_other_back(fleet: Fleet) -> None:
    fleet.report()
    token = fleet.submit("bad")["fencing_token"]
    stored = json.dumps(["job", "bad", "ada", {**JOB, "env": {"A\nB": "0"}}])  # by another build
    fleet.manager.store.jobs.write([JobRow(job_name("bad"), "", stored, 600.0)])
    key = job_key("t", fleet.submit("t")["fencing_token"])
    assert fleet.wanted() == {key: "run"}
    assert [lease["task_id"] for lease in fleet.manager.leases()] == ["t"]
    found = fleet.manager.result_of("bad", token)
    assert found is not None
    assert "its job cannot be started: job: env must have texts by the names of variables" in found["reason"]


@pytest.mark.parametrize("stored", [["job", "t", JOB], ["job", "t", "ada", JOB]])
def test_a_job_runs_for_a_lease_of_its_owner_only(
    fleet: Fleet, stored: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Neither one that names no owner, nor that of another who had this lease id."""
    fleet.report()
    fleet.manager.submit("t", 0, 8, job=JOB, owner="eve", server="gpu-a")
    fleet.store.jobs.write([JobRow(job_name("t"), "", json.dumps(stored), 600.0)])
    assert fleet.wanted() == {}
    assert "of 't' of owner 'eve' is something else or another owner's: submit it again" in caplog.text


def test_a_row_that_cannot_be_read_keeps_no_other_job_back(fleet: Fleet) -> None:
    fleet.report()
    first, second, third = (
        job_key(task, fleet.submit(task)["fencing_token"]) for task in ("first", "second", "third")
    )
    assert fleet.wanted() == {first: "run", second: "run", third: "run"}
    rows = {
        f"order {first}": "as of a service with other keys",
        f"order {second}": json.dumps(["order", first, {"want": "run"}]),
        "questions gpu-a": "7",
    }
    store = fleet.manager.store.jobs
    store.write([JobRow(digest(name), "", text, 600.0) for name, text in rows.items()])
    assert fleet.wanted() == {third: "run"}, "an order that nobody can read may be to end its job"
    fleet.manager.order_job("gpu-a", first, {"want": "stop"})
    assert fleet.wanted() == {first: "stop", third: "run"}
    assert len(fleet.manager.leases()) == 3


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
    assert fleet.manager.stored_jobs.job("t", "ada") == JOB


def test_an_agent_is_not_answered_again_and_again_while_a_job_has_its_grace(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_preemption, "time", SimpleNamespace(time=lambda: fleet.clock.now))
    lease = fleet.submit("t", preempt_grace=600)
    fleet.report(run(job_key("t", lease["fencing_token"])))
    fleet.manager.submit("urgent", 0, 60, priority=5, server="gpu-a")
    fleet.manager.preempt("t")
    first = fleet.board.jobs("gpu-a")
    fleet.clock.now += 1
    second = fleet.board.jobs("gpu-a", first["known"])
    assert [answer["jobs"][0]["grace_s"] for answer in (first, second)] == [600.0, 599.0]
    assert second["known"] == first["known"], "so that the question is kept open"


def test_an_order_about_the_job_of_no_lease_is_refused(fleet: Fleet) -> None:
    fleet.report()
    token = fleet.submit("t")["fencing_token"]
    for server, key in (("gpu-a", job_key("t", token + 1)), ("gpu-b", job_key("t", token))):
        with pytest.raises(Exception, match=r"no lease on gpu-. has the job"):
            fleet.manager.order_job(server, key, {"want": "stop"})
    with pytest.raises(ValueError, match="want must be one of prepare, run, terminate, preempt, stop"):
        fleet.manager.order_job("gpu-a", job_key("t", token), {"want": "reboot"})


def test_orders_count_as_jobs_of_their_owner_until_the_lease_ends(fleet: Fleet) -> None:
    lease = granted_lease(fleet.manager.submit("t", 0, 8, owner="ada", server="gpu-a"))
    token = lease["fencing_token"]
    key, jobs = job_key("t", token), fleet.store.jobs
    start = {"want": "run", "spec": SPEC}
    fleet.manager.order_job("gpu-a", key, start)
    assert jobs.bytes_of("ada") > 0
    other = JobRow(job_name("other"), "ada", "x" * MAX_BYTES_OF_CALLER, 600.0)
    jobs.write([other])
    fleet.clock.now += 1
    manager = GPUResourceManager(Settings(store="memory://"), store=fleet.store)  # that has counted nothing
    new = granted_lease(fleet.manager.submit("new", 0, 8, owner="ada", server="gpu-a"))["fencing_token"]
    for order in (start, {"want": "stop"}):
        with pytest.raises(TooManyJobsError):
            manager.order_job("gpu-a", job_key("new", new), order)
    manager.place_job("new", [JobPlace("agent", "gpu-a", **PLACE)], fencing_token=new)
    with pytest.raises(TooManyJobsError):
        manager.order_job("gpu-a", job_key("new", new), start)
    manager.order_job("gpu-a", job_key("new", new), {"want": "stop"})  # of a job that may run
    manager.release("new", fencing_token=new, job_end="ended")
    manager.place_job("t", [JobPlace("agent", "gpu-a", **PLACE)], fencing_token=token)
    jobs.write([other._replace(text="", keep_s=0.0)])
    assert jobs.bytes_of("ada") > 0
    manager.release("t", fencing_token=token, job_end="ended")
    assert (jobs.bytes_of("ada"), manager.stored_jobs.orders([key])) == (0, {})


def test_orders_end_with_the_member_whose_job_they_are_of(fleet: Fleet) -> None:
    """Also of what is left of a gang whose id has a lease again, and of a stored job."""
    orders = fleet.manager.stored_jobs.orders

    def start(task: str, nodes: int = 1, **more: Any) -> tuple[int, list[str]]:
        lease = fleet.manager.submit(task, 0, 8, owner="ada", server="gpu-a", nodes=nodes, **more)
        token = granted_lease(lease)["fencing_token"]
        places = [JobPlace("agent", "gpu-a", **PLACE)] * nodes
        fleet.manager.place_job(task, places, fencing_token=token)
        keys = [job_key(task, token, rank, nodes) for rank in range(nodes)]
        for key in keys:
            fleet.manager.order_job("gpu-a", key, {"want": "run", "spec": SPEC})
        return token, keys

    gang, keys = start("gang", 3, spread="pack")
    fleet.manager.release_members("gang", [0], fencing_token=gang, job_end="ended")
    assert [*orders(keys)] == keys[1:]
    again, own = start("gang")
    fleet.manager.release_members("gang", [1], fencing_token=gang, job_end="ended")
    assert [*orders(keys)] == keys[2:]
    fleet.manager.release("gang", fencing_token=gang, job_end="ended")
    assert [*orders([*keys, *own])] == own
    fleet.manager.release("gang", fencing_token=again, job_end="ended")
    stored, of_stored = start("stored", job=JOB)
    fleet.manager.release("stored", fencing_token=stored, job_end="ended")
    assert orders([*own, *of_stored]) == {}


def test_a_job_that_was_prepared_needs_no_more_room_to_run(fleet: Fleet) -> None:
    token = granted_lease(fleet.manager.submit("t", 0, 8, owner="ada", server="gpu-a"))["fencing_token"]
    key, jobs = job_key("t", token), fleet.store.jobs
    fleet.manager.order_job("gpu-a", key, {"want": "prepare", "spec": SPEC})
    left = MAX_BYTES_OF_CALLER - jobs.bytes_of("ada")
    jobs.write([JobRow(job_name("other"), "ada", "x" * left, 600.0)])
    manager = GPUResourceManager(Settings(store="memory://"), store=fleet.store)  # that has counted nothing
    longer = {**SPEC, "command": ["id", "-u", "--and-more-than-before"]}
    with pytest.raises(TooManyJobsError):
        manager.order_job("gpu-a", key, {"want": "run", "spec": longer})
    manager.order_job("gpu-a", key, {"want": "run", "spec": SPEC})
    assert list(manager.stored_jobs.orders([key])) == [key]
    assert jobs.bytes_of("ada") <= MAX_BYTES_OF_CALLER


@pytest.mark.usefixtures("fleet")
@pytest.mark.parametrize("want", ["prepare", "run"])
def test_an_order_does_not_choose_its_walls(want: str) -> None:
    fleet = Fleet(confine="must")
    fleet.report()
    token = granted_lease(fleet.manager.submit("t", 0, 8, owner="ada", server="gpu-a"))["fencing_token"]
    spec = {
        "command": ["id"],
        "environment": {},
        "confine": "off",
        "walls": ["-c", "print()"],
        "user": "root",
    }
    fleet.manager.order_job("gpu-a", job_key("t", token), {"want": want, "spec": spec}, owner="ada")
    [item] = fleet.board.jobs("gpu-a")["jobs"]
    said = item["spec"]
    assert (said["command"], said["confine"], said["user"]) == (["id"], "must", "")
    assert walls.BUBBLEWRAP in said["walls"][3]


SPEC = {"command": ["id"], "environment": {}}


@pytest.mark.parametrize(
    "order",
    [
        {"want": "stop", "grace_s": 1e9},
        {"want": "stop", "grace_s": -1},
        {"want": "stop", "grace_s": "1"},
        {"want": "stop", "grace_s": float("nan")},
        {"want": "stop", "user": "root"},
        {"want": "stop", "spec": SPEC},
        {"want": "preempt", "signal": "STOP"},
        {"want": "run"},
        {"want": "run", "spec": "id"},
        {"want": "run", "spec": {**SPEC, "command": "id"}},
        {"want": "run", "spec": {**SPEC, "environment": None}},
        {"want": "run", "spec": {**SPEC, "files": {"../../../.ssh/authorized_keys": "ssh-rsa"}}},
        {"want": "run", "spec": {**SPEC, "files": None}},
        {"want": "run", "spec": {**SPEC, "port": 70000}},
        {"want": "run", "spec": {**SPEC, "port": "1"}},
    ],
)
def test_an_order_that_no_agent_can_carry_out_is_refused(fleet: Fleet, order: dict[str, Any]) -> None:
    token = fleet.submit("t")["fencing_token"]
    with pytest.raises(InvalidRequestError):
        fleet.manager.order_job("gpu-a", job_key("t", token), order)


@pytest.mark.parametrize("env", [None, [], 0, False, ""])
def test_a_job_whose_variables_are_no_table_is_refused(fleet: Fleet, env: object) -> None:
    with pytest.raises(InvalidRequestError, match="env must have texts by the names of variables"):
        fleet.manager.submit("t", 0, 8, job={"command": ["id"], "env": env}, owner="ada", server="gpu-a")


def test_a_preempted_job_is_told_by_its_agent_while_who_would_tell_it_is_gone(fleet: Fleet) -> None:
    """As while Airflow is stopped; who comes back then is heard."""
    lease = granted_lease(fleet.manager.submit("t", 0, 8, server="gpu-a", preempt_grace=60))
    token, key = lease["fencing_token"], job_key("t", lease["fencing_token"])
    fleet.manager.place_job("t", [JobPlace("agent", "gpu-a", **PLACE)], fencing_token=token)
    begun = fleet.manager.order_job("gpu-a", key, {"want": "run", "spec": SPEC})
    fleet.manager.submit("urgent", 0, 60, priority=5, server="gpu-a")
    fleet.manager.preempt("t", preemptor="urgent")
    assert fleet.wanted() == {key: "run"}, "they have its grace to tell it"
    before = fleet.board.doorbell.mark("gpu-a")
    fleet.clock.now += 61
    fleet.manager.expire_and_schedule()
    assert fleet.board.doorbell.mark("gpu-a") != before, "its agent is told at once"
    [item] = fleet.board.jobs("gpu-a")["jobs"]
    assert (item["want"], item["n"], item["grace_s"], item["signal"]) == ("preempt", begun, 30.0, "TERM")
    assert JobBoard(fleet.manager, lambda: True).jobs("gpu-a")["jobs"] == [], "the state may be an old one"
    later = fleet.manager.order_job("gpu-a", key, {"want": "preempt", "grace_s": 5.0, "signal": "USR2"})
    [item] = fleet.board.jobs("gpu-a")["jobs"]
    assert (item["n"], item["grace_s"], item["signal"]) == (later, 5.0, "USR2")
    assert later > begun


def test_a_state_that_is_older_than_what_is_known_ends_no_job_but_by_an_order(fleet: Fleet) -> None:
    """Its moment may be that of a preemption that was taken back since, or of a terminal's late renewal."""
    fleet.report()
    shown = granted_lease(
        fleet.manager.submit("shown", 0, 8, ttl=60, server="gpu-a", labels={"launcher": "terminal"})
    )
    fleet.manager.place_job(
        "shown", [JobPlace("agent", "gpu-a", **PLACE)], fencing_token=shown["fencing_token"]
    )
    left, stored = (
        job_key("shown", shown["fencing_token"]),
        job_key("t", fleet.submit("t", preempt_grace=600)["fencing_token"]),
    )
    fleet.report(run(left), run(stored))
    fleet.clock.now += 61
    fleet.manager.expire_and_schedule()
    fleet.manager.submit("urgent", 0, 50, priority=5, server="gpu-a")
    fleet.manager.preempt("t", preemptor="urgent")
    board = JobBoard(fleet.manager, lambda: True)
    assert board.jobs("gpu-a")["jobs"] == []
    assert fleet.wanted() == {left: "stop", stored: "preempt"}
    fleet.manager.order_job("gpu-a", stored, {"want": "stop"})
    assert [item["key"] for item in board.jobs("gpu-a")["jobs"]] == [stored]


def test_a_job_that_begins_while_an_answer_is_made_is_not_taken_for_one_without_a_lease(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.report()
    read = fleet.manager.read

    def read_before_it_begins(*given: Any) -> Any:
        found = read(*given)
        monkeypatch.undo()
        fleet.report(run(job_key("t", fleet.submit("t")["fencing_token"])))
        return found

    monkeypatch.setattr(fleet.manager, "read", read_before_it_begins)
    assert fleet.board.jobs("gpu-a")["jobs"] == []


@pytest.mark.parametrize("what", ["machine", "folder", "mark"])
def test_the_end_of_a_job_is_believed_only_from_where_it_was_placed(fleet: Fleet, what: str) -> None:
    """In a copy of its folder, or on a copy of its machine, it looks as if it was killed."""
    other = {**PLACE, what: "/copy"}
    for name in ("gpu-a", "gpu-b"):
        fleet.report(name=name)
    key = job_key("t", fleet.submit("t")["fencing_token"])
    gang = granted_lease(fleet.manager.submit("gang", 0, 8, nodes=2, job=JOB))["fencing_token"]
    first, second = (job_key("gang", gang, rank, 2) for rank in (0, 1))
    killed: dict[str, Any] = {"exit_code": None, "ended_at": None}
    for _ in range(2):  # they are placed, and seen there
        fleet.report(run(key), run(first))
        fleet.report(run(second), name="gpu-b")
    before = fleet.board.doorbell.mark("gpu-a")
    fleet.report(run(key, "finished", **killed), run(first), place=other)
    assert fleet.board.doorbell.mark("gpu-a") == before, "its agent has nothing to do"
    fleet.report(run(second, "finished", **killed), name="gpu-b", place=other)
    fleet.report(run(key), run(first, "finished"))
    assert [lease["state"] for lease in fleet.manager.leases()] == ["RUNNING", "RUNNING"]
    fleet.report(run(key, "finished"), run(first, "finished"))
    fleet.report(run(second, "finished"), name="gpu-b")
    assert fleet.manager.leases() == []


def test_an_agent_that_runs_no_jobs_does_not_hide_the_jobs_of_another_one(fleet: Fleet) -> None:
    """As the unit of `agent install` beside an agent with --run-jobs."""
    fleet.report()
    with pytest.raises(ReportError, match="another one on gpu-a runs jobs and reports: stop one of them"):
        fleet.report(place=None)
    assert fleet.manager.agent_state("gpu-a")["place"] == PLACE
    fleet.clock.now += 40
    fleet.report(place=None)


@pytest.mark.parametrize("name", ["t", "gang"])
def test_what_is_left_of_a_gang_is_ended_and_keeps_no_other_job_back(fleet: Fleet, name: str) -> None:
    """Not that of another who has its lease id by then either."""
    fleet.report()
    fleet.report(name="gpu-b")
    where: dict[str, Any] = {"server": "gpu-b", "job": JOB}
    gang = granted_lease(fleet.manager.submit("gang", 0, 8, owner="ada", nodes=3, spread="pack", **where))
    fleet.report(name="gpu-b")
    fleet.manager.release_members("gang", [0], fencing_token=gang["fencing_token"], job_end="ended")
    token = granted_lease(fleet.manager.submit(name, 0, 8, owner="bob", **where))["fencing_token"]
    fleet.manager.release_members("gang", [1], fencing_token=gang["fencing_token"], job_end="ended")
    fleet.report(name="gpu-b")
    key = job_key("gang", gang["fencing_token"], 2, 3)
    assert fleet.wanted("gpu-b") == {key: "terminate", job_key(name, token): "run"}
    fleet.report(run(key, "finished", exit_code=143), name="gpu-b")
    assert [lease["task_id"] for lease in fleet.manager.leases()] == [name]


def test_the_end_of_a_gang_is_that_of_the_member_that_failed_first(fleet: Fleet) -> None:
    for name in ("gpu-a", "gpu-b"):
        fleet.report(name=name)
    token = granted_lease(fleet.manager.submit("t", 0, 8, nodes=2, job=JOB))["fencing_token"]
    first, second = (job_key("t", token, rank, 2) for rank in (0, 1))
    fleet.wanted()
    assert [fleet.wanted("gpu-b"), fleet.wanted("gpu-a")] == [{second: "run"}, {first: "run"}]
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


def test_rank_0_of_a_gang_that_starts_its_workers_first_is_offered_once_they_have_begun(fleet: Fleet) -> None:
    for name in ("gpu-a", "gpu-b"):
        fleet.report(name=name)
    order = {"startup_order": "workers_first"}
    lease = granted_lease(fleet.manager.submit("t", 0, 8, nodes=2, job=JOB, labels=order))
    first, second = (job_key("t", lease["fencing_token"], rank, 2) for rank in (0, 1))
    fleet.wanted("gpu-b")
    assert [fleet.wanted("gpu-a"), fleet.wanted("gpu-b")] == [{}, {second: "run"}]
    before = fleet.board.doorbell.mark("gpu-a")
    fleet.report(run(second), name="gpu-b")
    assert fleet.board.doorbell.mark("gpu-a") != before, "its agent is told at once"
    assert fleet.wanted("gpu-a") == {first: "run"}
    over = run(second, "finished", exit_code=5, ended_at=6.0)
    fleet.report(over, name="gpu-b")
    assert fleet.wanted("gpu-a") == {first: "terminate"}
    fleet.report(run(first, "absent", want="terminate", began=None), name="gpu-a")
    fleet.report(over, name="gpu-b")
    assert len(fleet.manager.leases()) == 1, "rank 0 may begin by an order of since, while gpu-b is silent"
    fleet.report(run(first, "absent", want="terminate", began=None, ended=True), name="gpu-a")
    fleet.report(over, name="gpu-b")
    assert fleet.manager.leases() == [], "rank 0 has not begun, and never does"
    found = fleet.manager.result_of("t")
    assert found is not None
    assert (found["exit_code"], found["outcome"]) == (5, "FAILED")


def test_a_lying_agent_ends_only_what_is_its_own_and_now(fleet: Fleet) -> None:
    for name in ("gpu-a", "gpu-b"):
        fleet.report(name=name)
    token = fleet.submit("t")["fencing_token"]
    key, older = job_key("t", token), job_key("t", token - 1)
    fleet.report(run(key))
    over = run(key, "finished", exit_code=0)
    fleet.report(over, name="gpu-b")
    fleet.report(run(older, "finished", exit_code=0), run(key))
    assert [lease["state"] for lease in fleet.manager.leases()] == ["RUNNING"]
    assert fleet.wanted("gpu-b") == {}
    assert fleet.wanted() == {key: "run", older: "forget"}
    said = report(fleet.clock.now - 1, gpu(0), place=PLACE, runs=[over])
    with pytest.raises(ReportError, match="older than the last one of this server"):
        fleet.receiver.receive(read_report(as_text(said)))
    assert fleet.manager.leases()[0]["state"] == "RUNNING"


def test_a_job_that_is_said_to_have_ended_and_goes_on_closes_its_gpu() -> None:
    fleet = Fleet((Gpu(0, "A100", uuid=uuid(0)),))
    fleet.report()
    token = granted_lease(fleet.manager.submit("t", 1, 8, job=JOB, server="gpu-a"))["fencing_token"]
    key = job_key("t", token)
    goes_on = gpu(0, processes=[process(job=key, lease_id="t", lease_source="environment")])
    fleet.report(run(key), gpus=(goes_on,))
    fleet.report(run(key, "finished"), gpus=(goes_on,))
    assert fleet.manager.leases() == []
    fleet.manager.submit("next", 1, 8, job=JOB, server="gpu-a")
    for _ in range(40):
        fleet.clock.now += 10
        fleet.report(gpus=(goes_on,))
    assert fleet.manager.leases() == [], "its GPU is nobody's while a process is there"
    assert fleet.manager.server("gpu-a")["closed_gpus"] == 1


def test_the_jobs_of_a_server_that_was_started_again_are_gone(fleet: Fleet) -> None:
    fleet.report()
    token = fleet.submit("t", ttl=100)["fencing_token"]
    key = job_key("t", token)
    fleet.report(run(key))
    fleet.clock.now += 60
    fleet.report(run(key, "finished", exit_code=None), boot_id="boot-2", uptime_s=5.0)
    assert fleet.manager.leases() == []
    found = fleet.manager.result_of("t", token)
    assert found is not None
    assert (found["exit_code"], found["outcome"]) == (None, "FAILED")


@pytest.mark.parametrize("copied", [False, True])
def test_a_server_that_was_started_again_and_knows_nothing_starts_no_job_twice(copied: bool) -> None:
    fleet = Fleet((Gpu(0, "A100", uuid=uuid(0)),))
    fleet.report()
    token = granted_lease(fleet.manager.submit("t", 1, 8, job=JOB, ttl=100))["fencing_token"]
    key = job_key("t", token)
    assert fleet.wanted() == {key: "run"}
    fleet.report(run(key))
    fleet.clock.now += 60
    empty = {**PLACE, "mark": "another"}
    fleet.report(place=empty)
    [item] = fleet.board.jobs("gpu-a")["jobs"]
    assert item["place"] == {"machine": "gpu-a/1", "folder": "/jobs", "mark": "m"}, "where its job may run"
    fleet.clock.now += 100
    fleet.manager.expire_and_schedule()
    assert fleet.manager.leases()[0]["state"] == "ERROR"
    runs = [run(key, "finished", exit_code=None, ended_at=None)] if copied else []
    fleet.report(*runs, place=empty, boot_id="boot-2", uptime_s=5.0)
    assert fleet.manager.leases() == [], "no process outlives its server"


def test_a_job_goes_to_no_server_whose_agent_runs_none() -> None:
    nodes = [
        Node("gpu-a", 0, {"cpus": 8}, (Gpu(0),)),
        Node("gpu-b", 1, {"cpus": 8}, (Gpu(0),), labels=RUNS_JOBS, job_user="train"),
    ]
    with GPUResourceManager.from_url("memory://", inventory=nodes) as manager:
        assert granted_lease(manager.submit("t", 1, job=JOB))["server_name"] == "gpu-b"
        assert manager.submit("waits", 1, job=JOB)["state"] == "WAITING"
        without = "gpu-a has no agent that runs jobs: set job_user of a server, or use gpu-manager run"
        with pytest.raises(NeverFitsError, match=without):
            manager.submit("never", 1, job=JOB, server="gpu-a")
