"""Check of the stack in containers: `python -m demo.compose` starts, trains, kills services, sees them heal.

It needs a Docker engine with Compose. It uses a separate project, ports and secrets, and removes all of them
at the end. `--store postgresql` keeps the manager's state in PostgreSQL, which is killed too, and the manager
must work without its Redis afterwards. `--sentinel` adds a fail-over of Redis.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import httpx

from demo.evidence import problems_of, reports_of
from demo.stack import REPOSITORY, AirflowApi, StackError, free_ports, wait_until
from demo.timeline import holdings
from resource_manager.cli.install_files import write_files
from resource_manager.cli.signals import ended_in_order

RUN_TIMEOUT_S = 600.0
HEAL_TIMEOUT_S = 300.0
PROJECT = "gpu-manager-check"
IMAGE = "gpu-resource-manager:local"
DAG_ID = "train_digits"
VICTIMS = ("gpu-manager", "airflow-triggerer", "airflow-scheduler")
"""Services that are killed while jobs train, beside the store; not the worker, the parent of the jobs."""
SENTINEL_SERVICES = ("redis-replica", "sentinel-1", "sentinel-2", "sentinel-3")


@click.command(help=__doc__)
@click.option(
    "--store",
    type=click.Choice(["redis", "postgresql"]),
    default="redis",
    show_default=True,
    help="Where the manager's state is.",
)
@click.option("--sentinel", is_flag=True, help="Also kill the primary Redis and see a replica take over.")
def main(store: str, sentinel: bool) -> None:
    if sentinel and store != "redis":
        raise click.UsageError("--sentinel goes with --store redis")
    if shutil.which("docker") is None:
        sys.exit("compose check failed: the program docker is missing; install Docker with Compose")
    with ended_in_order(), tempfile.TemporaryDirectory(prefix="gpu-manager-compose-") as folder:
        stack = Compose(Path(folder), store)
        try:
            check(stack)
            if store == "postgresql":
                check_without_redis(stack)
            if sentinel:
                check_fail_over(stack)
        except (StackError, httpx.HTTPError, subprocess.CalledProcessError) as error:
            print(stack.run("logs", "--no-color", "--tail", "15", check=False), file=sys.stderr)
            sys.exit(f"compose check failed: {error}")
        finally:
            stack.run("--profile", "*", "down", "--volumes", "--timeout", "20", check=False)
            stack.airflow.close()
    print("no GPU was allocated twice, none was lost, no container is left")


class Compose:
    """Compose project with its own ports and secrets."""

    def __init__(self, folder: Path, store: str) -> None:
        password = secrets.token_hex(16)
        ports = dict(zip(("AIRFLOW_PORT", "GPU_MANAGER_PORT"), free_ports(2), strict=True))
        self.values = {
            "REDIS_PASSWORD": secrets.token_hex(16),
            "BROKER_PASSWORD": secrets.token_hex(16),
            "POSTGRES_PASSWORD": secrets.token_hex(16),
            "AIRFLOW_ADMIN_PASSWORD": password,
            "AIRFLOW_JWT_SECRET": secrets.token_hex(32),
            "AIRFLOW_FERNET_KEY": base64.urlsafe_b64encode(os.urandom(32)).decode(),
            "GRAFANA_PASSWORD": secrets.token_hex(16),
            **{name: str(port) for name, port in ports.items()},
        }
        self.victims = ("postgres" if store == "postgresql" else "redis", *VICTIMS)
        self.profile: tuple[str, ...] = ()
        if store == "postgresql":
            self.profile = ("--profile", "postgresql")
            own = self.values["GPU_DATABASE_PASSWORD"] = secrets.token_hex(16)
            self.values["GPU_MANAGER_STORE"] = f"postgresql://gpu_manager:{own}@postgres/gpu_manager"
        self._folder = folder / "stack"
        write_files("compose", self._folder)
        (self._folder / "requirements.txt").write_text("scikit-learn>=1.5\n")
        shutil.copytree(REPOSITORY / "dags", self._folder / "dags", dirs_exist_ok=True)
        uv = Path(sys.executable).with_name("uv")
        wheel: list[str | Path] = [uv, "build", "--quiet", "--wheel", "--out-dir", self._folder, REPOSITORY]
        subprocess.run(wheel, check=True)
        self._env_file = folder / "env"
        passwords = folder / "passwords.json"
        passwords.write_text(json.dumps({"admin": password}))
        self.airflow = AirflowApi(f"http://localhost:{ports['AIRFLOW_PORT']}", passwords)
        self._service_url = f"http://localhost:{ports['GPU_MANAGER_PORT']}"

    def run(self, *arguments: str, check: bool = True) -> str:
        """Run `docker compose …` and return its output; raises `CalledProcessError`."""
        self._env_file.write_text("".join(f"{name}={value}\n" for name, value in self.values.items()))
        command = ["docker", "compose", "--project-name", PROJECT, "--env-file", str(self._env_file)]
        result = subprocess.run(
            [*command, *arguments], cwd=self._folder, check=check, stdout=subprocess.PIPE, text=True
        )
        return result.stdout

    def kill(self, service: str) -> None:
        """Kill the service's first process like a crash; after `docker kill` it would not be restarted."""
        container = self.run("ps", "--quiet", service).strip()
        found = _docker("inspect", "--format", "{{.State.Pid}}", container)
        _docker(
            *("run", "--rm", "--pid", "host", "--user", "0:0", "--entrypoint", "bash"),
            *(IMAGE, "-c", f"kill -KILL {int(found)}"),
        )

    def is_healthy(self, service: str) -> bool:
        """Return whether the service's container runs and its health check passes."""
        answer = self.run("ps", "--format", "json", service, check=False).strip()
        return bool(answer) and json.loads(answer.splitlines()[0]).get("Health") == "healthy"

    def use_sentinels(self) -> None:
        """Connect the manager's services to Redis through the three Sentinels from the next `up` on."""
        sentinels = ",".join(f"sentinel-{number}:26379" for number in (1, 2, 3))
        login = f":{self.values['REDIS_PASSWORD']}@"
        self.values["GPU_MANAGER_STORE"] = f"redis+sentinel://{login}{sentinels}/gpu-manager/0"

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Call the manager's service with the operator's token; return the JSON answer."""
        token = self.run("exec", "-T", "gpu-manager", "cat", "tokens/operator.token").strip()
        headers = {"Authorization": f"Bearer {token}"}
        answer = httpx.request(method, f"{self._service_url}{path}", json=body, headers=headers, timeout=30)
        answer.raise_for_status()
        return answer.json()

    def servers(self) -> list[dict[str, Any]]:
        servers: list[dict[str, Any]] = self.call("GET", "/api/status")["servers"]
        return servers

    def free_gpus(self) -> int:
        return sum(server["available_gpus"] for server in self.servers())

    def answers(self) -> bool:
        """Return whether the manager's service can read its store."""
        try:
            return bool(self.servers())
        except (httpx.HTTPError, subprocess.CalledProcessError):
            return False

    def history(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = []
        after: int | None = 0
        while after is not None:
            page = self.call("GET", f"/api/history?limit=1000&after={after}")
            entries += page["items"]
            after = page["next"]
        return entries


def check(stack: Compose) -> None:
    """Train once, then train again while services are killed; raise `StackError` unless both runs succeed.

    Every GPU must be free afterwards.
    """
    say("building and starting")
    stack.run(*stack.profile, "up", "--detach", "--build", "--wait")
    total = stack.free_gpus()
    runs = [stack.airflow.trigger(DAG_ID)]
    finish(stack, runs[0])
    say("the first run succeeded")
    runs.append(stack.airflow.trigger(DAG_ID))
    wait_for(lambda: stack.free_gpus() < total, "no GPU was leased")
    for service in stack.victims:
        stack.kill(service)
    say(f"killed while jobs train: {', '.join(stack.victims)}")
    for service in stack.victims:
        wait_for(lambda name=service: stack.is_healthy(name), f"{service} did not heal", HEAL_TIMEOUT_S)  # type: ignore[misc]
    say("all of them are healthy again")
    finish(stack, runs[1])
    wait_for(lambda: stack.free_gpus() == total, "not all GPUs are free again")
    held = holdings(stack.history())
    reports = [reports_of(stack.airflow, DAG_ID, run_id) for run_id in runs]
    tasks = sum(map(len, reports))
    problems = list(problems_of(held, reports, stack.servers()))
    if tasks != 12:
        problems.append(f"{tasks} of 12 jobs reported")
    if problems:
        raise StackError("; ".join(problems))
    say(f"both runs succeeded: {tasks} jobs, {len(held)} leases, all {total} GPUs are free")


def check_without_redis(stack: Compose) -> None:
    """Stop the manager's Redis: the service must grant and release without it."""
    stack.run("stop", "redis")
    payload = {"task_id": "without-redis", "required_gpus": 2, "required_cpus": 2}
    lease = stack.call("POST", "/api/allocate", payload)
    stack.call("POST", "/api/release", {"task_id": "without-redis", "fencing_token": lease["fencing_token"]})
    say("Redis was stopped: the service granted a lease and took it back")


def check_fail_over(stack: Compose) -> None:
    """Kill the primary for good: the Sentinels must promote the replica, and the service must use it."""
    stack.use_sentinels()
    stack.run("--profile", "sentinel", "up", "--detach", "--wait", "gpu-manager", *SENTINEL_SERVICES)
    say("a replica and three Sentinels run")
    payload = {"task_id": "before", "required_gpus": 2, "required_cpus": 2}
    lease = stack.call("POST", "/api/allocate", payload)
    time.sleep(2)  # the replica copies asynchronously
    stack.run("kill", "redis")
    say("the primary was killed")
    wait_for(stack.answers, "the service found no new primary", HEAL_TIMEOUT_S)
    renewed = stack.call("POST", "/api/renew", {"task_id": "before", "fencing_token": lease["fencing_token"]})
    if renewed["gpu_ids"] != lease["gpu_ids"]:
        raise StackError(f"the lease changed: {lease} became {renewed}")

    def granted() -> bool:
        try:
            return bool(stack.call("POST", "/api/allocate", {**payload, "task_id": "after"}))
        except httpx.HTTPStatusError:
            return False

    refused_at_first = not granted()
    wait_for(granted, "nothing was granted after the fail-over", HEAL_TIMEOUT_S)
    suspended = "yes" if refused_at_first else "no"
    say(f"the replica took over with the lease; grants were suspended at first: {suspended}")


def finish(stack: Compose, run_id: str) -> None:
    def state() -> str:
        try:
            return stack.airflow.run_state(DAG_ID, run_id)
        except httpx.HTTPError:  # the API server itself may be restarting
            return "unknown"

    wait_for(lambda: state() in {"success", "failed"}, f"run {run_id} did not end")
    if state() != "success":
        raise StackError(f"run {run_id} ended as {state()}")


def wait_for(condition: Callable[[], bool], reason: str, timeout_s: float = RUN_TIMEOUT_S) -> None:
    """Wait until the condition holds; test it every 2 s, since each test is a command or an HTTP request."""
    wait_until(condition, timeout_s, f"{reason} within {timeout_s:g} s", pause_s=2.0)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def _docker(*arguments: str) -> str:
    command = ["docker", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


if __name__ == "__main__":
    main()
