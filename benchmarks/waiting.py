"""How soon freed GPUs run the next job in a real Airflow, and what a triggerer full of tasks costs.

Without an option it runs the tests of tests/e2e/test_waiting.py that measure this, with `--launcher` one of
them; with `--mapped` it is 1,000 tasks that ask at once, of an Airflow on PostgreSQL. With `--load` it is a
process like a triggerer: it runs the triggers of 500 tasks whose jobs run here and of 500 that wait, against
a service of its own; what the triggers store in Airflow is in files instead.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree  # nosec B405

import httpx
import psutil

from benchmarks.processes import cpu_s, service
from resource_manager.cli.bench.store import redis_server
from resource_manager.core.models import Gpu, Node
from resource_manager.jobs.task_identity import TaskIdentity
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.rest import tokens
from resource_manager.rest.redis_persistence import RedisTokens
from resource_manager.rest.tokens import Role
from resource_manager.storage.once import digest
from resource_manager.storage.redis.client import RedisClient
from tests.sql_servers import Postgres

HAND_OVER = "test_waiting.py::test_a_released_gpu_soon_runs_the_next_process"
MAPPED = "test_waiting.py::test_mapped_tasks_that_wait"
ASK_AT_ONCE = 1000
"""Mapped tasks that ask at once: as many as a triggerer takes unless told otherwise."""

TASKS = 500
"""Tasks that run, each on one GPU, and as many that wait."""

GPUS = 8
MEASURED_S = 60.0
PRINTS_EVERY_S = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", action="store_true", help="measure a triggerer full of tasks")
    parser.add_argument("--launcher", choices=["local", "ssh", "docker"], help="measure its hand-over only")
    parser.add_argument("--mapped", action="store_true", help="measure tasks that ask at once")
    options = parser.parse_args()
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Airflow and the tasks log
    if options.load:
        figures = load()
    elif options.mapped:
        figures = on_postgresql(MAPPED, WAITING_JOBS=str(ASK_AT_ONCE))
    else:
        figures = measured(f"{HAND_OVER} and {options.launcher}" if options.launcher else HAND_OVER)
    with results:
        print(json.dumps(figures), file=results)


def on_postgresql(tests: str, **environment: str) -> dict[str, Any]:
    """Return what these tests measured in an Airflow on PostgreSQL.

    On SQLite so many tasks may end Airflow's scheduler: its database is locked.
    """
    database = Postgres()
    try:
        metadata = f"postgresql+psycopg2{database.url.removeprefix('postgresql')}"
        return measured(tests, E2E_METADATA=metadata, **environment)
    finally:
        database.stop()


def measured(tests: str, **environment: str) -> dict[str, Any]:
    """Return what these tests of tests/e2e measured in a real Airflow."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        file, _, names = tests.partition("::")
        command = [sys.executable, "-m", "pytest", f"tests/e2e/{file}", "-k", names]
        options = ["-q", "--junit-xml", str(report)]
        ran = subprocess.run(
            [*command, *options], env={**os.environ, **environment}, stdout=sys.stderr, check=False
        )
        if ran.returncode:
            sys.exit("the tests did not pass, so their figures count for nothing")
        recorded = {
            item.attrib["name"]: json.loads(item.attrib["value"])
            for item in ElementTree.parse(report).iter("property")  # nosec B314
        }
    return {
        name: {"p50": round(median(value), 2), "max": round(max(value), 2), "samples": len(value)}
        if isinstance(value, list)
        else value
        for name, value in recorded.items()
    }


def load() -> dict[str, float]:
    """Return the requests a second to the service, and the share of a core, of a triggerer full of tasks."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        service_for_user(Path(folder)) as (url, token, server),
    ):
        connect(Path(folder), url, token)
        return asyncio.run(Triggerer(url, token, server, Path(folder)).measured())


def connect(folder: Path, url: str, token: str) -> None:
    """Have tasks of this process, and of its children, use the service."""
    connection = {"conn_type": "gpu_manager", "host": url, "password": token}
    os.environ |= {
        "AIRFLOW_HOME": str(folder),
        "AIRFLOW_CONN_GPU_MANAGER_DEFAULT": json.dumps(connection),
        "GPU_MANAGER_INSTANCE": "bench",
        "GPU_MANAGER_JOBS_DIR": str(folder / "jobs"),
    }


def keep_in(folder: Path) -> None:
    """Have triggers of this process store in files what they store in Airflow, which wants all tasks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Airflow's own, on import
        from resource_manager.airflow import task_results
        from resource_manager.airflow.task_trigger import base, notes, task_lease
    kept = Kept(folder)

    async def note(identity: TaskIdentity, key: str, value: Any) -> None:
        kept.set(f"{identity.lease_id} {key}", json.dumps(value))

    async def noted(identity: TaskIdentity, key: str) -> Any:
        return json.loads(kept.get(f"{identity.lease_id} {key}") or "null")

    for module, name, value in (
        (notes, "note", note),
        (notes, "noted", noted),
        (base, "is_wanted", lambda identity: True),
        (task_lease, "is_wanted", lambda identity: True),
        (task_results, "CurrentAccess", lambda: kept),
    ):
        setattr(module, name, value)


class Kept:
    """Texts by their keys, each in a file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, key: str) -> str | None:
        path = self._folder / digest(key)
        return path.read_text() if path.exists() else None

    def set(self, key: str, text: str, before: str | None = None) -> None:
        draft = self._folder / f"{digest(key)}.new"
        draft.write_text(text)
        draft.replace(self._folder / digest(key))

    def delete(self, key: str) -> None:
        (self._folder / digest(key)).unlink(missing_ok=True)


def ask(folder: Path, number: int, command: str, gpus: int = 1) -> Any:
    """Return the trigger of a task that has asked for GPUs."""
    keep_in(folder / "kept")
    from resource_manager.airflow import GPUTrainingOperator
    from tests.airflow.tasks import asked

    operator = GPUTrainingOperator(task_id="t", gpus=gpus, cpus=1, ttl=timedelta(minutes=2), command=command)
    return asked(operator, map_index=number)  # type: ignore[no-untyped-call]


@contextmanager
def service_for_user(folder: Path, gpus: int = TASKS) -> Iterator[tuple[str, str, psutil.Process]]:
    """Yield the URL of a service of that many GPUs, a token of a user of it, and its process."""
    inventory = [
        Node(f"gpu-{number}", number, {"cpus": 64}, tuple(Gpu(gpu) for gpu in range(GPUS)))
        for number in range(-(-gpus // GPUS))
    ]
    with redis_server(None) as store, (folder / "service.log").open("w") as log:
        GPUResourceManager.from_url(store, inventory=inventory).close()
        token = tokens.create(RedisTokens(RedisClient.from_url(store)), "triggerer", Role.USER)
        with service(store, log=log) as (url, process):
            yield url, token, process


class Triggerer:
    """Process that runs the triggers of all tasks in one event loop, as a triggerer does."""

    def __init__(self, url: str, token: str, server: psutil.Process, folder: Path) -> None:
        self._http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"})
        self._server = server
        self._folder = folder

    async def measured(self) -> dict[str, float]:
        """Start all tasks; measure once those that can run do."""
        gpus = [1] * TASKS + [GPUS] * TASKS
        begun, kept = self._folder / "begun", self._folder / "kept"
        begun.mkdir()
        kept.mkdir()
        triggers = [self._trigger(0, 1)]  # with the imports, which a worker has before
        began = time.monotonic()
        triggers += map(self._trigger, range(1, 2 * TASKS), gpus[1:])
        asked_s = time.monotonic() - began
        running = [asyncio.create_task(anext(trigger.run())) for trigger in triggers]
        while len(list(begun.iterdir())) < TASKS:
            await asyncio.sleep(1.0)
            if failed := next((each for each in running if each.done()), None):
                sys.exit(f"a task ended: {failed.result()}")
        await asyncio.sleep(30.0)
        me, server = psutil.Process(), self._server
        before = time.monotonic(), cpu_s(me), cpu_s(server), self._requests()
        await asyncio.sleep(MEASURED_S)
        after = time.monotonic(), cpu_s(me), cpu_s(server), self._requests()
        seconds, own_s, server_s, requests = (b - a for a, b in zip(before, after, strict=True))
        (self._folder / "over").touch()
        await asyncio.sleep(PRINTS_EVERY_S + 5)  # the jobs look now and then
        for each in running:
            each.cancel()
        await asyncio.wait(running)
        for trigger in triggers:
            await trigger.cleanup()
        return {
            "triggerer_core_percent": round(100 * own_s / seconds, 1),
            "service_core_percent": round(100 * server_s / seconds, 1),
            "requests_per_s": round((requests - 1) / seconds, 2),  # without that for the metrics
            "asked_s": round(asked_s, 1),
        }

    def _trigger(self, number: int, gpus: int) -> Any:
        """Return the trigger of a task that has asked for GPUs; its job prints a line now and then."""
        folder = shlex.quote(str(self._folder))
        prints = f"do date; sleep {PRINTS_EVERY_S}; done"
        command = f"touch {folder}/begun/{number}; until [ -e {folder}/over ]; {prints}"
        return ask(self._folder, number, command, gpus)

    def _requests(self) -> float:
        """Return the requests that the service has answered."""
        text = self._http.get("/metrics").raise_for_status().text
        counts = re.findall(r"^gpu_manager_http_request_seconds_count\{.*\} (\S+)$", text, re.MULTILINE)
        return sum(map(float, counts))


if __name__ == "__main__":
    main()
