"""A submitted job from its grant to its end, with agent, service or answers lost at every step."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resource_manager import GPUResourceManager, MemoryStore, Settings
from resource_manager.agent.job_runner import AgentJobs
from resource_manager.agent.report_format import read_report
from resource_manager.core.models import RUNS_JOBS, Gpu, JobPlace, Node
from resource_manager.fleet.receiving import ReportReceiver
from resource_manager.fleet.server_use import use_of
from resource_manager.jobs.directories import ending, starting
from resource_manager.jobs.launchers import job_key
from resource_manager.jobs.launchers.walls import CHECK, program_of
from tests.agent.reporting import as_text, gpu, report
from tests.builders import Clock, granted_lease
from tests.eventually import wait_for

STEPS = ("granted", "placed", "offered", "started", "seen", "ended", "told", "forgotten")
"""Points of the life of a job after which something breaks."""


class World:
    """One server with its agent, and the service; every call between them is made by hand."""

    def __init__(self, folder: Path, confine: str) -> None:
        self.root = str(folder / "jobs")
        self.clock = Clock()
        user = pwd.getpwuid(os.geteuid()).pw_name
        node = Node("gpu-a", 0, {"cpus": 8}, (Gpu(0),), labels=RUNS_JOBS, job_user=user, confine=confine)
        self.manager = GPUResourceManager(
            Settings(store="memory://"),
            store=MemoryStore(clock=self.clock),
            inventory=[node],
            cluster={"min_gpus": 0, "max_gpus": 1},
        )
        self._uptime_s = 0.0
        self._last_answer: Any = None
        self.start_agent()
        self.start_service()

    def start_agent(self) -> None:
        self._known = ""
        self.agent = AgentJobs("gpu-a", self.root, changed=lambda: None, say=print)

    def start_service(self) -> None:
        self.receiver = ReportReceiver(self.manager)

    def kill_agent(self) -> None:
        self.agent.close()
        self.start_agent()

    def report(self) -> None:
        self._uptime_s += 1.0
        known = {**self.agent.report(), "uptime_s": self._uptime_s}
        said = report(self.manager.store.now(), gpu(0), **known)
        self.receiver.receive(read_report(as_text(said)))

    def poll(self, *, is_lost: bool = False) -> None:
        answer = self.receiver.board.jobs("gpu-a", self._known)
        if not is_lost:
            self._last_answer, self._known = answer, answer["known"]
            self.agent.take(answer)

    def repeat_an_old_answer(self) -> None:
        if self._last_answer is not None:
            self.agent.take(self._last_answer)

    def state(self, key: str) -> str:
        runs = {run["key"]: run for run in self.agent.report()["runs"]}
        return str(runs.get(key, {}).get("state"))


@pytest.fixture
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(tmp_path, getattr(request, "param", "off"))
    yield made
    made.agent.close()
    made.manager.close()


def test_a_job_that_saves_for_too_long_is_ended_by_its_agent_while_airflow_is_stopped(world: World) -> None:
    """Its lease waits for who collects the result; whoever they are, they find it preempted."""
    world.report()
    lease: Any = world.manager.submit("t", 1, preempt_grace=0.2)
    key = job_key("t", lease["fencing_token"])
    place = JobPlace("agent", "gpu-a", **world.agent.report()["place"])
    world.manager.place_job("t", [place], fencing_token=lease["fencing_token"])
    spec = {"command": ["/bin/sh", "-c", "trap '' TERM; while :; do sleep 0.1; done"], "environment": {}}
    world.manager.order_job("gpu-a", key, {"want": "run", "spec": spec})
    world.poll()
    wait_for(lambda: world.state(key) == "running")
    world.manager.submit("urgent", 1, priority=5)
    world.manager.preempt("t", preemptor="urgent")
    world.clock.now += 1.0
    world.manager.expire_and_schedule()
    assert world.manager.leases()[0]["quarantined"]
    world.poll()
    wait_for(lambda: world.state(key) == "finished")
    world.report()
    assert world.manager.agent_state("gpu-a")["runs"][key]["preempted"]
    assert [lease["task_id"] for lease in world.manager.leases()] == ["t"]


BREAKS: dict[str, Callable[[World], None]] = {
    "agent": World.kill_agent,
    "service": World.start_service,
    "answer": lambda world: world.poll(is_lost=True),
    "old answer": World.repeat_an_old_answer,
}


@pytest.mark.parametrize(
    ("what", "step"),
    [
        *(("agent", step) for step in STEPS),
        *((what, step) for what in BREAKS if what != "agent" for step in ("offered", "seen", "told")),
    ],
)
def test_a_job_runs_once_and_frees_its_gpus_whatever_breaks(
    world: World, tmp_path: Path, what: str, step: str
) -> None:
    count, go = tmp_path / "count", tmp_path / "go"

    def passed(name: str) -> None:
        if name == step:
            BREAKS[what](world)

    script = f"echo x >> {count}; while [ ! -e {go} ]; do sleep 0.02; done; echo last; exit 4"
    world.report()
    lease: Any = world.manager.submit("t", 1, job={"command": ["/bin/sh", "-c", script]})
    token = lease["fencing_token"]
    key = job_key("t", token)
    passed("granted")
    world.report()
    passed("placed")
    world.poll()
    passed("offered")
    world.poll()
    wait_for(count.exists)
    passed("started")
    world.poll()
    wait_for(lambda: world.state(key) == "running")
    world.report()
    passed("seen")
    go.touch()
    wait_for(lambda: world.state(key) == "finished")
    passed("ended")
    world.report()
    passed("told")
    world.report()
    world.poll()
    passed("forgotten")
    world.poll()
    world.report()
    assert world.manager.leases() == []
    found = world.manager.result_of("t", token)
    assert found is not None
    assert (found["exit_code"], found["last_line"]) == (4, "last")
    assert count.read_text() == "x\n", "it began once"
    assert world.agent.output(key, 0)["text"] == "last\n"


def test_a_job_of_one_folder_is_not_begun_in_another_that_its_agent_has_now(
    world: World, tmp_path: Path
) -> None:
    """An agent that was started elsewhere asks before it reports where, and finds no trace of the job."""
    count = tmp_path / "count"

    def submit(task: str, script: str) -> str:
        job = {"command": ["/bin/sh", "-c", script]}
        return job_key(task, granted_lease(world.manager.submit(task, 0, 1, job=job))["fencing_token"])

    world.report()
    key = submit("t", f"echo x >> {count}; sleep 600")
    world.report()
    world.poll()
    wait_for(count.exists)
    before = world.root
    world.root = str(tmp_path / "another")
    world.kill_agent()
    other = submit("u", "true")
    world.manager.order_job("gpu-a", other, {"want": "stop"})
    world.poll()
    wait_for(lambda: world.state(other) == "absent")
    assert world.state(key) == "None", "nothing is done to it there"
    assert count.read_text() == "x\n", "it began once"
    ending.stop(before, key, 0.0)


@pytest.mark.parametrize("world", ["try"], indirect=True)
@pytest.mark.parametrize("has_bubblewrap", [True, False])
def test_the_walls_that_an_agents_job_got_are_in_lease_top_and_log(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_bubblewrap: bool
) -> None:
    walls = "bubblewrap"
    if not has_bubblewrap:
        walls = "none: bwrap is missing: install bubblewrap"
        programs = tmp_path / "programs"
        programs.mkdir()
        for name in ("sh", "mv", "sleep"):
            (programs / name).symlink_to(f"/bin/{name}")
        monkeypatch.setenv("PATH", str(programs))
    elif starting.prepare(str(tmp_path), "probe", 0, [*program_of((), (), "", ()), CHECK])["walls"]:
        pytest.skip("needs bubblewrap, and namespaces that this user may make")
    world.report()
    lease: Any = world.manager.submit("t", 1, job={"command": ["/bin/sh", "-c", "echo begun; sleep 60"]})
    key = job_key("t", lease["fencing_token"])
    world.report()
    world.poll()
    wait_for(lambda: "begun" in world.agent.output(key, 0)["text"])
    world.kill_agent()  # what was tried at the start is known to the next one
    world.poll()
    wait_for(lambda: world.agent.report()["runs"][0]["walls"])
    world.report()
    assert [place["walls"] for place in world.manager.leases()[0]["job_places"]] == [walls]
    [use] = use_of(world.manager, ["gpu-a"])
    assert use["gpus"][0]["leases"][0]["walls"] == walls
    assert world.agent.output(key, 0)["text"] == f"gpu-manager: walls: {walls}\nbegun\n"
    world.manager.order_job("gpu-a", key, {"want": "stop"})
    world.poll()
    wait_for(lambda: world.state(key) != "running")


def test_a_job_is_ended_whose_terminal_has_not_renewed_its_lease(world: World) -> None:
    """As a terminal's job on any other server is a TTL after the last sign of its caller."""
    world.report()
    lease: Any = world.manager.submit("t", 1, ttl=5.0, labels={"launcher": "terminal"})
    key = job_key("t", lease["fencing_token"])
    state = world.manager.agent_state("gpu-a")["place"]
    assert state is not None
    place = JobPlace("agent", "gpu-a", **state)
    world.manager.place_job("t", [place], fencing_token=lease["fencing_token"])
    spec = {"command": ["sleep", "600"], "environment": {}}
    world.manager.order_job("gpu-a", key, {"want": "run", "spec": spec})
    world.poll()
    wait_for(lambda: world.state(key) == "running")  # until its start is known, it is absent, too
    world.clock.now = lease["expires_at"] + 1.0
    world.manager.expire_and_schedule()
    assert granted_lease(world.manager.status_of("t"))["quarantined"]
    world.poll()
    wait_for(lambda: world.state(key) == "absent")
    world.report()
    assert world.manager.leases() == [], "nobody else would end it"
    assert world.manager.history()[-1]["outcome"] == "CANCELLED"
