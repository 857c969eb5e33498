"""Speed of stores and locks, compared with redis-py's own lock or a bare compare-and-set."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import redis

from benchmarks.databases import measure_all
from resource_manager.cli.bench.store import redis_server
from resource_manager.core.cluster import ClusterState, Snapshot
from resource_manager.core.models import Gpu, Node, Request
from resource_manager.errors import SettingsError, StaleStateError
from resource_manager.scheduling import allocator, lease_steps
from resource_manager.scheduling.placement.policies import get_policy
from resource_manager.scheduling.queue.orders import fifo
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from resource_manager.storage import MemoryStore, Store, open_store
from resource_manager.storage.locks import Lock
from resource_manager.storage.redis.client import RedisClient
from resource_manager.storage.redis.lock import RedisLock

POLICY = get_policy("first_fit")


def inventory(servers: int) -> Snapshot:
    gpus = tuple(Gpu(k) for k in range(8))
    nodes = tuple(Node(f"gpu-server-{i}", i, {"cpus": 64}, gpus) for i in range(servers))
    return Snapshot(version=0, last_fencing_token=0, sequence=0, nodes=nodes)


class Client:
    """Minimal client of allocator and store, without the costs of a manager."""

    def __init__(self, store: Store, servers: int) -> None:
        self.store = store
        store.initialise(inventory(servers))
        self.replica = self.fresh(None)

    def fresh(self, replica: ClusterState | None) -> ClusterState:
        cluster = self.store.refresh(replica)
        assert cluster is not None
        return cluster

    def change(self, step: Callable[[float], list[Any]], lock: Lock | None = None) -> None:
        now = self.store.now()
        changes = step(now)
        self.store.commit(self.replica.version, changes, now=now, lock=lock)
        for change in changes:
            self.replica.apply(change)

    def pair(self, task_id: str) -> None:
        request = Request(task_id, 2, resources={"cpus": 8}, ttl_s=3600.0)
        self.contended(
            lambda now: allocator.allocate(self.replica, request, SchedulingPass(POLICY, fifo, now))
        )
        self.contended(lambda now: lease_steps.release(self.replica, task_id, now))

    def contended(self, step: Callable[[float], list[Any]]) -> None:
        try:
            self.change(step)
            return
        except StaleStateError:
            pass
        lock = self.store.lock()
        assert lock.acquire(60)
        self.replica = self.fresh(self.replica)
        self.change(step, lock)
        lock.release()


def rate(step: Callable[[int], Any], seconds: float) -> float:
    """Return the best rate per second over rounds of a tenth of the time."""
    best, i, end = 0.0, 0, time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        count = 0
        while time.perf_counter() - begin < seconds / 10:
            step(i := i + 1)
            count += 1
        best = max(best, count / (time.perf_counter() - begin))
    return best


def contention(url: str, clients: int, seconds: float) -> dict[str, float]:
    """Measure many threads on one state, each with its own client."""
    latencies: list[float] = []
    errors: list[BaseException] = []
    end = time.perf_counter() + seconds

    def work(name: int) -> None:
        try:
            with closing(open_store(url)) as store:
                client, i = Client(store, 64), 0
                while time.perf_counter() < end:
                    begin = time.perf_counter()
                    client.pair(f"{name}-{(i := i + 1)}")
                    latencies.append(time.perf_counter() - begin)
        except BaseException as error:
            errors.append(error)

    begin = time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        list(threads.map(work, range(clients)))
    took = time.perf_counter() - begin
    latencies.sort()
    return {
        "pairs_per_s": len(latencies) / took,
        "pair_p50_s": latencies[len(latencies) // 2],
        "pair_p99_s": latencies[int(len(latencies) * 0.99)],
        "errors": len(errors),
    }


def measure(url: str, seconds: float) -> dict[str, Any]:
    redis_client = RedisClient.from_url(url)
    bare = redis_client.driver.lock("bare", timeout=60)
    ours = RedisLock(redis_client, "bench")
    result: dict[str, Any] = {}

    def bare_pair(_: int) -> None:
        bare.acquire()
        bare.release()

    def our_pair(_: int) -> None:
        ours.acquire(10)
        ours.release()

    result["redis_py_lock_pairs_per_s"] = yardstick = rate(bare_pair, seconds)
    result["our_lock_ratio"] = rate(our_pair, seconds) / yardstick
    for servers in (4, 10_000):
        with closing(open_store(f"{url}?namespace=bench{servers}")) as store:
            client = Client(store, servers)
            result[f"redis_{servers}_servers_ratio"] = (
                rate(lambda i: client.pair(f"t{i}"), seconds) / yardstick  # noqa: B023
            )
            begin = time.perf_counter()
            client.fresh(None)
            result[f"redis_{servers}_servers_full_read_s"] = time.perf_counter() - begin
    memory = Client(MemoryStore(), 4)
    result["memory_4_servers_pairs_per_s"] = rate(lambda i: memory.pair(f"t{i}"), seconds)
    result["threads_100"] = contention(f"{url}?namespace=contention", 100, 4 * seconds)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="Redis to use; default: an embedded one")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each measurement")
    options = parser.parse_args()
    if not options.seconds > 0:
        parser.error(f"--seconds must be above 0, got {options.seconds:g}")
    if options.url:
        try:
            print(json.dumps(measure(options.url, options.seconds), indent=2))
        except (SettingsError, redis.RedisError) as error:
            parser.error(str(error))
        return
    with redis_server(None) as url:
        figures = measure(url, options.seconds)
        print(json.dumps({**figures, "databases": measure_all(options.seconds)}, indent=2))


if __name__ == "__main__":
    main()
