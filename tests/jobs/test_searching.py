"""Looks by the launchers at servers of a restored state, with real jobs here and over a real sshd."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from resource_manager import GPUResourceManager, MemoryStore
from resource_manager.agent.report_format import read_report
from resource_manager.core.changes import Drained
from resource_manager.core.models import Gpu, JobPlace, Node
from resource_manager.fleet.receiving import ReportReceiver
from resource_manager.jobs.launchers import Job, LauncherUnreachableError, job_key, open_at
from resource_manager.jobs.reconcile import Action, reconcile
from resource_manager.manager.refusal_wording import Refusal
from resource_manager.settings import Settings
from resource_manager.storage.backup import read_backup, restore, write_backup
from tests.agent.reporting import as_text, gpu, report, uuid
from tests.builders import Clock
from tests.e2e.servers import ssh_server
from tests.eventually import wait_until_ended
from tests.fleet.test_job_board import Fleet as AgentFleet
from tests.fleet.test_job_board import run
from tests.jobs.test_reconcile import States

__all__ = ["ssh_server"]

WINDOW_S = 60.0


class Restored:
    """A restored state with the placed lease `known` on `gpu-a`; the job of `lost` came after the backup."""

    def __init__(self, folder: Path, way: JobPlace, address: str) -> None:
        self.clock = Clock()
        self.clock.now = 1e6
        gpus = tuple(Gpu(n, "A100", uuid=uuid(n)) for n in range(4))
        self.manager = GPUResourceManager(
            Settings(store="memory://"),
            store=MemoryStore(clock=self.clock),
            inventory=(Node("gpu-a", 0, {"cpus": 64}, gpus, address=address),),
        )
        self.stack = ExitStack()
        self.way = way
        self.known = self.place("known")
        write_backup(self.manager.store, folder / "state.json")
        self.lost = self.place("lost")
        restore(self.manager.store, read_backup(folder / "state.json"), force=True)

    def place(self, name: str) -> str:
        """Return the key of the job of a new lease, which is placed and runs."""
        lease = self.manager.allocate_resources(name, 1, 1, quarantine=True)
        assert lease is not None
        job = Job(job_key(name, lease["fencing_token"]), ("/bin/sh", "-c", "sleep 600"))
        with closing(self.launcher()) as launcher:
            place = launcher.prepare(job)
            self.manager.place_job(name, [place], fencing_token=lease["fencing_token"])
            self.stack.callback(self.stop, job.key)
            launcher.start(job)
        return job.key

    def launcher(self) -> Any:
        """Return the launcher by which jobs come to the server, before it has prepared one."""
        launcher: Any = open_at(replace(self.way, folder=""))
        launcher.root = self.way.folder
        return launcher

    def stop(self, key: str) -> None:
        with closing(self.launcher()) as launcher:
            launcher.stop(key, grace_s=0.0)

    def look(self, after_s: float = WINDOW_S + 30.0) -> list[Action]:
        self.clock.now += after_s
        return reconcile(self.manager, States(), "production").actions

    @property
    def reason(self) -> str:
        drained = self.manager.read(lambda cluster, now: cluster.node("gpu-a").drained)
        return "" if drained is None else drained.reason


@pytest.fixture(params=["local", pytest.param("ssh", marks=pytest.mark.e2e)])
def fleet(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Restored]:
    folder = str(tmp_path / "jobs")
    way, address = JobPlace("local", folder=folder), ""
    if request.param == "ssh":
        server = request.getfixturevalue("ssh_server")
        monkeypatch.setenv("AIRFLOW_CONN_TEST_SSH", server.connection)
        address = f"127.0.0.1:{server.port}"
        way = JobPlace("ssh", address, "test_ssh", folder=folder)
    fleet = Restored(tmp_path, way, address)
    with fleet.stack:
        yield fleet


def test_a_server_opens_once_a_look_finds_no_job_without_a_lease(fleet: Restored) -> None:
    [kept] = fleet.look()
    assert (kept.name, kept.action) == ("gpu-a", "kept closed")
    assert kept.detail == fleet.reason
    assert kept.detail.endswith(f"; without a lease runs {fleet.lost}")
    assert isinstance(fleet.manager.allocate("next", 1, 1), Refusal)
    fleet.stop(fleet.lost)
    [opened] = fleet.look(1.0)
    assert (opened.action, opened.detail) == ("opened", "every job on it has a lease: 1")
    assert not isinstance(fleet.manager.allocate("next", 1, 1), Refusal)
    assert fleet.look(1.0) == [], "it is not searched again"


def test_a_process_that_outlived_its_job_keeps_the_server_closed(fleet: Restored) -> None:
    fleet.stop(fleet.lost)
    key = job_key("left", 7)
    leaves = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    with closing(fleet.launcher()) as launcher:
        fleet.stack.callback(fleet.stop, key)
        launcher.start(Job(key, (sys.executable, "-c", leaves)))
        wait_until_ended(launcher, key)
    [kept] = fleet.look()
    assert kept.detail.endswith(f"; without a lease runs {key}")


def test_a_look_in_the_recovery_window_says_nothing_of_jobs_that_owners_still_stop(fleet: Restored) -> None:
    fleet.stop(fleet.lost)
    [kept] = fleet.look(WINDOW_S - 1.0)
    assert kept.action == "kept closed"
    fleet.clock.now += 30.0
    fleet.manager.searched("gpu-a", [], age_s=30.0)
    assert fleet.reason, "the look began in the window"
    [opened] = fleet.look(1.0)
    assert opened.action == "opened"


Spoil = Callable[[Restored], None]


def place_elsewhere(fleet: Restored, **changed: Any) -> None:
    """Give the state a second way by which jobs come to servers."""
    elsewhere = replace(fleet.way, machine="elsewhere/1", mark="1", user="root", **changed)
    fleet.manager.resume("gpu-a")
    fleet.clock.now += WINDOW_S
    lease = fleet.manager.allocate_resources("second", 1, 1, quarantine=True)
    assert lease is not None
    fleet.manager.place_job("second", [elsewhere], fencing_token=lease["fencing_token"])
    now, store = fleet.clock.now, fleet.manager.store
    version = fleet.manager.read(lambda cluster, _: cluster.version)
    store.commit(
        version, [Drained("gpu-a", now, "not searched since the restore of the backup of noon")], now=now
    )


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda fleet: place_elsewhere(fleet, folder="/nonexistent"), "has no jobs folder /nonexistent"),
        (lambda fleet: place_elsewhere(fleet, launcher="ssh", conn_id="nowhere"), "it cannot be searched"),
        (
            lambda fleet: fleet.manager.release("known", job_end="gone", reason="seen"),
            "no lease says by which",
        ),
    ],
    ids=["folder", "connection", "no job"],
)
def test_who_cannot_look_by_every_known_way_opens_nothing(fleet: Restored, spoil: Spoil, words: str) -> None:
    fleet.stop(fleet.lost)
    spoil(fleet)
    *_, kept = fleet.look()
    assert (kept.name, kept.action) == ("gpu-a", "kept closed")
    assert words in kept.detail
    assert fleet.reason


def test_a_server_without_a_job_user_is_not_searched_for_jobs_of_an_agent(tmp_path: Path) -> None:
    fleet = Restored(tmp_path, JobPlace("local", folder=str(tmp_path / "jobs")), "")
    with fleet.stack:
        fleet.stop(fleet.lost)
        place_elsewhere(fleet, launcher="agent", folder="/jobs")
        *_, opened = fleet.look()
        assert (opened.name, opened.action) == ("gpu-a", "opened")


def restored(tmp_path: Path) -> tuple[AgentFleet, str, str]:
    """Return a fleet whose state was restored, the key of its job and that of one without a lease."""
    fleet = AgentFleet((Gpu(0, "A100"),))
    fleet.report()
    key, lost = job_key("t", fleet.submit("t")["fencing_token"]), job_key("lost", 99)
    fleet.report(run(key))
    write_backup(fleet.store, tmp_path / "state.json")
    restore(fleet.store, read_backup(tmp_path / "state.json"), force=True)
    fleet.clock.now += WINDOW_S + 30.0
    return fleet, key, lost


def test_a_server_opens_once_the_agent_that_runs_its_jobs_tells_of_none_without_a_lease(
    tmp_path: Path,
) -> None:
    """Its GPUs have no UUIDs, so nobody watches them."""
    fleet, key, lost = restored(tmp_path)

    def look() -> list[tuple[str, str]]:
        actions = reconcile(fleet.manager, States(), "production").actions
        return [(each.name, each.action) for each in actions if each.name.startswith("gpu-")]

    fleet.report(run(key), run(lost))
    assert look() == [("gpu-a", "kept closed"), ("gpu-b", "kept closed")]
    fleet.report(run(key))
    assert look() == [("gpu-a", "opened"), ("gpu-b", "kept closed")], "one agent is silent"
    fleet.report(name="gpu-b")
    assert look() == [("gpu-b", "opened")]


def test_a_job_of_a_server_that_shares_its_home_keeps_no_other_one_closed(tmp_path: Path) -> None:
    """As on NFS 4, where locks reach other machines."""
    fleet, key, lost = restored(tmp_path)
    fleet.manager.searched("gpu-b", [key, lost])
    drained = fleet.manager.read(lambda cluster, now: cluster.node("gpu-b").drained)
    assert drained is not None
    assert drained.reason.endswith(f"; without a lease runs {lost}")
    fleet.manager.searched("gpu-b", [key])
    assert fleet.manager.read(lambda cluster, now: cluster.node("gpu-b").is_open)


def test_the_account_of_another_user_says_nothing(fleet: Restored) -> None:
    words = r"jobs of user nobody cannot be seen as .*: ask as that user"
    launcher = fleet.stack.enter_context(closing(open_at(replace(fleet.way, user="nobody"))))
    with pytest.raises(LauncherUnreachableError, match=words):
        launcher.running()


def test_a_local_look_says_nothing_of_a_server_that_is_not_known_to_be_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Restored(tmp_path, JobPlace("local", folder=str(tmp_path / "jobs")), "")
    with fleet.stack:
        fleet.stop(fleet.lost)
        monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        *_, kept = fleet.look()
        assert "gpu-a is not known to be this machine" in kept.detail


def test_a_server_with_an_agent_waits_for_its_list(tmp_path: Path) -> None:
    fleet = Restored(tmp_path, JobPlace("local", folder=str(tmp_path / "jobs")), "")
    with fleet.stack:
        text = as_text(report(fleet.clock.now, *map(gpu, range(4)), name="gpu-a"))
        ReportReceiver(fleet.manager).receive(read_report(text))
        fleet.stop(fleet.lost)
        assert fleet.look() == []
        fleet.manager.searched("gpu-a", [])
        assert fleet.reason
