"""One process that allocates, queues, renews and releases at random, and writes down what it was told."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from resource_manager.core.changes import Outcome
from resource_manager.core.models import Node
from resource_manager.core.teams import Team, Teams
from resource_manager.errors import LeaseNotFoundError, ResourceManagerError
from resource_manager.manager.cluster_file.sections import ClusterForm
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.manager.results import ReleaseResult
from resource_manager.scheduling.preemption.requeueing import restarts_of
from tests.faults.access_paths import ACCESS_PATHS
from tests.shifted_clock import time_shifted_by

TTL_S = 2.0
SERVERS = 3
LOCK_TIMEOUT_S = 5.0
ALL_CHANGES = 1_000_000
SQL = ("postgresql://", "mysql://", "sqlite://")

Answer = dict[str, Any]


def inventory() -> tuple[Node, ...]:
    """The servers of a run; with an address each takes members of gangs."""
    return tuple(replace(node, address=f"10.0.0.{node.server_id + 1}") for node in default_inventory(SERVERS))


RULES = Teams(
    (Team("t0", 16, min_runtime_s=0.2), Team("t1", 4, min_runtime_s=0.2)),
    preemption=True,
    min_runtime_s=0.2,
    preemption_delay_s=0.0,
)
"""Rules of the workers' teams, where a run has preemption."""


FLOOD = 100
"""The requests in a batch of a flood."""


def flood_of(slot: int) -> dict[str, dict[str, Any]]:
    """Return the demands of a flood by task: a few for what may be free, the others for all there is."""
    small, all_there_is = {"gpus": 2, "cpus": 4}, {"gpus": 8, "cpus": 4, "nodes": SERVERS}
    common = {"team": f"t{slot % 2}"}
    return {f"f{slot}-{i}": (small if i < 3 else all_there_is) | common for i in range(FLOOD)}


def shape_of(slot: int, number: int) -> dict[str, Any]:
    """The demand of a slot's task, the same in each of its workers: every third one is a gang."""
    common = {"cpus": 4, "team": f"t{slot % 2}", "priority": number, "preempt_grace": TTL_S / 2}
    if number < 2:
        return {"gpus": 2 + (slot + number) % 5, **common}
    spread = "pack" if slot % 2 else "servers"
    return {"gpus": 2 + slot % 3, "nodes": 2 + slot // 2 % 2, "spread": spread, **common}


@dataclass(frozen=True)
class Assignment:
    """Orders of a worker, all plain values, so that another version can read them.

    `store` is a URL, or with `services` the addresses to ask instead; `redis_url` goes with airflow://.
    `lock_life_s` too. `access_path` leads to the manager there; `halts_at` is a commit point, the number
    of the commit and how long it sleeps there (0: it dies); `netns` a network namespace to enter; with
    `preemption` it waits in the queue more often; if it `keeps` its leases, it seldom releases one; with
    `floods` it sends batches and reads the queue. `clock` is the file of a shifted clock of this machine.
    """

    slot: int
    seed: int
    store: str
    record: str
    stop: str
    halts: str
    services: tuple[str, ...] = ()
    redis_url: str = ""
    lock_life_s: float = 0.0
    access_path: str = "threads"
    bug: str = ""
    halts_at: tuple[str, int, float] | None = None
    netns: str = ""
    preemption: bool = False
    keeps: bool = False
    floods: bool = False
    clock: str = ""


class Recorder:
    """Lines of JSON that survive a kill: each is written in one system call."""

    def __init__(self, path: str, slot: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._slot = slot
        self._count = count(1)

    def begin(self, kind: str, task_id: str, **details: Any) -> str:
        operation = f"{self._slot}.{os.getpid()}.{next(self._count)}"
        self._write(operation=operation, kind=kind, task_id=task_id, begin=time.monotonic(), **details)
        return operation

    def end(self, operation: str, **outcome: Any) -> None:
        self._write(operation=operation, end=time.monotonic(), **outcome)

    def _write(self, **values: Any) -> None:
        os.write(self._file, json.dumps(values).encode() + b"\n")


# ---- what is asked, and what the answer means ----


def _granted(view: dict[str, Any]) -> Answer:
    return {
        "result": "granted",
        "expires_at": view["expires_at"],
        "preempted": view["preempted_by"] is not None,
        "restarts": restarts_of(view["labels"]),
        **_lease(view),
    }


def _lease(view: dict[str, Any]) -> Answer:
    keys = ("rank", "server_name", "gpu_ids", "port")
    members = [{key: member[key] for key in keys} for member in view["members"]]
    return {"task_id": view["task_id"], "fencing_token": view["fencing_token"], "members": members}


def allocate(client: Any, task_id: str, gpus: int, cpus: int, **gang: Any) -> Answer:
    view = client.allocate_resources(task_id, gpus, cpus, **gang)
    return {"result": "none"} if view is None else _granted(view)


def allocate_batch(client: Any, shapes: dict[str, dict[str, Any]]) -> list[Answer]:
    views = client.allocate_batch([{"lease_id": name, **shape} for name, shape in shapes.items()])
    return [{"result": "none"} if view is None else _granted(view) for view in views]


def submit(client: Any, task_id: str, gpus: int, cpus: int, **gang: Any) -> Answer:
    view = client.submit(task_id, gpus, cpus, **gang)
    return {"result": "waiting"} if view["state"] == "WAITING" else _granted(view)


def status(client: Any, task_id: str) -> Answer:
    view = client.status_of(task_id)
    if view is None:
        return {"result": "absent"}
    return {"result": "waiting"} if view["state"] == "WAITING" else _granted(view)


def cancel(client: Any, task_id: str) -> Answer:
    return {"result": "cancelled" if client.cancel(task_id) else "not waiting"}


def renew(client: Any, task_id: str, fencing_token: int) -> Answer:
    view = client.renew(task_id, fencing_token=fencing_token)
    preempted = view["preempted_by"] is not None
    return {"result": "renewed", "expires_at": view["expires_at"], "preempted": preempted}


def release(client: Any, task_id: str, fencing_token: int, outcome: str = "") -> Answer:
    released = client.release_resources(task_id, fencing_token=fencing_token, outcome=outcome)
    return {"result": "released" if released else "gone"}


def release_members(client: Any, task_id: str, fencing_token: int, ranks: list[int]) -> Answer:
    done = client.release_members(task_id, ranks, fencing_token=fencing_token)
    return {"result": "released" if done == ReleaseResult.RELEASED else "gone"}


def leases(client: Any, task_id: str) -> Answer:
    return {"result": "listed", "leases": [_lease(view) for view in client.leases()]}


def queue(client: Any, task_id: str) -> Answer:
    return {"result": "read", "length": len(client.queue())}


def apply(client: Any, task_id: str, number: int) -> Answer:
    """Apply settings that bear the number; the other ones stay as the run began."""
    settings = {"lease_ttl": TTL_S, "confirmation_window": TTL_S, "idle_after": number}
    client.apply(ClusterForm.model_validate({"cluster": settings}))
    return {"result": "applied"}


CALLS: dict[str, Callable[..., Answer]] = {
    call.__name__: call
    for call in (allocate, submit, status, cancel, renew, release, release_members, leases, queue, apply)
}


class Worker:
    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.stop = Path(assignment.stop)
        self.rng = random.Random(assignment.seed)
        slot = assignment.slot
        self.shapes = (
            flood_of(slot) if assignment.floods else {f"w{slot}-{i}": shape_of(slot, i) for i in range(3)}
        )
        self.held: dict[str, int] = {}
        self.remainders: dict[tuple[str, int], set[int]] = {}
        """Leases of which members were released, perhaps, and the ranks that are left, as far as is known."""
        self.waiting: set[str] = set()
        self.preempted: set[str] = set()
        self.renewed_at: dict[str, float] = {}
        self.past: list[tuple[str, int]] = []

    def run(self) -> None:
        self.clients = self.connect()
        if not self.clients:
            return  # stopped before it began
        self.recorder = Recorder(self.assignment.record, self.assignment.slot)
        if self.assignment.floods:
            while not self.stop.exists():
                self.flood()
        else:
            self.work()
        deadline = time.monotonic() + 20
        while (self.held or self.waiting or self.remainders) and time.monotonic() < deadline:
            for task_id in list(self.waiting):
                self.ask("cancel", task_id)
                self.ask("status", task_id)
            for task_id in list(self.held):
                self.ask("release", task_id, fencing_token=self.held[task_id])
            for task_id, token in list(self.remainders):
                self.ask("release", task_id, fencing_token=token)
        for client in self.clients:
            client.close()

    def work(self) -> None:
        for task_id in self.shapes:
            self.ask("status", task_id)  # what one before it in this slot left
        self.ask("leases", "")
        while not self.stop.exists():
            self.step()
            time.sleep(self.rng.random() * 0.04)

    def flood(self) -> None:
        """Ask for everything in one call, give it back, and read the queue, without a pause."""
        client = self.rng.choice(self.clients)
        begun = [self.recorder.begin("allocate", name, **shape) for name, shape in self.shapes.items()]
        answers = self.answered(lambda: allocate_batch(client, self.shapes), len(begun))
        for operation, (task_id, shape), answer in zip(begun, self.shapes.items(), answers, strict=True):
            self.recorder.end(operation, **answer)
            self.note("allocate", task_id, shape, answer)
        for task_id, token in list(self.held.items()):
            self.ask("release", task_id, fencing_token=token)
        for _ in range(3):
            self.ask("queue", "")

    def connect(self) -> list[Any]:
        if self.assignment.services:
            from resource_manager.rest.client import ServiceClient

            return [ServiceClient(url, timeout_s=LOCK_TIMEOUT_S + 3) for url in self.assignment.services]
        settings: dict[str, Any] = {"lease_ttl_s": TTL_S, "lock_timeout_s": LOCK_TIMEOUT_S}
        settings["confirmation_window_s"] = TTL_S
        if self.assignment.redis_url:
            settings["redis_url"] = self.assignment.redis_url
        servers = inventory()
        while True:
            try:
                manager = GPUResourceManager.from_url(self.assignment.store, inventory=servers, **settings)
                return [ACCESS_PATHS[self.assignment.access_path](manager, self.assignment.seed)]
            except ResourceManagerError:
                if self.stop.exists():
                    return []
                time.sleep(0.1)

    def step(self) -> None:
        for task_id, at in list(self.renewed_at.items()):
            due = task_id in self.held and time.monotonic() - at > TTL_S / 4
            if due and self.rng.random() < 0.8:
                self.ask("renew", task_id, fencing_token=self.held[task_id])
                return
        choice = self.rng.random()
        if (taken := sorted(self.preempted & self.held.keys())) and choice < 0.7:
            token = self.held[taken[0]]
            self.ask("release", taken[0], fencing_token=token, outcome=Outcome.PREEMPTED.value)
            return
        task_id = self.rng.choice(sorted(self.shapes))
        if self.waiting and choice < 0.5:
            self.ask("cancel" if choice < 0.15 else "status", self.rng.choice(sorted(self.waiting)))
        elif self.assignment.preemption and choice > 0.8:
            self.ask("submit", task_id, **self.shapes[task_id])
        elif choice < 0.02:
            self.step_clock()
        elif choice < 0.06:
            self.ask("submit", task_id, **self.shapes[task_id])
        elif choice < 0.1 and self.past:
            old_task_id, token = self.rng.choice(self.past)  # a request that arrives late, once more
            if self.rng.random() < 0.3 and self.is_gang(old_task_id):
                self.release_some(old_task_id, token, self.ranks(old_task_id))
            else:
                self.ask(self.rng.choice(("renew", "release")), old_task_id, fencing_token=token)
        elif choice < 0.12:
            self.ask("leases", "")
        elif choice < 0.13:
            self.ask("apply", "", number=self.rng.randrange(1, 10**8))
        elif choice < 0.5:
            self.ask("allocate", task_id, **self.shapes[task_id])  # also what it holds: a request sent twice
        elif self.remainders and choice < 0.7:
            task_id, token = self.rng.choice(sorted(self.remainders))
            left = self.remainders[task_id, token]
            if left and self.rng.random() < 0.5:
                self.release_some(task_id, token, left)
            else:
                self.ask("release", task_id, fencing_token=token)
        elif self.held and not (self.assignment.keeps and self.rng.random() < 0.9):
            task_id = self.rng.choice(sorted(self.held))
            if self.is_gang(task_id) and self.rng.random() < 0.6:
                self.release_some(task_id, self.held[task_id], self.ranks(task_id))
            else:
                self.ask("release", task_id, fencing_token=self.held[task_id])

    def is_gang(self, task_id: str) -> bool:
        return "nodes" in self.shapes[task_id]

    def ranks(self, task_id: str) -> set[int]:
        return set(range(self.shapes[task_id].get("nodes", 1)))

    def release_some(self, task_id: str, token: int, ranks: set[int]) -> None:
        """Release some members, or all of them."""
        some = self.rng.sample(sorted(ranks), self.rng.randint(1, len(ranks)))
        self.ask("release_members", task_id, fencing_token=token, ranks=some)

    def step_clock(self) -> None:
        """This process's idea of the time goes wrong, as after a suspend."""
        for client in self.clients:
            manager = getattr(client, "manager", client)
            if isinstance(manager, GPUResourceManager):
                clock: Any = getattr(manager.store, "clock", None)
                if clock is not None:  # other versions keep it elsewhere
                    clock._offset_s += self.rng.choice((-100.0, 100.0))

    def ask(self, kind: str, task_id: str, **asked: Any) -> None:
        """Asks once, or twice at the same time; of a service that does not answer, the other one."""
        first = self.rng.randrange(len(self.clients))
        clients = [*self.clients[first:], *self.clients[:first]]
        if self.rng.random() < 0.1:
            answers: list[Answer] = []
            other = threading.Thread(
                target=lambda: answers.append(self.call(clients[-1], kind, task_id, asked))
            )
            other.start()
            answers.append(self.call(clients[0], kind, task_id, asked))
            other.join()
        else:
            answers = [self.call(clients[0], kind, task_id, asked)]
            if "error" in answers[0] and len(clients) > 1:
                answers.append(self.call(clients[1], kind, task_id, asked))
        for answer in answers:
            self.note(kind, task_id, asked, answer)
        if "error" in answers[-1]:
            time.sleep(self.rng.random() * 0.2)

    def call(self, client: Any, kind: str, task_id: str, asked: dict[str, Any]) -> Answer:
        operation = self.recorder.begin(kind, task_id, **asked)
        [answer] = self.answered(lambda: [CALLS[kind](client, task_id, **asked)], 1)
        self.recorder.end(operation, **answer)
        return answer

    def answered(self, call: Callable[[], list[Answer]], count: int) -> list[Answer]:
        """Return what so many operations in one call were answered."""
        try:
            return call()
        except LeaseNotFoundError:
            return [{"result": "gone"}] * count
        except ResourceManagerError as error:
            return [{"error": repr(error)}] * count
        except CancelledError:
            return [{"cancelled": True}] * count

    def note(self, kind: str, task_id: str, asked: dict[str, Any], answer: Answer) -> None:
        result = answer.get("result")
        token = asked.get("fencing_token")
        if result == "listed":
            for lease in answer["leases"]:
                key = (lease["task_id"], lease["fencing_token"])
                left = {member["rank"] for member in lease["members"]}
                if key[0] in self.shapes and left < self.ranks(key[0]):
                    self.remainders[key] = left
        if result in {"granted", "renewed"} and answer["preempted"]:
            self.preempted.add(task_id)
        elif result == "granted":
            self.preempted.discard(task_id)
        if result == "released" and asked.get("outcome"):
            self.waiting.add(task_id)
        if result == "granted":
            self.waiting.discard(task_id)
            self.held[task_id] = answer["fencing_token"]
            self.renewed_at[task_id] = time.monotonic()
            if (task_id, answer["fencing_token"]) not in self.past:
                self.past = [*self.past[-9:], (task_id, answer["fencing_token"])]
        elif result == "waiting" or (kind == "submit" and result is None):
            self.waiting.add(task_id)
        elif result in {"absent", "cancelled"}:
            self.waiting.discard(task_id)
        elif kind == "renew":
            self.renewed_at[task_id] = time.monotonic()
        if result in {"released", "gone"} and token is not None:
            if self.held.get(task_id) == token:
                del self.held[task_id]
            self.note_remainder(kind, task_id, token, asked, result)

    def note_remainder(self, kind: str, task_id: str, token: int, asked: dict[str, Any], result: str) -> None:
        """A gang that is gone may have a remainder: an answer to an earlier release of members was lost."""
        if kind == "release":
            self.remainders.pop((task_id, token), None)
        elif self.is_gang(task_id):
            left = self.remainders.get((task_id, token), self.ranks(task_id)) - set(asked.get("ranks", ()))
            self.remainders[task_id, token] = left
            if result == "released" and not left:
                del self.remainders[task_id, token]


def enter(netns: str) -> None:
    """Moves this process into that network namespace (`ip netns add`); needs CAP_SYS_ADMIN."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{netns}", "rb") as handle:
        if libc.setns(handle.fileno(), 0x40000000) != 0:  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {netns}")


def die_with_parent() -> None:
    """Ends this process once the run that started it is gone: else it would go on in another run's ports."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(assignment: Assignment) -> None:
    logging.disable(logging.CRITICAL)
    die_with_parent()
    if assignment.netns:
        enter(assignment.netns)
    if assignment.bug:
        from tests.faults.bugs import BUGS

        BUGS[assignment.bug]()
    if assignment.lock_life_s:
        from resource_manager.storage.airflow_variable import store as variable_store

        variable_store.LOCK_TTL_S = assignment.lock_life_s
        variable_store.WRITE_MARGIN_S = assignment.lock_life_s / 3
        variable_store.CHANGES_KEPT = ALL_CHANGES
    if assignment.clock:
        from resource_manager.storage.sql import sqlite

        sqlite.time = time_shifted_by(Path(assignment.clock))  # type: ignore[assignment, attr-defined]
    if assignment.halts_at is not None:
        from tests.faults.commit_points import CommitPoint

        point = CommitPoint(*assignment.halts_at, Path(assignment.halts), Path(assignment.stop))
        if assignment.lock_life_s:
            point.arm_variables()
        elif assignment.store.startswith(SQL):
            point.arm_sql()
        else:
            point.arm_redis()
    Worker(assignment).run()


if __name__ == "__main__":
    values = json.loads(sys.argv[1])
    values["services"] = tuple(values["services"])
    main(Assignment(**values))
