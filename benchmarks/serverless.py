"""Speed of the serverless simulator on one core: functions and environment steps per second.

`--workflows` are the public DAX files (see docs/simulators/serverless.md); without it, generated workflows
of the same size and kind are used. Times are processor time, the best of several runs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

from simulator.cli import InputErrors
from simulator.serverless import ClusterConfig, RawEnv, ServerlessEnv, WorkflowTemplate
from simulator.serverless.config import NumaNodes, ServerType
from simulator.serverless.run import run
from simulator.serverless.scheduler import HEURISTICS, PolicyScheduler, scheduler_policy
from simulator.serverless.workflow_files import read_workflows
from simulator.serverless.workflow_shapes import cybershake, montage

MEMORY_MIB = 128


def eight_nodes(memory_mib: int) -> ClusterConfig:
    """Return the cluster of four servers with two nodes each, of so much memory a node."""
    numa_nodes = NumaNodes(count=2, cpu=4, memory=memory_mib)
    server = ServerType(
        name="c5.2xlarge", count=4, hourly_rate=0.34, cold_start_latency=0.8, numa_nodes=numa_nodes
    )
    return ClusterConfig(servers=(server,))


EIGHT_NODES = eight_nodes(8192)

LARGE_MEMORY = eight_nodes(1000 * 8192)
"""Eight nodes on which nothing waits for memory: hundreds of containers run on a node at once."""


def generated() -> list[WorkflowTemplate]:
    """Return a Montage and a CyberShake of about 200 functions, each of 128 MiB and one thread."""
    random = np.random.default_rng(0)
    templates = []
    for name, (count, pairs) in (("montage", montage(65)), ("cybershake", cybershake(98))):
        runtimes = random.uniform(1e9, 3e10, size=count).astype(int).tolist()
        edges = tuple((*pair, 8_000_000) for pair in pairs)
        templates.append(WorkflowTemplate(tuple(runtimes), (MEMORY_MIB,) * count, (1,) * count, edges, name))
    return templates


def best(repeats: int, once: Callable[[], tuple[int, float]]) -> float:
    """Return units of work per second, the best of `repeats` runs."""
    return max(count / seconds for count, seconds in (once() for _ in range(repeats)))


def raw(
    templates: list[WorkflowTemplate], workflows: int, config: ClusterConfig, gap_s: float
) -> tuple[int, float]:
    """Return (functions, seconds) of an episode that places functions on the nodes in turn."""
    env = RawEnv([gap_s * wf_id for wf_id in range(workflows)], templates, config)
    env.reset(seed=1)
    nodes = len(env.cluster.nodes)
    count, terminated = 0, False
    began = time.process_time()
    while not terminated:
        terminated = env.step_at(count % nodes, MEMORY_MIB).terminated
        count += 1
    return count, time.process_time() - began


def environment(templates: list[WorkflowTemplate]) -> tuple[int, float]:
    """Return (steps, seconds) of an episode with observations, rewards and random actions."""
    env = ServerlessEnv([float(wf_id) for wf_id in range(5)], templates)
    env.reset(seed=1)
    nodes = np.random.default_rng(0).integers(len(env.raw.cluster.nodes), size=5000)
    actions = np.stack([nodes, np.zeros_like(nodes)], axis=1)
    count, terminated = 0, False
    began = time.process_time()
    while not terminated:
        _, _, terminated, _, _ = env.step(actions[count])
        count += 1
    return count, time.process_time() - began


def heuristic(templates: list[WorkflowTemplate], name: str) -> tuple[int, float]:
    """Return (functions, seconds) of a run under a policy, as `gpu-simulate serverless` states them."""
    env = RawEnv([float(wf_id) for wf_id in range(5)], templates, ClusterConfig.c5())
    summary = run(env, PolicyScheduler(scheduler_policy(name, env), MEMORY_MIB), seed=1).summary
    return summary.functions, summary.cpu_s


@click.command(cls=InputErrors, help=__doc__)
@click.option(
    "--workflows",
    type=click.Path(path_type=Path),
    multiple=True,
    help="A DAX or WfCommons file, or a folder; may be repeated.",
)
@click.option("--repeats", type=click.IntRange(1), default=10, show_default=True)
def main(workflows: tuple[Path, ...], repeats: int) -> None:
    templates = read_workflows(workflows) if workflows else generated()
    c5 = ClusterConfig.c5()
    cybershakes = [template for template in templates if "cybershake" in template.name.lower()] or templates
    rates: dict[str, Any] = {
        "spread": best(repeats, lambda: raw(templates, 5, c5, 1.0)),
        "congested": best(repeats, lambda: raw(templates, 20, EIGHT_NODES, 0.0)),
        "large_memory": best(3, lambda: raw(templates, 20, LARGE_MEMORY, 0.0)),
        "cybershake": best(3, lambda: raw(cybershakes, 20, EIGHT_NODES, 0.0)),
        "environment": best(repeats, lambda: environment(templates)),
    }
    for name in HEURISTICS:
        rates[f"policy_{name}"] = best(repeats, lambda name=name: heuristic(templates, name))  # type: ignore[misc]
    few = best(3, lambda: raw(templates, 20, EIGHT_NODES, 400.0))
    many = best(2, lambda: raw(templates, 200, EIGHT_NODES, 400.0))
    rates["cost_after_ten_times_as_many"] = round(few / many, 2)
    measured = {"unit": "functions or steps per second of processor time, the best of several runs"}
    print(json.dumps(measured | {name: round(rate, 2) for name, rate in rates.items()}, indent=2))


if __name__ == "__main__":
    main()
