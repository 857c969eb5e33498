"""Maintenance windows through the manager, its command line and every kind of store."""

from __future__ import annotations

import json
import re
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from resource_manager import GPUResourceManager, MemoryStore, Settings
from resource_manager.cli import main
from resource_manager.core.changes import MaintenanceChanged
from resource_manager.core.cluster import ClusterState
from resource_manager.core.maintenance import as_text
from resource_manager.errors import InvalidRequestError
from resource_manager.manager import maintenance_windows
from resource_manager.manager.cluster_file.sections import ClusterForm
from resource_manager.manager.maintenance_windows import WindowForm
from resource_manager.storage.history_file import collect
from resource_manager.storage.once import Once
from tests.builders import Clock, nodes
from tests.cli.targets import running_on
from tests.eventually import wait_for
from tests.redis_server import RedisServer


@pytest.fixture
def manager(clock: Clock) -> GPUResourceManager:
    store = MemoryStore(clock=clock)
    settings = Settings(store="memory://")
    return GPUResourceManager(settings, store=store, inventory=nodes("a", 8), cluster={"min_gpus": 1})


def form(begin: float, end: float, **more: object) -> WindowForm:
    return WindowForm.of(**{"servers": ["a"], "from": as_text(begin), "until": as_text(end), **more})


@pytest.mark.parametrize("target", ["store", "service"])
def test_a_window_from_the_command_line_keeps_a_job_waiting_until_its_end(
    target: str, manager: GPUResourceManager, clock: Clock, tmp_path: Path
) -> None:
    with running_on(target, manager, tmp_path) as run:
        times = ("--from", "1970-01-01T02:00+01:00", "--until", "1970-01-01T02:00Z")
        tried = run("maintenance", "add", "a", *times, "--preempt", "--dry-run")
        assert "it preempts nothing, since the teams have no preemption = true" in tried.stderr
        assert (tried.exit_code, manager.maintenance()) == (0, []), tried.output
        added = run("maintenance", "add", "a", *times, "--reason", "new fans", "--json")
        assert json.loads(added.output)["from"] == "1970-01-01T01:00Z", added.output
        assert json.loads(added.output)["begins_in_s"] == 3600.0 - clock.now
        assert manager.submit("long", 2, expected_runtime=7200)["state"] == "WAITING"
        (waiting,) = manager.queue()
        assert waiting["kind"] == "maintenance"
        assert "maintenance from 1970-01-01T01:00Z until 1970-01-01T02:00Z: new fans" in waiting["reason"]
        assert "new fans" in manager.explain("z", 2, expected_runtime=7200)["servers"][0]["reasons"][0]
        assert re.search("│ 1 │ a +│ 1970-01-01T01:00Z │", run("maintenance", "list").output)
        clock.now = 7199.0
        manager.expire_and_schedule()
        assert manager.leases() == []
        clock.now = 7200.0
        manager.expire_and_schedule()
        assert [lease["task_id"] for lease in manager.leases()] == ["long"]
        assert run("maintenance", "list").output == "no maintenance windows\n"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"from": "1970-01-02T08:00"}, "from has no time zone"),
        ({"from": "tomorrow"}, "from must be a time such as"),
        ({"from": 5}, "from must be a time such as .*, got 5"),
        ({"from": None}, "from must be a time such as"),
        ({"from": "9999-01-01T00:00Z"}, "from must be in the years 1970 to 9998"),
        ({"reason": "a\tb"}, "reason has a control or an invisible character"),
        ({"until": "1970-01-01T00:30Z"}, "until .* must be after its begin"),
        ({"servers": ["zz"]}, "servers"),
        ({"every": "week", "until": "1970-02-01T00:00Z"}, "shorter than a week"),
    ],
)
def test_a_wrong_window_changes_nothing(
    manager: GPUResourceManager, values: dict[str, object], message: str
) -> None:
    with pytest.raises((InvalidRequestError, LookupError), match=message) as error:
        manager.add_maintenance(form(3600.0, 7200.0, **values))
    assert "\n" not in str(error.value)
    assert manager.snapshot().get("version", 0) == 0


@pytest.mark.parametrize("target", ["store", "service"])
def test_removal_starts_what_waits_and_a_second_one_does_nothing(
    target: str, manager: GPUResourceManager, tmp_path: Path
) -> None:
    first = manager.add_maintenance(form(3600.0, 7200.0))["id"]
    manager.submit("long", 2, expected_runtime=7200)
    with running_on(target, manager, tmp_path) as run:
        assert run("maintenance", "remove", str(first)).output.endswith("(removed)\n")
        assert [lease["task_id"] for lease in manager.leases()] == ["long"]
        assert manager.add_maintenance(form(3600.0, 7200.0))["id"] > first
        again = run("maintenance", "remove", str(first))
        assert (again.exit_code, len(manager.maintenance())) == (0, 1), again.output
        assert again.output == f"there is no maintenance window {first}; nothing to remove\n"


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["redis", "sqlite"])
def test_a_window_on_a_real_store_opens_by_itself(
    kind: str, embedded_redis: RedisServer, tmp_path: Path
) -> None:
    url = embedded_redis.fresh_url() if kind == "redis" else f"sqlite:///{tmp_path / 'state.db'}"
    GPUResourceManager.from_url(url, inventory=nodes("a", 8)).close()
    begin = time.time() - 60.0

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(main, ["--store", url, *arguments])
        assert done.exit_code == 0, done.output
        return done.output

    times = ("--from", as_text(begin), "--until", as_text(begin + 3600.0))
    assert "(open): new fans" in run("maintenance", "add", "a", *times, "--reason", "new fans")
    run("submit", "long", "--gpus", "2", "--expected-runtime", "60")
    (waiting,) = json.loads(run("queue", "--json"))
    assert (waiting["kind"], waiting["estimated_start"]["server_name"]) == ("maintenance", "a")
    assert "new fans" in waiting["reason"]
    assert "new fans" in CliRunner().invoke(main, ["--store", url, "explain", "--gpus", "2"]).output
    with closing(GPUResourceManager(Settings(store=url))) as manager:
        until = datetime.fromtimestamp(time.time() + 3.0, UTC).isoformat()
        manager.add_maintenance(WindowForm.of(servers=["a"], **{"from": as_text(begin), "until": until}))
        manager.remove_maintenance(1)
        assert not manager.leases()
        wait_for(lambda: manager.expire_and_schedule() or manager.leases())
    assert run("maintenance", "list") == "no maintenance windows\n"


def test_a_repeat_adds_no_second_window(manager: GPUResourceManager) -> None:
    once = Once("ada", "k", "f")
    first = manager.add_maintenance(form(3600.0, 7200.0), once=once)
    assert manager.add_maintenance(form(3600.0, 7200.0), once=once) == first
    assert manager.add_maintenance(form(3600.0, 7200.0)) == first, "without a key, and with the same words"
    assert len(manager.maintenance()) == 1
    assert manager.add_maintenance(form(3600.0, 7200.0, reason="fans"))["id"] != first["id"]


def test_a_history_with_windows_leads_to_the_same_state(manager: GPUResourceManager) -> None:
    manager.add_maintenance(form(3600.0, 7200.0, every="week"))
    history = collect(manager)
    assert history.before.windows == ()
    cluster = ClusterState.from_snapshot(history.before)
    for change in history.changes:
        cluster.apply(change)
    assert [type(change) for change in history.changes] == [MaintenanceChanged]
    assert cluster.windows[0].every_s == 604_800.0


def test_a_lease_that_was_preempted_for_a_removed_window_runs_on(
    manager: GPUResourceManager, clock: Clock
) -> None:
    manager.apply(ClusterForm.model_validate({"teams": {"t": {}}, "preemption": True}))
    manager.submit("x", 2, team="t", preempt_grace=600, ttl=10_000)
    window = manager.add_maintenance(form(clock.now + 10, clock.now + 500, preempt=True))
    clock.now += 11
    manager.expire_and_schedule()
    assert [lease["state"] for lease in manager.leases()] == ["PREEMPTING"]
    manager.remove_maintenance(window["id"])
    assert [(lease["state"], lease["preempted_by"]) for lease in manager.leases()] == [("RUNNING", None)]


def test_windows_that_are_over_leave_their_places_to_others(
    manager: GPUResourceManager, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance_windows, "MAX_WINDOWS", 2)
    for number in range(2):
        manager.add_maintenance(form(clock.now + 10, clock.now + 20 + number))
    with pytest.raises(InvalidRequestError, match="there are 2 windows already"):
        manager.add_maintenance(form(clock.now + 10, clock.now + 50))
    clock.now += 30
    manager.add_maintenance(form(clock.now + 10, clock.now + 50))
    assert len(manager.maintenance()) == 1
