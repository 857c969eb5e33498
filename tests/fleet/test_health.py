"""Health table: the defaults, a file that overrides them, and what a report shows."""

from __future__ import annotations

import re
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from resource_manager.agent import probe
from resource_manager.agent.report_format import GpuReport
from resource_manager.errors import ClusterFileError
from resource_manager.fleet.health import findings, health_table
from resource_manager.manager.cluster_file.reading import load_health

# The decided action, and the immediate action of NVIDIA's XID catalogue (docs.nvidia.com/deploy/xid-errors,
# "Analyzing Xid Errors with the Xid Catalog", Ampere and newer).
XIDS = {
    13: ("note", "RESTART_APP"),
    31: ("note", "RESTART_APP"),
    43: ("note", "IGNORE"),
    45: ("note", "WORKFLOW_XID_45"),
    92: ("note", "IGNORE"),
    94: ("note", "RESTART_APP"),
    48: ("close after lease", "WORKFLOW_XID_48"),
    63: ("close after lease", "IGNORE"),
    64: ("close now", "RESET_GPU"),
    74: ("close now", "WORKFLOW_NVLINK_ERR"),
    79: ("close now", "RESTART_BM"),
    95: ("close now", "RESET_GPU"),
    109: ("close now", "RESET_GPU"),
    119: ("close now", "RESET_GPU"),
    120: ("close now", "RESET_GPU"),
    140: ("close now", "RESET_GPU"),
    154: ("ignore", "XID_154"),
}


def of(**values: Any) -> GpuReport:
    return GpuReport.model_validate(probe.gpu_of(0, **values))


def xid(number: int) -> dict[str, Any]:
    return {"xid": number, "count": 1, "at": 0.0}


def actions(gpu: GpuReport, path: Path | None = None) -> list[tuple[str, str]]:
    return [
        (found.condition, str(found.action))
        for found in findings(gpu, health_table(load_health(path) if path else ()))
    ]


def test_the_xids_have_the_decided_actions_and_the_catalogues_beside_them() -> None:
    table = health_table()
    text = (files("resource_manager.fleet") / "health.toml").read_text()
    catalogue = {name: entry.get("catalog") for name, entry in tomllib.loads(text)["health"].items()}
    found = {name: (rule.action, catalogue[name]) for name, rule in table.items() if name.startswith("xid")}
    assert found == {f"xid {number}": expected for number, expected in XIDS.items()}
    assert all(rule.text and rule.todo for rule in table.values())


def test_a_healthy_or_unknown_gpu_shows_nothing() -> None:
    assert actions(of()) == []
    healthy = of(rows_pending=False, rows_failed=False, recovery_action="none", throttle_reasons=[], xids=[])
    assert actions(healthy) == []


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"lost": True}, [("gpu lost", "close now")]),
        ({"rows_pending": True}, [("row remap pending", "close after lease")]),
        ({"rows_failed": True}, [("row remap failed", "close now")]),
        ({"pages_pending": True}, [("page retirement pending", "close after lease")]),
        ({"throttle_reasons": ["hardware thermal slowdown"]}, [("hardware slowdown", "note")]),
        ({"throttle_reasons": ["software power cap"]}, []),
        ({"vendor_state": "critical"}, [("state: critical", "close now")]),
        ({"xids": [xid(154)], "recovery_action": "none"}, []),
        ({"xids": [xid(154)], "recovery_action": "gpu reset"}, [("recovery action: gpu reset", "close now")]),
        ({"recovery_action": "node reboot"}, [("recovery action: node reboot", "close server")]),
        ({"recovery_action": "action 9"}, [("recovery action: action 9", "note")]),
        ({"xids": [xid(999)]}, [("xid 999", "note")]),
        (
            {"xids": [xid(13), xid(48), xid(79)]},
            [("xid 79", "close now"), ("xid 48", "close after lease"), ("xid 13", "note")],
        ),
    ],
)
def test_a_condition_has_its_action_the_most_severe_first(
    values: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    assert actions(of(**values)) == expected


def test_every_recovery_action_of_nvml_has_a_rule() -> None:
    table = health_table()
    assert {f"recovery action: {name}" for name in probe.RECOVERY_ACTIONS[1:]} <= set(table)


def test_a_file_overrides_single_conditions(tmp_path: Path) -> None:
    path = tmp_path / "health.toml"
    path.write_text('[health]\n"xid 63" = "ignore"\n"xid 79" = { action = "note", todo = "wait" }\n')
    assert actions(of(xids=[xid(63), xid(79)]), path) == [("xid 79", "note")]
    rule, built_in = health_table(load_health(path))["xid 79"], health_table()["xid 79"]
    assert (rule.text, rule.todo) == (built_in.text, "wait"), "what it does not say is as in the table"


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ("health = 1", "1:1", "health: "),
        ("[health\n", "1:8", "Expected"),
        ("[health]\n'xid 1' = 'explode'\n", "2:1", 'health."xid 1": '),
        ("[health.'xid 1']\naction = 'note'\nsound = 1\n", "3:1", 'health."xid 1".sound: is not a key'),
        ("[health]\n'a;b' = 'note'\n", "2:1", "health"),
    ],
)
def test_a_wrong_file_is_one_line_with_its_place(tmp_path: Path, text: str, place: str, reason: str) -> None:
    path = tmp_path / "health.toml"
    path.write_text(text)
    with pytest.raises(ClusterFileError) as caught:
        load_health(path)
    assert str(caught.value).startswith(f"{path}:{place}: ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_page_lists_every_condition_with_its_action() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gpus.md").read_text()
    rows = re.findall(r"^\| `([a-z ]+)` \| (.*) \|$", page, re.MULTILINE)
    told = {condition: action for action, text in rows for condition in re.findall(r"`([^`]+)`", text)}
    assert told == {name: rule.action for name, rule in health_table().items()}
