"""Vector environment: several environments stepped together in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray

from simulator.serverless.env import ServerlessEnv


class ServerlessVectorEnv(SyncVectorEnv):
    """Vector of `num_envs` equal environments; each roll-out equals that of a single one.

    An environment that has ended is reset by the next step, whose action it ignores (`NEXT_STEP`, as
    `metadata["autoreset_mode"]` declares), unless `autoreset_mode` says otherwise.
    """

    def __init__(
        self,
        num_envs: int = 1,
        *,
        autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP,
        **env_arguments: Any,
    ) -> None:
        self._single = [ServerlessEnv(**env_arguments) for _ in range(num_envs)]
        super().__init__([partial(_same, env) for env in self._single], autoreset_mode=autoreset_mode)

    def action_masks(self) -> NDArray[np.bool_]:
        """Return the masks, one row per environment."""
        return np.stack([env.action_masks() for env in self._single])


def _same(env: ServerlessEnv) -> ServerlessEnv:
    return env
