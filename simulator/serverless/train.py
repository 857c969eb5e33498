"""Training of an agent with MaskablePPO, compared with every heuristic on held-out episodes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from resource_manager.cli.base import FOLDER, Command
from resource_manager.errors import how_to_install
from simulator.io.files import write_json
from simulator.present.figures import drawing, legend_below, new_figure, save_png
from simulator.present.palette import light, style_of
from simulator.serverless.config import ClusterConfig
from simulator.serverless.env import RENT_WEIGHT, ServerlessEnv
from simulator.serverless.run import run
from simulator.serverless.scheduler import HEURISTICS, PolicyScheduler, scheduler_policy
from simulator.serverless.workflow_shapes import generate_workflows

SERVER_TYPES = 3
"""Count of c5 types used, from the smallest: four NUMA nodes on three servers."""

WORKFLOW_SIZE = 4
ARRIVAL_TIMES = tuple(4.0 * wf_id for wf_id in range(6))
TRAINING_ENVS = 8
CURVE_SEEDS = range(1_000_000, 1_000_010)
TEST_SEEDS = range(2_000_000, 2_000_050)
"""Seeds of the draws of workflows; training uses other seeds."""

Choose = Callable[[ServerlessEnv, NDArray[np.float32]], NDArray[np.int64]]


def make_env() -> ServerlessEnv:
    """Return the task: six workflows, drawn from four shapes, one every four seconds, on four NUMA nodes."""
    return ServerlessEnv(
        ARRIVAL_TIMES,
        generate_workflows(size=WORKFLOW_SIZE),
        ClusterConfig(servers=ClusterConfig.c5().servers[:SERVER_TYPES]),
    )


def play(env: ServerlessEnv, choose: Choose, seed: int) -> dict[str, float]:
    """Play one episode; return its return, mean makespan (s) and rent ($)."""
    seen, _ = env.reset(seed=seed)
    total, rent, ends, terminated = 0.0, 0.0, {}, False
    while not terminated:
        seen, reward, terminated, _, info = env.step(choose(env, seen))
        total += reward
        rent += info["log"].rent
        ends.update(info["log"].finished_workflow_records)
    makespans = [ends[workflow.wf_id] - workflow.arrival_time for workflow in env.raw.workload]
    return {"return": total, "mean_makespan_s": sum(makespans) / len(makespans), "rent": rent}


def play_heuristic(env: ServerlessEnv, name: str, seed: int) -> dict[str, float]:
    """Play the same episode with a placement policy and the memory each function requires."""
    env.reset(seed=seed)  # draws the seed of the episode as `play` does
    episode = run(env.raw, PolicyScheduler(scheduler_policy(name, env.raw, seed)), seed=env.episode_seed)
    waited = env.performance_weight * sum(episode.makespans_s)
    paid = (1.0 - env.performance_weight) * RENT_WEIGHT * episode.summary.rent
    return {
        "return": -waited - paid,
        "mean_makespan_s": episode.summary.mean_makespan_s,
        "rent": episode.summary.rent,
    }


def mean(results: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each number, and the standard error of the mean return."""
    means = {name: float(np.mean([result[name] for result in results])) for name in results[0]}
    spread = float(np.std([result["return"] for result in results], ddof=1))
    return {**means, "return_standard_error": spread / len(results) ** 0.5}


def random_actions(seed: int = 0) -> Choose:
    """Return an agent that draws uniformly among the allowed NUMA nodes and memory choices."""
    random = np.random.default_rng(seed)

    def choose(env: ServerlessEnv, seen: NDArray[np.float32]) -> NDArray[np.int64]:
        nodes, choices = np.split(env.action_masks(), [len(env.raw.cluster.nodes)])
        return np.array([random.choice(np.flatnonzero(nodes)), random.choice(np.flatnonzero(choices))])

    return choose


def train(steps: int, seed: int, evaluations: int = 30) -> tuple[Choose, list[tuple[int, float]]]:
    """Train; return the agent and the learning curve: (steps, mean return over `CURVE_SEEDS`)."""
    import torch
    from sb3_contrib import MaskablePPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    torch.set_num_threads(1)
    vector = VecNormalize(DummyVecEnv([make_env] * TRAINING_ENVS), norm_obs=False, gamma=0.995)
    model = MaskablePPO(
        "MlpPolicy",
        vector,
        n_steps=256,
        batch_size=256,
        n_epochs=5,
        learning_rate=lambda left: 1e-3 * left,
        gamma=0.995,
        gae_lambda=0.98,
        ent_coef=0.005,
        policy_kwargs={"net_arch": [64, 64]},
        seed=seed,
        device="cpu",
    )

    def choose(env: ServerlessEnv, seen: NDArray[np.float32]) -> NDArray[np.int64]:
        action: NDArray[np.int64] = model.predict(seen, action_masks=env.action_masks(), deterministic=True)[
            0
        ]
        return action

    curve: list[tuple[int, float]] = []
    began = time.perf_counter()
    env = make_env()

    class Curve(BaseCallback):
        """Callback that evaluates the agent on the held-out episodes at regular steps."""

        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            if self.num_timesteps >= len(curve) * steps / evaluations:
                result = mean([play(env, choose, curve_seed) for curve_seed in CURVE_SEEDS])["return"]
                curve.append((self.num_timesteps, result))
                seconds = time.perf_counter() - began
                click.echo(f"{self.num_timesteps:>8} steps {result:>9.1f} return {seconds:>6.0f} s", err=True)

    model.learn(steps, callback=Curve())
    curve.append((model.num_timesteps, mean([play(env, choose, s) for s in CURVE_SEEDS])["return"]))
    return choose, curve


def draw_curve(curve: list[tuple[int, float]], returns: dict[str, float], path: Path) -> None:
    """Draw the learning curve and the returns of the heuristics on the same episodes."""
    with drawing():
        figure, axes = new_figure()
        axes.plot(*zip(*curve, strict=True), color=light("ink"), linewidth=2, label="MaskablePPO")
        for place, (name, value) in enumerate(returns.items()):
            axes.axhline(value, linewidth=1, label=name, **style_of(place))
        axes.set_xlabel("training steps (decisions)")
        axes.set_ylabel("mean return, 10 held-out episodes")
        legend_below(axes)
        save_png(figure, path)


@click.command(cls=Command)
@click.option("--steps", type=click.IntRange(min=1), default=400_000, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--output-dir", type=FOLDER, required=True)
def main(steps: int, seed: int, output_dir: Path) -> None:
    """Train MaskablePPO; compare it with random actions and every heuristic on 50 held-out episodes."""
    began = time.perf_counter()
    try:
        choose, curve = train(steps, seed)
    except ModuleNotFoundError as error:
        sys.exit(f"training needs {error.name}: {how_to_install('rl')}")
    trained_s = time.perf_counter() - began
    env = make_env()
    players: dict[str, Callable[[int], dict[str, float]]] = {
        "MaskablePPO": lambda test_seed: play(env, choose, test_seed),
        "random actions": lambda test_seed: play(env, random_actions(test_seed), test_seed),
    }
    for name in HEURISTICS:
        players[name] = lambda test_seed, name=name: play_heuristic(env, name, test_seed)  # type: ignore[misc]
    table = {name: mean([player(test_seed) for test_seed in TEST_SEEDS]) for name, player in players.items()}
    levels = {
        name: mean([player(curve_seed) for curve_seed in CURVE_SEEDS])["return"]
        for name, player in players.items()
        if name != "MaskablePPO"
    }
    summary: dict[str, Any] = {"steps": steps, "seed": seed, "training_s": trained_s, "results": table}
    write_json(output_dir / "training.json", {**summary, "curve": curve})
    draw_curve(curve, levels, output_dir / "learning_curve.png")
    for name, result in sorted(table.items(), key=lambda item: -item[1]["return"]):
        click.echo(
            f"{name:<16} return {result['return']:>8.1f} ± {result['return_standard_error']:<5.1f}"
            f" makespan {result['mean_makespan_s']:>7.2f} s  rent {result['rent']:>6.3f} $"
        )


if __name__ == "__main__":
    main()
