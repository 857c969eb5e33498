"""`gpu-manager` that waits seconds where it waits minutes: python -m tests.faults.quick ARGUMENTS…

With `HOLD_START` in the environment it holds, between the placing of a job and its start, until that file
exists; `PLANTED_BUG` names a bug to plant, `AS_USER` an account that it becomes.
"""

from __future__ import annotations

import os
import pwd
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from resource_manager.cli import attended, by_hand, job_commands, main, session, signals, waiting
from resource_manager.jobs.launchers import LauncherError, directory_launcher, terminal

TTL_S = 6.0
"""Time to live of a lease of `run` here, a tenth of the real one."""


def shorten() -> None:
    """Let the programs of this process live ten times as fast."""
    attended.TTL_S = TTL_S
    attended.SIGN_EVERY_S = attended.RENEW_EVERY_S = TTL_S / 4
    attended.ASK_EVERY_S = TTL_S / 12
    attended.LOOK_EVERY_S = job_commands.LOOK_EVERY_S = 0.2
    waiting.TELL_EVERY_S, waiting.ASK_AGAIN_S, by_hand.LOOK_AGAIN_S = 0.5, 0.2, 0.5
    attended.GRACE_S = 2.0
    attended.PREEMPT_STEP_S = 1.0
    session.GIVE_BACK_S = signals.PROMPT_S = 3.0
    directory_launcher.ANSWER_TIMEOUT_S = TTL_S  # type: ignore[attr-defined]
    terminal.SSH_OPTIONS = ("-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=4")


def hold_starts() -> None:
    """Hold each start of a job until there is the file that `HOLD_START` names; `…-held`: one is held."""
    gate = os.environ.get("HOLD_START")
    if not gate:
        return
    attend = terminal.attend

    def held(*arguments: Any, **options: Any) -> Any:
        wait_at(Path(gate))
        return attend(*arguments, **options)

    terminal.attend = held


def wait_at(gate: Path) -> None:
    gate.with_name(f"{gate.name}-held").touch()
    while not gate.exists():
        time.sleep(0.02)


def become(user: str) -> None:
    """Go on as another account, with all modules loaded: it may not read those of this one."""
    import resource_manager.jobs.reconcile  # noqa: F401
    from resource_manager import GPUResourceManager
    from resource_manager.jobs.running_job import RunningJob

    with GPUResourceManager() as manager:
        for lease in manager.leases():
            for job in RunningJob.all_of(lease):
                with suppress(LauncherError):
                    job.open().close()
    account = pwd.getpwnam(user)
    os.setgroups([])
    os.setgid(account.pw_gid)
    os.setuid(account.pw_uid)


if __name__ == "__main__":
    shorten()
    hold_starts()
    if bug := os.environ.get("PLANTED_BUG"):
        from tests.faults.bugs import BUGS

        BUGS[bug]()
    if user := os.environ.get("AS_USER"):
        become(user)
    main(sys.argv[1:])
