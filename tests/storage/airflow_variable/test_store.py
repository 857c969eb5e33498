"""Behaviour of the Variable store only: a readable document, and an Airflow without compare-and-set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from resource_manager.core.changes import Drained, Granted
from resource_manager.core.models import Placement
from resource_manager.errors import (
    CorruptStateError,
    LockedError,
    NewerFormatError,
    SettingsError,
    StaleStateError,
    StateLostError,
    StateReplacedError,
    StoreUnavailableError,
)
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.settings import Settings
from resource_manager.storage import open_store
from resource_manager.storage.airflow_variable.jobs import VariableJobs
from resource_manager.storage.airflow_variable.store import VariableStore
from resource_manager.storage.backup import read_backup, restore, write_backup
from resource_manager.storage.jobs import JobRow
from resource_manager.storage.outage import outage
from resource_manager.storage.redis.client import RedisClient
from resource_manager.storage.redis.lock import RedisLock
from tests.storage.conftest import Variables
from tests.storage.walk import add, first_state, granted, started

KEY = "gpu_resource_status"

ORIGINAL: dict[str, Any] = {
    "servers": [
        {
            "server_id": 0,
            "server_name": "gpu-server-0",
            "total_gpus": 8,
            "available_gpus": [2, 3, 4, 5, 6, 7],
            "total_cpus": 64,
            "available_cpus": 56,
            "running_tasks": [
                {
                    "task_id": "train-1",
                    "allocated_gpus": [0, 1],
                    "allocated_cpus": 8,
                    "start_time": "2025-01-02T03:04:05",
                }
            ],
        },
        {
            "server_id": 1,
            "server_name": "gpu-server-1",
            "total_gpus": 8,
            "available_gpus": [0, 1, 2, 3, 4, 5, 6, 7],
            "total_cpus": 64,
            "available_cpus": 64,
            "running_tasks": [],
        },
    ],
    "last_updated": "2025-01-02T03:04:05",
}


@pytest.fixture
def variables() -> Variables:
    return Variables()


@pytest.fixture
def store(variables: Variables, redis_url: str) -> VariableStore:
    return VariableStore(variables, RedisClient.from_url(redis_url))


def test_the_document_reads_as_in_the_original(store: VariableStore, variables: Variables) -> None:
    add(store, started(store), "a")
    value = json.loads(variables.texts[KEY])
    server = value["servers"][0]
    assert server["server_id"] == 0
    assert server["server_name"] == "gpu-server-0"
    assert (server["total_gpus"], server["total_cpus"]) == (8, 64)
    assert server["available_gpus"] == [2, 3, 4, 5, 6, 7]
    assert server["available_cpus"] == 60
    (task,) = server["running_tasks"]
    assert (task["task_id"], task["allocated_gpus"], task["allocated_cpus"]) == ("a", [0, 1], 4)
    assert value["last_updated"].startswith("20")
    assert (value["version"], value["last_fencing_token"], value["format"]) == (1, 1, 1)


def test_a_document_of_the_original_is_imported(store: VariableStore, variables: Variables) -> None:
    variables.texts[KEY] = json.dumps(ORIGINAL)
    assert not store.initialise(first_state())
    cluster = store.refresh(None)
    assert cluster is not None
    assert cluster.leases["train-1"].placement == Placement("gpu-server-0", (0, 1))
    assert cluster.by_name["gpu-server-0"].whole_free == 6
    assert json.loads(variables.texts[KEY]) == ORIGINAL, "reading writes nothing"
    add(store, cluster, "new")
    again = store.refresh(None)
    assert again is not None
    assert set(again.leases) == {"train-1", "new"}
    assert again.leases["new"].fencing_token > again.leases["train-1"].fencing_token


def corrupted(path: str, value: object) -> str:
    document = json.loads(json.dumps(ORIGINAL))
    target = document
    *parents, last = path.split(".")
    for part in parents:
        target = target[int(part) if part.isdigit() else part]
    target[last] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"servers": 3}',
        '{"servers": [{}]}',
        '{"servers": [], "format": "x", "state": {}}',
        '{"servers": [], "format": 1}',
        corrupted("servers.0.total_gpus", "many"),
        corrupted("servers.1.running_tasks", ORIGINAL["servers"][0]["running_tasks"]),
        corrupted(
            "servers.0.running_tasks",
            [
                {
                    "task_id": t,
                    "allocated_gpus": [1],
                    "allocated_cpus": 1,
                    "start_time": "2025-01-02T03:04:05",
                }
                for t in "ab"
            ],
        ),
    ],
)
def test_a_corrupt_document_is_reported_and_left_unchanged(
    store: VariableStore, variables: Variables, text: str
) -> None:
    variables.texts[KEY] = text
    for step in (
        lambda: store.refresh(None),
        lambda: store.commit(0, [], now=store.now()),
        lambda: store.initialise(first_state()),
        lambda: store.history(),
    ):
        with pytest.raises(CorruptStateError, match=KEY) as caught:
            step()
        assert "\n" not in str(caught.value)
    assert variables.texts[KEY] == text
    store.replace(first_state())
    cluster = store.refresh(None)
    assert cluster is not None
    assert cluster.version > 10**12, "above any number of the lost document"
    assert cluster.last_fencing_token > 10**12


def test_a_manager_can_reset_an_unreadable_state(variables: Variables, redis_url: str) -> None:
    variables.texts[KEY] = "{"
    store = VariableStore(variables, RedisClient.from_url(redis_url))
    manager = GPUResourceManager(Settings(), store=store, inventory=default_inventory())
    for step in (manager.leases, lambda: manager.allocate_resources("a", 2, 2)):
        with pytest.raises(CorruptStateError, match="reset"):
            step()
    assert variables.texts[KEY] == "{"
    assert manager.reset_resources()
    assert manager.allocate_resources("a", 2, 2) is not None


def test_a_backup_takes_the_place_of_an_unreadable_document_only_by_force(
    store: VariableStore, variables: Variables, tmp_path: Path
) -> None:
    add(store, started(store), "a")
    write_backup(store, tmp_path / "state.json")
    variables.texts[KEY] = "{"
    backup = read_backup(tmp_path / "state.json")
    with pytest.raises(CorruptStateError, match="reset"):
        restore(store, backup)
    restore(store, backup, force=True)
    cluster = store.refresh(None)
    assert cluster is not None
    assert list(cluster.leases) == ["a"]


def test_a_final_backup_is_taken_back_beside_a_redis_that_forgot_lock_and_version(
    store: VariableStore, variables: Variables, redis_url: str, tmp_path: Path
) -> None:
    add(store, started(store), "a")
    write_backup(store, tmp_path / "state.json", closing="gone")
    later = VariableStore(variables, RedisClient.from_url(f"{redis_url}-empty"))
    assert restore(later, read_backup(tmp_path / "state.json")).unsearched == ()
    cluster = later.refresh(None)
    assert cluster is not None
    assert list(cluster.leases) == ["a"]


def test_a_restore_whose_lock_was_lost_says_so(
    store: VariableStore, variables: Variables, redis_url: str, tmp_path: Path
) -> None:
    """Tried again without it, it would never end."""
    add(store, started(store), "a")
    write_backup(store, tmp_path / "state.json")
    tries: list[str] = []

    class Losing(VariableStore):
        def restore(self, *given: Any, **more: Any) -> None:
            client = RedisClient.from_url(redis_url)
            client.driver.delete(client.key(f"gpu_resource_lock:{KEY}"))
            tries.append(variables.texts[KEY])
            assert len(tries) == 1, "it is tried again"
            super().restore(*given, **more)

    losing = Losing(variables, RedisClient.from_url(redis_url))
    with pytest.raises(StaleStateError, match="lost"):
        restore(losing, read_backup(tmp_path / "state.json"), force=True)
    assert variables.texts[KEY] == tries[0]


def test_a_newer_format_is_refused_even_by_a_reset(store: VariableStore, variables: Variables) -> None:
    started(store)
    value = json.loads(variables.texts[KEY])
    variables.texts[KEY] = text = json.dumps({**value, "format": 7})
    for step in (lambda: store.refresh(None), lambda: store.replace(first_state())):
        with pytest.raises(NewerFormatError, match=r"format 7.*upgrade"):
            step()
    assert variables.texts[KEY] == text


def test_a_deleted_variable_is_a_lost_state_for_all_clients(
    store: VariableStore, variables: Variables, redis_url: str
) -> None:
    cluster = started(store)
    add(store, cluster, "a")
    del variables.texts[KEY]
    newcomer = VariableStore(variables, RedisClient.from_url(redis_url))
    for client in (store, newcomer):
        with pytest.raises(StateLostError, match="gone"):
            client.refresh(None)
        with pytest.raises(StateLostError):
            client.initialise(first_state())
    newcomer.replace(first_state())
    assert store.refresh(cluster) is not None, "an operator's reset is trusted"


def test_an_older_document_is_a_lost_state(
    store: VariableStore, variables: Variables, redis_url: str
) -> None:
    cluster = started(store)
    add(store, cluster, "a")
    older = variables.texts[KEY]
    add(store, cluster, "b")
    variables.texts[KEY] = older
    with pytest.raises(StateLostError, match="is at version 1, but version 2 was read before"):
        store.refresh(cluster)
    newcomer = VariableStore(variables, RedisClient.from_url(redis_url))
    theirs = newcomer.refresh(None)
    assert theirs is not None
    with pytest.raises(StateLostError, match="version 2 was written"):
        add(newcomer, theirs, "c")
    assert variables.texts[KEY] == older


def test_a_state_started_without_a_reset_is_a_lost_state(
    store: VariableStore, variables: Variables, redis_url: str
) -> None:
    add(store, started(store), "a")
    other_variables = Variables()
    started(VariableStore(other_variables, RedisClient.from_url(f"{redis_url}-other")))
    for text in (other_variables.texts[KEY], json.dumps(ORIGINAL)):
        variables.texts[KEY] = text
        with pytest.raises(
            StateReplacedError, match="holds another state than before, started without a reset"
        ):
            store.refresh(None)


def test_the_first_commit_gives_a_document_of_the_original_its_identity(
    store: VariableStore, variables: Variables
) -> None:
    variables.texts[KEY] = json.dumps(ORIGINAL)
    cluster = store.refresh(None)
    assert cluster is not None
    add(store, cluster, "a")
    assert store.refresh(cluster) is cluster
    variables.texts[KEY] = json.dumps(ORIGINAL)
    with pytest.raises(StateReplacedError, match="holds another state"):
        store.refresh(None)


def test_two_writes_of_the_same_version_are_distinguished(
    store: VariableStore, variables: Variables, redis_url: str
) -> None:
    """An older document was restored, and Redis, which keeps the version, was emptied too."""
    cluster = started(store)
    older = variables.texts[KEY]
    add(store, cluster, "lost")
    variables.texts[KEY] = older
    other = VariableStore(variables, RedisClient.from_url(f"{redis_url}-emptied"))
    theirs = other.refresh(None)
    assert theirs is not None
    add(other, theirs, "kept")
    assert theirs.version == cluster.version
    with pytest.raises(StateLostError, match="lacks the version 1 that was read before"):
        store.refresh(cluster)
    seen = store.refresh(None)
    assert seen is not None
    assert set(seen.leases) == {"kept"}


def test_the_document_keeps_its_last_hundred_changes(store: VariableStore) -> None:
    cluster = started(store)
    for number in range(0, 120, 4):
        now = store.now()
        changes = [Drained("gpu-server-0", now) for _ in range(4)]
        store.commit(number, changes, now=now)
    assert [version for version, _ in store.history()] == list(range(21, 121))
    with pytest.raises(StaleStateError) as caught:
        store.commit(110, [], now=store.now())
    assert len(caught.value.missed) == 10
    with pytest.raises(StaleStateError) as caught:
        store.commit(cluster.version, [], now=store.now())
    assert caught.value.missed == (), "an incomplete list would be worse than none"


def test_the_history_survives_a_reset(store: VariableStore) -> None:
    add(store, started(store), "a")
    store.replace(first_state())
    assert [type(change) for _, change in store.history()] == [Granted]


def test_the_url_names_the_variable(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = Variables()
    monkeypatch.setattr("resource_manager.storage.airflow_variable.access.variable_access", lambda: variables)
    for url in ("airflow://", "airflow://team_b"):
        assert open_store(url, Settings(redis_url=redis_url)).initialise(first_state())
    assert set(variables.texts) == {KEY, "team_b"}


def test_a_decision_off_the_clock_is_refused(store: VariableStore) -> None:
    started(store)
    for now in (store.now() - 5, store.now() + 5):
        with pytest.raises(StaleStateError, match="decided more than 1 s off the clock; retry") as caught:
            store.commit(0, [], now=now)
        assert caught.value.actual == 0


def test_a_holder_with_an_expired_lock_writes_nothing(
    store: VariableStore, variables: Variables, redis_url: str
) -> None:
    cluster = started(store)
    lock = store.lock()
    assert lock.acquire(1)
    before = variables.texts[KEY]
    RedisClient.from_url(redis_url).driver.delete(
        RedisClient.from_url(redis_url).key(f"gpu_resource_lock:{KEY}")
    )
    with pytest.raises(StaleStateError, match="lost"):
        store.commit(0, [granted(cluster, "a", store.now())], now=store.now(), lock=lock)
    with pytest.raises(StaleStateError, match="not held"):
        store.commit(0, [granted(cluster, "a", store.now())], now=store.now(), lock=store.lock())
    assert variables.texts[KEY] == before


def test_no_write_begins_shortly_before_the_lock_expires(
    store: VariableStore, variables: Variables, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = started(store)
    before = variables.texts[KEY]
    monkeypatch.setattr(RedisLock, "remaining_s", property(lambda self: 9.0))
    with pytest.raises(StaleStateError, match=r"only 9\.0 s left"):
        add(store, cluster, "a")
    assert variables.texts[KEY] == before


def test_no_client_overwrites_a_write_without_an_answer(
    store: VariableStore, variables: Variables, redis_url: str
) -> None:
    cluster = started(store)
    late: list[tuple[str, str, str | None]] = []

    def lose_the_answer(key: str, text: str, before: str | None) -> bool:
        late.append((key, text, before))
        raise outage("no answer")

    variables.next_writes = [lose_the_answer]
    with pytest.raises(StoreUnavailableError):
        add(store, cluster, "a")
    other = VariableStore(variables, RedisClient.from_url(redis_url))
    theirs = other.refresh(None)
    assert theirs is not None
    with pytest.raises(LockedError):
        add(other, theirs, "b")
    variables.set(*late[0])  # now the write arrives
    seen = store.refresh(cluster)
    assert seen is not None
    assert set(seen.leases) == {"a"}


def test_a_write_paused_beyond_its_lock_changes_nothing(
    store: VariableStore, variables: Variables, redis_url: str
) -> None:
    cluster = started(store)
    other = VariableStore(variables, RedisClient.from_url(redis_url))

    def sleep_before(key: str, text: str, before: str | None) -> bool:
        """Pause the process after all checks, while another acquires its lock and writes."""
        RedisClient.from_url(redis_url).driver.delete(
            RedisClient.from_url(redis_url).key(f"gpu_resource_lock:{KEY}")
        )
        theirs = other.refresh(None)
        assert theirs is not None
        add(other, theirs, "b")
        return variables.write(key, text, before)

    variables.next_writes = [sleep_before]
    with pytest.raises(StaleStateError, match="another client changed it"):
        add(store, cluster, "a")
    seen = other.refresh(None)
    assert seen is not None
    assert set(seen.leases) == {"b"}


def test_a_completed_write_counts_although_its_lock_expired(
    store: VariableStore, variables: Variables, redis_url: str
) -> None:
    cluster = started(store)

    def sleep_after(key: str, text: str, before: str | None) -> bool:
        written = variables.write(key, text, before)
        RedisClient.from_url(redis_url).driver.delete(
            RedisClient.from_url(redis_url).key(f"gpu_resource_lock:{KEY}")
        )
        return written

    variables.next_writes = [sleep_after]
    add(store, cluster, "a")
    seen = store.refresh(cluster)
    assert seen is not None
    assert set(seen.leases) == {"a"}


@pytest.mark.parametrize("step_s", [-100.0, 100.0])
def test_a_decision_by_a_wrong_clock_is_made_again(
    store: VariableStore, variables: Variables, step_s: float
) -> None:
    cluster = started(store)
    before = variables.texts[KEY]
    store.clock._offset_s += step_s
    with pytest.raises(StaleStateError, match="off the clock"):
        add(store, cluster, "a")
    assert variables.texts[KEY] == before
    add(store, cluster, "a")


def test_without_a_redis_there_is_no_variable_store() -> None:
    with pytest.raises(SettingsError, match="GPU_MANAGER_REDIS_URL"):
        open_store("airflow://", Settings(redis_url=""))


class TestJobsThatOthersStoreToo:
    """Rows that hang on no commit are stored without the lock, by every thread and process."""

    @pytest.fixture
    def now(self) -> list[float]:
        return [100.0]

    @pytest.fixture
    def jobs(self, variables: Variables, now: list[float]) -> VariableJobs:
        return VariableJobs(variables, "v", lambda: now[0])

    def test_a_row_listed_meanwhile_stays_beside_the_own_ones(
        self, jobs: VariableJobs, variables: Variables
    ) -> None:
        def after_another(key: str, text: str, before: str | None) -> bool:
            jobs.write([JobRow("ring", "", "rung", 60.0)])
            return variables.write(key, text, before)

        variables.next_writes = [after_another]
        jobs.write([JobRow("job", "ada", "the job", 60.0)])
        assert jobs.texts(["job", "ring"]) == {"job": "the job", "ring": "rung"}
        assert jobs.bytes_of("ada") == len("the job")

    def test_a_text_written_meanwhile_is_that_of_the_last_writer(
        self, jobs: VariableJobs, variables: Variables
    ) -> None:
        def after_another(key: str, text: str, before: str | None) -> bool:
            jobs.write([JobRow("ring", "", "first", 60.0)])
            return variables.write(key, text, before)

        variables.next_writes = [variables.write, after_another]
        jobs.write([JobRow("ring", "", "last", 60.0)])
        assert jobs.texts(["ring"]) == {"ring": "last"}

    def test_a_list_that_a_task_wrote_back_gets_the_own_rows_again(
        self, jobs: VariableJobs, variables: Variables, now: list[float]
    ) -> None:
        """A task compares nothing: what it had read replaces what was written meanwhile."""

        def before_a_task(key: str, text: str, before: str | None) -> bool:
            written = variables.write(key, text, before)
            variables.texts[key] = before or "{}"
            return written

        variables.next_writes = [before_a_task]
        jobs.write([JobRow("job", "ada", "the job", 60.0)])
        assert jobs.texts(["job"]) == {"job": "the job"}
        variables.next_writes = [before_a_task]
        jobs.write([JobRow("job", "ada", "", 600.0)])
        now[0] += 300.0
        assert jobs.texts(["job"]) == {"job": "the job"}

    def test_rows_that_cannot_be_listed_are_an_outage(self, jobs: VariableJobs, variables: Variables) -> None:
        variables.next_writes = [lambda key, text, before: False] * 99
        with pytest.raises(StoreUnavailableError, match="'v_jobs': others wrote it meanwhile"):
            jobs.write([JobRow("job", "ada", "the job", 60.0)])
