"""Orders to an agent whose service has too many calls of their caller, or no report of the agent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from resource_manager.core.models import JobPlace
from resource_manager.errors import is_outage
from resource_manager.jobs.launchers import (
    Job,
    JobState,
    LauncherUnreachableError,
    agent,
)
from resource_manager.jobs.launchers.agent import AgentLauncher
from resource_manager.manager import patience
from resource_manager.manager.agent_jobs import note_opened
from resource_manager.rest.client_errors import error_of
from resource_manager.storage.jobs import TooManyJobsError
from tests.eventually import wait_until_ended
from tests.jobs.launchers.conftest import Board

TOO_MANY = "4 of your calls are being answered, the most at once: try again"


class BusyBoard(Board):
    """Service that has room for the third call of each kind only."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self._refusals = {"order": 2, "state": 2, "output": 1}

    def _enter(self, kind: str) -> None:
        if self._refusals[kind]:
            self._refusals[kind] -= 1
            raise error_of(429, {"detail": TOO_MANY}, "0")

    def order_job(self, server: str, key: str, order: Mapping[str, Any]) -> Any:
        self._enter("order")
        return super().order_job(server, key, order)

    def agent_state(self, server: str) -> Any:
        self._enter("state")
        return super().agent_state(server)

    def job_output(self, server: str, key: str, offset: int, *, lease_id: str = "") -> Any:
        self._enter("output")
        return super().job_output(server, key, offset, lease_id=lease_id)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[AgentLauncher]:
    board = BusyBoard(str(tmp_path))
    note_opened(board)
    yield AgentLauncher(JobPlace("agent", "here"))
    board.jobs.close()


def test_a_job_begins_once_the_service_has_room_for_its_order(
    launcher: AgentLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "ASK_AGAIN_S", 0.01)
    job = Job("busy-1", ("/bin/sh", "-c", "exit 3"))
    launcher.prepare(job)
    assert launcher.start(job)
    ended = wait_until_ended(launcher, job.key)
    assert (ended.state, ended.exit_code) == (JobState.FINISHED, 3)
    with pytest.raises(LauncherUnreachableError, match=f"^{TOO_MANY}$"):
        launcher.logs(job.key)
    assert launcher.logs(job.key).status == ended


def test_a_job_begins_once_the_store_has_room_for_the_jobs_of_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manager on the store itself says that there is none by another error than a service."""

    class FullBoard(Board):
        left = 2

        def order_job(self, server: str, key: str, order: Mapping[str, Any]) -> Any:
            if self.left:
                self.left -= 1
                raise TooManyJobsError("the jobs of ada have 64 MiB already")
            return super().order_job(server, key, order)

    monkeypatch.setattr(patience, "ASK_AGAIN_S", 0.0)
    board = FullBoard(str(tmp_path))
    note_opened(board)
    AgentLauncher(JobPlace("agent", "here")).prepare(Job("full-1", ("true",)))
    board.left = 3
    monkeypatch.setattr(agent, "BUSY_S", 0.0)
    with pytest.raises(LauncherUnreachableError) as unanswered:
        AgentLauncher(JobPlace("agent", "here")).start(Job("full-1", ("true",)))
    assert is_outage(unanswered.value), "its task would fail, and avoid the server"
    board.jobs.close()


def test_an_order_is_waited_for_after_the_clock_was_set_back(tmp_path: Path) -> None:
    """Its number is then below that of the order before."""

    class SetBack(Board):
        left = 9

        def number(self) -> str:
            self.left -= 1
            return f"{self.left:020d}"

    board = SetBack(str(tmp_path))
    note_opened(board)
    launcher, job = AgentLauncher(JobPlace("agent", "here")), Job("back-1", ("sleep", "60"))
    launcher.prepare(job)
    assert launcher.start(job)
    assert launcher.stop(job.key, 1.0)
    board.jobs.close()


def test_an_order_for_which_there_is_never_room_says_so(
    launcher: AgentLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "BUSY_S", 0.0)
    with pytest.raises(LauncherUnreachableError, match=f"^{TOO_MANY}$"):
        launcher.prepare(Job("busy-2", ("true",)))


class LateBoard(Board):
    """Service that has no report of the agent at the first two looks."""

    looks = 0
    has_reported = True

    def agent_state(self, server: str) -> Any:
        self.looks += 1
        state = super().agent_state(server)
        silent = {"is_silent": True, "has_reported": self.has_reported, "runs": {}}
        return {**state, **silent} if self.looks < 3 else state


def test_a_job_begins_once_a_late_report_of_the_agent_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "ASK_AGAIN_S", 0.0)
    board, job = LateBoard(str(tmp_path)), Job("late-1", ("true",))
    note_opened(board)
    AgentLauncher(JobPlace("agent", "here")).prepare(job)
    board.looks = 0
    assert AgentLauncher(JobPlace("agent", "here")).start(job)
    board.jobs.close()


@pytest.mark.parametrize(("has_reported", "timeout_s"), [(True, 0.0), (False, 600.0)])
def test_no_job_begins_where_no_report_of_the_agent_comes(
    has_reported: bool, timeout_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "ANSWER_TIMEOUT_S", timeout_s)
    board = LateBoard(str(tmp_path))
    board.has_reported = has_reported
    note_opened(board)
    with pytest.raises(LauncherUnreachableError, match="the agent of here is silent"):
        AgentLauncher(JobPlace("agent", "here")).prepare(Job("late-2", ("true",)))
    board.jobs.close()
