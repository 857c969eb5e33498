"""The environment for three agents that decide in turn: memory, then server, then NUMA node."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from pettingzoo import AECEnv

from simulator.serverless.env import ServerlessEnv
from simulator.serverless.errors import ActionError
from simulator.serverless.observation import Array

MEMORY, SERVER, NODE = AGENTS = ("memory_0", "server_0", "node_0")


class ServerlessAgents(AECEnv[str, Array, int]):  # type: ignore[misc]
    """PettingZoo AEC interface of `ServerlessEnv`, with its arguments; all agents get the same reward.

    Every agent observes what `ServerlessEnv` observes and two more numbers: the memory and the server
    chosen for the function so far, as fractions of their number, 0 before the choice. All have the same
    action space; `infos[agent]["action_mask"]` marks the actions the agent has now: memory choices,
    servers, or the NUMA nodes of the chosen server.
    """

    metadata = {"name": "serverless_workflow_v0", "render_modes": [], "is_parallelizable": False}  # noqa: RUF012

    def __init__(self, **env_arguments: Any) -> None:
        super().__init__()
        self.env = ServerlessEnv(**env_arguments)
        cluster = self.env.raw.cluster
        self._nodes_of = cluster.nodes_of
        nodes_ok, self._memory_mask = np.split(self.env.action_masks(), [len(cluster.nodes)])
        self._server_mask = np.array([nodes_ok[nodes].any() for nodes in self._nodes_of])
        self._nodes_ok = nodes_ok
        options = max(len(self._memory_mask), len(self._nodes_of), max(map(len, self._nodes_of)))
        size = self.env.observation_size + 2
        self._chosen_memory: int | None = None
        self._chosen_server: int | None = None
        self.possible_agents = list(AGENTS)
        self.action_spaces = {agent: spaces.Discrete(options) for agent in AGENTS}
        self.observation_spaces = {agent: spaces.Box(0.0, 1.0, (size,), np.float32) for agent in AGENTS}

    def observation_space(self, agent: str) -> spaces.Space[Array]:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Discrete[Any]:
        return self.action_spaces[agent]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Start an episode; the memory agent decides first."""
        self._seen, _ = self.env.reset(seed=seed)
        self.agents = list(AGENTS)
        self.rewards = dict.fromkeys(AGENTS, 0.0)
        self._cumulative_rewards = dict.fromkeys(AGENTS, 0.0)
        self.terminations = dict.fromkeys(AGENTS, False)
        self.truncations = dict.fromkeys(AGENTS, False)
        self._open_decision()
        self.infos: dict[str, dict[str, Any]] = {
            agent: {"action_mask": self._mask(agent)} for agent in AGENTS
        }
        self.agent_selection = MEMORY

    def observe(self, agent: str) -> Array:
        memory, server = self._chosen_memory, self._chosen_server
        shares = (
            0.0 if memory is None else (memory + 1) / len(self._memory_mask),
            0.0 if server is None else (server + 1) / len(self._server_mask),
        )
        return np.append(self._seen, np.array(shares, dtype=np.float32))

    def render(self) -> None:
        """Draw nothing; the plots of `gpu-simulate serverless` show a whole episode."""

    def close(self) -> None:
        """Do nothing: the environment holds no resources outside memory."""

    def step(self, action: int | None) -> None:
        """Act for `agent_selection`; raise `ActionError` for an action its mask excludes."""
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        mask = self._mask(agent)
        if action is None or not 0 <= action < len(mask) or not mask[action]:
            allowed = ", ".join(map(str, np.flatnonzero(mask)))
            raise ActionError(f"action {action} of {agent} is out of range: allowed are {allowed}")
        self._cumulative_rewards[agent] = 0.0
        self._clear_rewards()
        if agent == MEMORY:
            self._chosen_memory = int(action)
        elif agent == SERVER:
            self._chosen_server = int(action)
        else:
            self._decide(int(action))
        self.agent_selection = AGENTS[(AGENTS.index(agent) + 1) % len(AGENTS)]
        for other in AGENTS:
            self.infos[other] = {"action_mask": self._mask(other)}
        self._accumulate_rewards()

    def _decide(self, node: int) -> None:
        assert self._chosen_memory is not None
        assert self._chosen_server is not None
        position = self._nodes_of[self._chosen_server][node]
        self._seen, reward, terminated, _, _ = self.env.step(np.array([position, self._chosen_memory]))
        self.rewards = dict.fromkeys(AGENTS, reward)
        self.terminations = dict.fromkeys(AGENTS, terminated)
        self._open_decision()

    def _open_decision(self) -> None:
        self._chosen_memory = None
        self._chosen_server = None

    def _mask(self, agent: str) -> NDArray[np.int8]:
        mask = np.zeros(self.action_spaces[agent].n, dtype=np.int8)
        if agent == MEMORY:
            possible = self._memory_mask
        elif agent == SERVER:
            possible = self._server_mask
        else:
            # The node agent cannot act before a server is chosen; until then its mask is that of server 0.
            possible = self._nodes_ok[self._nodes_of[self._chosen_server or 0]]
        mask[: len(possible)] = possible
        return mask
