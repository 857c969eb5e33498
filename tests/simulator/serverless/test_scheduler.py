"""Heuristics with the resource manager's policies: their placements and their leases."""

from __future__ import annotations

import pytest

from resource_manager.core.changes import Granted
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Lease, Placement, Request
from resource_manager.scheduling.allocator import check
from resource_manager.scheduling.placement.policies import POLICIES
from simulator.serverless.config import ClusterConfig
from simulator.serverless.errors import ActionError, MemoryAllocationError
from simulator.serverless.raw_env import RawEnv
from simulator.serverless.run import run
from simulator.serverless.scheduler import PolicyScheduler, data_local, run_episode, scheduler_policy
from simulator.serverless.template import WorkflowTemplate
from simulator.serverless.workflow_shapes import generate_workflow, generate_workflows

CONFIG = ClusterConfig(servers=ClusterConfig.c5().servers[:4])


@pytest.mark.parametrize("name", [*POLICIES, "data_local"])
def test_every_policy_finishes_an_episode_and_releases_every_lease(name: str) -> None:
    env = RawEnv([0.0, 2.0, 3.0], generate_workflows(size=4), CONFIG)
    scheduler = PolicyScheduler(scheduler_policy(name, env, 3))
    for log in run_episode(env, scheduler, seed=1):
        check(scheduler.decided)
        assert log.allocated_memory == log.required_memory
    assert scheduler.decided.leases == {}
    assert env.workload.completed


def test_a_burst_during_a_cold_start_is_spread_over_nodes() -> None:
    """All source functions arrive before any server is ready; each decision affects the next."""
    env = RawEnv([0.0], [generate_workflow("montage", 6, seed=2)], CONFIG)
    scheduler = PolicyScheduler(scheduler_policy("round_robin", env), memory_mib=128)
    first = [log for log in run_episode(env, scheduler, seed=0) if log.submission_time == 0.0]
    assert len(first) == 6
    assert len({(log.server_name, log.numa_node_id) for log in first}) == 6


def test_a_function_that_fits_no_node_waits_in_the_shortest_queue() -> None:
    one = ClusterConfig(servers=CONFIG.servers[2:3])  # two nodes of 4 cores and 8192 MiB
    env = RawEnv([0.0], [generate_workflow("fork_join", 9, seed=0)], one)
    episode = run(env, PolicyScheduler(scheduler_policy("first_fit", env), memory_mib=8192), seed=0)
    middle = [record for record in episode.records if 0 < record.fn_id < 10]
    nodes = [record.numa_node_id for record in middle]
    assert abs(nodes.count(0) - nodes.count(1)) <= 1
    assert any(record.start_time > record.creation_time for record in middle)


def test_memory_above_every_node_is_an_error() -> None:
    env = RawEnv([0.0], generate_workflows(size=2), CONFIG)
    with pytest.raises(MemoryAllocationError, match="more than every NUMA node has; the largest has 8192"):
        run(env, PolicyScheduler(scheduler_policy("first_fit", env), memory_mib=8193))


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (("c9", 0, 0), "no server type 'c9'; known are c5.large"),
        (("c5.large", 1, 0), "no server 1 of type c5.large: there are 1"),
        (("c5.2xlarge", 0, 2), "no NUMA node 2 on c5.2xlarge/0: there are 2"),
    ],
)
def test_a_node_that_does_not_exist_is_an_error(place: tuple[str, int, int], words: str) -> None:
    env = RawEnv([0.0], generate_workflows(size=2), CONFIG)
    env.reset(seed=0)
    with pytest.raises(ActionError, match=words):
        env.step(*place, 128)


def test_data_local_prefers_the_server_then_the_node_then_fewest_leases() -> None:
    """Two servers of two nodes with four cores; three parents left 50, 30 and 40 bytes for the fourth."""
    config = ClusterConfig(servers=(CONFIG.servers[2].model_copy(update={"count": 2}),))
    edges = ((0, 3, 50), (1, 3, 30), (2, 3, 40))
    env = RawEnv([0.0], [WorkflowTemplate((1,) * 4, (128,) * 4, (1,) * 4, edges)], config)
    env.reset(seed=0)
    policy = data_local(env)
    state = ClusterState(env.cluster.inventory())
    assert policy(state, Request("source", resources={"cpus": 1})) == Placement("c5.2xlarge/0/0")
    for position in (0, 2, 3):
        env.step_at(position, 128)
    request = Request("t", resources={"cpus": 3})
    assert policy(state, request) == Placement("c5.2xlarge/1/1")
    state.apply(Granted(Lease(request, (Placement("c5.2xlarge/1/1"),), 1, 0.0, 1.0), 0.0))
    assert policy(state, Request("u", resources={"cpus": 3})) == Placement("c5.2xlarge/1/0")
    assert policy(state, Request("w", resources={"cpus": 5})) is None
