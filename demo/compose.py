"""`python -m demo.compose`: brings docker-compose.yml up, trains through it, kills a service and heals it.

Needs a Docker engine with Compose. Everything it made is removed at the end.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from demo.stack import REPOSITORY, AirflowApi, StackError

AIRFLOW_URL = "http://localhost:8080"
SERVICE_URL = "http://localhost:5000"
RUN_TIMEOUT_S = 300.0
PROJECT = "gpu-manager-check"


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="gpu-manager-compose-") as folder:
        stack = Compose(Path(folder))
        try:
            check(stack)
        except (StackError, httpx.HTTPError, subprocess.CalledProcessError) as error:
            print(f"compose check failed: {error}", file=sys.stderr)
            stack.run("logs", "--tail", "40", check=False)
            sys.exit(1)
        finally:
            stack.run("down", "--volumes", "--timeout", "20", check=False)


class Compose:
    """One project of its own with secrets of its own."""

    def __init__(self, folder: Path) -> None:
        password = secrets.token_hex(16)
        values = {
            "REDIS_PASSWORD": secrets.token_hex(16),
            "POSTGRES_PASSWORD": secrets.token_hex(16),
            "AIRFLOW_ADMIN_PASSWORD": password,
            "AIRFLOW_JWT_SECRET": secrets.token_hex(32),
            "AIRFLOW_FERNET_KEY": base64.urlsafe_b64encode(os.urandom(32)).decode(),
            "GRAFANA_PASSWORD": secrets.token_hex(16),
        }
        self._env_file = folder / "env"
        self._env_file.write_text("".join(f"{name}={value}\n" for name, value in values.items()))
        passwords = folder / "passwords.json"
        passwords.write_text(json.dumps({"admin": password}))
        self.airflow = AirflowApi(AIRFLOW_URL, passwords)

    def run(self, *arguments: str, check: bool = True) -> str:
        """The output of `docker compose …`; raises `CalledProcessError`."""
        command = [
            "docker",
            "compose",
            "--project-name",
            PROJECT,
            "--env-file",
            str(self._env_file),
            *arguments,
        ]
        result = subprocess.run(command, cwd=REPOSITORY, check=check, stdout=subprocess.PIPE, text=True)
        return result.stdout

    def free_gpus(self) -> int:
        """Free GPUs as the manager's service tells them."""
        token = self.run("exec", "-T", "gpu-manager", "cat", "auth/operator.token").strip()
        answer = httpx.get(
            f"{SERVICE_URL}/api/status", headers={"Authorization": f"Bearer {token}"}, timeout=10
        )
        answer.raise_for_status()
        return sum(server["available_gpus"] for server in answer.json()["servers"])


def check(stack: Compose) -> None:
    """Train; kill Redis while a second run trains; see both runs succeed and every GPU free."""
    print("building and starting", flush=True)
    stack.run("up", "--detach", "--build", "--wait")
    finish(stack, stack.airflow.trigger("train_digits"))
    print("first run succeeded", flush=True)
    run_id = stack.airflow.trigger("train_digits")
    wait_until(lambda: stack.free_gpus() < 32, "no GPU was leased")
    stack.run("kill", "redis")
    print("Redis was killed while jobs trained", flush=True)
    time.sleep(5)
    stack.run("up", "--detach", "--wait", "redis")
    finish(stack, run_id)
    wait_until(lambda: stack.free_gpus() == 32, "not all GPUs are free again")
    print("the run survived, all 32 GPUs are free", flush=True)


def finish(stack: Compose, run_id: str) -> None:
    wait_until(
        lambda: stack.airflow.run_state("train_digits", run_id) in {"success", "failed"},
        f"run {run_id} did not end",
    )
    state = stack.airflow.run_state("train_digits", run_id)
    if state != "success":
        raise StackError(f"run {run_id} ended as {state}")


def wait_until(condition: Callable[[], bool], reason: str) -> None:
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise StackError(f"{reason} within {RUN_TIMEOUT_S:g} s")
        time.sleep(2)


if __name__ == "__main__":
    main()
