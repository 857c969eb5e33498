"""Output of a job that an agent runs, as it comes, on the page of its lease."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from resource_manager import GPUResourceManager
from resource_manager.core.models import RUNS_JOBS, Gpu, JobPlace, Node
from resource_manager.jobs.launchers import Job, job_key
from resource_manager.jobs.launchers.agent import AgentLauncher
from tests.builders import granted_lease
from tests.e2e import browser as b
from tests.eventually import wait_for
from tests.listening import served

pytestmark = pytest.mark.e2e


@contextmanager
def agent_of(tmp_path: Path) -> Iterator[tuple[GPUResourceManager, str, Any]]:
    """Yield the manager of a server whose agent runs jobs, the URL of its console, and a browser's page."""
    user = pwd.getpwuid(os.geteuid()).pw_name
    node = Node("gpu-a", 0, {"cpus": 8}, (Gpu(0),), labels=RUNS_JOBS, job_user=user)
    environment = {**os.environ, "GPU_MANAGER_JOBS_DIR": str(tmp_path / "jobs"), "HOME": str(tmp_path)}
    program = [sys.executable, "-m", "resource_manager.cli", "agent", "--server", "gpu-a", "--run-jobs"]
    with (
        b.chromium() as browser,
        GPUResourceManager.from_url("memory://", inventory=[node]) as manager,
        served(manager, tmp_path, 8) as url,
        subprocess.Popen([*program, "--url", url], env=environment, stderr=subprocess.DEVNULL) as agent,
    ):
        try:
            wait_for(lambda: manager.agent_state("gpu-a")["place"] is not None)
            page = browser.new_page()
            problems: list[object] = []
            page.on("pageerror", lambda error: problems.append(error))
            yield manager, url, page
            assert problems == []
        finally:
            agent.terminate()


def test_a_page_shows_the_output_of_a_running_job_and_of_one_that_is_over(tmp_path: Path) -> None:
    go = tmp_path / "go"
    wait = f"while [ ! -e {go} ]; do sleep 0.05; done"
    script = f"echo first; printf '\\033[31mred\\033[0m <b>\\n'; {wait}; echo last"
    with agent_of(tmp_path) as (manager, url, page):
        manager.submit("t", 1, job={"command": ["/bin/sh", "-c", script]})
        page.goto(f"{url}/lease?id=t")
        output = page.locator("#output pre")
        b.expect(output).to_have_text("first\nred <b>\n")
        go.touch()
        b.expect(output).to_have_text("first\nred <b>\nlast\n")
        b.expect(page.locator("h1 .badge")).to_have_text("ENDED")
        page.reload()
        b.expect(output).to_have_text("first\nred <b>\nlast\n")


def test_a_page_waits_for_the_output_of_a_job_that_is_placed_and_begins_later(tmp_path: Path) -> None:
    with agent_of(tmp_path) as (manager, url, page):
        token = granted_lease(manager.submit("t", 1))["fencing_token"]
        launcher, job = AgentLauncher(JobPlace("agent", "gpu-a")), Job(job_key("t", token), ("echo", "first"))
        manager.place_job("t", [launcher.prepare(job)], fencing_token=token)
        with page.expect_response("**/api/jobs/output?*") as response:
            page.goto(f"{url}/lease?id=t")
        assert response.value.json()["status"]["state"] == "absent"
        launcher.start(job)
        b.expect(page.locator("#output pre")).to_have_text("first\n")
