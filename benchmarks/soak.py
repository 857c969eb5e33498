"""A soak of the service: `python benchmarks/soak.py --minutes 60 --rate 200`.

Serves 1,000 servers from a Redis of its own and sends allocate and release requests at an even rate. Each
minute it writes down latencies, memory of service and Redis, and the length of the stream of changes; at
the end the last quarter must look like the second (the first one fills caches). Exits with 1 if it does not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import psutil
import redis

from resource_manager.bench import redis_server

HISTORY_LENGTH = 5_000
INVENTORY = '[[servers]]\nname = "server-{id}"\ncount = 1000\ncpus = 64\ngpus = 8\n'
GROWTH = 1.15
"""The last quarter may use this much more memory, or time, than the second."""


@contextmanager
def service(store_url: str, folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """`gpu-manager serve` on a free port: its address and its process."""
    inventory = folder / "inventory.toml"
    inventory.write_text(INVENTORY)
    process = subprocess.Popen(
        [str(Path(sys.executable).parent / "gpu-manager"), "serve", "--port", "0", "--log-format", "json"],
        env={
            **os.environ,
            "GPU_MANAGER_STORE": store_url,
            "GPU_MANAGER_INVENTORY": str(inventory),
            "GPU_MANAGER_HISTORY_LENGTH": str(HISTORY_LENGTH),
        },
        stderr=subprocess.PIPE,
        text=True,
    )
    log = (folder / "service.log").open("w")
    try:
        assert process.stderr is not None
        for line in process.stderr:
            entry = json.loads(line)
            if "address" in entry:
                break
        else:
            raise SystemExit("the service did not start")
        drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=log)
        try:
            yield entry["address"], psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(10)
            drain.wait(10)
    finally:
        process.kill()
        log.close()


async def soak(url: str, rate: float, minutes: float, sample: Any) -> list[dict[str, Any]]:
    """Sends requests on schedule, late ones not left out; one record a minute."""
    records: list[dict[str, Any]] = []
    latencies: list[float] = []
    errors: list[str] = []
    numbers = count()
    limits = httpx.Limits(max_connections=50)
    async with httpx.AsyncClient(base_url=url, timeout=30, limits=limits) as client:

        async def call(path: str, body: dict[str, Any], due: float) -> None:
            try:
                answer = await client.post(path, json=body)
                if answer.status_code != 200:
                    errors.append(f"{path}: {answer.status_code} {answer.text[:100]}")
            except httpx.HTTPError as error:
                errors.append(f"{path}: {error!r}")
            latencies.append(time.perf_counter() - due)

        async def pair(due: float) -> None:
            task_id = f"soak-{next(numbers)}"
            await call("/api/allocate", {"task_id": task_id, "required_gpus": 2, "required_cpus": 4}, due)
            await asyncio.sleep(0.5)
            await call("/api/release", {"task_id": task_id}, time.perf_counter())

        pending: set[asyncio.Task[None]] = set()
        started = time.perf_counter()
        for minute in range(round(minutes)):
            for tick in range(round(60 * rate / 2)):
                due = started + minute * 60 + tick * 2 / rate
                await asyncio.sleep(max(due - time.perf_counter(), 0))
                task = asyncio.create_task(pair(due))
                pending.add(task)
                task.add_done_callback(pending.discard)
            done = sorted(latencies)
            record = {
                "minute": minute + 1,
                "requests": len(done),
                "p50_ms": round(1000 * done[len(done) // 2], 2),
                "p99_ms": round(1000 * done[int(len(done) * 0.99)], 2),
                "errors": len(errors),
                **sample(),
            }
            records.append(record)
            print(json.dumps(record), file=sys.stderr, flush=True)
            latencies.clear()
        await asyncio.gather(*pending)
    if errors:
        print("first error:", errors[0], file=sys.stderr)
    return records


def verdict(records: list[dict[str, Any]]) -> list[str]:
    """What grew from the second quarter to the last, in words."""
    quarter = max(len(records) // 4, 1)
    before, after = records[quarter : 2 * quarter] or records[:1], records[-quarter:]
    problems = [f"{records[-1]['errors']} errors"] if records[-1]["errors"] else []
    for key in ("service_mb", "redis_mb", "p50_ms"):
        old, new = (statistics.median(record[key] for record in part) for part in (before, after))
        if new > GROWTH * old:
            problems.append(f"{key} grew from {old:g} to {new:g}")
    if records[-1]["stream"] > 2 * HISTORY_LENGTH:
        problems.append(f"the stream holds {records[-1]['stream']} changes")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--rate", type=float, default=200, help="requests a second")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        redis_server(None) as url,
        service(url, Path(folder)) as (
            address,
            process,
        ),
    ):
        store = redis.Redis.from_url(url)

        def sample() -> dict[str, Any]:
            return {
                "service_mb": round(process.memory_info().rss / 1e6, 1),
                "redis_mb": round(store.info("memory")["used_memory"] / 1e6, 2),
                "stream": store.xlen("{gpu_manager}:changes"),
                "keys": store.dbsize(),
            }

        records = asyncio.run(soak(address, arguments.rate, arguments.minutes, sample))
    problems = verdict(records)
    print(json.dumps({"minutes": records, "problems": problems}))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
