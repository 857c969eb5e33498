"""Contention: `python -m benchmarks.contention [CASE …]`, as ratios to the pairs of one redis-py lock.

Every case runs on one embedded Redis, right after the lock was measured on it. A pair is an allocate and a
release. Printed as JSON: pairs per second, their ratio, latencies in seconds over all answers, and the mean
of the slowest client over the mean of all.

- `fit`: 100 clients in 10 processes of 10 threads, which all fit at once.
- `scarce`: the same, six times more asked for than there is, in a closed loop; granted pairs count.
- `many`: 1,000 clients on asyncio in 10 processes, which all fit at once.
- `pending`: one client beside 10,000 pending requests, as a ratio to one with an empty queue.
- `rest`: 50 clients with a token and a connection each, by `wrk`, of a service: requests per second and
  milliseconds. Left out, with a line that says so, where `wrk` is not installed.
- `handover`: 32 clients on 16 places: from a release until the next holder knows, in milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from benchmarks.processes import together
from resource_manager.cli.bench.service import serving
from resource_manager.cli.bench.store import (
    allocate_in_turn,
    interleaved,
    lock_pair,
    open_manager,
    ratio,
    redis_server,
)
from resource_manager.manager.aio import AsyncGPUResourceManager
from resource_manager.manager.manager import GPUResourceManager

PROCESSES = 10
WRK = """
local tokens = { %s }
local threads = 0

function setup(thread)
  threads = threads + 1
  thread:set("number", threads)
end

-- Each thread of wrk has one connection, so that it allocates and releases by turns.
function init(args)
  local headers = { ["Content-Type"] = "application/json", ["Authorization"] = "Bearer " .. tokens[number] }
  local id = '{"task_id": "wrk-' .. number .. '"'
  local body = id .. ', "required_gpus": 1, "required_cpus": 1, "gpu_milli": 250}'
  allocate = wrk.format("POST", "/api/allocate", headers, body)
  release = wrk.format("POST", "/api/release", headers, id .. "}")
  holds = false
end

function request()
  return holds and release or allocate
end

function response()
  holds = not holds
end

function done(summary, latency, requests)
  local errors = summary.errors
  local lost = errors.status + errors.connect + errors.read + errors.write + errors.timeout
  local times = '"p50_ms": %%.2f, "p99_ms": %%.2f'
  io.write(string.format('{"requests_per_s": %%.0f, "errors": %%d, ' .. times .. "}\\n",
    summary.requests / summary.duration * 1e6, lost,
    latency:percentile(50) / 1000, latency:percentile(99) / 1000))
end
"""
"""Program of `wrk` for one connection a thread."""

SERVERS = {"fit": 4, "scarce": 4, "many": 16}


def threads(
    manager: GPUResourceManager, number: int, seconds: float, scarce: bool, clients: int
) -> list[dict[str, Any]]:
    """Run clients on the threads of this process, which share one manager as in a service."""
    # 100 quarters of a GPU fit on 32 GPUs; 100 pairs of GPUs are six times what there is.
    gpus, milli = (2, None) if scarce else (1, 250)

    def client(index: int) -> dict[str, Any]:
        return allocate_in_turn(manager, f"client-{number}-{index}", seconds, gpus, milli)

    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(client, range(clients)))


async def coroutines(manager: AsyncGPUResourceManager, number: int, seconds: float) -> list[dict[str, Any]]:
    """Run a hundred clients as coroutines of this process, each with a fortieth of a GPU."""

    async def client(name: str) -> dict[str, Any]:
        pairs = refused = errors = 0
        latencies_s: list[float] = []
        ends = time.perf_counter() + seconds
        while (before := time.perf_counter()) < ends:
            granted = await manager.allocate_resources(name, 1, 1, gpu_milli=25)
            middle = time.perf_counter()
            latencies_s.append(middle - before)
            if granted is None:
                refused += 1
                continue
            errors += not await manager.release_resources(name)
            latencies_s.append(time.perf_counter() - middle)
            pairs += 1
        return {"pairs": pairs, "refused": refused, "errors": errors, "latencies_s": latencies_s}

    return await asyncio.gather(*(client(f"client-{number}-{i}") for i in range(100)))


def waiters(manager: GPUResourceManager, number: int, seconds: float) -> list[dict[str, Any]]:
    """Run four clients that wait for one of 16 places, hold it for 5 ms and release it; return when."""

    def client(index: int) -> list[dict[str, Any]]:
        name, seen = f"client-{number}-{index}", []
        ends = time.perf_counter() + seconds
        while time.perf_counter() < ends:
            asked_at = time.time()
            lease: Any = manager.submit(name, 2, 1)
            waited = lease["state"] == "WAITING"
            if waited:
                lease = manager.wait(name, 30.0)
            known_at = time.time()
            time.sleep(0.005)
            freed_at = time.time()
            manager.release_resources(name)
            seen.append(
                {
                    "place": (lease["server_name"], *lease["gpu_ids"]),
                    "token": lease["fencing_token"],
                    "granted_at": lease["granted_at"],
                    "waited": waited,
                    "asked_at": asked_at,
                    "known_at": known_at,
                    "freed_at": freed_at,
                }
            )
        return seen

    with ThreadPoolExecutor(4) as pool:
        return [entry for seen in pool.map(client, range(4)) for entry in seen]


def handover(url: str, seconds: float) -> dict[str, Any]:
    """Return the times from the release of a place, as sent and as committed, until its next holder knows."""
    entries = in_processes("handover", url, seconds, 8)
    holders: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for entry in sorted(entries, key=lambda entry: entry["token"]):
        holders.setdefault(tuple(entry["place"]), []).append(entry)
    delays = sorted(
        1000 * (after["known_at"] - before["freed_at"])
        for of_place in holders.values()
        for before, after in pairwise(of_place)
        if after["waited"] and after["asked_at"] < before["freed_at"]
    )
    # The commit of the release is that of the grant, which it makes possible.
    from_commit = sorted(
        1000 * (entry["known_at"] - entry["granted_at"]) for entry in entries if entry["waited"]
    )
    return {
        "clients": 32,
        "handovers": len(delays),
        "p50_ms_from_commit": round(from_commit[len(from_commit) // 2], 2),
        "p99_ms_from_commit": round(from_commit[int(len(from_commit) * 0.99)], 2),
        "per_s": round(len(delays) / seconds),
        "p50_ms": round(delays[len(delays) // 2], 2),
        "p99_ms": round(delays[int(len(delays) * 0.99)], 2),
    }


def child(case: str, url: str, seconds: float, clients: int, number: int) -> None:
    """Begin when the parent says so, which it does once all are ready."""
    manager = open_manager(url, SERVERS.get(case, 4))
    # What a process does once, such as building the checks of a request, is not to be measured.
    manager.allocate_resources(f"warm-{number}", 1, 1, gpu_milli=25)
    manager.release_resources(f"warm-{number}")
    print(flush=True)
    sys.stdin.readline()
    match case:
        case "handover":
            replies = waiters(manager, number, seconds)
        case "many":
            replies = asyncio.run(coroutines(AsyncGPUResourceManager(manager), number, seconds))
        case _:
            replies = threads(manager, number, seconds, case == "scarce", clients)
    print(json.dumps(replies))


def in_processes(
    case: str,
    url: str,
    seconds: float,
    processes: int,
    *,
    clients: int = 10,
    before: Callable[[], object] = int,
) -> list[Any]:
    """Run a case in so many processes, which begin together after `before`; return what their clients tell.

    Of the cases `fit` and `scarce` each process has so many `clients`.
    """
    open_manager(url, SERVERS.get(case, 4)).reset_resources()
    program = [sys.executable, "-m", "benchmarks.contention", "child"]
    replies = together([*program, case, url, str(seconds), str(clients)], processes, before)
    return [client for reply in replies for client in reply]


def contended(case: str, url: str, seconds: float) -> dict[str, Any]:
    """Run a case in `PROCESSES` processes; return its figures."""
    rates: list[list[float]] = []
    clients = in_processes(
        case, url, seconds, PROCESSES, before=lambda: rates.extend(interleaved([lock_pair(url)], 2.0))
    )
    lock_rate = statistics.median(rates[0])
    latencies = sorted(latency for client in clients for latency in client["latencies_s"])
    pairs = sum(client["pairs"] for client in clients)
    mean = statistics.fmean(latencies)
    return {
        "clients": len(clients),
        "lock_pairs_per_s": round(lock_rate),
        "pairs_per_s": round(pairs / seconds),
        "of_lock": round(pairs / seconds / lock_rate, 3),
        "refused": sum(client["refused"] for client in clients),
        "errors": sum(client["errors"] for client in clients),
        "p50_s": round(latencies[len(latencies) // 2], 4),
        "p99_s": round(latencies[int(len(latencies) * 0.99)], 4),
        "max_s": round(latencies[-1], 4),
        "slowest_client_of_mean": round(
            max(statistics.fmean(client["latencies_s"]) for client in clients) / mean, 2
        ),
    }


def pending(url: str, seconds: float) -> dict[str, Any]:
    """Measure one client's pairs on a cluster with 10,000 pending requests, beside one with none."""

    def pair_of(servers: int, waiting: int) -> Callable[[], object]:
        manager = open_manager(url, servers)
        manager.reset_resources()
        # No pending request, which asks for a whole server, ever fits.
        for name, gpus in [*((f"holder-{i}", 8) for i in range(servers - 1)), ("beside", 4)]:
            manager.allocate_resources(name, gpus, 1)
        for i in range(waiting):
            manager.submit(f"waits-{i}", 8, 60)

        def pair() -> None:
            granted = manager.allocate_resources("bench", 2, 1, priority=1)
            if granted is None or not manager.release_resources("bench"):
                raise RuntimeError("the place that is kept for the benchmark was taken")

        return pair

    empty, long = interleaved([pair_of(4, 0), pair_of(5, 10_000)], 2 * seconds)
    return {
        "pairs_per_s_empty": round(statistics.median(empty)),
        "pairs_per_s_10000": round(statistics.median(long)),
        "ratio": round(ratio(long, empty), 3),
    }


def rest(url: str, seconds: float) -> dict[str, Any]:
    """Measure the service with a driver in C, which takes next to no processor time from it."""
    with serving(url, 4) as (service, tokens), tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "pairs.lua"
        script.write_text(WRK % ", ".join(f'"{token}"' for token in tokens))
        clients = str(len(tokens))
        command = ["wrk", "-t", clients, "-c", clients, "-d", f"{seconds:.0f}s", "-s", str(script), service]
        for _ in range(2):  # imports, connections and the first snapshot are not to be measured
            answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    figures: dict[str, Any] = json.loads(answer.splitlines()[-1])
    return {"clients": len(tokens), **figures}


OTHERS = {"pending": pending, "handover": handover, "rest": rest}


@click.command()
@click.argument("cases", nargs=-1)
@click.option("--seconds", default=5.0, show_default=True)
def main(cases: Sequence[str], seconds: float) -> None:
    if cases[:1] == ("child",):
        child(cases[1], cases[2], float(cases[3]), int(cases[4]), int(cases[5]))
        return
    figures: dict[str, Any] = {}
    with redis_server(None) as url:
        for case in cases or (*SERVERS, *OTHERS):
            if case == "rest" and shutil.which("wrk") is None:
                print("rest is left out: wrk is not installed (Debian: apt-get install wrk)", file=sys.stderr)
                continue
            figures[case] = OTHERS[case](url, seconds) if case in OTHERS else contended(case, url, seconds)
            print(case, figures[case], file=sys.stderr)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
