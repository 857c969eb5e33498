"""Steps of docs/first-server.md from the first block to the last, with one sshd for both servers."""

import os
import re
import subprocess
import sys
import tomllib
from typing import Any

import pytest

from demo.stack import REPOSITORY, Stack, answers, free_ports
from resource_manager import __version__
from tests.e2e.bench import wait_for
from tests.eventually import TIMEOUT_FACTOR

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PAGE = (REPOSITORY / "docs" / "first-server.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def exported(script, folder):
    """Run the script in a shell and return the variables that it exports."""
    shell = subprocess.run(
        ["bash", "-ec", f"{script}\nenv -0"], cwd=folder, env={}, check=True, capture_output=True, text=True
    )
    values = dict(entry.split("=", 1) for entry in shell.stdout.split("\0") if entry)
    return {name: value for name, value in values.items() if name.startswith(("GPU_", "AIRFLOW_"))}


def test_from_two_servers_to_a_running_dag(tmp_path, ssh_server):
    [inventory], [dag] = blocks("toml"), blocks("python")
    install, exports, apply, serve = blocks("sh")
    again, status = apply.splitlines()
    wheel = f"gpu_resource_manager-{__version__}-py3-none-any.whl"
    [extras] = re.findall(rf"^pip install '{wheel}\[(.*)\]'$", install, re.MULTILINE)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    (tmp_path / "servers.toml").write_text(
        re.sub(r"10\.0\.0\.1[12]:22", f"127.0.0.1:{ssh_server.port}", inventory)
    )
    settings = exported(exports, tmp_path)
    settings.pop("GPU_MANAGER_STORE")  # the stack uses its own Redis
    settings["GPU_MANAGER_INVENTORY"] = os.fspath(tmp_path / "servers.toml")  # the stack applies it
    settings["AIRFLOW_CONN_GPU_SERVERS"] = (
        settings["AIRFLOW_CONN_GPU_SERVERS"]
        .replace('"login": "gpu"', '"login": "root"')
        .replace('"/etc/airflow/gpu_key"', f'"{ssh_server.key}", "no_host_key_check": true')
    )
    dags = tmp_path / "dags"
    dags.mkdir()
    (dags / "first.py").write_text(dag)
    limits: dict[str, Any] = {
        "start_timeout_s": 600.0 * TIMEOUT_FACTOR,
        "answer_timeout_s": 30.0 * TIMEOUT_FACTOR,
    }
    with Stack(tmp_path / "home", dags=dags, settings=settings, **limits) as stack:
        run_id = stack.api.trigger("first_gpu_job")
        ended = ("success", "failed")
        wait_for(lambda: stack.api.run_state("first_gpu_job", run_id) in ended, 300, "the end of the run")
        log = stack.api.log("first_gpu_job", run_id, "train")
        assert stack.api.run_state("first_gpu_job", run_id) == "success", log
        assert stack.api.xcom("first_gpu_job", run_id, "train") == "GPU 0 of gpu-a"
        assert stack.api.call("GET", "/dags/first_gpu_job")["description"]
        run_id = stack.api.trigger("gpu_reconcile")
        wait_for(lambda: stack.api.run_state("gpu_reconcile", run_id) in ended, 300, "the reconciliation")
        assert stack.api.run_state("gpu_reconcile", run_id) == "success"
        program = [sys.executable, "-m", "resource_manager.cli"]
        here = {"env": {**stack.environment, "COLUMNS": "80"}, "cwd": tmp_path, "text": True}
        said = [
            subprocess.run([*program, *line.split()[1:]], check=True, capture_output=True, **here).stdout
            for line in (again, status)
        ]
        assert said[0] == "no difference\n"
        shown = said[1]
        assert "GPUs: 6 free, 0 used, 0 closed of 6" in shown
        assert "gpu-b" in shown
        [port] = free_ports(1)
        tokens = os.fspath(tmp_path / "tokens.json")
        stack.spawn("serve", [*program, *serve.split()[1:], "--port", str(port), "--tokens", tokens])
        wait_for(lambda: answers(port), 60, "the console")
