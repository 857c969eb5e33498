"""What a job's container is made with."""

from __future__ import annotations

from typing import Any

import pytest

from resource_manager.jobs.launchers import Job
from resource_manager.jobs.launchers.docker_container import OWN_DIRECTORY, host_options

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
