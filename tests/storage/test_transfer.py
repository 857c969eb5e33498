"""A state that moves to another store, with its leases, its queue and its numbers."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest

from resource_manager.core.changes import Drained, Expired, Quarantined, Queued, Released, Renewed
from resource_manager.core.models import Request
from resource_manager.errors import CorruptStateError, StoreError, StoreMovedError
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.settings import Settings
from resource_manager.storage import Store, open_store
from resource_manager.storage.transfer import export_state, import_state, read_export
from tests.storage.test_contract import fresh
from tests.storage.walk import add, granted, started

WAYS = (
    ("embedded_redis", "postgresql"),
    ("postgresql", "embedded_redis"),
    ("embedded_redis", "mariadb"),
    ("mariadb", "sqlite"),
    ("sqlite", "postgresql"),
)


@pytest.fixture
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def url_of(request: pytest.FixtureRequest, kind: str, tmp_path: Path) -> str:
    if kind == "sqlite":
        return f"sqlite:///{tmp_path}/state.db"
    url: str = request.getfixturevalue(kind).fresh_url()
    return url


@pytest.mark.parametrize(("source_kind", "target_kind"), WAYS)
def test_a_state_moves_between_any_two_stores(
    request: pytest.FixtureRequest, opened: ExitStack, tmp_path: Path, source_kind: str, target_kind: str
) -> None:
    source: Store = opened.enter_context(closing(open_store(url_of(request, source_kind, tmp_path))))
    target: Store = opened.enter_context(closing(open_store(url_of(request, target_kind, tmp_path))))
    cluster = started(source)
    add(source, cluster, "a")
    add(source, cluster, "b")
    now = source.now()
    source.commit(
        2,
        [
            Renewed("a", 1, now, now + 900),
            Queued(Request("w", 8), now, 1, now),
            Drained("gpu-server-3", now, "fans", failed=True),
        ],
        now=now,
    )
    before = fresh(source)
    path = tmp_path / "state.json"
    export_state(source, path, "the other store", [{"token_id": "1"}])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(StoreMovedError, match="moved to the other store"):
        add(source, cluster_of(source), "c")
    exported = read_export(path)
    assert exported.tokens == ({"token_id": "1"},)
    pause_s = import_state(target, replace(exported, exported_at=exported.exported_at - 60.0))
    assert pause_s > 59.0
    after = fresh(target)
    assert [lease.expires_at for lease in after.leases] == pytest.approx(
        [lease.expires_at + pause_s for lease in before.leases]
    )
    leases = tuple(replace(lease, expires_at=0.0) for lease in before.leases)
    assert replace(after, leases=leases) == replace(before, leases=leases)
    grown = cluster_of(target)
    add(target, grown, "c")
    assert grown.leases["c"].fencing_token == 3, "tokens go on"


def cluster_of(store: Store):  # type: ignore[no-untyped-def]
    cluster = store.refresh(None)
    assert cluster is not None
    return cluster


OWNER = """
import subprocess, sys, time
from pathlib import Path
from resource_manager.errors import StoreMovedError
from resource_manager.manager.manager import GPUResourceManager

setting, stop, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
old = setting.read_text()
manager = GPUResourceManager.from_url(old, lease_ttl_s=60.0)
lease = manager.allocate_resources(name, 8, 8)
job = subprocess.Popen(["sleep", "600"])
print(lease["fencing_token"], lease["gpu_ids"], flush=True)
moved = False
while not (moved and stop.exists()):
    try:
        renewed = manager.renew(name, fencing_token=lease["fencing_token"])
        assert renewed["gpu_ids"] == lease["gpu_ids"] and renewed["server_id"] == lease["server_id"]
    except StoreMovedError:
        new = setting.read_text()
        if new != old:
            manager = GPUResourceManager.from_url(new)
            moved = True
            print("moved", flush=True)
    time.sleep(0.05)
assert job.poll() is None
job.kill()
assert manager.release_resources(name, fencing_token=lease["fencing_token"])
"""
"""The owner of a running job: renews its lease, and opens the store anew when that was moved."""


@pytest.mark.slow
def test_running_jobs_keep_their_leases_across_the_move(
    request: pytest.FixtureRequest, opened: ExitStack, tmp_path: Path
) -> None:
    """Owners in processes of their own renew and release in the new store with the tokens of the old one."""
    source_url = request.getfixturevalue("embedded_redis").fresh_url()
    target_url = request.getfixturevalue("postgresql").fresh_url()
    setting, stop = tmp_path / "setting", tmp_path / "stop"
    setting.write_text(source_url)
    GPUResourceManager.from_url(source_url, inventory=default_inventory(), lease_ttl_s=60.0).close()
    owners, outputs = [], []
    for number in range(4):
        command = [sys.executable, "-c", OWNER, str(setting), str(stop), f"job-{number}"]
        owner = opened.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        opened.callback(owner.kill)
        owners.append(owner)
        assert owner.stdout is not None
        outputs.append(owner.stdout)
    told = [output.readline() for output in outputs]
    assert all(told), "each has its lease and runs its job"
    with closing(open_store(source_url)) as source:
        export_state(source, tmp_path / "state.json", target_url)
    with closing(open_store(target_url)) as target:
        import_state(target, read_export(tmp_path / "state.json"))
    new = tmp_path / "new"
    new.write_text(target_url)
    new.replace(setting)
    with GPUResourceManager(Settings(store=target_url)) as manager:
        assert len(manager.leases()) == 4
        assert manager.allocate_resources("another", 2, 2) is None, "no GPU of a running job is free"
        assert [output.readline() for output in outputs] == ["moved\n"] * 4
        stop.touch()
        assert [owner.wait(60) for owner in owners] == [0] * 4
        assert manager.leases() == []
        changes = [change for _, change in manager.store.history()]
        assert sum(isinstance(change, Released) for change in changes) == 4
        assert not any(isinstance(change, (Expired, Quarantined)) for change in changes)


def test_a_state_goes_back_to_where_it_came_from_and_nowhere_else(tmp_path: Path, opened: ExitStack) -> None:
    store = opened.enter_context(closing(open_store(f"sqlite:///{tmp_path}/a.db")))
    other = opened.enter_context(closing(open_store(f"sqlite:///{tmp_path}/b.db")))
    add(store, started(store), "a")
    add(other, started(other), "b")
    path = tmp_path / "state.json"
    export_state(store, path, "b.db")
    export_state(store, path, "b.db")  # for instance because the file was lost
    with pytest.raises(StoreError, match="holds another state already"):
        import_state(other, read_export(path))
    import_state(store, read_export(path))
    cluster = cluster_of(store)
    assert list(cluster.leases) == ["a"]
    add(store, cluster, "c")


def test_a_commit_during_the_export_is_part_of_it(
    tmp_path: Path, opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened.enter_context(closing(open_store(f"sqlite:///{tmp_path}/a.db")))
    cluster = started(store)
    move = store.move
    late = [granted(cluster, "late", store.now())]

    def moved_a_little_later(version: int, to: str) -> None:
        if late:
            store.commit(version, [late.pop()], now=store.now())
        move(version, to)

    monkeypatch.setattr(store, "move", moved_a_little_later)
    export_state(store, tmp_path / "state.json", "elsewhere")
    exported = read_export(tmp_path / "state.json")
    assert [lease.lease_id for lease in exported.snapshot.leases] == ["late"]
    assert [path.name for path in tmp_path.glob("*.json")] == ["state.json"], "no draft is left"


def test_a_file_that_is_no_export(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    for text in ("", "[]", "{}", json.dumps({"state": {"format": 1}, "exported_at": 1, "tokens": []})):
        path.write_text(text)
        with pytest.raises(CorruptStateError, match=r"state\.json"):
            read_export(path)


def test_an_empty_store_has_nothing_to_export(tmp_path: Path, opened: ExitStack) -> None:
    store = opened.enter_context(closing(open_store(f"sqlite:///{tmp_path}/a.db")))
    with pytest.raises(StoreError, match="nothing to export"):
        export_state(store, tmp_path / "state.json", "elsewhere")
    assert not list(tmp_path.glob("*.json"))
