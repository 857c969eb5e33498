"""Launchers under contract: with a real shell, a real sshd and a real Docker engine."""

import gc
import os
import re
import shutil
import time
import warnings
from typing import Any

import pytest

from resource_manager.agent.job_runner import AgentJobs
from resource_manager.agent.report_format import RunReport
from resource_manager.core.models import JobPlace
from resource_manager.jobs.launchers import Job, LauncherUnreachableError, job_key, open_at
from resource_manager.jobs.launchers.docker_volumes import ENDED_LABEL
from resource_manager.jobs.launchers.local import LocalLauncher
from resource_manager.manager.agent_jobs import note_opened
from tests.e2e.servers import ssh_server
from tests.slurm_cluster import slurm, slurm_cluster

__all__ = ["slurm", "slurm_cluster", "ssh_server"]

IMAGE = os.environ.get("TEST_IMAGE", "python:3.11-slim")


class Board:
    """What stands between a launcher and an agent, without the service: orders and reports."""

    def __init__(self, root):
        self.jobs = AgentJobs("here", root, changed=lambda: None, say=print)
        self.orders = {}

    def number(self):
        return f"{time.monotonic_ns():020d}"

    def order_job(self, server, key, order):
        rank = re.search(r"-(\d+)(\.\d+)?$", key)
        assert rank is not None
        number = self.number()
        self.orders[key] = {
            **order,
            "n": number,
            "key": key,
            "token": int(rank[1]),
            "user": self.jobs.user,
        }
        jobs = list(self.orders.values())
        self.jobs.take({"server": "here", "incarnation": "1", "version": time.monotonic_ns(), "jobs": jobs})
        return number

    def agent_state(self, server):
        said = self.jobs.report()
        stored = [RunReport(**run).model_dump(exclude_defaults=True) for run in said["runs"]]
        runs = {run["key"]: run for run in stored}
        return {"server": server, "place": said["place"], "runs": runs, "is_silent": False}

    def job_output(self, server, key, offset, *, lease_id=""):
        try:
            return self.jobs.output(key, offset)
        except OSError as error:
            return {"error": str(error)}


@pytest.fixture(
    params=[
        "local",
        "agent",
        pytest.param("ssh", marks=pytest.mark.e2e),
        pytest.param("docker", marks=pytest.mark.e2e),
        pytest.param("slurm", marks=pytest.mark.e2e),
    ]
)
def launcher(request, tmp_path, monkeypatch):
    launcher: Any = None
    if request.param == "local":
        yield LocalLauncher(str(tmp_path))
        return
    if request.param == "agent":
        board = Board(str(tmp_path))
        note_opened(board)
        launcher = open_at(JobPlace("agent", "here"))
        launcher.root = str(tmp_path)
        yield launcher
        board.jobs.close()
        return
    if request.param == "slurm":
        cluster = request.getfixturevalue("slurm")
        with pytest.MonkeyPatch.context() as patched:  # a test may undo its own changes before the end
            patched.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
            launcher = open_at(JobPlace("slurm"))
            launcher.root = str(tmp_path)
            yield launcher
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if request.param == "ssh":
            server = request.getfixturevalue("ssh_server")
            monkeypatch.setenv("AIRFLOW_CONN_TEST_SSH", server.connection)
            launcher = open_at(JobPlace("ssh", f"127.0.0.1:{server.port}", "test_ssh"))
            launcher.root = str(tmp_path)
        else:
            if shutil.which("docker") is None:
                pytest.skip("needs a Docker engine with the image python:3.11-slim")
            reason = ""
            try:
                launcher = open_at(JobPlace("docker"))
            except LauncherUnreachableError as error:
                reason = str(error)
            if launcher is None:
                gc.collect()  # before the test ends, while the warnings about such sockets are filtered
                pytest.skip(reason)
        yield launcher
        if request.param == "docker":
            remove_tombstones(launcher)
        launcher.close()
        del launcher
        gc.collect()


def remove_tombstones(launcher):
    """Remove the volumes that would tell the engine for a day of the jobs of this test."""
    for volume in launcher._engine.api.volumes(filters={"label": ENDED_LABEL})["Volumes"] or ():
        if f"contract-{os.getpid()}-" in volume["Name"]:
            launcher._engine.api.remove_volume(volume["Name"])


@pytest.fixture
def job(launcher):
    """Return a function that makes jobs with unique keys, which are stopped after the test."""
    made = []

    def make(command, **arguments):
        key = f"contract-{os.getpid()}-{time.monotonic_ns()}-1"
        made.append(key)
        if type(launcher).__name__ == "DockerLauncher":
            arguments = {"image": IMAGE, "container": {"device_requests": []}, **arguments}
        return Job(key, ("/bin/sh", "-c", command), **arguments)

    yield make
    for key in made:
        launcher.stop(key, grace_s=0)


@pytest.fixture
def key(launcher):
    """Return a key of Slurm whose job is ended after the test."""
    key = job_key(f"a:d/{time.monotonic_ns()}/t", 1)
    yield key
    launcher.stop(key, 0.0)
