"""Soak test of the service: `python benchmarks/soak.py --minutes 60 --rate 200 --servers 1000`.

It runs the service on a separate Redis, archives the history, and sends allocate and release requests at a
constant rate, late ones included. Each minute (each sixteenth of a short run) it records latencies, the
service's processor time per request, its memory, threads, open files and sockets, and Redis' memory,
connections, keys and length of the stream. At the end the last quarter must not exceed the second (the
first one fills caches), and the archive must hold every change. It exits with 1 if not.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import redis

from benchmarks.processes import cpu_s, service
from resource_manager.cli.bench.store import redis_server

HISTORY_LENGTH = 5_000
INVENTORY = '[[servers]]\nname = "server-{{id}}"\ncount = {count}\ncpus = 64\ngpus = 8\n'
THREADS = 16
HELD_S = 0.5
GROWTH = {"service_mb": 1.15, "redis_mb": 1.15, "service_ms": 1.15, "p50_ms": 1.5, "p99_ms": 1.5}
"""Largest ratio of the last quarter to the second."""

LATENCIES = {"p50_ms", "p99_ms"}
"""Figures of which the best minute of a quarter counts, since other work on the machine only adds to them."""

MAY_NOT_GROW = {"sockets": 4, "files": 4, "threads": 2, "redis_clients": 4, "keys": 4}
"""Figures that must stay constant, and their allowed fluctuation."""


class Load:
    """Load of `rate` / 2 allocations per second, each released half a second later, from separate threads."""

    def __init__(self, address: str, rate: float) -> None:
        self.latencies: list[float] = []
        self.errors: list[str] = []
        self._address = address
        self._tick_s = 2 / rate
        self._held = -(-round(HELD_S / self._tick_s) // THREADS) * THREADS
        self._stop = threading.Event()
        self._started = time.perf_counter() + 0.2
        self._threads = [threading.Thread(target=self._run, args=(place,)) for place in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, first: int) -> None:
        connection = http.client.HTTPConnection(self._address, timeout=30)
        number = first
        while not self._stop.is_set():
            due = self._started + number * self._tick_s
            time.sleep(max(due - time.perf_counter(), 0))
            body = {"task_id": f"soak-{number}", "required_gpus": 2, "required_cpus": 4}
            self._call(connection, "/api/allocate", body, due)
            if number >= self._held:
                body = {"task_id": f"soak-{number - self._held}"}
                self._call(connection, "/api/release", body, max(due, time.perf_counter()))
            number += THREADS
        connection.close()

    def _call(
        self, connection: http.client.HTTPConnection, path: str, body: dict[str, Any], due: float
    ) -> None:
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != 200:
                self.errors.append(f"{path}: {answer.status} {text[:100]!r}")
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            self.errors.append(f"{path}: {error!r}")
        self.latencies.append(time.perf_counter() - due)


def soak(
    load: Load, minutes: float, process: psutil.Process, sample: Callable[[], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return one record per minute, at least sixteen."""
    count = max(round(minutes), 16)
    begin = time.perf_counter()
    records = []
    used_s = cpu_s(process)
    for number in range(1, count + 1):
        time.sleep(max(begin + number * minutes * 60 / count - time.perf_counter(), 0))
        done, load.latencies = sorted(load.latencies), []
        before, used_s = used_s, cpu_s(process)
        record = {
            "minute": round((time.perf_counter() - begin) / 60, 2),
            "requests": len(done),
            "p50_ms": round(1000 * done[len(done) // 2], 2),
            "p99_ms": round(1000 * done[int(len(done) * 0.99)], 2),
            "errors": len(load.errors),
            "service_ms": round(1000 * (used_s - before) / len(done), 3),
            "service_mb": round(process.memory_info().rss / 1e6, 1),
            "threads": process.num_threads(),
            "files": process.num_fds(),
            "sockets": len(process.net_connections()),
            **sample(),
        }
        records.append(record)
        print(json.dumps(record), file=sys.stderr, flush=True)
    return records


def verdict(records: list[dict[str, Any]], asked: float) -> list[str]:
    """Return a line for each figure that grew from the second quarter to the last, and for other problems."""
    quarter = max(len(records) // 4, 1)
    before, after = records[quarter : 2 * quarter], records[-quarter:]
    problems = [f"{records[-1]['errors']} errors"] if records[-1]["errors"] else []
    sent = sum(record["requests"] for record in records)
    if sent < 0.98 * asked:
        problems.append(f"only {sent} of {asked:g} requests were sent")
    for key in (*GROWTH, *MAY_NOT_GROW):
        typical = min if key in LATENCIES else statistics.median
        old, new = (typical([record[key] for record in part]) for part in (before, after))
        if new > (GROWTH[key] * old if key in GROWTH else old + MAY_NOT_GROW[key]):
            problems.append(f"{key} grew from {old:g} to {new:g}")
    if records[-1]["stream"] > 1.2 * HISTORY_LENGTH:
        problems.append(f"the stream holds {records[-1]['stream']} changes")
    return problems


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of all minutes: totals, and those of the best minute of the last quarter."""
    best = min(records[-max(len(records) // 4, 1) :], key=lambda record: record["p50_ms"])
    return {
        "requests": sum(record["requests"] for record in records),
        "errors": records[-1]["errors"],
        **{key: best[key] for key in ("p50_ms", "p99_ms", "service_ms")},
        "service_mb": records[-1]["service_mb"],
    }


def missing_changes(archive: Path, version: int) -> list[str]:
    """Return a line if the archive lacks some of the changes 1 to `version`."""
    with archive.open() as lines:
        snapshot = json.loads(next(lines))["snapshot"]
        versions = [json.loads(line)["version"] for line in lines]
    if versions == list(range(snapshot["version"] + 1, version + 1)) and snapshot["version"] <= 1:
        return []
    return [f"the archive holds {len(versions)} changes after {snapshot['version']}, of {version}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--rate", type=float, default=200, help="requests per second")
    parser.add_argument("--servers", type=int, default=1000)
    arguments = parser.parse_args()
    for name, value in vars(arguments).items():
        if not 0 < value < float("inf"):
            parser.error(f"--{name} must be a number above 0, got {value:g}")
    with tempfile.TemporaryDirectory() as name, redis_server(None) as url:
        folder = Path(name)
        archive = folder / "history.jsonl"
        store = redis.Redis.from_url(url)

        def sample() -> dict[str, Any]:
            return {
                "redis_mb": round(store.info("memory")["used_memory"] / 1e6, 2),
                "redis_clients": store.info("clients")["connected_clients"],
                "stream": store.xlen("{gpu_manager}:changes"),
                "keys": store.dbsize(),
                "archive_mb": round(archive.stat().st_size / 1e6, 2),
            }

        inventory = folder / "inventory.toml"
        inventory.write_text(INVENTORY.format(count=arguments.servers))
        program = [sys.executable, "-m", "resource_manager.cli", "--store", url]
        subprocess.run([*program, "apply", "--yes", str(inventory)], check=True)
        history = {"GPU_MANAGER_HISTORY_LENGTH": str(HISTORY_LENGTH)}
        with (
            (folder / "service.log").open("w") as log,
            service(url, "--archive", str(archive), log=log, **history) as (address, process),
        ):
            load = Load(address.removeprefix("http://"), arguments.rate)
            try:
                records = soak(load, arguments.minutes, process, sample)
            finally:
                load.stop()
        problems = verdict(records, arguments.rate * arguments.minutes * 60)
        version = int(store.hget("{gpu_manager}:meta", "version"))
        problems += missing_changes(archive, version)
    for problem in [*problems, *(f"first error: {error}" for error in load.errors[:1])]:
        print(problem, file=sys.stderr)
    print(json.dumps({**summary(records), "archived_changes": version, "problems": len(problems)}))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
