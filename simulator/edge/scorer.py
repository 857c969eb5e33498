"""Replay of a plan second by second, and its score; independent of the planners, and trusts no plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from simulator.edge.dataset import METRIC_PERIOD_S, Dataset, Device
from simulator.edge.plan import Add, Commands, Match, Plan
from simulator.edge.transfers import transfer_s, upload_s
from simulator.engine import EventQueue

UNFINISHED_JCT_S = 10_000
"""Completion time (s) counted for a job that never ends."""


@dataclass(frozen=True, slots=True)
class TaskRun:
    """Run of a task on an executor of a device, from its match to its end, in seconds."""

    task_id: int
    executor_id: int
    device: Device
    matched_s: int
    end_s: int
    completed: bool


@dataclass(frozen=True, slots=True)
class Score:
    """Score of a plan, and the results of its replay.

    `end_s` has the end of every completed task; `runs` also includes killed ones. `failed` counts the
    commands without effect, by reason.
    """

    score: float
    task_rate: float
    job_rate: float
    mean_jct_s: float
    simulated_s: int
    end_s: dict[int, int]
    runs: tuple[TaskRun, ...]
    failed: dict[str, int]


@dataclass(slots=True, eq=False)
class _Executor:
    executor_id: int
    category_id: int
    device: Device
    created_s: int
    free_from_s: int
    task_id: int | None = None
    matched_s: int = -1


def score_plan(dataset: Dataset, plan: Plan) -> Score:
    """Return the score of a plan: task rate + 20,000 x job rate + (10,000 - mean job completion time)."""
    return _Replay(dataset).run(plan)


class _Replay:
    """State of a replay."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.now = 0
        self.capacity = [list(dataset.first_capacity(device)) for device in dataset.devices]
        self.used = [[0, 0] for _ in dataset.devices]
        self.on_device: list[dict[int, _Executor]] = [{} for _ in dataset.devices]
        self.executors: dict[int, _Executor] = {}
        self.ready = {task.task_id for task in dataset.tasks.values() if not task.parents}
        self.running: dict[int, _Executor] = {}
        self.end_s: dict[int, int] = {}
        self.kept_on: dict[int, Device] = {}
        # (end, task, second of its match, device that keeps the data); the match tells it from a killed run
        self.ends: EventQueue[tuple[int, int, int, Device]] = EventQueue()
        self.runs: list[TaskRun] = []
        self.failed: Counter[str] = Counter()

    def run(self, plan: Plan) -> Score:
        last_command = max(plan, default=0)
        self.command(plan.get(0, Commands()))
        while self.now < last_command or self.ends:
            self.advance()
            step = plan.get(self.now)
            if step is not None:
                self.command(step)
        return self.score()

    # ---- commands ----

    def command(self, step: Commands) -> None:
        for executor_id in step.deletes:
            if executor_id in self.executors:
                self.drop(self.executors[executor_id])
            else:
                self.failed["delete: no such executor"] += 1
        for add in step.adds:
            self.add(add)
        for match in step.matches:
            self.match(match)

    def add(self, add: Add) -> None:
        category = self.dataset.categories[add.category_id]
        device = add.device
        used, capacity = self.used[device.index], self.capacity[device.index]
        if add.executor_id in self.executors:
            self.failed["add: the executor exists"] += 1
        elif used[0] + category.cpus > capacity[0] or used[1] + category.memory_mib > capacity[1]:
            self.failed["add: not enough capacity"] += 1
        else:
            # Preparation ends when the clock advances, so it takes at least one second.
            free_from_s = self.now + max(1, category.prepare_s)
            executor = _Executor(add.executor_id, add.category_id, device, self.now, free_from_s)
            used[0] += category.cpus
            used[1] += category.memory_mib
            self.executors[add.executor_id] = self.on_device[device.index][add.executor_id] = executor

    def match(self, match: Match) -> None:
        executor = self.executors.get(match.executor_id)
        task = self.dataset.tasks[match.task_id]
        if executor is None:
            reason = "no such executor"
        elif executor.category_id != task.category_id:
            reason = "another category"
        elif executor.task_id is not None or executor.free_from_s > self.now:
            reason = "executor not free"
        elif task.task_id not in self.ready:
            reason = "task not ready"
        elif self.dataset.jobs[task.job_id].arrival_s > self.now:
            reason = "job not arrived"
        else:
            executor.task_id = task.task_id
            executor.matched_s = self.now
            self.ready.remove(task.task_id)
            self.running[task.task_id] = executor
            self.expect_end(task.task_id)
            return
        self.failed[f"match: {reason}"] += 1

    def drop(self, executor: _Executor) -> None:
        """Remove an executor; its running task has to start again."""
        category = self.dataset.categories[executor.category_id]
        index = executor.device.index
        self.used[index][0] -= category.cpus
        self.used[index][1] -= category.memory_mib
        del self.executors[executor.executor_id], self.on_device[index][executor.executor_id]
        task_id = executor.task_id
        if task_id is not None:
            del self.running[task_id]
            self.ready.add(task_id)
            self.ran(executor, task_id, self.now, completed=False)

    def ran(self, executor: _Executor, task_id: int, end_s: int, *, completed: bool) -> None:
        run = TaskRun(task_id, executor.executor_id, executor.device, executor.matched_s, end_s, completed)
        self.runs.append(run)

    # ---- the clock ----

    def expect_end(self, task_id: int) -> None:
        """Schedule the end of a running task if all its parents have ended."""
        task = self.dataset.tasks[task_id]
        if any(parent not in self.end_s for parent, _ in task.parents):
            return
        executor = self.running[task_id]
        device = executor.device
        begin = executor.matched_s
        for parent, size in task.parents:
            available = max(executor.matched_s, self.end_s[parent])
            took = transfer_s(self.dataset, self.kept_on[parent], device, available, size)
            if took is None:
                return
            begin = max(begin, available + took)
        end = begin + task.compute_s * device.compute_factor
        kept_on = device
        if device.kind == "UE":
            uploaded = upload_s(self.dataset, device, end, task.output_size)
            if uploaded is None:
                return
            end += uploaded[0]
            kept_on = uploaded[1]
        self.ends.schedule(end, (end, task_id, executor.matched_s, kept_on), priority=task_id)

    def advance(self) -> None:
        """Advance one second, with the events in the same order as in `Environment.advance`."""
        before = self.now
        self.now = now = before + 1
        for event in self.ends.pop_due(now):
            self.complete(*event)
        second = now % METRIC_PERIOD_S
        for device, cpus, memory in self.dataset.capacity_changes.get(second, ()):
            self.resize(device, cpus, memory)
        for device in self.dataset.leaving.get(before % METRIC_PERIOD_S, ()):
            for executor in list(self.on_device[device].values()):
                self.drop(executor)

    def complete(self, end: int, task_id: int, matched_s: int, kept_on: Device) -> None:
        executor = self.running.get(task_id)
        if executor is None or executor.matched_s != matched_s:
            return  # it was killed meanwhile
        del self.running[task_id]
        executor.task_id = None
        self.end_s[task_id] = end
        self.kept_on[task_id] = kept_on
        self.ran(executor, task_id, end, completed=True)
        for child, _ in self.dataset.tasks[task_id].children:
            if child in self.running:
                self.expect_end(child)
            elif child not in self.end_s:
                self.ready.add(child)

    def resize(self, device: int, cpus: int, memory: int) -> None:
        """Change the capacity of a device; remove the oldest executors if they no longer fit."""
        self.capacity[device] = [cpus, memory]
        used = self.used[device]
        if used[0] > cpus or used[1] > memory:
            oldest = sorted(self.on_device[device].values(), key=lambda e: (e.created_s, e.executor_id))
            for executor in oldest:
                self.drop(executor)
                if used[0] <= cpus and used[1] <= memory:
                    break

    # ---- the end ----

    def score(self) -> Score:
        dataset = self.dataset
        completion: list[int] = []
        done = 0
        for job in dataset.jobs.values():
            if all(task_id in self.end_s for task_id in job.task_ids):
                done += 1
                completion.append(max(self.end_s[task_id] for task_id in job.task_ids) - job.arrival_s)
            else:
                completion.append(UNFINISHED_JCT_S)
        for task_id, executor in self.running.items():
            self.ran(executor, task_id, self.now, completed=False)
        task_rate = round(len(self.end_s) / len(dataset.tasks), 2)
        job_rate = round(done / len(dataset.jobs), 2)
        mean_jct_s = round(sum(completion) / len(completion), 2)
        return Score(
            score=round(task_rate + 20_000 * job_rate + (10_000 - mean_jct_s), 2),
            task_rate=task_rate,
            job_rate=job_rate,
            mean_jct_s=mean_jct_s,
            simulated_s=self.now,
            end_s=self.end_s,
            runs=tuple(self.runs),
            failed=dict(self.failed),
        )
