"""The Gymnasium, vector and PettingZoo interfaces: the libraries' own checks, and guarantees to users."""

from __future__ import annotations

import pickle
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from pettingzoo.test import api_test, seed_test

from simulator.serverless import ClusterConfig, ServerlessEnv
from simulator.serverless.agents import ServerlessAgents
from simulator.serverless.config import NumaNodes, ServerType
from simulator.serverless.errors import ActionError, EpisodeOverError, MemoryAllocationError
from simulator.serverless.observation import NODE_FEATURES
from simulator.serverless.template import WorkflowTemplate
from simulator.serverless.vector import ServerlessVectorEnv
from simulator.serverless.workflow_shapes import generate_workflows

SMALL: dict[str, Any] = {
    "arrival_times": (0.0, 1.0, 1.0),
    "workflow_templates": generate_workflows(size=3),
    "cluster_config": ClusterConfig(servers=ClusterConfig.c5().servers[:4]),
}
NODES = 8


def actions(seed: int, count: int = 200) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers([NODES, 4], size=(count, 2))


def roll_out(env: ServerlessEnv, chosen: NDArray[np.int64]) -> list[tuple[NDArray[np.float32], float, bool]]:
    seen = []
    for action in chosen:
        observation, reward, terminated, truncated, _ = env.step(action)
        assert not truncated
        seen.append((observation, reward, terminated))
        if terminated:
            break
    return seen


def test_gymnasium_env_checker_passes() -> None:
    check_env(gymnasium.make("ServerlessWorkflow-v0").unwrapped)
    check_env(gymnasium.make("ServerlessWorkflow-v0", **SMALL).unwrapped)


def test_pettingzoo_api_and_seed_tests_pass() -> None:
    api_test(ServerlessAgents(**SMALL), num_cycles=300)
    seed_test(lambda: ServerlessAgents(**SMALL), num_cycles=60)


def test_rewards_of_an_episode_sum_to_weighted_makespans_and_rent() -> None:
    for weight in (0.0, 0.5, 1.0):
        env = ServerlessEnv(**SMALL, performance_weight=weight)
        env.reset(seed=4)
        total, rent, makespans = 0.0, 0.0, 0.0
        for action in actions(4):
            _, reward, terminated, _, info = env.step(action)
            total += reward
            rent += info["log"].rent
            for record in info["log"].finished_workflow_records:
                makespans += record.completion_time - SMALL["arrival_times"][record.wf_id]
            if terminated:
                break
        assert total == pytest.approx(-weight * makespans - (1 - weight) * 10 * rent)
        assert rent > 0


def test_observations_stay_in_their_space_and_every_feature_varies() -> None:
    env = ServerlessEnv(**SMALL, memory_choices=(128, 256, 2048, 4096))  # large enough for queues
    first, _ = env.reset(seed=1)
    seen = [first, *(observation for observation, _, _ in roll_out(env, actions(1)))]
    assert all(env.observation_space.contains(observation) for observation in seen)
    varied = np.ptp(np.array(seen), axis=0) > 0
    by_node = varied[: -len(FUNCTION)].reshape(NODES, -1)
    assert by_node.any(axis=0).all(), "every feature of nodes varies over an episode"
    assert varied[-len(FUNCTION) :].all(), "every feature of functions varies over an episode"


FUNCTION = range(8)


def test_equal_seeds_give_equal_roll_outs_and_different_seeds_different_ones() -> None:
    def play(seed: int) -> bytes:
        env = ServerlessEnv(**SMALL)
        start, _ = env.reset(seed=seed)
        return pickle.dumps((start, roll_out(env, actions(0))))

    assert play(1) == play(1)
    assert len({play(seed) for seed in range(5)}) > 1


def test_a_restored_snapshot_continues_as_the_original() -> None:
    env = ServerlessEnv(**SMALL)
    env.reset(seed=2)
    roll_out(env, actions(2, 10))
    snapshot = env.snapshot()
    straight = pickle.dumps(roll_out(env, actions(3)))
    next_start, _ = env.reset()
    again = env.restore(snapshot)
    assert env.observation_space.contains(again)
    assert pickle.dumps(roll_out(env, actions(3))) == straight
    np.testing.assert_array_equal(env.reset()[0], next_start)


def test_vector_roll_outs_equal_single_ones() -> None:
    count, steps = 3, 120
    vector = gymnasium.make_vec(
        "ServerlessWorkflow-v0", num_envs=count, vectorization_mode="vector_entry_point", **SMALL
    )
    assert isinstance(vector, ServerlessVectorEnv)
    assert vector.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    singles = [ServerlessEnv(**SMALL) for _ in range(count)]
    together, _ = vector.reset(seed=5)
    for row, env in enumerate(singles):
        np.testing.assert_array_equal(together[row], env.reset(seed=5 + row)[0])
    over = [False] * count
    resets = 0
    for chosen in np.random.default_rng(5).integers([NODES, 4], size=(steps, count, 2)):
        together, rewards, ends, _, _ = vector.step(chosen)
        for row, env in enumerate(singles):
            if over[row]:
                resets += 1
                alone, reward, over[row] = env.reset()[0], 0.0, False
            else:
                alone, reward, over[row], _, _ = env.step(chosen[row])
            np.testing.assert_array_equal(together[row], alone)
            assert (rewards[row], ends[row]) == (reward, over[row])
    assert resets > 2
    assert vector.action_masks().shape == (count, NODES + 4)
    vector.close()


def tiny(memory: int) -> ServerType:
    return ServerType(
        name=f"m{memory}", count=1, hourly_rate=1.0, cold_start_latency=0.0,
        numa_nodes=NumaNodes(count=1, cpu=2, memory=memory),
    )  # fmt: skip


def test_an_end_that_is_out_of_sight_is_observed_as_the_upper_bound() -> None:
    """Nine threads on two cores: one has 1 operation a second, and a container with an eighth of it none."""
    config = ClusterConfig(servers=(tiny(64),), single_core_speed=8)
    template = WorkflowTemplate((80, 80, 80), memory_reqs=(1, 8, 1), parallelisms=(8, 1, 1))
    env = ServerlessEnv((0.0,), (template,), config, memory_choices=(1,))
    env.reset(seed=0)
    for _ in range(2):
        observation = env.step(np.array([0, 0]))[0]
    assert env.observation_space.contains(observation)
    assert observation[NODE_FEATURES.index("time_to_last_end")] == 1.0


def test_masks_exclude_exactly_the_impossible_options() -> None:
    config = ClusterConfig(servers=(tiny(64), tiny(300), tiny(2000)))
    env = ServerlessEnv((0.0,), generate_workflows(("chain",), 4), config)
    assert env.action_masks().tolist() == [False, True, True, True, True, False, False]
    env.reset(seed=0)
    env.step(np.array([1, 1]))
    env.step(np.array([2, 3]))
    with pytest.raises(MemoryAllocationError, match="more than the 300 MiB of NUMA node m300/0/0"):
        env.step(np.array([1, 3]))
    assert env.step(np.array([1, 0]))[4]["log"].allocated_memory == 128


def test_no_node_for_the_smallest_choice_is_an_error() -> None:
    with pytest.raises(MemoryAllocationError, match="more than every NUMA node"):
        ServerlessEnv(cluster_config=ClusterConfig(servers=(tiny(64),)))


@pytest.mark.parametrize("action", [(NODES, 0), (0, 4), (-1, 0), (0.5, 0), (0,), 3])
def test_an_action_out_of_range_changes_nothing(action: Any) -> None:
    env = ServerlessEnv(**SMALL)
    env.reset(seed=0)
    before = env.snapshot()
    with pytest.raises(ActionError, match="is out of range"):
        env.step(action)
    assert env.snapshot() == before


def test_a_step_after_the_end_or_before_the_start_is_an_error() -> None:
    env = ServerlessEnv(**SMALL)
    with pytest.raises(EpisodeOverError, match=r"call reset\(\)"):
        env.step(np.array([0, 0]))
    env.reset(seed=0)
    assert roll_out(env, actions(0))[-1][2]
    with pytest.raises(EpisodeOverError, match=r"call reset\(\)"):
        env.step(np.array([0, 0]))


def test_three_agents_give_the_same_steps_as_one() -> None:
    agents = ServerlessAgents(**SMALL)
    agents.reset(seed=3)
    env = ServerlessEnv(**SMALL)
    env.reset(seed=3)
    servers = [(0, 0), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2), (3, 3)]
    for position, choice in actions(3):
        server, node = servers[position]
        for agent, action in (("memory_0", choice), ("server_0", server), ("node_0", node)):
            assert agents.agent_selection == agent
            assert agents.infos[agent]["action_mask"][action]
            agents.step(int(action))
        observation, reward, terminated, _, _ = env.step(np.array([position, choice]))
        assert set(agents.rewards.values()) == {reward}
        np.testing.assert_array_equal(agents.observe("memory_0")[:-2], observation)
        if terminated:
            break
    assert all(agents.terminations.values())


def test_an_agent_cannot_choose_a_node_the_server_does_not_have() -> None:
    agents = ServerlessAgents(**SMALL)
    agents.reset(seed=0)
    agents.step(0)
    agents.step(2)
    assert agents.infos["node_0"]["action_mask"].tolist() == [1, 1, 0, 0]
    with pytest.raises(ActionError, match="allowed are 0, 1"):
        agents.step(2)
