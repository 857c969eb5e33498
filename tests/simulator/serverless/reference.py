"""Reference implementation of the specification: one event at a time, everything recomputed; slow.

It shares no code with the engine except the descriptions of workflows and cluster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from simulator.serverless.config import ClusterConfig
from simulator.serverless.template import WorkflowTemplate

INFINITE = math.inf


@dataclass
class Run:
    """Run of one function, in seconds; `left` counts operations."""

    workflow: int
    function: int
    node: int
    required: int
    given: int
    threads: int
    left: float
    submission: float
    creation: float
    order: int
    start: float = INFINITE
    end: float = INFINITE


@dataclass
class Node:
    """NUMA node with its scheduled, waiting and running containers."""

    server: int
    cores: int
    memory: int
    core_speed: int
    scheduled: list[Run] = field(default_factory=list)
    waiting: list[Run] = field(default_factory=list)
    running: list[Run] = field(default_factory=list)
    last_event: float = 0.0

    def speed(self, run: Run, together: Sequence[Run]) -> int:
        threads = sum(other.threads for other in together)
        thread = self.core_speed if threads <= self.cores else self.cores * self.core_speed // threads
        return min(run.given, run.required) * run.threads * thread // run.required

    def free(self) -> int:
        return self.memory - sum(run.given for run in self.running)

    def end_of(self, run: Run) -> float:
        return self.last_event + run.left / self.speed(run, self.running)

    def work_until(self, time: float) -> None:
        for run, speed in [(run, self.speed(run, self.running)) for run in self.running]:
            run.left -= min(run.left, math.floor(speed * (time - self.last_event)))
        self.last_event = time

    def begin(self, run: Run, time: float) -> None:
        run.start = time
        self.running.append(run)

    def latest_predicted_end(self) -> float:
        """Predict the last end: a fluid model without rounding, further arrivals or waiting containers."""
        now = self.last_event
        left = {id(run): float(run.left) for run in self.running}
        active = list(self.running)
        coming = sorted(self.scheduled, key=lambda run: (run.creation, run.order))
        queue = bool(self.waiting)
        latest = -INFINITE
        while active or coming:
            speeds = {id(run): self.speed(run, active) for run in active}
            first = min(active, key=lambda run: left[id(run)] / speeds[id(run)], default=None)
            end = INFINITE if first is None else now + left[id(first)] / speeds[id(first)]
            if coming and coming[0].creation < end:
                free = self.memory - sum(other.given for other in active)
                if queue or coming[0].given > free:
                    queue = True
                    coming.pop(0)
                    continue
                time = coming[0].creation
            else:
                time = end
            for run in active:
                left[id(run)] = max(0.0, left[id(run)] - speeds[id(run)] * (time - now))
            now = time
            if first is not None and time == end:
                active.remove(first)
                latest = max(latest, time)
            else:
                run = coming.pop(0)
                active.append(run)
                left[id(run)] = float(run.left)
        return latest


@dataclass
class Result:
    """Runs in order of decision, and the rent ($) from each decision to the next."""

    runs: list[Run]
    rents: list[float]


def simulate(
    arrivals: Sequence[float],
    templates: Sequence[WorkflowTemplate],
    config: ClusterConfig,
    decisions: Sequence[tuple[int, int]],
) -> Result:
    """Simulate an episode: workflow i has template i, and the `decisions` are used in rotation."""
    nodes: list[Node] = []
    servers: list[tuple[float, float]] = []  # dollars an hour, seconds of cold start
    for kind in config.servers:
        for _ in range(kind.count):
            for _ in range(kind.numa_nodes.count):
                shape = kind.numa_nodes
                nodes.append(Node(len(servers), shape.cpu, shape.memory, config.single_core_speed))
            servers.append((kind.hourly_rate, kind.cold_start_latency))
    expiration = [0.0] * len(servers)
    ready = [0.0] * len(servers)
    runs: list[Run] = []
    rents: list[float] = []
    ended: dict[tuple[int, int], Run] = {}
    placed: dict[tuple[int, int], int] = {}
    submitted = [
        (arrivals[w], w, f)
        for w, template in enumerate(templates)
        for f in range(len(template))
        if not template.predecessors[f]
    ]

    def pay(time: float, node: Node) -> None:
        server = node.server
        latest = max(other.latest_predicted_end() for other in nodes if other.server == server)
        if latest > expiration[server]:
            start = max(time, expiration[server])
            hours = math.ceil((latest - start) / 3600)
            expiration[server] = start + hours * 3600
            rents[-1] += hours * servers[server][0]

    def decide() -> None:
        submitted.sort()
        time, w, f = submitted.pop(0)
        position, memory = decisions[len(runs) % len(decisions)]
        node = nodes[position]
        template = templates[w]
        if time >= expiration[node.server]:
            ready[node.server] = time + servers[node.server][1]
        transfer = 0.0
        for parent, size in template.predecessors[f]:
            source = placed[w, parent]
            if source == position:
                transfer += size / config.memory_bandwidth
            elif nodes[source].server == node.server:
                transfer += size / config.numa_bandwidth
            else:
                transfer += size / config.network_bandwidth
        placed[w, f] = position
        run = Run(
            w, f, position, template.memory_reqs[f], memory, template.parallelisms[f],
            template.computations[f], time, max(ready[node.server], time) + transfer, len(runs),
        )  # fmt: skip
        runs.append(run)
        rents.append(0.0)
        node.scheduled.append(run)
        pay(time, node)

    def create(node: Node, run: Run) -> None:
        node.scheduled.remove(run)
        if node.waiting or run.given > node.free():
            node.waiting.append(run)
        else:
            node.work_until(run.creation)
            node.begin(run, run.creation)
        pay(run.creation, node)

    def complete(node: Node, run: Run, time: float) -> None:
        node.work_until(time)
        node.running.remove(run)
        run.end = time
        ended[run.workflow, run.function] = run
        while node.waiting and node.waiting[0].given <= node.free():
            node.begin(node.waiting.pop(0), time)
        template = templates[run.workflow]
        for child in template.successors[run.function]:
            if all((run.workflow, parent) in ended for parent, _ in template.predecessors[child]):
                submitted.append((time, run.workflow, child))
        pay(time, node)

    total = sum(len(template) for template in templates)
    while len(ended) < total:
        events: list[tuple[float, int, int, int, Node | None, Run | None]] = []
        for position, node in enumerate(nodes):
            for place, run in enumerate(node.running):
                events.append((node.end_of(run), 0, position, place, node, run))
            for run in node.scheduled:
                events.append((run.creation, 1, position, run.order, node, run))
        if submitted:
            events.append((min(submitted)[0], 2, 0, 0, None, None))
        time, _, _, _, where, who = min(events, key=lambda event: event[:4])
        if where is None or who is None:
            decide()
        elif who in where.running:
            complete(where, who, time)
        else:
            create(where, who)
    return Result(runs, rents)
