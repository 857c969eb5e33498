"""The tables: one row of `state` for each namespace, its changes, and what else the service keeps.

`state` is small and rewritten by each commit; the whole state is a `snapshot` with the changes after it.
The holder of the lock is in `state` too, so that one comparison guards a commit; `lock` has its waiters.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    DDL,
    BigInteger,
    Boolean,
    Column,
    Double,
    Identity,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    event,
)
from sqlalchemy.dialects.mysql import LONGTEXT

SCHEMA = "gpu_manager"
"""The schema on PostgreSQL, the beginning of the tables' names on SQLite; on MySQL they are alone."""

MAX_NAMESPACE = 100
MAX_REASON = 500
TABLES = ("state", "snapshot", "change", "lock", "once", "secret", "token", "session", "report", "job")

_BODY = Text().with_variant(LONGTEXT(), "mysql", "mariadb")


def _name(length: int) -> String:
    """A short text; on PostgreSQL without a limit, so that parameters have one type in all places."""
    return String(length).with_variant(Text(), "postgresql")


_ROW_ID = BigInteger().with_variant(Integer(), "sqlite")
"""SQLite numbers rows by itself only under this type, which has 64 bits there."""


def metadata(*, schema: str | None, prefix: str) -> MetaData:
    """Return the tables in that schema, their names with that prefix."""
    tables = MetaData(schema=schema)

    def table(name: str, *columns: Column[Any], **of_one_dialect: Any) -> Table:
        exact = {"charset": "utf8mb4", "collate": "utf8mb4_bin", "engine": "InnoDB"}
        options = {f"{kind}_{key}": value for kind in ("mysql", "mariadb") for key, value in exact.items()}
        return Table(prefix + name, tables, *columns, **options, **of_one_dialect)  # type: ignore[call-overload,no-any-return]

    def namespace() -> Column[Any]:
        return Column("namespace", _name(MAX_NAMESPACE), primary_key=True)

    table(
        "state",
        namespace(),
        Column("format", Integer, nullable=False),
        Column("incarnation", _name(32), nullable=False),
        Column("version", BigInteger),  # null: no state was written yet
        Column("last_fencing_token", BigInteger, nullable=False),
        Column("sequence", BigInteger, nullable=False),
        Column("commit_id", _name(32), nullable=False),
        Column("server", _name(64), nullable=False),
        Column("suspended_until", Double, nullable=False),
        Column("clock_jump_s", Double, nullable=False),
        Column("clock_jump_at", Double, nullable=False),
        Column("operator_reset", Boolean(create_constraint=False), nullable=False),
        Column("closed", _name(MAX_REASON), nullable=False),
        Column("lock_token", _name(32), nullable=False),
        Column("lock_expires_at", Double, nullable=False),
    )
    snapshot = table(
        "snapshot",
        namespace(),
        Column("version", BigInteger, nullable=False),
        Column("inventory_version", BigInteger, nullable=False),
        Column("inventory", _BODY, nullable=False),
        Column("body", _BODY, nullable=False),
    )
    # Until it is analysed, it is taken for 580 rows, and each query of the views is compiled for them.
    # SQLAlchemy has an argument for it only since 2.1, which older versions of Airflow do not take.
    analysed = "autovacuum_analyze_threshold = 0, autovacuum_analyze_scale_factor = 0"
    set_it = DDL(f"ALTER TABLE %(fullname)s SET ({analysed})")  # type: ignore[no-untyped-call]
    event.listen(snapshot, "after_create", set_it.execute_if(dialect="postgresql"))
    table(
        "change",
        namespace(),
        Column("version", BigInteger, primary_key=True, autoincrement=False),
        Column("at", Double, nullable=False),
        Column("commit_id", _name(32), nullable=False),
        Column("body", _BODY, nullable=False),
        sqlite_with_rowid=False,  # else each commit writes a page of an index, too
    )
    table(
        "lock",
        Column("position", _ROW_ID, Identity(), primary_key=True),
        Column("namespace", _name(MAX_NAMESPACE), nullable=False),
        Column("token", _name(32), nullable=False, unique=True),
        Column("expires_at", Double, nullable=False),
    )
    table(
        "once",
        namespace(),
        Column("caller", _name(32), primary_key=True),
        Column("name", _name(32), primary_key=True),
        Column("answer", _BODY, nullable=False),
        Column("expires_at", Double, nullable=False),
    )
    table("secret", namespace(), Column("body", _name(200), nullable=False))
    table(
        "token",
        namespace(),
        Column("token_id", _name(32), primary_key=True),
        Column("body", _BODY),
        Column("used_at", Double),
    )
    table(
        "session",
        namespace(),
        Column("token_id", _name(32), primary_key=True),
        Column("session_id", _name(64), primary_key=True),
        Column("expires_at", Double, nullable=False),
    )
    table(
        "report",
        namespace(),
        Column("kind", _name(8), primary_key=True),
        Column("server", _name(255), primary_key=True),
        Column("body", _BODY, nullable=False),
        Column("expires_at", Double, nullable=False),
    )
    table(
        "job",
        namespace(),
        Column("name", _name(32), primary_key=True),
        Column("caller", _name(32), nullable=False),
        Column("body", _BODY, nullable=False),
        Column("expires_at", Double, nullable=False),
    )
    return tables
