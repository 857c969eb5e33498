"""What databases do to a store: they die, fail over, refuse, fill up, forget, and lose answers."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Any

import psycopg
import pymysql
import pytest
from sqlalchemy.engine.default import DefaultDialect

from resource_manager.core.changes import InventoryChanged, Queued, Renewed
from resource_manager.core.cluster import ClusterState
from resource_manager.core.cluster_settings import ClusterSettings
from resource_manager.core.models import Request
from resource_manager.errors import (
    CorruptStateError,
    NewerFormatError,
    StaleStateError,
    StateLostError,
    StateReplacedError,
    StateUnconfirmedError,
    StoreError,
    StoreFullError,
    StoreRefusedError,
    StoreUnavailableError,
)
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.scheduling import lease_steps
from resource_manager.settings import Settings
from resource_manager.storage import Store, open_store
from resource_manager.storage.backup import read_backup, restore, write_backup
from resource_manager.storage.sql import database, dialect, sqlite
from resource_manager.storage.sql.database import Database
from resource_manager.storage.sql.dialect import Connection
from resource_manager.storage.sql.store import SqlStore
from tests.builders import granted_lease
from tests.eventually import wait_for
from tests.faults.proxy import Proxy
from tests.small_disk import small_disk_at
from tests.sql_servers import DATABASES, MariaDB, MySQL, Postgres, SqlServer, running_sql
from tests.storage import test_contract
from tests.storage.conftest import OpenStore
from tests.storage.sql.servers import PgBouncer, Standby
from tests.storage.test_contract import fresh
from tests.storage.walk import add, granted, started


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture(params=DATABASES)
def shared(request: pytest.FixtureRequest) -> SqlServer:
    server: SqlServer = request.getfixturevalue(request.param)
    return server


@pytest.fixture(params=DATABASES)
def own(request: pytest.FixtureRequest) -> Iterator[SqlServer]:
    """A server for one test, which may break it."""
    kinds: dict[str, type[SqlServer]] = {"postgresql": Postgres, "mariadb": MariaDB, "mysql": MySQL}
    with running_sql(kinds[request.param]) as server:
        yield server


@pytest.fixture
def primary() -> Iterator[Postgres]:
    with running_sql(Postgres, options="-c wal_level=replica -c max_wal_senders=4") as server:
        yield server


def one_line(error: BaseException) -> str:
    assert len(str(error).splitlines()) == 1, error
    return str(error)


def proxied(stack: ExitStack, server: SqlServer, namespace: str = "") -> tuple[Proxy, str]:
    """Return a proxy in front of a server, and the URL of a namespace behind it."""
    proxy = stack.enter_context(closing(Proxy(str(server.socket))))
    url = server.url.replace(f":{server.port}", f":{proxy.port}")
    return proxy, f"{url}?namespace={namespace or uuid.uuid4().hex}"


def test_what_was_acknowledged_survives_a_kill_of_the_database(own: SqlServer, stack: ExitStack) -> None:
    store = stack.enter_context(closing(open_store(own.url)))
    cluster = started(store)
    for number in range(5):
        add(store, cluster, f"t{number}")
    own.kill()
    with pytest.raises(StoreUnavailableError, match="cannot be reached") as caught:
        store.commit(cluster.version, [granted(cluster, "lost", store.now())], now=store.now())
    one_line(caught.value)
    own.start()
    assert fresh(store) == cluster.snapshot()
    add(store, cluster, "later")
    assert len(fresh(store).leases) == 6


def test_a_server_that_is_away_when_a_process_connects_for_the_first_time_is_asked_again(
    shared: SqlServer, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLAlchemy asks that connection for its schema, and has errors of its own for what goes wrong then."""
    is_postgresql = isinstance(shared, Postgres)
    end = "SELECT pg_terminate_backend(pg_backend_pid())" if is_postgresql else "KILL CONNECTION_ID()"
    left = [1]
    known = DefaultDialect.initialize

    def initialize(self: DefaultDialect, connection: Any) -> None:
        if left[0]:
            left[0] -= 1
            connection.exec_driver_sql(end)
        known(self, connection)

    monkeypatch.setattr(DefaultDialect, "initialize", initialize)
    store = stack.enter_context(closing(open_store(shared.fresh_url())))
    assert not started(store).leases
    left[0] = 1000
    with pytest.raises(StoreUnavailableError) as caught:
        stack.enter_context(closing(open_store(shared.fresh_url()))).refresh(None)
    one_line(caught.value)


@pytest.mark.parametrize("code", [1927, 4031], ids=["killed", "idle"])
def test_a_connection_that_mysql_says_it_closed_is_replaced(code: int) -> None:
    database = Database("mysql://manager@host/gpus")
    assert database.dialect.explain(pymysql.err.OperationalError(code, "closed")).kind == "away"


@pytest.mark.parametrize("state", ["57P05", "25P04"], ids=["idle", "long"])
def test_a_connection_that_postgresql_says_it_closed_is_replaced(state: str) -> None:
    error = psycopg.OperationalError("FATAL: terminating connection due to a timeout")
    error.sqlstate = state
    assert Database("postgresql://manager@host/gpus").dialect.explain(error).kind == "away"


def test_a_commit_whose_answer_was_lost_is_made_once(shared: SqlServer, stack: ExitStack) -> None:
    proxy, url = proxied(stack, shared)
    store = stack.enter_context(closing(open_store(url)))
    cluster = started(store)
    add(store, cluster, "a")
    for number in range(3):
        proxy.lose_answers = 1
        add(store, cluster, f"t{number}")
    assert fresh(store) == cluster.snapshot()


def test_a_waiter_is_in_line_once_though_the_first_answer_was_lost(
    shared: SqlServer, stack: ExitStack
) -> None:
    proxy, url = proxied(stack, shared)
    database = stack.enter_context(closing(Database(url)))
    line = "SELECT token FROM {lock} WHERE namespace = :namespace"
    assert database.rows(line) == []
    waiter = {"namespace": database.namespace, "token": uuid.uuid4().hex[:24], "heartbeat_s": 60.0}
    proxy.lose_answers = 1
    database.run(lambda connection: database.dialect.enter(connection, waiter))
    assert [token for (token,) in database.rows(line)] == [waiter["token"]]


def test_the_outcome_of_a_commit_without_an_answer_is_known_at_the_next_call(
    shared: SqlServer, stack: ExitStack
) -> None:
    proxy, url = proxied(stack, shared)
    manager = stack.enter_context(GPUResourceManager(Settings(store=url), inventory=default_inventory()))
    assert manager.allocate_resources("before", 2, 2) is not None
    proxy.lose_answers = 1000
    with pytest.raises(StoreUnavailableError) as caught:
        manager.allocate_resources("unknown", 2, 2)
    one_line(caught.value)
    proxy.lose_answers = 0
    lease = manager.status_of("unknown")
    assert lease is not None, "it was written before its answer was lost"
    again = manager.allocate_resources("unknown", 2, 2)
    assert again is not None
    assert again["fencing_token"] == granted_lease(lease)["fencing_token"]
    assert len(manager.leases()) == 2


def test_connections_that_the_server_closed_are_replaced(postgresql: Postgres, stack: ExitStack) -> None:
    url = postgresql.fresh_url()
    store = stack.enter_context(closing(open_store(url)))
    cluster = started(store)
    postgresql.psql(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'gpu-manager'"
    )
    add(store, cluster, "a")
    assert fresh(store).version == 1


def test_a_server_that_does_not_answer_is_given_up(
    postgresql: Postgres, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource_manager.storage.sql.postgresql.TIMEOUT_S", 0.5)
    proxy, url = proxied(stack, postgresql)
    store = stack.enter_context(closing(open_store(url)))
    started(store)
    proxy.partitioned = True
    with pytest.raises(StoreUnavailableError, match="cannot be reached"):
        store.refresh(None)
    proxy.partitioned = False
    assert fresh(store).version == 0


# ---- fail-over ----


def test_a_promoted_standby_begins_a_recovery_window(primary: Postgres, stack: ExitStack) -> None:
    standby = Standby(primary)
    stack.callback(standby.stop)
    both = f"postgresql://postgres@127.0.0.1:{primary.port},127.0.0.1:{standby.port}/postgres"
    store = stack.enter_context(closing(open_store(both)))
    cluster = started(store, ClusterSettings(confirmation_window_s=3.0))
    add(store, cluster, "a")
    version = primary.psql("SELECT pg_current_wal_lsn()")
    wait_for(lambda: standby.psql(f"SELECT pg_last_wal_replay_lsn() >= '{version}'") == "t")
    with (
        closing(open_store(standby.url)) as reader,
        pytest.raises(StoreUnavailableError, match="read-only, as a standby is") as refused,
    ):
        reader.refresh(None)
    one_line(refused.value)
    primary.kill()
    standby.promote()
    now = store.now()
    with pytest.raises((StaleStateError, StateUnconfirmedError)):
        store.commit(1, [granted(cluster, "b", now)], now=now)
    recovered = store.refresh(None)
    assert recovered is not None
    assert recovered.version > 2**20, "no replica from before passes as current"
    assert recovered.last_fencing_token > 2**20, "no token is issued twice"
    assert recovered.sequence > 1000, "nor a short id"
    assert list(recovered.leases) == ["a"]
    assert store.suspension.until > store.now()
    now = store.now()
    with pytest.raises(StateUnconfirmedError):
        store.commit(recovered.version, [granted(recovered, "b", now)], now=now)
    renewal = Renewed("a", 1, now, now + 900)
    store.commit(recovered.version, [renewal], now=now)
    recovered.apply(renewal)
    wait_for(lambda: store.now() > store.suspension.until)
    add(store, recovered, "b")
    assert sorted(lease.lease_id for lease in fresh(store).leases) == ["a", "b"]


# ---- poolers, isolation, rights ----


@pytest.fixture
def pgbouncer(postgresql: Postgres) -> Iterator[PgBouncer]:
    if shutil.which("pgbouncer") is None:
        pytest.skip("needs pgbouncer (Debian: pgbouncer)")
    pooler = PgBouncer(postgresql)
    yield pooler
    pooler.stop()


def opener(stack: ExitStack, url: str) -> OpenStore:
    def open_client() -> Store:
        return stack.enter_context(closing(open_store(url)))

    return open_client


def test_concurrent_writers_behind_a_pooler_lose_nothing(pgbouncer: PgBouncer, stack: ExitStack) -> None:
    test_contract.test_concurrent_writers_lose_nothing(
        opener(stack, f"{pgbouncer.url}?namespace={uuid.uuid4().hex}")
    )


def test_waiters_are_woken_directly_and_poll_behind_a_pooler(
    postgresql: Postgres, pgbouncer: PgBouncer, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource_manager.storage.sql.postgresql.LISTEN_AFTER_S", 0.0)
    monkeypatch.setattr(dialect, "POLL_S", 30.0)
    direct = stack.enter_context(closing(Database(postgresql.fresh_url())))
    pooled = stack.enter_context(closing(Database(pgbouncer.url)))
    listening = stack.enter_context(closing(direct.waiter("t")))
    polling = stack.enter_context(closing(pooled.waiter("t")))
    for waiter in (listening, polling):
        assert not waiter.wait(0.001, 0), "the lock may have been handed on before it listened"
    direct.row(direct.dialect.wake, token="t")
    assert listening.wait(30.0, 0)
    assert not polling.wait(0.001, 0)


def test_a_waiter_that_gets_no_connection_to_be_woken_by_goes_on_polling(
    postgresql: Postgres, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource_manager.storage.sql.postgresql.LISTEN_AFTER_S", 0.0)
    postgresql.psql("DROP ROLE IF EXISTS single; CREATE ROLE single LOGIN CONNECTION LIMIT 1")
    url = f"postgresql://single@127.0.0.1:{postgresql.port}/postgres"
    database = stack.enter_context(closing(Database(url)))
    waiter = stack.enter_context(closing(database.waiter("t")))
    with closing(database.connection()):  # as another thread, which has the only one meanwhile
        assert [waiter.wait(0.001, 0) for _ in range(3)] == [False] * 3


def test_transactions_that_disturb_each_other_are_tried_again(postgresql: Postgres, stack: ExitStack) -> None:
    postgresql.psql("DROP ROLE IF EXISTS strict; CREATE ROLE strict LOGIN SUPERUSER")
    postgresql.psql("ALTER ROLE strict SET default_transaction_isolation = 'serializable'")
    url = postgresql.fresh_url().replace("postgres@", "strict@")
    test_contract.test_concurrent_writers_lose_nothing(opener(stack, url))


@pytest.mark.parametrize("requests", [1, 20])
def test_a_prepared_commit_that_mariadb_does_not_know_any_more_is_prepared_again(
    mariadb: MariaDB, stack: ExitStack, requests: int
) -> None:
    """Behind a proxy that shares connections, the server's may be another one the next time."""
    store = stack.enter_context(closing(SqlStore(Database(mariadb.fresh_url()))))
    cluster = started(store)

    def forget(connection: Connection) -> None:
        for name in connection.info.get("prepared", {}).values():
            store.database.execute(connection, f"DEALLOCATE PREPARE {name}")

    for _ in range(3):
        now, first = store.now(), cluster.sequence + 1
        changes = [
            Queued(Request(f"t{number}", 1), now, number, now) for number in range(first, first + requests)
        ]
        store.commit(cluster.version, changes, now=now)
        for change in changes:
            cluster.apply(change)
        store.database.run(forget)
    assert fresh(store) == cluster.snapshot()


def test_sqlite_waits_for_another_writer_and_not_for_ever(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.db"
    store = stack.enter_context(closing(open_store(f"sqlite:///{path}")))
    cluster = started(store)
    monkeypatch.setattr(database, "MAX_RETRIES_BUSY", 0)
    other = stack.enter_context(closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)))
    other.execute("BEGIN IMMEDIATE")
    done = Timer(0.2, other.execute, ("COMMIT",))
    done.start()
    add(store, cluster, "a")
    done.join()
    monkeypatch.setattr(sqlite, "BUSY_S", 0.01)
    other.execute("BEGIN IMMEDIATE")
    assert "another process held its lock for 0.01 s" in refusal(store, cluster)
    other.execute("COMMIT")
    assert fresh(store) == cluster.snapshot()


@pytest.mark.parametrize("restored", [False, True])
def test_nothing_is_granted_on_a_file_of_sqlite_that_is_gone_or_was_replaced(
    tmp_path: Path, restored: bool
) -> None:
    """Another process would grant the same GPUs on the file that is there now."""
    path, backup = tmp_path / "state.db", tmp_path / "backup.db"
    url = f"sqlite:///{path}"
    with GPUResourceManager.from_url(url, inventory=default_inventory(1, 8, 64)) as manager:
        manager.submit("before", 2)
        with closing(sqlite3.connect(path)) as file, closing(sqlite3.connect(backup)) as copy:
            file.backup(copy)
        manager.submit("after", 2)
        for name in ("state.db-wal", "state.db-shm"):
            (tmp_path / name).unlink()
        backup.replace(path) if restored else path.unlink()
        with pytest.raises(StateLostError if restored else StoreError):
            manager.submit("t", 2)
        with pytest.raises(StateLostError if restored else StoreError):
            manager.release("before")
    if restored:
        with GPUResourceManager.from_url(url) as other:
            assert [lease["task_id"] for lease in other.leases()] == ["before"]


def guest_of(server: SqlServer, grant: str) -> str:
    """Return the URL of a new user with these rights to the tables of the server's state."""
    name = f"guest_{uuid.uuid4().hex[:12]}"
    if isinstance(server, Postgres):
        server.psql(f"CREATE ROLE {name} LOGIN")
        if grant:
            server.psql(f"GRANT USAGE ON SCHEMA gpu_manager TO {name}")
            server.psql(f"GRANT {grant} ON ALL TABLES IN SCHEMA gpu_manager TO {name}")
        return server.url.replace("postgres@", f"{name}@")
    assert isinstance(server, MariaDB)
    server.sql(f"CREATE USER {name}; GRANT {grant or 'USAGE'} ON gpu_manager.* TO {name}")
    server.sql(f"CREATE DATABASE IF NOT EXISTS bare; GRANT SELECT, INSERT ON bare.* TO {name}")
    return server.url.replace("root@", f"{name}@")


def state_with_guest(
    shared: SqlServer, rights: str, stack: ExitStack
) -> tuple[Store, ClusterState, Store, str]:
    """Return the owner's store with a state, that state, a guest's store of the same, and the guest's URL."""
    namespace = uuid.uuid4().hex
    owner = stack.enter_context(closing(open_store(f"{shared.url}?namespace={namespace}")))
    cluster = started(owner)
    url = guest_of(shared, rights)
    guest = stack.enter_context(closing(open_store(f"{url}?namespace={namespace}")))
    return owner, cluster, guest, url


def refusal(store: Store, cluster: ClusterState) -> str:
    """Return why a commit is refused, and see that nothing of it was written."""
    now = store.now()
    with pytest.raises(StoreUnavailableError) as caught:
        store.commit(cluster.version, [granted(cluster, "refused", now)], now=now)
    return one_line(caught.value)


def test_a_user_who_may_only_read(shared: SqlServer, stack: ExitStack) -> None:
    owner, cluster, guest, _ = state_with_guest(shared, "SELECT", stack)
    assert fresh(guest) == cluster.snapshot()
    assert "its user lacks rights: grant those in docs/stores.md" in refusal(guest, cluster)
    assert fresh(owner) == cluster.snapshot()
    add(owner, cluster, "a")
    assert fresh(guest) == cluster.snapshot()


def test_tables_that_are_missing_and_may_not_be_created(shared: SqlServer, stack: ExitStack) -> None:
    url = guest_of(shared, "")
    if isinstance(shared, Postgres):
        shared.psql("DROP DATABASE IF EXISTS bare")
        shared.psql("CREATE DATABASE bare")
    store = stack.enter_context(closing(open_store(f"{url.rpartition('/')[0]}/bare")))
    with pytest.raises(StoreUnavailableError, match="run gpu-manager store create as one who may") as caught:
        store.refresh(None)
    one_line(caught.value)


def test_a_server_that_takes_no_writes(shared: SqlServer, stack: ExitStack) -> None:
    _, cluster, guest, url = state_with_guest(shared, "SELECT, INSERT, UPDATE, DELETE", stack)
    if isinstance(shared, Postgres):
        role = url.partition("//")[2].partition("@")[0]
        shared.psql(f"ALTER ROLE {role} SET default_transaction_read_only = on")
    else:
        assert isinstance(shared, MariaDB)
        shared.sql("SET GLOBAL read_only = 1")
        stack.callback(shared.sql, "SET GLOBAL read_only = 0")
    assert "connect to the primary" in refusal(guest, cluster)
    assert fresh(guest) == cluster.snapshot(), "it can be read"


def test_a_wrong_password(postgresql: Postgres) -> None:
    postgresql.psql("DROP ROLE IF EXISTS ada; CREATE ROLE ada LOGIN PASSWORD 'right'")
    rules = postgresql.data / "pg_hba.conf"
    before = rules.read_text()
    rules.write_text(f"host all ada 127.0.0.1/32 scram-sha-256\n{before}")
    postgresql.psql("SELECT pg_reload_conf()")
    url = f"postgresql://ada:wrong@127.0.0.1:{postgresql.port}/postgres"  # pragma: allowlist secret

    def refused() -> bool:
        with closing(open_store(url)) as store:
            try:
                store.refresh(None)
            except StoreRefusedError as error:
                return "it refused the login: check user and password" in one_line(error)
        return False

    wait_for(refused)
    rules.write_text(before)
    postgresql.psql("SELECT pg_reload_conf()")


# ---- data that is gone, older, newer or full ----


def execute(url: str, *statements: str) -> None:
    with closing(Database(url)) as database:
        for statement in statements:
            database.run(partial(database.execute, statement=statement))


def test_a_closed_store_leaves_no_connection(postgresql: Postgres) -> None:
    store = open_store(f"{postgresql.fresh_url()}&application_name=closed")
    add(store, started(store), "a")
    mine = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'closed'"
    assert postgresql.psql(mine) == "1"
    store.close()
    wait_for(lambda: postgresql.psql(mine) == "0")


def test_an_emptied_database_is_a_lost_state(url: str, stack: ExitStack) -> None:
    store = stack.enter_context(closing(open_store(url)))
    cluster = started(store)
    add(store, cluster, "a")
    execute(
        url, *(f"DELETE FROM {{{table}}} WHERE namespace = :namespace" for table in ("state", "snapshot"))
    )
    with pytest.raises(StateLostError) as caught:
        store.refresh(cluster)
    one_line(caught.value)
    with pytest.raises(StateLostError):
        store.commit(1, [granted(cluster, "b", store.now())], now=store.now())
    store.replace(ClusterState(node.node for node in cluster.nodes).snapshot())
    assert fresh(store).leases == (), "an operator decided"


def test_an_older_database_is_a_lost_state(url: str, stack: ExitStack) -> None:
    store = stack.enter_context(closing(open_store(url)))
    cluster = started(store)
    for name in "abc":
        add(store, cluster, name)
    execute(
        url,
        "UPDATE {state} SET version = 1 WHERE namespace = :namespace",
        "DELETE FROM {change} WHERE namespace = :namespace AND version > 1",
    )
    with pytest.raises(StateLostError):
        store.refresh(cluster)


def test_another_state_in_the_same_place_is_a_lost_state(url: str, stack: ExitStack) -> None:
    store = stack.enter_context(closing(open_store(url)))
    started(store)
    execute(url, "UPDATE {state} SET incarnation = 'another' WHERE namespace = :namespace")
    with pytest.raises(StateReplacedError):
        store.refresh(None)


def test_a_newer_format_is_refused(url: str, stack: ExitStack) -> None:
    store = stack.enter_context(closing(open_store(url)))
    cluster = started(store)
    execute(url, "UPDATE {state} SET format = 2 WHERE namespace = :namespace")
    for act in (
        lambda: store.refresh(None),
        lambda: store.commit(0, [granted(cluster, "a", store.now())], now=store.now()),
        lambda: store.replace(cluster.snapshot()),
    ):
        with pytest.raises(NewerFormatError) as caught:
            act()
        one_line(caught.value)
    execute(url, "UPDATE {state} SET format = 1 WHERE namespace = :namespace")
    assert fresh(store).version == 0, "nothing was written"


def test_a_change_that_cannot_be_read_is_one_clear_line(url: str, stack: ExitStack) -> None:
    store = stack.enter_context(closing(open_store(url)))
    add(store, started(store), "a")
    execute(url, "UPDATE {change} SET body = 'no JSON' WHERE namespace = :namespace")
    for read in (lambda: fresh(store), store.history):
        with pytest.raises(CorruptStateError) as caught:
            read()
        assert str(caught.value).count("restore its data") == 1
        one_line(caught.value)


def test_a_backup_takes_the_place_of_an_unreadable_state_only_by_force(
    url: str, stack: ExitStack, tmp_path: Path
) -> None:
    store = stack.enter_context(closing(open_store(url)))
    add(store, started(store), "a")
    write_backup(store, tmp_path / "state.json")
    execute(url, "UPDATE {change} SET body = 'no JSON' WHERE namespace = :namespace")
    backup = read_backup(tmp_path / "state.json")
    other = stack.enter_context(closing(open_store(url)))
    with pytest.raises(CorruptStateError, match="restore its data"):
        restore(other, backup)
    restore(other, backup, force=True)
    assert [lease.lease_id for lease in fresh(other).leases] == ["a"]


def test_the_history_is_bounded_and_snapshots_take_its_place(url: str, stack: ExitStack) -> None:
    store = stack.enter_context(closing(SqlStore(Database(url), history_length=20, snapshot_every=10)))
    cluster = started(store)
    for step in range(60):
        add(store, cluster, f"t{step}") if step % 2 == 0 else end(store, cluster, f"t{step - 1}")
        if step == 20:
            more = InventoryChanged(default_inventory(9), store.now())
            store.commit(cluster.version, [more], now=more.at)
            cluster.apply(more)
    assert 20 <= len(store.history(0, 1000)) <= 40
    assert fresh(stack.enter_context(closing(open_store(url)))) == cluster.snapshot()
    before = cluster.version
    execute(url, "UPDATE {state} SET server = 'another' WHERE namespace = :namespace")
    after = store.refresh(None)
    assert after is not None
    assert after.version > before + 1000, "versions jump beyond what may have been lost"
    for number in range(15):
        now = store.now()
        queued = Queued(Request(f"q{number}", 1), now, after.sequence + 1, now)
        store.commit(after.version, [queued], now=now)
        after.apply(queued)
        store.tidy_up(after)
    assert 20 <= len(store.history(0, 1000)) <= 40, "it is counted in changes"


def test_no_snapshot_has_changes_that_the_server_lost(url: str, stack: ExitStack) -> None:
    """As where a standby without the last commit takes over just before its client writes a snapshot."""
    store = stack.enter_context(closing(SqlStore(Database(url), snapshot_every=3)))
    cluster = started(store)
    for name in ("a", "b"):
        add(store, cluster, name)
    before = cluster.snapshot()
    now = store.now()
    lost = granted(cluster, "c", now)
    store.commit(cluster.version, [lost], now=now)
    cluster.apply(lost)
    execute(
        url,
        "UPDATE {state} SET version = 2 WHERE namespace = :namespace",
        "DELETE FROM {change} WHERE namespace = :namespace AND version > 2",
    )
    store.tidy_up(cluster)
    assert fresh(stack.enter_context(closing(open_store(url)))) == before


def end(store: Store, cluster: ClusterState, lease_id: str) -> None:

    now = store.now()
    changes = lease_steps.release(cluster, lease_id, now)
    store.commit(cluster.version, changes, now=now)
    for change in changes:
        cluster.apply(change)
    store.tidy_up(cluster)


def fill_up(store: Store, cluster: ClusterState) -> None:
    for number in range(1000):
        add(store, cluster, f"t{number}")
        end(store, cluster, f"t{number}")


def test_a_full_disk_refuses_commits_whole_and_goes_on_once_it_has_room(
    small_disk: Path, stack: ExitStack
) -> None:
    store = stack.enter_context(closing(open_store(f"sqlite:///{small_disk}/state.db")))
    cluster = started(store)
    add(store, cluster, "a")
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space left"):
        filler.write_bytes(b"x" * 4 * 2**20)
    with pytest.raises(StoreFullError, match="its disk is full") as caught:
        fill_up(store, cluster)
    one_line(caught.value)
    assert fresh(store) == cluster.snapshot(), "all or nothing of each"
    filler.unlink()
    add(store, cluster, "b")
    assert fresh(store) == cluster.snapshot()
    with closing(sqlite3.connect(small_disk / "state.db")) as file:
        assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.fixture
def disk_of_server() -> Iterator[Path]:
    """A file system of 64 MiB that any user may fill.

    It is outside pytest's temporary folders, which only root can enter.
    """
    with TemporaryDirectory(prefix="small-disk-") as outer:
        Path(outer).chmod(0o755)
        with small_disk_at(Path(outer) / "small", "size=64m,mode=777") as place:
            yield place


def filled(folder: Path) -> Path:
    """Return a file that takes all the space that is left."""
    filler = folder / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(2**16))
    return filler


class SmallPostgres(Postgres):
    """A PostgreSQL with a log in files of 1 MiB, in `wal` if that is given."""

    def __init__(self, folder: Path | None = None, wal: Path | None = None) -> None:
        self.wal = wal
        super().__init__(folder)

    def prepare(self) -> None:
        initdb = [str(self.programs / "initdb"), "-D", str(self.data), "-U", "postgres", "-A", "trust"]
        elsewhere = [f"--waldir={self.wal}"] if self.wal else []
        self.run(*initdb, "--no-sync", "--wal-segsize=1", *elsewhere)


class SmallMariaDB(MariaDB):
    """A MariaDB whose own files take 40 MiB."""

    small_log = "--innodb-log-file-size=4M"

    def prepare(self) -> None:
        self.run(
            "mariadb-install-db", "--no-defaults", f"--datadir={self.folder / 'data'}", self.small_log,
            "--auth-root-authentication-method=normal", "--skip-test-db", "--skip-name-resolve",
        )  # fmt: skip

    def command(self) -> Sequence[str]:
        return [*super().command(), self.small_log, f"--tmpdir={tempfile.gettempdir()}"]  # not on that disk


@pytest.mark.parametrize("kind", [SmallPostgres, SmallMariaDB])
def test_a_full_disk_of_a_server(kind: type[SqlServer], disk_of_server: Path, stack: ExitStack) -> None:
    if missing := kind.missing():
        pytest.skip(missing)
    server = kind(disk_of_server / "server")
    stack.callback(server.kill)
    store = stack.enter_context(closing(open_store(server.url)))
    cluster = started(store)
    add(store, cluster, "a")
    filler = filled(disk_of_server)
    with pytest.raises(StoreFullError, match="its disk is full") as caught:
        fill_up(store, cluster)
    one_line(caught.value)
    assert fresh(store) == cluster.snapshot(), "all or nothing of each"
    filler.unlink()
    add(store, cluster, "b")
    assert fresh(store) == cluster.snapshot()


def test_a_full_disk_of_the_log_of_postgresql(disk_of_server: Path, stack: ExitStack) -> None:
    """The server ends itself; what it had acknowledged is there once it has room and is started again."""
    if missing := Postgres.missing():
        pytest.skip(missing)
    server = SmallPostgres(wal=disk_of_server / "wal")
    stack.callback(server.stop)
    url = f"{server.url}?namespace=log"
    store = stack.enter_context(closing(open_store(url)))
    cluster = started(store)
    filler = filled(disk_of_server)

    def fill_log() -> None:
        for number in range(1000):
            execute(url, "SELECT pg_logical_emit_message(false, 'log', repeat('x', 100000))")
            add(store, cluster, f"t{number}")
            end(store, cluster, f"t{number}")

    with pytest.raises(StoreUnavailableError, match=r"its disk is full|cannot be reached|crashed") as caught:
        fill_log()
    one_line(caught.value)
    filler.unlink()
    server.kill()
    server.start()
    assert fresh(store) == cluster.snapshot(), "all or nothing of each"
    add(store, cluster, "b")
    assert fresh(store) == cluster.snapshot()
