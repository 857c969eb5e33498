"""What others feel while one caller floods a service: renew, release and allocate under each flood.

It starts a Redis server and the service with 200 servers, and prints the table of docs/security.md, in
milliseconds. `--seconds` is how long each flood is measured.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.processes import service
from resource_manager import GPUResourceManager, Settings
from resource_manager.cli.bench.store import redis_server
from resource_manager.core.models import Gpu, Node
from resource_manager.rest import tokens
from resource_manager.rest.assemble import persistence_of
from resource_manager.rest.tokens import Role

SERVERS = 200
CONNECTIONS = 24
GANGS = 800
IN_VAIN = 500
LEASES = 300
WARM_UP_S = 1.0
CALLS = ("renew", "release", "allocate")


@dataclass(frozen=True, slots=True)
class Attack:
    """Calls that each connection of the attacker repeats, as a user or as a reader."""

    name: str
    role: Role
    connections: int
    call: Callable[[httpx.Client, int], httpx.Response]
    gangs: int = 0
    """Gangs that wait in the queue."""
    in_vain: int = 0
    """Requests in the queue that would preempt, each of another kind, and find nobody whom they may."""


def a_batch(http: httpx.Client, number: int) -> httpx.Response:
    requests = [
        {"task_id": f"eve-{number}-{index}", "required_gpus": 1 + index % 8, "required_cpus": 1}
        for index in range(1000)
    ]
    return http.post("/api/allocate/batch", json={"requests": requests})


def the_queue(http: httpx.Client, number: int) -> httpx.Response:
    return http.get("/api/queue?limit=1000")


def an_explanation(http: httpx.Client, number: int) -> httpx.Response:
    return http.get("/api/explain?required_gpus=8&required_cpus=1")


def one_more_in_vain(http: httpx.Client, number: int) -> httpx.Response:
    http.post("/api/submit", json=in_vain(f"eve-{number}", number))
    return http.post("/api/cancel", json={"task_id": f"eve-{number}"})


def all_leases(http: httpx.Client, number: int) -> httpx.Response:
    return http.get("/api/leases?limit=1000")


ATTACKS = (
    Attack("nobody", Role.READER, 0, the_queue),
    Attack(f"batches of 1,000 over {CONNECTIONS} connections", Role.USER, CONNECTIONS, a_batch),
    Attack(f"the queue of {GANGS} gangs, 16 readers", Role.READER, 16, the_queue, GANGS),
    Attack(f"explain beside {GANGS} gangs, 16 readers", Role.READER, 16, an_explanation, GANGS),
    Attack("all leases, 16 readers", Role.READER, 16, all_leases),
    Attack(
        f"submit and cancel beside {IN_VAIN} in vain, {CONNECTIONS} connections",
        Role.USER,
        CONNECTIONS,
        one_more_in_vain,
        in_vain=IN_VAIN,
    ),
)


class Service:
    """The service in a process of its own, on a Redis server of its own."""

    def __init__(self, stack: ExitStack) -> None:
        store = stack.enter_context(redis_server(None))
        self._kept = persistence_of(Settings(store=store)).tokens
        self._made = 0
        tokens.create(self._kept, "root", Role.OPERATOR)
        GPUResourceManager.from_url(store, inventory=inventory()).close()
        self.url, _ = stack.enter_context(service(store))

    def token(self, name: str, role: Role) -> str:
        return tokens.create(self._kept, name, role)

    def client(self, name: str, role: Role, timeout_s: float = 60.0) -> httpx.Client:
        return client(self.url, self.token(name, role), timeout_s)

    @contextmanager
    def attacked(self, attack: Attack) -> Iterator[None]:
        """Run the attack inside, from another process."""
        self._made += 1
        token = self.token(f"eve-{self._made}", attack.role)
        index = ATTACKS.index(attack)
        process = multiprocessing.get_context("spawn").Process(target=flood, args=(self.url, token, index))
        process.start()
        try:
            time.sleep(WARM_UP_S)
            yield
        finally:
            process.kill()
            process.join()


def client(url: str, token: str, timeout_s: float) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=timeout_s)


def inventory() -> list[Node]:
    gpus = tuple(Gpu(number, "H100") for number in range(8))
    return [
        Node(f"gpu-{number}", number, {"cpus": 64}, gpus, address=f"10.0.0.{number}")
        for number in range(SERVERS)
    ]


def flood(url: str, token: str, index: int) -> None:
    """Repeat the call of that attack over all its connections, whatever the answers are."""
    attack = ATTACKS[index]

    def repeat(number: int) -> None:
        with client(url, token, 60.0) as http:
            while True:
                with suppress(httpx.HTTPError):
                    attack.call(http, number)

    with ThreadPoolExecutor(attack.connections or 1) as threads:
        list(threads.map(repeat, range(attack.connections)))


def lease(http: httpx.Client, count: int) -> list[tuple[str, int]]:
    """Allocate leases; return their ids and fencing tokens."""
    leases = []
    for number in range(count):
        body = {"task_id": f"ada-{number}", "required_gpus": 1, "required_cpus": 1}
        answer = http.post("/api/allocate", json=body).raise_for_status().json()
        leases.append((answer["task_id"], answer["fencing_token"]))
    return leases


def measure(http: httpx.Client, leases: list[tuple[str, int]], seconds: float) -> dict[str, list[float]]:
    """Return the seconds that each call of a caller took: three renewals, a release, a request for another.

    Behind a queue, or once the attacker holds all GPUs, the request is refused: it is measured all the same.
    """
    taken: dict[str, list[float]] = {call: [] for call in CALLS}

    def timed(call: str, **body: Any) -> httpx.Response:
        began = time.perf_counter()
        answer = http.post(f"/api/{call}", json=body)
        taken[call].append(time.perf_counter() - began)
        return answer

    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at and len(leases) > 1:
        task_id, token = leases.pop()
        for each, its_token in ((task_id, token), leases[0], leases[-1]):
            timed("renew", task_id=each, fencing_token=its_token).raise_for_status()
        timed("release", task_id=task_id, fencing_token=token).raise_for_status()
        answer = timed("allocate", task_id=task_id, required_gpus=1, required_cpus=1)
        if answer.status_code == 200:
            leases.insert(0, (task_id, answer.json()["fencing_token"]))
    return taken


def queue_gangs(http: httpx.Client, count: int) -> None:
    """Queue gangs that wait for each other's runtimes, of many sizes."""
    for number in range(count):
        body = {"task_id": f"gang-{number}", "required_gpus": 8, "required_cpus": 1}
        body |= {"nodes": 2 + number % 50, "expected_runtime": 3600 + number}
        http.post("/api/submit", json=body).raise_for_status()


def in_vain(task_id: str, number: int) -> dict[str, Any]:
    """Return a request for a whole server, which has a lease that is inside its team's guarantee."""
    body = {"task_id": task_id, "required_gpus": 8, "required_cpus": 1 + number // SERVERS}
    return body | {"server": number % SERVERS, "team": "owed"}


def hold(root: httpx.Client) -> None:
    """Hold six GPUs of each server for a team inside its guarantee; another is owed the rest."""
    teams = {"held": {"guaranteed": 6 * SERVERS}, "owed": {"guaranteed": 2 * SERVERS}}
    rules = {"preemption": True, "min_runtime": 0, "preemption_delay": 0, "teams": teams}
    root.put("/api/cluster", json={"sections": rules}).raise_for_status()
    held = {"task_id": "held", "required_gpus": 6, "required_cpus": 8, "nodes": SERVERS, "team": "held"}
    root.post("/api/allocate", json={**held, "expected_runtime": 7200}).raise_for_status()


def fill_queue(root: httpx.Client, attack: Attack, most: int = IN_VAIN + GANGS) -> None:
    """Queue what the attack needs, or at most so many of each."""
    queue_gangs(root, min(attack.gangs, most))
    for number in range(min(attack.in_vain, most)):
        root.post("/api/submit", json=in_vain(f"vain-{number}", number)).raise_for_status()


def quantile(taken: list[float], part: float) -> float:
    """Return the quantile in milliseconds."""
    return 1000 * sorted(taken)[min(int(part * len(taken)), len(taken) - 1)]


def row(attack: Attack, seconds: float) -> str:
    """Measure one attack on a fresh service; return its row of the table."""
    with ExitStack() as stack:
        flooded = Service(stack)
        with flooded.client("root-2", Role.OPERATOR) as root, flooded.client("ada", Role.USER) as ada:
            hold(root)
            leases = lease(ada, LEASES)
            fill_queue(root, attack)
            with flooded.attacked(attack):
                taken = measure(ada, leases, seconds)
    figures = [f"{quantile(taken[call], part):.0f}" for call in CALLS for part in (0.5, 0.99)]
    return f"| {attack.name} | {' | '.join(figures)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    seconds = parser.parse_args().seconds
    print("| flood | " + " | ".join(f"{call} {part}" for call in CALLS for part in ("p50", "p99")) + " |")
    print("|---" * 7 + "|")
    for attack in ATTACKS:
        print(row(attack, seconds), flush=True)


if __name__ == "__main__":
    main()
