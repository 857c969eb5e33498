"""A few seeds of the fault matrix on a real Airflow on PostgreSQL: directly, and through its tasks."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.faults.airflow_on_postgres import what_is_missing
from tests.faults.processes import ROOT

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(what_is_missing()), reason=what_is_missing()),
]


def matrix(*options: str) -> dict[str, Any]:
    """Run the command in a process of its own, with that Airflow, and return its report on the seeds."""
    command = [sys.executable, "-m", "tests.faults.run", "--store", "variables", "--workers", "6", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "\n{" in done.stdout, done.stdout[-4000:] + done.stderr[-4000:]
    outcomes, _, summary = done.stdout.partition("\n{")
    print(outcomes)
    assert done.returncode == (1 if json.loads("{" + summary)["broken"] else 0)
    return dict(json.loads("{" + summary))


def test_processes_on_airflows_database_break_no_promise() -> None:
    summary = matrix("--seeds", "2", "--seconds", "4")
    assert summary["broken"] == 0
    assert summary["fewest_operations"] > 20
    assert summary["grants"] > 10
    assert summary["faults"] > 6


def test_tasks_on_the_execution_api_break_no_promise() -> None:
    summary = matrix("--tasks", "--seeds", "1")
    assert summary["broken"] == 0
    assert summary["fewest_operations"] > 20
    assert summary["grants"] > 5
    assert summary["faults"] > 10


def test_tasks_without_the_lock_are_found_to_double_book() -> None:
    assert matrix("--tasks", "--bug", "no lock", "--seeds", "2", "--seconds", "10")["broken"] > 0
