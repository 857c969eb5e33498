"""`doctor` on a real Redis: each fault of a store is found, with the next step, and nothing is changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from resource_manager.cli import main
from resource_manager.errors import redact
from resource_manager.scheduling.placement import policies
from tests.redis_server import RedisServer

CLUSTER = '[[servers]]\nname = "gpu-a"\ngpus = 2\ncpus = 8\n'


def run(store: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["--store", store, *arguments])


def faults(done: Result) -> list[str]:
    return [line for line in done.stdout.splitlines() if line.startswith("FAULT")]


def test_a_healthy_stack_has_no_fault_and_each_fault_has_its_line(
    own_redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_wall_clock: Any
) -> None:
    monkeypatch.setenv("GPU_MANAGER_JOBS_DIR", str(tmp_path / "jobs"))
    monkeypatch.setattr("resource_manager.cli.doctor.checks.LEAST_FREE_BYTES", 0)
    with own_redis.client() as client:
        client.config_set("appendonly", "yes")
    store = own_redis.limited_url()
    [empty] = faults(run(store, "doctor"))
    place = redact(store)
    assert f"no servers yet in {place}: gpu-manager apply FILE" in empty
    assert f"ok     store: {place}" in run(store, "doctor").stdout.splitlines()

    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER)
    assert run(store, "apply", "--yes", str(file)).exit_code == 0
    done = run(store, "doctor")
    assert (done.exit_code, faults(done)) == (0, []), done.output
    assert "1 server open" in done.stdout

    assert run(store, "drain", "gpu-a", "--reason", "moved").exit_code == 0
    meant = run(store, "doctor")
    assert (meant.exit_code, faults(meant)) == (0, []), meant.output
    assert "ok     servers: gpu-a: drained by unix:" in meant.stdout
    assert "(moved): gpu-manager resume gpu-a" in meant.stdout
    run(store, "resume", "gpu-a")

    plain = run(own_redis.url, "doctor")
    notes = [line for line in plain.stdout.splitlines() if line.startswith("note ")]
    assert notes[0].startswith("note   store: this service's user may run FLUSHALL")
    assert "ACL SETUSER <name> reset on >PASSWORD ~{" in notes[0], "a plain Redis works: it is a note"

    file.write_text(CLUSTER + '[[servers]]\nname = "gpu-b"\ngpus = 2\ncpus = 8\n')
    monkeypatch.setenv("GPU_MANAGER_INVENTORY", str(file))
    [differs] = faults(run(store, "doctor"))
    assert "cluster.toml differs (1 line): gpu-manager diff" in differs
    monkeypatch.delenv("GPU_MANAGER_INVENTORY")

    with own_redis.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("appendonly", "no")
    lossy = run(store, "doctor")
    assert lossy.exit_code == 1
    assert ["noeviction" in lossy.stdout, "set appendonly yes" in lossy.stdout] == [True, True]
    with own_redis.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("appendonly", "yes")

    [wrong] = faults(run(store.replace(":secret@", ":wrong@"), "doctor"))
    assert "refused the login" in wrong
    assert "correct user and password in --store" in wrong
    assert "secret" not in wrong
    set_wall_clock(lambda now: now + 30.0)
    assert [line for line in faults(run(store, "doctor")) if "differs from this machine's by 30.0 s" in line]


def test_what_cannot_be_reached_is_one_line_and_the_rest_is_looked_at(tmp_path: Path) -> None:
    done = run(f"unix://{tmp_path}/none.sock", "doctor", "--airflow-url", "http://127.0.0.1:9", "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert [(line["check"], line["ok"]) for line in found if line["check"] != "machine"] == [
        ("store", False),
        ("airflow", False),
    ]
    assert found[0]["text"].endswith("start it, or correct --store")


def test_a_policy_whose_package_is_missing_here_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store, file = f"sqlite:///{tmp_path}/state.db", tmp_path / "cluster.toml"
    file.write_text(f'[cluster]\npolicy = "ours"\n{CLUSTER}')
    monkeypatch.setitem(policies.POLICIES, "ours", policies.get_policy("first_fit"))
    assert run(store, "store", "create").exit_code == 0
    assert run(store, "apply", "--yes", str(file)).exit_code == 0
    monkeypatch.delitem(policies.POLICIES, "ours")
    done = run(store, "doctor")
    [fault] = faults(done)
    assert done.exit_code == 1
    assert "unknown policy 'ours'" in fault
    assert "install" in fault
