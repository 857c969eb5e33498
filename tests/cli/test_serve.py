"""`gpu-manager serve` as a separate process: it starts, answers, and stops on SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from waitress.server import create_server

from resource_manager.cli.serving import addresses


@pytest.mark.parametrize("options", [[], ["--trusted-proxy", "127.0.0.1", "--behind-https"]])
def test_serve_starts_answers_and_stops(tmp_path: Path, options: list[str]) -> None:
    archive = tmp_path / "history.jsonl"
    command = [sys.executable, "-m", "resource_manager.cli", "--store", "memory://", "serve", "--port", "0"]
    command += ["--archive", str(archive), "--audit", str(tmp_path / "audit.jsonl")]
    own = {"GPU_MANAGER_TOKENS": str(tmp_path / "tokens.json"), "XDG_STATE_HOME": str(tmp_path)}
    environment = {**os.environ, **own}
    process = subprocess.Popen([*command, *options], env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = json.loads(process.stderr.readline())
        assert line["message"].startswith("serving at http://127.0.0.1:")
        body = {"task_id": "test_001", "required_gpus": 4, "required_cpus": 32}
        answer = httpx.post(f"{line['address']}/api/allocate", json=body, timeout=30)
        assert answer.json()["gpu_devices"] == "0,1,2,3"
        assert httpx.get(f"{line['address']}/", timeout=30).status_code == 200
    finally:
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=30)[1]
    assert process.returncode == 0, rest
    assert all(json.loads(text)["level"] != "error" for text in rest.splitlines())
    before, granted = map(json.loads, archive.read_text().splitlines())
    assert before["snapshot"]["version"] == 0
    assert granted["lease"]["request"]["lease_id"] == "test_001"
    assert json.loads((tmp_path / "audit.jsonl").read_text()) == granted


def test_a_host_name_with_several_addresses_is_served_at_each() -> None:
    server = create_server(lambda environ, start: [], listen="127.0.0.1:0 127.0.0.1:0")
    try:
        assert len(set(addresses(server))) == 2
    finally:
        server.close()


def test_an_address_of_ipv6_is_a_url() -> None:
    server = SimpleNamespace(effective_host="::1", effective_port=5000)
    assert addresses(server) == ["http://[::1]:5000"]
