"""One process that allocates, renews and releases at random, and writes down when it asked and was told."""

from __future__ import annotations

import json
import logging
import os
import random
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from resource_manager import allocator
from resource_manager.errors import LeaseNotFoundError, ResourceManagerError
from resource_manager.inventory import default_inventory
from resource_manager.manager import GPUResourceManager
from resource_manager.models import Released
from resource_manager.stores import RedisStore

TTL_S = 2.0
SERVERS = 3
LOCK_TIMEOUT_S = 5.0
BUGS = ("no version check", "no fencing", "lost release")


@dataclass(frozen=True)
class Assignment:
    """What a worker is told: its place, the seed of its choices, and a bug to have, if any."""

    slot: int
    seed: int
    url: str
    record: Path
    stop: Path
    bug: str = ""


class Recorder:
    """Lines of JSON that survive a kill: each is written in one system call."""

    def __init__(self, path: Path, slot: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._slot = slot
        self._count = 0

    def begin(self, kind: str, task_id: str, **details: Any) -> str:
        self._count += 1
        operation = f"{self._slot}.{os.getpid()}.{self._count}"
        self._write(operation=operation, kind=kind, task_id=task_id, begin=time.monotonic(), **details)
        return operation

    def end(self, operation: str, **outcome: Any) -> None:
        self._write(operation=operation, end=time.monotonic(), **outcome)

    def _write(self, **values: Any) -> None:
        os.write(self._file, json.dumps(values).encode() + b"\n")


class Worker:
    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.rng = random.Random(assignment.seed)
        self.shapes = {f"w{assignment.slot}-{i}": (2 + (assignment.slot + i) % 5, 4) for i in range(3)}
        self.held: dict[str, int] = {}
        self.renewed_at: dict[str, float] = {}

    def run(self) -> None:
        manager = self.connect()
        self.recorder = Recorder(self.assignment.record, self.assignment.slot)
        while not self.assignment.stop.exists():
            self.step(manager)
            time.sleep(self.rng.random() * 0.04)
        deadline = time.monotonic() + 20
        while self.held and time.monotonic() < deadline:
            self.release(manager, next(iter(self.held)))

    def connect(self) -> GPUResourceManager:
        while True:
            try:
                return GPUResourceManager.from_url(
                    self.assignment.url,
                    inventory=default_inventory(SERVERS),
                    lease_ttl_s=TTL_S,
                    lock_timeout_s=LOCK_TIMEOUT_S,
                    reconfirm_s=TTL_S,
                )
            except ResourceManagerError:
                if self.assignment.stop.exists():
                    raise SystemExit(0) from None
                time.sleep(0.1)

    def step(self, manager: GPUResourceManager) -> None:
        for task_id, at in list(self.renewed_at.items()):
            due = task_id in self.held and time.monotonic() - at > TTL_S / 4
            if due and self.rng.random() < 0.8:
                self.renew(manager, task_id)
                return
        choice = self.rng.random()
        task_id = self.rng.choice(sorted(self.shapes))
        if choice < 0.02:
            self.step_clock(manager)
        elif choice < 0.5:
            self.allocate(manager, task_id)  # also what it holds: a request sent twice
        elif self.held:
            self.release(manager, self.rng.choice(sorted(self.held)))

    def step_clock(self, manager: GPUResourceManager) -> None:
        """This process's idea of the time goes wrong, as after a suspend."""
        store = manager._state.store
        assert isinstance(store, RedisStore)
        store._clock._offset_s += self.rng.choice((-100.0, 100.0))

    def allocate(self, manager: GPUResourceManager, task_id: str) -> None:
        gpus, cpus = self.shapes[task_id]
        operation = self.recorder.begin("allocate", task_id, gpus=gpus, cpus=cpus)
        try:
            granted = manager.allocate_resources(task_id, gpus, cpus)
        except ResourceManagerError as error:
            self.recorder.end(operation, error=repr(error))
            return
        if granted is None:
            self.recorder.end(operation, result="none")
            return
        keys = ("server_name", "gpu_ids", "fencing_token", "expires_at")
        self.recorder.end(operation, result="granted", **{key: granted[key] for key in keys})
        self.held[task_id] = granted["fencing_token"]
        self.renewed_at[task_id] = time.monotonic()

    def renew(self, manager: GPUResourceManager, task_id: str) -> None:
        token = self.held[task_id]
        self.renewed_at[task_id] = time.monotonic()
        operation = self.recorder.begin("renew", task_id, fencing_token=token)
        try:
            renewed = manager.renew(task_id, fencing_token=token)
        except LeaseNotFoundError:
            self.recorder.end(operation, result="gone")
            del self.held[task_id]
            return
        except ResourceManagerError as error:
            self.recorder.end(operation, error=repr(error))
            return
        self.recorder.end(operation, result="renewed", expires_at=renewed["expires_at"])

    def release(self, manager: GPUResourceManager, task_id: str) -> None:
        token = self.held[task_id]
        for _ in range(2 if self.rng.random() < 0.2 else 1):
            operation = self.recorder.begin("release", task_id, fencing_token=token)
            try:
                released = manager.release_resources(task_id, fencing_token=token)
            except ResourceManagerError as error:
                self.recorder.end(operation, error=repr(error))
                return
            self.recorder.end(operation, result="released" if released else "gone")
        self.held.pop(task_id)


def plant(bug: str) -> None:
    """Breaks this process in one of the ways that the checker must find."""
    if bug == "no version check":
        from resource_manager import redis_client

        load = redis_client.load_script.__wrapped__

        def careless(*names: str) -> redis_client.Script:
            text = load(*names).text
            return redis_client.Script(text.replace("if version ~= expected then", "if false then"))

        from resource_manager.stores import redis as redis_store

        redis_store.load_script = careless  # type: ignore[attr-defined]
    elif bug == "no fencing":
        for name in ("release", "renew"):
            setattr(allocator, name, partial(_without_fencing, getattr(allocator, name)))
    elif bug == "lost release":
        commit = RedisStore.commit

        def forgetful(self: RedisStore, version: int, changes: Any, **options: Any) -> None:
            if not all(isinstance(change, Released) for change in changes) or random.random() < 0.8:
                commit(self, version, changes, **options)

        RedisStore.commit = forgetful  # type: ignore[method-assign]
    elif bug:
        raise ValueError(f"unknown bug {bug!r}")


def _without_fencing(step: Any, *arguments: Any, **options: Any) -> Any:
    return step(*arguments, **{**options, "fencing_token": None})


def main(assignment: Assignment) -> None:
    logging.disable(logging.CRITICAL)
    plant(assignment.bug)
    Worker(assignment).run()
