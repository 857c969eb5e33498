"""Trigger that stays in the middle of a gang's start, for a test that kills its triggerer then."""

import os
import time
from pathlib import Path

from resource_manager.airflow.task_trigger.trigger import TaskTrigger
from resource_manager.jobs.launchers.ssh import SSHLauncher

STARTING = Path(f"{os.environ.get('LEDGER', '/dev/null')}-starting")
"""File that says that the first members have been started; the next trigger does not stay."""


class LingeringTrigger(TaskTrigger):
    """Trigger that never starts ranks 2 and above, unless another one has stayed there before it."""

    async def run(self):
        if not STARTING.exists():
            SSHLauncher.start = start_or_linger  # type: ignore[method-assign]
        async for event in super().run():
            yield event


def start_or_linger(launcher, job, start=SSHLauncher.start):
    if int(job.environment["GPU_NODE_RANK"]) >= 2:
        STARTING.touch()
        time.sleep(600)
    return start(launcher, job)
