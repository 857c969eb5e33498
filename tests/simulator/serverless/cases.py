"""Random workflows, clusters and decisions, small and with many ties, for the property tests."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from simulator.serverless.config import ClusterConfig, NumaNodes, ServerType
from simulator.serverless.raw_env import EnvLog, RawEnv
from simulator.serverless.template import WorkflowTemplate

CORE_SPEED = 10_000
MEMORY = 8


@dataclass(frozen=True)
class Case:
    """Episode in which template i arrives at arrival i, and decisions are used in rotation."""

    arrivals: list[float]
    templates: list[WorkflowTemplate]
    config: ClusterConfig
    decisions: list[tuple[int, int]]

    def env(self) -> RawEnv:
        """Return an environment in which every workflow has its own template."""
        env = RawEnv(self.arrivals, self.templates, self.config)
        env.begin(range(len(self.templates)))
        return env

    def play(self, env: RawEnv) -> list[EnvLog]:
        logs: list[EnvLog] = []
        while env.current_function is not None:
            logs.append(env.step_at(*self.decisions[len(logs) % len(self.decisions)]))
        return logs


@st.composite
def templates(draw: st.DrawFn) -> WorkflowTemplate:
    count = draw(st.integers(1, 6))
    work = st.one_of(
        st.sampled_from([0, 1, CORE_SPEED, 3600 * CORE_SPEED]),
        st.integers(0, 5000 * CORE_SPEED),
        st.integers(0, 99_999),
    )
    pairs = [(parent, child) for child in range(count) for parent in range(child)]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=8)) if pairs else []
    return WorkflowTemplate(
        tuple(draw(st.lists(work, min_size=count, max_size=count))),
        tuple(draw(st.lists(st.integers(1, MEMORY), min_size=count, max_size=count))),
        tuple(draw(st.lists(st.integers(1, 5), min_size=count, max_size=count))),
        tuple((*pair, draw(st.sampled_from([0, 100, 1000, 7777]))) for pair in chosen),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count = draw(st.integers(1, 5))
    servers = tuple(
        ServerType(
            name=f"type{kind}",
            count=draw(st.integers(1, 2)),
            hourly_rate=draw(st.sampled_from([0.085, 0.34, 1.0])),
            cold_start_latency=draw(st.sampled_from([0.0, 0.5, 1.7])),
            numa_nodes=NumaNodes(count=draw(st.integers(1, 2)), cpu=draw(st.integers(1, 4)), memory=MEMORY),
        )
        for kind in range(draw(st.integers(1, 2)))
    )
    config = ClusterConfig(
        memory_bandwidth=10_000, numa_bandwidth=5_000, network_bandwidth=1_000, single_core_speed=CORE_SPEED,
        servers=servers,
    )  # fmt: skip
    arrival = st.one_of(st.sampled_from([0.0, 0.5, 1.0, 3600.0]), st.floats(0, 5000, allow_nan=False))
    decision = st.tuples(st.integers(0, config.numa_node_count - 1), st.integers(1, MEMORY))
    return Case(
        draw(st.lists(arrival, min_size=count, max_size=count)),
        draw(st.lists(templates(), min_size=count, max_size=count)),
        config,
        draw(st.lists(decision, min_size=1, max_size=10)),
    )
