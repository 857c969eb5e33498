"""The command on the public workflows, and its error messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from simulator.cli import main

CHAIN = """<adag>
  <job id="ID0" runtime="2"><uses file="a" link="output" size="1000"/></job>
  <job id="ID1" runtime="3"><uses file="a" link="input" size="1000"/></job>
  <child ref="ID1"><parent ref="ID0"/></child>
</adag>
"""


def simulate(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["serverless", *map(str, arguments)])


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    path = tmp_path / "chain.dax"
    path.write_text(CHAIN)
    return path


def test_public_workflows_run_on_the_public_cluster(shared_data: Path, tmp_path: Path) -> None:
    folder = shared_data / "serverless"
    log = tmp_path / "log.jsonl"
    result = simulate(
        "--workflows", folder, "--cluster", folder / "cluster_config.yaml", "--arrivals", "0,1,2",
        "--policy", "least_loaded", "--memory", "128", "--seed", 3, "--log", log, "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    summary = json.loads(result.stdout)
    assert set(summary) == {
        "functions", "workflows", "mean_makespan_s", "last_completion_s", "rent", "wall_s", "cpu_s",
        "functions_per_s",
    }  # fmt: skip
    assert summary["functions_per_s"] == pytest.approx(600 / summary["cpu_s"])
    assert (summary["functions"], summary["workflows"]) == (600, 3)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert list(rows[0]) == [
        "wf_id", "fn_id", "server_name", "server_id", "numa_node_id", "submission_time", "creation_time",
        "start_time", "completion_time", "rent",
    ]  # fmt: skip
    assert len(rows) == 600
    assert max(row["completion_time"] for row in rows) == summary["last_completion_s"]
    assert sum(row["rent"] for row in rows) == pytest.approx(summary["rent"])


def test_a_chain_has_the_expected_makespan_and_rent(chain: Path) -> None:
    """Cold start 0.5 s, 2 s, 1000 bytes at 100 GB/s, 3 s; one hour of c5.large."""
    result = simulate("--workflows", chain, "--json")
    summary = json.loads(result.stdout)
    assert summary["last_completion_s"] == pytest.approx(0.5 + 2 + 1e-8 + 3, abs=1e-9)
    assert summary["rent"] == 0.085


def test_a_server_name_may_contain_any_characters(tmp_path: Path) -> None:
    """The name is a formula to matplotlib."""
    (tmp_path / "cluster.yaml").write_text(
        "servers: [{name: a $^$, count: 1, hourly_rate: 1, cold_start_latency: 1,"
        " numa_nodes: {count: 1, cpu: 4, memory: 8192}}]"
    )
    result = simulate(
        "--workflows", "chain:2", "--cluster", tmp_path / "cluster.yaml", "--output-dir", tmp_path
    )
    assert result.exit_code == 0, result.output
    assert (tmp_path / "gantt.png").exists()


def test_a_generated_shape_needs_no_file() -> None:
    result = simulate("--workflows", "montage:5", "chain:3", "--arrivals", "0,1", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["functions"] in {6, 23, 40}
    assert simulate("--workflows", "chain:3", "--seed", 1).stdout.splitlines()[1].split() == [
        "functions",
        "3",
    ]


def test_plots_are_written(chain: Path, tmp_path: Path) -> None:
    result = simulate("--workflows", chain, "--arrivals", "poisson:1:5", "--output-dir", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    names = {
        "gantt.png",
        "utilization.png",
        "load.png",
        "makespans.png",
        "rent.png",
        "summary.json",
        "report.html",
    }
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert "mean makespan" in result.stdout


def test_equal_seeds_give_equal_logs(shared_data: Path, tmp_path: Path) -> None:
    logs = []
    for run in range(2):
        log = tmp_path / f"{run}.jsonl"
        simulate(
            "--workflows", shared_data / "serverless", "--arrivals", "poisson:0.5:4", "--policy", "random",
            "--seed", 7, "--log", log,
        )  # fmt: skip
        logs.append(log.read_bytes())
    assert logs[0] == logs[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--arrivals", "soon"), "expected seconds"),
        (("--arrivals", "0,-1"), "expected seconds"),
        (("--arrivals", "1e308"), "from 0 to 1,000,000,000,000,000 s, got 1e+308"),
        (("--arrivals", "poisson:0:3"), "poisson:RATE:N"),
        (("--arrivals", "poisson:1:99999999999999"), "N from 1 to 1,000,000"),
        (("--seed", "-1"), "-1 is not in the range x>=0"),
        (("--memory", "much"), "MiB"),
        (("--memory", "0"), "MiB"),
        (("--memory", "99999"), "every NUMA node has less"),
        (("--policy", "magic"), "unknown policy 'magic'; known are best_fit, data_local, dot_product,"),
        (("--cluster", "absent.yaml"), "absent.yaml"),
        (("--workflows", "absent.dax"), "absent.dax: no such file"),
        (("--workflows", "ring:3"), "unknown workflow shape 'ring'; known are montage, cybershake"),
        (("--workflows", "chain:0"), "from 1 to 100,000, got 0"),
    ],
)
def test_invalid_options_give_one_line_and_status_2(
    chain: Path, arguments: tuple[str, str], words: str
) -> None:
    result = simulate("--workflows", chain, "--log", chain.parent / "log.jsonl", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert not (chain.parent / "log.jsonl").exists()
