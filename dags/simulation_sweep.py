"""Comparison of policies and queue orders on one workload: `gpu-simulate compare` with a mapped task per run.

Parameters: `nodes` and `jobs` are the files of your workload (docs/simulators/replay.md describes their
columns); without them a small workload is generated. The last task returns the findings.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from airflow.sdk import Param, dag, task


@dag(
    description="Compare placement policies and queue orders on one workload, one mapped task per run.",
    schedule=None,
    start_date=datetime(2025, 1, 1),
    catchup=False,
    tags=["gpu", "simulation"],
    doc_md=__doc__,
    params={
        "nodes": Param("", type="string", description="File of the servers, CSV or JSON"),
        "jobs": Param("", type="string", description="File of the jobs, CSV or JSON"),
        "policies": Param(["first_fit", "best_fit", "fgd"], type="array"),
        "orders": Param(["fifo", "fifo+backfill", "fair_share"], type="array"),
        # A default in the form, for a machine with one user.
        "folder": Param("/tmp/simulation_sweep", type="string", description="Folder of the report"),  # nosec B108
    },
)
def simulation_sweep() -> None:
    @task
    def cases(params: dict[str, Any]) -> list[dict[str, Any]]:
        """Return every run as plain values, which Airflow can pass on."""
        from simulator.replay.comparison import Source, cases_as_values, check
        from simulator.replay.sample import write_sample

        nodes, jobs = params["nodes"], params["jobs"]
        if not nodes or not jobs:
            nodes, jobs = map(str, write_sample(Path(params["folder"])))
        source = Source("jobs", (nodes, jobs))
        check(source, params["policies"], params["orders"], [0])
        return cases_as_values(source, params["policies"], params["orders"], [0])

    @task
    def run(case: dict[str, Any]) -> dict[str, Any]:
        """Simulate one run and return its metrics."""
        from simulator.replay.comparison import case_from_values, run_case

        return run_case(case_from_values(case))

    @task
    def report(results: list[dict[str, Any]], params: dict[str, Any]) -> list[str]:
        """Write the report and return what it says first."""
        from simulator.io.files import write_text
        from simulator.replay.report import page_of
        from simulator.replay.verdict import cautions, verdict

        found = list(results)
        write_text(Path(params["folder"]) / "report.html", page_of("Simulation sweep", found))
        return [*verdict(found), *cautions(found)]

    report(run.expand(case=cases()))


sweep_dag = simulation_sweep()
