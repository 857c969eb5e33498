"""Faults planted on real servers, agents, a disk and a real Airflow, and found by `gpu-manager doctor`."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from demo.stack import Stack, answers, free_ports
from resource_manager import GPUResourceManager, __version__
from resource_manager.jobs.task_identity import TaskIdentity
from tests.e2e.bench import wait_for
from tests.e2e.servers import SSHD, SSHServer
from tests.eventually import TIMEOUT_FACTOR
from tests.nvml.standin import State, gpu, library, uuid_of
from tests.redis_server import RedisServer
from tests.small_disk import small_disk_at

__all__ = ["library"]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PROGRAM = (sys.executable, "-m", "resource_manager.cli")
NO_ROUTE = "192.0.2.77"
"""Address for documentation (RFC 5737), to which no host ever has a route of its own."""


def doctor(environment: Mapping[str, str], *options: str) -> list[str]:
    """Return the lines of the faults that a new process of the command prints."""
    done = subprocess.run([*PROGRAM, "doctor", *options], env=environment, capture_output=True, text=True)
    faults = [line for line in done.stdout.splitlines() if line.startswith("FAULT")]
    assert (done.returncode, done.stderr) == (int(bool(faults)), ""), done.stdout + done.stderr
    return faults


@contextmanager
def running(*command: str, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def sshd(folder: Path, **variables: str) -> Iterator[SSHServer]:
    folder.mkdir()
    server = SSHServer(folder, variables=variables)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def without_route(address: str) -> Iterator[None]:
    if subprocess.run(["ip", "route", "add", "unreachable", address]).returncode:
        pytest.skip("needs the right to set routes, and iproute2")
    try:
        yield
    finally:
        subprocess.run(["ip", "route", "del", "unreachable", address], check=True)


@pytest.mark.skipif(SSHD is None or os.geteuid() != 0, reason="needs sshd (Debian: openssh-server) and root")
def test_servers_that_ssh_does_not_reach_and_a_full_disk(tmp_path: Path, embedded_redis: RedisServer) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    with (
        sshd(tmp_path / "well") as well,
        sshd(tmp_path / "bare-server", PATH=str(bare)) as without_python,
        without_route(NO_ROUTE),
        small_disk_at(tmp_path / "disk", "size=256k") as disk,
    ):
        with pytest.raises(OSError, match="No space left"):
            (disk / "checkpoint").write_bytes(bytes(1 << 20))
        without_python.share_key(well)
        addresses = {
            "no-nvml": f"127.0.0.1:{well.port}",
            "changed": f"localhost:{well.port}",
            "no-python": f"127.0.0.1:{without_python.port}",
            "no-route": f"{NO_ROUTE}:22",
            "no-sshd": f"127.0.0.1:{free_ports(1)[0]}",
            "stranger": f"127.0.0.2:{well.port}",
        }
        home = tmp_path / "home"
        (home / ".ssh").mkdir(parents=True)
        keys = [(server.home / "host_key.pub").read_text() for server in (well, without_python)]
        (home / ".ssh" / "known_hosts").write_text(
            f"[127.0.0.1]:{well.port} {keys[0]}[127.0.0.1]:{without_python.port} {keys[1]}"
            f"[localhost]:{well.port} {keys[1]}"
        )
        (tmp_path / "cluster.toml").write_text(
            "".join(
                f'[[servers]]\nname = "{name}"\naddress = "{address}"\ncpus = 8\ngpus = 2\n'
                for name, address in addresses.items()
            )
        )
        environment = {
            **os.environ,
            "HOME": str(home),
            "GPU_MANAGER_STORE": embedded_redis.fresh_url(),
            "GPU_MANAGER_JOBS_DIR": str(disk / "jobs"),
        }
        subprocess.run(
            [*PROGRAM, "apply", "--yes", str(tmp_path / "cluster.toml")], env=environment, check=True
        )
        faults = doctor(environment, "--ssh", "--user", "root", "--key", str(well.key))
    expected = {
        "no-nvml": "see docs/gpus.md",
        "changed": "ssh-keygen -R",
        "no-python": "has no python3, which is needed there: install python3 there",
        "no-route": "check its address, and the network",
        "no-sshd": "start its sshd, or correct the port",
        str(disk / "jobs"): "0.0 GiB free: make room",
    }
    expected["stranger"] = "start its sshd"  # nobody listens on this address
    for name, step in expected.items():
        [fault] = [line for line in faults if name in line or addresses.get(name, name) in line]
        assert step in fault, fault


def test_agents_that_are_silent_old_blind_or_have_the_token_of_another(
    tmp_path: Path, embedded_redis: RedisServer, library: Path
) -> None:
    names = ["blind", "old", "silent", "well", "robbed"]
    (tmp_path / "cluster.toml").write_text(
        "[cluster]\nsilent_after = 15\n"
        + "".join(
            f'[[servers]]\nname = "{name}"\ncpus = 8\n'
            f'gpus = [{{ids = [0], type = "A100", uuids = ["{uuid_of(number)}"]}}]\n'
            for number, name in enumerate(names)
        )
    )
    environment = {
        **os.environ,
        "GPU_MANAGER_STORE": embedded_redis.fresh_url(),
        "GPU_MANAGER_JOBS_DIR": str(tmp_path),
    }

    def call(*words: str) -> str:
        done = subprocess.run([*PROGRAM, *words], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    call("apply", "--yes", str(tmp_path / "cluster.toml"))
    call("token", "create", "olga", "--role", "operator")
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    older = "import resource_manager; resource_manager.__version__ = '0.0.1'"
    old = (sys.executable, "-c", f"{older}; from resource_manager.cli import main; main()")

    def agent(name: str, *, token_of: str = "", program: tuple[str, ...] = PROGRAM) -> Any:
        token = call("token", "create", f"agent of {name}", "--role", "agent", "--server", token_of or name)
        given = {**environment, "GPU_MANAGER_AGENT_TOKEN": token.strip()}
        if name != "blind":
            state = State(tmp_path / f"nvml-{name}", library)
            state.write(gpu(names.index(name)))
            given |= state.variables
        options = ("agent", "--server", name, "--url", url, "--every", "1")
        return running(*program, *options, environment=given)

    def reporting() -> set[str]:
        rows = json.loads(call("agent", "list", "--json"))
        return {row["server_name"] for row in rows if row["agent_version"]}

    with running(*PROGRAM, "serve", "--port", str(port), environment=environment):
        wait_for(lambda: answers(port), 60.0, "the service")
        with (
            agent("blind"),
            agent("old", program=old),
            agent("well"),
            agent("well", token_of="robbed"),
        ):
            with agent("silent"):
                wait_for(lambda: reporting() == {"blind", "old", "well", "silent"}, 60.0, "the reports")

            def faults() -> dict[str, str]:
                lines = [line for line in doctor(environment) if line.startswith("FAULT  servers: ")]
                named = {line.split(": ")[1]: line for line in lines}
                assert len(named) == len(lines), lines
                return named

            wait_for(lambda: "silent" in faults(), 90.0, "the silence")
            found = faults()
    assert set(found) == {"blind", "old", "silent", "robbed"}
    assert "it reports no GPUs: " in found["blind"]
    assert f"its agent is 0.0.1, this is {__version__}: install the same version there" in found["old"]
    assert "its agent has been silent for " in found["silent"]
    assert "systemctl status gpu-manager-agent" in found["silent"]
    assert "its agent's token is in use, but no report of it is taken" in found["robbed"]
    assert "gpu-manager agent install robbed --service URL" in found["robbed"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to hide the plugin from one API server")
def test_an_airflow_without_triggerer_reconciler_plugin_or_an_id_of_its_own(tmp_path: Path) -> None:
    dags = tmp_path / "dags"
    dags.mkdir()
    (dags / "reconcile.py").write_text(
        "from resource_manager.airflow import reconcile_dag\n\ndag = reconcile_dag()\n"
    )
    (tmp_path / "cluster.toml").write_text('[[servers]]\nname = "gpu-a"\ngpus = 2\ncpus = 8\n')
    settings = {
        "GPU_MANAGER_INVENTORY": str(tmp_path / "cluster.toml"),
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(tmp_path / "plugins"),
    }
    limits: dict[str, Any] = {
        "start_timeout_s": 600.0 * TIMEOUT_FACTOR,
        "answer_timeout_s": 30.0 * TIMEOUT_FACTOR,
    }
    with Stack(tmp_path / "home", dags=dags, settings=settings, **limits) as stack:
        wait_for(lambda: stack.api.knows("gpu_reconcile"), 120.0, "the reading of the DAG")
        user, password = stack.api.login

        def airflow_faults(url: str = stack.url) -> list[str]:
            login = ("--airflow-url", url, "--airflow-user", user, "--airflow-password", password)
            lines = doctor(stack.environment, *login)
            return [
                line.removeprefix("FAULT  airflow: ") for line in lines if line.startswith("FAULT  airflow: ")
            ]

        wait_for(lambda: len(airflow_faults()) == 1, 60.0, "the heartbeats")
        assert airflow_faults() == ["the DAG gpu_reconcile is paused: airflow dags unpause gpu_reconcile"]
        instance = stack.api.call("GET", "/variables/gpu_manager_instance")["value"]
        of_copy = TaskIdentity(instance, "elsewhere", "manual__1", "train")
        with GPUResourceManager.from_url(stack.store_url) as manager:
            manager.submit(of_copy.lease_id, 1, labels=of_copy.labels)
            [_, copied] = airflow_faults()  # while nobody reconciles, who would release it
            manager.release(of_copy.lease_id)
        assert "no task of it, such as elsewhere.train: another Airflow has a copy of the id" in copied

        program = str(Path(sys.executable).parent / "airflow")
        step = [program, "dags", "unpause", "--yes", "gpu_reconcile"]
        subprocess.run(step, env=stack.environment, check=True, capture_output=True)
        assert airflow_faults() == []

        for process in stack.processes():
            if process.cmdline()[-1:] == ["triggerer"]:
                process.kill()
        wait_for(airflow_faults, 90.0, "the end of its heartbeats")
        assert airflow_faults() == ["its triggerer is unhealthy: start one, airflow triggerer"]

        [installed] = [
            file
            for file in importlib.metadata.files("gpu-resource-manager") or []
            if file.name == "entry_points.txt"
        ]
        hide = f"mount --bind /dev/null {installed.locate()} && exec {program} api-server --port $0"
        [port] = free_ports(1)
        stack.spawn("other", ["unshare", "-m", "sh", "-c", hide, str(port)])
        wait_for(lambda: answers(port), 120.0, "the API server without the plugin")
        of_other = airflow_faults(f"http://127.0.0.1:{port}")
        assert of_other[1:] == [
            "the plugin is not loaded: install this package in the environment of its API server, and "
            "restart that"
        ]
