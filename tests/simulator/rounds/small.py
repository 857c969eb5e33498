"""Small data of both studies, written where a test wants them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from simulator.cli import main

JOB_COLUMNS = "name,time,application,num_replicas,batch_size"


def study_replay(study: str, folder: Path, *options: str) -> Result:
    command = ["replay", "--trace", study, "--data", str(folder), "--json", *options]
    return CliRunner().invoke(main, command)


def write_pollux(folder: Path, *jobs: str, epochs: int = 2, epoch_progress: float = 100.0) -> Path:
    """Write an application whose step takes 1 s, of which 0.2 s are synchronisation, wherever it runs.

    Without gradient noise the gain is 1, so progress is one a second and an epoch 100 s.
    """
    application = folder / "applications" / "toy"
    application.mkdir(parents=True)
    limits = {"epochs": epochs, "init_batch_size": 8, "max_batch_size": 64, "min_local_bsz": 1,
              "max_local_bsz": 64}  # fmt: skip
    (folder / "applications.json").write_text(json.dumps({"toy": limits}))
    shapes = ("1", "2", "3", "4", "11", "12", "13", "14", "22", "23", "24", "33", "34", "44")
    rows = [f"{shape},{size},1.0,0.2" for shape in shapes for size in (1, 64)]
    (application / "placements.csv").write_text(
        "\n".join(["placement,local_bsz,step_time,sync_time", *rows]) + "\n"
    )
    wide = [
        f"{nodes},{gpus},{size},1.0,0.2"
        for nodes, gpus in ((1, 4), (4, 16), (16, 16), (16, 64))
        for size in (1, 64)
    ]
    (application / "scalability.csv").write_text(
        "\n".join(["num_nodes,num_replicas,local_bsz,step_time,sync_time", *wide]) + "\n"
    )
    for size in (8, 64):
        lines = [f"{epoch_progress * (k + 1)},{100 * (k + 1)},0,1.0,0.0" for k in range(epochs)]
        (application / f"validation-{size}.csv").write_text(
            "\n".join(["progress,iteration,metric,grad_sqr,grad_var", *lines]) + "\n"
        )
    write_workload(folder, *jobs)
    return folder


def write_workload(folder: Path, *jobs: str) -> None:
    """Write the jobs as workload 1 of load 1.0."""
    path = folder / "workloads" / "1.0" / "workload-1.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([JOB_COLUMNS, *jobs]) + "\n")


def shockwave_job(job: int, **given: Any) -> dict[str, Any]:
    """Return a job of ten seconds on one GPU."""
    usual = {"job": job, "model": "LM", "batch_size": 40, "gpus": 1, "mode": "static", "steps": 100,
             "arrival_s": 0.0, "exclusive_s": 10.0}  # fmt: skip
    return usual | given


def write_shockwave(folder: Path, *jobs: dict[str, Any], noise: dict[str, Any] | None = None) -> Path:
    """Write the jobs and tables in which LM makes ten steps a second on a GPU, twice that on two."""
    folder.mkdir(parents=True, exist_ok=True)
    rates = {size: {"1": 10.0, "2": 20.0, "4": 40.0} for size in ("20", "40", "80")}
    tables = {"steps_per_s": {"LM": rates}, "dataset_size": {"LM": 400}}
    (folder / "throughputs.json").write_text(json.dumps(tables))
    (folder / "gns.json").write_text(json.dumps(noise or {}))
    (folder / "jobs.json").write_text(json.dumps(jobs))
    return folder
