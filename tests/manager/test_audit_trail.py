"""The audit trail: every change once in order, over restarts, rotation, full disks and replaced states."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from resource_manager import GPUResourceManager
from resource_manager.errors import SettingsError
from resource_manager.manager.audit_trail import AuditTrail, audit_trail, to_file, to_syslog
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.storage import open_store
from resource_manager.storage.backup import read_backup, restore, write_backup
from tests.redis_server import RedisServer


@pytest.fixture
def manager() -> GPUResourceManager:
    return GPUResourceManager.from_url("memory://", inventory=default_inventory())


def pairs(manager: GPUResourceManager, count: int, name: str = "t") -> None:
    for number in range(count):
        assert manager.allocate_resources(f"{name}{number}", 2, 4)
        assert manager.release_resources(f"{name}{number}")


def lines(*paths: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def versions(*paths: Path) -> list[int]:
    return [line["version"] for line in lines(*paths)]


def test_each_change_is_a_line_with_who_and_what(manager: GPUResourceManager, tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    trail = audit_trail(manager, str(file), tmp_path / "state")
    pairs(manager, 300)
    assert trail.follow() == 600, "more than a page"
    assert trail.follow() == 0
    assert versions(file) == list(range(1, 601))
    assert lines(file) == json.loads(json.dumps(manager.history(0, 600)))
    assert lines(file)[1]["change"] == "released"
    assert lines(file)[1]["by"].startswith("unix:")
    assert file.stat().st_mode & 0o007 == 0


def test_it_goes_on_after_a_restart(manager: GPUResourceManager, tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    for _ in range(3):
        pairs(manager, 2)
        audit_trail(manager, str(file), tmp_path / "state").follow()
    assert versions(file) == list(range(1, 13))


def test_it_goes_on_where_the_store_has_another_address(tmp_path: Path) -> None:
    """Such as another password; another file gets every change."""
    file, other = tmp_path / "audit.jsonl", tmp_path / "other.jsonl"
    for name, folder in (("t", tmp_path), ("u", f"{tmp_path}/."), ("v", tmp_path)):
        url = f"sqlite:///{folder}/state.db"
        with GPUResourceManager.from_url(url, inventory=default_inventory()) as manager:
            pairs(manager, 1, name)
            audit_trail(manager, str(file), tmp_path / "state").follow()
    with GPUResourceManager.from_url(url, inventory=default_inventory()) as manager:
        audit_trail(manager, str(other), tmp_path / "state").follow()
    assert versions(file) == versions(other) == list(range(1, 7))


def test_a_restore_into_another_store_is_a_line(tmp_path: Path) -> None:
    file, backup = tmp_path / "audit.jsonl", tmp_path / "state.json"
    first, second = (f"sqlite:///{tmp_path}/{name}.db" for name in ("first", "second"))
    with GPUResourceManager.from_url(first, inventory=default_inventory()) as manager:
        pairs(manager, 1)
        audit_trail(manager, str(file), tmp_path / "state").follow()
        write_backup(manager.store, backup)
    with closing(open_store(second)) as store:
        restore(store, read_backup(backup))
    with GPUResourceManager.from_url(second, inventory=default_inventory()) as manager:
        audit_trail(manager, str(file), tmp_path / "state").follow()
    assert [line["change"] for line in lines(file)] == ["granted", "released", "state_replaced"]


@pytest.mark.parametrize("begins", ["new", "after a reset"])
def test_two_stores_that_write_to_one_place_lose_nothing(begins: str, tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    for name, tasks in (("first", 5), ("second", 2)):
        with GPUResourceManager.from_url(
            f"sqlite:///{tmp_path}/{name}.db", inventory=default_inventory()
        ) as manager:
            pairs(manager, tasks)
            if name == "second" and begins == "after a reset":
                manager.reset_resources()
                pairs(manager, 1)
            before = versions(file) if file.exists() else []
            audit_trail(manager, str(file), tmp_path / "state").follow()
            assert versions(file)[len(before) :] == [entry["version"] for entry in manager.history(0, 100)]
    assert "state_replaced" not in [line["change"] for line in lines(file)]


@pytest.mark.parametrize("at", ["before the write", "in a line", "before the cursor"])
def test_a_crash_loses_no_change_and_leaves_no_half_line(
    at: str, manager: GPUResourceManager, tmp_path: Path
) -> None:
    file, cursor = tmp_path / "audit.jsonl", tmp_path / "cursor"
    pairs(manager, 1)
    AuditTrail(manager, partial(to_file, file), cursor).follow()
    kept = cursor.read_text()
    pairs(manager, 2, "u")
    if at == "in a line":
        with file.open("a") as stream:
            stream.write('{"version": 3, "cha')
    if at == "before the cursor":
        AuditTrail(manager, partial(to_file, file), cursor).follow()
        cursor.write_text(kept)
    AuditTrail(manager, partial(to_file, file), cursor).follow()
    repeated = [3, 4, 5, 6] if at == "before the cursor" else []
    assert versions(file) == [1, 2, *repeated, 3, 4, 5, 6]


def test_a_file_that_was_moved_is_begun_anew(manager: GPUResourceManager, tmp_path: Path) -> None:
    file, moved = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1"
    trail = audit_trail(manager, str(file), tmp_path / "state")
    pairs(manager, 2)
    trail.follow()
    file.rename(moved)
    pairs(manager, 2, "u")
    trail.follow()
    assert (versions(moved), versions(file)) == ([1, 2, 3, 4], [5, 6, 7, 8])


@pytest.mark.parametrize("store", ["memory://", "sqlite:///{}/state.db"])
def test_a_reset_is_seen_and_what_follows_it_and_nothing_is_written_again(store: str, tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    with GPUResourceManager.from_url(store.format(tmp_path), inventory=default_inventory()) as manager:
        trail = audit_trail(manager, str(file), tmp_path / "state")
        pairs(manager, 1)
        trail.follow()
        assert manager.allocate_resources("unread", 2, 4)
        time.sleep(0.002)  # a state's name tells the millisecond in which it began
        manager.reset_resources()
        pairs(manager, 1, "u")
        trail.follow()
        trail.follow()
    found = [line["change"] for line in lines(file)]
    unread = [] if store == "memory://" else ["granted"]  # only that drops its history with the state
    assert found == ["granted", "released", "state_replaced", *unread, "granted", "released"]


def test_of_a_state_that_was_begun_anew_every_change_is_a_line(tmp_path: Path) -> None:
    file, state = tmp_path / "audit.jsonl", tmp_path / "state.db"
    for name in "tu":
        url = f"sqlite:///{state}"
        with GPUResourceManager.from_url(url, inventory=default_inventory()) as manager:
            pairs(manager, 2, name)
            audit_trail(manager, str(file), tmp_path / "state").follow()
        for left in tmp_path.glob("state.db*"):
            left.unlink()
    assert [line.get("version") for line in lines(file)] == [1, 2, 3, 4, 4, 1, 2, 3, 4]


@pytest.mark.thorough
def test_changes_that_the_store_dropped_unread_are_a_line(
    tmp_path: Path, embedded_redis: RedisServer
) -> None:
    file = tmp_path / "audit.jsonl"
    with GPUResourceManager.from_url(
        embedded_redis.fresh_url(), history_length=1000, inventory=default_inventory()
    ) as manager:
        trail = audit_trail(manager, str(file), tmp_path / "state")
        pairs(manager, 1)
        trail.follow()
        pairs(manager, 1500, "u")
        trail.follow()
    gap = lines(file)[2]
    assert (gap["change"], gap["before"]) == ("dropped_unread", 2)
    assert versions(file)[3:] == list(range(gap["version"], 3003))


def test_a_failed_write_is_made_up_for(manager: GPUResourceManager, tmp_path: Path) -> None:
    file = partial(to_file, tmp_path / "audit.jsonl")
    is_full = True

    def write(written: Sequence[dict[str, Any]]) -> None:
        if is_full:
            raise OSError(28, "No space left on device")
        file(written)

    trail = AuditTrail(manager, write, tmp_path / "cursor")
    pairs(manager, 2)
    with pytest.raises(OSError, match="No space"):
        trail.follow()
    is_full = False
    trail.follow()
    assert versions(tmp_path / "audit.jsonl") == [1, 2, 3, 4]


def test_a_cursor_that_cannot_be_written_repeats_no_line_and_stops_no_trail(
    manager: GPUResourceManager, tmp_path: Path
) -> None:
    """As on a full disk, where the audit itself is on another one."""
    file, full = tmp_path / "audit.jsonl", tmp_path / "full"
    trail = AuditTrail(manager, partial(to_file, file), full / "cursor")
    for tasks, last in ((300, 600), (1, 602), (0, 602)):
        pairs(manager, tasks, f"{tasks}-")
        with pytest.raises(OSError, match="No such file"):
            trail.follow()
        assert versions(file) == list(range(1, last + 1)), "more than a page, each line once"
    full.mkdir()
    assert trail.follow() == 0
    AuditTrail(manager, partial(to_file, file), full / "cursor").follow()
    assert versions(file) == list(range(1, 603)), "the cursor was made up for"


def test_a_place_that_cannot_be_written_is_refused_at_once(
    manager: GPUResourceManager, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=r"--audit .*/none/audit.jsonl: No such file or directory"):
        audit_trail(manager, str(tmp_path / "none" / "audit.jsonl"), tmp_path / "state")
    with pytest.raises(SettingsError, match="Is a directory"):
        audit_trail(manager, str(tmp_path), tmp_path / "state")


def test_a_cursor_that_cannot_be_read_is_named(manager: GPUResourceManager, tmp_path: Path) -> None:
    (tmp_path / "cursor").write_text("{")
    with pytest.raises(SettingsError, match=r"cursor: not the cursor of an audit trail \(.+\): remove it"):
        AuditTrail(manager, partial(to_file, tmp_path / "audit.jsonl"), tmp_path / "cursor")


def test_syslog_gets_each_change_and_a_short_line_for_one_too_long(
    manager: GPUResourceManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = tmp_path / "log"
    monkeypatch.setattr("resource_manager.manager.audit_trail.DEVICE", str(address))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.bind(str(address))
        log.settimeout(5)
        trail = audit_trail(manager, "syslog", tmp_path / "state")
        pairs(manager, 1)
        trail.follow()
        head, _, text = log.recv(1 << 20).decode().partition(": ")
        assert (head, json.loads(text)["change"]) == ("<86>gpu-manager-audit", "granted")
        assert json.loads(log.recv(1 << 20).decode().partition(": ")[2])["version"] == 2
        to_syslog([{"version": 3, "change": "inventory_changed", "at": 1.0, "nodes": "x" * 10**7}])
        short = json.loads(log.recv(1 << 20).decode().partition(": ")[2])
        assert (short["version"], short["change"], short["truncated"]) == (3, "inventory_changed", True)
    with pytest.raises(SettingsError, match="--audit syslog: "):
        audit_trail(manager, "syslog", tmp_path / "state")
