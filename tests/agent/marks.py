"""What the probe of an agent finds of a process with an environment."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from subprocess import PIPE

from resource_manager.agent import probe


def jobs_with(environment: Mapping[str, str]) -> set[str]:
    """Return the keys of the jobs that the probe finds in a process that was started with the variables."""
    command = ["/bin/sh", "-c", "echo up; read end"]
    with subprocess.Popen(command, env=environment, stdin=PIPE, stdout=PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # before, its environment may not be there yet
        return probe.jobs_of(str(process.pid))
