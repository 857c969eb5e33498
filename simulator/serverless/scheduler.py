"""Scheduler of functions by a placement policy of the resource manager; it needs no training.

Two things are counted, each in one place. The environment counts the memory that running containers use,
from their start on. This scheduler holds a lease on cores and memory for every function it has placed, from
the decision to the end, in the only `ClusterState` there is: by the memory in use alone, all functions
submitted during a cold start would go to one node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf

from resource_manager.core.changes import new_released
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Amount, Placement, Request
from resource_manager.scheduling.allocator import grant
from resource_manager.scheduling.placement.policies import Policy, get_policy
from resource_manager.scheduling.placement.policies.measured import least_loaded
from simulator.serverless.errors import MemoryAllocationError
from simulator.serverless.raw_env import EnvLog, RawEnv
from simulator.serverless.workflow import Function

HEURISTICS = ("first_fit", "best_fit", "round_robin", "least_loaded", "data_local", "random")
"""Policies that make sense without GPUs; the others are accepted too."""


def data_local(env: RawEnv) -> Policy:
    """Return the policy for the functions of `env`; it reads there where the current one's inputs are.

    Of the nodes that fit it chooses most input on the server, then most on the node, then fewest leases.
    The server comes first because the network is far slower than the bus of a server.
    """

    server_of = env.cluster.server_of
    spans = [slice(each.start, each.stop) for each in env.cluster.nodes_of]

    def policy(cluster: ClusterState, request: Request) -> Placement | None:
        nodes = cluster.nodes
        on_node: dict[int, int] = {}
        on_server: dict[int, int] = {}
        for position, size in env.data_distribution:
            if size:
                server = server_of[position]
                on_node[position] = on_node.get(position, 0) + size
                on_server[server] = on_server.get(server, 0) + size
        while on_server:
            most = max(on_server.values())
            servers = [server for server, size in on_server.items() if size == most]
            holding = [
                (-size, len(nodes[position].leases), position)
                for position, size in on_node.items()
                if server_of[position] in servers and nodes[position].fits(request)
            ]
            if holding:
                return nodes[min(holding)[-1]].place(request)
            leases = least_loaded.measures(cluster, request)
            fewest, first = min((min(leases[spans[each]]), spans[each].start) for each in servers)
            if fewest != inf:
                return nodes[leases.index(fewest, first)].place(request)
            for server in servers:
                del on_server[server]
        return least_loaded(cluster, request)

    return policy


ENVIRONMENT_POLICIES: dict[str, Callable[[RawEnv], Policy]] = {"data_local": data_local}
"""Policies that read the environment besides the leases."""


def scheduler_policy(name: str, env: RawEnv, seed: int = 0) -> Policy:
    """Return the policy of that name for `env`; raise `PolicyError`."""
    if name in ENVIRONMENT_POLICIES:
        return ENVIRONMENT_POLICIES[name](env)
    return get_policy(name, seed=seed, beside=ENVIRONMENT_POLICIES)


class PolicyScheduler:
    """Scheduler that places each function with a policy, on a state with a lease per placed function.

    If no node has the cores free, the policy is asked for memory alone; if no node has that either, the
    container has to wait anyway and goes to the node with the fewest leases.

    `memory_mib` is given to every function; None gives each the memory it requires.
    """

    def __init__(self, policy: Policy, memory_mib: int | None = None) -> None:
        self.policy = policy
        self.memory_mib = memory_mib
        self.decided = ClusterState()
        self._demands: dict[tuple[int, int], tuple[Request, ...]] = {}
        """What to ask the policy for, in this order, by threads and MiB; functions get a copy."""

    def reset(self, env: RawEnv) -> None:
        """Clear all decisions; call it after `env.reset`."""
        self.decided = ClusterState(env.cluster.inventory())
        self._demands.clear()

    def decide(self, env: RawEnv) -> tuple[int, int]:
        """Return the position of a NUMA node and MiB for the current function of `env`, with a lease on them.

        Raises `MemoryAllocationError` if the function fits no node.
        """
        function, cluster = env.function, self.decided
        memory_mib = self.memory_mib or function.memory_req
        demands = self._demands.get((function.parallelism, memory_mib)) or self._ask_for(function, memory_mib)
        for demand in demands:
            placement = self.policy(cluster, demand)
            if placement is not None:
                break
        else:
            placement = self._shortest_queue(memory_mib)
            demand = NO_DEMAND
        request = demand.for_task(f"{function.wf_id}/{function.fn_id}")
        cluster.apply(grant(cluster, request, (placement,), env.now))
        return cluster.by_name[placement.node].index, memory_mib

    def observe(self, log: EnvLog) -> None:
        """Release the leases of the functions that ended."""
        cluster = self.decided
        for wf_id, fn_id, _, end in log.finished_function_records:
            lease_id = f"{wf_id}/{fn_id}"
            cluster.apply(new_released(lease_id, cluster.leases[lease_id].fencing_token, end))

    def _ask_for(self, function: Function, memory_mib: int) -> tuple[Request, ...]:
        largest = self.decided.largest
        if memory_mib > largest["memory_mib"]:
            raise MemoryAllocationError(
                f"{memory_mib} MiB for function {function.wf_id}/{function.fn_id} is more than every NUMA "
                f"node has; the largest has {largest['memory_mib']} MiB"
            )
        memory: dict[str, Amount] = {"memory_mib": memory_mib}
        cores: dict[str, Amount] = {"cpus": min(function.parallelism, largest["cpus"])}
        demands = tuple(Request("function", resources=each) for each in (cores | memory, memory))
        self._demands[function.parallelism, memory_mib] = demands
        return demands

    def _shortest_queue(self, memory_mib: int) -> Placement:
        able = [state for state in self.decided.nodes if state.node.resources["memory_mib"] >= memory_mib]
        return Placement(min(able, key=lambda state: len(state.leases)).name)


NO_DEMAND = Request("function")


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
