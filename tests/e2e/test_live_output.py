"""Output of a job that an agent runs, as it comes, on the page of its lease."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from resource_manager import GPUResourceManager
from resource_manager.core.models import RUNS_JOBS, Gpu, Node
from tests.e2e import browser as b
from tests.eventually import wait_for
from tests.listening import served

pytestmark = pytest.mark.e2e


def test_a_page_shows_the_output_of_a_running_job_and_of_one_that_is_over(tmp_path: Path) -> None:
    user = pwd.getpwuid(os.geteuid()).pw_name
    node = Node("gpu-a", 0, {"cpus": 8}, (Gpu(0),), labels=RUNS_JOBS, job_user=user)
    environment = {**os.environ, "GPU_MANAGER_JOBS_DIR": str(tmp_path / "jobs"), "HOME": str(tmp_path)}
    program = [sys.executable, "-m", "resource_manager.cli", "agent", "--server", "gpu-a", "--run-jobs"]
    go = tmp_path / "go"
    wait = f"while [ ! -e {go} ]; do sleep 0.05; done"
    script = f"echo first; printf '\\033[31mred\\033[0m <b>\\n'; {wait}; echo last"
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
            manager.submit("t", 1, job={"command": ["/bin/sh", "-c", script]})
            page.goto(f"{url}/lease?id=t")
            output = page.locator("#output pre")
            b.expect(output).to_have_text("first\nred <b>\n")
            go.touch()
            b.expect(output).to_have_text("first\nred <b>\nlast\n")
            b.expect(page.locator("h1 .badge")).to_have_text("ENDED")
            page.reload()
            b.expect(output).to_have_text("first\nred <b>\nlast\n")
            assert problems == []
        finally:
            agent.terminate()
