"""`gpu-simulate oasis`, end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from simulator.cli import main


def simulate(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["oasis", *map(str, arguments)])


def summary(*arguments: object) -> dict[str, Any]:
    result = simulate(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_json_has_one_figure_a_seed() -> None:
    found = summary("--seeds", "1-3", "--load", 1, "--jobs", 6)
    oasis = found["algorithms"]["oasis"]
    assert all(len(oasis[key]) == 3 for key in ("utility", "accepted", "alpha"))
    assert oasis["decision_ms_mean"] > 0
    assert found["load"] == pytest.approx([1.0] * 3, abs=0.1)


def test_same_seed_same_figures() -> None:
    first, second = (summary("--seed", 4, "--load", 0.8)["algorithms"]["oasis"] for _ in range(2))
    assert first["utility"] == second["utility"]


def test_a_saved_instance_gives_the_same_result(tmp_path: Path) -> None:
    drawn = summary("--seed", 5, "--load", 1, "--mixed", "--save-instances", tmp_path)
    read = summary("--seed", 5, "--instance", tmp_path / "instance-5.json")
    assert read["algorithms"]["oasis"]["utility"] == drawn["algorithms"]["oasis"]["utility"]
