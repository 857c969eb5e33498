"""Random workflows, clusters and decisions, small and with many ties, for the property tests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from operator import itemgetter

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


# Strategies are made once: to make them anew for each example takes longer than the example.
WORK = st.one_of(
    st.sampled_from([0, 1, CORE_SPEED, 3600 * CORE_SPEED]),
    st.integers(0, 5000 * CORE_SPEED),
    st.integers(0, 99_999),
)
MEMORIES, PARALLELISMS = st.integers(1, MEMORY), st.integers(1, 5)
SIZES = st.sampled_from([0, 100, 1000, 7777])
ARRIVALS = st.one_of(st.sampled_from([0.0, 0.5, 1.0, 3600.0]), st.floats(0, 5000, allow_nan=False))


@cache
def templates(count: int) -> st.SearchStrategy[WorkflowTemplate]:
    """Return the templates of so many functions."""
    functions = [st.tuples(*[values] * count) for values in (WORK, MEMORIES, PARALLELISMS)]
    pairs = [(parent, child) for child in range(count) for parent in range(child)]
    edges = st.tuples(st.sampled_from(pairs), SIZES) if pairs else st.nothing()
    chosen = st.lists(edges, unique_by=itemgetter(0), max_size=min(8, len(pairs)))
    return st.builds(
        WorkflowTemplate, *functions, chosen.map(lambda edges: tuple((*pair, size) for pair, size in edges))
    )


@cache
def arrivals(count: int) -> st.SearchStrategy[tuple[tuple[float, ...], tuple[WorkflowTemplate, ...]]]:
    """Return the times and templates of so many workflows."""
    template = st.integers(1, 6).flatmap(templates)
    return st.tuples(st.tuples(*[ARRIVALS] * count), st.tuples(*[template] * count))


@cache
def decisions(nodes: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Return lists of decisions for so many NUMA nodes."""
    return st.lists(st.tuples(st.integers(0, nodes - 1), MEMORIES), min_size=1, max_size=10)


def servers(name: str) -> st.SearchStrategy[ServerType]:
    """Return the server types of that name."""
    numa_nodes = st.builds(NumaNodes, count=st.integers(1, 2), cpu=st.integers(1, 4), memory=st.just(MEMORY))
    return st.builds(
        ServerType,
        name=st.just(name),
        count=st.integers(1, 2),
        hourly_rate=st.sampled_from([0.085, 0.34, 1.0]),
        cold_start_latency=st.sampled_from([0.0, 0.5, 1.7]),
        numa_nodes=numa_nodes,
    )


CONFIGS = st.builds(
    ClusterConfig,
    memory_bandwidth=st.just(10_000),
    numa_bandwidth=st.just(5_000),
    network_bandwidth=st.just(1_000),
    single_core_speed=st.just(CORE_SPEED),
    servers=st.one_of(st.tuples(servers("type0")), st.tuples(servers("type0"), servers("type1"))),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    config = draw(CONFIGS)
    times, workflows = draw(st.integers(1, 5).flatmap(arrivals))
    return Case(list(times), list(workflows), config, draw(decisions(config.numa_node_count)))
