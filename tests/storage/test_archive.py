"""The archive: one unbroken history in a file, despite trimmed streams, resets and crashes."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from resource_manager import GPUResourceManager
from resource_manager.errors import SettingsError
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.storage.archive import extend
from simulator.replay.history import read_history
from tests.redis_server import RedisServer
from tests.small_disk import small_disk_at


def manager_on(url: str, **settings: Any) -> GPUResourceManager:
    return GPUResourceManager.from_url(url, inventory=default_inventory(), **settings)


def pairs(manager: GPUResourceManager, count: int, name: str = "t") -> None:
    for number in range(count):
        assert manager.allocate_resources(f"{name}{number}", 2, 4)
        assert manager.release_resources(f"{name}{number}")


def versions(path: Path) -> list[int]:
    lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    assert "snapshot" in lines[0]
    return [lines[0]["snapshot"]["version"], *(line["version"] for line in lines[1:])]


def test_it_receives_new_changes_and_can_be_replayed(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    with manager_on("memory://") as manager:
        pairs(manager, 3)
        assert extend(path, manager) == 6
        assert extend(path, manager) == 0
        pairs(manager, 700, "u")
        assert extend(path, manager) == 1400, "more than a page"
    assert versions(path) == list(range(1407))
    assert len(read_history(str(path)).changes) == 1406


def test_on_a_full_disk_the_error_names_the_file_and_later_it_is_whole(tmp_path: Path) -> None:
    with small_disk_at(tmp_path / "small", "size=64k") as folder, manager_on("memory://") as manager:
        path = folder / "history.jsonl"
        assert extend(path, manager) == 0
        pairs(manager, 20)
        free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_bsize
        (folder / "other").write_bytes(bytes(free))
        with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
            extend(path, manager)
        (folder / "other").unlink()
        extend(path, manager)
        assert versions(path) == list(range(manager.summary()["version"] + 1))


def test_what_is_no_plain_file_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with manager_on("memory://") as manager, pytest.raises(OSError, match=r"not a plain file: '.*pipe'"):
        extend(tmp_path / "pipe", manager)


@pytest.mark.thorough
def test_it_is_complete_although_the_store_drops_changes(tmp_path: Path, embedded_redis: RedisServer) -> None:
    path = tmp_path / "history.jsonl"
    with GPUResourceManager.from_url(
        embedded_redis.fresh_url(), history_length=1000, inventory=default_inventory()
    ) as manager:
        for number in range(3):
            pairs(manager, 250, f"r{number}-")
            extend(path, manager)
        assert len(manager.history(limit=10_000)) < 1500
    assert versions(path) == list(range(1501))


@pytest.mark.thorough
def test_changes_dropped_unread_start_another_file(tmp_path: Path, embedded_redis: RedisServer) -> None:
    path = tmp_path / "history.jsonl"
    with GPUResourceManager.from_url(
        embedded_redis.fresh_url(), history_length=1000, inventory=default_inventory()
    ) as manager:
        pairs(manager, 2)
        extend(path, manager)
        pairs(manager, 600, "u")
        extend(path, manager)
    assert versions(tmp_path / "history.jsonl.4") == list(range(5))
    first, *rest = versions(path)
    assert first > 4
    assert rest == list(range(first + 1, 1205))


def test_a_reset_starts_another_file(tmp_path: Path, embedded_redis: RedisServer) -> None:
    path = tmp_path / "history.jsonl"
    with manager_on(embedded_redis.fresh_url()) as manager:
        pairs(manager, 2)
        extend(path, manager)
        pairs(manager, 1, "u")
        manager.reset_resources()
        pairs(manager, 1, "v")
        extend(path, manager)
    assert versions(tmp_path / "history.jsonl.6") == list(range(7)), "the changes before it are kept"
    assert len(versions(path)) == 3


def test_a_new_store_starts_another_file(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    for life, count in ("a", 2), ("b", 1), ("c", 2), ("d", 3):
        with manager_on("memory://") as manager:
            pairs(manager, count, life)
            extend(path, manager)
            pairs(manager, 1, f"{life}-later-")
            extend(path, manager)
    found = {
        file.name: file.read_text().splitlines()[1].partition('"lease_id": ')[2][1]
        for file in tmp_path.iterdir()
    }
    assert found == {
        "history.jsonl.6": "a",
        "history.jsonl.4": "b",
        "history.jsonl.6-2": "c",
        "history.jsonl": "d",
    }
    assert versions(path) == list(range(9))


@pytest.mark.thorough
def test_an_archive_started_late_has_each_change_once(tmp_path: Path, embedded_redis: RedisServer) -> None:
    path = tmp_path / "history.jsonl"
    with GPUResourceManager.from_url(
        embedded_redis.fresh_url(), history_length=1000, inventory=default_inventory()
    ) as manager:
        assert manager.allocate_resources("long", 2, 4)
        pairs(manager, 1000)
        assert manager.release_resources("long")  # granted before the changes that the store still has
        extend(path, manager)
        assert extend(path, manager) == 0
        pairs(manager, 1, "u")
        assert extend(path, manager) == 2
    first, *rest = versions(path)[1:]
    assert rest == list(range(first + 1, 2005))


def test_a_line_torn_by_a_crash_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    with manager_on("memory://") as manager:
        pairs(manager, 2)
        extend(path, manager)
        path.write_bytes(path.read_bytes()[:-20])
        assert extend(path, manager) == 1
    assert versions(path) == list(range(5))


def test_two_writers_write_each_change_once(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    with manager_on("memory://") as manager:
        extend(path, manager)
        threads = [
            threading.Thread(target=lambda: [extend(path, manager) for _ in range(100)]) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        pairs(manager, 200)
        for thread in threads:
            thread.join()
        extend(path, manager)
    assert versions(path) == list(range(401))


@pytest.mark.parametrize("content", ["", "hello\n", '{"a": 1}\n', '{"snapshot": 1}\n', "[]\n"])
def test_a_file_that_is_not_an_archive_is_left_unchanged(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with (
        manager_on("memory://") as manager,
        pytest.raises(SettingsError, match="notes"),
    ):
        extend(path, manager)
    assert path.read_text() == content
