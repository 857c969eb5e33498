"""What a job's container is made with."""

from __future__ import annotations

from typing import Any

import pytest

from resource_manager.core.identifiers import job_key
from resource_manager.jobs.launchers import Job
from resource_manager.jobs.launchers.docker_container import OWN_DIRECTORY, environment_of, host_options
from tests.agent.marks import jobs_with

pytest.importorskip("docker")


@pytest.mark.parametrize(
    ("binds", "kept"),
    [
        (["/data:/data:ro"], ["/data:/data:ro"]),
        ({"/data": {"bind": "/data", "mode": "ro"}}, ["/data:/data:ro"]),
        (None, []),
    ],
)
def test_a_container_has_the_job_s_own_directory_beside_all_forms_of_binds(
    binds: Any, kept: list[str]
) -> None:
    """Without it the job's checkpoints would end with the container."""
    options = host_options(Job("gpu-train-1", ("true",), container={"binds": binds}), {})
    assert options["binds"] == [*kept, f"gpu-train-kept:{OWN_DIRECTORY}:rw"]


def test_an_agent_finds_the_job_of_a_container_by_what_its_processes_inherit() -> None:
    """Else a server opens after a restore while a container without a lease loads its data there."""
    key = job_key("lab:dag/run/train", 7)
    assert jobs_with(environment_of(Job(key, ("true",)))) == {key}
