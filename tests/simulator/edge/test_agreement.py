"""Scorer and environment, two independent programs, agree on every end and every refusal."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.edge.environment import NEVER_S, Environment
from simulator.edge.plan import Add, Commands, Match, Plan
from simulator.edge.random_dataset import generate
from simulator.edge.scorer import score_plan

LAST_COMMAND_S = 2600
NO_SUCH_ID = 99_999


class RandomCommands:
    """Generator of random commands, valid or not; it executes the valid ones in the environment."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.dataset = generate(random.randrange(1000), jobs=4, hosts=2, stations=2, ues=8, tasks_per_job=3)
        self.world = Environment(self.dataset)
        self.plan: Plan = {}
        self.executors = {}  # type: ignore[var-annotated]
        self.refused = 0

    def run(self) -> None:
        world = self.world
        while world.now < LAST_COMMAND_S or any(e.free_from_s < NEVER_S for e in world.running.values()):
            if world.now < LAST_COMMAND_S and self.random.random() < 0.3:
                step = self.plan[world.now] = Commands()
                self.delete(step)
                self.add(step)
                for _ in range(self.random.randrange(4)):
                    self.match(step)
            world.advance()
            alive = {key for held in world.on_device for key in held}
            self.executors = {key: value for key, value in self.executors.items() if key in alive}

    def any_executor_id(self) -> int:
        return self.random.choice([*self.executors, NO_SUCH_ID])

    def delete(self, step: Commands) -> None:
        if self.random.random() < 0.2:
            executor_id = self.any_executor_id()
            step.deletes.append(executor_id)
            if executor_id in self.executors:
                self.world.delete(self.executors.pop(executor_id))
            else:
                self.refused += 1

    def add(self, step: Commands) -> None:
        task = self.random.choice(list(self.dataset.tasks.values()))
        category = self.dataset.categories[task.category_id]
        device = self.random.choice(self.dataset.devices)
        free = self.world.node(device).free
        if self.executors and self.random.random() < 0.1:  # an id that is taken
            step.adds.append(Add(self.random.choice(list(self.executors)), category.category_id, device))
            self.refused += 1
        elif free["cpus"] >= category.cpus and free["memory_mib"] >= category.memory_mib:
            executor = self.world.add(category, device)
            step.adds.append(Add(executor.executor_id, category.category_id, device))
            self.executors[executor.executor_id] = executor
        else:
            step.adds.append(Add(NO_SUCH_ID - 1, category.category_id, device))
            self.refused += 1

    def match(self, step: Commands) -> None:
        world = self.world
        task_ids = list(world.executable) or list(self.dataset.tasks)
        if self.random.random() < 0.2:
            task_ids = list(self.dataset.tasks)
        task = self.dataset.tasks[self.random.choice(task_ids)]
        fitting = [
            e.executor_id for e in self.executors.values() if e.category.category_id == task.category_id
        ]
        executor_id = self.random.choice([*fitting, self.any_executor_id()])
        executor = self.executors.get(executor_id)
        started = [parent for parent, _ in task.parents if parent in world.end_s]
        if task.task_id not in world.executable and started:
            return  # allowed by the rules, but not in the environment
        step.matches.append(Match(executor_id, task.task_id))
        can = executor is not None and executor.is_free(world.now) and executor_id in fitting
        if can and task.task_id in world.executable:
            assert executor is not None
            world.match(executor, task.task_id)
        else:
            self.refused += 1


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_random_commands_have_the_same_effect_in_scorer_and_environment(seed: int) -> None:
    monkey = RandomCommands(Random(seed))
    monkey.run()
    score = score_plan(monkey.dataset, monkey.plan)
    assert score.end_s == monkey.world.end_s
    assert sum(score.failed.values()) == monkey.refused
