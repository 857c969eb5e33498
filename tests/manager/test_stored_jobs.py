"""Jobs stored with requests: who may read them, how long they stay, and the result of a lease."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from cryptography.fernet import Fernet

from resource_manager import GPUResourceManager
from resource_manager.core.models import RUNS_JOBS, JobPlace
from resource_manager.errors import CorruptStateError, DuplicateTaskError, InvalidRequestError, SettingsError
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.stored_jobs import JobExit, StoredJobs
from resource_manager.settings import Settings
from resource_manager.storage import MemoryStore
from resource_manager.storage.checks import of_job_keys
from resource_manager.storage.jobs import (
    ENDED_S,
    MAX_BYTES_OF_CALLER,
    RESULT_S,
    JobRow,
    MemoryJobs,
    TooManyJobsError,
    job_name,
)
from tests.builders import Clock, granted_lease
from tests.forked import in_child

NODES = tuple(replace(node, labels=RUNS_JOBS) for node in default_inventory(1))
JOB = {"command": ["python", "train.py"], "env": {"TOKEN": "hush"}}
ENDED: JobExit = {"exit_code": 3, "last_line": "boom", "ended_at": 12.0}


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    return MemoryStore(clock=clock)


def opened(store: MemoryStore, *keys: bytes) -> GPUResourceManager:
    settings = Settings(store="memory://", job_keys=" ".join(key.decode() for key in keys))
    return GPUResourceManager(settings, store=store, inventory=NODES)


def test_a_job_is_stored_with_its_request_and_in_no_change(store: MemoryStore) -> None:
    manager = opened(store)
    lease = manager.submit("t", 2, job=JOB)
    assert manager.stored_jobs.job("t") == JOB
    assert lease["labels"] == {"job": "stored"}
    assert "hush" not in str(manager.history()) + str(manager.snapshot())


def test_no_caller_states_that_a_job_came_with_a_request(store: MemoryStore) -> None:
    """Under its id the job of another may be stored still, which would run for this caller."""
    manager, stated = opened(store), {"job": "stored"}
    ways: list[Callable[[], object]] = [
        lambda: manager.submit("t", 2, labels=stated),
        lambda: manager.submit("t", 2, job=JOB, labels=stated),
        lambda: manager.try_allocate("t", 2, labels=stated),
        lambda: manager.try_allocate_batch([{"lease_id": "t", "gpus": 2, "labels": stated}]),
        lambda: manager.announce("t", 2, labels=stated),
    ]
    for way in ways:
        with pytest.raises(InvalidRequestError, match="labels may not have job=stored"):
            way()
    assert (manager.leases(), manager.queue(), manager.coming()) == ([], [], [])


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ({**JOB, "image": "pytorch"}, "has an image, and agents run none"),
        ({**JOB, "launcher": "ssh"}, "may have command, env, launcher only"),
        ({**JOB, "unknown": 1}, "may have command, env, launcher only"),
        ({}, "command must be a list of texts"),
        ({"command": "python train.py"}, "command must be a list of texts"),
        ({"command": ["echo", "a\0b"]}, "command must be a list of texts"),
        ({**JOB, "env": {"A=B": "1"}}, "env must have texts by the names of variables"),
        ({**JOB, "env": {"A": 1}}, "env must have texts by the names of variables"),
    ],
)
def test_what_no_agent_can_run_is_refused_at_once(
    store: MemoryStore, job: dict[str, object], said: str
) -> None:
    manager = opened(store)
    with pytest.raises(InvalidRequestError, match=said):
        manager.submit("t", 2, job=job)
    assert manager.leases() == []


def test_a_repeat_of_the_request_keeps_the_job_and_is_refused_with_another(store: MemoryStore) -> None:
    manager = opened(store, Fernet.generate_key())
    same, other = {**JOB, "command": ("python", "train.py")}, {**JOB, "env": {"TOKEN": "other"}}
    for name, state in (("runs", "RUNNING"), ("waits", "WAITING")):
        for job in (JOB, same):
            assert manager.submit(name, 8, job=job)["state"] == state
        with pytest.raises(DuplicateTaskError, match="already waits or runs, and not with this job: cancel"):
            manager.submit(name, 8, job=other)
        assert manager.stored_jobs.job(name) == JOB


def test_a_request_that_brought_no_job_runs_none_that_comes_later(store: MemoryStore) -> None:
    manager = opened(store)
    manager.submit("t", 2, labels_required=RUNS_JOBS)
    with pytest.raises(DuplicateTaskError, match="not with this job"):
        manager.submit("t", 2, job=JOB)


def test_a_job_goes_a_day_after_the_end_of_its_lease_or_request(store: MemoryStore, clock: Clock) -> None:
    manager = opened(store)
    token = granted_lease(manager.submit("ends", 8, quarantine=True, job=JOB))["fencing_token"]
    for name in ("waits", "cancelled"):
        manager.submit(name, 8, job=JOB)
    clock.now += 5 * ENDED_S  # nothing ends by itself
    manager.cancel("cancelled")
    clock.now += ENDED_S - 1
    assert manager.stored_jobs.job("cancelled") == JOB
    manager.release("ends", fencing_token=token)
    clock.now += 2
    assert manager.stored_jobs.job("cancelled") is None
    assert manager.stored_jobs.job("ends") == JOB
    clock.now += ENDED_S
    assert manager.stored_jobs.job("ends") is None
    assert manager.stored_jobs.job("waits") == JOB


def test_the_result_is_stored_by_the_release_and_known_for_a_week(store: MemoryStore, clock: Clock) -> None:
    manager = opened(store)
    lease = granted_lease(manager.submit("t", 2, owner="ada", team="vision", job=JOB))
    token = lease["fencing_token"]
    assert manager.result_of("t", token) is None
    end: JobExit = {**ENDED, "last_line": "x" * 5000}
    manager.release("t", fencing_token=token, outcome="FAILED", reason="late", result=end)
    found = manager.result_of("t", token)
    whose = {"owner": "ada", "team": "vision", "fencing_token": token, "jobs": []}
    assert found == {**ENDED, "last_line": "x" * 2000, "outcome": "FAILED", "reason": "late", **whose}
    assert manager.result_of("t") == found, "the newest of that id"
    assert manager.result_of("t", token + 1) is None
    clock.now += RESULT_S + 1
    assert manager.result_of("t", token) is None


@pytest.mark.parametrize(("server", "state"), [("a", "RUNNING"), ("b", "WAITING")])
def test_what_is_left_of_a_gang_ends_neither_job_nor_result_of_what_has_its_id_by_then(
    store: MemoryStore, clock: Clock, server: str, state: str
) -> None:
    nodes = [replace(NODES[0], name=name, server_id=i, address=f"10.0.0.{i}") for i, name in enumerate("ab")]
    manager = GPUResourceManager(Settings(store="memory://"), store=store, inventory=nodes)
    gang = granted_lease(manager.submit("t", 2, nodes=2, job=JOB))["fencing_token"]
    manager.place_job("t", [JobPlace("agent", machine=name) for name in "ab"], fencing_token=gang)
    manager.release_members("t", [0], fencing_token=gang, job_end="gone", reason="a died")
    manager.submit("fills", 1, server="b", quarantine=True)
    assert manager.submit("t", 8, server=server, quarantine=True, job=JOB)["state"] == state
    manager.release("t", fencing_token=gang, outcome="FAILED", job_end="ended", result=ENDED)
    assert all(lease["fencing_token"] != gang for lease in manager.leases())
    assert manager.result_of("t", gang + 2) is None
    clock.now += 2 * ENDED_S
    assert manager.stored_jobs.job("t") == JOB


def test_who_uses_a_lease_id_again_hides_no_result_of_its_owner_before(store: MemoryStore) -> None:
    manager = opened(store)
    for owner in ("ada", "bob"):
        token = granted_lease(manager.submit("t", 2, owner=owner, job=JOB))["fencing_token"]
        manager.release("t", fencing_token=token, result=ENDED)
    for who, owner in (("ada", "ada"), ("bob", "bob"), ("carol", "bob"), (None, "bob")):
        found = manager.result_of("t", owner=who)
        assert found is not None
        assert found["owner"] == owner


def test_a_release_that_ends_nothing_stores_no_result(store: MemoryStore) -> None:
    manager = opened(store)
    token = granted_lease(manager.submit("t", 2, job=JOB))["fencing_token"]
    manager.release("t", fencing_token=token + 1, result=ENDED)
    assert manager.result_of("t", token + 1) is None
    with pytest.raises(InvalidRequestError, match="result needs fencing_token beside it"):
        manager.release("t", result=ENDED)


def test_keys_encrypt_and_are_replaced_one_after_another(store: MemoryStore) -> None:
    old, new = Fernet.generate_key(), Fernet.generate_key()
    opened(store, old).submit("t", 2, job=JOB)
    text = store.jobs.texts([job_name("t")])[job_name("t")]
    assert "hush" not in text
    assert opened(store, new, old).stored_jobs.job("t") == JOB
    for keys in ((), (new,)):
        with pytest.raises(CorruptStateError, match="GPU_MANAGER_JOB_KEYS must be the same in all processes"):
            opened(store, *keys).stored_jobs.job("t")


def test_a_job_of_a_writer_without_the_key_or_of_another_lease_is_refused(store: MemoryStore) -> None:
    key = Fernet.generate_key()
    opened(store).submit("plain", 2, job=JOB)
    with pytest.raises(CorruptStateError, match="cannot be decrypted"):
        opened(store, key).stored_jobs.job("plain")
    manager = opened(store, key)
    manager.submit("mine", 2, job=JOB)
    row = manager.stored_jobs.row_of_job("mine", "", JOB)
    store.jobs.write([row._replace(name=job_name("theirs"))])
    with pytest.raises(CorruptStateError, match="is something else"):
        manager.stored_jobs.job("theirs")


def test_bad_jobs_are_refused_in_one_line(store: MemoryStore) -> None:
    manager = opened(store)
    with pytest.raises(InvalidRequestError, match=r"job has 65,\d+ bytes, at most 65,536 are stored"):
        manager.submit("t", 2, job={"command": ["x" * 65_521]})
    with pytest.raises(InvalidRequestError, match=r"job cannot be stored: .* not JSON serializable"):
        manager.submit("t", 2, job={"command": [object()]})
    store.jobs.write([JobRow(job_name("t"), "ada", "x" * 2**26, RESULT_S)])
    with pytest.raises(TooManyJobsError, match="the jobs of ada have 64 MiB already"):
        manager.submit("t", 2, owner="ada", job=JOB)
    manager.submit("t", 2, owner="bob", job=JOB)
    with pytest.raises(SettingsError, match="GPU_MANAGER_JOB_KEYS has Fernet keys"):
        StoredJobs(store.jobs, "not-a-key")


def test_the_jobs_of_a_caller_are_not_counted_for_each_of_them() -> None:
    """A store looks at all of them; a refusal is always of what is stored."""

    class Counting(MemoryJobs):
        counts = 0

        def bytes_of(self, caller: str) -> int:
            self.counts += 1
            return super().bytes_of(caller)

    jobs = Counting(Clock())
    stored = StoredJobs(jobs, "")
    large = {"command": ["x" * 60_000]}
    fit = MAX_BYTES_OF_CALLER // 60_100
    for number in range(fit):
        stored.row_of_job(f"t{number}", "ada", large)
    assert jobs.counts == 1
    for number in range(fit):
        stored.row_of_job(f"u{number}", "ada", large)  # none of them was stored
    assert jobs.counts == 2
    jobs.write([JobRow(job_name("t"), "ada", "x" * MAX_BYTES_OF_CALLER, RESULT_S)])
    with pytest.raises(TooManyJobsError):
        StoredJobs(jobs, "").row_of_job("v", "ada", large)


def test_results_and_output_of_others_take_no_room_from_who_names_no_owner(store: MemoryStore) -> None:
    manager, jobs = opened(store), store.jobs
    stored = manager.stored_jobs
    part = {"text": "x" * (MAX_BYTES_OF_CALLER // 2), "offset": 0}
    for number in range(3):
        stored.keep_output("gpu-a", {"key": "k", "offset": 0, "n": str(number)}, part)
    token = granted_lease(manager.submit("t", 2, owner="ada"))["fencing_token"]
    assert manager.release("t", fencing_token=token, result=ENDED)
    stored.ring("gpu-a", "gpu-b")
    stored.note_known(1, "gpu-a", ["gpu-a", "gpu-b"])
    assert jobs.bytes_of("") == 0
    manager.submit("u", 2, job=JOB)
    assert jobs.bytes_of("") > 0


def test_a_forked_child_stores_a_job_while_a_thread_of_its_parent_counts() -> None:
    inside, over = threading.Event(), threading.Event()

    class Slow(MemoryJobs):
        def bytes_of(self, caller: str) -> int:
            if threading.current_thread() is thread:
                inside.set()
                over.wait(60)
            return super().bytes_of(caller)

    stored = StoredJobs(Slow(Clock()), "")
    thread = threading.Thread(target=stored.row_of_job, args=("t", "ada", JOB))
    thread.start()
    assert inside.wait(60)
    try:
        assert in_child(lambda: int(stored.row_of_job("u", "ada", JOB).text == "")) == 0
    finally:
        over.set()
        thread.join()


def test_that_jobs_are_not_encrypted_is_said() -> None:
    [said] = of_job_keys(Settings(store="sqlite:///x.db"))
    assert (said.ok, said.is_caution) == (False, True)
    assert "set GPU_MANAGER_JOB_KEYS" in said.text
    assert all(each.ok for each in of_job_keys(Settings(store="sqlite:///x.db", job_keys="k")))
    assert of_job_keys(Settings(store="airflow://")) == []
