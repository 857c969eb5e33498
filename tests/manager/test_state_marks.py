"""A store that was set back to a dump: what a service, its archive, an agent or an owner remembers."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from resource_manager import GPUResourceManager
from resource_manager.core.refusal import RefusalKind
from resource_manager.errors import LeaseNotFoundError, StateLostError, StateReplacedError
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.refusal_wording import Refusal
from resource_manager.manager.results import Renewal
from resource_manager.manager.state_marks import StateMarks
from resource_manager.storage import open_store
from resource_manager.storage.backup import read_backup, restore, write_backup
from resource_manager.storage.incarnation import new_incarnation
from resource_manager.storage.mark import Mark
from tests.redis_server import RedisServer
from tests.storage.dumps import dump_of_postgresql, dump_of_redis, dump_of_sqlite, fail_over

Dump = Callable[[], Callable[[], None]]


class Place:
    """A store, an empty one, how a dump is taken, and the file in which a service keeps its mark."""

    def __init__(self, url: str, empty_url: str, dump: Dump, folder: Path) -> None:
        self.url = url
        self.empty_url = empty_url
        self.dump = dump
        self.file = folder / "kept" / "state.mark"
        with self.manager() as manager:
            manager.allocate("first", 2)

    def manager(self) -> GPUResourceManager:
        return GPUResourceManager.from_url(self.url, inventory=default_inventory(), confirmation_window_s=0.0)

    def go_back(self) -> None:
        """Take the state back to a dump, which lacks a lease that a service has marked since."""
        bring_back = self.dump()
        with self.manager() as manager:
            assert not isinstance(manager.allocate("lost", 2), Refusal)
            self.marked(manager)
        bring_back()

    def marked(self, manager: GPUResourceManager) -> StateMarks:
        """Return the marks of a service that has run for a while."""
        marks = StateMarks(manager, check_every_s=0.0)
        marks.keep_in([self.file])
        marks.check()
        return marks


@pytest.fixture(params=("embedded_redis", "postgresql", "sqlite"))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "sqlite":
        path = tmp_path / "state.db"
        yield Place(
            f"sqlite:///{path}", f"sqlite:///{tmp_path}/empty.db", lambda: dump_of_sqlite(path), tmp_path
        )
        return
    server = request.getfixturevalue(request.param)
    url = server.fresh_url()
    is_redis = request.param == "embedded_redis"
    yield Place(
        url,
        server.fresh_url(),
        lambda: dump_of_redis(url) if is_redis else dump_of_postgresql(server),
        tmp_path,
    )


def refusal(manager: GPUResourceManager) -> Refusal:
    asked = manager.allocate("next", 2)
    assert isinstance(asked, Refusal), asked
    return asked


def test_a_service_that_starts_on_an_older_dump_grants_nothing_and_names_the_restore(place: Place) -> None:
    place.go_back()
    with place.manager() as manager, place.manager() as worker:
        StateMarks(manager, check_every_s=0.0).keep_in([place.file])
        refused = refusal(manager)
        assert refused.kind is RefusalKind.MISCONFIGURED
        assert "gpu-manager store restore FILE of the newest backup" in refused.detail
        assert "misconfigured" in manager.get_resource_summary()
        refused = refusal(worker)
        assert refused.kind is RefusalKind.RECOVERING, "others grant nothing there either"
        assert "gpu-manager store restore FILE" in refused.detail
        assert manager.renew("first")["task_id"] == "first", "what the dump knows goes on"


def test_an_older_dump_on_which_others_went_on_is_still_one(place: Place) -> None:
    """Workers grant on the dump before any service starts, so that its version is above the mark's."""
    place.go_back()
    with place.manager() as manager:
        for number in range(4):
            manager.allocate(f"other-{number}", 2)
        StateMarks(manager, check_every_s=0.0).keep_in([place.file])
        assert refusal(manager).kind is RefusalKind.MISCONFIGURED


def test_an_older_dump_at_another_address_is_still_one(place: Place) -> None:
    """As in a managed database that was restored as a new instance; of another state no mark counts."""
    place.go_back()
    with GPUResourceManager.from_url(place.empty_url, inventory=default_inventory()) as begun:
        StateMarks(begun, check_every_s=0.0).keep_in([place.file.with_name("of another state.mark")])
        assert not isinstance(begun.allocate("first", 2), Refusal)
    with GPUResourceManager.from_url(place.url) as manager:
        StateMarks(manager, check_every_s=0.0).keep_in([place.file.with_name("of its address now.mark")])
        assert refusal(manager).kind is RefusalKind.MISCONFIGURED


def test_an_older_dump_under_another_server_process_is_still_one(place: Place) -> None:
    """Its version jumps beyond the mark's, as after a fail-over, at the first look."""
    if not place.url.startswith("unix"):
        pytest.skip("PostgreSQL jumps in tests/storage/sql/test_faults.py; SQLite has no server")
    place.go_back()
    fail_over(place.url)
    with place.manager() as manager:
        StateMarks(manager, check_every_s=0.0).keep_in([place.file])
        assert refusal(manager).detail.startswith("misconfigured: the state in the store is older")


def test_a_change_that_a_fail_over_lost_never_becomes_the_mark(embedded_redis: RedisServer) -> None:
    """Its time had not come when it was lost, and what lacks it is no older dump."""
    url = embedded_redis.fresh_url()
    with GPUResourceManager.from_url(
        url, inventory=default_inventory(), confirmation_window_s=0.0
    ) as manager:
        manager.allocate("first", 2)
        marks = StateMarks(manager, check_every_s=0.0)
        bring_back = dump_of_redis(url)
        manager.allocate("lost", 2)
        marks.check()
        bring_back()
        fail_over(url)
        for number in range(3):
            marks.check()
            assert not isinstance(manager.allocate(f"next-{number}", 2), Refusal)
        told = Mark.parse(marks.mark)
        assert told is not None
        assert told.version > 2**20, "of a change that came after it"


def test_an_emptied_store_is_no_new_one_until_an_operator_says_so(place: Place) -> None:
    with place.manager() as manager:
        place.marked(manager)
    with GPUResourceManager.from_url(place.empty_url, inventory=default_inventory()) as begun:
        begun.allocate("first", 2)
        marks = StateMarks(begun, check_every_s=0.0)
        marks.keep_in([place.file])
        assert refusal(begun).kind is RefusalKind.MISCONFIGURED
        assert begun.reset_resources()
        marks.check()
        assert not isinstance(begun.allocate("next", 2), Refusal)


def go_on(place: Place, grants: int) -> None:
    """Grant that many leases by another process."""
    with place.manager() as worker:
        for number in range(grants):
            assert not isinstance(worker.allocate(f"other-{number}", 2), Refusal)


GOES_ON = pytest.mark.parametrize("others", [0, 2, 3], ids=["older", "as_far", "further"])
"""Grants of others on the dump; the lost changes are two."""


@GOES_ON
def test_an_owner_learns_that_its_lease_is_not_in_an_older_state(place: Place, others: int) -> None:
    """Processes that begin there grant its GPUs, so it must not go on."""
    bring_back = place.dump()
    with place.manager() as manager:
        first, later = manager.renew("first"), manager.submit("later", 2)
        assert later["state"] == "RUNNING"
        bring_back()
        go_on(place, others)
        no_lease = f"no live lease of task 'later' with fencing token {later['fencing_token']}"
        with pytest.raises(LeaseNotFoundError, match=no_lease):
            manager.renew("later", fencing_token=later["fencing_token"])
        renewal: Renewal = {
            "task_id": "later",
            "fencing_token": later["fencing_token"],
            "checkpoint_at": None,
        }
        assert manager.renew_all([renewal]) == [False]
        for token in (first["fencing_token"], None):
            with pytest.raises(StateLostError):
                manager.renew("first", fencing_token=token)
        of_one_triggerer: list[Renewal] = [
            renewal,
            {"task_id": "first", "fencing_token": first["fencing_token"], "checkpoint_at": None},
        ]
        assert manager.renew_all(of_one_triggerer) == [False, True], "whoever asks with it"
        with pytest.raises(StateLostError):
            manager.renew_all(of_one_triggerer[1:])


@pytest.mark.parametrize("has_begun", [False, True])
def test_an_owner_learns_that_its_store_began_anew_once_something_may_be_granted_there(
    tmp_path: Path, has_begun: bool
) -> None:
    url = f"sqlite:///{tmp_path / 'state.db'}"
    with GPUResourceManager.from_url(url, inventory=default_inventory()) as manager:
        lease = manager.submit("job", 2)
        assert lease["state"] == "RUNNING"
        empty(tmp_path / "state.db")
        if has_begun:
            GPUResourceManager.from_url(url, inventory=default_inventory()).close()
        with pytest.raises(LeaseNotFoundError if has_begun else StateLostError):
            manager.renew("job", fencing_token=lease["fencing_token"])


def empty(database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection:
        for table in ("state", "snapshot", "change"):
            connection.execute(f"DELETE FROM gpu_manager_{table}")
        connection.commit()


def test_a_service_that_goes_on_closes_the_servers_of_a_store_that_began_anew(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'state.db'}"
    with GPUResourceManager.from_url(url, inventory=default_inventory()) as manager:
        manager.allocate("job", 2)
        marks = StateMarks(manager, check_every_s=0.0)
        marks.keep_in([tmp_path / "state.mark"])
        manager.allocate("another", 2)
        for _ in range(2):
            marks.check()
        empty(tmp_path / "state.db")
        with GPUResourceManager.from_url(url, inventory=default_inventory()) as worker:
            for _ in range(2):
                with pytest.raises(StateReplacedError):
                    marks.check()
            assert "gpu-manager store restore FILE" in refusal(worker).detail


@GOES_ON
def test_a_service_that_goes_on_closes_the_servers_of_an_older_dump(place: Place, others: int) -> None:
    bring_back = place.dump()
    with place.manager() as manager:
        for name in ("lost", "lost too"):
            assert not isinstance(manager.allocate(name, 2), Refusal)
        marks = place.marked(manager)
        bring_back()
        go_on(place, others)
        for _ in range(2):
            with pytest.raises(StateLostError):
                marks.check()
        with place.manager() as worker:
            assert "gpu-manager store restore FILE" in refusal(worker).detail
        with pytest.raises(StateLostError):
            manager.allocate("next", 2)


def test_a_restore_ends_it(place: Place, tmp_path: Path) -> None:
    with place.manager() as manager:
        write_backup(manager.store, tmp_path / "noon.json")
    place.go_back()
    with place.manager() as manager:
        marks = StateMarks(manager, check_every_s=0.0)
        marks.keep_in([place.file])
        assert refusal(manager).kind is RefusalKind.MISCONFIGURED
        with closing(open_store(place.url)) as store:
            restore(store, read_backup(tmp_path / "noon.json"), force=True)
        marks.check()
        refused = refusal(manager)
        assert (refused.kind, "not searched" in refused.detail) == (RefusalKind.RECOVERING, True)
        manager.resume(0)
        granted = manager.allocate("next", 2)
        assert not isinstance(granted, Refusal)
        assert granted.fencing_token > 2**32
        for _ in range(3):
            marks.check()
        assert Mark.parse(place.file.read_text()) == Mark.parse(marks.mark)
        assert marks.mark.startswith(manager.store.incarnation)


def test_a_state_that_goes_on_is_trusted_through_restarts_resets_and_trimmed_history(place: Place) -> None:
    for number in range(3):
        with place.manager() as manager:
            place.marked(manager)
            assert not isinstance(manager.allocate(f"next-{number}", 2), Refusal)
    with place.manager() as manager:
        assert manager.reset_resources()
        marks = place.marked(manager)
        assert not isinstance(manager.allocate("last", 2), Refusal)
        marks.check()
        marks.check()
        assert marks.mark.startswith(manager.store.incarnation)


def test_a_mark_is_as_old_as_one_check_so_that_no_crash_has_lost_it(place: Place) -> None:
    with place.manager() as manager:
        marks = StateMarks(manager, check_every_s=0.0)
        marks.keep_in([place.file])
        manager.allocate("second", 2)
        marks.check()
        told = Mark.parse(marks.mark)
        assert told is not None
        assert told.version == 1, "of the state before"


def test_marks_of_others_count_too_and_those_that_are_none_do_not(place: Place) -> None:
    with place.manager() as manager:
        marks = place.marked(manager)
        later = new_incarnation(0.0, manager.store.incarnation)
        wrong = [f"{later}/{rest}" for rest in ("0/1.0", "-1/1.0", "7/inf", "7/nan", "7/-1.0", "7/1e18")]
        to_come = new_incarnation(manager.store.now() + 60.0)
        wrong += [f"{name}/7/1.0" for name in (to_come, "f" * 24, f"{later}0", later[:12])]
        for text in (None, "", "x", "a/b/c", "0/1/2.0", "9" * 500, *wrong):
            marks.hear(text)
            assert not isinstance(manager.allocate("t", 2), Refusal)
            manager.release("t")
        marks.hear(str(Mark(later, 1, 2.0)))
        assert refusal(manager).kind is RefusalKind.MISCONFIGURED
        assert marks.mark == ""
        assert manager.reset_resources()
        marks.check()
        assert not isinstance(manager.allocate("t", 2), Refusal), "a reset ends it"


def test_a_folder_that_cannot_be_written_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As the home of Airflow's API server in a container may be."""
    url = f"sqlite:///{tmp_path}/state.db"
    with GPUResourceManager.from_url(url, inventory=default_inventory()) as manager:
        marks = StateMarks(manager, check_every_s=0.0)
        marks.keep_in([tmp_path / "state.db" / "state.mark"])
        for number in range(3):
            manager.allocate(f"t{number}", 2)
            marks.check()
    assert caplog.text.count("no mark of the state is kept in") == 1


def test_a_state_in_memory_has_no_mark_as_it_ends_with_its_service(tmp_path: Path) -> None:
    for _ in range(2):
        with GPUResourceManager.from_url("memory://") as manager:
            marks = StateMarks(manager, check_every_s=0.0)
            marks.keep_in([tmp_path / "state.mark"])
            assert not isinstance(manager.allocate("t", 2), Refusal)
            marks.check()
            marks.check()
            assert marks.mark == "", "agents would tell it to the next one"
