"""Fractions of a GPU: which daemons an agent keeps, and what is said of a part that nothing enforces.

Against a stand-in of MPS.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.core import Metric

from resource_manager.agent import mps
from resource_manager.cli import tables
from resource_manager.fleet.server_use import use_of
from resource_manager.fleet.silence import SilenceWatch
from resource_manager.jobs.launchers.devices import (
    MPS_MARK,
    NOT_ENFORCED,
    await_share,
    job_environment,
    with_share,
)
from resource_manager.jobs.running_job import job_of
from resource_manager.rest.observability.gpu_metrics import GpuGauges
from resource_manager.rest.state_follower import StateFollower
from tests.agent import mps_control
from tests.agent.reporting import gpu, process, server, uuid
from tests.builders import granted_lease
from tests.fleet.test_receiving import Service


class Agent:
    """Agent of a server whose inventory has `mps`, with one report a round."""

    def __init__(self, folder: Path) -> None:
        self.service = Service(replace(server(), mps=str(folder)))
        self.manager = self.service.manager
        self.wanted: Any = None

    def round(self, *gpus: dict[str, Any]) -> Any:
        daemons: dict[str, Any] = mps.keep(self.wanted)
        answer = self.service.report(*(gpus or (gpu(0), gpu(1))), **daemons)
        self.wanted = answer.get("mps")
        return self.wanted["uuids"]

    def sharing(self) -> list[str]:
        [found] = use_of(self.manager)
        return [each["sharing"] for each in found["gpus"]]

    def metric(self) -> list[float]:
        watch = StateFollower(self.manager.store)
        families: list[Metric] = list(GpuGauges(watch, self.manager, SilenceWatch(60.0)).collect())
        watch.close()
        [family] = [each for each in families if each.name.endswith("gpu_share_enforced")]
        return [sample.value for sample in family.samples]


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("MPS_STANDIN", str(mps_control.install(tmp_path / "bin")))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    yield Agent(tmp_path / "mps")
    mps.keep({"folder": str(tmp_path / "mps"), "uuids": []})


def test_a_daemon_is_kept_from_the_first_share_to_the_last_and_its_processes(agent: Agent) -> None:
    assert agent.round() == []
    agent.manager.allocate("whole", 1, prefer_server="gpu-a")
    assert agent.round() == []
    agent.manager.allocate("half", 1, gpu_milli=500)
    agent.manager.allocate("other", 1, gpu_milli=250)
    assert agent.sharing() == ["", "accounted, not enforced: its MPS daemon does not run yet"]
    assert agent.round() == [uuid(1)]
    assert agent.sharing()[1] == "accounted, not enforced: its MPS daemon does not run yet"
    assert agent.metric() == [0.0]
    agent.round()
    assert agent.sharing() == ["", "enforced by MPS"]
    assert agent.metric() == [1.0]
    agent.manager.release("half")
    left = process(lease_id="other", lease_source="environment")
    assert agent.round(gpu(0), gpu(1, processes=[left])) == [uuid(1)]
    agent.manager.release("other")
    assert agent.round(gpu(0), gpu(1, processes=[left])) == [uuid(1)], "a process of it is left"
    assert agent.round() == []
    agent.round()
    assert not list(Path(agent.wanted["folder"]).iterdir())
    assert agent.metric() == []


@pytest.mark.parametrize("source", ["none", "unreadable"])
def test_the_server_of_a_daemon_is_nobodys_process(agent: Agent, source: str) -> None:
    """It bears no mark, and stays while the daemon does, which waits until the GPU is clean."""
    mps_server = process(user="root", command="nvidia-cuda-mps-server", lease_source=source)
    agent.manager.allocate("half", 1, gpu_milli=500)
    used = gpu(0, processes=[mps_server])
    for _ in range(2):
        agent.round(used, gpu(1))
    assert agent.service.closed == {}
    agent.manager.release("half")
    assert agent.round(used, gpu(1)) == []
    alone = Service(server())
    alone.report(gpu(0, processes=[{**mps_server, "lease_source": "none"}]), gpu(1))
    assert alone.closed == {0: "rogue process; pid 77 of root: nvidia-cuda-mps-server"}


def test_why_a_daemon_does_not_run_is_said_wherever_its_gpu_is_shown(agent: Agent, tmp_path: Path) -> None:
    (tmp_path / "bin" / "refuses").write_text("no permission\n")
    agent.manager.allocate("half", 1, gpu_milli=500)
    assert agent.sharing()[0] == "accounted, not enforced: no agent that keeps MPS daemons reports"
    for _ in range(2):
        agent.round()
    said = f"{mps.CONTROL} of {uuid(0)} did not start: no permission"
    assert agent.sharing()[0] == f"accounted, not enforced: {said}"
    assert agent.metric() == [0.0]


def test_explain_and_the_lease_say_if_a_part_is_enforced(agent: Agent) -> None:
    assert agent.manager.explain("t", 1)["sharing"] == ""
    answer = agent.manager.explain("t", 1, gpu_milli=500)
    assert answer["sharing"] == "enforced by MPS"
    assert "Its part of the GPU is enforced by MPS." in str(tables.explanation(answer).renderables[0])
    plain = Service(server()).manager
    answer = plain.explain("t", 1, gpu_milli=500)
    assert answer["sharing"] == "accounted, not enforced: no MPS daemon is kept on gpu-a"
    lease = granted_lease(plain.submit("t", 1, gpu_milli=500))
    assert lease["members"][0]["mps_folder"] == ""


def test_a_job_gets_the_pipes_of_its_gpu_s_daemon_and_a_container_none(agent: Agent) -> None:
    lease = granted_lease(agent.manager.submit("t", 1, gpu_milli=500))
    job = job_of(lease, "k", ["true"])
    folder = lease["members"][0]["mps_folder"]
    assert folder.endswith(f"/{uuid(0)}")
    assert job_environment(job)["CUDA_MPS_PIPE_DIRECTORY"] == mps.pipe_folder(folder)
    assert "CUDA_MPS_PIPE_DIRECTORY" not in job_environment(job, renumbered=True)
    whole = agent.manager.submit("u", 1)
    assert job_of(whole, "k", ["true"]).command == ("true",)
    assert "CUDA_MPS_PIPE_DIRECTORY" not in job_environment(job_of(whole, "k", ["true"]))


def ran(environment: dict[str, str]) -> tuple[str, str]:
    done = subprocess.run(
        with_share(["sh", "-c", "echo $0 $1", "a b", "c"]),
        env={**os.environ, "GPU_LEASE_ID": "t", **environment},
        capture_output=True,
        text=True,
    )
    return done.stdout, done.stderr


def test_a_job_says_if_nothing_enforces_its_part_and_waits_for_the_daemon(tmp_path: Path) -> None:
    part = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}
    assert ran(part) == ("a b c\n", f"t: {NOT_ENFORCED}\n")
    assert await_share(part) == NOT_ENFORCED
    assert await_share({}) == ""
    assert f"{mps.CONTROL}.pid" == MPS_MARK
    mark = tmp_path / MPS_MARK
    later = threading.Timer(0.5, lambda: mark.write_text("1"))
    later.start()
    assert ran({**part, "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}) == ("a b c\n", "")
    later.join()
    assert await_share({**part, "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}) == ""
