"""`gpu-simulate edge` end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from simulator.cli import main
from simulator.edge.dataset import TIERS
from simulator.edge.dataset_files import read_dataset
from simulator.edge.published import published_score
from tests.simulator.refusing import assert_refused

KEYS = {"score", "task_rate", "job_rate", "mean_jct_s", "simulated_s", "wall_s", "failed_commands"}


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["edge", *map(str, arguments)])


@pytest.mark.parametrize("policy", ["water_gate", "timetable"])
def test_a_plan_is_written_drawn_and_scored_again_equally(tables: Path, tmp_path: Path, policy: str) -> None:
    out = tmp_path / "out"
    planned = call("--data", tables, "--policy", policy, "--output-dir", out, "--json")
    assert planned.exit_code == 0, planned.output
    summary = json.loads(planned.stdout)
    assert summary.keys() == KEYS
    assert summary["job_rate"] == 1
    assert json.loads((out / "summary.json").read_text()) == summary
    assert (out / "gantt-host.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "report.html").read_text()
    assert f"{policy} scores {summary['score']:,.2f}" in page
    assert page.index('class="verdict"') < page.index("<table>") < page.index("<svg")
    again = json.loads(call("--data", tables, "--score-only", out, "--json").stdout)
    assert {**again, "wall_s": 0} == {**summary, "wall_s": 0}


def test_a_mean_with_unfinished_jobs_is_told_as_one(tables: Path, tmp_path: Path) -> None:
    call("--data", tables, "--policy", "water_gate", "--output-dir", tmp_path)
    for plan in tmp_path.glob("*.csv"):
        plan.write_text(plan.read_text().partition("\n")[0] + "\n")
    told = call("--data", tables, "--score-only", tmp_path).stdout.replace("\n", " ")
    mean = "the mean completion time is 2.8 hours, an unfinished job counted as 10,000 s."
    assert f"0 % of the jobs are done; {mean}" in told


def test_a_generated_dataset_is_written_beside_its_plan(tmp_path: Path) -> None:
    result = call("--seed", 4, "--jobs", 3, "--policy", "water_gate", "--output-dir", tmp_path)
    assert result.exit_code == 0
    assert "with host+bs+ue: 100 % of the jobs are done" in result.stdout
    assert len(read_dataset(tmp_path / "generated-4").jobs) == 3
    renamed = (tmp_path / "generated-4").rename(tmp_path / "a $^$")  # a formula to matplotlib
    scored = call("--data", renamed, "--score-only", tmp_path, "--output-dir", tmp_path / "charts", "--json")
    assert scored.exit_code == 0, scored.output
    assert json.loads(scored.stdout) == json.loads((tmp_path / "summary.json").read_text()) | {
        "wall_s": json.loads(scored.stdout)["wall_s"]
    }


def test_the_table_has_the_published_scores_of_a_public_dataset(shared_data: Path) -> None:
    folder = shared_data / "edge"
    result = call("--data", folder / "test0", "--score-only", folder / "published_plans" / "test0")
    assert "29,035.78" in result.stdout
    assert "That is 276.36 below the published plan." in result.stdout
    cells = [line.strip("│ ").split() for line in result.stdout.splitlines()]
    assert ["published", "│", "host+bs+ue", "│", "29,312.14", "│", "100", "%", "│", "688.86"] in cells
    assert "957 commands had no effect (match: no such executor)." in result.stdout


def test_a_scored_plan_is_told_with_the_devices_that_it_uses(tables: Path, tmp_path: Path) -> None:
    public = tables.rename(tmp_path / "test0")
    call("--data", public, "--tiers", "host", "--output-dir", tmp_path / "out")
    scored = call("--data", public, "--score-only", tmp_path / "out").stdout.replace("\n", " ")
    assert " with host: 100 % of the jobs are done" in scored
    assert "above the published plan" in scored


def test_a_plan_too_long_for_a_timetable_is_refused(tables: Path, tmp_path: Path) -> None:
    path = tables / "task_table.csv"
    path.write_text(path.read_text() + "".join(f"{i},1,0,[],[],1000000\n" for i in range(5, 200)))
    result = call("--data", tables, "--output-dir", tmp_path / "out")
    assert result.exit_code == 2
    assert "s for 6 devices is too large; plan with --policy water_gate" in result.stderr
    assert not (tmp_path / "out").exists()


def test_only_public_datasets_have_a_published_score() -> None:
    assert [published_score("test9", tiers) for tiers in TIERS] == [21016.49, 24715.19, 25646.48]
    assert not any(published_score(name, "host") for name in ("test10", "test", "7", "generated-1"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere"], "Error: nowhere: no such folder of tables"),
        (["--data", "{tables}", "--jobs", "3"], "--jobs is for a generated dataset"),
        (
            ["--data", "{tables}", "--score-only", "x", "--policy", "timetable"],
            "--policy is for planning; it cannot be used with --score-only",
        ),
        (["--data", "{tables}", "--score-only", "x", "--seed", "0"], "--seed has no effect on a given"),
        (["--data", "{tables}", "--policy", "water_gate", "--seed", "1"], "--seed has no effect on a given"),
        (
            ["--data", "{tables}", "--score-only", "nowhere"],
            "nowhere/executor.csv: cannot be read: No such file",
        ),
        (["--data", "{tables}", "--tiers", "ue"], "Invalid value for '--tiers'"),
        (["--data", "{tables}", "--policy", "magic"], "Invalid value for '--policy'"),
        (["--seed", "-1"], "Invalid value for '--seed'"),
        (["--jobs", "0"], "Invalid value for '--jobs'"),
    ],
)
def test_invalid_input_gives_one_line_and_writes_nothing(
    tables: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    out = tmp_path / "out"
    result = call(*(a.replace("{tables}", str(tables)) for a in arguments), "--output-dir", out)
    assert_refused(result, message)
    assert not out.exists()
