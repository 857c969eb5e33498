"""Volumes that say of a Docker engine's jobs that they ended, or until when they have their grace."""

from __future__ import annotations

from typing import Any

import docker

from resource_manager.jobs.launchers.docker_volumes import ENDED_LABEL, KILL_AT_LABEL, prune_tombstones

NOW = {"SystemTime": "2026-06-03T12:00:00Z"}
LONG_AGO, LATELY = "2026-06-02T11:00:00Z", "2026-06-02T13:00:00Z"


class Engine:
    """Engine with volumes of these names: the label of each, and when it was created."""

    def __init__(self, containers: list[str], volumes: dict[str, tuple[str, str]]) -> None:
        self.containers, self.left = containers, volumes

    def volumes(self, filters: dict[str, str]) -> dict[str, Any]:
        named = {name: at for name, (label, at) in self.left.items() if label == filters["label"]}
        return {"Volumes": [{"Name": name, "CreatedAt": at} for name, at in named.items()] or None}

    def inspect_container(self, key: str) -> None:
        if key not in self.containers:
            raise docker.errors.NotFound("no such container")

    def remove_volume(self, name: str) -> None:
        del self.left[name]


def test_what_was_noted_of_a_job_goes_a_day_later_but_not_before_its_container() -> None:
    """`DockerOperator` removes its container itself, and the note stayed on the server for ever."""
    engine = Engine(
        ["kept-1"],
        {
            "a-1-ended": (ENDED_LABEL, LONG_AGO),
            "b-1-ended": (ENDED_LABEL, LATELY),
            "gone-1-told": (KILL_AT_LABEL, LONG_AGO),
            "young-1-told": (KILL_AT_LABEL, LATELY),
            "kept-1-told": (KILL_AT_LABEL, LONG_AGO),
        },
    )
    prune_tombstones(engine, NOW)
    assert [*engine.left] == ["b-1-ended", "young-1-told", "kept-1-told"]
