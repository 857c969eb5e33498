"""One run of a scenario with one seed: arrivals and scheduling between spans of ticks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from simulator.engine import EventQueue
from simulator.vgpu.pool import Amounts, Ledger
from simulator.vgpu.results import SHORT_DIMENSIONS, SandboxDecision, ScenarioRun, TaskOutcome, Utilisation
from simulator.vgpu.scenario import Scenario
from simulator.vgpu.state import Pack, as_array, as_list, empty_state, no_pending
from simulator.vgpu.tasks import Task, demand_series, generate
from simulator.vgpu.tick import COMPLETED, RUNNING, Rules, advance, compiled

DROP_AFTER_DEADLINES = 1.5
PRESSURE_SHARE, PRESSURE_S = 0.1, 0.05


Observer = Callable[[SandboxDecision], object]


def simulate(
    scenario: Scenario,
    seed: int,
    *,
    use_numba: bool = True,
    observers: Sequence[Observer] = (),
    observe_every: int = 1,
    tasks: Sequence[Task] | None = None,
) -> ScenarioRun:
    """Run the scenario; equal scenario and seed give an equal `ScenarioRun`, interpreted or compiled.

    `observers` are called with a `SandboxDecision` for every running task after every tick
    (`sandbox_apply` in the original), or after the first of every `observe_every` ticks. `tasks`, sorted by
    arrival, replace those drawn from the seed.
    """
    if tasks is None:
        tasks = generate(scenario.profiles, scenario.tasks, scenario.duration_s, scenario.arrival, seed)
    simulation = Simulation(scenario, tasks, use_numba, observers, observe_every)
    simulation.run()
    return ScenarioRun(scenario, seed, tuple(tasks), simulation.outcomes(), simulation.utilisation())


class Simulation:
    """State of one run between ticks.

    Arrivals are events of a queue. Ends are not: the demand of a task, and so its progress, changes in every
    tick, so nobody knows its end before the tick in which it comes.
    """

    def __init__(
        self,
        scenario: Scenario,
        tasks: Sequence[Task],
        use_numba: bool,
        observers: Sequence[Observer],
        observe_every: int = 1,
    ) -> None:
        self.scenario = scenario
        self.tasks = tasks
        self.observers = observers
        self.observe_every = observe_every
        self.ledger = Ledger(scenario)
        self.nodes = [state.name for state in self.ledger.cluster.nodes]
        self.node_index = {name: i for i, name in enumerate(self.nodes)}
        delta_t = scenario.delta_t_s
        self.arrivals: EventQueue[int] = EventQueue()
        for i, task in enumerate(tasks):
            self.arrivals.schedule(math.ceil(task.arrival_s / delta_t - 1e-9), i)
        # A task is dropped in the first tick at whose end it exceeds its allowed time. The number of ticks is
        # capped at the end of the run, because it may be too large for an integer array.
        most = scenario.ticks
        self.life_ticks = [
            math.floor(min(DROP_AFTER_DEADLINES * task.profile.deadline_s / delta_t, most) + 1e-9) + 1
            for task in tasks
        ]
        self.start_tick: list[int | None] = [None] * len(tasks)
        self.end_tick: list[int] = [scenario.ticks] * len(tasks)
        self.node_of: list[str | None] = [None] * len(tasks)
        self.waiting: list[int] = []
        self.demand_used = 0
        self.width = max(1, len(tasks))
        self.rules = rules_of(scenario)
        self.advance = compiled() if use_numba else advance
        self.pack: Pack = as_array if use_numba else as_list
        demand_ticks = sum(min(life, scenario.ticks) for life in self.life_ticks)
        self.state = empty_state(self.ledger, tasks, self.width, demand_ticks, self.pack)
        names = [profile.name for profile in scenario.profiles]
        self.kind = [names.index(task.profile.name) for task in tasks]
        self.demanded = no_pending(self.ledger, self.pack)

    def run(self) -> None:
        """Run every tick of the scenario."""
        scheduling = self.scenario.scheduling
        interval = 1 if scheduling.retry_every_tick else scheduling.interval_ticks
        tick, end = 0, self.scenario.ticks
        stale = False  # True if a pending task may fit now that did not before
        while tick < end:
            if tick % interval == 0:
                arrived = self._arrivals(tick)
                due = arrived or stale or self.ledger.follows_usage
                granted = bool(self.waiting) and due and self._schedule(tick)
                # A grant may change the best vendor, so tasks tried earlier may fit now.
                stale = granted and not scheduling.vendor_fallback
            # Run to the next pass that may admit a task; if the ledger follows usage, ticks may stop first.
            next_pass = tick - tick % interval + interval
            if not (self.waiting and stale):
                arrival = min(self.arrivals.next_time, end)
                next_pass = max(next_pass, math.ceil(arrival / interval) * interval)
            stop = min(end, next_pass)
            if self.observers:
                every = self.observe_every
                stop = min(stop, math.ceil(tick / every) * every + 1)
            stop_if_fits = bool(self.waiting) and self.ledger.follows_usage
            tick = self.advance(
                self.state,
                self.rules,
                self.demanded._replace(stop_if_fits=stop_if_fits),
                self.width,
                tick,
                stop,
            )
            if self.observers and (tick - 1) % self.observe_every == 0:
                self._observe(tick - 1)
            stale = self._retire(tick) or stale

    # ---- arrivals and scheduling ----

    def _arrivals(self, tick: int) -> bool:
        before = len(self.waiting)
        for task in self.arrivals.pop_due(tick):
            self.waiting.append(task)
            self.demanded.count[self.kind[task]] += 1
        return len(self.waiting) > before

    def _schedule(self, tick: int) -> bool:
        """Try every pending task once, in order of arrival; return True if one was admitted."""
        now = tick * self.scenario.delta_t_s
        if self.ledger.follows_usage:
            self.ledger.reallocate(self._usage(), now)
        full: set[str] = set()  # profiles that fit no node
        still_waiting = []
        for task in self.waiting:
            profile = self.tasks[task].profile
            lease = None
            if profile.name not in full:
                lease = self.ledger.admit(self.tasks[task].task_id, profile, now)
            if lease is None:
                full.add(profile.name)
                still_waiting.append(task)
                continue
            self.demanded.count[self.kind[task]] -= 1
            self._start(task, tick, lease.placement.node, self.ledger.quota(lease, profile))
            if not self.scenario.scheduling.vendor_fallback:
                full.clear()  # a grant may change the best vendor
        granted = len(still_waiting) < len(self.waiting)
        self.waiting = still_waiting
        return granted

    def _usage(self) -> dict[str, Amounts]:
        """Return the amounts to allocate to each running task, by task id."""
        state = self.state
        booked = {}
        for node, count in enumerate(state.running):
            for task in state.slots[node * self.width : node * self.width + count]:
                used = _at(state.granted, task)
                if self.scenario.scheduling.admission == "max":
                    compute, memory, bandwidth = map(max, used, _at(state.quota, task))
                    used = compute, memory, bandwidth
                booked[self.tasks[task].task_id] = used
        return booked

    def _start(self, task: int, tick: int, node: str, quota: Amounts) -> None:
        state, scenario = self.state, self.scenario
        delta_t = scenario.delta_t_s
        self.start_tick[task] = tick
        self.node_of[task] = node
        index = self.node_index[node]
        state.slots[index * self.width + state.running[index]] = task
        state.running[index] += 1
        for quotas, amount in zip(state.quota, quota, strict=True):
            quotas[task] = amount
        state.tokens[task] = max(quota[2] * scenario.sandbox.bandwidth_refill, 1e-9)
        state.adjust_tick[task] = tick
        state.drop_tick[task] = tick + self.life_ticks[task]
        deadline = self.tasks[task].profile.deadline_s
        calm_s = deadline - max(PRESSURE_SHARE * deadline, PRESSURE_S)
        state.pressure_tick[task] = tick + math.ceil(min(calm_s / delta_t, scenario.ticks) - 1e-9)
        ticks = min(self.life_ticks[task], scenario.ticks - tick)
        first, after = self.demand_used, self.demand_used + ticks
        state.demand_origin[task] = first - tick
        series = demand_series(self.tasks[task], tick, ticks, delta_t)
        for buffer, demand in zip(state.demand, series, strict=True):
            buffer[first:after] = self.pack(demand)
        self.demand_used = after

    # ---- after ticks ----

    def _retire(self, tick: int) -> bool:
        """Release the tasks that ended in the previous tick; return True if there were any."""
        state, width = self.state, self.width
        retired = False
        for node, count in enumerate(state.running):
            first = node * width
            kept = []
            for task in state.slots[first : first + count]:
                if state.outcome[task] == RUNNING:
                    kept.append(task)
                    continue
                retired = True
                self.end_tick[task] = tick
                outcome = "completed" if state.outcome[task] == COMPLETED else "overtime"
                self.ledger.release(self.tasks[task].task_id, tick * self.scenario.delta_t_s, outcome)
            if len(kept) < count:
                state.slots[first : first + len(kept)] = kept
                state.running[node] = len(kept)
        return retired

    def _observe(self, tick: int) -> None:
        state = self.state
        for node, count in enumerate(state.running):
            for task in state.slots[node * self.width : node * self.width + count]:
                k = state.demand_origin[task] + tick
                decision = SandboxDecision(
                    tick,
                    self.tasks[task].task_id,
                    self.nodes[node],
                    _at(state.quota, task),
                    _at(state.demand, k),
                    _at(state.allowed, task),
                    _at(state.granted, task),
                    state.tokens[task],
                    state.scale[task],
                    state.progress[task],
                )
                for observer in self.observers:
                    observer(decision)

    # ---- results ----

    def outcomes(self) -> tuple[TaskOutcome, ...]:
        """Return the outcome of every task, in order of arrival."""
        state, delta_t = self.state, self.scenario.delta_t_s
        results = []
        for i, task in enumerate(self.tasks):
            start = self.start_tick[i]
            code = int(state.outcome[i])
            how = "never_started" if start is None else ENDED[code]
            ran_s = None if start is None else (self.end_tick[i] - start) * delta_t
            results.append(
                TaskOutcome(
                    task.task_id,
                    task.profile.name,
                    how,
                    self.node_of[i],
                    task.arrival_s,
                    None if start is None else start * delta_t,
                    self.end_tick[i] * delta_t,
                    task.profile.ideal_duration_s,
                    code == COMPLETED and ran_s is not None and ran_s <= task.profile.deadline_s + 1e-9,
                    {
                        "memory": int(state.memory_events[i]),
                        "bandwidth": int(state.bandwidth_events[i]),
                        "compute": int(state.compute_events[i]),
                    },
                )
            )
        return tuple(results)

    def utilisation(self) -> dict[str, dict[str, Utilisation]]:
        """Return the utilisation of each node by dimension, over all ticks of the run."""
        state, ticks = self.state, self.scenario.ticks
        shares: dict[str, dict[str, Utilisation]] = {}
        for node, name in enumerate(self.nodes):
            shares[name] = {}
            for d, (key, capacities) in enumerate(zip(SHORT_DIMENSIONS, state.capacity, strict=True)):
                capacity = float(capacities[node])
                mean = float(state.used[3 * node + d]) / ticks
                variance = float(state.used_squared[3 * node + d]) / ticks - mean * mean
                shares[name][key] = Utilisation(
                    mean / capacity,
                    math.sqrt(max(0.0, variance)) / capacity,
                    float(state.used_peak[3 * node + d]) / capacity,
                )
        return shares


ENDED = ("unfinished", "completed", "overtime")


def _at(three: Sequence[Sequence[float]], place: int) -> Amounts:
    """Return the compute, memory and bandwidth at that place of three sequences."""
    compute, memory, bandwidth = three
    return float(compute[place]), float(memory[place]), float(bandwidth[place])


def rules_of(scenario: Scenario) -> Rules:
    """Return the scenario's numbers that every tick needs."""
    sandbox, guard = scenario.sandbox, scenario.guard
    return Rules(
        delta_t=scenario.delta_t_s,
        threshold=sandbox.limit_threshold,
        memory_gate=sandbox.memory_gate,
        bandwidth_gate=sandbox.bandwidth_gate,
        compute_gate=sandbox.compute_gate,
        refill=sandbox.bandwidth_refill,
        ceiling=sandbox.compute_ceiling,
        guard=guard.enabled,
        adjust_interval=guard.adjust_interval_ticks,
        boost_step=guard.boost_step,
        max_boost=guard.max_boost,
        decay=guard.decay,
        heavy_first=scenario.arbitration == "heavy_first",
        bottleneck=scenario.progress == "bottleneck",
        sliced=scenario.scheduling.partition == "slices",
    )
