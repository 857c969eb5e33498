"""Gymnasium environment: one agent chooses a NUMA node and an amount of memory for each function."""

from __future__ import annotations

import pickle  # nosec B403
from collections.abc import Sequence
from operator import index
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from simulator.errors import SimulationError
from simulator.serverless.config import ClusterConfig
from simulator.serverless.errors import ActionError, MemoryAllocationError
from simulator.serverless.observation import Array, Observer
from simulator.serverless.raw_env import EnvLog, RawEnv
from simulator.serverless.template import WorkflowTemplate
from simulator.serverless.workflow_shapes import generate_workflows

MEMORY_CHOICES_MIB = (128, 256, 512, 1024)
DEFAULT_ARRIVAL_TIMES = tuple(5.0 * wf_id for wf_id in range(8))
RENT_WEIGHT = 10.0


class ServerlessEnv(gymnasium.Env[Array, NDArray[np.int64]]):
    """Gymnasium environment with the action (NUMA node, index of the memory choice).

    Observation: see `observation`. Reward for the time from a decision to the next:
    -w x integral of the active workflows over time (s) - (1 - w) x 10 x rent ($).
    The rewards of an episode therefore sum to -w x (sum of makespans) - (1 - w) x 10 x (rent).
    `info["log"]` is the `EnvLog`. Without arguments: 8 generated workflows on one server of each c5 type.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - gymnasium's own form

    def __init__(
        self,
        arrival_times: Sequence[float] = DEFAULT_ARRIVAL_TIMES,
        workflow_templates: Sequence[WorkflowTemplate] | None = None,
        cluster_config: ClusterConfig | None = None,
        *,
        memory_choices: Sequence[int] = MEMORY_CHOICES_MIB,
        performance_weight: float = 0.5,
    ) -> None:
        config = ClusterConfig.c5() if cluster_config is None else cluster_config
        templates = (
            generate_workflows(single_core_speed=config.single_core_speed)
            if workflow_templates is None
            else workflow_templates
        )
        if not memory_choices or min(memory_choices) < 1:
            raise MemoryAllocationError("memory_choices must be one or more amounts of at least 1 MiB")
        if not 0.0 <= performance_weight <= 1.0:
            raise SimulationError(f"performance_weight must be from 0 to 1, got {performance_weight}")
        self.raw = RawEnv(arrival_times, templates, config)
        self.memory_choices = tuple(memory_choices)
        self.performance_weight = performance_weight
        self.episode_seed = 0
        """Seed passed to `RawEnv.reset` for this episode."""
        self._observer = Observer(self.raw, max(memory_choices))
        self._masks = self._possible_actions()
        self.action_space = spaces.MultiDiscrete([len(self.raw.cluster.nodes), len(self.memory_choices)])
        self.observation_space = spaces.Box(0.0, 1.0, (self._observer.size,), np.float32)

    @property
    def observation_size(self) -> int:
        """Count of numbers in an observation."""
        return self._observer.size

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Start an episode; the templates are drawn with the seed."""
        super().reset(seed=seed)
        self.episode_seed = int(self.np_random.integers(2**63))
        self.raw.reset(seed=self.episode_seed)
        self._observer.mark_all_changed()
        return self._observer.observe(), {}

    def step(self, action: NDArray[np.int64]) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Place the current function; raise `ActionError` or `EpisodeOverError`, and then change nothing."""
        position, choice = self._checked(action)
        before, active = self.raw.now, self.raw.active_workflow_count
        log = self.raw.step_at(position, self.memory_choices[choice])
        reward = self._reward(log, before, active)
        return self._observer.observe(), reward, log.terminated, False, {"log": log}

    def action_masks(self) -> NDArray[np.bool_]:
        """Return one flag per option: the NUMA nodes, then the memory choices; False if impossible.

        Every pair of allowed options is possible: nodes too small for the smallest choice are excluded, and
        so are choices larger than the smallest remaining node.
        """
        return self._masks.copy()

    def snapshot(self) -> bytes:
        """Return the episode and the random generator; equal snapshots give equal roll-outs."""
        return pickle.dumps((self.raw.snapshot(), self.np_random))

    def restore(self, snapshot: bytes) -> Array:
        """Go back to a snapshot of this environment; return its observation. See `RawEnv.restore`."""
        raw, self.np_random = pickle.loads(snapshot)  # the caller's own, as documented  # nosec B301
        self.raw.restore(raw)
        self._observer.mark_all_changed()
        return self._observer.observe()

    def _checked(self, action: NDArray[np.int64]) -> tuple[int, int]:
        limits = (len(self.raw.cluster.nodes), len(self.memory_choices))
        try:
            position, choice = map(index, action)
        except (TypeError, ValueError):
            position, choice = -1, -1
        if not (0 <= position < limits[0] and 0 <= choice < limits[1]):
            raise ActionError(
                f"action {action!r} is out of range: expected a NUMA node from 0 to {limits[0] - 1} "
                f"and a memory choice from 0 to {limits[1] - 1}"
            )
        return position, choice

    def _reward(self, log: EnvLog, before: float, active: int) -> float:
        """Return the reward; arrivals happen only at decisions, so meanwhile the active count only falls."""
        after = self.raw.now
        waited = active * (after - before)
        for record in log.finished_workflow_records:
            waited -= after - record.completion_time
        weight = self.performance_weight
        return -weight * waited - (1.0 - weight) * RENT_WEIGHT * log.rent

    def _possible_actions(self) -> NDArray[np.bool_]:
        memories = np.array([node.memory for node in self.raw.cluster.nodes])
        choices = np.array(self.memory_choices)
        nodes = memories >= choices.min()
        if not nodes.any():
            raise MemoryAllocationError(
                f"the smallest memory choice, {choices.min()} MiB, is more than every NUMA node has"
            )
        masks: NDArray[np.bool_] = np.concatenate([nodes, choices <= memories[nodes].min()])
        return masks
