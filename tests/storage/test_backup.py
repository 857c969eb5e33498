"""Backups of a state, and what a restored one keeps, forgets and refuses."""

from __future__ import annotations

import json
import math
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from resource_manager.core.changes import (
    Cancelled,
    Change,
    Drained,
    Expired,
    Granted,
    JobPlaced,
    Preempting,
    Quarantined,
    Queued,
    Released,
    Renewed,
)
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import STORED, JobPlace, Request
from resource_manager.core.refusal import RefusalKind
from resource_manager.core.search import is_unsearched, reason_before
from resource_manager.errors import (
    BackupRefusedError,
    CorruptStateError,
    LeaseNotFoundError,
    LockedError,
    StaleStateError,
    StateClosedError,
    StateUnconfirmedError,
)
from resource_manager.manager.cluster_file.sections import ClusterDefinition
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.manager.refusal_wording import Refusal
from resource_manager.scheduling import lease_steps
from resource_manager.settings import Settings
from resource_manager.storage import Store, open_store
from resource_manager.storage.backup import (
    NUMBERS_LEFT_FREE,
    Backup,
    read_backup,
    restore,
    write_backup,
)
from resource_manager.storage.jobs import JobRow, job_name
from resource_manager.storage.redis.client import RedisClient
from resource_manager.storage.redis.store import RedisStore
from tests.eventually import wait_for
from tests.redis_server import RedisServer
from tests.storage.dumps import dump_of_sqlite, fail_over
from tests.storage.test_contract import fresh, normal
from tests.storage.walk import add, granted, started

WAYS = (
    ("embedded_redis", "postgresql"),
    ("postgresql", "embedded_redis"),
    ("embedded_redis", "mariadb"),
    ("mariadb", "sqlite"),
    ("sqlite", "postgresql"),
)


class Instead:
    """The store, with other methods in the place of some for whoever is given this."""

    def __init__(self, store: Any, **methods: Any) -> None:
        self._store = store
        vars(self).update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def url_of(request: pytest.FixtureRequest, kind: str) -> str:
    url: str = request.getfixturevalue(kind).fresh_url()
    return url


@pytest.mark.parametrize(("source_kind", "target_kind"), WAYS)
def test_a_state_moves_between_any_two_stores(
    request: pytest.FixtureRequest, opened: ExitStack, tmp_path: Path, source_kind: str, target_kind: str
) -> None:
    source: Store = opened.enter_context(closing(open_store(url_of(request, source_kind))))
    target: Store = opened.enter_context(closing(open_store(url_of(request, target_kind))))
    cluster = started(source)
    add(source, cluster, "a")
    add(source, cluster, "b")
    now = source.now()
    source.commit(
        2,
        [
            Renewed("a", 1, now, now + 900),
            Preempting("b", 2, "w", now + 30.0, now),
            Queued(Request("w", 8, owner="ada", labels=STORED), now, 1, now),
            Drained("gpu-server-3", now, "fans", failed=True),
        ],
        now=now,
    )
    stored, other = (JobRow(job_name(name), "ada", f"job of {name}", 60.0) for name in "wb")
    source.jobs.write([stored, other])
    before = fresh(source)
    path = tmp_path / "state.json"
    write_backup(source, path, [{"token_id": "1"}], closing="it went to the other store")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(StateClosedError, match="it went to the other store"):
        add(source, cluster_of(source), "c")
    backup = read_backup(path)
    assert (backup.tokens, backup.is_final) == (({"token_id": "1"},), True)
    done = restore(target, replace(backup, taken_at=backup.taken_at - 60.0))
    assert done.unsearched == (), "nothing was granted after a final backup"
    after = fresh(target)
    assert [lease.expires_at for lease in after.leases] == pytest.approx(
        [lease.expires_at + done.pause_s for lease in before.leases]
    )
    assert after.leases[1].preempt_until == pytest.approx(now + 30.0 + done.pause_s)
    assert after.version >= max(before.version + NUMBERS_LEFT_FREE, round(now * 1000))
    assert after.last_fencing_token >= max(2 + NUMBERS_LEFT_FREE, round(now * 1000))
    numbers = {
        name: getattr(before, name) for name in ("version", "last_fencing_token", "sequence", "leases")
    }
    assert replace(after, **numbers) == before
    assert target.jobs.texts([stored.name, other.name]) == {stored.name: "job of w"}
    with pytest.raises((StateUnconfirmedError, StaleStateError)):
        add(target, cluster_of(target), "c")


def cluster_of(store: Store) -> ClusterState:
    cluster = store.refresh(None)
    assert cluster is not None
    return cluster


OWNER = """
import subprocess, sys, time
from pathlib import Path
from resource_manager.errors import StateClosedError
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
    except StateClosedError:
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
def test_running_jobs_keep_their_leases_across_a_final_backup_and_its_restore(
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
        write_backup(source, tmp_path / "state.json", closing=f"it went to {target_url}")
    with closing(open_store(target_url)) as target:
        restore(target, read_backup(tmp_path / "state.json"))
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


# ---- what a restore takes the place of ----


@pytest.fixture(params=("embedded_redis", "postgresql", "sqlite"))
def url(request: pytest.FixtureRequest) -> str:
    return url_of(request, request.param)


@pytest.fixture
def store(url: str, opened: ExitStack) -> Store:
    return opened.enter_context(closing(open_store(url)))


def backup_of(store: Store, tmp_path: Path, closing: str | None = None) -> Backup:
    write_backup(store, tmp_path / "state.json", closing=closing)
    return read_backup(tmp_path / "state.json")


def test_a_backup_stops_nothing(store: Store, tmp_path: Path) -> None:
    cluster = started(store)
    add(store, cluster, "a")
    assert backup_of(store, tmp_path).snapshot == normal(cluster.snapshot())
    add(store, cluster, "b")
    assert list(cluster_of(store).leases) == ["a", "b"]


def test_a_closed_state_is_taken_back_where_it_was_and_no_other_gives_way(
    store: Store, tmp_path: Path, opened: ExitStack
) -> None:
    other = opened.enter_context(closing(open_store(f"sqlite:///{tmp_path}/other.db")))
    add(store, started(store), "a")
    add(other, started(other), "b")
    backup_of(store, tmp_path, "gone")
    final = backup_of(store, tmp_path, "gone")  # again, for instance because the file was lost
    with pytest.raises(BackupRefusedError, match=r"holds a state already \(version 1\).*--force gives it up"):
        restore(other, final)
    assert restore(store, final).unsearched == ()
    assert list(cluster_of(store).leases) == ["a"]
    [(_, change)] = store.history()
    assert isinstance(change, Granted)
    assert change.lease.lease_id == "a", "it keeps its history"


def test_a_file_is_restored_a_second_time_only_by_force(store: Store, tmp_path: Path) -> None:
    add(store, started(store), "a")
    final = backup_of(store, tmp_path, "gone")
    restore(store, final)
    first = fresh(store)
    with pytest.raises(BackupRefusedError, match="was restored here before, and the state went on"):
        restore(store, final)
    assert fresh(store) == first
    done = restore(store, final, force=True)
    again = fresh(store)
    assert again.version > first.version
    assert again.last_fencing_token >= first.last_fencing_token
    assert len(done.unsearched) == 4, "nobody knows what was granted in between"


def test_a_state_that_went_on_is_given_up_only_by_force(store: Store, tmp_path: Path) -> None:
    cluster = started(store)
    add(store, cluster, "a")
    backup = backup_of(store, tmp_path)
    with pytest.raises(BackupRefusedError, match=r"nothing has changed here since .* nothing to restore$"):
        restore(store, backup)
    add(store, cluster, "b")
    with pytest.raises(BackupRefusedError, match="--force gives it up"):
        restore(store, backup)
    restore(store, backup, force=True)
    assert list(cluster_of(store).leases) == ["a"]
    assert cluster_of(store).last_fencing_token > 2
    assert len(store.history()) == 1, "what the state does not know has left its history"


def test_a_closed_state_is_taken_back_after_a_fail_over_of_its_store(
    store: Store, url: str, tmp_path: Path
) -> None:
    """Its version jumps, though it takes no change."""
    add(store, started(store), "a")
    earlier = backup_of(store, tmp_path)
    add(store, cluster_of(store), "b")
    final = backup_of(store, tmp_path, "gone")
    fail_over(url)
    assert cluster_of(store).version > final.snapshot.version
    with pytest.raises(BackupRefusedError, match="--force gives it up"):
        restore(store, earlier)
    assert restore(store, final).unsearched == ()
    assert list(cluster_of(store).leases) == ["a", "b"]
    assert len(store.history()) == 2, "it keeps its history"


def test_what_was_granted_on_a_dump_is_given_up_only_by_force(opened: ExitStack, tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with closing(open_store(f"sqlite:///{path}")) as store:
        cluster = started(store)
        bring_back = dump_of_sqlite(path)
        for name in ("a", "b"):
            add(store, cluster, name)
        backup = backup_of(store, tmp_path)
    bring_back()
    later = opened.enter_context(closing(open_store(f"sqlite:///{path}")))
    add(later, cluster_of(later), "a")
    with pytest.raises(BackupRefusedError, match=r"state already \(version 1\).*--force gives it up"):
        restore(later, backup)
    bring_back()
    last = opened.enter_context(closing(open_store(f"sqlite:///{path}")))
    assert restore(last, backup).unsearched
    assert list(cluster_of(last).leases) == ["a", "b"]


def test_a_grant_during_a_restore_is_not_lost_unseen(
    store: Store, url: str, tmp_path: Path, opened: ExitStack
) -> None:
    """A restore is one commit on the version it read: after another commit it looks again, and refuses."""
    other = opened.enter_context(closing(open_store(url)))
    backup = backup_of_another(tmp_path, opened)

    def a_moment_later(*values: Any, **options: Any) -> None:
        cluster = started(other)
        with suppress(LockedError):  # in a store of some state the lock keeps others out
            add(other, cluster, "late")
        store.restore(*values, **options)

    with pytest.raises(BackupRefusedError, match="holds a state already"):
        restore(Instead(store, restore=a_moment_later), backup)
    assert cluster_of(other).by_name.keys() == {f"gpu-server-{i}" for i in range(4)}


def test_a_restore_that_stands_is_told_as_one_though_its_lock_was_lost(
    embedded_redis: RedisServer, tmp_path: Path, opened: ExitStack
) -> None:
    client = RedisClient.from_url(embedded_redis.fresh_url())
    store = opened.enter_context(closing(RedisStore(client)))

    def without_lock(*values: Any, **options: Any) -> None:
        client.driver.delete(client.key("lock"))
        store.restore(*values, **options)

    backup = backup_of_another(tmp_path, opened)
    assert len(restore(Instead(store, restore=without_lock), backup).unsearched) == 4


def backup_of_another(tmp_path: Path, opened: ExitStack) -> Backup:
    source = opened.enter_context(closing(open_store(f"sqlite:///{tmp_path}/source.db")))
    add(source, started(source), "a")
    return backup_of(source, tmp_path)


def test_leases_with_placed_jobs_keep_what_was_left_of_their_time_and_others_their_end(
    store: Store, tmp_path: Path
) -> None:
    """What held no placed job may have ended after the backup, and its owner may wake: it must not renew."""
    cluster = started(store)
    add(store, cluster, "a")
    add(store, cluster, "held")
    now = store.now()
    unlimited = replace(granted(cluster, "b", now).lease, expires_at=math.inf)
    placed, preempting = JobPlaced("a", 1, (JobPlace("ssh"),), now), Preempting("a", 1, "w", now + 30.0, now)
    store.commit(2, [placed, preempting, Granted(unlimited, now)], now=now)
    backup = backup_of(store, tmp_path)
    backup = replace(backup, taken_at=backup.taken_at - 3600.0)
    done = restore(store, backup, force=True)
    leases = {lease.lease_id: lease for lease in fresh(store).leases}
    assert leases["a"].expires_at == pytest.approx(cluster.leases["a"].expires_at + done.pause_s)
    assert done.pause_s > 3599.0
    assert leases["held"].expires_at == pytest.approx(cluster.leases["held"].expires_at)
    assert leases["a"].preempt_until == pytest.approx(now + 30.0 + done.pause_s)
    assert (leases["held"].preempt_until, leases["b"].expires_at) == (math.inf, math.inf)


def test_a_lease_that_may_have_been_granted_again_cannot_be_renewed_after_a_restore(
    store: Store, tmp_path: Path
) -> None:
    """The window after a restore expires nothing: who renewed then would share its GPUs."""
    cluster = started(store)
    for name in ("over", "ended", "kept", "placed"):
        add(store, cluster, name)
    now = store.now()
    lease = {each.lease_id: each for each in cluster.leases.values()}
    store.commit(
        4,
        [
            Renewed("over", lease["over"].fencing_token, now, now + 0.001),
            JobPlaced("placed", lease["placed"].fencing_token, (JobPlace("ssh"),), now),
        ],
        now=now,
    )
    backup = backup_of(store, tmp_path)
    version = fresh(store).version
    ends = [Released(name, lease[name].fencing_token, store.now()) for name in ("ended", "placed")]
    store.commit(version, ends, now=store.now())
    wait_for(lambda: store.now() > now + 0.001)
    restore(store, backup, force=True)
    after = ClusterState.from_snapshot(fresh(store))
    for name in ("over", "ended"):
        with pytest.raises(LeaseNotFoundError):
            lease_steps.renew(after, name, store.now(), fencing_token=lease[name].fencing_token)
        assert after.leases[name].expires_at <= store.now(), "it expires when the window is over"
    for name in ("kept", "placed"):
        assert lease_steps.renew(after, name, store.now(), fencing_token=lease[name].fencing_token)


def test_every_server_is_closed_until_it_was_searched_also_one_that_was_drained(
    store: Store, tmp_path: Path
) -> None:
    cluster = started(store)
    store.commit(0, [Drained("gpu-server-1", store.now(), "RMA, do not use")], now=store.now())
    backup = backup_of(store, tmp_path)
    done = restore(store, backup, force=True)
    assert done.unsearched == tuple(state.name for state in cluster.nodes)
    drained = {state.name: state.drained for state in cluster_of(store).nodes}
    assert all(is_unsearched(each) for each in drained.values())
    first, second = drained["gpu-server-0"], drained["gpu-server-1"]
    assert first is not None
    assert second is not None
    assert reason_before(second) == "RMA, do not use"
    assert "gpu-manager resume gpu-server-0" in first.reason


def test_a_server_that_the_backup_does_not_know_is_closed_until_it_was_searched(
    store: Store, url: str, tmp_path: Path
) -> None:
    """It was applied in the lost hour, and jobs of leases that were granted then may run there."""
    first, second, *others = default_inventory()
    with GPUResourceManager.from_url(url, inventory=(first, second), confirmation_window_s=0.1) as manager:
        manager.drain(second.name, reason="RMA, do not use")
        manager.apply(ClusterDefinition(nodes=(first,)))
        backup = backup_of(store, tmp_path)
        manager.apply(ClusterDefinition(nodes=(first, others[0])))
        restore(store, backup, force=True)
        manager.resume(first.name)
        added = manager.apply(ClusterDefinition(nodes=(first, second, others[0])))["lines"]
        assert [
            line.endswith("closed until searched for jobs that the restored state lacks") for line in added
        ] == [
            False,
            True,
        ]
    with GPUResourceManager.from_url(url) as fresh_one:
        drained = fresh_one.read(lambda cluster, now: {each.name: each.drained for each in cluster.nodes})
        assert [is_unsearched(each) for each in drained.values()] == [False, True, True]
        of_second = drained[second.name]
        assert of_second is not None
        assert reason_before(of_second) == "RMA, do not use"
        refused = fresh_one.allocate("next", 1, 1, server=others[0].name)
        assert isinstance(refused, Refusal)
        assert refused.kind is RefusalKind.RECOVERING
        fresh_one.resume(others[0].name)
        fresh_one.apply(ClusterDefinition(nodes=(first, second, *others)))
        assert is_unsearched(fresh_one.read(lambda cluster, now: cluster.node(others[1].name).drained))


def test_a_server_that_a_final_backup_does_not_know_is_open(store: Store, url: str, tmp_path: Path) -> None:
    first, second, *_ = default_inventory()
    with GPUResourceManager.from_url(url, inventory=(first,)) as manager:
        restore(store, backup_of(store, tmp_path, "gone"))
        manager.apply(ClusterDefinition(nodes=(first, second)))
        assert manager.read(lambda cluster, now: cluster.node(second.name).is_open)


# ---- files ----


def test_a_commit_during_a_final_backup_is_part_of_it(tmp_path: Path, opened: ExitStack) -> None:
    store = opened.enter_context(closing(open_store(f"sqlite:///{tmp_path}/a.db")))
    cluster = started(store)
    late = [granted(cluster, "late", store.now())]

    def a_little_later(version: int, reason: str) -> None:
        if late:
            store.commit(version, [late.pop()], now=store.now())
        store.close_state(version, reason)

    backup = backup_of(Instead(store, close_state=a_little_later), tmp_path, "elsewhere")
    assert [lease.lease_id for lease in backup.snapshot.leases] == ["late"]
    assert store.refresh(None) is not None
    assert (backup.snapshot.version, store.closed) == (cluster.version + 1, "elsewhere")
    assert [path.name for path in tmp_path.glob("*.json")] == ["state.json"], "no draft is left"


def test_a_final_backup_reads_the_stored_job_of_a_request_once_however_many_commits_come(
    tmp_path: Path, opened: ExitStack
) -> None:
    """Reading them all took longer than the time between the renewals of a busy service."""
    store = opened.enter_context(closing(open_store(f"sqlite:///{tmp_path}/a.db")))
    started(store)
    counts: list[int] = []

    def submit(number: int, lease_id: str, *before: Change) -> None:
        store.jobs.write([JobRow(job_name(lease_id), "ada", f"job {number}", 60.0)])
        now = store.now()
        queued = Queued(Request(lease_id, 8, owner="ada", labels=STORED), now, number, now)
        store.commit(cluster_of(store).version, [*before, queued], now=now)

    def texts(wanted: list[str]) -> dict[str, str]:
        counts.append(len(wanted))
        return store.jobs.texts(wanted)

    def a_little_later(version: int, reason: str) -> None:
        if len(counts) == 1:
            submit(3, "b", Cancelled("b", store.now()))  # it waits again, with another job
        store.close_state(version, reason)

    submit(1, "a")
    submit(2, "b")
    busy = Instead(store, close_state=a_little_later, jobs=Instead(store.jobs, texts=texts))
    assert backup_of(busy, tmp_path, "elsewhere").jobs == {"a": "job 1", "b": "job 3"}
    assert counts == [2, 1]


def test_a_file_that_is_no_backup(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    for text in ("", "[]", "{}", json.dumps({"state": {"format": 1}, "taken_at": 1, "tokens": []})):
        path.write_text(text)
        with pytest.raises(CorruptStateError, match=r"state\.json"):
            read_backup(path)


@pytest.mark.parametrize(
    "wrong",
    [{"taken_at": math.nan}, {"taken_at": math.inf}, {"taken_at": 1e300}, {"taken_at": 1e12}]
    + [{"incarnation": text} for text in ("state", "0x1234567890abc", "-00000000001")]
    + [{"state": {name: 10**30}} for name in ("version", "last_fencing_token", "sequence")],
)
def test_a_file_whose_times_or_numbers_are_none_is_no_backup(tmp_path: Path, wrong: dict[str, Any]) -> None:
    path = tmp_path / "state.json"
    with closing(open_store("memory://")) as store:
        started(store)
        write_backup(store, path)
    found = json.loads(path.read_text())
    state = found["state"] | wrong.get("state", {})
    path.write_text(json.dumps(found | wrong | {"state": state}))
    with pytest.raises(CorruptStateError, match=r"state\.json is not a file of gpu-manager store backup"):
        read_backup(path)


def test_an_empty_store_has_nothing_to_back_up(tmp_path: Path, opened: ExitStack) -> None:
    store = opened.enter_context(closing(open_store(f"sqlite:///{tmp_path}/a.db")))
    with pytest.raises(BackupRefusedError, match="nothing to back up"):
        write_backup(store, tmp_path / "state.json")
    assert not list(tmp_path.glob("*.json"))
