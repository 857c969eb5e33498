"""URLs of databases, and what a user is told about a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from resource_manager.errors import ResourceManagerError, SettingsError, StoreRefusedError
from resource_manager.storage import open_store
from resource_manager.storage.sql.database import Database
from resource_manager.storage.sql.sqlite import refuse_network
from tests.sql_servers import MariaDB, Postgres

WRONG = {
    "sqlite://": "it names a file",
    "sqlite:///:memory:": "it names a file",
    "sqlite:///x.db?mode=ro": "it names a file",
    "mysql://root@127.0.0.1": "it names no database",
    "mysql://root@127.0.0.1:port/x": "not mysql://user:password@host:port/database",
    "postgresql://h/x?colour=red": "invalid URI query parameter",
    "postgresql://h/x?namespace=a/b": "a namespace may have up to 100 letters",
    f"postgresql://h/x?namespace={'a' * 101}": "a namespace may have up to 100 letters",
    "postgresql://ada:pass@secret@h/x": "write @ and / in its password as %40",  # pragma: allowlist secret
    "postgresql://ada:pass/secret@h/x": "write @ and / in its password as %40",  # pragma: allowlist secret
    "mysql://ada:pass@secret@h/x": "write @ in its password as %40",  # pragma: allowlist secret
}


@pytest.mark.parametrize("url", WRONG)
def test_a_wrong_url_is_refused_before_anything_connects(url: str) -> None:
    with pytest.raises(SettingsError, match=WRONG[url]) as caught:
        open_store(url)
    assert len(str(caught.value).splitlines()) == 1
    assert "secret" not in str(caught.value)


def told(url: str, kind: type[ResourceManagerError] = ResourceManagerError) -> str:
    store = open_store(url)
    with pytest.raises(kind) as caught:
        store.refresh(None)
    store.close()
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_a_server_that_is_not_there() -> None:
    assert "cannot be reached" in told("postgresql://ada@127.0.0.1:1/x")
    assert "cannot be reached" in told("mysql://ada@127.0.0.1:1/x")


def test_sqlite_says_what_is_wrong_with_its_file(tmp_path: Path) -> None:
    assert f"there is no folder {tmp_path}/nowhere" in told(f"sqlite:///{tmp_path}/nowhere/state.db")
    assert "it is a folder" in told(f"sqlite:///{tmp_path}")
    other = tmp_path / "notes.txt"
    other.write_text("no database\n" * 100)
    assert "it is no SQLite database, or damaged: move it away" in told(f"sqlite:///{other}")
    assert other.read_text() == "no database\n" * 100


def test_sqlite_refuses_a_network_file_system(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    lines = ["/dev/sda1 / ext4 rw 0 0", f"server:/home {tmp_path} nfs4 rw 0 0"]
    mounts.write_text("\n".join(lines) + "\n")
    with pytest.raises(SettingsError, match=r"on a network file system \(nfs4\)"):
        refuse_network(tmp_path / "deep" / "state.db", mounts)
    mounts.write_text("\n".join([*lines, f"tmpfs {tmp_path}/deep tmpfs rw 0 0"]) + "\n")
    refuse_network(tmp_path / "deep" / "state.db", mounts)


def test_only_the_threads_that_use_one_database_share_a_line_for_its_lock() -> None:
    urls = [f"postgresql:///gpus?{query}" for query in ("host=/run/a", "host=/run/b", "service=b")]
    databases = [Database(url) for url in [*urls, urls[0]]]
    assert [databases[0].line is each.line for each in databases] == [True, False, False, True]


def test_postgresql_says_what_is_wrong_with_the_login(postgresql: Postgres) -> None:
    address = f"127.0.0.1:{postgresql.port}"
    assert "there is no such database" in told(f"postgresql://postgres@{address}/nowhere")
    assert "it refused the login" in told(f"postgresql://nobody@{address}/postgres", StoreRefusedError)


def test_mariadb_says_what_is_wrong_with_the_login(mariadb: MariaDB) -> None:
    address = f"127.0.0.1:{mariadb.port}"
    assert "there is no such database" in told(f"mysql://root@{address}/nowhere")
    wrong = f"mysql://root:wrong@{address}/gpu_manager"  # pragma: allowlist secret
    assert "it refused the login" in told(wrong, StoreRefusedError)
