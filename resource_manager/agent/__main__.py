"""Agent of this server as its unit starts it, set by the environment. Standard library only."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress

from resource_manager.agent.generation import KnownGeneration, mark_file
from resource_manager.agent.sending import ReportSender, run_agent

EVERY_S = 10.0


def main() -> None:
    """Report the GPUs of `GPU_MANAGER_SERVER` to the first service of `GPU_MANAGER_URL` that answers."""
    server, urls = os.environ["GPU_MANAGER_SERVER"], os.environ["GPU_MANAGER_URL"]

    def say(line: str) -> None:
        with suppress(OSError):  # its log is on a full disk
            print(f"{server}: {line}", file=sys.stderr, flush=True)

    run_agent(
        server,
        ReportSender(urls, os.environ.get("GPU_MANAGER_AGENT_TOKEN")),
        EVERY_S,
        sleep=time.sleep,
        say=say,
        generation=KnownGeneration(mark_file(server, urls)),
    )


if __name__ == "__main__":
    main()
