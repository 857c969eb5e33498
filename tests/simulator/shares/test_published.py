"""Shares of Gavel's and POP's instances: every published and every filled value comes out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from simulator.cli import main
from simulator.shares.division import Options, divide_fleet
from simulator.shares.instance import read_instance
from simulator.timing import timed

KNOWLEDGE = ["aware", "agnostic"]
TEAMS = ["teams-fairness-random", "teams-fairness-measured"]


def expected(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "expected" / f"{name}.json").read_text())
    return found


def shares(path: Path, *options: str) -> dict[str, Any]:
    result = CliRunner().invoke(main, ["shares", str(path), *options, "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("parts", ["1", "2", "4", "8"])
def test_every_packed_job_has_the_published_throughput(gavel_data: Path, parts: str) -> None:
    path = gavel_data / "instances" / "jobs-2048.json"
    published = expected(gavel_data, "jobs-2048")["parts"][parts]
    found = shares(path, "--policy", "max_min", "--pack", "--parts", parts)
    throughput = np.array(list(found["throughput"].values()))
    assert throughput == pytest.approx(published["throughput"], rel=1e-6)
    assert (found["jobs"], found["parts"], len(found["levels"])) == (2048, int(parts), int(parts))
    undivided = shares(path, "--policy", "max_min", "--pack")
    ratios = throughput / np.array(list(undivided["throughput"].values()))
    assert ratios.mean() == pytest.approx(published["mean_ratio"], abs=1e-6)
    assert ratios.std() == pytest.approx(published["std_ratio"], abs=1e-6)


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize("options", [{"pack": True}, {}, {"agnostic": True}], ids=str)
def test_2048_jobs_take_half_a_second(gavel_data: Path, options: dict[str, Any], parts: int) -> None:
    with timed() as times:
        instance = read_instance(gavel_data / "instances" / "jobs-2048.json")
        divide_fleet(instance, Options("max_min", parts=parts, **options))
    assert times.cpu_s < (1 if parts == 8 else 0.5)


@pytest.mark.parametrize("kind", ["unpacked", "agnostic"])
def test_the_level_of_every_part(gavel_data: Path, kind: str) -> None:
    options = ["--agnostic"] if kind == "agnostic" else []
    for parts, levels in expected(gavel_data, "jobs-2048")[kind]["level"].items():
        path = gavel_data / "instances" / "jobs-2048.json"
        found = shares(path, "--policy", "max_min", "--parts", parts, *options)
        assert found["levels"] == pytest.approx(levels, rel=1e-6)


@pytest.mark.parametrize("knowledge", KNOWLEDGE)
@pytest.mark.parametrize("name", [*TEAMS, "example"])
def test_filled_levels(gavel_data: Path, name: str, knowledge: str) -> None:
    """Row n is the first n jobs."""
    instance = read_instance(gavel_data / "instances" / f"{name}.json")
    for count, row in expected(gavel_data, name)[knowledge].items():
        part = replace(instance, jobs=instance.jobs[: int(count)])
        found = divide_fleet(part, Options("two_level", agnostic=knowledge == "agnostic"))
        assert found.normalised == pytest.approx(row["filled"], abs=1e-6)


@pytest.mark.parametrize("knowledge", KNOWLEDGE)
@pytest.mark.parametrize("name", TEAMS)
def test_printed_figures_at_once_with_ecos(gavel_data: Path, name: str, knowledge: str) -> None:
    pytest.importorskip("ecos", reason="the printed figures are those of ECOS: pip install '.[ecos]'")
    instance = read_instance(gavel_data / "instances" / f"{name}.json")
    options = Options("two_level", agnostic=knowledge == "agnostic", settle="at_once", solver="ecos")
    for count, row in expected(gavel_data, name)[knowledge].items():
        found = divide_fleet(replace(instance, jobs=instance.jobs[: int(count)]), options)
        assert found.normalised.round(3).tolist() == row["printed"]


def test_the_example_of_the_command(gavel_data: Path) -> None:
    path = gavel_data / "instances" / "example.json"
    found = shares(path, "--policy", "two_level")
    assert list(found["normalised"].values()) == pytest.approx(
        expected(gavel_data, "example")["aware"]["6"]["filled"], abs=1e-6
    )
    assert list(found["gpus"]["llm-large"]) == ["A100", "H100"]
