"""Dashboard and alert rules: they use only metrics that the service exposes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml
from flask.testing import FlaskClient

MONITORING = Path(__file__).parents[2] / "monitoring"
NAME = re.compile(r"\bgpu_manager_\w+")


def expressions() -> dict[str, str]:
    dashboard = json.loads((MONITORING / "grafana" / "gpu-resource-manager.json").read_text())
    found = {
        f"panel {panel['title']}": target["expr"]
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
