"""Docker launcher as it ends jobs, also while another process does; the engine is a stand-in."""

from __future__ import annotations

from typing import Any

import docker
import pytest

from resource_manager.core.models import JobPlace
from resource_manager.jobs.launchers import JobState
from resource_manager.jobs.launchers.docker import DockerLauncher
from resource_manager.jobs.launchers.docker_volumes import KILL_AT_LABEL


class Response:
    def __init__(self, status_code: int) -> None:
        self.status_code = status_code


class Engine:
    """Engine whose container is gone, or has ended, after the first look."""

    def __init__(self, fails: str, error: Exception, then: str) -> None:
        self.fails, self.error = fails, error
        self.states = iter(["running", then])
        self.graces: list[int] = []
        self.about = {"ID": "e", "Name": "h"}
        self.api = self

    def current_info(self) -> dict[str, Any]:
        return self.about

    def inspect_container(self, key: str) -> dict[str, Any]:
        status = next(self.states)
        if status == "gone":
            raise docker.errors.NotFound("no such container")
        return {"State": {"Status": status, "Error": "", "ExitCode": 0, "FinishedAt": "2026-01-01T00:00:00Z"}}

    def inspect_volume(self, name: str) -> None:
        raise docker.errors.NotFound("no such volume")

    def create_volume(self, name: str, labels: dict[str, str]) -> None:
        pass

    def put_archive(self, *_: object) -> None:
        self._fail("put_archive")

    def kill(self, *_: object) -> None:
        self._fail("kill")

    def stop(self, key: str, timeout: int) -> None:
        self.graces.append(timeout)

    def _fail(self, name: str) -> None:
        if name == self.fails:
            raise self.error


@pytest.mark.parametrize(
    ("fails", "error", "then", "state"),
    [
        ("put_archive", docker.errors.NotFound("no such container"), "gone", JobState.ABSENT),
        ("kill", docker.errors.NotFound("no such container"), "gone", JobState.ABSENT),
        ("kill", docker.errors.APIError("not running", Response(409)), "exited", JobState.FINISHED),
    ],
)
def test_a_job_that_ends_while_it_is_preempted_has_ended(
    fails: str, error: Exception, then: str, state: JobState
) -> None:
    assert launcher_of(Engine(fails, error, then)).preempt("k", 10.0).state is state


def test_a_job_that_was_told_of_its_preemption_and_has_ended_is_known_to_have_been_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its preemption may have been taken back since, and another triggerer may watch it."""
    engine = Engine("", OSError(), "")
    engine.states = iter(["exited", "exited"])
    assert not launcher_of(engine).status("k").preempted
    monkeypatch.setattr(engine, "inspect_volume", lambda name: {"Labels": {KILL_AT_LABEL: "1.5"}})
    assert launcher_of(engine).status("k").preempted


@pytest.mark.parametrize(("grace_s", "given_s"), [(0.0, 0), (0.5, 1), (10.0, 10)])
def test_the_engine_which_counts_whole_seconds_gives_a_job_no_less_than_its_grace(
    grace_s: float, given_s: int
) -> None:
    engine = Engine("", OSError(), "exited")
    launcher_of(engine).terminate("k", grace_s)
    assert engine.graces == [given_s]


def launcher_of(engine: Engine) -> DockerLauncher:
    launcher: Any = DockerLauncher.__new__(DockerLauncher)
    launcher._docker, launcher.engine, launcher._place = docker, "tcp://h", JobPlace("docker", "tcp://h")
    launcher._engine = engine
    return launcher
