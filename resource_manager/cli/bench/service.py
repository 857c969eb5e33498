"""Benchmark of `gpu-manager bench --http`: a real service on a real Redis, called over HTTP."""

from __future__ import annotations

import http.client
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from resource_manager.cli.bench.console import in_chromium
from resource_manager.cli.bench.store import NAMESPACE, redis_server
from resource_manager.errors import ResourceManagerError

CLIENTS = 50
PENDING = 200
START_S = 60.0

Call = Callable[[str, str, Any], bytes]

INVENTORY = """[[servers]]
name = "gpu-server-{{id}}"
count = {count}
gpus = 8
cpus = 64
"""


class BenchError(ResourceManagerError):
    """Failure of the service under test to start, or an error in its answer."""


def run(redis_url: str | None = None, *, seconds: float = 3.0, servers: int = 1000) -> dict[str, Any]:
    """Measure latency and throughput of the service at 4 servers, and its slowest pages at `servers`.

    Latencies are those of a client on this machine, in milliseconds, its own work included. The console
    is measured in a browser if Chromium and Playwright are installed.
    """
    results: dict[str, Any] = {}
    with redis_server(redis_url) as redis:
        with serving(redis, 4) as (url, tokens):
            results["one_client"] = one_client(url, tokens[0], seconds)
            results["clients"] = many_clients(url, tokens, seconds)
        with serving(redis, servers) as (url, tokens):
            results["many_servers"] = many_servers(url, tokens[0], servers)
    return results


def one_client(url: str, token: str, seconds: float) -> dict[str, Any]:
    """Measure `POST /api/allocate`; the release after each call is not counted."""
    latencies: list[float] = []
    with caller(url, token) as call:
        for i in range(30):  # connections, imports and the first snapshot are not to be measured
            _pair(call, f"warm-up-{i}")
        ends = time.perf_counter() + seconds
        while time.perf_counter() < ends:
            latencies.append(_pair(call, f"one-{len(latencies)}"))
    return {"allocations": len(latencies), **_percentiles(latencies)}


def many_clients(url: str, tokens: list[str], seconds: float) -> dict[str, Any]:
    """Measure clients with a token and a connection each that allocate and release a quarter of a GPU."""
    latencies: list[float] = []
    errors: list[str] = []
    guard = threading.Lock()
    start = threading.Barrier(len(tokens) + 1)

    def client(number: int, token: str) -> None:
        payload = {"task_id": f"many-{number}", "required_gpus": 1, "required_cpus": 1, "gpu_milli": 250}
        own: list[float] = []
        start.wait()
        ends = time.perf_counter() + seconds
        try:
            with caller(url, token) as call:
                while (began := time.perf_counter()) < ends:
                    call("POST", "/api/allocate", payload)
                    middle = time.perf_counter()
                    call("POST", "/api/release", {"task_id": payload["task_id"]})
                    own += [middle - began, time.perf_counter() - middle]
        except (BenchError, OSError, http.client.HTTPException) as error:
            with guard:
                errors.append(f"{type(error).__name__}: {error}")
        with guard:
            latencies.extend(own)

    threads = [threading.Thread(target=client, args=item) for item in enumerate(tokens)]
    for thread in threads:
        thread.start()
    start.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - began
    return {
        "clients": len(tokens),
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
        "requests_per_s": round(len(latencies) / elapsed),
        **_percentiles(latencies),
    }


def many_servers(url: str, token: str, servers: int) -> dict[str, Any]:
    """Measure the summary and the console with all GPUs of so many servers allocated."""
    with caller(url, token) as call:
        figures = _many_servers(call, servers)
        return figures | in_chromium(url, token, lambda task_id: _release(call, task_id))


def _many_servers(call: Call, servers: int) -> dict[str, Any]:
    for start in range(0, 2 * servers, 500):
        requests = [
            {"task_id": f"t{i}", "required_gpus": 4, "required_cpus": 8} for i in range(start, start + 500)
        ]
        call("POST", "/api/allocate/batch", {"requests": requests})
    for i in range(20):
        call("POST", "/api/submit", {"task_id": f"w{i}", "required_gpus": 8, "required_cpus": 8})

    def timed(path: str) -> float:
        call("GET", path, None)
        return round(1000 * statistics.median(_timed(lambda: call("GET", path, None)) for _ in range(15)), 1)

    def each_pending() -> float:
        """Measure how long the answer takes how a pending request stands, for which each `run` asks."""
        for i in range(20, PENDING):
            call("POST", "/api/submit", {"task_id": f"w{i}", "required_gpus": 8, "required_cpus": 8})
        paths = [f"/api/task?task_id=w{i}&exact=true" for i in range(PENDING)]
        took = [_timed(partial(call, "GET", path, None)) for path in 3 * paths]
        for i in range(20, PENDING):
            call("POST", "/api/cancel", {"task_id": f"w{i}"})
        return round(1000 * statistics.median(took), 1)

    return {
        "servers": servers,
        "leases": 2 * servers,
        "status_ms": timed("/api/status"),
        "queue_ms": timed("/api/queue"),
        "metrics_ms": timed("/metrics"),
        "console_ms": timed("/"),
        "pending_ms": each_pending(),
    }


@contextmanager
def caller(url: str, token: str) -> Iterator[Call]:
    """Yield `call(method, path, body)` on one open connection; it raises `BenchError` unless it gets 200."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}

    def call(method: str, path: str, body: Any) -> bytes:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise BenchError(
                f"{method} {path} gave {response.status}: {answer[:200].decode(errors='replace')}"
            )
        return answer

    with closing(connection):
        yield call


@contextmanager
def serving(redis: str, servers: int) -> Iterator[tuple[str, list[str]]]:
    """Run `gpu-manager serve` as a user starts it, in its own namespace; yield its address and tokens."""
    separator = "&" if "?" in redis else "?"
    store = f"{redis}{separator}namespace={NAMESPACE}_http_{servers}"
    with tempfile.TemporaryDirectory(prefix="gpu-manager-bench-") as folder:
        inventory = Path(folder) / "servers.toml"
        inventory.write_text(INVENTORY.format(count=servers), encoding="utf-8")
        base = [sys.executable, "-m", "resource_manager.cli", "--store", store]
        for command in (["reset", "--yes"], ["apply", "--yes", str(inventory)]):
            done = subprocess.run([*base, *command], capture_output=True, text=True)
            if done.returncode:
                raise BenchError(f"gpu-manager {command[0]}: {done.stderr.strip().removeprefix('Error: ')}")
        tokens = _tokens(store)
        port = _free_port()
        with (Path(folder) / "serve.log").open("w+") as log:
            # What allocates GPUs of a thousand servers at once counts as so many calls.
            limits = ["--threads", "8", "--rate-limit", "100000/second"]
            process = subprocess.Popen(
                [*base, "serve", "--port", str(port), "--log-level", "warning", *limits], stderr=log
            )
            url = f"http://127.0.0.1:{port}"
            try:
                _wait_for(url, process, log)
                yield url, tokens
            finally:
                process.terminate()
                process.wait(timeout=20)


def _tokens(store: str) -> list[str]:
    from resource_manager.rest.assemble import persistence_of
    from resource_manager.rest.tokens import Role, create
    from resource_manager.settings import Settings

    kept = persistence_of(Settings(store=store)).tokens
    return [create(kept, f"bench-{i}", Role.USER) for i in range(CLIENTS)]


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Any) -> None:
    ends = time.monotonic() + START_S
    while time.monotonic() < ends and process.poll() is None:
        try:
            with caller(url, "") as call:
                call("GET", "/healthz", None)
            return
        except (OSError, BenchError, http.client.HTTPException):
            time.sleep(0.1)
    log.seek(0)
    raise BenchError(f"the service did not start: {log.read()[-300:]}")


def _pair(call: Call, task_id: str) -> float:
    """Return the seconds of one allocation; the release after it is not counted."""
    payload = {"task_id": task_id, "required_gpus": 4, "required_cpus": 32}
    seconds = _timed(lambda: call("POST", "/api/allocate", payload))
    _release(call, task_id)
    return seconds


def _release(call: Call, task_id: str) -> None:
    call("POST", "/api/release", {"task_id": task_id})


def _timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _percentiles(latencies: list[float]) -> dict[str, float]:
    ordered = sorted(latencies) or [0.0]
    return {
        "p50_ms": round(1000 * ordered[len(ordered) // 2], 2),
        "p99_ms": round(1000 * ordered[int(len(ordered) * 0.99)], 2),
    }


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
