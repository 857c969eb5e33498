"""`top` on a service and a store, after the reports of two servers' agents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from resource_manager import GPUResourceManager
from resource_manager.agent.report_format import read_report
from resource_manager.cli import gpu_table, main
from resource_manager.core.models import Gpu, Node
from resource_manager.fleet.receiving import ReportReceiver
from tests.agent.reporting import as_text, gpu, process, report, server, uuid
from tests.builders import granted_lease
from tests.cli.targets import Run

NODES = [server(gpus=4), Node("gpu-b", 1, {"cpus": 8}, (Gpu(0),))]

TASK = {"dag_id": "my_dag", "run_id": "run", "task_id": "train"}


@pytest.fixture
def manager() -> Iterator[GPUResourceManager]:
    """One server with a busy, an idle, a rogue and a lost GPU, and one that reports nothing."""
    with GPUResourceManager.from_url("memory://", inventory=NODES) as manager:
        busy = granted_lease(
            manager.submit("here:dag/run/train", 1, server="gpu-a", team="vision", labels=TASK)
        )
        manager.submit("hand:1f2e", 1, gpu_milli=250, server="gpu-a", owner="ada", idle_after=1e-6)
        mine = process(78, lease_id="here:dag/run/train", lease_source="environment", job=None)
        assert busy["gpu_uuids"] == [uuid(0)]
        known = {"temperature_c": 61, "power_w": 251.5}
        text = as_text(
            report(
                manager.store.now(),
                gpu(0, memory_used_mib=63488, utilization_percent=71, processes=[mine], **known),
                gpu(1),
                gpu(2, utilization_percent=99, processes=[process(4242)]),
            )
        )
        ReportReceiver(manager).receive(read_report(text))
        yield manager


def test_json_has_every_gpu_with_its_leases_and_what_is_wrong(run: Run) -> None:
    done = run("top", "--once", "--json")
    assert done.exit_code == 0, done.output
    first, second = json.loads(done.stdout)
    assert (first["server_name"], first["watched"], first["error"]) == ("gpu-a", True, "")
    assert 0 <= first["age_s"] < 60
    busy, idle, rogue, lost = first["gpus"]
    assert (busy["utilization_percent"], busy["memory_used_mib"], busy["power_w"]) == (71, 63488, 251.5)
    assert [lease["task_id"] for lease in busy["leases"]] == ["here:dag/run/train"]
    assert (busy["leases"][0]["team"], busy["idle"], busy["rogue"], busy["closed"]) == (
        "vision",
        False,
        False,
        "",
    )
    assert [each["rogue"] for each in busy["processes"]] == [False]
    assert (idle["idle"], idle["leases"][0]["gpu_milli"], idle["uuid"]) == (True, 250, uuid(1))
    assert (rogue["rogue"], rogue["closed"]) == (True, "rogue process; pid 4242 of eve: python mine.py")
    assert (lost["utilization_percent"], lost["processes"]) == (None, None)
    assert lost["closed"] == f"uuid missing; {uuid(3)}"
    assert (second["age_s"], second["gpus"][0]["memory_used_mib"]) == (None, None)


def lines(done: Any) -> list[str]:
    assert done.exit_code == 0, done.output
    return [line.rstrip() for line in done.stdout.splitlines()]


def test_the_table_fits_80_columns_and_names_what_is_wrong(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = lines(run("top", "--once"))
    assert max(map(len, shown)) <= 80
    assert shown[0].startswith("gpu-a  PARTIAL  4 × A100  ")
    assert shown[1] == "  0 █████▋·· 71%  ██████▎· 62/80G    61°  252W my_dag.train vnpm vision"
    assert shown[2] == "  1 ········ 0%   ········ 0/80G       –     – idle hand:1f2e f462 250m soft"
    assert "ROGUE 4242 eve" in shown[3]
    assert "CLOSED uuid missing" in shown[4]
    assert shown[5] == "gpu-b  IDLE  1 × GPU  no report"
    assert shown[6].endswith("free")


def test_a_narrow_terminal_has_the_leases_and_names_what_it_leaves_out(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    shown = lines(run("top", "--once"))
    assert max(map(len, shown)) <= 50
    assert shown[1] == "  0  71%   62/80G my_dag.train vnpm vision"
    assert shown[-1] == "not shown: temperature, power"


def test_a_low_terminal_has_whole_servers_and_says_how_many_it_leaves_out(run: Run) -> None:
    console, rows = Console(width=80), json.loads(run("top", "--once", "--json").stdout)
    with console.capture() as captured:
        console.print(gpu_table.servers(rows, 80, 6))
    shown = captured.get().splitlines()
    assert [len(shown), shown[-1].rstrip()] == [6, "not shown: 1 more server (gpu-manager top SERVER)"]
    with console.capture() as captured:
        console.print(gpu_table.servers(rows, 80, 7))
    assert "not shown" not in captured.get()


def test_a_cluster_without_servers_says_how_to_name_them(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/state.db"
    shown = CliRunner().invoke(main, ["--store", url, "top", "--once"], env={"COLUMNS": "400"})
    assert f"no servers yet in {url}: gpu-manager apply FILE" in shown.stdout


def test_servers_are_chosen_by_name_and_number(run: Run) -> None:
    assert [row["server_name"] for row in json.loads(run("top", "1", "--once", "--json").stdout)] == ["gpu-b"]
    both = run("top", "gpu-b", "gpu-a", "--once", "--json")
    assert [row["server_name"] for row in json.loads(both.stdout)] == ["gpu-a", "gpu-b"]


@pytest.mark.parametrize(
    ("arguments", "exit_code", "line"),
    [
        (
            ["gpu-c", "--once"],
            2,
            "Error: server 'gpu-c' is not in the inventory of 2 servers: did you mean gpu-b or gpu-a?",
        ),
        (["--json"], 2, "Error: --json goes with --once"),
        (
            ["--every", "0"],
            2,
            "Error: Invalid value for '--every': a duration must be above 0 and at most a day, got '0'. "
            "See main top --help.",
        ),
    ],
)
def test_bad_input_is_one_line(run: Run, arguments: list[str], exit_code: int, line: str) -> None:
    done = run("top", *arguments)
    assert (done.exit_code, done.stdout, done.stderr) == (exit_code, "", f"{line}\n")
