"""Jobs of Airflow's tasks that the agent of a server runs: it connects outward, and nobody logs in there."""

import os
import pwd
import subprocess
import sys

import pytest

from resource_manager.manager.cluster_file.sections import ClusterForm
from tests.e2e.bench import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SERVER = "by-agent"
PROGRAM = [sys.executable, "-m", "resource_manager.cli"]


class Agent:
    """`gpu-manager agent --run-jobs` of a server, which knows the service's address and its own token."""

    def __init__(self, bench, service):
        self._bench = bench
        created = subprocess.run(
            [
                *PROGRAM,
                "--store",
                "memory://",
                "token",
                "create",
                SERVER,
                "--role",
                "agent",
                "--server",
                SERVER,
            ],
            env={**os.environ, "GPU_MANAGER_TOKENS": str(service.tokens)},
            check=True,
            capture_output=True,
            text=True,
        )
        self._command = [
            *("env", f"GPU_MANAGER_AGENT_TOKEN={created.stdout.strip()}"),
            *(f"GPU_MANAGER_JOBS_DIR={bench.home / 'agent-jobs'}", f"HOME={bench.home}"),
            *(*PROGRAM, "agent", "--server", SERVER, "--url", service.url, "--run-jobs", "--every", "2s"),
        ]

    def start(self):
        self._process = self._bench.spawn("agent", self._command)

    def kill(self):
        self._process.kill()
        self._process.wait()


@pytest.fixture
def agent(bench, service):
    before = bench.manager.cluster()["sections"]["servers"]
    user = pwd.getpwuid(os.geteuid()).pw_name
    added = {"name": SERVER, "cpus": 64, "gpus": 8, "gpu_type": "agent", "job_user": user}
    bench.manager.apply(ClusterForm.model_validate({"servers": [*before, added]}))
    service.start(bench)
    agent = Agent(bench, service)
    agent.start()
    wait_for(lambda: bench.manager.agent_state(SERVER)["place"], what="the agent's first report")
    yield agent
    for run in bench.runs:
        run.finish()
    bench.check_free()
    agent.kill()
    service.kill()
    bench.manager.apply(ClusterForm.model_validate({"servers": before}))


def places_of(bench, run):
    return [place["launcher"] for place in bench.manager.status_of(run.lease_id)["job_places"]]


def test_a_task_that_names_no_launcher_is_run_by_the_agent_of_its_server(bench, agent):
    run = bench.run("agent_job")
    run.wait_until_training()
    assert places_of(bench, run) == ["agent"]
    run.finish()
    run.wait_until("success")
    assert len(run.processes()) == 1
    log = run.log()
    assert "the job begins" in log
    assert f"of {SERVER}" in log


def test_a_job_goes_on_while_its_agent_and_the_service_are_away(bench, service, agent):
    run = bench.run("agent_job")
    run.wait_until_training()
    agent.kill()
    service.kill()
    seen = len(run.beats())
    wait_for(lambda: len(run.beats()) > seen + 10, what="the next lines of the job")
    service.start(bench)
    agent.start()
    run.finish()
    run.wait_until("success")
    assert len(run.processes()) == 1
    assert run.task()["try_number"] == 1, run.log(1)


def test_a_task_that_is_marked_failed_ends_its_job(bench, agent):
    run = bench.run("agent_job")
    run.wait_until_training()
    run.mark("failed")
    bench.check_free()
    assert len(run.processes()) == 1


def test_a_job_that_fails_is_tried_again(bench, agent):
    run = bench.run("agent_job", seconds=1, exit_code=3)
    run.wait_until("failed")
    assert len(run.processes()) == 3
    assert "exit code 3" in run.log(1)
