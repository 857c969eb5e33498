"""`status` and `logs` of a gang: which members have a job, and whose output is shown."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from resource_manager import GPUResourceManager
from resource_manager.agent.report_format import read_report
from resource_manager.cli import job_commands
from resource_manager.core.models import RUNS_JOBS, JobPlace
from resource_manager.fleet.receiving import ReportReceiver
from resource_manager.jobs.launchers import Job, job_key
from resource_manager.jobs.launchers.local import LocalLauncher
from resource_manager.manager.cluster_file.servers import default_inventory
from tests.agent.reporting import as_text, gpu, report
from tests.builders import granted_lease, redefine
from tests.cli.targets import Run
from tests.eventually import wait_until_ended
from tests.fleet.test_job_board import PLACE
from tests.fleet.test_job_board import run as job_state

SERVERS = ("gpu-server-0", "gpu-server-1", "gpu-server-2")


@pytest.fixture
def gang(manager: GPUResourceManager) -> Any:
    """Function that submits a gang of three."""
    nodes = [replace(node, address="127.0.0.1", labels=RUNS_JOBS) for node in default_inventory(3)]
    redefine(manager, nodes=tuple(nodes))
    return lambda **more: granted_lease(manager.submit("t", 1, nodes=3, **more))


def test_the_output_of_a_gang_says_whose_it_is_and_names_the_others(
    run: Run, gang: Any, manager: GPUResourceManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_MANAGER_JOBS_DIR", str(tmp_path))
    token, launcher = gang()["fencing_token"], LocalLauncher()
    jobs = [Job(job_key("t", token, rank, 3), ("echo", f"here {rank}")) for rank in range(3)]
    manager.place_job("t", [launcher.prepare(job) for job in jobs], fencing_token=token)
    for job in jobs:
        launcher.start(job)
        wait_until_ended(launcher, job.key)
    first = run("logs", "t")
    assert first.stdout == "here 0\n"
    assert first.stderr == "gpu-manager: the output of rank 0, on gpu-server-0; of others: --rank 1–2\n"
    assert (run("logs", "t", "--rank", "1").output, run("logs", "t", "--rank", "0").stderr) == (
        "here 1\n",
        "",
    )
    wrong = run("logs", "t", "--rank", "3")
    assert (wrong.exit_code, "--rank must be one of 0–2, got 3" in wrong.output) == (2, True)
    manager.release_members("t", [0, 1], fencing_token=token, job_end="ended")
    assert run("logs", "t", "--rank", "2").output == run("logs", "t").output == "here 2\n", "what is left"
    for job in jobs:
        launcher.stop(job.key, 0.0)


def test_the_status_of_a_gang_names_the_members_without_a_job_and_why(
    run: Run, gang: Any, manager: GPUResourceManager
) -> None:
    token = gang(job={"command": ["true"]})["fencing_token"]
    keys = [job_key("t", token, rank, 3) for rank in range(3)]
    receiver = ReportReceiver(manager)

    def tells(name: str, *runs: dict[str, Any]) -> None:
        said = report(manager.store.now(), gpu(0), name=name, place=PLACE, runs=list(runs))
        receiver.receive(read_report(as_text(said)))

    tells(SERVERS[0], job_state(keys[0]))
    tells(SERVERS[1])
    assert "; rank 1 on gpu-server-1: its job has not begun; rank 2 on gpu-server-2: its agent is silent" in (
        line := run("status", "t").output.splitlines()[-1]
    )
    assert "rank 0" not in line
    manager.place_job("t", [JobPlace("agent", name) for name in SERVERS], fencing_token=token)
    tells(SERVERS[1], job_state(keys[1], "finished"))
    assert "rank 1 on gpu-server-1: its job has ended; rank 2" in run("status", "t").output


def test_the_agents_of_a_gang_are_asked_at_once(
    run: Run, gang: Any, manager: GPUResourceManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a service each answer is a way there and back, and a gang may have hundreds of members."""
    gang(job={"command": ["true"]})
    asked, ask = Barrier(3), manager.agent_state

    def together(server: str) -> Any:
        asked.wait(30)
        return ask(server)

    monkeypatch.setattr(manager, "agent_state", together)
    assert run("status", "t").output.count("its agent is silent") == 3


@pytest.fixture
def local_job(
    manager: GPUResourceManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[LocalLauncher, Job]]:
    """Job that lease t says is on this machine, and that has not begun."""
    monkeypatch.setenv("GPU_MANAGER_JOBS_DIR", str(tmp_path))
    redefine(manager, nodes=(replace(default_inventory(1)[0], address="127.0.0.1"),))
    token, launcher = granted_lease(manager.submit("t", 1))["fencing_token"], LocalLauncher()
    job = Job(job_key("t", token), ("echo", "here"))
    manager.place_job("t", [launcher.prepare(job)], fencing_token=token)
    yield launcher, job
    launcher.stop(job.key, 0.0)


@pytest.mark.parametrize("begins", [True, False])
def test_the_output_of_a_job_that_is_placed_is_followed_from_its_begin(
    run: Run,
    local_job: tuple[LocalLauncher, Job],
    manager: GPUResourceManager,
    monkeypatch: pytest.MonkeyPatch,
    begins: bool,
) -> None:
    """It ended at once, with 0, as for rank 0 of a gang that starts its workers first."""
    launcher, job = local_job
    pause = time.sleep
    monkeypatch.setattr(job_commands, "LOOK_EVERY_S", 0.0625)

    def meanwhile(time_s: float) -> None:
        if time_s != job_commands.LOOK_EVERY_S:
            pause(time_s)
        elif begins:
            launcher.start(job)
            wait_until_ended(launcher, job.key)
        else:
            assert manager.leases() != [], "no job begins without a lease"
            manager.release("t", job_end="ended")

    monkeypatch.setattr(time, "sleep", meanwhile)
    done = run("logs", "-f", "t")
    assert (done.exit_code, done.output) == (0, "here\n" if begins else "")


def test_a_server_that_does_not_answer_is_unreachable_for_logs(
    run: Run, gang: Any, manager: GPUResourceManager
) -> None:
    """On a store it was refused, with exit code 1."""
    token = gang()["fencing_token"]
    manager.place_job("t", [JobPlace("agent", name) for name in SERVERS], fencing_token=token)
    done = run("logs", "t")
    assert (done.exit_code, "the agent of gpu-server-0 is silent" in done.output) == (3, True), done.output
