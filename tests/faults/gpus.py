"""Servers whose GPUs fail while they are leased, and proof that no broken or used one is granted.

A course is a seeded sequence of steps on two services of one store: leases come and go, devices fall off the
bus and come back, numbers shift, children outlive their jobs, agents fall silent, report twice or with a
wrong clock. What each report said is written down beside the history, from which `check_gpus` works without
the fold that it examines.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from resource_manager import GPUResourceManager
from resource_manager.agent.report_format import ReportError, read_report
from resource_manager.core.changes import (
    AgentLost,
)
from resource_manager.core.models import Gpu, Node
from resource_manager.errors import CapacityError
from resource_manager.fleet.receiving import ReportReceiver
from resource_manager.fleet.records import records_of
from resource_manager.settings import Settings
from resource_manager.storage import Store, open_store
from tests.agent.reporting import as_text, gpu, process, report
from tests.builders import redefine
from tests.faults.gpu_checks import INTERVAL_S, Seen, check_gpus, check_idle
from tests.faults.outcomes import Outcome
from tests.faults.redis_servers import Server

GPUS = 4
IDLE_AFTER_S = 0.5
STEPS = 250
SETTING = "failing gpus"


def servers(count: int) -> list[Node]:
    return [
        Node(f"s{s}", s, {"cpus": 64}, tuple(Gpu(n, uuid=f"GPU-{s}{n:07x}-0000") for n in range(GPUS)))
        for s in range(count)
    ]


@dataclass
class Device:
    """A real device: lost or not, busy or not, and the jobs on it, by fencing token."""

    uuid: str
    lost: bool = False
    is_busy: bool = False
    jobs: dict[int, str] = field(default_factory=dict)
    xids: list[int] = field(default_factory=list)


class Course:
    """One seed on two clients of a store; `pass_time` lets a fake clock advance."""

    def __init__(
        self, seed: int, stores: Sequence[Store], pass_time: Callable[[float], None] = lambda s: None
    ) -> None:
        self.rng = random.Random(seed)
        self.pass_time = pass_time
        self.managers = [_manager(store) for store in stores]
        self.receivers = [ReportReceiver(manager) for manager in self.managers]
        self.devices = {
            node.name: [Device(gpu.uuid) for gpu in node.gpus] for node in self.managers[0].inventory
        }
        self.offsets = {name: self.rng.choice((0.0, 3600.0, -3600.0)) for name in self.devices}
        self.uptime = dict.fromkeys(self.devices, 1000.0)
        self.seen: list[Seen] = []
        self.refused = 0
        self.last: dict[str, dict[str, Any]] = {}
        self.number = 0
        self.leases: dict[str, dict[str, Any]] = {}
        self.done: Counter[str] = Counter()

    def run(self, steps: int) -> list[str]:
        """Return the complaints after so many steps."""
        kinds = [self.ask] * 4 + [self.release] * 3 + [self.send] * 8
        kinds += [self.lose, self.mend, self.storm, self.again, self.silence, self.open, self.clean_up]
        kinds += [self.renumber, self.work, self.work]
        for _ in range(steps):
            self.pass_time(self.rng.uniform(0.01, 0.1))
            kind = self.rng.choice(kinds)
            kind()
            self.done[kind.__name__] += 1
        history = self.managers[0].store.history(limit=100_000)
        return check_gpus(history, self.seen) + check_idle(history, self.seen)

    @property
    def faults(self) -> tuple[Callable[[], None], ...]:
        return self.lose, self.storm, self.again, self.silence, self.renumber

    def manager(self) -> GPUResourceManager:
        return self.rng.choice(self.managers)

    def ask(self) -> None:
        self.number += 1
        task, gpus = f"t{self.number}", self.rng.choice((1, 1, 2, GPUS))
        milli = self.rng.choice((1000, 1000, 400)) if gpus == 1 else 1000
        options: dict[str, Any] = {"gpu_milli": milli}
        if self.rng.random() < 0.5:
            options |= {"idle_after": IDLE_AFTER_S, "idle_action": "release", "preempt_grace": 0.3}
        if self.rng.random() < 0.5:
            self.manager().submit(task, gpus, 1, **options)
        else:
            self.manager().allocate_resources(task, gpus, 1, **options)
        self.start_jobs()

    def start_jobs(self) -> None:
        """Start the job of every lease that has none: a process on each of its devices."""
        for lease in self.managers[0].leases():
            if lease["task_id"] in self.leases:
                continue
            self.leases[lease["task_id"]] = dict(lease)
            for member in lease["members"]:
                for device in self.devices[member["server_name"]]:
                    if device.uuid in member["gpu_uuids"] and not device.lost:
                        device.jobs[lease["fencing_token"]] = lease["task_id"]

    def release(self) -> None:
        leases = self.managers[0].leases()
        if not leases:
            return
        lease = self.rng.choice(leases)
        if self.rng.random() < 0.6:
            self.end_job(lease["fencing_token"])
        self.manager().release_resources(lease["task_id"])
        self.start_jobs()

    def end_job(self, token: int) -> None:
        for devices in self.devices.values():
            for device in devices:
                device.jobs.pop(token, None)

    def clean_up(self) -> None:
        """The children that outlived their jobs end at last."""
        live = {lease["fencing_token"] for lease in self.managers[0].leases()}
        for devices in self.devices.values():
            for device in devices:
                device.jobs = {token: task for token, task in device.jobs.items() if token in live}

    def send(self, name: str = "") -> None:
        name = name or self.rng.choice(list(self.devices))
        present = [device for device in self.devices[name] if not (device.lost and self.rng.random() < 0.5)]
        self.rng.shuffle(present)  # another order says nothing
        self.uptime[name] += self.rng.uniform(0.05, 0.2)
        store = self.managers[0].store
        value = report(
            store.now() + self.offsets[name],
            *(self._gpu(device) for device in present),
            name=name,
            uptime_s=self.uptime[name],
            interval_s=INTERVAL_S,
        )
        self.last[name] = value
        self._deliver(
            value,
            {d.uuid: set(d.jobs) for d in present if not d.lost},
            frozenset(d.uuid for d in present if not d.lost and not d.is_busy),
        )
        for device in self.devices[name]:
            device.xids.clear()

    def _gpu(self, device: Device) -> dict[str, Any]:
        if device.lost:
            return gpu(0, uuid=device.uuid, lost=True, processes=None, utilization_percent=None)
        jobs = [
            process(1000 + token % 1_000_000, job=f"gpu-{task}-0a1b2c3d-{token}", lease_source="cgroup")
            for token, task in device.jobs.items()
        ]
        at = self.managers[0].store.now() + 3600 * 5
        xids = [{"xid": xid, "count": 9, "at": at} for xid in device.xids]
        busy = {"utilization_percent": 80} if device.is_busy else {}
        return gpu(0, uuid=device.uuid, processes=jobs, xids=xids, **busy)

    def work(self) -> None:
        """A device begins to compute, or ends."""
        device = self.rng.choice(self.rng.choice(list(self.devices.values())))
        device.is_busy = not device.is_busy

    def _deliver(
        self, value: dict[str, Any], jobs: dict[str, set[int]], idle: frozenset[str] = frozenset()
    ) -> None:
        text = as_text(value)
        version = self.managers[0].get_resource_summary()["version"]  # it counts for its own commit's grants
        try:
            self.rng.choice(self.receivers).receive(read_report(text))
        except ReportError:
            self.refused += 1
            return
        at = records_of(self.managers[0].store, [value["server"]])[value["server"]].received_at
        after = self.managers[0].get_resource_summary()["version"]
        self.seen.append(Seen(version, value["server"], jobs, at, idle, after))
        self.start_jobs()

    def lose(self) -> None:
        device = self.rng.choice(self.rng.choice(list(self.devices.values())))
        device.lost = True
        device.jobs.clear()

    def mend(self) -> None:
        for devices in self.devices.values():
            for device in devices:
                device.lost = False

    def storm(self) -> None:
        device = self.rng.choice(self.rng.choice(list(self.devices.values())))
        device.xids = self.rng.sample(range(1, 150), 60)

    def again(self) -> None:
        """A second agent, or a slow network: the last report once more."""
        if self.last:
            name = self.rng.choice(list(self.last))
            self._deliver(self.last[name], {})

    def silence(self) -> None:
        """The agent of a server is lost for a while; sometimes an operator takes it for removed."""
        name = self.rng.choice(list(self.devices))
        manager = self.manager()
        manager.commit(
            lambda cluster, now: [AgentLost(name, now, now - 60.0)] if cluster.node(name).watched else []
        )
        if self.rng.random() < 0.3:
            manager.resume(name)
        self.start_jobs()

    def renumber(self) -> None:
        """An operator pins the same devices under other numbers."""
        manager = self.manager()
        renumbered = [
            replace(
                node,
                gpus=tuple(
                    replace(gpu, gpu_id=number)
                    for number, gpu in zip(self.rng.sample(range(GPUS), GPUS), node.gpus, strict=True)
                ),
            )
            for node in manager.inventory
        ]
        redefine(manager, nodes=renumbered)
        self.start_jobs()

    def open(self) -> None:
        """An operator opens what is closed, after the device was mended and its processes have ended."""
        self.mend()
        for name in self.devices:
            self.managers[0].expire_and_schedule()
            self.clean_up()
            for _ in range(2):
                self.send(name)
            for entry in self.managers[0].get_resource_summary()["servers"]:
                for closed in entry["gpus_closed"] if entry["server_name"] == name else ():
                    self.manager().resume(name, closed["gpu_id"])
        self.start_jobs()


def _manager(store: Store) -> GPUResourceManager:
    return GPUResourceManager(Settings(store="memory://"), store=store, inventory=servers(2))


def run_course(seed: int, folder: Path) -> Outcome:
    """Return the outcome of a seed on a Redis with two clients."""
    server = Server(folder / "server", 'save ""')
    url = f"unix://{server.socket}?namespace={folder.name}"
    try:
        course = Course(seed, [open_store(url), open_store(url)])
        outcome = Outcome(seed, SETTING)
        try:
            outcome.complaints = course.run(STEPS)
        except CapacityError as error:
            outcome.complaints = [f"the fold refuses a grant as impossible: {error}"]
        outcome.operations, outcome.kinds = course.done.total(), course.done
        outcome.granted, outcome.errors = len(course.leases), course.refused
        outcome.faults = Counter({each.__name__: course.done[each.__name__] for each in course.faults})
        return outcome
    finally:
        server.kill()
