"""Dashboard and alert rules: they use only metrics that the service exposes."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from flask.testing import FlaskClient

from resource_manager import GPUResourceManager
from resource_manager.errors import LeaseNotFoundError, StateLostError
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.rest.observability.metrics import Metrics
from resource_manager.rest.state_follower import StateFollower
from resource_manager.rest.tokens import Role
from resource_manager.storage.memory import MemoryStore
from tests.builders import Clock

MONITORING = Path(__file__).parents[2] / "resource_manager" / "deploy" / "monitoring"
PROMTOOL = shutil.which("promtool")
NAME = re.compile(r"\bgpu_manager_\w+")


def expressions() -> dict[str, str]:
    dashboard = json.loads((MONITORING / "grafana" / "gpu-resource-manager.json").read_text())
    found = {
        f"panel {panel['title']} {target['refId']}": target["expr"]
        for panel in dashboard["panels"]
        for target in panel["targets"]
    }
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]
    return {**found, **{f"alert {rule['alert']}": rule["expr"] for rule in rules}}


def test_every_expression_uses_metrics_that_exist(open_client: FlaskClient) -> None:
    for i in range(5):
        open_client.post("/api/submit", json={"task_id": f"t{i}", "required_gpus": 8, "required_cpus": 1})
    open_client.post("/api/release", json={"task_id": "t0"})
    exposed = set(
        re.findall(r"^(?:# TYPE )?(\w+)", open_client.get("/metrics").get_data(as_text=True), re.MULTILINE)
    )
    for where, expression in expressions().items():
        used = NAME.findall(expression)
        assert used or "up{" in expression, where
        assert set(used) <= exposed, where


def test_the_board_has_a_panel_for_all_that_the_alerts_ask_and_none_hides_another() -> None:
    names: dict[str, set[str]] = {"panel": set(), "alert": set()}
    for where, expression in expressions().items():
        names[where.partition(" ")[0]] |= set(NAME.findall(expression))
    assert names["alert"] - names["panel"] == set()
    dashboard = json.loads((MONITORING / "grafana" / "gpu-resource-manager.json").read_text())
    cells = [
        (at["x"] + across, at["y"] + down)
        for at in (panel["gridPos"] for panel in dashboard["panels"])
        for across in range(at["w"])
        for down in range(at["h"])
    ]
    assert (len(cells), max(across for across, _ in cells)) == (len(set(cells)), 23)


def test_the_original_thresholds_are_kept() -> None:
    found = expressions()
    assert found["alert GpuAllocationSlow"].endswith("> 0.5")
    assert found["alert GpuLockWaitLong"].endswith("> 5")
    assert found["alert GpuManyConcurrentRequests"].endswith("> 50")


def test_services_of_one_store_are_not_summed_and_gpu_types_are_kept() -> None:
    """Sums are wrong: each service exports the whole store, and a server may have several GPU types."""
    found = expressions()
    assert found["alert GpuLeasesExpire"].startswith("max by (quarantined) (increase(")
    for where, expression in found.items():
        for metric in ("gpu_manager_gpus_free", "gpu_manager_gpus_allocated"):
            by_type = f"max by (server, gpu_type) ({metric})"
            assert expression.count(metric) == expression.count(by_type), where


def test_the_alert_of_a_service_that_cannot_be_scraped_names_each_reason() -> None:
    """A token that has expired looks like a service that is down: `up` is 0, and its probes are well."""
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]
    [text] = [rule["annotations"]["description"] for rule in rules if rule["alert"] == "GpuManagerDown"]
    assert [word for word in ("/livez", "/readyz", "token") if word not in text] == []


Series = dict[str, str]
Case = tuple[Series, dict[str, list[str]]]

SERVER_A, LEASE = 'server="gpu-a"', 'lease="my_dag.train k7wd",team="vision",server="gpu-a"'
GPU_3 = f'gpu_manager_gpu_closed{{{SERVER_A},gpu="3",uuid="GPU-3",reason="memory errors"}}'
QUARANTINED = f"gpu_manager_lease_quarantined{{{LEASE}}}"
AGE, INTERVAL = (f"gpu_manager_report_{what}_seconds{{{SERVER_A}}}" for what in ("age", "interval"))
FAILED, SILENT = f"gpu_manager_server_failed{{{SERVER_A}}}", f"gpu_manager_server_silent{{{SERVER_A}}}"
EXPIRED = 'gpu_manager_expirations_total{quarantined="true"}'
REQUESTS = "gpu_manager_http_request_seconds"
JOB = 'job="gpu-manager",instance="one"'

CASES: dict[str, Case] = {
    "leases that expire, until 5 minutes after the last": (
        {EXPIRED: "0x4 1 2 3 4 5 6x60"},
        {"10m": ["GpuLeasesExpire"], "20m": [], "40m": []},
    ),
    "three leases in half an hour are not many": ({EXPIRED: "0x4 1 2x9 3x60"}, {"6m": [], "16m": []}),
    "a quarantined lease that stays": (
        {QUARANTINED: "1x20 _x40"},
        {"10m": [], "16m": ["GpuLeaseQuarantined"], "40m": []},
    ),
    "a quarantined lease that is ended soon": ({QUARANTINED: "1x9 _x60"}, {"16m": [], "30m": []}),
    "a failed server, once": (
        {FAILED: "0x4 1x60", QUARANTINED: "1x90", GPU_3: "1x90"},
        {"30m": ["GpuServerFailed"]},
    ),
    "a failed server whose agent is silent, once": (
        {FAILED: "0x4 1x60", SILENT: "1x90"},
        {"30m": ["GpuServerFailed"]},
    ),
    "a failed server that is resumed": ({FAILED: "1x10 0x60"}, {"5m": ["GpuServerFailed"], "20m": []}),
    "a silent server, once": (
        {SILENT: "0x4 1x90", QUARANTINED: "1x90", GPU_3: "1x90"},
        {"30m": ["GpuAgentSilent"]},
    ),
    "a silent server whose last report the store forgot": (
        {AGE: "0 60 120 180 _x60", INTERVAL: "10x3 _x60", SILENT: "0 1x60"},
        {"3m": ["GpuAgentSilent"], "30m": ["GpuAgentSilent"]},
    ),
    "a server that reports": (
        {AGE: "5x60", INTERVAL: "10x60", SILENT: "0x60", FAILED: "0x60"},
        {"30m": []},
    ),
    "a server that reports each five minutes": (
        {AGE: " ".join(["0 60 120 180 240"] * 9), INTERVAL: "300x60", SILENT: "0x60"},
        {f"{minute}m": [] for minute in range(1, 40, 3)},
    ),
    "a server whose silence no service has judged": (
        {AGE: "0+60x60", INTERVAL: "300x60", SILENT: "0x60"},
        {"15m": [], "30m": ["GpuAgentSilent"]},
    ),
    "a closed GPU": ({GPU_3: "1x10 _x30"}, {"5m": ["GpuClosed"], "20m": []}),
    "a closed state, of which two services tell": (
        {f'gpu_manager_state_unusable{{reason="closed",instance="{name}"}}': "0 1x9 0x9" for name in "ab"},
        {"5m": ["GpuStateUnusable"], "15m": []},
    ),
    "a lost state": ({'gpu_manager_state_unusable{reason="lost"}': "1x9"}, {"5m": ["GpuStateUnusable"]}),
    "an apply of settings and teams, once": (
        {f'gpu_manager_cluster_changes_total{{kind="{kind}"}}': "0x4 1x60" for kind in ("settings", "teams")},
        {"2m": [], "10m": ["GpuClusterChanged"], "20m": []},
    ),
    "a lease that is released as idle": (
        {'gpu_manager_preemptions_total{reason="idle"}': "0x4 1x60"},
        {"2m": [], "10m": ["GpuLeaseEndedByLimit"], "20m": []},
    ),
    "a service that cannot be scraped": (
        {f"up{{{JOB}}}": "1 0x9 1x9"},
        {"2m": [], "5m": ["GpuManagerDown"], "15m": []},
    ),
    "slow allocations": (
        {
            f'{REQUESTS}_bucket{{route="/api/allocate",le="{le}",{JOB}}}': f"0+{step}x30"
            for le, step in (("0.5", 90), ("1", 100), ("+Inf", 100))
        },
        {"4m": [], "20m": ["GpuAllocationSlow"]},
    ),
    "long waits for the lock": (
        {
            f'gpu_manager_lock_wait_seconds_bucket{{le="{le}",{JOB}}}': f"0+{step}x30"
            for le, step in (("5", 90), ("10", 100), ("+Inf", 100))
        },
        {"20m": ["GpuLockWaitLong"]},
    ),
    "many requests at once": (
        {f"gpu_manager_http_requests_in_progress{{{JOB}}}": "51x5 50x9"},
        {"3m": ["GpuManyConcurrentRequests"], "10m": []},
    ),
    "a queue that stalls": (
        {
            f"gpu_manager_queue_oldest_seconds{{{JOB}}}": "21601x120",
            f"gpu_manager_releases_total{{{JOB}}}": "7x120",
        },
        {"100m": ["GpuQueueStalls"]},
    ),
    "a queue that moves": (
        {
            f"gpu_manager_queue_oldest_seconds{{{JOB}}}": "21601x120",
            f"gpu_manager_releases_total{{{JOB}}}": "0+1x120",
        },
        {"100m": []},
    ),
    "commits that conflict": (
        {
            f"gpu_manager_commit_conflicts_total{{{JOB}}}": "0+60x60",
            f"gpu_manager_commit_seconds_count{{{JOB}}}": "0+100x60",
        },
        {"30m": ["GpuCommitConflicts"]},
    ),
    "a clock that jumped": (
        {f"gpu_manager_store_clock_jumps_total{{{JOB}}}": "0x4 1x60"},
        {"10m": ["GpuStoreClockJumped"], "30m": []},
    ),
    "a rogue process": (
        {
            f'gpu_manager_gpu_rogue_process{{{SERVER_A},gpu="3",pid="7",user="eve"}}': "1x9 _x30",
        },
        {"5m": ["GpuRogueProcess"], "20m": []},
    ),
    "a webhook that takes nothing": (
        {'gpu_manager_notice_failed_attempts{to="hooks.example.org",team=""}': "0 1 2 3 4x9 0x9"},
        {"5m": [], "8m": ["GpuNoticeNotTaken"], "16m": []},
    ),
    "fractions that no daemon enforces": (
        {f'gpu_manager_gpu_share_enforced{{{SERVER_A},gpu="3"}}': "0x9 1x30"},
        {"1m": [], "5m": ["GpuShareNotEnforced"], "15m": []},
    ),
    "agents that fall silent together": (
        {"gpu_manager_agents_silent_together": "12x9 0x9"},
        {"5m": ["GpuAgentsSilentTogether"], "15m": []},
    ),
    "an idle holder": ({f"gpu_manager_lease_idle_seconds{{{LEASE}}}": "3600x9"}, {"5m": ["GpuIdleHolder"]}),
    "a preemption that is stuck": (
        {'gpu_manager_leases_preempting{stuck="true"}': "2x9 0x9"},
        {"5m": ["GpuPreemptionStuck"], "15m": []},
    ),
    "leases under maintenance": (
        {"gpu_manager_leases_under_maintenance": "1x9 0x9"},
        {"5m": ["GpuRunsUnderMaintenance"], "15m": []},
    ),
}


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_every_alert_is_tried() -> None:
    fired = {name for _, at in CASES.values() for names in at.values() for name in names}
    assert fired == {rule["alert"] for rule in rules()}


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool: apt-get install prometheus")
def test_alerts_fire_once_for_what_they_are_for_and_go_quiet_when_it_is_over(tmp_path: Path) -> None:
    """At each time these alerts fire, once each, and no other."""
    firing = 'sort(count by (alertname) (ALERTS{alertstate="firing"}))'
    cases = [
        {
            "name": name,
            "interval": "1m",
            "input_series": [{"series": series, "values": values} for series, values in given.items()],
            "promql_expr_test": [
                {
                    "expr": firing,
                    "eval_time": time,
                    "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in expected],
                }
                for time, expected in at.items()
            ],
        }
        for name, (given, at) in CASES.items()
    ]
    try_rules(tmp_path, cases)
    assert subprocess.run([str(PROMTOOL), "check", "rules", str(MONITORING / "alerts.yml")]).returncode == 0


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool: apt-get install prometheus")
def test_what_the_page_joins_with_nvidias_exporter_has_each_lease_of_a_shared_gpu(tmp_path: Path) -> None:
    """With several series of one GPU on the side of the one, Prometheus refuses the whole query."""
    page = (MONITORING.parents[2] / "docs" / "monitoring.md").read_text()
    [query] = re.findall(r"```text\n([^`]*DCGM_FI_DEV_GPU_UTIL[^`]*)```", page)
    of_gpu = 'gpu_manager_gpu_info{server="s",gpu="0",uuid="GPU-1",team="",lease='
    given = {f'{of_gpu}"a"}}': "1", f'{of_gpu}"b"}}': "1", 'DCGM_FI_DEV_GPU_UTIL{UUID="GPU-1"}': "70"}
    labels = '{{UUID="GPU-1",uuid="GPU-1",lease="{}"}}'
    samples = [{"labels": labels.format(lease), "value": 70} for lease in "ab"]
    expected = {"expr": query, "eval_time": "0", "exp_samples": samples}
    series = [{"series": name, "values": value} for name, value in given.items()]
    try_rules(tmp_path, [{"interval": "1m", "input_series": series, "promql_expr_test": [expected]}])


def try_rules(folder: Path, cases: list[dict[str, Any]]) -> None:
    file = folder / "alerts.test.yml"
    tests = {"rule_files": [str(MONITORING / "alerts.yml")], "evaluation_interval": "1m", "tests": cases}
    file.write_text(yaml.safe_dump(tests))
    done = subprocess.run([str(PROMTOOL), "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_state_of_leases_and_of_servers_is_exposed() -> None:
    clock = Clock()
    manager = GPUResourceManager(store=MemoryStore(clock=clock), inventory=default_inventory())
    watch = StateFollower(manager.store)
    metrics = Metrics(watch)
    manager.allocate_resources("lost", 4, 8, ttl=10, quarantine=True, server="gpu-server-0")
    clock.now += 11
    manager.expire_and_schedule()
    manager.allocate_resources("kept", 4, 8)
    manager.drain("gpu-server-1", reason="broken", failed=True)
    text = metrics.text().decode()
    for state, count in (("running", 1), ("preempting", 0), ("quarantined", 1)):
        assert f'gpu_manager_leases{{state="{state}"}} {count}.0' in text
    [line] = re.findall(r"^gpu_manager_lease_quarantined\{.*", text, re.MULTILINE)
    assert line.startswith('gpu_manager_lease_quarantined{lease="lost ')
    assert line.endswith('server="gpu-server-0",team=""} 1.0')
    assert 'gpu_manager_server_failed{server="gpu-server-1"} 1.0' in text
    assert 'gpu_manager_server_failed{server="gpu-server-0"} 0.0' in text
    watch.close()


def test_the_end_of_a_hold_is_no_lease_that_was_not_renewed() -> None:
    """Four people whose holds end at noon are no reason to call somebody."""
    clock = Clock()
    manager = GPUResourceManager(store=MemoryStore(clock=clock), inventory=default_inventory())
    watch = StateFollower(manager.store)
    metrics = Metrics(watch)
    for lease_id in ("hand:ada@desk/0123abcd", "train"):
        manager.allocate_resources(lease_id, 2, 1, ttl=10)
    clock.now += 11
    manager.expire_and_schedule()
    assert 'gpu_manager_expirations_total{quarantined="false"} 1.0' in metrics.text().decode()
    watch.close()


def test_a_lease_that_its_preemption_ended_is_none_that_was_not_renewed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What runs in a worker ends so at its longest runtime, of which another alert tells."""
    caplog.set_level(logging.WARNING)  # whatever another test has set
    clock = Clock()
    manager = GPUResourceManager(store=MemoryStore(clock=clock), inventory=default_inventory())
    watch = StateFollower(manager.store)
    metrics = Metrics(watch)
    manager.allocate_resources("in a worker", 2, 1, ttl=60, max_runtime=300)
    manager.allocate_resources("lost", 2, 1, ttl=60)
    for _ in range(8):
        clock.now += 50
        with suppress(LeaseNotFoundError):
            manager.renew("in a worker")
        manager.expire_and_schedule()
    ends = [change["lease_id"] for change in manager.history() if change["change"] == "expired"]
    assert sorted(ends) == ["in a worker", "lost"]
    told = [message for message in caplog.messages if not message.startswith("preempted: ")]
    assert told == ["not renewed in time: lost f462", "its grace is over: in a worker vnpm"]
    text = metrics.text().decode()
    assert 'gpu_manager_expirations_total{quarantined="false"} 1.0' in text
    watch.close()


def test_a_worker_that_dies_within_the_grace_of_its_preemption_is_one_that_was_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A rack that fails in the grace of a maintenance window is a reason to call somebody."""
    clock = Clock()
    manager = GPUResourceManager(store=MemoryStore(clock=clock), inventory=default_inventory(1))
    watch = StateFollower(manager.store)
    metrics = Metrics(watch)
    for lease_id, quarantine in (("expires", False), ("stays", True)):
        manager.allocate_resources(lease_id, 4, 1, ttl=60, preempt_grace=3600, quarantine=quarantine)
    for lease_id in ("expires", "stays"):
        manager.submit(f"waits for {lease_id}", 4)
        manager.preempt(lease_id)
    clock.now += 61
    manager.expire_and_schedule()
    assert "not renewed in time: expires vnpm, stays f462" in caplog.messages
    text = metrics.text().decode()
    for quarantined in ("false", "true"):
        assert f'gpu_manager_expirations_total{{quarantined="{quarantined}"}} 1.0' in text
    watch.close()


def test_a_change_of_the_cluster_is_counted_by_kind(open_client: FlaskClient) -> None:
    times = {"from": "2126-12-01T08:00+01:00", "until": "2126-12-01T12:00+01:00"}
    windows = {"servers": ["gpu-server-0"], "reason": "new disk", **times}
    assert open_client.post("/api/maintenance", json=windows).status_code < 300
    text = open_client.get("/metrics").get_data(as_text=True)
    assert 'gpu_manager_cluster_changes_total{kind="maintenance"} 1.0' in text
    assert 'gpu_manager_cluster_changes_total{kind="teams"} 0.0' in text


def test_a_lost_state_is_exposed_as_such(
    manager: Any, service: Any, as_role: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = as_role(Role.READER)
    assert 'reason="lost"} 0.0' in reader.get("/metrics").get_data(as_text=True)

    def lost(reader: Any) -> None:
        raise StateLostError("the state went back")

    with monkeypatch.context() as patched:
        patched.setattr(service.watch, "read", lost)
        text = reader.get("/metrics").get_data(as_text=True)
    assert ('reason="lost"} 1.0' in text, "gpu_manager_gpus_free" in text) == (True, False)
    assert 'reason="lost"} 0.0' in reader.get("/metrics").get_data(as_text=True)
