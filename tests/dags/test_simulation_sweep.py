"""Simulation sweep inside a real Airflow: its tasks are mapped, and the last one writes the report."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

RUN = """
import json, sys
sys.path.insert(0, {dags!r})
from simulation_sweep import sweep_dag
run = sweep_dag.test(run_conf={conf!r})
states = [(ti.task_id, ti.map_index, str(ti.state)) for ti in run.get_task_instances()]
print("STATES", json.dumps(states))
"""


@pytest.mark.e2e
def test_sweep_in_airflow() -> None:
    pytest.importorskip("airflow")
    with tempfile.TemporaryDirectory(prefix="sweep-") as home:
        environment = {
            **os.environ,
            "AIRFLOW_HOME": home,
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
            "PYTHONPATH": str(ROOT),
        }
        subprocess.run(
            [sys.executable, "-m", "airflow", "db", "migrate"],
            env=environment,
            check=True,
            capture_output=True,
        )
        conf = {"folder": f"{home}/out", "policies": ["first_fit", "fgd"], "orders": ["fifo", "fair_share"]}
        code = RUN.format(dags=str(ROOT / "dags"), conf=conf)
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240
        )
        assert "STATES" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
        assert done.stdout.count('"run", ') == 4
        assert "failed" not in done.stdout.split("STATES")[1]
        assert "data:image/png" in Path(home, "out", "report.html").read_text()
