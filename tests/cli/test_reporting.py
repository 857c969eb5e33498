"""`report` and `history` on a service and a store: what they print adds up and fits."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from resource_manager import GPUResourceManager
from resource_manager.cli.base import inert
from resource_manager.core.models import Gpu, Node
from resource_manager.manager.cluster_file.reading import load_teams
from resource_manager.manager.commit.asking import asked_by
from resource_manager.storage.memory import MemoryStore
from tests.builders import Clock, redefine
from tests.cli.targets import Run

CATEGORIES = ("used", "idle", "failed", "preempted", "quarantined", "unknown")


@pytest.fixture
def manager() -> Iterator[GPUResourceManager]:
    """Two hours in which nlp failed on two GPUs for one, and vision succeeded on one for both."""
    clock = Clock()
    node = Node("s0", 0, {"cpus": 64}, tuple(Gpu(i, "A100" if i < 2 else "H100") for i in range(4)))
    with GPUResourceManager(store=MemoryStore(clock=clock), inventory=[node]) as manager:
        manager.submit("a", 2, team="nlp", owner="ada", labels={"dag_id": "bert"})
        manager.submit("b", 1, team="=vision", owner="bob")
        manager.submit("c", 4, team="nlp", owner="ada")
        clock.now += 3600
        manager.renew("b")
        manager.release("a", outcome="FAILED")
        clock.now += 3600
        manager.cancel("c")
        manager.release("b", outcome="SUCCESS")
        yield manager


def test_the_report_adds_up_by_every_key(run: Run) -> None:
    for by in ("team", "user", "dag", "gpu_type", "team,dag,user,gpu_type"):
        done = run("report", "--by", by, "--since", "3h", "--json")
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        for row in (*found["rows"], found["total"]):
            assert sum(row[name] for name in CATEGORIES) == pytest.approx(row["granted"])
        for name in ("granted", "waited", *CATEGORIES):
            assert sum(row[name] for row in found["rows"]) == pytest.approx(found["total"][name])
        assert (found["total"]["failed"], found["total"]["used"]) == (pytest.approx(2), pytest.approx(2))
        assert found["total"]["waited"] == pytest.approx(2)


def test_all_keys_of_the_report_go_together_and_one_that_is_said_twice_counts_once(run: Run) -> None:
    keys = ["team", "user", "dag", "gpu_type", "source"]
    assert json.loads(run("report", "--by", ",".join(keys), "--json").stdout)["by"] == keys
    assert run("report", "--by", "team,dag,team").stdout == run("report", "--by", "team,dag").stdout


def test_estimates_are_reported_with_how_often_they_came_true(manager: GPUResourceManager, run: Run) -> None:
    assert "No request has started yet" in run("report", "--estimates").stdout
    manager.submit("first", 4, expected_runtime=600)
    manager.submit("waits", 4)
    manager.queue()
    manager.release("first")
    manager.submit("next", 4)
    manager.queue()
    assert json.loads(run("report", "--estimates", "--json").stdout)["started"][0]["task_id"] == "waits"
    text = run("report", "--estimates").stdout
    assert re.search(r"within an hour │ +1 │ +0 % │ +10 min │ few data", text), text
    refused = run("report", "--estimates", "--by", "team")
    assert (refused.exit_code, refused.stderr) == (2, "Error: --by and --estimates exclude each other\n")


def test_csv_is_one_line_a_group_and_holds_no_formula(run: Run) -> None:
    rows = list(csv.DictReader(io.StringIO(run("report", "--csv").stdout)))
    assert [(row["team"], float(row["granted"])) for row in rows] == [("nlp", 2.0), ("'=vision", 2.0)]


@pytest.mark.parametrize("text", ["", "a-b", "d-1;e", "1=2"])
def test_a_text_that_is_no_formula_stays(text: str) -> None:
    assert inert(text) == text


@pytest.mark.parametrize("formula", ["=1", "+1", "-1", "@A", "\uff1d1", "\t=1", "\r=1"])
def test_a_formula_is_text_in_its_cell_and_where_semicolons_make_cells(formula: str) -> None:
    assert inert(formula).startswith("'")
    assert inert(f"a;{formula}").startswith("a;'")


def test_the_table_fits_80_columns_and_wide_shows_all(run: Run) -> None:
    narrow = run("report", "--by", "team,user,dag,gpu_type").stdout
    assert max(map(len, narrow.splitlines())) <= 80
    assert "=vision" in narrow
    assert "not shown: " in narrow
    wide = run("report", "--by", "team,user,dag,gpu_type", "--wide").stdout
    assert all(name in wide for name in CATEGORIES)
    assert "not shown" not in wide


@pytest.mark.parametrize("command", [["status"], ["explain", "--gpus", "1"], ["teams"]])
def test_wide_tables_give_up_no_column(
    run: Run, manager: GPUResourceManager, tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "teams.toml").write_text(f"[teams.{'long' * 15}]\nguaranteed = 1\n")
    redefine(manager, teams=load_teams(tmp_path / "teams.toml"))
    manager.submit("d/r/" + "x" * 70, 1, team="long" * 15)
    narrow, wide = run(*command), run(*command, "--wide")
    assert max(map(len, narrow.stdout.splitlines())) <= 80
    assert "not shown" not in wide.stdout
    assert "…" not in wide.stdout


def test_prices_of_the_cluster_make_costs(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("[cluster]\nprices = { A100 = 2.0, default = 3.5 }\n")
    assert run("apply", "--yes", str(path)).exit_code == 0
    found = json.loads(run("report", "--json").stdout)
    assert found["total"]["cost"] == pytest.approx(2 * 2.0 + 2 * 3.5)
    path.write_text("[cluster]\nprices = { A100 = 'dear' }\n")
    done = run("apply", "--yes", str(path))
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert f"{path}:2:12: cluster.prices.A100: " in done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--by", "colour"], "--by must be 'team', 'user', 'dag', 'gpu_type' or 'source', got 'colour'"),
        (["--since", "soon"], "--since must be seconds or a text such as 45s, 10min, 12h, 3d, got 'soon'"),
        (["--csv", "--json"], "--csv and --json exclude each other"),
    ],
)
def test_bad_input_is_one_line(run: Run, arguments: list[str], text: str) -> None:
    done = run("report", *arguments)
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", f"Error: {text}\n")


def test_history_shows_the_newest_last_without_renewals(run: Run) -> None:
    def kinds(*more: str) -> list[str]:
        return [change["change"] for change in json.loads(run("history", "--json", *more).stdout)]

    without = kinds()
    assert without[-2:] == ["cancelled", "released"]
    assert "renewed" not in without
    assert kinds("--all").count("renewed") == 1
    assert kinds("--limit", "1") == ["released"]
    assert kinds("--after", "1", "--limit", "1") == without[1:2]
    assert max(map(len, run("history").stdout.splitlines())) <= 80


def test_ids_are_whole_however_narrow(
    run: Run, monkeypatch: pytest.MonkeyPatch, manager: GPUResourceManager
) -> None:
    name = "a-very-long-dag-of-team-vision/manual__2026-11-22T12:00:00/train_the_model/"
    for number in range(2):
        manager.submit(f"{name}{number}", 1, team="vision", owner="somebody@example.com")
    monkeypatch.setenv("COLUMNS", "80")
    shown = run("leases").stdout
    assert max(map(len, shown.splitlines())) <= 80
    joined = "".join(line.strip("│┃ ").split("│")[0].strip() for line in shown.splitlines())
    assert f"{name}0" in joined
    assert f"{name}1" in joined
    assert f"{name}1" in run("leases", "--wide").stdout


def test_history_finds_who_released_what(run: Run, manager: GPUResourceManager) -> None:
    with asked_by("ada"):
        name = manager.submit("x", 1)["short_id"]
        manager.release("x", outcome="FAILED")
    with asked_by("airflow:prod/etl/train"):
        manager.submit("y", 1)
        manager.renew("y")
        manager.release("y")

    def found(*more: str) -> list[tuple[str, str]]:
        changes = json.loads(run("history", "--json", *more).stdout)
        return [(change["change"], change["by"]) for change in changes]

    assert found("--by", "ada", "--what", "release") == [("released", "ada")]
    assert found("--by", "ada", "--after", "0") == [("granted", "ada"), ("released", "ada")]
    assert found("--by", "airflow:*", "--what", "renew") == [("renewed", "airflow:prod/etl/train")]
    assert found("--by", "eve") == []
    shown = run("history", "--by", "ada", "--what", "release", "--wide").stdout
    [row] = [line for line in shown.splitlines() if "release" in line]
    assert row.replace("│", " ").split()[-5:] == ["release", "x", name, "FAILED", "ada"]


def test_history_refuses_a_kind_that_there_is_not(run: Run) -> None:
    done = run("history", "--what", "borrow")
    assert done.exit_code == 2
    assert "'borrow' is not one of 'submit', 'grant'" in done.stderr
