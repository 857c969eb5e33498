"""What a store in a database says and does while others lock its tables, or the server refuses or is mute."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any

import psycopg
import pymysql
import pytest
from sqlalchemy.engine import make_url

from resource_manager.errors import CorruptStateError, SettingsError, StoreUnavailableError
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.settings import Settings
from resource_manager.storage import checks, open_store
from resource_manager.storage.sql import database, dialect, mysql
from resource_manager.storage.sql import postgresql as postgresql_module
from resource_manager.storage.sql.database import Database
from resource_manager.storage.sql.dialect import Connection
from tests.builders import granted_lease
from tests.eventually import wait_for
from tests.sql_servers import DATABASES, MariaDB, MySQL, Postgres, SqlServer
from tests.storage.test_contract import fresh
from tests.storage.walk import add, first_state, granted, started


@pytest.fixture(params=DATABASES)
def server(request: pytest.FixtureRequest) -> SqlServer:
    server: SqlServer = request.getfixturevalue(request.param)
    return server


def admin(server: SqlServer) -> Any:
    """Return a connection of the superuser's, in a transaction."""
    if isinstance(server, Postgres):
        return psycopg.connect(server.url)
    url = make_url(server.url)
    return pymysql.connect(host=url.host, port=url.port or 0, user=url.username or "", database=url.database)


@contextmanager
def locked(server: SqlServer, statement: str) -> Iterator[None]:
    with closing(admin(server)) as connection:
        connection.cursor().execute(statement)
        yield
        connection.rollback()


def what_locks(server: SqlServer, whole: bool) -> str:
    if isinstance(server, Postgres):
        return "LOCK TABLE gpu_manager.state" if whole else "SELECT * FROM gpu_manager.state FOR UPDATE"
    return "LOCK TABLES state WRITE" if whole else "SELECT * FROM state FOR UPDATE"


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store waits a second for locks of other sessions."""
    for module in (dialect, mysql):
        monkeypatch.setattr(module, "LOCK_WAIT_S", 1)


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("whole", [True, False])
def test_a_commit_that_another_session_locks_out_is_refused_and_not_made_later(
    server: SqlServer, whole: bool
) -> None:
    """As by VACUUM FULL, a dump, or somebody who left a transaction open."""
    url = server.fresh_url()
    with closing(open_store(url)) as store:
        cluster = started(store)
        with locked(server, what_locks(server, whole)):
            now = store.now()
            with pytest.raises(StoreUnavailableError, match="another session keeps its tables locked: see"):
                store.commit(cluster.version, [granted(cluster, "refused", now)], now=now)
        add(store, cluster, "a")
        assert fresh(store).version == 1


@pytest.mark.usefixtures("short_waits")
def test_a_check_waits_once_for_tables_that_another_session_locks(server: SqlServer) -> None:
    url = server.fresh_url()
    with closing(open_store(url)) as store:
        started(store)
    with (
        locked(server, what_locks(server, whole=True)),
        pytest.raises(StoreUnavailableError, match="another session keeps its tables locked"),
    ):
        checks.check(Settings(store=url))


@pytest.mark.usefixtures("short_waits")
def test_a_process_that_hangs_in_a_transaction_locks_others_out_for_a_while_only(
    server: SqlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is stopped, or whose machine is gone, while it hands on the lock."""
    if type(server) is MySQL:
        pytest.skip("MySQL has no limit of that kind")
    for module in (dialect, mysql):
        monkeypatch.setattr(module, "IDLE_S", 1)
    url = server.fresh_url()
    with closing(open_store(url)) as store, closing(Database(url)) as hanging, ThreadPoolExecutor(1) as pool:
        cluster = started(store)
        entered, resumed = Event(), Event()

        def work(connection: Connection) -> None:
            hanging.execute(connection, "UPDATE {state} SET lock_token = '' WHERE namespace = :namespace")
            entered.set()
            assert resumed.wait(60)

        def is_added() -> bool:
            with suppress(StoreUnavailableError):
                add(store, cluster, "a")
            return bool(cluster.leases)

        write = pool.submit(hanging.write, work)
        try:
            assert entered.wait(60)
            wait_for(is_added)
        finally:
            resumed.set()
        assert write.result(60) is None, "it is made again on another connection"
        assert fresh(store).version == 1


def test_a_lock_is_waited_for_less_long_than_an_answer() -> None:
    assert min(postgresql_module.TIMEOUT_S, mysql.TIMEOUT_S) > dialect.LOCK_WAIT_S


def test_a_server_that_took_no_writes_for_a_while_takes_them_again(server: SqlServer) -> None:
    """Its sessions keep what was set when they began."""
    if isinstance(server, Postgres):
        name = f"read_only_{uuid.uuid4().hex[:12]}"
        server.psql(f"CREATE ROLE {name} LOGIN SUPERUSER")
        url = server.fresh_url().replace("postgres@", f"{name}@")

        def set_read_only(value: str) -> None:
            server.psql(f"ALTER ROLE {name} SET default_transaction_read_only = {value}")
    else:
        assert isinstance(server, MariaDB)
        url = server.fresh_url()

        def set_read_only(value: str) -> None:
            server.sql(f"SET GLOBAL TRANSACTION READ {'ONLY' if value == 'on' else 'WRITE'}")

    with closing(open_store(url)) as store:
        cluster = started(store)
    set_read_only("on")
    try:
        with closing(open_store(url)) as store:
            store.refresh(None)
            with pytest.raises(StoreUnavailableError, match=r"it is read-only, as a .*: connect"):
                add(store, cluster, "a")
            set_read_only("off")
            add(store, cluster, "b")
            assert fresh(store).version == 1
    finally:
        set_read_only("off")


@pytest.mark.parametrize(("longest_s", "times"), [(-1.0, 1), (60.0, 3)])
def test_a_server_is_asked_again_only_for_a_while(
    postgresql: Postgres, monkeypatch: pytest.MonkeyPatch, longest_s: float, times: int
) -> None:
    monkeypatch.setattr(database, "MAX_AWAY_S", longest_s)
    asked = []

    def ask(connection: Connection) -> None:
        asked.append(connection)
        raise psycopg.OperationalError("no answer within 5 s")

    with (
        closing(Database(postgresql.fresh_url())) as away,
        pytest.raises(StoreUnavailableError, match="cannot be reached"),
    ):
        away.run(ask)
    assert len(asked) == times


def test_a_server_that_does_not_answer_is_asked_twice() -> None:
    timeout_s = max(postgresql_module.TIMEOUT_S, mysql.TIMEOUT_S)
    assert timeout_s < database.MAX_AWAY_S < 2 * timeout_s


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ('FATAL: too many connections for role "ada"', "it has no connection left: raise max_connections"),
        ('FATAL: permission denied for database "gpus"', "its user lacks rights"),
        ('FATAL: role "ada" does not exist', "it refused the login"),
        ('FATAL: database "gpus" does not exist', "there is no such database"),
        ('FATAL: database "gpus" is not currently accepting connections', "cannot be reached"),
    ],
)
def test_an_error_of_connecting_is_known_by_its_words(words: str, said: str) -> None:
    away = Database("postgresql://localhost:1/gpus")
    assert said in away.dialect.explain(psycopg.OperationalError(words)).text


def copy_file(path: Path) -> None:
    """Copy it in this process, whose locks end where it closes the file, and let another come and go."""
    path.with_suffix(".copy").write_bytes(path.read_bytes())
    read = "import sqlite3, sys; file = sqlite3.connect(sys.argv[1]); file.execute('VACUUM'); file.close()"
    subprocess.run([sys.executable, "-c", read, path], check=True)


def remove_log(path: Path) -> None:
    for name in ("-wal", "-shm"):
        Path(f"{path}{name}").unlink()


@pytest.mark.parametrize("harm", [copy_file, remove_log])
def test_nothing_is_granted_in_a_log_of_sqlite_that_others_do_not_read(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    path = tmp_path / "state.db"
    with GPUResourceManager.from_url(f"sqlite:///{path}", inventory=default_inventory(1, 8, 64)) as manager:
        manager.submit("before", 2)
        harm(path)
        with pytest.raises(CorruptStateError, match="was removed while it was open: end all processes"):
            manager.submit("t", 2)


def test_a_damaged_page_of_sqlite_is_named_once(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with closing(open_store(f"sqlite:///{path}")) as store:
        started(store)
    pages = bytearray(path.read_bytes())
    pages[3 * 4096 : 6 * 4096] = b"\xff" * (3 * 4096)
    path.write_bytes(pages)
    with (
        closing(open_store(f"sqlite:///{path}")) as store,
        pytest.raises(
            CorruptStateError, match=r"^SQLite at [^ ]*: it is no SQLite database, or damaged: [^:]*$"
        ),
    ):
        store.refresh(None)
    damaged = [
        finding.text for finding in checks.check(Settings(store=f"sqlite:///{path}")) if not finding.ok
    ]
    assert damaged
    assert not any("\n" in text for text in damaged)


@pytest.mark.parametrize("option", ["colour=red", "connect_timeout=soon", "ssl_ca=/nowhere/ca.pem"])
def test_a_wrong_option_of_mysql_is_one_line(option: str) -> None:
    with (
        closing(open_store(f"mysql://root@localhost:1/gpus?{option}")) as store,
        pytest.raises(SettingsError, match=r"^MySQL at [^ ]*: an option of its URL is wrong \(.*\)$"),
    ):
        store.refresh(None)


def test_a_state_too_large_for_mysql_says_what_to_raise(mariadb: MariaDB) -> None:
    limit = mariadb.sql("SELECT @@GLOBAL.max_allowed_packet")
    mariadb.sql("SET GLOBAL max_allowed_packet = 65536")
    try:
        with (
            closing(open_store(mariadb.fresh_url())) as store,
            pytest.raises(StoreUnavailableError, match="larger than it takes: raise max_allowed_packet"),
        ):
            store.initialise(first_state(1000))
    finally:
        mariadb.sql(f"SET GLOBAL max_allowed_packet = {limit}")


@pytest.mark.parametrize(
    ("setting", "value"),
    [("max_prepared_stmt_count", 0), ("sql_mode", "'EMPTY_STRING_IS_NULL'"), ("sql_mode", "'ORACLE'")],
)
def test_a_setting_of_mariadb_that_others_need_changes_nothing(
    mariadb: MariaDB, setting: str, value: object
) -> None:
    """Without prepared statements nothing was released; an empty text as NULL ended in a traceback."""
    url, before = mariadb.fresh_url(), mariadb.sql(f"SELECT @@GLOBAL.{setting}").strip()
    mariadb.sql(f"SET GLOBAL {setting} = {value}")
    try:
        with GPUResourceManager.from_url(url, inventory=default_inventory(1)) as manager:
            lease = granted_lease(manager.submit("t", 2))
            manager.renew("t", fencing_token=lease["fencing_token"])
            assert manager.release("t", fencing_token=lease["fencing_token"])
        with GPUResourceManager.from_url(url) as manager:
            assert manager.leases() == []
    finally:
        mariadb.sql(f"SET GLOBAL {setting} = " + (before if before.isdecimal() else f"'{before}'"))


@pytest.mark.parametrize(("encoding", "takes"), [("UTF8", True), ("SQL_ASCII", True), ("LATIN1", False)])
def test_names_are_kept_whatever_the_encoding_of_postgresql_or_refused_in_one_line(
    postgresql: Postgres, monkeypatch: pytest.MonkeyPatch, encoding: str, takes: bool
) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "latin1")
    name = f"in_{encoding.lower()}"
    postgresql.psql(f"DROP DATABASE IF EXISTS {name}")
    postgresql.psql(f"CREATE DATABASE {name} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0")
    url = f"{postgresql.url.rpartition('/')[0]}/{name}"
    with closing(open_store(url)) as store:
        cluster = started(store)
        faults = [finding.text for finding in checks.check(Settings(store=url)) if not finding.ok]
        assert any("it has no UTF-8" in fault for fault in faults) is not takes
        if takes:
            add(store, cluster, "学習")
            assert [lease.lease_id for lease in fresh(store).leases] == ["学習"]
        else:
            with pytest.raises(StoreUnavailableError, match=r"it has no UTF-8: create .* ENCODING 'UTF8'$"):
                add(store, cluster, "学習")
