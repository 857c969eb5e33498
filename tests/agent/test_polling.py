"""Standing question of an agent for its jobs, while services fail and answer again."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from resource_manager.agent import polling
from resource_manager.agent.job_runner import AgentJobs
from resource_manager.agent.polling import SHORT_WAIT_S, WAIT_S, JobPoll
from resource_manager.agent.sending import NoAnswerError, ReportRefusedError, ReportSender
from tests.builders import Clock
from tests.eventually import wait_for


class FailingService(ReportSender):
    """Service that fails each question once the test lets it."""

    def __init__(self) -> None:
        super().__init__("http://localhost:1")
        self.count = 0
        self.is_told = False
        """Whether it has taken a report."""
        self.was_told: list[bool] = []
        """Whether it had at each question."""
        self.waits: list[float] = []
        self.fails = threading.Semaphore(0)

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 0.0
    ) -> Mapping[str, Any]:
        self.was_told.append(self.is_told)
        self.count += 1
        self.waits.append(float(parse_qs(urlsplit(path).query)["wait"][0]))
        self.fails.acquire(timeout=10)
        raise NoAnswerError("it does not answer")


@pytest.fixture
def service() -> FailingService:
    return FailingService()


@pytest.fixture
def poll(
    service: FailingService, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> Iterator[JobPoll]:
    monkeypatch.setattr(polling, "FIRST_PAUSE_S", 600.0)
    jobs = AgentJobs("here", str(tmp_path), changed=lambda: None, say=print)
    poll = JobPoll("here", service, jobs, print, clock=clock)
    service.is_told = True
    poll.ask_again()
    yield poll
    poll.close()
    service.fails.release()
    poll._thread.join(10)
    jobs.close()


def test_nothing_is_asked_before_a_report_was_taken(service: FailingService, poll: JobPoll) -> None:
    """It would be judged by where the agent before had its jobs: one would be placed there for good."""
    wait_for(lambda: service.count == 1)
    assert service.was_told == [True]


def test_a_service_that_answers_again_is_asked_at_once(service: FailingService, poll: JobPoll) -> None:
    service.fails.release()
    wait_for(lambda: service.count == 1 and service.fails._value == 0)
    poll.ask_again()
    wait_for(lambda: service.count == 2)


def test_a_wake_while_a_question_fails_is_not_forgotten(service: FailingService, poll: JobPoll) -> None:
    wait_for(lambda: service.count == 1)
    poll.ask_again()  # while the question of before is still failing
    service.fails.release()
    wait_for(lambda: service.count == 2)


def test_behind_a_proxy_that_gives_up_sooner_it_asks_for_a_shorter_time(
    service: FailingService, poll: JobPoll, clock: Clock
) -> None:
    wait_for(lambda: service.count == 1)
    clock.now += SHORT_WAIT_S
    service.fails.release()
    poll.ask_again()
    wait_for(lambda: service.count == 2)
    assert service.waits == [WAIT_S, SHORT_WAIT_S]


class LargeService(FailingService):
    """Service whose first answer is larger than the memory that the jobs have left."""

    def ask(self, *call: Any, **how: Any) -> Mapping[str, Any]:
        if self.count == 0:
            self.count += 1
            raise MemoryError
        return super().ask(*call, **how)


@pytest.mark.parametrize("service", [LargeService()])
def test_an_agent_that_lacked_memory_for_a_while_asks_again(
    service: FailingService, poll: JobPoll, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else it reports on, its server takes leases, and no job of them begins or is ended."""
    wait_for(lambda: service.count == 1)
    poll.ask_again()
    wait_for(lambda: service.count == 2)
    assert capsys.readouterr().out == "MemoryError\n"


class DisagreeingServices(FailingService):
    """Two services that are asked in turn and see the jobs of a server differently."""

    def ask(self, *call: Any, **how: Any) -> Mapping[str, Any]:
        with suppress(NoAnswerError):
            super().ask(*call, **how)
        known = str(self.count % 2)
        return {"server": "here", "incarnation": "", "version": 1, "known": known, "jobs": [], "output": []}


@pytest.mark.parametrize("service", [DisagreeingServices()])
def test_services_that_answer_differently_are_not_asked_without_a_pause(
    service: FailingService, poll: JobPoll
) -> None:
    service.fails.release(100)
    wait_for(lambda: service.count >= 4)
    for _ in range(3):
        before = service.count
        poll.ask_again()
        wait_for(lambda before=before: service.count > before)  # type: ignore[misc]
    assert service.count < 20


class FullService(FailingService):
    """Service that wants two outputs, refuses the second call that brings one, and holds a known question."""

    def __init__(self) -> None:
        super().__init__()
        self.brought: list[str] = []
        self.calls = 0

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 0.0
    ) -> Mapping[str, Any]:
        if body is None:
            self.count += 1
            if "known=k" in path:
                self.fails.acquire(timeout=10)
                return {"known": "k"}
            output = [{"key": "j-1-1", "offset": 0, "n": number} for number in ("1", "2")]
            return {
                "server": "here",
                "incarnation": "",
                "version": 1,
                "known": "k",
                "jobs": [],
                "output": output,
            }
        self.calls += 1
        if self.calls == 2:
            raise ReportRefusedError("it has too many calls")
        self.brought.append(body["n"])
        return {"success": True}


@pytest.mark.parametrize("service", [FullService()])
def test_output_that_was_refused_is_brought_again(service: FullService, poll: JobPoll) -> None:
    wait_for(lambda: service.calls == 2)
    poll.ask_again()
    wait_for(lambda: len(service.brought) == 2)
    assert sorted(service.brought) == ["1", "2"]


class AskingService(FailingService):
    """Service that asks for the output of a job in another folder, and of one whose lease is over."""

    def __init__(self) -> None:
        super().__init__()
        self.brought: list[str] = []

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 0.0
    ) -> Mapping[str, Any]:
        if body is not None:
            self.brought.append(body["n"])
            return {}
        if "known=k" in path:
            return super().ask(method, path, body, timeout_s)
        elsewhere = {"machine": "another", "folder": "/jobs", "mark": "m"}
        output = [
            {"key": "j-1-1", "offset": 0, "n": "1", "place": elsewhere},
            {"key": "j-2-2", "offset": 0, "n": "2"},
        ]
        return {"server": "here", "incarnation": "", "version": 1, "known": "k", "jobs": [], "output": output}


@pytest.mark.parametrize("service", [AskingService()])
def test_nothing_is_said_of_the_output_of_a_job_in_another_folder(
    service: AskingService, poll: JobPoll
) -> None:
    """It would say that the job is absent, which may run there."""
    wait_for(lambda: service.count == 1)
    assert service.brought == ["2"]
