"""Health table: the defaults, a file that overrides them, and what a report shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from resource_manager.agent import probe
from resource_manager.agent.health import HealthTableError, findings, load_health_table
from resource_manager.agent.reports import GpuReport

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
    return [(found.condition, str(found.action)) for found in findings(gpu, load_health_table(path))]


def test_the_xids_have_the_decided_actions_and_the_catalogues_beside_them() -> None:
    table = load_health_table()
    found = {name: (str(rule.action), rule.catalog) for name, rule in table.items() if name.startswith("xid")}
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
    table = load_health_table()
    assert {f"recovery action: {name}" for name in probe.RECOVERY_ACTIONS[1:]} <= set(table)


def test_a_file_overrides_single_conditions(tmp_path: Path) -> None:
    path = tmp_path / "health.toml"
    path.write_text('[[conditions]]\ncondition = "xid 63"\naction = "ignore"\ntext = "as NVIDIA says"\n')
    assert actions(of(xids=[xid(63), xid(79)]), path) == [("xid 79", "close now")]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("conditions = 1", "conditions: "),
        ("[[conditions]\n", "Expected"),
        ("[[conditions]]\ncondition = 'xid 1'\naction = 'explode'\ntext = ''\n", r"conditions\.0\.action: "),
        ("[[conditions]]\ncondition = 'xid 1'\naction = 'note'\ntext = ''\n" * 2, "twice"),
        ("[[conditions]]\ncondition = 'a'\naction = 'note'\ntext = ''\nsound = 1\n", r"conditions\.0\.sound"),
    ],
)
def test_a_wrong_file_is_one_line_with_its_name(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "health.toml"
    path.write_text(text)
    with pytest.raises(HealthTableError, match=rf"health\.toml: .*{reason}") as caught:
        load_health_table(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(HealthTableError, match=r"none\.toml: No such file"):
        load_health_table(tmp_path / "none.toml")


def test_the_page_lists_every_condition_with_its_action() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gpus.md").read_text()
    rows = re.findall(r"^\| `([a-z ]+)` \| (.*) \|$", page, re.MULTILINE)
    told = {condition: action for action, text in rows for condition in re.findall(r"`([^`]+)`", text)}
    assert told == {name: str(rule.action) for name, rule in load_health_table().items()}
