"""Namespaces in one database: each as if it were alone there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from resource_manager.core.changes import Change, Drained
from resource_manager.errors import KeysFullError, StaleStateError, StoreUnavailableError
from resource_manager.rest.sessions import MAX_SESSIONS
from resource_manager.rest.sql_persistence import SqlSessions, SqlTokens, secret
from resource_manager.rest.tokens import Token
from resource_manager.settings import Settings
from resource_manager.storage import Store, checks
from resource_manager.storage.clock import ClockJump
from resource_manager.storage.incarnation import new_incarnation
from resource_manager.storage.jobs import JobRow
from resource_manager.storage.once import MAX_KEYS, Once, digest
from resource_manager.storage.reports import Sighting
from resource_manager.storage.sql import expiring_rows
from resource_manager.storage.sql.database import Database
from resource_manager.storage.sql.expiring_rows import BRIEF_S, DROP_S, SqlJobs, SqlKeys
from resource_manager.storage.sql.store import SqlStore
from tests.storage.test_contract import fresh
from tests.storage.walk import first_state, granted, started

ONCE = Once("ada", "key", "f")
NAMES = ["a" * 32, "b" * 32]
CLOSED, SUSPENSION = 2, 3


@pytest.fixture
def stores(url: str) -> Iterator[tuple[Store, Store]]:
    """Two namespaces with the same names, the second of which has more of everything."""
    own_url = url if "namespace=" in url else f"{url}?namespace=one"
    databases = Database(own_url), Database(f"{own_url}_other")
    with (
        closing(SqlStore(databases[0], snapshot_every=2)) as own,
        closing(SqlStore(databases[1], snapshot_every=2)) as other,
    ):
        fill(own, 1)
        fill(other, 2)
        same = [at for at, (a, b) in enumerate(zip(contents(own), contents(other), strict=True)) if a == b]
        assert same == [CLOSED, SUSPENSION]
        yield own, other


def fill(store: Store, amount: int) -> None:
    cluster = started(store)
    for n in range(amount):
        add(store, amount, once=[(Once("ada", "key", "f"), str(amount))] if n == 0 else [])
    store.reports.put_sighting("boot", Sighting(float(amount)))
    store.reports.put("gpu-a", b"%d" % amount, b"%d" % -amount, 600.0)
    store.jobs.write([JobRow(name, "me", f"text {amount}", 600.0) for name in NAMES[:amount]])
    tokens, sessions = of_service(store)
    for token_id in NAMES[:amount]:
        put(store, token_id, amount)
        tokens.note_use(token_id, amount)
        sessions.begin(token_id, f"s{amount}")
    assert cluster.version == 0


def add(store: Store, amount: int, once: list[tuple[Once, str]]) -> None:
    cluster = store.refresh(None)
    assert cluster is not None
    now = store.now()
    change: Change = granted(cluster, f"t{cluster.version}", now, amount)
    store.commit(cluster.version, [change], now=now, once=once, jobs=[JobRow("c" * 32, "me", "1", 600.0)])
    cluster.apply(change)
    store.tidy_up(cluster)


def of_service(store: Store) -> tuple[SqlTokens, SqlSessions]:
    database = store.database  # type: ignore[attr-defined]
    return SqlTokens(database), SqlSessions(database)


def put(store: Store, token_id: str, created_at: float) -> None:
    of_service(store)[0].put(Token(token_id, "ada", "reader", "digest", created_at))


def contents(store: Store) -> list[object]:
    """Return all that a namespace has."""
    return [
        fresh(store),
        store.history(),
        store.closed,
        store.suspension,
        store.recall(ONCE),
        store.reports.sightings(),
        store.reports.reports(["gpu-a"]),
        store.reports.records(["gpu-a"]),
        store.jobs.texts([*NAMES, "c" * 32]),
        store.jobs.bytes_of("me"),
        secret(store.database),  # type: ignore[attr-defined]
        of_service(store)[0].read(),
        of_service(store)[0].last_uses(),
        [of_service(store)[1].is_live(NAMES[0], f"s{n}") for n in range(4)],
    ]


def replace(store: Store) -> None:
    store.replace(first_state(2), once=[(Once("ada", "reset", "f"), "1")])


def restore(store: Store) -> None:
    cluster = store.refresh(None)
    assert cluster is not None
    name = new_incarnation(store.now(), store.incarnation)
    store.restore(cluster.snapshot(), cluster.version, incarnation=name, suspended_until=0.0, history_until=0)


def test_a_check_changes_nothing(stores: tuple[Store, Store], url: str) -> None:
    own, other = stores
    before = contents(own), contents(other)
    findings = [finding.text for finding in checks.check(Settings(store=url)) if finding.ok]
    assert any("tables with all rights" in words for words in findings)
    assert (contents(own), contents(other)) == before


DEEDS: dict[str, Callable[[Store], object]] = {
    "a commit": lambda store: add(store, 1, []),
    "a key": lambda store: add(store, 1, [(Once("ada", "next", "f"), "x")]),
    "a replacement": replace,
    "a restore": restore,
    "an end": lambda store: store.close_state(1, "moved"),
    "a jump": lambda store: store.suspend(ClockJump(3600.0, store.now())),
    "a report": lambda store: store.reports.put("gpu-a", b"new", b"new", 600.0),
    "a token": lambda store: put(store, NAMES[0], 9.0),
    "the end of a token": lambda store: of_service(store)[0].delete(NAMES[0]),
    "a use": lambda store: of_service(store)[0].note_use(NAMES[0], 9.0),
    "a session": lambda store: of_service(store)[1].begin(NAMES[0], "s3"),
    "the end of a session": lambda store: of_service(store)[1].end(NAMES[0], "s1"),
    "a witness": lambda store: store.reports.put_sighting("boot", Sighting(9.0)),
    "a job": lambda store: store.jobs.write(
        [JobRow(NAMES[0], "me", "new", 600.0), JobRow(NAMES[1], "", "", 0.0)]
    ),
}


@pytest.mark.parametrize("deed", DEEDS)
def test_what_is_done_to_one_changes_nothing_in_the_other(stores: tuple[Store, Store], deed: str) -> None:
    own, other = stores
    own_before, before = contents(own), contents(other)
    assert contents(own) == own_before
    DEEDS[deed](own)
    assert contents(own) != own_before
    assert contents(other) == before


def test_a_session_is_of_one_token(stores: tuple[Store, Store]) -> None:
    _, sessions = of_service(stores[0])
    sessions.begin(NAMES[0], "x")
    sessions.begin(NAMES[0], "x")  # sent again, as when its answer was lost
    for number in range(MAX_SESSIONS):
        sessions.begin(NAMES[1], f"y{number}")
    assert sessions.is_live(NAMES[0], "x"), "others have no part in its bound"
    assert not sessions.is_live(NAMES[0], "y1")
    sessions.end(NAMES[0], "y1")
    assert sessions.is_live(NAMES[1], "y1")
    sessions.end(NAMES[1], "y1")
    assert sessions.is_live(NAMES[1], "y2")


def test_who_waits_for_the_lock_of_one_is_not_in_line_for_that_of_the_other(
    stores: tuple[Store, Store],
) -> None:
    own, other = stores
    held = own.lock()
    assert held.acquire(0.0)
    database: Database = own.database  # type: ignore[attr-defined]
    waiter = {"namespace": database.namespace, "token": "w", "heartbeat_s": 60.0}
    database.run(lambda connection: database.dialect.enter(connection, waiter))
    for _ in range(2):
        free = other.lock()
        assert free.acquire(0.0)
        now = other.now()
        with suppress(StaleStateError):
            other.commit(0, [Drained("gpu-server-0", now)], now=now, lock=free)
        free.release()
    held.release()
    assert not own.lock().acquire(0.0), "it was handed to the waiter"


def test_the_history_of_one_ends_without_that_of_the_other(stores: tuple[Store, Store]) -> None:
    own, other = stores
    assert isinstance(own, SqlStore)
    whole = other.history()
    short = SqlStore(own.database, snapshot_every=2, history_length=2)
    for _ in range(9):
        add(short, 1, once=[])
    assert len(own.history()) < 9
    assert other.history() == whole


def test_what_lives_briefly_goes_soon_after_its_time_without_a_snapshot(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As parts of output, each under a new name: a thousand changes may take hours."""
    own, other = stores
    begin = time.monotonic() + 1000
    clock = SimpleNamespace(monotonic=lambda: begin)
    monkeypatch.setattr(expiring_rows, "time", clock)
    parts = [digest(f"part {n}") for n in range(300)]
    for store in stores:
        store.jobs.write([JobRow(part, "", "text", 0.0) for part in parts])
        store.jobs.write([JobRow("d" * 32, "", "awaited", BRIEF_S)])
    theirs, late = SqlJobs(own.database), "e" * 32  # type: ignore[attr-defined]
    theirs.write([JobRow(parts[0], "", "again", BRIEF_S), JobRow(late, "", "another process drops it", 0.0)])
    assert rows_of(own) >= {*parts}
    clock.monotonic = lambda: begin + DROP_S
    own.jobs.write([])
    assert rows_of(own) & {*parts, "d" * 32, late} == {parts[0], "d" * 32, late}
    assert rows_of(other) >= {*parts}


def test_an_outage_forgets_nothing_that_lives_briefly(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, _ = stores
    begin = time.monotonic() + 1000
    clock = SimpleNamespace(monotonic=lambda: begin)
    monkeypatch.setattr(expiring_rows, "time", clock)
    parts = [digest(f"part {n}") for n in range(300)]
    own.jobs.write([JobRow(part, "", "text", 0.0) for part in parts])
    clock.monotonic = lambda: begin + DROP_S - 1e-7
    own.jobs.write([JobRow("f" * 32, "", "over just after the next look", 1e-6)])
    database = own.database  # type: ignore[attr-defined]
    change, failing = database.change, [StoreUnavailableError("gone")]

    def changed(statement: str, **values: Any) -> Any:
        done = change(statement, **values)
        if failing:
            raise failing.pop()
        return done

    monkeypatch.setattr(database, "change", changed)
    clock.monotonic = lambda: begin + DROP_S
    with pytest.raises(StoreUnavailableError):
        own.jobs.write([])
    assert rows_of(own) & {*parts}
    clock.monotonic = lambda: begin + 2 * DROP_S
    own.jobs.write([])
    assert not rows_of(own) & {*parts, "f" * 32}


def rows_of(store: Store) -> set[str]:
    rows = store.database.rows(  # type: ignore[attr-defined]
        "SELECT name FROM {job} WHERE namespace = :namespace"
    )
    return {name for (name,) in rows}


def test_a_caller_with_all_its_keys_gets_no_other_and_loses_none(stores: tuple[Store, Store]) -> None:
    database, beside = (store.database for store in stores)  # type: ignore[attr-defined]
    digits = " UNION ALL ".join(f"SELECT {digit} AS n" for digit in range(10))
    places = {10**place: f"d{place}" for place in range(5)}
    assert 10 ** len(places) == MAX_KEYS
    database.change(
        "INSERT INTO {once} (namespace, caller, name, answer, expires_at) SELECT :namespace, :caller, "
        f"{' + '.join(f'{each} * {name}.n' for each, name in places.items())}, 'f 1', {{now}} + 600 FROM "
        + ", ".join(f"({digits}) {name}" for name in places.values()),
        caller=Once("eve", "", "").caller,
    )
    known, new = Once("eve", "0", "f"), Once("eve", "new", "f")
    row = {"caller": known.caller, "name": "0"}
    database.change(
        "UPDATE {once} SET name = :key WHERE caller = :caller AND name = :name", key=known.key, **row
    )
    assert SqlKeys(database).recall(known) == "1"
    with pytest.raises(KeysFullError):
        SqlKeys(database).recall(new)
    assert SqlKeys(database).recall(Once("bob", "new", "f")) is None
    assert SqlKeys(beside).recall(new) is None
    over = "UPDATE {once} SET expires_at = {now} - 1 WHERE caller = :caller AND name = :name"
    assert database.change(over, caller=known.caller, name=known.key) == 1
    assert SqlKeys(database).recall(known) is None, "one is over: neither known nor counted"
