"""Stored jobs that ended, or were kept from beginning, without anybody who would release their leases."""

from __future__ import annotations

from typing import Any

import pytest

from resource_manager.core.maintenance import as_text
from resource_manager.core.models import Gpu, JobPlace
from resource_manager.jobs.launchers import job_key
from resource_manager.manager.maintenance_windows import WindowForm
from tests.agent.reporting import uuid
from tests.builders import granted_lease
from tests.fleet.test_job_board import JOB, PLACE, Fleet, run


def begun(fleet: Fleet, **more: Any) -> str:
    """Return the key of a job that runs."""
    fleet.report()
    key = job_key("t", fleet.submit("t", **more)["fencing_token"])
    for _ in range(2):  # it is placed, and seen there
        fleet.report(run(key))
    return key


def gang(fleet: Fleet, **more: Any) -> tuple[str, str]:
    """Return the keys of the jobs of a gang on both servers, which are placed."""
    for name in ("gpu-a", "gpu-b"):
        fleet.report(name=name)
    token = granted_lease(fleet.manager.submit("t", 0, 8, nodes=2, job=JOB, **more))["fencing_token"]
    for name in ("gpu-a", "gpu-b"):
        fleet.report(name=name)
    return job_key("t", token, 0, 2), job_key("t", token, 1, 2)


def quarantine(fleet: Fleet) -> None:
    fleet.clock.now += 101
    fleet.manager.expire_and_schedule()
    assert fleet.manager.leases()[0]["state"] == "ERROR"


def in_a_terminal() -> tuple[Fleet, str]:
    """Return a fleet with a lease whose job a terminal shows, and the key of that job."""
    fleet = Fleet()
    fleet.report()
    labels = {"launcher": "terminal"}
    lease = granted_lease(fleet.manager.submit("t", 0, 8, ttl=100, server="gpu-a", labels=labels))
    token, key = lease["fencing_token"], job_key("t", lease["fencing_token"])
    fleet.manager.place_job("t", [JobPlace("agent", "gpu-a", **PLACE)], fencing_token=token)
    return fleet, key


def outcomes(fleet: Fleet) -> list[str]:
    return [change["outcome"] for change in fleet.manager.history() if change["change"] == "released"]


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        ({"exit_code": 0}, "SUCCESS"),
        ({"exit_code": 3}, "FAILED"),
        ({"exit_code": 143, "preempted": True}, "EVICTED"),
        ({"state": "absent", "want": "stop", "ended": True, "exit_code": None}, "CANCELLED"),
        ({"state": "absent", "refusal": "NotStartedError", "error": "disk full"}, "CANCELLED"),
    ],
)
def test_a_command_whose_terminal_is_cut_off_ends_as_it_ended(end: dict[str, Any], outcome: str) -> None:
    """The terminal finds no lease any more, so nobody else says how."""
    fleet, key = in_a_terminal()
    fleet.report(run(key))
    if "preempted" in end:
        fleet.manager.submit("urgent", 0, 60, priority=5, server="gpu-a")
        fleet.manager.preempt("t", preemptor="urgent")
    quarantine(fleet)
    fleet.report(run(key, **{"state": "finished", **end}))
    assert outcomes(fleet) == [outcome]
    assert "t" not in [entry["task_id"] for entry in fleet.manager.queue()]


def test_a_command_that_is_over_when_its_terminal_is_cut_off_is_not_stopped() -> None:
    """How it ended is read from its folder, which goes with a stop."""
    fleet, key = in_a_terminal()
    fleet.clock.now += 95
    fleet.report(run(key, "finished"))
    fleet.clock.now += 6
    fleet.manager.expire_and_schedule()
    assert fleet.manager.leases()[0]["state"] == "ERROR"
    assert fleet.wanted() == {}
    fleet.report(run(key, "finished"))
    assert outcomes(fleet) == ["SUCCESS"]


def test_a_job_that_was_preempted_before_it_began_waits_again() -> None:
    fleet = Fleet()
    fleet.report()
    key = job_key("t", fleet.submit("t")["fencing_token"])
    fleet.report()
    fleet.manager.submit("urgent", 0, 60, priority=5, server="gpu-a")
    fleet.manager.preempt("t", preemptor="urgent")
    [item] = fleet.board.jobs("gpu-a")["jobs"]
    told = {"want": "preempt", "began": None}
    fleet.report(run(key, "absent", **told, n="of a preemption that was taken back"))
    fleet.report(run(key, "absent", **told, n=item["n"], error="its folder cannot be read"))
    assert [lease["task_id"] for lease in fleet.manager.leases()] == ["t"], "it may run"
    fleet.report(run(key, "absent", **told, n=item["n"]))
    assert [lease["task_id"] for lease in fleet.manager.leases()] == ["urgent"]
    assert [entry["task_id"] for entry in fleet.manager.queue()] == ["t"]
    assert outcomes(fleet) == ["PREEMPTED"]


def test_a_job_that_was_told_of_a_preemption_that_is_taken_back_ends_and_waits_again() -> None:
    """It saves what it did, as it was told, and its agent ends it if it does not."""
    fleet = Fleet()
    key = begun(fleet)
    fleet.manager.submit("urgent", 0, 60, priority=5, server="gpu-a")
    fleet.manager.preempt("t", preemptor="urgent")
    [item] = fleet.board.jobs("gpu-a")["jobs"]
    fleet.manager.cancel("urgent")
    assert fleet.manager.leases()[0]["state"] == "RUNNING"
    assert fleet.wanted() == {key: "run"}, "nobody has told it yet"
    fleet.report(run(key, preempted=True))
    assert fleet.board.jobs("gpu-a")["jobs"] == [item]
    fleet.report(run(key, "finished", exit_code=143, preempted=True))
    assert outcomes(fleet) == ["PREEMPTED"]
    assert [(lease["task_id"], lease["fencing_token"]) for lease in fleet.manager.leases()] == [("t", 2)]
    key = job_key("t", 2)
    fleet.report(run(key))
    fleet.report(run(key, "finished", exit_code=1))
    assert outcomes(fleet) == ["PREEMPTED", "FAILED"]


def test_a_gang_of_which_one_was_told_of_a_preemption_that_is_taken_back_ends_as_one() -> None:
    fleet = Fleet()
    for name in ("gpu-a", "gpu-b"):
        fleet.report(name=name)
    token = granted_lease(fleet.manager.submit("t", 0, 8, nodes=2, job=JOB))["fencing_token"]
    first, second = (job_key("t", token, rank, 2) for rank in (0, 1))
    for name, key in (("gpu-a", first), ("gpu-b", second)):
        fleet.report(run(key, "absent", began=None), name=name)
    fleet.report(run(first))
    fleet.manager.submit("urgent", 0, 60, priority=5, server="gpu-a")
    fleet.manager.preempt("t", preemptor="urgent")
    [item] = fleet.board.jobs("gpu-b")["jobs"]
    fleet.manager.cancel("urgent")
    unbegun = {"want": "preempt", "n": item["n"], "began": None}
    fleet.report(run(second, "absent", **unbegun), name="gpu-b")
    assert fleet.wanted("gpu-b") == {second: "run"}
    fleet.report(run(first, preempted=True))
    assert fleet.wanted("gpu-b") == {second: "preempt"}
    fleet.report(run(first, "finished", exit_code=143, preempted=True))
    assert outcomes(fleet) == ["PREEMPTED"]


def test_a_member_of_a_preempted_gang_has_its_grace_although_another_one_has_ended() -> None:
    """As rank 0, which alone writes the checkpoint: the others have nothing to save."""
    fleet = Fleet()
    first, second = gang(fleet)
    fleet.report(run(first))
    fleet.report(run(second), name="gpu-b")
    fleet.manager.submit("urgent", 0, 60, priority=5, server="gpu-a")
    fleet.manager.preempt("t", preemptor="urgent")
    fleet.report(run(second, "finished", exit_code=143, preempted=True), name="gpu-b")
    assert fleet.wanted() == {first: "preempt"}
    fleet.report(run(first, "finished", exit_code=143, preempted=True))
    assert outcomes(fleet) == ["PREEMPTED"]


@pytest.mark.parametrize("order", ["together", "workers_first"])
def test_a_gang_of_which_one_member_cannot_start_ends_and_avoids_that_server(order: str) -> None:
    """Else the others would wait for it as long as they like, or never begin."""
    fleet = Fleet()
    first, second = gang(fleet, labels={"startup_order": order})
    over = run(first, "absent", want="terminate", began=None, ended=True)
    if order == "together":
        fleet.report(run(first))
        over = run(first, "finished", exit_code=143)
    before = fleet.board.doorbell.mark("gpu-a")
    refusal = {"refusal": "NotStartedError", "error": "/jobs cannot be written: disk full"}
    fleet.report(run(second, "absent", began=None, **refusal), name="gpu-b")
    assert fleet.board.doorbell.mark("gpu-a") != before, "its agent is told at once"
    assert fleet.wanted() == {first: "terminate"}
    assert fleet.wanted("gpu-b") == {second: "run"}, "its reason stays"
    fleet.report(over)
    [released] = [change for change in fleet.manager.history() if change["change"] == "released"]
    assert (released["outcome"], list(released["failed_nodes"])) == ("NOT_STARTED", ["gpu-b"])
    assert "disk full" in released["reason"]
    assert [entry["task_id"] for entry in fleet.manager.queue()] == ["t"]


@pytest.mark.parametrize(
    "state", [{"state": "absent"}, {"state": "finished", "exit_code": None, "ended_at": None}]
)
def test_a_stopped_job_that_left_no_end_ends_its_lease_once_nobody_renews_that(state: dict[str, Any]) -> None:
    """Its folder is gone, or SIGKILL ended it; and who stopped it died, or a restore undid the release."""
    fleet = Fleet()
    key = begun(fleet, ttl=100)
    stopped = run(key, **state, want="stop", ended=True)
    fleet.report(stopped)
    assert len(fleet.manager.leases()) == 1, "who stopped it has its time to say so"
    quarantine(fleet)
    fleet.report(stopped)
    assert fleet.manager.leases() == []
    assert outcomes(fleet) == ["CANCELLED"]


def test_a_job_that_no_agent_took_in_the_time_of_its_lease_waits_again_elsewhere() -> None:
    """Its server died as it was granted: nobody else would ask for it again."""
    fleet = Fleet()
    token = granted_lease(fleet.manager.submit("t", 0, 8, job=JOB, ttl=100, prefer_server="gpu-a"))[
        "fencing_token"
    ]
    fleet.clock.now += 101
    fleet.manager.expire_and_schedule()
    [lease] = fleet.manager.leases()
    assert (lease["server_name"], lease["fencing_token"] > token) == ("gpu-b", True)
    assert outcomes(fleet) == ["NOT_STARTED"]
    assert "no agent took its job on gpu-a" in str(fleet.manager.history())
    assert fleet.manager.stored_jobs.job("t") == JOB


def test_a_job_that_agents_take_too_late_to_end_before_maintenance_waits_again_at_its_place() -> None:
    """The grant counted its runtime from itself."""
    fleet = Fleet()
    for name in ("gpu-a", "gpu-b"):
        fleet.report(name=name)
    begin = fleet.manager.store.now() + 3600
    times = {"from": as_text(begin), "until": as_text(begin + 3600)}
    fleet.manager.add_maintenance(WindowForm.of(servers=["gpu-a"], **times))
    wanted: dict[str, Any] = {"job": JOB, "expected_runtime": 3590, "prefer_server": "gpu-a", "ttl": 600}
    lease = granted_lease(fleet.manager.submit("t", 0, 8, **wanted))
    assert lease["server_name"] == "gpu-a"
    fleet.clock.now += 20
    assert fleet.wanted() == {}
    [again] = fleet.manager.leases()
    assert (again["server_name"], again["job_places"]) == ("gpu-b", [])
    assert outcomes(fleet) == ["NOT_STARTED"]
    assert "its job began too late to end before the maintenance from " in str(fleet.manager.history())
    assert fleet.wanted("gpu-b") == {job_key("t", again["fencing_token"]): "run"}


def test_a_job_of_a_server_that_falls_silent_before_its_agent_took_it_waits_again_elsewhere() -> None:
    """Its lease may have a day to live."""
    fleet = Fleet((Gpu(0, "A100", uuid=uuid(0)),))
    for name in ("gpu-a", "gpu-b"):
        fleet.report(name=name)
    fleet.manager.submit("t", 1, 8, job=JOB, prefer_server="gpu-a")
    fleet.manager.submit("runs", 0, 8, job=JOB, server="gpu-a")
    place = JobPlace("agent", "gpu-a", **PLACE)
    fleet.manager.place_job("runs", [place], fencing_token=2)
    for _ in range(8):
        fleet.clock.now += 9
        fleet.report(name="gpu-b")
        fleet.receiver.note_silence()
    leases = {lease["task_id"]: lease["server_name"] for lease in fleet.manager.leases()}
    assert leases == {"t": "gpu-b", "runs": "gpu-a"}
    assert outcomes(fleet) == ["NOT_STARTED"]


def test_a_job_that_no_agent_took_before_the_end_of_its_preemption_waits_again() -> None:
    fleet = Fleet()
    fleet.submit("t", preempt_grace=10)
    fleet.manager.submit("urgent", 0, 60, priority=5, server="gpu-a")
    fleet.manager.preempt("t", preemptor="urgent")
    fleet.clock.now += 11
    fleet.manager.expire_and_schedule()
    assert [lease["task_id"] for lease in fleet.manager.leases()] == ["urgent"]
    assert [entry["task_id"] for entry in fleet.manager.queue()] == ["t"]
    assert outcomes(fleet) == ["PREEMPTED"]


@pytest.mark.parametrize("is_alive", [True, False], ids=["released", "died"])
def test_a_gang_whose_members_somebody_terminates_is_cancelled_and_did_not_fail(is_alive: bool) -> None:
    """Its members are terminated before any is removed, and one is seen to end before its agent says why."""
    fleet = Fleet()
    for name in ("gpu-a", "gpu-b"):
        fleet.report(name=name)
    token = granted_lease(fleet.manager.submit("t", 0, 8, nodes=2, job=JOB))["fencing_token"]
    keys = {"gpu-a": job_key("t", token, 0, 2), "gpu-b": job_key("t", token, 1, 2)}
    for name, key in keys.items():
        fleet.report(run(key), name=name)
    for name, key in keys.items():
        fleet.manager.order_job(name, key, {"want": "terminate", "grace_s": 10.0})
    for name, key in keys.items():
        fleet.report(run(key, "finished", exit_code=143, ended_at=fleet.clock.now), name=name)
    assert [lease["task_id"] for lease in fleet.manager.leases()] == ["t"], "who stops it releases it"
    if is_alive:
        fleet.manager.release("t", fencing_token=token, outcome="CANCELLED", job_end="ended")
    else:
        fleet.clock.now += 31
        for name, key in keys.items():
            over = run(key, "finished", want="terminate", exit_code=143, ended_at=fleet.clock.now - 31)
            fleet.report(over, name=name)
    assert fleet.manager.leases() == []
    assert outcomes(fleet) == ["CANCELLED"]


def test_a_gang_that_was_half_stopped_by_somebody_who_died_ends() -> None:
    """They had a member that had not begun ended, and no time to say that it is stopped."""
    fleet = Fleet()
    for name in ("gpu-a", "gpu-b"):
        fleet.report(name=name)
    token = granted_lease(fleet.manager.submit("t", 0, 8, nodes=2, job={"command": ["train"]}))[
        "fencing_token"
    ]
    key = job_key("t", token, 0, 2)
    for name in ("gpu-a", "gpu-b"):
        fleet.report(name=name)
    fleet.manager.order_job("gpu-a", key, {"want": "terminate"})
    fleet.manager.release_members("t", [1], fencing_token=token, job_end="ended")
    [item] = fleet.board.jobs("gpu-a")["jobs"]
    assert (item["want"], item["bury"]) == ("terminate", True)
    fleet.report(run(key, "absent", want="terminate", n=item["n"], began=None, ended=True))
    assert fleet.manager.leases() == []


def test_a_job_that_ended_before_its_server_was_started_again_keeps_its_result() -> None:
    fleet = Fleet((Gpu(0, "A100", uuid=uuid(0)),))
    key = begun(fleet, ttl=100)
    quarantine(fleet)
    ended = run(key, "finished", exit_code=0, ended_at=fleet.clock.now - 50, last_line="saved")
    fleet.report(ended, boot_id="boot-2", uptime_s=5.0)
    assert fleet.manager.leases() == []
    found = fleet.manager.result_of("t")
    assert found is not None
    assert (found["exit_code"], found["last_line"], found["outcome"]) == (0, "saved", "SUCCESS")


def test_a_gang_of_which_one_server_lost_its_disk_ends_although_the_other_tells_an_end() -> None:
    fleet = Fleet((Gpu(0, "A100", uuid=uuid(0)),))
    for name in ("gpu-a", "gpu-b"):
        fleet.report(name=name)
    lease = granted_lease(fleet.manager.submit("t", 0, 8, nodes=2, ttl=100, job={"command": ["train"]}))
    first, second = (job_key("t", lease["fencing_token"], rank, 2) for rank in (0, 1))
    servers = dict(zip((member["server_name"] for member in lease["members"]), (first, second), strict=True))
    for name in servers:
        fleet.report(name=name)
    for name, key in servers.items():
        fleet.report(run(key), name=name)
    quarantine(fleet)
    for uptime_s in (5.0, 6.0):
        again: dict[str, Any] = {"boot_id": "boot-2", "uptime_s": uptime_s}
        fleet.report(run(servers["gpu-a"], "finished", exit_code=0), **again)
        fleet.report(name="gpu-b", **again)
    assert fleet.manager.leases() == []
    assert outcomes(fleet) == ["FAILED"]


@pytest.mark.parametrize("is_over", [True, False], ids=["before", "after"])
def test_a_gang_that_lost_a_server_for_good_is_no_success_although_the_other_member_ends_well(
    is_over: bool,
) -> None:
    """An operator says that the lost member is gone, before the other one has ended or after that."""
    fleet = Fleet()
    for name in ("gpu-a", "gpu-b"):
        fleet.report(name=name)
    token = granted_lease(fleet.manager.submit("t", 0, 8, nodes=2, job=JOB))["fencing_token"]
    first, second = (job_key("t", token, rank, 2) for rank in (0, 1))
    for _ in range(2):
        fleet.report(run(first), name="gpu-a")
        fleet.report(run(second), name="gpu-b")
    ended = run(second, "finished", exit_code=0)
    if is_over:
        fleet.report(ended, name="gpu-b")
    fleet.manager.release_members("t", [0], fencing_token=token, job_end="gone", reason="its server is dead")
    fleet.report(ended, name="gpu-b")
    assert fleet.manager.leases() == []
    assert fleet.manager.history()[-1]["outcome"] == "FAILED"
    ended_as = fleet.manager.result_of("t")
    assert ended_as is not None
    assert (ended_as["outcome"], ended_as["reason"]) == ("FAILED", "its server is dead")


def test_a_job_that_went_with_its_server_has_a_result() -> None:
    """Who submitted it is told, although no agent told its end."""
    fleet = Fleet()
    begun(fleet)
    [lease] = fleet.manager.leases()
    token = lease["fencing_token"]
    fleet.manager.release("t", fencing_token=token, job_end="gone", reason="its server is dead")
    told = fleet.manager.result_of("t")
    assert told is not None
    assert (told["exit_code"], told["outcome"], told["reason"]) == (None, "FAILED", "its server is dead")
