"""Serverless workflows on rented servers with NUMA nodes: simulator and learning environment."""

from __future__ import annotations

from simulator.serverless.config import ClusterConfig
from simulator.serverless.raw_env import EnvLog, RawEnv
from simulator.serverless.template import WorkflowTemplate

__all__ = ["ClusterConfig", "EnvLog", "RawEnv", "WorkflowTemplate"]
