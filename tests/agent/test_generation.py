"""The newest state that an agent was told of: it outlives the agent, and no older one is followed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from resource_manager.agent.generation import KnownGeneration, mark_file, state_folder
from resource_manager.agent.report_format import ReportError
from resource_manager.agent.sending import OLDER, run_agent
from resource_manager.core.models import RUNS_JOBS
from resource_manager.core.refusal import RefusalKind
from resource_manager.jobs.launchers import job_key
from resource_manager.manager.refusal_wording import Refusal
from resource_manager.manager.state_marks import StateMarks
from resource_manager.storage import Store, open_store
from resource_manager.storage.incarnation import new_incarnation
from resource_manager.storage.mark import Mark
from tests.agent.reporting import gpu, server
from tests.builders import granted_lease
from tests.fleet.test_job_board import run
from tests.fleet.test_receiving import Service
from tests.redis_server import RedisServer
from tests.sql_servers import SqliteFiles
from tests.storage.dumps import dump_of_redis, fail_over


def test_newer_states_are_remembered_by_the_next_agent_and_older_ones_refused(tmp_path: Path) -> None:
    path = tmp_path / "kept" / "agent.mark"
    known = KnownGeneration(path)
    assert known.mark is None
    for told in ("0b/7/1.0", "0b/9/1.0", "0c/1/1.0"):
        assert known.take(told)
    assert known.take("0c/0/1.0"), "another service of the same state may know less"
    again = KnownGeneration(path)
    assert again.mark == "0c/1/1.0"
    assert not again.take("0b/99/1.0")
    assert again.mark == "0c/1/1.0"


def test_the_states_of_two_services_are_remembered_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial service may have the state that began later."""
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path))
    assert KnownGeneration(mark_file("gpu-a", "http://trial")).take("0c/1/1.0")
    assert KnownGeneration(mark_file("gpu-a", "http://b http://a")).take("0b/9/1.0")
    assert KnownGeneration(mark_file("gpu-a", "http://a http://b")).mark == "0b/9/1.0"
    assert KnownGeneration(mark_file("gpu-b", "http://trial")).mark is None


@pytest.mark.parametrize("told", [None, 7, "", "x" * 500])
def test_a_service_that_tells_none_is_followed(told: object, tmp_path: Path) -> None:
    assert KnownGeneration(tmp_path / "mark").take(told)


def test_its_folder_is_that_of_the_unit_else_that_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/x")
    assert state_folder() == Path("/x/gpu-manager")
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/a:/var/lib/b")
    assert state_folder() == Path("/var/lib/a")


class Answering:
    """A sender whose service answers as told; it keeps the reports."""

    url = "http://service"

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers = list(answers)
        self.reports: list[dict[str, Any]] = []

    def send(self, report: dict[str, Any]) -> dict[str, Any]:
        self.reports.append(json.loads(json.dumps(report)))
        if not self.answers:
            raise KeyboardInterrupt
        return self.answers.pop(0)


def test_an_agent_follows_no_answer_of_an_older_state_and_tells_the_service_what_it_knows(
    tmp_path: Path,
) -> None:
    service = Answering({"generation": "0c/1/1.0"}, {"generation": "0b/9/1.0", "jobs": True}, {})
    said: list[str] = []
    run_agent(
        "gpu-a",
        service,  # type: ignore[arg-type]
        1.0,
        sleep=lambda seconds: None,
        say=said.append,
        generation=KnownGeneration(tmp_path / "mark"),
    )
    assert [report["generation"] for report in service.reports] == [None, "0c/1/1.0", "0c/1/1.0", "0c/1/1.0"]
    assert OLDER in said
    assert "jobs" not in service.reports[2], "it does not do what that answer asked for"


@pytest.fixture
def service(sqlite: SqliteFiles) -> Iterator[Service]:
    """A service on a state that outlives it, as only such a one has marks."""
    with closing(open_store(sqlite.fresh_url())) as store:
        yield Service(server(), store=store)


def newer_than(store: Store) -> str:
    """Return the mark of a state that began after that of the store."""
    return str(Mark(new_incarnation(0.0, store.incarnation), 7, 1.0))


def test_the_mark_that_an_agent_brings_stops_the_grants_of_a_service_on_an_older_state(
    service: Service,
) -> None:
    service.report(gpu(0), gpu(1))
    newer = newer_than(service.manager.store)
    with pytest.raises(ReportError, match="older than the last one"):  # of another machine, or sent again
        service.report(gpu(0), gpu(1), after_s=-1.0, generation=newer)
    service.receiver.marks.check()
    assert not service.receiver.marks.is_behind
    service.report(gpu(0), gpu(1), generation=newer)
    refused = service.manager.allocate("t", 1)
    assert isinstance(refused, Refusal)
    assert refused.kind is RefusalKind.MISCONFIGURED
    assert "that the agent of gpu-a has seen: gpu-manager store restore" in refused.detail


JOB = {"command": ["true"]}
PLACE: Any = {"place": {"machine": "gpu-a/1", "folder": "/jobs", "mark": "m", "user": "train"}}


def running_jobs(store: Store) -> Service:
    """Return a service on that store whose one server has an agent that runs jobs."""
    service = Service(replace(server(), labels=RUNS_JOBS, job_user="train"), store=store)
    service.report(gpu(0), gpu(1), **PLACE)
    return service


def test_a_service_on_an_older_state_has_no_job_ended_that_it_lacks_and_none_begun(tmp_path: Path) -> None:
    """What it lacks was granted since, and what it has not seen begin may have had its GPUs taken since."""
    with closing(open_store(f"sqlite:///{tmp_path}/state.db")) as store:
        service = running_jobs(store)
        lease = granted_lease(service.manager.submit("known", 1, job=JOB))
        gone, known = run(job_key("lost", 90)), job_key("known", lease["fencing_token"])
        service.report(gpu(0), gpu(1), **PLACE, runs=[gone])
        board = service.receiver.board
        assert {item["key"]: item["want"] for item in board.jobs("gpu-a")["jobs"]} == {
            gone["key"]: "stop",
            known: "run",
        }
        service.report(gpu(0), gpu(1), **PLACE, runs=[gone], generation=newer_than(store))
        assert board.jobs("gpu-a")["jobs"] == []
        service.manager.order_job("gpu-a", known, {"want": "stop"})
        assert [item["want"] for item in board.jobs("gpu-a")["jobs"]] == ["stop"], "what its owner orders"


def test_no_job_is_ended_or_begun_before_a_store_that_came_back_is_compared_with_the_mark(
    embedded_redis: RedisServer,
) -> None:
    """An older dump looks like a fail-over, and the last check was before it."""
    url = embedded_redis.fresh_url()
    with closing(open_store(url)) as store:
        service = running_jobs(store)
        marks = service.receiver.marks = StateMarks(service.manager, check_every_s=0.0)
        granted_lease(service.manager.submit("known", 1, job=JOB))
        service.report(gpu(0), gpu(1), **PLACE)
        bring_back = dump_of_redis(url)
        lost = granted_lease(service.manager.submit("lost", 1, job=JOB))
        for _ in range(2):
            marks.check()
        bring_back()
        fail_over(url)
        service.report(gpu(0), gpu(1), **PLACE, runs=[run(job_key("lost", lost["fencing_token"]))])
        assert service.receiver.board.jobs("gpu-a")["jobs"] == []


def test_a_service_tells_agents_the_mark_of_a_while_ago(service: Service) -> None:
    service.receiver.marks = StateMarks(service.manager, check_every_s=0.0)
    assert "generation" not in service.report(gpu(0), gpu(1))
    service.allocate("t")
    service.receiver.marks.check()
    service.receiver.marks.check()
    told = Mark.parse(service.report(gpu(0), gpu(1))["generation"])
    assert told is not None
    assert told.incarnation == service.manager.store.incarnation
