"""`gpu-manager diff`, `apply` and `cluster`, on a service and directly on the store."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from resource_manager import GPUResourceManager
from resource_manager.cli import main
from tests.cli.targets import Run, holding

FILE = """[cluster]
policy = "best_fit"
order = "fifo"

[[servers]]
name = "a"
gpus = 2
cpus = 8
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "servers.toml"
    path.write_text(FILE)
    return path


def test_a_file_is_shown_applied_and_printed_again(run: Run, file: Path, tmp_path: Path) -> None:
    shown = run("diff", str(file))
    assert shown.exit_code == 1
    assert shown.stdout.splitlines() == [
        "~ order priority+backfill → fifo",
        *(f"- server gpu-server-{number}" for number in range(4)),
        "+ server a, 2 × GPU",
    ]
    done = run("apply", str(file), "--yes").stdout
    assert done.startswith(f"{shown.stdout}applied to ")
    assert "http://127.0.0.1:" in done or "airflow://, since GPU_MANAGER_STORE is not set" in done
    assert run("diff", str(file)).exit_code == 0
    assert run("apply", str(file), "--yes").stdout == "no difference\n"
    printed = tmp_path / "printed.toml"
    printed.write_text(run("cluster").stdout)
    assert run("diff", str(printed)).stdout == "no difference\n"
    assert json.loads(run("cluster", "--json").stdout)["sections"]["cluster"] == {
        "policy": "best_fit",
        "order": "fifo",
    }
    change = json.loads(run("history", "--json").stdout)[0]
    assert (change["change"], change["lines"]) == (
        "clustersettingschanged",
        ["~ order priority+backfill → fifo"],
    )


def test_without_yes_it_asks_and_no_changes_nothing(run: Run, file: Path) -> None:
    refused = run("apply", str(file))
    assert refused.exit_code == 1
    assert re.search(r"Apply this to (http|airflow)://.*\? \[y/N\]", refused.stderr)
    assert run("diff", str(file)).exit_code == 1
    wrong = run("apply", str(file), "--json")
    assert (wrong.exit_code, wrong.stderr) == (2, "Error: --json cannot ask for confirmation: add --yes\n")


def test_what_is_refused_names_file_and_line_and_changes_nothing(
    run: Run, manager: GPUResourceManager, file: Path
) -> None:
    manager.allocate("x", 2, server="gpu-server-0")
    version = manager.snapshot()["version"]
    kept = run("apply", str(file), "--yes")
    assert kept.exit_code == 2
    assert "- server gpu-server-0: refused, it has 1 lease (--retire gpu-server-0)" in kept.stdout
    assert kept.stderr.startswith(f"Error: {file}:5:1: server gpu-server-0: it has 1 lease")
    file.write_text(FILE.replace("best_fit", "magic"))
    assert run("apply", str(file), "--yes").stderr.startswith(f"Error: {file}:2:1: policy magic: unknown")
    file.write_text(FILE + "cpsu = 8\n")
    assert run("apply", str(file), "--yes").stderr.startswith(f"Error: {file}:9:1: servers.0.cpsu: is not")
    file.write_text(FILE + "[teams.x]\nguaranteed = 3\n")
    wrong = run("apply", str(file), "--yes", "--retire", "gpu-server-0")
    assert wrong.stderr.startswith(f"Error: {file}:10:1: teams.x.guaranteed: the guarantees add up to 3")
    assert manager.snapshot()["version"] == version
    file.write_text(FILE)
    assert run("apply", str(file), "--yes", "--retire", "gpu-server-0").exit_code == 0
    assert [lease["task_id"] for lease in manager.leases()] == ["x"]


def test_an_empty_section_changes_nothing_and_says_so(
    run: Run, manager: GPUResourceManager, file: Path
) -> None:
    file.write_text("[teams.x]\nlimit = 3\n")
    run("apply", str(file), "--yes")
    file.write_text("[teams]\n")
    said = run("apply", str(file), "--yes")
    assert said.stdout == "no difference\n"
    assert said.stderr == f"{file}: teams is empty: nothing changes (--remove teams ends it)\n"
    file.write_text("")
    assert run("diff", str(file)).stderr == f"{file}: there is no section: nothing changes\n"
    manager.allocate("held", 2, team="x")
    refused = run("apply", str(file), "--yes", "--remove", "teams").stderr.splitlines()[-1]
    assert refused.startswith("Error: teams.x: the team is missing but holds leases (held "), "of no file"
    manager.release("held")
    assert run("apply", str(file), "--yes", "--remove", "teams").stdout.startswith("- team x\napplied to ")


def test_the_named_file_is_taken_and_status_says_that_it_differs(
    run: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = run("diff")
    assert (nothing.exit_code, nothing.stderr) == (
        2,
        "Error: name a FILE of the cluster, or set GPU_MANAGER_INVENTORY to one\n",
    )
    monkeypatch.setenv("GPU_MANAGER_INVENTORY", str(file))
    assert "servers.toml differs (6 lines): gpu-manager diff\n" in run("status").stderr
    assert run("apply", "--yes").exit_code == 0
    assert "differs" not in run("status").stderr
    file.write_text("[[servers]\n")
    assert f"{file}:1:10: " in run("status").stderr


@pytest.mark.parametrize("command", [["status"], ["run", "--gpus", "1", "--", "true"]])
def test_a_store_without_servers_is_named_without_its_password(command: list[str]) -> None:
    """Who forgot the variable would apply the cluster to a second store, which grants the same GPUs again."""
    with GPUResourceManager.from_url("memory://", inventory=()) as empty:
        forgotten = CliRunner().invoke(main, command, obj=holding(empty))
        store = ["--store", "redis://me:secret@store:6379/0"]
        named = CliRunner().invoke(main, [*store, *command], obj=holding(empty))
    assert "no servers yet in airflow://, since GPU_MANAGER_STORE is not set: gpu-manager" in forgotten.stderr
    assert "no servers yet in redis://me@store:6379/0: gpu-manager apply FILE" in named.stderr
