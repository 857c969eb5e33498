"""Placed jobs as agents see them: a quarantined lease ends once every server says that its job is gone."""

from __future__ import annotations

from typing import Any

import pytest

from resource_manager.core.changes import JobEnd, Quarantined
from resource_manager.core.models import Gpu, JobPlace, Node
from resource_manager.fleet.receiving import ReportAnswer
from tests.agent.reporting import gpu, process, uuid
from tests.fleet.test_receiving import Service

MACHINE = "host-a/0a1b"
TTL_S = 60.0


def node(name: str, number: int) -> Node:
    gpus = tuple(Gpu(n, "A100", uuid=uuid(8 * number + n)) for n in range(2))
    return Node(name, number, {"cpus": 64}, gpus, address="10.0.0.1")


class Fleet(Service):
    """Two servers with agents, and a lease of `t` whose job was placed on the first, or on both."""

    def __init__(self, *, nodes: int = 1, launcher: str = "ssh", machine: str = MACHINE, **more: Any) -> None:
        super().__init__(node("gpu-a", 0), node("gpu-b", 1))
        for name in ("gpu-a", "gpu-b"):
            self.see(name)
        options = {"server": "gpu-a"} if nodes == 1 else {"nodes": nodes}
        lease = self.manager.allocate_resources("t", 2, 1, ttl=TTL_S, quarantine=True, **options, **more)
        assert lease is not None
        self.token: int = lease["fencing_token"]
        machines = [machine, machine.replace("host-a", "host-b")][:nodes]
        places = [JobPlace(launcher, "10.0.0.1", "", each, "/jobs", "1", "ada") for each in machines]
        self.manager.place_job("t", places, fencing_token=self.token)

    def key(self, rank: int | None = None) -> str:
        return f"gpu-t-0a1b2c3d-{self.token}" + ("" if rank is None else f".{rank}")

    def see(
        self, name: str = "gpu-a", *keys: str, complete: bool | None = True, after_s: float = 5.0, **more: Any
    ) -> ReportAnswer:
        """Send a report of the server with these jobs, or without a list if `complete` is None."""
        first = 0 if name == "gpu-a" else 8
        machine = MACHINE if name == "gpu-a" else MACHINE.replace("host-a", "host-b")
        jobs = None if complete is None else {"keys": list(keys), "complete": complete}
        gpus = more.pop("gpus", (gpu(first), gpu(first + 1)))
        given = {"name": name, "machine": machine, "jobs": jobs, **more}
        return self.report(*gpus, after_s=after_s, **given)

    def quarantine(self) -> None:
        self.manager.commit(lambda cluster, now: [Quarantined("t", self.token, now)])

    @property
    def is_held(self) -> bool:
        return self.manager.status_of("t") is not None


def test_a_job_that_was_seen_and_is_gone_twice_ends_its_lease_and_frees_its_gpus() -> None:
    fleet = Fleet()
    fleet.see("gpu-a", fleet.key())
    fleet.quarantine()
    fleet.see("gpu-a")
    fleet.see("gpu-a")
    assert fleet.is_held
    fleet.see("gpu-a")
    assert not fleet.is_held
    [released] = [change for change in fleet.manager.history() if change["change"] == "released"]
    assert (released["outcome"], released["reason"]) == (
        "FAILED",
        "its agent found no process of it on gpu-a at 1970-01-12T13:47Z",
    )
    fleet.see("gpu-a")
    assert fleet.server["available_gpus"] == 2


def test_the_service_asks_for_jobs_until_one_was_seen_and_while_its_lease_waits_for_its_end() -> None:
    fleet = Fleet()
    assert fleet.see("gpu-a", complete=None)["jobs"] is True
    assert "jobs" not in fleet.see("gpu-b", complete=None)
    assert "jobs" not in fleet.see("gpu-a", fleet.key())
    assert "jobs" not in fleet.see("gpu-a", complete=None)
    fleet.quarantine()
    assert [fleet.see("gpu-a", complete=None)["jobs"] for _ in range(3)] == [True] * 3
    assert fleet.is_held, "no report listed the jobs"


def test_jobs_are_listed_every_five_seconds_while_reports_come_faster() -> None:
    fleet = Fleet()
    fleet.manager.submit("next", 2, 1, server="gpu-a")
    asked: list[Any] = []
    for _ in range(22):
        answer = fleet.see("gpu-a", complete=True if asked and asked[-1] else None, after_s=0.5)
        asked.append(answer.get("jobs", False))
    assert [place for place, is_asked in enumerate(asked) if is_asked] == [0, 11]


def test_a_job_in_the_middle_of_its_work_on_cpus_keeps_its_lease() -> None:
    fleet = Fleet()
    for _ in range(2):
        fleet.see("gpu-a", fleet.key())
    fleet.quarantine()
    for _ in range(9):
        fleet.see("gpu-a", fleet.key())
    assert fleet.is_held


def test_a_job_that_was_never_seen_may_start_late() -> None:
    fleet = Fleet()
    fleet.quarantine()
    for _ in range(9):
        fleet.see("gpu-a", "gpu-other-0a1b2c3d-99")
    assert fleet.is_held


def test_a_list_that_is_incomplete_or_an_error_begins_the_row_again() -> None:
    fleet = Fleet()
    fleet.see("gpu-a", fleet.key())
    fleet.quarantine()
    fleet.see("gpu-a")
    for interruption in ({"complete": False}, {"error": "the GPU driver hangs", "gpus": ()}):
        fleet.see("gpu-a")
        fleet.see("gpu-a", **interruption)
    fleet.see("gpu-a")
    assert fleet.is_held
    for _ in range(2):
        fleet.see("gpu-a")
    assert not fleet.is_held


@pytest.mark.parametrize(
    "placed",
    [
        {"launcher": "docker"},
        {"machine": "host-a/another"},
        {"labels": {"instance": "a", "dag_id": "d", "run_id": "r", "task_id": "t", "map_index": "-1"}},
    ],
    ids=["a container", "another machine", "a task, whose trigger collects its result"],
)
def test_what_an_agent_cannot_tell_of_it_does_not_end(placed: dict[str, Any]) -> None:
    fleet = Fleet(**placed)
    fleet.see("gpu-a", fleet.key())
    fleet.quarantine()
    for _ in range(9):
        fleet.see("gpu-a")
    assert fleet.is_held


def test_the_lease_of_a_task_that_somebody_released_by_force_ends_with_its_job() -> None:
    labels = {"instance": "a", "dag_id": "d", "run_id": "r", "task_id": "t", "map_index": "-1"}
    fleet = Fleet(labels=labels)
    fleet.see("gpu-a", fleet.key())
    fleet.manager.release("t", job_end=JobEnd.FORCED)
    for _ in range(3):
        fleet.see("gpu-a")
    assert not fleet.is_held
    [released] = [change for change in fleet.manager.history() if change["change"] == "released"]
    assert released["outcome"] == "CANCELLED"


def test_a_lease_without_a_placed_job_is_not_the_agents() -> None:
    fleet = Fleet()
    fleet.manager.allocate_resources("u", 1, 1, ttl=TTL_S, quarantine=True, server="gpu-b")
    fleet.see("gpu-b")
    fleet.manager.commit(lambda cluster, now: [Quarantined("u", cluster.leases["u"].fencing_token, now)])
    for _ in range(9):
        fleet.see("gpu-b")
    assert fleet.manager.status_of("u") is not None


def test_a_process_on_its_gpus_that_is_nobody_elses_keeps_it_and_so_does_a_gpu_that_cannot_be_seen() -> None:
    fleet = Fleet()
    fleet.see("gpu-a", fleet.key())
    fleet.quarantine()
    own = process(job=fleet.key(), lease_source="cgroup")
    unclear = [gpu(1, processes=[left]) for left in (process(), process(lease_source="unreadable"), own)]
    unclear += [gpu(1, processes=None), gpu(1, lost=True)]
    for gpus in (*((gpu(0), each) for each in unclear), (gpu(0),)):
        for _ in range(4):
            fleet.see("gpu-a", gpus=gpus)
        assert fleet.is_held


def test_a_renewal_begins_the_row_again() -> None:
    fleet = Fleet()
    fleet.see("gpu-a", fleet.key())
    fleet.quarantine()
    for _ in range(2):
        fleet.see("gpu-a")
    fleet.manager.renew("t", fencing_token=fleet.token)
    fleet.quarantine()
    for _ in range(2):
        fleet.see("gpu-a")
    assert fleet.is_held
    fleet.see("gpu-a")
    assert not fleet.is_held


def test_the_first_report_of_a_quarantined_lease_may_be_older_than_the_quarantine() -> None:
    fleet = Fleet()
    fleet.see("gpu-a", fleet.key())
    fleet.see("gpu-a")
    fleet.see("gpu-a")
    fleet.quarantine()
    fleet.see("gpu-a")
    fleet.see("gpu-a")
    assert fleet.is_held


def test_a_restart_of_the_server_confirms_by_itself() -> None:
    fleet = Fleet()
    fleet.see("gpu-a", fleet.key())
    fleet.quarantine()
    fleet.see("gpu-a", complete=None, boot_id="boot-2", uptime_s=3.0)
    assert not fleet.is_held


def test_a_restart_under_the_name_of_another_machine_confirms_nothing() -> None:
    fleet = Fleet()
    fleet.see("gpu-a", fleet.key())
    fleet.quarantine()
    fleet.see("gpu-a", complete=None, boot_id="boot-2", uptime_s=3.0, machine="host-z/9f")
    assert fleet.is_held


def test_a_gang_ends_once_each_of_its_servers_says_so() -> None:
    fleet = Fleet(nodes=2)
    fleet.see("gpu-a", fleet.key(0))
    fleet.see("gpu-b", fleet.key(1))
    fleet.quarantine()
    for _ in range(5):
        fleet.see("gpu-a")
    fleet.see("gpu-b", fleet.key(1))
    fleet.see("gpu-b")
    assert fleet.is_held
    fleet.see("gpu-b")
    assert not fleet.is_held
    [released] = [change for change in fleet.manager.history() if change["change"] == "released"]
    assert released["reason"].startswith("its agent found no process of it on gpu-a and 1 more at ")


def test_a_gang_of_which_one_member_was_never_seen_keeps_its_lease() -> None:
    fleet = Fleet(nodes=2)
    fleet.see("gpu-a", fleet.key(0))
    fleet.quarantine()
    for _ in range(5):
        fleet.see("gpu-a")
        fleet.see("gpu-b")
    assert fleet.is_held


def test_what_is_left_of_a_gang_ends_the_same_way() -> None:
    fleet = Fleet(nodes=2)
    fleet.see("gpu-a", fleet.key(0))
    fleet.see("gpu-b", fleet.key(1))
    fleet.manager.release_members("t", [0], fencing_token=fleet.token, job_end=JobEnd.ENDED)
    for _ in range(3):
        fleet.see("gpu-b")
    assert fleet.manager.leases() == []
