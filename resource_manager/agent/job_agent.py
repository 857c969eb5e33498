"""Agent of a server that reports and runs jobs."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from urllib.parse import urlsplit

from resource_manager.agent.generation import KnownGeneration, mark_file
from resource_manager.agent.job_runner import AgentJobs, OtherAgentError
from resource_manager.agent.polling import JobPoll
from resource_manager.agent.sending import ReportSender, run_agent
from resource_manager.errors import InvalidRequestError
from resource_manager.jobs.directories.job_files import DEFAULT_ROOT

PR_SET_DUMPABLE = 4
SETTLE_S = 0.02
"""Time for which changes are gathered before they are reported."""


def _hide() -> None:
    """Keep the memory and the first environment of this process, and so the token, from its user's jobs.

    Its own processes, such as the probe, cannot be kept from them: they get no token.
    """
    for name in ("GPU_MANAGER_AGENT_TOKEN", "GPU_MANAGER_TOKEN"):
        os.environ.pop(name, None)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)


def run_job_agent(
    server: str, urls: str, token: str | None, interval_s: float, *, say: Callable[[str], None]
) -> None:
    """Report and run the jobs of this server until Ctrl-C; a change of a job's state is reported at once.

    Raises `InvalidRequestError` for an address that others could read, or if another agent runs here.
    """
    for url in urls.split():
        parts = urlsplit(url)
        if parts.scheme != "https" and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
            raise InvalidRequestError(
                "{url} {!r}: jobs are run for an https:// service, or one of this machine", url, field="url"
            )
    _hide()
    woken = threading.Event()
    generation = KnownGeneration(mark_file(server, urls))
    try:
        root = os.environ.get("GPU_MANAGER_JOBS_DIR", DEFAULT_ROOT)
        jobs = AgentJobs(server, root, changed=woken.set, say=say, newest=generation.newest)
    except (OtherAgentError, OSError) as error:
        raise InvalidRequestError("{run_jobs}: {}", error, field="run_jobs") from error
    poll = JobPoll(server, ReportSender(urls, token), jobs, say)

    def sleep(seconds: float) -> bool:
        is_woken = woken.wait(seconds)
        if is_woken:
            threading.Event().wait(SETTLE_S)
            woken.clear()
        return is_woken

    try:
        run_agent(
            server,
            ReportSender(urls, token),
            interval_s,
            sleep=sleep,
            say=say,
            generation=generation,
            jobs=jobs.report,
            taken=poll.ask_again,
        )
    finally:
        poll.close()
        jobs.close()
