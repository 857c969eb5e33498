"""Scheduler of functions by a placement policy of the resource manager; it needs no training."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from resource_manager.core.changes import Released
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Amount, Placement, Request
from resource_manager.scheduling.allocator import grant, select_placement
from resource_manager.scheduling.policies import POLICIES, Policy, get_policy
from resource_manager.scheduling.policies.random import seeded
from simulator.serverless.data_local import INPUT_BYTES_LABEL, data_local
from simulator.serverless.errors import MemoryAllocationError
from simulator.serverless.raw_env import EnvLog, RawEnv
from simulator.serverless.workflow import Function

SCHEDULER_POLICIES: dict[str, Policy] = {**POLICIES, "data_local": data_local}

HEURISTICS = ("first_fit", "best_fit", "round_robin", "least_loaded", "data_local", "random")
"""Policies that make sense without GPUs; the others are accepted too."""


class Decision(NamedTuple):
    """A NUMA node by position, and MiB."""

    position: int
    memory_mib: int


def scheduler_policy(name: str, seed: int = 0) -> Policy:
    """Return the policy of that name (`random` draws with `seed`); raise `PolicyError`."""
    if name == "random":
        return seeded(seed)
    return SCHEDULER_POLICIES[name] if name in SCHEDULER_POLICIES else get_policy(name)


class PolicyScheduler:
    """Scheduler that places each function with a policy, on a state with a lease per placed function.

    The environment reserves memory only when a container is created; a scheduler that read only that
    would send all functions submitted during a cold start to one node. This one therefore keeps a
    `ClusterState` of its decisions: a lease on cores and memory from the decision to the end. If no node
    has the cores free, the policy is asked for memory alone; if no node has that either, the container
    has to wait anyway and goes to the node with the fewest leases.

    `memory_mib` is given to every function; None gives each the memory it requires.
    """

    def __init__(self, policy: Policy, memory_mib: int | None = None) -> None:
        self.policy = policy
        self.memory_mib = memory_mib
        self.decided = ClusterState()
        self._max_cpus: Amount = 0

    def reset(self, env: RawEnv) -> None:
        """Clear all decisions; call it after `env.reset`."""
        inventory = env.cluster.inventory()
        self.decided = ClusterState(inventory)
        self._max_cpus = max(node.resources["cpus"] for node in inventory)

    def decide(self, env: RawEnv) -> Decision:
        """Place the current function of `env`; raise `MemoryAllocationError` if it fits no node."""
        function = env.function
        memory_mib = self.memory_mib if self.memory_mib is not None else function.memory_req
        if memory_mib > env.cluster.config.largest_memory:
            raise MemoryAllocationError(
                f"{memory_mib} MiB for function {function.wf_id}/{function.fn_id} is more than every NUMA "
                f"node has; the largest has {env.cluster.config.largest_memory} MiB"
            )
        memory: dict[str, Amount] = {"memory_mib": memory_mib}
        cpus = min(function.parallelism, self._max_cpus)
        request = partial(
            Request, f"{function.wf_id}/{function.fn_id}", labels=self._input_labels(env, function)
        )
        first = request(resources={"cpus": cpus, **memory})
        placement = select_placement(self.decided, first, self.policy)
        asked = first
        if placement is None:
            asked = request(resources=memory)
            placement = select_placement(self.decided, asked, self.policy)
        if placement is None:
            asked = request(resources={})
            placement = self._shortest_queue(memory_mib)
        self.decided.apply(grant(self.decided, asked, placement, env.now))
        return Decision(self.decided.by_name[placement.node].index, memory_mib)

    def observe(self, log: EnvLog) -> None:
        """Release the leases of the functions that ended."""
        leases = self.decided.leases
        for record in log.finished_function_records:
            task_id = f"{record.wf_id}/{record.fn_id}"
            self.decided.apply(Released(task_id, leases[task_id].fencing_token, record.completion_time))

    def _shortest_queue(self, memory_mib: int) -> Placement:
        able = [state for state in self.decided.nodes if state.node.resources["memory_mib"] >= memory_mib]
        return Placement(min(able, key=lambda state: len(state.leases)).name)

    def _input_labels(self, env: RawEnv, function: Function) -> dict[str, str]:
        """Return labels with the bytes of input by NUMA node, for policies that use data locality."""
        held: dict[str, int] = {}
        for position, size in env.data_distribution(function.wf_id, function.fn_id):
            label = INPUT_BYTES_LABEL + env.cluster.nodes[position].name
            held[label] = held.get(label, 0) + size
        return {label: str(size) for label, size in held.items()}


def run_episode(env: RawEnv, scheduler: PolicyScheduler, seed: int | None = None) -> Iterator[EnvLog]:
    """Reset both and yield the log of every decision until the episode is over."""
    env.reset(seed=seed)
    scheduler.reset(env)
    terminated = False
    while not terminated:
        log = env.step_at(*scheduler.decide(env))
        scheduler.observe(log)
        terminated = log.terminated
        yield log
