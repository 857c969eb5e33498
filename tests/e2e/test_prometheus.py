"""A real Prometheus with the example configuration scrapes the service and evaluates every expression."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from demo.stack import free_ports
from tests.e2e import browser as b
from tests.eventually import TIMEOUT_FACTOR
from tests.rest.test_monitoring import MONITORING, expressions

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Prometheus' API, after it scraped a service with two leases and one pending request."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("no Prometheus: apt-get install prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    with b.serving(folder, 1) as service:
        with service.client("ursula") as user:
            for task_id in ("first", "second", "third"):
                payload = {"task_id": task_id, "required_gpus": 4, "required_cpus": 8}
                user.post("/api/submit", json=payload).raise_for_status()
        (folder / "token").write_text(service.tokens["vera"])
        [port] = free_ports(1)
        log = (folder / "log").open("w")
        process = subprocess.Popen(
            [
                program,
                f"--config.file={configuration(folder, service.url)}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
                deadline = time.monotonic() + 60 * TIMEOUT_FACTOR
                while not scraped(client):
                    assert process.poll() is None, (folder / "log").read_text()
                    assert time.monotonic() < deadline, (folder / "log").read_text()
                    time.sleep(0.2)
                yield client
        finally:
            process.terminate()
            process.wait(timeout=20)
            log.close()


def configuration(folder: Path, url: str) -> Path:
    """Return the example configuration with the addresses of this test."""
    settings = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    settings["global"]["scrape_interval"] = "1s"
    settings["rule_files"] = [str(MONITORING / "alerts.yml")]
    [job] = settings["scrape_configs"]
    job["authorization"]["credentials_file"] = str(folder / "token")
    job["static_configs"][0]["targets"] = [url.removeprefix("http://")]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(settings))
    return path


def query(client: httpx.Client, expression: str) -> list[dict[str, Any]]:
    answer = client.get("/api/v1/query", params={"query": expression})
    assert answer.status_code == 200, (expression, answer.text)
    result: list[dict[str, Any]] = answer.json()["data"]["result"]
    return result


def scraped(client: httpx.Client) -> bool:
    try:  # it answers 503 while it reads its data
        is_ready = client.get("/-/ready").is_success
        return is_ready and [row["value"][1] for row in query(client, 'up{job="gpu-manager"}')] == ["1"]
    except httpx.TransportError:
        return False


def test_it_counts_leases_and_pending_requests(prometheus: httpx.Client) -> None:
    assert [entry["value"][1] for entry in query(prometheus, "gpu_manager_queue_length")] == ["1"]


def test_every_panel_and_alert_can_be_evaluated(prometheus: httpx.Client) -> None:
    for expression in expressions().values():
        query(prometheus, expression)


def test_every_rule_is_healthy(prometheus: httpx.Client) -> None:
    [group] = prometheus.get("/api/v1/rules").json()["data"]["groups"]
    assert len(group["rules"]) >= 7
    assert not [rule for rule in group["rules"] if rule["health"] == "err"]
