"""Serverless workflows on rented servers with NUMA nodes: simulator and learning environment."""

from __future__ import annotations

import gymnasium

from simulator.serverless.config import ClusterConfig
from simulator.serverless.env import ServerlessEnv
from simulator.serverless.raw_env import EnvLog, RawEnv
from simulator.serverless.template import WorkflowTemplate

gymnasium.register(
    id="ServerlessWorkflow-v0",
    entry_point="simulator.serverless.env:ServerlessEnv",
    vector_entry_point="simulator.serverless.vector:ServerlessVectorEnv",
)

__all__ = ["ClusterConfig", "EnvLog", "RawEnv", "ServerlessEnv", "WorkflowTemplate"]
